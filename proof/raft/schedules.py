"""Schedules in which unmodified pysyncobj loses data, and schedules against rules of the adapter.

Each schedule runs a fixed history on a ``World`` and returns the violation, or None. ``DIRECTED`` maps each
mutant to the schedule that finds it.
"""

# Long because each schedule stands beside the others of its rule, and all use the same few helpers.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kafkalite.raft.messages import Message
from kafkalite.raft.node import RESUME_INTERVAL_S
from kafkalite.rng import seeded_rng
from proof.raft.world import STILL, World

Schedule = Callable[[], str | None]


def _world(count: int = 3, **settings: Any) -> World:
    """Return a bootstrapped cluster, led by node 1 in term 1."""
    world = World(count, seeded_rng(1), replace(STILL, retained_entries=0, **settings))
    world.found()
    return world


def _two_leaders(world: World) -> str | None:
    terms = [term for _, term in world.leaders()]
    return f"leaders (node, term): {world.leaders()}" if len(set(terms)) < len(terms) else None


def _lost(world: World, i: int) -> str | None:
    lost = [name for name in world.acked if name not in world.names(i)]
    return f"acknowledged and lost: {lost}" if lost else None


def s1_a_voter_that_restarts_votes_again() -> str | None:
    world = _world()
    world.unlink(2, 3)
    world.elect(2)
    world.deliver(2, 1)
    world.deliver(1, 2)
    world.lose_power(1)
    world.start(1)
    world.unlink(1, 2)
    world.link(1, 3)
    world.outwait(1, 3)
    world.elect(3)
    world.deliver(3, 1)
    world.deliver(1, 3)
    return _two_leaders(world)


def s2_a_voter_whose_disk_is_full_does_not_vote_until_there_is_room() -> str | None:
    world = _world()
    world.unlink(1, 3)
    world.elect(3)
    world.link(1, 3)
    world.disks[1].capacity_bytes = 0
    term = world.up[3].term
    request = {
        "type": "request_vote",
        "term": term,
        "last_log_index": 9,
        "last_log_term": 1,
        "directory": b"",
    }
    world.inject(3, 1, request)
    world.deliver(3, 2)
    world.deliver(2, 3)
    if world.up[1].node.is_running or world.up[1].failure is not None:
        return f"node 1 does not pause with a full disk: {world.up[1].failure!r}"
    if (found := _two_leaders(world)) is not None:
        return found
    world.disks[1].capacity_bytes = None
    world.clock[0] += RESUME_INTERVAL_S
    world.link_all()
    world.tick(1)
    world.elect(3)
    world.settle()
    world.propose(3, ["a"])
    world.settle()
    return None if world.names(1) == ["a"] else f"node 1 has {world.names(1)}, its log {world.up[1].log()}"


def s3_a_kill_between_snapshot_and_compaction_keeps_the_tail() -> str | None:
    world = _world(1)
    world.propose(1, [f"a{n}" for n in range(50)])
    world.settle()
    world.up[1].node.journal.compact = lambda first_index: None  # type: ignore[method-assign]
    world.up[1].take_snapshot()
    world.settle()
    world.propose(1, [f"b{n}" for n in range(30)])
    world.settle()
    world.lose_power(1)
    world.start(1)
    world.settle()
    return _lost(world, 1) if len(world.acked) == 80 else "nothing was acknowledged"


def s4_a_kill_within_compaction_keeps_the_log() -> str | None:
    world = _world(1)
    world.propose(1, [f"a{n}" for n in range(50)])
    world.settle()
    disk = world.disks[1]
    rename = disk.rename

    def die(old: str, new: str) -> None:
        if new.endswith("raft.log"):
            raise OSError(5, "the machine is gone")
        rename(old, new)

    disk.rename = die  # type: ignore[method-assign]
    world.up[1].take_snapshot()
    world.settle()
    disk.rename = rename  # type: ignore[method-assign]
    world.lose_power(1)
    world.start(1)
    world.settle()
    return _lost(world, 1) if len(world.acked) == 50 else "nothing was acknowledged"


