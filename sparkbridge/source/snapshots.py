"""Snapshots of the topics, and the start and end of a query, looked up in the cluster by the driver.

Waiting, requests and warnings are in this module, so that ``planning`` and ``start_and_end`` are pure.
"""

# Tests: tests/sparkbridge/test_stream_reader.py

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kafkalite.model import TopicPartition
from sparkbridge.errors import DataLossError, DataLossWarning, SparkOptionError
from sparkbridge.offsets import Loss, Positions, Snapshot, StreamOffset, TopicSnapshot
from sparkbridge.position_specs import EndingSpec, StartingSpec
from sparkbridge.source.planning import is_created_again, went_back
from sparkbridge.source.start_and_end import (
    LookupResults,
    Lookups,
    Resolved,
    assigned,
    needed_lookups,
    resolve_ending,
    resolve_starting,
)

if TYPE_CHECKING:
    from sparkbridge.brokers.cluster import SparkCluster
    from sparkbridge.options import SourceOptions

_LOSSES_SHOWN = 5


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def snapshot_now(cluster: SparkCluster, options: SourceOptions) -> dict[str, TopicSnapshot]:
    """Return the starts and ends of the topics that ``options`` select. Missing topics are omitted."""
    wanted: Mapping[str, Sequence[int] | None]
    if options.assign is not None:
        wanted = options.assign
    elif options.subscribe is not None:
        wanted = dict.fromkeys(options.subscribe)
    else:
        wanted = dict.fromkeys(cluster.topics(pattern=options.subscribe_pattern))
    return cluster.snapshot(wanted) if wanted else {}


def steady_snapshot(
    cluster: SparkCluster, options: SourceOptions, offset: StreamOffset
) -> dict[str, TopicSnapshot]:
    """Return a snapshot that matches ``offset``. Retry up to fetchOffset.numRetries times.

    A snapshot does not match if a partition in ``offset`` is missing, ends before its position, or has
    another topic id. If no snapshot matches, returns the last one. Retries prefer other brokers, because the
    metadata of a broker may be old.
    """
    return _steady(cluster, options, offset, lambda: snapshot_now(cluster, options))


def replay_snapshot(
    cluster: SparkCluster, options: SourceOptions, end: StreamOffset
) -> dict[str, TopicSnapshot]:
    """Return a snapshot of the partitions in ``end``, a batch's end. Retries as ``steady_snapshot`` does."""
    wanted: dict[str, list[int]] = {}
    for topic, partition in sorted(end.positions):
        wanted.setdefault(topic, []).append(partition)
    return _steady(cluster, options, end, lambda: cluster.snapshot(wanted) if wanted else {})


def _steady(
    cluster: SparkCluster,
    options: SourceOptions,
    offset: StreamOffset,
    look: Callable[[], dict[str, TopicSnapshot]],
) -> dict[str, TopicSnapshot]:
    for retries_left in range(options.fetch_offset_retries, -1, -1):
        snapshot = look()
        there = ends_of(snapshot)
        short = went_back(offset, snapshot)
        if short and options.client.is_read_committed:
            _let_stand(snapshot, {tp: offset.positions[tp] for tp in short}, cluster.high_watermarks(short))
            short = went_back(offset, snapshot)
        is_known = all(tp in there for tp in offset.positions) and not any(
            is_created_again(topic, offset.ids, snapshot) for topic in offset.ids
        )
        if (is_known and not short) or not retries_left:
            break
        cluster.avoid_last_responder()
        time.sleep(options.fetch_offset_retry_interval_ms / 1000)
    return snapshot


def _let_stand(snapshot: dict[str, TopicSnapshot], positions: Positions, ends: Positions) -> None:
    """Set each partition's end in ``snapshot`` to its position, unless that is above the end in ``ends``.

    ``ends`` are high watermarks, and the positions are beyond the last stable offset: an open transaction
    hides the records before them. These records are not lost: they were read with read_uncommitted, or the
    user requested the position.
    """
    for tp, position in positions.items():
        known = snapshot[tp.topic]
        if position <= ends[tp]:
            stable = [position if number == tp.partition else end for number, end in enumerate(known.ends)]
            snapshot[tp.topic] = known._replace(ends=tuple(stable))


