"""Framing: where one message ends and the next begins. Bytes in, frames out; no sockets.

::

    0        4        8              8 + envelope          8 + envelope + payload
    +--------+--------+--------------+---------------------+
    |envelope|payload | envelope     | payload             |
    |u32 be  |u32 be  | msgpack      | raw record batches  |
    +--------+--------+--------------+---------------------+

A frame is received in at most two places. Small ones gather in a staging buffer of fixed size, many per read.
What does not fit there gets a buffer of exactly its own size, and the transport is handed that buffer, so
a payload arrives where it will be checked, and written to disk from, without a copy in Python.

Both lengths are judged before a byte of the frame is kept. The exact buffers are zero pages until bytes
arrive: a peer that announces 100 MiB and sends nothing costs address space, not memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from struct import Struct as Layout
from typing import Final

from kafkalite.errors import LocalProtocolError, RemoteProtocolError
from kafkalite.limits import FRAME_HEADER_BYTES, KIB, MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES
from kafkalite.protocol.codec import Buffer
from kafkalite.protocol.structs import Struct

# Two hundred requests of the usual 80 bytes. Of a payload that goes on in its own buffer, what came with
# the header is copied: never more than this.
STAGING_BYTES: Final = 16 * KIB

_HEADER: Final = Layout(">II")
_NO_PAYLOAD: Final = memoryview(bytearray())

assert _HEADER.size == FRAME_HEADER_BYTES


class Frame(Struct):
    """One frame's two parts, each in memory of its own: nothing received later overwrites them."""

    envelope: Buffer
    payload: memoryview  #: writable