def s5_an_answer_on_its_way_cuts_nothing() -> str | None:
    """The leader receives the response to the first of many appends; its next append must not truncate the
    follower.
    """
    world = _world(append_bytes=1_000)
    world.isolate(3)
    for n in range(6):
        world.propose(1, [f"{n}" + "x" * 600])
        world.heartbeat(1)
    world.deliver(1, 2)
    for _ in range(len(world.pending(2, 1))):
        world.deliver(2, 1, 1)
        world.heartbeat(1)
    world.tick(1)
    acked, lowest = len(world.acked), world.up[2].log()[-1]
    while world.pending(1, 2):
        world.deliver(1, 2, 1)
        lowest = min(lowest, world.up[2].log()[-1])
    if acked != 6:
        return f"only {acked} were acknowledged"
    return None if lowest == world.up[2].log()[-1] else f"the follower's log went back to {lowest}"


def s5b_an_old_append_cuts_nothing() -> str | None:
    """Schedule: an old append arrives again, and the leader is killed before it can send another one."""
    world = _world()
    world.isolate(3)
    world.propose(1, ["0"])
    old = world.pending(1, 2)[-1]
    world.propose(1, ["1", "2", "3"])
    world.settle(1, 2)
    if len(world.acked) != 4:
        return f"only {len(world.acked)} were acknowledged"
    world.inject(1, 2, old)
    world.kill(1)
    world.restart(2)
    world.link(2, 3)
    world.outwait(2, 3)
    world.elect(2)
    world.settle(2, 3)
    return _lost(world, 2)


def s7_a_damaged_snapshot_is_not_acknowledged() -> str | None:
    world = _world()
    world.isolate(1)
    world.propose(1, [f"divergent{n}" for n in range(30)])
    world.elect(2)
    world.settle(2, 3)
    world.propose(2, [f"good{n}" for n in range(5)])
    world.settle(2, 3)
    world.unlink(2, 3)
    world.up[2].take_snapshot()
    world.tick(2)
    world.propose(2, ["new0", "new1"])
    world.link(1, 2)
    world.up[2].send_snapshot_to(1)
    world.heartbeat(2)
    pieces = [message for message in world.pending(2, 1) if message.get("serialized")]
    world.forget(2, 1)
    for piece in pieces:
        data, is_first, is_last = piece["serialized"]
        middle = len(data) // 2
        rotten = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        world.inject(2, 1, {**piece, "serialized": (rotten, is_first, is_last)})
    world.deliver(1, 2)
    world.tick(2)
    if not pieces:
        return "no snapshot was sent"
    return "acknowledged with one copy" if "new0" in world.acked else None


def s8_an_acknowledgement_of_another_term_does_not_count() -> str | None:
    world = _world(5)
    for i in (3, 4, 5):
        world.unlink(1, i)
    world.propose(1, [f"old{n}" for n in range(20)])
    world.deliver(1, 2)
    late = world.pending(2, 1)
    world.isolate(2)
    world.elect(3)
    world.settle(3, 4, 5)
    for i in (3, 4, 5):
        world.link(1, i)
    world.settle(1, 3, 4, 5)
    for i in (1, 4, 5):
        world.unlink(3, i)
    world.elect(1)
    world.settle(1, 4, 5)
    world.unlink(1, 5)
    world.link(1, 2)
    world.forget(1, 2)
    world.propose(1, [f"new{n}" for n in range(3)])
    for message in late:  # responses to messages of this link, but of another term
        world.inject(2, 1, {**message, "seq": world.up[1].last_append_seq(2)})
    for _ in range(3):
        world.deliver(1, 4)
        world.deliver(4, 1)
        world.tick(1)
    return f"acknowledged with 2 copies of 5: {world.acked}" if world.acked else None


def s9_a_vote_counts_once() -> str | None:
    world = _world(5)
    world.isolate(1)
    world.elect(2)
    world.deliver(2, 3)
    (vote,) = [message for message in world.pending(3, 2) if message["type"] == "response_vote"]
    world.inject(3, 2, dict(vote))
    world.inject(3, 2, dict(vote))
    return "elected by two of five" if world.up[2].is_leader else None


def s11_what_is_committed_is_not_taken_from_memory() -> str | None:
    """All disks lose the same tail, as in a power cut without syncs: a leader must not commit alone."""
    world = _world()
    before = {i: world.copy(i) for i in world.ids}
    world.propose(1, [f"a{n}" for n in range(20)])
    world.settle()
    for i in world.ids:
        world.restore(i, before[i])
    for i in world.ids:
        world.start(i)
    world.link_all()
    world.elect(2)
    world.deliver(2, 1)
    world.deliver(1, 2)
    world.isolate(2)
    world.propose(2, ["alone"])
    world.tick(2)
    return "acknowledged alone" if "alone" in world.acked else None


