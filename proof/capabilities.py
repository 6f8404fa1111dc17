"""Proves that the tests of the capability table fail when their capability is broken.

``tests/capabilities/mutations.toml`` has at least one mutation for each row of ``docs/capabilities.md`` that
names a test: a line of the product and its replacement. ``python -m proof.capabilities`` (``make
capabilities``) runs the named tests without a mutation, then those of each row with its mutations, in copies
of the checkout. They must pass, then fail. The exit code is 1 if a row is weak, because its tests pass with a
mutation, or if its tests neither pass nor fail within LIMIT_S.
"""

# Tests: tests/test_capabilities.py

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from proof.console import tell

ROOT: Final = Path(__file__).resolve().parent.parent
TABLE: Final = ROOT / "docs/capabilities.md"
MUTATIONS: Final = ROOT / "tests/capabilities/mutations.toml"
LIMIT_S: Final = 120.0  #: for one run of a row's tests with a mutation
NOT_YET: Final = "not yet"

_ROW: Final = re.compile(r"^\| ([A-L]\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
_PASSED, _FAILED = 0, 1  # exit codes of pytest
_FAILURE: Final = re.compile(r"^(?:FAILED|ERROR) .*?::(.+)$", re.MULTILINE)  # in pytest's summary
_FAILURE_CHARACTERS: Final = 150


class Row(NamedTuple):
    """A row of the table. ``tests`` is empty if ``shown_by`` is NOT_YET."""

    name: str
    capability: str
    shown_by: str
    tests: tuple[str, ...]


class Mutation(NamedTuple):
    """Replaces ``old``, which occurs once in ``file``, by ``new``. Then at least one of ``tests`` must fail.

    If ``is_slow``, the tests start Spark or take minutes, so random samples omit this mutation.
    """

    row: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_slow: bool


class Verdict(StrEnum):
    """What the tests of a mutation show. Every verdict except FOUND is a problem."""

    FOUND = "found"  #: a test failed
    WEAK = "WEAK: passes with the mutation"
    TIMED_OUT = "TIMED OUT: the tests neither pass nor fail"  # a slow test shows nothing
    NOT_RUN = "NOT RUN"  #: the mutation does not fit the file, or pytest could not run the tests


class Outcome(NamedTuple):
    """The result of a mutation. ``detail`` is the failed test and its error, or why no test was run."""

    mutation: Mutation
    verdict: Verdict
    detail: str
    seconds: float


class TestsFailedError(Exception):
    """Tests fail although nothing is broken. The message is the end of pytest's output."""


def rows() -> list[Row]:
    """Return the rows of the table, in its order."""
    return [
        Row(name, capability, shown_by, tuple(_TEST.findall(shown_by)))
        for name, capability, shown_by in _ROW.findall(TABLE.read_text())
    ]


def mutations() -> list[Mutation]:
    """Return the mutations of the file. A mutation without ``tests`` concerns all tests of its row."""
    named = {row.name: row.tests for row in rows()}
    with MUTATIONS.open("rb") as file:
        entries = tomllib.load(file)["mutation"]
    return [
        Mutation(
            entry["row"],
            entry["file"],
            entry["old"],
            entry["new"],
            tuple(entry.get("tests") or named[entry["row"]]),
            entry.get("slow", False),
        )
        for entry in entries
    ]


def _copy(directory: Path) -> None:
    """Copy the files of the checkout that git does not ignore, and link its virtual environment."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    (directory / ".venv").symlink_to(Path(sys.prefix))


def _run(directory: Path, tests: Iterable[str], limit_s: float = LIMIT_S) -> int | None:
    """Run ``tests`` in a copy of the checkout. Return pytest's exit code, or None after ``limit_s``."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    variables = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "300",  # for whole lines in pytest's summary
    }
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def prove(mutation: Mutation, directory: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run the tests of ``mutation`` with it, in the copy of the checkout in ``directory``."""
    started_s = time.monotonic()
    path = directory / mutation.file
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        detail = f"{mutation.file} has {mutation.old!r} {count} times, not once"
        return Outcome(mutation, Verdict.NOT_RUN, detail, 0.0)
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        code = _run(directory, mutation.tests, limit_s)
    finally:
        path.write_text(text)
    return Outcome(mutation, *_judge(code, (directory / "output").read_text()), time.monotonic() - started_s)


def _judge(code: int | None, output: str) -> tuple[Verdict, str]:
    """Return (verdict, detail) for pytest's exit code, or None after a time-out, and its output."""
    if code is None:
        return Verdict.TIMED_OUT, ""
    if code == _PASSED:
        return Verdict.WEAK, ""
    failure = _FAILURE.search(output)
    if code == _FAILED and failure is not None:
        return Verdict.FOUND, failure[1][:_FAILURE_CHARACTERS]
    return Verdict.NOT_RUN, f"exit code {code}: {output[-500:]}"


def prove_all(chosen: Sequence[Mutation], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes of ``chosen``, in its order, from ``jobs`` copies of the checkout at a time.

    Raises TestsFailedError if the tests do not pass without a mutation.
    """
    with tempfile.TemporaryDirectory(prefix="capabilities-") as parent:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            directory = Path(parent, str(number))
            directory.mkdir()
            _copy(directory)
            copies.put(directory)

        tests = dict.fromkeys(test for mutation in chosen for test in mutation.tests)
        if _run(directory, tests, limit_s=LIMIT_S * 10) != _PASSED:
            raise TestsFailedError((directory / "output").read_text()[-4000:])

        def run(mutation: Mutation) -> Outcome:
            directory = copies.get()
            try:
                return prove(mutation, directory)
            finally:
                copies.put(directory)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.capabilities", description=__doc__)
    parser.add_argument("rows", nargs="*", help="which rows; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--sample", type=int, default=0, help="how many quick mutations; default: all")
    parser.add_argument("--seed", type=int, default=None, help="of the sample; default: at random")
    options = parser.parse_args(arguments)
    chosen = [one for one in mutations() if not options.rows or one.row in options.rows]
    if options.sample:
        seed = random.randrange(10**6) if options.seed is None else options.seed
        quick = [one for one in chosen if not one.is_slow]
        chosen = random.Random(seed).sample(quick, min(options.sample, len(quick)))
        tell(f"{len(chosen)} of {len(quick)} quick mutations, seed {seed}")
    verdicts: Counter[Verdict] = Counter()
    try:
        for outcome in prove_all(chosen, options.jobs):
            verdicts[outcome.verdict] += 1
            detail = f": {outcome.detail}" if outcome.detail else ""
            tell(f"{outcome.mutation.row:<5}{outcome.seconds:>6.1f} s  {outcome.verdict}{detail}")
    except TestsFailedError as error:
        tell(f"{error}\nthe tests fail without a mutation")
        return 1
    others = (
        f"{verdicts[one]} {one.name.lower().replace('_', ' ')}" for one in Verdict if one != Verdict.FOUND
    )
    tell(f"{verdicts[Verdict.FOUND]} of {len(chosen)} mutations found, {', '.join(others)}")
    return 0 if verdicts[Verdict.FOUND] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
