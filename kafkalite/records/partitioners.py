"""Chooses the partition of a record if the caller does not specify it.

A key goes to the partition that Kafka's clients choose (murmur2), so that programs of both kinds agree.
Partitioners differ in their treatment of records without a key:

==============  ====================================================================================
``roundrobin``  the default: one partition until its batch closes, then the next in turn
``sticky``      one partition until its batch closes, then another at random (KIP-480)
``random``      a random partition for each record; keys are ignored
``hash``        murmur2; a missing key counts as an empty key, so these records share a partition
a callable      ``(topic, key, value, partition_count)`` -> partition, or None for roundrobin
==============  ====================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
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
    hashed = _cached_hash(key) if len(key) <= _MAX_CACHED_KEY_BYTES else murmur2(key) & 0x7FFFFFFF
    return hashed % partition_count


class Partitioner(Protocol):
    def partition(
        self, topic: str, key: bytes | None, value: bytes | None, partition_count: int, /
    ) -> int | None:
        """Return a partition in [0, partition_count), or None to leave the choice to the caller."""
        ...

    def on_batch_closed(self, topic: str, partition: int, /) -> None:
        """Change to another partition if this partitioner fills one batch at a time. Called when the batch
        for ``partition`` is closed."""
        return


class RoundRobinPerBatch:
    """Records without a key fill one batch after another. The batches go to the partitions in turn."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        if key is not None:
            return partition_for_key(key, partition_count)
        current = self._current.get(topic, partition_count)
        if current >= partition_count:
            current = self._current[topic] = 0
        return current

    def on_batch_closed(self, topic: str, partition: int) -> None:
        """Choose the next partition if ``partition`` is the current one for records without a key."""
        if self._current.get(topic) == partition:
            self._current[topic] = partition + 1


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
            current = self._another(self._left.get(topic), partition_count)
            self._current[topic] = current
        return current

    def on_batch_closed(self, topic: str, partition: int) -> None:
        """Choose another partition if ``partition`` is the current one for records without a key."""
        if self._current.get(topic) == partition:
            self._left[topic] = self._current.pop(topic)

    def _another(self, left: int | None, partition_count: int) -> int:
        """Return a random partition; not ``left``, unless it is the only one."""
        if left is None or left >= partition_count or partition_count == 1:
            return self._rng.randrange(partition_count)
        chosen = self._rng.randrange(partition_count - 1)
        return chosen + (chosen >= left)


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
        """Return the partition that the function chooses. Raises RecordError if the topic has no such
        partition."""
        chosen = self._function(topic, key, value, partition_count)
        if chosen is None:
            return self._otherwise.partition(topic, key, value, partition_count)
        if not isinstance(chosen, int) or not 0 <= chosen < partition_count:
            raise RecordError(
                f"the partitioner chose {chosen!r} for a record of {topic!r}",
                hint=f"it must return a whole number from 0 to {partition_count - 1}, or None",
            )
        return chosen

    def on_batch_closed(self, topic: str, partition: int) -> None:
        self._otherwise.on_batch_closed(topic, partition)


def make_partitioner(name: str | PartitionFunction, rng: Rng) -> Partitioner:
    """Return the partitioner with this name, or one that calls this function. Raises ConfigError."""
    if callable(name):
        return ByFunction(name)
    match name:
        case "roundrobin":
            return RoundRobinPerBatch()
        case "sticky":
            return Sticky(rng)
        case "random":
            return Random(rng)
        case "hash":
            return Hash()
    raise ConfigError(
        key="partitioner", value=name, allowed="one of roundrobin, sticky, random, hash, or a callable"
    )
