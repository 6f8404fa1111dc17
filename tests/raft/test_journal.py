"""The metadata journal on a disk that loses power anywhere, fills up, fails, and rots."""

from __future__ import annotations

import logging
import random
import struct

import msgpack
import pytest

from kafkalite.errors import CorruptLogError, DiskFullError, LogOfflineError, StorageError
from kafkalite.raft.journal import LOG_FILE, SNAPSHOT_FILE, Journal
from kafkalite.records.checksum import crc32c

LOG, SNAPSHOT = f"meta/{LOG_FILE}", f"meta/{SNAPSHOT_FILE}"


def frame(value) -> bytes:
    payload = msgpack.packb(value)
    return struct.pack(">II", len(payload), crc32c(payload)) + payload


def opened(disk):
    journal = Journal(disk, "meta")
    return journal, journal.open()


def put(disk, path, data):
    disk.write_atomically(path, data)


def test_a_new_directory_gets_an_empty_journal(disk):
    journal, recovered = opened(disk)
    assert (recovered.snapshot_offset, recovered.snapshot_records, recovered.entries) == (0, [], [])
    assert journal.last_offset == 0
    assert disk.durable_names.keys() >= {LOG}


def test_entries_come_back_in_order(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    journal.append([(2, kit.topic(2)), (5, kit.topic(3))])
    journal.close()
    journal, recovered = opened(disk)
    assert recovered.entries == [(1, kit.topic(1)), (2, kit.topic(2)), (5, kit.topic(3))]
    assert journal.last_offset == 5
    journal.append([(6, kit.topic(4))])
    assert opened(disk)[1].entries[-1] == (6, kit.topic(4))


def test_the_bytes_are_as_documented(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(7))])
    topic_id = f"{7:032x}"
    records = [[1, 0, topic_id, "t7"], [3, 1, topic_id, 0, [1], [1], 1, 0, 0, [], []]]
    assert disk.read_bytes(LOG) == frame(["kafkalite-metadata-log", 1, 0]) + frame([[1, records]])
    journal.write_snapshot(1, kit.topic(7))
    assert disk.read_bytes(SNAPSHOT) == frame(["kafkalite-metadata-snapshot", 1, 1, records])
    assert disk.read_bytes(LOG) == frame(["kafkalite-metadata-log", 1, 1])


def test_a_group_of_entries_costs_one_sync(disk, kit):
    journal, _ = opened(disk)
    before = disk.sync_count
    journal.append([(number, kit.topic(number)) for number in range(1, 50)])
    assert disk.sync_count == before + 1


def test_a_snapshot_begins_an_empty_journal(disk, kit):
    journal, _ = opened(disk)
    empty_bytes = journal.size_bytes
    journal.append([(1, kit.topic(1)), (2, kit.topic(2))])
    journal.write_snapshot(2, kit.topic(1) + kit.topic(2))
    assert journal.size_bytes == empty_bytes
    journal.append([(3, kit.topic(3))])
    journal, recovered = opened(disk)
    assert recovered.snapshot_offset == 2
    assert recovered.snapshot_records == kit.topic(1) + kit.topic(2)
    assert recovered.entries == [(3, kit.topic(3))]
    assert journal.snapshot_bytes == len(disk.read_bytes(SNAPSHOT))


def test_a_snapshot_is_of_the_last_entry_and_no_other(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    with pytest.raises(AssertionError):
        journal.write_snapshot(2, [])


def test_entries_that_the_snapshot_holds_already_are_skipped(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1)), (2, kit.topic(2)), (3, kit.topic(3))])
    old_log = disk.read_bytes(LOG)
    journal.write_snapshot(3, kit.topic(1) + kit.topic(2) + kit.topic(3))
    put(disk, LOG, old_log)  # as if the power had gone between the two files
    journal, recovered = opened(disk)
    assert (recovered.snapshot_offset, recovered.entries) == (3, [])
    assert journal.last_offset == 3


