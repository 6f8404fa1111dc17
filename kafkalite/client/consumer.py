"""Consumer: records out, in the order of their offsets, from partitions one names.

``fetch_state`` decides what to fetch and what comes next; here the network is driven and the user waits.
Nothing is fetched before somebody asks for records; then fetching runs ahead of the user as far as the
options allow.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from kafkalite.client import offsets
from kafkalite.client.cluster import FETCH_LANE, ClusterClient
from kafkalite.client.config import BootstrapServers, ConsumerSettings, consumer_config, merged
from kafkalite.client.connection import Connection
from kafkalite.client.delivery import wake
from kafkalite.client.fetch_state import (
    Asked,
    FetchedBatch,
    FetchLimits,
    FetchPlan,
    FetchState,
    PartitionState,
)
from kafkalite.client.retry import Backoff
from kafkalite.client.subscription import Subscription
from kafkalite.errors import ClientClosedError, ClientError, KafkaliteError
from kafkalite.model import EARLIEST, LATEST, OffsetAndTimestamp, Record, TopicPartition
from kafkalite.protocol.messages.data import FetchRequest, OffsetsForLeaderEpochRequest
from kafkalite.rng import Rng

if TYPE_CHECKING:
    import pyarrow

_FOREVER_MS: Final = 2**53


class _Fetch:
    """A fetch in flight. One per broker."""

    __slots__ = ("connection", "plan", "waits_until_ms")

    def __init__(self, plan: FetchPlan, connection: Connection, now_ms: int) -> None:
        self.plan = plan
        self.connection = connection
        self.waits_until_ms = now_ms + plan.max_wait_ms


class Consumer:
    """Reads records, without a group: it commits nothing, and nobody else decides what it reads.

    ::

        async with Consumer("orders", bootstrap_servers="localhost:9092") as consumer:
            async for record in consumer:
                print(record.address, record.key, record.value)

    ``topics`` (or ``pattern``, a regular expression that a topic's whole name must match) subscribe to all
    their partitions, those added later included. ``assign`` names partitions instead. A partition without a
    position starts where ``auto_offset_reset`` says as of the opening; one that appears later starts at its
    beginning, so that ``latest`` skips nothing that is new. Settings are those of
    ``config.CONSUMER_OPTIONS``, as arguments or, dotted, in ``config``; arguments win.
    """

    def __init__(
        self,
        *topics: str,
        bootstrap_servers: BootstrapServers | None = None,
        pattern: str | re.Pattern[str] | None = None,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.config = consumer_config(merged(config, {"bootstrap_servers": bootstrap_servers, **settings}))
        self._cluster = ClusterClient(
            self.config,
            allow_auto_topic_creation=self.config.allow_auto_create_topics and pattern is None,
            on_change=self._on_cluster_change,
            rng=rng,
        )
        self._cluster.long_poll_ms = self.config.fetch_max_wait_ms
        self._fetches: dict[int, _Fetch] = {}
        self._checking: set[int] = set()  # nodes with a question about epochs in flight
        self._state = FetchState(_limits(self.config))
        self._life = "new"
        self._subscription: Subscription | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._deferred_error: KafkaliteError | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        if topics or pattern is not None:
            self.subscribe(*topics, pattern=pattern)

    def __repr__(self) -> str:
        brokers = len(self._cluster.metadata.addresses)
        ahead = sum(state.buffered_bytes for state in self._state.partitions.values())
        count = len(self._state.partitions)
        return f"<Consumer {self._life}, {count} partitions @ {brokers} brokers, {ahead} bytes fetched ahead>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_life", "new") == "open":
            _warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Reach the cluster, and find out where subscribed partitions start. ``async with`` does this.

        Raises ConnectionFailedError; UnknownTopicOrPartitionError for a topic not there and not created.
        """
        if self._life != "new":
            raise ClientClosedError(f"a consumer starts once; this one is {self._life}")
        self._life = "starting"
        try:
            await self._cluster.start()
            self._life = "open"
            await self._find_subscribed()
            await self._find_positions(None)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close the connections; whoever waits for records gets ClientClosedError. May be called twice."""
        if self._life == "closed":
            return
        self._life = "closed"
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._wake()
        await self._cluster.close()
        self._state.assign({})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._life != "open":
            hint = "open it with 'async with' or start()" if self._life in {"new", "starting"} else ""
            raise ClientClosedError(f"the consumer is {self._life}", hint=hint)

    # --- what to read --------------------------------------------------------------------------

    def subscribe(self, *topics: str, pattern: str | re.Pattern[str] | None = None) -> None:
        """Read all partitions of these topics, instead of what was read before."""
        if bool(topics) == (pattern is not None):
            raise ClientError("subscribe to topics or to a pattern, one of the two")
        self._subscription = Subscription(topics, pattern, self.config.auto_offset_reset)
        self._cluster.topics = set(topics) if pattern is None else None
        self._state.assign({})
        if self._life == "open":
            self._cluster.request_refresh(urgent=True)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; those read before keep their positions."""
        self._subscription = None
        wanted = [TopicPartition(*tp) for tp in partitions]
        self._state.assign(dict.fromkeys(wanted, self.config.auto_offset_reset))
        if self._cluster.topics is None:
            self._cluster.topics = set()
        for tp in wanted:
            self._cluster.track(tp.topic)

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read, in order."""
        return sorted(self._state.partitions)

    async def _find_subscribed(self) -> None:
        """Wait until the subscribed topics are known."""
        subscription = self._subscription
        if subscription is None:
            return
        deadline_ms = self._cluster.now_ms() + offsets.MISSING_TOPIC_GRACE_MS
        for topic in subscription.topics:
            await self._cluster.topic_partition_count(topic, deadline_ms)
        self._assign_subscribed()
        subscription.is_late = True

    def _assign_subscribed(self) -> None:
        if self._subscription is None:
            return
        selection = self._subscription.select(self._cluster.metadata, self._cluster.now_ms())
        self._state.restart(selection.replaced)
        self._state.assign(selection.partitions)
        if selection.is_missing_some:
            self._cluster.request_refresh()

    def _on_cluster_change(self) -> None:
        """Metadata came, or a connection came or went."""
        if self._life != "open":
            return
        self._assign_subscribed()
        self._state.on_leaders(self._cluster.metadata.leader)
        self._wake()

    # --- where to read -------------------------------------------------------------------------

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to be given, or None before it is known."""
        return self._assigned(tp).position

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        """Give the record at ``offset`` next, or the first after it; out of range the reset policy rules."""
        if offset < 0:
            raise ClientError(
                f"{tp}: offset {offset} is below 0", hint="seek_to_beginning() and seek_to_end()"
            )
        self._assigned(tp).seek(offset)

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give the oldest record next; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.beginning_offsets(tps)).items():
            self._assigned(tp).seek(offset)

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give only records produced from now on; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.end_offsets(tps)).items():
            self._assigned(tp).seek(offset)

    async def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        """Give the first record that is not older next; only new records when all are."""
        self._assigned(tp)
        found = (await self.offsets_for_times({tp: timestamp_ms}))[tp]
        offset = found.offset if found is not None else (await self.end_offsets([tp]))[tp]
        self._assigned(tp).seek(offset)

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give no records of these until ``resume``; what was fetched of them is kept."""
        self._state.pause(self._named(partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        for tp in self._named(partitions):
            self._assigned(tp).paused = False
        self._wake()

    def paused(self) -> list[TopicPartition]:
        return sorted(tp for tp, state in self._state.partitions.items() if state.paused)

    def _named(self, partitions: Iterable[TopicPartition | Iterable[TopicPartition]]) -> list[TopicPartition]:
        """Partitions given one by one or as iterables; all that are assigned when none is given."""
        named: list[TopicPartition] = []
        for each in partitions:
            named += [each] if isinstance(each, TopicPartition) else [TopicPartition(*tp) for tp in each]
        if not partitions:
            return list(self._state.partitions)
        for tp in named:
            self._assigned(tp)
        return named

    def _assigned(self, tp: TopicPartition) -> PartitionState:
        state = self._state.partitions.get(tp)
        if state is None:
            raise ClientError(
                f"{TopicPartition(*tp)} is not assigned to this consumer", hint="assign() it first"
            )
        return state

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition that can be read."""
        return await self._list_offsets(dict.fromkeys(partitions, EARLIEST))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record of each partition that can be read."""
        return await self._list_offsets(dict.fromkeys(partitions, LATEST))

    async def _list_offsets(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        self._check_open()
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        return {tp: entry.offset for tp, entry in listed.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition whose timestamp is not less; None where all are older."""
        self._check_open()
        return await offsets.offsets_for_times(self._cluster, timestamps_ms)

    async def lag(self) -> dict[TopicPartition, int]:
        """How many offsets lie between each assigned partition's position and its end."""
        ends = await self.end_offsets(self._state.partitions)
        await self._find_positions(None)
        return {tp: max(0, end - (self._assigned(tp).position or 0)) for tp, end in ends.items()}

    # --- reading -------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Record]:
        """Records without end, as they come. A loop may be left and another begun; none is lost by that."""
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Record]:
        while True:
            cursor = self._state.next_cursor()
            if cursor is None:
                await self._wait_for_records(_FOREVER_MS)
                continue
            self._fetch()
            for record in cursor.iterator:
                yield record

    async def get_one(self, *, timeout_ms: int | None = None) -> Record | None:
        """The next record, or None when none came within ``timeout_ms`` (None: wait for it)."""
        records = await self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    async def get_many(
        self, max_records: int | None = None, *, timeout_ms: int | None = None
    ) -> list[Record]:
        """Up to ``max_records`` (max.poll.records) records, as soon as there is one.

        Empty when none came within ``timeout_ms`` (None: wait). Raises what went wrong with a partition:
        NoOffsetError, CorruptBatchError, a BrokerError; records before it are given first.
        """
        self._check_open()
        limit = max_records if max_records is not None else self.config.max_poll_records
        records: list[Record] = []
        deadline_ms = self._deadline_ms(timeout_ms)
        self._raise_deferred()
        while True:
            try:
                while len(records) < limit and (cursor := self._state.next_cursor()) is not None:
                    records += cursor.take(limit - len(records))
            except KafkaliteError as error:
                self._raise_or_defer(error, bool(records))
            self._fetch()
            if records or limit <= 0 or not await self._wait_for_records(deadline_ms):
                return records

    async def get_batches(self, *, timeout_ms: int | None = None) -> list[FetchedBatch]:
        """All batches that are there, as soon as there is one: columns, records or Arrow are made of them.

        Empty when none came within ``timeout_ms`` (None: wait). Raises as ``get_many``.
        """
        self._check_open()
        batches: list[FetchedBatch] = []
        deadline_ms = self._deadline_ms(timeout_ms)
        self._raise_deferred()
        while True:
            try:
                while (batch := self._state.next_batch()) is not None:
                    batches.append(batch)
            except KafkaliteError as error:
                self._raise_or_defer(error, bool(batches))
            self._fetch()
            if batches or not await self._wait_for_records(deadline_ms):
                return batches

    async def to_arrow(self, *, timeout_ms: int | None = None) -> pyarrow.Table:
        """What ``get_batches`` gives as one Arrow table, values not copied.

        Columns: topic, partition, offset, timestamp, key, value, headers. Without rows when nothing came.
        """
        from kafkalite.client.arrow import table

        return table(await self.get_batches(timeout_ms=timeout_ms))

    def _raise_or_defer(self, error: KafkaliteError, has_something: bool) -> None:
        """Give first what was taken before a partition's error; the next call raises it."""
        if not has_something:
            raise error
        self._deferred_error = error

    def _raise_deferred(self) -> None:
        """Raise the error that the last call kept back, unless a seek has mended it since."""
        error, self._deferred_error = self._deferred_error, None
        if error is not None and any(state.error is error for state in self._state.partitions.values()):
            raise error

    def _deadline_ms(self, timeout_ms: int | None) -> int:
        return _FOREVER_MS if timeout_ms is None else self._cluster.now_ms() + timeout_ms

    async def _wait_for_records(self, deadline_ms: int) -> bool:
        """Fetch, and return when there may be something new. False when ``deadline_ms`` passed first."""
        self._check_open()
        if not await self._find_positions(deadline_ms):
            return False
        self._fetch()
        if any(
            state.has_records or state.error for state in self._state.partitions.values() if not state.paused
        ):
            return True
        now_ms = self._cluster.now_ms()
        if deadline_ms <= now_ms:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        timer = None
        if deadline_ms < _FOREVER_MS:
            timer = asyncio.get_running_loop().call_later((deadline_ms - now_ms) / 1000, wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        self._check_open()
        return True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)

    async def _find_positions(self, deadline_ms: int | None) -> bool:
        """Ask where partitions without a position start. False when ``deadline_ms`` passed first."""
        wanted = self._state.without_offset()
        if self._subscription is not None:  # what it misses now is being looked for
            wanted = {tp: at for tp, at in wanted.items() if self._cluster.metadata.knows(tp)}
        if not wanted:
            return True
        try:
            async with asyncio.timeout(self._seconds_until(deadline_ms)):
                await self._find_positions_of(wanted)
        except TimeoutError:
            return False
        return True

    async def _find_positions_of(self, wanted: Mapping[TopicPartition, int]) -> None:
        seeks = {tp: self._state.partitions[tp].seek_count for tp in wanted}
        epochs = {tp: self._cluster.metadata.leader(tp).leader_epoch for tp in wanted}
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        for tp, entry in listed.items():
            state = self._state.partitions.get(tp)
            if state is not None and state.needs_offset and state.seek_count == seeks[tp]:
                state.seek(entry.offset, entry.leader_epoch)
                state.checked_epoch = max(epochs[tp], entry.leader_epoch)  # that leader has just told

    def _seconds_until(self, deadline_ms: int | None) -> float | None:
        if deadline_ms is None or deadline_ms >= _FOREVER_MS:
            return None
        return max(0, deadline_ms - self._cluster.now_ms()) / 1000

    # --- fetching ------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Send the fetches that are due."""
        if self._life != "open":
            return
        self._hang_up_on_stale_polls()
        now_ms = self._cluster.now_ms()
        self._check_epochs(now_ms)
        plans, leaderless = self._state.plan(now_ms, self._cluster.metadata.leader, self._is_busy)
        for plan in plans:
            self._send(plan, now_ms)
        if leaderless:
            self._cluster.request_refresh()
        self._arm_retry_timer(now_ms)

    def _check_epochs(self, now_ms: int) -> None:
        """Ask new leaders whether their logs have what was read from the old ones."""
        for node_id, questions in self._state.checks(now_ms, self._cluster.metadata.leader).items():
            connection = self._cluster.connection_now(node_id)
            if connection is None or node_id in self._checking:
                continue
            request = OffsetsForLeaderEpochRequest([question for question, _ in questions.values()])
            asked = {tp: at for tp, (_, at) in questions.items()}
            try:
                connection.request(
                    request, partial(self._on_checked, node_id, asked), self.config.request_timeout_ms
                )
            except KafkaliteError:
                self._state.on_fetch_failed(asked, now_ms, self._cluster.rng.random())
                continue
            self._checking.add(node_id)

    def _on_checked(
        self,
        node_id: int,
        asked: dict[TopicPartition, Asked],
        message: Any,
        _: memoryview,
        error: Exception | None,
    ) -> None:
        self._checking.discard(node_id)
        now_ms, chance = self._cluster.now_ms(), self._cluster.rng.random()
        if error is not None:
            self._state.on_fetch_failed(asked, now_ms, chance)
            self._cluster.request_refresh()
        elif self._state.on_checked(asked, message.partitions, now_ms, chance):
            self._cluster.request_refresh()
        if self._waiters:
            self._fetch_for_waiters()

    def _is_busy(self, node_id: int) -> bool:
        """Whether no fetch can be sent to this broker now; ``_on_cluster_change`` tells when one can."""
        return node_id in self._fetches or self._cluster.connection_now(node_id, FETCH_LANE) is None

    def _send(self, plan: FetchPlan, now_ms: int) -> None:
        config = self.config
        request = FetchRequest(
            plan.max_wait_ms,
            config.fetch_min_bytes,
            config.fetch_max_bytes,
            int(config.isolation_level),
            plan.partitions,
        )
        connection = self._cluster.connection_now(plan.node_id, FETCH_LANE)
        if connection is None:
            return
        fetch = _Fetch(plan, connection, now_ms)
        try:
            connection.request(
                request,
                partial(self._on_answer, fetch),
                config.request_timeout_ms + plan.max_wait_ms,
            )
        except KafkaliteError:
            self._state.on_fetch_failed(plan.asked, now_ms, self._cluster.rng.random())
            return
        self._fetches[plan.node_id] = fetch

    def _hang_up_on_stale_polls(self) -> None:
        """After a seek, a long poll in flight waits for what nobody wants, and answers come in order.

        Closing its connection is the way to be served before it ends; dialling anew costs a millisecond.
        """
        now_ms = self._cluster.now_ms()
        for node_id, fetch in list(self._fetches.items()):
            if fetch.waits_until_ms - now_ms <= _WORTH_HANGING_UP_MS:
                continue
            is_led = partial(self._is_led_by, node_id)
            if not self._state.serves(fetch.plan.asked, now_ms, is_led):
                del self._fetches[node_id]
                self._cluster.hang_up(node_id, FETCH_LANE)

    def _is_led_by(self, node_id: int, tp: TopicPartition) -> bool:
        return self._cluster.metadata.leader(tp).node_id == node_id

    def _on_answer(self, fetch: _Fetch, message: Any, payload: memoryview, error: Exception | None) -> None:
        node_id = fetch.plan.node_id
        if self._fetches.get(node_id) is not fetch:
            return  # hung up on
        del self._fetches[node_id]
        now_ms, chance = self._cluster.now_ms(), self._cluster.rng.random()
        if error is not None:
            self._state.on_fetch_failed(fetch.plan.asked, now_ms, chance)
            self._cluster.request_refresh()
        elif self._state.on_fetched(fetch.plan.asked, message.partitions, payload, now_ms, chance):
            self._cluster.request_refresh()
        if self._waiters:
            self._fetch_for_waiters()

    def _fetch_for_waiters(self) -> None:
        """Somebody waits: wake them when there is something for them to do, else poll again."""
        states = [state for state in self._state.partitions.values() if not state.paused]
        if any(state.has_records or state.error or state.needs_offset for state in states):
            self._wake()
        else:
            self._fetch()

    def _arm_retry_timer(self, now_ms: int) -> None:
        retry_ms = self._state.next_retry_ms(now_ms)
        if retry_ms is None or self._retry_timer is not None:
            return

        def again() -> None:
            self._retry_timer = None
            self._wake()

        loop = asyncio.get_running_loop()
        self._retry_timer = loop.call_later((retry_ms - now_ms) / 1000, again)


# A long poll with less than this to go is waited for.
_WORTH_HANGING_UP_MS: Final = 20


def _limits(config: Any) -> FetchLimits:
    return FetchLimits(
        fetch_max_wait_ms=config.fetch_max_wait_ms,
        fetch_max_bytes=config.fetch_max_bytes,
        max_partition_fetch_bytes=config.max_partition_fetch_bytes,
        check_crcs=config.check_crcs,
        backoff=Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms),
    )
