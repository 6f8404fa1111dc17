"""The broker's transaction service: on both sides of a coordinator, wherever that one is.

As a leader of partitions: has the coordinator of a transaction add a partition before the transaction's first
batch goes in (``verify``, R31). As a coordinator: passes commands to the shard that serves the name, lets
one that came too early wait a little until the transaction before it is complete, and has the markers sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.coordination.coordinators import Coordinators
from kafkalite.broker.coordination.internal_topics import TRANSACTION, TRANSACTIONS_TOPIC
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
from kafkalite.broker.server.tasks import TaskSet
from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import FINAL, RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.retry import Backoff
from kafkalite.clock import Clock
from kafkalite.coordination import Caller
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
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    TxnPartition,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from kafkalite.raft.controller_node import ControllerNode

if TYPE_CHECKING:
    from kafkalite.broker.cluster.authentication import Authenticator
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.client.cluster.connection import Connection
    from kafkalite.metadata.delta import Delta
    from kafkalite.metadata.image import ClusterImage

#: How long a leader looks for a coordinator that answers; after that the producer is told to try again.
VERIFY_TIMEOUT_MS: Final = 3_000
#: How long it waits for the transaction before to be complete (Kafka's add.partitions.to.txn.retry).
CONCURRENT_TIMEOUT_MS: Final = 500
VERIFY_BACKOFF: Final = Backoff(5, 100)
#: Of one question to another broker.
ASK_TIMEOUT_MS: Final = 1_500
MARKERS_TIMEOUT_MS: Final = 3_000
#: How long a coordinator holds a command that came before the last transaction is complete. Short where the
#: answers of other transactions wait behind it.
HOLD_MS: Final = 50

#: Another broker may coordinate, or the same one soon.
_ELSEWHERE: Final = (
    NotCoordinatorError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    RequestTimedOutError,
    ShuttingDownError,
    ClusterAuthorizationFailedError,
    ClientError,
    ProtocolError,  # a broker of an earlier version, which does not know what it is asked
)

#: The transaction before is not complete yet, or the coordinator does not know the partition yet.
_WAITS: Final = (ConcurrentTransactionsError, UnknownTopicOrPartitionError)


class Transactions:
    """One broker's. Follows the coordinators of transactions that it hosts."""

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
        """``authenticator`` None: this broker is a cluster of its own."""
        self._node_id = node_id
        self._loop = loop
        self._controller = controller
        self._coordinators = coordinators
        self._producer_ids = producer_ids
        self._marker_writer = marker_writer
        self._authenticator = authenticator
        self._held: dict[str, dict[HeldResponse, None]] = {}  # by transactional id
        self._peers: dict[str, PeerConnections] = {}
        self._is_closed = False
        #: Batches that wait for ``verify``.
        self.verifications = Verifications(self.verify, partitions, clock, tasks)
        self.sender = MarkerSender(
            self._send_markers, lambda: controller.image, tasks, loop, self._on_complete
        )
        coordinators.on_change(TRANSACTION, self.sender.on_change)
        coordinators.on_close(TRANSACTION, self.sender.on_close)
        controller.publishers.append(self._publish)

    def end(self) -> None:
        """The broker stops: ask no other one any more, and answer what is held."""
        self._is_closed = True
        self.sender.close()
        for held in [one for waiting in self._held.values() for one in waiting]:
            held.finish()

    async def close(self) -> None:
        """``end``, and leave the other brokers alone."""
        self.end()
        for peers in self._peers.values():
            await peers.close()

    def _publish(self, _delta: Delta, image: ClusterImage) -> None:
        self.sender.on_image(image)

    # --- as a leader of partitions

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
    ) -> None:
        """Return when the transaction's end will reach ``partitions``: the coordinator has added them.

        Raises what the coordinator refuses with, and retriable errors alone where it is not known (R30):
        ConcurrentTransactionsError while the transaction before is not complete, CoordinatorNotAvailableError
        when no coordinator answered in time.
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
            CallRules(self._judge, VERIFY_BACKOFF),
            now_ms=int(self._loop.time() * 1000),
            timeout_ms=VERIFY_TIMEOUT_MS,
            timeout_error=timeout_error,
        )

        async def locate() -> int:
            return self._coordinator_of(transactional_id)

        async def dial(node_id: int | None) -> Connection | None:
            """The connection to the coordinator; None if this broker is the coordinator."""
            if node_id is None or node_id == self._node_id:
                return None
            return await self._connection(node_id, "verify", ASK_TIMEOUT_MS)

        async def send(connection: Connection | None, _timeout_ms: int) -> None:
            if connection is None:
                _check(await settled(self.add_partitions(request, NO_CALLER)))
            else:
                _check((await connection.call(request, timeout_ms=ASK_TIMEOUT_MS)).message)

        await drive(plan, locate=locate, dial=dial, send=send)

    def _judge(self, error: KafkaliteError) -> Verdict:
        """How ``verify`` goes on after an error of its coordinator."""
        if isinstance(error, _WAITS):
            return Verdict(must_locate=True, limit_ms=0 if self._is_closed else CONCURRENT_TIMEOUT_MS)
        if isinstance(error, _ELSEWHERE):
            return Verdict(must_locate=True, limit_ms=0) if self._is_closed else RELOCATE
        return FINAL

    def _coordinator_of(self, transactional_id: str) -> int:
        """Return the node that coordinates the transactional id. Raises CoordinatorNotAvailableError."""
        partition = self._coordinators.partition_of(TRANSACTION, transactional_id)
        state = self._controller.image.partition(TRANSACTIONS_TOPIC, partition)
        if state is None or state.leader < 0:
            raise CoordinatorNotAvailableError(f"{TRANSACTIONS_TOPIC}-{partition} has no leader now")
        return state.leader

    async def _connection(self, node_id: int, purpose: str, timeout_ms: int) -> Connection:
        """A connection to another broker. Each purpose has its own: responses come in order."""
        if self._authenticator is None:
            raise NotCoordinatorError(f"broker {node_id} is no part of this cluster")
        if self._is_closed:
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

    # --- as a coordinator

    def submit(
        self, transactional_id: str, command: Any, caller: Caller = NO_CALLER, *, hold_ms: int = HOLD_MS
    ) -> Response | Pending:
        """Return the response to ``command`` of the coordinator of ``transactional_id`` on this broker.

        A response CONCURRENT_TRANSACTIONS is held for up to ``hold_ms``, and the command decided again when
        the previous transaction is complete. ``transactional_id`` may also name an application, whose
        transaction groups have the same coordinator. Raises NotCoordinatorError,
        CoordinatorLoadInProgressError, CoordinatorNotAvailableError.
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
        self,
        transactional_id: str,
        make: Callable[[int], Any],
        caller: Caller,
        *,
        hold_ms: int = HOLD_MS,
    ) -> HandlerResult:
        """Submit the command that ``make`` returns for a reserved producer id.

        If the command does not use the id, it is discarded. Raises as ``submit``, and RequestTimedOutError if
        no id could be reserved in time.
        """
        self._coordinators.transactions(transactional_id)  # before an id is reserved
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
        """Respond to the leader of partitions. Raises as ``submit``, and UnknownTopicOrPartitionError.

        A partition that is not in this broker's metadata yet is refused: one that is missing later was
        deleted.
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


def _check(response: Any) -> None:
    """Raises the BrokerError that the coordinator told, of the request or of a partition."""
    if response.error_code:
        raise broker_error(response.error_code, response.error_message or "")
    for result in response.partitions:
        if result.error_code:
            raise broker_error(result.error_code, result.error_message or "")
