"""Committed offsets: those in effect, and those of transactions that are still open (R35).

Values stay packed until somebody asks for them: loading a partition of a million offsets decodes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kafkalite.groups.record_codec import OffsetValue, parse_offset


class OffsetKey(NamedTuple):
    """What an offset is committed for."""

    group_id: str
    topic: str
    partition: int


class Offsets:
    """The offsets in effect of one group."""

    def __init__(self) -> None:
        self._packed: dict[str, dict[int, bytes]] = {}  # no topic without a partition

    def __bool__(self) -> bool:
        return bool(self._packed)

    def __len__(self) -> int:
        return sum(map(len, self._packed.values()))

    @property
    def topics(self) -> list[str]:
        return list(self._packed)

    def put(self, topic: str, partition: int, packed: bytes | None) -> None:
        """Set an offset's packed value; None removes it."""
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
        """The offset committed for a partition, of whatever incarnation of the topic."""
        partitions = self._packed.get(topic)
        packed = partitions.get(partition) if partitions is not None else None
        return parse_offset(packed) if packed is not None else None

    def partitions(self, topic: str) -> list[int]:
        """The partitions of a topic that have one, in order."""
        return sorted(self._packed.get(topic, ()))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(topic, partition) of every offset, in order."""
        for topic in sorted(self._packed):
            for partition in sorted(self._packed[topic]):
                yield topic, partition

    def packed(self) -> dict[tuple[str, int], bytes]:
        """All of them as they stand in the log."""
        return {(topic, partition): self._packed[topic][partition] for topic, partition in self}


class PendingOffsets:
    """Offsets of open transactions. They take effect with the marker, in the order of the log.

    What counts is the order in which the *offsets* were written, as compaction and a later reader see it: a
    plain commit, or one of another transaction, that stands behind a pending offset overrules it, whichever
    marker comes first.
    """

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[OffsetKey, tuple[int, bytes | None]]] = {}
        self._producers: dict[OffsetKey, set[int]] = {}  # the other way round; no empty set
        self._written_count = 0

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def add(self, producer_id: int, key: OffsetKey, packed: bytes | None) -> None:
        """An offset was written in an open transaction."""
        self._written_count += 1
        self._by_producer.setdefault(producer_id, {})[key] = (self._written_count, packed)
        self._producers.setdefault(key, set()).add(producer_id)

    def is_pending(self, key: OffsetKey) -> bool:
        """Whether an open transaction may yet change what is committed for the partition (R35)."""
        return key in self._producers

    def overrule(self, key: OffsetKey) -> None:
        """A plain offset, or its removal, was written behind everything pending for the partition."""
        for producer_id in self._producers.pop(key, ()):
            self._forget(producer_id, key)

    def end(self, producer_id: int, *, is_commit: bool) -> list[tuple[OffsetKey, bytes | None]]:
        """The producer's marker was written: what takes effect now."""
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
        """The partitions for which the group has one, in order."""
        return sorted(key for key in self._producers if key.group_id == group_id)

    def state(self) -> dict[int, dict[OffsetKey, bytes | None]]:
        """Everything pending by producer."""
        return {
            producer_id: {key: packed for key, (_, packed) in pending.items()}
            for producer_id, pending in self._by_producer.items()
        }
