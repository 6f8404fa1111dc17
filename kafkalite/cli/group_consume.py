"""``kl consume -g``: reads as a member of a group, and commits the offsets of printed records."""

# Tests: tests/cli/test_group.py

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import PartialFailureError, TimedOutError
from kafkalite.cli.invocation import Invocation
from kafkalite.cli.offset_queries import matching_topics
from kafkalite.cli.output import plural
from kafkalite.cli.printers import Printer
from kafkalite.cli.stdio import printing
from kafkalite.errors import KafkaliteError, KafkaStorageError, RecordError

if TYPE_CHECKING:
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.model import TopicPartition

_POLL_RECORDS: Final = 10_000
_POLL_MS: Final = 500
#: How long a command that must end waits for the commit of the records that it has printed.
_LAST_COMMIT_S: Final = 1.0
#: A member without partitions for this many seconds prints what it waits for.
_EXPLAIN_S: Final = 0.8
#: It repeats that after so many seconds if other members are silent.
_REPEAT_S: Final = 10.0
#: A heartbeat that is late by so much is missing.
_LATE_MS: Final = 2_000
#: A member is idle if it has had no partition for this many seconds, because other members own all of them.
_IDLE_S: Final = 3.0
#: How long ``-e`` waits for a partition. A killed member, whose partitions this one may get, expires earlier.
_IDLE_LIMIT_S: Final = 60.0


def patience_ms(deadline: float | None) -> int:
    """Return the time limit of the next poll in ms: 0 or less if ``deadline`` has passed.

    ``deadline`` is in seconds of ``time.monotonic``; None means no deadline.
    """
    if deadline is None:
        return _POLL_MS
    return min(_POLL_MS, int((deadline - time.monotonic()) * 1000))


def timed_out(printed_count: int, wanted_count: int | None, settings: Mapping[str, Any]) -> TimedOutError:
    """Return the error to raise when a time limit has passed. ``wanted_count`` is the value of -n or None."""
    of = f" of {wanted_count:,}" if wanted_count is not None else ""
    hint = "a longer --timeout waits longer"
    if settings.get("isolation.level") == "read_committed":
        hint += "; records of an open transaction are held back until it ends: 'kl txn list' shows it"
    text = f"timed out after {plural(printed_count, 'record')}{of}{invocation.last_warning()}"
    return TimedOutError(text, hint=hint)


async def _commit(consumer: Consumer) -> None:
    """Commit the offsets of the printed records.

    If --timeout or a signal cancels this task, wait for the commit for at most _LAST_COMMIT_S seconds more.
    """
    import asyncio

    commit = asyncio.ensure_future(consumer.commit())
    try:
        await asyncio.shield(commit)
    except asyncio.CancelledError:
        await asyncio.wait({commit}, timeout=_LAST_COMMIT_S)
        commit.cancel()
        raise


@dataclass(frozen=True, slots=True)
class Holders:
    """The other members of the group that own partitions.

    ``silent_ms`` has the time since the last heartbeat of each. ``interval_ms`` is the heartbeat interval of
    the group, and ``session_ms`` its session timeout.
    """

    silent_ms: list[int]
    interval_ms: int
    session_ms: int
    missing: tuple[str, ...] = ()  #: subscribed topics that do not exist

    @property
    def late_ms(self) -> list[int]:
        return [silent_ms for silent_ms in self.silent_ms if silent_ms > self.interval_ms + _LATE_MS]

    def explain(self, group_id: str, waits: str = "") -> str:
        """Return a sentence that explains why this member has no partition.

        ``waits`` is inserted only if the other members have all partitions and their heartbeats are not late.
        """
        none = f"group {group_id!r} has no partition for this member"
        if self.missing:
            return f"{none}: there is no topic {', '.join(map(repr, self.missing))}"
        if not self.silent_ms:
            return f"{none} yet: its coordinator has not assigned them"
        late = self.late_ms
        if late:
            count = plural(len(late), "member")
            have = "has" if len(late) == 1 else "have"
            left_s = max(0, self.session_ms - min(late)) // 1000
            return (
                f"{none}: {count} that {have} partitions sent no heartbeat for {min(late) // 1000} s, and "
                f"{have} probably died; the session ends in {left_s} s, and the partitions get other owners"
            )
        last_s, left_s = max(self.silent_ms) // 1000, (self.session_ms - min(self.silent_ms)) // 1000
        return (
            f"{none}: others have all of them{waits}; the last heartbeat was {last_s} s ago, and a member"
            f" that was killed keeps its partitions until its session ends, in up to {left_s} s"
        )


