"""Random seeds of the whole simulated cluster: a few here, hundreds by ``make sim``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kafkalite.rng import seeded_rng
from proof.sim import runner
from proof.sim.plan import draw
from proof.sim.runner import (
    COORDINATION_PROBES,
    COORDINATION_PROBES_FROM_SEEDS,
    EXIT_CODES,
    EXIT_NO_PROBE,
    PROBES,
    PROBES_FROM_SEEDS,
    Report,
    regression_seeds,
    replay_command,
    run_many,
    run_one,
)
from proof.sim.scenario import Outcome

pytestmark = pytest.mark.slow

THREE_BROKERS = range(1, 9)
WITH_A_FOURTH = (24, 25)
# In 912, a coordinator appended in the leader epoch of before a power failure (R22).
ONE_BROKER = (*range(1, 9), 912)


@pytest.mark.parametrize("seed", [*regression_seeds(3), *THREE_BROKERS, *WITH_A_FOURTH])
def test_three_brokers(seed: int) -> None:
    outcome = run_one(seed, 3, story=200)
    assert outcome.violation is None, "\n".join([*outcome.story, outcome.violation, replay_command(outcome)])
    assert outcome.acknowledged > 0


@pytest.mark.parametrize("seed", [*regression_seeds(1), *ONE_BROKER])
def test_one_broker(seed: int) -> None:
    outcome = run_one(seed, 1, story=200)
    assert outcome.violation is None, "\n".join([*outcome.story, outcome.violation, replay_command(outcome)])
    assert outcome.acknowledged > 0


_HASH = """
from proof.sim.scenario import run_seed

for brokers, seed in ((3, 11), (3, 26), (1, 3)):
    print(run_seed(seed, brokers=brokers).trace_hash)
"""


def test_a_seed_has_the_same_trace_in_every_process(repository: Path) -> None:
    """Two processes with different string hashes and object addresses have the same trace."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _HASH],
            cwd=repository,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "4711")
    ]
    hashes = []
    for process in running:
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
        hashes.append(printed.split())
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 3


def test_plans_differ_and_repeat() -> None:
    plans = [draw(seed, seeded_rng(seed)) for seed in range(60)]
    assert plans == [draw(seed, seeded_rng(seed)) for seed in range(60)]
    assert len({plan.summary() for plan in plans}) > 50
    assert {plan.durability for plan in plans} == {"fsync", "page-cache"}
    assert 5 < sum(plan.spares for plan in plans) < 30
    assert all(plan.admin_pause_s for plan in plans if plan.spares)
    for plan in plans:
        if plan.durability == "page-cache":
            assert plan.power_losses < plan.min_insync_replicas


def test_seeds_run_in_processes() -> None:
    outcomes = list(run_many([1, 2, 3], jobs=2, brokers=1))
    assert sorted(outcome.seed for outcome in outcomes) == [1, 2, 3]
    assert all(outcome.trace_hash for outcome in outcomes)


def test_a_budget_ends_the_run() -> None:
    assert list(run_many(range(100), brokers=1, budget_s=-1.0)) == []


def _outcome(seed: int, kind: str = "", probes: dict[str, int] | None = None) -> Outcome:
    outcome = Outcome(seed, "a plan", 3, kind=kind, probes=probes or {})
    if kind:
        outcome.violation, outcome.check = "something: broke", "something"
    return outcome


@pytest.mark.parametrize("kind", ["crash", "liveness", "safety"])
def test_a_failure_prints_the_command_that_replays_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.take(_outcome(1))
    report.take(_outcome(17, kind))
    report.finish(1.0)
    assert report.exit_code() == EXIT_CODES[kind]
    printed = capsys.readouterr().out
    assert "seed=17" in printed
    assert "commit=" in printed
    assert "python -m proof.sim --world cluster --seeds 1 --start 17" in printed


def test_a_path_never_taken_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    every = dict.fromkeys(PROBES, 1)
    for seed in range(PROBES_FROM_SEEDS):
        report.take(_outcome(seed, probes=every))
    assert report.exit_code() == 0
    report.probes["truncation"] = 0
    assert report.exit_code() == EXIT_NO_PROBE
    assert "truncation" in capsys.readouterr().out
    assert report.exit_code(wants_probes=False) == 0
    report.probes["truncation"] = 1
    report.seeds = COORDINATION_PROBES_FROM_SEEDS
    assert report.exit_code() == EXIT_NO_PROBE
    report.probes.update(dict.fromkeys(COORDINATION_PROBES, 1))
    assert report.exit_code() == 0


def test_an_exception_of_the_simulation_itself_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Outcome:
        raise RuntimeError("of the simulation's own")

    monkeypatch.setattr(runner, "run_seed", broken)
    outcome = run_one(1)
    assert outcome.kind == "crash"
    assert "own" in str(outcome.violation)
