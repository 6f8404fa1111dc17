"""The simulation's checks of groups and transactions find states that were tampered with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.broker.coordination.internal_topics import GROUP
from kafkalite.client.admin.admin import Admin
from kafkalite.errors import CommitFailedError
from kafkalite.groups.record_codec import OFFSET, record
from kafkalite.model import OFFSETS_TOPIC, TopicPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import stamp
from kafkalite.rng import seeded_rng
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.sim.compacted_logs import CompactedLogs
from proof.sim.coordination import Coordination
from proof.sim.group_clients import READERS
from proof.sim.plan import draw
from proof.sim.stage import Stage, play
from proof.sim.workload import CLIENT_SETTINGS, Load, Workload

KEY = TopicPartition("t", 0)
LOG = ("__consumer_offsets", 0, "id")


# --- logs that are compacted -----------------------------------------------------------------------------


def batch_of(*values: bytes, base_offset: int = 0, leader_epoch: int = 1) -> RecordBatch:
    batch = build_batch(list(values), [b"k%d" % number for number in range(len(values))], timestamps_ms=1)
    stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
    return RecordBatch(memoryview(batch))


def test_a_rewritten_batch_has_the_same_records() -> None:
    """I3, I6: compaction may remove records and rebatch the others."""
    logs = CompactedLogs()
    whole = logs.check("a", LOG, batch_of(b"0", b"1"))
    for told in whole:
        logs.check_committed("a", LOG, told)
    left = build_batch([b"1"], [b"k1"], timestamps_ms=1)
    stamp(left, base_offset=1, leader_epoch=1)
    (told,) = logs.check("b", LOG, RecordBatch(memoryview(left)))
    logs.check_committed("b", LOG, told)
    assert told == whole[1]


def test_another_record_at_an_offset_is_found() -> None:
    logs = CompactedLogs()
    logs.check("a", LOG, batch_of(b"0"))
    with pytest.raises(Violation, match="I3"):
        logs.check("b", LOG, batch_of(b"other"))


def test_another_record_below_a_high_watermark_is_found() -> None:
    logs = CompactedLogs()
    (first,) = logs.check("a", LOG, batch_of(b"0"))
    (second,) = logs.check("b", LOG, batch_of(b"other", leader_epoch=2))
    logs.check_committed("a", LOG, first)
    with pytest.raises(Violation, match="I6"):
        logs.check_committed("b", LOG, second)


# --- coordinators ----------------------------------------------------------------------------------------


def coordination(simulation: Simulation, stage: Stage | None = None) -> Coordination:
    load = Load(producers=0, consumers=0, group_readers=1)
    bootstrap, nodes = ([], []) if stage is None else (stage.bootstrap, stage.nodes)
    return Coordination(Workload(simulation, bootstrap, [KEY], load), nodes)


async def commit(stage: Stage) -> None:
    async with Admin(stage.bootstrap, rng=stage.simulation.rng("admin"), **CLIENT_SETTINGS) as admin:
        await admin.alter_group_offsets(READERS, {KEY: 10})


def found(tamper: Callable[[Any], None], check: Callable[[Coordination], None]) -> None:
    """Commit offset 10, ``tamper`` with the coordinator's group, and ``check``."""

    async def story(stage: Stage) -> str | None:
        await stage.open(KEY.topic)
        await stage.on("admin", commit(stage))
        watcher = coordination(stage.simulation, stage)
        await stage.until(lambda: stage.observer.unconverged() is None)
        watcher.check()
        watcher.check_rest()
        assert stage.simulation.probes["replayed"] == 3
        node = stage.led(OFFSETS_TOPIC)
        assert node.live is not None
        (shard,) = node.live.coordinators.shards(GROUP)
        tamper(shard.machine.groups[READERS])
        check(watcher)
        return None

    play(story)


def test_a_coordinator_whose_state_differs_from_its_log_is_found() -> None:
    with pytest.raises(Violation, match="R36"):
        found(lambda group: group.offsets.put(*KEY, None), Coordination.check_rest)


def test_a_committed_offset_that_goes_back_is_found() -> None:
    def tamper(group: Any) -> None:
        value = group.offsets.get(*KEY)
        group.offsets.put(*KEY, record(OFFSET, value._replace(offset=5), READERS, *KEY).value)

    with pytest.raises(Violation, match="R39"):
        found(tamper, Coordination.check)


class FakeConsumer:
    config = SimpleNamespace(group_id=READERS)

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.is_lost = False

    def group_metadata(self) -> Any:
        if self.is_lost:
            raise CommitFailedError("expelled, and not told yet")
        return SimpleNamespace(member_id=self.member_id)


def test_two_members_that_own_a_partition_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1; but not if the owner or the claimant was expelled, whether it has received that or not."""
    with Simulation(1) as simulation:
        watcher = coordination(simulation)
        members = {"a": None, "b": None}
        monkeypatch.setattr(watcher, "_group", lambda group_id: SimpleNamespace(members=members))
        first, second = FakeConsumer("a"), FakeConsumer("b")
        watcher.on_assigned("g1.1", first, [KEY])  # type: ignore[arg-type]
        first.is_lost = True
        watcher.on_assigned("g2.1", second, [KEY])  # type: ignore[arg-type]
        del members["b"]
        first.is_lost = False
        watcher.on_assigned("g1.1", first, [KEY])  # type: ignore[arg-type]
        watcher.on_assigned("g2.1", second, [KEY])  # type: ignore[arg-type]
        assert simulation.violations == []
        members["b"] = None
        watcher.on_assigned("g2.1", second, [KEY])  # type: ignore[arg-type]
        assert [violation.check for violation in simulation.violations] == ["D1"]


def test_plans_have_all_kinds_of_programs() -> None:
    plans = [draw(seed, seeded_rng(seed)) for seed in range(1, 60)]
    loads = [plan.load for plan in plans]
    for kind in ("group_readers", "transformers", "transactors", "batch_teams", "watchers"):
        assert {bool(getattr(load, kind)) for load in loads} == {False, True}
    assert 10 < sum(plan.compacts for plan in plans) < 40
