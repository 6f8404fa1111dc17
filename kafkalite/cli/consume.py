"""``kl consume``: prints the records of topics, live or in a range, in several formats."""

# Tests: tests/cli/test_produce_consume.py

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import ANY_BYTES
from kafkalite.cli.completion import complete_groups, complete_topics
from kafkalite.cli.exit_codes import PartialFailureError, UsageError
from kafkalite.cli.group_consume import GroupJob, patience_ms, timed_out
from kafkalite.cli.invocation import Invocation, Terminated, client_options, topic_names
from kafkalite.cli.offset_queries import Span, matching_topics, partitions_of, spans
from kafkalite.cli.output import plural
from kafkalite.cli.printers import RECORD_OUTPUTS, Printer, make_printer
from kafkalite.cli.ranges import END, START, Anchor, OffsetRange, check_order, parse_limit, parse_range
from kafkalite.cli.stdio import printing, until_pipe_closes
from kafkalite.errors import KafkaStorageError, NoOffsetError, RecordError
from kafkalite.model import Record, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.consumer.consumer import Consumer

_POLL_RECORDS: Final = 10_000


def record_output(text: str) -> str | OffsetRange:
    """Return the value of -o: an output format, or an offset range, which is what -o means in kcat and rpk.

    Raises click's BadParameter if ``text`` is neither.
    """
    if text in RECORD_OUTPUTS:
        return text
    try:
        wanted = parse_range("start" if text == "beginning" else text, now_ms=invocation.now_ms())
    except ValueError:
        raise click.BadParameter(f"{text!r} is none of {', '.join(RECORD_OUTPUTS)}") from None
    invocation.say(f"-o is the output format here; a range is -r {text}")
    return wanted


@click.command(
    epilog="""\b
Ranges (-r), per partition; the bound right of a colon is exclusive:
  start  end  :end  +10  -10  42  42:50  -10:end
  @2015-05-17T10:00:00Z  @-1h  @today:  @-1h:-30m  @2015-05-17:+1h

\b
Formats (-f), kcat's letters or Python's braces:
  '%t[%p]@%o %T{iso} %k: %s\\n'     %S %K lengths, %h headers, {hex} {base64} {json}
  '{topic}[{partition}]@{offset} {key}: {value.amount:>8}'

\b
Examples:
  kl consume events                 from the start, then live; Ctrl-C ends
  kl consume events -e | sort       all records there are
  kl consume events -r -10:end      the last ten of each partition
  kl consume 'orders-.*' -e         the topics that match a regular expression
  kl consume a -e -o jsonl | kl produce b -i jsonl
  kl consume orders -g billing      share the work with the other members of the group"""
)
@click.argument("topics", nargs=-1, shell_complete=complete_topics)
@invocation.number_option("-n", "--count", help="Stop after this many records.", minimum=0)
@click.option("-e", "--exit", "exit_at_end", is_flag=True, help="Stop at the end of the log as it is now.")
@click.option("-r", "--range", "range_text", metavar="RANGE", help="Offsets to read.  [default: start]")
@click.option("--from", "from_text", metavar="TIME", help="Start at TIME (inclusive), start or end.")
@click.option("--to", "to_text", metavar="TIME", help="Stop at TIME (exclusive) or end.")
@click.option("--from-beginning", is_flag=True, hidden=True, help="Kafka's name for the default here.")
@invocation.number_option(
    "-p", "-P", "--partition", "wanted", multiple=True, help="Only this partition.", minimum=0
)
@click.option(
    "-g",
    "--group",
    metavar="GROUP",
    help="Join this group: continue at its committed offsets, and commit the records that were printed.",
    shell_complete=complete_groups,
)
@click.option("--read-committed", is_flag=True, help="Skip records of open and aborted transactions.")
@click.option(
    "-f",
    "--format",
    "text_format",
    type=ANY_BYTES,
    metavar="FORMAT",
    help="Print each record in this format.",
)
@click.option(
    "-o",
    "--output",
    type=record_output,
    default="value",
    metavar="|".join(RECORD_OUTPUTS),
    show_default=True,
    help="Print records in one of these formats.",
)
@client_options
def consume(
    topics: tuple[str, ...],
    count: int | None,
    exit_at_end: bool,
    range_text: str | None,
    from_text: str | None,
    to_text: str | None,
    from_beginning: bool,
    wanted: tuple[int, ...],
    group: str | None,
    read_committed: bool,
    text_format: str | None,
    output: str | OffsetRange,
) -> None:
    """Print the records of TOPICS."""
    topics = topic_names(topics)
    if isinstance(output, OffsetRange):
        if range_text is not None:
            raise UsageError("both -o and -r give a range; -o is the output format")
        chosen, output = output, "value"
    else:
        chosen = _chosen_range(range_text, from_text, to_text)
    if exit_at_end and chosen.stop is None:
        chosen = OffsetRange(chosen.first, END)
    printer = make_printer(output, text_format)
    current = invocation.current()
    settings = {"isolation.level": "read_committed"} if read_committed else {}
    job: _Job | GroupJob
    if group is None:
        job = _Job(topics, wanted, chosen, count, current.timeout_ms, settings, printer)
    else:
        if range_text or from_text or to_text or wanted:
            raise UsageError(
                "a group continues at its committed offsets; leave out -r, --from, --to and -p",
                hint=f"'kl group reset-offsets {group}' changes them",
            )
        job = GroupJob(topics, group, exit_at_end, count, current.timeout_ms, settings, printer)
    invocation.listen_to_clients()
    try:
        invocation.run(lambda: until_pipe_closes(job.run(current)))
    except (KeyboardInterrupt, Terminated):
        invocation.say(f"{plural(job.printed_count, 'record')}")
        raise
    except BrokenPipeError:
        if isinstance(job, GroupJob):
            records = plural(job.printed_count, "record")
            invocation.say(
                f"stdout was closed; up to {records} may be committed that its reader did not read"
            )
        raise


