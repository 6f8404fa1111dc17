"""``kl conformance``: checks whether a server or a client speaks the protocol; prints the schema."""

# Tests: tests/conformance/test_suite.py, tests/conformance/test_clients.py

from __future__ import annotations

import asyncio
import fnmatch
import json
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from kafkalite.cli.exit_codes import CheckFailedError, UsageError
from kafkalite.cli.invocation import debug_option
from kafkalite.cli.output import plural, write

if TYPE_CHECKING:
    from kafkalite.conformance.client_checks import ClientResult, Judge
    from kafkalite.conformance.suite import Result

DEFAULT_LIMIT_S: Final = 120.0
_SILENCE_S: Final = 1.5
_MARKS: Final = {
    "passed": "ok  ",
    "failed": "FAIL",
    "skipped": "skip",
    "not run": "late",
    "not exercised": "-   ",
}


@click.command()
@click.argument("address", metavar="HOST:PORT", required=False)
@click.option(
    "--listen", metavar="HOST:PORT", help="Be a server there, and check what your client sends to it."
)
@click.option(
    "--faults", is_flag=True, help="With --listen: refuse each partition once, with NOT_LEADER_OR_FOLLOWER."
)
@click.option("--json", "is_json", is_flag=True, help="One JSON object for each check.")
@click.option("--only", "patterns", multiple=True, metavar="NAME", help="These checks alone: 'groups.*'.")
@click.option("--list", "lists", is_flag=True, help="Print the names of the checks and their sections.")
@click.option(
    "--schema", "prints_schema", is_flag=True, help="Print the protocol's schema, docs/protocol.json."
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="No check begins later. --listen ends then.",
)
@debug_option
def conformance(
    address: str | None,
    listen: str | None,
    faults: bool,
    is_json: bool,
    patterns: tuple[str, ...],
    lists: bool,
    prints_schema: bool,
    limit_s: float,
) -> None:
    """Check that the server at HOST:PORT speaks the protocol of docs/protocol.md.

    The command creates topics, groups and transactional ids whose names begin with "conformance-", and
    deletes the topics and groups. Exit code 9 means that a check failed, or did not begin in time.

    With --listen, the command checks a client: run the client against HOST:PORT, and press Ctrl-C when the
    client is done. Then the command prints whether each check passed, failed or was not exercised. Exit code
    9 means that a check failed, or that no client connected.
    """
    if listen is not None:
        if address is not None or lists or prints_schema or patterns:
            raise UsageError("--listen takes --faults, --limit and --json alone")
        _report_clients(asyncio.run(_listen(listen, limit_s, has_faults=faults)), is_json=is_json)
        return
    if faults:
        raise UsageError("--faults needs --listen")
    from kafkalite.conformance import suite

    if prints_schema:
        from kafkalite.conformance.schema import schema

        write(json.dumps(schema(), indent=1) + "\n")
        return

    def is_wanted(name: str) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [check for check in suite.CHECKS if is_wanted(check.name)]
    if not wanted:
        raise UsageError(
            f"no check is named {', '.join(patterns)}", hint="'kl conformance --list' prints them"
        )
    if lists:
        for check in wanted:
            write(f"{check.name:<28}  section {check.section}\n")
        return
    if address is None:
        raise UsageError("HOST:PORT is missing", hint="for example 'kl conformance localhost:9092'")
    problems = passed = 0
    for result in _with_silence_warning(address, suite.run(address, limit_s=limit_s, is_wanted=is_wanted)):
        is_problem = result.status in (suite.FAILED, suite.LATE)
        problems += is_problem
        passed += result.status == suite.PASSED
        if is_json:
            write(json.dumps(result._asdict()) + "\n")
            continue
        about = f"  section {result.section}: {result.detail}" if result.detail else ""
        write(f"{_MARKS[result.status]}  {result.name:<28} {result.duration_ms:>6} ms{about}\n")
    if not is_json:
        sys.stderr.write(f"kl: {passed} of {plural(len(wanted), 'check')} passed\n")
    if problems:
        raise CheckFailedError(
            f"{plural(problems, 'check')} did not pass", hint="docs/protocol.md has the sections"
        )


def _with_silence_warning(address: str, results: Iterator[Result]) -> Iterator[Result]:
    """Yield ``results``. If the first one takes longer than _SILENCE_S, print a warning to stderr."""
    text = f"kl: waiting: {address} does not respond; does a kafkalite broker run there?\n"
    waiting = threading.Timer(_SILENCE_S, lambda: sys.stderr.write(text))
    waiting.daemon = True
    waiting.start()
    try:
        for result in results:
            waiting.cancel()
            yield result
    finally:
        waiting.cancel()


async def _listen(address: str, limit_s: float, *, has_faults: bool) -> Judge:
    """Serve clients for ``limit_s`` seconds, or until Ctrl-C or SIGTERM. Return the judge of the clients."""
    from kafkalite.conformance.listener import Listener

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        async with Listener(address, has_faults=has_faults) as listener:
            sys.stderr.write(
                f"kl: listening at {listener.address} for {limit_s:g} s; run your client, then press Ctrl-C\n"
            )
            sys.stderr.flush()
            try:
                async with asyncio.timeout(limit_s):
                    await ended.wait()
            except TimeoutError:
                pass
        return listener.judge
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _report_clients(judge: Judge, *, is_json: bool) -> None:
    results: list[ClientResult] = judge.results()
    for result in results:
        if is_json:
            write(json.dumps(result._asdict()) + "\n")
            continue
        times = f"{result.times:>5}x" if result.times else "      "
        write(
            f"{_MARKS[result.status]}  {result.name:<26} {times}  section {result.section}: {result.detail}\n"
        )
    if judge.connection_count == 0:
        raise CheckFailedError(
            "no client has connected", hint="run your client against the address of --listen"
        )
    failed = sum(result.status == "failed" for result in results)
    passed = sum(result.status == "passed" for result in results)
    if not is_json:
        rest = len(results) - failed - passed
        sys.stderr.write(f"kl: {passed} passed, {failed} failed, {rest} not exercised\n")
    if failed:
        raise CheckFailedError(f"{plural(failed, 'check')} failed", hint="docs/protocol.md has the sections")
