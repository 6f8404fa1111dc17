"""A quorum of one node: compare-and-append, one sync for many commits, durable before it is reported."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from kafkalite.errors import DiskFullError, LogOfflineError, ShuttingDownError
from kafkalite.metadata import record_codec
from kafkalite.raft.frames import frame
from kafkalite.raft.journal import JOURNAL_FILE
from kafkalite.raft.quorum import Quorum, StaleImageError
from kafkalite.raft.single_quorum import SingleNodeLog, SingleQuorum
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE

FIRST = 2  # the offset of the first commit: entry 1 of every log is a no-op
LOG, SNAPSHOT = f"meta/{JOURNAL_FILE}", f"meta/{SNAPSHOT_FILE}"


@pytest.fixture(params=["memory", "journal", "inline"])
def quorum(request, kit, disk):
    if request.param == "memory":
        return SingleQuorum()
    if request.param == "inline":
        return SingleQuorum(disk, "meta", is_inline=True)
    return SingleQuorum(disk, "meta", executor=kit.InlineExecutor())


async def started(quorum, kit):
    machine = kit.Machine()
    quorum.attach(machine)
    await quorum.start()
    return machine


async def test_a_commit_is_applied_before_it_returns(quorum: Quorum, kit):
    machine = await started(quorum, kit)
    assert (quorum.offset, quorum.leader_id) == (0, 1)
    assert await quorum.commit(kit.topic(1), 0) == FIRST
    assert machine.applied == [(FIRST, kit.topic(1))]
    assert await quorum.commit(kit.topic(2), FIRST) == FIRST + 1
    assert quorum.offset == FIRST + 1
    await quorum.stop()


async def test_a_decision_on_an_older_state_is_refused_and_leaves_nothing(quorum, kit):
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(1), 0)
    for decided_on in (0, 1, FIRST + 1):
        with pytest.raises(StaleImageError, match="decide again") as caught:
            await quorum.commit(kit.topic(2), decided_on)
        assert (caught.value.decided_on, caught.value.offset) == (decided_on, FIRST)
    assert machine.names == ["t1"]
    await quorum.stop()


async def test_of_two_decisions_on_the_same_state_one_holds(quorum, kit):
    machine = await started(quorum, kit)
    results = await asyncio.gather(
        quorum.commit(kit.topic(1), 0), quorum.commit(kit.topic(2), 0), return_exceptions=True
    )
    assert results[0] == FIRST
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


async def test_a_restart_replays_committed_entries(disk, kit):
    quorum = SingleQuorum(disk, "meta")  # the loop's own executor: real threads
    await started(quorum, kit)
    for number in range(3):
        await quorum.commit(kit.topic(number), quorum.offset)
    await quorum.stop()
    quorum = SingleQuorum(disk, "meta")
    machine = await started(quorum, kit)
    assert machine.loaded is None
    assert [offset for offset, _ in machine.applied] == [2, 3, 4]
    assert quorum.offset == 4
    assert await quorum.commit(kit.topic(3), 4) == 5
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
    assert await commit == FIRST
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
        commits.append(asyncio.create_task(quorum.commit(kit.topic(number), number + 1)))
    await kit.turn()
    assert len(executor.calls) == 1
    executor.run_one()
    await kit.turn()
    executor.run_one()
    assert await asyncio.gather(*commits) == list(range(FIRST, FIRST + 100))
    assert disk.sync_count == before + 2
    assert machine.names == [f"t{number}" for number in range(100)]
    await quorum.stop()


async def test_stopping_waits_for_pending_commits(disk, kit):
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
    assert await commit == FIRST


async def test_a_cancelled_commit_takes_effect_all_the_same(disk, kit):
    executor = kit.HeldExecutor()
    quorum = SingleQuorum(disk, "meta", executor=executor)
    machine = kit.Machine()
    quorum.attach(machine)
    starting = asyncio.create_task(quorum.start())
    await kit.turn()
    executor.run_one()
    await starting
    commits = [asyncio.create_task(quorum.commit(kit.topic(number), number and FIRST)) for number in range(2)]
    await kit.turn()
    commits[0].cancel()
    await kit.turn()
    executor.run_one()
    assert await commits[1] == FIRST + 1
    assert machine.names == ["t0", "t1"]
    await quorum.stop()


async def test_a_full_disk_refuses_commits_until_there_is_space(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(0), 0)
    disk.full = True
    # The second was decided on the first, which fails.
    results = await asyncio.gather(
        quorum.commit(kit.topic(1), FIRST), quorum.commit(kit.topic(2), FIRST + 1), return_exceptions=True
    )
    assert [type(result) for result in results] == [DiskFullError, DiskFullError]
    assert machine.failure is None
    disk.full = False
    assert await quorum.commit(kit.topic(3), FIRST) == FIRST + 1
    assert machine.names == ["t0", "t3"]
    await quorum.stop()


async def test_a_failed_sync_is_final(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    machine = await started(quorum, kit)
    await quorum.commit(kit.topic(0), 0)
    disk.failing = {"sync"}
    with pytest.raises(LogOfflineError, match="has stopped"):
        await quorum.commit(kit.topic(1), FIRST)
    assert isinstance(machine.failure, LogOfflineError)
    disk.failing = set()
    with pytest.raises(LogOfflineError):
        await quorum.commit(kit.topic(1), FIRST)
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
        await quorum.commit(kit.topic(number), quorum.offset)
        largest = max(largest, len(disk.read_bytes(LOG)))
    await quorum.stop()
    snapshot_bytes = len(disk.read_bytes(SNAPSHOT))
    assert snapshot_bytes > 4_000
    assert largest < snapshot_bytes + 1_000
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor())
    again = await started(quorum, kit)
    assert again.loaded is not None
    assert again.names == machine.names
    assert quorum.offset == FIRST + 199
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
            await quorum.commit(kit.topic(number), quorum.offset)
    assert 1 <= caplog.text.count("no room for a snapshot") <= 3
    assert not disk.exists(SNAPSHOT)
    monkeypatch.setattr(disk, "write_atomically", write_atomically)
    for number in range(12, 24):
        await quorum.commit(kit.topic(number), quorum.offset)
    assert disk.exists(SNAPSHOT)
    assert len(machine.names) == 24
    await quorum.stop()


async def test_a_snapshot_that_fails_ends_the_quorum_after_the_commit(disk, kit):
    quorum = SingleQuorum(disk, "meta", executor=kit.InlineExecutor(), snapshot_min_bytes=50)
    machine = await started(quorum, kit)
    disk.failing = {"sync_dir"}
    assert await quorum.commit(kit.topic(0), 0) == FIRST
    await quorum.stop()
    assert isinstance(machine.failure, LogOfflineError)


def test_a_file_system_needs_a_directory(disk):
    with pytest.raises(AssertionError, match="needs a directory"):
        SingleQuorum(disk)


def opened(disk):
    log = SingleNodeLog(disk, "meta", 1, b"d" * 16)
    return log, log.open()


def test_a_group_of_entries_costs_one_sync(disk, kit):
    log, _ = opened(disk)
    before = disk.sync_count
    log.append([(number, kit.topic(number)) for number in range(2, 50)])
    assert disk.sync_count == before + 1


def test_the_bytes_are_those_of_a_voter(disk, kit):
    log, _ = opened(disk)
    log.append([(2, kit.topic(7))])
    header = ["kafkalite-raft-log", 1, 1, b"d" * 16, True, [[1, b"d" * 16]], 1, 1]
    records = record_codec.to_bytes(kit.topic(7))
    entry = [1, 2, 1, bytes(9) + records]
    assert disk.read_bytes(LOG) == frame(header) + frame([[1, 1, 0, b"\x01"]]) + frame([entry])
    log.write_snapshot(2, kit.topic(7))
    snapshot = ["kafkalite-raft-snapshot", 1, [b"\x01", 1, 0], [bytes(9) + records, 2, 1], 2, records]
    assert disk.read_bytes(SNAPSHOT) == frame(snapshot)
    assert disk.read_bytes(LOG) == frame(header) + frame([[1, 1, 0, b"\x01"], entry])


def test_a_snapshot_is_of_the_last_entry(disk, kit):
    log, _ = opened(disk)
    log.append([(2, kit.topic(1)), (3, kit.topic(2))])
    for offset in (2, 4):
        with pytest.raises(AssertionError):
            log.write_snapshot(offset, [])


def test_entries_that_the_snapshot_covers_are_skipped(disk, kit):
    log, _ = opened(disk)
    log.append([(2, kit.topic(1)), (3, kit.topic(2))])
    whole = disk.read_bytes(LOG)
    log.write_snapshot(3, kit.topic(1) + kit.topic(2))
    disk.write_atomically(LOG, whole)  # as if the power had failed between the two files
    log, recovered = opened(disk)
    assert (recovered.snapshot_offset, recovered.entries, log.journal.last_index) == (3, [], 3)


def test_a_full_disk_leaves_the_log_usable(disk, kit):
    log, _ = opened(disk)
    log.append([(2, kit.topic(1))])
    disk.full = True
    with pytest.raises(DiskFullError):
        log.append([(3, kit.topic(2))])
    with pytest.raises(DiskFullError):
        log.write_snapshot(2, kit.topic(1))
    disk.full = False
    log.append([(3, kit.topic(3))])
    assert [records[0].name for _, records in opened(disk)[1].entries] == ["t1", "t3"]


@pytest.mark.parametrize("what", ["write", "sync", "truncate"])
def test_a_failing_disk_takes_the_log_offline(disk, kit, what):
    log, _ = opened(disk)
    disk.failing, disk.full = {what}, what == "truncate"
    with pytest.raises(LogOfflineError, match=r"raft\.log could not be"):
        log.append([(2, kit.topic(1))])


def write_history(disk, kit, acknowledged):
    """Append six groups of entries, with two snapshots; note the last offset that was acknowledged."""
    log, _ = opened(disk)
    number, topics = 1, []
    for group in range(6):
        entries = []
        for _ in range(1 + group % 3):
            number += 1
            entries.append((number, kit.topic(number)))
            topics += kit.topic(number)
        log.append(entries)
        acknowledged.append(number)
        if group % 3 == 1:
            log.write_snapshot(number, topics)


def topics_of(recovered):
    records = recovered.snapshot_records + [record for _, some in recovered.entries for record in some]
    return [record.name for record in records if hasattr(record, "name")]


def test_power_loss_at_every_step_loses_nothing_acknowledged(disk, kit):
    write_history(disk, kit, [])
    for step in range(1, disk.steps + 1):
        for seed in range(12):
            crashing, acknowledged = kit.CrashDisk(), [1]
            crashing.steps_left = step
            with pytest.raises(kit.PowerLoss):
                write_history(crashing, kit, acknowledged)
            survivor = crashing.after_power_loss(random.Random(seed))
            log, recovered = opened(survivor)
            names = topics_of(recovered)
            assert names == [f"t{number}" for number in range(2, 2 + len(names))], (step, seed)
            assert 1 + len(names) == log.journal.last_index >= acknowledged[-1], (step, seed)
            # The log can be written to, and survives another restart.
            following = log.journal.last_index + 1
            log.append([(following, kit.topic(following))])
            assert topics_of(opened(survivor)[1]) == [*names, f"t{following}"]


def test_power_loss_during_recovery_is_recovered_from(disk, kit):
    log, _ = opened(disk)
    log.append([(2, kit.topic(1))])
    disk.write_atomically(LOG, disk.read_bytes(LOG) + b"\0\0\0\x50torn")
    for step in (1, 2):
        for seed in range(8):
            crashing = disk.after_power_loss(random.Random(seed))
            crashing.steps_left = step
            with pytest.raises(kit.PowerLoss):
                opened(crashing)
            assert topics_of(opened(crashing.after_power_loss(random.Random(seed)))[1]) == ["t1"]


async def test_an_inline_commit_is_written_and_costs_no_turn_of_the_loop(kit, disk):
    quorum = SingleQuorum(disk, "meta", is_inline=True)
    machine = await started(quorum, kit)
    commit = quorum.commit(kit.topic(1), 0)
    with pytest.raises(StopIteration) as ended:
        commit.send(None)
    assert ended.value.value == FIRST
    await quorum.stop()
    machine = await started(SingleQuorum(disk, "meta", is_inline=True), kit)
    assert machine.names == ["t1"]
