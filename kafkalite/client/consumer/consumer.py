"""Consumer: the public class. Reads records in offset order from assigned or subscribed partitions.

``assigned_partitions`` decides which partitions are fetched and which records are returned next, ``fetcher``
sends the requests, and ``group.session`` maintains the membership in a group. A call that reads records also
requests further ones, within the limits of the options, so that later calls find them buffered.
"""

# Long because Consumer is one class: subscriptions, positions, commits and reading share its state.

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Self, Unpack

from kafkalite.client.arguments import (
    checked_count,
    checked_int,
    checked_interceptors,
    checked_ints,
    checked_number,
    checked_partition,
    checked_partitions,
)
from kafkalite.client.cluster import list_offsets as offsets
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.retry import is_retriable
from kafkalite.client.config import (
    CONSUMER_OPTIONS,
    BootstrapServers,
    ConfigSource,
    ConsumerSettings,
    consumer_config,
    merged,
)
from kafkalite.client.consumer.assigned_partitions import PartitionState
from kafkalite.client.consumer.decoding import decoder
from kafkalite.client.consumer.fetched_batch import FetchedBatch, RecordCursor
from kafkalite.client.consumer.fetcher import FOREVER_MS, Fetcher
from kafkalite.client.consumer.progress import Progress, committable_offsets
from kafkalite.client.consumer.subscription import Subscription, topic_names
from kafkalite.client.forgotten import Forgettable, guard
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.client.interceptors import ConsumerInterceptor, passed_through
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    KafkaliteError,
    KafkaStorageError,
    NotSubscribedError,
    UnknownTopicOrPartitionError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import (
    EARLIEST,
    LATEST,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Record,
    TopicPartition,
)
from kafkalite.rng import Rng
from kafkalite.serde import AnyDeserializer, K, V

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from kafkalite.client.group.session import GroupSession

AnyRecord = Record[Any, Any]
Committable = AnyRecord | Iterable[AnyRecord] | Mapping[TopicPartition, int | OffsetAndMetadata] | None
"""The argument of ``commit``: processed records, next offsets to read, or None for all returned records."""


logger = logging.getLogger(__name__)

# How long start() waits for the first assignment of a group member.
_FIRST_ASSIGNMENT_MS: Final = 300

# Iteration returns this many records of a batch before the event loop runs other tasks.
_RECORDS_PER_LOOP_TURN: Final = 128


