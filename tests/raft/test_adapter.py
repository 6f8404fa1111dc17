"""The adapter works with one version of the library, and disables its pickle."""

from __future__ import annotations

import logging
from dataclasses import replace

import pysyncobj.pickle
import pysyncobj.syncobj
import pytest

from kafkalite.raft import adapter
from kafkalite.raft.entries import NO_OP
from kafkalite.rng import seeded_rng
from proof.raft.world import STILL, World


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(adapter, "VERSION", "0.3.18")
    with pytest.raises(adapter.WrongLibraryError, match=r"pip install pysyncobj==0\.3\.17"):
        adapter.check_library()


def test_a_library_without_an_overridden_method_is_refused(monkeypatch):
    monkeypatch.delattr(adapter.SyncObj, "_SyncObj__applyLogEntries")
    with pytest.raises(adapter.WrongLibraryError, match="applyLogEntries"):
        adapter.check_library()


@pytest.mark.parametrize("name", ["loads", "load", "dumps", "dump"])
def test_pickle_is_dead(name):
    with pytest.raises(AssertionError, match="tried to use pickle"):
        getattr(pysyncobj.pickle, name)(b"cos\nsystem\n(S'true'\ntR.")


def test_a_command_that_the_library_would_unpickle_ends_the_node():
    world = World(1, seeded_rng(1))
    world.found()
    world.up[1].node.voter._applyCommand(b"\x8b", None, 3)  # VERSION, as setCodeVersion would append it
    world.tick(1)
    world.tick(1)
    assert "is of unknown kind" in str(world.up[1].failure)


def test_a_no_op_has_the_librarys_number():
    assert pysyncobj.syncobj._COMMAND_TYPE.NO_OP == NO_OP
    assert pysyncobj.syncobj._COMMAND_TYPE.REGULAR == 0


def test_the_librarys_warning_of_truncation_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("pysyncobj.syncobj").critical(
            "truncating already-applied log entries from index %d", 1
        )
        logging.getLogger("pysyncobj.syncobj").critical("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_after_a_sleep_a_voter_first_reads_pending_messages():
    world = World(3, seeded_rng(1))
    world.found()
    world.clock[0] += 10**6
    world.tick(2)
    assert world.pending(2, 1) == world.pending(2, 3) == []
    assert world.up[2].leader == (1, 1)


def test_a_leader_that_slept_first_reads_pending_messages():
    world = World(3, seeded_rng(1))
    world.found()
    world.clock[0] += world.settings.fetch_timeout_ms / 1000 + 1
    world.tick(1)
    world.settle()
    assert world.leaders() == [(1, 1)]


def test_a_leader_that_no_majority_answers_steps_down():
    world = World(3, seeded_rng(1), replace(STILL, fetch_timeout_ms=10_000_000))
    world.found()
    world.isolate(1)
    world.up[1].propose("unknown")
    for _ in range(6):
        world.clock[0] += 2_000
        world.tick(1)
    assert world.leaders() == []
    assert world.outcomes == {"unknown": None}
    assert world.up[1].leader == (None, 1)


def test_a_stale_leader_and_a_stale_candidate_receive_the_newer_term():
    world = World(3, seeded_rng(1))
    world.found()
    world.isolate(1)
    world.elect(2)
    world.settle(2, 3)
    world.link(1, 3)
    world.tick(1)
    world.deliver(1, 3)
    world.deliver(3, 1)
    assert (world.leaders(), world.up[1].term) == ([(2, 2)], 2)
    request = {"type": "request_vote", "term": 1, "last_log_index": 9, "last_log_term": 1, "directory": b""}
    world.inject(3, 2, request)
    assert {"type": "stale_term", "term": 2} in world.pending(2, 3)
