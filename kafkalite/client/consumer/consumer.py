"""Consumer: records out, in the order of their offsets, from partitions one names or a group hands out.

``assigned_partitions`` decides what to fetch and which records come next, ``fetcher`` does the requests, and
``group.session`` the membership in a group. Nothing is fetched before the first call for records; then
fetching runs ahead of the user as far as the options allow.
"""

# Long because Consumer is one class: subscriptions, positions, commits and reading share its state.

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from kafkalite.client.cluster import list_offsets as offsets
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.config import BootstrapServers, ConsumerSettings, consumer_config, merged
from kafkalite.client.consumer.assigned_partitions import PartitionState
from kafkalite.client.consumer.fetched_batch import FetchedBatch, RecordCursor
from kafkalite.client.consumer.fetcher import FOREVER_MS, Fetcher
from kafkalite.client.consumer.progress import Progress, committable_offsets
from kafkalite.client.consumer.subscription import Subscription
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import ClientClosedError, ClientError, KafkaliteError
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

if TYPE_CHECKING:
    import pyarrow

    from kafkalite.client.group.session import GroupSession

Committable = Record | Iterable[Record] | Mapping[TopicPartition, int | OffsetAndMetadata] | None
"""What ``commit`` takes: a record or several (done with), offsets to go on at, or None for all given."""


# How long the opening waits for the first partitions of a group's member.
_FIRST_ASSIGNMENT_MS: Final = 300

# Iteration gives so many records of a batch before the event loop has its turn.
_RECORDS_PER_LOOP_TURN: Final = 128