def ends_of(snapshot: Snapshot) -> Positions:
    """Return the ends of the partitions in ``snapshot``. Partitions that were not requested are omitted."""
    return {
        TopicPartition(topic, number): end
        for topic, known in snapshot.items()
        for number, (start, end) in enumerate(zip(known.starts, known.ends, strict=True))
        if start >= 0
    }


def first_snapshot(cluster: SparkCluster, options: SourceOptions) -> dict[str, TopicSnapshot]:
    """Return the snapshot with which a query or a batch job begins.

    Raises SparkOptionError if a named topic or partition is missing after all retries
    (fetchOffset.numRetries).
    """
    for retries_left in range(options.fetch_offset_retries, -1, -1):
        snapshot = snapshot_now(cluster, options)
        missing = _missing(options, snapshot)
        if not missing:
            return snapshot
        if retries_left:
            cluster.avoid_last_responder()
            time.sleep(options.fetch_offset_retry_interval_ms / 1000)
    option = "subscribe" if options.assign is None else "assign"
    raise SparkOptionError(
        f"{option} names missing topics or partitions: {', '.join(missing)}",
        hint="create it first, or use subscribePattern, which adds topics when they are created",
    )


def _missing(options: SourceOptions, snapshot: Snapshot) -> list[str]:
    """Return the topics and partitions that are named by the options but missing."""
    if options.assign is None:
        return [topic for topic in options.subscribe or () if topic not in snapshot]
    known = assigned(snapshot, options.assign)
    named = [TopicPartition(topic, each) for topic, numbers in options.assign.items() for each in numbers]
    return [str(tp) for tp in named if tp not in known]


def resolve_start(
    cluster: SparkCluster, options: SourceOptions, spec: StartingSpec, snapshot: dict[str, TopicSnapshot]
) -> Resolved:
    """Return the start positions that ``spec`` requests, and losses. Raises the errors of ``start_and_end``.

    A start beyond the last stable offset, in an open transaction, is kept, and the partition's end in
    ``snapshot`` is set to it.
    """
    partitions = assigned(snapshot, options.assign)
    results = look_up(cluster, options, needed_lookups(spec, partitions, now_ms()))
    resolved = resolve_starting(spec, partitions, results)
    wanted = {TopicPartition(loss.topic, loss.partition): loss.to for loss in resolved.losses}
    behind = {tp: offset for tp, offset in wanted.items() if offset > partitions[tp].end}
    if not behind or not options.client.is_read_committed:
        return resolved
    _let_stand(snapshot, behind, cluster.high_watermarks(behind))
    return resolve_starting(spec, assigned(snapshot, options.assign), results)


def resolve_end(
    cluster: SparkCluster, options: SourceOptions, spec: EndingSpec, snapshot: Snapshot
) -> Resolved:
    """Return the exclusive ends that ``spec`` requests, and losses. Raises errors of ``start_and_end``."""
    partitions = assigned(snapshot, options.assign)
    results = look_up(cluster, options, needed_lookups(spec, partitions, now_ms()))
    return resolve_ending(spec, partitions, results)


def look_up(cluster: SparkCluster, options: SourceOptions, asked: Lookups) -> LookupResults:
    """Fetch the results of ``asked`` from the brokers. Sends no request if nothing is needed."""
    times = cluster.offsets_for_times(asked.times) if asked.times else {}
    committed: Positions = {}
    if asked.is_group_wanted and options.group_id is not None:
        committed = cluster.committed_offsets(options.group_id)
    return LookupResults(times, committed)


def report_losses(losses: Collection[Loss], *, is_failing: bool) -> None:
    """If there are losses, raise DataLossError if ``is_failing``; otherwise issue one warning for all."""
    if not losses:
        return
    listed = "; ".join(str(loss) for loss in list(losses)[:_LOSSES_SHOWN])
    if len(losses) > _LOSSES_SHOWN:
        listed += f"; and {len(losses) - _LOSSES_SHOWN} more"
    if is_failing:
        raise DataLossError(
            f"records were deleted before the query read them: {listed}",
            hint="set failOnDataLoss to false to continue without them",
        )
    warnings.warn(f"records were deleted before they were read: {listed}", DataLossWarning, stacklevel=2)
