"""Random schedules for Raft voters, which check the invariants of the metadata log (I11).

``python -m proof.raft.fuzz --seeds 100`` (``--first``, ``--steps``, ``--members``)

A schedule delivers messages one by one, cuts and heals links, kills processes, cuts power, replaces disks,
restores older copies, compacts logs, decides on outdated states, adds and removes voters, and requests
reads. At the end everything is healed. A seed always produces the same schedule. These properties are checked
after each step or at the end:

- Each term has one leader. The term of a node never decreases, and the node votes once in each term.
- Applied entries are the same on all nodes and never change.
- If two logs agree in one entry, they agree in all earlier entries.
- An acknowledged entry exists once at the end. An entry that was reported as not applied does not exist.
- A read includes every entry that was acknowledged before it.
- Committed lists of voters are the same on all nodes, and each differs by one voter from the one before
  (R93-R98).
- At the end there is a leader, all voters vote, and all have the same state.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kafkalite.raft.adapter import LEADER, RaftSettings
from kafkalite.raft.voter import Voter
from kafkalite.raft.voter_set import AddVoter, RemoveVoter
from kafkalite.rng import Rng, seeded_rng
from proof.raft.world import Link, Member, World

SETTINGS = RaftSettings(
    election_timeout_ms=500,
    fetch_timeout_ms=1_000,
    heartbeat_ms=100,
    snapshot_min_bytes=3_000,
    retained_entries=5,
    append_bytes=400,  # so that catching up takes several messages
    chunk_bytes=700,
)
STEPS = 3_000


class ViolationError(Exception):
    pass


@dataclass
class Plan:
    """The rate of each kind of event, in thousandths of a step."""

    deliver: int = 550
    tick: int = 295
    propose: int = 90
    stale: int = 4
    read: int = 12
    kill: int = 4
    power: int = 2
    wipe: int = 1
    restore: int = 2
    cut: int = 6
    heal: int = 20
    compact: int = 6
    duplicate: int = 0
    fill: int = 0
    change: int = 0  #: attempts to add or remove a voter; without them, no node is an observer
    downtimes: Sequence[float] = (0.0, 0.01, 1.0, 3.0)


FAULTS = ("kill", "power", "wipe", "restore", "cut", "fill")
CALM = Plan()
FULL = Plan(fill=15, compact=12)
#: Voters come and go; a voter whose disk was replaced is removed and may be added again.
MEMBERS = Plan(
    change=40, restore=0, kill=3, power=1, wipe=3, cut=5, heal=30, compact=10, downtimes=(0.0, 0.01, 0.3)
)
HARSH = Plan(kill=8, power=4, wipe=2, cut=12, heal=24, duplicate=20, downtimes=(0.0, 0.01, 0.5, 1.5))


@dataclass
class Run:
    """One schedule. Invariant: ``truth`` has every applied entry, in order."""

    seed: int
    count: int
    plan: Plan
    settings: RaftSettings
    alone_count: int = 0  #: values that node 1 commits as a single node before the others start
    rng: Rng = field(init=False)
    world: World = field(init=False)
    truth: list[str] = field(default_factory=list)
    leaders: dict[int, int] = field(default_factory=dict)
    votes: dict[tuple[int, int], int] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    down_until: dict[int, float] = field(default_factory=dict)
    recovering: set[int] = field(default_factory=set)
    copies: dict[int, dict[str, bytes]] = field(default_factory=dict)  #: an earlier copy of a node's files
    committed: dict[int, list[int]] = field(default_factory=dict)  #: {offset: voters} of committed changes
    restored: int | None = None  #: the node that has not caught up since an older copy of it was restored
    stats: Counter[str] = field(default_factory=Counter)
    proposed: int = 0
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.rng = seeded_rng(self.seed)
        self.world = World(self.count, self.rng, self.settings)
        if self.alone_count:
            self.world.wipe(1)
            names = [f"alone {number}" for number in range(self.alone_count)]
            self.world.keep_alone(1, names, snapshot_at=self.rng.randrange(2 * self.alone_count))
            self.world.start(1)
            self.world.link_all()
        if self.plan.change:
            for i in (self.count + 1, self.count + 2):
                self.world.add_node(i)

    def run(self, steps: int) -> None:
        """Run the schedule. Raises ViolationError."""
        actions = self._actions()
        for _ in range(steps):
            self.steps_done += 1
            self.world.clock[0] += self.rng.random() * 0.008
            self._start_those_due()
            action = actions[self.rng.randrange(len(actions))]
            # With the memory of one voter lost, three voters bear no other fault.
            if self.restored is None or action not in FAULTS:
                getattr(self, f"_{action}")()
            self._check()
        self._heal_everything()
        self._check_end()

    def _actions(self) -> list[str]:
        names = (
            "deliver",
            "tick",
            "propose",
            "stale",
            "read",
            "heal",
            "compact",
            "duplicate",
            "change",
            *FAULTS,
        )
        weights = {name: getattr(self.plan, name) for name in names}
        return [name for name, weight in weights.items() for _ in range(weight)]

    def _pick(self) -> Member | None:
        up = list(self.world.up)
        return self.world.up[up[self.rng.randrange(len(up))]] if up else None

    def _pick_link(self) -> tuple[tuple[int, int], Link] | None:
        loaded = [(ends, link) for ends, link in self.world.links.items() if link.queue]
        return loaded[self.rng.randrange(len(loaded))] if loaded else None

    # --- events ----------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        picked = self._pick_link()
        if picked is not None:
            self.world.deliver(*picked[0], 1 + self.rng.randrange(3))

    def _duplicate(self) -> None:
        """Deliver a message twice or too late, which a real connection never does."""
        picked = self._pick_link()
        if picked is not None:
            queue = picked[1].queue
            message = queue[self.rng.randrange(len(queue))]
            if self.rng.randrange(2):
                queue.remove(message)
            queue.insert(self.rng.randrange(len(queue) + 1), message)

    def _tick(self) -> None:
        member = self._pick()
        if member is not None:
            member.tick()

    def _propose(self) -> None:
        for member in list(self.world.up.values()):
            if member.is_leader:
                for _ in range(1 + self.rng.randrange(4)):
                    self.proposed += 1
                    padding = "x" * (0, 0, 150)[self.rng.randrange(3)]
                    member.propose(f"{self.proposed} {padding}")
                    if self.rng.randrange(2):
                        member.tick()

    def _stale(self) -> None:
        """Propose an entry that was decided on an outdated state."""
        member = self._pick()
        if member is not None and member.is_leader:
            self.proposed += 1
            member.propose(f"{self.proposed} stale", after_offset=self.rng.randrange(member.offset + 1))
            self.stats["stale"] += 1

    def _read(self) -> None:
        member = next((member for member in self.world.up.values() if member.is_leader), None)
        if member is None:
            return
        known = max(self.world.acked.values(), default=0)

        def on_answer(is_current: bool) -> None:
            if is_current:
                self.stats["reads"] += 1
                if member.offset < known:
                    raise ViolationError(
                        f"node {member.node_id} reads at {member.offset}, {known} was acknowledged"
                    )

        member.node.read_index(on_answer)

    def _kill(self) -> None:
        member = self._pick()
        if member is not None:
            self.world.kill(member.node_id)
            self._leave_down(member.node_id)

    def _power(self) -> None:
        member = self._pick()
        if member is not None:
            self.world.lose_power(member.node_id)
            self._leave_down(member.node_id)

    def _wipe(self) -> None:
        """Replace one disk, unless the last one that was replaced does not vote yet."""
        member = self._pick()
        if member is None or self.recovering - {member.node_id}:
            return
        i = member.node_id
        if self.plan.change:
            leader = next((one for one in self.world.up.values() if one.leader[0] == one.node_id), None)
            if leader is None or not self._may_lose(leader, i):
                return
            self.world.joiners.add(i)
        self.world.wipe(i)
        self.recovering.add(i)
        self._forget(i)
        self._leave_down(i)
        self.stats["wiped"] += 1

    def _may_lose(self, leader: Member, i: int) -> bool:
        """Whether a majority of the voters keeps its memory without the disk of ``i``.

        All nodes that run must have the same voters, and the last change must be committed.
        """
        members = self.world.up.values()
        if any(not one.node.is_running or one.voter_ids != leader.voter_ids for one in members):
            return False
        ids = leader.voter_ids
        if not set(ids) <= self.world.up.keys() or leader.node.voter.voter_set().offset > leader.index:
            return False
        return i not in ids or len(ids) >= 3

    def _change(self) -> None:
        """Let a leader, which may be a deposed one, add or remove a voter."""
        leaders = [member for member in self.world.up.values() if member.is_leader]
        if not leaders:
            return
        leader = leaders[self.rng.randrange(len(leaders))]
        node_id = self.world.ids[self.rng.randrange(len(self.world.ids))]
        if node_id in leader.voter_ids:
            if not self.recovering or node_id in self.recovering:
                self.world.change(leader.node_id, RemoveVoter(node_id))
        else:
            self.world.change(leader.node_id, AddVoter(node_id))

    def _forget(self, i: int) -> None:
        """Expect node ``i`` to remember nothing of its terms and votes."""
        for vote in [key for key in self.votes if key[0] == i]:
            del self.votes[vote]
        self.terms.pop(i, None)

    def _restore(self) -> None:
        """Copy the files of a node, or restore its last copy and start it while all others are connected."""
        member = self._pick()
        if member is None or self.recovering:
            return
        i = member.node_id
        copy = self.copies.pop(i, None)
        if copy is None:
            self.copies[i] = self.world.copy(i)
            return
        world = self.world
        world.restore(i, copy)
        self._forget(i)
        self.restored = i
        for other in world.ids:
            self.down_until.pop(other, None)
            world.disks[other].capacity_bytes = None
            if other not in world.up:
                world.start(other)
        world.cut.clear()
        world.link_all()
        self.stats["restored"] += 1

    def _leave_down(self, i: int) -> None:
        downtimes = self.plan.downtimes
        self.down_until[i] = self.world.clock[0] + downtimes[self.rng.randrange(len(downtimes))]
        self.stats["killed"] += 1

    def _start_those_due(self) -> None:
        for i, until in list(self.down_until.items()):
            if until < self.world.clock[0]:
                del self.down_until[i]
                self.world.disks[i].capacity_bytes = None
                self.world.restart(i)

    def _cut(self) -> None:
        a = 1 + self.rng.randrange(len(self.world.ids))
        b = 1 + self.rng.randrange(len(self.world.ids))
        if a != b and (a, b) not in self.world.cut:
            self.world.unlink(a, b)
            self.stats["cut"] += 1

    def _heal(self) -> None:
        cut = sorted(self.world.cut)
        if cut:
            self.world.link(*cut[self.rng.randrange(len(cut))])

    def _fill(self) -> None:
        """Fill the disk of a node except for a few bytes, or free it if it was filled (R54)."""
        member = self._pick()
        if member is not None:
            disk = self.world.disks[member.node_id]
            is_full = disk.capacity_bytes is not None
            disk.capacity_bytes = None if is_full else disk.used_bytes() + self.rng.randrange(200)
            self.stats["filled"] += 1

    def _compact(self) -> None:
        member = self._pick()
        if member is not None and member.index > 2:
            member.take_snapshot()
            self.stats["compacted"] += 1

    # --- invariants ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.world.failures:
            node_id, error = self.world.failures[0]
            raise ViolationError(f"node {node_id} failed: {error!r}") from error
        for i, member in self.world.up.items():
            self._check_effects(i, member)
            if not member.node.is_running:
                self.stats["paused"] += 1
                continue  # it knows only what is on its disk
            self._check_term(i, member)
            self._check_voters(i, member)
            if member.is_leader:
                self._check_matches(i, member)
            if i in self.recovering and _votes(member):
                self.recovering.discard(i)
            if i == self.restored and member.node.voter._restart.is_over and _votes(member):
                self.restored = None
        if self.rng.randrange(50) == 0:
            self._check_logs()

    def _check_term(self, i: int, member: Member) -> None:
        voter, term = member.node.voter, member.term
        if voter.raft_state() == LEADER and self.leaders.setdefault(term, i) != i:
            raise ViolationError(f"nodes {self.leaders[term]} and {i} lead in term {term}")
        if term < self.terms.get(i, 0):
            raise ViolationError(f"node {i} went back from term {self.terms[i]} to {term}")
        self.terms[i] = term
        vote = member.vote
        if vote is not None and self.votes.setdefault((i, term), vote) != vote:
            raise ViolationError(f"node {i} voted for {self.votes[i, term]} and {vote} in term {term}")

    def _check_voters(self, i: int, member: Member) -> None:
        journal = member.node.journal
        voters = journal.voters.at(journal.getRaftCommitIndex())
        if voters is None:
            return
        ids = sorted(voters.voters)
        if self.committed.setdefault(voters.offset, ids) != ids:
            raise ViolationError(f"node {i} has voters {ids}, others {self.committed[voters.offset]}")
        before = max((at for at in self.committed if at < voters.offset), default=None)
        former = range(1, self.count + 1) if before is None else self.committed[before]
        if member.is_leader and len(set(former) ^ set(ids)) > 1:
            raise ViolationError(f"the voters {list(former)} become {ids} in one change")
        if member.is_leader:
            self.recovering &= set(ids)

    def _check_matches(self, i: int, leader: Member) -> None:
        """Check that the entries that a leader counts on a follower's disk exist there."""
        for peer, (match, _) in leader.node.voter.matches().items():
            follower = self.world.up.get(peer)
            if follower is None or follower.term != leader.term or match == 0:
                continue
            entry, own = follower.node.journal.entry(match), leader.node.journal.entry(match)
            if match > follower.node.journal.last_index or (entry and own and entry[2] != own[2]):
                raise ViolationError(f"leader {i} counts entry {match} on node {peer}, which has it not")

    def _check_effects(self, i: int, member: Member) -> None:
        known = min(len(self.truth), member.seen_to)
        names, base = member.values, len(member.snapshot_values)
        if member.fresh_snapshot:
            member.fresh_snapshot = False
            if member.snapshot_values[: len(self.truth)] != self.truth[:base]:
                raise ViolationError(f"the snapshot of node {i} differs from what took effect")
            self.truth.extend(member.snapshot_values[len(self.truth) :])
            known = base
        for at in range(max(known, base), base + len(names)):
            name = names[at - base][1]
            if at == len(self.truth):
                self.truth.append(name)
            elif self.truth[at] != name:
                raise ViolationError(f"effect {at} is {self.truth[at][:9]!r}, and on node {i} {name[:9]!r}")
        member.seen_to = base + len(names)

    def _check_logs(self) -> None:
        logs = {
            i: {entry[1]: entry for entry in member.node.journal[:]} for i, member in self.world.up.items()
        }
        for a in logs:
            for b in logs:
                agree = False
                for index in sorted(logs[a].keys() & logs[b].keys(), reverse=True) if a < b else ():
                    agree = agree or logs[a][index][2] == logs[b][index][2]
                    if agree and logs[a][index] != logs[b][index]:
                        raise ViolationError(f"the logs of {a} and {b} agree behind {index}, and not there")

    def _heal_everything(self) -> None:
        world = self.world
        for i in world.ids:
            world.disks[i].capacity_bytes = None
            if i not in world.up:
                world.start(i)
        world.cut.clear()
        world.link_all()
        for _ in range(1_500):
            world.clock[0] += 0.005
            for i in world.ids:
                world.up[i].runner.hand_loop.run()
            for a, b in list(world.links):
                world.deliver(a, b)
            self._check()
            if self._is_settled():
                return

    def _is_settled(self) -> bool:
        members = list(self.world.up.values())
        leader = next((member for member in members if member.leader[0] == member.node_id), None)
        voters = [member for member in members if leader is not None and _is_listed(leader, member)]
        if leader is None or not all(_votes(member) for member in voters):
            return False
        last = leader.node.journal.last_index
        return all(member.index == last and member.node.journal.last_index == last for member in voters)

    def _follows_voters(self, member: Member) -> bool:
        """Whether a node is listed as a voter by the leader, so that it must have the same state."""
        leaders = [one for one in self.world.up.values() if one.leader[0] == one.node_id]
        return any(_is_listed(leader, member) for leader in leaders)

    def _check_end(self) -> None:
        if not self._is_settled():
            state = [(member.leader, member.index, _votes(member)) for member in self.world.up.values()]
            raise ViolationError(f"does not settle: {state}")
        for i, member in self.world.up.items():
            if self._follows_voters(member) and member.names != self.truth:
                raise ViolationError(f"node {i} has not the state of the others")
        if len(set(self.truth)) != len(self.truth):
            raise ViolationError("something took effect twice")
        present = set(self.truth)
        lost = [name for name in self.world.acked if name not in present]
        if lost:
            raise ViolationError(f"{len(lost)} acknowledged entries are lost, among them {lost[0][:9]!r}")
        undone = [
            name
            for name, outcome in self.world.outcomes.items()
            if name in present and name not in self.world.acked and outcome is not None
        ]
        if undone:
            raise ViolationError(f"{undone[0][:9]!r} was reported as void and was applied")
        self.stats["acked"] += len(self.world.acked)
        self.stats["changes"] += sum(error is None for _, error in self.world.changes)
        self.stats["elections"] += len(self.leaders)


