"""Detects records with a unique id that were produced or returned several times.

A producer without idempotence, or an application that sends again after a restart, writes the same event
twice. A restarted consumer receives some records twice. An id in each record reveals both cases. Only the
last ``capacity`` ids of each partition are remembered, so duplicates of older ids are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

from kafkalite.errors import ClientError
from kafkalite.model import Record, TopicPartition

UniqueId = Callable[[Record], bytes | None]
"""Returns a record's unique id, or None if it has none. A record without an id is never a duplicate."""

_DIGEST_BYTES = 16  # with 10**12 ids, the probability of a collision is about 10**-14


def header_id(name: str) -> UniqueId:
    """Return a function that returns the value of a record's last header called ``name``."""

    def find(record: Record) -> bytes | None:
        for header, value in reversed(record.headers):
            if header == name:
                return value
        return None

    return find


def key_id(record: Record) -> bytes | None:
    """Return the record's key, for topics in which each key is produced only once."""
    return record.key


class Deduplicator:
    """Detects records that were seen before.

    ::

        seen = Deduplicator(header_id("event-id"))
        async for record in consumer:
            if not seen.is_repeated(record):
                process(record)
                seen.add(record)

    Ids are remembered per partition, so duplicates are detected only in the same partition. Use ``dump`` and
    ``load`` to keep a partition's ids across restarts. If the ids are stored in the same transaction as the
    results, a record takes effect only once, as long as its id is remembered. Call ``forget`` for partitions
    that are assigned to another member.
    """

    def __init__(self, unique_id: UniqueId, *, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ClientError(f"capacity is {capacity}, but must be at least 1")
        self._unique_id = unique_id
        self._capacity = capacity
        self._seen: dict[TopicPartition, dict[bytes, None]] = {}  # in the order of arrival

    def __repr__(self) -> str:
        count = sum(map(len, self._seen.values()))
        return f"<Deduplicator, {count} ids of {len(self._seen)} partitions>"

    def is_repeated(self, record: Record) -> bool:
        """Whether the record's id is remembered for its partition. False for a record without an id."""
        digest = self._digest(record)
        if digest is None:
            return False
        return digest in self._seen.get(TopicPartition(record.topic, record.partition), ())

    def add(self, record: Record) -> bool:
        """Remember the record's id, and return whether it was new. A record without an id is always new."""
        digest = self._digest(record)
        if digest is None:
            return True
        seen = self._seen.setdefault(TopicPartition(record.topic, record.partition), {})
        if digest in seen:
            return False
        seen[digest] = None
        if len(seen) > self._capacity:
            del seen[next(iter(seen))]
        return True

    def new(self, records: Iterable[Record]) -> list[Record]:
        """Add each record, in order, and return those whose ids were new and those without an id."""
        return [record for record in records if self.add(record)]

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the ids of these partitions."""
        for tp in partitions:
            self._seen.pop(tp, None)

    def dump(self, tp: TopicPartition) -> bytes:
        """Return the remembered ids of a partition, as digests of 16 bytes each, for ``load``."""
        return b"".join(self._seen.get(tp, ()))

    def load(self, tp: TopicPartition, dumped: bytes) -> None:
        """Replace a partition's ids with ``dumped``, a result of ``dump``.

        Raises ClientError if its length is not a multiple of 16.
        """
        if len(dumped) % _DIGEST_BYTES:
            raise ClientError(f"{len(dumped)} bytes are not a dump of a Deduplicator")
        digests = [dumped[at : at + _DIGEST_BYTES] for at in range(0, len(dumped), _DIGEST_BYTES)]
        self._seen[tp] = dict.fromkeys(digests[-self._capacity :])

    def _digest(self, record: Record) -> bytes | None:
        unique_id = self._unique_id(record)
        return None if unique_id is None else blake2b(unique_id, digest_size=_DIGEST_BYTES).digest()
