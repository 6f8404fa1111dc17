"""``python -m benchmarks [SUITE ...]``: run, print the table, write ``benchmarks/results.json``."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Row

SUITES = (
    "yardsticks",
    "records",
    "broker",
    "fairness",
    "quotas",
    "security",
    "client",
    "raft",
    "groups",
    "transactions",
    "replication",
    "failover",
    "reassignment",
    "scale",
    "start_up",
    "fixture",
    "spark",
    "spark_sink",
    "spark_files",
)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


def _print(row: Row) -> None:
    ratio = f"{row.ratio:6.2f} ×" if row.ratio is not None else " " * 8
    mark = "" if row.met is None else "ok  " if row.met else "MISS"
    print(f"{row.name:44} {_figure(row.value):>12} {row.unit:10} {ratio} {row.target:22} {mark}")
    print(f"    {row.workload}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("suite", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    arguments = parser.parse_args()
    unknown = set(arguments.suite) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.suite or SUITES:
        print(f"\n== {name}", flush=True)
        rows = importlib.import_module(f"benchmarks.{name}").run()
        for row in rows:
            _print(row)
        results[name] = [row.as_dict() for row in rows]
    path = Path(__file__).with_name("results.json")
    if set(results) == set(SUITES):
        report = {"python": platform.python_version(), "machine": platform.machine(), "suites": results}
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(f"\nwritten to {path.name}")
    missed = [row["name"] for rows in results.values() for row in rows if row["met"] is False]
    print(f"\n{len(missed)} missed: {', '.join(missed)}" if missed else "\nevery target met")
    sys.exit(0)


if __name__ == "__main__":
    main()