def _votes(member: Member) -> bool:
    return member.failure is None and not member.abstains


def _is_listed(leader: Member, member: Member) -> bool:
    return leader.node.voter.voter_set().lists(member.node_id, member.directory)


def run_raft_seed(
    seed: int,
    *,
    steps: int = STEPS,
    count: int = 3,
    plan: Plan = CALM,
    is_prevote_used: bool = True,
    alone_count: int = 0,
    stats: Counter[str] | None = None,
) -> str | None:
    """Run one schedule. Return the violation, or None."""
    run = Run(seed, count, plan, SETTINGS, alone_count)
    is_prevote_due = Voter.is_prevote_due
    if not is_prevote_used:  # Raft must be safe without it
        Voter.is_prevote_due = lambda self, now: False  # type: ignore[method-assign]
    try:
        run.run(steps)
    except ViolationError as violation:
        return f"{violation} (seed {seed}, step {run.steps_done})"
    finally:
        Voter.is_prevote_due = is_prevote_due  # type: ignore[method-assign]
        if stats is not None:
            stats.update(run.stats)
    return None


def run_varied_seed(seed: int, *, steps: int = STEPS, stats: Counter[str] | None = None) -> str | None:
    """Run one schedule in one of several plans. Return the violation, or None."""
    plan = HARSH if seed % 2 else FULL if seed % 4 else CALM
    count = 5 if seed % 5 == 0 else 3
    if seed % 17 == 0:
        count = 1 + seed % 2
        plan = replace(plan, wipe=0, restore=0)  # because a lost disk would be the only copy
    alone_count = 0
    if seed % 7 == 3:
        alone_count = 1 + seed % 30
        plan = replace(plan, wipe=0, restore=0)
    return run_raft_seed(
        seed,
        steps=steps,
        count=count,
        plan=plan,
        is_prevote_used=seed % 3 != 0,
        alone_count=alone_count,
        stats=stats,
    )


def run_members_seed(seed: int, *, steps: int = STEPS, stats: Counter[str] | None = None) -> str | None:
    """Run one schedule in which voters come and go (R93-R98). Return the violation, or None."""
    count = (1, 3, 3, 2, 5)[seed % 5]
    return run_raft_seed(
        seed, steps=steps, count=count, plan=MEMBERS, is_prevote_used=seed % 4 != 0, stats=stats
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proof.raft.fuzz")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--members", action="store_true", help="only schedules in which voters change")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    stats: Counter[str] = Counter()
    begun, bad = time.monotonic(), 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        run = run_members_seed if arguments.members else run_varied_seed
        violation = run(seed, steps=arguments.steps, stats=stats)
        if violation is not None:
            bad += 1
            print(violation, flush=True)  # noqa: T201
    spent = time.monotonic() - begun
    print(f"{arguments.seeds} schedules, {bad} violations, {spent:.1f} s; {dict(stats)}")  # noqa: T201
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
