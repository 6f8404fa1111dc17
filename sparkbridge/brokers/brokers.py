"""The brokers of one cluster as a blocking client sees them: connections, who leads what, and trying again.

One connection per address, made when it is first needed. What may pass (a leader that moved, a connection
that broke, a broker that is away) is tried again with growing pauses and fresh metadata until
request.timeout.ms; what will not pass is raised at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.client.cluster.call_plan import (
    CallPlan,
    CallRules,
    Dial,
    GiveUp,
    Locate,
    Pause,
    judge_broker_error,
)
from kafkalite.client.cluster.retry import Backoff, is_retriable
from kafkalite.client.cluster.routing import NO_NODE, MetadataCache
from kafkalite.errors import (
    ConnectionFailedError,
    KafkaliteError,
    LeaderNotAvailableError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.model import IsolationLevel, TopicPartition
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.rng import system_rng
from sparkbridge.brokers.connection import Reply, WireConnection

if TYPE_CHECKING:
    from sparkbridge.options import ClientOptions

T = TypeVar("T")

# Unless kafka.retry.backoff.ms, kafka.retry.backoff.max.ms and kafka.socket.connection.setup.timeout.ms say
# otherwise. A connection that takes longer is given up for this attempt: the host may be gone.
RETRY_BACKOFF_MS: Final = 20
RETRY_BACKOFF_MAX_MS: Final = 500
CONNECT_TIMEOUT_MS: Final = 5_000

# Of several brokers, the next is asked when one has not answered a question that any can answer.
STAGGER_S: Final = 1.0

# A leader that leaves a request unanswered for so long may be dead without having hung up.
PATIENCE_S: Final = 2.0

# After so many failures in a row whoever was asked before may be cut off: any other may know better.
_PATIENT_FAILURES: Final = 3

# Of several brokers one may not have heard yet of a topic that was just made.
MISSING_TOPIC_GRACE_S: Final = 1.0


class Brokers:
    """For one user at a time."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.metadata = MetadataCache()
        self._bootstrap = [part.strip() for part in options.bootstrap_servers.split(",") if part.strip()]
        self._connections: dict[str, WireConnection] = {}
        self._rng = system_rng()
        settings = options.consumer
        backoff = Backoff(
            int(settings.get("retry.backoff.ms", RETRY_BACKOFF_MS)),
            int(settings.get("retry.backoff.max.ms", RETRY_BACKOFF_MAX_MS)),
        )
        self._rules = CallRules(judge_broker_error, backoff, has_free_retry=True)
        connect_ms = int(settings.get("socket.connection.setup.timeout.ms", CONNECT_TIMEOUT_MS))
        self._connect_timeout_s = connect_ms / 1000
        level = (
            IsolationLevel.READ_COMMITTED if options.is_read_committed else IsolationLevel.READ_UNCOMMITTED
        )
        self.isolation_level = int(level)
        #: By address, what went wrong there during the present call.
        self._tried: dict[str, str] = {}
        self._turn = 0  #: whom to ask first of those that are equally near; another after each failure
        self._failures = 0  #: of the present call
        self._told_by = ""  #: who answered last what anybody can answer
        self._doubted: set[str] = set()  #: whom to ask so only when there is nobody else

    def __repr__(self) -> str:
        return f"<Brokers {', '.join(self._addresses())}, {len(self._connections)} connections>"

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Close every connection; the next call opens new ones."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    # --- trying again --------------------------------------------------------------------------

    def deadline_s(self, extra_ms: int = 0) -> float:
        """When a call that begins now gives up: in request.timeout.ms, and ``extra_ms`` later."""
        return time.monotonic() + (self.options.request_timeout_ms + extra_ms) / 1000

    def until_answered(
        self,
        what: str,
        tps: Collection[TopicPartition],
        attempt: Callable[[float], T],
        *,
        extra_ms: int = 0,
    ) -> T:
        """What ``attempt(deadline_s)`` returns. It may be called many times, and does what is left to do.

        ``tps`` are the partitions whose leaders it needs.
        Raises what will not pass at once; otherwise ConnectionFailedError or RequestTimeoutError, which say
        what was tried where.
        """
        started_s = time.monotonic()
        deadline_s = self.deadline_s(extra_ms)
        self._tried = {}
        self._failures = 0
        plan = CallPlan(
            self._rules,
            now_ms=0,
            timeout_ms=int((deadline_s - started_s) * 1000),
            is_located=True,
            timeout_error=lambda last: self._given_up(what, last, started_s),
        )
        last: KafkaliteError | None = None
        while True:
            step = plan.next_step(int((time.monotonic() - started_s) * 1000))
            if isinstance(step, Locate):
                assert last is not None, "the leaders are looked up only after a failure"
                self._refresh_after(last, tps, started_s, deadline_s)
                plan.located()
            elif isinstance(step, Dial):
                plan.connected()  # ``attempt`` opens the connections that it needs
            elif isinstance(step, Pause):
                time.sleep(step.duration_ms / 1000)
                plan.wake()
            elif isinstance(step, GiveUp):
                raise step.error
            else:
                try:
                    return attempt(deadline_s)
                except KafkaliteError as error:
                    last = error
                    self._failures += 1
                    self._turn += 1
                    plan.failed(error, int((time.monotonic() - started_s) * 1000), self._rng.random())

    def _refresh_after(
        self, error: KafkaliteError, tps: Collection[TopicPartition], started_s: float, deadline_s: float
    ) -> None:
        """Ask who leads now. Raises ``error`` when it tells of a topic that is really not there."""
        topics = {tp.topic for tp in tps}
        try:
            self.refresh(topics, deadline_s)
        except KafkaliteError as failure:
            if not is_retriable(failure):
                raise
            return
        if isinstance(error, UnknownTopicOrPartitionError):
            is_missing = not all(map(self.metadata.knows, tps))
            is_final = is_missing and len(self.metadata.addresses) == 1
            if is_final or time.monotonic() - started_s >= MISSING_TOPIC_GRACE_S:
                raise error
        for topic in topics:
            fatal = self.metadata.fatal_error(topic)
            if fatal is not None:
                raise broker_error(*fatal, about=f"topic {topic!r}")

    def _given_up(self, what: str, error: KafkaliteError, started_s: float) -> KafkaliteError:
        after_ms = int((time.monotonic() - started_s) * 1000)
        tried = "; ".join(f"{address}: {why}" for address, why in self._tried.items())
        message = f"{what} came to nothing within {after_ms} ms: {tried or error.message}"
        if isinstance(error, ConnectionFailedError):
            return ConnectionFailedError(
                message, hint="is a broker running there? Check kafka.bootstrap.servers and any firewall"
            )
        return RequestTimeoutError(
            message, hint="raise kafka.request.timeout.ms if the brokers are only slow"
        )

    def patient_until_s(self, deadline_s: float, patience_s: float) -> float:
        """Until when to wait for somebody whom another may replace; a lone broker has all the time."""
        if len(self._addresses()) < 2:
            return deadline_s
        return min(deadline_s, time.monotonic() + patience_s)

    def blame(self, address: str, error: KafkaliteError) -> None:
        """Remember what went wrong at ``address`` for the message of a call that comes to nothing."""
        self._tried[address] = error.message

    # --- connections ---------------------------------------------------------------------------

    def connection(self, address: str, deadline_s: float) -> WireConnection:
        """The open connection to ``address``, or a new one. Raises ConnectionFailedError."""
        connection = self._connections.get(address)
        if connection is not None:
            if connection.is_open and not connection.is_stale:
                return connection
            connection.close()
            del self._connections[address]
        connection = self.dial(address, deadline_s)
        self._connections[address] = connection
        return connection

    def dial(self, address: str, deadline_s: float) -> WireConnection:
        """A connection of its own, which whoever asked for it closes. Raises ConnectionFailedError."""
        deadline_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        try:
            return WireConnection.open(address, client_id=self.options.client_id, deadline_s=deadline_s)
        except KafkaliteError as error:
            self.blame(address, error)
            raise

    def address(self, node_id: int) -> str:
        """Where a broker listens. Raises LeaderNotAvailableError when the metadata does not know it."""
        address = self.metadata.addresses.get(node_id)
        if address is None:
            raise LeaderNotAvailableError(f"broker {node_id} is not in the cluster's metadata")
        return address

    def _addresses(self) -> list[str]:
        """Known brokers, then those to begin with."""
        return list(dict.fromkeys((*self.metadata.addresses.values(), *self._bootstrap)))

    def ask_anybody(self, message: Any, deadline_s: float, *, but: Collection[str] = ()) -> Reply:
        """The answer of the first broker that gives one in good time, connected ones first.

        Raises the last error when none does; ``but`` are not asked.
        """
        addresses = [address for address in self._addresses() if address not in but]
        if not addresses:
            raise ConnectionFailedError("there is no other broker to ask")
        turn = self._turn % len(addresses)
        addresses = addresses[turn:] + addresses[:turn]
        if self._failures < _PATIENT_FAILURES:
            addresses.sort(key=self._distance)
        addresses.sort(key=self._doubted.__contains__)
        last: KafkaliteError | None = None
        for address in addresses:
            limit_s = self.patient_until_s(deadline_s, STAGGER_S * (1 + self._failures))
            try:
                reply = self.connection(address, limit_s).call(message, limit_s)
            except KafkaliteError as error:
                self.blame(address, error)
                last = error
                if not is_retriable(error):
                    raise
            else:
                self._told_by = address
                return reply
        assert last is not None, "somebody was asked"
        raise last

    def _distance(self, address: str) -> int:
        """0 for an idle connection, 1 for one not made yet, 2 for one with others' answers before ours."""
        connection = self._connections.get(address)
        if connection is None or not connection.is_open:
            return 1
        return 2 if connection.in_flight else 0

    # --- metadata ------------------------------------------------------------------------------

    def refresh(
        self, topics: Collection[str] | None, deadline_s: float, *, but: Collection[str] = ()
    ) -> None:
        """Learn brokers and leaders of ``topics`` (None: of all) anew. Raises KafkaliteError."""
        request = MetadataRequest(None if topics is None else sorted(topics), False)
        reply = self.ask_anybody(request, deadline_s, but=but)
        self.metadata.update(reply.message, complete=topics is None)

    def doubt(self) -> None:
        """Have the next questions that anybody can answer asked of others than whoever answered the last."""
        self._doubted.add(self._told_by)
        if self._doubted.issuperset(self._addresses()):
            self._doubted.clear()
            self._turn += 1

    def leader(self, tp: TopicPartition, deadline_s: float) -> tuple[str, int]:
        """(address of the leader, its epoch), from the cache if it is there.

        Raises UnknownTopicOrPartitionError, LeaderNotAvailableError.
        """
        if not self.metadata.knows(tp):
            self.refresh([tp.topic], deadline_s)
            self._check_known(tp)
        found = self.metadata.leader(tp)
        if found.node_id == NO_NODE:
            raise LeaderNotAvailableError(f"{tp} has no leader")
        return self.address(found.node_id), found.leader_epoch

    def _check_known(self, tp: TopicPartition) -> None:
        if self.metadata.knows(tp):
            return
        fatal = self.metadata.fatal_error(tp.topic)
        if fatal is not None:
            raise broker_error(*fatal, about=f"topic {tp.topic!r}")
        count = self.metadata.partition_count(tp.topic)
        if count is None:
            raise UnknownTopicOrPartitionError(f"there is no topic {tp.topic!r}")
        raise UnknownTopicOrPartitionError(
            f"{tp.topic!r} has partitions 0 to {count - 1}, not {tp.partition}"
        )

    # --- leaders -------------------------------------------------------------------------------

    def receive(
        self,
        connection: WireConnection,
        reply: Reply,
        tp: TopicPartition,
        deadline_s: float,
        *,
        extra_ms: int = 0,
    ) -> Reply:
        """The answer of ``tp``'s leader, which is left when it does not answer and the others name another.

        ``extra_ms`` is how long the leader may hold the answer by itself. Raises as WireConnection.receive.
        """
        patience_s = PATIENCE_S + extra_ms / 1000
        while not connection.wait(reply, min(deadline_s, time.monotonic() + patience_s)):
            if time.monotonic() >= deadline_s or self._has_moved(connection, tp, deadline_s):
                break
        try:
            return connection.receive(reply, time.monotonic())
        except KafkaliteError as error:
            self.blame(connection.address, error)
            raise

    def _has_moved(self, connection: WireConnection, tp: TopicPartition, deadline_s: float) -> bool:
        try:
            self.refresh([tp.topic], deadline_s, but=[connection.address])
            return self.leader(tp, deadline_s)[0] != connection.address
        except KafkaliteError:
            return False

    def ask_leaders(
        self,
        what: str,
        wanted: Iterable[TopicPartition],
        request_of: Callable[[Sequence[tuple[TopicPartition, int]]], Any],
    ) -> dict[TopicPartition, list[Any]]:
        """Ask each leader once for all it leads, all leaders at once, until each partition is answered.

        ``request_of`` makes a request of (partition, leader epoch) pairs; its answer has ``partitions``, each
        with topic, partition and error code. Returns the answers of each partition, as many as were asked.
        """
        found: dict[TopicPartition, list[Any]] = {}
        wanted = list(dict.fromkeys(wanted))

        def attempt(deadline_s: float) -> None:
            missing = [tp for tp in wanted if tp not in found]
            error = self._ask_round(missing, request_of, found, deadline_s)
            if error is None and len(found) < len(wanted):
                error = LeaderNotAvailableError("a broker left partitions out of its answer")
            if error is not None:
                raise error

        self.until_answered(what, wanted, attempt)
        return {tp: found[tp] for tp in wanted}

    def _ask_round(
        self,
        missing: Sequence[TopicPartition],
        request_of: Callable[[Sequence[tuple[TopicPartition, int]]], Any],
        found: dict[TopicPartition, list[Any]],
        deadline_s: float,
    ) -> KafkaliteError | None:
        """One round: what is answered goes into ``found``; returns an error if anything is not."""
        error: KafkaliteError | None = None
        by_address: dict[str, list[tuple[TopicPartition, int]]] = {}
        for tp in missing:
            try:
                address, leader_epoch = self.leader(tp, deadline_s)
            except LeaderNotAvailableError as failure:
                error = failure
                continue
            by_address.setdefault(address, []).append((tp, leader_epoch))
        sent: list[tuple[WireConnection, Reply, TopicPartition]] = []
        for address, asked in by_address.items():
            try:
                connection = self.connection(address, deadline_s)
                sent.append((connection, connection.send(request_of(asked), deadline_s), asked[0][0]))
            except KafkaliteError as failure:
                self.blame(address, failure)
                error = failure
        for connection, reply, tp in sent:
            try:
                self.receive(connection, reply, tp, deadline_s)
            except KafkaliteError as failure:
                error = failure
                continue
            error = _take(reply.message.partitions, found) or error
        return error


def _take(answers: Iterable[Any], found: dict[TopicPartition, list[Any]]) -> KafkaliteError | None:
    """Put the answers without an error into ``found``. Returns an error of the rest, a lasting one if any."""
    error: KafkaliteError | None = None
    refused: set[TopicPartition] = set()
    taken: dict[TopicPartition, list[Any]] = {}
    for answer in answers:
        tp = TopicPartition(answer.topic, answer.partition)
        if answer.error_code == 0:
            taken.setdefault(tp, []).append(answer)
            continue
        refused.add(tp)
        failure = broker_error(answer.error_code, answer.error_message or "", about=str(tp))
        if error is None or not is_retriable(failure):
            error = failure
    found.update({tp: list_ for tp, list_ in taken.items() if tp not in refused})
    return error
