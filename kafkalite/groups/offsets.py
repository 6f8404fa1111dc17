"""Stores committed offsets: those in effect, and those in open transactions (R35).

Values stay encoded until they are read, so replaying a million offsets decodes no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kafkalite.groups.record_codec import OFFSET, OffsetValue, parse


class OffsetKey(NamedTuple):
    """The group and partition of a committed offset."""

    group_id: str
    topic: str
    partition: int


class Offsets:
    """The committed offsets of one group that are in effect, and the number of those in open transactions.

    Invariant: ``_staged_beyond`` is the sum, over all partitions, of the number of open transactions with an
    offset of the partition, less one if an offset of the partition is in effect, but not below 0. So
    ``used`` is also the largest number of offsets that can be in effect when all transactions have ended.
    """

    def __init__(self) -> None:
        self._packed: dict[str, dict[int, bytes]] = {}  # by topic and partition; no inner dict is empty
        #: The number of open transactions with an offset of each (topic, partition), without zeros.
        self._staged: dict[tuple[str, int], int] = {}
        self._staged_beyond = 0

    def __bool__(self) -> bool:
        """Whether the group has offsets, in effect or in open transactions."""
        return bool(self._packed or self._staged)

    def __len__(self) -> int:
        """Return the number of offsets that are in effect."""
        return sum(map(len, self._packed.values()))

    @property
    def topics(self) -> list[str]:
        return list(self._packed)

    @property
    def used(self) -> int:
        """The part of group.max.offsets that is used (S26).

        A partition counts once for each open transaction with its offset, and at least once if it has a
        committed offset.
        """
        return len(self) + self._staged_beyond

    @property
    def staged(self) -> list[tuple[str, int]]:
        """(topic, partition) of each offset in an open transaction, sorted."""
        return sorted(self._staged)

    def adds(self, topic: str, partition: int) -> bool:
        """Whether ``used`` grows if another transaction stages an offset of the partition."""
        return self._staged.get((topic, partition), 0) >= self._is_in_effect(topic, partition)

    def stage(self, topic: str, partition: int, change: int) -> None:
        """Add ``change`` to the number of open transactions with an offset of the partition."""
        before = self._staged.pop((topic, partition), 0)
        if before + change:
            self._staged[topic, partition] = before + change
        in_effect = self._is_in_effect(topic, partition)
        self._staged_beyond += max(0, before + change - in_effect) - max(0, before - in_effect)

    def _is_in_effect(self, topic: str, partition: int) -> bool:
        return partition in self._packed.get(topic, ())

    def put(self, topic: str, partition: int, packed: bytes | None) -> None:
        """Store the encoded offset of a partition, or remove it if ``packed`` is None."""
        if self._staged.get((topic, partition)):
            self._staged_beyond += self._is_in_effect(topic, partition) - (packed is not None)
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
    """Offsets in open transactions. They take effect when their transaction is committed.

    If several commits of one partition's offset take effect, directly or in transactions, the one that was
    appended to the log last remains, regardless of the order in which the transactions end. Compaction keeps
    the same one.
    """

    def __init__(self, on_change: Callable[[OffsetKey, int], None] = lambda _key, _change: None) -> None:
        """``on_change`` is called when the number of open transactions with an offset of a key changes."""
        self._on_change = on_change
        self._by_producer: dict[int, dict[OffsetKey, tuple[int, bytes | None]]] = {}
        self._producers: dict[OffsetKey, set[int]] = {}  # the inverse of ``_by_producer``; no set is empty
        self._written_count = 0

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def add(self, producer_id: int, key: OffsetKey, packed: bytes | None) -> None:
        """Add an offset, or its removal, that was written in the producer's open transaction."""
        self._written_count += 1
        self._by_producer.setdefault(producer_id, {})[key] = (self._written_count, packed)
        producers = self._producers.setdefault(key, set())
        if producer_id not in producers:
            producers.add(producer_id)
            self._on_change(key, 1)

    def is_pending(self, key: OffsetKey) -> bool:
        """Whether an open transaction may still change the committed offset of this key (R35)."""
        return key in self._producers

    def has(self, producer_id: int, key: OffsetKey) -> bool:
        """Whether the producer's open transaction has an offset of this key."""
        return producer_id in self._producers.get(key, ())

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
            self._on_change(key, -1)
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
        self._on_change(key, -1)
