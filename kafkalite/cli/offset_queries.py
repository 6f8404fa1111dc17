"""Requests the partitions of topics, and their offsets, from brokers."""

# Tests: tests/cli/test_processes.py

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kafkalite.cli import connect
from kafkalite.cli.ranges import Bound, OffsetRange, resolve
from kafkalite.errors import KafkaStorageError
from kafkalite.model import NO_OFFSET, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin


#: Stands for the end of a damaged log, which is unknown: a reader gets to the sound end, and then an error.
UNKNOWN_END: Final = 2**63 - 1


class Extent(NamedTuple):
    """The offsets of a partition: ``log_start_offset`` inclusive, ``log_end_offset`` exclusive."""

    log_start_offset: int
    log_end_offset: int


class Span(NamedTuple):
    """The offsets to read in one partition. ``stop_offset`` is exclusive, or None for no end."""

    first_offset: int
    stop_offset: int | None


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


async def extents(admin: Admin, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Extent]:
    starts = await admin.list_offsets(partitions, "earliest")
    ends = await admin.list_offsets(partitions, "latest")
    return {partition: Extent(starts[partition].offset, ends[partition].offset) for partition in partitions}


async def list_or_fail(
    admin: Admin, partitions: Sequence[TopicPartition], at: Literal["earliest", "latest"] | int
) -> dict[TopicPartition, int | KafkaStorageError]:
    """Return the offset of each partition, or the error of the leader, whose log may be damaged (R24)."""
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
    """Return the first offset at or after ``timestamp_ms`` by partition; None if all records are older."""
    found = await admin.list_offsets(partitions, timestamp_ms)
    return {
        partition: None if found[partition].offset == NO_OFFSET else found[partition].offset
        for partition in partitions
    }


async def spans(
    admin: Admin, partitions: Sequence[TopicPartition], wanted: OffsetRange
) -> dict[TopicPartition, Span]:
    """Return the offsets to read in each partition, computed from ``wanted`` and the current log ends.

    Of a damaged log the sound part can be read: offsets that its leader does not know are UNKNOWN_END.
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

    return {
        partition: Span(
            offset_of(wanted.first, partition),
            None if wanted.stop is None else offset_of(wanted.stop, partition),
        )
        for partition in partitions
    }
