"""Batches that readers could not unpack are refused before they are appended (S22)."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable

import pytest

from kafkalite.errors import (
    BatchTooLargeError,
    CorruptBatchError,
    KafkaliteError,
    UnsupportedForMessageFormatError,
)
from kafkalite.limits import MAX_DECOMPRESSED_BYTES, MAX_RECORDS_PER_BATCH
from kafkalite.records import readable
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.columns import check_header_count, decode_timestamps
from kafkalite.records.compression import compress
from kafkalite.records.header import COLUMN_CODEC_SHIFT, COLUMNAR, HEADER_BYTES, Codec, check
from kafkalite.records.readable import check_readable

MakeBatch = Callable[..., bytearray]

NULLS = b"\x94" + b"\xc0" * 4


def checked(batch: bytes | bytearray) -> None:
    check_readable(memoryview(batch), check(batch))


SHAPES = {
    "one": ([b"v"], None, 1, None),
    "empty value": ([b""], None, 1, None),
    "key": ([b"v" * 300], [b"k"], 1, None),
    "many": ([b"v" * n for n in range(50)], [b"k%d" % n for n in range(50)], 1, None),
    "large": ([b"v" * 40_000] * 9, None, 1, None),
    "timestamps": ([b"a", b"b", b"c"], None, [1, 2, 3], None),
    "wide timestamps": ([b"a", b"b"], [b"k", b"l"], [1, 2**40], None),
    "nulls": ([None, b"b"], [b"k", None], 1, None),
    "tombstone": ([None], [b"k"], 1, None),
    "headers": ([b"a", b"b"], None, 1, [[("h", b"x")], []]),
    "nothing": ([None], None, 1, None),
}


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_of_builders_are_readable(shape: str, codec: Codec) -> None:
    values, keys, timestamps, headers = SHAPES[shape]
    checked(build_batch(values, keys, timestamps, headers=headers, codec=codec))


@pytest.mark.parametrize("shape", ["one", "empty value", "key", "many", "large", "timestamps"])
def test_ordinary_batches_take_the_short_check(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, keys, timestamps, headers = SHAPES[shape]
    monkeypatch.setattr(readable, "_check_any", None)
    if shape != "timestamps":
        checked(build_batch(values, keys, timestamps, headers=headers))
        return
    checked(build_batch(values, keys, timestamps))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_short_check_accepts_only_what_a_reader_can_locate(shape: str, batch_of_body: MakeBatch) -> None:
    """With any damage the result is that of a reader, and no other error."""
    values, keys, timestamps, headers = SHAPES[shape]
    batch = build_batch(values, keys, timestamps, headers=headers)
    body, count = bytes(batch[HEADER_BYTES:]), len(values)
    rng = random.Random(shape)
    for _ in range(400):
        changed = bytearray(body[: rng.randrange(len(body) + 1)] if rng.random() < 0.3 else body)
        for _ in range(rng.randrange(3)):
            if changed:
                changed[rng.randrange(min(len(changed), 24))] = rng.choice(
                    [0xC0, 0xC4, 0xC5, 0xC6, 0x93, 0, 255]
                )
        claimed = rng.choice([count, count, count + 1, 60])
        damaged = batch_of_body(bytes(changed), count=claimed)
        try:
            view = RecordBatch(damaged).view()
            if view.headers is not None:
                check_header_count(view.headers, claimed)
            if view.timestamp_deltas is not None:
                decode_timestamps(view.timestamp_deltas, claimed, 0)
        except CorruptBatchError:
            with pytest.raises(CorruptBatchError):
                checked(damaged)
        else:
            checked(damaged)


@pytest.mark.parametrize(
    ("base", "kind", "deltas", "is_valid"),
    [
        (1_000, "q", (0, 2**63 - 1), False),
        (1_000, "q", (0, -1_002), False),
        (1_000, "q", (0, 2**62), True),
        (1_000, "i", (0, -1_002), False),
        (1_000, "i", (0, -1_001), True),
        (2**63 - 1, "i", (0, 1), False),
        (2**63 - 1, "i", (0, 0), True),
        (-1, "i", (0, -1), False),
        (2**40, "i", (0, -(2**31)), True),
    ],
)
def test_timestamps_beyond_their_range_are_refused(
    base: int, kind: str, deltas: tuple[int, int], is_valid: bool, batch_of_body: MakeBatch
) -> None:
    """As at the reader, in batches with and without headers."""
    column = struct.pack(f"<2{kind}", *deltas)
    values = bytes(build_batch([b"a", b"b"])[HEADER_BYTES + 3 : -1])
    for headers in (b"\xc0", b"\x92\x90\x90"):
        body = b"\x94" + bytes([0xC4, len(column)]) + column + b"\xc0" + values + headers
        batch = batch_of_body(body, count=2, base_timestamp_ms=base)
        if is_valid:
            checked(batch)
            assert RecordBatch(batch).columns().timestamps == [base + delta for delta in deltas]
        else:
            with pytest.raises(CorruptBatchError, match="timestamps from"):
                checked(batch)


def test_rows_are_refused(batch_of_body: MakeBatch) -> None:
    for attributes in (0, 1, 4):
        with pytest.raises(UnsupportedForMessageFormatError, match="Kafka's rows"):
            checked(batch_of_body(b"rows", attributes=attributes))


@pytest.mark.parametrize("codec", Codec)
def test_a_few_bytes_cannot_declare_a_million_records(codec: Codec, batch_of_body: MakeBatch) -> None:
    attributes = COLUMNAR | codec << COLUMN_CODEC_SHIFT
    body = bytes(compress(codec, NULLS))
    for count in (MAX_RECORDS_PER_BATCH, 300_000):
        if codec is Codec.LZ4 and count <= HEADER_BYTES + 256 * len(body):
            continue
        with pytest.raises(CorruptBatchError, match=f"declares {count} records"):
            checked(batch_of_body(body, count=count, attributes=attributes))
    checked(batch_of_body(body, count=66, attributes=attributes))


@pytest.mark.parametrize("count", [1, 66, 67, 1000])
@pytest.mark.parametrize("codec", Codec)
def test_records_without_any_content_are_built_readable(count: int, codec: Codec) -> None:
    batch = build_batch([None] * count, codec=codec)
    checked(batch)
    assert RecordBatch(batch).columns().values == [None] * count


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
def test_bombs_are_refused_by_their_declared_size(codec: Codec, batch_of_body: MakeBatch) -> None:
    """Frames without a declared size are left to the readers, which unpack at most 16 MiB (S4)."""
    bomb = bytes(compress(codec, bytes(MAX_DECOMPRESSED_BYTES + 1)))
    batch = batch_of_body(bomb, attributes=COLUMNAR | codec << COLUMN_CODEC_SHIFT)
    started_s = time.process_time()
    if codec is Codec.LZ4:
        checked(batch)
    else:
        with pytest.raises(BatchTooLargeError):
            checked(batch)
    assert time.process_time() - started_s < 0.1


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.NONE])
@pytest.mark.parametrize("body", [b"", b"\xff" * 40, struct.pack("<IQ", 1, 2)])
def test_other_bytes_than_the_codec_s_are_refused(
    codec: Codec, body: bytes, batch_of_body: MakeBatch
) -> None:
    if codec is Codec.SNAPPY and body and body[0] != 0xFF:
        body = b"\x80" * 5  # its only mark is a length
    with pytest.raises(KafkaliteError) as raised:
        checked(batch_of_body(body, attributes=COLUMNAR | codec << COLUMN_CODEC_SHIFT))
    assert isinstance(raised.value, CorruptBatchError | BatchTooLargeError)
