"""A consumer's membership in its group. Partitions are added and revoked inside the user's calls.

Heartbeats in the background only record the coordinator's responses. The effects of a new assignment
(commits, calls of the listener, start positions) happen in ``run_pending``, which the consumer awaits in
calls that read records. There is one exception: as soon as a response revokes a partition, no more of its
records are returned (``hidden``).
"""

# Long because a session is one state: membership, assignment, commits and the poll interval.

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import GROUP_KEY, CoordinatorLink
from kafkalite.client.cluster.list_offsets import MISSING_TOPIC_GRACE_MS
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.group.commits import OffsetCommits, Offsets
from kafkalite.client.group.heartbeats import EXPELLED, Heartbeats
from kafkalite.client.group.membership import MemberSettings, Membership
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    CommitFailedError,
    KafkaliteError,
    MaxPollIntervalError,
    RequestTimeoutError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import GroupMetadata, OffsetAndMetadata, RecordAddress, TopicPartition

logger = logging.getLogger(__name__)

# The time limit of automatic commits at a rebalance and when the consumer closes.
AUTO_COMMIT_MS: Final = 5_000

# The shortest interval of automatic commits, whatever auto.commit.interval.ms is.
_MIN_COMMIT_INTERVAL_MS: Final = 10

# The longest interval between checks of max.poll.interval.ms.
_WATCH_MS: Final = 1_000

# A number that timers accept, for a wait without a limit.
_LONG_S: Final = 86_400.0

_Committed = dict[TopicPartition, OffsetAndMetadata]


