"""Prove that the tests find a missing rule: activate one mutant at a time.

``python -m proof.mutants`` (``make mutants``) prints for every mutant how it was found: by a directed
schedule, by random seeds of the core model (the real replicas and the real controller, without sockets
and event loop), or by random seeds of the whole cluster. If a mutant is not found, no test covers its
rule: the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, NamedTuple

from proof.mutants import effects, without
from proof.sim.runner import default_jobs, run_one

CORE_BUDGET_S: Final = 20.0
CLUSTER_BUDGET_S: Final = 60.0


class Finding(NamedTuple):
    """How a mutant was found; ``how`` is empty if it was not."""

    mutant: str
    how: str
    symptom: str
    tries: int
    seconds: float


def find(
    mutant: str, *, core_budget_s: float = CORE_BUDGET_S, cluster_budget_s: float = CLUSTER_BUDGET_S
) -> Finding:
    """Look for a run that fails without the rule."""
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

_RAFT: Final = "RAFT-"


def _ways(
    mutant: str, core_budget_s: float, cluster_budget_s: float
) -> Iterable[tuple[str, Iterable[Attempt]]]:
    """Yield (name of the method, the attempts), the quickest first."""
    directed = _directed(mutant)
    if directed is not None:
        yield "directed schedule", [lambda: _with(mutant, directed)]
    if mutant.startswith(_RAFT):
        from proof.raft.fuzz import run_varied_seed

        def raft(seed: int) -> Attempt:
            return lambda: _with(mutant, lambda: run_varied_seed(seed))

        yield "Raft seeds", _within(core_budget_s, (raft(seed) for seed in range(1, 10**6)))
    else:
        from proof.core.model import run_core_seed

        def core(seed: int, *, fsync: bool) -> Attempt:
            return lambda: _with(mutant, lambda: run_core_seed(seed, fsync=fsync))

        attempts = (core(number // 2, fsync=number % 2 == 0) for number in range(10**6))
        yield "core model", _within(core_budget_s, attempts)

    def cluster(seed: int) -> Attempt:
        return lambda: run_one(seed, 3, mutant).violation

    yield "whole cluster", _within(cluster_budget_s, (cluster(seed) for seed in range(1, 10**6)))


def _directed(mutant: str) -> Attempt | None:
    """Return the schedule that was written for the mutant, or None."""
    if mutant.startswith(_RAFT):
        from proof.raft import schedules as raft_schedules

        return raft_schedules.DIRECTED.get(mutant)
    from proof.core import directed as core_directed
    from proof.groups import directed as group_directed
    from proof.sim import directed as cluster_directed
    from proof.transactions import directed as txn_directed
    from proof.transactions import log as txn_log

    directed: tuple[dict[str, Attempt], ...] = (
        core_directed.DIRECTED,
        group_directed.DIRECTED,
        txn_directed.DIRECTED,
        txn_log.DIRECTED,
        cluster_directed.DIRECTED,
    )
    return next((schedules[mutant] for schedules in directed if mutant in schedules), None)


def _within(budget_s: float, attempts: Iterable[Attempt]) -> Iterable[Attempt]:
    """Yield ``attempts`` until the time is over."""
    end_s = time.monotonic() + budget_s
    for attempt in attempts:
        if time.monotonic() > end_s:
            return
        yield attempt


def _with(mutant: str, run: Attempt) -> str | None:
    """Return what ``run`` finds while the mutant is active. Any exception is a finding."""
    with without(mutant):
        try:
            return run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="which mutants; default: all")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="how many at a time")
    parser.add_argument("--core-budget", type=float, default=CORE_BUDGET_S, help="seconds, for each mutant")
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
        _say(f"{'mutant':<26}{'found by':<19}{'tries':>6}{'s':>7}  symptom")
        for future in futures:
            finding = future.result()
            findings.append(finding)
            _say(
                f"{finding.mutant:<26}{finding.how or 'NOT FOUND':<19}{finding.tries:>6}"
                f"{finding.seconds:>7.1f}  {finding.symptom[:90]}"
            )
    found = sum(bool(finding.how) for finding in findings)
    _say(f"score: {found} of {len(findings)}, {100 * found // max(len(findings), 1)} %")
    return 0 if found == len(findings) else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    from proof.mutants import __main__ as importable  # worker processes import its functions by this name

    sys.exit(importable.main())
