"""Schedules in which the voters change: the rules R93 to R98, and kills at every step of a change.

``python -m proof.raft.voter_schedules`` kills at each message of each change.

Each schedule runs a fixed history on a ``World`` and returns the violation, or None. ``DIRECTED`` maps each
mutant to the schedule that finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kafkalite.errors import (
    BrokerError,
    DuplicateVoterError,
    InvalidRequestError,
    InvalidVoterKeyError,
    NotControllerError,
    VoterChangePendingError,
    VoterNotCaughtUpError,
    VoterNotFoundError,
)
from kafkalite.raft.voter_set import AddVoter, RemoveVoter, VoterChange
from kafkalite.rng import seeded_rng
from proof.raft.world import STILL, World

Schedule = Callable[[], str | None]


def _world(*voters: int, observers: tuple[int, ...] = ()) -> World:
    """Return a cluster that node 1 has founded alone, and to which it has added the other ``voters``."""
    world = World(1, seeded_rng(1), replace(STILL, retained_entries=0))
    world.found()
    world.rounds = 6
    for i in voters[1:]:
        world.add_node(i)
        world.add_voter(1, i)
        world.settle()
    for i in observers:
        world.add_node(i)
    world.settle()
    assert all(error is None for _, error in world.changes), world.changes
    world.changes.clear()
    return world


def _lost(world: World, i: int) -> str | None:
    lost = [name for name in world.acked if name not in world.names(i)]
    return f"acknowledged and lost on node {i}: {lost}" if lost else None


def _refused(world: World, i: int, change: VoterChange, expected: type[BrokerError]) -> str | None:
    """Return a violation unless ``change`` is refused with the expected error."""
    world.changes.clear()
    world.change(i, change)
    world.tick(i)
    error = world.changes[-1][1] if world.changes else None
    return None if type(error) is expected else f"{change} gets {error!r}, not {expected.__name__}"


def v1_a_lone_node_grows_to_five_and_shrinks_to_one() -> str | None:
    world = _world(1)
    for i in (2, 3, 4, 5):
        world.propose(1, [f"before {i}"])
        world.add_node(i)
        world.add_voter(1, i)
        world.propose(1, [f"during {i}"])
        world.settle()
    if world.up[5].voter_ids != [1, 2, 3, 4, 5] or any(member.abstains for member in world.up.values()):
        return f"the voters are {world.up[5].voter_ids}"
    for i in (5, 4, 3, 2):
        world.remove_voter(1, i)
        world.propose(1, [f"without {i}"])
        world.settle()
    if world.up[1].voter_ids != [1] or not all(world.up[i].abstains for i in (2, 3, 4, 5)):
        return f"the voters are {world.up[1].voter_ids}"
    if len(world.acked) != 12 or any(error is not None for _, error in world.changes):
        return f"acknowledged: {list(world.acked)}, changes: {world.changes}"
    return next((found for i in world.up if (found := _lost(world, i)) is not None), None)


def v2_a_change_takes_effect_when_it_is_appended() -> str | None:
    """Only nodes 1 and 2 have the entry by which node 1 adds a voter: three of four must acknowledge."""
    world = _world(1, 2, 3, observers=(4,))
    world.change(1, AddVoter(4))
    for i in (3, 4):
        world.isolate(i)
    world.propose(1, ["a"])
    world.settle(1, 2)
    if "a" in world.acked or world.changes:
        return f"committed by two of four voters: {world.acked} {world.changes}"
    world.link(1, 3)
    world.settle(1, 2, 3)
    return None if "a" in world.acked else "not committed by three of four voters"


def v3_a_truncated_change_is_rolled_back() -> str | None:
    """The entry is only on node 1, and node 2 leads meanwhile: three voters are counted again."""
    world = _world(1, 2, 3, observers=(4,))
    world.change(1, AddVoter(4))
    world.isolate(1)
    if world.up[1].voter_ids != [1, 2, 3, 4]:
        return "the change has no effect"
    world.elect(2)
    world.settle(2, 3)
    world.propose(2, ["a"])
    world.settle(2, 3)
    world.link(1, 2)
    world.link(1, 3)
    world.settle(1, 2, 3)
    if world.up[1].voter_ids != [1, 2, 3]:
        return f"node 1 counts the voters {world.up[1].voter_ids}"
    if not isinstance(world.changes[-1][1], BrokerError):
        return f"the change was reported as {world.changes}"
    world.isolate(2)
    world.elect(1)
    world.settle(1, 3)
    return _lost(world, 1) if world.up[1].is_leader else "two of three voters elect no leader"


def v4_voters_survive_snapshots_and_restarts() -> str | None:
    world = _world(1, 2, 3)
    world.propose(1, ["a", "b", "c"])
    world.settle()
    for i in (1, 2, 3):
        world.up[i].take_snapshot()
    world.settle()
    world.add_node(4)  # receives the snapshot
    world.settle()
    for i in (1, 2, 3, 4):
        world.lose_power(i)
    for i in (1, 2, 3, 4):
        world.restart(i)
    found = [world.up[i].voter_ids for i in (1, 2, 3, 4)]
    if found != [[1, 2, 3]] * 4:
        return f"after a restart, the nodes count {found}"
    world.outwait()
    world.elect(2)
    world.settle()
    return _lost(world, 2) if world.up[2].is_leader else "no leader was elected"


def v5_a_new_leader_first_commits_an_entry_of_its_term() -> str | None:
    """The schedule that Ongaro published in 2015 against the rule of his dissertation.

    Node 1 adds node 5 and is cut off. Node 2 is elected and removes node 1, with only node 3 connected. If
    that takes effect before node 4 has an entry of the new term, node 1 is elected by 4 and 5.
    """
    world = _world(1, 2, 3, 4, observers=(5,))
    for i in (2, 3, 4):
        world.unlink(1, i)
    world.change(1, AddVoter(5))
    world.settle(1, 5)
    world.elect(2)
    for i in (3, 4):
        world.deliver(2, i)
        world.deliver(i, 2)
    if not world.up[2].is_leader:
        return "node 2 was not elected"
    world.isolate(4)
    world.change(2, RemoveVoter(1))
    world.propose(2, ["precious"])
    world.settle(2, 3)
    is_acked = "precious" in world.acked
    for i in (4, 5):
        world.link(1, i)
    world.settle(1, 4, 5)
    world.elect(1)
    world.settle(1, 4, 5)
    if is_acked and world.up[1].is_leader:
        return f"acknowledged by the voters {world.up[2].voter_ids}, and node 1 leads without it"
    return None


def v6_one_change_at_a_time() -> str | None:
    world = _world(1, 2, 3, observers=(4, 5))
    world.isolate(2)
    world.isolate(3)
    world.change(1, AddVoter(4))
    return _refused(world, 1, AddVoter(5), VoterChangePendingError) or _refused(
        world, 1, RemoveVoter(2), VoterChangePendingError
    )


def v7_an_observer_that_lags_is_refused() -> str | None:
    world = _world(1, 2, 3, observers=(4,))
    world.isolate(4)
    world.propose(1, ["a", "b"])
    world.settle(1, 2, 3)
    world.clock[0] += 2 * world.settings.election_timeout_ms / 1000
    return _refused(world, 1, AddVoter(4), VoterNotCaughtUpError)


def v8_a_replaced_disk_neither_votes_nor_acknowledges() -> str | None:
    """Only node 2 had the entry beside the leader, and its disk is replaced: no voter may elect node 3."""
    world = _world(1, 2, 3)
    world.isolate(3)
    world.propose(1, ["precious"])
    world.settle(1, 2)
    if "precious" not in world.acked:
        return "not acknowledged"
    world.kill(1)
    world.add_node(2)
    world.link(2, 3)
    world.outwait(2, 3)
    for _ in range(3):
        world.elect(3)
        world.settle(2, 3)
    if world.up[3].is_leader:
        return f"node 3 leads by the vote of another disk: {world.up[3].log()}"
    world.restart(1)
    world.link_all()
    world.outwait()
    world.elect(1)
    world.settle()
    if (found := _refused(world, 1, AddVoter(2), DuplicateVoterError)) is not None:
        return found
    world.remove_voter(1, 2)
    world.settle()
    world.add_voter(1, 2)
    world.settle()
    if world.up[2].abstains or world.up[2].voter_ids != [1, 2, 3]:
        return f"the replaced disk is no voter: {world.changes}"
    return _lost(world, 2)


def v9_a_leader_that_removes_itself_does_not_count_and_steps_down() -> str | None:
    world = _world(1, 2, 3, 4)
    world.isolate(3)
    world.isolate(4)
    world.remove_voter(1, 1)
    world.propose(1, ["a"])
    world.settle(1, 2)
    if "a" in world.acked or world.changes:
        return "committed by one of three voters, and a leader that is none"
    if world.leaders() != [(1, 1)]:
        return "the leader steps down before the change is committed"
    world.link(1, 3)
    world.link(2, 3)
    world.settle(1, 2, 3)
    world.clock[0] += 2 * world.settings.heartbeat_ms / 1000
    world.settle(1, 2, 3)
    if (1, 1) in world.leaders():
        return "the removed leader still leads"
    if world.changes != [(RemoveVoter(1), None)]:
        return f"the change was reported as {world.changes}"
    world.settle()
    if not any(world.up[i].is_leader for i in (2, 3)):
        return "no voter was asked to lead"
    return _lost(world, 2) or _lost(world, 3)


def v10_two_leaders_both_change_the_voters() -> str | None:
    world = _world(1, 2, 3, observers=(4, 5))
    world.isolate(1)
    world.elect(2)
    world.settle(2, 3, 4, 5)
    if [i for i, _ in world.leaders()] != [1, 2]:
        return f"not two leaders: {world.leaders()}"
    world.change(1, AddVoter(4))
    world.change(2, AddVoter(5))
    world.propose(1, ["lost"])
    world.propose(2, ["kept"])
    world.settle(2, 3, 5)
    world.link_all()
    world.settle()
    ids = [member.voter_ids for member in world.up.values()]
    if ids != [[1, 2, 3, 5]] * 5 or list(world.acked) != ["kept"]:
        return f"the voters are {ids}, acknowledged: {list(world.acked)}"
    errors = dict(world.changes)
    return None if errors[AddVoter(5)] is None and errors[AddVoter(4)] is not None else f"{errors}"


def v11_a_new_voter_votes_before_it_has_the_change() -> str | None:
    """Node 1 has added node 3, which does not know it yet, and dies: 2 and 3 are two of three voters."""
    world = _world(1, 2, observers=(3,))
    world.change(1, AddVoter(3))
    world.unlink(1, 3)
    world.settle(1, 2)
    if world.changes != [(AddVoter(3), None)]:
        return f"not committed: {world.changes}"
    world.kill(1)
    world.settle(2, 3)
    world.elect(2)
    world.settle(2, 3)
    if not world.up[2].is_leader:
        return "two of three voters elect no leader"
    return None if world.up[3].voter_ids == [1, 2, 3] else "node 3 does not know the voters"


def v12_changes_that_are_not_possible_are_refused() -> str | None:
    world = _world(1, 2, observers=(3,))
    other = b"another directory"
    refused: list[tuple[int, VoterChange, type[BrokerError]]] = [
        (1, AddVoter(2), DuplicateVoterError),
        (1, AddVoter(3, other), InvalidVoterKeyError),
        (1, AddVoter(9), VoterNotFoundError),
        (1, RemoveVoter(3), VoterNotFoundError),
        (1, RemoveVoter(2, other), InvalidVoterKeyError),
        (2, AddVoter(3), NotControllerError),
        (3, AddVoter(3), NotControllerError),
    ]
    for i, change, error in refused:
        if (found := _refused(world, i, change, error)) is not None:
            return found
    return _refused(_world(1), 1, RemoveVoter(1), InvalidRequestError)


def v13_a_replaced_founder_of_a_grown_cluster_follows_it() -> str | None:
    """The node that was alone loses its disk; it is removed, and added again with its new directory."""
    world = _world(1, 2, 3)
    world.propose(1, ["a"])
    world.settle()
    world.kill(1)
    world.outwait(2, 3)
    world.elect(2)
    world.settle(2, 3)
    world.remove_voter(2, 1)
    world.settle(2, 3)
    world.add_node(1)
    world.add_voter(2, 1)
    world.settle()
    if world.up[1].abstains or world.up[1].voter_ids != [1, 2, 3]:
        return f"node 1 is no voter: {world.changes}"
    return _lost(world, 1)


def v14_observers_do_not_count() -> str | None:
    world = _world(1, 2, 3, observers=(4, 5))
    world.remove_voter(1, 3)
    world.settle()
    world.isolate(2)
    world.propose(1, ["a"])
    world.settle(1, 3, 4, 5)
    if len(world.up[4].log()) < len(world.up[1].log()):
        return "an observer does not receive the log"
    return "committed by one of two voters, and by observers" if "a" in world.acked else None


#: The changes that are interrupted at each step: voters, observers, and the change by the leader, node 1.
CHANGES: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...], VoterChange]]] = {
    "a lone node adds a voter": ((1,), (2,), AddVoter(2)),
    "two become three": ((1, 2), (3,), AddVoter(3)),
    "three become four": ((1, 2, 3), (4,), AddVoter(4)),
    "four become three": ((1, 2, 3, 4), (), RemoveVoter(4)),
    "the leader leaves": ((1, 2, 3), (), RemoveVoter(1)),
    "two become one": ((1, 2), (), RemoveVoter(2)),
}


def interrupted(name: str, victim: int, step: int) -> tuple[str | None, bool]:
    """Begin a change, cut the power of ``victim`` after ``step`` messages, start it again, and continue.

    Return (the violation, or None; whether the change had further messages).
    """
    voters, observers, change = CHANGES[name]
    world = _world(*voters, observers=observers)
    world.propose(1, ["before"])
    world.settle()
    world.change(1, change)
    world.propose(1, ["during"])
    for _ in range(step):
        if not _one_message(world):
            return None, False
    world.lose_power(victim)
    world.restart(victim)
    world.link_all()
    leaders = world.leaders()
    for candidate in (1, *world.up):
        world.outwait()
        if any(world.up[i].is_leader for i in world.up[candidate].voter_ids):
            break
        world.elect(candidate)
        world.settle()
    if world.failures:
        return f"node {world.failures[0][0]} failed: {world.failures[0][1]!r}", True
    (leader, *others) = [i for i, _ in world.leaders()] or [0]
    if not leader or others:
        return f"the leaders are {world.leaders()}, and were {leaders}", True
    world.propose(leader, ["after"])
    world.settle()
    if "after" not in world.acked:
        return f"nothing is committed by leader {leader} of {world.up[leader].voter_ids}", True
    ids = world.up[leader].voter_ids
    for i in ids:
        if world.up[i].voter_ids != ids:
            return f"node {i} has the voters {world.up[i].voter_ids}, the leader {ids}", True
        if (found := _lost(world, i)) is not None:
            return found, True
    intended = sorted(
        {*voters, change.node_id} if isinstance(change, AddVoter) else {*voters} - {change.node_id}
    )
    if world.changes and world.changes[0][1] is None and ids != intended:
        return f"the change was reported as done, and the voters are {ids}", True
    return None, True


def _one_message(world: World) -> bool:
    """Deliver the first message that is in transit, in the order of the links, after a tick of all nodes."""
    world.tick()
    for (a, b), link in world.links.items():
        if link.queue:
            world.deliver(a, b, 1)
            return True
    return False


def interrupt(name: str, stride: int = 1) -> str | None:
    """Interrupt a change at each ``stride``-th of its messages, by the loss of each node. Return the first
    violation."""
    voters, observers, _ = CHANGES[name]
    for victim in (*voters, *observers):
        step, has_more = victim % stride, True
        while has_more:
            found, has_more = interrupted(name, victim, step)
            if found is not None:
                return f"{found} (node {victim} loses power at step {step})"
            step += stride
    return None


SCHEDULES: Final[dict[str, Schedule]] = {
    name: value for name, value in list(globals().items()) if name[0] == "v" and name[1].isdigit()
}

DIRECTED: Final[dict[str, Schedule]] = {
    "R93-kept-after-truncation": v3_a_truncated_change_is_rolled_back,
    "R93-on-commit": v2_a_change_takes_effect_when_it_is_appended,
    "R93-snapshot-forgets": v4_voters_survive_snapshots_and_restarts,
    "R94-any-term": v5_a_new_leader_first_commits_an_entry_of_its_term,
    "R95-two-changes": v6_one_change_at_a_time,
    "R96-empty-voter": v7_an_observer_that_lags_is_refused,
    "R97-any-directory": v8_a_replaced_disk_neither_votes_nor_acknowledges,
    "R98-leader-counts-itself": v9_a_leader_that_removes_itself_does_not_count_and_steps_down,
    "R98-observer-counts": v14_observers_do_not_count,
    "R98-removed-leader-stays": v9_a_leader_that_removes_itself_does_not_count_and_steps_down,
}


def main() -> None:
    """Interrupt every change at each of its messages, and print the results."""
    violations = 0
    for name in CHANGES:
        found = interrupt(name)
        violations += found is not None
        print(f"{name}: {found or 'no violation'}", flush=True)  # noqa: T201
    raise SystemExit(1 if violations else 0)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main()
