"""Shared by the benchmarks: a result row, percentiles, and a server in its own process."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One result. ``ratio`` compares our rate or time with the yardstick's.

    ``target`` is the project's own bound, as text; ``met`` is whether this run kept it.
    """

    name: str
    workload: str
    value: float
    unit: str
    yardstick: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rate_row(
    name: str, workload: str, value: float, unit: str, *, yardstick: float | None = None, at_least: float
) -> Row:
    """Return the row of a rate whose target is ``at_least`` times the yardstick, or ``at_least`` itself."""
    ratio = value / yardstick if yardstick else None
    met = (ratio if ratio is not None else value) >= at_least
    target = f"≥ {at_least:g} × yardstick" if yardstick else f"≥ {at_least:,.0f} {unit}"
    return Row(name, workload, value, unit, yardstick, ratio, target, met)


def time_row(
    name: str, workload: str, value: float, unit: str, *, yardstick: float | None = None, at_most: float
) -> Row:
    """Return the row of a time whose target is ``at_most`` times the yardstick, or ``at_most`` itself."""
    ratio = value / yardstick if yardstick else None
    met = (ratio if ratio is not None else value) <= at_most
    target = f"≤ {at_most:g} × yardstick" if yardstick else f"≤ {at_most:g} {unit}"
    return Row(name, workload, value, unit, yardstick, ratio, target, met)


def plain_row(name: str, workload: str, value: float, unit: str) -> Row:
    return Row(name, workload, value, unit)


def percentile(samples: list[float], fraction: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def median_of(measure: Callable[[], float], runs: int = 3) -> float:
    return statistics.median(measure() for _ in range(runs))


def paired(first: Callable[[], float], second: Callable[[], float], runs: int = 3) -> tuple[float, float]:
    """Return the medians of two measures taken in turn, so that changes of the machine's speed affect
    both.
    """
    firsts: list[float] = []
    seconds: list[float] = []
    for _ in range(runs):
        firsts.append(first())
        seconds.append(second())
    return statistics.median(firsts), statistics.median(seconds)


class ServerProcess:
    """A process of ``python -m benchmarks.servers KIND ...``, which prints its ports first, one per listener."""

    def __init__(self, kind: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.servers", kind, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if not words or not all(map(str.isdigit, words)):
            raise RuntimeError(f"the {kind} server did not start: {words!r}")
        self.ports = list(map(int, words))
        self.port = self.ports[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def loop_cpu_seconds(self) -> float:
        """Return the CPU time of the main thread, which runs the event loop, in seconds."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


@contextlib.contextmanager
def server(kind: str, *arguments: str) -> Iterator[ServerProcess]:
    process = ServerProcess(kind, *arguments)
    try:
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def scratch_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kafkalite-bench-") as path:
        yield path


def best_wall_seconds(command: list[str], runs: int = 15) -> float:
    """Return the median seconds that a process with this command runs. Its output is discarded."""
    samples: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=ROOT)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
