"""Committed offsets: offsets in effect, and offsets in open transactions (R35).

Values stay packed until they are read, so loading a partition of a million offsets decodes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kafkalite.groups.record_codec import OffsetValue, parse_offset


class OffsetKey(NamedTuple):
    """The group and the partition of a committed offset."""

    group_id: str
    topic: str
    partition: int


class Offsets:
    """The offsets of one group that are in effect."""

    def __init__(self) -> None:
        self._packed: dict[str, dict[int, bytes]] = {}  # no topic without partitions

    def __bool__(self) -> bool:
        return bool(self._packed)

    def __len__(self) -> int:
        return sum(map(len, self._packed.values()))

    @property
    def topics(self) -> list[str]:
        return list(self._packed)

    def put(self, topic: str, partition: int, packed: bytes | None) -> None:
        """Set the packed value of an offset; None removes it."""
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
        """Return the committed offset of a partition, whichever incarnation of the topic it is for."""
        partitions = self._packed.get(topic)
        packed = partitions.get(partition) if partitions is not None else None
        return parse_offset(packed) if packed is not None else None

    def partitions(self, topic: str) -> list[int]:
        """Return the partitions of a topic that have an offset, sorted."""
        return sorted(self._packed.get(topic, ()))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (topic, partition) of every offset, sorted."""
        for topic in sorted(self._packed):
            for partition in sorted(self._packed[topic]):
                yield topic, partition

    def packed(self) -> dict[tuple[str, int], bytes]:
        """Return all offsets in their packed form."""
        return {(topic, partition): self._packed[topic][partition] for topic, partition in self}


class PendingOffsets:
    """Offsets in open transactions. They take effect in log order once the transaction's marker is
    written.

    The offset written last in the log wins, whether committed directly or in a transaction, and
    whichever marker comes first. Compaction and later readers use the same order.
    """

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[OffsetKey, tuple[int, bytes | None]]] = {}
        self._producers: dict[OffsetKey, set[int]] = {}  # the inverse mapping, without empty sets
        self._written_count = 0

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def add(self, producer_id: int, key: OffsetKey, packed: bytes | None) -> None:
        """Add an offset that was written in an open transaction."""
        self._written_count += 1
        self._by_producer.setdefault(producer_id, {})[key] = (self._written_count, packed)
        self._producers.setdefault(key, set()).add(producer_id)

    def is_pending(self, key: OffsetKey) -> bool:
        """Whether an open transaction may still change the committed offset of the partition (R35)."""
        return key in self._producers

    def overrule(self, key: OffsetKey) -> None:
        """Drop all pending offsets of the partition, because a direct commit or a removal follows them."""
        for producer_id in self._producers.pop(key, ()):
            self._forget(producer_id, key)

    def end(self, producer_id: int, *, is_commit: bool) -> list[tuple[OffsetKey, bytes | None]]:
        """Return the offsets that take effect now, because the producer's marker was written."""
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
        """Return the partitions with a pending offset of the group, sorted."""
        return sorted(key for key in self._producers if key.group_id == group_id)

    def state(self) -> dict[int, dict[OffsetKey, bytes | None]]:
        """Return all pending offsets by producer."""
        return {
            producer_id: {key: packed for key, (_, packed) in pending.items()}
            for producer_id, pending in self._by_producer.items()
        }
