"""Runs one voter on the Raft loop (``runner``): its files, links and Raft protocol.

The node handles encoded entries and their order. ``RaftQuorum`` runs on the broker's loop, receives events
through ``post``, and decodes the records. Offsets are Raft indices, and have gaps (``entries``).

Any exception stops the node. It then sends nothing, and the quorum receives the error. Nothing is retried,
because the state of the library after an exception is unknown (R26). If the disk is full, or another resource
is exhausted, the node pauses instead: it drops its voter, and reads its files again after RESUME_INTERVAL_S,
as after a crash (R54).
"""

# Tests: tests/raft/test_raft_quorum.py, tests/raft/test_raft_schedules.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kafkalite.errors import BrokerError, NotControllerError, StorageExhaustedError
from kafkalite.log_fields import Fields
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.adapter import LEADER, Done, RaftSettings
from kafkalite.raft.eligibility import UNKNOWN, Eligibility
from kafkalite.raft.entries import effective_records
from kafkalite.raft.messages import Message
from kafkalite.raft.metadata_log import DIRECTORY_ID_BYTES, MetadataLog
from kafkalite.raft.runner import Runner
from kafkalite.raft.snapshot_store import Snapshot, SnapshotStore
from kafkalite.raft.transport import RaftTransport
from kafkalite.raft.voter import ChangeDone, Voter
from kafkalite.raft.voter_set import VoterChange, VoterKey, VoterSet
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import FileSystem

_MIN_TICK_S: Final = 0.002
_MAX_TICK_S: Final = 0.1
_ABSTAINS_QUIETLY_S: Final = 5.0
#: The time until a paused node reads its files again.
RESUME_INTERVAL_S: Final = 1.0
_PAUSE_WARNING_S: Final = 60.0  # between two log lines about pauses

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The outcome of an applied command: its offset, or, if it is void, the offset of the current state."""

    took_effect: bool
    offset: int


class VoterStatus(NamedTuple):
    """The state of one voter or observer in a node's QuorumStatus. Only the leader knows that of others."""

    node_id: int
    match_offset: int  #: last index at which its log agrees with the leader's; -1 if unknown
    last_contact_ms: int  #: time since its last response; 0 for the node itself, -1 if unknown
    is_voter: bool = True  #: False for an observer
    directory: bytes = UNKNOWN  #: the id of its metadata directory, as far as it is known
    address: str = ""  #: empty if unknown


class QuorumStatus(NamedTuple):
    """The state of the quorum as one voter knows it. Only the leader knows the match offsets of other
    voters."""

    node_id: int
    leader_id: int | None
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    is_voter: bool  #: False while it abstains
    nodes: Sequence[VoterStatus]
    missing_at_first_start: Sequence[int] = ()  #: see ``Eligibility.missing_at_first_start``


