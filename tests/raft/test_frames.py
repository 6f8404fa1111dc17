"""Frames: torn tails end a file, damage before an intact frame is refused."""

from __future__ import annotations

import struct

import pytest

from kafkalite.errors import CorruptLogError, StorageError
from kafkalite.raft.frames import check_version, frame, read_frames, read_single_frame
from kafkalite.records.checksum import crc32c

FRAMES = [["header", 1], [1, b"abc"], [2, None]]
DATA = b"".join(map(frame, FRAMES))


def test_frames_are_read_back_with_their_positions():
    values, end = read_frames(DATA, "f")
    assert [value for _, value in values] == FRAMES
    assert [position for position, _ in values] == [
        0,
        len(frame(FRAMES[0])),
        len(DATA) - len(frame(FRAMES[2])),
    ]
    assert end == len(DATA)


def test_a_torn_tail_ends_the_file_wherever_it_is_torn():
    last = len(frame(FRAMES[2]))
    for cut in range(1, last + 1):
        values, end = read_frames(DATA[:-cut], "f")
        assert ([value for _, value in values], end) == (FRAMES[:2], len(DATA) - last)
    assert read_frames(DATA + bytes(500), "f")[1] == len(DATA)


def test_damage_before_an_intact_frame_is_refused_wherever_it_is():
    for at in range(len(DATA) - len(frame(FRAMES[2]))):
        damaged = DATA[:at] + bytes([DATA[at] ^ 0x10]) + DATA[at + 1 :]
        with pytest.raises(CorruptLogError) as caught:
            read_frames(damaged, "f")
        assert caught.value.path == "f"


@pytest.mark.parametrize("data", [b"", frame(["x"])[:-1], DATA])
def test_a_file_of_one_frame_has_exactly_one(data):
    with pytest.raises(CorruptLogError, match="one intact frame"):
        read_single_frame(data, "f")


@pytest.mark.parametrize("payload", [b"\xc1\xc1\xc1", b"\x81\x01\x02", b"\xcd\x01\x00"])
def test_a_payload_that_is_no_array_is_refused(payload):
    framed = struct.pack(">II", len(payload), crc32c(payload)) + payload
    for read in (read_frames, read_single_frame):
        with pytest.raises(CorruptLogError, match=r"msgpack|an array"):
            read(framed, "f")


def test_another_format_and_another_version_are_refused():
    check_version(["format", 1, "more"], "f", "format", 1)
    with pytest.raises(StorageError, match=r"format version 2,.*newer kafkalite"):
        check_version(["format", 2], "f", "format", 1)
    with pytest.raises(CorruptLogError, match="a header of format"):
        check_version(["other", 1], "f", "format", 1)
