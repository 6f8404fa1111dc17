"""Copying queries that are killed at every named point, on a cluster of three brokers. Checks the output.

::

    python -m proof.spark.faults --rounds 20 --seed 7
    python -m proof.spark.faults --rounds 1 --point before-commit --point after-commit

Each round is the life of one query: source, a change of each record, sink, one checkpoint. All points strike,
one after the other. Then a read_committed reader must find f(input), each record once and in order, and no
open transaction. Afterwards a fifth as many rounds run with an at-least-once sink, which must lose nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import TRANSACTION_KEY, CoordinatorLink
from kafkalite.client.config import admin_config
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.rng import Rng, seeded_rng
from kafkalite.testing.process_cluster import ProcessCluster
from proof.console import tell
from proof.processes.transactions import CLUSTER_SETTINGS
from proof.spark import topics
from proof.spark.drivers import Driver, SessionDriver
from proof.spark.points import DIRECTORY_OPTION, PLAN_OPTION, FaultPlan, plan_text
from proof.spark.rounds import ALL, LOCAL, SPLIT, STOPPED, Run, last_batch_id, plan_round
from proof.spark.verdict import check_copy, check_order, check_replays, duplicates
from sparkbridge.errors import FastStartError
from sparkbridge.local import fast_start

IN_PARTITIONS: Final = 2
OUT_PARTITIONS: Final = 3
HISTORY: Final = 60  #: records of each partition that a start at latest must not read
FIRST: Final = 40  #: records of each partition between the choice of the start and the first batch
PER_TRIGGER: Final = 90
#: The number of batches after the last point.
SPARE_BATCHES: Final = 4
HEALING_LIMIT_S: Final = 60.0
OPEN_LIMIT_S: Final = 15.0
_UNVERIFIED: Final = (
    "-XX:+UnlockDiagnosticVMOptions -XX:+IgnoreUnrecognizedVMOptions -XX:-BytecodeVerificationRemote"
)
SETTINGS: Final[Mapping[str, str]] = {
    "spark.log.level": "OFF",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    # Verifying Spark's classes is a fifth of the processor time of a start.
    "spark.driver.extraJavaOptions": _UNVERIFIED,
    "spark.executor.extraJavaOptions": _UNVERIFIED,
}


@dataclass(slots=True)
class Outcome:
    """The result of a round."""

    seed: int
    struck: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    records: int = 0
    doubled: int = 0
    batches: int = 0
    drivers: int = 0
    seconds: float = 0.0


class Round:
    """The life of one query. ``run`` raises TimeoutError if a step makes no progress.

    Each run whose end kills the driver has a driver process. The others are on ``session``, a running Spark
    session with the master LOCAL, or, if it is None, in one more process.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        directory: Path,
        seed: int,
        *,
        points: Collection[str] = ALL,
        at_least_once: bool = False,
        session: Any = None,
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._directory = directory
        self._rng: Rng = seeded_rng(seed)
        self._runs = plan_round(self._rng, points)
        self._bulk = (last_batch_id(self._runs) + SPARE_BATCHES) * PER_TRIGGER // IN_PARTITIONS
        self._starts_at_latest = "latest-start" in points
        self._at_least_once = at_least_once
        mode = "loose" if at_least_once else "once"
        self._input, self._output = (f"{end}-{seed}-{mode}" for end in ("in", "out"))
        self._plan = FaultPlan(directory)
        self._starts: dict[int, int] = {}
        self._healing: set[asyncio.Task[None]] = set()
        self.outcome = Outcome(seed)

    @property
    def _servers(self) -> str:
        return self._cluster.bootstrap_servers

    async def run(self) -> Outcome:
        began_s = time.monotonic()
        self._directory.mkdir(parents=True, exist_ok=True)
        await self._fill_first()
        async with AsyncExitStack() as stack:
            helper = asyncio.create_task(self._help())
            stack.push_async_callback(_cancelled, helper)
            await self._live(stack, helper)
        await asyncio.gather(*self._healing)
        await self._cluster.wait(is_whole=True, brokers=len(self._cluster.nodes), limit_s=HEALING_LIMIT_S)
        await self._judge()
        self.outcome.seconds = time.monotonic() - began_s
        return self.outcome

    async def _fill_first(self) -> None:
        replicas = min(3, len(self._cluster.nodes))
        async with Admin(self._servers) as admin:
            await admin.create_topic(self._input, IN_PARTITIONS, replicas)
            await admin.create_topic(self._output, OUT_PARTITIONS, replicas)
        await self._cluster.wait(topics=[self._input, self._output])
        if self._starts_at_latest:
            await topics.fill(self._servers, self._input, IN_PARTITIONS, HISTORY)
            self._starts = await topics.ends(self._servers, self._input, IN_PARTITIONS)
        else:
            await topics.fill(self._servers, self._input, IN_PARTITIONS, self._bulk)

    # --- the runs ------------------------------------------------------------------------------------

    async def _live(self, stack: AsyncExitStack, helper: asyncio.Task[None]) -> None:
        """Start one run after another, each while the next driver is prepared."""
        masters = [
            run.master
            for index, run in enumerate(self._runs)
            if not index or self._runs[index - 1].ends_driver
        ]
        drivers: list[Driver | SessionDriver] = [
            Driver({**SETTINGS, "spark.master": master}, self._directory / f"driver-{number}.log")
            for number, master in enumerate(masters)
        ]
        if self._session is not None and not self._runs[-1].ends_driver:
            assert masters[-1] == LOCAL, "a session has no executors to kill"
            drivers[-1] = SessionDriver(self._session)
        for driver in drivers:
            stack.push_async_callback(driver.close)
        self.outcome.drivers = len(drivers)
        current = 0
        await drivers[0].start()
        for number, run in enumerate(self._runs):
            is_new = number == 0 or self._runs[number - 1].ends_driver
            if is_new and current + 1 < len(drivers):
                await drivers[current + 1].start()
            answer = await drivers[current].run(self._order(run))
            if helper.done():
                helper.result()
            self._check_end(number, run, answer, drivers[current])
            if run.ends_driver:
                current += 1
            if "latest-start" in run.plan:
                await topics.fill(
                    self._servers, self._input, IN_PARTITIONS, self._bulk, first=HISTORY + FIRST
                )
        for driver in drivers:
            await driver.close()

    def _check_end(self, number: int, run: Run, answer: str, driver: Driver | SessionDriver) -> None:
        struck = self._plan.struck()
        missed = [point for point in run.plan if point not in struck]
        wanted = "died" if run.ends_driver else "failed" if run.ends_query else "ended"
        if missed or not answer.startswith(wanted):
            raise AssertionError(
                f"run {number} ({run}) should have ended as {wanted!r}, and ended as {answer!r}; "
                f"did not strike: {missed}\n{driver.tail()}"
            )
        self.outcome.struck.update(run.plan.keys())
        if isinstance(run.until, int):
            self.outcome.struck[STOPPED] += 1
        if number and run.min_partitions != self._runs[number - 1].min_partitions:
            self.outcome.struck[SPLIT] += 1

    def _order(self, run: Run) -> dict[str, Any]:
        faults = {DIRECTORY_OPTION: str(self._directory), PLAN_OPTION: plan_text(run.plan)}
        source = faults | {
            "kafka.bootstrap.servers": self._servers,
            "subscribe": self._input,
            "startingOffsets": "latest" if self._starts_at_latest else "earliest",
            "maxOffsetsPerTrigger": str(PER_TRIGGER),
        }
        if run.min_partitions is not None:
            source["minPartitions"] = str(run.min_partitions)
        sink = faults | {"kafka.bootstrap.servers": self._servers, "topic": self._output}
        if self._at_least_once:
            sink["exactlyOnce"] = "false"
        return {"source": source, "sink": sink, "checkpoint": str(self._checkpoint), "until": run.until}

    @property
    def _checkpoint(self) -> Path:
        return self._directory / "checkpoint"

    # --- requests of the points ----------------------------------------------------------------------

    async def _help(self) -> None:
        """Fulfil the requests of the points, until cancelled."""
        while True:
            for what in self._plan.asked():
                if what == "more-input":
                    await topics.fill(self._servers, self._input, IN_PARTITIONS, FIRST, first=HISTORY)
                else:
                    await asyncio.gather(*self._healing)
                    await self._cluster.wait(is_whole=True, brokers=len(self._cluster.nodes))
                    victim = await (self._leader() if what == "leader-killed" else self._coordinator())
                    await self._cluster.kill(victim)
                    self._healing.add(asyncio.create_task(self._restart(victim)))
                self._plan.done(what)
            await asyncio.sleep(0.02)

    async def _restart(self, node_id: int) -> None:
        await asyncio.sleep(2 * self._rng.random())
        await self._cluster.start_node(node_id)

    async def _leader(self) -> int:
        tp = TopicPartition(self._output, self._rng.randrange(OUT_PARTITIONS))
        for each in (await self._cluster.view()).partitions:
            if each.name == tp and each.state.leader_id > 0:
                return each.state.leader_id
        return 1

    async def _coordinator(self) -> int:
        metadata = json.loads((self._checkpoint / "metadata").read_text())
        cluster = ClusterClient(admin_config({"bootstrap_servers": self._servers}))
        await cluster.start()
        try:
            return await CoordinatorLink(cluster, TRANSACTION_KEY, f"spark-{metadata['id']}").find()
        finally:
            await cluster.close()

    # --- the verdict ---------------------------------------------------------------------------------

    def _logged(self) -> dict[int, dict[str, Any]]:
        """Return the source's end offset of each batch in Spark's offset log."""
        files = [path for path in (self._checkpoint / "offsets").iterdir() if path.name.isdigit()]
        return {int(path.name): json.loads(path.read_text().splitlines()[-1]) for path in files}

    async def _judge(self) -> None:
        outcome = self.outcome
        inputs = await topics.read_all(self._servers, self._input, IN_PARTITIONS, starts=self._starts)
        outputs = await topics.read_all(self._servers, self._output, OUT_PARTITIONS)
        logged, planned = self._logged(), self._plan.planned()
        filled = self._bulk + (FIRST if self._starts_at_latest else 0)
        if len(inputs) != filled * IN_PARTITIONS:
            outcome.problems.append(
                f"{len(inputs)} records of input where {filled * IN_PARTITIONS} were sent"
            )
        outcome.records, outcome.batches, outcome.doubled = len(outputs), len(logged), duplicates(outputs)
        outcome.problems += check_copy(inputs, outputs, at_least_once=self._at_least_once)
        outcome.problems += check_replays(planned, logged)
        if not self._at_least_once:
            outcome.problems += check_order(outputs, planned, logged)
        outcome.problems += await topics.open_transactions(
            self._servers, self._output, OUT_PARTITIONS, OPEN_LIMIT_S
        )


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# --- many rounds -----------------------------------------------------------------------------------


