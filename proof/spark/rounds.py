"""One round: the life of a copying query in which every point strikes once.

The seed determines the order of the points, the batches and the kind of each run. ``plan_round`` is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from kafkalite.rng import Rng
from proof.spark.points import KILLS_DRIVER, KILLS_QUERY, POINTS

LOCAL: Final = "local[2,4]"
LOCAL_CLUSTER: Final = "local-cluster[2,1,1024]"
#: A query that is stopped from outside at any moment and restarted from its checkpoint.
STOPPED: Final = "restart"
#: A restart with a different minPartitions.
SPLIT: Final = "min-partitions"
ALL: Final = (*POINTS, STOPPED, SPLIT)
#: Points at which Spark does not provide the batch id.
PLANNING: Final = frozenset({"planned", "stream-reader-killed"})
MIN_PARTITIONS: Final = 5


class Run(NamedTuple):
    """One start of the query: its master, its options, the points that strike, and how it ends."""

    master: str
    min_partitions: int | None
    plan: Mapping[str, int]
    until: str | int  #: the ``until`` of ``copy_job.run``
    ends_driver: bool
    ends_query: bool


def plan_round(rng: Rng, points: Collection[str] = ALL) -> list[Run]:
    """Return the runs of a round. Batches increase, a kill is the last point of its run, and the last run
    ends normally.
    """
    order = [point for point in POINTS if point in points and point != "latest-start"]
    if STOPPED in points:
        order.append(STOPPED)
    rng.shuffle(order)
    runs: list[Run] = []
    plan: dict[str, int] = {}
    batch_id = 0

    def end(until: str | int, *, driver: bool = False, query: bool = False) -> None:
        splits = SPLIT in points and len(runs) % 2 == 1
        runs.append(Run(LOCAL, MIN_PARTITIONS if splits else None, dict(plan), until, driver, query))
        plan.clear()

    if "latest-start" in points:
        plan["latest-start"] = 0
        end("available-now", driver=True)
    for point in order:
        kills = point in KILLS_DRIVER or point in KILLS_QUERY
        # Several points may strike in one batch, but none after a kill in its planning; and planning counts a
        # batch that is run again as the next one.
        batch_id += 2 if point in PLANNING else 1 if kills else rng.randrange(2) + rng.randrange(2)
        endless = ("available-now", "processed")[rng.randrange(2)]
        if point == STOPPED:
            end(batch_id)
            continue
        plan[point] = batch_id
        if kills:
            end(endless, driver=point in KILLS_DRIVER, query=point in KILLS_QUERY)
    if plan or not runs or runs[-1].ends_query or runs[-1].ends_driver or isinstance(runs[-1].until, int):
        end("available-now")
    return _with_executors(runs)


def last_batch_id(runs: Iterable[Run]) -> int:
    """Return the last batch with a point."""
    stops = [run.until for run in runs if isinstance(run.until, int)]
    return max([0, *stops, *(batch_id for run in runs for batch_id in run.plan.values())])


def _with_executors(runs: list[Run]) -> list[Run]:
    """Give a driver its own executors, for its whole life, if one of them is killed."""
    lives: list[list[Run]] = [[]]
    for run in runs:
        lives[-1].append(run)
        if run.ends_driver:
            lives.append([])
    for life in lives:
        if any("executor-killed" in run.plan for run in life):
            life[:] = [run._replace(master=LOCAL_CLUSTER) for run in life]
    return [run for life in lives for run in life]
