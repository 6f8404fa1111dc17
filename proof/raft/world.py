"""Raft voters without a network, a clock or a disk. The test controls every message, tick and power cut.

The real ``RaftNode`` runs on a loop that advances only on request, with links that hold messages until they
are delivered, and disks in memory that can lose power at any moment. The schedules and the fuzzer use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgpack

from kafkalite.errors import BrokerError
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import TopicRecord
from kafkalite.raft import messages
from kafkalite.raft.adapter import LEADER, RaftSettings
from kafkalite.raft.entries import REGULAR, change_after, effective_records
from kafkalite.raft.messages import Message
from kafkalite.raft.node import Outcome, RaftNode
from kafkalite.raft.single_quorum import SingleNodeLog
from kafkalite.raft.voter_set import AddVoter, RemoveVoter, VoterChange
from kafkalite.rng import Rng, seeded_rng
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of

DIRECTORY: Final = "meta"
_ELIGIBILITY: Final = 13  # the number of this kind of message
#: Timers do not expire for hours, so that schedules control all events.
STILL: Final = RaftSettings(
    election_timeout_ms=5_000_000, fetch_timeout_ms=10**9, heartbeat_ms=1_000_000, snapshot_min_bytes=10**9
)


class _Handle:
    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self.when = when
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None


class HandLoop:
    """The part of an event loop that a node uses. It runs callbacks only on request."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self._ready: deque[Callable[[], object]] = deque()
        self._timers: list[_Handle] = []

    def time(self) -> float:
        return self._clock[0]

    def is_closed(self) -> bool:
        return False

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self._ready.append(lambda: function(*args))

    def call_later(self, delay: float, function: Callable[..., object], *args: Any) -> _Handle:
        handle = _Handle(self.time() + delay, lambda: function(*args))
        self._timers.append(handle)
        return handle

    def run(self) -> None:
        """Run the callbacks that are ready or due, once."""
        timers, self._timers = self._timers, []
        for handle in timers:
            if handle.call is not None and handle.when <= self.time():
                self._ready.append(handle.call)
            elif handle.call is not None:
                self._timers.append(handle)
        for _ in range(len(self._ready)):
            self._ready.popleft()()


class HandRunner:
    def __init__(self, clock: list[float]) -> None:
        self.hand_loop = HandLoop(clock)

    @property
    def loop(self) -> Any:
        return self.hand_loop

    def call(self, function: Callable[..., object], *args: Any) -> None:
        self.hand_loop.call_soon(function, *args)

    def offload(self, work: Callable[[], Any], done: Callable[[Any], object]) -> None:
        self.call(done, work())