def _chosen_range(range_text: str | None, from_text: str | None, to_text: str | None) -> OffsetRange:
    now_ms = invocation.now_ms()
    try:
        if range_text is not None:
            if from_text is not None or to_text is not None:
                raise UsageError("-r gives both bounds; leave out --from and --to")
            return parse_range(range_text, now_ms=now_ms)
        found = OffsetRange(
            START if from_text is None else parse_limit(from_text, now_ms=now_ms),
            None if to_text is None else parse_limit(to_text, now_ms=now_ms),
        )
        check_order(found)
        return found
    except ValueError as problem:
        raise UsageError(str(problem)) from None


@dataclass(slots=True)
class _Job:
    topics: tuple[str, ...]
    wanted: tuple[int, ...]
    range: OffsetRange
    count: int | None
    timeout_ms: int | None
    settings: dict[str, Any]
    printer: Printer
    printed_count: int = 0
    _open: dict[TopicPartition, Span] = field(default_factory=dict)  #: spans that are not finished
    _partition_count: int = 0
    _unreadable: list[TopicPartition] = field(default_factory=list)  #: not read to the end of their spans

    async def run(self, current: Invocation) -> None:
        """Print the records.

        Raises TimedOutError if --timeout passes before -n records are printed or the end of the range is
        reached. If there is neither -n nor an end, --timeout ends the command without an error, unless the
        offsets were not looked up in time, or none of the existing records was fetched. If the range has an
        end and one of several partitions cannot be read up to it, the others are read, and then
        PartialFailureError is raised.
        """
        deadline = None if self.timeout_ms is None else time.monotonic() + self.timeout_ms / 1000
        settings = {"auto.offset.reset": "none", "max.poll.records": _POLL_RECORDS, **self.settings}
        async with AsyncExitStack() as stack:

            async def start() -> Consumer:
                await self._look_up(current)
                return await stack.enter_async_context(connect.consumer(current, **settings))

            consumer = await invocation.within(self.timeout_ms, start)
            await self._read(consumer, deadline)
        if self._unreadable:
            count = plural(self._partition_count, "partition")
            raise PartialFailureError(f"{len(self._unreadable)} of {count} could not be read to the end")

    async def _look_up(self, current: Invocation) -> None:
        """Request the partitions of the topics, and the offsets to read in each partition."""
        async with connect.admin(current) as admin:
            partitions = await partitions_of(admin, await matching_topics(admin, self.topics), self.wanted)
            found = await spans(admin, partitions, self.range)
        self._open = {
            partition: span
            for partition, span in found.items()
            if span.stop_offset is None or span.first_offset < span.stop_offset
        }
        self._partition_count = len(found)
        self._explain_empty(found)

    def _explain_empty(self, found: dict[TopicPartition, Span]) -> None:
        """Print a message if the range is empty in all partitions, or begins after the end of every log.

        If the range is ``start:end``, print nothing.
        """
        first = self.range.first
        is_beyond = first.anchor is Anchor.OFFSET and all(
            first.number > span.log_end_offset for span in found.values()
        )
        is_empty = found and not self._open and not (first == START and self.range.stop == END)
        if not found or not (is_beyond or is_empty):
            return
        tp, span = next(iter(found.items()))
        others = f" (of {plural(len(found), 'partition')})" if len(found) > 1 else ""
        waits = "; waiting for new ones" if self._open and self.range.stop is None else ""
        invocation.say(
            f"no records in this range: {tp}{others} ends at offset {span.log_end_offset:,}{waits}"
        )

    async def _read(self, consumer: Consumer, deadline: float | None) -> None:
        with printing(self.printer) as show:
            if self._open:
                consumer.assign(list(self._open))
            for partition, span in self._open.items():
                await consumer.seek(partition, span.first_offset)
            while self._open and self.count != self.printed_count:
                left_ms = patience_ms(deadline)
                if left_ms <= 0:
                    if self.count is None and self.range.stop is None and not self._lacks_fetch(consumer):
                        return  # the range is open-ended: the records that arrived in time were printed
                    raise timed_out(self.printed_count, self.count, self.settings)
                try:
                    records = await consumer.get_many(_POLL_RECORDS, timeout_ms=left_ms)
                except (KafkaStorageError, RecordError) as error:
                    self._give_up(consumer, error)
                    continue
                except NoOffsetError as error:
                    await self._go_on(consumer, error)
                    continue
                show(self._take(records))
                self._close_finished(consumer)

    def _lacks_fetch(self, consumer: Consumer) -> bool:
        """Whether no record was printed, and a log with records in the range has not been read yet."""
        return not self.printed_count and any(
            (consumer.position(partition) or 0) <= span.first_offset < span.log_end_offset
            for partition, span in self._open.items()
        )

    def _give_up(self, consumer: Consumer, error: KafkaStorageError | RecordError) -> None:
        """Print why a partition cannot be read further, and continue with the other partitions.

        Raises ``error`` if the command reads only one partition, if the range has no end, or if ``error``
        does not name a partition that is being read.
        """
        partition = error.topic_partition
        if self.range.stop is None or self._partition_count == 1 or partition not in self._open:
            raise error
        invocation.say(f"{partition}: {error}")
        self._unreadable.append(partition)
        del self._open[partition]
        consumer.pause([partition])

    async def _go_on(self, consumer: Consumer, error: NoOffsetError) -> None:
        """Choose the next position in a log that did not have the consumer's position.

        If the records at the position were deleted, print this and continue at the log start. If the range
        has no end and the log ends before the position, also print this and continue at the log start. If the
        range has no end and the log has the position now, fetch again. In all other cases, raise ``error``.
        """
        tp = error.topic_partition
        position = None if tp is None else consumer.position(tp)
        if tp is None or position is None:
            raise error
        start, end = (await consumer.beginning_offsets([tp]))[tp], (await consumer.end_offsets([tp]))[tp]
        if position < start:
            why = f"the records before offset {start} were deleted before they were read"
        elif self.range.stop is None and end < position:
            why = f"its log ends at {end}: the topic was created again, or its cluster lost its data"
        elif self.range.stop is None:  # another replica leads, which has the position
            await consumer.seek(tp, position)
            return
        else:
            raise error
        invocation.say(f"{tp}: offset {position} does not exist, {why}; going on at offset {start}")
        await consumer.seek(tp, start)

    def _take(self, records: list[Record]) -> list[Record]:
        """Return the ``records`` in the range, at most as many as -n still allows, and count them."""
        if self.range.stop is not None:
            taken = [record for record in records if self._is_wanted(record)]
        else:
            taken = records
        if self.count is not None:
            taken = taken[: self.count - self.printed_count]
        self.printed_count += len(taken)
        return taken

    def _is_wanted(self, record: Record) -> bool:
        span = self._open.get(TopicPartition(record.topic, record.partition))
        if span is None or (span.stop_offset is not None and record.offset >= span.stop_offset):
            return False
        return span.times is None or span.times[0] <= record.timestamp_ms < span.times[1]

    def _close_finished(self, consumer: Consumer) -> None:
        if self.range.stop is None:
            return
        done = [
            partition
            for partition, span in self._open.items()
            if span.stop_offset is not None and (consumer.position(partition) or 0) >= span.stop_offset
        ]
        for partition in done:
            del self._open[partition]
        if done and self._open:
            consumer.pause(done)
