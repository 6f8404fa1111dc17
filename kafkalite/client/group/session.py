"""A consumer in its group: partitions taken and given back in the user's turn.

The heartbeats in the background only talk: they note what the coordinator says. Whatever the user could
notice happens in ``run_pending``, which the consumer awaits whenever the user asks for records: commits, the
listener's calls, the first position of a partition. One thing does not wait for that: what was revoked or
lost is given no record of from the moment it is known (``hidden``).
"""

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
from kafkalite.model import GroupMetadata, OffsetAndMetadata, TopicPartition

logger = logging.getLogger(__name__)

# What a commit that nobody asked for may take: at a rebalance, or when the consumer closes.
AUTO_COMMIT_MS: Final = 5_000

# auto.commit.interval.ms may be less; more often than this nothing is committed.
_MIN_COMMIT_INTERVAL_MS: Final = 10

# The longest time between two looks at whether the user still asks for records.
_WATCH_MS: Final = 1_000

# A wait without a bound of its own, in a number that a timer takes.
_LONG_S: Final = 86_400.0

_Committed = dict[TopicPartition, OffsetAndMetadata]


class ReadingProgress(Protocol):
    """The positions of the consumer that is the member; ``consumer.progress`` has them."""

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
    """One consumer's membership. ``wake`` is called when there is something for the user's turn.

    Invariant: a partition is in ``progress.partitions`` only while the membership owns it.
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
        self.link = CoordinatorLink(
            cluster,
            GROUP_KEY,
            config.group_id,
        )
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
        self.has_pending = False  #: whether there is something for the user's turn
        self.hidden: dict[TopicPartition, bool] = {}  #: given no records of; and whether the user paused it
        self.waiting_calls = 0  #: how many calls wait for records now
        self.is_subscribed = False
        self._cluster = cluster
        self._config = config
        self._progress = progress
        self._wake = wake
        self._lost: dict[TopicPartition, str] = {}  # and not told to the listener yet
        self._lost_because: KafkaliteError | None = None
        self._is_closing = False
        self._partition_counts: dict[str, int] = {}  # of each topic, as of its first assignment
        self._pending_task: asyncio.Task[Any] | None = None
        self._pending_lock = asyncio.Lock()
        #: Partitions whose committed offsets are being read, as long as they are to be taken up.
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

    # --- what the consumer says ----------------------------------------------------------------

    @property
    def metadata(self) -> GroupMetadata:
        """As whom we commit: a member, or nobody's member where partitions were assigned by the user."""
        if self.is_subscribed:
            return self.membership.metadata
        return GroupMetadata(self.membership.settings.group_id)

    def subscribe(self, topics: Sequence[str], pattern: str | None, listener: RebalanceListener) -> None:
        """Want these topics from now on; what is held of others is given back as the coordinator says."""
        self.is_subscribed = True
        self.listener = listener
        self._heartbeats.error = None
        self.membership.subscribe(topics, pattern)
        self._heartbeats.poke()

    def check_unsubscribed(self) -> None:
        """Raises ClientError for a member: what it reads is the coordinator's to say."""
        if self.is_subscribed:
            raise ClientError(
                "a member of a group is assigned its partitions by the coordinator",
                hint="use assign() instead of subscribe(), not after it",
            )

    def on_assign(self, partitions: Iterable[TopicPartition]) -> None:
        """The user assigned these; the committed offsets of the new ones are to be asked for."""
        kept = set(partitions)
        self.membership.release([tp for tp in self.membership.owned if tp not in kept])
        self._cancel_reading(dict.fromkeys(kept, ""))
        self._notify_pending()

    def start(self) -> None:
        """Begin the background, if not begun."""
        self.touch()
        if self._watch_timer is None:
            self._watch()
            self._arm_auto_commit()
        if self.is_subscribed:
            self._heartbeats.start()

    async def joined(self) -> None:
        """Return when this consumer is a member, if it is to be one. Raises why it can't be."""
        if self.is_subscribed:
            await self._heartbeats.joined()

    def touch(self) -> None:
        """The user asked for records, or was given some."""
        self._asked_ms = self._cluster.now_ms()

    async def close(self, *, commits: Offsets) -> None:
        """Commit, give everything back, leave. Raises what a commit in the background failed with.

        Nothing of it takes long: a coordinator that is away is not waited for.
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

    async def _revoke_all(self) -> None:
        if self._lost:
            await self._report_lost()
        if self.is_subscribed and self.membership.owned:
            await self._call_listener(self.listener.on_revoked, self.membership.owned)

    # --- the user's turn -----------------------------------------------------------------------

    async def run_pending(self, deadline_ms: int) -> bool:
        """Do what waits for the user. False when ``deadline_ms`` passed first; the rest is for the next turn.

        Raises what ended the membership, what the listener raised, and errors of the coordinator.
        """
        self.touch()
        if self._pending_task is asyncio.current_task():
            return True  # the listener seeks or commits
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
            elif self._heartbeats.is_away:
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
        """Partitions that the user assigned and whose committed offsets were not asked for yet."""
        placed = self.membership.owned
        return {tp: "" for tp in self._progress.partitions if tp not in placed}

    async def _report_lost(self) -> None:
        lost = dict(self._lost)
        try:
            await self._call_listener(self.listener.on_lost, lost)
        except asyncio.CancelledError:
            self.has_pending = True  # told again by the next turn
            raise
        except Exception:
            self._remove_lost(lost)
            raise
        self._remove_lost(lost)

    def _remove_lost(self, lost: dict[TopicPartition, str]) -> None:
        self._lost = {tp: topic_id for tp, topic_id in self._lost.items() if tp not in lost}
        self._remove(lost)

    async def _revoke(self, partitions: dict[TopicPartition, str]) -> None:
        """Commit what is done of them, tell the listener, let them go; also if it fails.

        If it is cancelled they stay ours, and the next turn does it again.
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
        """Have written what ``commit_later`` was given: behind the next owner's commits it would be a step
        back. What takes too long is dropped when its partition is not ours any more."""
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
        """Take up what was assigned, at the committed offsets."""
        try:
            committed = await self._committed(partitions, deadline_ms)
        except EXPELLED:
            return True  # noted already; the turn goes on with what was lost
        except KafkaliteError:
            self.has_pending = True
            raise
        if committed is None:
            return self._reading_offsets is None  # they are not to be taken up any more; the turn goes on
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
        except BaseException:  # the listener may not have placed them: they are taken up by another turn
            self.has_pending = True
            self._release(partitions)
            raise
        self._heartbeats.poke()
        return True

    async def _committed(self, partitions: dict[TopicPartition, str], deadline_ms: int) -> _Committed | None:
        """What is committed; None when ``deadline_ms`` passed first, and it is still on its way, or when
        they were taken away meanwhile."""
        if self._reading_offsets is None or self._reading_offsets[0] != partitions:
            task = self._cluster.spawn(self._find_committed(list(partitions)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
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
        """What is read of committed offsets is old by the time that the partitions come back: drop it if some
        of them are not among those ``adding``, to be taken up."""
        if self._reading_offsets is not None and not self._reading_offsets[0].items() <= adding.items():
            self._reading_offsets = None

    async def _find_committed(self, partitions: list[TopicPartition]) -> _Committed:
        """Also have the metadata of their topics, for where to start if nothing is committed."""
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
        """auto.offset.reset of a partition without a committed offset: ``latest`` skips nothing that is new.

        A partition that its topic did not have when the first of them was assigned here is new.
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
        """Give no record of these any more."""
        for tp in partitions:
            if tp not in self.hidden and tp in self._progress.partitions:
                self.hidden[tp] = self._progress.hide(tp)

    def _notify_pending(self) -> None:
        self.has_pending = True
        self._wake()

    # --- commits -------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets) -> None:
        """Commit now. Raises CommitFailedError for a partition that is not ours."""
        self._check_ours(offsets)
        await self.commits.commit(offsets)

    def commit_later(self, offsets: Offsets) -> None:
        """Commit in the background. Raises CommitFailedError for a partition that is not ours."""
        self._check_ours(offsets)
        self.commits.commit_later(offsets)

    def check_not_lost(self) -> None:
        """Raises CommitFailedError when we were expelled and the user has not been told.

        A new membership must not commit what an old one read (KIP-447).
        """
        if self._lost_because is not None and (self._lost or self._heartbeats.is_away):
            raise self._lost_error(self._lost_because)

    def _check_ours(self, offsets: Offsets) -> None:
        self.check_not_lost()
        for tp in offsets:
            if not self._is_ours(tp):
                raise CommitFailedError(
                    f"{tp} is not assigned to this member of group {self.membership.settings.group_id!r}",
                    hint="it is another one's by now, or not yet ours; commit in on_revoked at the latest",
                )

    def _is_ours(self, tp: TopicPartition) -> bool:
        return tp in self.membership.owned or not self.is_subscribed

    def _lost_error(self, cause: KafkaliteError) -> KafkaliteError:
        if isinstance(cause, MaxPollIntervalError):
            return MaxPollIntervalError(cause.message, hint=cause.hint)
        error = CommitFailedError(
            f"this consumer was expelled from group {self.membership.settings.group_id!r} ({cause.message}), "
            "and another member may have read the same records",
            hint="the next call for records joins again and goes on at the committed offsets",
        )
        error.__cause__ = cause
        return error

    async def _auto_commit(self, offsets: Offsets) -> None:
        """Commit what changed; a failure is logged, for the records will then only be given again."""
        changed = self._changed(offsets)
        if not changed:
            return
        try:
            async with asyncio.timeout(AUTO_COMMIT_MS / 1000):  # also for what was queued before
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
        """Have the user's turn commit when auto.commit.interval.ms has passed. At most once has no need."""
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
            self._commit_if_due()  # who asks is done with what was given
        else:
            self.has_pending = True

    def _commit_if_due(self) -> None:
        if not self._is_commit_due or self._is_closing:
            return
        self._is_commit_due = False
        if changed := self._changed(self._progress.committable()):
            self.commits.commit_quietly(changed)
        self._arm_auto_commit()

    # --- what the heartbeats say ---------------------------------------------------------------

    def _on_assignment(self) -> None:
        """An answer came: nothing is given any more of what is to be given back."""
        membership = self.membership
        revoking = membership.revoking()
        for tp in [tp for tp in self.hidden if tp in membership.owned and tp not in revoking]:
            self._progress.show(tp, paused=self.hidden.pop(tp))  # ours again before we gave it back
        self._hide(revoking)
        adding = membership.adding()
        self._cancel_reading(adding)
        if revoking or adding:
            self._notify_pending()

    def _on_expelled(self, error: KafkaliteError) -> None:
        """We are no member any more: what we held is lost, and the heartbeats join anew."""
        if not self.is_subscribed or not self.membership.is_member:
            return  # known already
        if not isinstance(error, MaxPollIntervalError):
            logger.warning("expelled, joining again %s", Fields(group=self._config.group_id, error=error))
        lost = self.membership.on_expelled()
        self._cancel_reading({})
        self._hide(lost)
        self._lost |= {tp: topic_id for tp, topic_id in lost.items() if tp in self._progress.partitions}
        self._lost_because = error
        self._heartbeats.notify_new_epoch()
        self._heartbeats.poke()
        if self._lost:
            self._notify_pending()

    def _on_failed(self, error: KafkaliteError) -> None:
        """There will be no more heartbeats: the user's next turn raises ``error``."""
        if self.membership.is_member:
            self._on_expelled(error)
        self._notify_pending()

    # --- max.poll.interval.ms ------------------------------------------------------------------

    def _watch(self) -> None:
        limit_ms = self._config.max_poll_interval_ms
        if self.waiting_calls or self._progress.has_moved():
            self.touch()
        idle_ms = self._cluster.now_ms() - self._asked_ms
        if idle_ms >= limit_ms and self.membership.is_member and self._pending_task is None:
            self._leave_after_timeout(idle_ms)
        due_ms = max(1, min(_WATCH_MS, limit_ms // 8))
        self._watch_timer = asyncio.get_running_loop().call_later(due_ms / 1000, self._watch)

    def _leave_after_timeout(self, idle_ms: int) -> None:
        limit_ms = self._config.max_poll_interval_ms
        error = MaxPollIntervalError(
            f"nobody asked this consumer for records for {idle_ms} ms (max.poll.interval.ms: {limit_ms}), so "
            f"it left group {self.membership.settings.group_id!r} and others read its partitions",
            hint="process fewer records at once (max.poll.records), faster, or raise max.poll.interval.ms; "
            "the next call for records joins again",
        )
        logger.error("the consumer left its group %s", Fields(error=error))
        self._heartbeats.leave()
        self._on_expelled(error)