def encode_frame(envelope: bytes, payload_parts: Iterable[Buffer] = ()) -> list[Buffer]:
    """The buffers to send in order: one of header and envelope, then the parts as they came.

    Raises LocalProtocolError when a length is over its limit.
    """
    parts = list(payload_parts)
    payload_bytes = sum(part.nbytes if type(part) is memoryview else len(part) for part in parts)
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise LocalProtocolError(f"an envelope of {len(envelope)} bytes; the limit is {MAX_ENVELOPE_BYTES}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise LocalProtocolError(f"a payload of {payload_bytes} bytes; the limit is {MAX_PAYLOAD_BYTES}")
    return [_HEADER.pack(len(envelope), payload_bytes) + envelope, *parts]


class _Lender(BytesIO):
    """Lends its bytes out. Nothing to close: from Python 3.13 on, a collector that meets one in a cycle
    would close it while it is lent out, and report the refusal."""

    __slots__ = ()

    def close(self) -> None:
        pass


def untouched_buffer(size_bytes: int) -> memoryview:
    """A writable buffer of zeros that takes memory only as it is written to.

    ``bytearray(n)`` writes its zeros; ``bytes(n)`` comes from calloc, whose large blocks are pages that
    the kernel supplies at the first write. BytesIO lends such a ``bytes`` out for writing.
    """
    return _Lender(bytes(size_bytes)).getbuffer()


class FrameReader:
    """Turns what a transport receives into frames.

    For each read: take ``get_buffer()``, fill a beginning of it, tell how much with ``received(n)``, then
    call ``next_frame()`` until it returns None. ``buffer_updated`` does the last two at once.

    The limits are inclusive, and may be changed between two frames. After a RemoteProtocolError the stream
    has no frame boundary any more: close the connection.

    Invariant: once ``next_frame`` returned None, either a target is being filled and the staging buffer is
    empty, or the staging buffer holds the beginning of a frame and has room for one more byte of it.
    """

    __slots__ = (
        "_end",
        "_envelope",
        "_filled",
        "_payload_bytes",
        "_staging",
        "_start",
        "_target",
        "max_envelope_bytes",
        "max_payload_bytes",
    )

    def __init__(
        self,
        *,
        max_envelope_bytes: int = MAX_ENVELOPE_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        assert staging_bytes >= FRAME_HEADER_BYTES
        self.max_envelope_bytes = max_envelope_bytes
        self.max_payload_bytes = max_payload_bytes
        self._staging = memoryview(bytearray(staging_bytes))
        self._start = 0
        self._end = 0
        # The exactly sized buffer being filled: of an envelope while _envelope is None, else of a payload.
        self._target: memoryview | None = None
        self._filled = 0
        self._envelope: Buffer | None = None
        self._payload_bytes = 0

    @property
    def is_mid_frame(self) -> bool:
        """Whether an end of the stream now would cut a frame off."""
        return self._target is not None or self._end > self._start

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Where the next bytes of the stream belong: writable, at least one byte long."""
        if self._target is not None:
            return self._target[self._filled :]
        return self._staging[self._end :]

    def buffer_updated(self, byte_count: int) -> list[Frame]:
        """``byte_count`` bytes were written to the last ``get_buffer()``; the frames they complete.

        Raises RemoteProtocolError; the frames completed before the offending one are lost with it.
        """
        self.received(byte_count)
        frames = []
        while (frame := self.next_frame()) is not None:
            frames.append(frame)
        return frames

    def received(self, byte_count: int) -> None:
        if self._target is not None:
            self._filled += byte_count
        else:
            self._end += byte_count

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None when more bytes are needed. Raises RemoteProtocolError."""
        if self._target is not None:
            return self._finish_target()
        start = self._start + FRAME_HEADER_BYTES
        if start > self._end:
            self._make_room(FRAME_HEADER_BYTES)
            return None
        envelope_bytes, payload_bytes = _HEADER.unpack_from(self._staging, self._start)
        self._judge(envelope_bytes, payload_bytes)
        end = start + envelope_bytes
        if end <= self._end:
            self._start = end
            return self._take_payload(bytes(self._staging[start:end]), payload_bytes)
        if FRAME_HEADER_BYTES + envelope_bytes <= len(self._staging):
            self._make_room(FRAME_HEADER_BYTES + envelope_bytes)
            return None
        self._start = start
        self._payload_bytes = payload_bytes
        self._fill_target(envelope_bytes)
        return None

    def _judge(self, envelope_bytes: int, payload_bytes: int) -> None:
        if not 0 < envelope_bytes <= self.max_envelope_bytes:
            raise RemoteProtocolError(
                f"a frame announces an envelope of {envelope_bytes} bytes; "
                f"allowed are 1 to {self.max_envelope_bytes}"
            )
        if payload_bytes > self.max_payload_bytes:
            raise RemoteProtocolError(
                f"a frame announces a payload of {payload_bytes} bytes; "
                f"allowed are 0 to {self.max_payload_bytes}"
            )

    def _take_payload(self, envelope: Buffer, payload_bytes: int) -> Frame | None:
        if payload_bytes == 0:
            return Frame(envelope, _NO_PAYLOAD)
        end = self._start + payload_bytes
        if end <= self._end:
            payload = memoryview(bytearray(self._staging[self._start : end]))
            self._start = end
            return Frame(envelope, payload)
        self._envelope = envelope
        self._fill_target(payload_bytes)
        return None

    def _fill_target(self, size_bytes: int) -> None:
        """Begin a buffer of that size with what the staging buffer holds of it, which is less."""
        self._target = untouched_buffer(size_bytes)
        self._filled = self._end - self._start
        self._target[: self._filled] = self._staging[self._start : self._end]
        self._start = self._end = 0

    def _finish_target(self) -> Frame | None:
        assert self._target is not None
        if self._filled < len(self._target):
            return None
        whole, self._target = self._target, None
        if self._envelope is None:
            return self._take_payload(whole, self._payload_bytes)
        frame = Frame(self._envelope, whole)
        self._envelope = None
        return frame

    def _make_room(self, size_bytes: int) -> None:
        """Let the staging buffer hold ``size_bytes`` from the start of the unfinished frame."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size_bytes > len(self._staging):
            kept = self._end - self._start
            self._staging[:kept] = self._staging[self._start : self._end]
            self._start, self._end = 0, kept
