"""Runs many seeds at the same time, and reports violations with the command that reproduces them.

``python -m proof.sim --seeds 300 --jobs 2`` runs some seeds of each small world (``proof.worlds``) too,
prints which branches of the rules were reached, and steers every other seed towards rarely reached ones. Exit
codes: 0 no violation, 127 crash, 128 liveness violation, 129 safety violation, 130 a probe never fired.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proof.console import tell
from proof.mutants import without
from proof.reach import Steering, counting, decode_factors, encode_factors, table
from proof.sim.scenario import Outcome, run_seed
from proof.worlds import WORLDS

EXIT_CODES: Final = {"crash": 127, "liveness": 128, "safety": 129}
EXIT_NO_PROBE: Final = 130
REGRESSION_SEEDS: Final = Path(__file__).with_name("regression_seeds.txt")
STORY_LINES: Final = 120
SEEDS_PER_PROCESS: Final = 50  #: a process keeps about 10 MB of every seed, so more than these make it slow
CLUSTER: Final = "cluster"  #: the world of this package; the others are in proof.worlds
SMALL_CHUNK: Final = 20  #: the number of seeds of a small world that one task runs

#: Code paths that a long enough run must reach. Otherwise it proves nothing about them.
PROBES: Final[tuple[str, ...]] = (
    "truncation",
    "isr-shrink",
    "isr-expand",
    "leader-change",
    "eligible-leaders",
    "fenced",
    "kill",
    "power-loss",
    "near-read",
    "reassigned-among-four",
)
#: From this many seeds on, a probe that never fired is a failure.
PROBES_FROM_SEEDS: Final = 40

#: The same for groups and transactions, which not every seed uses.
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
    parser.add_argument("--world", choices=(CLUSTER, *WORLDS), default=None, help="run only this world")
    parser.add_argument(
        "--factors",
        type=decode_factors,
        default=None,
        help="probabilities of kinds, as a failure printed them",
    )
    parser.add_argument("--no-regressions", action="store_true", help="leave out the kept seeds")
    parser.add_argument(
        "--verbose", action="store_true", help="a line for each seed, and the story of a bad one"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    start = options.start if options.start is not None else int(time.time()) % 1_000_000_000
    seeds = list(range(start, start + options.seeds))
    if options.world not in (None, CLUSTER):
        small = {options.world: range(start, start + options.seeds)}
        seeds = []
    else:
        small = {}
        if options.world is None and options.factors is None and options.brokers > 1:
            small = {
                name: range(start * world.per_seed, (start + options.seeds) * world.per_seed)
                for name, world in WORLDS.items()
            }
    if seeds and not options.no_regressions and options.mutant is None:
        seeds = [*regression_seeds(options.brokers), *seeds]
    tell(f"seeds {start} to {start + options.seeds - 1}, {options.brokers} brokers, {_commit()}")
    report = Report(options.verbose)
    started_s = time.monotonic()
    for found in run_small_worlds(small, jobs=options.jobs, mutant=options.mutant):
        report.take_small(found)
    for outcome in run_many(
        seeds,
        jobs=options.jobs,
        brokers=options.brokers,
        mutant=options.mutant,
        budget_s=options.time_budget,
        story=STORY_LINES,
        steering=Steering() if options.factors is None else _Fixed(options.factors),
    ):
        report.take(outcome)
    report.finish(time.monotonic() - started_s)
    return report.exit_code(wants_probes=options.brokers > 1)


class _Fixed(Steering):
    """Uses the same given factors for every seed, to repeat a failure."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self._fixed = dict(factors)

    def factors_for(self, seed: int) -> dict[str, float]:
        return self._fixed


def regression_seeds(brokers: int) -> list[int]:
    """Return the seeds that once found a bug. Each line is ``<brokers> <seed>  <the bug>``."""
    found: list[int] = []
    for line in REGRESSION_SEEDS.read_text("utf-8").splitlines():
        fields = line.partition("#")[0].split()
        if len(fields) >= 2 and int(fields[0]) == brokers:
            found.append(int(fields[1]))
    return found


