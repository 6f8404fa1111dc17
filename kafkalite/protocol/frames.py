"""Framing: the boundaries of messages in a stream. Converts bytes to frames, without sockets.

::

    0        4        8              8 + envelope          8 + envelope + payload
    +--------+--------+--------------+---------------------+
    |envelope|payload | envelope     | payload             |
    |u32 be  |u32 be  | msgpack      | raw record batches  |
    +--------+--------+--------------+---------------------+

Small frames are received in a staging buffer of fixed size, many per read. An envelope that does not fit
there, or a payload that is not complete there, gets a buffer of its own, into which the transport reads. This
buffer grows as the bytes arrive, to exactly the size of the envelope or payload, so a payload is checked and
written to disk without another copy.

Both lengths are checked as soon as the header has arrived (S1). Because the buffer grows, a peer that
announces 100 MiB and sends nothing costs only the first size of the buffer (S3): ``first_buffer_bytes``, by
default 64 KiB, or the size of the largest envelope or payload that the peer has completed, up to 1,028 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from struct import Struct as Layout
from typing import Final

from kafkalite.errors import TLS_HINT, LocalProtocolError, RemoteProtocolError
from kafkalite.limits import FRAME_HEADER_BYTES, KIB, MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES, MIB
from kafkalite.protocol.codec import Buffer
from kafkalite.protocol.structs import Struct

# The size of the staging buffer: about two hundred requests of the usual 80 bytes. If a payload gets its own
# buffer, the bytes of it that arrived with the header are copied, at most this many.
STAGING_BYTES: Final = 16 * KIB
# The first size of the buffer of a larger part, and the factor by which it grows. The buffers of later parts
# begin with the size of the largest complete part, which saves the copies of growing.
FIRST_BUFFER_BYTES: Final = 64 * KIB
MAX_FIRST_BUFFER_BYTES: Final = MIB + 4 * KIB  # for batches of 1 MiB and their headers
BUFFER_GROWTH: Final = 4

_HEADER: Final = Layout(">II")
#: The beginnings of a TLS alert and of a TLS handshake: as lengths they exceed every limit.
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")
_new: Final = tuple.__new__  # half the time of a struct's constructor
_NO_PAYLOAD: Final = memoryview(bytearray())

assert _HEADER.size == FRAME_HEADER_BYTES


class Frame(Struct):
    """The two parts of a frame, each in its own memory, which later frames do not overwrite (S17)."""

    envelope: Buffer
    payload: memoryview  #: writable


def encode_frame(envelope: bytes, payload_parts: Iterable[Buffer] = ()) -> list[Buffer]:
    """Return the buffers to send in order: one with header and envelope, then the payload parts.

    Raises LocalProtocolError if a length exceeds its limit.
    """
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise LocalProtocolError(f"an envelope of {len(envelope)} bytes; the limit is {MAX_ENVELOPE_BYTES}")
    if not payload_parts:
        return [_HEADER.pack(len(envelope), 0) + envelope]
    parts = list(payload_parts)
    payload_bytes = 0
    for part in parts:  # sum() of a generator takes longer for the usual single part
        payload_bytes += part.nbytes if type(part) is memoryview else len(part)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"a payload of {payload_bytes} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return [_HEADER.pack(len(envelope), payload_bytes) + envelope, *parts]


class _Lender(BytesIO):
    """A BytesIO whose ``close`` does nothing: closing a BytesIO raises BufferError while a view exists."""

    __slots__ = ()

    def close(self) -> None:
        pass


def untouched_buffer(size_bytes: int) -> memoryview:
    """Return a writable buffer of zeros. A large one occupies memory only where it has been written.

    ``bytearray(n)`` writes all its zeros. ``bytes(n)`` is allocated by calloc: a large block consists of
    pages that the kernel supplies at the first write. BytesIO makes such a ``bytes`` object writable.
    """
    return _Lender(bytes(size_bytes)).getbuffer()


class FrameReader:
    """Converts received bytes to frames.

    For each read, call ``get_buffer()``, fill its beginning, report the number of bytes with ``received(n)``,
    and call ``next_frame()`` until it returns None. ``buffer_updated`` performs the last two steps.

    The limits are inclusive and may be changed between two frames. After a RemoteProtocolError, the frame
    boundary is lost: close the connection.

    Invariant: after ``next_frame`` has returned None, there are two cases. Either the staging buffer is
    empty, and the target, a buffer for one envelope or payload, is being filled. Or there is no target, and
    the staging buffer has room for another byte; it is empty or holds the beginning of a frame.
    """

    __slots__ = (
        "_end",
        "_envelope",
        "_filled",
        "_first_buffer_bytes",
        "_payload_bytes",
        "_staging",
        "_staging_view",
        "_start",
        "_target",
        "_target_bytes",
        "held_bytes",
        "max_envelope_bytes",
        "max_payload_bytes",
    )

    def __init__(
        self,
        *,
        max_envelope_bytes: int = MAX_ENVELOPE_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        staging_bytes: int = STAGING_BYTES,
        first_buffer_bytes: int = FIRST_BUFFER_BYTES,
    ) -> None:
        """``first_buffer_bytes`` is the first size of the buffer of a large envelope or payload."""
        assert staging_bytes >= FRAME_HEADER_BYTES
        self.max_envelope_bytes = max_envelope_bytes
        self.max_payload_bytes = max_payload_bytes
        self._staging = bytearray(staging_bytes)  # slices are copies
        self._staging_view = memoryview(self._staging)
        self._start = 0
        self._end = 0
        self._first_buffer_bytes = max(first_buffer_bytes, staging_bytes)
        # The buffer that is being filled: for an envelope while _envelope is None, else for a payload.
        self._target: memoryview | None = None
        self._target_bytes = 0  # the size to which it grows
        self._filled = 0
        #: The size of the buffers of an unfinished frame that does not fit the staging buffer.
        self.held_bytes = 0
        self._envelope: Buffer | None = None
        self._payload_bytes = 0

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._target is not None or self._end > self._start

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Return a writable buffer of at least one byte for the next bytes of the stream."""
        if self._target is not None:
            return self._target[self._filled :]
        return self._staging_view[self._end :]

    def buffer_updated(self, byte_count: int) -> list[Frame]:
        """Return the frames completed by ``byte_count`` bytes in the last ``get_buffer()``.

        Raises RemoteProtocolError for an invalid frame; frames completed by the same bytes are lost, too.
        """
        self.received(byte_count)
        return list(iter(self.next_frame, None))

    def received(self, byte_count: int) -> None:
        if self._target is not None:
            self._filled += byte_count
        else:
            self._end += byte_count

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None if more bytes are needed. Raises RemoteProtocolError."""
        if self._target is not None:
            return self._finish_target()
        start = self._start + FRAME_HEADER_BYTES
        if start > self._end:
            if self._start == self._end:
                self._start = self._end = 0
            else:
                self._make_room(FRAME_HEADER_BYTES)
            return None
        envelope_bytes, payload_bytes = _HEADER.unpack_from(self._staging, self._start)
        if not 0 < envelope_bytes <= self.max_envelope_bytes or payload_bytes > self.max_payload_bytes:
            raise self._refusal(envelope_bytes, payload_bytes)
        end = start + envelope_bytes
        if end <= self._end:
            self._start = end
            return self._take_payload(self._staging[start:end], payload_bytes)
        if FRAME_HEADER_BYTES + envelope_bytes <= len(self._staging):
            self._make_room(FRAME_HEADER_BYTES + envelope_bytes)
            return None
        self._start = start
        self._payload_bytes = payload_bytes
        self._fill_target(envelope_bytes)
        return None

    def _refusal(self, envelope_bytes: int, payload_bytes: int) -> RemoteProtocolError:
        if not 0 < envelope_bytes <= self.max_envelope_bytes:
            begin = _HEADER.pack(envelope_bytes, payload_bytes)
            if begin.startswith(_TLS_RECORDS):
                return RemoteProtocolError("the peer speaks TLS, and this side plain text", hint=TLS_HINT)
            if begin.isascii() and begin.decode("ascii").isprintable():
                spoken = "HTTP" if b"HTTP" in begin or b" /" in begin else "another protocol"
                return RemoteProtocolError(
                    f"the peer speaks {spoken}: it sent {begin.decode()!r} instead of a frame"
                )
            return RemoteProtocolError(
                f"a frame announces an envelope of {envelope_bytes} bytes; "
                f"allowed are 1 to {self.max_envelope_bytes}"
            )
        return RemoteProtocolError(
            f"a frame announces a payload of {payload_bytes} bytes; allowed are 0 to {self.max_payload_bytes}"
        )

    def _take_payload(self, envelope: Buffer, payload_bytes: int) -> Frame | None:
        if payload_bytes == 0:
            return _new(Frame, (envelope, _NO_PAYLOAD))
        end = self._start + payload_bytes
        if end <= self._end:
            payload = memoryview(self._staging[self._start : end])
            self._start = end
            return _new(Frame, (envelope, payload))
        self._envelope = envelope
        self._fill_target(payload_bytes)
        self.held_bytes += len(envelope)
        return None

    def _fill_target(self, size_bytes: int) -> None:
        """Begin a target buffer for a part of ``size_bytes``, and move the staged bytes into it."""
        self._target_bytes = size_bytes
        self.held_bytes = min(size_bytes, self._first_buffer_bytes)
        self._target = untouched_buffer(self.held_bytes)
        self._filled = self._end - self._start
        self._target[: self._filled] = self._staging_view[self._start : self._end]
        self._start = self._end = 0

    def abandon(self) -> None:
        """Free the buffers of an unfinished frame. The stream can't be continued."""
        self._target = self._envelope = None
        self._start = self._end = self.held_bytes = 0

    def _finish_target(self) -> Frame | None:
        assert self._target is not None
        if self._filled < len(self._target):
            return None
        if self._filled < self._target_bytes:
            grown = untouched_buffer(min(self._target_bytes, self._filled * BUFFER_GROWTH))
            grown[: self._filled] = self._target
            self.held_bytes += len(grown) - self._filled
            self._target = grown
            return None
        whole, self._target, self.held_bytes = self._target, None, 0
        self._first_buffer_bytes = max(self._first_buffer_bytes, min(self._filled, MAX_FIRST_BUFFER_BYTES))
        if self._envelope is None:
            return self._take_payload(whole, self._payload_bytes)
        frame = Frame(self._envelope, whole)
        self._envelope = None
        return frame

    def _make_room(self, size_bytes: int) -> None:
        """Ensure that the staging buffer can hold ``size_bytes`` from the start of the unfinished frame."""
        if self._start + size_bytes > len(self._staging):
            kept = self._end - self._start
            self._staging_view[:kept] = self._staging_view[self._start : self._end]
            self._start, self._end = 0, kept
