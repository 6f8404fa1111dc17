"""The header: exact bytes both ways, every error, stamping in place, scanning a log."""

from __future__ import annotations

import struct

import crc32c as crc32c_package
import pytest

from kafkalite.errors import ConfigError, CorruptBatchError
from kafkalite.limits import MAX_RECORDS_PER_BATCH
from kafkalite.model import TimestampType
from kafkalite.records import checksum
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import (
    HEADER_BYTES,
    Codec,
    check,
    check_length,
    parse_header,
    scan,
    seal,
    stamp,
    stamp_log_append_time,
    total_length,
)

# One batch, written out field by field.
EXPLICIT = bytes.fromhex(
    "0000000000000007"  # base offset 7
    "00000033"  # 51 bytes follow
    "00000005"  # leader epoch 5
    "02"  # magic
    "00000000"  # CRC, below
    "0407"  # columns, zstd
    "00000001"  # last offset delta 1
    "0000018bcfe56800"  # base timestamp 1700000000000
    "0000018bcfe56be8"  # max timestamp 1700000001000
    "0000000000000fa1"  # producer id 4001
    "0003"  # producer epoch
    "00000010"  # base sequence 16
    "00000002"  # two records
    "aabb"
)


def test_every_field_is_read_from_its_place() -> None:
    header = parse_header(EXPLICIT)
    assert header._asdict() == {
        "base_offset": 7,
        "length_bytes": 63,
        "leader_epoch": 5,
        "magic": 2,
        "crc": 0,
        "attributes": 0x0407,
        "last_offset_delta": 1,
        "base_timestamp_ms": 1_700_000_000_000,
        "max_timestamp_ms": 1_700_000_001_000,
        "producer_id": 4001,
        "producer_epoch": 3,
        "base_sequence": 16,
        "record_count": 2,
    }
    assert header.last_offset == 8
    assert header.next_offset == 9
    assert header.codec is Codec.ZSTD
    assert header.is_columnar
    assert header.timestamp_type is TimestampType.CREATE_TIME
    assert not header.is_transactional
    assert not header.is_control


def test_a_header_is_found_at_its_position() -> None:
    assert parse_header(b"\xff" * 9 + EXPLICIT, 9) == parse_header(EXPLICIT)


def test_the_builder_writes_the_same_bytes() -> None:
    batch = build_batch(
        [b"v", b"w"],
        timestamps_ms=[1_700_000_000_000, 1_700_000_001_000],
        base_offset=7,
        leader_epoch=5,
        producer_id=4001,
        producer_epoch=3,
        base_sequence=16,
    )
    expected = bytearray(EXPLICIT[:HEADER_BYTES])
    body = bytes.fromhex(
        "94"
        "c408 00000000 e8030000"  # timestamps: 0 and 1000 after the base
        "c0"  # no keys
        "93 c40c 00000000 01000000 02000000 c402 7677 c0"  # values "v" and "w", none null
        "c0"  # no headers
    )
    expected[8:12] = struct.pack(">i", HEADER_BYTES - 12 + len(body))
    expected[21:23] = b"\x00\x07"
    expected += body
    expected[17:21] = struct.pack(">I", crc32c_package.crc32c(bytes(expected[21:])))
    assert batch == expected


@pytest.mark.parametrize(
    ("attributes", "codec", "is_columnar"),
    [
        (0x0000, Codec.NONE, False),
        (0x0001, Codec.GZIP, False),
        (0x0004, Codec.ZSTD, False),
        (0x0007, Codec.NONE, True),
        (0x0307, Codec.LZ4, True),
    ],
)
def test_attributes_have_the_layout_and_the_codec(attributes: int, codec: Codec, is_columnar: bool) -> None:
    header = parse_header(_with(21, ">h", attributes))
    assert (header.codec, header.is_columnar) == (codec, is_columnar)


def test_attribute_bits_of_time_transaction_and_control() -> None:
    header = parse_header(_with(21, ">h", 0x0007 | 1 << 3 | 1 << 4 | 1 << 5))
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert header.is_transactional
    assert header.is_control


def _with(position: int, kind: str, value: int) -> bytearray:
    changed = bytearray(EXPLICIT)
    struct.pack_into(kind, changed, position, value)
    return changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (EXPLICIT[:60], "61 bytes, but 60"),
        (b"", "61 bytes, but 0"),
        (_with(16, ">b", 1), "magic is 1"),
        (_with(8, ">i", 48), "60 bytes, less than a header"),
        (_with(8, ">i", -1), "11 bytes, less than a header"),
        (_with(57, ">i", 3), "3 records, but the last offset delta is 1"),
        (_with(23, ">i", -2), "2 records, but the last offset delta is -2"),
        (_with(0, ">q", -1), "base offset is -1"),
        (_with(0, ">q", 2**63 - 1), "base offset is"),
        (_with(27, ">q", -2), "below -1"),
        (_with(35, ">q", -2), "below -1"),
        (_with(21, ">h", 5), "unknown compression codec 5"),
        (_with(21, ">h", 0x0507), "unknown compression codec 5"),
    ],
)
def test_a_header_that_no_builder_writes_is_refused(changed: bytes, message: str) -> None:
    with pytest.raises(CorruptBatchError, match=message):
        parse_header(changed)


