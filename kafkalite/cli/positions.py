"""Which partitions of which topics, and which of their offsets, a command means: asked of the brokers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kafkalite.cli import connect
from kafkalite.cli.ranges import OffsetRange, resolve
from kafkalite.model import TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin import Admin
    from kafkalite.client.consumer import Consumer


class Extent(NamedTuple):
    """Where a partition's records stand: [log_start_offset, log_end_offset)."""

    log_start_offset: int
    log_end_offset: int


class Span(NamedTuple):
    """What to read of one partition: ``first_offset`` inclusive, ``stop_offset`` exclusive or None."""

    first_offset: int
    stop_offset: int | None


async def partitions_of(
    admin: Admin, topics: Sequence[str], wanted: Iterable[int] = ()
) -> list[TopicPartition]:
    """Every partition of ``topics``, or of each those in ``wanted``.

    Raises UnknownTopicOrPartitionError for a topic, NotFoundError for a partition that is not there.
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


async def extents(consumer: Consumer, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Extent]:
    starts = await consumer.beginning_offsets(partitions)
    ends = await consumer.end_offsets(partitions)
    return {partition: Extent(starts[partition], ends[partition]) for partition in partitions}


async def offsets_at(
    consumer: Consumer, partitions: Sequence[TopicPartition], timestamp_ms: int
) -> dict[TopicPartition, int | None]:
    """The first offset whose timestamp is not less, by partition; None where all records are older."""
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, timestamp_ms))
    at: dict[TopicPartition, int | None] = {}
    for partition in partitions:
        entry = found.get(partition)
        at[partition] = None if entry is None else entry.offset
    return at


async def spans(
    consumer: Consumer, partitions: Sequence[TopicPartition], wanted: OffsetRange
) -> dict[TopicPartition, Span]:
    """A range as offsets of each partition, at this moment."""
    known = await extents(consumer, partitions)
    by_time = {moment: await offsets_at(consumer, partitions, moment) for moment in wanted.timestamps_ms}
    found: dict[TopicPartition, Span] = {}
    for partition, extent in known.items():
        offset_at = {moment: by_time[moment][partition] for moment in by_time}
        first, stop = (
            None
            if bound is None
            else resolve(
                bound,
                log_start_offset=extent.log_start_offset,
                log_end_offset=extent.log_end_offset,
                offset_at=offset_at,
            )
            for bound in (wanted.first, wanted.stop)
        )
        assert first is not None, "a range has a first bound"
        found[partition] = Span(first, stop)
    return found
