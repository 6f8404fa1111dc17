"""A quorum of one: compare-and-append, one sync for many, durable before anybody is told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kafkalite.errors import DiskFullError, LogOfflineError, ShuttingDownError
from kafkalite.raft.journal import LOG_FILE, SNAPSHOT_FILE
from kafkalite.raft.quorum import Quorum, StaleImageError
from kafkalite.raft.single_quorum import SingleQuorum

LOG, SNAPSHOT = f"meta/{LOG_FILE}", f"meta/{SNAPSHOT_FILE}"


@pytest.fixture(params=["memory", "journal"])
def quorum(request, kit, disk):
    if request.param == "memory":
        return SingleQuorum()
    return SingleQuorum(disk, "meta", executor=kit.InlineExecutor())


async def started(quorum, kit):
    machine = kit.Machine()
    quorum.attach(machine)
    await quorum.start()
    return machine


async def test_a_commit_is_applied_before_it_returns(quorum: Quorum, kit):
    machine = await started(quorum, kit)
    assert (quorum.offset, quorum.leader_id) == (0, 1)
    assert await quorum.commit(kit.topic(1), 0) == 1
    assert machine.applied == [(1, kit.topic(1))]
    assert await quorum.commit(kit.topic(2), 1) == 2
    assert quorum.offset == 2
    await quorum.stop()


async def test_a_decision_on_an_older_state_is_refused_and_leaves_nothing(quorum, kit):
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(1), 0)
    for decided_on in (0, 2):
        with pytest.raises(StaleImageError, match="decide again") as caught:
            await quorum.commit(kit.topic(2), decided_on)
        assert (caught.value.decided_on, caught.value.offset) == (decided_on, 1)
    assert machine.names == ["t1"]
    await quorum.stop()


async def test_of_two_decisions_on_the_same_state_one_holds(quorum, kit):
    machine = await started(quorum, kit)
    results = await asyncio.gather(
        quorum.commit(kit.topic(1), 0), quorum.commit(kit.topic(2), 0), return_exceptions=True
    )
    assert results[0] == 1
    assert isinstance(results[1], StaleImageError)
    assert machine.names == ["t1"]
    await quorum.stop()


async def test_a_stopped_quorum_takes_no_more(quorum, kit):
    with pytest.raises(ShuttingDownError):
        await quorum.commit(kit.topic(1), 0)
    await started(quorum, kit)
    await quorum.stop()
    with pytest.raises(ShuttingDownError):
        await quorum.commit(kit.topic(1), 0)


async def test_a_quorum_drives_one_machine(quorum, kit):
    with pytest.raises(AssertionError, match="attach a state machine first"):
        await quorum.start()
    quorum.attach(kit.Machine())
    with pytest.raises(AssertionError, match="already"):
        quorum.attach(kit.Machine())


async def test_a_restart_replays_what_was_committed(disk, kit):
    quorum = SingleQuorum(disk, "meta")  # the loop's own executor: real threads
    await started(quorum, kit)
    for number in range(3):
        await quorum.commit(kit.topic(number), number)
    await quorum.stop()
    quorum = SingleQuorum(disk, "meta")
    machine = await started(quorum, kit)
    assert machine.loaded is None
    assert [offset for offset, _ in machine.applied] == [1, 2, 3]
    assert quorum.offset == 3
    assert await quorum.commit(kit.topic(3), 3) == 4
    await quorum.stop()


async def test_nothing_is_applied_or_answered_before_the_sync(disk, kit):
    executor = kit.HeldExecutor()
    quorum = SingleQuorum(disk, "meta", executor=executor)
    machine = kit.Machine()
    quorum.attach(machine)
    starting = asyncio.create_task(quorum.start())
    await kit.turn()
    executor.run_one()
    await starting
    commit = asyncio.create_task(quorum.commit(kit.topic(1), 0))
    await kit.turn()
    assert not commit.done()
    assert (machine.applied, quorum.offset) == ([], 0)
    executor.run_one()
    assert await commit == 1
    assert machine.names == ["t1"]
    await quorum.stop()


async def test_commits_that_arrive_during_a_sync_share_the_next_one(disk, kit):
    executor = kit.HeldExecutor()
    quorum = SingleQuorum(disk, "meta", executor=executor)
    machine = kit.Machine()
    quorum.attach(machine)
    starting = asyncio.create_task(quorum.start())
    await kit.turn()
    executor.run_one()
    await starting
    before = disk.sync_count
    commits = [asyncio.create_task(quorum.commit(kit.topic(0), 0))]
    await kit.turn()
    for number in range(1, 100):
        commits.append(asyncio.create_task(quorum.commit(kit.topic(number), number)))
    await kit.turn()
    assert len(executor.calls) == 1
    executor.run_one()
    await kit.turn()
    executor.run_one()
    assert await asyncio.gather(*commits) == list(range(1, 101))
    assert disk.sync_count == before + 2
    assert machine.names == [f"t{number}" for number in range(100)]
    await quorum.stop()


async def test_stopping_waits_for_what_was_begun(disk, kit):
    executor = kit.HeldExecutor()
    quorum = SingleQuorum(disk, "meta", executor=executor)
    machine = kit.Machine()
    quorum.attach(machine)
    starting = asyncio.create_task(quorum.start())
    await kit.turn()
    executor.run_one()
    await starting
    commit = asyncio.create_task(quorum.commit(kit.topic(1), 0))
    await kit.turn()
    stopping = asyncio.create_task(quorum.stop())
    await kit.turn()
    assert not stopping.done()
    executor.run_one()
    await stopping
    assert await commit == 1


async def test_a_cancelled_commit_takes_effect_all_the_same(disk, kit):
    executor = kit.HeldExecutor()
    quorum = SingleQuorum(disk, "meta", executor=executor)
    machine = kit.Machine()
    quorum.attach(machine)
    starting = asyncio.create_task(quorum.start())
    await kit.turn()
    executor.run_one()
    await starting
    commits = [asyncio.create_task(quorum.commit(kit.topic(number), number)) for number in range(2)]
    await kit.turn()
    commits[0].cancel()
    await kit.turn()
    executor.run_one()
    assert await commits[1] == 2
    assert machine.names == ["t0", "t1"]
    await quorum.stop()


async def test_a_full_disk_refuses_and_the_quorum_goes_on_when_there_is_space(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(0), 0)
    disk.full = True
    # The second was decided on the first, which is not going to be.
    results = await asyncio.gather(
        quorum.commit(kit.topic(1), 1), quorum.commit(kit.topic(2), 2), return_exceptions=True
    )
    assert [type(result) for result in results] == [DiskFullError, DiskFullError]
    assert machine.failure is None
    disk.full = False
    assert await quorum.commit(kit.topic(3), 1) == 2
    assert machine.names == ["t0", "t3"]
    await quorum.stop()


async def test_a_failed_sync_is_final(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(0), 0)
    disk.failing = {"sync"}
    with pytest.raises(LogOfflineError, match="has stopped"):
        await quorum.commit(kit.topic(1), 1)
    assert isinstance(machine.failure, LogOfflineError)
    disk.failing = set()
    with pytest.raises(LogOfflineError):
        await quorum.commit(kit.topic(1), 1)
    assert machine.names == ["t0"]
    await quorum.stop()


async def test_an_entry_that_cannot_be_replayed_ends_the_quorum(quorum, kit):
    machine = await started(quorum, kit)
    machine.raising = AssertionError("broken invariant")
    with pytest.raises(LogOfflineError, match="broken invariant"):
        await quorum.commit(kit.topic(1), 0)
    assert machine.failure is machine.raising
    with pytest.raises(LogOfflineError, match="broken invariant"):
        await quorum.commit(kit.topic(1), 0)
    await quorum.stop()


async def test_the_journal_stays_bounded(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor(), snapshot_min_bytes=1_000)
    machine = await started(quorum, kit)
    largest = 0
    for number in range(200):
        await quorum.commit(kit.topic(number), number)
        largest = max(largest, len(disk.read_bytes(LOG)))
    await quorum.stop()
    snapshot_bytes = len(disk.read_bytes(SNAPSHOT))
    assert snapshot_bytes > 4_000
    assert largest < snapshot_bytes + 1_000
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    again = await started(quorum, kit)
    assert again.loaded is not None
    assert again.names == machine.names
    assert quorum.offset == 200
    await quorum.stop()


async def test_a_snapshot_that_finds_no_room_is_tried_again_later(disk, kit, caplog, monkeypatch):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor(), snapshot_min_bytes=500)
    machine = await started(quorum, kit)
    write_atomically = disk.write_atomically

    def refuse(path, data):
        raise DiskFullError("no space left")

    monkeypatch.setattr(disk, "write_atomically", refuse)
    with caplog.at_level(logging.WARNING):
        for number in range(12):
            await quorum.commit(kit.topic(number), number)
    assert 1 <= caplog.text.count("no room for a snapshot") <= 3
    assert not disk.exists(SNAPSHOT)
    monkeypatch.setattr(disk, "write_atomically", write_atomically)
    for number in range(12, 24):
        await quorum.commit(kit.topic(number), number)
    assert disk.exists(SNAPSHOT)
    assert len(machine.names) == 24
    await quorum.stop()


async def test_a_snapshot_that_fails_ends_the_quorum_after_the_commit(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor(), snapshot_min_bytes=50)
    machine = await started(quorum, kit)
    disk.failing = {"sync_dir"}
    assert await quorum.commit(kit.topic(0), 0) == 1
    await quorum.stop()
    assert isinstance(machine.failure, LogOfflineError)


def test_a_file_system_needs_a_directory(disk):
    with pytest.raises(AssertionError, match="needs a directory"):
        SingleQuorum(disk)