class NodeListener(Protocol):
    """Receives the events of the node in order. ``Post`` makes the calls on the listener's loop."""

    def on_entry(self, index: int, offset: int, records: bytes) -> None:
        """Apply the records of an entry that is committed and takes effect."""
        ...

    def on_void(self, index: int) -> None:
        """Record that the entry ``index`` is committed but has no effect: it is void (see ``entries``) or a
        no-op."""
        ...

    def on_snapshot(self, index: int, offset: int, records: bytes) -> None:
        """Replace the state by the snapshot's ``records``."""
        ...

    def on_leader(self, leader_id: int | None, term: int) -> None: ...

    def on_peers(self, addresses: Mapping[int, str]) -> None:
        """Connect to these nodes from now on: {node id: address, or "" if unknown}."""
        ...

    def on_snapshot_wanted(self) -> None:
        """Call ``RaftNode.take_snapshot`` soon, because the log has grown."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """Refuse further calls, because the node has stopped permanently."""
        ...


Post = Callable[[list[tuple[Any, ...]]], None]
"""Called on the Raft loop with [(function, argument, …), …]. Makes the calls in order on another loop."""


class RaftNode:
    """The files, links and protocol of one voter. Use it on the Raft loop only, except for its creation and
    ``status``. After a failure it sends, writes and applies nothing."""

    def __init__(
        self,
        filesystem: FileSystem,
        directory: str,
        *,
        node_id: int,
        voters: Iterable[int],
        runner: Runner,
        rng: Rng,
        settings: RaftSettings,
        listener: NodeListener,
        post: Post,
        allow_new: bool = True,
        known_offset: int | None = None,
        is_copy: bool = False,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        """``voters``: those of the first format, or none if this node joins a running quorum. ``addresses``:
        those of the voters and of other nodes to ask for the log, and this node's own. ``is_copy``: the data
        directory was copied since the node last used it (R59)."""
        self._node_id = node_id
        self._voters = sorted(set(voters))
        self._addresses = dict(addresses or {})
        self._others = sorted({*self._voters, *self._addresses} - {node_id})
        #: Called on the Raft loop with the address of each peer, whenever they change.
        self.on_peers: Callable[[Mapping[int, str]], None] | None = None
        self.peer_addresses: Mapping[int, str] = {}
        self._runner = runner
        self._rng = rng
        self._settings = settings
        self._listener = listener
        self._post = post
        self._allow_new = allow_new
        self._known_offset = known_offset
        self._is_copy = is_copy
        # If the time between two ticks were longer, the voter would mistake it for a pause of the process.
        self._max_tick_s = min(_MAX_TICK_S, settings.election_timeout_ms / 4_000)
        self._events: list[tuple[Any, ...]] = []
        self.is_running = False  #: False before ``open``, while the node pauses, and when it has ended
        self._failure: BaseException | None = None
        self._is_tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: The quorum as of the last tick. It is replaced, never modified, so any thread may read it.
        self.status = QuorumStatus(node_id, None, 0, 0, 0, 1, 0, False, ())
        self._offset = 0  # the offset of the last applied entry that took effect
        self._last_leader: tuple[int | None, int] = (None, 0)
        self._is_snapshot_requested = False
        self._compacted_bytes = 0  # the size of the log after the last compaction
        self._posted_index = 0  # the last entry of which the listener was notified
        self._is_ended = False
        self._pause_warned_s = -_PAUSE_WARNING_S  # when a pause was last logged
        self._filesystem, self._directory = filesystem, directory
        self._use_files()
        self.voter: Voter
        self.transport = RaftTransport(
            self._others,
            on_attached=self._on_attached,
            on_detached=self._on_detached,
            on_message=self._on_message,
        )

    def _use_files(self) -> None:
        self._snapshots = SnapshotStore(
            self._filesystem, self._directory, chunk_bytes=self._settings.chunk_bytes
        )
        self._files = MetadataLog(
            self._filesystem,
            self._directory,
            node_id=self._node_id,
            voters=self._voters,
            snapshots=self._snapshots,
        )
        self.journal = self._files.journal

    @property
    def has_caught_up(self) -> bool:
        """Whether the voter has all entries that were committed before its start (R59). May be read in any
        thread."""
        return self.is_running and self.voter.has_ended_restart()

    # --- start and stop --------------------------------------------------------------------------------

    def open(self) -> None:
        """Read or create the files, pass the snapshot to the listener if it is newer than the listener's
        state, and start the voter and its timer.

        Raises CorruptLogError, StorageError, DataDirectoryError.
        """
        journal, now = self.journal, self._runner.loop.time
        self._files.open(
            self._rng.randbytes(DIRECTORY_ID_BYTES),
            allow_new=self._allow_new,
            known_offset=self._known_offset,
        )
        identity, snapshot = journal.identity, self._snapshots.current
        first_voters = self._first_voters()
        is_changed = journal.voters.latest is not None
        self._eligibility = eligibility = Eligibility(
            self._node_id,
            [] if is_changed else first_voters.voters.keys() - {self._node_id},
            identity.directory,
            is_voter=identity.is_voter,
            bootstrap_voters=identity.bootstrap_voters,
        )
        if eligibility.was_alone:
            journal.setRaftCommitIndex(journal.last_index)  # a single node's synced entries are committed
        self.voter = Voter(
            self._node_id,
            self._others,
            self,
            journal=journal,
            snapshots=self._snapshots,
            eligibility=eligibility,
            settings=self._settings,
            now=now,
            rng=self._rng,
            is_copy=self._is_copy,
            is_new=self._files.is_created and not first_voters.voters,
            first_voters=first_voters,
            address=self._addresses.get(self._node_id, ""),
        )
        self._offset = 0
        if snapshot is not None:
            self._take_snapshot(snapshot)
        self._opened, self._has_warned = now(), False
        self.is_running = True
        for peer_id in self.transport.attached():
            self._on_attached(peer_id)
        self._flush()
        self._on_timer()

    def _first_voters(self) -> VoterSet:
        """Return the voters of the first format: the configured ones, or else those in the journal."""
        voters = self._voters or sorted(self.journal.identity.bootstrap_voters)
        return VoterSet(0, {node: VoterKey(UNKNOWN, self._addresses.get(node, "")) for node in voters})

    def stop(self, done: Callable[[], None]) -> None:
        """If this node leads, request a leadership transfer. Close the files, then call ``done`` on the
        listener's loop."""
        if self.is_running:
            self._work(self.voter.hand_over)
        self._end()
        self._is_ended = True
        self._post([(done,)])

    def _end(self) -> None:
        if self.is_running:
            self.is_running = False
            if self._timer is not None:
                self._timer.cancel()
            self.journal.close()

    def halt(self) -> None:
        """Stop immediately, without a leadership transfer. The listener is not notified."""
        self._end()
        self._is_ended = True

    def _fail(self, error: BaseException) -> None:
        _log.error("controller has stopped %s", Fields(node=self._node_id, error=repr(error)))
        self._failure = error
        self._end()
        self._is_ended = True
        self._notify(self._listener.on_failure, error)

    def _pause(self, error: StorageExhaustedError) -> None:
        """Stop, and read the files again after RESUME_INTERVAL_S. The outcome of proposals in the log is
        unknown (R54)."""
        now = self._runner.loop.time()
        if now - self._pause_warned_s >= _PAUSE_WARNING_S:
            self._pause_warned_s = now
            _log.error("controller pauses %s", Fields(node=self._node_id, error=error))
        self._end()
        self._is_copy = self._is_copy and not self.voter.has_ended_restart()
        self.voter.abandon()
        term = int(self.voter.raftCurrentTerm)
        self._last_leader = (None, term)
        self.status = self.status._replace(leader_id=None)
        self._notify(self._listener.on_leader, *self._last_leader)
        self._runner.loop.call_later(RESUME_INTERVAL_S, self._resume)

    def _resume(self) -> None:
        if self._is_ended:
            return
        self._use_files()
        try:
            self.open()
        except StorageExhaustedError:
            self._runner.loop.call_later(RESUME_INTERVAL_S, self._resume)
        except Exception as error:
            self._fail(error)
            self._flush()

    # --- work ------------------------------------------------------------------------------------------

    def _work(self, call: Callable[..., object], *args: Any) -> None:
        """Run ``call``, which uses the voter, if the node is running. An exception stops the node, or pauses
        it if a resource is exhausted."""
        if not self.is_running:
            return
        try:
            self.voter.enter()
            call(*args)
        except StorageExhaustedError as error:
            self._pause(error)
        except Exception as error:
            self._fail(error)
        else:
            self._notify_leader()
        self._flush()

    def _on_attached(self, peer_id: int) -> None:
        if self.is_running:
            self._work(self.voter.begin_link, peer_id)

    def _on_detached(self, peer_id: int) -> None:
        if self.is_running:
            self._work(self.voter.end_link, peer_id)

    def _on_message(self, peer_id: int, message: Message) -> None:
        if self.is_running:
            self._work(self.voter.on_message, peer_id, message)

    def _notify(self, function: Callable[..., None], *args: Any) -> None:
        self._events.append((function, *args))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._post(events)

    def _notify_leader(self) -> None:
        leader = (self.voter.leader(), int(self.voter.raftCurrentTerm))
        if leader != self._last_leader:
            if leader[0] is not None:
                _log.info("controller %s", Fields(node=self._node_id, leader=leader[0], term=leader[1]))
            self._last_leader = leader
            self.status = self._current_status()
            self._notify(self._listener.on_leader, *leader)

    def kick(self) -> None:
        """Implements ``AdapterHost.kick``: schedules one tick for all calls in this iteration of the loop."""
        if not self._is_tick_due and self.is_running:
            self._is_tick_due = True
            self._runner.loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._is_tick_due = False
        self._work(self.voter.doTick, 0.0)
        if self.is_running:
            self._request_snapshot()

    def _on_timer(self) -> None:
        if self.is_running:
            self._tick()
        if self.is_running:
            self.status = self._current_status()
            self._warn_if_abstaining()
            loop = self._runner.loop
            delay = min(max(self.voter.next_deadline() - loop.time(), _MIN_TICK_S), self._max_tick_s)
            self._timer = loop.call_later(delay, self._on_timer)

    def _warn_if_abstaining(self) -> None:
        """If this node still abstains _ABSTAINS_QUIETLY_S after it was opened, log once why, and which voters
        are not connected."""
        if self._has_warned or not self.voter.abstains():
            return
        if self._runner.loop.time() - self._opened > _ABSTAINS_QUIETLY_S:
            self._has_warned = True
            missing = [peer for peer in self._others if peer not in self.transport.attached()]
            fields = Fields(node=self._node_id, not_reached=missing, reason=self._why_it_abstains())
            _log.warning("controller does not vote yet %s", fields)

    def _why_it_abstains(self) -> str:
        if self._eligibility.was_alone:
            return "it was the only voter: it waits until all other voters have received its log"
        if not self.voter.counted() or not self.voter.own_weight():
            return "it is an observer; 'kl metadata quorum add-voter' makes it a voter"
        if self.voter.is_voter():
            return "it compares its log with those of the other voters, and too few have responded"
        return "its metadata directory is new: the first start needs all voters, a later one the leader's log"

    def propose(self, command: bytes, done: Done) -> None:
        """Propose ``command``, a change as returned by ``change_after``. Call ``done(outcome, is_known)``
        later on the listener's loop.

        (Outcome, True): the entry is committed, and either applied or void. (None, True): the command has no
        effect. (None, False): the outcome is unknown. ``done`` is not called if the node stops or fails
        first.
        """
        if not self.is_running:
            self._post([(done, None, True)])
            return
        self._work(self.voter.propose, command, lambda *outcome: self._notify(done, *outcome))

    def read_index(self, done: Callable[[bool], None]) -> None:
        """Call ``done(True)`` on the listener's loop once all entries committed before this call are applied
        here.

        Call ``done(False)`` if this node does not lead or stops leading. ``done`` is not called if the node
        stops or fails first.
        """
        if not self.is_running:
            self._post([(done, False)])
            return
        self._work(self.voter.read_index, lambda is_current: self._notify(done, is_current))

    def change_voters(self, change: VoterChange, done: ChangeDone) -> None:
        """Add or remove a voter. Call ``done`` later on the listener's loop, as ``Voter.change_voters`` does.
        ``done`` is not called if the node stops or fails first."""
        if not self.is_running:
            self._post([(done, NotControllerError("this controller has paused"))])
            return

        def on_done(error: BrokerError | None) -> None:
            self.status = self._current_status()
            self._notify(done, error)

        self._work(self.voter.change_voters, change, on_done)

    # --- the host of the adapter -----------------------------------------------------------------------

    def use_peers(self, addresses: Mapping[int, str]) -> None:
        """Implements ``AdapterHost.use_peers``."""
        known = self._addresses
        self.peer_addresses = {peer: address or known.get(peer, "") for peer, address in addresses.items()}
        self.transport.peers = frozenset(addresses)
        self._notify(self._listener.on_peers, self.peer_addresses)
        if self.on_peers is not None:
            self.on_peers(self.peer_addresses)

    def send(self, peer_id: int, message: Message) -> bool:
        """Implements ``AdapterHost.send``."""
        return self.transport.send(peer_id, message)

    def apply(self, index: int, change: bytes) -> Outcome:
        """Implements ``AdapterHost.apply``. The change takes effect only if it was decided on the current
        state."""
        records = effective_records(change, self._offset)
        if records is None:
            self.skip(index)
            return Outcome(False, self._offset)
        self._offset = index
        if index > self._posted_index:  # after a pause, entries are applied again, but not posted again
            self._posted_index = index
            self._notify(self._listener.on_entry, index, index, records)
        return Outcome(True, index)

    def skip(self, index: int) -> None:
        """Implements ``AdapterHost.skip``."""
        if index > self._posted_index:
            self._posted_index = index
            self._notify(self._listener.on_void, index)

    def install(self, snapshot: Snapshot) -> None:
        """Implements ``AdapterHost.install``."""
        assert snapshot.offset >= self._offset, f"a snapshot at {snapshot.offset} of state at {self._offset}"
        self._compacted_bytes = self.journal.size_bytes
        self._take_snapshot(snapshot)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        self._offset = snapshot.offset
        if snapshot.last_index > self._posted_index:
            self._posted_index = snapshot.last_index
            self._notify(self._listener.on_snapshot, snapshot.last_index, snapshot.offset, snapshot.records)

    # --- snapshots -------------------------------------------------------------------------------------

    def _request_snapshot(self) -> None:
        grown = self.journal.size_bytes - self._compacted_bytes
        if not self._is_snapshot_requested and grown >= max(
            self._settings.snapshot_min_bytes, self._snapshots.size_bytes
        ):
            self._is_snapshot_requested = True
            self._post([(self._listener.on_snapshot_wanted,)])

    def take_snapshot(self, index: int, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Store ``records``, the state at ``offset`` after entry ``index``, as the snapshot. Then drop
        earlier entries except the retained ones.

        ``Runner.offload`` encodes the records, because with many partitions that takes longer than an
        election timeout. Nothing is stored if the node has a newer snapshot by then, or has not applied entry
        ``index`` again after a pause, or if a resource is exhausted.
        """
        self._runner.offload(
            lambda: record_codec.to_bytes(records),
            lambda encoded: self._work(self._store_snapshot, index, offset, encoded),
        )

    def _store_snapshot(self, index: int, offset: int, encoded: bytes | BaseException) -> None:
        self._is_snapshot_requested = False
        if isinstance(encoded, BaseException):
            raise encoded
        journal, current = self.journal, self._snapshots.current
        if self.voter.raftLastApplied < index:
            return  # after a pause, the entries before the snapshot are applied again
        previous, last = journal.entry(index - 1), journal.entry(index)
        if previous is None or last is None or (current is not None and current.last_index >= index):
            return  # the leader has sent a newer snapshot
        snapshot = Snapshot(previous, last, offset, encoded)
        try:
            self._files.store_snapshot(snapshot, self._first_retained(index - 1))
        except StorageExhaustedError as error:  # retried when the log has grown as much again
            _log.warning("snapshot of the metadata not stored %s", Fields(node=self._node_id, error=error))
        self._compacted_bytes = journal.size_bytes

    def _first_retained(self, index: int) -> int:
        """Return the index of the first entry to keep when all entries before ``index`` could be dropped.

        Of these entries, at most ``retained_entries`` are kept, with at most ``snapshot_min_bytes`` of
        commands.
        """
        settings, size_bytes = self._settings, 0
        first = max(self.journal.first_index, index - settings.retained_entries)
        for candidate in range(index, first, -1):
            entry = self.journal.entry(candidate - 1)
            size_bytes += len(entry[0]) if entry is not None else 0
            if size_bytes > settings.snapshot_min_bytes:
                return candidate
        return first

    # --- status ----------------------------------------------------------------------------------------

    def _current_status(self) -> QuorumStatus:
        voter, journal = self.voter, self.journal
        leader_id, term = self._last_leader
        is_leader = voter.raft_state() == LEADER
        now = self._runner.loop.time()
        listed = voter.named_voter_set()
        own = VoterKey(voter.own_directory(), self._addresses.get(self._node_id, ""))
        is_listed = bool(voter.own_weight())
        nodes = [VoterStatus(self._node_id, journal.last_index, 0, is_listed, *own)]
        for peer, (match, seen) in voter.matches().items():
            contact_ms = int((now - seen) * 1000) if is_leader and seen >= 0 else -1
            key = listed.voters.get(peer, VoterKey(UNKNOWN, ""))
            nodes.append(VoterStatus(peer, match if is_leader else -1, contact_ms, True, *key))
        for peer, observer in voter.observers().items() if is_leader else ():
            nodes.append(VoterStatus(peer, observer.match_index, -1, False, *observer.key))
        snapshot = self._snapshots.current
        return QuorumStatus(
            node_id=self._node_id,
            leader_id=leader_id,
            term=term,
            commit_offset=voter.raftCommitIndex,
            applied_offset=voter.raftLastApplied,
            log_end_offset=journal.last_index + 1,
            snapshot_offset=snapshot.last_index if snapshot is not None else 0,
            is_voter=not voter.abstains(),
            nodes=sorted(nodes),
            missing_at_first_start=self._eligibility.missing_at_first_start(self.transport.attached()),
        )
