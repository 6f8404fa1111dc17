"""``kl produce``: sends lines, JSON or whole files to a topic."""

# Tests: tests/cli/test_produce_consume.py

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import ANY_BYTES
from kafkalite.cli.client_warnings import installed, print_line
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import PartialFailureError, TimedOutError, UsageError
from kafkalite.cli.formats import unescape
from kafkalite.cli.input_records import (
    INPUT_FORMATS,
    Block,
    InputError,
    InputFormat,
    RecordDefaults,
    RecordReader,
)
from kafkalite.cli.invocation import Invocation, Terminated, client_options
from kafkalite.cli.offset_queries import missing_topics
from kafkalite.cli.output import plural
from kafkalite.cli.stdio import file_chunks
from kafkalite.cli.times import parse_time
from kafkalite.errors import KafkaliteError, RecordTooLargeError, RequestTimeoutError
from kafkalite.model import Headers
from kafkalite.rng import system_rng

if TYPE_CHECKING:
    from kafkalite.cli.progress import Progress
    from kafkalite.client.producer.producer import Producer

_BLOCK_RECORDS: Final = 10_000
_ACKNOWLEDGED: Final = "acknowledged"
_ABORTED: Final = "aborted"
_IN_DOUBT: Final = "sent, and perhaps committed,"  # while the commit request is outstanding
_BURSTS_PER_SECOND: Final = 20  # how often per second a part is sent with --rate
_PER_SECOND: Final = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_rate(text: str) -> float:
    """Parse ``100/s``, ``100`` or ``6000/min`` into records per second. Raises click's BadParameter."""
    count, _, unit = text.partition("/")
    try:
        rate = float(count) / _PER_SECOND[unit.strip() or "s"]
    except (ValueError, KeyError):
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise click.BadParameter(f"{text!r} is not a rate; write for example 100/s or 6000/min")
    return rate


def parse_header(text: str) -> tuple[str, bytes | None]:
    """Parse ``name=value``. A ``name`` alone has a null value. Raises UsageError without a name."""
    name, equals, value = text.partition("=")
    if not name:
        raise UsageError(f"header {text!r} has no name; write -H name=value")
    return name, value.encode("utf-8", "surrogateescape") if equals else None


