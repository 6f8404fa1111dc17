"""The metadata files of older single nodes: read from golden bytes, converted, and refused if damaged."""

from __future__ import annotations

import random

import pytest

from kafkalite.errors import CorruptLogError, StorageError
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import ConfigRecord, ProducerIdsRecord
from kafkalite.raft import legacy_journal
from kafkalite.raft.frames import frame
from kafkalite.raft.metadata_log import MetadataLog
from kafkalite.raft.single_quorum import SingleNodeLog
from proof.disk_trees import disk_with_files, tree_of

LOG, SNAPSHOT = "/meta/metadata.log", "/meta/metadata.snapshot"

# Written by the last version that had this format: topic 1, topic 2 with a config, a snapshot, two entries.
GOLDEN_LOG = bytes.fromhex(
    "0000001a3108e90793b66b61666b616c6974652d6d657461646174612d6c6f6701000000005ba7f15c0e91920192940100d9"
    "203030303030303030303030303030303030303030303030303030303030303031a274319b0301d920303030303030303030"
    "3030303030303030303030303030303030303030303031009101910101000090900000007c10e1caa992920292940100d920"
    "3030303030303030303030303030303030303030303030303030303030303032a274329b0301d92030303030303030303030"
    "3030303030303030303030303030303030303030303200910191010100009090920391960400a5746f706963a27432ac7265"
    "74656e74696f6e2e6d73a431303030"
)
GOLDEN_SNAPSHOT = bytes.fromhex(
    "000000ec79ddb2b894bb6b61666b616c6974652d6d657461646174612d736e617073686f74010395940100d9203030303030"
    "303030303030303030303030303030303030303030303030303031a274319b0301d920303030303030303030303030303030"
    "303030303030303030303030303030303100910191010100009090940100d920303030303030303030303030303030303030"
    "3030303030303030303030303032a274329b0301d92030303030303030303030303030303030303030303030303030303030"
    "3030303200910191010100009090960400a5746f706963a27432ac726574656e74696f6e2e6d73a431303030"
)
GOLDEN_LOG_AFTER_SNAPSHOT = bytes.fromhex(
    "0000001a22581af393b66b61666b616c6974652d6d657461646174612d6c6f6701030000005b99cc991f91920492940100d9"
    "203030303030303030303030303030303030303030303030303030303030303034a274349b0301d920303030303030303030"
    "3030303030303030303030303030303030303030303034009101910101000090900000000ab799bda791920591930800cd03"
    "e8"
)
CONFIG = ConfigRecord("topic", "t2", "retention.ms", "1000")
HEADER = frame(["kafkalite-metadata-log", 1, 0])


def disk_with(files):
    return disk_with_files({LOG: HEADER, **files})


def names(records):
    return [record.name for record in records if type(record).__name__ == "TopicRecord"]


def test_the_golden_log_is_read(kit):
    offset, records = legacy_journal.read(disk_with({LOG: GOLDEN_LOG}), "/meta")
    assert offset == 3
    decoded = record_codec.from_bytes(records)
    assert set(decoded) == {*kit.topic(1), *kit.topic(2), CONFIG}


def test_the_golden_snapshot_and_the_log_after_it_are_read(kit):
    disk = disk_with({LOG: GOLDEN_LOG_AFTER_SNAPSHOT, SNAPSHOT: GOLDEN_SNAPSHOT})
    offset, records = legacy_journal.read(disk, "/meta")
    assert offset == 5
    expected = {*kit.topic(1), *kit.topic(2), *kit.topic(4), CONFIG, ProducerIdsRecord(1000)}
    assert set(record_codec.from_bytes(records)) == expected


def test_entries_that_the_snapshot_covers_are_skipped():
    disk = disk_with({LOG: GOLDEN_LOG, SNAPSHOT: GOLDEN_SNAPSHOT})
    assert legacy_journal.read(disk, "/meta")[0] == 3


