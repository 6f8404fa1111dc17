"""The controller of one node: decides on an image, commits, replays, publishes, replies.

::

    submit(command)
      decide   metadata.controller.decide(image, command) → records, reply                    pure
      commit   quorum.commit(records, after_offset=image.metadata_offset)                     durable
      replay   Delta(image).replay(records).apply(offset) → the next image                    every node
      publish  publisher(delta, image), each in turn                                          every node
      reply    when this node's image has reached the committed offset

Commands that arrive during a commit are decided together after it, each on the result of the previous one.
They share one entry, up to a limit. Their records are also replayed once before the commit, so that a record
that cannot be replayed is never committed. If another entry came first (StaleImageError), the whole group is
decided again on the newer image, so that a decision takes effect only on the state for which it was made.

One of several controllers is active: the leader of the quorum, once its image contains every entry committed
before its term. Only the active controller handles heartbeats and decides which brokers are alive
(``metadata.sessions``). Sessions are not replicated. A heartbeat writes to the log only if it changes the
state of the broker or of its replicas.
"""

# Long because every step of a command works on the one queue and the one image.

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final

from kafkalite.clock import Clock
from kafkalite.errors import (
    BrokerError,
    DuplicateVoterError,
    ErrorCode,
    InvalidRequestError,
    InvalidVoterKeyError,
    LogOfflineError,
    NotControllerError,
    ShuttingDownError,
    ThrottlingQuotaExceededError,
    VoterChangePendingError,
    VoterNotCaughtUpError,
    VoterNotFoundError,
)
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST, MAX_QUEUED_COMMANDS
from kafkalite.log_fields import Fields
from kafkalite.metadata.broker_commands import (
    BeginShutdown,
    FenceBroker,
    broker_of,
    heartbeat_change,
    may_shut_down,
)
from kafkalite.metadata.controller import Command, decide
from kafkalite.metadata.decision import ControllerSettings, Decision, outcome
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.feature_commands import NodeRanges, describe_features
from kafkalite.metadata.features import SUPPORTED, VOTER_CHANGES, newest_levels, refusal
from kafkalite.metadata.image import EMPTY, BrokerState, ClusterImage, TopicImage
from kafkalite.metadata.partition_commands import MAX_ELECTIONS_PER_BALANCE, BalanceLeaders
from kafkalite.metadata.reassignment_commands import ContinueReassignments, reassigning
from kafkalite.metadata.rebalance_commands import RebalanceReplicas, is_overruled
from kafkalite.metadata.record_codec import check_level
from kafkalite.metadata.records import MetadataRecord
from kafkalite.metadata.recovery import RecoveredPartition, ReplaceShortLeaders, ReplicaReports
from kafkalite.metadata.sessions import BrokerSessions
from kafkalite.protocol.messages.admin import (
    AddRaftVoterRequest,
    AddRaftVoterResponse,
    RemoveRaftVoterRequest,
    RemoveRaftVoterResponse,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.messages.cluster import (
    BrokerHeartbeatRequest,
    BrokerHeartbeatRequestV1,
    BrokerHeartbeatResponse,
    FeatureRange,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    ReplicaReport,
    ReportReplicasRequest,
    ReportReplicasResponse,
)
from kafkalite.protocol.messages.metadata import DescribeFeaturesResponse, DescribeRecoveryResponse
from kafkalite.raft.quorum import OffsetWaiters, Quorum, StaleImageError, complete
from kafkalite.raft.voter_set import AddVoter, RemoveVoter, VoterChange
from kafkalite.rng import Rng

logger = logging.getLogger(__name__)

Publisher = Callable[[Delta, ClusterImage], None]
"""Called with the delta and the new image, in order, on the event loop. An exception stops the node (R18)."""

_MAX_COMMANDS_PER_ENTRY: Final = 1_000
_MAX_RECORDS_PER_ENTRY: Final = MAX_PARTITIONS_PER_REQUEST  # further commands wait for the next entry

_READ_INDEX_RETRY_MS: Final = 50
_CONTINUE_INTERVAL_MS: Final = 1_000  # between two looks for reassignments that can finish
#: How long the brokers are unchanged and nothing is moved before replicas move by themselves.
REBALANCE_DELAY_MS: Final = 10_000
#: How long no replica moves by itself after an operator has cancelled or changed such a move.
REBALANCE_PAUSE_MS: Final = 3_600_000
_PROBE_TIMEOUT_S: Final = 1.0
#: The errors with which a change of the voters is refused, as opposed to errors of the controller.
_VOTER_ERRORS: Final = (
    DuplicateVoterError,
    InvalidRequestError,
    InvalidVoterKeyError,
    VoterChangePendingError,
    VoterNotCaughtUpError,
    VoterNotFoundError,
)

_Waiting = tuple[Command, asyncio.Future[Any]]


class ControllerNode:
    """Owns this node's cluster image, and runs the commands that change it.

    Invariant: the image's offset never decreases.
    """

    def __init__(
        self,
        quorum: Quorum,
        node_id: int,
        clock: Clock,
        rng: Rng,
        settings: ControllerSettings | None = None,
        *,
        is_refused: Callable[[str], Awaitable[bool]] | None = None,
        on_failed: Callable[[LogOfflineError], None] | None = None,
        voter_features: Callable[[], NodeRanges] = dict,
    ) -> None:
        """``is_refused(address)`` returns whether the host responds that no process listens at
        ``address``. ``on_failed`` is called with the reason when this node can't continue.
        ``voter_features`` returns the feature levels that each connected voter supports."""
        self.image: ClusterImage = EMPTY
        self.publishers: list[Publisher] = []  #: append publishers before ``start``
        self._quorum = quorum
        self._node_id = node_id
        self._clock = clock
        self._rng = rng
        settings = settings or ControllerSettings()
        if (settings.node_id, settings.is_single_node) != (node_id, quorum.is_single_node):
            settings = replace(settings, node_id=node_id, is_single_node=quorum.is_single_node)
        self._settings = settings
        self._is_refused = is_refused
        self._on_failed = on_failed
        self._voter_features = voter_features
        # By broker id: the epoch of its last heartbeat, and the feature levels that its program supports.
        self._broker_features: dict[int, tuple[int, Sequence[FeatureRange]]] = {}
        self._sessions = BrokerSessions(self._settings.session_timeout_ms)
        self._reports = ReplicaReports(self._settings)
        # By id of a broker that shuts down: the metadata offset of its last leadership transfer.
        self._shutdown_offsets: dict[int, int] = {}
        self._activation: asyncio.Task[None] | None = None
        # By id of a fenced broker: the metadata offset that it must replay before it is unfenced.
        self._fenced_offsets: dict[int, int] = {}
        self._fencing: set[int] = set()  # ids of the brokers whose fence is being committed
        self._probing: dict[int, asyncio.Task[None]] = {}  # by id of a broker without a heartbeat connection
        self._is_caught_up = False  # whether this leader's image has all entries committed before its term
        self._balanced_ms = 0
        self._continued_ms = 0
        self._continued: ClusterImage | None = None  # the image on which no reassignment could continue
        self._looked_at: Mapping[str, TopicImage] = {}  # the topics of which ``_moving`` was determined
        self._moving: set[tuple[str, int]] = set()  # the partitions that are being reassigned
        # The target replicas of those that ``_rebalance`` moved last.
        self._own_moves: dict[tuple[str, int], tuple[int, ...]] = {}
        self._rebalanced: ClusterImage | None = None  # the image on which no replica had to move
        self._rebalance_ms = 0  # when ``_rebalance`` may decide again
        self._settled_brokers: Mapping[int, BrokerState] = {}
        self._unsettled_ms = 0  # when the brokers last changed, or partitions were moved by others
        self._is_ticking = False
        self._loading: Delta | None = None  # during ``start``: the changes since EMPTY, published once
        self._queue: deque[_Waiting] = deque()
        self._decider: asyncio.Task[None] | None = None
        self._offset_waiters = OffsetWaiters()
        self._is_open = False
        self._failure: BaseException | None = None

    @property
    def controller_id(self) -> int | None:
        """The node id of the quorum's leader as far as this node knows, or None."""
        return self._quorum.leader_id

    @property
    def is_active(self) -> bool:
        """Whether this node is the active controller: it leads the quorum, and its image has every entry
        committed before its term."""
        return self._is_open and self._is_caught_up and self._quorum.leader_id == self._node_id

    @property
    def is_single_node(self) -> bool:
        return self._settings.is_single_node

    async def start(self) -> None:
        """Load the stored state and publish it as one delta from the empty image. Raises StorageError."""
        self._loading = Delta(EMPTY)
        self._quorum.attach(self)
        await self._quorum.start()
        delta, self._loading = self._loading, None
        self._advance(delta, self._quorum.offset)
        self._is_open = True
        self._quorum.on_leader_change.append(self._on_leader_change)
        self._on_leader_change(self._quorum.leader_id, 0)

    async def stop(self) -> None:
        """Wait until each submitted command is complete or has failed, then stop the quorum."""
        self._is_open = False
        self._end_activation()
        for probe in self._probing.values():
            probe.cancel()
        if self._decider is not None:
            await self._decider
        await self._quorum.stop()

    # --- the active controller

    def _on_leader_change(self, leader_id: int | None, _term: int) -> None:
        self._end_activation()
        self._is_caught_up = False
        self._sessions.clear()
        self._reports.clear()
        self._shutdown_offsets.clear()
        self._fenced_offsets.clear()
        self._broker_features.clear()
        if leader_id == self._node_id and self._is_open:
            if self._settings.is_single_node:
                self._is_caught_up = True
            else:
                self._activation = asyncio.create_task(self._activate(), name="become the active controller")

    def _end_activation(self) -> None:
        if self._activation is not None:
            self._activation.cancel()
            self._activation = None

    async def _activate(self) -> None:
        """Become active after applying all entries committed before this node's term (R19)."""
        while True:
            try:
                await self.wait_for_offset(await self._quorum.read_index())
                break
            except BrokerError as error:
                if not error.retriable or self._quorum.leader_id != self._node_id:
                    return
            except LogOfflineError:
                return  # ``fail`` has already failed all waiters
            await self._clock.sleep_ms(_READ_INDEX_RETRY_MS)
        self._is_caught_up = True
        self._balanced_ms = now_ms = self._clock.monotonic_ms()
        self._expect_live(now_ms)
        self._probe()

    async def _ensure_leading(self) -> None:
        """Return when this node may decide commands. Raises NotControllerError, LogOfflineError."""
        if not self._is_caught_up and self._activation is not None:
            await asyncio.wait({self._activation})
        self._check_leads()
        if not self._is_caught_up:
            raise NotControllerError(f"node {self._node_id} is not the active controller yet")

    async def heartbeat(
        self, request: BrokerHeartbeatRequest, now_ms: int | None = None
    ) -> BrokerHeartbeatResponse:
        """Handle a broker's heartbeat. ``now_ms`` is monotonic; None means now.

        A response without ``is_fenced`` extends the session that the broker itself keeps. That session must
        end before another broker leads (R23). Therefore a majority of the voters confirms this controller
        before the response, and ``is_fenced`` is already set while a fence of the broker is being committed.

        If the response has STALE_BROKER_EPOCH or BROKER_ID_NOT_REGISTERED, the broker must register again. A
        broker that wants to shut down may do so, and is fenced, once it leads no partition that another
        broker could lead and all other live brokers have replayed the transfer of its leaderships.

        Raises the errors of ``submit`` and ``Quorum.read_index``.
        """
        self._check_usable()
        await self._ensure_leading()
        node_id, broker_epoch = request.node_id, request.broker_epoch
        now_ms = self._clock.monotonic_ms() if now_ms is None else now_ms
        try:
            await self._check_registered(node_id, broker_epoch)
            if isinstance(request, BrokerHeartbeatRequestV1):
                self._broker_features[node_id] = (broker_epoch, request.features)
            if not self._settings.is_single_node:
                self._sessions.on_heartbeat(node_id, broker_epoch, request.metadata_offset, now_ms)
            known_damaged = self._reports.damaged_on(node_id)
            for change in heartbeat_change(self.image, request, self._fenced_offset(node_id), known_damaged):
                error = await self.submit(change)
                if error is not None:
                    raise error
                if isinstance(change, BeginShutdown):
                    self._shutdown_offsets[node_id] = self.image.metadata_offset
            self._reports.take_damaged(node_id, request.damaged)  # after the changes that depend on it
            may_go = request.wants_shutdown and await self._may_shut_down(request)
            await self.confirm_leadership()
            broker = broker_of(self.image, node_id, broker_epoch)
        except BrokerError as error:
            if error.code not in {ErrorCode.STALE_BROKER_EPOCH, ErrorCode.BROKER_ID_NOT_REGISTERED}:
                raise
            return BrokerHeartbeatResponse(int(error.code), error.message, True, False)
        return BrokerHeartbeatResponse(0, None, broker.is_fenced or node_id in self._fencing, may_go)

    async def confirm_leadership(self) -> None:
        """Wait until a majority confirms that this node leads. Raises the errors of ``Quorum.read_index``."""
        await self._quorum.read_index()

    def _fenced_offset(self, node_id: int) -> int:
        """Return the metadata offset up to which a fenced broker must replay before it is unfenced; 0 if the
        broker is not fenced."""
        if self.image.brokers[node_id].is_fenced:
            return self._fenced_offsets.setdefault(node_id, self.image.metadata_offset)
        self._fenced_offsets.pop(node_id, None)
        return 0

    async def _check_registered(self, node_id: int, broker_epoch: int) -> None:
        """Raise BROKER_ID_NOT_REGISTERED if the newest image does not have the broker, or STALE_BROKER_EPOCH
        if the image has another epoch of the broker (R19)."""
        try:
            broker_of(self.image, node_id, broker_epoch)
        except BrokerError:
            await self.wait_for_offset(await self._quorum.read_index())
            broker_of(self.image, node_id, broker_epoch)

    async def _may_shut_down(self, request: BrokerHeartbeatRequest) -> bool:
        node_id, image = request.node_id, self.image
        if not image.brokers[node_id].is_fenced and not self._settings.is_single_node:
            handed_over = self._shutdown_offsets.setdefault(node_id, image.metadata_offset)
            others = image.live_brokers() - {node_id}
            if not may_shut_down(image, node_id) or not self._sessions.have_replayed(others, handed_over):
                return False
            error = await self.submit(FenceBroker(node_id, request.broker_epoch))
            if error is not None:
                raise error
        self._sessions.end(node_id)
        self._shutdown_offsets.pop(node_id, None)
        return True

    async def report_replicas(self, request: ReportReplicasRequest) -> ReportReplicasResponse:
        """Record a broker's report of its replicas' logs, and elect leaders where possible (R46-R50).

        Raises STALE_BROKER_EPOCH, BROKER_ID_NOT_REGISTERED, and the errors of ``submit`` and
        ``Quorum.read_index``.
        """
        self._check_usable()
        await self._ensure_leading()
        await self._check_registered(request.node_id, request.broker_epoch)
        self._reports.take(self.image, request, self._clock.monotonic_ms())
        refusals = self._reports.take_refusals(self.image, request)
        if refusals:
            await self._replace_short_leaders(request, tuple(refusals))
        await self._recover_leaders()
        return ReportReplicasResponse(0, None, len(request.partitions))

    async def _replace_short_leaders(
        self, request: ReportReplicasRequest, refusals: tuple[ReplicaReport, ...]
    ) -> None:
        outcome = await self.submit(ReplaceShortLeaders(request.node_id, request.broker_epoch, refusals))
        if isinstance(outcome, BrokerError):
            raise outcome
        for topic, number, is_replaced in outcome:
            logger.error(
                "a leader lacks committed records %s",
                Fields(
                    partition=f"{topic}-{number}",
                    replica=request.node_id,
                    action="the replica leads" if is_replaced else "waits for 'kl cluster elect --unclean'",
                ),
            )

    async def _recover_leaders(self) -> None:
        """Elect leaders of partitions for which enough replicas have reported, or for which the wait for the
        missing reports has ended (R46, R47)."""
        while (command := self._reports.due(self.image, self._clock.monotonic_ms())) is not None:
            recovered: list[RecoveredPartition] = await self.submit(command)
            for topic, number, verdict in recovered:
                level = logging.ERROR if verdict.is_late or verdict.short else logging.INFO
                logger.log(
                    level,
                    "leader elected after an unclean stop %s",
                    Fields(
                        partition=f"{topic}-{number}",
                        leader=verdict.leader,
                        not_heard=list(verdict.waits_for),
                        short=list(verdict.short),
                    ),
                )
            if not recovered:
                return

    def describe_recovery(self) -> DescribeRecoveryResponse:
        """Return the recovering partitions, as ``ReplicaReports.describe`` describes them.

        Raises NotControllerError if this node is not the active controller.
        """
        if not self.is_active:
            raise NotControllerError(f"node {self._node_id} is not the active controller")
        return DescribeRecoveryResponse(
            0, None, self._reports.describe(self.image, self._clock.monotonic_ms())
        )

    def describe_features(self) -> DescribeFeaturesResponse:
        """Return the finalised feature levels, and those that each node supports.

        Raises NotControllerError if this node is not the active controller.
        """
        if not self.is_active:
            raise NotControllerError(f"node {self._node_id} is not the active controller")
        image = self.image
        return DescribeFeaturesResponse(
            0, None, image.metadata_offset, describe_features(image, self._node_ranges(image))
        )

    def _voters(self) -> frozenset[int]:
        """Return the node ids of the present voters."""
        return self._quorum.voter_ids() or self._settings.voters

    def _node_ranges(self, image: ClusterImage) -> NodeRanges:
        """Return the feature levels that each broker and voter supports; None if they are unknown (R92)."""
        voters, connected = self._voters(), self._voter_features()
        found: dict[int, Sequence[FeatureRange] | None] = {}
        for node_id in image.brokers.keys() | voters | {self._node_id}:
            broker = image.brokers.get(node_id)
            if node_id == self._node_id:
                found[node_id] = SUPPORTED
                continue
            found[node_id] = connected.get(node_id) if node_id in voters else None
            if broker is not None and (node_id not in voters or found[node_id] is not None):
                epoch, ranges = self._broker_features.get(node_id, (-1, ()))
                runs = epoch == broker.broker_epoch and not broker.is_fenced
                found[node_id] = ranges if runs else None
        return found

    def on_disconnect(self, node_id: int) -> None:
        """Record that the broker's heartbeat connection has closed, and check whether the broker's process
        has ended."""
        self._sessions.on_disconnect(node_id)
        self._probe()

    def _probe(self) -> None:
        """Dial each unfenced broker without a heartbeat connection. If the broker's host refuses the dial,
        end the broker's session, because its process has ended."""
        for node_id in self._sessions.unconnected() if self.is_active else ():
            broker = self.image.brokers.get(node_id)
            if broker is None or broker.is_fenced or node_id in self._probing:
                continue
            self._probing[node_id] = probe = asyncio.create_task(self._probe_one(broker))
            probe.add_done_callback(partial(self._end_probe, node_id))

    async def _probe_one(self, broker: BrokerState) -> None:
        if self._is_refused is None or not broker.addresses:
            return
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                is_gone = await self._is_refused(broker.addresses[0])
        except TimeoutError:
            return
        if is_gone:
            self._sessions.on_refused(broker.node_id, broker.broker_epoch, self._clock.monotonic_ms())
            with suppress(BrokerError, LogOfflineError):  # the next tick tries again if this node still leads
                await self.tick()

    def _end_probe(self, node_id: int, _probe: asyncio.Task[None]) -> None:
        del self._probing[node_id]

    async def tick(self) -> None:
        """Fence brokers whose sessions have expired, elect leaders, continue reassignments, and balance
        leadership every ``imbalance_check_interval_ms``.

        Has no effect unless this node is the active controller of several nodes. Call it every 100 ms. Raises
        the errors of ``submit``.
        """
        if not self.is_active or self._settings.is_single_node or self._is_ticking:
            return
        self._is_ticking = True
        try:
            now_ms = self._clock.monotonic_ms()
            self._probe()
            await asyncio.gather(*(self._fence(change) for change in self._overdue(now_ms)))
            await self._recover_leaders()
            await self._continue_reassignments(now_ms)
            settings = self._settings
            if settings.auto_rebalance:
                await self._rebalance(now_ms)
            if (
                settings.auto_leader_rebalance
                and now_ms - self._balanced_ms >= settings.imbalance_check_interval_ms
                and await self.submit(BalanceLeaders()) < MAX_ELECTIONS_PER_BALANCE
            ):
                self._balanced_ms = now_ms
        finally:
            self._is_ticking = False

    async def _continue_reassignments(self, now_ms: int) -> None:
        """Finish the reassignments that can finish, and add replicas to internal topics. Does nothing while
        the image is the one on which nothing could be done."""
        if self.image is self._continued or now_ms - self._continued_ms < _CONTINUE_INTERVAL_MS:
            return
        image = self.image
        if await self.submit(ContinueReassignments(self._settings.internal_topics)) == 0:
            self._continued, self._continued_ms = image, now_ms

    async def _rebalance(self, now_ms: int) -> None:
        """Begin to move replicas to brokers with fewer (``RebalanceReplicas``).

        The first moves wait until the brokers are unchanged and no reassignment is in progress for
        REBALANCE_DELAY_MS, because a command of an operator may have several steps. The next ones follow as
        soon as these are complete. If no replica had to move, this looks again after REBALANCE_DELAY_MS at
        the earliest, and only if topics or brokers have changed. If an operator cancels one of these moves or
        gives it another target, none begins for REBALANCE_PAUSE_MS.
        """
        image = self.image
        if image.topics is not self._looked_at:
            self._looked_at = image.topics
            self._moving = {(topic.topic_id, number) for topic, number, _ in reassigning(image)}
            if any(is_overruled(image, *key, target) for key, target in self._own_moves.items()):
                self._own_moves, self._rebalance_ms = {}, now_ms + REBALANCE_PAUSE_MS
        if self._moving - self._own_moves.keys() or not self._own_moves:
            self._own_moves = {}
            if self._moving or self._settled_brokers is not image.brokers:
                self._settled_brokers, self._unsettled_ms = image.brokers, now_ms
            if now_ms - self._unsettled_ms < REBALANCE_DELAY_MS:
                return
        seen = self._rebalanced
        is_seen = seen is not None and image.topics is seen.topics and image.brokers is seen.brokers
        if self._moving or is_seen or now_ms < self._rebalance_ms:
            return
        self._own_moves = await self.submit(RebalanceReplicas())
        if not self._own_moves:
            self._rebalanced, self._rebalance_ms = image, now_ms + REBALANCE_DELAY_MS

    async def _fence(self, command: FenceBroker) -> None:
        """Fence a broker whose session has ended. Until the fence is committed, the responses to its
        heartbeats have ``is_fenced`` (R23)."""
        self._fencing.add(command.node_id)
        self._fenced_offsets.pop(command.node_id, None)
        try:
            await self.submit(command)
        finally:
            self._fencing.discard(command.node_id)

    def _expect_live(self, now_ms: int) -> None:
        """Begin a session for each broker that is not fenced and has none."""
        for broker in self.image.brokers.values():
            if not broker.is_fenced:
                self._sessions.expect(broker.node_id, broker.broker_epoch, now_ms)

    def _overdue(self, now_ms: int) -> list[FenceBroker]:
        """Return commands that fence the brokers whose sessions have expired."""
        image, sessions = self.image, self._sessions
        self._expect_live(now_ms)
        changes: list[FenceBroker] = []
        for node_id, broker_epoch in sessions.expired(now_ms):
            known = image.brokers.get(node_id)
            if known is not None and known.broker_epoch == broker_epoch and not known.is_fenced:
                changes.append(FenceBroker(node_id, broker_epoch))  # the fence ends the session
            else:
                sessions.end(node_id)
        return changes

    # --- commands

    async def change_voters(
        self, command: AddRaftVoterRequest | RemoveRaftVoterRequest
    ) -> AddRaftVoterResponse | RemoveRaftVoterResponse:
        """Add or remove a voter of the quorum. The response has the error of a change that is not possible.

        Raises the other errors of ``Quorum.change_voters``, and InvalidRequestError for a directory id that
        is not in hex.
        """
        self._check_usable()
        try:
            directory = bytes.fromhex(command.directory_id)
        except ValueError:
            raise InvalidRequestError(f"{command.directory_id!r} is not a directory id in hex") from None
        is_added = isinstance(command, AddRaftVoterRequest)
        change: VoterChange = (AddVoter if is_added else RemoveVoter)(command.node_id, directory)
        response = AddRaftVoterResponse if is_added else RemoveRaftVoterResponse
        refused = refusal(self.image.levels, VOTER_CHANGES)
        if refused is not None and not self._settings.is_single_node:
            return response(*outcome(refused), change.node_id)
        try:
            await self._quorum.change_voters(change)
        except _VOTER_ERRORS as error:
            return response(*outcome(error), change.node_id)
        logger.warning(
            "the voters have changed %s",
            Fields(
                change=type(change).__name__, node=change.node_id, voters=sorted(self._quorum.voter_ids())
            ),
        )
        return response(0, None, change.node_id)

    async def submit(self, command: Command | AddRaftVoterRequest | RemoveRaftVoterRequest) -> Any:
        """Decide ``command``. Return its reply once its records are committed and in this node's image.

        Raises the error of the decision, NotControllerError, ShuttingDownError, ThrottlingQuotaExceededError
        (the queue is full), and the errors of ``Quorum.commit``. After RequestTimedOutError, LogOfflineError,
        ShuttingDownError or a cancellation, the command may still take effect.
        """
        if isinstance(command, AddRaftVoterRequest | RemoveRaftVoterRequest):
            return await self.change_voters(command)  # an entry of its own kind
        self._check_usable()
        if len(self._queue) >= MAX_QUEUED_COMMANDS:
            raise ThrottlingQuotaExceededError(
                f"{MAX_QUEUED_COMMANDS} commands are waiting for the controller, which is the limit"
            )
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((command, done))
        if self._decider is None:
            self._decider = asyncio.create_task(self._decide_all(), name="controller")
        return await done

    async def change(self, decide: Callable[[ClusterImage], Sequence[MetadataRecord]]) -> None:
        """Commit the records that ``decide`` returns for the newest image. If another entry came first,
        ``decide`` is called again with a newer image. Raises the errors of ``submit`` except
        ThrottlingQuotaExceededError."""
        self._check_usable()
        while not await self._commit(decide(self.image)):
            pass

    async def decide_at_once(self, command: Command) -> Any:
        """Decide and commit ``command`` without the queue of ``submit``, in an entry of its own. Return its
        reply.

        For a single node that starts, this takes fewer turns of the event loop. Raises the errors of
        ``submit`` except ThrottlingQuotaExceededError.
        """
        reply: Any = None

        def records(image: ClusterImage) -> Sequence[MetadataRecord]:
            nonlocal reply
            decision = self._decide(image, command)
            reply = decision.reply
            return decision.records

        await self.change(records)
        return reply

    async def wait_for_offset(self, offset: int) -> None:
        """Return when the image has reached ``offset``. Raises LogOfflineError if the node has failed."""
        if self.image.metadata_offset >= offset:
            return
        self._check_not_failed()
        await self._offset_waiters.add(offset)

    def _check_usable(self) -> None:
        self._check_not_failed()
        if not self._is_open:
            raise ShuttingDownError(f"node {self._node_id} is not started")
        self._check_leads()

    def _check_leads(self) -> None:
        self._check_not_failed()
        if self._quorum.leader_id != self._node_id:
            raise NotControllerError(f"the controller is node {self._quorum.leader_id}")

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise LogOfflineError(f"the controller has stopped: {self._failure}") from self._failure

    async def _decide_all(self) -> None:
        try:
            while self._queue:
                try:
                    await self._ensure_leading()
                except (BrokerError, LogOfflineError) as error:
                    while self._queue:
                        complete(self._queue.popleft()[1], error)
                    return
                await self._decide_group()
        finally:
            self._decider = None

    async def _decide_group(self) -> None:
        """Commit the first commands of the queue as one entry of the metadata log, then complete their
        futures."""
        while True:
            records, outcomes = self._decide_on(self.image)
            try:
                is_decided = await self._commit(records)
            except Exception as error:
                is_decided, outcomes = True, [error] * len(outcomes)
            if is_decided:
                for outcome in outcomes:
                    _, done = self._queue.popleft()
                    complete(done, outcome)
                return

    def _decide_on(self, image: ClusterImage) -> tuple[list[MetadataRecord], list[Any]]:
        """Decide the first commands of the queue on ``image``, each on the result of the previous ones.

        Return (the records of all commands, the reply or exception of each command). A command whose decision
        raises has no records and does not affect the others.
        """
        records: list[MetadataRecord] = []
        outcomes: list[Any] = []
        for command, done in islice(self._queue, _MAX_COMMANDS_PER_ENTRY):
            if len(records) >= _MAX_RECORDS_PER_ENTRY:
                break
            if done.done():  # the caller of ``submit`` was cancelled
                outcomes.append(None)
                continue
            try:
                step = self._decide(image, command)
                if step.records:
                    image = Delta(image).replay_all(step.records).apply(image.metadata_offset)
            except Exception as error:
                outcomes.append(error)
                continue
            records += step.records
            outcomes.append(step.reply)
        return records, outcomes

    def _decide(self, image: ClusterImage, command: Command) -> Decision:
        if isinstance(command, RegisterBrokerRequest):
            earlier = image.brokers.get(command.node_id)
            # A registration ends the earlier process (R20). If that process still sends heartbeats, two
            # processes have the same node id, and the new one is refused. If it was killed, its connection
            # is closed or its session will expire.
            if (
                earlier is not None
                and earlier.incarnation_id != command.incarnation_id
                and self._sessions.is_alive(command.node_id, earlier.broker_epoch, self._clock.monotonic_ms())
            ):
                message = f"another live process is broker {command.node_id}"
                code = ErrorCode.DUPLICATE_BROKER_REGISTRATION
                return Decision(RegisterBrokerResponse(int(code), message, -1, -1))
            self._reports.take_damaged(command.node_id, command.damaged)
        settings = self._settings
        if isinstance(command, UnregisterBrokerRequest) and not settings.is_single_node:
            settings = replace(settings, voters=self._voters())
        decision = decide(
            image,
            command,
            now_ms=self._clock.wall_ms(),
            rng=self._rng,
            settings=settings,
            ends_of=partial(self._reports.ends_of, image),
            nodes=self._node_ranges(image) if isinstance(command, UpdateFeaturesRequest) else None,
        )
        check_level(decision.records, image.metadata_version)
        return decision

    async def _commit(self, records: Sequence[MetadataRecord]) -> bool:
        """Commit the records, and return True when the image contains them. Return False if another entry
        came first."""
        if not records:
            return True
        decided_on = self.image.metadata_offset
        if decided_on == 0:  # the first entry of a new log
            records = [*newest_levels(), *records]
        try:
            offset = await self._quorum.commit(records, decided_on)
        except StaleImageError as stale:
            assert stale.offset > decided_on, "stale, but no newer entry"
            await self.wait_for_offset(stale.offset)
            return False
        await self.wait_for_offset(offset)
        return True

    # --- the state machine of the quorum ---------------------------------------------------------------

    def load(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Implements ``StateMachine.load``."""
        if self._loading is not None:
            self._loading = Delta.to_snapshot(EMPTY, records)
        else:
            self._advance(Delta.to_snapshot(self.image, records), offset)

    def apply(self, offset: int, records: Sequence[MetadataRecord]) -> None:
        """Implements ``StateMachine.apply``."""
        if self._loading is not None:
            self._loading.replay_all(records)
        else:
            self._advance(Delta(self.image).replay_all(records), offset)

    def snapshot(self) -> tuple[int, Iterable[MetadataRecord]]:
        """Implements ``StateMachine.snapshot``."""
        return self.image.metadata_offset, self.image.to_records()

    def fail(self, error: BaseException) -> None:
        """Implements ``StateMachine.fail``: raises LogOfflineError in all tasks that wait for an offset, and
        calls ``on_failed``."""
        self._failure = error
        stopped = LogOfflineError(f"the controller has stopped: {error}")
        stopped.__cause__ = error
        self._offset_waiters.fail(stopped)
        if self._on_failed is not None:
            self._on_failed(stopped)

    def _advance(self, delta: Delta, offset: int) -> None:
        """Build the next image, publish it, and complete the futures that wait for its offset."""
        assert offset >= self.image.metadata_offset, f"the image would go back to {offset}"
        image = self.image = delta.apply(offset)
        for publisher in self.publishers:
            publisher(delta, image)
        self._offset_waiters.reach(offset)
