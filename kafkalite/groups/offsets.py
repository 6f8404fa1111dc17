"""Stores committed offsets: those in effect, and those in open transactions (R35).

Values stay encoded until they are read, so replaying a million offsets decodes none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kafkalite.groups.record_codec import OFFSET, OffsetValue, parse


class OffsetKey(NamedTuple):
    """The group and partition of a committed offset."""

    group_id: str
    topic: str
    partition: int


class Offsets:
    """The committed offsets of one group that are in effect."""

    def __init__(self) -> None:
        self._packed: dict[str, dict[int, bytes]] = {}  # by topic and partition; no inner dict is empty

    def __bool__(self) -> bool:
        return bool(self._packed)

    def __len__(self) -> int:
        return sum(map(len, self._packed.values()))

    @property
    def topics(self) -> list[str]:
        return list(self._packed)

    def put(self, topic: str, partition: int, packed: bytes | None) -> None:
        """Store the encoded offset of a partition, or remove it if ``packed`` is None."""
        partitions = self._packed.get(topic)
        if packed is not None:
            if partitions is None:
                self._packed[topic] = {partition: packed}
            else:
                partitions[partition] = packed
        elif partitions is not None:
            partitions.pop(partition, None)
            if not partitions:
                del self._packed[topic]

    def get(self, topic: str, partition: int) -> OffsetValue | None:
        """Return the committed offset of a partition, or None. The caller must check that the offset's topic
        id is current."""
        partitions = self._packed.get(topic)
        packed = partitions.get(partition) if partitions is not None else None
        value: OffsetValue | None = parse(OFFSET, packed)[0] if packed is not None else None
        return value

    def partitions(self, topic: str) -> list[int]:
        """Return the partitions of a topic that have a committed offset, sorted."""
        return sorted(self._packed.get(topic, ()))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (topic, partition) of every offset, sorted."""
        for topic in sorted(self._packed):
            for partition in sorted(self._packed[topic]):
                yield topic, partition


class PendingOffsets:
    """Offsets in open transactions. They take effect when the marker of their transaction is written.

    If a partition's offset is committed several times, directly or in transactions, the commit that was
    appended last takes effect, regardless of the order of the markers. Compaction keeps the same commit.
    """

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[OffsetKey, tuple[int, bytes | None]]] = {}
        self._producers: dict[OffsetKey, set[int]] = {}  # the inverse of ``_by_producer``; no set is empty
        self._written_count = 0

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def add(self, producer_id: int, key: OffsetKey, packed: bytes | None) -> None:
        """Add an offset, or its removal, that was written in the producer's open transaction."""
        self._written_count += 1
        self._by_producer.setdefault(producer_id, {})[key] = (self._written_count, packed)
        self._producers.setdefault(key, set()).add(producer_id)

    def is_pending(self, key: OffsetKey) -> bool:
        """Whether an open transaction may still change the committed offset of this key (R35)."""
        return key in self._producers

    def overrule(self, key: OffsetKey) -> None:
        """Drop all pending offsets of this key, because a later direct commit or removal replaces them."""
        for producer_id in self._producers.pop(key, ()):
            self._forget(producer_id, key)

    def end(self, producer_id: int, *, is_commit: bool) -> list[tuple[OffsetKey, bytes | None]]:
        """End the producer's transaction. Return (key, encoded offset) of each offset that takes effect.

        An encoded offset of None removes the committed offset. The list is empty after an abort.
        """
        effective: list[tuple[OffsetKey, bytes | None]] = []
        for key, (order, packed) in self._by_producer.pop(producer_id, {}).items():
            producers = self._producers[key]
            producers.discard(producer_id)
            if is_commit:
                effective.append((key, packed))
                for other in [p for p in producers if self._by_producer[p][key][0] < order]:
                    producers.discard(other)
                    self._forget(other, key)
            if not producers:
                del self._producers[key]
        return effective

    def _forget(self, producer_id: int, key: OffsetKey) -> None:
        pending = self._by_producer[producer_id]
        del pending[key]
        if not pending:
            del self._by_producer[producer_id]

    def keys_of(self, group_id: str) -> list[OffsetKey]:
        """Return the group's keys that have a pending offset, sorted."""
        return sorted(key for key in self._producers if key.group_id == group_id)
