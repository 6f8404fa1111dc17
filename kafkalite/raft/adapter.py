"""The pysyncobj adapter: the only module that uses the Raft library. It corrects unsafe behavior.

pysyncobj provides the election, the replication loop, the commit rule and the apply loop. Without the adapter
the library loses acknowledged commands (docs/adr/0009-raft-on-pysyncobj.md, which also gives the source of
each rule below). The adapter supplies its own journal, snapshot store and transport, and overrides methods of
the library: ``_SyncObj__x`` is the library's private ``self.__x``. This works with exactly one version of the
library. The import of this module checks the version.

The adapter adds to the library's Raft (R17):

- State is durable before a message depends on it: terms and votes at once, entries before their
  acknowledgement, the leader's own entries before they count.
- An acknowledgement carries the term of its sender and the number of the message that it acknowledges. It
  does not count if this term is not the leader's, if that message was sent before the current link began, or
  if the sender abstains from voting (``eligibility``).
- A follower commits only entries that the current message has verified.
- Each vote counts once. Nothing is ever unpickled. Only the leader's own process proposes commands.
- A snapshot replaces only an older state.
- The voters are those of the log (``voter_set``), from the moment in which their entry is appended. The
  library's own membership changes, which are neither durable nor safe, are never used.
- A leader or candidate of an older term is notified. A node whose process was paused first reads the messages
  that arrived meanwhile.

``voter`` adds pre-vote, read-index, eligibility and the check after a start. Time is the clock of the Raft
loop, and random numbers come from the node's ``Rng``, so that a simulated cluster is reproducible.
"""

# Long because it is one class, and no other module may use the library's private names.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kafkalite.errors import KafkaliteError, MissingExtraError
from kafkalite.limits import KIB, MIB
from kafkalite.raft.eligibility import UNKNOWN, Eligibility
from kafkalite.raft.entries import MAX_COMMAND_BYTES, NO_OP, REGULAR, VOTERS
from kafkalite.raft.journal import Journal
from kafkalite.raft.messages import Message
from kafkalite.raft.restart import LogEnd
from kafkalite.raft.snapshot_store import Snapshot, SnapshotStore
from kafkalite.raft.voter_set import Voters, VoterSet, command_of, is_same_directory
from kafkalite.rng import Rng

try:
    import pysyncobj.pickle
    import pysyncobj.syncobj
    from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf
    from pysyncobj.node import Node
    from pysyncobj.transport import Transport
    from pysyncobj.version import VERSION
except ModuleNotFoundError as error:
    raise MissingExtraError("a quorum of several controllers", "pysyncobj", "server") from error

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
_ABSENT: Final = -2  # stands for this node among the library's peers while this node is no voter
_APPLIED_PER_TICK: Final = 2_000  # limits a tick, so that many entries to apply do not delay heartbeats

_now: Callable[[], float] = time.monotonic


class WrongLibraryError(KafkaliteError):
    """The installed pysyncobj is not the version for which the adapter was written."""


def check_library() -> None:
    """Raise WrongLibraryError unless the installed version is the supported one and has all overridden
    methods."""
    missing = [name for name in _OVERRIDDEN if not hasattr(SyncObj, f"_SyncObj__{name}")]
    if VERSION != LIBRARY_VERSION or missing:
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise WrongLibraryError(
            f"pysyncobj {VERSION}{lacks} is installed, and kafkalite needs {LIBRARY_VERSION} exactly",
            hint=f"pip install pysyncobj=={LIBRARY_VERSION}",
        )


def _refuse_pickle(*_: Any) -> Any:
    raise AssertionError("the Raft library tried to use pickle")


def _patch_library() -> None:
    """Disable the library's pickle, and make the library read the clock of the adapter whose ``enter`` was
    called last."""
    check_library()
    for name in ("loads", "load", "dumps", "dump"):
        setattr(pysyncobj.pickle, name, _refuse_pickle)
    pysyncobj.syncobj.monotonicTime = lambda: _now()
    # The library warns that it truncates the log even where the journal truncates nothing.
    logging.getLogger("pysyncobj.syncobj").addFilter(lambda record: "truncating" not in str(record.msg))