@click.command(
    epilog="""\b
Examples:
  echo hello | kl produce greetings
  kl produce logs access.log error.log --progress
  kl produce users -K : <<< 'alice:{"age":30}'
  kl consume a -e -o jsonl | kl produce b -i jsonl      copies a topic exactly
  kl produce orders --txn < orders.txt                  all of the file, or nothing
  kl produce photos -i raw -k cat.jpg cat.jpg           the whole file is one value

\b
-i jsonl and -i json accept records as 'kl consume -o jsonl' prints them:
  {"key":"k","value":"v","headers":[["h","1"]],"timestamp":1431857103000,"partition":0}
Binary data is {"b64":"…"}; only "value" is required, and may be null."""
)
@click.argument("topic", required=False, shell_complete=complete_topics)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option(
    "-i",
    "--input",
    "how",
    type=click.Choice(INPUT_FORMATS),
    default="lines",
    show_default=True,
    help="Input format.",
)
@click.option("-k", "--key", type=ANY_BYTES, help="The key of every record.")
@click.option(
    "-K", "--key-separator", type=ANY_BYTES, metavar="TEXT", help=r"Split lines at TEXT into key and value."
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    type=ANY_BYTES,
    metavar="NAME=VALUE",
    help="A header for every record.",
)
@invocation.number_option("-p", "--partition", help="The partition of every record.", minimum=0)
@click.option("--any-partition", is_flag=True, help="Ignore the partitions in JSON lines.")
@click.option("-Z", "--null", "empty_is_null", is_flag=True, help="An empty key or value is null.")
@click.option(
    "-z",
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    help="Codec.  [default: none]",
)
@click.option(
    "--acks", type=click.Choice(["0", "1", "all"]), help="Acknowledgements to wait for.  [default: all]"
)
@click.option(
    "--txn",
    "transactional_id",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    help="Send all records in one transaction, or none. An ID fences an earlier run with the same ID.",
)
@click.option("--rate", type=parse_rate, metavar="N/s", help="At most this many records per second.")
@click.option("--progress", is_flag=True, help="Show a progress bar if stderr is a terminal.")
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
@click.option("--dry-run", is_flag=True, help="Read and check the input, send nothing.")
@client_options
def produce(
    topic: str | None,
    files: tuple[Path, ...],
    how: str,
    key: str | None,
    key_separator: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    any_partition: bool,
    empty_is_null: bool,
    compression: str | None,
    acks: str | None,
    transactional_id: str | None,
    rate: float | None,
    progress: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    """Send records to TOPIC from stdin or FILES; if TOPIC is '-', each JSON line names its topic."""
    if not topic:
        raise UsageError("which topic? Give TOPIC as an argument")
    defaults = RecordDefaults(
        topic=None if topic == "-" else topic,
        partition=partition,
        any_partition=any_partition,
        key=_as_bytes(key),
        key_separator=_as_bytes(unescape(key_separator)) if key_separator is not None else None,
        headers=cast("Headers", tuple(parse_header(text) for text in headers)),
        empty_is_null=empty_is_null,
    )
    if key_separator == "":
        raise UsageError("the key separator must not be empty")
    current = invocation.current()
    job = _Job(
        files or (Path("-"),),
        cast("InputFormat", how),
        defaults,
        rate=rate,
        progress=progress,
        quiet=quiet,
        dry_run=dry_run,
    )
    if not files and not quiet and sys.stdin.isatty():
        invocation.say("type one record per line; Ctrl-D ends")
    settings = {"compression.type": compression, "acks": acks}
    if transactional_id is not None:
        settings["transactional.id"] = transactional_id or f"kl-{system_rng().randbytes(8).hex()}"
    started = time.monotonic()
    try:
        invocation.run_command(lambda: job.run(current, {k: v for k, v in settings.items() if v is not None}))
    except (KeyboardInterrupt, Terminated):
        if not quiet:
            job.summarize(time.monotonic() - started)
        raise
    except TimedOutError as late:
        raise TimedOutError(f"{late.message}; {job.acknowledged}", hint=late.hint) from None
    if not quiet:
        job.summarize(time.monotonic() - started)


def _of_transaction(error: BaseException) -> KafkaliteError:
    cause = error.message if isinstance(error, KafkaliteError) else str(error)
    return KafkaliteError(
        f"the transaction was aborted, and none of its records can be read: {cause}",
        hint=getattr(error, "hint", ""),
    )


def _as_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


def _add_place(error: RecordTooLargeError, block: Block, limit_bytes: int) -> None:
    """Change the message of ``error`` to name the place of the first too large record in the input."""
    from kafkalite.client.producer.pending_batch import BATCH_OVERHEAD_BYTES, record_size

    for index, value in enumerate(block.values):
        key = block.keys[index] if block.keys is not None else None
        size_bytes = record_size(value, key, block.headers[index] if block.headers is not None else ())
        if size_bytes + BATCH_OVERHEAD_BYTES > limit_bytes:
            place = block.place_of(index)
            error.message = f"{place}: the record has {size_bytes} bytes; max.request.size is {limit_bytes}"
            return


@dataclass(slots=True)
class _Job:
    files: tuple[Path, ...]
    how: InputFormat
    defaults: RecordDefaults
    rate: float | None
    progress: bool
    quiet: bool
    dry_run: bool
    sent_count: int = 0
    failed_count: int = 0
    _given_count: int = 0  #: the records given to the producer
    fate: str = _ACKNOWLEDGED  #: the state of the sent records, for messages
    topics: set[str] = field(default_factory=set)
    _looked_up: set[str] = field(default_factory=set)  #: topics whose existence was checked
    _producer: Producer | None = None

    @property
    def acknowledged(self) -> str:
        """The number of records and their state, as text such as ``3 records acknowledged``."""
        if self._producer is None or self.fate not in {_ACKNOWLEDGED, _ABORTED}:
            return f"{plural(self.sent_count, 'record')} {self.fate}"
        text = f"{plural(self._acknowledged_count, 'record')} {_ACKNOWLEDGED}"
        if self.fate == _ABORTED:
            return f"{text}, in a transaction that is not committed"
        left_count = self._given_count - self._acknowledged_count
        return f"{text}, {left_count:,} without an acknowledgement" if left_count else text

    @property
    def _acknowledged_count(self) -> int:
        return self._producer.statistics().acknowledged_records if self._producer is not None else 0

    async def run(self, current: Invocation, settings: dict[str, Any]) -> None:
        bar = self._bar()
        handler = installed()
        if handler is not None:
            handler.write = lambda line: bar.tell(f"{line}; {self.acknowledged}")
        try:
            if self.dry_run:
                async for blocks in self._blocks(bar):
                    self._count(blocks)
                return
            self._producer = connect.producer(current, **settings)
            if self._producer.config.acks == 0:
                self.fate = "sent unacknowledged"
            async with self._producer as producer:
                if "transactional.id" not in settings:
                    await self._send_all(current, producer, bar)
                    return
                await self._send_in_transaction(current, producer, bar)
        except InputError as problem:
            if self.fate == _ABORTED:
                hint = "the transaction was aborted: none of its records can be read"
            else:
                hint = f"{self.acknowledged} before it, and the rest was not read"
            raise KafkaliteError(str(problem), hint=hint) from None
        finally:
            bar.close()
            if handler is not None:
                handler.write = print_line

    async def _send_in_transaction(self, current: Invocation, producer: Producer, bar: Progress) -> None:
        """Send all records in one transaction. If sending fails, the transaction is aborted."""
        self.fate = _ABORTED
        try:
            async with producer.transaction():
                await self._send_all(current, producer, bar)
                self.fate = _IN_DOUBT
        except RequestTimeoutError as error:
            if self.fate != _IN_DOUBT:
                raise
            name = producer.config.transactional_id
            raise RequestTimeoutError(
                error.message, hint=f"whether it was committed is unknown: see 'kl txn describe {name}'"
            ) from error
        except PartialFailureError as failure:
            raise _of_transaction(failure.__cause__ or failure) from failure
        self.fate = "committed"

    async def _send_all(self, current: Invocation, producer: Producer, bar: Progress) -> None:
        import asyncio

        started = time.monotonic()
        async for blocks in self._blocks(bar):
            if self.rate is not None:
                due = started + (self.sent_count + self.failed_count) / self.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            missing = await self._missing(current, blocks)
            self._given_count += sum(len(block.values) for block in blocks)
            outcomes = await asyncio.gather(
                *(
                    producer.send_many(
                        block.topic,
                        block.values,
                        block.keys,
                        partition=block.partition,
                        timestamps_ms=block.timestamps_ms,
                        headers=block.headers,
                    )
                    for block in blocks
                ),
                return_exceptions=True,
            )
            self._judge(blocks, outcomes)
            for topic in sorted(missing):
                from kafkalite.client.cluster.client import created_topic

                count = len(await producer.partitions_for(topic))
                bar.tell(f"kl: {created_topic(topic, count)}")
            bar.advance_records(sum(len(block.values) for block in blocks))

    async def _missing(self, current: Invocation, blocks: list[Block]) -> set[str]:
        """Return the topics of ``blocks`` that do not exist yet.

        A topic is looked up only once. With --quiet, no topic is looked up.
        """
        unknown = {block.topic for block in blocks} - self._looked_up
        self._looked_up |= unknown
        return await missing_topics(current, unknown) if unknown and not self.quiet else set()

    def _judge(self, blocks: list[Block], outcomes: list[Any]) -> None:
        """Count the sent and failed records of ``blocks``. ``outcomes`` has one entry per block.

        If blocks failed, raises the error of the first failed block. If that error is a KafkaliteError and
        any record was acknowledged, raises PartialFailureError instead.
        """
        failures: list[BaseException] = []
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self.failed_count += len(block.values)
                if isinstance(outcome, RecordTooLargeError) and self._producer is not None:
                    _add_place(outcome, block, self._producer.config.max_request_size)
                failures.append(outcome)
            else:
                self._count([block])
        if not failures:
            return
        first = failures[0]
        acknowledged_count = self._acknowledged_count
        if acknowledged_count == 0 or not isinstance(first, KafkaliteError):
            raise first
        lost_count = self.sent_count + self.failed_count - acknowledged_count
        raise PartialFailureError(
            f"{plural(acknowledged_count, 'record')} {self.fate}, then {lost_count:,} not: {first.message}",
            hint=first.hint,
        ) from first

    def _count(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.sent_count += len(block.values)
            self.topics.add(block.topic)

    async def _blocks(self, bar: Progress) -> AsyncIterator[list[Block]]:
        now_ms = invocation.now_ms()
        most = _BLOCK_RECORDS
        if self.rate is not None:
            most = max(1, min(most, int(self.rate / _BURSTS_PER_SECOND)))
        for path in self.files:
            reader = RecordReader(
                "stdin" if str(path) == "-" else str(path),
                self.how,
                self.defaults,
                now_ms=now_ms,
                parse_timestamp=lambda text: parse_time(text, now_ms=now_ms),
            )
            async for chunk in file_chunks(path):
                for blocks in reader.feed(chunk, max_records=most):
                    yield blocks
                bar.advance_bytes(len(chunk))
            for blocks in reader.finish(max_records=most):
                yield blocks

    def _bar(self) -> Progress:
        from kafkalite.cli.progress import Progress, bar_on

        if not self.progress:
            return Progress()
        sizes = [path.stat().st_size for path in self.files if str(path) != "-" and path.is_file()]
        total_bytes = sum(sizes) if len(sizes) == len(self.files) else None
        return bar_on(sys.stderr, "producing", total_bytes=total_bytes)

    def summarize(self, seconds: float) -> None:
        where = ", ".join(sorted(self.topics)) or self.defaults.topic or "nowhere"
        verb = "would go" if self.dry_run else self.fate
        if verb == _ABORTED:
            invocation.say(
                f"{plural(self.sent_count, 'record')} sent to {where} and aborted: they cannot be read"
            )
            return
        if verb == _ACKNOWLEDGED and self._given_count > self.sent_count + self.failed_count:  # interrupted
            invocation.say(f"to {where}: {self.acknowledged}")
            return
        rate = f", {self.sent_count / seconds:,.0f}/s" if seconds > 0.5 and self.sent_count > 1 else ""
        invocation.say(f"{plural(self.sent_count, 'record')} {verb} to {where} in {seconds:.2f} s{rate}")