@pytest.mark.parametrize("cut_bytes", [1, 5, 9, 30])
def test_a_torn_tail_is_cut_with_one_log_line(disk, kit, caplog, cut_bytes):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    whole_bytes = journal.size_bytes
    journal.append([(2, kit.topic(2))])
    torn_bytes = journal.size_bytes - cut_bytes
    put(disk, LOG, disk.read_bytes(LOG)[:torn_bytes])
    with caplog.at_level(logging.WARNING):
        journal, recovered = opened(disk)
    assert [offset for offset, _ in recovered.entries] == [1]
    (line,) = caplog.messages
    assert "torn tail" in line
    assert f"position={whole_bytes} cut_bytes={torn_bytes - whole_bytes}" in line
    assert disk.names[LOG].durable == disk.read_bytes(LOG)
    assert len(disk.read_bytes(LOG)) == whole_bytes
    journal.append([(2, kit.topic(9))])
    assert [records[0].name for _, records in opened(disk)[1].entries] == ["t1", "t9"]


def test_a_tail_of_zeros_is_cut(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    put(disk, LOG, disk.read_bytes(LOG) + bytes(500))
    assert len(opened(disk)[1].entries) == 1
    assert len(disk.read_bytes(LOG)) == journal.size_bytes


@pytest.mark.parametrize("shift", range(0, 90, 7))
def test_damage_before_a_whole_entry_is_named_and_nothing_is_cut(disk, kit, shift):
    journal, _ = opened(disk)
    first = journal.size_bytes
    journal.append([(1, kit.topic(1))])
    second = journal.size_bytes
    journal.append([(2, kit.topic(2))])
    data = bytearray(disk.read_bytes(LOG))
    data[first + shift] ^= 0x40
    put(disk, LOG, bytes(data))
    with pytest.raises(CorruptLogError, match="backup") as caught:
        opened(disk)
    assert caught.value.path == LOG
    assert caught.value.position == first
    assert f"the one at {second} was written after it" in str(caught.value)
    assert disk.read_bytes(LOG) == data


def test_a_damaged_header_is_no_torn_tail(disk):
    opened(disk)
    data = bytearray(disk.read_bytes(LOG))
    data[10] ^= 1
    put(disk, LOG, bytes(data))
    with pytest.raises(CorruptLogError, match="a whole header"):
        opened(disk)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_damaged_snapshot_is_named(disk, kit, damage):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    journal.write_snapshot(1, kit.topic(1))
    put(disk, SNAPSHOT, damage(disk.read_bytes(SNAPSHOT)))
    with pytest.raises(CorruptLogError, match=SNAPSHOT_FILE):
        opened(disk)


def test_a_snapshot_without_its_journal_is_refused(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    journal.write_snapshot(1, kit.topic(1))
    del disk.names[LOG]
    with pytest.raises(StorageError, match=r"metadata\.log is missing"):
        opened(disk)


def test_a_journal_without_the_snapshot_it_follows_is_refused(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    journal.write_snapshot(1, kit.topic(1))
    del disk.names[SNAPSHOT]
    with pytest.raises(CorruptLogError, match="a snapshot at offset 1 or above"):
        opened(disk)


@pytest.mark.parametrize(
    ("path", "data", "error", "match"),
    [
        (LOG, frame(["kafkalite-metadata-log", 2, 0]), StorageError, "format version 2.*newer kafkalite"),
        (LOG, frame(["something else", 1, 0]), CorruptLogError, "metadata of this format"),
        (LOG, frame({"no": "array"}), CorruptLogError, "metadata of this format"),
        (
            SNAPSHOT,
            frame(["kafkalite-metadata-snapshot", 7, 0, []]),
            StorageError,
            "format version 7.*newer kafkalite",
        ),
        (SNAPSHOT, frame([1]), CorruptLogError, "metadata of this format"),
        (SNAPSHOT, frame(["kafkalite-metadata-snapshot", 1, 0, 5]), StorageError, "must be an array"),
    ],
)
def test_files_of_another_format_are_refused(disk, path, data, error, match):
    put(disk, LOG, frame(["kafkalite-metadata-log", 1, 0]))
    put(disk, path, data)
    with pytest.raises(error, match=match):
        opened(disk)


@pytest.mark.parametrize(
    ("payload", "error", "match"),
    [
        (500, CorruptLogError, "metadata of this format"),
        ([5], CorruptLogError, "metadata of this format"),
        ([[1, [[99, 0]]]], StorageError, r"metadata\.log at position .*type 99.*newer kafkalite"),
        ([[3, []], [3, []]], CorruptLogError, "an offset above 3"),
    ],
)
def test_entries_that_make_no_sense_are_refused(disk, payload, error, match):
    put(disk, LOG, frame(["kafkalite-metadata-log", 1, 0]) + frame(payload))
    with pytest.raises(error, match=match):
        opened(disk)


def test_bad_msgpack_with_a_good_checksum_is_refused(disk):
    payload = b"\xc1\xc1\xc1"
    bad = struct.pack(">II", len(payload), crc32c(payload)) + payload
    put(disk, LOG, frame(["kafkalite-metadata-log", 1, 0]) + bad)
    with pytest.raises(CorruptLogError, match="metadata of this format"):
        opened(disk)


def test_a_full_disk_refuses_the_entry_and_leaves_the_journal_as_it_was(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    size_bytes = journal.size_bytes
    disk.full = True
    with pytest.raises(DiskFullError):
        journal.append([(2, kit.topic(2))])
    assert len(disk.read_bytes(LOG)) == journal.size_bytes == size_bytes
    with pytest.raises(DiskFullError):
        journal.write_snapshot(1, kit.topic(1))
    disk.full = False
    journal.append([(2, kit.topic(3))])
    assert [records[0].name for _, records in opened(disk)[1].entries] == ["t1", "t3"]


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_failing_disk_takes_the_journal_offline(disk, kit, what):
    journal, _ = opened(disk)
    disk.failing = {what}
    with pytest.raises(LogOfflineError, match=r"metadata\.log could not be"):
        journal.append([(1, kit.topic(1))])
    assert journal.last_offset == 0


def test_a_full_disk_that_cannot_even_be_truncated_takes_the_journal_offline(disk, kit):
    journal, _ = opened(disk)
    disk.full, disk.failing = True, {"truncate"}
    with pytest.raises(LogOfflineError, match="could not be truncated"):
        journal.append([(1, kit.topic(1))])


def test_a_snapshot_that_may_have_half_replaced_the_files_takes_the_journal_offline(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    disk.failing = {"sync_dir"}
    with pytest.raises(LogOfflineError, match="could not be replaced"):
        journal.write_snapshot(1, kit.topic(1))


def write_history(disk, kit, acknowledged):
    """Six groups of entries and two snapshots; what has returned is appended to ``acknowledged``."""
    journal, _ = opened(disk)
    number, topics = 0, []
    for group in range(6):
        entries = []
        for _ in range(1 + group % 3):
            number += 1
            entries.append((number, kit.topic(number)))
            topics += kit.topic(number)
        journal.append(entries)
        acknowledged.append(number)
        if group % 3 == 1:
            journal.write_snapshot(number, topics)


def topics_of(recovered):
    records = recovered.snapshot_records + [record for _, some in recovered.entries for record in some]
    return [record.name for record in records if hasattr(record, "name")]


def test_power_loss_at_every_step_loses_nothing_acknowledged(disk, kit):
    write_history(disk, kit, [])
    for step in range(1, disk.steps + 1):
        for seed in range(12):
            crashing, acknowledged = kit.CrashDisk(), [0]
            crashing.steps_left = step
            with pytest.raises(kit.PowerLoss):
                write_history(crashing, kit, acknowledged)
            survivor = crashing.after_power_loss(random.Random(seed))
            journal, recovered = opened(survivor)
            names = topics_of(recovered)
            assert names == [f"t{number}" for number in range(1, len(names) + 1)], (step, seed)
            assert len(names) == journal.last_offset >= acknowledged[-1], (step, seed)
            # And it goes on from there, through another orderly restart.
            following = journal.last_offset + 1
            journal.append([(following, kit.topic(following))])
            assert topics_of(opened(survivor)[1]) == [*names, f"t{following}"]


def test_power_loss_during_recovery_is_recovered_from(disk, kit):
    journal, _ = opened(disk)
    journal.append([(1, kit.topic(1))])
    put(disk, LOG, disk.read_bytes(LOG) + b"\0\0\0\x50torn")
    for step in (1, 2):
        for seed in range(8):
            crashing = disk.after_power_loss(random.Random(seed))
            crashing.steps_left = step
            with pytest.raises(kit.PowerLoss):
                opened(crashing)
            assert topics_of(opened(crashing.after_power_loss(random.Random(seed)))[1]) == ["t1"]
