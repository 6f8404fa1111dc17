from __future__ import annotations

import pytest

from kafkalite.errors import DataDirectoryError
from kafkalite.storage import layout

TOPIC_ID = "0123456789abcdef" * 2


def test_a_log_directory_name_is_parsed_back() -> None:
    name = layout.log_directory_name(TOPIC_ID, 12)
    assert name == f"{TOPIC_ID}-12"
    assert layout.parse_log_directory_name(name) == (TOPIC_ID, 12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        TOPIC_ID,
        f"{TOPIC_ID}-",
        f"{TOPIC_ID}-01",
        f"{TOPIC_ID}-x",
        f"{TOPIC_ID.upper()}-0",
        f"{TOPIC_ID}-0.deleted",
    ],
)
def test_other_directory_names_are_not_logs(name: str) -> None:
    assert layout.parse_log_directory_name(name) is None


@pytest.mark.parametrize(
    ("topic_id", "partition"), [("../../etc", 0), ("", 0), (TOPIC_ID, -1), ("A" * 32, 0)]
)
def test_an_id_that_is_not_hex_names_no_directory(topic_id: str, partition: int) -> None:
    with pytest.raises(DataDirectoryError):
        layout.log_directory_name(topic_id, partition)


@pytest.mark.parametrize("suffix", layout.SEGMENT_SUFFIXES)
def test_a_segment_file_name_has_twenty_digits(suffix: str) -> None:
    name = layout.segment_file_name(42, suffix)
    assert name == "00000000000000000042" + suffix
    assert layout.parse_segment_file_name(name) == (42, suffix)
    assert layout.parse_segment_file_name(name + ".deleted") is None


def test_file_names_sort_as_offsets_do() -> None:
    offsets = [0, 9, 10, 2**31, 2**63 - 1]
    names = [layout.segment_file_name(offset, ".log") for offset in offsets]
    assert names == sorted(names)


def test_retired_and_half_written_files_are_leftovers() -> None:
    assert layout.is_leftover("x.deleted")
    assert layout.is_leftover("log-state.tmp")
    assert not layout.is_leftover("00000000000000000000.log")


@pytest.mark.parametrize(("path", "expected"), [("/a/b", "/a"), ("/a", "/"), ("a", "."), ("a/b", "a")])
def test_parent(path: str, expected: str) -> None:
    assert layout.parent(path) == expected
    assert layout.join("/a", "b") == "/a/b"