class Link:
    """One direction between two nodes, in order. Holds messages until they are delivered."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.is_cut = False

    def send(self, message: bytes) -> None:
        if not self.is_cut:
            self.queue.append(message)


class Member:
    """One process: a node, and the state machine behind it, which is called directly (``NodeListener``)."""

    def __init__(self, world: World, node_id: int, *, is_copy: bool = False) -> None:
        self.world = world
        self.node_id = node_id
        self.values: list[tuple[int, str]] = []  #: (offset, value) of the applied entries
        self.snapshot_values: list[str] = []
        self.offset = 0
        self.index = 0
        self.leader: tuple[int | None, int] = (None, 0)
        self.failure: BaseException | None = None
        self.queued = 0  # number of proposals since the last tick
        self.seen_to = 0  #: number of entries that the fuzzer has compared
        self.fresh_snapshot = False  #: whether there is a snapshot that the fuzzer has not compared
        self.runner = HandRunner(world.clock)
        is_joiner = node_id in world.joiners
        self.node = RaftNode(
            world.disks[node_id],
            DIRECTORY,
            node_id=node_id,
            voters=[] if is_joiner else world.founders,
            addresses={i: f"node{i}:9093" for i in (world.ids if is_joiner else world.founders)},
            runner=self.runner,
            rng=seeded_rng(world.rng.randrange(1 << 30)),
            settings=world.settings,
            listener=self,
            post=self._post,
            is_copy=is_copy,
        )
        self.node.on_peers = self._on_peers
        self.node.open()

    def _on_peers(self, addresses: Mapping[int, str]) -> None:
        """Connect to new peers, as RaftLinks does, in the next tick."""
        for peer in addresses:
            self.runner.hand_loop.call_soon(self.world.dial, self.node_id, peer)

    def _post(self, events: list[tuple[Any, ...]]) -> None:
        for function, *args in events:
            function(*args)

    def on_entry(self, index: int, offset: int, records: bytes) -> None:
        (record,) = record_codec.from_bytes(records)
        assert isinstance(record, TopicRecord)
        if self.world.decided_on[record.name] != self.offset:
            self.world.failures.append((self.node_id, AssertionError(f"{record.name[:9]!r} is not void")))
        self.index, self.offset = index, offset
        self.values.append((offset, record.name))

    def on_void(self, index: int) -> None:
        self.index = index

    def on_snapshot(self, index: int, offset: int, records: bytes) -> None:
        self.index, self.offset = index, offset
        self.snapshot_values = [cast(TopicRecord, record).name for record in record_codec.from_bytes(records)]
        self.values = []
        self.fresh_snapshot = True

    def on_leader(self, leader_id: int | None, term: int) -> None:
        self.leader = (leader_id, term)

    def on_peers(self, addresses: Mapping[int, str]) -> None:
        pass

    def on_snapshot_wanted(self) -> None:
        self.take_snapshot()

    def on_failure(self, error: BaseException) -> None:
        self.failure = error
        self.world.failures.append((self.node_id, error))

    def take_snapshot(self) -> None:
        records = [TopicRecord("0" * 32, name) for name in self.names]
        self.node.take_snapshot(self.index, self.offset, records)

    @property
    def names(self) -> list[str]:
        """Return all applied values, in order."""
        return self.snapshot_values + [name for _, name in self.values]

    @property
    def is_leader(self) -> bool:
        """Whether pysyncobj considers this node the leader, which it does from the election on."""
        return self.node.is_running and self.node.voter.raft_state() == LEADER

    @property
    def abstains(self) -> bool:
        """Whether the node makes no promise at present."""
        return self.node.voter.abstains()

    @property
    def vote(self) -> int | None:
        """The vote in the current term."""
        vote: int | None = self.node.voter._SyncObj__votedForNodeId
        return vote

    def last_append_seq(self, peer: int) -> int:
        """Return the sequence of the last append that the leader sent to ``peer``."""
        return self.node.voter._append_seq.get(peer, 0)

    def send_snapshot_to(self, peer: int) -> None:
        """Let the leader send its snapshot to ``peer`` again."""
        voter = self.node.voter
        voter._SyncObj__raftNextIndex[voter._nodes[peer]] = 1

    @property
    def voter_ids(self) -> list[int]:
        """The voters according to the node's log."""
        return sorted(self.node.voter.voter_set().voters)

    @property
    def directory(self) -> bytes:
        return self.node.journal.identity.directory

    @property
    def term(self) -> int:
        return int(self.node.voter.raftCurrentTerm)

    def log(self) -> list[tuple[int, int]]:
        """Return (index, term) of the entries in the log."""
        return [(index, term) for _, index, term in self.node.journal[:]]

    def propose(self, name: str, after_offset: int | None = None) -> None:
        """Propose a value, decided on the coming state unless ``after_offset`` is given.

        The outcome goes to ``world.outcomes``.
        """
        if after_offset is None:
            after_offset = self._offset_to_be()
        self.world.decided_on[name] = after_offset
        command = change_after(after_offset, record_codec.to_bytes([TopicRecord("0" * 32, name)]))
        self.queued += 1
        self.node.propose(
            command, lambda outcome, is_known: self.world.settle_proposal(name, outcome, is_known)
        )

    def _offset_to_be(self) -> int:
        """Return the offset after the whole log and all queued entries are committed."""
        journal = self.node.journal
        if self.queued:
            return journal.last_index + self.queued
        offset = self.offset
        for command, index, _ in journal[max(0, self.index + 1 - journal.first_index) :]:
            if command[0] == REGULAR and effective_records(command[1:], offset) is not None:
                offset = index
        return offset

    def tick(self) -> None:
        """Run the pending callbacks, then tick."""
        self.queued = 0
        self.runner.hand_loop.run()
        self.node.kick()
        self.runner.hand_loop.run()


def _is_of_version_0(data: bytes) -> bool:
    """Whether a voter that supports only version 0 of RaftMessages reads the message."""
    kind, *fields = msgpack.unpackb(data)
    return kind != _ELIGIBILITY or len(fields) == 4


