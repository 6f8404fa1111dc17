"""Which directories a single node and a voter may open, and that each reads the files of the other."""

from __future__ import annotations

import pytest

from kafkalite.errors import DataDirectoryError
from kafkalite.raft.entries import FIRST_ENTRY
from kafkalite.raft.journal import Identity, Journal
from kafkalite.raft.metadata_log import MetadataLog
from kafkalite.raft.snapshot_store import Snapshot
from kafkalite.raft.voter_set import VoterKey, VoterSet, command_of
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files

DIRECTORY = b"d" * 16
ALL = {1: DIRECTORY, 2: b"b", 3: b"c"}


def disk_of(is_voter, bootstrap_voters):
    disk = MemoryFileSystem()
    identity = Identity(1, DIRECTORY, is_voter, bootstrap_voters)
    Journal(disk, "/meta").create(identity, [FIRST_ENTRY], term=0, vote=None)
    return disk


def opened(disk, voters, **more):
    log = MetadataLog(disk, "/meta", node_id=1, voters=voters)
    log.open(b"e" * 16, **more)
    return log.journal.identity


def test_a_new_directory_is_a_voters_or_a_single_nodes():
    assert opened(MemoryFileSystem(), [1, 2, 3]) == Identity(1, b"e" * 16, False, {})
    assert opened(MemoryFileSystem(), None) == Identity(1, b"e" * 16, True, {1: b"e" * 16})


@pytest.mark.parametrize("voters", [None, [1], [1, 2, 3]])
def test_the_directory_of_a_single_node_serves_both(voters):
    assert opened(disk_of(True, {1: DIRECTORY}), voters).directory == DIRECTORY


@pytest.mark.parametrize("known", [{}, ALL])
def test_a_single_node_refuses_the_directory_of_a_voter(known):
    with pytest.raises(DataDirectoryError, match="of a node of a cluster"):
        opened(disk_of(bool(known), known), None)


def test_a_voter_refuses_a_directory_of_other_voters():
    assert opened(disk_of(True, ALL), [3, 2, 1]).bootstrap_voters == ALL
    with pytest.raises(DataDirectoryError, match=r"nodes \[1, 2, 3\], and not \[1, 2, 4\]"):
        opened(disk_of(True, ALL), [1, 2, 4])


def test_r25_an_older_copy_names_the_command_that_accepts_it():
    disk = disk_of(True, {1: DIRECTORY})
    with pytest.raises(DataDirectoryError, match=r"at least 7 records in doubt.*'kl log accept-loss /meta'"):
        opened(disk, [1], known_offset=8)
    assert opened(disk, [1], known_offset=1).directory == DIRECTORY


def test_a_lost_journal_is_refused_unless_the_node_may_rejoin():
    with pytest.raises(DataDirectoryError, match="--rejoin"):
        opened(MemoryFileSystem(), [1, 2, 3], allow_new=False)
    disk = disk_with_files({"/meta/raft.snapshot": b"x"})
    with pytest.raises(DataDirectoryError, match=r"raft\.snapshot without raft\.log"):
        opened(disk, [1, 2, 3])


def test_r93_a_log_that_lists_other_voters_is_refused_by_a_node_on_its_own():
    disk = MemoryFileSystem()
    log = MetadataLog(disk, "/meta", node_id=1)
    log.open(DIRECTORY)
    two = {1: VoterKey(DIRECTORY, "a:1"), 2: VoterKey(b"two", "b:1")}
    for index, voters in enumerate(({1: two[1]}, two), 2):
        log.journal.add(command_of(voters), index, 1)
        log.journal.sync()
        log.journal.close()
        log = MetadataLog(disk, "/meta", node_id=1)
        if voters is not two:
            log.open(DIRECTORY)
    with pytest.raises(DataDirectoryError, match=r"whose voters are \[1, 2\]"):
        log.open(DIRECTORY)
    MetadataLog(disk, "/meta", node_id=1, voters=[1]).open(DIRECTORY)


def test_r93_a_snapshot_keeps_the_voters_that_its_entries_list():
    disk = MemoryFileSystem()
    log = MetadataLog(disk, "/meta", node_id=1, voters=[1])
    log.open(DIRECTORY)
    voters = {1: VoterKey(DIRECTORY, "a:1"), 2: VoterKey(b"two", "b:1")}
    entries = [(command_of(voters), 2, 1), (b"\x01", 3, 1), (b"\x01", 4, 1)]
    for entry in entries:
        log.journal.add(*entry)
    log.store_snapshot(Snapshot(entries[1], entries[2], 0, b""), 3)
    log.journal.close()
    again = MetadataLog(disk, "/meta", node_id=1, voters=[1])
    again.open(DIRECTORY)
    assert again.journal.first_index == 3
    assert again.journal.voters.latest == VoterSet(2, voters)
