"""Random schedules: a bounded number here, any number with ``python -m proof.raft.fuzz``."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from proof.mutants import without
from proof.raft import fuzz as raft_fuzz

TRACE = """
from proof.raft.fuzz import HARSH, SETTINGS, Run
run = Run(3, 3, HARSH, SETTINGS)
run.run(1_000)
print(run.stats, run.truth, run.world.clock, [member.log() for member in run.world.up.values()])
"""


@pytest.mark.parametrize("seed", [*range(8), pytest.param(random.randrange(10**6), id="new")])
def test_random_schedule_violates_nothing(seed):
    print(f"seed {seed}")
    stats = Counter()
    assert raft_fuzz.run_varied_seed(seed, steps=2_000, stats=stats) is None
    assert stats["elections"] >= 1


def test_a_seed_replays_exactly_whatever_the_hash_seed():
    traces = {
        subprocess.run(
            [sys.executable, "-c", TRACE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(traces) == 1


@pytest.mark.parametrize("mutant", ["RAFT-ack-unsynced", "RAFT-tail-dropped", "RAFT-truncate-overlap"])
def test_random_schedules_notice_a_missing_rule(mutant):
    with without(mutant):
        assert any(raft_fuzz.run_raft_seed(seed, plan=raft_fuzz.HARSH) is not None for seed in range(20))


def test_r54_full_disks_violate_nothing():
    stats = Counter()
    for seed in range(6):
        assert raft_fuzz.run_raft_seed(seed, steps=2_000, plan=raft_fuzz.FULL, stats=stats) is None
    assert stats["paused"] >= 1


def test_r59_older_copies_violate_nothing():
    plan, stats = replace(raft_fuzz.CALM, restore=12), Counter()
    for seed in range(6):
        assert raft_fuzz.run_raft_seed(seed, steps=2_000, plan=plan, stats=stats) is None
    assert stats["restored"] >= 6


def test_r59_random_schedules_notice_a_voter_that_does_not_compare_its_log():
    plan = replace(raft_fuzz.CALM, restore=12)
    with without("R59-elects-any"):
        assert any(raft_fuzz.run_raft_seed(seed, plan=plan) is not None for seed in range(30))


def test_r54_random_schedules_notice_a_voter_that_goes_on_without_its_disk():
    with without("R54-voter-goes-on"):
        assert any(raft_fuzz.run_raft_seed(seed, plan=raft_fuzz.FULL) is not None for seed in range(10))


def test_r93_changes_of_the_voters_violate_nothing():
    stats = Counter()
    for seed in range(10):
        assert raft_fuzz.run_members_seed(seed, steps=1_500, stats=stats) is None
    assert stats["changes"] >= 20


@pytest.mark.parametrize(
    ("mutant", "seeds"),
    [("R93-on-commit", range(5)), ("R95-two-changes", range(5)), ("R98-observer-counts", range(5))],
)
def test_r93_random_schedules_notice_a_missing_rule_of_membership(mutant, seeds):
    with without(mutant):
        assert any(raft_fuzz.run_members_seed(seed) is not None for seed in seeds)
