"""Tracks returned and processed records, and the offsets that may be committed. Pure.

Reading more records, or a normal close, marks the records returned before as processed. Until then they are
*unprocessed*: explicit commits include them; auto-commit includes them only with at_most_once.
"""

# Tests: tests/client/test_session.py

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kafkalite.client.arguments import checked_offsets
from kafkalite.client.consumer.assigned_partitions import AssignedPartitions, PartitionState
from kafkalite.errors import ClientError
from kafkalite.model import NO_EPOCH, OffsetAndMetadata, Record, TopicPartition


class Progress:
    """Tracks which records of one consumer were returned and processed, for commits and rebalances."""

    def __init__(self, assigned: AssignedPartitions, *, is_at_most_once: bool) -> None:
        self._assigned = assigned
        #: The record that iteration returned last, while it is unprocessed.
        self.current_record: Record[Any, Any] | None = None
        self._is_at_most_once = is_at_most_once
        self._unprocessed: dict[TopicPartition, int] = {}  # the first unprocessed offset of each partition
        self._seen_record: Record[Any, Any] | None = None

    @property
    def partitions(self) -> Collection[TopicPartition]:
        """The partitions that are read."""
        return self._assigned.partitions.keys()

    def mark_processed(self) -> None:
        """Mark all records returned so far as processed."""
        self.current_record = None
        if self._unprocessed:
            self._unprocessed = {}

    def mark_returned(self, tp: TopicPartition, offset: int) -> None:
        """Mark records from ``offset`` on as unprocessed, just before they are returned to the user."""
        self._unprocessed.setdefault(tp, offset)

    def unprocessed(self) -> list[TopicPartition]:
        """Return the partitions with records that ``mark_returned`` has marked as unprocessed."""
        return list(self._unprocessed)

    def has_moved(self) -> bool:
        """Return whether ``current_record`` has changed since the last call of this method."""
        before, self._seen_record = self._seen_record, self.current_record
        return self._seen_record is not before

    def positions(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the positions of ``partitions`` (None: all) after all returned records.

        Unknown positions are omitted.
        """
        states = self._assigned.partitions
        wanted = states if partitions is None else [tp for tp in partitions if tp in states]
        return {
            tp: OffsetAndMetadata(position, states[tp].position_epoch)
            for tp in wanted
            if (position := states[tp].position) is not None
        }

    def committable(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets to auto-commit: the positions after the processed records.

        With at_most_once, they are the positions after the returned records.
        """
        positions = self.positions()
        if self._is_at_most_once:
            return positions
        unprocessed = dict(self._unprocessed)
        if self.current_record is not None:
            tp = TopicPartition(self.current_record.topic, self.current_record.partition)
            unprocessed.setdefault(tp, self.current_record.offset)
        for tp, offset in unprocessed.items():
            if tp in positions and offset < positions[tp].offset:
                positions[tp] = positions[tp]._replace(offset=offset)
        return positions

    def add(self, partitions: Mapping[TopicPartition, str]) -> None:
        """Also read these partitions, {partition: reset policy}."""
        states = self._assigned.partitions
        self._assigned.assign({tp: state.reset for tp, state in states.items()} | dict(partitions))

    def start_at(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Start at these committed offsets in the partitions that have no position yet."""
        for tp, at in offsets.items():
            state = self._assigned.partitions.get(tp)
            if state is not None and state.base_position is None:
                state.seek(at.offset, at.leader_epoch)

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions."""
        gone = set(partitions)
        self._assigned.assign(
            {tp: state.reset for tp, state in self._assigned.partitions.items() if tp not in gone}
        )
        for tp in gone:
            self._unprocessed.pop(tp, None)

    def hide(self, tp: TopicPartition) -> bool:
        """Stop returning records of ``tp``, but keep its position. Return whether the user had paused it."""
        state = self._assigned.partitions[tp]
        was_paused = state.paused
        _rewind(state, state.position)
        state.paused = True
        return was_paused

    def show(self, tp: TopicPartition, *, paused: bool) -> None:
        """Undo ``hide``. ``paused`` is the result of ``hide``."""
        self._assigned.partitions[tp].paused = paused

    def rewind_returned(self) -> None:
        """Move positions back to the first unprocessed records, so that they are returned again."""
        unprocessed, self._unprocessed = self._unprocessed, {}
        for tp, offset in unprocessed.items():
            state = self._assigned.partitions.get(tp)
            if state is not None:
                _rewind(state, offset)


def _rewind(state: PartitionState, offset: int | None) -> None:
    """Seek back to ``offset`` and discard the fetched records. Do nothing if ``offset`` is None."""
    if offset is not None:
        epoch = state.position_epoch
        state.seek(offset, NO_EPOCH)
        state.base_epoch = epoch


def committable_offsets(
    what: Record[Any, Any] | Iterable[Record[Any, Any]] | Mapping[TopicPartition, int | OffsetAndMetadata],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return {partition: offset to commit} for records or offsets. Raises ClientError for other types."""
    if isinstance(what, Mapping):
        return checked_offsets(what)
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    is_one = isinstance(what, Record) or not isinstance(what, Iterable)
    for record in [what] if is_one else what:
        if not isinstance(record, Record):
            raise ClientError(
                f"{type(record).__name__} can't be committed",
                hint="pass a record, records, or {TopicPartition: next offset to read}",
            )
        tp = TopicPartition(record.topic, record.partition)
        if tp not in found or found[tp].offset <= record.offset:
            found[tp] = OffsetAndMetadata(record.offset + 1)
    return found
