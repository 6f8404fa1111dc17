"""The core model: chance finds nothing while the rules are in force; each schedule needs its rule."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from proof.core.directed import DIRECTED
from proof.core.model import run_core_seed
from proof.mutants import without

#: Seeds that have found a bug once, and which bug.
REGRESSIONS = {
    (2621, True): "a leader's log that starts within a batch could never be followed",
    (3788, False): "the same, met by an empty follower",
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)
    yield


@pytest.mark.parametrize(("seed", "fsync"), REGRESSIONS)
def test_a_seed_that_failed_once(seed: int, fsync: bool) -> None:
    assert run_core_seed(seed, fsync=fsync) is None


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [True, False], ids=["fsync", "page-cache"])
@pytest.mark.parametrize("part", range(4))
def test_random_worlds_keep_every_promise(part: int, fsync: bool) -> None:
    for seed in range(part * 25, part * 25 + 25):
        assert run_core_seed(seed, fsync=fsync) is None, f"seed {seed}, fsync {fsync}"


def test_a_seed_replays() -> None:
    with without("R4-truncate-to-hw"):
        found = [run_core_seed(seed, fsync=True) for seed in range(60)]
        assert any(found)
        assert found == [run_core_seed(seed, fsync=True) for seed in range(60)]


@pytest.mark.parametrize("mutant", DIRECTED)
def test_a_schedule_does_no_harm_while_the_rules_are_in_force(mutant: str) -> None:
    assert DIRECTED[mutant]() is None


@pytest.mark.parametrize("mutant", DIRECTED)
def test_a_schedule_breaks_what_lacks_its_rule(mutant: str) -> None:
    with without(mutant):
        assert DIRECTED[mutant]() is not None


@pytest.mark.parametrize(
    "mutant",
    ["R4-divergent-counts", "R20-no-fencing", "R22-stale-metadata", "R27-no-rebuild", "R28-no-dedup"],
)
def test_chance_finds_a_missing_rule(mutant: str) -> None:
    with without(mutant):
        assert any(run_core_seed(seed, fsync=True) for seed in range(300))