def _replaced_disk(world: World) -> None:
    """Commit ``precious`` on nodes 1 and 2, and replace the disk of node 2."""
    world.isolate(3)
    world.propose(1, ["precious"])
    world.settle(1, 2)
    assert "precious" in world.acked
    world.wipe(2)
    world.start(2)


def s13_a_new_disk_does_not_vote() -> str | None:
    world = _world()
    _replaced_disk(world)
    world.kill(1)
    world.link(2, 3)
    world.elect(3)
    world.settle(2, 3)
    return f"node 3 leads without it: {world.names(3)}" if world.up[3].is_leader else None


def s13b_a_new_disk_votes_again_when_it_has_everything() -> str | None:
    world = _world()
    _replaced_disk(world)
    world.link(1, 3)
    world.link(2, 3)
    world.link(1, 2)
    for _ in range(4):
        world.settle()
        world.clock[0] += 2 * STILL.election_timeout_ms / 1000
    if world.up[2].abstains:
        return "it abstains for ever"
    vote = world.up[2].node.journal.getVotedForNodeId()
    world.isolate(1)
    world.elect(2)
    world.settle(2, 3)
    if not world.up[2].is_leader or world.names(2) != ["precious"]:
        return f"leaders {world.leaders()}, its state {world.names(2)}"
    return None if vote == -1 else f"it could vote a second time in its term: {vote}"


def s14_nobody_injects_commands() -> str | None:
    import msgpack

    world = _world()
    refused = world.up[1].node.transport.refused_count
    for command in (b"\x02membership", b"\x03version", b"\x00command"):
        world.inject(2, 1, msgpack.packb({"type": "apply_command", "command": command}))
        world.inject(2, 1, msgpack.packb([14, command]))
        world.inject(2, 1, msgpack.packb([1, 1, 2, 99, 2, 1, [[command, 3, 1], [b"\x02", 4, 1]]]))
    world.settle()
    if world.up[1].node.transport.refused_count != refused + 9:
        return "something was taken"
    return None if [len(member.log()) for member in world.up.values()] == [2, 2, 2] else "the log has grown"


def s16_a_late_answer_does_not_roll_back_the_state() -> str | None:
    world = _world()
    world.propose(1, [f"a{n}" for n in range(10)])
    world.settle()
    world.up[1].take_snapshot()
    world.tick(1)
    world.isolate(3)
    world.propose(1, [f"b{n}" for n in range(5)])
    world.settle(1, 2)
    top, acked = world.up[2].log()[-1], len(world.acked)
    world.forget(1, 2)
    answer: Message = {"type": "next_node_idx", "next_node_idx": 2, "reset": True, "success": False}
    answer |= {"stamp": 1, "counts": True, "seq": world.up[1].last_append_seq(2), "directory": b""}
    world.inject(2, 1, answer)
    world.heartbeat(1)
    pieces = [message for message in world.pending(1, 2) if message.get("serialized")]
    for piece in pieces:
        world.inject(1, 2, piece)
    if acked != 15 or not pieces:
        return f"{acked} acknowledged, {len(pieces)} pieces sent"
    if world.failures:
        return f"node {world.failures[0][0]} failed: {world.failures[0][1]!r}"
    if world.up[2].log()[-1] < top or len(world.names(2)) < acked:
        return f"log from {top} back to {world.up[2].log()[-1]}, {len(world.names(2))} of {acked} effects"
    return None


def s16b_a_snapshot_from_before_the_acknowledged_end_cuts_nothing() -> str | None:
    """The follower has acknowledged more than the snapshot contains, but has not received the commit."""
    world = _world()
    world.propose(1, [f"a{n}" for n in range(10)])
    world.settle(1, 3)
    world.up[1].take_snapshot()
    world.tick(1)
    world.isolate(3)
    world.up[1].node.voter.enter()
    world.settle(1, 2, rounds=1)
    world.propose(1, [f"b{n}" for n in range(5)])
    for _ in range(3):
        world.deliver(1, 2)
        world.deliver(2, 1)
        world.tick(1)
    top = world.up[2].log()[-1]
    world.forget(1, 2)
    world.up[1].send_snapshot_to(2)
    world.heartbeat(1)
    world.deliver(1, 2)
    return (
        None if world.up[2].log()[-1] >= top else f"the log went back from {top} to {world.up[2].log()[-1]}"
    )


