"""Requests the partitions of topics, and their offsets, from brokers."""

# Tests: tests/cli/test_processes.py

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kafkalite.cli import connect
from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.invocation import Invocation, say
from kafkalite.cli.ranges import Bound, OffsetRange, resolve
from kafkalite.errors import ErrorCode, KafkaliteError, KafkaStorageError
from kafkalite.model import NO_OFFSET, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin


#: Replaces the unknown end of a damaged log. A reader gets the records before the damage, and then an error.
UNKNOWN_END: Final = 2**63 - 1


_LOOKUP_S: Final = 1.0
_PATTERN_HINT: Final = "a pattern is a regular expression for the whole name: 'orders-.*'"


class Extent(NamedTuple):
    """The offsets of a partition: ``log_start_offset`` inclusive, ``log_end_offset`` exclusive."""

    log_start_offset: int
    log_end_offset: int


class Span(NamedTuple):
    """The offsets to read in one partition. ``stop_offset`` is exclusive, or None for no end.

    ``times`` is set if the wanted range of times cannot be converted to offsets, because timestamps may be
    out of order. Then only records with a timestamp from the first time (inclusive, in ms) to the second
    (exclusive) are printed.
    """

    first_offset: int
    stop_offset: int | None
    times: tuple[int, int] | None = None
    log_end_offset: int = 0  #: the end of the log at the time of the lookup


async def partitions_of(
    admin: Admin, topics: Sequence[str], wanted: Iterable[int] = ()
) -> list[TopicPartition]:
    """Return every partition of ``topics``, or only the partitions with the numbers ``wanted``.

    Raises UnknownTopicOrPartitionError for a missing topic, and NotFoundError for a missing partition.
    """
    chosen = sorted(set(wanted))
    found: list[TopicPartition] = []
    for description in await admin.describe_topics(list(dict.fromkeys(topics))):
        count = len(description.partitions)
        for partition in chosen:
            if partition >= count:
                raise connect.no_such_partition(description.name, partition, count)
        found += [TopicPartition(description.name, each) for each in chosen or range(count)]
    return found


async def missing_topics(current: Invocation, topics: Iterable[str]) -> set[str]:
    """Return those of ``topics`` that no broker has.

    Return the empty set if the requests fail, or take longer than a second.
    """
    import asyncio

    from kafkalite.protocol.messages.metadata import MetadataRequest

    missing = set(topics)
    request = MetadataRequest(sorted(missing), False)
    with suppress(KafkaliteError, TimeoutError):
        async with asyncio.timeout(_LOOKUP_S), connect.cluster(current) as client:
            for node_id in (
                None,
                *client.metadata.addresses,
            ):  # a broker learns of a new topic a little later
                if missing:
                    found = (await client.call(request, node_id=node_id)).message.topics
                    missing -= {topic.name for topic in found if topic.error_code == ErrorCode.NONE}
            return missing
    return set()


async def matching_topics(admin: Admin, names: Sequence[str]) -> list[str]:
    """Return ``names`` with each pattern replaced by the topics that it matches.

    A pattern is a regular expression for the whole name of a topic. A name is a pattern if it contains a
    character other than ASCII letters, digits, ``.``, ``_`` and ``-``. Raises UsageError for an invalid
    pattern, and NotFoundError for a pattern that matches no topic.
    """
    if not any(_is_pattern(name) for name in names):
        return list(names)
    known = sorted(topic.name for topic in await admin.list_topics())
    found: dict[str, None] = {}
    for name in names:
        if not _is_pattern(name):
            found[name] = None
            continue
        try:
            matches = [topic for topic in known if re.fullmatch(name, topic)]
        except re.error as problem:
            raise UsageError(f"{name!r} is not a regular expression: {problem}", hint=_PATTERN_HINT) from None
        if not matches:
            hint = "separate topics with spaces" if "," in name else _PATTERN_HINT
            raise NotFoundError(f"no topic matches {name!r}", hint=hint)
        found |= dict.fromkeys(matches)
    return list(found)


def _is_pattern(name: str) -> bool:
    return re.search(r"[^a-zA-Z0-9._-]", name) is not None


async def extents(admin: Admin, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Extent]:
    starts = await admin.list_offsets(partitions, "earliest")
    ends = await admin.list_offsets(partitions, "latest")
    return {partition: Extent(starts[partition].offset, ends[partition].offset) for partition in partitions}


async def list_or_fail(
    admin: Admin, partitions: Sequence[TopicPartition], at: Literal["earliest", "latest"] | int
) -> dict[TopicPartition, int | KafkaStorageError]:
    """Return each partition's offset, or the KafkaStorageError that the leader returned (R24)."""
    import asyncio

    async def one(partition: TopicPartition) -> int | KafkaStorageError:
        try:
            return (await admin.list_offsets([partition], at))[partition].offset
        except KafkaStorageError as error:
            return error

    try:
        return {tp: found.offset for tp, found in (await admin.list_offsets(partitions, at)).items()}
    except KafkaStorageError as error:
        if len(partitions) == 1:
            return {partitions[0]: error}
        return dict(zip(partitions, await asyncio.gather(*map(one, partitions)), strict=True))


async def offsets_at(
    admin: Admin, partitions: Sequence[TopicPartition], timestamp_ms: int
) -> dict[TopicPartition, int | None]:
    """Return {partition: offset of the first record at or after the time}.

    The offset is None if all records of the partition are older.
    """
    found = await admin.list_offsets(partitions, timestamp_ms)
    return {
        partition: None if found[partition].offset == NO_OFFSET else found[partition].offset
        for partition in partitions
    }


async def spans(
    admin: Admin, partitions: Sequence[TopicPartition], wanted: OffsetRange
) -> dict[TopicPartition, Span]:
    """Return the offsets to read in each partition, computed from ``wanted`` and the current log ends.

    If the leader of a damaged log cannot determine an offset, UNKNOWN_END replaces it, so that the log is
    read up to the damage. If ``wanted`` is a range of times and both times have the same offset, the span
    extends to the log end: records in the range may follow, because timestamps may be out of order.
    """
    starts = await admin.list_offsets(partitions, "earliest")
    ends = await list_or_fail(admin, partitions, "latest")
    by_time = {moment: await list_or_fail(admin, partitions, moment) for moment in wanted.timestamps_ms}

    def known(offset: int | KafkaStorageError) -> int:
        return offset if isinstance(offset, int) else UNKNOWN_END

    def offset_of(bound: Bound, partition: TopicPartition) -> int:
        at = {moment: known(found[partition]) for moment, found in by_time.items()}
        return resolve(
            bound,
            log_start_offset=starts[partition].offset,
            log_end_offset=known(ends[partition]),
            offset_at={moment: None if offset == NO_OFFSET else offset for moment, offset in at.items()},
        )

    found: dict[TopicPartition, Span] = {}
    for partition in partitions:
        first = offset_of(wanted.first, partition)
        stop = None if wanted.stop is None else offset_of(wanted.stop, partition)
        end = known(ends[partition])
        found[partition] = Span(first, stop, None, end)
        if stop == first < end and len(wanted.timestamps_ms) == 2:
            from_ms, to_ms = wanted.timestamps_ms
            if from_ms < to_ms:
                say(f"{partition} has no record in order in this time range; searching to its end")
                found[partition] = Span(first, end, (from_ms, to_ms), end)
    return found
