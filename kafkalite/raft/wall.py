"""The wall: the one module that knows pysyncobj, and makes what it keeps of it safe.

Of the library serve the election, the replication loop, the commit rule and the loop that applies. As
shipped it loses acknowledged commands (docs/adr/0009-raft-on-pysyncobj.md tells how, and where each rule
below comes from), so around these stand our own journal, snapshot store and transport, and methods of the
library are overridden: ``_SyncObj__x`` is its private ``self.__x``. That holds for one version of it
exactly, and is checked when the module is imported.

What the wall adds to the library's Raft (R17):

- nothing is said before it is on disk: votes and terms at once, entries before the acknowledgement, the
  leader's own copy before it counts
- an acknowledgement carries its term and the message that it answers; one of another term or from before the
  link's last beginning counts nothing, nor does one of a voter that abstains
- a follower commits no further than the message at hand has verified
- a vote counts once; nothing is ever unpickled; commands come from the leader's own process only
- a snapshot replaces only an older state
- a leader or candidate of an older term hears of it; after a sleep a node first reads what has come

``voter`` adds pre-vote, read-index and abstaining.

Time is the Raft loop's, chance is the node's ``Rng``; so a simulated cluster replays exactly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from kafkalite import mutants
from kafkalite.errors import KafkaliteError
from kafkalite.raft.raft_journal import RaftJournal
from kafkalite.raft.raft_messages import MAX_COMMAND_BYTES, NO_OP, REGULAR, Message
from kafkalite.raft.raft_settings import RaftSettings
from kafkalite.raft.snapshot_store import Snapshot, SnapshotStore
from kafkalite.raft.standing import Standing
from kafkalite.rng import Rng

LIBRARY_VERSION: Final = "0.3.17"
_OVERRIDDEN: Final = (
    "applyLogEntries",
    "doApplyCommand",
    "generateRaftTimeout",
    "loadDumpFile",
    "onBecomeLeader",
    "onMessageReceived",
    "onNodeConnected",
    "onNodeDisconnected",
    "sendAppendEntries",
    "sendNextNodeIdx",
    "setCurrentTerm",
    "setState",
    "tryLogCompaction",
)

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2
_APPLIED_PER_TICK: Final = 2_000  # a long backlog must not starve the heartbeats

_now: Callable[[], float] = time.monotonic


class WrongLibraryError(KafkaliteError):
    """Another pysyncobj than the one that the wall was built around."""


def check_library() -> None:
    """Raises WrongLibraryError unless the library is the one that was audited."""
    missing = [name for name in _OVERRIDDEN if not hasattr(SyncObj, f"_SyncObj__{name}")]
    if VERSION != LIBRARY_VERSION or missing:
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise WrongLibraryError(
            f"pysyncobj {VERSION}{lacks} is installed, and kafkalite needs {LIBRARY_VERSION} exactly",
            hint=f"pip install pysyncobj=={LIBRARY_VERSION}",
        )


def _refuse_pickle(*_: Any) -> Any:
    raise AssertionError("the Raft library tried to use pickle")


def _take_over_library() -> None:
    """Its pickle is dead, and its clock is that of the wall at work."""
    check_library()
    for name in ("loads", "load", "dumps", "dump"):
        setattr(pysyncobj.pickle, name, _refuse_pickle)
    pysyncobj.syncobj.monotonicTime = lambda: _now()
    # It warns of cutting a log where our journal cuts nothing.
    logging.getLogger("pysyncobj.syncobj").addFilter(lambda record: "truncating" not in str(record.msg))


_take_over_library()


class Applied(Protocol):
    """What the wall tells its node. All calls come from within a call of the node's."""

    def send(self, peer_id: int, message: Message) -> bool: ...

    def kick(self) -> None:
        """A tick is wanted soon."""
        ...

    def apply(self, index: int, command: bytes) -> Any:
        """Entry ``index`` is committed; the result goes to its proposer. What it raises is fatal."""
        ...

    def pass_by(self, index: int) -> None:
        """Entry ``index`` is committed and says nothing."""
        ...

    def install(self, snapshot: Snapshot) -> None:
        """The state is the snapshot's from now on."""
        ...


Done = Callable[[Any, bool], None]
"""(result of apply, whether the outcome is known to be that). (None, True): certainly not done."""


