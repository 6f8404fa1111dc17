"""The follower of one partition: the position it reports to its leader, and how it applies a response.

R1  batches are appended as the leader sent them; only a gap batch that begins before the log end is shortened
R3  a response counts only if it has the current leader epoch and the replica has not changed since the fetch:
    a fetch position has a version, which each append, truncation and change of the role increments
R4  a log that diverges from the leader's log is truncated by leader epochs, never to the high watermark
R10 the high watermark is raised to min(the leader's, the follower's log end)
R49 committed records are truncated only after an unclean election; otherwise a leader that lacks them is
    refused
R69 a compacted log that is filled from the beginning is filled from one leader: it starts over after a change
    of the leader
"""

from __future__ import annotations

import struct
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalite.errors import CorruptBatchError, OffsetOutOfRangeError, ShortLeaderError
from kafkalite.model import NO_EPOCH, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.gaps import joined_at
from kafkalite.records.header import check, total_length
from kafkalite.storage.leader_epochs import EpochEnd

if TYPE_CHECKING:
    from kafkalite.storage.log import Log

_BASE_OFFSET: Final = struct.Struct(">q")


class FetchPosition(NamedTuple):
    """The position that a follower reports in a fetch.

    If nothing is appended or truncated and the role does not change, the next position has the same
    ``version``. A response to a fetch at one position is valid for every position with the same version.
    """

    leader_epoch: int
    fetch_offset: int  #: the log end
    last_epoch: int  #: of the last batch; NO_EPOCH in an empty log
    synced_end_offset: int
    log_start_offset: int
    version: int


class NextFetch(Enum):
    """When a follower fetches again after a response."""

    NOT_DUE = auto()  #: nothing has changed
    AFTER_SYNC = auto()  #: the log grew, and the leader counts the new end only after the sync
    NOW = auto()
    REPEATED = auto()  #: now, and request that the leader sends its last response again


class FollowerStep(NamedTuple):
    """The effect of a response. ``is_ignored``: the response was outdated (R3) and had no effect."""

    appended_bytes: int = 0
    truncated_to: int | None = None
    log_start_moved: bool = False
    is_ignored: bool = False
    lost_records: int = 0  #: committed records that were truncated after an unclean election (R49)
    high_watermark_moved: bool = False

    def next_fetch(self, *, is_synced_only: bool) -> NextFetch:
        """Return when to fetch next. ``is_synced_only``: the leader counts only synced bytes."""
        if self.is_ignored or self.truncated_to is not None:
            return NextFetch.REPEATED
        if self.appended_bytes and is_synced_only:
            return NextFetch.AFTER_SYNC
        return NextFetch.NOW if self.appended_bytes or self.log_start_moved else NextFetch.NOT_DUE


IGNORED: Final = FollowerStep(is_ignored=True)