@dataclass
class SmallOutcome:
    """The results of some seeds of a small world, which end at the first violation."""

    world: str
    seeds: int
    failed: tuple[int, str] | None  #: (seed, violation)
    cpu_s: float
    reached: Counter[str]


def run_small(world: str, seeds: range, mutant: str | None) -> SmallOutcome:
    """Run seeds of a small world. An exception counts as a violation."""
    logging.disable(logging.CRITICAL)
    started_s, reached, failed = time.process_time(), Counter[str](), None
    with without(mutant) if mutant is not None else nullcontext(), counting(reached):
        for seed in seeds:
            try:
                violation = WORLDS[world].run(seed)
            except Exception as error:
                violation = f"{type(error).__name__}: {error}"
            if violation is not None:
                failed = (seed, violation)
                break
    logging.disable(logging.NOTSET)
    count = len(seeds) if failed is None else seeds.index(failed[0]) + 1
    return SmallOutcome(world, count, failed, time.process_time() - started_s, reached)


def run_small_worlds(
    worlds: Mapping[str, range], *, jobs: int = 1, mutant: str | None = None
) -> Iterator[SmallOutcome]:
    """Yield the results of all seeds of small worlds, as they complete."""
    chunks = [
        (name, seeds[first : first + SMALL_CHUNK], mutant)
        for name, seeds in worlds.items()
        for first in range(0, len(seeds), SMALL_CHUNK)
    ]
    if jobs <= 1 or len(chunks) <= 1:
        for chunk in chunks:
            yield run_small(*chunk)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(run_small, *chunk) for chunk in chunks]:
            yield future.result()


def run_many(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    brokers: int = 3,
    mutant: str | None = None,
    budget_s: float | None = None,
    story: int = 0,
    steering: Steering | None = None,
) -> Iterator[Outcome]:
    """Yield outcomes as they complete. No seed starts after ``budget_s``. ``steering`` learns from each."""
    steering = steering or Steering()
    end_s = None if budget_s is None else time.monotonic() + budget_s
    chosen = list(seeds)
    todo = iter(chosen)
    if jobs <= 1 and len(chosen) <= SEEDS_PER_PROCESS:
        for seed in todo:
            if end_s is not None and time.monotonic() > end_s:
                return
            outcome = run_one(seed, brokers, mutant, story, steering.factors_for(seed))
            steering.take(outcome.kinds, outcome.reached)
            yield outcome
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
                    factors = steering.factors_for(following)
                    running[pool.submit(run_one, following, brokers, mutant, story, factors)] = following
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set(), set())
            for future in done:
                del running[future]
                outcome = future.result()
                steering.take(outcome.kinds, outcome.reached)
                yield outcome


