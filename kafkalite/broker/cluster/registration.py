"""A broker's membership in its cluster: registration, heartbeats, and the transfer of leaderships at a stop.

::

    register      the controller assigns this process a broker epoch and fences the previous process (R20)
    replay        the broker takes no role until its image shows its registration (R22)
    heartbeat     the first heartbeats unfence the broker; later ones keep its session alive (R23)
    hand over     heartbeats request a shutdown, until other brokers lead all its partitions, or a timeout

A session lasts for the session timeout. This broker counts from the time at which it sent the last heartbeat
to which a controller responded that the broker is not fenced (``NodeState.session_end_ms``). The controller
counts from the receipt of the heartbeat, so the session ends here first. Without a session this broker
refuses the requests of clients, because another broker may lead
(docs/adr/0024-a-broker-without-a-session-stops-serving.md).
"""

# Tests: tests/integration/test_cluster_membership.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.tasks import first_of
from kafkalite.clock import Clock
from kafkalite.errors import (
    BrokerError,
    BrokerIdNotRegisteredError,
    DuplicateBrokerRegistrationError,
    KafkaliteError,
    StaleBrokerEpochError,
)
from kafkalite.log_fields import Fields
from kafkalite.metadata.features import SUPPORTED
from kafkalite.model import NO_BROKER_EPOCH
from kafkalite.protocol.messages.cluster import (
    BrokerHeartbeatRequestV1,
    BrokerHeartbeatResponse,
    DamagedReplica,
    RegisterBrokerRequest,
    RegisterBrokerRequestV1,
    RegisterBrokerResponse,
)
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.storage.log_config import FSYNC

logger = logging.getLogger(__name__)

#: The timeout of one attempt to register; each failed attempt is logged.
REGISTER_TIMEOUT_MS: Final = 5_000
#: Clients receive the reason for the wait after this time, and it is renewed as often. It is shorter than the
#: time after which a client reports that the node does not respond (SILENT_MS).
EXPLAIN_AFTER_MS: Final = 700
#: The pause between heartbeats while the broker starts and is still fenced.
START_INTERVAL_MS: Final = 20
#: The longest pause between heartbeats of a running broker that is fenced.
FENCED_INTERVAL_MS: Final = 100
#: The longest time that a stop waits until other brokers lead this broker's partitions.
HAND_OVER_TIMEOUT_MS: Final = 5_000
HAND_OVER_INTERVAL_MS: Final = 50
HAND_OVER_ANSWER_TIMEOUT_MS: Final = 1_500