@pytest.mark.parametrize("cut_bytes", [1, 5, 9, 30])
def test_a_torn_tail_is_ignored(cut_bytes):
    offset, records = legacy_journal.read(disk_with({LOG: GOLDEN_LOG[:-cut_bytes]}), "/meta")
    assert (offset, names(record_codec.from_bytes(records))) == (1, ["t1"])


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({LOG: frame(["kafkalite-metadata-log", 2, 0])}, StorageError, r"format version 2,.*newer kafkalite"),
        ({LOG: frame(["something else", 1, 0])}, CorruptLogError, "a header of kafkalite-metadata-log"),
        ({LOG: GOLDEN_LOG[:40] + b"x" + GOLDEN_LOG[41:]}, CorruptLogError, "an intact frame"),
        ({LOG: b"x" + GOLDEN_LOG[1:]}, CorruptLogError, "an intact frame"),
        ({LOG: HEADER + frame([5])}, CorruptLogError, "an entry"),
        ({LOG: HEADER + frame([[1, [[99, 0]]]])}, StorageError, r"metadata\.log at position .*type 99"),
        ({LOG: GOLDEN_LOG_AFTER_SNAPSHOT}, CorruptLogError, "a snapshot at offset 3 or above"),
        ({SNAPSHOT: GOLDEN_SNAPSHOT[:-1]}, CorruptLogError, "one intact frame"),
        ({SNAPSHOT: frame(["kafkalite-metadata-snapshot", 7, 0, []])}, StorageError, "format version 7"),
    ],
)
def test_damaged_files_and_other_versions_are_refused(files, error, match):
    disk = disk_with(files)
    with pytest.raises(error, match=match):
        SingleNodeLog(disk, "/meta", 1, b"d" * 16).open()
    assert tree_of(disk) == tree_of(disk_with(files)), "nothing was changed"


def test_a_snapshot_without_its_log_is_refused():
    disk = disk_with_files({SNAPSHOT: GOLDEN_SNAPSHOT})
    with pytest.raises(StorageError, match=r"metadata\.log is missing"):
        SingleNodeLog(disk, "/meta", 1, b"d" * 16).open()


def test_the_files_are_converted_with_their_offsets(kit):
    disk = disk_with({LOG: GOLDEN_LOG_AFTER_SNAPSHOT, SNAPSHOT: GOLDEN_SNAPSHOT})
    for _ in range(2):
        log = SingleNodeLog(disk, "/meta", 1, b"d" * 16)
        recovered = log.open()
        assert (recovered.snapshot_offset, names(recovered.snapshot_records)) == (5, ["t1", "t2", "t4"])
        assert not recovered.entries
        assert disk.list_dir("/meta") == ["raft.end", "raft.log", "raft.snapshot"]
    log.append([(log.journal.last_index + 1, kit.topic(9))])
    assert SingleNodeLog(disk, "/meta", 1, b"e" * 16).open().entries == [(7, kit.topic(9))]


def test_an_empty_log_is_converted(kit):
    disk = disk_with({})
    assert SingleNodeLog(disk, "/meta", 1, b"d" * 16).open().entries == []
    assert disk.list_dir("/meta") == ["raft.end", "raft.log"]


def test_a_voter_converts_them_too():
    disk = disk_with({LOG: GOLDEN_LOG})
    log = MetadataLog(disk, "/meta", node_id=1, voters=[1, 2, 3])
    log.open(b"d" * 16)
    assert log.journal.identity.bootstrap_voters == {1: b"d" * 16}
    assert log.snapshots.current.offset == 3


def test_power_loss_at_every_step_of_a_conversion_loses_nothing(kit):
    files = {"meta/metadata.log": GOLDEN_LOG_AFTER_SNAPSHOT, "meta/metadata.snapshot": GOLDEN_SNAPSHOT}

    def fresh():
        disk = kit.CrashDisk()
        for path, data in files.items():
            disk.write_atomically(path, data)
        disk.steps = 0
        return disk

    disk = fresh()
    SingleNodeLog(disk, "meta", 1, b"d" * 16).open()
    for step in range(1, disk.steps + 1):
        for seed in range(12):
            crashing = fresh()
            crashing.steps_left = step
            with pytest.raises(kit.PowerLoss):
                SingleNodeLog(crashing, "meta", 1, b"d" * 16).open()
            survivor = crashing.after_power_loss(random.Random(seed))
            recovered = SingleNodeLog(survivor, "meta", 1, b"e" * 16).open()
            assert (recovered.snapshot_offset, names(recovered.snapshot_records)) == (5, ["t1", "t2", "t4"])