class Consumer:
    """Reads records.

    ::

        async with Consumer("orders", group_id="billing", bootstrap_servers="localhost:9092") as consumer:
            async for record in consumer:
                print(record.address, record.key, record.value)

    ``topics`` (or ``pattern``, a regular expression that a topic's whole name must match) subscribe to all
    their partitions, those added later included. With ``group_id`` the members of the group share them, and
    the group remembers how far it is; ``listener`` hears of partitions that come and go. Without, this
    consumer reads all of them, and nobody remembers. ``assign`` names partitions instead.

    A partition without a position starts at the group's offset, else where ``auto_offset_reset`` says as of
    the opening; one that appears later starts at its beginning, so that ``latest`` skips nothing that is new.
    Settings are those of ``config.CONSUMER_OPTIONS``, as arguments or, dotted, in ``config``; arguments win.

    For one task at a time: asking for records says that the user is done with those given before.
    """

    def __init__(
        self,
        *topics: str,
        bootstrap_servers: BootstrapServers | None = None,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
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
        self._fetcher = Fetcher(self._cluster, self.config)
        self._assigned = self._fetcher.assigned
        self._progress = Progress(self._assigned, is_at_most_once=self.config.is_at_most_once)
        self._group: GroupSession | None = None
        self._life = "new"
        self._subscription: Subscription | None = None
        self._deferred_error: KafkaliteError | None = None
        #: The partitions whose first positions are being looked up.
        self._finding: tuple[dict[TopicPartition, int], asyncio.Task[None]] | None = None
        if self.config.group_id is not None:
            from kafkalite.client.group.session import GroupSession

            self._group = GroupSession(self._cluster, self.config, self._progress, self._fetcher.wake)
        if topics or pattern is not None:
            self.subscribe(*topics, pattern=pattern, listener=listener)
        elif listener is not None:
            raise ClientError("a listener needs topics or a pattern", hint="give it to subscribe()")

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
        """Reach the cluster, join the group, and find out where to start. ``async with`` does this.

        Raises ConnectionFailedError; UnknownTopicOrPartitionError for a topic not there and not created; with
        a group what keeps it from being joined.
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
                # An offset may be in the open transaction of whoever died; the next call for records waits.
                await self._group.run_pending(self._cluster.now_ms() + _FIRST_ASSIGNMENT_MS)
            await self._find_positions(None)
        except BaseException:
            await self._close(is_done=False)
            raise
        return self

    async def close(self) -> None:
        """Leave the group, and close the connections. May be called twice.

        What the user is done with is committed first (with auto-commit), and the listener's ``on_revoked``
        called. Whoever waits for records gets ClientClosedError. Raises what ``commit_nowait`` failed with.
        """
        await self._close(is_done=True)

    async def _close(self, *, is_done: bool) -> None:
        """``is_done``: also with what was given last."""
        if self._life in {"closing", "closed"}:
            return
        was_open, self._life = self._life == "open", "closing"
        try:
            if self._group is not None and was_open:
                if is_done:
                    self._progress.mark_processed()
                self._fetcher.wake()
                await self._group.close(commits=self._progress.committable())
        finally:
            self._life = "closed"
            self._fetcher.close()
            await self._cluster.close()
            self._assigned.assign({})

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._close(is_done=error is None)
        except KafkaliteError as unfinished:
            if error is None:
                raise
            error.add_note(f"kafkalite: {unfinished}")

    def _check_open(self) -> None:
        if self._life != "open":
            hint = "open it with 'async with' or start()" if self._life in {"new", "starting"} else ""
            raise ClientClosedError(f"the consumer is {self._life}", hint=hint)

    # --- what to read --------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read all partitions of these topics, or this member's share, instead of what was read before.

        ``listener`` hears of partitions that come and go in the group.
        """
        if bool(topics) == (pattern is not None):
            raise ClientError("subscribe to topics or to a pattern, one of the two")
        if self._group is not None:
            self._cluster.topics = set(topics)
            self._group.subscribe(topics, _pattern_text(pattern), listener or RebalanceListener())
            if self._life == "open":
                self._group.start()
        elif listener is not None:
            raise ClientError("only the members of a group have a listener", hint="give a group_id")
        else:
            self._subscription = Subscription(topics, pattern, self.config.auto_offset_reset)
            self._cluster.topics = set(topics) if pattern is None else None
            self._assigned.assign({})
        if self._life == "open":
            self._cluster.request_refresh(urgent=True)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; those read before keep their positions.

        With a group it remembers what is committed, but does not know this consumer as a member.
        """
        if self._group is not None:
            self._group.check_unsubscribed()
        self._subscription = None
        wanted = [TopicPartition(*tp) for tp in partitions]
        self._assigned.assign(dict.fromkeys(wanted, self.config.auto_offset_reset))
        if self._group is not None:
            self._group.on_assign(wanted)
        if self._cluster.topics is None:
            self._cluster.topics = set()
        for tp in wanted:
            self._cluster.track(tp.topic)

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read, in order."""
        return sorted(self._assigned.partitions)

    async def _find_subscribed(self) -> None:
        """Wait until the subscribed topics are known."""
        deadline_ms = self._cluster.now_ms() + offsets.MISSING_TOPIC_GRACE_MS
        for topic in sorted(self._cluster.topics or ()):
            await self._cluster.topic_partition_count(topic, deadline_ms)
        if self._subscription is not None:
            self._assign_subscribed()
            self._subscription.is_late = True

    def _assign_subscribed(self) -> None:
        if self._subscription is None:
            return
        selection = self._subscription.select(self._cluster.metadata, self._cluster.now_ms())
        self._assigned.restart(selection.replaced)
        self._assigned.assign(selection.partitions)
        if selection.is_missing_some:
            self._cluster.request_refresh()

    def _on_cluster_change(self) -> None:
        """Metadata came, or a connection came or went."""
        if self._life != "open":
            return
        self._assign_subscribed()
        self._assigned.on_leaders(self._cluster.metadata.leader)
        self._fetcher.wake()

    # --- the group -----------------------------------------------------------------------------

    async def commit(self, what: Committable = None) -> None:
        """Return when the group has committed ``what``: everything given so far, unless it says otherwise.

        A record (or several) counts as done with, together with all before it in its partition. Offsets are
        those to go on at, {partition: offset}. Raises CommitFailedError when the partitions are another
        member's by now, MaxPollIntervalError when that is because nobody asked for records for too long.
        """
        await self._member().commit(self._offsets(what))

    def commit_nowait(self, what: Committable = None) -> None:
        """As ``commit``, in the background. A failure is raised by the next ``commit``, or by ``close``."""
        self._member().commit_later(self._offsets(what))

    async def committed(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed for these (or all assigned) partitions; None where it has not."""
        wanted = [
            TopicPartition(*tp) for tp in (self._assigned.partitions if partitions is None else partitions)
        ]
        found = await self._member().commits.fetch(wanted)
        return {tp: found.get(tp) for tp in wanted}

    def group_metadata(self) -> GroupMetadata:
        """As whom this consumer commits: for a producer's ``send_offsets``, refused when it is stale.

        Raises CommitFailedError when it was expelled since records were last asked for.
        """
        member = self._member()
        member.check_not_lost()
        return member.metadata

    def _member(self) -> GroupSession:
        if self._life != "closing":  # its listener may still commit
            self._check_open()
        if self._group is None:
            raise ClientError("this consumer is in no group", hint="give it a group_id")
        return self._group

    def _offsets(self, what: Committable) -> dict[TopicPartition, OffsetAndMetadata]:
        if what is None:
            return self.positions()
        return committable_offsets(what)

    # --- positions -----------------------------------------------------------------------------

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to be given, or None before it is known."""
        return self._state_of(tp).position

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Behind everything given so far: what ``commit`` commits, and a transaction's ``send_offsets``."""
        return self._progress.positions()

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        """Give the record at ``offset`` next, or the first after it; out of range the reset policy rules."""
        if offset < 0:
            raise ClientError(
                f"{tp}: offset {offset} is below 0", hint="seek_to_beginning() and seek_to_end()"
            )
        self._state_of(tp).seek(offset)

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give the oldest record next; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.beginning_offsets(tps)).items():
            self._state_of(tp).seek(offset)

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give only records produced from now on; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.end_offsets(tps)).items():
            self._state_of(tp).seek(offset)

    async def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        """Give the first record that is not older next; only new records when all are."""
        self._state_of(tp)
        found = (await self.offsets_for_times({tp: timestamp_ms}))[tp]
        offset = found.offset if found is not None else (await self.end_offsets([tp]))[tp]
        self._state_of(tp).seek(offset)

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give no records of these until ``resume``; what was fetched of them is kept."""
        self._assigned.pause(self._named(partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Fetch records of paused partitions again."""
        hidden = self._group.hidden if self._group is not None else {}
        for tp in self._named(partitions):
            if tp in hidden:
                hidden[tp] = False
            else:
                self._state_of(tp).paused = False
        self._fetcher.wake()

    def paused(self) -> list[TopicPartition]:
        """The partitions that ``pause`` holds, in order."""
        hidden = self._group.hidden if self._group is not None else {}
        return sorted(tp for tp, state in self._assigned.partitions.items() if hidden.get(tp, state.paused))

    def _named(self, partitions: Iterable[TopicPartition | Iterable[TopicPartition]]) -> list[TopicPartition]:
        """Partitions given one by one or as iterables; all that are assigned when none is given."""
        translate: list[TopicPartition] = []
        for each in partitions:
            translate += [each] if isinstance(each, TopicPartition) else [TopicPartition(*tp) for tp in each]
        if not partitions:
            return list(self._assigned.partitions)
        for tp in translate:
            self._state_of(tp)
        return translate

    def _state_of(self, tp: TopicPartition) -> PartitionState:
        state = self._assigned.partitions.get(tp)
        if state is None:
            raise ClientError(
                f"{TopicPartition(*tp)} is not assigned to this consumer",
                hint="assign() it first" if self._group is None else "assignment() names those that are",
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
        return await offsets.offsets_for_times(
            self._cluster, timestamps_ms, isolation_level=self.config.isolation_level
        )

    async def lag(self) -> dict[TopicPartition, int]:
        """How many offsets lie between each assigned partition's position and its end."""
        ends = await self.end_offsets(self._assigned.partitions)
        await self._find_positions(None)
        return {tp: max(0, end - (self._state_of(tp).position or 0)) for tp, end in ends.items()}

    async def _find_positions(self, deadline_ms: int | None) -> bool:
        """Ask where partitions without a position start.

        False when ``deadline_ms`` passed first; then the answer is still on its way.
        """
        wanted = self._assigned.without_offset()
        if self._subscription is not None or (self._group is not None and self._group.is_subscribed):
            known = {tp: at for tp, at in wanted.items() if self._cluster.metadata.knows(tp)}
            if len(known) < len(wanted):  # what is missing now is being looked for
                self._cluster.request_refresh()
            wanted = known
        if not wanted:
            return True
        if self._finding is None or self._finding[0] != wanted:
            self._finding = (wanted, self._cluster.spawn(self._find_positions_of(wanted)))
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
                state.checked_epoch = max(epochs[tp], entry.leader_epoch)  # that leader has just told

    def _seconds_until(self, deadline_ms: int | None) -> float | None:
        if deadline_ms is None or deadline_ms >= FOREVER_MS:
            return None
        return max(0, deadline_ms - self._cluster.now_ms()) / 1000

    # --- reading -------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Record]:
        """Records without end, as they come. A loop may be left and another begun; none is lost by that."""
        if self._group is None:
            return self._iterate()
        return self._iterate_in_group(self._group)

    async def _iterate(self) -> AsyncIterator[Record]:
        while True:
            cursor = self._assigned.next_cursor()
            if cursor is None:
                await self._wait_for_records(FOREVER_MS)
                continue
            self._fetcher.fetch()
            for record in cursor.iterator:
                yield record

    async def _iterate_in_group(self, group: GroupSession) -> AsyncIterator[Record]:
        """As ``_iterate``; coming back for the next record is the user's turn, and done with the last."""
        progress, is_at_most_once = self._progress, self.config.is_at_most_once
        while True:
            progress.mark_processed()
            await asyncio.sleep(0)  # whatever is fetched ahead, heartbeats go on
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
        """At most once: have the next max.poll.records of a batch committed before the first is given.

        Returns where what is committed ends.
        """
        batch, position = cursor.batch, cursor.position
        tp = TopicPartition(batch.topic, batch.partition)
        committed = group.commits.committed.get(tp)
        if committed is not None and committed.offset > position:
            return committed.offset
        end = min(position + self.config.max_poll_records, cursor.next_offset)
        await group.commit({tp: OffsetAndMetadata(end, batch.batch.header.leader_epoch)})
        return end

    async def get_one(self, *, timeout_ms: int | None = None) -> Record | None:
        """The next record, or None when none came within ``timeout_ms`` (None: wait for it)."""
        records = await self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    async def get_many(
        self, max_records: int | None = None, *, timeout_ms: int | None = None
    ) -> list[Record]:
        """Up to ``max_records`` (max.poll.records) records, as soon as there is one.

        Empty when none came within ``timeout_ms`` (None: wait). Raises what went wrong with a partition:
        NoOffsetError, CorruptBatchError, a BrokerError; records before it are given first. With a group also
        what its coordinator or its listener raised.
        """
        limit = max_records if max_records is not None else self.config.max_poll_records
        records: list[Record] = []
        deadline_ms = self._deadline_ms(timeout_ms)
        if not await self._begin_call(deadline_ms):
            return records
        while True:
            try:
                while len(records) < limit and (cursor := self._assigned.next_cursor()) is not None:
                    if self._group is not None:
                        batch = cursor.batch
                        self._progress.mark_returned(
                            TopicPartition(batch.topic, batch.partition), cursor.position
                        )
                    records += cursor.take(limit - len(records))
            except KafkaliteError as error:
                self._raise_or_defer(error, bool(records))
            self._fetcher.fetch()
            if records or limit <= 0 or not await self._wait_for_records(deadline_ms):
                await self._commit_returned()
                return records

    async def get_batches(self, *, timeout_ms: int | None = None) -> list[FetchedBatch]:
        """All batches that are there, as soon as there is one: columns, records or Arrow are made of them.

        Empty when none came within ``timeout_ms`` (None: wait). Raises as ``get_many``.
        """
        batches: list[FetchedBatch] = []
        deadline_ms = self._deadline_ms(timeout_ms)
        if not await self._begin_call(deadline_ms):
            return batches
        while True:
            try:
                while (batch := self._assigned.next_batch()) is not None:
                    batches.append(batch)
                    self._progress.mark_returned(
                        TopicPartition(batch.topic, batch.partition), batch.from_offset
                    )
            except KafkaliteError as error:
                self._raise_or_defer(error, bool(batches))
            self._fetcher.fetch()
            if batches or not await self._wait_for_records(deadline_ms):
                await self._commit_returned()
                return batches

    async def _begin_call(self, deadline_ms: int) -> bool:
        """The user asks again, so is done with what was given. False when ``deadline_ms`` passed first."""
        self._check_open()
        self._progress.mark_processed()
        if self._group is not None:
            self._group.touch()
            await asyncio.sleep(0)  # whatever is fetched ahead, heartbeats go on
            if self._group.has_pending and not await self._group.run_pending(deadline_ms):
                return False
        self._raise_deferred()
        return True

    async def _commit_returned(self) -> None:
        """At most once: what is about to be given is committed first. If that fails it is not given."""
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
        """What ``get_batches`` gives as one Arrow table, values not copied.

        Columns: topic, partition, offset, timestamp, key, value, headers. Without rows when nothing came.
        """
        from kafkalite.client.consumer.arrow import table

        return table(await self.get_batches(timeout_ms=timeout_ms))

    def _raise_or_defer(self, error: KafkaliteError, has_records_or_error: bool) -> None:
        """Give first what was taken before a partition's error; the next call raises it."""
        if not has_records_or_error:
            raise error
        self._deferred_error = error

    def _raise_deferred(self) -> None:
        """Raise the error that the last call kept back, unless a seek has mended it since."""
        error, self._deferred_error = self._deferred_error, None
        if error is not None and any(state.error is error for state in self._assigned.partitions.values()):
            raise error

    def _deadline_ms(self, timeout_ms: int | None) -> int:
        self._check_open()
        return FOREVER_MS if timeout_ms is None else self._cluster.now_ms() + timeout_ms

    async def _wait_for_records(self, deadline_ms: int) -> bool:
        """Fetch, and return when there may be something new. False when ``deadline_ms`` passed first."""
        self._check_open()
        if self._group is None:
            return await self._wait(deadline_ms)
        self._group.waiting_calls += 1
        try:
            return await self._group.run_pending(deadline_ms) and await self._wait(deadline_ms)
        finally:
            self._group.waiting_calls -= 1
            self._group.touch()

    async def _wait(self, deadline_ms: int) -> bool:
        if not await self._find_positions(deadline_ms):
            return False
        self._fetcher.fetch()
        if self._fetcher.has_records_or_error or (self._group is not None and self._group.has_pending):
            return True
        if not await self._fetcher.wait(deadline_ms):
            return False
        self._check_open()
        return True


def _pattern_text(pattern: str | re.Pattern[str] | None) -> str | None:
    """What the coordinator is told: it matches patterns itself. Raises ClientError."""
    if pattern is None or isinstance(pattern, str):
        if pattern is not None:
            re.compile(pattern)
        return pattern
    if pattern.flags & ~re.UNICODE:
        raise ClientError(
            "a group's pattern can't have flags", hint="write them into it, as in '(?i)orders.*'"
        )
    return pattern.pattern