def s17_a_piece_of_a_snapshot_commits_nothing() -> str | None:
    world = _world(chunk_bytes=100)
    world.isolate(1)
    world.propose(1, [f"never{n}" for n in range(5)])
    world.elect(2)
    world.settle(2, 3)
    world.propose(2, [f"good{n}" for n in range(20)])
    world.settle(2, 3)
    world.up[2].take_snapshot()
    world.tick(2)
    world.link(1, 2)
    world.forget(2, 1)
    world.up[2].send_snapshot_to(1)
    world.heartbeat(2)
    world.deliver(2, 1, 1)
    world.tick(1)
    wrong = [name for name in (*world.acked, *world.names(1)) if name.startswith("never")]
    return f"took effect without a commit: {wrong}" if wrong else None


def s18_a_new_disk_does_not_count() -> str | None:
    """Schedule: a deposed leader finds a voter whose new disk lacks the election that deposed the leader."""
    world = _world()
    world.isolate(1)
    world.elect(3)
    world.settle(2, 3)
    world.propose(3, ["committed"])
    world.settle(2, 3)
    assert "committed" in world.acked
    world.wipe(2)
    world.unlink(2, 3)
    world.start(2)
    world.link(1, 2)
    world.propose(1, ["conflicting"])
    world.settle(1, 2)
    return "two entries are committed at one place" if "conflicting" in world.acked else None


def s19_what_a_lost_disk_acknowledged_does_not_count() -> str | None:
    world = _world(5)
    for i in (3, 4, 5):
        world.unlink(1, i)
    world.propose(1, ["x"])
    world.settle(1, 2)
    world.wipe(2)
    world.start(2)
    world.link(1, 2)
    match, last = world.up[1].node.voter.matches()[2][0], world.up[2].node.journal.last_index
    return None if match <= last else f"the leader counts {match} on a log that ends at {last}"


def s20_an_entry_decided_on_another_state_is_void() -> str | None:
    world = _world()
    world.propose(1, ["first"])
    world.settle()
    offset = world.up[1].offset
    world.up[1].propose("second", after_offset=offset)
    world.up[1].propose("late", after_offset=offset)
    world.settle()
    names = [world.names(i) for i in world.ids]
    return None if names == [["first", "second"]] * 3 and "late" not in world.acked else f"effects {names}"


def s21_a_deposed_leader_does_not_read() -> str | None:
    world = _world()
    world.isolate(1)
    world.elect(2)
    world.settle(2, 3)
    world.propose(2, ["new"])
    world.settle(2, 3)
    answers: list[bool] = []
    world.up[1].node.read_index(answers.append)
    world.tick(1)
    return "it read, and had not seen what was acknowledged" if answers == [True] else None


def s22_nothing_is_acknowledged_before_it_is_on_disk() -> str | None:
    world = _world()
    world.isolate(3)
    synced = [world.disks[i].sync_count for i in (1, 2)]
    world.propose(1, ["a"])
    world.deliver(1, 2)
    acks = [
        message
        for message in world.pending(2, 1)
        if message["type"] == "next_node_idx" and message["success"]
    ]
    if acks and world.disks[2].sync_count == synced[1]:
        return "acknowledged without a sync"
    world.deliver(2, 1)
    world.tick(1)
    if "a" not in world.acked:
        return "not acknowledged"
    return "counted by the leader without a sync" if world.disks[1].sync_count == synced[0] else None


def s23_pre_vote_leaves_a_leader_alone() -> str | None:
    """A node that was cut off does not depose the leader when it comes back."""
    world = _world()
    world.isolate(3)
    for _ in range(5):
        world.clock[0] += 3 * STILL.election_timeout_ms / 1000
        world.tick(3)
        world.settle(1, 2, rounds=2)
    world.link(1, 3)
    world.link(2, 3)
    world.settle()
    return None if world.leaders() == [(1, 1)] else f"leaders (node, term): {world.leaders()}"


def s24_new_voters_elect_no_leader_without_the_log_of_a_node_that_was_alone() -> str | None:
    world = World(3, seeded_rng(1), replace(STILL, retained_entries=0), is_linked=False)
    world.wipe(1)
    world.keep_alone(1, [f"alone{n}" for n in range(10)], snapshot_at=4)
    world.start(1)
    world.link_all()
    for _ in range(2):  # they bootstrap, if they do so before they have its log
        for i in world.ids:
            world.tick(i)
        for a in world.ids:
            for b in world.ids:
                if a != b:
                    world.deliver(a, b)
    world.isolate(1)
    world.settle(2, 3)
    world.elect(2)
    world.settle(2, 3)
    if world.up[2].is_leader and not world.names(2):
        return "node 2 leads without the log"
    world.link(1, 2)
    world.link(1, 3)
    for _ in range(4):
        world.settle()
        world.clock[0] += STILL.heartbeat_ms / 1000 + 1
    if any(member.abstains for member in world.up.values()):
        return f"they abstain forever: {[i for i, member in world.up.items() if member.abstains]}"
    names = [world.names(i) for i in world.ids]
    return None if names == [[f"alone{n}" for n in range(10)]] * 3 else f"effects {names}"


