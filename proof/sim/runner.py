"""Runs many seeds at a time, and reports violations with the command that replays them.

``python -m proof.sim --seeds 300 --jobs 2``. Exit codes: 0 no violation, 127 a crash, 128 a violation
of liveness, 129 a violation of safety, 130 a probe never fired.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Final

from proof.sim.scenario import Outcome, run_seed

EXIT_CODES: Final = {"crash": 127, "liveness": 128, "safety": 129}
EXIT_NO_PROBE: Final = 130
REGRESSION_SEEDS: Final = Path(__file__).with_name("regression_seeds.txt")
STORY_LINES: Final = 120
SEEDS_PER_PROCESS: Final = 50

#: Paths that a long enough run must take; otherwise it proves nothing about them.
PROBES: Final[tuple[str, ...]] = (
    "truncation",
    "isr-shrink",
    "isr-expand",
    "leader-change",
    "eligible-leaders",
    "fenced",
    "kill",
    "power-loss",
)
#: From this many seeds on, a probe that never fired is a failure.
PROBES_FROM_SEEDS: Final = 40

#: The same for groups and transactions, which not every seed has.
COORDINATION_PROBES: Final = (
    "rebalance",
    "member-expelled",
    "zombie-member-refused",
    "zombie-producer-refused",
    "coordinator-failover",
    "failover-in-transaction",
    "batch-decided",
    "timeout-abort",
    "transformed",
    "read-committed",
    "compacted",
    "replayed",
)
COORDINATION_PROBES_FROM_SEEDS: Final = 120


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proof.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=None, help="the first one; default: drawn from the time")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--brokers", type=int, default=3, help="1 or 3")
    parser.add_argument("--mutant", default=None, help="remove a rule: a name of proof.mutants")
    parser.add_argument("--time-budget", type=float, default=None, help="begin no seed after so many seconds")
    parser.add_argument("--no-regressions", action="store_true", help="leave out the kept seeds")
    parser.add_argument(
        "--verbose", action="store_true", help="a line for each seed, and the story of a bad one"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    start = options.start if options.start is not None else int(time.time()) % 1_000_000_000
    seeds = list(range(start, start + options.seeds))
    if not options.no_regressions and options.mutant is None:
        seeds = [*regression_seeds(options.brokers), *seeds]
    _say(f"seeds {start} to {start + options.seeds - 1}, {options.brokers} brokers, {_commit()}")
    report = Report(options.verbose)
    started_s = time.monotonic()
    for outcome in run_many(
        seeds,
        jobs=options.jobs,
        brokers=options.brokers,
        mutant=options.mutant,
        budget_s=options.time_budget,
        story=STORY_LINES,
    ):
        report.take(outcome)
    report.finish(time.monotonic() - started_s)
    return report.exit_code(wants_probes=options.brokers > 1)


def regression_seeds(brokers: int) -> list[int]:
    """Return the seeds that once found a bug. Each line is ``<brokers> <seed>  <the bug>``."""
    found: list[int] = []
    for line in REGRESSION_SEEDS.read_text("utf-8").splitlines():
        fields = line.partition("#")[0].split()
        if len(fields) >= 2 and int(fields[0]) == brokers:
            found.append(int(fields[1]))
    return found


def run_many(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    brokers: int = 3,
    mutant: str | None = None,
    budget_s: float | None = None,
    story: int = 0,
) -> Iterator[Outcome]:
    """Yield outcomes as they complete. No seed starts after ``budget_s``."""
    end_s = None if budget_s is None else time.monotonic() + budget_s
    todo = iter(seeds)
    if jobs <= 1:
        for seed in todo:
            if end_s is not None and time.monotonic() > end_s:
                return
            yield run_one(seed, brokers, mutant, story)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=SEEDS_PER_PROCESS) as pool:
        running: dict[Future[Outcome], int] = {}
        is_open = True
        while is_open or running:
            while is_open and len(running) < 2 * jobs:
                following = next(todo, None)
                if following is None or (end_s is not None and time.monotonic() > end_s):
                    is_open = False
                else:
                    running[pool.submit(run_one, following, brokers, mutant, story)] = following
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set(), set())
            for future in done:
                del running[future]
                yield future.result()


def run_one(seed: int, brokers: int = 3, mutant: str | None = None, story: int = 0) -> Outcome:
    """Run one seed. An exception of the simulation itself is an outcome too."""
    try:
        outcome = run_seed(seed, brokers=brokers, mutant=mutant, story=story)
    except Exception as error:
        outcome = Outcome(
            seed, "", brokers, f"simulation failed: {error!r}", mutant, kind="crash", check="simulation"
        )
    return outcome


class Report:
    """Counts outcomes, and prints violations."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self.failures: list[Outcome] = []
        self.probes: Counter[str] = Counter()
        self.seeds = 0
        self.virtual_ms = 0
        self.healing_ms: list[int] = []
        self.acknowledged = 0
        self.cpu_s = 0.0

    def take(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.virtual_ms += outcome.virtual_ms
        self.acknowledged += outcome.acknowledged
        self.cpu_s += outcome.wall_s
        if outcome.violation is None:
            self.healing_ms.append(outcome.healing_ms)
        self.probes.update(outcome.probes)
        if self._verbose:
            _say(
                f"{'FAIL' if outcome.violation else 'ok  '} seed={outcome.seed} {outcome.trace_hash}"
                f" {outcome.virtual_ms / 1000:.1f} s in {outcome.wall_s:.1f} s,"
                f" {outcome.acknowledged}/{outcome.sends} acknowledged,"
                f" in sync after {outcome.healing_ms} ms; {outcome.plan}",
            )
        if outcome.violation is not None:
            self.failures.append(outcome)
            _say(
                f"FAIL seed={outcome.seed} commit={_commit()} kind={outcome.kind} check={outcome.check}"
                f" t={outcome.virtual_ms} ms\n     {outcome.violation}\n     {outcome.plan}\n"
                f"     replay: {replay_command(outcome)}",
            )
            if self._verbose:
                _say("\n".join(outcome.story))

    def finish(self, wall_s: float) -> None:
        rate = self.virtual_ms / 1000 / wall_s if wall_s else 0.0
        _say(
            f"{self.seeds} seeds, {len(self.failures)} failed;"
            f" {self.virtual_ms / 3_600_000:.2f} simulated hours in {wall_s:.0f} s"
            f" ({rate:.0f} times real time, {self.cpu_s / max(self.seeds, 1):.1f} s a seed);"
            f" {self.acknowledged} records acknowledged; in sync again after faults within"
            f" {_percentile(self.healing_ms, 50)} ms (median), {_percentile(self.healing_ms, 100)} ms (worst)"
        )
        _say("  ".join(f"{name}={count}" for name, count in sorted(self.probes.items())))

    def exit_code(self, *, wants_probes: bool = True) -> int:
        for kind in ("safety", "crash", "liveness"):
            if any(outcome.kind == kind for outcome in self.failures):
                return EXIT_CODES[kind]
        if wants_probes and self.seeds >= PROBES_FROM_SEEDS:
            wanted = PROBES
            if self.seeds >= COORDINATION_PROBES_FROM_SEEDS:
                wanted += COORDINATION_PROBES
            missing = [name for name in wanted if not self.probes[name]]
            if missing:
                _say(f"FAIL never happened: {', '.join(missing)}")
                return EXIT_NO_PROBE
        return 0


def _percentile(values: Sequence[int], percent: int) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def replay_command(outcome: Outcome) -> str:
    brokers = "" if outcome.brokers == 3 else f" --brokers {outcome.brokers}"
    mutant = f" --mutant {outcome.mutant}" if outcome.mutant else ""
    return f"python -m proof.sim --seeds 1 --start {outcome.seed}{brokers}{mutant} --no-regressions --verbose"


def _commit() -> str:
    """Return the commit of this source, or "unknown" outside of a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def default_jobs() -> int:
    return max(1, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    sys.exit(main())