class World:
    """``count`` voters, numbered from 1, and the links between them."""

    def __init__(
        self,
        count: int,
        rng: Rng,
        settings: RaftSettings = STILL,
        *,
        is_linked: bool = True,
        earlier: Iterable[int] = (),
    ) -> None:
        """``earlier`` voters read and write version 0 of RaftMessages only (R90)."""
        self.rng = rng
        self.settings = settings
        self.clock = [1_000.0]
        self.earlier = frozenset(earlier)
        self.rounds = 12  #: the rounds of ``settle``
        self.founders = list(range(1, count + 1))  #: the voters of the first format
        self.ids = list(self.founders)
        self.joiners: set[int] = set()  #: the nodes that start as observers
        self.changes: list[
            tuple[VoterChange, BrokerError | None]
        ] = []  #: the outcomes of changes of the voters
        self.disks = {i: MemoryFileSystem(crashable=True) for i in self.ids}
        self.up: dict[int, Member] = {}
        self.links: dict[tuple[int, int], Link] = {}
        self.cut: set[tuple[int, int]] = set()
        self.failures: list[tuple[int, BaseException]] = []
        self.outcomes: dict[str, Outcome | None] = {}
        self.decided_on: dict[str, int] = {}
        self.acked: dict[str, int] = {}  #: {value: offset} of the acknowledged proposals
        for i in self.ids:
            self.start(i)
        if is_linked:
            self.link_all()

    def keep_alone(self, i: int, names: Iterable[str], *, snapshot_at: int | None = None) -> None:
        """Let node ``i`` run as a single node on its disk, commit these values, and stop.

        After ``snapshot_at`` values it takes a snapshot.
        """
        self.kill(i)
        log = SingleNodeLog(self.disks[i], DIRECTORY, i, bytes([i]) * 16)
        recovered = log.open()
        values = [cast(TopicRecord, record) for record in recovered.snapshot_records]
        offset = recovered.snapshot_offset
        for offset, records in recovered.entries:  # noqa: B007
            values += cast("list[TopicRecord]", records)
        for count, name in enumerate(names, 1):
            self.decided_on[name], offset = offset, log.journal.last_index + 1
            values.append(TopicRecord("0" * 32, name))
            log.append([(offset, values[-1:])])
            self.acked[name] = offset
            if count == snapshot_at:
                log.write_snapshot(offset, values)
        log.close()

    def settle_proposal(self, name: str, outcome: Outcome | None, is_known: bool) -> None:
        assert name not in self.outcomes, "a proposal has one outcome"
        self.outcomes[name] = outcome
        if outcome is not None and outcome.took_effect:
            self.acked[name] = outcome.offset

    # --- processes and links ---------------------------------------------------------------------------

    def start(self, i: int, *, is_copy: bool = False) -> Member:
        member = self.up[i] = Member(self, i, is_copy=is_copy)
        return member

    def add_node(self, i: int) -> Member:
        """Start a node with an empty disk, which follows the quorum as an observer."""
        if i not in self.ids:
            self.ids.append(i)
        self.joiners.add(i)
        self.disks[i] = MemoryFileSystem(crashable=True)
        return self.restart(i)

    def change(self, i: int, change: VoterChange) -> None:
        """Let node ``i`` change the voters. The outcome goes to ``changes``."""
        self.up[i].node.change_voters(change, lambda error: self.changes.append((change, error)))

    def add_voter(self, i: int, node_id: int) -> None:
        """Let node ``i`` add a voter, once the observer has caught up."""
        self.settle()
        self.change(i, AddVoter(node_id))

    def remove_voter(self, i: int, node_id: int) -> None:
        self.change(i, RemoveVoter(node_id))

    def kill(self, i: int) -> None:
        """Kill the process. The disk keeps the data that was written to the kernel."""
        self.up.pop(i, None)
        for j in self.ids:
            self._drop(i, j)

    def lose_power(self, i: int) -> None:
        self.kill(i)
        self.disks[i].crash(self.rng)

    def wipe(self, i: int) -> None:
        """Replace the disk by an empty one."""
        self.kill(i)
        self.disks[i] = MemoryFileSystem(crashable=True)

    def copy(self, i: int) -> dict[str, bytes]:
        """Return the files of a node, as a backup of a running node has them."""
        return dict(tree_of(self.disks[i]))

    def restore(self, i: int, copy: dict[str, bytes]) -> None:
        """Kill the process, and replace its files by those of an earlier ``copy``."""
        self.kill(i)
        self.disks[i] = disk_with_files(copy, [f"/{DIRECTORY}"])

    def restart(self, i: int) -> Member:
        self.kill(i)
        member = self.start(i)
        for j in self.up:
            if j != i and (i, j) not in self.cut:
                self.link(i, j)
        return member

    def link(self, a: int, b: int) -> None:
        for x, y in ((a, b), (b, a)):
            self.cut.discard((x, y))
            if x in self.up and y in self.up and y in self.up[x].node.transport.peers:
                former = self.links.pop((x, y), None)
                if former is not None:
                    former.is_cut = True
                link = self.links[x, y] = Link()
                self.up[x].node.transport.attach(y, link, 0 if self.earlier & {x, y} else messages.VERSION)

    def dial(self, a: int, b: int) -> None:
        """Open the link from ``a`` to ``b`` unless it is open or cut."""
        is_open = (a, b) in self.links or {(a, b), (b, a)} & self.cut
        if a in self.up and b in self.up and b in self.up[a].node.transport.peers and not is_open:
            self.links[a, b] = Link()
            self.up[a].node.transport.attach(b, self.links[a, b])

    def link_all(self) -> None:
        for a in self.ids:
            for b in self.ids:
                if a < b:
                    self.link(a, b)

    def unlink(self, a: int, b: int) -> None:
        """Close the link; messages in transit are lost."""
        self.cut |= {(a, b), (b, a)}
        self._drop(a, b)

    def isolate(self, i: int) -> None:
        for j in self.ids:
            if j != i:
                self.unlink(i, j)

    def _drop(self, a: int, b: int) -> None:
        for x, y in ((a, b), (b, a)):
            link = self.links.pop((x, y), None)
            if link is not None:
                link.is_cut = True
                if x in self.up:
                    self.up[x].node.transport.detach(y, link)

    # --- messages --------------------------------------------------------------------------------------

    def pending(self, a: int, b: int) -> list[Message]:
        """Return the messages in transit from ``a`` to ``b``."""
        link = self.links.get((a, b))
        return [messages.decode(data) for data in link.queue] if link is not None else []

    def deliver(self, a: int, b: int, count: int | None = None) -> None:
        link = self.links.get((a, b))
        if link is None:
            return
        for _ in range(len(link.queue) if count is None else min(count, len(link.queue))):
            data = link.queue.popleft()
            if b in self.earlier and not _is_of_version_0(data):
                data = b""  # malformed for that voter
            self.up[b].node.transport.receive(a, data)

    def inject(self, a: int, b: int, message: Message | bytes) -> None:
        """Deliver ``message`` to ``b`` as if ``a`` had just sent it."""
        data = message if isinstance(message, bytes) else messages.encode(message)
        self.up[b].node.transport.receive(a, data)

    def forget(self, a: int, b: int) -> None:
        """Lose the messages in transit; neither node notices."""
        link = self.links.get((a, b))
        if link is not None:
            link.queue.clear()

    # --- time ------------------------------------------------------------------------------------------

    def tick(self, *ids: int) -> None:
        for i in ids or list(self.up):
            self.up[i].tick()

    def elect(self, i: int) -> None:
        """Let node ``i`` stand for election."""
        self.tick(i)  # so that the node does not consider itself paused
        voter = self.up[i].node.voter
        voter._has_won_prevote = True
        voter.set_deadline(0.0)
        self.tick(i)

    def heartbeat(self, i: int) -> None:
        self.up[i].node.voter.beat_soon()
        self.tick(i)

    def outwait(self, *ids: int) -> None:
        """Let so much time pass that restarted voters do without a voter that does not respond (R59)."""
        self.clock[0] += 2 * self.settings.election_timeout_ms / 1000
        self.settle(*ids)

    def settle(self, *ids: int, rounds: int | None = None) -> None:
        """Deliver everything between these nodes, with heartbeats of the leaders."""
        chosen = ids or tuple(self.up)
        for _ in range(rounds or self.rounds):
            for i in chosen:
                if i in self.up and self.up[i].is_leader:
                    self.heartbeat(i)
            for a in chosen:
                for b in chosen:
                    if a != b and a in self.up and b in self.up:
                        self.deliver(a, b)
            self.tick(*(i for i in chosen if i in self.up))

    def found(self) -> None:
        """Bootstrap the cluster, led by node 1."""
        for _ in range(4):
            self.settle(rounds=4)
            self.clock[0] += self.settings.heartbeat_ms / 1000 + 0.001
        assert all(not member.abstains for member in self.up.values()), "founded"
        assert self.leaders() == [(1, 1)], self.leaders()

    # --- state -----------------------------------------------------------------------------------------

    def leaders(self) -> list[tuple[int, int]]:
        """Return (node, term) of every leader."""
        return [(i, member.term) for i, member in self.up.items() if member.is_leader]

    def names(self, i: int) -> list[str]:
        return self.up[i].names

    def propose(self, i: int, names: Iterable[str]) -> None:
        """Propose values one after the other. Each is appended before the next one is decided."""
        for name in names:
            self.up[i].propose(name)
            self.up[i].tick()

    def acked_among(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.acked]
