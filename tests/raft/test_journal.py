"""The journal: damage is refused, a torn tail is truncated, and everything synced is read again."""

from __future__ import annotations

import random

import pytest

from kafkalite.errors import (
    CorruptLogError,
    DataDirectoryError,
    DiskFullError,
    LogOfflineError,
    StorageError,
    TooManyOpenFilesError,
)
from kafkalite.raft.entries import FIRST_ENTRY
from kafkalite.raft.frames import frame
from kafkalite.raft.journal import Identity, Journal
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of

LOG = "/meta/raft.log"
DIRECTORY = b"d" * 16


def created(disk=None):
    disk = disk or MemoryFileSystem(crashable=True)
    journal = Journal(disk, "/meta")
    journal.create(Identity(1, DIRECTORY, False, {}), [FIRST_ENTRY], term=0, vote=None)
    return disk, journal


def reopened(disk):
    journal = Journal(disk, "/meta")
    journal.open(1)
    return journal


def filled():
    """Return a log with five entries after the first, each synced on its own."""
    disk, journal = created()
    for index in range(2, 7):
        journal.add(b"\x00%d" % index, index, 1)
        journal.sync()
    return disk, journal


def damaged(disk, data):
    return disk_with_files({**tree_of(disk), LOG: data})


def test_synced_changes_are_read_back():
    disk, journal = filled()
    journal.setCurrentTerm(4, 2)
    journal.set_eligibility(is_voter=True, bootstrap_voters={1: b"a", 2: b"b"})
    journal.add(b"\x00lost", 7, 4)  # never synced
    again = reopened(disk)
    assert again[:] == [FIRST_ENTRY, *((b"\x00%d" % index, index, 1) for index in range(2, 7))]
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (4, 2)
    assert (again.identity.directory, again.identity.is_voter) == (DIRECTORY, True)
    assert again.identity.bootstrap_voters == {1: b"a", 2: b"b"}
    assert again.getRaftCommitIndex() == 1


def test_the_bytes_are_as_documented():
    disk, journal = created()
    journal.add(b"\x00abc", 2, 1)
    journal.add(b"\x01", 3, 1)
    journal.sync()
    header = frame(["kafkalite-raft-log", 1, 1, DIRECTORY, False, [], 0, None])
    first = frame([[1, 1, 0, b"\x01"]])
    assert disk.read_bytes(LOG) == header + first + frame([[1, 2, 1, b"\x00abc"], [1, 3, 1, b"\x01"]])


def test_a_torn_tail_is_cut(caplog):
    disk, _ = filled()
    whole = disk.read_bytes(LOG)
    last = len(frame([[1, 6, 1, b"\x006"]]))
    for cut in range(1, last):
        torn = damaged(disk, whole[:-cut])
        torn.unlink("/meta/raft.end")  # the write was interrupted before the end was recorded
        assert reopened(torn).last_index == 5
        assert torn.read_bytes(LOG) == whole[:-last]
    assert "torn tail" in caplog.text


def test_r25_a_frame_that_was_synced_and_is_cut_off_is_refused():
    disk, _ = filled()
    whole = disk.read_bytes(LOG)
    for cut in (1, 5, 30, len(whole) // 2):
        with pytest.raises(CorruptLogError, match=f"frames up to position {len(whole)}, which were synced"):
            reopened(damaged(disk, whole[:-cut]))


def test_r25_a_journal_that_is_not_the_recorded_one_is_refused():
    disk, journal = filled()
    older = disk.read_bytes(LOG)
    journal.setCurrentTerm(7, None)
    journal.compact(3)
    with pytest.raises(CorruptLogError, match=r"the journal that raft\.end describes"):
        reopened(damaged(disk, older))


@pytest.mark.parametrize("content", [None, b"", bytes(20), b"x" * 20, b"x"])
def test_without_a_readable_end_the_journal_is_opened(content):
    disk, journal = filled()
    disk.unlink("/meta/raft.end")
    if content is not None:
        disk.open("/meta/raft.end", create=True).write_at(0, content)
    again = reopened(disk)
    assert again.last_index == journal.last_index
    assert len(disk.read_bytes("/meta/raft.end")) == 20


def test_a_crash_while_the_journal_is_replaced_leaves_no_end_of_the_longer_one(monkeypatch):
    disk, journal = filled()
    monkeypatch.setattr(journal, "_note_end", lambda: None)
    journal.compact(4)
    assert reopened(disk).last_index == journal.last_index


def test_damage_in_the_middle_is_refused_wherever_it_is():
    disk, _ = filled()
    whole = disk.read_bytes(LOG)
    last = len(frame([[1, 6, 1, b"\x006"]]))
    for at in range(0, len(whole) - last, 3):
        rotten = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        with pytest.raises(StorageError):
            reopened(damaged(disk, rotten))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (["kafkalite-raft-log", 2, 1], StorageError),
        (["something-else", 1, 1], CorruptLogError),
        (["kafkalite-raft-log", 1, 2, DIRECTORY, True, [], 0, None], DataDirectoryError),
        ({"a": 1}, CorruptLogError),
    ],
)
def test_a_header_of_another_kind_is_refused(value, error):
    disk, _ = created()
    with pytest.raises(error):
        reopened(damaged(disk, frame(value)))


@pytest.mark.parametrize("change", [[1, 9, 1, b"\x00gap"], [5], [2, "x", None], 7])
def test_a_change_without_sense_is_refused(change):
    disk, _ = filled()
    with pytest.raises(CorruptLogError):
        reopened(damaged(disk, disk.read_bytes(LOG) + frame([change])))


