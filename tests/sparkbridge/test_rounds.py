"""The plans of rounds: every point strikes, and none after a point that ends its run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kafkalite.rng import seeded_rng
from proof.spark.points import KILLS_DRIVER, KILLS_QUERY, POINTS
from proof.spark.rounds import ALL, LOCAL, LOCAL_CLUSTER, PLANNING, STOPPED, last_batch_id, plan_round

SEEDS = range(200)


@pytest.mark.parametrize("points", [ALL, ("before-commit",), ("task-fails", STOPPED), ()])
def test_every_point_strikes_once_and_the_last_run_ends_normally(points: tuple[str, ...]) -> None:
    for seed in SEEDS:
        runs = plan_round(seeded_rng(seed), points)
        planned = [point for run in runs for point in run.plan]
        assert sorted(planned) == sorted(point for point in points if point in POINTS)
        assert sum(isinstance(run.until, int) for run in runs) == (STOPPED in points)
        assert not runs[-1].ends_driver and not runs[-1].ends_query and isinstance(runs[-1].until, str)


def test_a_killing_point_is_the_last_of_its_run() -> None:
    for seed in SEEDS:
        for run in plan_round(seeded_rng(seed)):
            *others, last = list(run.plan) or [""]
            assert not (KILLS_DRIVER | KILLS_QUERY) & set(others)
            assert run.ends_driver == (last in KILLS_DRIVER)
            assert run.ends_query == (last in KILLS_QUERY)
            if run.ends_driver or run.ends_query:
                assert all(run.plan[other] < run.plan[last] for other in others)


def test_batch_numbers_ascend() -> None:
    for seed in SEEDS:
        runs = plan_round(seeded_rng(seed))
        for one, other in pairwise(run for run in runs if run.plan):
            assert max(one.plan.values()) <= min(other.plan.values())
        assert all(last_batch_id(runs) >= batch_id for run in runs for batch_id in run.plan.values())


def test_executors_of_one_driver_are_recognized() -> None:
    for seed in SEEDS:
        runs = plan_round(seeded_rng(seed))
        (killed,) = (run for run in runs if "executor-killed" in run.plan)
        assert killed.master == LOCAL_CLUSTER
        for one, other in pairwise(runs):
            if not one.ends_driver:
                assert one.master == other.master
        assert any(run.master == LOCAL for run in runs)


def test_a_seed_is_a_plan() -> None:
    assert plan_round(seeded_rng(5)) == plan_round(seeded_rng(5))
    assert len({str(plan_round(seeded_rng(seed))) for seed in SEEDS}) == len(SEEDS)


def test_planning_one_batch_too_many_strikes_after_all_others() -> None:
    for seed in range(200):
        for run in plan_round(seeded_rng(seed)):
            others = [batch_id for point, batch_id in run.plan.items() if point not in PLANNING]
            for point in PLANNING & run.plan.keys():
                assert run.plan[point] - 1 > max(others, default=-1), (seed, run)
