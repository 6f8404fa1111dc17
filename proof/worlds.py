"""The small worlds of the proof: each runs one part of the product from seeds, without an event loop.

A seed takes milliseconds, so that random histories meet in seconds what those of a whole cluster meet in
days. ``python -m proof.sim`` runs ``per_seed`` seeds of each for every seed of the cluster;
``python -m proof.mutants`` searches with them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from proof.core.model import run_core_seed
from proof.disks import run_disk_seed
from proof.groups.random import run_group_seed
from proof.levels import run_levels_seed
from proof.raft.fuzz import run_members_seed, run_varied_seed
from proof.transactions.log import run_txn_log_seed
from proof.transactions.random import run_transaction_seed


class SmallWorld(NamedTuple):
    """``run`` takes a seed and returns the violation, or None."""

    name: str
    run: Callable[[int], str | None]
    per_seed: int  #: chosen so that all small worlds take about a tenth of the whole cluster's time
    rules: tuple[str, ...]  #: prefixes of the mutants that it may find


def _core(seed: int) -> str | None:
    return run_core_seed(seed // 2, fsync=seed % 2 == 0)


WORLDS: Final = {
    world.name: world
    for world in (
        SmallWorld(
            "core",
            _core,
            6,
            (
                "R1",
                "R2",
                "R3-",
                "R4-",
                "R5-",
                "R6-",
                "R7-",
                "R8-",
                "R9-",
                "R57-",
                "R60-",
                "R61-",
                "R65-",
                "R66-",
                "R67-",
            ),
        ),
        SmallWorld("disks", run_disk_seed, 2, ("R24-", "R25-", "R42-", "R43-", "R45-")),
        SmallWorld("levels", run_levels_seed, 1, ("R91", "R92")),
        SmallWorld("raft", run_varied_seed, 1, ("RAFT-", "R59-", "R54-voter-goes-on")),
        SmallWorld("members", run_members_seed, 1, ("R93-", "R94-", "R95-", "R96-", "R97-", "R98-")),
        SmallWorld("transaction-log", run_txn_log_seed, 1, ("R5-", "R11", "R28", "R29", "R31", "R32", "R33")),
        SmallWorld("transactions", run_transaction_seed, 3, ("R31", "R32", "R34")),
        SmallWorld("groups", run_group_seed, 2, ("R35", "R38", "R39", "R40", "R56")),
    )
}


def worlds_of(mutant: str) -> list[SmallWorld]:
    """Return the worlds in which ``mutant`` may be found."""
    return [world for world in WORLDS.values() if mutant.startswith(world.rules)]