def _older_copy(world: World) -> None:
    """Commit ``precious`` on nodes 1 and 2 while node 3 is cut off, then restore an older copy of node 2."""
    copy = world.copy(2)
    world.isolate(3)
    world.propose(1, ["precious"])
    world.settle(1, 2)
    assert "precious" in world.acked
    world.restore(2, copy)


def _respond(world: World, source: int, target: int) -> None:
    """Deliver the response to a restarted voter, and lose the other messages of ``source``."""
    world.clock[0] += STILL.heartbeat_ms / 1000 + 1  # the voter inquires once per heartbeat interval
    world.tick(target)
    world.deliver(target, source)
    for message in world.pending(source, target):
        if message["type"] == "eligibility":
            world.inject(source, target, message)
    world.forget(source, target)


def s25_an_older_copy_elects_no_leader_without_what_it_has_forgotten() -> str | None:
    world = _world()
    _older_copy(world)
    world.start(2)
    world.link_all()
    _respond(world, 3, 2)
    world.elect(3)
    world.deliver(3, 2)
    world.deliver(2, 3)
    if world.up[3].is_leader:
        return f"node 3 leads without the entry, elected before node 1 responded: {world.up[3].log()}"
    world.settle()
    world.elect(1)
    world.settle()
    if world.failures:
        return f"node {world.failures[0][0]} failed: {world.failures[0][1]!r}"
    if "precious" not in world.names(3) or any(member.abstains for member in world.up.values()):
        return f"node 3 has {world.names(3)}; {[member.abstains for member in world.up.values()]}"
    world.isolate(1)
    world.elect(2)
    world.settle(2, 3)
    return None if world.up[2].is_leader else "the restored node, which has caught up, cannot lead"


def s25b_an_older_copy_does_not_vote_for_less_than_another_voter_has() -> str | None:
    world = _world()
    _older_copy(world)
    world.start(2)
    world.link_all()
    world.unlink(1, 3)
    _respond(world, 1, 2)
    _respond(world, 3, 2)
    if world.up[2].abstains:
        return "it abstains, though both other voters have responded"
    for candidate, voter in ((3, 2), (2, 3)):
        world.elect(candidate)
        world.deliver(candidate, voter)
        world.deliver(voter, candidate)
        if world.up[candidate].is_leader:
            return f"node {candidate} leads without the entry: {world.up[candidate].log()}"
    return None


def s25c_a_copy_from_before_the_bootstrap_is_no_new_voter() -> str | None:
    """The directory is the one that the other voters have listed, and it looks as if it had never voted."""
    world = World(3, seeded_rng(1), replace(STILL, retained_entries=0))
    copy = world.copy(2)
    world.found()
    world.isolate(3)
    world.propose(1, ["precious"])
    world.settle(1, 2)
    world.restore(2, copy)
    world.start(2)
    world.link(2, 3)
    _respond(world, 3, 2)
    world.elect(3)
    world.deliver(3, 2)
    world.deliver(2, 3)
    return f"node 3 leads without the entry: {world.up[3].log()}" if world.up[3].is_leader else None


def s26_an_older_copy_does_not_vote_again_in_a_term() -> str | None:
    """Node 1 has forgotten its vote for node 2, which receives it after node 1 has started again."""
    world = _world()
    copy = world.copy(1)
    world.unlink(2, 3)
    world.elect(2)
    world.deliver(2, 1)
    (vote,) = [message for message in world.pending(1, 2) if message["type"] == "response_vote"]
    world.restore(1, copy)
    world.start(1)
    world.link(1, 2)
    world.link(1, 3)
    _respond(world, 2, 1)
    _respond(world, 3, 1)
    world.inject(1, 2, vote)
    world.elect(3)
    world.deliver(3, 1)
    world.deliver(1, 3)
    return _two_leaders(world) if world.up[2].is_leader else "the vote was not counted"


