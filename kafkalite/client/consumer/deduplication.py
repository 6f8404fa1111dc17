"""Records with a unique id, each processed once, though it was produced or given more than once.

A producer without idempotence, or an application that sends again after its own restart, puts the same event
into the log twice; a consumer that starts again is given some records twice. Both look the same to whoever
knows the events' ids. What is known is bounded: the last ``capacity`` ids of each partition. A repetition
that comes later than that is not recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

from kafkalite.errors import ClientError
from kafkalite.model import Record, TopicPartition

UniqueId = Callable[[Record], bytes | None]
"""A record's unique id, or None where it has none; such a record is never a repetition."""

_DIGEST_BYTES = 16  # two of 10**12 ids are alike with a chance of one in 10**14


def header_id(name: str) -> UniqueId:
    """The value of a header; of the last one of that name."""

    def find(record: Record) -> bytes | None:
        for header, value in reversed(record.headers):
            if header == name:
                return value
        return None

    return find


def key_id(record: Record) -> bytes | None:
    """The record's key: where each key is produced once."""
    return record.key


class Deduplicator:
    """Tells the records that were seen before.

    ::

        seen = Deduplicator(header_id("event-id"))
        async for record in consumer:
            if not seen.is_repeated(record):
                process(record)
                seen.add(record)

    Ids are remembered per partition, for equal ids go to the same one by their key. ``dump`` and ``load``
    carry what is known of a partition through a restart: kept with the results, in one transaction of theirs,
    each record takes effect exactly once. ``forget`` what went to another member.
    """

    def __init__(self, unique_id: UniqueId, *, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ClientError(f"capacity is {capacity}, but must be at least 1")
        self._unique_id = unique_id
        self._capacity = capacity
        self._seen: dict[TopicPartition, dict[bytes, None]] = {}  # in the order of their coming

    def __repr__(self) -> str:
        count = sum(map(len, self._seen.values()))
        return f"<Deduplicator, {count} ids of {len(self._seen)} partitions>"

    def is_repeated(self, record: Record) -> bool:
        """Whether a record with this one's id was added before."""
        digest = self._digest(record)
        if digest is None:
            return False
        return digest in self._seen.get(TopicPartition(record.topic, record.partition), ())

    def add(self, record: Record) -> bool:
        """Remember the record's id: it is processed. Whether it was new; a record without an id always is."""
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
        """Those of ``records`` that were not seen before, each id once; they are remembered."""
        return [record for record in records if self.add(record)]

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop what is known of these."""
        for tp in partitions:
            self._seen.pop(tp, None)

    def dump(self, tp: TopicPartition) -> bytes:
        """What is known of a partition, 16 bytes an id, to be given to ``load``."""
        return b"".join(self._seen.get(tp, ()))

    def load(self, tp: TopicPartition, dumped: bytes) -> None:
        """Know of a partition what ``dump`` gave, and nothing else. Raises ClientError for other bytes."""
        if len(dumped) % _DIGEST_BYTES:
            raise ClientError(f"{len(dumped)} bytes are no dump of a Deduplicator")
        digests = [dumped[at : at + _DIGEST_BYTES] for at in range(0, len(dumped), _DIGEST_BYTES)]
        self._seen[tp] = dict.fromkeys(digests[-self._capacity :])

    def _digest(self, record: Record) -> bytes | None:
        unique_id = self._unique_id(record)
        return None if unique_id is None else blake2b(unique_id, digest_size=_DIGEST_BYTES).digest()
