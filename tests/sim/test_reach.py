"""The branches of rules that a run reaches, the steering of its seeds, and the small worlds."""

from __future__ import annotations

from collections import Counter

import pytest

from kafkalite.replication.leader import PartitionLeader
from kafkalite.rng import seeded_rng
from proof.mutants import effects
from proof.reach import MOST, REVIEW_SEEDS, Steering, counting, decode_factors, encode_factors, points, table
from proof.sim.plan import draw
from proof.sim.runner import main, run_small
from proof.worlds import WORLDS

SETTLED = "kafkalite.replication.leader:PartitionLeader.is_settled"


def _leader(high_watermark: int) -> PartitionLeader:
    return PartitionLeader(
        1,
        leader_epoch=0,
        isr=(1, 2),
        epoch_start_offset=5,
        high_watermark=high_watermark,
        min_insync_replicas=1,
    )


def test_both_branches_of_a_rule_are_counted() -> None:
    counts: Counter[str] = Counter()
    original = vars(PartitionLeader)["is_settled"]
    with counting(counts):
        assert [_leader(end).is_settled for end in (4, 5, 6)] == [False, True, True]
    assert (counts[f"{SETTLED} true"], counts[f"{SETTLED} false"]) == (2, 1)
    assert vars(PartitionLeader)["is_settled"] is original
    lines = "\n".join(table({"cluster": counts}))
    assert "true 2  false 1" in lines
    assert "NEVER" in lines
    assert points()[SETTLED] == ("true", "false")


def test_seeds_are_steered_towards_rare_branches() -> None:
    steering = Steering()
    for seed in range(REVIEW_SEEDS):
        is_rare = seed == 3
        steering.take(["kill"] if is_rare else ["pause"], ["a", "b"] if is_rare else ["a"])
    assert steering.factors_for(1)["kill"] == MOST
    assert steering.factors_for(1).get("pause", 1.0) < 1.0
    assert steering.factors_for(2) == {}
    assert decode_factors(encode_factors(steering.factors)) == steering.factors


def test_factors_change_how_often_a_fault_is_drawn() -> None:
    plain = sum("kill" in draw(seed, seeded_rng(seed)).faults for seed in range(200))
    often = sum("kill" in draw(seed, seeded_rng(seed), factors={"kill": 2.0}).faults for seed in range(200))
    assert often > 1.5 * plain


@pytest.mark.parametrize("world", WORLDS)
def test_a_small_world_holds(world: str) -> None:
    found = run_small(world, range(1, 6), None)
    assert found.failed is None, found.failed
    assert found.seeds == 5
    assert found.reached


def test_a_small_world_finds_a_mutant_and_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "R28-no-dedup" in effects()
    arguments = ["--world", "core", "--seeds", "20", "--start", "1", "--mutant", "R28-no-dedup"]
    assert main(arguments) == 129
    assert "--world core --seeds 1 --start" in capsys.readouterr().out
