"""Records of one partition that are acknowledged or fail together, from ``send`` to the response. Pure."""

# Tests: tests/client/test_accumulator.py

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Headers

# Upper estimate of a record's overhead: 8 timestamp, 4 + 4 column offsets, 2 validity bits, 1 for absent
# headers. Must not be too low, or a batch could exceed max.request.size.
RECORD_OVERHEAD_BYTES: Final = 18
HEADER_OVERHEAD_BYTES: Final = 12  # per record header: two length prefixes and an array mark
BATCH_OVERHEAD_BYTES: Final = 128  # the 61-byte header and the columns' length prefixes

Encoded = bytes | bytearray | memoryview

WHOLE_BATCH: Final = -1  # the index of listeners that wait for the batch, not for a record


class PendingBatch:
    """Records of one partition that are acknowledged or fail together.

    ``values``, ``timestamps`` and, if any, ``keys`` and ``headers`` have one entry per record while the
    batch is open. Invariant: ``size_bytes`` is never less than the records' size on the wire.
    """

    __slots__ = (
        "base_offset",
        "closed",
        "common_timestamp_ms",
        "deadline_ms",
        "done",
        "error",
        "headers",
        "is_plain",
        "keys",
        "limit_bytes",
        "limit_records",
        "linger_until_ms",
        "listeners",
        "log_append_time_ms",
        "observed",
        "owns_prebuilt",
        "partition",
        "prebuilt",
        "record_count",
        "reserved_bytes",
        "size_bytes",
        "timestamps",
        "topic",
        "values",
    )

    def __init__(self, topic: str, partition: int, *, limit_bytes: int, limit_records: int) -> None:
        self.topic = topic
        self.partition = partition
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int] = []
        #: Replaces ``timestamps`` if all records have the same (send_many, send_batch).
        self.common_timestamp_ms = NO_TIMESTAMP
        self.headers: list[Headers] | None = None
        self.is_plain = True  #: no record has headers yet
        self.prebuilt: Encoded | None = None
        self.owns_prebuilt = False  #: that buffer is not shared
        self.size_bytes = BATCH_OVERHEAD_BYTES
        self.limit_bytes = limit_bytes
        self.limit_records = limit_records
        self.reserved_bytes = 0
        self.record_count = 0  #: valid once closed
        self.linger_until_ms = 0
        self.deadline_ms = 0
        self.closed = False
        self.done = False
        self.base_offset = NO_OFFSET  #: valid once done without error; NO_OFFSET with acks=0
        self.log_append_time_ms = NO_TIMESTAMP
        self.error: Exception | None = None
        #: (index of the record or WHOLE_BATCH, callback). The batch only carries them.
        self.listeners: list[tuple[int, Callable[[], object]]] = []
        #: Indexes of the records of a failed batch whose error has been or will be seen.
        self.observed: set[int] = set()

    def __repr__(self) -> str:
        state = "open"
        if self.done:
            state = f"failed: {self.error}" if self.error else f"done at offset {self.base_offset}"
        elif self.closed:
            state = "closed"
        count = self.record_count if self.closed else len(self.values)
        return f"<PendingBatch {self.topic}-{self.partition}, {count} records, {state}>"

    def append(
        self, value: bytes | None, key: bytes | None, timestamp_ms: int, headers: Headers, size_bytes: int
    ) -> int:
        """Add one record of ``size_bytes`` and return its index. The caller has checked ``has_room``."""
        index = len(self.values)
        assert not self.closed, "a closed batch accepts no records"
        if key is not None and self.keys is None:
            self.keys = [None] * index
        if self.keys is not None:
            self.keys.append(key)
        if headers and self.headers is None:
            self.headers = [()] * index
            self.is_plain = False
        if self.headers is not None:
            self.headers.append(headers)
        self.values.append(value)
        self.timestamps.append(timestamp_ms)
        self.size_bytes += size_bytes
        return index

    def has_room(self, size_bytes: int) -> bool:
        """Whether a record of ``size_bytes`` fits. An empty batch takes any record."""
        count = len(self.values)
        return count == 0 or (self.size_bytes + size_bytes <= self.limit_bytes and count < self.limit_records)

    def timestamp_ms(self, index: int) -> int:
        """Return the record's timestamp in the log: the append time if the topic uses it, or its own."""
        if self.log_append_time_ms != NO_TIMESTAMP:
            return self.log_append_time_ms
        return self.timestamps[index] if self.timestamps else self.common_timestamp_ms

    def close(self) -> None:
        """Accept no more records. The limit becomes 0, so that the fast path needs no other check."""
        self.closed = True
        self.limit_records = 0
        self.record_count = len(self.values)

    def complete(self, base_offset: int, log_append_time_ms: int, error: Exception | None) -> None:
        """Record the result and drop the records, so that deliveries do not hold their memory."""
        assert not self.done, "a batch completes once"
        self.base_offset = base_offset
        self.log_append_time_ms = log_append_time_ms
        self.error = error
        self.done = True  # last, because another thread may read it
        if error is not None:
            self.observed.update(index for index, _ in self.listeners if index != WHOLE_BATCH)
        self.values = []
        self.keys = self.headers = self.prebuilt = None

    def unobserved_count(self) -> int:
        """Return how many records of a failed batch have an error that was not seen."""
        return self.record_count - len(self.observed)

    def observe_all(self) -> None:
        self.observed.update(range(self.record_count))


def record_size(value: bytes | None, key: bytes | None, headers: Headers = ()) -> int:
    """Return an upper estimate of one record's bytes on the wire, uncompressed."""
    size = RECORD_OVERHEAD_BYTES
    if value is not None:
        size += len(value)
    if key is not None:
        size += len(key)
    for name, content in headers:
        # A name of n characters is at most 4n bytes of UTF-8.
        size += HEADER_OVERHEAD_BYTES + (len(name) if name.isascii() else 4 * len(name))
        size += len(content) if content is not None else 0
    return size
