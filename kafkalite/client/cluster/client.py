"""The client's connections and metadata: bootstrap, refresh, one connection per broker and purpose.

Responses on a connection arrive in the order of its requests, so a long poll delays the responses to later
requests. Requests that must not wait use another connection to the same broker, identified by its
``Purpose``.
"""

# Long because connections need the metadata, the metadata needs connections, and one class owns both.

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from kafkalite.client.arguments import checked_name
from kafkalite.client.cluster.call_driver import drive
from kafkalite.client.cluster.call_plan import CallPlan, CallRules, judge_broker_error
from kafkalite.client.cluster.connection import (
    CLOSED_AT_ONCE_HINT,
    FOREIGN_HINT,
    REFUSED_HINT,
    SILENT_HINT,
    Buffer,
    Connection,
    Response,
    connect,
)
from kafkalite.client.cluster.retry import Backoff, is_retriable
from kafkalite.client.cluster.routing import NO_NODE, MetadataCache
from kafkalite.client.cluster.security import ConnectionSecurity
from kafkalite.client.cluster.setbacks import LATE_MS, SILENT_MS, Setbacks, lost_quorum
from kafkalite.client.cluster.signal import Signal
from kafkalite.client.config import CommonConfig
from kafkalite.errors import (
    HOST_NAME_HINT,
    TLS_HINT,
    AuthenticationError,
    BrokerError,
    ClientClosedError,
    ConnectionFailedError,
    ErrorCode,
    KafkaliteError,
    RequestTimeoutError,
    broker_error,
)
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.metadata import DescribeClusterRequest, MetadataRequest
from kafkalite.rng import Rng, system_rng
from kafkalite.transport import SSL_SCHEME

if TYPE_CHECKING:
    from kafkalite.client.cluster.login import ConnectionLogin

logger = logging.getLogger(__name__)


def closed_loop_error() -> ClientClosedError:
    """Return the error of a client whose event loop was closed before the client."""
    return ClientClosedError(
        "the event loop in which this client was opened is closed",
        hint="open, use and close a client in the same event loop",
    )


class Purpose(enum.IntEnum):
    """The purpose of a connection. A client has at most one connection per broker and purpose."""

    MAIN = 0
    FETCH = 1
    HEARTBEAT = 2
    ABORT = 3

    __hash__ = int.__hash__  # Enum's hash is a slow Python function, and every request hashes a Purpose


# While a needed broker is away, metadata is requested repeatedly. These are the first pause, and the length
# of each further pause in percent of the previous one, while the metadata does not change. With 110 %, a new
# leader is found late by 5 % of the outage on average.
REFRESH_PAUSE_MS: Final = 50
_REFRESH_GROWTH_PERCENT: Final = 110

# If there are several brokers, the next one is tried when a broker has not responded for this long.
STAGGER_S: Final = 0.3

# Metadata of a broker that reaches no controller may be outdated (R23). After this many such responses, the
# last one is used anyway.
MAX_OUTDATED: Final = 3

# If there is no controller, a node that accepts no connection for this long counts as unreachable.
PROBE_MS: Final = 700

# A client that opens tries every bootstrap address this many times before it fails, if no broker accepts a
# connection, and for socket.connection.setup.timeout.ms at most. If a broker has accepted one, it may have
# been killed since, so the client tries until default.api.timeout.ms. An open client reconnects until it is
# closed.
BOOTSTRAP_ROUNDS: Final = 3
MIN_ROUND_MS: Final = 100

# A missing topic is logged as a warning only after this time. Most calls raise its error earlier.
_MISSING_MS: Final = 1_100

_NO_CLUSTER_HINT: Final = "is a broker running there? 'kl dev' starts one"
#: The hints of errors that no broker causes, or one that will not accept this client.
_NO_BROKER_HINTS: Final = frozenset({_NO_CLUSTER_HINT, HOST_NAME_HINT, SILENT_HINT, FOREIGN_HINT, TLS_HINT})
#: The hints of ``connect`` that replace _NO_CLUSTER_HINT.
_PRECISE_HINTS: Final = (_NO_BROKER_HINTS - {_NO_CLUSTER_HINT}) | {CLOSED_AT_ONCE_HINT, REFUSED_HINT}


def created_topic(name: str, partitions: int) -> str:
    """Return a text that announces a topic which a request of this client created."""
    return f"created topic {name} ({partitions} partition{'' if partitions == 1 else 's'})"


def _missing_topics(response: Response) -> set[str]:
    return {
        topic.name
        for topic in response.message.topics
        if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    }