class Registration:
    """Registers one process and keeps its session alive. No other object may use its ``channel``."""

    def __init__(
        self,
        node: NodeState,
        config: BrokerConfig,
        clock: Clock,
        controller: ControllerNode,
        channel: ControllerChannel,
        *,
        addresses: tuple[str, ...],
        directory_id: str,
        clean_broker_epoch: int,
        start_count: int,
        damaged: Callable[[], list[DamagedReplica]],
        on_waiting: Callable[[str], None],
        missing_at_first_start: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """``clean_broker_epoch`` is the epoch in the clean-shutdown marker, or -1 without a marker (R21).

        ``start_count`` is the number of starts in the data directory (R51), or 0 if it is unknown.
        ``damaged`` returns the replicas to report as damaged or offline. ``on_waiting`` is called with the
        reason for the wait every EXPLAIN_AFTER_MS, and after each failed attempt to register.
        ``missing_at_first_start`` returns the voters for whose first start this node waits.
        """
        self._node = node
        self._controller = controller
        self._channel = channel
        self._addresses = list(addresses)
        self._directory_id = directory_id
        self._clean_broker_epoch = clean_broker_epoch
        self._start_count = start_count
        self._damaged = damaged
        self._on_waiting = on_waiting
        self._missing_at_first_start = missing_at_first_start
        self._problem = "no controller has responded"  # of the last attempt to register
        self._config = config
        self._clock = clock
        self._is_silent = False  # whether the end of the session was logged
        self._hurry = asyncio.Event()
        self._is_leaving = False
        channel.on_lost = self._hurry.set

    async def register(self) -> None:
        """Register this process. Return when this node's own image shows the registration.

        Waits for a controller without limit. Raises every error of the controller that is not retriable;
        DuplicateBrokerRegistrationError only after two session timeouts.
        """
        config = self._config
        request = RegisterBrokerRequestV1(
            config.node_id,
            self._node.incarnation_id,
            self._directory_id,
            self._addresses,
            config.broker_rack,
            self._clean_broker_epoch,
            config.durability == FSYNC,
            self._damaged(),
            self._start_count,
            list(SUPPORTED),
        )
        registered: RegisterBrokerResponse = await self._register_until_accepted(request)
        self._node.broker_epoch = registered.broker_epoch
        await self.replay(registered.metadata_offset)

    async def replay(self, registration_offset: int) -> None:
        """Return when this node's image contains the registration of this process. Until then the node takes
        no role (R22)."""
        await self._controller.wait_for_offset(registration_offset)

    async def _register_until_accepted(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse:
        began_ms = self._clock.monotonic_ms()
        if not self._config.has_peers:
            alone: RegisterBrokerResponse = await self._channel.execute(request)
            return alone
        explaining = asyncio.ensure_future(self._explain_wait())
        try:
            return await self._repeat_until_accepted(request, began_ms)
        finally:
            explaining.cancel()

    async def _explain_wait(self) -> None:
        while True:
            await self._clock.sleep_ms(EXPLAIN_AFTER_MS)
            self._on_waiting(self._reason())

    def _reason(self) -> str:
        head = f"broker {self._config.node_id} is starting, and no controller has accepted it yet"
        missing = self._missing_at_first_start()
        if missing:
            return f"{head}; first start: all voters must run; missing: {', '.join(map(str, missing))}"
        voters = self._voters_text()
        return f"{head}: {self._problem}; a majority of {voters} must run"

    def _voters_text(self) -> str:
        return ",".join(f"{node}@{address}" for node, address in self._config.controllers.items())

    async def _repeat_until_accepted(
        self, request: RegisterBrokerRequest, began_ms: int
    ) -> RegisterBrokerResponse:
        while True:
            try:
                response: RegisterBrokerResponse = await self._channel.send(request, REGISTER_TIMEOUT_MS)
                return response
            except BrokerError as error:
                waited_ms = self._clock.monotonic_ms() - began_ms
                # The session of a dead process with the same id expires; that of a live process does not.
                may_end = waited_ms <= 2 * self._config.broker_session_timeout_ms
                if not error.retriable and not (
                    may_end and isinstance(error, DuplicateBrokerRegistrationError)
                ):
                    raise
                self._problem = error.message
                self._on_waiting(self._reason())
                voters = self._voters_text()
                logger.warning(
                    "waiting for a controller %s",
                    Fields(
                        node_id=self._config.node_id, voters=voters, waited_ms=waited_ms, reason=error.message
                    ),
                )
                await self._clock.sleep_ms(START_INTERVAL_MS)

    async def wait_unfenced(self) -> None:
        """Send heartbeats until this broker is unfenced and its own image shows that. Raises BrokerErrors
        that are not retriable."""
        while True:
            try:
                response = await self._heartbeat()
            except BrokerError as error:
                if not error.retriable:
                    raise
                await self._clock.sleep_ms(START_INTERVAL_MS)
                continue
            broker = self._controller.image.brokers.get(self._config.node_id)
            if not response.is_fenced and broker is not None and not broker.is_fenced:
                return
            await self._clock.sleep_ms(START_INTERVAL_MS)

    async def heartbeat_forever(self) -> None:
        """Send heartbeats until cancelled, except after ``hand_over`` was called. Register again if the
        controller does not know this broker.

        Raises StaleBrokerEpochError if another process has registered under this node id, and the errors of
        ``register``.
        """
        interval_ms = self._config.broker_heartbeat_interval_ms
        pause_ms = interval_ms
        while True:
            self._hurry.clear()
            await self._sleep(pause_ms)
            pause_ms = interval_ms
            if self._is_leaving:  # no heartbeat may unfence the broker now
                continue
            try:
                if (await self._heartbeat()).is_fenced:
                    pause_ms = min(interval_ms, FENCED_INTERVAL_MS)
            except BrokerIdNotRegisteredError:
                logger.warning("registering again %s", Fields(node_id=self._config.node_id))
                await self.register()
            except StaleBrokerEpochError:
                raise
            except BrokerError as error:
                self._check_contact(error)

    def hurry(self) -> None:
        """Send the next heartbeat at once, because a log has gone offline (R81)."""
        self._hurry.set()

    async def _sleep(self, duration_ms: int) -> None:
        """Sleep for ``duration_ms``, until the connection to the controller is lost, or until ``hurry``."""
        await first_of(self._clock.sleep_ms(duration_ms), self._hurry.wait())

    async def _heartbeat(
        self, *, wants_shutdown: bool = False, timeout_ms: int = 0
    ) -> BrokerHeartbeatResponse:
        node, config = self._node, self._config
        request = BrokerHeartbeatRequestV1(
            config.node_id,
            node.broker_epoch,
            self._controller.image.metadata_offset,
            wants_shutdown,
            self._damaged(),
            list(SUPPORTED),
        )
        patience_ms = timeout_ms or max(config.broker_session_timeout_ms // 3, 1)
        sent_ms = self._clock.monotonic_ms()
        response: BrokerHeartbeatResponse = await self._channel.send(request, patience_ms)
        if not response.is_fenced:
            self.extend_session(sent_ms)
        if self._is_silent:
            self._is_silent = False
            logger.info("controller reached again %s", Fields(node_id=config.node_id))
        return response

    def extend_session(self, sent_ms: int) -> None:
        """Extend the session, because the controller responded to the heartbeat sent at ``sent_ms`` (R23)."""
        self._node.session_end_ms = sent_ms + self._config.broker_session_timeout_ms

    def _check_contact(self, error: BrokerError) -> None:
        if self._is_silent or self._clock.monotonic_ms() < self._node.session_end_ms:
            return
        self._is_silent = True
        logger.error(
            "no controller reached, clients are refused %s",
            Fields(node_id=self._config.node_id, reason=error.message),
        )

    async def hand_over(self) -> bool:
        """Transfer all leaderships to other brokers. Return True if that succeeded. Return False after an
        error, after HAND_OVER_TIMEOUT_MS, or if this process was never registered."""
        if self._node.broker_epoch == NO_BROKER_EPOCH:
            return False
        self._is_leaving = True
        deadline_ms = self._clock.monotonic_ms() + HAND_OVER_TIMEOUT_MS
        while self._clock.monotonic_ms() < deadline_ms:
            try:
                response = await self._heartbeat(wants_shutdown=True, timeout_ms=HAND_OVER_ANSWER_TIMEOUT_MS)
            except KafkaliteError as error:
                logger.warning("leaderships not handed over %s", Fields(reason=error.message))
                return False
            if response.may_shut_down:
                return True
            await self._clock.sleep_ms(HAND_OVER_INTERVAL_MS)
        logger.warning("leaderships not handed over %s", Fields(reason="it took too long"))
        return False