_patch_library()


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """The timeouts and size limits of a voter. A follower that receives nothing from a leader starts an
    election after a random time of one to two election timeouts."""

    election_timeout_ms: int = 500
    fetch_timeout_ms: int = 1_000  #: a leader steps down after this time without responses from a majority
    heartbeat_ms: int = 100
    commit_timeout_ms: int = 10_000  #: after this time a commit fails with an unknown outcome
    #: take a snapshot when the log has grown by this and by the size of the last snapshot
    snapshot_min_bytes: int = MIB
    retained_entries: int = 1_000  #: entries kept before a snapshot, for followers that lag slightly
    append_bytes: int = MAX_COMMAND_BYTES + MIB  #: entries in one message; exceeds any single command
    chunk_bytes: int = 256 * KIB  #: size of a snapshot chunk in one message
    recent_bytes: int = 4 * MIB  #: committed entries kept in memory for brokers that are not voters

    def __post_init__(self) -> None:
        assert self.election_timeout_ms > 3 * self.heartbeat_ms, "a follower may miss two heartbeats"


class AdapterHost(Protocol):
    """The owner of an adapter. The adapter calls these methods only during the owner's calls to it."""

    def send(self, peer_id: int, message: Message) -> bool: ...

    def kick(self) -> None:
        """Call the adapter's ``_onTick`` soon."""
        ...

    def apply(self, index: int, change: bytes) -> Any:
        """Apply the change of the committed entry ``index``. The proposer's ``done`` callback receives the
        result."""
        ...

    def skip(self, index: int) -> None:
        """Record that the committed entry ``index`` is a no-op, for which ``apply`` is not called."""
        ...

    def install(self, snapshot: Snapshot) -> None:
        """Replace the state by the snapshot's state."""
        ...

    def use_peers(self, addresses: Mapping[int, str]) -> None:
        """Exchange messages with these nodes, the voters and observers other than this node. An empty address
        means that only the peer connects."""
        ...


Done = Callable[[Any, bool], None]
"""Called with (result of ``apply``, whether the outcome is known). (None, True): no effect."""


class _Port(Transport):  # type: ignore[misc]
    """The transport object that the library calls; it passes messages to the adapter."""

    ready = True

    def __init__(self, adapter: RaftAdapter) -> None:
        super().__init__(None, None, [])
        self._adapter = adapter

    def send(self, node: Node, message: Message) -> bool:
        return self._adapter.emit(node, message)

    def destroy(self) -> None:
        pass


class _NoPoller:
    def poll(self, _timeout: float) -> None:
        pass


