"""Properties: batches against a slow, obvious model of the format, and damaged bytes against the errors."""

from __future__ import annotations

import contextlib
import itertools
import struct
from typing import Any

import crc32c
import msgpack
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import BatchTooLargeError, CorruptBatchError, RecordError
from kafkalite.records.batch import RecordBatch, iter_batches
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import Codec, check, seal

relaxed = settings(derandomize=True, deadline=None)

maybe_bytes = st.none() | st.binary(max_size=20)
record_headers = st.lists(st.tuples(st.text(max_size=4), maybe_bytes), max_size=3)
timestamps = st.integers(-1, 2**63 - 1) | st.integers(1_700_000_000_000, 1_700_000_100_000)
records = st.tuples(maybe_bytes, maybe_bytes, timestamps, record_headers)
batches = st.lists(records, min_size=1, max_size=40) | st.lists(
    st.tuples(st.binary(min_size=3, max_size=3), st.none(), st.just(7), st.just([])), min_size=1, max_size=40
)


def _model_column(values: list[bytes | None]) -> Any:
    if all(value is None for value in values):
        return None
    offsets, data, bits = [0], b"", 0
    for i, value in enumerate(values):
        data += value or b""
        offsets.append(len(data))
        bits |= (value is not None) << i
    validity = None if None not in values else bits.to_bytes((len(values) + 7) // 8, "little")
    return [struct.pack(f"<{len(offsets)}i", *offsets), data, validity]


def _model(rows: list[Any], base_offset: int) -> bytes:
    """The specification, one record after the other, with the whole body encoded by msgpack."""
    times = [row[2] for row in rows]
    deltas = None
    if len(set(times)) > 1:
        width = 4 if max(times) - min(times) < 2**31 else 8
        deltas = b"".join((time - times[0]).to_bytes(width, "little", signed=True) for time in times)
    headers = [row[3] for row in rows] if any(row[3] for row in rows) else None
    columns = [deltas, _model_column([row[1] for row in rows]), _model_column([row[0] for row in rows])]
    body = msgpack.packb([*columns, headers])
    covered = struct.pack(">hiqqqhii", 7, len(rows) - 1, times[0], max(times), -1, -1, -1, len(rows)) + body
    crc = crc32c.crc32c(covered)
    return struct.pack(">qiibI", base_offset, 9 + len(covered), -1, 2, crc) + covered


@relaxed
@given(batches, st.integers(0, 2**40))
def test_the_builder_writes_what_the_model_writes(rows: list[Any], base_offset: int) -> None:
    values, keys, times, headers = map(list, zip(*rows, strict=True))
    assert build_batch(values, keys, times, headers, base_offset=base_offset) == _model(rows, base_offset)


@relaxed
@given(batches, st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_pieces_build_what_one_call_builds(rows: list[Any], cuts: list[int], singly: bool) -> None:
    builder = RecordBatchBuilder()
    edges = [0, *sorted(cuts), len(rows)]
    for first, end in itertools.pairwise(edges):
        piece = rows[first:end]
        if singly:
            for value, key, time, headers in piece:
                builder.append(value, key, time, headers)
        elif piece:
            builder.extend(*zip(*piece, strict=True))
        singly = not singly
    assert builder.build() == _model(rows, 0)


@relaxed
@given(batches, st.sampled_from(Codec), st.integers(0, 50))
def test_records_round_trip(rows: list[Any], codec: Codec, skipped: int) -> None:
    values, keys, times, headers = map(list, zip(*rows, strict=True))
    batch = RecordBatch(build_batch(values, keys, times, headers, codec, base_offset=100))
    found = [
        (r.offset, r.value, r.key, r.timestamp_ms, list(r.headers))
        for r in batch.records("t", 0, from_offset=100 + skipped)
    ]
    assert found == [(100 + i, *row) for i, row in enumerate(rows)][skipped:]
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.column("value").to_pylist() == values
    assert table.column("key").to_pylist() == keys
    assert table.column("timestamp").cast("int64").to_pylist() == times


def _arrow(items: list[Any], kind: pa.DataType, before: int, cut: int) -> pa.ChunkedArray:
    """``items`` as two chunks, each in the middle of a longer array."""
    chunks = []
    for piece in (items[:cut], items[cut:]):
        padded = [*items[:before], *piece, *items[:1]]
        chunks.append(pa.array(padded, kind)[len(items[:before]) :][: len(piece)])
    return pa.chunked_array(chunks, kind)


@relaxed
@given(batches, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["name", "key"]), st.booleans())
def test_arrow_records_round_trip(rows: list[Any], before: int, cut: int, name: str, whole: bool) -> None:
    values, keys, times, headers = map(list, zip(*rows, strict=True))
    struct = pa.struct([pa.field(name, pa.string()), pa.field("value", pa.binary())])
    lists = [
        [{name: one, "value": content} for one, content in record] if record else None for record in headers
    ]
    columns: list[Any] = [
        _arrow(values, pa.large_binary(), before, cut),
        _arrow(keys, pa.binary(), before + 1, cut),
        _arrow(times, pa.int64(), before, cut + 1),
        _arrow(lists, pa.list_(struct), before, cut + 2),
    ]
    if whole:
        columns = [column.combine_chunks() for column in columns]
    builder = RecordBatchBuilder()
    builder.extend_arrow(*columns)
    found = [
        (r.value, r.key, r.timestamp_ms, list(r.headers))
        for r in RecordBatch(builder.build()).records("t", 0)
    ]
    assert found == [(value, key, time, list(record)) for value, key, time, record in rows]
    builder.extend(values, keys, times, headers)
    assert len(RecordBatch(builder.build())) == 2 * len(rows)


def _read_everything(buffer: bytes) -> None:
    """Raise nothing but the documented errors; check the shape of what can be read."""
    with contextlib.suppress(CorruptBatchError, BatchTooLargeError, RecordError):
        for batch in iter_batches(buffer):
            for read in (batch.columns, lambda batch=batch: batch.records("t", 0), batch.to_arrow):
                with contextlib.suppress(CorruptBatchError, BatchTooLargeError, RecordError):
                    read()
            columns = batch.columns()
            count = batch.header.record_count
            assert len(columns.values) == len(columns.offsets) == count
            assert all(value is None or type(value) is bytes for value in columns.values)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(batches, st.sampled_from(Codec), st.data())
def test_damage_under_a_right_crc_raises_only_documented_errors(
    rows: list[Any], codec: Codec, data: st.DataObject
) -> None:
    values, keys, times, headers = map(list, zip(*rows, strict=True))
    batch = build_batch(values, keys, times, headers, codec)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(8, len(batch) - 1))
        batch[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(batch)) | st.just(len(batch)))
    if cut >= 61:
        del batch[cut:]
        if data.draw(st.booleans()):
            batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
        seal(batch)
    _read_everything(batch)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=120), st.integers(1, 30), st.booleans())
def test_random_bodies_raise_only_documented_errors(body: bytes, count: int, is_array: bool) -> None:
    batch = build_batch([b""] * count)
    batch[61:] = (b"\x94" if is_array else b"") + body
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    seal(batch)
    _read_everything(batch)


@relaxed
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_documented_errors(data: bytes) -> None:
    _read_everything(data)
    with contextlib.suppress(CorruptBatchError):
        check(data)
