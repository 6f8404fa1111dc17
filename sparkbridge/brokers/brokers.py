"""The brokers of one cluster for a blocking client: connections, leaders, and retries.

There is one connection per address, opened on first use; ``dial`` opens additional ones. ``until_answered``
retries retriable errors (a leader that moved, a broken connection, an unreachable broker) with growing pauses
until request.timeout.ms has passed. ``kafkalite.client.cluster.call_plan`` plans its steps.
"""

# Tests: tests/sparkbridge/test_failover.py

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.client.cluster.call_plan import (
    FINAL,
    CallPlan,
    CallRules,
    Dial,
    GiveUp,
    Locate,
    Pause,
    Send,
    Verdict,
    judge_broker_error,
)
from kafkalite.client.cluster.retry import Backoff, is_retriable
from kafkalite.client.cluster.routing import NO_NODE, MetadataCache
from kafkalite.client.config import admin_config
from kafkalite.errors import (
    AuthenticationError,
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
from sparkbridge.brokers.connection import BrokerConnection, Reply
from sparkbridge.options import ClientOptions

if TYPE_CHECKING:
    from kafkalite.client.cluster.security import ConnectionSecurity

T = TypeVar("T")

# Defaults of kafka.retry.backoff.ms, kafka.retry.backoff.max.ms and kafka.socket.connection.setup.timeout.ms.
RETRY_BACKOFF_MS: Final = 20
RETRY_BACKOFF_MAX_MS: Final = 500
CONNECT_TIMEOUT_MS: Final = 5_000

# If a broker does not respond to a request that any broker can serve within this time, the request is sent to
# the next broker.
STAGGER_S: Final = 1.0

# If a leader does not respond within this time, it may be dead: the other brokers are asked for the leader.
PATIENCE_S: Final = 2.0

# After this many failures in a row, connected brokers are no longer preferred: they may be partitioned from
# the cluster.
_PATIENT_FAILURES: Final = 3

# In a cluster of several brokers, some may not have the metadata yet of a topic that was just created.
MISSING_TOPIC_GRACE_MS: Final = 1_000


def _now_ms() -> int:
    return int(time.monotonic() * 1000)


class Brokers:
    """Owns the connections to the brokers and the metadata of the cluster. Serves one caller at a time."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.metadata = MetadataCache()
        self._bootstrap = [part.strip() for part in options.bootstrap_servers.split(",") if part.strip()]
        self._connections: dict[str, BrokerConnection] = {}
        self._rng = system_rng()
        settings = options.consumer
        backoff = Backoff(
            int(settings.get("retry.backoff.ms", RETRY_BACKOFF_MS)),
            int(settings.get("retry.backoff.max.ms", RETRY_BACKOFF_MAX_MS)),
        )
        self._rules = CallRules(self._judge, backoff, has_free_retry=True)
        connect_ms = int(settings.get("socket.connection.setup.timeout.ms", CONNECT_TIMEOUT_MS))
        self._connect_timeout_s = connect_ms / 1000
        self._security: ConnectionSecurity | None = None
        if options.security:
            from kafkalite.client.cluster.security import ConnectionSecurity  # ssl, which others do not need

            config = admin_config({"bootstrap.servers": self._bootstrap, **options.security})
            self._security = ConnectionSecurity(config)
        level = (
            IsolationLevel.READ_COMMITTED if options.is_read_committed else IsolationLevel.READ_UNCOMMITTED
        )
        self.isolation_level = int(level)
        #: The last error of each broker in the current call, by address; see ``record_failure``.
        self._errors: dict[str, KafkaliteError] = {}
        self._failures = 0  #: the number of failures in the current call
        self._turn = 0  #: rotates the order in which ``ask_any`` tries the brokers; grows with each failure
        self._last_responder = ""  #: the last broker that responded to a request that any broker can serve
        self._avoided: set[str] = set()  #: brokers that ``ask_any`` tries last

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

    def _judge(self, error: KafkaliteError) -> Verdict:
        """Return the verdict of ``judge_broker_error``, with two exceptions.

        A missing topic is retried only for MISSING_TOPIC_GRACE_MS. An AuthenticationError is final until a
        broker has sent metadata.
        """
        if isinstance(error, UnknownTopicOrPartitionError):
            return Verdict(must_locate=True, limit_ms=MISSING_TOPIC_GRACE_MS)
        if isinstance(error, AuthenticationError) and not self.metadata.addresses:
            return FINAL
        return judge_broker_error(error)

    def deadline_s(self, extra_ms: int = 0) -> float:
        """Return the monotonic time, in seconds, that is request.timeout.ms plus ``extra_ms`` from now."""
        return time.monotonic() + (self.options.request_timeout_ms + extra_ms) / 1000

    def until_answered(
        self, what: str, tps: Collection[TopicPartition], attempt: Callable[[float], T], *, extra_ms: int = 0
    ) -> T:
        """Call ``attempt(deadline_s)`` until it succeeds, and return its result.

        The deadline is request.timeout.ms plus ``extra_ms`` from now. Each retry is preceded by a refresh of
        the metadata of ``tps``, except the first retry after an error that metadata cannot explain. ``what``
        names the call in errors.

        Raises permanent errors at once. At the deadline, raises ConnectionFailedError or RequestTimeoutError
        with the last error of each broker that failed. If a topic or partition stays missing, raises
        UnknownTopicOrPartitionError after MISSING_TOPIC_GRACE_MS, or at once in a cluster of one broker.
        """
        started_s = time.monotonic()
        deadline_s = self.deadline_s(extra_ms)
        self._errors = {}
        self._failures = 0
        plan = CallPlan(
            self._rules,
            now_ms=_now_ms(),
            timeout_ms=self.options.request_timeout_ms + extra_ms,
            is_located=True,
            timeout_error=lambda error: self._timeout_error(what, error, started_s),
        )
        last: KafkaliteError | None = None
        while True:
            step = plan.next_step(_now_ms())
            match step:
                case Locate():
                    assert last is not None, "the metadata is refreshed after a failure"
                    self._refresh_after(last, tps, deadline_s)
                    plan.located()
                case Dial():
                    plan.connected()
                case Pause():
                    time.sleep(step.duration_ms / 1000)
                    plan.wake()
                case GiveUp():
                    raise step.error
                case Send():
                    try:
                        return attempt(deadline_s)
                    except KafkaliteError as error:
                        last = error
                        self._turn += 1
                        plan.failed(error, _now_ms(), self._rng.random())
                        self._failures = plan.failures

    def _refresh_after(
        self, error: KafkaliteError, tps: Collection[TopicPartition], deadline_s: float
    ) -> None:
        """Refresh the metadata of ``tps`` after ``error``. Raises an error if a retry would be useless."""
        topics = {tp.topic for tp in tps}
        try:
            self.refresh(topics, deadline_s)
        except KafkaliteError as failure:
            if not is_retriable(failure):
                raise
            return
        is_missing = isinstance(error, UnknownTopicOrPartitionError) and not all(
            map(self.metadata.knows, tps)
        )
        if is_missing and len(self.metadata.addresses) == 1:
            raise error
        for topic in topics:
            fatal = self.metadata.fatal_error(topic)
            if fatal is not None:
                raise broker_error(*fatal, about=f"topic {topic!r}")

    def _timeout_error(self, what: str, error: KafkaliteError, started_s: float) -> KafkaliteError:
        if isinstance(error, UnknownTopicOrPartitionError):
            return error
        after_ms = int((time.monotonic() - started_s) * 1000)
        tried = "; ".join(f"{address}: {why.message}" for address, why in self._errors.items())
        message = f"{what} failed for {after_ms} ms: {tried or error.message}"
        for refusal in self._errors.values():
            if isinstance(refusal, AuthenticationError):
                return type(refusal)(message, hint=refusal.hint)
        if isinstance(error, ConnectionFailedError):
            return ConnectionFailedError(
                message, hint="is a broker running there? Check kafka.bootstrap.servers and any firewall"
            )
        return RequestTimeoutError(
            message, hint="raise kafka.request.timeout.ms if the brokers are only slow"
        )

    def patient_until_s(self, deadline_s: float, patience_s: float) -> float:
        """Return when to stop waiting for one broker, on the monotonic clock.

        This is ``deadline_s`` or, if there are other brokers to try, at most ``patience_s`` from now.
        """
        if len(self._addresses()) < 2:
            return deadline_s
        return min(deadline_s, time.monotonic() + patience_s)

    def record_failure(self, address: str, error: KafkaliteError) -> None:
        """Record the failure of a broker for the error message of a call that times out.

        A later error does not replace an AuthenticationError: it may be a mere timeout at the deadline.
        """
        if not isinstance(self._errors.get(address), AuthenticationError):
            self._errors[address] = error

    # --- connections ---------------------------------------------------------------------------

    def connection(self, address: str, deadline_s: float) -> BrokerConnection:
        """Return the open connection to ``address``, or a new one. Raises the same errors as ``dial``."""
        connection = self._connections.get(address)
        if connection is not None:
            if connection.is_open and not connection.is_stale:
                return connection
            connection.close()
            del self._connections[address]
        connection = self.dial(address, deadline_s)
        self._connections[address] = connection
        return connection

    def dial(self, address: str, deadline_s: float) -> BrokerConnection:
        """Return a new connection, which the caller must close.

        Raises the errors of ``BrokerConnection.open``.
        """
        deadline_s = min(deadline_s, time.monotonic() + self._connect_timeout_s)
        try:
            return BrokerConnection.open(
                address, client_id=self.options.client_id, deadline_s=deadline_s, security=self._security
            )
        except KafkaliteError as error:
            self.record_failure(address, error)
            raise

    def address(self, node_id: int) -> str:
        """Return the address of a broker. Raises LeaderNotAvailableError if it is not in the metadata."""
        address = self.metadata.addresses.get(node_id)
        if address is None:
            raise LeaderNotAvailableError(f"broker {node_id} is not in the cluster's metadata")
        return address

    def _addresses(self) -> list[str]:
        """Return the addresses of the brokers in the metadata, followed by the bootstrap servers."""
        return list(dict.fromkeys((*self.metadata.addresses.values(), *self._bootstrap)))

    def ask_any(self, message: Any, deadline_s: float, *, excluding: Collection[str] = ()) -> Reply:
        """Send the request to one broker after another until one succeeds, and return its response.

        Skips the addresses in ``excluding``. Raises permanent errors at once. If every broker fails, raises
        the last error. If there is no broker to ask, raises ConnectionFailedError.
        """
        addresses = [address for address in self._addresses() if address not in excluding]
        if not addresses:
            raise ConnectionFailedError("there is no other broker to ask")
        turn = self._turn % len(addresses)
        addresses = addresses[turn:] + addresses[:turn]
        if self._failures < _PATIENT_FAILURES:
            addresses.sort(key=self._distance)
        addresses.sort(key=self._avoided.__contains__)
        last: KafkaliteError | None = None
        for address in addresses:
            limit_s = self.patient_until_s(deadline_s, STAGGER_S * (1 + self._failures))
            try:
                reply = self.connection(address, limit_s).call(message, limit_s)
            except KafkaliteError as error:
                self.record_failure(address, error)
                last = error
                if self._judge(error).is_final:
                    raise
            else:
                self._last_responder = address
                return reply
        assert last is not None, "at least one broker was asked"
        raise last

    def _distance(self, address: str) -> int:
        """Return a sort key: 0 for an idle connection, 1 for no open one, 2 if requests are in flight."""
        connection = self._connections.get(address)
        if connection is None or not connection.is_open:
            return 1
        return 2 if connection.in_flight else 0

    # --- metadata ------------------------------------------------------------------------------

    def refresh(
        self, topics: Collection[str] | None, deadline_s: float, *, excluding: Collection[str] = ()
    ) -> None:
        """Fetch the metadata of ``topics`` (None: all topics). Raises the same errors as ``ask_any``."""
        request = MetadataRequest(None if topics is None else sorted(topics), False)
        reply = self.ask_any(request, deadline_s, excluding=excluding)
        self.metadata.update(reply.message, complete=topics is None)

    def avoid_last_responder(self) -> None:
        """Let ``ask_any`` try the last responder last. Start over when this applies to every broker."""
        self._avoided.add(self._last_responder)
        if self._avoided.issuperset(self._addresses()):
            self._avoided.clear()
            self._turn += 1

    def leader(self, tp: TopicPartition, deadline_s: float) -> tuple[str, int]:
        """Return (the leader's address, leader epoch) of ``tp``, from the cache if possible.

        Raises UnknownTopicOrPartitionError, LeaderNotAvailableError, the BrokerError of a topic that cannot
        be used, and the errors of ``refresh``.
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
        connection: BrokerConnection,
        reply: Reply,
        tp: TopicPartition,
        deadline_s: float,
        *,
        extra_ms: int = 0,
    ) -> Reply:
        """Wait for the leader's response about ``tp`` and return ``reply``.

        The leader may hold the response for up to ``extra_ms``. Raises the same errors as
        ``BrokerConnection.receive``. Raises RequestTimeoutError at ``deadline_s``, or earlier if another
        broker reports a new leader while there is no response.
        """
        patience_s = PATIENCE_S + extra_ms / 1000
        while not connection.wait(reply, min(deadline_s, time.monotonic() + patience_s)):
            if time.monotonic() >= deadline_s or self._has_moved(connection, tp, deadline_s):
                break
        try:
            return connection.receive(reply, time.monotonic())
        except KafkaliteError as error:
            self.record_failure(connection.address, error)
            raise

    def _has_moved(self, connection: BrokerConnection, tp: TopicPartition, deadline_s: float) -> bool:
        try:
            self.refresh([tp.topic], deadline_s, excluding=[connection.address])
            return self.leader(tp, deadline_s)[0] != connection.address
        except KafkaliteError:
            return False

    def ask_leaders(
        self,
        what: str,
        wanted: Iterable[TopicPartition],
        entries_of: Callable[[TopicPartition, int], list[Any]],
        request_of: Callable[[list[Any]], Any],
    ) -> dict[TopicPartition, list[Any]]:
        """Send requests to the leaders in parallel. Retry the partitions whose response has an error.

        ``entries_of(partition, leader epoch)`` returns the request entries of a partition, and ``request_of``
        makes a request from entries. If a partition has several entries, its leader gets several requests,
        because a request names each partition once (S23). A response must have ``partitions``, a list of
        entries with topic, partition and error code. Returns the response entries of each partition, in the
        order of its request entries. ``what`` names the call in errors. Raises the same errors as
        ``until_answered``.
        """
        found: dict[TopicPartition, list[Any]] = {}
        wanted = list(dict.fromkeys(wanted))

        def attempt(deadline_s: float) -> None:
            missing = [tp for tp in wanted if tp not in found]
            error = self._ask_round(missing, entries_of, request_of, found, deadline_s)
            if error is None and len(found) < len(wanted):
                error = LeaderNotAvailableError("a broker omitted partitions from its response")
            if error is not None:
                raise error

        self.until_answered(what, wanted, attempt)
        return {tp: found[tp] for tp in wanted}

    def _ask_round(
        self,
        missing: Sequence[TopicPartition],
        entries_of: Callable[[TopicPartition, int], list[Any]],
        request_of: Callable[[list[Any]], Any],
        found: dict[TopicPartition, list[Any]],
        deadline_s: float,
    ) -> KafkaliteError | None:
        """Send requests for ``missing`` to the leaders, once, and add the results to ``found``.

        Returns one of the errors if any request or partition failed, else None. Raises the errors of
        ``leader`` other than LeaderNotAvailableError.
        """
        error: KafkaliteError | None = None
        by_address: dict[str, list[list[Any]]] = {}  # the entries of each request
        for tp in missing:
            try:
                address, leader_epoch = self.leader(tp, deadline_s)
            except LeaderNotAvailableError as failure:
                error = failure
                continue
            requests = by_address.setdefault(address, [])
            for index, entry in enumerate(entries_of(tp, leader_epoch)):
                if index == len(requests):
                    requests.append([])
                requests[index].append(entry)
        sent: list[tuple[BrokerConnection, list[Reply], TopicPartition]] = []
        for address, requests in by_address.items():
            try:
                connection = self.connection(address, deadline_s)
                first = TopicPartition(requests[0][0].topic, requests[0][0].partition)
                replies = [connection.send(request_of(entries), deadline_s) for entries in requests]
                sent.append((connection, replies, first))
            except KafkaliteError as failure:
                self.record_failure(address, failure)
                error = failure
        for connection, replies, tp in sent:
            entries = []
            try:
                for reply in replies:
                    entries += self.receive(connection, reply, tp, deadline_s).message.partitions
            except KafkaliteError as failure:
                error = failure
                continue
            error = _take(entries, found) or error
        return error


def _take(entries: Iterable[Any], found: dict[TopicPartition, list[Any]]) -> KafkaliteError | None:
    """Add the entries to ``found``, but none of a partition that has an entry with an error.

    Return the error of an entry (a permanent one, if there is any), or None.
    """
    error: KafkaliteError | None = None
    refused: set[TopicPartition] = set()
    taken: dict[TopicPartition, list[Any]] = {}
    for entry in entries:
        tp = TopicPartition(entry.topic, entry.partition)
        if entry.error_code == 0:
            taken.setdefault(tp, []).append(entry)
            continue
        refused.add(tp)
        failure = broker_error(entry.error_code, entry.error_message or "", about=str(tp))
        if error is None or not is_retriable(failure):
            error = failure
    found.update({tp: list_ for tp, list_ in taken.items() if tp not in refused})
    return error
