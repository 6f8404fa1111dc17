"""Random histories of transactions in the logs of one partition: crashes, late batches, markers (R27,
R31-R33).
"""

from __future__ import annotations

import pytest

from proof.mutants import without
from proof.transactions import log as txn_log


def test_nothing_is_violated_while_all_rules_are_in_force() -> None:
    assert [found for seed in range(1, 21) if (found := txn_log.run_txn_log_seed(seed))] == []


def test_something_happens_in_these_histories() -> None:
    reads = leader_epochs = 0
    decisions: list[bool] = []
    for seed in range(1, 11):
        world = txn_log.World(seed)
        for _ in range(txn_log.STEPS):
            world.step()
        world.heal()
        reads, leader_epochs = reads + len(world.read), leader_epochs + world.leader_epoch
        decisions += world.decisions.values()
    assert leader_epochs >= 10
    assert min(reads, decisions.count(True), decisions.count(False)) >= 10


@pytest.mark.parametrize("mutant", txn_log.DIRECTED)
def test_the_loss_of_a_rule_is_noticed(mutant: str) -> None:
    with without(mutant):
        assert txn_log.DIRECTED[mutant]()


def test_without_the_checks_of_state_the_reader_still_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader receives an aborted record if the index is lost."""
    monkeypatch.setattr(txn_log.World, "check_states", lambda world: None)
    with without("R33-index-forgotten"):
        found = [txn_log.run_txn_log_seed(seed) for seed in range(1, 60)]
    assert any(one is not None and "aborted transaction" in one for one in found)
