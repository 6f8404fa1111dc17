"""Whole record batches and hashes in tests/golden/batches.json, for authors of other clients.

``UPDATE_GOLDEN=1`` writes the file again; the changelog must then name the difference. Compressed batches are
compared by their contents, because libraries may compress differently.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker, parse_marker
from kafkalite.records.header import HEADER, Codec, check, stamp
from kafkalite.records.partitioners import murmur2, partition_for_key

NOW_MS = 1_700_000_000_000
FIELDS = [
    "base_offset",
    "batch_length",
    "partition_leader_epoch",
    "magic",
    "crc",
    "attributes",
    "last_offset_delta",
    "base_timestamp",
    "max_timestamp",
    "producer_id",
    "producer_epoch",
    "base_sequence",
    "record_count",
]
KEYS = ["", "k", "21", "foobar", "a-little-bit-long-string", "\u00e9\u00e8", "group-1"]


def _stamped(batch: bytearray, base_offset: int, leader_epoch: int) -> bytearray:
    stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
    return batch


def batches() -> dict[str, bytearray]:
    """Return name -> batch. ``fetched`` is ``plain`` as the leader writes it."""
    values, keys = [b"hello", b"world"], [None, b"k"]
    times = [NOW_MS, NOW_MS + 5]
    headers: Any = [[("trace", b"1"), ("trace", None)], []]
    found = {
        "plain": build_batch(values, keys, times),
        "fetched": _stamped(build_batch(values, keys, times), 456_332, 7),
        "one record, no key, base timestamp alone": build_batch([b"v"], None, NOW_MS),
        "nulls and empty values": build_batch([None, b"", b"v"] * 3, [b"k"] * 9, NOW_MS),
        "headers": build_batch(values, keys, times, headers),
        "timestamps of 8 bytes": build_batch(values, None, [NOW_MS, NOW_MS + 2**31]),
        "no timestamps": build_batch(values, keys),
        "idempotent, sequence 2147483647 and 0": build_batch(
            values, keys, times, producer_id=4_000, producer_epoch=3, base_sequence=2**31 - 1
        ),
        "transactional": build_batch(
            values, keys, times, producer_id=4_000, producer_epoch=3, base_sequence=0, transactional=True
        ),
        "commit marker": build_marker(4_000, 4, 9, True, NOW_MS),
        "abort marker": build_marker(4_000, 4, 9, False, NOW_MS),
    }
    for codec in Codec:
        if codec is not Codec.NONE:
            found[f"codec {codec}"] = build_batch([b"hello " * 40] * 3, None, NOW_MS, codec=codec)
    return found


def describe(batch: bytearray) -> dict[str, Any]:
    """Return the batch in hex, its header, and its records with text where bytes are ASCII."""
    found = RecordBatch(bytes(batch))
    records = [
        {
            "timestamp": record.timestamp_ms,
            "key": None if record.key is None else record.key.hex(),
            "value": None if record.value is None else record.value.hex(),
            "headers": [[name, None if value is None else value.hex()] for name, value in record.headers],
        }
        for record in found.records("t", 0)
    ]
    header = dict(zip(FIELDS, HEADER.unpack_from(batch), strict=True))
    return {"header": header, "records": records, "hex": bytes(batch).hex()}


def document() -> dict[str, Any]:
    hashes = [
        {
            "key": key,
            "utf8_hex": key.encode().hex(),
            "murmur2": murmur2(key.encode()) & 0xFFFFFFFF,
            "partition_of_10": partition_for_key(key.encode(), 10),
        }
        for key in KEYS
    ]
    return {"batches": {name: describe(batch) for name, batch in batches().items()}, "murmur2": hashes}


@pytest.fixture(scope="module")
def path(repository: Path) -> Path:
    return repository / "tests" / "golden" / "batches.json"


@pytest.fixture(scope="module")
def golden(path: Path) -> dict[str, Any]:
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(document(), indent=1) + "\n")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_the_names_and_the_hashes_are_what_they_were(golden: dict[str, Any]) -> None:
    assert golden["batches"].keys() == batches().keys()
    assert golden["murmur2"] == document()["murmur2"]


@pytest.mark.parametrize("name", list(batches()))
def test_the_bytes_are_read_back(golden: dict[str, Any], name: str) -> None:
    frozen = golden["batches"][name]
    data = bytearray.fromhex(frozen["hex"])
    check(memoryview(data))
    assert describe(data) == frozen
    expected = describe(batches()[name])
    assert frozen["records"] == expected["records"]
    if not name.startswith("codec"):
        assert frozen == expected, "the protocol changed"
    else:
        fixed = {"batch_length", "crc"}
        for field in FIELDS:
            assert field in fixed or frozen["header"][field] == expected["header"][field]


def test_the_markers_are_markers(golden: dict[str, Any]) -> None:
    for name, is_commit in (("commit marker", True), ("abort marker", False)):
        assert parse_marker(bytes.fromhex(golden["batches"][name]["hex"])) == (is_commit, 9)
