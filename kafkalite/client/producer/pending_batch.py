"""Holds records of one partition that are acknowledged or fail together. Pure."""

# Tests: tests/client/test_accumulator.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kafkalite.client.cluster.signal import Waker
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, Headers, RecordHeaders

# Upper bound of a record's overhead: 8 bytes timestamp, 4 + 4 column offsets, 2 validity bits, 1 byte for
# absent headers. If it were too low, a batch could exceed max.request.size.
RECORD_OVERHEAD_BYTES: Final = 18
HEADER_OVERHEAD_BYTES: Final = 12  # per record header: two length prefixes and an array mark
BATCH_OVERHEAD_BYTES: Final = 128  # the 61-byte header and the columns' length prefixes

Encoded = bytes | bytearray | memoryview

WHOLE_BATCH: Final = -1  # the index of listeners that wait for the whole batch


@dataclass(slots=True, eq=False, repr=False)
class PendingBatch:
    """Records of one partition that are acknowledged or fail together.

    While the batch is open, ``values``, ``timestamps`` and, if not None, ``keys`` and ``headers`` have one
    entry per record. Invariant: ``size_bytes`` is at least the size of the uncompressed record batch, or of
    ``prebuilt``.
    """

    topic: str
    partition: int
    limit_bytes: int = 0
    limit_records: int = 0
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    timestamps: list[int] = field(default_factory=list)
    #: Replaces ``timestamps`` in a prebuilt batch: one for all records, or one for each.
    prebuilt_timestamps_ms: int | Sequence[int] = NO_TIMESTAMP
    headers: list[Headers] | None = None
    is_plain: bool = True  #: no record has headers yet
    prebuilt: Encoded | None = None
    owns_prebuilt: bool = False  #: whether the buffer of ``prebuilt`` is not shared
    size_bytes: int = BATCH_OVERHEAD_BYTES
    reserved_bytes: int = 0
    record_count: int = 0  #: valid after ``close``
    linger_until_ms: int = 0
    deadline_ms: int = 0
    closed: bool = False
    done: bool = False
    base_offset: int = NO_OFFSET  #: valid when done without an error; NO_OFFSET with acks=0
    log_append_time_ms: int = NO_TIMESTAMP
    error: Exception | None = None
    #: (index of the record or WHOLE_BATCH, callback). The sender calls them when the batch is done.
    listeners: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    #: Indexes of the records of a failed batch whose error was seen or will be passed to a listener.
    observed: set[int] = field(default_factory=set)

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
        """Add one record of ``size_bytes`` and return its index. Callers must check ``has_room`` first."""
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
        """Whether a record of ``size_bytes`` fits. An empty batch accepts any record."""
        count = len(self.values)
        return count == 0 or (self.size_bytes + size_bytes <= self.limit_bytes and count < self.limit_records)

    def timestamp_ms(self, index: int) -> int:
        """Return the log append time if the broker has responded with one, or else the record's own
        timestamp.

        For every record of a batch that was passed to ``send_batch`` or ``queue_batch``, the own timestamp is
        the base timestamp of the batch.
        """
        if self.log_append_time_ms != NO_TIMESTAMP:
            return self.log_append_time_ms
        if self.timestamps:
            return self.timestamps[index]
        stamps = self.prebuilt_timestamps_ms
        return stamps if isinstance(stamps, int) else stamps[index]

    def close(self) -> None:
        """Accept no more records. Sets the record limit to 0, so that the fast path needs no other check."""
        self.closed = True
        self.limit_records = 0
        self.record_count = len(self.values)

    def complete(self, base_offset: int, log_append_time_ms: int, error: Exception | None) -> None:
        """Record the result. Drop keys, values and headers, so that deliveries do not keep their memory."""
        assert not self.done, "a batch completes once"
        self.base_offset = base_offset
        self.log_append_time_ms = log_append_time_ms
        self.error = error
        self.done = True  # set last, because another thread may read it
        if error is not None:
            self.observed.update(
                index for index, listener in self.listeners if index != WHOLE_BATCH and _is_live(listener)
            )
        self.values = []
        self.keys = self.headers = self.prebuilt = None

    def unobserved_count(self) -> int:
        """Return the number of records of a failed batch whose error was neither seen nor passed to a
        listener."""
        return self.record_count - len(self.observed)

    def observe(self, index: int = WHOLE_BATCH) -> None:
        """Mark the error as seen for the record at ``index``, or for all records."""
        self.observed.update(range(self.record_count) if index == WHOLE_BATCH else (index,))


def _is_live(listener: Callable[[], object]) -> bool:
    """Whether the listener will see the error: it is not the wait of a task that was cancelled."""
    return not (isinstance(listener, Waker) and listener.waiter.cancelled())


def record_size(value: bytes | None, key: bytes | None, headers: RecordHeaders = ()) -> int:
    """Return an upper bound of one record's size on the wire in bytes, uncompressed."""
    size = RECORD_OVERHEAD_BYTES
    if value is not None:
        size += len(value)
    if key is not None:
        size += len(key)
    for name, content in headers:
        # A text of n characters is at most 4n bytes of UTF-8.
        size += HEADER_OVERHEAD_BYTES + (len(name) if name.isascii() else 4 * len(name))
        if content is not None:
            size += len(content) if not isinstance(content, str) or content.isascii() else 4 * len(content)
    return size