def _warn_of_created(response: Response, missing: set[str]) -> None:
    for topic in response.message.topics:
        if topic.name in missing and topic.error_code == ErrorCode.NONE:
            logger.warning(
                "%s; allow.auto.create.topics=false prevents that",
                created_topic(topic.name, len(topic.partitions)),
            )


def _has_controller(response: Response) -> bool:
    """Whether the broker that sent this metadata reaches a controller."""
    return bool(response.message.controller_id != NO_NODE)


@dataclass(slots=True, eq=False)
class _Link:
    """The connection to one broker for one purpose.

    Invariant: ``task``, which dials the broker, is None while ``connection`` is open.
    """

    node_id: int
    purpose: Purpose
    address: str = ""  #: the last one in the metadata, which has only live brokers
    connection: Connection | None = None
    task: asyncio.Task[Connection | KafkaliteError] | None = None
    failures: int = 0
    is_away: bool = False  #: the connection was lost, or could not be established
    not_before_ms: int = 0
    #: The bootstrap connection at the time when ``connection`` was lost. It does not replace ``connection``,
    #: because the broker may have accepted it earlier (R56).
    older: Connection | None = None


class ClusterClient:
    """Owns the connections and metadata of one client.

    ``on_change`` is called after a refresh of the metadata in the background, after each attempt to connect
    to a node, when a connection is lost or can be written again, and by ``close``.
    """

    #: Warn of topics that a refresh creates. It then first asks without creating, to know what is missing.
    warns_of_creation = False

    def __init__(
        self,
        config: CommonConfig,
        *,
        allow_auto_topic_creation: bool = False,
        on_change: Callable[[], None] | None = None,
        rng: Rng | None = None,
    ) -> None:
        self.config = config
        self.metadata = MetadataCache()
        security = ConnectionSecurity(config)
        self.tls = security.tls
        self.login: ConnectionLogin | None = security.login
        self.rng = rng or system_rng()
        self.allow_auto_topic_creation = allow_auto_topic_creation
        #: The maximum time that a broker may hold the response to a long poll, in ms by purpose.
        self.long_poll_ms: dict[int, int] = {}
        #: Topics whose metadata is kept up to date. None means all topics.
        self.topics: set[str] | None = set()
        self.last_error: KafkaliteError | None = None
        self.setbacks = Setbacks(self._lost_majority)
        self._on_change = on_change
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False
        self._links: dict[tuple[int, int], _Link] = {}
        self._unreachable: set[str] = set()  #: addresses that refused the last attempt to connect
        #: The addresses of fenced brokers, which the metadata omits. None: unknown; asked for in a probe.
        self._fenced: dict[int, str] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._bootstrap: Connection | None = None
        self._opens_until_ms: int | None = None  #: when ``start`` gives up; None when it is over
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()  #: set while an urgent refresh is requested but not begun
        self._first_pause_ms = min(REFRESH_PAUSE_MS, config.retry_backoff_ms)
        self._refresh_pause_ms = self._first_pause_ms
        self._refreshed_ms = 0  #: when the last refresh ended
        self._refresh_started_ms: int | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._changed = Signal()
        self._retry_backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._reconnect_backoff = Backoff(config.reconnect_backoff_ms, config.reconnect_backoff_max_ms)
        #: The rules for requests to one node, to any broker, or to the leaders of partitions.
        self.call_rules = CallRules(
            judge_broker_error,
            self._retry_backoff,
            attempt_timeout_ms=config.request_timeout_ms,
            locates_in_background=True,
        )

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to any broker and fetch the metadata.

        If no broker accepts a connection, raises ConnectionFailedError after BOOTSTRAP_ROUNDS rounds or
        socket.connection.setup.timeout.ms. Once a broker has accepted one, tries until default.api.timeout.ms
        and then raises the last error. Raises errors that are not retriable, and a refused login or
        certificate, at once.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._bootstrap_in_rounds()
        except BaseException:
            await self.close()
            raise
        self._schedule_by_age()

    async def _bootstrap_in_rounds(self) -> None:
        began_ms = self.now_ms()
        last_ms = began_ms + self.config.default_api_timeout_ms
        until_ms = min(last_ms, began_ms + self.config.socket_connection_setup_timeout_ms)
        was_accepted = False  # whether a broker has accepted a connection
        for failures in count(1):
            self._opens_until_ms = until_ms
            try:
                await self._refresh_once()
                self.setbacks.clear("metadata")
                self._opens_until_ms = None
                return
            except KafkaliteError as error:
                if error.hint not in _NO_BROKER_HINTS:
                    was_accepted, until_ms = True, last_ms
                pause_ms = self._reconnect_backoff.delay_ms(failures, self.rng.random())
                is_hopeless = failures == BOOTSTRAP_ROUNDS and not was_accepted
                is_final = not is_retriable(error) or isinstance(error, AuthenticationError)
                # A shorter round would only report how short it was, and not why the others failed.
                last_start_ms = until_ms - min(MIN_ROUND_MS, (until_ms - began_ms) // 5)
                if is_final or is_hopeless or self.now_ms() + pause_ms >= last_start_ms:
                    raise
                self.setbacks.note("metadata", error, self.now_ms())
                await asyncio.sleep(pause_ms / 1000)
                if self.now_ms() >= last_start_ms:
                    raise

    async def close(self) -> None:
        """Close every connection. Requests in flight fail with ClientClosedError. May be called twice."""
        self.is_closed = True
        if self._age_timer is not None:
            self._age_timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in self._connections():
            connection.on_lost = connection.on_writable = None
            connection.close()
        self._links.clear()
        self._bootstrap = None
        self._notify()
        await asyncio.sleep(0)  # lets the transports call connection_lost

    def now_ms(self) -> int:
        """Return the time of the loop's monotonic clock in milliseconds."""
        assert self._loop is not None, "start() first"
        return int(self._loop.time() * 1000)

    def _connections(self) -> list[Connection]:
        connections = [link.connection for link in self._links.values() if link.connection is not None]
        if self._bootstrap is not None and self._bootstrap not in connections:
            connections.append(self._bootstrap)
        return connections

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a background task of this client. ``close`` cancels it.

        Raises ClientClosedError if the client's event loop was closed.
        """
        assert self._loop is not None, "start() first"
        if self._loop.is_closed():
            coroutine.close()
            raise closed_loop_error()
        task = self._loop.create_task(coroutine)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # the owner reports a missing close()
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def _notify(self) -> None:
        self._changed.fire()
        if self._on_change is not None:
            self._on_change()

    # --- connections ---------------------------------------------------------------------------

    def connection_now(self, node_id: int, purpose: Purpose = Purpose.MAIN) -> Connection | None:
        """Return the open connection to a broker for ``purpose``, or None if there is none.

        If there is none and the client is open, start to dial in the background.
        """
        link = self._links.get((node_id, purpose))
        if link is not None:
            if link.connection is not None and link.connection.is_open:
                return link.connection
            if link.is_away:  # another broker may lead now
                self.request_refresh()
        if not self.is_closed:
            self._dial_soon(node_id, purpose)
        return None

    async def connection(self, node_id: int, purpose: Purpose = Purpose.MAIN) -> Connection:
        """Return the open connection to a broker for ``purpose``, or a new one after at most one attempt.

        Raises ClientClosedError if the client is closed, ConnectionFailedError if the metadata has no such
        broker, and the errors of ``connect``.
        """
        connection = self.connection_now(node_id, purpose)
        if connection is not None:
            return connection
        if self.is_closed:
            raise ClientClosedError("the client is closed")
        dialling = self._dial_soon(node_id, purpose)
        await asyncio.wait({dialling})
        if dialling.cancelled():  # by close()
            raise ClientClosedError("the client is closed")
        outcome = dialling.result()
        if isinstance(outcome, KafkaliteError):
            raise outcome
        return outcome

    def is_away(self, node_id: int, purpose: Purpose) -> bool:
        """Whether the connection for ``purpose`` was lost or not accepted, and is not being dialled again."""
        link = self._links.get((node_id, purpose))
        return link is not None and link.is_away and link.task is None

    def drop_connection(self, node_id: int, purpose: Purpose) -> None:
        """Close the connection to a broker for ``purpose``, to cancel its requests.

        The broker may then be dialled again without a pause, unlike after a lost connection.
        """
        link = self._links.get((node_id, purpose))
        if link is not None and link.connection is not None:
            connection, link.connection = link.connection, None
            connection.on_lost = connection.on_writable = None
            connection.close()

    def _dial_soon(self, node_id: int, purpose: Purpose) -> asyncio.Task[Connection | KafkaliteError]:
        link = self._links.get((node_id, purpose))
        if link is None:
            link = self._links[node_id, purpose] = _Link(node_id, purpose)
        if link.task is None:
            link.task = self.spawn(self._dial(link))
        return link.task

    async def _dial(self, link: _Link) -> Connection | KafkaliteError:
        try:
            pause_ms = link.not_before_ms - self.now_ms()
            if pause_ms > 0:
                await asyncio.sleep(pause_ms / 1000)
            address = self.metadata.addresses.get(link.node_id)
            if address is None:
                self.request_refresh()
                link.not_before_ms = self.now_ms() + self.config.reconnect_backoff_ms
                text = f"broker {link.node_id} is not among the live brokers"
                if link.address:
                    text += f": it was stopped, or does not respond at {link.address}"
                return ConnectionFailedError(text)
            link.address = address
            connection = await self._connect(address)
        except KafkaliteError as error:
            link.failures += 1
            link.is_away = True
            pause_ms = self._reconnect_backoff.delay_ms(link.failures, self.rng.random())
            link.not_before_ms = self.now_ms() + pause_ms
            logger.info("node_id=%d connect failed, next try in %d ms: %s", link.node_id, pause_ms, error)
            if link.node_id == self.metadata.controller_id and isinstance(error, ConnectionFailedError):
                error.message = f"node {link.node_id}, the controller: {error.message}"
            self.setbacks.note((link.node_id, link.purpose), error, self.now_ms())
            self.request_refresh()
            return error
        else:
            self._adopt(link, connection)
            return connection
        finally:
            link.task = None
            if not self.is_closed:
                assert self._loop is not None
                self._loop.call_soon(self._notify)

    async def _connect(self, address: str) -> Connection:
        assert self._loop is not None
        late = self._loop.call_later(SILENT_MS / 1000, self._on_silence, address)
        timeout_ms = self.config.socket_connection_setup_timeout_ms
        if self._opens_until_ms is not None:
            timeout_ms = max(1, min(timeout_ms, self._opens_until_ms - self.now_ms()))
        try:
            connection = await self.dial(address, timeout_ms)
        except ConnectionFailedError:
            self._unreachable.add(address)
            raise
        finally:
            late.cancel()
        self._unreachable.discard(address)
        return connection

    async def dial(self, address: str, timeout_ms: int) -> Connection:
        """Return a new connection that the caller must close. Raises the same errors as ``connect``."""
        return await connect(
            self.secured(address),
            client_id=self.config.client_id,
            timeout_ms=timeout_ms,
            tls=self.tls,
            login=self.login,
        )

    def secured(self, address: str) -> str:
        """Return the address that ``connect`` needs for ``address`` in this client's security.protocol."""
        return address if self.tls is None else f"{SSL_SCHEME}{address}"

    def _on_silence(self, address: str) -> None:
        self._warn_unless_probing(f"{address} does not respond; does a kafkalite broker run there?")

    def _warn_unless_probing(self, text: str) -> None:
        """Log the text of ``_lost_majority`` or, if that is empty, ``text``. Does nothing during a probe."""
        if self._probing is None:
            self.setbacks.warn(self._lost_majority() or text, self.now_ms())

    def _adopt(self, link: _Link, connection: Connection) -> None:
        self.setbacks.clear((link.node_id, link.purpose))
        link.address = self.metadata.addresses.get(link.node_id, link.address)
        link.connection = connection
        link.failures = 0
        link.is_away = False
        connection.on_lost = self._on_lost
        connection.on_writable = self._notify
        connection.on_slow = self._on_slow
        connection.extra_patience_s = self.long_poll_ms.get(link.purpose, 0) / 1000

    def _on_slow(self, connection: Connection) -> None:
        logger.info("slow responses %s", Fields(connection=connection))
        self.request_refresh()
        if len(self.metadata.addresses) > 1:
            self.spawn(self._explain_slowness(connection))
        else:
            self._warn_unless_probing(f"{connection.address} is slow to respond")

    async def _explain_slowness(self, connection: Connection) -> None:
        """Probe all brokers, then warn that this one is slow, or that the controllers lost their majority."""
        await asyncio.wait({self._probe()})
        self._warn_unless_probing(f"{connection.address} is slow to respond")

    def give_up(self, node_id: int) -> bool:
        """Close the MAIN connection to a broker if the broker is slow to respond.

        The requests on the connection then fail. Use this when other brokers have become leaders of the
        requested partitions. Returns whether the connection was closed.
        """
        link = self._links.get((node_id, Purpose.MAIN))
        if link is None or link.connection is None or not link.connection.is_slow:
            return False
        link.connection.give_up()
        return True

    def _on_lost(self, connection: Connection) -> None:
        if connection is self._bootstrap:
            self._bootstrap = None
        for link in self._links.values():
            if link.connection is connection:
                link.connection = None
                link.older = self._bootstrap
                link.is_away = True
                link.not_before_ms = self.now_ms() + self.config.reconnect_backoff_ms
        if not self.is_closed:
            logger.info("connection lost %s", Fields(connection=connection))
            self.request_refresh()
            self._notify()

    # --- metadata ------------------------------------------------------------------------------

    def track(self, topic: str) -> None:
        """Keep the metadata of ``topic`` up to date from now on. Raises ClientError if it is not a str."""
        checked_name("topic", topic)
        if self.topics is not None and topic not in self.topics:
            self.topics.add(topic)
            self.request_refresh(urgent=True)

    def request_refresh(self, *, urgent: bool = False) -> None:
        """Fetch metadata in the background: at once if ``urgent``, otherwise after a pause.

        The pause begins when the previous refresh began. It grows up to ``retry.backoff.max.ms`` while the
        responses contain no changes. Only one refresh runs at a time. A call during a refresh repeats the
        refresh if ``urgent``, and otherwise does nothing.
        """
        if self.is_closed or self._loop is None:
            return
        if self._refreshing is not None:
            if urgent:
                self._hurry.set()
            return
        self._refreshing = self.spawn(self._refresh(urgent))

    async def refreshed(self) -> None:
        """Wait for metadata that is requested after this call. Raises ClientClosedError.

        There is no time limit while no broker responds.
        """
        self.request_refresh(urgent=True)
        if self._refreshing is not None:
            await asyncio.wait({self._refreshing})
        if self.is_closed:
            raise ClientClosedError("the client is closed")

    async def _refresh(self, urgent: bool) -> None:
        """Request metadata until a request succeeds, then call ``on_change``."""
        failures = 0
        try:
            while True:
                if not urgent and self._refresh_started_ms is not None:
                    due_ms = self._refresh_started_ms + self._refresh_pause_ms
                    await self._pause(due_ms - self.now_ms())
                self._hurry.clear()
                generation = self.metadata.generation
                try:
                    await self._refresh_once()
                except KafkaliteError as error:
                    self.last_error = error
                    self.setbacks.note("metadata", error, self.now_ms())
                    failures += 1
                    await self._pause(self._retry_backoff.delay_ms(failures, self.rng.random()))
                    continue
                self.last_error = None
                self._note_topics()
                self._adapt_refresh_pause(has_changes=self.metadata.generation != generation)
                if not self._hurry.is_set():
                    return
        finally:
            self._refreshing = None
            if not self.is_closed and not (self._loop is None or self._loop.is_closed()):
                self._notify()

    def _note_topics(self) -> None:
        """Record in ``setbacks`` which of ``topics`` have an error or a partition without a leader."""
        now_ms = self.now_ms()
        self.setbacks.clear("metadata")
        for topic in self.topics or ():
            error = self.metadata.errors.get(topic)
            leaders = self.metadata.topics[topic].leaders if topic in self.metadata.topics else []
            leaderless = [number for number, leader in enumerate(leaders) if leader.node_id < 0]
            if error is not None:
                missing = broker_error(*error, about=f"topic {topic!r}")
                self.setbacks.note(topic, missing, now_ms, late_ms=_MISSING_MS)
            elif leaderless:
                self.setbacks.note(topic, f"{topic}-{leaderless[0]} has no leader", now_ms)
            elif self.setbacks:
                self.setbacks.clear(topic)

    def _lost_majority(self) -> str:
        """Return a text that explains failed requests by a lost majority of the controllers.

        The text is "" unless the metadata has brokers but no controller, or there are several brokers and at
        least half of them can't be reached.
        """
        nodes, lost = self._nodes(), self._lost_nodes()
        if self.metadata.addresses and self.metadata.controller_id == NO_NODE:
            return lost_quorum(lost, len(nodes))
        if len(nodes) > 1 and 2 * len(lost) >= len(nodes):
            return lost_quorum(lost, len(nodes), is_certain=False)
        return ""

    def _nodes(self) -> dict[int, str]:
        """Return the addresses of all known brokers, including fenced ones."""
        return {**(self._fenced or {}), **self.metadata.addresses}

    def _lost_nodes(self) -> list[str]:
        """Return a text for each broker that accepted no connection at the last attempt."""
        return [
            f"node {node_id} ({address})"
            for node_id, address in sorted(self._nodes().items())
            if address in self._unreachable
        ]

    def explained(self, error: KafkaliteError) -> KafkaliteError:
        """Put the text of ``_lost_majority``, if any, before the message of ``error``, and return ``error``.

        Then ``error.is_quorum_lost`` is True. Use this for the last error of several attempts, which may not
        show why all of them failed.
        """
        cause = self._lost_majority()
        if cause and "; the last error: " not in error.message:  # one error may end several calls
            error.message = f"{cause}; the last error: {error.message}"
            error.hint = "'kl cluster status' shows which nodes run"
            error.is_quorum_lost = True
        return error

    async def _note_controller(self) -> None:
        """Record in ``setbacks`` whether the latest metadata has no controller. If so, probe the brokers.

        Waits for the probe if half of the brokers have refused connections and the fenced ones are unknown,
        so that the probe warns even if the caller soon closes this client.
        """
        if self.metadata.controller_id != NO_NODE:
            self._unreachable.clear()
            self._fenced = None
            self.setbacks.clear("controller")
            return
        self._note_lost_majority()
        probing = self._probe()
        if self._fenced is None and self._is_half_lost():
            await asyncio.wait({probing})

    def _note_lost_majority(self) -> None:
        """Record that there is no controller, and warn if that lasts.

        If at least half of the brokers can't be reached, warns as soon as the fenced brokers are known: then
        the cause is not a short election. Does nothing while the metadata has no brokers.
        """
        if not self.metadata.addresses:
            return
        late_ms = 0 if self._fenced is not None and self._is_half_lost() else LATE_MS
        self.setbacks.note("controller", self._lost_majority(), self.now_ms(), late_ms=late_ms)

    def _is_half_lost(self) -> bool:
        return 2 * len(self._lost_nodes()) >= len(self._nodes())

    def _probe(self) -> asyncio.Task[None]:
        """Return the task that finds the brokers that accept no connection within PROBE_MS.

        Starts the task unless it already runs.
        """
        if self._probing is None:
            self._probing = self.spawn(self._probe_nodes())
        return self._probing

    async def _probe_nodes(self) -> None:
        try:
            live = list(self.metadata.addresses.values())
            fenced, unreachable = await asyncio.gather(self._find_fenced(live), self._find_unreachable(live))
            if fenced:
                unreachable |= await self._find_unreachable(fenced.values())
            self._fenced, self._unreachable = fenced, unreachable
            if self.metadata.controller_id == NO_NODE:
                self._note_lost_majority()
        finally:
            self._probing = None

    async def _find_fenced(self, live: Iterable[str]) -> dict[int, str] | None:
        """Return the addresses of fenced brokers from one of ``live``, or None if none responds in PROBE_MS.

        Returns the last result until the metadata has a controller, because only a controller fences brokers.
        """
        if self._fenced is not None:
            return self._fenced
        found = await asyncio.gather(*map(self._fenced_according_to, live))
        return next((each for each in found if each is not None), None)

    async def _fenced_according_to(self, address: str) -> dict[int, str] | None:
        """Ask on a new connection, because others may wait for responses. Returns {} without permission."""
        try:
            async with asyncio.timeout(PROBE_MS / 1000):
                connection = await self.dial(address, PROBE_MS)
                try:
                    response = await connection.call(DescribeClusterRequest(), timeout_ms=PROBE_MS)
                finally:
                    connection.close()
        except BrokerError:
            return {}
        except (KafkaliteError, TimeoutError):
            return None
        return {each.node_id: each.address for each in response.message.brokers if each.is_fenced}

    async def _find_unreachable(self, addresses: Collection[str]) -> set[str]:
        accepted = await asyncio.gather(*map(self._accepts, addresses))
        return {address for address, is_accepted in zip(addresses, accepted, strict=True) if not is_accepted}

    async def _accepts(self, address: str) -> bool:
        """Whether a connection to ``address`` is open and not slow, or a new one is accepted in PROBE_MS."""
        if any(each.address == address and not each.is_slow for each in self._open_connections()):
            return True
        try:
            connection = await self.dial(address, PROBE_MS)
        except KafkaliteError:
            return False
        connection.close()
        return True

    async def _pause(self, duration_ms: int) -> None:
        """Wait for ``duration_ms``, or until an urgent refresh is requested, whichever is first."""
        if duration_ms > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(duration_ms / 1000):
                    await self._hurry.wait()

    def _adapt_refresh_pause(self, *, has_changes: bool) -> None:
        """Increase the pause before the next refresh, or reset it after a change or a long idle time."""
        if has_changes or self._refreshed_ms + self._refresh_pause_ms * 4 < self.now_ms():
            self._refresh_pause_ms = self._first_pause_ms
        else:
            slowest_ms = max(self._first_pause_ms, self.config.retry_backoff_max_ms)
            self._refresh_pause_ms = min(self._refresh_pause_ms * _REFRESH_GROWTH_PERCENT // 100, slowest_ms)
        self._refreshed_ms = self.now_ms()

    async def _refresh_once(self) -> None:
        """Fetch metadata from any broker and apply it. Raises KafkaliteError.

        With ``allow_auto_topic_creation`` and ``warns_of_creation``, a second request creates missing topics.
        """
        self._refresh_started_ms = self.now_ms()
        topics = self.topics
        may_create = self.allow_auto_topic_creation
        request = MetadataRequest(
            topics=None if topics is None else sorted(topics),
            allow_auto_topic_creation=may_create and not self.warns_of_creation,
        )
        response = await self.call_any_broker(request, is_current=_has_controller)
        if may_create and self.warns_of_creation:
            missing = _missing_topics(response)
            if missing:
                request = request._replace(allow_auto_topic_creation=True)
                response = await self.call_any_broker(request, is_current=_has_controller)
                _warn_of_created(response, missing)
        self.metadata.update(response.message, complete=topics is None)
        self._adopt_bootstrap()
        await self._note_controller()

    async def call_any_broker(
        self, request: Any, *, is_current: Callable[[Response], bool] | None = None
    ) -> Response:
        """Send the request to one broker after another until one responds, and return its response.

        Tries the next broker after STAGGER_S seconds without a response. If only one address is known, waits
        for request.timeout.ms. If ``is_current(response)`` is False, the response is outdated, and the next
        broker is tried. After MAX_OUTDATED outdated responses, or when all brokers were tried, the last
        outdated response is returned. Raises the last error if no broker responds, and the BrokerError of a
        response at once.
        """
        error: KafkaliteError | None = None
        outdated: list[Response] = []
        timeout_ms = self.config.request_timeout_ms
        addresses = {*self.metadata.addresses.values(), *self.config.bootstrap_servers}
        tried: set[str] = set()
        others = self._open_connections()
        while len(outdated) < MAX_OUTDATED and (others or addresses - tried or not tried):
            try:
                async with asyncio.timeout(STAGGER_S if outdated else None):
                    connection = others.pop(0) if others else await self._new_connection(tried)
            except (TimeoutError, ConnectionFailedError):
                if not outdated:
                    raise
                break
            tried.add(connection.address)
            try:
                async with asyncio.timeout(STAGGER_S if len(addresses) > 1 else None):
                    response = await connection.call(request, timeout_ms=timeout_ms)
                if is_current is None or is_current(response):
                    return response
                outdated.append(response)
            except TimeoutError:  # the broker may be dead without having closed the connection
                error = RequestTimeoutError(f"{connection.address} did not respond for {STAGGER_S} s")
            except (ConnectionFailedError, RequestTimeoutError) as failure:
                error = failure
        if outdated:
            return outdated[-1]
        assert error is not None, "at least one broker was tried"
        raise error

    def _open_connections(self) -> list[Connection]:
        """Return the open connections, the most responsive first."""
        connections = [connection for connection in self._connections() if connection.is_open]
        return sorted(connections, key=lambda connection: (connection.is_slow, connection.in_flight))

    async def _any_connection(self) -> Connection:
        """Return an open connection, or a new one to a known broker or a bootstrap address."""
        connections = self._open_connections()
        return connections[0] if connections else await self._new_connection()

    async def _new_connection(self, tried: Collection[str] = ()) -> Connection:
        """Return the first connection that a broker accepts, which becomes the bootstrap connection.

        Brokers in the metadata are dialled before bootstrap addresses. The next address is dialled after
        STAGGER_S seconds, or as soon as a dial fails. Addresses in ``tried`` are skipped unless there are no
        others. Raises ConnectionFailedError if no broker accepts a connection, and another error of
        ``connect`` at once.
        """
        known = list(dict.fromkeys((*self.metadata.addresses.values(), *self.config.bootstrap_servers)))
        addresses = [address for address in known if address not in tried] or known
        failures: dict[str, str] = {}
        refused: AuthenticationError | None = None
        hint = _NO_CLUSTER_HINT
        dials: dict[asyncio.Task[Connection], str] = {}
        try:
            while addresses or dials:
                if addresses:
                    address = addresses.pop(0)
                    dials[asyncio.ensure_future(self._connect(address))] = address
                done, _ = await asyncio.wait(
                    dials, timeout=STAGGER_S if addresses else None, return_when=asyncio.FIRST_COMPLETED
                )
                for dial in [dial for dial in dials if dial in done]:
                    address = dials.pop(dial)
                    error = dial.exception()
                    if error is None:
                        if self._bootstrap is not None:
                            self._bootstrap.give_up()  # the old connection does not respond
                        self._bootstrap = dial.result()
                        self._bootstrap.on_lost = self._on_lost
                        self._bootstrap.on_slow = self._on_slow
                        self._bootstrap.extra_patience_s = self.long_poll_ms.get(Purpose.MAIN, 0) / 1000
                        return self._bootstrap
                    if not isinstance(error, ConnectionFailedError):
                        raise error
                    if isinstance(error, AuthenticationError):
                        refused = error
                    failures[address] = error.message
                    if error.hint in _PRECISE_HINTS:
                        hint = error.hint
        finally:
            for dial in dials:
                dial.cancel()
                dial.add_done_callback(_close_if_late)
        if refused is not None:
            raise refused
        raise ConnectionFailedError(f"no broker could be reached: {'; '.join(failures.values())}", hint=hint)

    def _adopt_bootstrap(self) -> None:
        """Make the bootstrap connection the MAIN connection to its broker, unless there is one already."""
        connection = self._bootstrap
        if connection is None:
            return
        for node_id, address in self.metadata.addresses.items():
            if address in {connection.address, connection.peer}:
                link = self._links.setdefault((node_id, Purpose.MAIN), _Link(node_id, Purpose.MAIN))
                if link.connection is None and link.task is None and connection is not link.older:
                    self._adopt(link, connection)
                    self._bootstrap = None
                return

    def _schedule_by_age(self) -> None:
        assert self._loop is not None
        self._age_timer = self._loop.call_later(self.config.metadata_max_age_ms / 1000, self._on_age)

    def _on_age(self) -> None:
        self.request_refresh()
        self._schedule_by_age()

    async def changed(self, deadline_ms: int) -> bool:
        """Return True at the next change that ``on_change`` reports, or False at ``deadline_ms``.

        Raises ClientClosedError if the client is closed already.
        """
        if self.is_closed:
            raise ClientClosedError("the client is closed")
        return await self._changed.wait(max(0, deadline_ms - self.now_ms()) / 1000)

    async def topic_partition_count(self, topic: str, deadline_ms: int) -> int:
        """Return the number of partitions of ``topic``. Waits for its metadata if necessary.

        Raises the topic's BrokerError if a retry cannot help, ``topic_error(topic)`` if the topic is still
        unknown at ``deadline_ms``, and ClientClosedError.
        """
        self.track(topic)
        while True:
            count = self.metadata.partition_count(topic)
            if count is not None:
                return count
            fatal = self.metadata.fatal_error(topic)
            if fatal is not None:
                raise broker_error(*fatal, about=f"topic {topic!r}")
            self.request_refresh()
            if not await self.changed(deadline_ms):
                raise self.topic_error(topic)

    def topic_error(self, topic: str) -> KafkaliteError:
        """Return the error of an unusable ``topic``.

        It is the topic's error in the metadata, or else the error of the last metadata request, or else
        RequestTimeoutError.
        """
        error = self.metadata.errors.get(topic)
        if error is not None:
            return broker_error(*error, about=f"topic {topic!r}")
        if self.last_error is not None:
            return self.last_error
        return RequestTimeoutError(f"no metadata of topic {topic!r} arrived in time")

    # --- calls ---------------------------------------------------------------------------------

    async def call(
        self,
        message: Any,
        *,
        node_id: int | None = None,
        timeout_ms: int | None = None,
        payload_parts: Sequence[Buffer] = (),
    ) -> Response:
        """Send a request to ``node_id`` (None: any broker) and return the response.

        Retriable errors are retried until ``timeout_ms`` (None: default.api.timeout.ms) has passed. Then the
        last one is raised: BrokerError, ConnectionFailedError, RequestTimeoutError. Other errors are raised
        at once. Raises ClientClosedError if the client is not open. ``payload_parts`` are sent after the
        message.
        """
        if self.is_closed or self._loop is None:
            raise ClientClosedError("the client is not open; use 'async with' or start()")
        if timeout_ms is None:
            timeout_ms = self.config.default_api_timeout_ms
        plan = CallPlan(
            self.call_rules,
            now_ms=self.now_ms(),
            timeout_ms=timeout_ms,
            node_id=node_id,
            is_located=True,
            timeout_error=self.explained,
        )

        async def dial(node_id: int | None) -> Connection:
            return await (self._any_connection() if node_id is None else self.connection(node_id))

        async def send(connection: Connection, timeout_ms: int) -> Response:
            return await connection.call(message, timeout_ms=timeout_ms, payload_parts=payload_parts)

        async def locate() -> int | None:
            self.request_refresh()
            return node_id

        return await drive(
            plan, locate=locate, dial=dial, send=send, chance=self.rng.random, setbacks=self.setbacks
        )


def _close_if_late(dial: asyncio.Task[Connection]) -> None:
    """Close a connection that was established after another connection was chosen."""
    if not dial.cancelled() and dial.exception() is None:
        dial.result().close()
