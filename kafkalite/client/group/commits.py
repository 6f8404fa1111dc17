"""Commits and fetches the offsets of one group."""

# Tests: tests/client/test_session.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import CoordinatorLink
from kafkalite.client.cluster.retry import Backoff
from kafkalite.client.interceptors import notify
from kafkalite.errors import (
    BrokerError,
    CommitFailedError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    KafkaliteError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnstableOffsetCommitError,
    broker_error,
)
from kafkalite.log_fields import Fields
from kafkalite.model import (
    NO_OFFSET,
    NO_TIMESTAMP,
    GroupMetadata,
    IsolationLevel,
    OffsetAndMetadata,
    TopicPartition,
)
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    GroupPartition,
    OffsetCommitRequest,
    OffsetFetchRequest,
)

logger = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]

_EXPELLED: Final = (UnknownMemberIdError, FencedMemberEpochError, FencedInstanceIdError)


class OffsetCommits:
    """Commits and fetches a group's offsets. Commits are sent one at a time, in order.

    ``identity`` returns the committing member and its epoch. ``next_identity(identity, deadline_ms)`` waits
    for another epoch of the member, and returns False after the deadline or an expulsion. ``on_expelled`` is
    called when the coordinator no longer knows the member. ``is_ours`` returns whether the member owns a
    partition; the coordinator does not check this.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        link: CoordinatorLink,
        isolation_level: IsolationLevel,
        *,
        identity: Callable[[], GroupMetadata],
        next_identity: Callable[[GroupMetadata, int], Awaitable[bool]],
        on_expelled: Callable[[BrokerError], None],
        is_ours: Callable[[TopicPartition], bool],
    ) -> None:
        self._cluster = cluster
        self._link = link
        self._require_stable = isolation_level is IsolationLevel.READ_COMMITTED
        self._identity = identity
        self._next_identity = next_identity
        self._on_expelled = on_expelled
        self._is_ours = is_ours
        self._lock = asyncio.Lock()
        self._queued: dict[TopicPartition, OffsetAndMetadata] = {}
        self._queued_quietly: set[TopicPartition] = set()
        self._worker: asyncio.Task[None] | None = None
        self._failed: tuple[KafkaliteError, set[TopicPartition]] | None = None
        self.on_committed: Sequence[Callable[[Offsets], None]] = ()  #: called with the committed offsets
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}  #: the offsets last committed or fetched

    async def commit(self, offsets: Offsets) -> None:
        """Commit ``offsets``, after all queued commits, and return when the coordinator has stored them.

        Raises CommitFailedError if this member may not commit a partition any more, RequestTimeoutError, the
        request's BrokerError, or the error of an earlier ``commit_later`` unless ``offsets`` covers all
        partitions of that commit.
        """
        await self.write(offsets)
        self._raise_failed(offsets)

    async def write(self, offsets: Offsets, *, timeout_ms: int | None = None) -> None:
        """Commit ``offsets`` as ``commit`` does, but without raising errors of earlier commits.

        ``timeout_ms`` (None: default.api.timeout.ms) limits the retries of this commit.
        """
        await self.wait_queued()
        if offsets:
            async with self._lock:
                await self._commit(offsets, timeout_ms)

    def commit_later(self, offsets: Offsets) -> None:
        """Commit in the background.

        If this fails, the error is raised by ``drain``, or by the next ``commit`` that does not cover all of
        these partitions.
        """
        self._queued_quietly -= offsets.keys()
        self._queue(offsets)

    def commit_quietly(self, offsets: Offsets) -> None:
        """Commit in the background. A failure is only logged, because a later commit replaces the offsets."""
        self._queued_quietly |= offsets.keys() - self._queued.keys()
        self._queue(offsets)

    def _queue(self, offsets: Offsets) -> None:
        self._queued.update(offsets)
        if self._queued and self._worker is None:
            self._worker = self._cluster.spawn(self._work())

    async def drain(self) -> None:
        """Wait until no commit is queued. If a queued commit failed, raise its error, but only once."""
        await self.wait_queued()
        self._raise_failed({})

    async def wait_queued(self) -> None:
        """Wait until no commit is queued. Errors are not raised."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait({self._worker})

    def _raise_failed(self, replaced: Offsets) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and not failed[1] <= replaced.keys():
            raise failed[0].with_traceback(None)

    async def _work(self) -> None:
        try:
            while self._queued:
                offsets, self._queued = self._queued, {}
                quiet, self._queued_quietly = self._queued_quietly, set()
                try:
                    async with self._lock:
                        await self._commit(offsets, None)
                except KafkaliteError as error:
                    logger.warning("commit failed in the background %s", Fields(error=error))
                    if loud := offsets.keys() - quiet:
                        already = self._failed[1] if self._failed is not None else set()
                        self._failed = (error, already | loud)
        finally:
            self._worker = None

    async def _commit(self, offsets: Offsets, timeout_ms: int | None) -> None:
        if timeout_ms is None:
            timeout_ms = self._cluster.config.default_api_timeout_ms
        deadline_ms = self._cluster.now_ms() + timeout_ms
        while True:
            identity = self._identity()
            ours = {tp: at for tp, at in offsets.items() if self._is_ours(tp)}
            try:
                if ours:
                    await self._commit_as(identity, ours, deadline_ms - self._cluster.now_ms())
            except StaleMemberEpochError as error:  # during a rebalance, the newer epoch will soon arrive
                if not await self._next_identity(identity, deadline_ms):
                    raise _refused(identity, ours, error) from error
            except _EXPELLED as error:
                self._note_expelled(identity, error)
                raise _refused(identity, ours, error) from error
            else:
                self.committed.update(ours)
                if self.on_committed:
                    notify(self.on_committed, ours)
                if len(ours) < len(offsets):  # revoked while they were queued, or refused at an older epoch
                    raise _not_owned(identity, [tp for tp in offsets if tp not in ours])
                return

    def _note_expelled(self, identity: GroupMetadata, error: BrokerError) -> None:
        if self._identity() == identity:  # otherwise a new membership has begun
            self._on_expelled(error)

    async def _commit_as(self, identity: GroupMetadata, offsets: Offsets, left_ms: int) -> None:
        request = OffsetCommitRequest(
            identity.group_id,
            identity.member_id,
            identity.member_epoch,
            identity.instance_id,
            [to_commit(tp, at) for tp, at in offsets.items()],
        )
        response = await self._link.call(request, timeout_ms=max(1, left_ms))
        _raise_first(response.offsets, "commit")

    async def fetch(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offset of each partition. Partitions without one are omitted.

        With read_committed, waits for the end of transactions that contain offsets (R35). Retries until
        default.api.timeout.ms has passed. Raises BrokerError and RequestTimeoutError.
        """
        wanted = [GroupPartition(*tp) for tp in partitions]
        config = self._cluster.config
        backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        deadline_ms = self._cluster.now_ms() + config.default_api_timeout_ms
        failures = 0
        while True:
            identity = self._identity()
            request = OffsetFetchRequest(
                identity.group_id, identity.member_id, identity.member_epoch, self._require_stable, wanted
            )
            try:
                left_ms = max(1, deadline_ms - self._cluster.now_ms())
                response = await self._link.call(request, timeout_ms=left_ms)
                _raise_first(response.offsets, "read of the committed offset")
            except (UnstableOffsetCommitError, StaleMemberEpochError) as error:
                failures += 1
                pause_ms = backoff.delay_ms(failures, self._cluster.rng.random())
                if self._cluster.now_ms() + pause_ms >= deadline_ms:
                    raise
                if isinstance(error, StaleMemberEpochError):
                    await self._next_identity(identity, self._cluster.now_ms() + pause_ms)
                else:
                    await asyncio.sleep(pause_ms / 1000)
            except _EXPELLED as error:
                self._note_expelled(identity, error)
                raise
            else:
                break
        found = {
            TopicPartition(one.topic, one.partition): as_committed(one)
            for one in response.offsets
            if one.offset != NO_OFFSET
        }
        self.committed.update(found)
        return found


def _raise_first(offsets: Iterable[CommittedOffset], what: str) -> None:
    for one in offsets:
        if one.error_code:
            tp = TopicPartition(one.topic, one.partition)
            raise broker_error(one.error_code, one.error_message or "", about=f"{what} of {tp}")


def _not_owned(identity: GroupMetadata, partitions: list[TopicPartition]) -> CommitFailedError:
    return CommitFailedError(
        f"{', '.join(map(str, partitions[:3]))} not committed: group {identity.group_id!r} has assigned it "
        "to another member",
        hint="commit in on_revoked at the latest",
    )


def _refused(identity: GroupMetadata, offsets: Offsets, cause: BrokerError) -> CommitFailedError:
    some = ", ".join(str(tp) for tp in list(offsets)[:3]) + (" ..." if len(offsets) > 3 else "")
    if not identity.member_id:
        return CommitFailedError(
            f"group {identity.group_id!r} has members, but not this consumer: {some} not committed",
            hint="subscribe() instead of assign(), or use another group.id",
        )
    return CommitFailedError(
        f"{some} not committed: this consumer was expelled from group {identity.group_id!r} "
        f"(member epoch {identity.member_epoch}), and another member may have read the same records",
        hint="the next call for records joins again and continues at the committed offsets",
    )


def to_commit(tp: TopicPartition, at: int | OffsetAndMetadata) -> CommittedOffset:
    """Return the entry for ``tp`` in a commit request. The coordinator sets its time and topic id."""
    if isinstance(at, int):
        at = OffsetAndMetadata(at)
    topic, partition = tp
    return CommittedOffset(
        topic, partition, at.offset, at.leader_epoch, at.metadata, NO_TIMESTAMP, "", 0, None
    )


def as_committed(entry: CommittedOffset) -> OffsetAndMetadata:
    """Return the committed offset in a response's entry, with NO_OFFSET if none is committed."""
    return OffsetAndMetadata(entry.offset, entry.leader_epoch, entry.metadata)