@dataclass(slots=True, eq=False)
class PartitionFollower:
    """Follows ``leader_id`` (-1: there is no leader) in ``leader_epoch``. Applies responses to the log.

    Records below ``committed_floor`` are committed according to the metadata. ``loss_epoch`` is the leader
    epoch of the latest unclean election.
    """

    key: TopicPartition
    log: Log
    _: KW_ONLY
    leader_id: int
    leader_epoch: int
    high_watermark: int
    version: int
    committed_floor: int = 0  #: exclusive end of the records that are committed by the metadata; 0: unknown
    loss_epoch: int = NO_EPOCH  #: the leader epoch of the latest unclean election
    is_in_sync: bool = False  #: whether this replica is in the ISR by the metadata that it has replayed
    #: The broker from which all records of this log were copied since it was empty; -1 if that is not known.
    #: None if the replica has been in sync since its log was empty.
    filled_from: int | None = None
    must_start_over: bool = False  #: whether the first response empties the log (R69)
    agrees: bool = False  #: whether the leader has found no divergence since this role or a truncation began

    def position(self) -> FetchPosition:
        """Return the position to report in the next fetch.

        While the log must start over, it is that of an empty log: the leader must count no record of it.
        """
        log = self.log
        if self.must_start_over:
            start = log.log_start_offset
            return FetchPosition(self.leader_epoch, start, NO_EPOCH, start, start, self.version)
        return FetchPosition(
            self.leader_epoch,
            log.log_end_offset,
            log.latest_epoch,
            self.reported_synced_end(),
            log.log_start_offset,
            self.version,
        )

    def accepts(self, leader_epoch: int, asked: FetchPosition | None) -> bool:
        """Whether a response in ``leader_epoch`` to a fetch at the position ``asked`` is valid now (R3).

        If ``asked`` is None, the caller guarantees that nothing has changed since the fetch.
        """
        return leader_epoch == self.leader_epoch and (asked is None or asked.version == self.version)

    @property
    def youngest_epoch(self) -> int | None:
        """The greatest leader epoch that a batch from the leader may have (R3); None if there is no limit."""
        return self.leader_epoch

    def reported_synced_end(self) -> int:
        """Return the offset (exclusive) below which the leader may count this replica's records as durable
        (R7)."""
        return self.log.synced_end_offset

    def truncation_offset(self, response: ReplicaFetchedPartition) -> int:
        """Return the offset to truncate the log to after a divergence (R4)."""
        log = self.log
        own = log.end_offset_for_epoch(response.diverging_epoch)
        return truncation_target(response.diverging_end_offset, own, log.log_end_offset)

    @property
    def committed_end(self) -> int:
        """The exclusive end of the records in this log that are known to be committed."""
        return max(self.high_watermark, self.committed_floor)

    def may_truncate(self, offset: int) -> bool:
        """Whether the log may be truncated to ``offset`` (R49).

        A leader that requires a truncation below the committed end has lost records. Such a truncation is
        allowed only if every batch of this log has an earlier leader epoch than the latest unclean election.
        """
        return offset >= self.committed_end or self.log.latest_epoch < self.loss_epoch

    def waits_for_disk(self, response: ReplicaFetchedPartition, batches: memoryview) -> bool:
        """Whether ``apply`` may sync before it returns, because the response may truncate the log or move its
        start."""
        log = self.log
        return bool(
            response.error_code
            or self.must_start_over
            or response.diverging_epoch != NO_EPOCH
            or response.log_start_offset > log.log_start_offset
            or (
                len(batches) >= _BASE_OFFSET.size
                and _BASE_OFFSET.unpack_from(batches)[0] < log.log_end_offset
            )
        )

    def apply(self, response: ReplicaFetchedPartition, batches: memoryview, now_ms: int) -> FollowerStep:
        """Append batches, truncate the log, or empty it and begin at another offset, as the response
        requires.

        The only error code that the response may have is OFFSET_OUT_OF_RANGE. Raises the same errors as
        ``Partition.on_fetched``.
        """
        if self.must_start_over:
            return self._start_over_under(response)
        if response.error_code:
            return self._start_over_behind(response)
        if response.diverging_epoch != NO_EPOCH:
            return self._truncate(response)
        return self._extend(response, batches, now_ms)

    def _extend(self, response: ReplicaFetchedPartition, batches: memoryview, now_ms: int) -> FollowerStep:
        log = self.log
        if batches and _BASE_OFFSET.unpack_from(batches)[0] < log.log_end_offset <= response.log_start_offset:
            # The leader's log starts inside the first batch, at or after this log's end: the leader has
            # deleted all records of this log.
            self._start_over(_BASE_OFFSET.unpack_from(batches)[0])
        before = log.log_end_offset
        if batches:
            if _BASE_OFFSET.unpack_from(batches)[0] < before:
                batches = joined_at(batches, before)  # the leader has compacted beyond this log's end
                if _BASE_OFFSET.unpack_from(batches)[0] < before:
                    return self._join_at(response, batches)
            try:
                log.append_as_follower(batches, now_ms=now_ms, leader_epoch=self.youngest_epoch)
            finally:
                if log.log_end_offset != before:
                    self.version += 1
        self.agrees = True
        moved = self.advance(response.high_watermark, log.log_end_offset)
        if moved:
            log.forget_stable_transactions(self.high_watermark)
        start = min(response.log_start_offset, log.log_end_offset)
        is_deleting = start > log.log_start_offset
        if is_deleting:
            log.delete_before(start)
            self.advance(start, start)
        return FollowerStep(len(batches), None, is_deleting, high_watermark_moved=moved)

    def advance(self, leader_high_watermark: int, log_end_offset: int) -> bool:
        """Raise the high watermark to the leader's, at most to the log end (R10). Return whether it moved.

        A new leader's high watermark may be lower for a while. This does not lower the follower's.
        """
        known = min(leader_high_watermark, log_end_offset)
        if known <= self.high_watermark:
            return False
        self.high_watermark = known
        return True

    def may_serve(self) -> bool:
        """Whether consumers may read from this replica (R65): the leader has compared the logs in this epoch.

        Before that, this log may have other records than the leader's below its high watermark, if an
        unclean election has lost committed records.
        """
        return self.agrees

    def readable_end(self) -> int:
        """Return the exclusive end of the records that this replica knows to be committed (R65)."""
        return self.high_watermark

    def _join_at(self, response: ReplicaFetchedPartition, batches: memoryview) -> FollowerStep:
        """Truncate this log to the base offset of the leader's first batch, because this log ends inside that
        batch.

        Called if this log copied its end from another leader, which had compacted the batch differently. The
        batch is committed but incomplete here, so this replica is not in sync, and the truncation removes no
        copy that counts (R8). Raises CorruptBatchError if the batch is not committed, or if this log does not
        end inside it.
        """
        log = self.log
        header = check(batches[: total_length(batches)])
        if not log.log_end_offset < header.next_offset <= response.high_watermark:
            raise CorruptBatchError(
                f"a batch with offsets from {header.base_offset} to {header.last_offset};"
                f" the next has offset {log.log_end_offset}"
            )
        if header.base_offset < log.log_start_offset:
            return self._start_over(header.base_offset)
        self.version += 1
        return self._ends_at(log.truncate_to(header.base_offset))

    def _truncate(self, response: ReplicaFetchedPartition) -> FollowerStep:
        target = self.truncation_offset(response)
        committed_end = self.committed_end
        if not self.may_truncate(target):
            raise ShortLeaderError(
                partition=self.key, leader_id=self.leader_id, offset=target, committed_end=committed_end
            )
        self.committed_floor = 0
        if target < self.log.log_start_offset:
            step = self._start_over(response.log_start_offset)
        else:
            self.version += 1
            step = self._ends_at(self.log.truncate_to(target))
        return step._replace(lost_records=max(committed_end - target, 0))

    def _start_over_behind(self, response: ReplicaFetchedPartition) -> FollowerStep:
        """Empty the log and begin at the leader's log start, because the leader has deleted the records after
        this log's end. Raises OffsetOutOfRangeError if the leader still has them and this log is not
        empty."""
        log = self.log
        if response.log_start_offset <= log.log_end_offset and log.latest_epoch != NO_EPOCH:
            raise OffsetOutOfRangeError(
                f"{self.key} ends at {log.log_end_offset}; the leader refuses that offset although its log"
                f" starts at {response.log_start_offset}"
            )
        return self._start_over(response.log_start_offset)

    def _start_over_under(self, response: ReplicaFetchedPartition) -> FollowerStep:
        """Empty the log because another broker leads (R69).

        Begin at the reported position, or later, if the leader has accepted that position: it counts this
        replica from there on.
        """
        start = response.log_start_offset
        return self._start_over(start if response.error_code else max(self.log.log_start_offset, start))

    def _start_over(self, offset: int) -> FollowerStep:
        self.version += 1
        self.log.reset_to(offset)
        self.filled_from, self.must_start_over = self.leader_id, False
        return self._ends_at(offset)

    def _ends_at(self, end: int) -> FollowerStep:
        self.agrees = False  # until the next response
        self.high_watermark = max(min(self.high_watermark, end), self.log.log_start_offset)
        return FollowerStep(truncated_to=end)


def diverging_at(last_epoch: int, fetch_offset: int, leaders: EpochEnd) -> EpochEnd | None:
    """Return the epoch end to send instead of records, or None if the follower's log does not diverge from
    the leader's (R4).

    Called by the leader. The follower reports ``last_epoch`` and ``fetch_offset``, its log end. ``leaders``
    is the result of ``end_offset_for_epoch(last_epoch)`` for the leader's log.
    """
    if leaders.leader_epoch < last_epoch or leaders.end_offset < fetch_offset:
        return leaders
    return None


def truncation_target(leaders_end_offset: int, own: EpochEnd, log_end_offset: int) -> int:
    """Return the offset to which a follower truncates its log (R4).

    ``leaders_end_offset`` is the end of an epoch in the leader's log. ``own`` is the result of
    ``end_offset_for_epoch`` for the same epoch and the follower's log.
    """
    return min(leaders_end_offset, own.end_offset, log_end_offset)
