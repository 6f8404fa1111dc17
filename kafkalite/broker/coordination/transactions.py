"""A broker's part in transactions: commands to its own coordinators, and requests to those of other brokers.

A command that arrives before the previous transaction is complete is held for a short time. The markers of
decided transactions are sent to the leaders of their partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.coordination.coordinators import Coordinators
from kafkalite.broker.coordination.internal_topics import TRANSACTION
from kafkalite.broker.coordination.marker_sender import MarkerSender
from kafkalite.broker.coordination.marker_writer import MarkerWriter
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.broker.coordination.shard import NO_CALLER
from kafkalite.broker.coordination.verification import Verifications
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.server.responses import (
    HandlerResult,
    HeldResponse,
    Pending,
    Refusal,
    Reply,
    Response,
    settled,
)
from kafkalite.broker.tasks import TaskSet
from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import FINAL, RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.retry import Backoff
from kafkalite.clock import Clock
from kafkalite.coordinator_types import Caller
from kafkalite.errors import (
    BrokerError,
    ClientError,
    ClusterAuthorizationFailedError,
    ConcurrentTransactionsError,
    ConnectionFailedError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    ErrorCode,
    KafkaliteError,
    NotCoordinatorError,
    ProtocolError,
    RequestTimedOutError,
    ShuttingDownError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.model import TRANSACTIONS_TOPIC, TopicPartition
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    TxnPartition,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from kafkalite.raft.controller_node import ControllerNode

if TYPE_CHECKING:
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.client.cluster.authentication import Authenticator
    from kafkalite.client.cluster.connection import Connection
    from kafkalite.metadata.delta import Delta
    from kafkalite.metadata.image import ClusterImage

#: The timeout of one request to another broker.
ASK_TIMEOUT_MS: Final = 1_500
MARKERS_TIMEOUT_MS: Final = 3_000
#: The longest time that a coordinator holds a command because the previous transaction is not complete. It is
# short because the responses to other transactions on the same connection wait meanwhile.
HOLD_MS: Final = 50
#: The longest time that a leader tries to reach a coordinator; then the producer must retry.
VERIFY_TIMEOUT_MS: Final = 3_000
#: The longest time that a leader waits for the previous transaction to complete (KIP-890).
CONCURRENT_TIMEOUT_MS: Final = 500
VERIFY_BACKOFF: Final = Backoff(5, 100)

#: After these errors another broker may be the coordinator, or this one may soon be available.
_ELSEWHERE: Final = (
    NotCoordinatorError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    RequestTimedOutError,
    ShuttingDownError,
    ClusterAuthorizationFailedError,
    ClientError,
    ProtocolError,  # a broker of an earlier version does not support the api
)

#: Retried: the previous transaction is not complete, or the coordinator's image lacks the partition.
_WAITS: Final = (ConcurrentTransactionsError, UnknownTopicOrPartitionError)


class Transactions:
    """Coordinates the transactions of this broker's shards, and verifies transactions in the partitions that
    this broker leads.

    To verify is to ask the coordinator to add a partition to the transaction (``Verifications``).
    """

    def __init__(
        self,
        node_id: int,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        controller: ControllerNode,
        coordinators: Coordinators,
        partitions: Partitions,
        producer_ids: ProducerIds,
        marker_writer: MarkerWriter,
        authenticator: Authenticator | None,
        tasks: TaskSet,
    ) -> None:
        """``authenticator`` is None in a single-node cluster."""
        self._node_id = node_id
        self._loop = loop
        self._controller = controller
        self._coordinators = coordinators
        self._producer_ids = producer_ids
        self._marker_writer = marker_writer
        self._authenticator = authenticator
        self._held: dict[str, dict[HeldResponse, None]] = {}  # by transactional id
        self._peers: dict[str, PeerConnections] = {}
        self.is_closed = False
        #: Batches that wait for the coordinator of their transaction.
        self.verifications = Verifications(self.verify, partitions, clock, tasks)
        self._verify_rules = CallRules(self._judge, VERIFY_BACKOFF)
        self.sender = MarkerSender(
            self._send_markers, lambda: controller.image, tasks, loop, self._on_complete
        )
        coordinators.on_change(TRANSACTION, self.sender.on_change)
        coordinators.on_close(TRANSACTION, self.sender.on_close)
        controller.publishers.append(self._publish)

    def end(self) -> None:
        """Stop sending requests to other brokers, and send held responses now, because the broker stops."""
        self.is_closed = True
        self.sender.close()
        for held in [one for waiting in self._held.values() for one in waiting]:
            held.finish()

    async def close(self) -> None:
        """Call ``end`` and close the connections to other brokers."""
        self.end()
        for peers in self._peers.values():
            await peers.close()

    def _publish(self, _delta: Delta, image: ClusterImage) -> None:
        self.sender.on_image(image)

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
    ) -> None:
        """Return when the coordinator has durably added ``partitions`` to the transaction, so that each will
        get a marker (R31).

        Raises the coordinator's error if it refuses. Raises a retriable error (R30) if no decision arrived in
        time: ConcurrentTransactionsError while the previous transaction is not complete,
        UnknownTopicOrPartitionError while the coordinator's image lacks a partition, or
        CoordinatorNotAvailableError if no coordinator responded.
        """
        request = AddPartitionsToTxnRequest(
            transactional_id, producer_id, producer_epoch, [TxnPartition(*key) for key in partitions]
        )

        def timeout_error(last: KafkaliteError) -> KafkaliteError:
            if isinstance(last, _WAITS):
                return last
            return CoordinatorNotAvailableError(
                f"no coordinator of {transactional_id!r} responded: {last.message}"
            )

        plan = CallPlan(
            self._verify_rules,
            now_ms=int(self._loop.time() * 1000),
            timeout_ms=VERIFY_TIMEOUT_MS,
            timeout_error=timeout_error,
        )
        await drive(
            plan,
            locate=partial(self._locate, transactional_id),
            dial=self._dial,
            send=partial(self._send_add, request),
        )

    def _judge(self, error: KafkaliteError) -> Verdict:
        """Return whether, and for how long, to retry after an error of the coordinator."""
        if isinstance(error, _WAITS):
            return Verdict(must_locate=True, limit_ms=0 if self.is_closed else CONCURRENT_TIMEOUT_MS)
        if isinstance(error, _ELSEWHERE):
            return Verdict(must_locate=True, limit_ms=0) if self.is_closed else RELOCATE
        return FINAL

    async def _locate(self, transactional_id: str) -> int:
        """Return the node id of the coordinator. Raises CoordinatorNotAvailableError."""
        partition = self._coordinators.partition_of(TRANSACTION, transactional_id)
        state = self._controller.image.partition(TRANSACTIONS_TOPIC, partition)
        if state is None or state.leader < 0:
            raise CoordinatorNotAvailableError(f"{TRANSACTIONS_TOPIC}-{partition} has no leader now")
        return state.leader

    async def _dial(self, node_id: int | None) -> Connection | None:
        """Return a connection to the coordinator, or None if this broker is the coordinator."""
        if node_id is None or node_id == self._node_id:
            return None
        return await self._connection(node_id, "verify", ASK_TIMEOUT_MS)

    async def _send_add(
        self, request: AddPartitionsToTxnRequest, connection: Connection | None, _timeout_ms: int
    ) -> None:
        """Ask the coordinator to add partitions. Raises the request's or a partition's BrokerError."""
        if connection is None:
            response = await settled(self.add_partitions(request, NO_CALLER))
        else:
            response = (await connection.call(request, timeout_ms=ASK_TIMEOUT_MS)).message
        for result in (response, *response.partitions):
            if result.error_code:
                raise broker_error(result.error_code, result.error_message or "")

    async def _connection(self, node_id: int, purpose: str, timeout_ms: int) -> Connection:
        """Return a connection to another broker. Only requests with the same ``purpose`` share the
        connection."""
        if self._authenticator is None:
            raise NotCoordinatorError(f"broker {node_id} is not part of this cluster")
        if self.is_closed:
            raise ShuttingDownError("this broker stops")
        peers = self._peers.get(purpose)
        if peers is None:
            from kafkalite.broker.cluster.peers import PeerConnections

            peers = self._peers[purpose] = PeerConnections(
                lambda: self._controller.image, self._authenticator, f"{purpose}-{self._node_id}"
            )
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await peers.connection(node_id)
        except TimeoutError:
            raise ConnectionFailedError(f"broker {node_id} was not reached within {timeout_ms} ms") from None

    def submit(
        self, transactional_id: str, command: Any, caller: Caller = NO_CALLER, *, hold_ms: int = HOLD_MS
    ) -> Response | Pending:
        """Return the response of the coordinator on this broker to ``command``.

        A response of CONCURRENT_TRANSACTIONS is held for up to ``hold_ms``, and ``command`` is decided again
        when the previous transaction is complete. ``transactional_id`` may also be the application id of a
        transaction group. Raises NotCoordinatorError, CoordinatorLoadInProgressError,
        CoordinatorNotAvailableError.
        """
        response = self._coordinators.transactions(transactional_id).submit(command, caller)
        if not isinstance(response, Pending) and not _is_concurrent(response):
            return response

        def ask() -> Response | Pending:
            try:
                return self._coordinators.transactions(transactional_id).submit(command, caller)
            except BrokerError as error:
                return Refusal(error.code, error.message)

        def release() -> None:
            waiting = self._held[transactional_id]
            del waiting[held]
            if not waiting:
                del self._held[transactional_id]

        held = HeldResponse(
            self._loop, hold_ms, ask, lambda response: not _is_concurrent(response), on_cancel=release
        )
        self._held.setdefault(transactional_id, {})[held] = None
        held.offer(response)
        return held if held.response is None else held.response

    def submit_with_spare_id(
        self, transactional_id: str, make: Callable[[int], Any], caller: Caller, *, hold_ms: int = HOLD_MS
    ) -> HandlerResult:
        """Reserve a producer id, and submit the command that ``make`` returns for it.

        If the command does not use the id, the id is discarded. Raises the same errors as ``submit``, and
        the errors of ``ProducerIds.next``, such as RequestTimedOutError if no id could be reserved in time.
        """
        self._coordinators.transactions(transactional_id)  # raises before an id is reserved
        spare_id = self._producer_ids.take()
        if spare_id is not None:
            return self.submit(transactional_id, make(spare_id), caller, hold_ms=hold_ms)
        return self._submit_later(transactional_id, make, caller, hold_ms)

    async def _submit_later(
        self, transactional_id: str, make: Callable[[int], Any], caller: Caller, hold_ms: int
    ) -> Response:
        spare_id = await self._producer_ids.next()
        return Reply(await settled(self.submit(transactional_id, make(spare_id), caller, hold_ms=hold_ms)))

    def add_partitions(self, request: AddPartitionsToTxnRequest, caller: Caller) -> Response | Pending:
        """Add partitions to a transaction, as their leader requests. Return the response.

        Raises UnknownTopicOrPartitionError if this broker's image lacks a partition: only existing partitions
        are added, so a partition that is missing later has been deleted. Also raises the errors of
        ``submit``.
        """
        topics = self._controller.image.topics
        for topic, partition in request.partitions:
            known = topics.get(topic)
            if known is None or partition >= len(known.partitions):
                raise UnknownTopicOrPartitionError(f"there is no partition {topic}-{partition} here")
        return self.submit(request.transactional_id, request, caller)

    def _on_complete(self, transactional_id: str) -> None:
        for held in self._held.get(transactional_id, ()):
            held.update()

    async def _send_markers(self, node_id: int, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        if node_id == self._node_id:
            response = await settled(self._marker_writer.write(request.markers))
        else:
            connection = await self._connection(node_id, "markers", MARKERS_TIMEOUT_MS)
            response = (await connection.call(request, timeout_ms=MARKERS_TIMEOUT_MS)).message
        assert isinstance(response, WriteTxnMarkersResponse)
        return response


def _is_concurrent(response: Response) -> bool:
    code = response.error_code if isinstance(response, Refusal) else response.message.error_code
    return bool(code == ErrorCode.CONCURRENT_TRANSACTIONS)