def s27_a_restarted_voter_goes_on_without_a_dead_one() -> str | None:
    world = _world()
    world.propose(1, ["a"])
    world.settle()
    world.kill(1)
    for i in (2, 3):
        world.restart(i)
    world.settle()
    if not all(member.abstains for member in world.up.values()):
        return "they vote before node 1 had time to respond"
    world.outwait()
    world.elect(2)
    world.settle()
    if not world.up[2].is_leader:
        return f"they elect no leader: {[member.abstains for member in world.up.values()]}"
    return _lost(world, 2)


def s28_a_copied_directory_waits_for_the_voter_that_has_what_it_forgot() -> str | None:
    """After a stop of all nodes: only node 1, which starts last, has the entry that the copy of 2 lacks."""
    world = _world()
    _older_copy(world)
    world.kill(1)
    world.start(2, is_copy=True)
    world.restart(3)
    world.link(2, 3)
    world.outwait()
    for _ in range(3):
        world.elect(3)
        world.settle()
        if world.up[3].is_leader:
            return f"node 3 leads without the entry, by the vote of the copy: {world.up[3].log()}"
    world.restart(1)
    world.link_all()
    world.settle()
    world.elect(1)
    world.settle()
    if world.failures:
        return f"node {world.failures[0][0]} failed: {world.failures[0][1]!r}"
    if any("precious" not in world.names(i) for i in (2, 3)):
        return f"node 2 has {world.names(2)}, node 3 {world.names(3)}"
    return None


def s29_voters_of_two_versions_elect_and_commit() -> str | None:
    """Node 3 is of the version before. Then it starts again with an empty disk, and so does a new one."""
    world = World(3, seeded_rng(1), replace(STILL, retained_entries=0), earlier=[3])
    world.found()
    if world.up[3].node.transport.refused_count:
        return "an earlier voter refused a message"
    world.propose(1, ["a"])
    world.settle()
    for i in (3, 2):
        world.wipe(i)
        world.restart(i)
        world.settle()
        world.outwait()
        if world.up[i].abstains:
            return f"node {i} makes no promise"
    world.kill(1)
    world.elect(2)
    world.settle()
    return _lost(world, 2) if world.up[2].is_leader else "node 2 is not elected by the earlier voter"


SCHEDULES: Final[dict[str, Schedule]] = {
    name: value for name, value in list(globals().items()) if name[0] == "s" and name[1].isdigit()
}

DIRECTED: Final[dict[str, Schedule]] = {
    "R59-elects-any": s25b_an_older_copy_does_not_vote_for_less_than_another_voter_has,
    "R59-promises-at-once": s25_an_older_copy_elects_no_leader_without_what_it_has_forgotten,
    "R59-trusts-copies": s28_a_copied_directory_waits_for_the_voter_that_has_what_it_forgot,
    "R59-votes-again": s26_an_older_copy_does_not_vote_again_in_a_term,
    "R90-newest-message": s29_voters_of_two_versions_elect_and_commit,
    "RAFT-ack-unsynced": s22_nothing_is_acknowledged_before_it_is_on_disk,
    "RAFT-alone-unshared": s24_new_voters_elect_no_leader_without_the_log_of_a_node_that_was_alone,
    "RAFT-ack-unstamped": s8_an_acknowledgement_of_another_term_does_not_count,
    "RAFT-commit-unclamped": s17_a_piece_of_a_snapshot_commits_nothing,
    "RAFT-fresh-acks": s18_a_new_disk_does_not_count,
    "RAFT-fresh-votes": s13_a_new_disk_does_not_vote,
    "RAFT-leader-unsynced": s22_nothing_is_acknowledged_before_it_is_on_disk,
    "RAFT-match-kept": s19_what_a_lost_disk_acknowledged_does_not_count,
    "RAFT-no-compare": s20_an_entry_decided_on_another_state_is_void,
    "R54-voter-goes-on": s2_a_voter_whose_disk_is_full_does_not_vote_until_there_is_room,
    "R54-voter-stops": s2_a_voter_whose_disk_is_full_does_not_vote_until_there_is_room,
    "RAFT-read-unconfirmed": s21_a_deposed_leader_does_not_read,
    "RAFT-stale-snapshot": s16_a_late_answer_does_not_roll_back_the_state,
    "RAFT-tail-dropped": s3_a_kill_between_snapshot_and_compaction_keeps_the_tail,
    "RAFT-truncate-overlap": s5b_an_old_append_cuts_nothing,
    "RAFT-vote-forgotten": s1_a_voter_that_restarts_votes_again,
    "RAFT-vote-twice": s9_a_vote_counts_once,
}
