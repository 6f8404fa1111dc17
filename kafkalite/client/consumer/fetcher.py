"""Sends fetches, and adds the records of the responses to ``AssignedPartitions``.

``assigned_partitions`` decides which partitions are fetched. At most one fetch per broker is in flight. A
response is followed by another fetch only while a caller waits for records.
"""

# Tests: tests/client/test_consumer.py

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.cluster.connection import Connection
from kafkalite.client.cluster.signal import Signal
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.consumer.assigned_partitions import AssignedPartitions, FetchPlan, Requested
from kafkalite.client.consumer.decoding import Decode
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import (
    FetchRequest,
    FetchRequestV1,
    FetchResponseV1,
    OffsetsForLeaderEpochRequest,
)

FOREVER_MS: Final = 2**53

# A long poll that ends within this time, in milliseconds, is not cancelled.
_WORTH_DROPPING_MS: Final = 20


class _Fetch:
    """A fetch in flight. There is at most one per broker."""

    __slots__ = ("connection", "plan", "waits_until_ms")

    def __init__(self, plan: FetchPlan, connection: Connection, now_ms: int) -> None:
        self.plan = plan
        self.connection = connection
        self.waits_until_ms = now_ms + plan.max_wait_ms


class Fetcher:
    """Fetches records for ``assigned``. A caller that finds no records in ``assigned`` calls ``wait``."""

    def __init__(self, cluster: ClusterClient, config: ConsumerConfig, decode: Decode | None = None) -> None:
        self.assigned = AssignedPartitions(config, decode)
        self.config = config
        self._cluster = cluster
        cluster.long_poll_ms[Purpose.FETCH] = config.fetch_max_wait_ms
        self._fetches: dict[int, _Fetch] = {}
        self._checking: set[int] = set()  # ids of brokers with a truncation check in flight
        self._arrived = Signal()  # fired when records or errors have arrived
        self._retry_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def close(self) -> None:
        """Stop sending requests and wake all waiting callers."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self.wake()

    async def wait(self, deadline_ms: int) -> bool:
        """Return True when records or errors may have arrived, or when ``deadline_ms`` passes.

        If ``deadline_ms`` has already passed, return False at once.
        """
        now_ms = self._cluster.now_ms()
        if deadline_ms <= now_ms:
            return False
        await self._arrived.wait((deadline_ms - now_ms) / 1000 if deadline_ms < FOREVER_MS else None)
        return True

    def wake(self) -> None:
        """Wake all waiting callers."""
        self._arrived.fire()

    def fetch(self, only: frozenset[TopicPartition] | None = None) -> None:
        """Send the fetches that are due. ``only`` are the partitions that the caller reads (None: all)."""
        if self._is_closed:
            return
        now_ms = self._cluster.now_ms()
        if self.config.client_rack is not None:
            self._leave_followers(now_ms)
        self._drop_stale_polls()
        self._check_epochs(now_ms)
        plans, leaderless = self.assigned.plan(
            now_ms, self._cluster.metadata.leader, self._is_busy, only, self._is_open, self._is_asked
        )
        for plan in plans:
            self._send(plan, now_ms)
        if leaderless:
            self._cluster.request_refresh()
        self._arm_retry_timer(now_ms)

    def _check_epochs(self, now_ms: int) -> None:
        """Verify with new leaders that their logs contain the fetched records (KIP-320)."""
        for node_id, questions in self.assigned.checks(now_ms, self._cluster.metadata.leader).items():
            connection = self._cluster.connection_now(node_id)
            if connection is None or node_id in self._checking:
                continue
            request = OffsetsForLeaderEpochRequest([question for question, _ in questions.values()])
            requested = {tp: at for tp, (_, at) in questions.items()}
            try:
                connection.request(
                    request, partial(self._on_checked, node_id, requested), self.config.request_timeout_ms
                )
            except KafkaliteError:
                self.assigned.on_fetch_failed(requested, now_ms, self._cluster.rng.random())
                continue
            self._checking.add(node_id)

    def _on_checked(
        self,
        node_id: int,
        requested: dict[TopicPartition, Requested],
        message: Any,
        _: memoryview,
        error: Exception | None,
    ) -> None:
        self._checking.discard(node_id)
        now_ms, chance = self._cluster.now_ms(), self._cluster.rng.random()
        if error is not None:
            self.assigned.on_fetch_failed(requested, now_ms, chance)
            self._cluster.request_refresh()
        elif self.assigned.on_checked(requested, message.partitions, now_ms, chance):
            self._cluster.request_refresh()
        if self._arrived.is_awaited:
            self._fetch_for_waiters()

    def _leave_followers(self, now_ms: int) -> None:
        """Return to the leaders from followers that cannot be reached, or are not live any more."""
        for node_id in self.assigned.near_nodes():
            is_live = node_id in self._cluster.metadata.addresses
            if not is_live or self._cluster.is_away(node_id, Purpose.FETCH):
                self.assigned.leave_follower(node_id, now_ms)

    def _is_open(self, node_id: int) -> bool:
        """Whether there is a connection for fetches to a broker. Dials if necessary."""
        return self._cluster.connection_now(node_id, Purpose.FETCH) is not None

    def _is_asked(self, node_id: int, tp: TopicPartition) -> bool:
        """Whether a fetch of a partition is in flight to a broker."""
        fetch = self._fetches.get(node_id)
        return fetch is not None and tp in fetch.plan.requested

    def _is_busy(self, node_id: int) -> bool:
        """Whether no fetch may be sent: one is in flight, or no connection is open. Dials if necessary."""
        return node_id in self._fetches or not self._is_open(node_id)

    def _send(self, plan: FetchPlan, now_ms: int) -> None:
        config = self.config
        connection = self._cluster.connection_now(plan.node_id, Purpose.FETCH)
        if connection is None:
            return
        fields = (
            plan.max_wait_ms,
            config.fetch_min_bytes,
            config.fetch_max_bytes,
            int(config.isolation_level),
            plan.partitions,
        )
        request = FetchRequest(*fields)
        may_be_near = config.client_rack is not None and (plan.states_rack or plan.is_near)
        if may_be_near and connection.supports(FetchRequestV1):
            request = FetchRequestV1(*fields, config.client_rack)
        fetch = _Fetch(plan, connection, now_ms)
        try:
            connection.request(
                request, partial(self._on_response, fetch), config.request_timeout_ms + plan.max_wait_ms
            )
        except KafkaliteError:
            self.assigned.on_fetch_failed(plan.requested, now_ms, self._cluster.rng.random())
            return
        self._fetches[plan.node_id] = fetch

    def _drop_stale_polls(self) -> None:
        """Close the connection of each pending fetch that would delay a fetch of other partitions or offsets.

        That happens, for example, after a seek. Connecting again takes about a millisecond.
        """
        now_ms = self._cluster.now_ms()
        for node_id, fetch in list(self._fetches.items()):
            if fetch.waits_until_ms - now_ms <= _WORTH_DROPPING_MS:
                continue
            is_read = partial(self._is_read_from, node_id, now_ms)
            if not self.assigned.covers(fetch.plan.requested, now_ms, is_read):
                del self._fetches[node_id]
                self._cluster.drop_connection(node_id, Purpose.FETCH)

    def _is_read_from(self, node_id: int, now_ms: int, tp: TopicPartition) -> bool:
        state, leader = self.assigned.partitions[tp], self._cluster.metadata.leader(tp)
        return self.assigned.source(state, leader, now_ms, self._is_open) == node_id

    def _on_response(self, fetch: _Fetch, message: Any, payload: memoryview, error: Exception | None) -> None:
        node_id = fetch.plan.node_id
        if self._fetches.get(node_id) is not fetch:
            return  # the connection was dropped
        del self._fetches[node_id]
        now_ms, chance = self._cluster.now_ms(), self._cluster.rng.random()
        setbacks = self._cluster.setbacks
        if error is not None:
            self.assigned.on_fetch_failed(fetch.plan.requested, now_ms, chance)
            self._cluster.request_refresh()
            setbacks.note(("fetch", node_id), error, now_ms)
        else:
            if self.assigned.on_fetched(fetch.plan.requested, message.partitions, payload, now_ms, chance):
                self._cluster.request_refresh()
            if isinstance(message, FetchResponseV1):
                self.assigned.on_preferred(fetch.plan.requested, message.preferred_read_replicas, now_ms)
                for one in message.preferred_read_replicas:
                    self._is_open(one.node_id)  # dials
            setbacks.clear(("fetch", node_id))
            if setbacks or any(
                one.error_code or one.last_stable_offset < one.high_watermark for one in message.partitions
            ):
                self._note_partitions(fetch.plan.requested, now_ms)
        if self._arrived.is_awaited:
            self._fetch_for_waiters()

    def _note_partitions(self, requested: Iterable[TopicPartition], now_ms: int) -> None:
        setbacks = self._cluster.setbacks
        for tp in requested:
            state = self.assigned.partitions.get(tp)
            if state is not None and state.delayed_by is not None:
                setbacks.note(tp, state.delayed_by, now_ms)
            else:
                setbacks.clear(tp)

    def _fetch_for_waiters(self) -> None:
        """Wake waiting callers if a partition has records, an error or no position. Otherwise fetch.

        Paused partitions do not count.
        """
        states = [state for state in self.assigned.partitions.values() if not state.paused]
        if any(state.has_records or state.error or state.needs_offset for state in states):
            self.wake()
        else:
            self.fetch()

    def _arm_retry_timer(self, now_ms: int) -> None:
        retry_ms = self.assigned.next_retry_ms(now_ms)
        if retry_ms is None or self._retry_timer is not None:
            return

        def again() -> None:
            self._retry_timer = None
            self.wake()

        loop = asyncio.get_running_loop()
        self._retry_timer = loop.call_later((retry_ms - now_ms) / 1000, again)