def test_only_conflicting_entries_are_truncated():
    disk, journal = filled()
    journal.deleteEntriesFrom(2)
    journal.add(b"\x00other", 4, 1)  # the same term: the same entry
    assert journal.last_index == 6
    journal.add(b"\x00newer", 5, 2)
    assert journal[:][-2:] == [(b"\x004", 4, 1), (b"\x00newer", 5, 2)]
    journal.sync()
    assert reopened(disk)[:] == journal[:]
    journal.setRaftCommitIndex(5)
    with pytest.raises(AssertionError, match="committed"):
        journal.add(b"\x00no", 5, 3)
    with pytest.raises(AssertionError, match="does not follow"):
        journal.add(b"\x00no", 9, 3)


def test_compaction_keeps_the_tail_the_term_and_the_vote():
    disk, journal = filled()
    journal.setCurrentTerm(3, 2)
    journal.set_eligibility(is_voter=True, bootstrap_voters={1: b"a"})
    journal.compact(4)
    assert [index for _, index, _ in journal[:]] == [4, 5, 6]
    journal.add(b"\x007", 7, 3)
    journal.sync()
    again = reopened(disk)
    assert again[:] == journal[:]
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, 2)
    assert again.identity == journal.identity


@pytest.mark.parametrize("seed", range(30))
def test_power_may_be_lost_anywhere(seed):
    """Entries, terms and compactions that were made durable survive any power loss."""
    rng = random.Random(seed)
    disk, journal = created()
    promised = list(journal[:])
    for _ in range(rng.randrange(1, 25)):
        choice = rng.randrange(6)
        if choice < 4:
            journal.add(b"\x00" + rng.randbytes(rng.choice([3, 600, 5_000])), journal.last_index + 1, 1)
        elif choice == 4:
            journal.sync()
            promised = list(journal[:])
        elif len(journal) > 2:
            journal.compact(journal.last_index - 1)
            promised = list(journal[:])
    disk.crash(rng)
    assert reopened(disk)[: len(promised)] == promised


def test_a_failed_sync_is_final():
    _, journal = filled()
    journal.add(b"\x00x", 7, 1)
    journal._filesystem.fail_next_sync()
    with pytest.raises(LogOfflineError, match=r"raft\.log could not be synced"):
        journal.sync()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("loses_pages", [False, True])
def test_r26_an_entry_whose_sync_failed_is_durable_once_it_was_read(loses_pages, seed):
    """The next process reads the entry, and may vote and acknowledge with it."""
    disk, journal = filled()
    journal.add(b"\x00x", 7, 1)
    disk.fail_next_sync(loses_pages=loses_pages)
    with pytest.raises(LogOfflineError):
        journal.sync()
    read = list(reopened(disk)[:])
    disk.crash(random.Random(seed))
    assert reopened(disk)[:] == read


def test_a_full_disk_leaves_the_file_as_it_was():
    disk, journal = filled()
    whole = disk.read_bytes(LOG)
    disk.capacity_bytes = disk.used_bytes()
    journal.add(b"\x00x", 7, 1)
    for write in (journal.sync, lambda: journal.compact(3)):
        with pytest.raises(DiskFullError):
            write()
        assert disk.read_bytes(LOG) == whole
    journal.discard_unsynced(6)
    disk.capacity_bytes = None
    journal.add(b"\x00y", 7, 1)
    journal.sync()
    assert reopened(disk)[-1] == (b"\x00y", 7, 1)


def test_r55_a_lack_of_descriptors_after_compaction_is_passing():
    """The entries of the new file stay, and what is synced later is in it, not in the former one."""
    disk, journal = filled()

    def refuse(path, *, create=False):
        raise TooManyOpenFilesError(f"no file descriptor left for {path}: simulated")

    replace = disk.write_atomically

    def write_atomically(path, data):
        replace(path, data)
        vars(disk)["open"] = refuse

    vars(disk)["write_atomically"] = write_atomically
    with pytest.raises(TooManyOpenFilesError):
        journal.compact(3)
    journal.add(b"\x00x", 7, 1)
    with pytest.raises(TooManyOpenFilesError):
        journal.sync()
    journal.discard_unsynced(6)
    del vars(disk)["open"], vars(disk)["write_atomically"]
    journal.add(b"\x00y", 7, 1)
    journal.sync()
    assert [entry[0] for entry in reopened(disk)] == [b"\x003", b"\x004", b"\x005", b"\x006", b"\x00y"]


def test_a_log_that_agrees_with_its_snapshot_stays_whole():
    _, journal = filled()
    journal.align((b"\x003", 3, 1), (b"\x004", 4, 1))
    assert (journal.first_index, journal.last_index, journal.getRaftCommitIndex()) == (1, 6, 4)


def test_a_log_that_does_not_gives_way():
    disk, journal = filled()
    journal.align((b"\x00c", 3, 1), (b"\x00d", 4, 2))
    assert journal[:] == [(b"\x00c", 3, 1), (b"\x00d", 4, 2)]
    assert reopened(disk)[:] == journal[:]
    _, journal = filled()
    journal.align((b"\x00c", 30, 1), (b"\x00d", 31, 1))
    assert (journal.first_index, journal.last_index) == (30, 31)
    with pytest.raises(CorruptLogError, match="as its snapshot ends"):
        journal.align((b"\x00c", 3, 1), (b"\x00d", 4, 1))


def test_a_journal_that_was_refused_can_be_closed():
    disk, _ = filled()
    journal = Journal(damaged(disk, disk.read_bytes(LOG)[:-5]), "/meta")
    with pytest.raises(CorruptLogError):
        journal.open(1)
    journal.close()
