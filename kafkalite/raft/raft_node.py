"""One voter at work: files, links and the wall, on the Raft loop, ticking when there is something to do.

It keeps the encoded entries and their order; what they mean it leaves to the quorum, which lives on the
broker's loop and is told of everything by ``post``.

A command is eight bytes of ``after_offset`` and the encoded records. Applied, it takes effect only if
``after_offset`` is the offset of the last entry that did; else it is void, here and on every other node
alike. So offsets are Raft indices, with gaps.

Whatever goes wrong here ends the node: it says nothing any more, and the quorum hears why. No failure is
tried again, since the library's state in the midst of one is not known (R26).
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kafkalite import mutants
from kafkalite.errors import DataDirectoryError
from kafkalite.log_fields import Fields
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.raft_journal import RAFT_LOG_FILE, RaftJournal
from kafkalite.raft.raft_messages import Message
from kafkalite.raft.raft_settings import RaftSettings
from kafkalite.raft.raft_transport import RaftTransport
from kafkalite.raft.runner import Runner
from kafkalite.raft.snapshot_store import RAFT_SNAPSHOT_FILE, Snapshot, SnapshotStore
from kafkalite.raft.standing import Founders, Standing
from kafkalite.raft.voter import Voter
from kafkalite.raft.wall import LEADER, Done
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import join

AFTER_OFFSET: Final = struct.Struct(">Q")
_SINGLE_NODE_FILES: Final = ("metadata.log", "metadata.snapshot")
_MIN_TICK_S: Final = 0.002
_MAX_TICK_S: Final = 0.1
_DIRECTORY_ID_BYTES: Final = 16
_ABSTAINS_QUIETLY_S: Final = 5.0

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """Of an applied command: the offset that it has, or, when it is void, the one it should have named."""

    took_effect: bool
    offset: int


class VoterStatus(NamedTuple):
    """What the leader knows of a voter, itself included."""

    node_id: int
    match_offset: int  #: its log agrees with the leader's up to here; -1 where that is not known
    last_contact_ms: int  #: since its last answer; 0 for the node itself, -1 where that is not known


class QuorumStatus(NamedTuple):
    """How a voter sees the quorum. ``nodes`` have match offsets on the leader only."""

    node_id: int
    leader_id: int | None
    term: int
    commit_offset: int
    applied_offset: int
    log_end_offset: int  #: exclusive
    snapshot_offset: int
    is_voter: bool  #: False while it abstains: its directory is new
    nodes: Sequence[VoterStatus]


class Told(Protocol):
    """Who hears what the node does, in order: ``post`` brings each call to the right thread."""

    def on_entry(self, index: int, offset: int, records: bytes) -> None: ...

    def on_void(self, index: int) -> None: ...

    def on_snapshot(self, index: int, offset: int, records: bytes) -> None: ...

    def on_leader(self, leader_id: int | None, term: int) -> None: ...

    def on_snapshot_wanted(self) -> None: ...

    def on_failure(self, error: BaseException) -> None: ...


Post = Callable[[list[tuple[Any, ...]]], None]
"""Takes [(function, argument, …), …] to wherever they are to be called, in order. From the Raft loop."""


class RaftNode:
    """All methods on the Raft loop. Invariant: after a failure nothing is sent, written or applied."""

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
        told: Told,
        post: Post,
        allow_fresh: bool = True,
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._node_id = node_id
        self._others = sorted(set(voters) - {node_id})
        self._runner = runner
        self._rng = rng
        self._settings = settings
        self._told = told
        self._post = post
        self._allow_fresh = allow_fresh
        # A longer pause between two ticks than this would look as if the process had slept.
        self._max_tick_s = min(_MAX_TICK_S, settings.election_timeout_ms / 4_000)
        self._events: list[tuple[Any, ...]] = []
        self._is_running = False
        self._failure: BaseException | None = None
        self._is_tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: The quorum as seen a moment ago: replaced as a whole, so any thread may read it.
        self.view = QuorumStatus(node_id, None, 0, 0, 0, 1, 0, False, ())
        self._offset = 0  # of the last applied entry that took effect
        self._last_view: tuple[int | None, int] = (None, 0)
        self._is_snapshot_asked = False
        self._compacted_bytes = 0  # size of the log after the last compaction
        self._snapshots = SnapshotStore(filesystem, directory, chunk_bytes=settings.chunk_bytes)
        self.journal = RaftJournal(filesystem, directory)
        self.wall: Voter
        self.transport = RaftTransport(
            self._others,
            on_attached=self._on_attached,
            on_detached=self._on_detached,
            on_message=self._on_message,
        )

    # --- life ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read or make the files, and begin to tick. Posts the snapshot, if there is one.

        Raises CorruptLogError, StorageError, DataDirectoryError.
        """
        journal, snapshots = self.journal, self._snapshots
        if journal.exists:
            journal.open(self._node_id)
        else:
            self._check_may_begin()
            journal.create(self._node_id, self._rng.randbytes(_DIRECTORY_ID_BYTES))
        snapshots.open()
        snapshot = snapshots.current
        if snapshot is not None:
            journal.align(snapshot.previous, snapshot.last)
            self._offset = snapshot.offset
        elif journal.first_index != 1:
            raise DataDirectoryError(
                f"{self._directory} has a Raft log from {journal.first_index} on, and no snapshot",
                hint="restore the directory, or empty it and start the node with --rejoin",
            )
        identity = journal.identity
        self._check_voters(identity.founders)
        standing = Standing(
            self._node_id,
            self._others,
            identity.directory,
            is_voter=identity.is_voter,
            founders=identity.founders,
        )
        self.wall = Voter(
            self._node_id,
            self._others,
            self,
            journal=journal,
            snapshots=snapshots,
            standing=standing,
            settings=self._settings,
            now=self._runner.loop.time,
            rng=self._rng,
        )
        self._standing = standing
        if snapshot is not None:
            self._tell(self._told.on_snapshot, snapshot.last_index, snapshot.offset, snapshot.records)
        self._opened, self._has_said_why = self._runner.loop.time(), False
        self._is_running = True
        for peer_id in self.transport.attached():
            self._on_attached(peer_id)
        self._flush()
        self._on_timer()

    def _check_may_begin(self) -> None:
        single = [name for name in _SINGLE_NODE_FILES if self._filesystem.exists(join(self._directory, name))]
        if single:
            raise DataDirectoryError(
                f"{self._directory} holds the metadata of a node that was alone: {', '.join(single)}",
                hint="give the cluster new data directories, and copy the topics over",
            )
        if self._snapshots.exists or not self._allow_fresh:
            what = (
                f"{RAFT_SNAPSHOT_FILE} without its {RAFT_LOG_FILE}"
                if self._snapshots.exists
                else "no Raft log"
            )
            raise DataDirectoryError(
                f"{self._directory} has {what}, though this node has voted before",
                hint="restore the directory; if its disk is lost, start the node with --rejoin: it then takes"
                " everything from the others, and votes again once it has it",
            )

    def _check_voters(self, founders: Founders) -> None:
        """A majority of one set of voters need not overlap with one of another."""
        voters = sorted([self._node_id, *self._others])
        if founders and sorted(founders) != voters:
            raise DataDirectoryError(
                f"the voters of this cluster are the nodes {sorted(founders)}, and not {voters}",
                hint="set controller.quorum.voters back; who votes is fixed when a cluster is founded",
            )

    def stop(self, done: Callable[[], None]) -> None:
        """Hand over to another leader, answer what waits, close the files."""
        if self._is_running:
            self._work(self.wall.hand_over)
        self._end()
        self._post([(done,)])

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            if self._timer is not None:
                self._timer.cancel()
            self.journal.close()

    def halt(self) -> None:
        """End at once: the broker's side can't go on."""
        self._end()

    def _fail(self, error: BaseException) -> None:
        _log.error("controller stopped node=%d error=%r", self._node_id, error)
        self._failure = error
        self._end()
        self._tell(self._told.on_failure, error)

    # --- work ------------------------------------------------------------------------------------------

    def _work(self, call: Callable[..., object], *args: Any) -> None:
        """Do something with the wall; a failure of any kind is the last thing that this node does."""
        if not self._is_running:
            return
        try:
            self.wall.enter()
            call(*args)
        except Exception as error:
            self._fail(error)
        else:
            self._tell_of_leader()
        self._flush()

    def _on_attached(self, peer_id: int) -> None:
        if self._is_running:
            self._work(self.wall.begin_link, peer_id)

    def _on_detached(self, peer_id: int) -> None:
        if self._is_running:
            self._work(self.wall.end_link, peer_id)

    def _on_message(self, peer_id: int, message: Message) -> None:
        if self._is_running:
            self._work(self.wall.on_message, peer_id, message)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        self._events.append((function, *args))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._post(events)

    def _tell_of_leader(self) -> None:
        view = (self.wall.leader(), int(self.wall.raftCurrentTerm))
        if view != self._last_view:
            if view[0] is not None:
                _log.info("controller %s", Fields(node=self._node_id, leader=view[0], term=view[1]))
            self._last_view = view
            self.view = self._look()
            self._tell(self._told.on_leader, *view)

    def kick(self) -> None:
        """``Applied.kick``: one tick for all that has happened in this turn of the loop."""
        if not self._is_tick_due and self._is_running:
            self._is_tick_due = True
            self._runner.loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._is_tick_due = False
        self._work(self.wall.doTick, 0.0)
        if self._is_running:
            self._ask_for_snapshot()

    def _on_timer(self) -> None:
        if self._is_running:
            self._tick()
        if self._is_running:
            self.view = self._look()
            self._say_why_it_abstains()
            loop = self._runner.loop
            delay = min(max(self.wall.next_deadline() - loop.time(), _MIN_TICK_S), self._max_tick_s)
            self._timer = loop.call_later(delay, self._on_timer)

    def _say_why_it_abstains(self) -> None:
        """Once: whoever waits for a cluster to begin wants to know for whom."""
        if self._standing.is_voter or self._has_said_why:
            return
        if self._runner.loop.time() - self._opened > _ABSTAINS_QUIETLY_S:
            self._has_said_why = True
            missing = [peer for peer in self._others if peer not in self.transport.attached()]
            _log.warning(
                "controller does not vote yet: its metadata directory is new, and it waits for all voters or "
                "for the leader's log %s",
                Fields(node=self._node_id, not_reached=missing),
            )

    def propose(self, command: bytes, done: Done) -> None:
        """Posts ``done(outcome, is_known)``: (None, True) nothing was done, (None, False) who knows."""
        if not self._is_running:
            self._post([(done, None, True)])
            return
        self._work(self.wall.propose, command, lambda *outcome: self._tell(done, *outcome))

    def read_index(self, done: Callable[[bool], None]) -> None:
        """Posts ``done(True)`` behind everything that was committed anywhere before this call."""
        if not self._is_running:
            self._post([(done, False)])
            return
        self._work(self.wall.read_index, lambda is_current: self._tell(done, is_current))

    # --- what the wall tells ---------------------------------------------------------------------------

    def send(self, peer_id: int, message: Message) -> bool:
        """``Applied.send``."""
        return self.transport.send(peer_id, message)

    def apply(self, index: int, command: bytes) -> Outcome:
        """``Applied.apply``: compare and append, by the log's own order."""
        (after_offset,) = AFTER_OFFSET.unpack_from(command)
        if after_offset != self._offset and "RAFT-no-compare" not in mutants.ACTIVE:
            self._tell(self._told.on_void, index)
            return Outcome(False, self._offset)
        self._offset = index
        self._tell(self._told.on_entry, index, index, command[AFTER_OFFSET.size :])
        return Outcome(True, index)

    def pass_by(self, index: int) -> None:
        """``Applied.pass_by``."""
        self._tell(self._told.on_void, index)

    def install(self, snapshot: Snapshot) -> None:
        """``Applied.install``."""
        self._offset = snapshot.offset
        self._compacted_bytes = self.journal.size_bytes
        self._tell(self._told.on_snapshot, snapshot.last_index, snapshot.offset, snapshot.records)

    # --- snapshots -------------------------------------------------------------------------------------

    def _ask_for_snapshot(self) -> None:
        grown = self.journal.size_bytes - self._compacted_bytes
        if not self._is_snapshot_asked and grown >= max(
            self._settings.snapshot_min_bytes, self._snapshots.size_bytes
        ):
            self._is_snapshot_asked = True
            self._post([(self._told.on_snapshot_wanted,)])

    def take_snapshot(self, index: int, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Store the state that entry ``index`` left, then forget the log before it but for a tail.

        The records are encoded elsewhere: with many partitions it takes longer than a leader may be silent.
        """
        self._runner.offload(
            lambda: record_codec.to_bytes(records),
            lambda encoded: self._work(self._store_snapshot, index, offset, encoded),
        )

    def _store_snapshot(self, index: int, offset: int, encoded: bytes | BaseException) -> None:
        self._is_snapshot_asked = False
        if isinstance(encoded, BaseException):
            raise encoded
        journal, current = self.journal, self._snapshots.current
        previous, last = journal.entry(index - 1), journal.entry(index)
        if previous is None or last is None or (current is not None and current.last_index >= index):
            return  # a newer one has come from the leader
        self._snapshots.store(Snapshot(previous, last, offset, encoded))
        journal.compact(self._first_retained(index - 1))
        self._compacted_bytes = journal.size_bytes

    def _first_retained(self, index: int) -> int:
        """Where the tail begins that is kept behind a snapshot."""
        settings, size_bytes = self._settings, 0
        first = max(self.journal.first_index, index - settings.retained_entries)
        for candidate in range(index, first, -1):
            entry = self.journal.entry(candidate - 1)
            size_bytes += len(entry[0]) if entry is not None else 0
            if size_bytes > settings.snapshot_min_bytes:
                return candidate
        return first

    # --- looking ---------------------------------------------------------------------------------------

    def _look(self) -> QuorumStatus:
        wall, journal = self.wall, self.journal
        leader_id, term = self._last_view
        is_leader = wall.raft_state() == LEADER
        now = self._runner.loop.time()
        nodes = [VoterStatus(self._node_id, journal.last_index, 0)]
        for peer, (match, seen) in wall.matches().items():
            contact_ms = int((now - seen) * 1000) if is_leader and seen >= 0 else -1
            nodes.append(VoterStatus(peer, match if is_leader else -1, contact_ms))
        snapshot = self._snapshots.current
        return QuorumStatus(
            node_id=self._node_id,
            leader_id=leader_id,
            term=term,
            commit_offset=wall.raftCommitIndex,
            applied_offset=wall.raftLastApplied,
            log_end_offset=journal.last_index + 1,
            snapshot_offset=snapshot.last_index if snapshot is not None else 0,
            is_voter=self._standing.is_voter,
            nodes=sorted(nodes),
        )