class Consumer(Generic[K, V]):
    """Reads records.

    ::

        async with Consumer("orders", group_id="billing", bootstrap_servers="localhost:9092") as consumer:
            async for record in consumer:
                print(record.address, record.key, record.value)

    ``topics``, or ``pattern`` (a regular expression for the whole name of a topic), subscribe to all
    partitions of these topics, including partitions that are added later. With ``group_id``, the members of
    the group share the partitions, and the group stores committed offsets; ``listener`` is called when
    partitions are assigned or revoked. Without a group, this consumer reads all partitions and no offsets are
    stored. ``assign`` selects partitions instead of topics.

    A partition starts at its committed offset. If it has none, ``auto_offset_reset`` determines the start.
    With ``latest``, partitions that are added to a topic while this consumer is subscribed to the topic start
    at their beginning, so that their first records are not skipped.

    ``settings`` are the options in ``config.CONSUMER_OPTIONS``. ``config`` is a mapping of further settings,
    whose names may be dotted, or "environment", which stands for the variables ``KAFKALITE_CLIENT_GROUP_ID``
    and so on. A keyword argument takes precedence over the same option in ``config``.

    ``key_deserializer`` and ``value_deserializer`` are functions of the bytes, or objects such as those of
    ``kafkalite.serde``. A record that they can't read raises SerializationError after the records before it
    were returned; ``seek(error.topic_partition, error.next_offset)`` skips it. ``interceptors`` receive the
    records before they are returned, and the committed offsets. Neither deserializers nor interceptors are
    used by ``get_batches``, ``to_arrow`` and ``to_pandas``, which return bytes.

    Use a consumer from one task at a time. Every call that reads records marks the records that earlier calls
    returned as processed.
    """

    _opener: str = "'async with'"  # the statement that opens it, for hints

    def __init__(
        self,
        *topics: str | Iterable[str],
        bootstrap_servers: BootstrapServers | None = None,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
        key_deserializer: AnyDeserializer[K] | None = None,
        value_deserializer: AnyDeserializer[V] | None = None,
        interceptors: Sequence[ConsumerInterceptor] = (),
        config: ConfigSource | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.clock = clock or SystemClock()  #: used by ``kafkalite.retrying`` for its delays
        given = {"bootstrap_servers": bootstrap_servers, **settings}
        self.config = consumer_config(merged(config, given, CONSUMER_OPTIONS))
        self._cluster = ClusterClient(
            self.config,
            allow_auto_topic_creation=self.config.allow_auto_create_topics and pattern is None,
            on_change=self._on_cluster_change,
            rng=rng,
        )
        self._cluster.warns_of_creation = True
        decode = decoder(key_deserializer, value_deserializer)
        self._fetcher = Fetcher(self._cluster, self.config, decode)
        chain = checked_interceptors(interceptors, ConsumerInterceptor)
        self._on_consume = [interceptor.on_consume for interceptor in chain]
        self._assigned = self._fetcher.assigned
        #: The records that interceptors returned and that no call has returned yet: those in place of one
        #: record of an iteration, and those above the limit of ``get_many``. Each item has the partition's
        #: state, and its seek count and position when the record was read.
        self._seen: list[tuple[PartitionState, int, int | None, deque[AnyRecord]]] = []
        self._progress = Progress(self._assigned, is_at_most_once=self.config.is_at_most_once)
        self._group: GroupSession | None = None
        self._life = "new"
        self._guard: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self._deferred_error: KafkaliteError | None = None
        self._subscribed: set[str] = set()
        #: Topics of a ``subscribe`` after ``start`` that are not in the metadata yet, and the deadline (ms)
        #: after which they count as missing.
        self._unfound: tuple[list[str], int] = ([], 0)
        #: The partitions whose start offsets are being looked up, and the task that does it.
        self._finding: tuple[dict[TopicPartition, int], asyncio.Task[None]] | None = None
        if self.config.group_id is not None:
            from kafkalite.client.group.session import GroupSession

            self._group = GroupSession(self._cluster, self.config, self._progress, self._fetcher.wake)
            self._group.commits.on_committed = [interceptor.on_commit for interceptor in chain]
        if topics or pattern is not None:
            self.subscribe(*topics, pattern=pattern, listener=listener)
        elif listener is not None:
            raise ClientError("a listener needs topics or a pattern", hint="pass it to subscribe()")

    def __repr__(self) -> str:
        brokers = len(self._cluster.metadata.addresses)
        ahead = sum(state.buffered_bytes for state in self._assigned.partitions.values())
        count = len(self._assigned.partitions)
        group = f" of group {self.config.group_id!r}" if self.config.group_id is not None else ""
        return (
            f"<Consumer {self._life}{group}, {count} partitions @ {brokers} brokers, "
            f"{ahead} bytes fetched ahead>"
        )

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_life", "new") == "open":
            _warn(f"{self!r} was never closed; use 'async with'", ResourceWarning, source=self, stacklevel=2)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect to the cluster, join the group, and find the start offsets. ``async with`` calls this.

        Raises ConnectionFailedError if no broker can be reached, UnknownTopicOrPartitionError if a topic does
        not exist and was not created, and ClientClosedError if the consumer was started or closed before.
        With a group, also raises the errors of joining and of the listener.
        """
        if self._life != "new":
            raise ClientClosedError(f"a consumer starts once; this one is {self._life}")
        self._life = "starting"
        try:
            await self._cluster.start()
            self._life = "open"
            await self._find_subscribed()
            if self._group is not None:
                self._group.start()
                if self._group.is_subscribed:
                    await self._group.joined()
                # A committed offset may be part of an open transaction. If it is still open after this time,
                # the next call for records waits.
                await self._group.run_pending(self._cluster.now_ms() + _FIRST_ASSIGNMENT_MS)
                self._guard = guard(
                    Forgettable("consumer", self, lambda: self._life == "open", self._close_at_end)
                )
                await asyncio.sleep(0)  # a task that has not begun can't handle the end of the loop
            await self._find_positions(None)
        except BaseException:
            await self._close(is_done=False)
            raise
        return self

    async def close(self) -> None:
        """Leave the group and close the connections. May be called twice.

        Before leaving, commits the offsets of all returned records (with auto-commit) and calls the
        listener's ``on_revoked``. Callers that wait for records receive ClientClosedError. Raises the error
        of a failed ``commit_nowait``, RequestTimeoutError if such a commit takes too long, and exceptions of
        the listener.
        """
        await self._close(is_done=True)

    async def stop(self) -> None:
        """Close the consumer, as ``close`` does. This is aiokafka's name."""
        await self.close()

    async def _close_at_end(self, timeout_ms: int) -> None:
        """Leave the group at the end of the event loop, without calling the program's listener.

        The offsets of the records of the last call are not committed, because the program may not have
        processed them.
        """
        assert self._group is not None, "only members of groups have a guard"
        self._group.listener = RebalanceListener()
        async with asyncio.timeout(timeout_ms / 1000):
            await self._close(is_done=False)

    async def _close(self, *, is_done: bool) -> None:
        """Close the consumer. If ``is_done``, the records of the last call count as processed.

        They do not if interceptors returned more records than the last call.
        """
        if self._life in {"closing", "closed"}:
            return
        was_open, self._life = self._life == "open", "closing"
        try:
            if self._group is not None and was_open:
                if is_done and not self._has_seen():
                    self._progress.mark_processed()
                self._fetcher.wake()
                await self._group.close(commits=self._progress.committable())
        finally:
            self._life = "closed"
            self._fetcher.close()
            await self._cluster.close()
            self._assigned.assign({})
            if self._guard is not None and self._guard is not asyncio.current_task():
                self._guard.cancel()
                await asyncio.wait({self._guard})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self._close(is_done=error is None)
        except KafkaliteError as unfinished:
            if error is None:
                raise
            error.add_note(f"kafkalite: {unfinished}")

    def _check_open(self) -> None:
        if self._life != "open":
            hint = f"open it with {self._opener} or start()" if self._life in {"new", "starting"} else ""
            raise ClientClosedError(f"the consumer is {self._life}", hint=hint)

    # --- assignment ----------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str | Iterable[str],
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read all partitions of these topics or, in a group, this member's share of them.

        Replaces the previous subscription or assignment. ``listener`` is called when the group assigns or
        revokes partitions. If a topic does not exist and is not created, UnknownTopicOrPartitionError is
        raised by ``start`` or, after ``start``, by the next call that finds no records. Raises ClientError
        unless there are either topics or a valid pattern, for an address among the topics, and for a listener
        without a group.
        """
        names = topic_names(topics)
        if bool(names) == (pattern is not None):
            raise ClientError("subscribe either to topics or to a pattern")
        if pattern is not None:
            _check_pattern(pattern)
        self._subscribed = set(names)
        if self._group is not None:
            self._cluster.topics = set(names)
            self._group.subscribe(names, _pattern_text(pattern), listener or RebalanceListener())
            if self._life == "open":
                self._group.start()
        elif listener is not None:
            raise ClientError("a listener needs a group", hint="pass a group_id")
        else:
            self._subscription = Subscription(names, pattern, self.config.auto_offset_reset)
            self._cluster.topics = set(names) if pattern is None else None
            self._assigned.assign({})
        if self._life == "open":
            self._unfound = (names, self._cluster.now_ms() + offsets.MISSING_TOPIC_GRACE_MS)
            self._cluster.request_refresh(urgent=True)

    async def unsubscribe(self) -> None:
        """Read no more topics or partitions, until the next ``subscribe`` or ``assign``. Leaves the group.

        Before leaving, commits the offsets of all returned records (with auto-commit) and calls the
        listener's ``on_revoked``, as ``close`` does. Raises exceptions of the listener.
        """
        self._check_open()
        self._progress.mark_processed()
        try:
            if self._group is not None:
                await self._group.unsubscribe(commits=self._progress.committable())
        finally:
            self._subscription = None
            self._subscribed = set()
            self._unfound = ([], 0)
            self._cluster.topics = set()
            self._assigned.assign({})
            self._fetcher.wake()

    def subscription(self) -> list[str]:
        """Return the topic names given to ``subscribe``, sorted; [] for a pattern."""
        return sorted(self._subscribed)

    def wrap_listener(self, wrap: Callable[[RebalanceListener], RebalanceListener]) -> None:
        """Replace the listener with ``wrap(listener)``, if there is one."""
        if self._group is not None and type(self._group.listener) is not RebalanceListener:
            self._group.listener = wrap(self._group.listener)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Partitions that were read before keep their positions.

        With a group, committed offsets are stored in the group, but this consumer is not a member of it.
        Raises ClientError if the consumer has a group and has subscribed.
        """
        wanted = checked_partitions(partitions)
        if self._group is not None:
            self._group.check_unsubscribed()
        self._subscription = None
        self._subscribed = set()
        self._unfound = ([], 0)
        self._assigned.assign(dict.fromkeys(wanted, self.config.auto_offset_reset))
        if self._group is not None:
            self._group.on_assign(wanted)
        if self._cluster.topics is None:
            self._cluster.topics = set()
        for tp in wanted:
            self._cluster.track(tp.topic)

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, sorted."""
        return sorted(self._assigned.partitions)

    async def _find_subscribed(self) -> None:
        """Wait until the subscribed topics are in the metadata. Without a group, assign their partitions.

        Raises the errors of ``ClusterClient.topic_partition_count``.
        """
        deadline_ms = self._cluster.now_ms() + offsets.MISSING_TOPIC_GRACE_MS
        for topic in sorted(self._cluster.topics or ()):
            await self._cluster.topic_partition_count(topic, deadline_ms)
        if self._subscription is not None:
            self._assign_subscribed()
            self._subscription.is_late = True
            if self._subscription.pattern is not None and not self._assigned.partitions:
                logger.warning(
                    "no topic matches the pattern yet %s", Fields(pattern=self._subscription.pattern.pattern)
                )

    async def _refresh_metadata(self) -> None:
        """Wait for metadata that is requested now. Without a group, added partitions are then assigned.

        There is no time limit while no broker responds: cancel the call instead.
        """
        self._check_open()
        await self._cluster.refreshed()

    async def _find_unfound(self, deadline_ms: int) -> bool:
        """Wait until the metadata contains the topics of a ``subscribe`` that was called after ``start``.

        Returns False after ``deadline_ms``. Raises UnknownTopicOrPartitionError if brokers respond but one of
        the topics has not appeared within MISSING_TOPIC_GRACE_MS, and a topic's error that is not retriable.
        """
        names, until_ms = self._unfound
        while names:
            try:
                await self._cluster.topic_partition_count(names[-1], min(deadline_ms, until_ms))
            except KafkaliteError as error:
                if not is_retriable(error):
                    raise
                if deadline_ms < until_ms:
                    return False
                if isinstance(error, UnknownTopicOrPartitionError):
                    raise
                until_ms = self._cluster.now_ms() + offsets.MISSING_TOPIC_GRACE_MS
            else:
                names.pop()
        return True

    def _check_selected(self) -> None:
        is_member = self._group is not None and self._group.is_subscribed
        if not self._assigned.partitions and self._subscription is None and not is_member:
            raise NotSubscribedError(
                "the consumer has no topics to read",
                hint="name topics when you create it, or call subscribe() or assign()",
            )

    def _assign_subscribed(self) -> None:
        if self._subscription is None:
            return
        selection = self._subscription.select(self._cluster.metadata, self._cluster.now_ms())
        self._assigned.restart(selection.replaced)
        self._assigned.assign(selection.partitions)
        if selection.is_missing_some:
            self._cluster.request_refresh()

    def _on_cluster_change(self) -> None:
        """Assign new partitions, end retry pauses of partitions with a new leader, and wake waiting calls."""
        if self._life != "open":
            return
        self._assign_subscribed()
        self._assigned.on_leaders(self._cluster.metadata.leader)
        self._fetcher.wake()

    # --- the group -----------------------------------------------------------------------------

    async def commit(self, what: Committable = None) -> None:
        """Commit ``what`` and return when the group has stored it.

        The default is all records returned so far. A record commits the offset after it in its partition; of
        several records, the one with the highest offset in each partition counts. A mapping commits the next
        offsets to read, {partition: offset}. Raises CommitFailedError if this member does not own one of the
        partitions, and MaxPollIntervalError, a subclass, if it lost them by reading no records for
        max.poll.interval.ms. Raises the error of an earlier ``commit_nowait`` unless this commit covers
        all partitions of that one.
        """
        await self._member().commit(self._offsets(what))

    def commit_nowait(self, what: Committable = None) -> None:
        """Commit ``what`` as ``commit`` does, but in the background.

        If this fails, the error is raised by ``close``, or by the next ``commit`` that does not cover all of
        these partitions.
        """
        self._member().commit_later(self._offsets(what))

    async def committed(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return {partition: committed offset, or None} for ``partitions`` (default: all assigned)."""
        wanted = checked_partitions(self._assigned.partitions if partitions is None else partitions)
        found = await self._member().commits.fetch(wanted)
        return {tp: found.get(tp) for tp in wanted}

    def group_metadata(self) -> GroupMetadata:
        """Return this member's identity for ``Producer.send_offsets``. Brokers refuse an outdated identity.

        Raises CommitFailedError if this member has lost partitions and has not read records since.
        """
        member = self._member()
        member.check_not_lost()
        return member.metadata

    @asynccontextmanager
    async def processing(self, record: Record[Any, Any]) -> AsyncIterator[None]:
        """Process ``record`` for longer than max.poll.interval.ms without leaving the group.

        ::

            async with consumer.processing(record):
                await an_hour_of_work(record)

        Heartbeats continue, and a warning is logged whenever max.poll.interval.ms has passed. Partitions that
        the coordinator revokes meanwhile are released at the next call for records. The coordinator waits for
        them at most max.poll.interval.ms. The body must not block the event loop. Without a group, does
        nothing.
        """
        if not isinstance(record, Record):
            raise ClientError(f"{record!r} is not a record", hint="pass the record that is being processed")
        address = record.address
        if self._group is not None:
            self._member().begin_processing(address)
        try:
            yield
        finally:
            if self._group is not None:
                self._group.end_processing(address)

    def _member(self) -> GroupSession:
        if self._life != "closing":  # the listener may still commit
            self._check_open()
        if self._group is None:
            raise ClientError("this consumer has no group", hint="pass a group_id")
        return self._group

    def _offsets(self, what: Committable) -> dict[TopicPartition, OffsetAndMetadata]:
        if what is None:
            return self.positions()
        return committable_offsets(what)

    # --- positions -----------------------------------------------------------------------------

    def position(self, tp: TopicPartition) -> int | None:
        """Return the next offset to read, or None if it is not known yet.

        Raises ClientError if ``tp`` is not assigned.
        """
        return self._state_of(tp).position

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return {assigned partition: the position after its returned records}, without unknown positions.

        The result is an argument for ``commit`` and ``Producer.send_offsets``.
        """
        return self._progress.positions()

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        """Continue with the record at ``offset``, or with the first record after it.

        If ``offset`` is out of range, auto.offset.reset applies. Raises ClientError if ``offset`` is below 0
        or ``tp`` is not assigned.
        """
        if checked_int("offset", offset) < 0:
            raise ClientError(
                f"{tp}: offset {offset} is below 0", hint="use seek_to_beginning() or seek_to_end()"
            )
        self._state_of(tp).seek(offset)

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Continue at the oldest record of each of these partitions (default: all assigned partitions)."""
        tps = self._named(partitions)
        for tp, offset in (await self.beginning_offsets(tps)).items():
            self._state_of(tp).seek(offset)

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Continue at the end of these partitions (default: all assigned), to read only new records."""
        tps = self._named(partitions)
        for tp, offset in (await self.end_offsets(tps)).items():
            self._state_of(tp).seek(offset)

    async def seek_to_committed(
        self, *partitions: TopicPartition | Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Continue at the committed offsets of these partitions (default: all assigned) and return them.

        A partition without a committed offset keeps its position.
        """
        committed = await self.committed(self._named(partitions))
        for tp, at in committed.items():
            if at is not None:
                self._state_of(tp).seek(at.offset, at.leader_epoch)
        return committed

    async def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        """Continue at the first record at or after this timestamp in ms, or at the end if there is none."""
        self._state_of(tp)
        found = (await self.offsets_for_times({tp: timestamp_ms}))[tp]
        offset = found.offset if found is not None else (await self.end_offsets([tp]))[tp]
        self._state_of(tp).seek(offset)

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Return no records of these partitions (default: all assigned) until ``resume``.

        Records already fetched are kept.
        """
        self._assigned.pause(self._named(partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Return records of these partitions (default: all assigned) again after ``pause``."""
        hidden = self._group.hidden if self._group is not None else {}
        for tp in self._named(partitions):
            if tp in hidden:
                hidden[tp] = False
            else:
                self._state_of(tp).paused = False
        self._fetcher.wake()

    def paused(self) -> list[TopicPartition]:
        """Return the assigned partitions that are paused, sorted."""
        hidden = self._group.hidden if self._group is not None else {}
        return sorted(tp for tp, state in self._assigned.partitions.items() if hidden.get(tp, state.paused))

    def _named(self, partitions: Iterable[TopicPartition | Iterable[TopicPartition]]) -> list[TopicPartition]:
        """Return ``partitions`` as a flat list, or all assigned partitions if it is empty.

        Raises ClientError for a partition that is not assigned.
        """
        if not partitions:
            return list(self._assigned.partitions)
        named: list[TopicPartition] = []
        for each in partitions:
            is_several = isinstance(each, Iterable) and not isinstance(each, TopicPartition | str)
            named += checked_partitions(each if is_several else [each])
        for tp in named:
            self._state_of(tp)
        return named

    def _state_of(self, tp: TopicPartition) -> PartitionState:
        state = self._assigned.partitions.get(checked_partition(tp))
        if state is None:
            raise ClientError(
                f"{tp} is not assigned to this consumer",
                hint="assign() it first" if self._group is None else "assignment() returns the assigned ones",
            )
        return state

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first readable offset of each partition."""
        return await self._list_offsets(dict.fromkeys(checked_partitions(partitions), EARLIEST))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end (exclusive) of the readable offsets of each partition.

        It is the high watermark, or with ``read_committed`` the last stable offset.
        """
        return await self._list_offsets(dict.fromkeys(checked_partitions(partitions), LATEST))

    async def _list_offsets(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        self._check_open()
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        return {tp: entry.offset for tp, entry in listed.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return {partition: offset and timestamp of its first record at or after the given time in ms}.

        The value is None if all records of the partition are older.
        """
        self._check_open()
        return await offsets.offsets_for_times(
            self._cluster,
            checked_ints("timestamp", timestamps_ms),
            isolation_level=self.config.isolation_level,
        )

    async def lag(self) -> dict[TopicPartition, int]:
        """Return {assigned partition: the number of offsets from its position to its end offset}."""
        ends = await self.end_offsets(self._assigned.partitions)
        await self._find_positions(None)
        return {tp: max(0, end - (self._state_of(tp).position or 0)) for tp, end in ends.items()}

    async def _find_positions(self, deadline_ms: int | None) -> bool:
        """Look up the start offsets of partitions without a position.

        Returns False if ``deadline_ms`` passes first. The lookup then continues in the background.
        """
        wanted = self._assigned.without_offset()
        if self._subscription is not None or (self._group is not None and self._group.is_subscribed):
            known = {tp: at for tp, at in wanted.items() if self._cluster.metadata.knows(tp)}
            if len(known) < len(wanted):  # look the missing partitions up in fresh metadata
                self._cluster.request_refresh()
            wanted = known
        if not wanted:
            return True
        if self._finding is None or self._finding[0] != wanted:
            task = self._cluster.spawn(self._find_positions_of(wanted))
            # Retrieve the error, even if no caller waits.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._finding = (wanted, task)
        finding = self._finding[1]
        if not (await asyncio.wait({finding}, timeout=self._seconds_until(deadline_ms)))[0]:
            return False
        self._finding = None
        if finding.cancelled():
            raise ClientClosedError("the consumer was closed")
        finding.result()
        return True

    async def _find_positions_of(self, wanted: Mapping[TopicPartition, int]) -> None:
        seeks = {tp: self._assigned.partitions[tp].seek_count for tp in wanted}
        epochs = {tp: self._cluster.metadata.leader(tp).leader_epoch for tp in wanted}
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        for tp, entry in listed.items():
            state = self._assigned.partitions.get(tp)
            if state is not None and state.needs_offset and state.seek_count == seeks[tp]:
                state.seek(entry.offset, entry.leader_epoch)
                state.checked_epoch = max(epochs[tp], entry.leader_epoch)  # this leader has just responded

    def _seconds_until(self, deadline_ms: int | None) -> float | None:
        if deadline_ms is None or deadline_ms >= FOREVER_MS:
            return None
        return max(0, deadline_ms - self._cluster.now_ms()) / 1000

    # --- reading -------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Record[K | None, V | None]]:
        """Iterate over records without end. Leaving the loop and starting another loop loses no record."""
        records = self._iterate() if self._group is None else self._iterate_in_group(self._group)
        return self._intercepted(records) if self._on_consume else records

    async def _intercepted(self, records: AsyncIterator[Record[Any, Any]]) -> AsyncIterator[Record[Any, Any]]:
        while True:
            while (seen := self._next_seen()) is not None:
                yield seen
            record = await anext(records)
            self._keep(record, passed_through(self._on_consume, [record]))

    def _keep(self, origin: AnyRecord, records: Iterable[AnyRecord]) -> None:
        """Keep ``records``, which interceptors returned for ``origin``, for the next call."""
        state = self._assigned.partitions[TopicPartition(origin.topic, origin.partition)]
        self._seen.append((state, state.seek_count, state.position, deque(records)))

    def _next_seen(self) -> AnyRecord | None:
        """Return the next record in ``_seen``, or None if there is none. Those of one record belong together,
        so a pause does not hold them back.

        Drops the records of a partition that is no longer assigned, or whose position was changed by a seek.
        """
        return self._seen[0][-1].popleft() if self._has_seen() else None

    def _has_seen(self) -> bool:
        """Whether there is a next record in ``_seen``. Removes the items without one from its beginning."""
        while self._seen:
            state, seek_count, position, records = self._seen[0]
            has_moved = state.seek_count != seek_count and state.position != position
            if records and not has_moved:
                return True
            del self._seen[0]
        return False

    async def _iterate(self) -> AsyncIterator[Record[Any, Any]]:
        while True:
            cursor = self._assigned.next_cursor()
            if cursor is None:
                await self._wait_for_records(FOREVER_MS)
                continue
            self._fetcher.fetch()
            for record in cursor.iterator:
                yield record

    async def _iterate_in_group(self, group: GroupSession) -> AsyncIterator[Record[Any, Any]]:
        """Iterate as a group member. Requesting the next record marks the previous record as processed."""
        progress, is_at_most_once = self._progress, self.config.is_at_most_once
        while True:
            progress.mark_processed()
            await asyncio.sleep(0)  # let heartbeats run, even if records are buffered
            if group.has_pending:
                self._check_open()
                await group.run_pending(FOREVER_MS)
            cursor = self._assigned.next_cursor()
            if cursor is None:
                await self._wait_for_records(FOREVER_MS)
                continue
            self._fetcher.fetch()
            position = cursor.position
            end = await self._commit_ahead(group, cursor) if is_at_most_once else cursor.next_offset
            end = min(end, position + _RECORDS_PER_LOOP_TURN)
            for record in cursor.iterator:
                progress.current_record = record
                yield record
                if group.has_pending or record.offset + 1 >= end:
                    break

    async def _commit_ahead(self, group: GroupSession, cursor: RecordCursor) -> int:
        """For at-most-once: commit the next records of ``cursor`` before they are returned.

        Commits at most max.poll.records offsets, and none if the next record is committed already. Returns
        the committed offset, before which iteration must stop.
        """
        batch, position = cursor.batch, cursor.position
        tp = TopicPartition(batch.topic, batch.partition)
        committed = group.commits.committed.get(tp)
        if committed is not None and committed.offset > position:
            return committed.offset
        end = min(position + self.config.max_poll_records, cursor.next_offset)
        await group.commit({tp: OffsetAndMetadata(end, batch.batch.header.leader_epoch)})
        return end

    async def get_one(self, *, timeout_ms: int | None = None) -> Record[K | None, V | None] | None:
        """Return the next record, or None if none arrives within ``timeout_ms`` (None: no limit)."""
        records = await self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    async def getone(self) -> Record[K | None, V | None]:
        """Return the next record. This is aiokafka's name for ``get_one`` without a time limit."""
        record = await self.get_one()
        assert record is not None, "without a time limit, there is a record"
        return record

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record[K | None, V | None]]]:
        """Return the records of ``get_many`` by partition. Does not wait by default. This is aiokafka's name.

        If ``partitions`` are given, return only their records; a later call can return the others. Raises
        ClientError for a partition that is not assigned.
        """
        only = frozenset(self._named(partitions)) if partitions else None
        return by_partition(await self._get_many(max_records, timeout_ms, only))

    async def get_many(
        self, max_records: int | None = None, *, timeout_ms: int | None = None
    ) -> list[Record[K | None, V | None]]:
        """Return up to ``max_records`` (default: max.poll.records) records as soon as there is at least one.

        Returns [] if none arrives within ``timeout_ms`` (None: no limit). Raises the error of a partition,
        such as NoOffsetError, CorruptBatchError or a BrokerError, after the records before it have been
        returned. KafkaStorageError is raised after the leader has responded with it for
        STORAGE_ERROR_PATIENCE_MS, because the leader's log is damaged or has failed and no other replica has
        taken over; the next call fetches again. With a group, also raises errors of the coordinator and of
        the listener. Raises NotSubscribedError if no topic is subscribed and no partition is assigned.
        """
        return await self._get_many(max_records, timeout_ms, None)

    async def _get_many(
        self, max_records: int | None, timeout_ms: int | None, only: frozenset[TopicPartition] | None
    ) -> list[Record[K | None, V | None]]:
        limit = (
            self.config.max_poll_records if max_records is None else checked_count("max_records", max_records)
        )
        until_ms = self._deadline_ms(timeout_ms)
        records: list[Record[Any, Any]] = []
        if self._seen and only is None:
            while len(records) < limit and (kept := self._next_seen()) is not None:
                records.append(kept)
            if records:
                if self._group is not None:
                    self._group.touch()
                return records

        def take() -> bool:
            while len(records) < limit and (cursor := self._assigned.next_cursor(only)) is not None:
                if self._group is not None:
                    batch = cursor.batch
                    self._progress.mark_returned(
                        TopicPartition(batch.topic, batch.partition), cursor.position
                    )
                records.extend(cursor.take(limit - len(records)))
            return limit <= 0

        await self._collect(records, take, timeout_ms, only)
        while self._on_consume and records:
            seen = list(passed_through(self._on_consume, records))
            left_ms = until_ms - self._cluster.now_ms()
            if seen or left_ms <= 0:
                if len(seen) > limit:
                    self._keep(records[-1], seen[limit:])
                return seen[:limit]
            records.clear()  # the interceptors left out all of them
            await self._collect(records, take, None if timeout_ms is None else left_ms, only)
        return records

    async def get_batches(self, *, timeout_ms: int | None = None) -> list[FetchedBatch]:
        """Return all fetched batches as soon as there is at least one, for use as columns, records or Arrow.

        Returns [] if none arrives within ``timeout_ms`` (None: no limit). Raises the errors of ``get_many``.
        """
        batches: list[FetchedBatch] = []

        def take() -> bool:
            while (batch := self._assigned.next_batch()) is not None:
                batches.append(batch)
                self._progress.mark_returned(TopicPartition(batch.topic, batch.partition), batch.from_offset)
            return False

        await self._collect(batches, take, timeout_ms)
        return batches

    async def _collect(
        self,
        found: list[Any],
        take: Callable[[], bool],
        timeout_ms: int | None,
        only: frozenset[TopicPartition] | None = None,
    ) -> None:
        """Call ``take``, which appends to ``found``, until ``take`` returns True or has appended an item.

        Between the calls, waits for records of the partitions ``only`` (None: all). Returns when
        ``timeout_ms`` (None: no limit) has passed. An error of ``take`` is raised at once if ``found`` is
        empty, and otherwise by the next call that reads records.
        """
        self._check_open()
        deadline_ms = self._deadline_ms(timeout_ms)
        if not await self._begin_call(deadline_ms):
            return
        is_done = False
        while not is_done:
            try:
                is_done = take() or bool(found)
            except KafkaliteError as error:
                if not found:
                    raise
                self._deferred_error, is_done = error, True
            self._fetcher.fetch()
            is_done = is_done or not await self._wait_for_records(deadline_ms, only)
        if not found:
            await asyncio.sleep(0)  # or a loop of calls with timeout_ms=0 would keep responses from arriving
        await self._commit_returned()

    def _deadline_ms(self, timeout_ms: int | None) -> int:
        """Return the time at which ``timeout_ms`` (None: no limit) will have passed.

        Raises ClientClosedError unless the consumer is open.
        """
        self._check_open()
        if timeout_ms is None:
            return FOREVER_MS
        deadline_ms: int = self._cluster.now_ms() + checked_number("timeout_ms", timeout_ms)
        return deadline_ms

    async def _begin_call(self, deadline_ms: int) -> bool:
        """Mark the records returned so far as processed, and do the group's pending work.

        Returns False if ``deadline_ms`` passes before the work is done. Raises the error that the last call
        deferred.
        """
        self._check_open()
        self._progress.mark_processed()
        if self._group is not None:
            self._group.touch()
            await asyncio.sleep(0)  # let heartbeats run, even if records are buffered
            if self._group.has_pending and not await self._group.run_pending(deadline_ms):
                return False
        self._raise_deferred()
        return True

    async def _commit_returned(self) -> None:
        """For at-most-once: commit records before they are returned. If that fails, they are not returned."""
        if self._group is None:
            return
        self._group.touch()
        if self.config.is_at_most_once:
            try:
                await self._group.commit(self._progress.positions(self._progress.unprocessed()))
            except BaseException:
                self._progress.rewind_returned()
                raise

    async def to_arrow(self, *, timeout_ms: int | None = None) -> pyarrow.Table:
        """Return the batches of ``get_batches`` as one Arrow table, without copying values.

        The columns are topic, partition, offset, timestamp, key, value and headers. The table has no rows if
        no batch arrives within ``timeout_ms`` (None: no limit). Raises MissingExtraError without pyarrow, and
        the errors of ``get_batches``.
        """
        from kafkalite.client.consumer.arrow import table

        return table(await self.get_batches(timeout_ms=timeout_ms))

    async def to_pandas(self, *, timeout_ms: int | None = None) -> pandas.DataFrame:
        """Return the table of ``to_arrow`` as a DataFrame. Raises MissingExtraError without pandas."""
        from kafkalite.client.consumer.data_frames import data_frame, require_pandas

        require_pandas()  # before records are taken, which would be lost
        return data_frame(await self.to_arrow(timeout_ms=timeout_ms))

    def _raise_deferred(self) -> None:
        """Raise the error that the last call deferred.

        An error that its partition has no more, for example after a seek, is dropped. A KafkaStorageError,
        which no partition keeps, is raised if its partition is still assigned.
        """
        error, self._deferred_error = self._deferred_error, None
        partitions = self._assigned.partitions
        is_kept = any(state.error is error for state in partitions.values())
        is_passing = isinstance(error, KafkaStorageError) and error.topic_partition in partitions
        if error is not None and (is_kept or is_passing):
            raise error

    async def _wait_for_records(
        self, deadline_ms: int, only: frozenset[TopicPartition] | None = None
    ) -> bool:
        """Fetch, and wait until records may have arrived or ``deadline_ms`` passes.

        Returns False if no time is left.
        """
        self._check_open()
        self._check_selected()
        if self._unfound[0] and not await self._find_unfound(deadline_ms):
            return False
        if self._group is None:
            return await self._wait(deadline_ms, only)
        self._group.waiting_calls += 1
        try:
            return await self._group.run_pending(deadline_ms) and await self._wait(deadline_ms, only)
        finally:
            self._group.waiting_calls -= 1
            self._group.touch()

    async def _wait(self, deadline_ms: int, only: frozenset[TopicPartition] | None) -> bool:
        if not await self._find_positions(deadline_ms):
            return False
        self._fetcher.fetch(only)
        if self._assigned.has_records_or_error(only) or (self._group is not None and self._group.has_pending):
            return True
        if not await self._fetcher.wait(deadline_ms):
            return False
        self._check_open()
        return True


def by_partition(
    records: Iterable[Record[K | None, V | None]],
) -> dict[TopicPartition, list[Record[K | None, V | None]]]:
    """Return ``records`` as {partition: its records, in order}."""
    found: dict[TopicPartition, list[Record[K | None, V | None]]] = {}
    for record in records:
        found.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
    return found


def _check_pattern(pattern: object) -> None:
    """Raise ClientError unless ``pattern`` is a regular expression of text."""
    try:
        is_text = isinstance(re.compile(pattern).pattern, str)  # type: ignore[call-overload]
    except (re.error, TypeError) as error:
        raise ClientError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    if not is_text:
        raise ClientError(f"the pattern {pattern!r} is not a str")


def _pattern_text(pattern: str | re.Pattern[str] | None) -> str | None:
    """Return the pattern as text, because the coordinator matches it. Raises ClientError if it has flags."""
    if pattern is None or isinstance(pattern, str):
        return pattern
    if pattern.flags & ~re.UNICODE:
        raise ClientError(
            "the pattern of a group can't have flags",
            hint="write them into the pattern, as in '(?i)orders.*'",
        )
    return pattern.pattern
