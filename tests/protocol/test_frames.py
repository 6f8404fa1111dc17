"""Framing: (frame, exact bytes) both ways, whole and byte by byte, and refused lengths."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.errors import LocalProtocolError, RemoteProtocolError
from kafkalite.limits import KIB, MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES, MIB
from kafkalite.protocol.frames import (
    BUFFER_GROWTH,
    FIRST_BUFFER_BYTES,
    MAX_FIRST_BUFFER_BYTES,
    STAGING_BYTES,
    Frame,
    FrameReader,
    encode_frame,
    untouched_buffer,
)

Feed = Callable[..., list[Frame]]

FULL = b"e" * (STAGING_BYTES - 8)

TABLE = [
    ("small, no payload", b"\x90", (), b"\0\0\0\x01" b"\0\0\0\0" b"\x90"),
    ("payload in one part", b"\x91\x01", (b"abc",), b"\0\0\0\x02" b"\0\0\0\x03" b"\x91\x01" b"abc"),
    ("payload in parts", b"\x90", (b"ab", bytearray(b"c"), memoryview(b"de")), b"\0\0\0\1\0\0\0\5\x90abcde"),
    ("payload beyond staging", b"\x90", (b"p" * 40_000,), b"\0\0\0\1\0\0\x9c\x40\x90" + b"p" * 40_000),
    ("envelope beyond staging", b"e" * 20_000, (b"p",), b"\0\0\x4e\x20\0\0\0\1" + b"e" * 20_000 + b"p"),
    ("both beyond staging", b"e" * 20_000, (b"p" * 20_000,), b"\0\0N \0\0N " + b"e" * 20_000 + b"p" * 20_000),
    ("fills staging exactly", FULL, (), struct.pack(">II", len(FULL), 0) + FULL),
    ("one beyond staging", FULL + b"e", (), struct.pack(">II", len(FULL) + 1, 0) + FULL + b"e"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("envelope", "parts", "wire"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
class TestTable:
    def test_encode(self, envelope: bytes, parts: tuple[Any, ...], wire: bytes) -> None:
        buffers = encode_frame(envelope, parts)
        assert b"".join(buffers) == wire
        assert all(sent is part for sent, part in zip(buffers[1:], parts, strict=True)), (
            "parts are not copied"
        )

    @pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 30])
    def test_decode(self, feed: Feed, envelope: bytes, parts: Any, wire: bytes, chunk: int) -> None:
        (frame,) = feed(FrameReader(), [wire], chunk)
        assert bytes(frame.envelope) == envelope
        assert bytes(frame.payload) == b"".join(parts)

    def test_every_truncation_is_mid_frame(
        self, feed: Feed, envelope: bytes, parts: Any, wire: bytes
    ) -> None:
        for cut in [*range(min(len(wire), 40)), len(wire) - 1]:
            reader = FrameReader()
            assert feed(reader, [wire[:cut]]) == []
            assert reader.is_mid_frame == (cut > 0)


def test_many_small_frames_in_one_read(feed: Feed) -> None:
    frames = [(bytes([0x90]) * (1 + i % 9), bytes([i]) * (i % 5)) for i in range(200)]
    wire = b"".join(b"".join(encode_frame(envelope, [payload])) for envelope, payload in frames)
    assert len(wire) < STAGING_BYTES
    reader = FrameReader()
    reader.get_buffer()[: len(wire)] = wire
    received = reader.buffer_updated(len(wire))
    assert [(bytes(f.envelope), bytes(f.payload)) for f in received] == frames
    assert not reader.is_mid_frame


@pytest.mark.parametrize("chunk", [1, 13, 4096, 1 << 30])
def test_a_stream_of_mixed_sizes_in_any_chunks(feed: Feed, chunk: int) -> None:
    sizes = [
        (1, 0),
        (700, 3),
        (5, STAGING_BYTES),
        (STAGING_BYTES, 1),
        (3, 60_000),
        (STAGING_BYTES - 9, 0),
        (2, 2),
    ]
    frames = [(bytes([i + 1]) * size, bytes([100 + i]) * payload) for i, (size, payload) in enumerate(sizes)]
    wire = [b"".join(encode_frame(envelope, [payload])) for envelope, payload in frames]
    reader = FrameReader()
    assert [(bytes(f.envelope), bytes(f.payload)) for f in feed(reader, wire, chunk)] == frames
    assert not reader.is_mid_frame


def test_a_large_payload_is_received_into_its_own_exact_buffer() -> None:
    reader = FrameReader(first_buffer_bytes=MAX_PAYLOAD_BYTES)
    header = struct.pack(">II", 1, 1 * MIB) + b"\x90"
    reader.get_buffer()[: len(header)] = header
    assert reader.buffer_updated(len(header)) == []
    target = reader.get_buffer()
    assert len(target) == 1 * MIB
    target[: 1 * MIB - 1] = b"x" * (1 * MIB - 1)
    assert reader.buffer_updated(1 * MIB - 1) == []
    assert len(reader.get_buffer()) == 1, "never more than the frame still needs"
    reader.get_buffer()[:1] = b"y"
    (frame,) = reader.buffer_updated(1)
    assert frame.payload.obj is target.obj, "no copy"
    assert frame.payload[-1] == ord("y")


def test_a_received_frame_is_never_overwritten(feed: Feed) -> None:
    """S17: the parts of a frame stay unchanged when later frames arrive in the same staging buffer."""
    reader = FrameReader()
    (first,) = feed(reader, encode_frame(b"one", [b"first"]))
    feed(reader, encode_frame(b"two", [b"other"]))
    assert bytes(first.envelope) == b"one"
    assert bytes(first.payload) == b"first"


def test_payloads_are_writable(feed: Feed) -> None:
    """The leader stamps offsets into a batch in the receive buffer."""
    for size in (4, 100_000):
        (frame,) = feed(FrameReader(), encode_frame(b"e", [b"x" * size]))
        frame.payload[:2] = b"zz"
        assert bytes(frame.payload[:3]) == b"zzx"


REFUSED = [
    ("no envelope", 0, 0, "envelope of 0 bytes"),
    ("envelope over its limit", 1001, 0, "envelope of 1001 bytes; allowed are 1 to 1000"),
    ("payload over its limit", 10, 2001, "payload of 2001 bytes; allowed are 0 to 2000"),
    ("negative envelope as an unsigned number", 2**32 - 1, 0, "envelope of 4294967295 bytes"),
    ("negative payload as an unsigned number", 1, 2**32 - 1, "payload of 4294967295 bytes"),
    ("largest signed", 2**31 - 1, 0, "envelope of 2147483647 bytes"),
]


@pytest.mark.parametrize(
    ("envelope", "payload", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
@pytest.mark.parametrize("chunk", [1, 100])
def test_lengths_are_checked_before_the_frame(
    feed: Feed, envelope: int, payload: int, reason: str, chunk: int
) -> None:
    """S1: a length outside its bounds is refused as soon as the eight bytes have arrived."""
    reader = FrameReader(max_envelope_bytes=1000, max_payload_bytes=2000)
    with pytest.raises(RemoteProtocolError, match=reason):
        feed(reader, [struct.pack(">II", envelope, payload)], chunk)


def test_limits_are_inclusive(feed: Feed) -> None:
    reader = FrameReader(max_envelope_bytes=10, max_payload_bytes=20)
    (frame,) = feed(reader, encode_frame(b"e" * 10, [b"p" * 20]))
    assert len(frame.payload) == 20


def test_limits_may_change_between_two_frames_of_one_read() -> None:
    reader = FrameReader(max_envelope_bytes=3, max_payload_bytes=0)
    wire = b"".join(encode_frame(b"one") + encode_frame(b"three", [b"p"]))
    reader.get_buffer()[: len(wire)] = wire
    reader.received(len(wire))
    assert reader.next_frame() is not None
    reader.max_envelope_bytes, reader.max_payload_bytes = 5, 1
    frame = reader.next_frame()
    assert frame is not None
    assert bytes(frame.envelope) == b"three"
    assert reader.next_frame() is None


@pytest.mark.parametrize(
    ("envelope", "parts", "reason"),
    [
        (bytes(MAX_ENVELOPE_BYTES + 1), (), "an envelope of"),
        (b"e", (memoryview(bytes(MAX_PAYLOAD_BYTES)), b"x"), "a payload of"),
    ],
)
def test_an_oversized_frame_is_not_sent(envelope: bytes, parts: Any, reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        encode_frame(envelope, parts)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 * KIB


def test_announced_but_unsent_payloads_cost_no_memory(feed: Feed) -> None:
    """S1, S3: ten peers announce 100 MiB each and send a few bytes of it."""
    before = _resident_bytes()
    readers = [FrameReader() for _ in range(10)]
    for reader in readers:
        feed(reader, [struct.pack(">II", 1, 100 * MIB) + b"\x90" + b"begun"])
        assert reader.held_bytes == FIRST_BUFFER_BYTES + 1
    assert _resident_bytes() - before < 1 * MIB


def test_s3_the_buffer_of_a_large_payload_grows_with_its_bytes() -> None:
    reader = FrameReader()
    payload = bytes(range(256)) * (4 * KIB + 1)
    wire = memoryview(struct.pack(">II", 1, len(payload)) + b"\x90" + payload)
    sent, frames = 0, []
    while sent < len(wire):
        room = reader.get_buffer()
        size = min(len(room), len(wire) - sent, 10_000)
        room[:size] = wire[sent : sent + size]
        sent += size
        assert reader.held_bytes <= max(BUFFER_GROWTH * sent, FIRST_BUFFER_BYTES) + 1
        frames += reader.buffer_updated(size)
    (frame,) = frames
    assert frame.payload == payload
    assert reader.held_bytes == 0


@pytest.mark.parametrize(
    ("sent", "first"),
    [(4 * KIB, FIRST_BUFFER_BYTES), (200 * KIB, 200 * KIB), (4 * MIB, MAX_FIRST_BUFFER_BYTES)],
)
def test_s3_the_first_buffer_is_at_most_the_size_of_a_part_that_was_sent(
    feed: Feed, sent: int, first: int
) -> None:
    """Buffers of later payloads need not grow, but an announcement alone costs no more than was sent once."""
    reader = FrameReader()
    for size in (sent, 1 * KIB):
        feed(reader, encode_frame(b"e", [bytes(size)]))
    feed(reader, [struct.pack(">II", 1, 100 * MIB) + b"\x90"])
    assert reader.held_bytes == first + 1


def test_an_untouched_buffer_is_writable_zeros() -> None:
    buffer = untouched_buffer(3)
    assert bytes(buffer) == b"\0\0\0"
    buffer[1] = 7
    assert bytes(buffer) == b"\0\7\0"
    assert not buffer.readonly