@pytest.mark.parametrize("count", [0, MAX_RECORDS_PER_BATCH + 1, -5])
def test_a_count_outside_the_limit_is_refused(count: int) -> None:
    changed = _with(57, ">i", count)
    struct.pack_into(">i", changed, 23, count - 1)
    with pytest.raises(CorruptBatchError, match="records, not 1 to"):
        parse_header(changed)


def test_check_requires_exactly_one_batch() -> None:
    batch = build_batch([b"value"])
    assert check(batch) == parse_header(batch)
    assert check(memoryview(batch).toreadonly()) == check(bytes(batch))
    for wrong in (batch[:-1], batch + b"\0"):
        with pytest.raises(CorruptBatchError, match="its length field is"):
            check(wrong)


def test_check_finds_every_single_changed_bit_that_the_crc_covers() -> None:
    batch = build_batch([b"value"], [b"key"], timestamps_ms=3)
    for position in range(17, len(batch)):
        for bit in range(8):
            batch[position] ^= 1 << bit
            with pytest.raises(CorruptBatchError):
                check(batch)
            batch[position] ^= 1 << bit
    check(batch)


def test_length_alone_can_be_checked() -> None:
    batch = build_batch([b"value"])
    batch[-1] ^= 1
    assert check_length(batch).record_count == 1


def test_stamping_leaves_the_crc_valid() -> None:
    batch = build_batch([b"a", b"b"])
    stamp(memoryview(batch), base_offset=2**40, leader_epoch=17)
    header = check(batch)
    assert (header.base_offset, header.leader_epoch, header.last_offset) == (2**40, 17, 2**40 + 1)


def test_log_append_time_is_every_records_time() -> None:
    batch = build_batch([b"a", b"b"], timestamps_ms=[5, 6])
    stamp_log_append_time(batch, 99)
    header = check(batch)
    assert header.timestamp_type is TimestampType.LOG_APPEND_TIME
    assert header.max_timestamp_ms == 99
    assert RecordBatch(batch).columns().timestamps == 99


def test_seal_writes_the_crc_of_the_package() -> None:
    batch = bytearray(EXPLICIT)
    seal(memoryview(batch))
    assert parse_header(batch).crc == crc32c_package.crc32c(EXPLICIT[21:])


def test_total_length_reads_twelve_bytes() -> None:
    assert total_length(EXPLICIT[:12]) == 63
    assert total_length(b"--" + EXPLICIT, 2) == 63
    assert total_length(bytes(12)) == 0
    with pytest.raises(CorruptBatchError, match="fewer than 12 bytes"):
        total_length(EXPLICIT[:11])
    with pytest.raises(CorruptBatchError, match="no header fits"):
        total_length(struct.pack(">qi", 0, 48))
    with pytest.raises(CorruptBatchError, match="no header fits"):
        total_length(struct.pack(">qi", 1, 0))


def test_scan_yields_complete_batches_and_stops_at_a_torn_one() -> None:
    batches = [build_batch([b"x" * n] * 3, timestamps_ms=n, base_offset=3 * n) for n in range(5)]
    log = b"".join(batches)
    expected = []
    position = 0
    for n, batch in enumerate(batches):
        expected.append((position, 3 * n, 2, n, len(batch)))
        position += len(batch)
    assert list(scan(log, 0, len(log))) == expected
    assert list(scan(log, 0, len(log) + 1000)) == expected
    assert list(scan(log + bytes(4096), 0, len(log) + 4096)) == expected
    for end in range(len(log)):
        whole = [found for found in expected if found[0] + found[4] <= end]
        assert list(scan(log, 0, end)) == whole
    assert list(scan(memoryview(log), expected[2][0], len(log))) == expected[2:]


@pytest.mark.parametrize(
    "wrong", [_with(16, ">b", 0), _with(23, ">i", -1), _with(8, ">i", 48), _with(8, ">i", -(2**31))]
)
def test_scan_ends_at_an_invalid_batch(wrong: bytearray) -> None:
    assert list(scan(EXPLICIT + wrong, 0, 126)) == [(0, 7, 1, 1_700_000_001_000, 63)]


@pytest.mark.parametrize("codec", Codec)
def test_codec_names_are_those_of_compression_type(codec: Codec) -> None:
    assert Codec.parse(str(codec)) is codec
    assert Codec.parse(codec.name) is codec


def test_an_unknown_codec_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compression\.type is 'brotli', but must be one of none, gzip"):
        Codec.parse("brotli")


def test_checksum_is_castagnolis() -> None:
    assert checksum.crc32c(b"123456789") == 0xE3069283


def test_checksum_is_the_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum._load() is crc32c_package.crc32c
    monkeypatch.setattr(checksum, "_load_extension", lambda: None)
    monkeypatch.delitem(checksum.sys.modules, "crc32c._crc32c")
    assert checksum._load() is crc32c_package.crc32c


@pytest.mark.parametrize("found", [None, "no package", "no extension"])
def test_checksum_falls_back_to_the_package(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    class Spec:
        submodule_search_locations = None if found == "no package" else ()
        loader = None

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None) -> Spec | None:
            return Spec() if found and not (path == () and found == "no extension") else None

    monkeypatch.setattr(checksum, "PathFinder", Finder)
    assert checksum._load_extension() is None


def test_the_extension_is_loaded_without_its_package() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kafkalite.records.checksum as c; assert 'crc32c' not in sys.modules;"
        "import crc32c; assert crc32c.crc32c is c.crc32c"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