def run_one(
    seed: int,
    brokers: int = 3,
    mutant: str | None = None,
    story: int = 0,
    factors: Mapping[str, float] | None = None,
) -> Outcome:
    """Run one seed. An exception in the simulation itself becomes an outcome too."""
    try:
        outcome = run_seed(seed, brokers=brokers, mutant=mutant, story=story, factors=factors)
    except Exception as error:
        outcome = Outcome(
            seed, "", brokers, f"simulation failed: {error!r}", mutant, kind="crash", check="simulation"
        )
        outcome.factors = factors or {}
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
        self.reached: Counter[str] = Counter()
        self.reached_small: Counter[str] = Counter()
        self.small: dict[str, Counter[str]] = {}  # {world: seeds, failures and milliseconds}

    def take_small(self, found: SmallOutcome) -> None:
        counts = self.small.setdefault(found.world, Counter())
        counts.update(seeds=found.seeds, ms=int(found.cpu_s * 1000), failed=int(found.failed is not None))
        self.reached_small.update(found.reached)
        if found.failed is not None:
            seed, violation = found.failed
            tell(
                f"FAIL world={found.world} seed={seed} commit={_commit()}\n     {violation}\n"
                f"     replay: python -m proof.sim --world {found.world} --seeds 1 --start {seed}"
            )

    def take(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.virtual_ms += outcome.virtual_ms
        self.acknowledged += outcome.acknowledged
        self.cpu_s += outcome.wall_s
        if outcome.violation is None:
            self.healing_ms.append(outcome.healing_ms)
        self.probes.update(outcome.probes)
        self.reached.update(outcome.reached)
        if self._verbose:
            tell(
                f"{'FAIL' if outcome.violation else 'ok  '} seed={outcome.seed} {outcome.trace_hash}"
                f" {outcome.virtual_ms / 1000:.1f} s in {outcome.wall_s:.1f} s,"
                f" {outcome.acknowledged}/{outcome.sends} acknowledged,"
                f" in sync after {outcome.healing_ms} ms; {outcome.plan}"
            )
        if outcome.violation is not None:
            self.failures.append(outcome)
            tell(
                f"FAIL seed={outcome.seed} commit={_commit()} kind={outcome.kind} check={outcome.check}"
                f" t={outcome.virtual_ms} ms\n     {outcome.violation}\n     {outcome.plan}\n"
                f"     replay: {replay_command(outcome)}"
            )
            if self._verbose:
                tell("\n".join(outcome.story))

    def finish(self, wall_s: float) -> None:
        for name, counts in self.small.items():
            tell(
                f"{name}: {counts['seeds']} seeds, {counts['failed']} failed;"
                f" {counts['ms'] / max(counts['seeds'], 1):.0f} ms a seed"
            )
        if not self.seeds:
            return
        if self.reached:
            tell("\n".join(table({"cluster": self.reached, "small worlds": self.reached_small})))
        rate = self.virtual_ms / 1000 / wall_s if wall_s else 0.0
        tell(
            f"{self.seeds} seeds, {len(self.failures)} failed;"
            f" {self.virtual_ms / 3_600_000:.2f} simulated hours in {wall_s:.0f} s"
            f" ({rate:.0f} times real time, {self.cpu_s / max(self.seeds, 1):.1f} s a seed);"
            f" {self.acknowledged} records acknowledged; in sync again after faults within"
            f" {_percentile(self.healing_ms, 50)} ms (median), {_percentile(self.healing_ms, 100)} ms (worst)"
        )
        tell("  ".join(f"{name}={count}" for name, count in sorted(self.probes.items())))

    def exit_code(self, *, wants_probes: bool = True) -> int:
        if any(counts["failed"] for counts in self.small.values()):
            return EXIT_CODES["safety"]
        for kind in ("safety", "crash", "liveness"):
            if any(outcome.kind == kind for outcome in self.failures):
                return EXIT_CODES[kind]
        if wants_probes and self.seeds >= PROBES_FROM_SEEDS:
            wanted = PROBES
            if self.seeds >= COORDINATION_PROBES_FROM_SEEDS:
                wanted += COORDINATION_PROBES
            missing = [name for name in wanted if not self.probes[name]]
            if missing:
                tell(f"FAIL never happened: {', '.join(missing)}")
                return EXIT_NO_PROBE
        return 0


def _percentile(values: Sequence[int], percent: int) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0


def replay_command(outcome: Outcome) -> str:
    brokers = "" if outcome.brokers == 3 else f" --brokers {outcome.brokers}"
    mutant = f" --mutant {outcome.mutant}" if outcome.mutant else ""
    factors = f" --factors {encode_factors(outcome.factors)}" if outcome.factors else ""
    return (
        f"python -m proof.sim --world {CLUSTER} --seeds 1 --start {outcome.seed}{brokers}{mutant}{factors}"
        " --no-regressions --verbose"
    )


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
