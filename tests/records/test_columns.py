"""Columns: exact bytes, every error of a reader, the validity bitmap."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest

from kafkalite.errors import BatchTooLargeError, CorruptBatchError, RecordError
from kafkalite.limits import MAX_HEADERS_PER_RECORD
from kafkalite.records import columns
from kafkalite.records.columns import (
    BinaryColumn,
    BinaryView,
    binary_column,
    binary_parts,
    checked_headers,
    concatenate,
    decode_headers,
    decode_timestamps,
    header_parts,
    pack_validity,
    timestamp_parts,
    uniform_offsets,
    validity_digits,
    view_body,
)

NIL = b"\xc0"


def _written(values: list[bytes | None]) -> bytes:
    return b"".join(binary_parts(binary_column(values)))


def _read(written: bytes, count: int) -> list[bytes | None]:
    view = view_body(memoryview(b"\x94" + NIL + NIL + written + NIL), count).values
    return [None] * count if view is None else view.decode()


def test_a_column_is_arrows_layout() -> None:
    assert _written([b"ab", None, b""]) == bytes.fromhex(
        "93 c410 00000000 02000000 02000000 02000000 c402 6162 c401 05"
    )
    assert _written([None, None]) == NIL
    assert _written([b""]) == bytes.fromhex("93 c408 00000000 00000000 c400 c0")


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 1023, 1024, 1025, 3000, 70_000])
@pytest.mark.parametrize("kind", ["uniform", "empty", "varied", "last differs", "same mean", "nulls"])
def test_values_of_every_shape_come_back(count: int, kind: str) -> None:
    values: list[bytes | None] = {
        "uniform": [b"%07d" % i for i in range(count)],
        "empty": [b""] * count,
        "varied": [b"v" * (i % 7) for i in range(count)],
        "last differs": [b"%07d" % i for i in range(count - 1)] + [b"12345678"],
        "same mean": [b"abcd", b"abcd", b"abc", b"abcde"] * (count // 4) + [b"four"] * (count % 4),
        "nulls": [None if i % 3 == 0 else b"%03d" % (i % 1000) for i in range(count)],
    }[kind]
    assert _read(_written(values), count) == values


def test_bytes_like_objects_are_values() -> None:
    values = [bytearray(b"ab"), memoryview(b"cd"), b"ef"]
    assert _read(_written(values), 3) == [b"ab", b"cd", b"ef"]


@pytest.mark.parametrize("wrong", ["text", 7, [b"list"], memoryview(b"12345678").cast("i"), 1.5])
@pytest.mark.parametrize("others", [[], [None], [b"x"] * 20])
def test_a_value_that_is_not_bytes_is_refused(wrong: object, others: list[bytes | None]) -> None:
    with pytest.raises(RecordError, match=r"must be bytes or None \(encode it first"):
        binary_column([*others, wrong])


def test_items_wider_than_a_byte_are_refused_in_a_uniform_column() -> None:
    with pytest.raises(RecordError, match="memoryview"):
        binary_column([memoryview(b"12345678").cast("i")] * 20)


def test_a_value_that_changes_its_length_is_refused() -> None:
    class Growing(bytes):
        def __len__(self) -> int:
            return 99

    with pytest.raises(RecordError, match="changed its length"):
        binary_column([Growing(b"x")])


def test_offsets_have_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_MAX_INT32", 99)
    with pytest.raises(BatchTooLargeError, match="32 bits"):
        binary_column([b"x" * 50, b"x" * 50])
    half = BinaryColumn(1, struct.pack("<2i", 0, 60), (b"x" * 60,), 60, None)
    with pytest.raises(BatchTooLargeError, match="32 bits"):
        concatenate([(1, half), (1, half)])


def test_columns_are_concatenated() -> None:
    parts = [[b"a", b"bb"], [None, None], [b"", None, b"ccc"], [b"d"] * 20]
    joined = concatenate([(len(part), binary_column(part)) for part in parts])
    assert joined is not None and joined.count == 27
    assert _read(b"".join(binary_parts(joined)), 27) == [value for part in parts for value in part]
    assert joined.size_bytes == 4 * 28 + 26 + 4
    assert concatenate([(2, None), (3, None)]) is None
    alone = binary_column([b"x"])
    assert concatenate([(1, alone)]) is alone
    assert concatenate([(1, alone), (1, alone)]).validity is None  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [0, 1, 1000, 2**20])
@pytest.mark.parametrize("count", [16, 1000, 2000, (1 << 16) + 1])
def test_uniform_offsets_are_multiples(length: int, count: int) -> None:
    if length * count < 2**31:
        expected = struct.pack(f"<{count + 1}i", *(length * i for i in range(count + 1)))
        assert uniform_offsets(length, count) == expected


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_a_validity_bitmap_starts_at_the_lowest_bit(count: int) -> None:
    flags = [i % 3 != 1 for i in range(count)]
    bitmap = pack_validity(flags)
    assert len(bitmap) == (count + 7) // 8
    assert [bool(bitmap[i // 8] >> i % 8 & 1) for i in range(count)] == flags
    assert validity_digits(bitmap, count) == "".join("01"[flag] for flag in flags)


@pytest.mark.parametrize(
    ("length", "head"),
    [(0, "c400"), (255, "c4ff"), (256, "c50100"), (65535, "c5ffff"), (65536, "c600010000")],
)
def test_a_bin_has_the_shortest_head(length: int, head: str) -> None:
    written = _written([b"x" * length])
    assert written[11 : 11 + len(head) // 2].hex() == head
    assert _read(written, 1) == [b"x" * length]


# --- timestamps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timestamps", "width"),
    [
        ([5, 4, 9, -1], 4),
        ([0, 2**31 - 1], 4),
        ([0, 2**31], 8),
        ([2**63 - 1, -1], 8),
        ([1_700_000_000_000, 1_700_000_000_000 - 2**31 + 1], 4),
    ],
)
def test_timestamps_take_four_or_eight_bytes(timestamps: list[int], width: int) -> None:
    count = len(timestamps)
    head, packed = timestamp_parts(timestamps, timestamps[0], max(timestamps) - min(timestamps))
    assert head == bytes((0xC4, width * count))
    kind = "i" if width == 4 else "q"
    assert struct.unpack(f"<{count}{kind}", packed) == tuple(t - timestamps[0] for t in timestamps)
    assert decode_timestamps(memoryview(packed), count, timestamps[0]) == timestamps


def test_a_fractional_timestamp_is_refused() -> None:
    with pytest.raises(RecordError, match="not a whole number"):
        timestamp_parts([1, 2.5], 1, 2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("base", "kind", "delta"), [(5, "i", -7), (2**63 - 1, "i", 1), (0, "q", -2), (2**62, "q", 2**62)]
)
def test_impossible_timestamps_are_refused(base: int, kind: str, delta: int) -> None:
    with pytest.raises(CorruptBatchError, match="timestamps from"):
        decode_timestamps(memoryview(struct.pack(f"<2{kind}", 0, delta)), 2, base)


# --- headers -----------------------------------------------------------------------------------------


def test_headers_keep_order_repeats_and_nulls() -> None:
    headers = [(("a", b"1"), ("a", None), ("", b"")), (), (("é", b"\0"),)]
    (packed,) = header_parts(headers)
    assert packed == msgpack.packb([[["a", b"1"], ["a", None], ["", b""]], [], [["é", b"\0"]]])
    assert decode_headers(memoryview(packed), 3) == headers


def test_no_headers_are_nil() -> None:
    assert header_parts(None) == [NIL]
    assert header_parts([(), ()]) == [NIL]


@pytest.mark.parametrize("count", [1, 15, 16, 65_536])
def test_headers_of_many_records_come_back(count: int) -> None:
    headers = [((("n", b"%d" % i),) if i % 2 == 0 else ()) for i in range(count)]
    assert decode_headers(memoryview(header_parts(headers)[0]), count) == headers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([("name",)], "pairs of a name and a value"),
        ([b"xy"], "int, but must be str"),
        (7, "pairs of a name and a value"),
        ([(b"name", b"value")], "name is bytes"),
        ([("name", 5)], "header 'name' is int"),
        ([("\ud800", b"value")], "surrogates"),
        ([("n", None)] * (MAX_HEADERS_PER_RECORD + 1), "at most 1000 headers"),
    ],
)
def test_headers_of_another_shape_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        checked_headers(wrong)


def test_headers_may_be_any_iterable_of_pairs() -> None:
    assert checked_headers(iter([["a", b"1"]])) == (("a", b"1"),)
    assert checked_headers(None) == ()
    assert checked_headers({"a": b"1"}.items()) == (("a", b"1"),)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xa1x",
        b"\xdc\x00",
        b"\xdd\x00\x00\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x91",
        b"\x91\x90\x90",
        b"\x92\x90\x90",
        b"\x91\x05",
        b"\x91\xc0",
        b"\x91\xa0",
        b"\x91\x91\x05",
        b"\x91\x91\x91\xa1a",
        b"\x91\x91\x92\xa1a\x05",
        b"\x91\x91\x92\x05\xc0",
        b"\x91\x91\x92\xa1\xff\xc0",
        b"\x91\x91\x92\xa2a",
        b"\x91\x81\x01\x02",
        b"\x91\xd4\x01\x02",
        b"\x91\xc1",
        b"\x91" + b"\x91" * 3000,
        b"\x91\xdd\x00\x01\x00\x00",
        b"\x91" + b"\xdc\x03\xe8" * 2000,
    ],
)
def test_hostile_headers_are_refused(packed: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        decode_headers(memoryview(packed), 1)


# --- bodies ------------------------------------------------------------------------------------------


def test_a_body_of_nothing_is_four_nils() -> None:
    view = view_body(memoryview(b"\x94" + NIL * 4), 3)
    assert (view.timestamp_deltas, view.keys, view.values, view.headers) == (None, None, None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93" + NIL * 3,
        b"\x94",
        b"\x94" + NIL,
        b"\x94" + NIL * 5,
        b"\x94\xa1x" + NIL * 3,
        b"\x94\xc4" + NIL * 3,
        b"\x94\xc6\x00\x00",
        b"\x94\xc4\x05" + NIL * 3,
        b"\x94\xc4\x03abc" + NIL * 3,
        b"\x94" + NIL + b"\x92" + NIL * 3,
        b"\x94" + NIL + b"\x93" + NIL * 5,
    ],
)
def test_a_body_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        view = view_body(memoryview(body), 1)
        assert view.headers is not None
        decode_headers(view.headers, 1)


@pytest.mark.parametrize(
    ("offsets", "data", "validity"),
    [
        ([0, 1], b"a", None),  # too few
        ([0, 1, 1, 1], b"a", None),  # too many
        ([1, 1, 1], b"a", None),  # not from 0
        ([0, 1, 2], b"a", None),  # past the end
        ([0, 1, 1], b"ab", None),  # short of the end
        ([0, 2, 1], b"a", None),  # backwards
        ([0, -1, 1], b"a", None),
        ([0, 2**31 - 1, 1], b"a", None),
        ([0, 1, 2], b"ab", b""),
        ([0, 1, 2], b"ab", b"\x03\x00"),
    ],
)
def test_inconsistent_offsets_are_refused(
    binary_of: Callable[..., bytes], offsets: list[int], data: bytes, validity: bytes | None
) -> None:
    with pytest.raises(CorruptBatchError):
        _read(binary_of(offsets, data, validity), 2)


def test_offsets_or_data_of_nil_are_refused(binary_of: Callable[..., bytes]) -> None:
    for written in (b"\x93" + NIL + b"\xc4\x00" + NIL, b"\x93\xc4\x0c" + bytes(12) + NIL + NIL):
        with pytest.raises(CorruptBatchError, match="lacks its offsets or its data"):
            _read(written, 2)
    with pytest.raises(CorruptBatchError, match="do not fit"):
        _read(binary_of([], b"", raw_offsets=bytes(11)), 2)


def test_bytes_of_a_null_are_ignored() -> None:
    view = BinaryView(2, memoryview(struct.pack("<3i", 0, 3, 4)), memoryview(b"abcd"), memoryview(b"\x02"))
    assert view.decode() == [None, b"d"]
