"""Decides, in the driver, where the next batch of a source ends and which records were lost.

Pure: positions, a snapshot of the logs and the time are arguments, and losses are results. The readers make
the look-ups, and raise or warn. Spark stores the start and the end of each batch. For a replay, ``ranges``
needs only these two, the options, and the current log starts and topic ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kafkalite.model import TopicPartition
from sparkbridge.offsets import Loss, OffsetRange, Positions, Snapshot, StreamOffset
from sparkbridge.options import SourceOptions
from sparkbridge.source.splitting import split
from sparkbridge.source.start_and_end import (
    NO_RESULTS,
    Bounds,
    LookupResults,
    Lookups,
    assigned,
    check_match,
    requested_offset,
    time_of,
)

_GONE: Final = "the topic or the partition was deleted or is no longer read"
_CREATED_AGAIN: Final = "the topic was deleted and created again"
_AGED_OUT: Final = "they were deleted, by retention or by request, before they were read"
_WENT_BACK: Final = "the log ends before the position of the query"
_NOT_FROM_ZERO: Final = "the partition is new and no longer begins at 0"

_MAX_OFFSET: Final = 2**63 - 1
_NOWHERE: Final = -1  # the position in a partition that was never read


class BytesLookup(NamedTuple):
    """Requests the positions between ``starts`` and ``ends`` up to which ``max_bytes`` can be read.

    The partition ``first`` has priority: it is the one that has been left out of the most batches in a row.
    None means that no partition was left out.
    """

    starts: Positions
    ends: Positions
    max_bytes: int
    first: TopicPartition | None = None


class _Reading(NamedTuple):
    """One partition when a batch is planned. Earlier batches have read it up to ``position`` (or _NOWHERE).

    The offsets from ``start`` (inclusive) to ``target`` (exclusive) can be read now.
    """

    position: int
    start: int
    target: int

    @property
    def lag(self) -> int:
        return max(0, self.target - self.start)


class _Draft(NamedTuple):
    """A batch being planned, before maxOffsetsPerTrigger and similar limits are applied.

    ``new`` holds the first offsets of new partitions. If ``is_forced``, a batch is run even if it reads
    nothing, so that Spark logs the new offset.
    """

    start: StreamOffset
    snapshot: Snapshot
    readings: dict[TopicPartition, _Reading]
    new: Positions
    losses: list[Loss]
    is_forced: bool

    def ending_at(self, ends: Positions) -> tuple[StreamOffset, list[Loss]]:
        """Return (offset of the batch that ends at ``ends``, losses).

        The offset is ``start`` itself if there is nothing to read, unless ``is_forced``.
        """
        start, snapshot = self.start, self.snapshot
        positions = {tp: end for tp, end in ends.items() if end != _NOWHERE}
        if not self.is_forced and positions == start.positions:
            return start, self.losses
        new = {tp: offset for tp, offset in self.new.items() if tp in positions}
        old = {tp: offset for tp, offset in start.positions.items() if tp in positions and tp not in new}
        losses = [
            Loss(*tp, 0, offset, _NOT_FROM_ZERO)
            for tp, offset in sorted(new.items())
            if offset > 0 and not is_created_again(tp.topic, start.ids, snapshot)
        ]
        from_ = {**old, **new} if start.is_initial else new
        return StreamOffset(positions, ids=_ids(snapshot, positions), from_=from_), self.losses + losses


@dataclass(frozen=True, slots=True)
class Proposal:
    """A planned batch. ``end`` is its end, or ``start`` itself if there is no batch.

    If ``wants_bytes`` is set, pass the result of that look-up to ``SourcePlan.cut`` and use the Proposal that
    it returns. ``seen`` holds the log ends; if there is no batch, the reader waits for data beyond them.
    """

    start: StreamOffset
    end: StreamOffset
    losses: list[Loss]
    seen: Positions
    wants_bytes: BytesLookup | None = None
    draft: _Draft | None = field(default=None, repr=False, compare=False)
    ends: Positions = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_batch(self) -> bool:
        return self.end is not self.start


class SourcePlan:
    """Plans the batches of one stream reader in the driver. Its state is lost at a restart."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._initial: StreamOffset | None = None
        self._last_batch_ms: int | None = None
        # batches in a row in which maxOffsetsPerTrigger left nothing for the partition
        self._waits: dict[TopicPartition, int] = {}
        self._waits_for_bytes: dict[TopicPartition, int] = {}  # the same for maxBytesPerTrigger
        self._is_available_now = False
        self._cap: Positions | None = None  # where AvailableNow ends; ``_cap_ids`` are the ids of its topics
        self._cap_ids: dict[str, str] = {}
        self._bounds: Positions = {}  # resolved ending offsets; they never change
        self._bounds_now_ms: int | None = None  # the time to which an ending such as "-10m" is relative

    def initial(self, snapshot: Snapshot, starting: Positions) -> StreamOffset:
        """Return the start offset of a new query. Later calls return the first result.

        Raises StartOffsetMismatchError if an ending option does not give a position for exactly the
        partitions to read.
        """
        if self._initial is None:
            if self.options.ending is not None:
                check_match(self.options.ending, assigned(snapshot, self.options.assign))
            self._initial = StreamOffset(dict(starting), ids=_ids(snapshot, starting), is_initial=True)
        return self._initial

    def prepare_available_now(self) -> None:
        """Make the next call of ``latest`` fix the end of the query at the log ends of its snapshot.

        The end is not fixed now, because a batch that a crash interrupted is run first.
        """
        self._is_available_now = True
        self._cap = None

    def needed_lookups(self, snapshot: Snapshot, now_ms: int) -> Lookups:
        """Return the times in the ending option whose offsets ``latest`` still needs.

        Look them up after the snapshot was taken: if there is no offset for a time, then the snapshot has no
        record at or after that time.
        """
        spec = self.options.ending
        if spec is None:
            return Lookups({})
        if self._bounds_now_ms is None:
            self._bounds_now_ms = now_ms
        times: dict[TopicPartition, int] = {}
        for tp in assigned(snapshot, self.options.assign):
            where = spec.where(tp)
            timestamp_ms = None if where is None else time_of(where, self._bounds_now_ms)
            if timestamp_ms is not None and tp not in self._bounds:
                times[tp] = timestamp_ms
        return Lookups(times)

    def latest(
        self,
        start: StreamOffset,
        snapshot: Snapshot,
        now_ms: int,
        *,
        is_limited: bool,
        results: LookupResults = NO_RESULTS,
    ) -> Proposal:
        """Return a Proposal for the batch after ``start``.

        If ``is_limited``, minOffsetsPerTrigger, maxOffsetsPerTrigger and maxBytesPerTrigger apply.
        ``results`` are the results of ``needed_lookups``. The first batch of a query is run even if it is
        empty, so that Spark first logs where the query began.
        """
        partitions = assigned(snapshot, self.options.assign)
        if self._is_available_now and self._cap is None:
            self._cap = {tp: bounds.end for tp, bounds in partitions.items()}
            self._cap_ids = {topic: known.topic_id for topic, known in snapshot.items()}
        draft = self._draft(start, snapshot, partitions, results)
        seen = {tp: bounds.end for tp, bounds in partitions.items()}
        if is_limited and not draft.is_forced and self._is_too_early(draft.readings, now_ms):
            return Proposal(start, start, draft.losses, seen)
        if is_limited:
            ends = self._limited(draft.readings)
        else:
            ends = {tp: reading.target for tp, reading in draft.readings.items()}
        end, losses = draft.ending_at(ends)
        if end is not start:
            self._last_batch_ms = now_ms
        wants_bytes: BytesLookup | None = None
        most = self.options.max_bytes_per_trigger
        asked = {tp: reading.start for tp, reading in draft.readings.items() if ends[tp] > reading.start}
        if is_limited and most is not None and asked:
            waiting = [tp for tp in asked if tp in self._waits_for_bytes]
            first = max(waiting, key=self._waits_for_bytes.__getitem__, default=None)
            wants_bytes = BytesLookup(asked, {tp: ends[tp] for tp in asked}, most, first)
        return Proposal(start, end, losses, seen, wants_bytes, draft, ends)

    def cut(self, proposal: Proposal, ends: Mapping[TopicPartition, int]) -> Proposal:
        """Return ``proposal`` limited to ``ends``, the result of its look-up ``wants_bytes``."""
        asked, draft = proposal.wants_bytes, proposal.draft
        if asked is None or draft is None:
            return proposal
        within = dict(proposal.ends)
        waits = {  # a partition that maxOffsetsPerTrigger omitted keeps its count, or it might never be first
            tp: count
            for tp, count in self._waits_for_bytes.items()
            if tp not in asked.starts and tp in draft.readings
        }
        for tp, begin in asked.starts.items():
            answer = min(ends.get(tp, begin), asked.ends[tp])
            within[tp] = answer if answer > begin else draft.readings[tp].position
            if answer <= begin:
                waits[tp] = self._waits_for_bytes.get(tp, 0) + 1
        self._waits_for_bytes = waits
        end, losses = draft.ending_at(within)
        return replace(proposal, end=end, losses=losses, wants_bytes=None, ends=within)

    def ranges(
        self, start: StreamOffset, end: StreamOffset, snapshot: Snapshot
    ) -> tuple[list[OffsetRange], list[Loss]]:
        """Return the ranges of the batch's tasks, and the losses.

        Repeated calls return the same ranges unless records were deleted in between. For partitions in
        ``end.from_``, ``start`` is ignored: after a crash in the first batch, Spark may pass another start.
        """
        first = {tp: end.from_.get(tp, start.positions.get(tp)) for tp in end.positions}
        whole, losses = whole_ranges(first, end.positions, end.ids, snapshot)
        return self.split(whole), losses

    def split(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Split the ranges of partitions into ranges of tasks."""
        options = self.options
        return split(
            ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition
        )

    def _draft(
        self,
        start: StreamOffset,
        snapshot: Snapshot,
        partitions: Mapping[TopicPartition, Bounds],
        results: LookupResults,
    ) -> _Draft:
        """Return the plan of the batch after ``start``, before the limits are applied."""
        losses: list[Loss] = []
        readings: dict[TopicPartition, _Reading] = {}
        for tp, position in sorted(start.positions.items()):
            bounds = partitions.get(tp)
            if bounds is None:
                losses.append(Loss(*tp, position, position, _GONE))
            elif is_created_again(tp.topic, start.ids, snapshot):
                losses.append(Loss(*tp, position, position, _CREATED_AGAIN))
            elif position > bounds.end:
                losses.append(Loss(*tp, bounds.end, position, _WENT_BACK))
                readings[tp] = _Reading(position, bounds.end, bounds.end)
            else:
                target = max(position, self._target(tp, bounds, snapshot, results))
                readings[tp] = _Reading(position, max(position, bounds.start), target)
        new: Positions = {}
        for tp, bounds in partitions.items():
            if tp not in readings:
                reading = _Reading(_NOWHERE, bounds.start, self._target(tp, bounds, snapshot, results))
                if reading.lag > 0:
                    readings[tp], new[tp] = reading, bounds.start
        return _Draft(start, snapshot, readings, new, losses, is_forced=bool(losses) or start.is_initial)

    def _target(self, tp: TopicPartition, bounds: Bounds, snapshot: Snapshot, results: LookupResults) -> int:
        """Return the exclusive end up to which ``tp`` may be read; 0 if this run does not read it."""
        target = bounds.end
        if self._cap is not None:
            if tp not in self._cap or self._cap_ids[tp.topic] != snapshot[tp.topic].topic_id:
                return 0
            target = min(target, self._cap[tp])
        spec = self.options.ending
        if spec is not None:
            if spec.where(tp) is None:
                return 0
            if tp not in self._bounds:
                bound = requested_offset(spec, tp, bounds, results)
                if bound is None:
                    return target
                self._bounds[tp] = bound
            target = min(target, self._bounds[tp])
        return target

    def _is_too_early(self, readings: Mapping[TopicPartition, _Reading], now_ms: int) -> bool:
        """Whether minOffsetsPerTrigger delays the batch."""
        fewest = self.options.min_offsets_per_trigger
        if fewest is None or self._is_available_now or self._last_batch_ms is None:
            return False
        if now_ms - self._last_batch_ms >= self.options.max_trigger_delay_ms:
            return False
        if all(reading.target >= self._bounds.get(tp, _MAX_OFFSET) for tp, reading in readings.items()):
            return False  # the query reads no more data
        return sum(reading.lag for reading in readings.values()) < fewest

    def _limited(self, readings: Mapping[TopicPartition, _Reading]) -> Positions:
        """Return the batch's ends within maxOffsetsPerTrigger. Partitions without a share do not move."""
        limit = self.options.max_offsets_per_trigger
        lags = {tp: reading.lag for tp, reading in readings.items() if reading.lag > 0}
        if limit is None or sum(lags.values()) <= limit:
            self._waits = {}
            return {tp: reading.target for tp, reading in readings.items()}
        shares = share_out(lags, limit, self._waits)
        self._waits = {tp: self._waits.get(tp, 0) + 1 for tp, share in shares.items() if share == 0}
        ends: Positions = {}
        for tp, reading in readings.items():
            if tp not in shares:
                ends[tp] = reading.target
            elif shares[tp] > 0:
                ends[tp] = reading.start + shares[tp]
            else:
                ends[tp] = reading.position
        return ends


def share_out(
    lags: Mapping[TopicPartition, int], limit: int, waits: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Divide ``limit`` offsets in proportion to the lags (above 0). Return ``lags`` if their sum fits.

    ``waits`` is the number of batches in a row in which a partition had no share. What is left after rounding
    down goes first to partitions without a share, the longest wait first, so that no partition waits for
    ever. The rest goes to the largest remainders.
    """
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {tp: limit * lag // total for tp, lag in lags.items()}
    left = limit - sum(shares.values())
    order = sorted(lags, key=lambda tp: (shares[tp] > 0, -waits.get(tp, 0), -(limit * lags[tp] % total), tp))
    for tp in order[:left]:
        shares[tp] += 1
    return shares


def whole_ranges(
    first: Mapping[TopicPartition, int | None],
    until: Mapping[TopicPartition, int],
    ids: Mapping[str, str],
    snapshot: Snapshot,
) -> tuple[list[OffsetRange], list[Loss]]:
    """Return one range per partition that has offsets between ``first`` (None: the log start) and ``until``.

    Only the log starts and topic ids of the snapshot are used, so a replay returns the same ranges after
    further writes. Deleted records are omitted and returned as losses.
    """
    ranges: list[OffsetRange] = []
    losses: list[Loss] = []
    there = assigned(snapshot)
    for tp, end in sorted(until.items()):
        bounds = there.get(tp)
        wanted = first.get(tp)
        begin = wanted if wanted is not None else 0 if bounds is None else bounds.start
        if begin >= end:
            continue
        if bounds is None:
            losses.append(Loss(*tp, begin, end, _GONE))
            continue
        if is_created_again(tp.topic, ids, snapshot):
            losses.append(Loss(*tp, begin, end, _CREATED_AGAIN))
            continue
        if begin < bounds.start:
            losses.append(Loss(*tp, begin, min(bounds.start, end), _AGED_OUT))
            begin = bounds.start
        if begin < end:
            ranges.append(OffsetRange(*tp, begin, end, snapshot[tp.topic].topic_id))
    return ranges, losses


def went_back(start: StreamOffset, snapshot: Snapshot) -> list[TopicPartition]:
    """Return the partitions whose log ends before their position in ``start``.

    Topics that were created again are omitted.
    """
    return [
        tp
        for tp, bounds in assigned(snapshot).items()
        if start.positions.get(tp, 0) > bounds.end and not is_created_again(tp.topic, start.ids, snapshot)
    ]


def _ids(snapshot: Snapshot, positions: Positions) -> dict[str, str]:
    topics = {tp.topic for tp in positions}
    return {topic: known.topic_id for topic, known in snapshot.items() if topic in topics and known.topic_id}


def is_created_again(topic: str, ids: Mapping[str, str], snapshot: Snapshot) -> bool:
    """Whether the topic's current id differs from ``ids``. False unless both ids are known."""
    known, id_ = snapshot.get(topic), ids.get(topic)
    return known is not None and bool(id_) and bool(known.topic_id) and known.topic_id != id_
