"""Runs many seeds of the core model on all cores: ``python -m proof.core --seeds 1000``.

``--mutant NAME`` removes one rule, and ``--mutants`` removes each rule in turn and prints how often that was
found. The exit code is 0 if no seed fails with all rules active and every removed rule was found, else 1.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from typing import Final

from proof.console import tell
from proof.core.directed import DIRECTED
from proof.core.model import run_core_seed
from proof.mutants import effects, without

CHUNK: Final = 25

#: The core model covers the rules of replication and of idempotent producers.
COVERED: Final = tuple(
    name
    for name in effects()
    if name[:2] in {"R3", "R4", "R5", "R7", "R8", "R9"}
    or name[:3] in {"R12", "R13", "R14", "R16", "R20", "R21", "R22", "R27", "R28", "R60", "R61", "R68", "R69"}
)

Found = tuple[int, bool, str]


def run_seeds(job: tuple[str, int, int]) -> list[Found]:
    """Return (seed, fsync, violation) for each failing seed of a chunk."""
    mutant, first, count = job
    logging.disable(logging.CRITICAL)
    found: list[Found] = []
    with without(mutant) if mutant else nullcontext():
        for seed in range(first, first + count):
            for fsync in (True, False):
                problem = run_core_seed(seed, fsync=fsync)
                if problem is not None:
                    found.append((seed, fsync, problem))
    return found


def directed(mutant: str) -> str | None:
    """Return the violation that the mutant's own schedule finds, or None if there is none."""
    schedule = DIRECTED.get(mutant)
    if schedule is None:
        return None
    with without(mutant):
        return schedule()


def _run(pool: multiprocessing.pool.Pool, mutant: str, first: int, seeds: int) -> bool:
    """Print a line about one mutant, or about the unchanged rules. Return whether it is as expected."""
    began = time.monotonic()
    jobs = [
        (mutant, start, min(CHUNK, first + seeds - start)) for start in range(first, first + seeds, CHUNK)
    ]
    found = sorted(one for chunk in pool.imap_unordered(run_seeds, jobs) for one in chunk)
    seconds = time.monotonic() - began
    by_mode = Counter(fsync for _, fsync, _ in found)
    by_schedule = directed(mutant) if mutant else None
    tell(
        f"{mutant or 'all rules in force':28} fsync {by_mode[True]:5} page-cache {by_mode[False]:5}"
        f" of {seeds}"
        f"  directed {'-' if mutant not in DIRECTED else 'found' if by_schedule else 'MISSED'}"
        f"  {2 * seeds / seconds:5.0f} runs/s  {found[0][2] if found else by_schedule or ''}"[:230]
    )
    if not mutant:
        for seed, fsync, problem in found:
            tell(f"FAIL seed={seed} fsync={fsync} {problem}")
        return not found
    return bool(found or by_schedule)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.core", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutant", default="", choices=["", *COVERED])
    parser.add_argument("--mutants", action="store_true", help="remove each rule in turn")
    chosen = parser.parse_args(arguments)
    names = COVERED if chosen.mutants else (chosen.mutant,)
    with multiprocessing.Pool(chosen.jobs) as pool:
        results = [_run(pool, name, chosen.start, chosen.seeds) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