class RaftAdapter(SyncObj):  # type: ignore[misc]
    """A Raft voter, implemented by pysyncobj. Its host must call ``enter`` before each call that handles a
    message, a tick, a proposal or a link."""

    _SyncObj__raftLeader: Any
    _SyncObj__otherNodes: set[Node]

    def __init__(
        self,
        node_id: int,
        others: Iterable[int],
        host: AdapterHost,
        *,
        journal: Journal,
        snapshots: SnapshotStore,
        eligibility: Eligibility,
        settings: RaftSettings,
        now: Callable[[], float],
        rng: Rng,
        first_voters: VoterSet,
    ) -> None:
        """``others``: the nodes to which this one connects at first. ``first_voters``: the voters if no entry
        of the log has changed them."""
        self._host, self._journal, self._snapshots = host, journal, snapshots
        self._eligibility, self._rng = eligibility, rng
        self._loop_time = now
        #: All peers: the other voters, the observers, and the nodes at which this one asks for the log.
        self._nodes = {peer: Node(peer) for peer in others}
        self._first_voters = first_voters
        self._voter_set = VoterSet(-1, {})  # the last one that ``adopt_voters`` has adopted
        self._votes_counted: set[tuple[int, int]] = set()
        self._leader_seen, self._last_tick = -1e9, now()
        self._append_seq: dict[int, int] = {}  # by peer: the sequence number of the last append sent
        self._link_floor: dict[int, int] = {}  # by peer: ``_append_seq`` when the current link began
        self._reset_floor: dict[int, int] = {}  # by peer: ``_append_seq`` at its last position reset
        self._acknowledging = 0  # the sequence number of the append that is being handled
        self._leader_commit = 0  # the commit index in the leader's last append
        self.enter()
        heartbeat = settings.heartbeat_ms / 1000
        election = settings.election_timeout_ms / 1000
        super().__init__(
            Node(node_id),
            [],
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
        self.adopt_voters()
        if not self.counted() and self.is_voter():
            self._SyncObj__raftElectionDeadline = 0.0  # a single voter need not wait for a leader

    # --- the state ---------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the library use this adapter's clock until ``enter`` of another adapter is called."""
        global _now
        _now = self._loop_time

    def raft_state(self) -> int:
        return int(self._SyncObj__raftState)

    def leader(self) -> int | None:
        """Return the leader's node id, or None. A leader returns its own id only after it has applied the
        first entry of its term."""
        if self.raft_state() == LEADER:
            first = self._SyncObj__noopIDx
            return self.selfNode.id if self.raftLastApplied >= first else None
        leader = self._SyncObj__raftLeader
        return None if leader is None or leader == self.selfNode else leader.id

    def followed(self) -> int | None:
        """Return the current term's leader, or None. A leader returns its own id as soon as it is elected."""
        leader = self._SyncObj__raftLeader
        return None if leader is None else leader.id

    def matches(self) -> dict[int, tuple[int, float]]:
        """On the leader, return {other voter: (match index, loop time of its last response)}.

        The match index is the last index up to which the peer's log agrees with the leader's. Unknown values
        are 0 and -1.0.
        """
        match, seen = self._SyncObj__raftMatchIndex, self._SyncObj__lastResponseTime
        others = {peer: self._nodes[peer] for peer in sorted(self.counted())}
        return {peer: (match.get(node, 0), seen.get(node, -1.0)) for peer, node in others.items()}

    def next_deadline(self) -> float:
        """Return the loop time, in seconds, at which the next tick is due unless an event requires an earlier
        one."""
        if self.raft_state() == LEADER:
            return float(self._SyncObj__newAppendEntriesTime)
        return self.deadline()

    def propose(self, command: bytes, done: Done) -> None:
        """Append a command in a later tick if this node then leads.

        Calls ``done(result, is_known)`` once, when the outcome is decided: (result of ``AdapterHost.apply``,
        True) if the command is committed; (None, True) if it has no effect; (None, False) if the outcome is
        unknown. After an exception of the adapter, ``done`` is called only if the host calls ``abandon``.
        """
        assert len(command) <= MAX_COMMAND_BYTES, "a command must fit in a message"

        def on_outcome(result: Any, reason: int) -> None:
            if reason == FAIL_REASON.SUCCESS:
                done(result, True)
            else:
                done(None, reason in {FAIL_REASON.NOT_LEADER, FAIL_REASON.QUEUE_FULL, FAIL_REASON.DISCARDED})

        self._applyCommand(command, on_outcome, REGULAR)
        self._host.kick()

    def hand_over(self) -> None:
        """If this node leads, request that the most advanced follower becomes the leader. Has no effect if
        that follower lacks entries."""
        if self.raft_state() == LEADER:
            self.transferLeadership()

    # --- hooks for ``voter`` -------------------------------------------------------------------------------

    def _before_election(self, now: float) -> None:
        """Request pre-votes if an election is due; a node that abstains from voting seeks the right to vote
        instead. Called in each tick of a follower or candidate, before the library checks the election
        deadline."""

    # --- the voters ------------------------------------------------------------------------------------

    def voter_set(self) -> VoterSet:
        """Return the voter set in force: the last one in the log, committed or not (R93)."""
        return self._journal.voters.latest or self._first_voters

    def former_voter_set(self) -> VoterSet:
        """Return the voter set before the one in force, or the one in force if it is the first one."""
        return self._journal.voters.former or self._first_voters

    def is_voter(self) -> bool:
        """Whether this node is a voter according to its own log. If its directory is not listed there,
        ``eligibility`` decides."""
        own = self._voter_set.voters.get(self.selfNode.id)
        return own is not None and self.is_listed_as(own.directory)

    def is_listed_as(self, listed: bytes) -> bool:
        """Whether a voter set that lists this node with the directory ``listed`` means this directory
        (R97)."""
        if listed == UNKNOWN:
            return self._eligibility.is_voter
        return is_same_directory(listed, self._eligibility.directory)

    def counted(self) -> Set[int]:
        """Return the other nodes whose votes and acknowledgements count: the voters (R98)."""
        return self._voter_set.voters.keys() - {self.selfNode.id}

    def own_directory(self) -> bytes:
        return self._eligibility.directory

    def own_weight(self) -> int:
        """Return 1 if this node counts itself towards a majority, or 0 if it is not listed as a voter: a
        leader that removes itself does not count (R98)."""
        return int(self._voter_set.lists(self.selfNode.id, self._eligibility.directory))

    def _majority(self, count: int) -> bool:
        """Whether ``count`` voters are a majority."""
        return 2 * count > len(self.counted()) + self.own_weight()

    def is_known_voter(self, peer: int) -> bool:
        """Whether ``peer`` is a voter in the set in force or in the one before."""
        return peer in self._voter_set.voters or peer in self.former_voter_set().voters

    def adopt_voters(self) -> None:
        """Make the library count the voters of the log. Called after each change of the log."""
        if self.voter_set() == self._voter_set:
            return
        self._voter_set = self.voter_set()
        for peer in self.counted():
            self._nodes.setdefault(peer, Node(peer))
        others = {self._nodes[peer] for peer in self.counted()}
        if not self.own_weight():
            others.add(Node(_ABSENT))  # the library counts this node, so the majority is larger by half
        former, last = self._SyncObj__otherNodes, self._journal.last_index
        for node in others - former:
            self._SyncObj__readonlyNodes.discard(node)
            self._SyncObj__raftNextIndex.setdefault(node, last + 1)
            self._SyncObj__raftMatchIndex[node] = 0
            self._SyncObj__lastResponseTime[node] = self._loop_time()
        for node in former - others:
            self._SyncObj__raftMatchIndex[node] = 0
            if node in self._SyncObj__connectedNodes:
                self._SyncObj__readonlyNodes.add(node)
        self._SyncObj__otherNodes = others
        self._silence_absent()
        self.announce_peers()

    def _silence_absent(self) -> None:
        if Node(_ABSENT) in self._SyncObj__otherNodes:
            self._SyncObj__lastResponseTime[Node(_ABSENT)] = -1e12

    def addresses(self) -> dict[int, str]:
        """Return the known addresses of peers."""
        listed = {**self._first_voters.voters, **self._voter_set.voters}
        return {peer: key.address for peer, key in listed.items() if key.address}

    def announce_peers(self) -> None:
        """Pass the peers to the host."""
        known = self.addresses()
        self._host.use_peers({peer: known.get(peer, "") for peer in self._nodes})

    def add_peer(self, peer: int) -> None:
        self._nodes.setdefault(peer, Node(peer))

    def drop_peer(self, peer: int) -> None:
        """Forget a peer that is no voter and has no link."""
        node = self._nodes.pop(peer)
        self._SyncObj__raftNextIndex.pop(node, None)
        self._SyncObj__raftMatchIndex.pop(node, None)

    def append_voters(self, voters: Voters, done: Done) -> None:
        """As the leader, append an entry that lists ``voters``, and count by it from now on.

        ``done`` is called as by ``propose``, with the index of the entry.
        """
        index, term = self._journal.last_index + 1, self.raftCurrentTerm
        self._journal.add(command_of(voters), index, term)

        def on_outcome(result: Any, reason: int) -> None:
            done(result if reason == FAIL_REASON.SUCCESS else None, reason != FAIL_REASON.UNKNOWN_OUTCOME)

        self._SyncObj__commandsWaitingCommit[index].append((term, on_outcome))
        self.adopt_voters()
        self._SyncObj__sendAppendEntries()
        self.sync_own_copy()
        self._host.kick()

    def first_index_of_term(self) -> int:
        """As the leader, return the index of the first entry of its term."""
        return int(self._SyncObj__noopIDx)

    def resign(self) -> None:
        """As the leader, send the commit index, ask the most advanced voter to lead, and follow."""
        self._SyncObj__sendAppendEntries()
        self.hand_over()
        self._SyncObj__setState(FOLLOWER)
        self.forget_leader()

    def takes_proposals(self) -> bool:
        """Whether this leader appends proposals; False while it is about to stop leading."""
        return True

    def may_promise(self) -> bool:
        """Whether this node may rely on its own files (R59)."""
        return True

    def abstains(self) -> bool:
        """Whether this node at present neither votes nor sends acknowledgements that count."""
        return not self.is_voter() or not self.may_promise()

    def may_elect(self, candidate: LogEnd) -> bool:
        """Whether this node may vote for a candidate whose log ends at ``candidate`` (R59)."""
        return True

    def may_stand(self) -> bool:
        """Whether this node is a voter, or was one before a change that may not be committed yet.

        In the second case, its log may be the only one with which a leader can be elected.
        """
        if self.is_voter():
            return True
        own = self.former_voter_set().voters.get(self.selfNode.id)
        is_committed = self._voter_set.offset <= self.raftCommitIndex
        return own is not None and not is_committed and self.is_listed_as(own.directory)

    def may_elect_itself(self) -> bool:
        """Whether this node may be a candidate."""
        return self.may_stand() and self.may_promise() and self.may_elect(self.log_end())

    def log_end(self) -> LogEnd:
        return LogEnd(self._journal.last_term, self._journal.last_index)

    def _on_resigned(self) -> None:
        """Fail all waiting ``read_index`` calls. Called when this node has stopped leading or is
        abandoned."""

    def _may_append_to(self, peer: int) -> bool:
        """Whether the leader may send entries to ``peer``."""
        return True

    def note_directory(self, peer: int, directory: bytes) -> None:
        """Record the directory of a peer, or ``UNKNOWN`` while the peer makes no promise. Called for each
        acknowledgement over the present link."""

    def _on_abstaining_ack(self, peer: int, match_index: int) -> None:
        """Record that a peer that abstains from voting has all entries up to ``match_index``. Called for each
        of its successful acknowledgements."""

    def set_deadline(self, deadline: float) -> None:
        """Set the loop time after which this node starts an election. A message from a leader replaces it."""
        self._SyncObj__raftElectionDeadline = deadline

    def deadline(self) -> float:
        return float(self._SyncObj__raftElectionDeadline)

    def draw_timeout(self) -> float:
        """Return a random election timeout, in seconds."""
        return float(self._SyncObj__generateRaftTimeout())

    def is_handed_over_to(self) -> bool:
        """Whether the leader is transferring its leadership to this node."""
        return bool(self._SyncObj__transferInProgress)

    def beat_soon(self) -> None:
        """As the leader, send appends in the next tick, even without new entries."""
        self._SyncObj__newAppendEntriesTime = 0.0

    def forget_leader(self) -> None:
        self._SyncObj__raftLeader = None

    def take_term(self, term: int, vote: int | None) -> None:
        """Enter ``term`` with ``vote``: the node that this node has voted for, ``voter.NO_CANDIDATE``, or
        None if it may still vote. Both are durable on return."""
        self._SyncObj__setCurrentTerm(term, vote)

    def lead_next_term(self) -> None:
        """Become the leader of a new term without requesting votes."""
        self.take_term(self.raftCurrentTerm + 1, self.selfNode.id)
        self._SyncObj__onBecomeLeader()

    def note_response(self, peer: int) -> None:
        """As the leader, record a response of the peer now, so that the peer counts as reachable."""
        self._SyncObj__lastResponseTime[self._nodes[peer]] = self._loop_time()

    def send_all(self, message: Message) -> None:
        """Send a message to all other voters, or to all peers if this node does not know the voters yet."""
        for peer in sorted(self.counted()) if self._voter_set.voters else self._nodes:
            self._host.send(peer, dict(message))

    def listed_directory(self, peer: int) -> bytes:
        """Return the directory with which the voter set in force lists ``peer``."""
        key = self._voter_set.voters.get(peer)
        return UNKNOWN if key is None else key.directory

    # --- links -----------------------------------------------------------------------------------------

    def begin_link(self, peer: int) -> None:
        """Begin a new link to ``peer``, which may have restarted, possibly with another disk."""
        self._link_floor[peer] = self._append_seq.get(peer, 0)
        node = self._nodes[peer]
        self._snapshots.cancelTransmisstion(node)
        if peer in self._voter_set.voters:
            self._SyncObj__onNodeConnected(node)
        else:
            self._SyncObj__onReadonlyNodeConnected(node)
        self._host.kick()

    def end_link(self, peer: int) -> None:
        node = self._nodes[peer]
        if peer in self._voter_set.voters:
            self._SyncObj__onNodeDisconnected(node)
        else:
            self._SyncObj__onReadonlyNodeDisconnected(node)

    def is_linked(self, peer: int) -> bool:
        return self._nodes[peer] in self._SyncObj__connectedNodes

    def _SyncObj__onNodeConnected(self, node: Node) -> None:  # noqa: N802
        SyncObj._SyncObj__onNodeConnected(self, node)
        if self.raft_state() == LEADER and node in self._SyncObj__raftMatchIndex:
            self.forget_match(node)
            self.beat_soon()

    def forget_match(self, node: Node) -> None:
        """Reset the match index for a new link: the peer's disk may have lost acknowledged entries (R17)."""
        self._SyncObj__raftMatchIndex[node] = 0

    # --- sending ---------------------------------------------------------------------------------------

    def _send(self, node: Node, message: Message) -> bool:
        return self._host.send(node.id, message)

    def emit(self, node: Node, message: Message) -> bool:
        """Add the adapter's fields to a message of the library, make the state that the message depends on
        durable, and send it. Return False if it is not sent."""
        kind = message["type"]
        if kind == "append_entries":
            if "prevLogIdx" in message and message["prevLogIdx"] is None:
                return False  # the peer's log seems longer than this one: its next response corrects that
            if not self._may_append_to(node.id):
                return False
            message["seq"] = self._append_seq[node.id] = self._append_seq.get(node.id, 0) + 1
        elif kind == "next_node_idx":
            message["stamp"] = self.raftCurrentTerm
            message["seq"] = self._acknowledging
            message["counts"] = self.do_acknowledgements_count()
            message["directory"] = self._eligibility.directory if self.may_promise() else UNKNOWN
            self.sync_before_acknowledgement()
        elif kind == "request_vote":
            message["directory"] = self.listed_directory(node.id)
        elif kind in {"apply_command", "apply_command_response"}:
            return False  # only the leader's own process may propose
        return self._send(node, message)

    def do_acknowledgements_count(self) -> bool:
        """Whether the leader may count this node's acknowledgements; False while this node abstains (R17)."""
        return not self.abstains()

    def sync_before_acknowledgement(self) -> None:
        """Sync entries to disk before they are acknowledged (R17)."""
        self._journal.sync()

    def sync_own_copy(self) -> None:
        """Sync the leader's own entries to disk before they count towards a majority (R17)."""
        self._journal.sync()

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        if self.raft_state() != LEADER or not self.takes_proposals():
            self._refuse_proposals()
            return
        last = self._journal.last_index
        super()._checkCommandsToApply()
        if self._journal.last_index != last:
            self._SyncObj__sendAppendEntries()  # one append per batch, sent before this node's own sync
            self.sync_own_copy()

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        SyncObj._SyncObj__onBecomeLeader(self)
        self._silence_absent()
        self.sync_own_copy()  # so that a single voter commits its first entry in this tick

    def _refuse_proposals(self) -> None:
        queue = self._SyncObj__commandsQueue
        while True:
            try:
                _, on_outcome = queue.get_nowait()
            except pysyncobj.syncobj.Queue.Empty:
                return
            on_outcome(None, FAIL_REASON.NOT_LEADER)

    # --- ticking ---------------------------------------------------------------------------------------

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803
        now = self._loop_time()
        gap = self.conf.raftMinTimeout / 2
        if now - self._last_tick > gap:
            # This process was paused. First read the messages that other nodes sent meanwhile.
            self._SyncObj__raftElectionDeadline = max(self._SyncObj__raftElectionDeadline, now + gap)
            heard = now - self.conf.leaderFallbackTimeout / 2
            for node, seen in self._SyncObj__lastResponseTime.items():
                self._SyncObj__lastResponseTime[node] = max(seen, heard)
        self._last_tick = now
        if self.raft_state() == LEADER:
            self.sync_own_copy()
        else:
            self._before_election(now)
        commit, next_append = self.raftCommitIndex, self._SyncObj__newAppendEntriesTime
        super()._onTick(0.0)
        if self.raft_state() == LEADER:
            self.sync_own_copy()
            if self.raftCommitIndex != commit and self._SyncObj__newAppendEntriesTime == next_append:
                self._SyncObj__sendAppendEntries()  # followers need not wait for the next heartbeat
            if not self.counted() and self._journal.last_index > self.raftCommitIndex:
                self._host.kick()

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        return float(self.conf.raftMinTimeout * (1 + self._rng.random()))

    # --- applying --------------------------------------------------------------------------------------

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        index = self.raftLastApplied + 1
        if command[0] == REGULAR:
            return self._host.apply(index, command[1:])
        assert command[0] in {NO_OP, VOTERS}, f"entry {index} is of unknown kind {command[0]}"
        self._host.skip(index)
        return index if command[0] == VOTERS else None

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
            self._report_unknown_outcomes()
            self._on_resigned()

    def abandon(self) -> None:
        """Complete all proposals and reads, because the adapter is no longer used. Reads fail. The outcome of
        proposals that are already in the log is unknown; all other proposals have no effect."""
        self._report_unknown_outcomes()
        self._refuse_proposals()
        self._on_resigned()

    def _report_unknown_outcomes(self) -> None:
        for index in sorted(self._SyncObj__commandsWaitingCommit):
            self._report_unknown_outcome(index)

    def _report_unknown_outcome(self, index: int) -> None:
        """Complete the proposal of entry ``index`` with an unknown outcome."""
        for _, on_outcome in self._SyncObj__commandsWaitingCommit.pop(index, ()):
            on_outcome(None, FAIL_REASON.UNKNOWN_OUTCOME)

    # --- receiving -------------------------------------------------------------------------------------

    def on_message(self, peer: int, message: Message) -> None:
        """Handle a decoded message from the voter ``peer``."""
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
        self._leader_seen, self._acknowledging = self._loop_time(), message["seq"]
        self._leader_commit = message["commit_index"]
        message["commit_index"] = self.verified_commit_index(message)
        chunk = message.pop("serialized", None)
        self._base(node, message)
        self.adopt_voters()
        if chunk is not None:
            self._take_chunk(node, chunk)

    def verified_commit_index(self, message: Message) -> int:
        """Return the commit index in ``message``, but at most the last index that the message verifies (R17).
        A snapshot chunk does not advance the commit index."""
        if "prevLogIdx" in message:
            entries = message["entries"]
            verified = entries[-1][1] if entries else message["prevLogIdx"]
        else:  # a snapshot chunk verifies no entry of this log
            verified = self.raftCommitIndex
        return int(min(message["commit_index"], verified))

    def _take_chunk(self, node: Node, chunk: tuple[bytes, bool, bool]) -> None:
        data, is_first, is_last = chunk
        snapshot = self._snapshots.receive(data, is_first=is_first, is_last=is_last)
        if snapshot is not None and self.is_newer_state(snapshot):
            self._install(snapshot)
            next_index = snapshot.last_index + 1  # entries after the snapshot are not verified yet
            self._SyncObj__sendNextNodeIdx(node, nextNodeIdx=next_index, success=True)
        else:  # shows the leader that this node is alive during a long transfer
            self._SyncObj__sendNextNodeIdx(node)

    def is_newer_state(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is newer than the applied state; an older one must not replace it (R17)."""
        return bool(snapshot.last_index > self.raftLastApplied)

    def _install(self, snapshot: Snapshot) -> None:
        """Replace the state by the leader's snapshot. Also replace the log unless it contains the last two
        entries of the snapshot."""
        self._snapshots.store(snapshot)
        self._journal.align(snapshot.previous, snapshot.last, snapshot.voters)
        self.adopt_voters()
        for index in list(self._SyncObj__commandsWaitingCommit):
            if index <= snapshot.last_index:
                self._report_unknown_outcome(index)
        self._SyncObj__raftLastApplied = self._SyncObj__raftCommitIndex = snapshot.last_index
        self._host.install(snapshot)

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:  # noqa: N802, N803
        raise AssertionError("the adapter loads snapshots, not pysyncobj")

    def _on_next_node_idx(self, node: Node, message: Message) -> None:
        if self.raft_state() != LEADER:
            return
        if not self.is_of_present_term(message) or not self.is_of_present_link(node.id, message):
            return
        next_index = self._SyncObj__raftNextIndex
        self.note_directory(node.id, message["directory"])
        if message["reset"]:
            if message["seq"] <= self._reset_floor.get(node.id, 0):
                message["reset"] = False  # sent before the peer received the appends after the last reset
            else:
                self._reset_floor[node.id] = self._append_seq.get(node.id, 0)
                self.beat_soon()  # otherwise the peer's position would move back by one entry per heartbeat
        message["next_node_idx"] = max(1, min(message["next_node_idx"], self._journal.last_index + 1))
        if not self.does_acknowledgement_count(node.id, message):
            if message["reset"]:
                next_index[node] = message["next_node_idx"]
            elif message["success"]:
                self._on_abstaining_ack(node.id, message["next_node_idx"] - 1)
            return
        sent = next_index[node]
        self._base(node, message)
        if message["success"] and not message["reset"] and next_index[node] < sent:
            next_index[node] = sent  # do not resend entries that are in flight

    def does_acknowledgement_count(self, peer: int, message: Message) -> bool:
        """Whether an acknowledgement is one of a voter, in the directory that is listed for it (R97,
        R98)."""
        if peer not in self.counted():
            return False
        listed = self.listed_directory(peer)
        if listed == UNKNOWN:
            return bool(message["counts"])
        return is_same_directory(listed, message["directory"])

    def is_of_present_term(self, message: Message) -> bool:
        """Whether an acknowledgement has the leader's current term; otherwise it does not count (R17)."""
        return bool(message["stamp"] == self.raftCurrentTerm)

    def is_of_present_link(self, peer: int, message: Message) -> bool:
        """Whether the append that is acknowledged was sent over the current link; otherwise the
        acknowledgement does not count (R17)."""
        return bool(message["seq"] > self._link_floor.get(peer, 0))

    def _on_request_vote(self, node: Node, message: Message) -> None:
        candidate = LogEnd(message["last_log_term"], message["last_log_index"])
        if not self.may_vote(message["directory"]) or not self.may_elect(candidate):
            return
        if message["directory"] == UNKNOWN and not self.is_known_voter(node.id):
            return
        if message["term"] < self.raftCurrentTerm:
            self._send(node, {"type": "stale_term", "term": self.raftCurrentTerm})
            return
        self._base(node, message)

    def may_vote(self, listed: bytes) -> bool:
        """Whether this node may vote for a candidate whose voter set lists it with the directory ``listed``,
        also if its own log does not have that set yet (R17, R97)."""
        return self.is_listed_as(listed) and self.may_promise()

    def _on_response_vote(self, node: Node, message: Message) -> None:
        if node.id in self.counted() and self.is_new_vote(message["term"], node.id):
            self._votes_counted = {kept for kept in self._votes_counted if kept[0] >= self.raftCurrentTerm}
            self._votes_counted.add((message["term"], node.id))
            self._base(node, message)

    def is_new_vote(self, term: int, peer: int) -> bool:
        """Whether no vote of ``peer`` in ``term`` was counted before; a second one does not count (R17)."""
        return (term, peer) not in self._votes_counted

    def _on_timeout_now(self, node: Node, message: Message) -> None:
        if self.may_elect_itself():
            self._base(node, message)

    def _on_stale_term(self, _node: Node, message: Message) -> None:
        if message["term"] > self.raftCurrentTerm:
            self.follow_in_term(message["term"], None)

    def follow_in_term(self, term: int, vote: int | None) -> None:
        """Become a follower in ``term``, of which no leader is known yet."""
        self.take_term(term, vote)
        self._SyncObj__setState(FOLLOWER)
        self.forget_leader()