class ReadingProgress(Protocol):
    """The consumer's partitions and positions, as a GroupSession uses them. Implemented by ``Progress``."""

    @property
    def partitions(self) -> Collection[TopicPartition]: ...
    def committable(self) -> dict[TopicPartition, OffsetAndMetadata]: ...
    def has_moved(self) -> bool: ...
    def add(self, partitions: Mapping[TopicPartition, str]) -> None: ...
    def start_at(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None: ...
    def remove(self, partitions: Iterable[TopicPartition]) -> None: ...
    def hide(self, tp: TopicPartition) -> bool: ...
    def show(self, tp: TopicPartition, *, paused: bool) -> None: ...


class GroupSession:
    """One consumer's membership in its group.

    ``wake`` is called when calls that wait for records must call ``run_pending``. Invariant: while the
    consumer is subscribed, it returns only records of partitions that the membership owns.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        config: ConsumerConfig,
        progress: ReadingProgress,
        wake: Callable[[], None],
    ) -> None:
        assert config.group_id is not None, "a session is in a group"
        self.membership = Membership(
            MemberSettings(
                config.group_id,
                cluster.rng.randbytes(16).hex(),
                config.group_instance_id,
                config.group_remote_assignor,
                config.max_poll_interval_ms,
            )
        )
        self.link = CoordinatorLink(cluster, GROUP_KEY, config.group_id)
        self.commits = OffsetCommits(
            cluster,
            self.link,
            config.isolation_level,
            identity=lambda: self.metadata,
            next_identity=lambda before, deadline_ms: self._heartbeats.wait_for_new_epoch(
                before.member_epoch, deadline_ms
            ),
            on_expelled=self._on_expelled,
            is_ours=self._is_ours,
        )
        self.listener = RebalanceListener()
        self.has_pending = False  #: whether ``run_pending`` has work to do
        #: Partitions whose records are not returned, and whether the user had paused them.
        self.hidden: dict[TopicPartition, bool] = {}
        self.waiting_calls = 0  #: the number of calls that wait for records
        #: Records between ``begin_processing`` and ``end_processing``, and when their processing began (ms).
        self._processing: dict[RecordAddress, int] = {}
        self.is_subscribed = False
        self._cluster = cluster
        self._config = config
        self._progress = progress
        self._wake = wake
        self._lost: dict[TopicPartition, str] = {}  # lost partitions not reported to the listener yet
        self._lost_because: KafkaliteError | None = None
        self._is_closing = False
        self._partition_counts: dict[str, int] = {}  # partition count of each topic at its first assignment
        self._pending_task: asyncio.Task[Any] | None = None
        self._pending_lock = asyncio.Lock()
        #: The partitions to be added whose committed offsets are being fetched, and the task that does it.
        self._reading_offsets: tuple[dict[TopicPartition, str], asyncio.Task[_Committed]] | None = None
        self._asked_ms = 0
        self._watch_timer: asyncio.TimerHandle | None = None
        self._commit_timer: asyncio.TimerHandle | None = None
        self._is_commit_due = False
        self._heartbeats = Heartbeats(
            cluster,
            config,
            self.link,
            self.membership,
            on_assignment=self._on_assignment,
            on_expelled=self._on_expelled,
            on_failed=self._on_failed,
        )

    def __repr__(self) -> str:
        return repr(self.membership)

    # --- calls of the consumer -----------------------------------------------------------------

    @property
    def metadata(self) -> GroupMetadata:
        """This member's identity in commits, or only the group id if the user assigned the partitions."""
        if self.is_subscribed:
            return self.membership.metadata
        return GroupMetadata(self.membership.settings.group_id)

    def subscribe(self, topics: Sequence[str], pattern: str | None, listener: RebalanceListener) -> None:
        """Subscribe to these topics. The coordinator then revokes the partitions of other topics."""
        self.is_subscribed = True
        self.listener = listener
        self._heartbeats.error = None
        self._heartbeats.is_away = False
        self.membership.subscribe(topics, pattern)
        self._heartbeats.poke()

    def check_unsubscribed(self) -> None:
        """Raise ClientError if this consumer has subscribed: then the coordinator assigns its partitions."""
        if self.is_subscribed:
            raise ClientError(
                "a member of a group is assigned its partitions by the coordinator",
                hint="use either assign() or subscribe()",
            )

    def on_assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Handle ``Consumer.assign``: the next ``run_pending`` fetches the committed offsets."""
        kept = set(partitions)
        self.membership.release([tp for tp in self.membership.owned if tp not in kept])
        self._cancel_reading(dict.fromkeys(kept, ""))
        self._notify_pending()

    def start(self) -> None:
        """Start heartbeats and auto-commit, if they have not been started."""
        self.touch()
        if self._watch_timer is None:
            self._watch()
            self._arm_auto_commit()
        if self.is_subscribed:
            self._heartbeats.start()

    async def joined(self) -> None:
        """Wait until this consumer is a member, if it subscribed. Raises the error that prevents joining."""
        if self.is_subscribed:
            await self._heartbeats.joined()

    def touch(self) -> None:
        """Record that the user reads records now (for max.poll.interval.ms)."""
        self._asked_ms = self._cluster.now_ms()

    def begin_processing(self, address: RecordAddress) -> None:
        """Suspend max.poll.interval.ms while the user processes this record."""
        self._processing[address] = self._cluster.now_ms()

    def end_processing(self, address: RecordAddress) -> None:
        """Apply max.poll.interval.ms again after ``begin_processing`` of this record."""
        self._processing.pop(address, None)
        self.touch()

    async def close(self, *, commits: Offsets) -> None:
        """Commit ``commits`` if enable.auto.commit is set, call the listener, and leave the group.

        Raises the error of an earlier ``commit_later``, RequestTimeoutError if queued commits do not end in
        time, and exceptions of the listener. Every step but the listener has a time limit, so that an
        unreachable coordinator does not delay closing for long.
        """
        self._is_closing = True
        for timer in (self._watch_timer, self._commit_timer):
            if timer is not None:
                timer.cancel()
        failed: KafkaliteError | None = None
        if commits and self._config.enable_auto_commit:
            await self._auto_commit(commits)
        try:
            await self._revoke_all()
            async with asyncio.timeout(AUTO_COMMIT_MS / 1000):
                await self.commits.drain()
        except TimeoutError:
            failed = RequestTimeoutError(f"offsets were not committed within {AUTO_COMMIT_MS} ms of closing")
        except KafkaliteError as error:
            failed = error
        finally:
            await self._heartbeats.stop()
        if failed is not None:
            raise failed

    async def unsubscribe(self, *, commits: Offsets) -> None:
        """Commit ``commits`` if enable.auto.commit is set, call the listener, and leave the group for good.

        The consumer may subscribe again. Raises exceptions of the listener, after leaving the group.
        """
        if commits and self._config.enable_auto_commit:
            await self._auto_commit(commits)
        try:
            await self._revoke_all()
            await self._wait_queued_commits()
        finally:
            if self.is_subscribed:
                self.is_subscribed = False
                if self.membership.is_member:
                    self._heartbeats.leave()
                self._heartbeats.is_away = True  # until the next ``subscribe``
                self._heartbeats.error = None
            self._remove(self.membership.on_expelled())
            self._cancel_reading({})
            self._lost, self._lost_because = {}, None
            self.listener = RebalanceListener()
            self.has_pending = False

    async def _revoke_all(self) -> None:
        if self._lost:
            await self._report_lost()
        if self.is_subscribed and self.membership.owned:
            await self._call_listener(self.listener.on_revoked, self.membership.owned)

    # --- pending work --------------------------------------------------------------------------

    async def run_pending(self, deadline_ms: int) -> bool:
        """Revoke and add partitions as assigned, and call the listener.

        Returns False if ``deadline_ms`` passes first; the next call then continues. Raises the error that
        ended the membership, exceptions of the listener, and errors of the coordinator.
        """
        self.touch()
        if self._pending_task is asyncio.current_task():
            return True  # called by the listener, which seeks or commits
        async with self._pending_lock:
            self._pending_task = asyncio.current_task()
            try:
                return await self._run_pending(deadline_ms)
            finally:
                self._pending_task = None
                self.touch()

    async def _run_pending(self, deadline_ms: int) -> bool:
        membership = self.membership
        self.has_pending = False
        self._commit_if_due()
        while True:
            if self._lost:
                await self._report_lost()
            elif self._heartbeats.error is not None:
                self.has_pending = True
                raise self._heartbeats.error.with_traceback(None)
            elif self._heartbeats.is_away and self.is_subscribed:
                self._heartbeats.is_away = False
                self._heartbeats.poke()
            elif self.is_subscribed and (revoking := membership.revoking()):
                await self._revoke(revoking)
            elif adding := membership.adding() if self.is_subscribed else self._without_start():
                if not await self._add_partitions(adding, deadline_ms):
                    self.has_pending = True
                    return False
            else:
                return True

    def _without_start(self) -> dict[TopicPartition, str]:
        """Return the partitions that the user assigned and whose committed offsets have not been fetched."""
        placed = self.membership.owned
        return {tp: "" for tp in self._progress.partitions if tp not in placed}

    async def _report_lost(self) -> None:
        lost = dict(self._lost)
        try:
            await self._call_listener(self.listener.on_lost, lost)
        except asyncio.CancelledError:
            self.has_pending = True  # report again in the next call
            raise
        except Exception:
            self._remove_lost(lost)
            raise
        self._remove_lost(lost)

    def _remove_lost(self, lost: dict[TopicPartition, str]) -> None:
        self._lost = {tp: topic_id for tp, topic_id in self._lost.items() if tp not in lost}
        self._remove(lost)

    async def _revoke(self, partitions: dict[TopicPartition, str]) -> None:
        """Commit processed records, call the listener and release the partitions, even if a step fails.

        If this method is cancelled, the partitions stay owned, and the next call repeats all steps.
        """
        problem: Exception | None = None
        try:
            if self._config.enable_auto_commit:
                offsets = self._progress.committable()
                await self._auto_commit({tp: at for tp, at in offsets.items() if tp in partitions})
            try:
                await self._call_listener(self.listener.on_revoked, partitions)
            except Exception as error:
                problem = error
            await self._wait_queued_commits()
        except asyncio.CancelledError:
            self.has_pending = True
            raise
        self._release(partitions)
        if problem is not None:
            raise problem

    async def _wait_queued_commits(self) -> None:
        """Wait up to AUTO_COMMIT_MS until the commits of ``commit_later`` are written.

        If they were written after the next owner's commits, they would move offsets back. A commit that takes
        longer is dropped when its partition is revoked.
        """
        try:
            async with asyncio.timeout(AUTO_COMMIT_MS / 1000):
                await self.commits.wait_queued()
        except TimeoutError:
            logger.warning(
                "offsets were not committed before a rebalance %s", Fields(timeout_ms=AUTO_COMMIT_MS)
            )

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        still = [tp for tp in partitions if tp in self.membership.owned]
        self._remove(still)
        self.membership.release(still)
        self._heartbeats.poke()

    async def _add_partitions(self, partitions: dict[TopicPartition, str], deadline_ms: int) -> bool:
        """Add partitions at their committed offsets, and call the listener.

        Returns False if ``deadline_ms`` passes first. Raises errors of the coordinator and of the listener.
        """
        try:
            committed = await self._committed(partitions, deadline_ms)
        except EXPELLED:
            return True  # already recorded; continue with the lost partitions
        except KafkaliteError:
            self.has_pending = True
            raise
        if committed is None:
            return self._reading_offsets is None  # no longer assigned; continue
        if self.is_subscribed:
            adding = self.membership.adding()
            partitions = {tp: topic_id for tp, topic_id in partitions.items() if adding.get(tp) == topic_id}
        self.membership.take(partitions)
        for tp in partitions:
            self._cluster.track(tp.topic)
        if self.is_subscribed:
            self._progress.add({tp: self._reset_of(tp) for tp in partitions})
        self._progress.start_at({tp: at for tp, at in committed.items() if tp in partitions})
        try:
            if partitions and self.is_subscribed:
                await self._call_listener(self.listener.on_assigned, partitions)
        except BaseException:  # the listener may not have set positions, so add them again in the next call
            self.has_pending = True
            self._release(partitions)
            raise
        self._heartbeats.poke()
        return True

    async def _committed(self, partitions: dict[TopicPartition, str], deadline_ms: int) -> _Committed | None:
        """Return the committed offsets of ``partitions``, or None if ``deadline_ms`` passes first.

        After the deadline, fetching continues for the next call. Also returns None if one of the partitions
        was revoked meanwhile; then ``_reading_offsets`` is None.
        """
        if self._reading_offsets is None or self._reading_offsets[0] != partitions:
            task = self._cluster.spawn(self._find_committed(list(partitions)))
            # Retrieve the error, even if no caller waits.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._reading_offsets = (partitions, task)
        reading = self._reading_offsets
        seconds = max(0, deadline_ms - self._cluster.now_ms()) / 1000
        if not (await asyncio.wait({reading[1]}, timeout=min(seconds, _LONG_S)))[0]:
            return None
        if reading[1].cancelled():
            raise ClientClosedError("the consumer was closed")
        if self._reading_offsets is reading:
            self._reading_offsets = None
        elif reading[1].exception() is None:
            return None
        return reading[1].result()

    def _cancel_reading(self, adding: dict[TopicPartition, str]) -> None:
        """Discard the running fetch of committed offsets unless all of its partitions are in ``adding``.

        The fetched offset of a partition outside ``adding`` would be outdated when that partition is assigned
        again.
        """
        if self._reading_offsets is not None and not self._reading_offsets[0].items() <= adding.items():
            self._reading_offsets = None

    async def _find_committed(self, partitions: list[TopicPartition]) -> _Committed:
        """Fetch the committed offsets and the metadata of ``partitions``.

        The metadata is for partitions without an offset, and may be missing.
        """
        try:
            found = await self.commits.fetch(partitions)
            deadline_ms = self._cluster.now_ms() + MISSING_TOPIC_GRACE_MS
            for topic in sorted({tp.topic for tp in partitions}):
                with contextlib.suppress(KafkaliteError):
                    await self._cluster.topic_partition_count(topic, deadline_ms)
            return found
        finally:
            self._notify_pending()

    def _reset_of(self, tp: TopicPartition) -> str:
        """Return auto.offset.reset for a partition without a committed offset.

        A new partition gets "earliest" instead of "latest", which would skip records. A partition is new if
        its topic did not have it when a partition of that topic was first assigned to this consumer.
        """
        reset = self._config.auto_offset_reset
        known = self._partition_counts.get(tp.topic)
        if known is None:
            count = self._cluster.metadata.partition_count(tp.topic)
            if count is not None:
                self._partition_counts[tp.topic] = count
            return reset
        return "earliest" if reset == "latest" and tp.partition >= known else reset

    async def _call_listener(
        self,
        method: Callable[[Sequence[TopicPartition]], Awaitable[None] | None],
        partitions: Iterable[TopicPartition],
    ) -> None:
        result = method(sorted(partitions))
        if inspect.isawaitable(result):
            await result

    def _remove(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self.hidden.pop(tp, None)
            self.commits.committed.pop(tp, None)
        self._progress.remove(partitions)

    def _hide(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop returning records of these partitions."""
        for tp in partitions:
            if tp not in self.hidden and tp in self._progress.partitions:
                self.hidden[tp] = self._progress.hide(tp)

    def _notify_pending(self) -> None:
        self.has_pending = True
        self._wake()

    # --- commits -------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets) -> None:
        """Commit ``offsets`` and wait for the result.

        Raises CommitFailedError for a partition that is not owned, and the errors of
        ``OffsetCommits.commit``.
        """
        self._check_ours(offsets)
        await self.commits.commit(offsets)

    def commit_later(self, offsets: Offsets) -> None:
        """Commit in the background. Raises CommitFailedError for a partition that is not owned."""
        self._check_ours(offsets)
        self.commits.commit_later(offsets)

    def check_not_lost(self) -> None:
        """Raise CommitFailedError if this member lost partitions and the listener was not called yet.

        Also raises it while the consumer is not a member because it read no records for max.poll.interval.ms.
        Records read before that must not be committed by the new membership (KIP-447).
        """
        if self._lost_because is not None and (self._lost or self._heartbeats.is_away):
            raise self._lost_error(self._lost_because)

    def _check_ours(self, offsets: Offsets) -> None:
        self.check_not_lost()
        for tp in offsets:
            if not self._is_ours(tp):
                raise CommitFailedError(
                    f"{tp} is not assigned to this member of group {self.membership.settings.group_id!r}",
                    hint="it is revoked, or not assigned yet; commit in on_revoked at the latest",
                )

    def _is_ours(self, tp: TopicPartition) -> bool:
        return tp in self.membership.owned or not self.is_subscribed

    def _lost_error(self, cause: KafkaliteError) -> KafkaliteError:
        if isinstance(cause, MaxPollIntervalError):
            return MaxPollIntervalError(cause.message, hint=cause.hint)
        error = CommitFailedError(
            f"this consumer was expelled from group {self.membership.settings.group_id!r} ({cause.message}), "
            "and another member may have read the same records",
            hint="the next call for records joins again and continues at the committed offsets",
        )
        error.__cause__ = cause
        return error

    async def _auto_commit(self, offsets: Offsets) -> None:
        """Commit changed offsets. A failure is only logged: then records may be returned again."""
        changed = self._changed(offsets)
        if not changed:
            return
        try:
            async with asyncio.timeout(AUTO_COMMIT_MS / 1000):  # includes waiting for queued commits
                await self.commits.write(changed, timeout_ms=AUTO_COMMIT_MS)
        except (KafkaliteError, TimeoutError) as error:
            logger.warning("auto-commit failed, records may be delivered again %s", Fields(error=error))

    def _changed(self, offsets: Offsets) -> Offsets:
        committed = self.commits.committed
        return {
            tp: at
            for tp, at in offsets.items()
            if ((before := committed.get(tp)) is None or before.offset != at.offset) and self._is_ours(tp)
        }

    def _arm_auto_commit(self) -> None:
        """Schedule an auto-commit after auto.commit.interval.ms, unless it is disabled or scheduled already.

        An at-most-once consumer commits before it returns records instead.
        """
        if self._config.is_at_most_once or self._is_closing:
            return
        if self._config.enable_auto_commit and self._commit_timer is None:
            loop = asyncio.get_running_loop()
            seconds = max(self._config.auto_commit_interval_ms, _MIN_COMMIT_INTERVAL_MS) / 1000
            self._commit_timer = loop.call_later(seconds, self._on_commit_due)

    def _on_commit_due(self) -> None:
        self._commit_timer = None
        self._is_commit_due = True
        if self.waiting_calls and self._pending_task is None:
            self._commit_if_due()  # a waiting caller has processed its records
        else:
            self.has_pending = True

    def _commit_if_due(self) -> None:
        if not self._is_commit_due or self._is_closing:
            return
        self._is_commit_due = False
        if changed := self._changed(self._progress.committable()):
            self.commits.commit_quietly(changed)
        self._arm_auto_commit()

    # --- heartbeat events ----------------------------------------------------------------------

    def _on_assignment(self) -> None:
        """Handle a response: stop returning records of partitions to be revoked.

        Return records again of partitions that were assigned again before they were revoked.
        """
        membership = self.membership
        revoking = membership.revoking()
        for tp in [tp for tp in self.hidden if tp in membership.owned and tp not in revoking]:
            self._progress.show(tp, paused=self.hidden.pop(tp))  # assigned again before it was revoked
        self._hide(revoking)
        adding = membership.adding()
        self._cancel_reading(adding)
        if revoking or adding:
            self._notify_pending()

    def _on_expelled(self, error: KafkaliteError) -> None:
        """Handle an expulsion: all owned partitions are lost, and the heartbeats join again."""
        if not self.is_subscribed or not self.membership.is_member:
            return  # already handled
        if not isinstance(error, MaxPollIntervalError):
            logger.warning("expelled, joining again %s", Fields(group=self._config.group_id, error=error))
        lost = self.membership.on_expelled()
        self._cancel_reading({})
        self._hide(lost)
        self._lost |= {tp: topic_id for tp, topic_id in lost.items() if tp in self._progress.partitions}
        self._lost_because = error
        self._heartbeats.epoch_changed.fire()
        self._heartbeats.poke()
        if self._lost:
            self._notify_pending()

    def _on_failed(self, error: KafkaliteError) -> None:
        """Handle an error that ends the membership for good: the user's next call for records raises it."""
        if self.membership.is_member:
            self._on_expelled(error)
        self._notify_pending()

    # --- max.poll.interval.ms ------------------------------------------------------------------

    def _watch(self) -> None:
        limit_ms = self._config.max_poll_interval_ms
        if self.waiting_calls or self._progress.has_moved():
            self.touch()
        elif self._processing:
            self._watch_processing(limit_ms)
        idle_ms = self._cluster.now_ms() - self._asked_ms
        if idle_ms >= limit_ms and self.membership.is_member and self._pending_task is None:
            self._leave_after_timeout(idle_ms)
        due_ms = max(1, min(_WATCH_MS, limit_ms // 8))
        self._watch_timer = asyncio.get_running_loop().call_later(due_ms / 1000, self._watch)

    def _watch_processing(self, limit_ms: int) -> None:
        now_ms = self._cluster.now_ms()
        if now_ms - self._asked_ms >= limit_ms:
            address, since_ms = next(iter(self._processing.items()))
            logger.warning(
                "processing takes longer than max.poll.interval.ms %s",
                Fields(record=address, group=self._config.group_id, elapsed_ms=now_ms - since_ms),
            )
            self.touch()

    def _leave_after_timeout(self, idle_ms: int) -> None:
        limit_ms = self._config.max_poll_interval_ms
        error = MaxPollIntervalError(
            f"no records were read for {idle_ms} ms (max.poll.interval.ms: {limit_ms}), so the consumer "
            f"left group {self.membership.settings.group_id!r} and others read its partitions",
            hint="process fewer records at once (max.poll.records) or faster, or raise max.poll.interval.ms; "
            "the next call for records joins again",
        )
        logger.error("the consumer left its group %s", Fields(error=error))
        self._heartbeats.leave()
        self._on_expelled(error)
