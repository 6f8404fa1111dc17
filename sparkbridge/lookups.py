"""What the driver's side of the source asks of the cluster, in the words of ``planning`` and ``starting``.

Here is all the waiting and warning that those pure modules leave to others.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kafkalite.model import TopicPartition
from sparkbridge.errors import DataLossError, DataLossWarning, SparkOptionError
from sparkbridge.offsets import Loss, Positions, Snapshot, StreamOffset, TopicSnapshot
from sparkbridge.planning import went_back
from sparkbridge.starting import (
    Answers,
    EndingSpec,
    Questions,
    Resolved,
    StartingSpec,
    assigned,
    questions,
    resolve_ending,
    resolve_starting,
)

if TYPE_CHECKING:
    from sparkbridge.cluster import SparkCluster
    from sparkbridge.options import SourceOptions

_LOSSES_TOLD = 5


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def snapshot_now(cluster: SparkCluster, options: SourceOptions) -> dict[str, TopicSnapshot]:
    """Where the topics of ``options`` start and end; those that do not exist are left out."""
    wanted: dict[str, Sequence[int] | None] = {}
    if options.assign is not None:
        for name, info in cluster.topics(names=sorted(options.assign)).items():
            there = [number for number in options.assign[name] if number < info.partition_count]
            if there:
                wanted[name] = there
    elif options.subscribe is not None:
        wanted = dict.fromkeys(cluster.topics(names=list(options.subscribe)))
    else:
        wanted = dict.fromkeys(cluster.topics(pattern=options.subscribe_pattern))
    return cluster.snapshot(wanted) if wanted else {}


def steady_snapshot(
    cluster: SparkCluster, options: SourceOptions, offset: StreamOffset
) -> dict[str, TopicSnapshot]:
    """A snapshot, taken again (fetchOffset.numRetries) while a partition of ``offset`` is gone or too short.

    A broker that has just started, or a leader that was just elected, will soon know better.
    """
    for _ in range(options.fetch_offset_retries):
        snapshot = snapshot_now(cluster, options)
        there = ends_of(snapshot)
        if not went_back(offset, snapshot) and all(tp in there for tp in offset.positions):
            return snapshot
        time.sleep(options.fetch_offset_retry_interval_ms / 1000)
    return snapshot_now(cluster, options)


def ends_of(snapshot: Snapshot) -> Positions:
    """Where each partition that was asked for ends."""
    return {
        TopicPartition(topic, number): end
        for topic, known in snapshot.items()
        for number, (start, end) in enumerate(zip(known.starts, known.ends, strict=True))
        if start >= 0
    }


def check_existence(options: SourceOptions, snapshot: Snapshot) -> None:
    """Raises SparkOptionError when a query names topics or partitions that are not there as it begins."""
    if options.assign is not None:
        known = assigned(snapshot, options.assign)
        named = [TopicPartition(topic, each) for topic, all_ in options.assign.items() for each in all_]
        missing = [str(tp) for tp in named if tp not in known]
        option = "assign"
    else:
        missing = [topic for topic in options.subscribe or () if topic not in snapshot]
        option = "subscribe"
    if missing:
        raise SparkOptionError(
            f"{option} names what does not exist: {', '.join(missing)}",
            hint="create it first, or use subscribePattern, which takes up a topic when it comes",
        )


def resolve_start(
    cluster: SparkCluster, options: SourceOptions, spec: StartingSpec, snapshot: Snapshot
) -> Resolved:
    """Where to start; raises what ``starting`` raises."""
    partitions = assigned(snapshot, options.assign)
    answers = answers_to(cluster, options, questions(spec, partitions, now_ms()))
    return resolve_starting(spec, partitions, answers)


def resolve_end(
    cluster: SparkCluster, options: SourceOptions, spec: EndingSpec, snapshot: Snapshot
) -> Resolved:
    """Where to end, exclusive; raises what ``starting`` raises."""
    partitions = assigned(snapshot, options.assign)
    answers = answers_to(cluster, options, questions(spec, partitions, now_ms()))
    return resolve_ending(spec, partitions, answers)


def answers_to(cluster: SparkCluster, options: SourceOptions, asked: Questions) -> Answers:
    """Asks nobody when there is nothing to ask."""
    times = cluster.offsets_for_times(asked.times) if asked.times else {}
    committed: Positions = {}
    if asked.is_group_wanted and options.group_id is not None:
        committed = cluster.committed_offsets(options.group_id)
    return Answers(times, committed)


def tell_losses(losses: Collection[Loss], *, is_failing: bool) -> None:
    """Raises DataLossError (failOnDataLoss), or warns: once, whatever their number."""
    if not losses:
        return
    told = "; ".join(str(loss) for loss in list(losses)[:_LOSSES_TOLD])
    if len(losses) > _LOSSES_TOLD:
        told += f"; and {len(losses) - _LOSSES_TOLD} more"
    if is_failing:
        raise DataLossError(
            f"records that the query had still to read are gone: {told}",
            hint="set failOnDataLoss to false to go on without them",
        )
    warnings.warn(f"records are gone: {told}", DataLossWarning, stacklevel=2)
