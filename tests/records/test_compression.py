"""Every codec both ways; bombs and damage are refused at little cost."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import random
import time
import zlib
from typing import Any

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import BatchTooLargeError, ConfigError, CorruptBatchError, RecordError
from kafkalite.limits import KIB, MAX_DECOMPRESSED_BYTES, MIB
from kafkalite.records import compression
from kafkalite.records.compression import check_level, compress, decompress
from kafkalite.records.header import Codec

REAL = [codec for codec in Codec if codec is not Codec.NONE]


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size", [0, 1, 60, 4096, 100_000, 3 * MIB])
@pytest.mark.parametrize("kind", ["zeros", "text", "noise"])
def test_there_and_back(codec: Codec, size: int, kind: str) -> None:
    data = {
        "zeros": bytes(size),
        "text": (b"GET /index.html 200 " * (size // 20 + 1))[:size],
        "noise": random.Random(size).randbytes(size),
    }[kind]
    packed = compress(codec, data)
    assert bytes(decompress(codec, packed, max(size, 1))) == data
    assert bytes(decompress(codec, memoryview(bytes(packed)).toreadonly(), 4 * MIB)) == data
    if size > 1000 and kind != "noise" and codec is not Codec.NONE:
        assert len(packed) < size / 2


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(REAL), st.binary(max_size=3000), st.integers(1, 50))
def test_there_and_back_for_anything(codec: Codec, data: bytes, times: int) -> None:
    assert bytes(decompress(codec, compress(codec, data * times), MIB)) == data * times


@pytest.mark.parametrize("codec", REAL)
def test_the_limit_is_inclusive(codec: Codec) -> None:
    data = os.urandom(100) * 1000
    packed = compress(codec, data)
    assert len(decompress(codec, packed, len(data))) == len(data)
    with pytest.raises(BatchTooLargeError, match="unpack to more than 99999 bytes"):
        decompress(codec, packed, len(data) - 1)


@functools.cache
def _bomb(codec: Codec) -> bytes:
    """At most 1 MiB that unpack to far more than the limit."""
    zeros = bytes(16 * MIB)
    if codec is Codec.GZIP:
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        return b"".join([*(packer.compress(zeros) for _ in range(14)), packer.flush()])
    if codec is Codec.SNAPPY:
        return bytes(cramjam.snappy.compress_raw(bytes(22 * MIB)))
    if codec is Codec.LZ4:
        packer = cramjam.lz4.Compressor(1, content_checksum=False, block_linked=True)
        for _ in range(15):
            packer.compress(zeros)
        return bytes(packer.finish())
    return _zstd_blocks(window=0x88, blocks=MIB // 4 - 2)


def _zstd_blocks(*, window: int, blocks: int) -> bytes:
    """RFC 8878: a frame without a content size, of blocks that each repeat one byte 128 KiB times."""
    block = (1 << 1 | 128 * KIB << 3).to_bytes(3, "little") + b"a"
    last = (1 | 1 << 1 | 128 * KIB << 3).to_bytes(3, "little") + b"a"
    return b"\x28\xb5\x2f\xfd" + bytes((0, window)) + block * (blocks - 1) + last


def _resident_bytes() -> int:
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM"))
    return int(peak.split()[1]) * KIB


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


@pytest.mark.parametrize("codec", REAL)
def test_a_bomb_costs_little_memory(codec: Codec) -> None:
    bomb = _bomb(codec)
    assert len(bomb) <= 1.1 * MIB
    try:
        _reset_peak()
    except OSError:
        pytest.skip("this kernel does not let a process reset its peak of memory")
    before = _resident_bytes()
    with pytest.raises(BatchTooLargeError):
        decompress(codec, bomb, MAX_DECOMPRESSED_BYTES)
    # The output, a window that is filled no further than the output, and the decoder's own state.
    assert _resident_bytes() - before < 2 * MAX_DECOMPRESSED_BYTES + MIB


@pytest.mark.parametrize("codec", REAL)
def test_a_bomb_is_refused_within_a_tenth_of_a_second_of_cpu_time(codec: Codec) -> None:
    bomb = _bomb(codec)
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        with pytest.raises(BatchTooLargeError):
            decompress(codec, bomb, MAX_DECOMPRESSED_BYTES)
        best = min(best, time.process_time() - start)
    assert best < 0.1


def test_zstd_without_a_content_size_is_unpacked_into_growing_buffers() -> None:
    frame = _zstd_blocks(window=0x40, blocks=20)
    assert decompress(Codec.ZSTD, frame, MAX_DECOMPRESSED_BYTES) == b"a" * 20 * 128 * KIB
    with pytest.raises(BatchTooLargeError):
        decompress(Codec.ZSTD, frame, 20 * 128 * KIB - 1)


def test_zstd_with_an_enormous_window_is_refused() -> None:
    with pytest.raises(CorruptBatchError, match="too much memory"):
        decompress(Codec.ZSTD, _zstd_blocks(window=0xA8, blocks=2), MAX_DECOMPRESSED_BYTES)


@pytest.mark.parametrize(
    ("head", "declared"),
    [
        (b"\x20\x05", 5),  # single segment, 1 byte
        (b"\x60\x00\x01", 512),  # single segment, 2 bytes, 256 more
        (b"\x40\x58\x00\x01", 512),  # a window before it
        (b"\xa1\xff\x07\x00\x00\x00", 7),  # a dictionary id of 1 byte before 4 bytes
        (b"\xe3\xff\xff\xff\xff\x07\x00\x00\x00\x00\x00\x00\x00", 7),  # of 4 before 8
        (b"\x00\x58", None),
    ],
)
def test_the_content_size_of_a_zstd_frame_is_found(head: bytes, declared: int | None) -> None:
    assert compression._zstd_content_bytes(b"\x28\xb5\x2f\xfd" + head) == declared


def test_no_zstd_frame_has_no_content_size() -> None:
    assert compression._zstd_content_bytes(b"") is None
    assert compression._zstd_content_bytes(b"something else") is None


@pytest.mark.parametrize("codec", [Codec.SNAPPY, Codec.ZSTD])
def test_an_impossible_declared_size_allocates_nothing(codec: Codec) -> None:
    promise = {
        Codec.SNAPPY: b"\xff\xff\xff\x07" + b"abc",
        Codec.ZSTD: b"\x28\xb5\x2f\xfd\xa0" + (15 * MIB).to_bytes(4, "little") + b"abc",
    }[codec]
    with pytest.raises(CorruptBatchError, match="cannot unpack to"):
        decompress(codec, promise, MAX_DECOMPRESSED_BYTES)


@pytest.mark.parametrize("codec", REAL)
def test_damage_is_a_named_error(codec: Codec) -> None:
    packed = bytes(compress(codec, b"some text that repeats, " * 200))
    for damaged in (b"", b"garbage" * 20, packed[:-1], packed[: len(packed) // 2], packed[3:]):
        with pytest.raises(CorruptBatchError, match=f"valid {codec}|cannot unpack to"):
            decompress(codec, damaged, MIB)


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_gzip_of_about_a_piece_of_output(size: int) -> None:
    assert decompress(Codec.GZIP, compress(Codec.GZIP, bytes(size)), 4 * MIB) == bytes(size)


def test_bytes_long_after_the_gzip_member_are_refused() -> None:
    with pytest.raises(CorruptBatchError, match="does not end where the batch ends"):
        decompress(Codec.GZIP, bytes(compress(Codec.GZIP, b"text")).ljust(MIB, b"\0"), MIB)


def test_bytes_after_the_gzip_member_are_refused() -> None:
    with pytest.raises(CorruptBatchError, match="does not end where the batch ends"):
        decompress(Codec.GZIP, bytes(compress(Codec.GZIP, b"text")) + b"more", MIB)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from(REAL), st.data())
def test_flipped_bytes_are_refused_or_harmless(codec: Codec, data: st.DataObject) -> None:
    packed = bytearray(compress(codec, b"some text that repeats, " * 40 + bytes(range(256))))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptBatchError, BatchTooLargeError):
        assert len(decompress(codec, packed, 64 * KIB)) <= 64 * KIB


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from(REAL), st.binary(max_size=300))
def test_random_bytes_are_refused_or_harmless(codec: Codec, data: bytes) -> None:
    heads = {Codec.GZIP: b"\x1f\x8b\x08\0", Codec.LZ4: b"\x04\x22\x4d\x18", Codec.ZSTD: b"\x28\xb5\x2f\xfd"}
    for attempt in (data, heads.get(codec, b"") + data):
        with contextlib.suppress(CorruptBatchError, BatchTooLargeError):
            assert len(decompress(codec, attempt, 64 * KIB)) <= 64 * KIB


@pytest.mark.parametrize(
    ("codec", "level"),
    [(Codec.GZIP, 1), (Codec.GZIP, 9), (Codec.LZ4, 12), (Codec.ZSTD, -7), (Codec.ZSTD, 22)],
)
def test_levels(codec: Codec, level: int) -> None:
    data = b"level " * 1000
    assert bytes(decompress(codec, compress(codec, data, level), MIB)) == data


@pytest.mark.parametrize(
    ("codec", "level", "message"),
    [
        (Codec.GZIP, 10, "compression.gzip.level is 10, but must be a whole number from 1 to 9"),
        (Codec.LZ4, 0, "compression.lz4.level is 0"),
        (Codec.ZSTD, 23, "compression.zstd.level is 23"),
        (Codec.SNAPPY, 1, "snappy has no levels"),
        (Codec.NONE, 1, "none has no levels"),
    ],
)
def test_a_level_out_of_range_is_refused(codec: Codec, level: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_level(codec, level)
    with pytest.raises(ConfigError, match=message):
        compress(codec, b"", level)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_cramjam(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "cramjam":
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    compression._cramjam.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without_cramjam)
    with pytest.raises(RecordError, match=r"cramjam, which is not installed .*kafkalite\[compression\]"):
        compress(Codec.LZ4, b"data")
    assert bytes(decompress(Codec.GZIP, compress(Codec.GZIP, b"data"), 100)) == b"data"
    compression._cramjam.cache_clear()