async def run(
    directory: Path, seeds: Sequence[int], *, loose: int, points: Collection[str], brokers: int
) -> list[Outcome]:
    """Run a round for each seed on one cluster, the last ``loose`` of them at-least-once.

    Stops at the first one with a problem.
    """
    outcomes: list[Outcome] = []
    async with ProcessCluster(directory / "nodes", brokers=brokers, settings=CLUSTER_SETTINGS) as cluster:
        for number, seed in enumerate(seeds):
            is_loose = number >= len(seeds) - loose
            life = Round(cluster, directory / f"round-{seed}", seed, points=points, at_least_once=is_loose)
            try:
                outcomes.append(await life.run())
            except (KafkaliteError, TimeoutError, AssertionError) as error:
                life.outcome.problems.append(str(error))
                outcomes.append(life.outcome)
            tell(_line(number + 1, outcomes[-1], is_loose))
            if outcomes[-1].problems:
                break
            shutil.rmtree(directory / f"round-{seed}", ignore_errors=True)
    return outcomes


def _line(number: int, outcome: Outcome, is_loose: bool) -> str:
    mode = "at least once" if is_loose else "exactly once "
    verdict = "; ".join(outcome.problems) or "as it must be"
    return (
        f"{number:>3}  seed {outcome.seed}  {mode}  {outcome.records:,} records, {outcome.batches} batches, "
        f"{outcome.doubled} doubled, {outcome.struck.total()} strikes, {outcome.drivers} drivers, "
        f"{outcome.seconds:.0f} s: {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if every round passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.spark.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="exactly once; a fifth more are at-least-once")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the others count on")
    parser.add_argument("--point", action="append", choices=sorted(ALL), help="only these; may be repeated")
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--at-least-once", action="store_true", help="all rounds are")
    parser.add_argument("--directory", help="keep the nodes' data and all logs here")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 1_000_000
    loose = chosen.rounds if chosen.at_least_once else chosen.rounds // 5
    count = chosen.rounds if chosen.at_least_once else chosen.rounds + loose
    directory = Path(chosen.directory or tempfile.mkdtemp(prefix="kafkalite-spark-faults-"))
    tell(f"seed {seed}, {count} rounds, logs in {directory}")
    points = chosen.point or ALL
    with contextlib.suppress(FastStartError):
        fast_start.make_class_archive()
    began_s = time.monotonic()
    outcomes = asyncio.run(
        run(directory, range(seed, seed + count), loose=loose, points=points, brokers=chosen.brokers)
    )
    struck = sum((outcome.struck for outcome in outcomes), Counter[str]())
    tell("\n" + "\n".join(f"{point:<22} {struck[point]:>5}" for point in ALL))
    seconds = sorted(outcome.seconds for outcome in outcomes)
    median_s = seconds[len(seconds) // 2]
    tell(
        f"\n{len(outcomes)} rounds in {time.monotonic() - began_s:.0f} s, p50 {median_s:.0f} s, "
        f"{sum(outcome.records for outcome in outcomes):,} records, {struck.total()} strikes"
    )
    if bad := [outcome for outcome in outcomes if outcome.problems]:
        tell(f"FAILED, seed {bad[0].seed}; the logs are in {directory}")
        return 1
    if not chosen.directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
