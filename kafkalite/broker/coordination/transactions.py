"""The broker's transaction service: on both sides of a coordinator, wherever that one is.

As a leader of partitions: has the coordinator of a transaction add a partition before the transaction's first
batch goes in (``verify``, R31). As a coordinator: passes commands to the shard that serves the name, lets
one that came too early wait a little until the transaction before it is complete, and has the markers sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.coordination.internal_topics import TRANSACTION, TRANSACTIONS_TOPIC
from kafkalite.broker.coordination.marker_sender import MarkerSender
from kafkalite.broker.coordination.marker_writer import write_markers
from kafkalite.broker.coordination.shard import NO_CALLER, settled
from kafkalite.broker.coordination.verification import Verifications
from kafkalite.broker.server.responses import Answer, Pending, Refusal, Reply
from kafkalite.broker.server.tasks import TaskSet
from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import FINAL, RELOCATE, CallPlan, CallRules, Verdict
from kafkalite.client.cluster.retry import Backoff
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

if TYPE_CHECKING:
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.broker.server.services import Services
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

    def __init__(self, services: Services, tasks: TaskSet) -> None:
        self._services = services
        self._loop = services.waiters.loop
        self._held: dict[str, dict[_Held, None]] = {}
        self._peers: dict[str, PeerConnections] = {}
        self._is_closed = False
        #: Batches that wait for ``verify``.
        self.verifications = Verifications(self.verify, services.partitions, services.clock, tasks)
        self.sender = MarkerSender(
            self._send_markers, lambda: services.controller.image, tasks, self._loop, self._on_complete
        )
        services.coordinators.on_change(TRANSACTION, self.sender.on_change)
        services.coordinators.on_close(TRANSACTION, self.sender.on_close)
        services.controller.publishers.append(self._publish)

    def end(self) -> None:
        """The broker stops: ask no other one any more, and answer what is held."""
        self._is_closed = True
        self.sender.close()
        for held in [one for waiting in self._held.values() for one in waiting]:
            held.expire()

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
            if node_id is None or node_id == self._services.config.node_id:
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
        services = self._services
        partition = services.coordinators.partition_of(TRANSACTION, transactional_id)
        state = services.controller.image.partition(TRANSACTIONS_TOPIC, partition)
        if state is None or state.leader < 0:
            raise CoordinatorNotAvailableError(f"{TRANSACTIONS_TOPIC}-{partition} has no leader now")
        return state.leader

    async def _connection(self, node_id: int, purpose: str, timeout_ms: int) -> Connection:
        """A connection to another broker. Each purpose has its own: responses come in order."""
        services = self._services
        if services.authenticator is None:
            raise NotCoordinatorError(f"broker {node_id} is no part of this cluster")
        if self._is_closed:
            raise ShuttingDownError("this broker stops")
        peers = self._peers.get(purpose)
        if peers is None:
            from kafkalite.broker.cluster.peers import PeerConnections

            client_id = f"{purpose}-{services.config.node_id}"
            peers = self._peers[purpose] = PeerConnections(
                lambda: services.controller.image, services.authenticator, client_id
            )
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await peers.connection(node_id)
        except TimeoutError:
            raise ConnectionFailedError(f"broker {node_id} was not reached within {timeout_ms} ms") from None

    # --- as a coordinator

    def submit(
        self, name: str, command: Any, caller: Caller = NO_CALLER, *, hold_ms: int = HOLD_MS
    ) -> Answer | Pending:
        """The answer to ``command`` of whoever serves ``name`` here: a transactional id, or an application.

        One that would be CONCURRENT_TRANSACTIONS waits up to ``hold_ms`` for the transaction before it to be
        complete. Raises NotCoordinatorError, CoordinatorLoadInProgressError, CoordinatorNotAvailableError.
        """
        shard = self._services.coordinators.transactions(name)
        held = _Held(self, name, command, caller, hold_ms)
        waiting = self._held.setdefault(name, {})
        waiting[held] = None
        answer = shard.submit(command, caller)
        if isinstance(answer, Pending):
            answer.then(held.on_answer)
        else:
            held.on_answer(answer)
        return held.pending.answer if held.pending.answer is not None else held.pending

    def submit_with_spare_id(
        self, name: str, make: Callable[[int], Any], caller: Caller, *, hold_ms: int = HOLD_MS
    ) -> Answer | Pending | Coroutine[Any, Any, Answer]:
        """``submit`` what ``make`` makes of a producer id that nobody has. Raises as ``submit``, and
        RequestTimedOutError when there was no such id in time."""
        services = self._services
        services.coordinators.transactions(name)  # before an id is taken
        spare_id = services.producer_ids.take()
        if spare_id is not None:
            return self.submit(name, make(spare_id), caller, hold_ms=hold_ms)
        return self._submit_later(name, make, caller, hold_ms)

    async def _submit_later(
        self, name: str, make: Callable[[int], Any], caller: Caller, hold_ms: int
    ) -> Answer:
        spare_id = await self._services.producer_ids.next()
        return Reply(await settled(self.submit(name, make(spare_id), caller, hold_ms=hold_ms)))

    def add_partitions(self, request: AddPartitionsToTxnRequest, caller: Caller) -> Answer | Pending:
        """Answer a leader. Raises as ``submit``, and UnknownTopicOrPartitionError.

        A partition this broker has not heard of yet is not taken: one that is missing later was deleted.
        """
        topics = self._services.controller.image.topics
        for topic, partition in request.partitions:
            known = topics.get(topic)
            if known is None or partition >= len(known.partitions):
                raise UnknownTopicOrPartitionError(f"there is no partition {topic}-{partition} here")
        return self.submit(request.transactional_id, request, caller)

    def _on_complete(self, name: str) -> None:
        for held in list(self._held.get(name, ())):
            held.on_complete()

    def forget(self, held: _Held) -> None:
        """``held`` is answered."""
        waiting = self._held.get(held.name)
        if waiting is not None:
            waiting.pop(held, None)
            if not waiting:
                del self._held[held.name]

    def resubmit(self, held: _Held) -> Answer | Pending:
        """The answer now. Never raises."""
        try:
            return self._services.coordinators.transactions(held.name).submit(held.command, held.caller)
        except BrokerError as error:
            return Refusal(error.code, error.message)

    def call_later(self, delay_ms: int, held: _Held) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ms / 1000, held.expire)

    async def _send_markers(self, node_id: int, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
        if node_id == self._services.config.node_id:
            response = await settled(write_markers(self._services, request.markers))
        else:
            connection = await self._connection(node_id, "markers", MARKERS_TIMEOUT_MS)
            response = (await connection.call(request, timeout_ms=MARKERS_TIMEOUT_MS)).message
        assert isinstance(response, WriteTxnMarkersResponse)
        return response


class _Held:
    """A command and its answer to come: asked again when a transaction of its name is complete."""

    __slots__ = (
        "_concurrent",
        "_hold_ms",
        "_is_overtaken",
        "_owner",
        "_timer",
        "caller",
        "command",
        "name",
        "pending",
    )

    def __init__(self, owner: Transactions, name: str, command: Any, caller: Caller, hold_ms: int) -> None:
        self.name = name
        self.command = command
        self.caller = caller
        self.pending = Pending(self._release)
        self._owner = owner
        self._hold_ms = hold_ms
        self._concurrent: Answer | None = None  # the answer, unless there is a better one in time
        self._is_overtaken = False  # complete since it was decided: it would be answered otherwise now
        self._timer: asyncio.TimerHandle | None = None

    def on_answer(self, answer: Answer) -> None:
        if self.pending.is_done:
            return
        if not _is_concurrent(answer) or self._hold_ms <= 0:
            self.pending.resolve(answer)
            return
        self._concurrent = answer
        if self._timer is None:
            self._timer = self._owner.call_later(self._hold_ms, self)
        if self._is_overtaken:
            self._ask_again()

    def on_complete(self) -> None:
        self._is_overtaken = True
        if self._concurrent is not None:
            self._ask_again()

    def _ask_again(self) -> None:
        self._is_overtaken, self._concurrent = False, None
        answer = self._owner.resubmit(self)
        if isinstance(answer, Pending):
            answer.then(self.on_answer)
        else:
            self.on_answer(answer)

    def expire(self) -> None:
        """Waited long enough: tell the client to come back."""
        if self._concurrent is not None:
            self.pending.resolve(self._concurrent)
        else:
            self._hold_ms = 0  # the answer that is on its way is the last one

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._owner.forget(self)


def _is_concurrent(answer: Answer) -> bool:
    code = answer.error_code if isinstance(answer, Refusal) else answer.message.error_code
    return bool(code == ErrorCode.CONCURRENT_TRANSACTIONS)


def _check(response: Any) -> None:
    """Raises the BrokerError that the coordinator told, of the request or of a partition."""
    if response.error_code:
        raise broker_error(response.error_code, response.error_message or "")
    for result in response.partitions:
        if result.error_code:
            raise broker_error(result.error_code, result.error_message or "")
