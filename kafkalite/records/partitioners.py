"""Chooses the partition of a record if the caller does not specify it.

Unless the table states otherwise, a record with a key goes to the partition that Kafka's clients choose
(murmur2), so that programs of both kinds agree. The table describes the treatment of records without a key:

==============  ====================================================================================
``roundrobin``  the default: one partition until its batch closes, then the one with the fewest records; if
                several have equally few, the next of them in turn
``sticky``      one partition until its batch closes, then another at random (KIP-480)
``random``      a random partition for each record; keys are ignored
``timed``       one random partition until a batch closes after ``partitioner.switch.ms``, then another
``hash``        the partition of the empty key, so that these records share a partition
``ring``        as ``roundrobin``, but keys are placed on a hash ring, so that added partitions move few keys
a callable      ``(topic, key, value, partition_count)`` -> partition, or None for roundrobin
==============  ====================================================================================
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from kafkalite.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from kafkalite.rng import Rng

PartitionFunction = Callable[[str, bytes | None, bytes | None, int], int | None]

_MASK: Final = 0xFFFFFFFF
MURMUR2_SEED: Final = 0x9747B28C
MURMUR2_M: Final = 0x5BD1E995
MURMUR2_R: Final = 24

# Hashing in Python takes a microsecond or two and keys repeat, so hashes are cached: at most 32,768 hashes of
# keys of at most 64 bytes, about 5 MB.
_MAX_CACHED_KEY_BYTES: Final = 64
_CACHED_KEYS: Final = 32_768

# The points of a partition on the hash ring: with 128, shares of keys deviate by about a tenth.
_RING_BLOCKS: Final = 8
_RING_BLOCK: Final = struct.Struct(">16I")  # a SHA-512 digest
_RING_SEED: Final = struct.Struct(">II")


def murmur2(data: bytes) -> int:
    """Return the 32-bit hash of Kafka's clients (``Utils.murmur2``), signed as in Java."""
    length = len(data)
    words = length // 4
    h = MURMUR2_SEED ^ length
    for k in struct.unpack_from(f"<{words}I", data):
        k = k * MURMUR2_M & _MASK
        k = (k ^ k >> MURMUR2_R) * MURMUR2_M & _MASK
        h = h * MURMUR2_M & _MASK ^ k
    tail = data[words * 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * MURMUR2_M & _MASK
    h = (h ^ h >> 13) * MURMUR2_M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


@lru_cache(maxsize=_CACHED_KEYS)
def _cached_hash(key: bytes) -> int:
    return murmur2(key) & 0x7FFFFFFF


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for ``key``: 0 to partition_count - 1."""
    return _positive_hash(key) % partition_count


def _positive_hash(key: bytes) -> int:
    return _cached_hash(key) if len(key) <= _MAX_CACHED_KEY_BYTES else murmur2(key) & 0x7FFFFFFF


def partition_on_ring(key: bytes, partition_count: int) -> int:
    """Return the partition that owns the first point of the hash ring at or after the hash of ``key``. If
    there is no such point, the owner of the lowest point is returned.

    A partition has 128 points. For n from 0 to 7, the SHA-512 digest of (partition, n), as two big-endian
    uint32, gives 16 big-endian uint32; each of them, shifted right by one bit, is a point. The hash is
    ``murmur2(key) & 0x7FFFFFFF``. If partitions are added, the keys that they receive are the only ones that
    move.
    """
    points, owners = _ring(partition_count)
    index = bisect_left(points, _positive_hash(key))
    return owners[index if index < len(points) else 0]


@lru_cache(maxsize=64)
def _ring(partition_count: int) -> tuple[array[int], array[int]]:
    """Return (the points of the ring, sorted; the partition that owns each). If points of several partitions
    are equal, the lowest partition owns them."""
    packed = sorted(
        (word >> 1) << 32 | partition
        for partition in range(partition_count)
        for block in range(_RING_BLOCKS)
        for word in _RING_BLOCK.unpack(hashlib.sha512(_RING_SEED.pack(partition, block)).digest())
    )
    return array("I", [each >> 32 for each in packed]), array("I", [each & _MASK for each in packed])


class Partitioner(Protocol):
    def partition(
        self, topic: str, key: bytes | None, value: bytes | None, partition_count: int, /
    ) -> int | None:
        """Return a partition in [0, partition_count)."""
        ...

    def on_batch_closed(self, topic: str, partition: int, record_count: int, /) -> None:
        """Change to another partition if this partitioner fills one batch at a time. Called when the batch
        of ``record_count`` records for ``partition`` is closed."""
        return


class RoundRobinPerBatch:
    """Records without a key fill one batch after another.

    Each batch goes to the partition that has received the fewest records in such batches, so that the counts
    stay even although some batches are sent before they are full. Partitions with equal counts take turns.
    """

    def __init__(self) -> None:
        self._load: dict[str, list[tuple[int, int, int]]] = {}  # heaps of (record count, turn, partition)
        self._turns = count()

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        if key is not None:
            return partition_for_key(key, partition_count)
        load = self._load.get(topic, [])
        if len(load) != partition_count:
            load = self._load[topic] = self._resized(load, partition_count)
        return load[0][2]

    def on_batch_closed(self, topic: str, partition: int, record_count: int) -> None:
        """Choose the next partition if ``partition`` is the current one for records without a key."""
        load = self._load.get(topic)
        if load and load[0][2] == partition:
            heapq.heapreplace(load, (load[0][0] + record_count, next(self._turns), partition))

    def _resized(self, load: list[tuple[int, int, int]], partition_count: int) -> list[tuple[int, int, int]]:
        """Return ``load`` with an item for each of ``partition_count`` partitions. A new partition begins
        with the lowest record count in ``load``. If it began with 0, it would receive all records until it
        had as many as the other partitions."""
        lowest = load[0][0] if load else 0
        known = {partition for _, _, partition in load}
        new = (number for number in range(partition_count) if number not in known)
        resized = [one for one in load if one[2] < partition_count]
        resized += [(lowest, -1, number) for number in new]
        heapq.heapify(resized)
        return resized


class Ring(RoundRobinPerBatch):
    """Places keys on a hash ring (``partition_on_ring``), and records without a key as ``roundrobin``
    does."""

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        if key is not None:
            return partition_on_ring(key, partition_count)
        return super().partition(topic, key, value, partition_count)


class Sticky:
    """Records without a key fill one batch after another, each in a random partition (KIP-480)."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._current: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        if key is not None:
            return partition_for_key(key, partition_count)
        current = self._current.get(topic)
        if current is None or current >= partition_count:
            current = self._start(topic, partition_count)
        return current

    def on_batch_closed(self, topic: str, partition: int, record_count: int) -> None:
        """Choose another partition if ``partition`` is the current one for records without a key."""
        if self._current.get(topic) == partition:
            self._left[topic] = self._current.pop(topic)

    def _start(self, topic: str, partition_count: int) -> int:
        """Choose and return the partition of the next batches."""
        chosen = self._current[topic] = self._another(self._left.get(topic), partition_count)
        return chosen

    def _another(self, left: int | None, partition_count: int) -> int:
        """Return a random partition; not ``left``, unless it is the only one."""
        if left is None or left >= partition_count or partition_count == 1:
            return self._rng.randrange(partition_count)
        chosen = self._rng.randrange(partition_count - 1)
        return chosen + (chosen >= left)


class Timed(Sticky):
    """Records without a key stay in one random partition for at least ``switch_ms``. Another partition is
    chosen when a batch of this partition is closed after that time."""

    def __init__(self, rng: Rng, switch_ms: int, now_ms: Callable[[], int]) -> None:
        super().__init__(rng)
        self._switch_ms = switch_ms
        self._now_ms = now_ms
        self._until_ms: dict[str, int] = {}

    def on_batch_closed(self, topic: str, partition: int, record_count: int) -> None:
        if self._now_ms() >= self._until_ms.get(topic, 0):
            super().on_batch_closed(topic, partition, record_count)

    def _start(self, topic: str, partition_count: int) -> int:
        self._until_ms[topic] = self._now_ms() + self._switch_ms
        return super()._start(topic, partition_count)


class Random(Partitioner):
    """Each record goes to a random partition, whatever its key."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        return self._rng.randrange(partition_count)


class Hash(Partitioner):
    """Each record goes to the partition of its key's hash. A null key counts as an empty key."""

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        return partition_for_key(key or b"", partition_count)


class ByFunction:
    """The user's function chooses each record's partition. If it returns None, ``roundrobin`` chooses."""

    def __init__(self, function: PartitionFunction) -> None:
        self._function = function
        self._otherwise = RoundRobinPerBatch()

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        """Return the partition that the function chooses, or that of ``roundrobin`` if it returns None.
        Raises RecordError if the topic has no such partition."""
        chosen = self._function(topic, key, value, partition_count)
        if chosen is None:
            return self._otherwise.partition(topic, key, value, partition_count)
        if not isinstance(chosen, int) or not 0 <= chosen < partition_count:
            raise RecordError(
                f"the partitioner chose {chosen!r} for a record of {topic!r}",
                hint=f"it must return a whole number from 0 to {partition_count - 1}, or None",
            )
        return chosen

    def on_batch_closed(self, topic: str, partition: int, record_count: int) -> None:
        self._otherwise.on_batch_closed(topic, partition, record_count)


def make_partitioner(
    name: str | PartitionFunction, rng: Rng, *, switch_ms: int = 0, now_ms: Callable[[], int] = lambda: 0
) -> Partitioner:
    """Return the partitioner with this name, or one that calls this function. Raises ConfigError for an
    unknown name.

    ``switch_ms`` and ``now_ms``, which returns monotonic milliseconds, are used by ``timed``. If
    ``switch_ms`` is 0, ``timed`` is the same as ``sticky``.
    """
    if callable(name):
        return ByFunction(name)
    match name:
        case "roundrobin":
            return RoundRobinPerBatch()
        case "sticky":
            return Sticky(rng)
        case "random":
            return Random(rng)
        case "timed":
            return Timed(rng, switch_ms, now_ms)
        case "hash":
            return Hash()
        case "ring":
            return Ring()
    raise ConfigError(
        key="partitioner",
        value=name,
        allowed="one of roundrobin, sticky, random, timed, hash, ring, or a callable",
    )