@dataclass(slots=True)
class GroupJob:
    """Prints records as a group member, from the committed offsets or, by default, from the log start.

    Offsets are committed after their records were printed and flushed. Therefore a crash can cause records to
    be printed again, but not to be skipped.
    """

    topics: tuple[str, ...]
    group_id: str
    exit_at_end: bool
    count: int | None
    timeout_ms: int | None
    settings: dict[str, Any]
    printer: Printer
    printed_count: int = 0
    #: The end offsets of the assigned partitions when they were assigned.
    _ends: dict[TopicPartition, int] = field(default_factory=dict)
    _held_at: float = field(default_factory=time.monotonic)  #: the last time with an assigned partition
    _explained_at: float | None = None  #: the last time at which it printed what it waits for
    _subscribed: tuple[str, ...] = ()
    _unreadable: set[TopicPartition] = field(default_factory=set)  #: partitions with a damaged log or batch

    async def run(self, current: Invocation) -> None:
        """Print the records.

        With -n or -e, TimedOutError is raised when --timeout passes. Without them, it is raised only if the
        consumer has not started in time; later, --timeout ends the command without an error. With -e,
        TimedOutError is also raised if this member has had no partition for _IDLE_LIMIT_S seconds. If one of
        several assigned partitions cannot be read, the others are read, and PartialFailureError is raised at
        the end.
        """
        settings = {
            "group.id": self.group_id,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "max.poll.records": _POLL_RECORDS,
            **self.settings,
        }
        import asyncio

        now_s = asyncio.get_running_loop().time()
        deadline_s = None if self.timeout_ms is None else now_s + self.timeout_ms / 1000
        async with AsyncExitStack() as stack:

            async def start() -> Consumer:
                async with connect.admin(current) as admin:
                    self._subscribed = tuple(await matching_topics(admin, self.topics))
                consumer = connect.consumer(current, **settings)
                consumer.subscribe(*self._subscribed)
                return await stack.enter_async_context(consumer)

            consumer = await invocation.within(self.timeout_ms, start)
            try:
                async with asyncio.timeout_at(deadline_s) as limit:
                    await self._read(consumer, current)
            except TimeoutError:
                if not limit.expired():
                    raise
                if self.count is not None or self.exit_at_end:
                    raise timed_out(self.printed_count, self.count, self.settings) from None
        if self._unreadable:
            names = ", ".join(sorted(map(str, self._unreadable)))
            raise PartialFailureError(f"{names} could not be read to the end")

    async def _read(self, consumer: Consumer, current: Invocation) -> None:
        with printing(self.printer) as show:
            while self.count != self.printed_count:
                most = _POLL_RECORDS if self.count is None else self.count - self.printed_count
                try:
                    records = await consumer.get_many(min(most, _POLL_RECORDS), timeout_ms=_POLL_MS)
                except (KafkaStorageError, RecordError) as error:
                    self._give_up(consumer, error)
                    continue
                if records:
                    show(records)
                    self.printed_count += len(records)
                    await _commit(consumer)
                await self._explain(consumer, current)
                if self._is_idle(consumer):
                    if self.exit_at_end and await self._has_left_nothing(current):
                        return
                    if self.exit_at_end and time.monotonic() - self._held_at > _IDLE_LIMIT_S:
                        raise timed_out(self.printed_count, self.count, self.settings)
                elif self.exit_at_end and await self._is_at_end(consumer):
                    return

    def _give_up(self, consumer: Consumer, error: KafkaStorageError | RecordError) -> None:
        """Print why a partition cannot be read further, and continue with the other partitions.

        Raises ``error`` if it names no partition, or if no other assigned partition can be read.
        """
        partition = error.topic_partition
        if partition is None or not set(consumer.assignment()) - self._unreadable - {partition}:
            raise error
        if partition not in self._unreadable:
            invocation.say(f"{partition}: {error}")
        self._unreadable.add(partition)
        if partition in consumer.assignment():
            consumer.pause([partition])

    async def _is_at_end(self, consumer: Consumer) -> bool:
        """Whether this member has partitions and has read each up to the log end at the time of assignment.

        Unreadable partitions do not count. The end of a damaged log is unknown: the log is read until the
        damage is found, or until another replica leads and returns the end.
        """
        held = set(consumer.assignment()) - self._unreadable
        for tp in held - self._ends.keys():
            try:
                self._ends.update(await consumer.end_offsets([tp]))
            except KafkaStorageError:
                continue  # the next call asks again
        return bool(held) and all(
            tp in self._ends and (consumer.position(tp) or 0) >= self._ends[tp] for tp in held
        )

    async def _has_left_nothing(self, current: Invocation) -> bool:
        """Whether the group has committed all records of its partitions.

        These are the assigned partitions, and the partitions with a committed offset.
        """
        async with connect.admin(current) as admin:
            lags = await admin.group_lag(self.group_id)
        return not any(each.end_offset if each.committed is None else each.lag for each in lags)

    def _is_idle(self, consumer: Consumer) -> bool:
        """Whether this member has had no partition for _IDLE_S seconds."""
        now = time.monotonic()
        if consumer.assignment():
            self._held_at = now
        return now - self._held_at > _IDLE_S

    async def _explain(self, consumer: Consumer, current: Invocation) -> None:
        """If this member has no partition, print why. Repeat this only while owners send no heartbeats."""
        now = time.monotonic()
        if consumer.assignment():
            self._explained_at = None
            return
        is_first = self._explained_at is None
        since = self._held_at if self._explained_at is None else self._explained_at
        if now - since < (_EXPLAIN_S if is_first else _REPEAT_S):
            return
        self._explained_at = now
        waits = "; waiting until they leave, or have read everything" if self.exit_at_end else ""
        try:
            holders = await self._holders(current, consumer.group_metadata().member_id)
        except KafkaliteError:  # the consumer itself reports what is wrong with the coordinator
            holders = Holders([], 0, 0)
        if is_first or holders.late_ms:
            invocation.say(holders.explain(self.group_id, waits))

    async def _holders(self, current: Invocation, member_id: str) -> Holders:
        async with connect.admin(current) as admin:
            described = await admin.describe_group(self.group_id)
            node_id = (await admin.describe_cluster()).brokers[0].node_id
            settings = await admin.describe_configs("broker", str(node_id))
            topics = {each.name for each in await admin.list_topics()}
        return Holders(
            [
                each.last_heartbeat_ms_ago
                for each in described.members
                if each.assignment and each.member_id != member_id
            ],
            int(settings["group.consumer.heartbeat.interval.ms"].value or 0),
            int(settings["group.consumer.session.timeout.ms"].value or 0),
            tuple(name for name in self._subscribed if name not in topics),
        )
