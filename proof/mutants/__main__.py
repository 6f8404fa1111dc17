"""Proves that the tests find a missing rule, by activating one mutant at a time.

``python -m proof.mutants`` (``make mutants``) prints for every mutant whether random seeds of a small world
(``proof.worlds``) found it, else whether a directed schedule did, else whether random seeds of the whole
cluster did. If a mutant is not found, no test covers its rule, and the exit code is 1. So it is if random
histories found fewer than ``--at-least``.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

from proof.console import tell
from proof.mutants import effects, violation_without
from proof.sim.runner import default_jobs, run_one
from proof.worlds import worlds_of

CORE_BUDGET_S: Final = 5.0  #: of processor time, for each small world
CLUSTER_BUDGET_S: Final = 60.0


class Finding(NamedTuple):
    """How a mutant was found. ``how`` is empty if it was not found."""

    mutant: str
    how: str
    symptom: str
    tries: int
    seconds: float


def find(
    mutant: str, *, core_budget_s: float = CORE_BUDGET_S, cluster_budget_s: float = CLUSTER_BUDGET_S
) -> Finding:
    """Search for a run that fails while the mutant is active."""
    started_s = time.monotonic()
    tries = 0
    for how, attempts in _ways(mutant, core_budget_s, cluster_budget_s):
        for attempt in attempts:
            tries += 1
            symptom = attempt()
            if symptom is not None:
                return Finding(mutant, how, symptom, tries, time.monotonic() - started_s)
    return Finding(mutant, "", "", tries, time.monotonic() - started_s)


Attempt = Callable[[], str | None]

DIRECTED: Final = "directed schedule"


def _ways(
    mutant: str, core_budget_s: float, cluster_budget_s: float
) -> Iterable[tuple[str, Iterable[Attempt]]]:
    """Yield (name of the method, the attempts): random histories of small worlds first."""

    def small(run: Callable[[int], str | None], seed: int) -> Attempt:
        return lambda: violation_without(mutant, lambda: run(seed))

    for world in worlds_of(mutant):
        seeds = range(1, 10**6)
        yield world.name, _within(core_budget_s, map(partial(small, world.run), seeds), time.process_time)
    directed = _directed(mutant)
    if directed is not None:
        yield DIRECTED, [lambda: violation_without(mutant, directed)]

    def cluster(seed: int) -> Attempt:
        return lambda: run_one(seed, 3, mutant).violation

    yield "whole cluster", _within(cluster_budget_s, (cluster(seed) for seed in range(1, 10**6)))


def _directed(mutant: str) -> Attempt | None:
    """Return the schedule that was written for the mutant, or None."""
    from proof import hostile
    from proof.core import directed as core_directed
    from proof.damage import directed as damage_directed
    from proof.damage import directories
    from proof.groups import directed as group_directed
    from proof.raft import schedules as raft_schedules
    from proof.raft import voter_schedules
    from proof.sim import directed as cluster_directed
    from proof.transactions import directed as txn_directed
    from proof.transactions import log as txn_log

    directed: tuple[dict[str, Attempt], ...] = (
        core_directed.DIRECTED,
        group_directed.DIRECTED,
        txn_directed.DIRECTED,
        txn_log.DIRECTED,
        cluster_directed.DIRECTED,
        damage_directed.DIRECTED,
        directories.DIRECTED,
        hostile.DIRECTED,
        raft_schedules.DIRECTED,
        voter_schedules.DIRECTED,
    )
    return next((schedules[mutant] for schedules in directed if mutant in schedules), None)


def _within(
    budget_s: float, attempts: Iterable[Attempt], clock: Callable[[], float] = time.monotonic
) -> Iterable[Attempt]:
    """Yield ``attempts`` until ``budget_s`` of ``clock`` is used up."""
    end_s = clock() + budget_s
    for attempt in attempts:
        if clock() > end_s:
            return
        yield attempt


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="which mutants; default: all")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="how many at a time")
    parser.add_argument("--core-budget", type=float, default=CORE_BUDGET_S, help="seconds, for each mutant")
    parser.add_argument("--at-least", type=int, default=0, help="how many random histories must find")
    parser.add_argument("--cluster-budget", type=float, default=CLUSTER_BUDGET_S, help="seconds likewise")
    options = parser.parse_args(arguments)
    known = effects()
    names = options.names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    settings: dict[str, Any] = {
        "core_budget_s": options.core_budget,
        "cluster_budget_s": options.cluster_budget,
    }
    context = multiprocessing.get_context("spawn")
    findings: list[Finding] = []
    with ProcessPoolExecutor(
        options.jobs, mp_context=context, initializer=logging.disable, initargs=(logging.CRITICAL,)
    ) as pool:
        futures = [pool.submit(find, name, **settings) for name in names]
        tell(f"{'mutant':<26}{'found by':<19}{'tries':>6}{'s':>7}  symptom")
        for future in futures:
            finding = future.result()
            findings.append(finding)
            tell(
                f"{finding.mutant:<26}{finding.how or 'NOT FOUND':<19}{finding.tries:>6}"
                f"{finding.seconds:>7.1f}  {finding.symptom[:90]}"
            )
    found = sum(bool(finding.how) for finding in findings)
    tell(f"score: {found} of {len(findings)}, {100 * found // max(len(findings), 1)} %")
    randomly = sum(finding.how not in ("", DIRECTED) for finding in findings)
    only = ", ".join(finding.mutant for finding in findings if finding.how == DIRECTED)
    tell(f"{randomly} by random histories; only by a directed schedule: {only or 'none'}")
    return 0 if found == len(findings) and randomly >= options.at_least else 1


if __name__ == "__main__":
    from proof.mutants import __main__ as importable  # worker processes import its functions by this name

    sys.exit(importable.main())