class _Port(Transport):  # type: ignore[misc]
    """What the library takes for its transport."""

    ready = True

    def __init__(self, wall: Wall) -> None:
        super().__init__(None, None, [])
        self._wall = wall

    def send(self, node: Node, message: Message) -> bool:
        return self._wall.emit(node, message)

    def destroy(self) -> None:
        pass


class _NoPoller:
    def poll(self, _timeout: float) -> None:
        pass


class Wall(SyncObj):  # type: ignore[misc]
    """One voter. Its node calls ``enter`` first, whatever it wants."""

    _SyncObj__raftLeader: Any

    def __init__(
        self,
        node_id: int,
        others: Iterable[int],
        host: Applied,
        *,
        journal: RaftJournal,
        snapshots: SnapshotStore,
        standing: Standing,
        settings: RaftSettings,
        now: Callable[[], float],
        rng: Rng,
    ) -> None:
        self._host, self._journal, self._snapshots = host, journal, snapshots
        self._standing, self._settings, self._rng = standing, settings, rng
        self._loop_time = now
        self._nodes = {peer: Node(peer) for peer in others}
        self._votes_counted: set[tuple[int, int]] = set()
        self._leader_seen, self._last_tick = -1e9, now()
        self._append_seq: dict[int, int] = {}  # of the last append sent, per peer
        self._link_floor: dict[int, int] = {}  # its value when the link began
        self._reset_floor: dict[int, int] = {}  # its value at the last back-off
        self._answering = 0  # the seq of the append at hand
        self._leader_commit = 0  # as the leader said it last
        self.enter()
        heartbeat = settings.heartbeat_ms / 1000
        election = settings.election_timeout_ms / 1000
        super().__init__(
            Node(node_id),
            list(self._nodes.values()),
            SyncObjConf(
                autoTick=False,
                journalFile=None,
                fullDumpFile=None,
                useFork=False,
                dynamicMembershipChange=False,
                commandsWaitLeader=False,
                appendEntriesUseBatch=True,
                appendEntriesBatchSizeBytes=settings.append_bytes,
                appendEntriesPeriod=heartbeat,
                raftMinTimeout=election,
                raftMaxTimeout=2 * election,
                leaderFallbackTimeout=settings.fetch_timeout_ms / 1000,
                connectionTimeout=1e9,
                logCompactionMinEntries=10**12,
                logCompactionMinTime=1e12,
            ),
            transport=_Port(self),
        )
        self._poller = _NoPoller()
        self._SyncObj__raftLog = journal
        self._SyncObj__serializer = snapshots
        term = journal.getCurrentTerm()
        self._SyncObj__raftCurrentTerm = max(term, journal.last_term)
        self._SyncObj__votedForNodeId = journal.getVotedForNodeId() if term >= journal.last_term else None
        self._SyncObj__raftCommitIndex = journal.getRaftCommitIndex()
        if snapshots.current is not None:
            self._SyncObj__raftLastApplied = snapshots.current.last_index
        if not self._nodes and standing.is_voter:
            self._SyncObj__raftElectionDeadline = 0.0  # a lone voter need not wait for anybody

    # --- what the node asks ----------------------------------------------------------------------------

    def enter(self) -> None:
        """The library's clock is this wall's until another wall enters."""
        global _now
        _now = self._loop_time

    def raft_state(self) -> int:
        return int(self._SyncObj__raftState)

    def leader(self) -> int | None:
        """Who leads, as far as known. Itself only once it has applied the first entry of its own term."""
        if self.raft_state() == LEADER:
            first = self._SyncObj__noopIDx
            return self.selfNode.id if self.raftLastApplied >= first else None
        leader = self._SyncObj__raftLeader
        return None if leader is None or leader == self.selfNode else leader.id

    def matches(self) -> dict[int, tuple[int, float]]:
        """The leader's knowledge: peer → (its log agrees up to here, when it last answered)."""
        match, seen = self._SyncObj__raftMatchIndex, self._SyncObj__lastResponseTime
        return {peer: (match.get(node, 0), seen.get(node, -1.0)) for peer, node in self._nodes.items()}

    def abstains(self) -> bool:
        """Whether this node has no vote for now."""
        return self._standing.abstains

    def voted_for(self) -> int | None:
        """In this term."""
        vote: int | None = self._SyncObj__votedForNodeId
        return vote

    def next_deadline(self) -> float:
        """When a tick has something to do, if nothing else happens before."""
        if self.raft_state() == LEADER:
            return float(self._SyncObj__newAppendEntriesTime)
        return self.deadline()

    def propose(self, command: bytes, done: Done) -> None:
        """Append a command, as the leader. ``done`` is called once, sooner or later."""
        assert len(command) <= MAX_COMMAND_BYTES, "a command must fit in a message"

        def on_outcome(result: Any, reason: int) -> None:
            if reason == FAIL_REASON.SUCCESS:
                done(result, True)
            else:
                done(None, reason in {FAIL_REASON.NOT_LEADER, FAIL_REASON.QUEUE_FULL, FAIL_REASON.DISCARDED})

        self._applyCommand(command, on_outcome, REGULAR)
        self._host.kick()

    # --- what a voter adds: see ``voter`` ------------------------------------------------------------------

    def _before_election(self, now: float) -> None:
        """Called in every tick of a follower or candidate, before the library looks at the deadline."""

    def _on_resigned(self) -> None:
        """This node has just stopped to lead."""

    def set_deadline(self, deadline: float) -> None:
        """When to stand for election, if no leader is heard of before."""
        self._SyncObj__raftElectionDeadline = deadline

    def deadline(self) -> float:
        return float(self._SyncObj__raftElectionDeadline)

    def draw_timeout(self) -> float:
        """How long to wait for a leader, this time."""
        return float(self._SyncObj__generateRaftTimeout())

    def is_handed_over_to(self) -> bool:
        """Whether the leader has asked this node to take over."""
        return bool(self._SyncObj__transferInProgress)

    def followed(self) -> int | None:
        """Whom this node takes for the leader of its term; itself if it leads, at once."""
        leader = self._SyncObj__raftLeader
        return None if leader is None else leader.id

    def beat_soon(self) -> None:
        """As the leader: let the next tick send appends, whether or not there is something new."""
        self._SyncObj__newAppendEntriesTime = 0.0

    def last_append_seq(self, peer: int) -> int:
        """Of the append that was sent there last."""
        return self._append_seq.get(peer, 0)

    def send_snapshot_to(self, peer: int) -> None:
        """As the leader: begin with the snapshot again at that follower."""
        self._SyncObj__raftNextIndex[self._nodes[peer]] = 1

    def forget_leader(self) -> None:
        self._SyncObj__raftLeader = None

    def take_term(self, term: int, vote: int | None) -> None:
        """Be in ``term`` from now on, durably."""
        self._SyncObj__setCurrentTerm(term, vote)

    def send_all(self, message: Message) -> None:
        for peer in self._nodes:
            self._host.send(peer, dict(message))

    # --- what the node asks, continued ---------------------------------------------------------------------

    def hand_over(self) -> None:
        """Ask the follower that is furthest to take over at once: this node is going."""
        if self.raft_state() == LEADER:
            self.transferLeadership()

    def begin_link(self, peer: int) -> None:
        """A link goes to ``peer`` now: maybe to another process, with another disk, than before."""
        self._link_floor[peer] = self._append_seq.get(peer, 0)
        self._snapshots.cancelTransmisstion(self._nodes[peer])
        self._SyncObj__onNodeConnected(self._nodes[peer])
        self._host.kick()

    def end_link(self, peer: int) -> None:
        self._SyncObj__onNodeDisconnected(self._nodes[peer])

    def _SyncObj__onNodeConnected(self, node: Node) -> None:  # noqa: N802
        SyncObj._SyncObj__onNodeConnected(self, node)
        if self.raft_state() == LEADER and node in self._SyncObj__raftMatchIndex:
            if "RAFT-match-kept" not in mutants.ACTIVE:
                self._SyncObj__raftMatchIndex[node] = 0  # it may have lost what it acknowledged
            self.beat_soon()

    # --- sending ---------------------------------------------------------------------------------------

    def _send(self, node: Node, message: Message) -> bool:
        return self._host.send(node.id, message)

    def emit(self, node: Node, message: Message) -> bool:
        """The library sends: complete the message, and make durable what it tells of."""
        kind = message["type"]
        if kind == "append_entries":
            if "prevLogIdx" in message and message["prevLogIdx"] is None:
                return False  # ahead of our log: the follower's next answer says where it really is
            message["seq"] = self._append_seq[node.id] = self._append_seq.get(node.id, 0) + 1
        elif kind == "next_node_idx":
            message["stamp"] = self.raftCurrentTerm
            message["seq"] = self._answering
            message["counts"] = not self._standing.abstains or "RAFT-fresh-acks" in mutants.ACTIVE
            if "RAFT-ack-unsynced" not in mutants.ACTIVE:
                self._journal.sync()
        elif kind in {"apply_command", "apply_command_response"}:
            return False  # only the leader's own process proposes
        return self._send(node, message)

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        if self.raft_state() != LEADER:
            self._refuse_proposals()
            return
        last = self._journal.last_index
        super()._checkCommandsToApply()
        if self._journal.last_index != last:
            self._SyncObj__sendAppendEntries()  # one for the whole batch, at once; then our own copy
            self._sync_own_copy()

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        SyncObj._SyncObj__onBecomeLeader(self)
        self._sync_own_copy()  # a lone voter commits its first entry in this very tick

    def _refuse_proposals(self) -> None:
        queue = self._SyncObj__commandsQueue
        while True:
            try:
                _, on_outcome = queue.get_nowait()
            except pysyncobj.syncobj.Queue.Empty:
                return
            on_outcome(None, FAIL_REASON.NOT_LEADER)

    def _sync_own_copy(self) -> None:
        if "RAFT-leader-unsynced" not in mutants.ACTIVE:
            self._journal.sync()

    # --- ticking ---------------------------------------------------------------------------------------

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803
        now = self._loop_time()
        gap = self.conf.raftMinTimeout / 2
        if now - self._last_tick > gap:
            # This process slept. What the others have said meanwhile is still to be read.
            self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, now + gap)
            heard = now - self.conf.leaderFallbackTimeout / 2
            for node, seen in self._SyncObj__lastResponseTime.items():
                self._SyncObj__lastResponseTime[node] = max(seen, heard)
        self._last_tick = now
        if self.raft_state() == LEADER:
            self._sync_own_copy()
        else:
            self._before_election(now)
        commit, next_append = self.raftCommitIndex, self._SyncObj__newAppendEntriesTime
        super()._onTick(0.0)
        if self.raft_state() == LEADER:
            self._sync_own_copy()
            if self.raftCommitIndex != commit and self._SyncObj__newAppendEntriesTime == next_append:
                self._SyncObj__sendAppendEntries()  # followers may apply it now, not at the next heartbeat
            if not self._nodes and self._journal.last_index > self.raftCommitIndex:
                self._host.kick()

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        return float(self.conf.raftMinTimeout * (1 + self._rng.random()))

    def _majority(self, count: int) -> bool:
        """Whether ``count`` voters are more than half of all."""
        return 2 * count > len(self._nodes) + 1

    # --- applying --------------------------------------------------------------------------------------

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        index = self.raftLastApplied + 1
        if command[0] == REGULAR:
            return self._host.apply(index, command[1:])
        assert command[0] == NO_OP, f"entry {index} is of a kind that nobody writes"
        self._host.pass_by(index)
        return None

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        commit, bound = self.raftCommitIndex, self.raftLastApplied + _APPLIED_PER_TICK
        if commit <= bound:
            return bool(SyncObj._SyncObj__applyLogEntries(self))
        self._SyncObj__raftCommitIndex = bound
        try:
            return bool(SyncObj._SyncObj__applyLogEntries(self))
        finally:
            self._SyncObj__raftCommitIndex = commit
            self._host.kick()

    def _SyncObj__setState(self, state: int) -> None:  # noqa: N802
        was = self.raft_state()
        SyncObj._SyncObj__setState(self, state)
        if was == LEADER and state != LEADER:
            waiting = self._SyncObj__commandsWaitingCommit
            for index in sorted(waiting):
                self._give_up_waiting(index)
            self._on_resigned()

    def _give_up_waiting(self, index: int) -> None:
        """Never leave a proposer hanging: its outcome is not known here."""
        for _, on_outcome in self._SyncObj__commandsWaitingCommit.pop(index, ()):
            on_outcome(None, FAIL_REASON.UNKNOWN_OUTCOME)

    # --- receiving -------------------------------------------------------------------------------------

    def on_message(self, peer: int, message: Message) -> None:
        """A message that keeps to its schema, from a voter."""
        getattr(self, f"_on_{message['type']}")(self._nodes[peer], message)
        self._host.kick()

    def _base(self, node: Node, message: Message) -> None:
        SyncObj._SyncObj__onMessageReceived(self, node, message)

    def _on_append_entries(self, node: Node, message: Message) -> None:
        term = self.raftCurrentTerm
        if message["term"] < term:
            self._send(node, {"type": "stale_term", "term": term})
            return
        assert self.raft_state() != LEADER or message["term"] != term, f"two leaders in term {term}"
        self._leader_seen, self._answering = self._loop_time(), message["seq"]
        self._leader_commit = message["commit_index"]
        if "RAFT-commit-unclamped" in mutants.ACTIVE:
            pass
        elif "prevLogIdx" in message:
            entries = message["entries"]
            verified = entries[-1][1] if entries else message["prevLogIdx"]
            message["commit_index"] = min(message["commit_index"], verified)
        else:  # a piece of a snapshot verifies nothing of this log
            message["commit_index"] = min(message["commit_index"], self.raftCommitIndex)
        piece = message.pop("serialized", None)
        self._base(node, message)
        if piece is not None:
            self._take_piece(node, piece)

    def _take_piece(self, node: Node, piece: tuple[bytes, bool, bool]) -> None:
        data, is_first, is_last = piece
        snapshot = self._snapshots.receive(data, is_first=is_first, is_last=is_last)
        newer = snapshot is not None and (
            snapshot.last_index > self.raftLastApplied or "RAFT-stale-snapshot" in mutants.ACTIVE
        )
        if snapshot is not None and newer:
            self._install(snapshot)
            self._SyncObj__sendNextNodeIdx(node, success=True)
        else:  # so that the leader knows that somebody listens, however long it takes
            self._SyncObj__sendNextNodeIdx(node)

    def _install(self, snapshot: Snapshot) -> None:
        """Replace the state by the leader's, and the log where it does not agree with it."""
        self._snapshots.store(snapshot)
        self._journal.align(snapshot.previous, snapshot.last)
        for index in [
            index for index in self._SyncObj__commandsWaitingCommit if index <= snapshot.last_index
        ]:
            self._give_up_waiting(index)
        self._SyncObj__raftLastApplied = self._SyncObj__raftCommitIndex = snapshot.last_index
        self._host.install(snapshot)

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:  # noqa: N802, N803
        raise AssertionError("snapshots are loaded by us")

    def _on_next_node_idx(self, node: Node, message: Message) -> None:
        if self.raft_state() != LEADER:
            return
        if message["stamp"] != self.raftCurrentTerm and "RAFT-ack-unstamped" not in mutants.ACTIVE:
            return
        if message["seq"] <= self._link_floor.get(node.id, 0) and "RAFT-match-kept" not in mutants.ACTIVE:
            return  # to what went over an earlier link: its disk may be another by now
        next_index = self._SyncObj__raftNextIndex
        if message["reset"]:
            if message["seq"] <= self._reset_floor.get(node.id, 0):
                message["reset"] = False  # it was sent before the last back-off had arrived
            else:
                self._reset_floor[node.id] = self._append_seq.get(node.id, 0)
                self.beat_soon()  # and not one entry each heartbeat
        message["next_node_idx"] = max(1, min(message["next_node_idx"], self._journal.last_index + 1))
        if not message["counts"]:
            if message["reset"]:
                next_index[node] = message["next_node_idx"]
            return
        sent = next_index[node]
        self._base(node, message)
        if message["success"] and not message["reset"] and next_index[node] < sent:
            next_index[node] = sent  # the library would send again what is still on its way

    def _on_request_vote(self, node: Node, message: Message) -> None:
        if self._standing.abstains and "RAFT-fresh-votes" not in mutants.ACTIVE:
            return
        if message["term"] < self.raftCurrentTerm:
            self._send(node, {"type": "stale_term", "term": self.raftCurrentTerm})
            return
        self._base(node, message)

    def _on_response_vote(self, node: Node, message: Message) -> None:
        vote = (message["term"], node.id)
        if vote in self._votes_counted and "RAFT-vote-twice" not in mutants.ACTIVE:
            return
        self._votes_counted = {kept for kept in self._votes_counted if kept[0] >= self.raftCurrentTerm}
        self._votes_counted.add(vote)
        self._base(node, message)

    def _on_timeout_now(self, node: Node, message: Message) -> None:
        if not self._standing.abstains:
            self._base(node, message)

    def _on_stale_term(self, _node: Node, message: Message) -> None:
        if message["term"] > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(message["term"], None)
            self._SyncObj__setState(FOLLOWER)
            self._SyncObj__raftLeader = None
