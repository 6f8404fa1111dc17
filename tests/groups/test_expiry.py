"""Expiry: unused offsets and groups are removed, in bounded portions."""

from __future__ import annotations

from kafkalite.groups.expiry import MAX_RECORDS_PER_TICK
from kafkalite.groups.machine import GroupMachine
from kafkalite.groups.settings import GroupSettings
from proof.groups.world import Consumer, Coordinator

T0, T1 = ("t", 0), ("t", 1)
OK = 0
SHORT = GroupSettings(offsets_retention_ms=3_600_000, retention_check_interval_ms=600_000)
MINUTE = 60_000
TXN = 7_000


def minutes(coordinator, count, *members):
    for _ in range(count * 2):
        coordinator.advance(MINUTE // 2)
        for member in members:
            member.beat()


def test_offsets_of_a_group_with_members_do_not_expire():
    coordinator = Coordinator(SHORT, t=3)
    member = Consumer(coordinator, "m1", "t")
    member.join()
    coordinator.commit({T0: 1}, member_id="m1", epoch=1)
    minutes(coordinator, 120, member)
    assert coordinator.committed() == {T0: (1, OK)}


def test_the_retention_counts_from_when_the_group_became_empty():
    coordinator = Coordinator(SHORT, t=3)
    member = Consumer(coordinator, "m1", "t")
    member.join()
    coordinator.commit({T0: 1}, member_id="m1", epoch=1)
    minutes(coordinator, 50, member)
    member.leave()
    minutes(coordinator, 55)
    coordinator.reload()
    assert coordinator.committed() == {T0: (1, OK)}
    minutes(coordinator, 15)
    assert coordinator.committed() == {}
    minutes(coordinator, 25)
    coordinator.reload()
    assert not coordinator.machine.groups


def test_offsets_without_membership_expire_one_by_one():
    coordinator = Coordinator(SHORT, t=3)
    coordinator.commit({T0: 1, T1: 1})
    minutes(coordinator, 40)
    coordinator.commit({T1: 2})
    minutes(coordinator, 31)
    assert coordinator.committed() == {T1: (2, OK)}
    minutes(coordinator, 40)
    assert not coordinator.machine.groups


def test_offsets_pending_in_a_transaction_do_not_expire():
    coordinator = Coordinator(SHORT, t=3)
    coordinator.commit({T0: 1})
    coordinator.commit({T0: 2}, producer_id=TXN)
    minutes(coordinator, 100)
    assert coordinator.committed() == {T0: (1, OK)}
    coordinator.end_transaction(TXN, is_commit=True)
    minutes(coordinator, 11)
    assert coordinator.committed() == {}


def test_an_empty_group_without_offsets_is_forgotten_soon_but_not_at_once():
    coordinator = Coordinator(SHORT, t=3)
    member = Consumer(coordinator, "m1", "t")
    member.join()
    member.leave()
    minutes(coordinator, 9)
    assert coordinator.causes == ["MemberJoined", "MemberLeft"]
    minutes(coordinator, 11)
    assert not coordinator.machine.groups


def test_much_that_is_due_comes_in_portions():
    coordinator = Coordinator(SHORT, t=10)
    for number in range(500):
        coordinator.commit({("t", partition): 1 for partition in range(10)}, group_id=f"g{number}")
    coordinator.now = type(coordinator.now)(
        coordinator.now.monotonic_ms, coordinator.now.wall_ms + 80 * MINUTE
    )
    coordinator.now = type(coordinator.now)(
        coordinator.now.monotonic_ms + 10 * MINUTE, coordinator.now.wall_ms
    )
    portions = 0
    while coordinator.machine.groups:
        assert coordinator.machine.next_deadline_ms() <= coordinator.now.monotonic_ms
        decision = coordinator.machine.tick(coordinator.now, coordinator.topics)
        assert 0 < len(decision.records) <= MAX_RECORDS_PER_TICK + 10
        coordinator.take(decision)
        portions += 1
    assert portions == 5


def test_a_tick_whose_records_were_not_written_comes_again(coordinator, consumer):
    consumer("m1")
    coordinator.now = type(coordinator.now)(coordinator.now.monotonic_ms + 45_000, coordinator.now.wall_ms)
    first = coordinator.machine.tick(coordinator.now, coordinator.topics)
    assert first.records
    assert coordinator.machine.tick(coordinator.now, coordinator.topics) == first
    assert coordinator.machine.next_deadline_ms() <= coordinator.now.monotonic_ms


def test_members_of_many_groups_expire_together(coordinator):
    for number in range(600):
        Consumer(coordinator, "m", "t", group_id=f"g{number}").join()
    coordinator.advance(45_000)
    assert all(not group.members for group in coordinator.machine.groups.values())


def test_a_machine_that_never_loaded_has_nothing_due():
    assert GroupMachine().next_deadline_ms() is None
