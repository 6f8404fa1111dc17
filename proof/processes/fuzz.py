"""A mutation fuzzer of all APIs at a real broker: ``python -m proof.processes.fuzz --minutes 10``.

::

    python -m proof.processes.fuzz --start 4711 --count 1      # one connection again

The number of a connection determines what it sends, and in which phase: to a listener without logins; before
a login; as a login, or a mutant of one; or after the login of a user with few rights, or of a super user.
Requests and their mutants are those of ``drawn_requests``, logins those of ``drawn_logins``. Meanwhile a
quiet client measures how long its requests take, and how long the broker's event loop computed or slept in
the meantime, and another good client logs in again and again.

What must hold: every response has a known error code, and not UNKNOWN_SERVER_ERROR; nothing but a login is
served before it, no wrong login is accepted and no right one refused; the log has no traceback; the event
loop is never busy or blocked beyond a bound; both good clients are served; afterwards tasks, descriptors and
memory are back to before.
"""

# Tests: tests/processes/test_fuzz.py

from __future__ import annotations

import argparse
import asyncio
import enum
import random
import shutil
import struct
import sys
import tempfile
import time
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import ErrorCode, KafkaliteError
from kafkalite.protocol.api import APIS, LOGIN_APIS, ApiKey
from kafkalite.protocol.messages.admin import ControlledShutdownRequest
from kafkalite.protocol.structs import Struct
from kafkalite.testing.wire import WireClient
from proof.console import tell
from proof.processes.drawn_logins import FEW, PASSWORD, ROOT, DrawnLogin, responses_in, served
from proof.processes.drawn_requests import Generator, Row, frame_of, hints
from proof.processes.observed import Observed, Pinger

CONNECTIONS: Final = 4  #: at a time
CONNECTION_LIMIT_S: Final = 10.0
MAX_HOLD_MS: Final = 500.0
MAX_RSS_GROWTH_BYTES: Final = 48 * 2**20
MAX_MORE_FILES: Final = 100  #: logs keep the files open that were used not long ago
VISIT_PAUSE_S: Final = 0.5
VISIT_LIMIT_MS: Final = 10_000
#: The broker stops by them on purpose.
_STOPPING: Final = frozenset({ApiKey.CONTROLLED_SHUTDOWN})


class Phase(enum.Enum):
    """When the requests of a connection are sent."""

    PLAIN = "without logins"
    BEFORE = "before the login"
    DURING = "during the login"
    AFTER_FEW = "after the login of a user with few rights"
    AFTER_ROOT = "after the login of a super user"


#: The number of a connection determines its phase.
PHASES: Final = (
    *(Phase.PLAIN, Phase.DURING, Phase.AFTER_ROOT, Phase.BEFORE),
    *(Phase.PLAIN, Phase.DURING, Phase.AFTER_FEW, Phase.DURING),
)


# --- responses -------------------------------------------------------------------------------------------


def bad_codes(data: bytes, keys: dict[int, int]) -> tuple[Counter[str], list[str]]:
    """Return the error codes in a stream of responses, and what is wrong with them.

    ``keys`` maps correlation ids to API keys. Responses with other correlation ids may be to any API.
    """
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for correlation_id, body in responses_in(data):
        for code, message in _codes(body, keys.get(correlation_id)):
            known = code in ErrorCode.__members__.values()
            seen[ErrorCode(code).name if known else str(code)] += 1
            if not known or code == ErrorCode.UNKNOWN_SERVER_ERROR:
                problems.append(f"error code {code} ({message}) of API {keys.get(correlation_id)}")
    return seen, problems


def _codes(body: Row, key: int | None) -> list[tuple[int, Any]]:
    is_refusal = isinstance(body, list) and len(body) == 2 and isinstance(body[0], int)
    if is_refusal and (body[1] is None or isinstance(body[1], str)):
        return [(body[0], body[1])]
    api = APIS.get(key) if key is not None else None
    found = list(_codes_in(api.response, body)) if api is not None else []
    # A mutated frame may contain a request of another API with the same correlation id.
    return found if all(isinstance(code, int) for code, _ in found) else []


def _codes_in(kind: type[Struct], row: Row) -> typing.Iterator[tuple[int, Any]]:
    if not isinstance(row, list) or len(row) != len(hints(kind)):
        return
    for value, (name, hint) in zip(row, hints(kind).items(), strict=True):
        if name == "error_code":
            yield value, row[1] if len(row) > 1 else ""
        inner = [each for each in (hint, *typing.get_args(hint)) if isinstance(each, type)]
        for each in inner:
            if issubclass(each, Struct):
                for one in value if isinstance(value, list) and typing.get_origin(hint) is list else [value]:
                    yield from _codes_in(each, one)


# --- a run -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    connections: Counter[Phase] = field(default_factory=Counter)
    frames: int = 0
    held: int = 0  #: connections that the fuzzer ended while a request waited, which may take 10 minutes
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)  #: numbers of the open connections
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    pauses_ms: list[float] = field(default_factory=list)
    visits_ms: list[float] = field(default_factory=list)  #: of the good client that logs in each time
    longest_hold_ms: float = 0.0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)


async def run(
    directory: Path, *, start: int, seconds: float, count: int | None, tell: Callable[[str], None]
) -> Result:
    """Fuzz a broker for ``seconds``, or with ``count`` connections."""
    result = Result()
    broker = Observed(directory)
    await broker.start()
    try:
        await broker.set_up()
        keys = [key for key in ApiKey if key in APIS and (key not in _STOPPING or await _is_guarded(broker))]
        assert broker.process is not None
        pinger = Pinger(broker.address, broker.process.pid, result.in_flight)
        pinger.start()
        if count is None:  # fill caches and the allocator before the first measurement
            await _attack(broker, keys, Result(), start - 1_000_000, min(seconds / 5, 60.0), None)
        await broker.tidy()
        result.before = await _settled(broker, None)
        pinger.times_ms.clear()
        pinger.holds_ms.clear()
        await _attack(broker, keys, result, start, seconds, count)
        result.pauses_ms = sorted(pinger.times_ms)
        result.longest_hold_ms = max(pinger.holds_ms, default=0.0)
        await broker.tidy()
        result.after = await _settled(broker, result.before)
        pinger.stop()
        _judge(result, broker, pinger)
    finally:
        await broker.stop()
    tell(", ".join(f"{result.connections[phase]} connections {phase.value}" for phase in Phase))
    tell(
        f"{result.connections.total()} connections, {result.frames} frames, {result.held} held, error codes: "
        + ", ".join(f"{name} {number}" for name, number in result.codes.most_common())
    )
    return result


async def _attack(
    broker: Observed, keys: Sequence[ApiKey], result: Result, start: int, seconds: float, count: int | None
) -> None:
    until_s = time.monotonic() + seconds
    numbers = iter(range(start, start + count) if count is not None else range(start, 2**62))

    async def work() -> None:
        for number in numbers:
            if (count is None and time.monotonic() >= until_s) or len(result.problems) > 20:
                return
            result.in_flight.add(number)
            problems = await _connection(broker, number, keys, result)
            result.in_flight.discard(number)
            result.problems += [f"connection {number}: {each}" for each in problems]
            assert broker.process is not None
            if broker.process.returncode is not None:
                result.problems.append(f"connection {number}: the broker has ended:\n{broker.log[-3000:]}")
                return

    visits = asyncio.create_task(_visit(broker.login_address, result))
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    result.is_over.set()
    await visits


async def _visit(address: str, result: Result) -> None:
    """Log in on a new connection now and then, and send a request, until the attack is over."""
    login: dict[str, Any] = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_username": ROOT,
        "sasl_password": PASSWORD,
    }
    login["request_timeout_ms"] = VISIT_LIMIT_MS
    while not result.is_over.is_set():
        begun_s = time.perf_counter()
        try:
            async with Admin(address, **login) as admin:
                await admin.describe_cluster()
        except KafkaliteError as error:
            result.problems.append(f"a good client that logs in was not served: {error!r}")
            return
        result.visits_ms.append((time.perf_counter() - begun_s) * 1000)
        with suppress(TimeoutError):
            async with asyncio.timeout(VISIT_PAUSE_S):
                await result.is_over.wait()


class Talk:
    """One connection of the fuzzer. ``keys`` maps the correlation ids of what it has sent to API keys."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._read = 0  # responses that were returned
        self.received = bytearray()
        self.keys: dict[int, int] = {}
        self.sent = 0  #: frames

    def send(self, frame: bytes) -> None:
        with suppress(ValueError, TypeError, msgpack.UnpackException, struct.error):
            length = struct.unpack_from(">I", frame)[0]
            key, _, correlation_id, *_ = msgpack.unpackb(frame[8 : 8 + length], strict_map_key=False)
            self.keys.setdefault(correlation_id, key)
        if not self._writer.is_closing():
            self._writer.write(frame)
            self.sent += 1

    async def response(self) -> Row | None:
        """Return the body of the next response, or None if the connection has ended."""
        while len(found := responses_in(self.received)) <= self._read:
            try:
                part = await self._reader.read(1 << 16)
            except OSError:
                return None
            if not part:
                return None
            self.received += part
        self._read += 1
        return found[self._read - 1][1]

    async def send_all(self, script: Sequence[bytes]) -> None:
        """Send the frames and the end of the stream. Return when the broker has closed the connection."""
        for frame in script:
            self.send(frame)
            await self._writer.drain()
        self._writer.write_eof()
        while part := await self._reader.read(1 << 16):
            self.received += part


async def _connection(broker: Observed, number: int, keys: Sequence[ApiKey], result: Result) -> list[str]:
    """Play the script of one connection. Return what is wrong with the responses."""
    rng, phase = random.Random(number), PHASES[number % len(PHASES)]
    address = broker.address if phase is Phase.PLAIN else broker.login_address
    try:
        reader, writer = await asyncio.open_connection(*address.split(":"))
    except OSError as error:
        return [f"no connection: {error}"]
    talk = Talk(reader, writer)
    problems: list[str] = []
    try:
        async with asyncio.timeout(CONNECTION_LIMIT_S):
            if phase is Phase.PLAIN:
                await talk.send_all(Generator(rng, keys).script())
            elif phase is Phase.BEFORE:
                is_of_login = rng.random() < 0.5
                await talk.send_all(Generator(rng, sorted(LOGIN_APIS) if is_of_login else keys).script())
            else:
                problems = await _play_logins(talk, broker, rng, phase)
                if not problems and phase is not Phase.DURING:
                    await talk.send_all(Generator(rng, keys).script())
    except TimeoutError:
        result.held += 1  # a request may wait as long as it says
    except OSError:
        pass  # the broker closes a connection whose bytes are not frames
    finally:
        writer.close()
    codes, wrong = bad_codes(bytes(talk.received), talk.keys)
    if phase is Phase.BEFORE:
        wrong += [
            f"served before the login: {each}"
            for each in served([body for _, body in responses_in(talk.received)])
        ]
    result.codes += codes
    result.connections[phase] += 1
    result.frames += talk.sent
    return [f"{phase.value}: {each}" for each in (*problems, *wrong)]


async def _play_logins(talk: Talk, broker: Observed, rng: random.Random, phase: Phase) -> list[str]:
    """Log in as the phase demands: as it should be done, or a mutant, or both on one connection."""
    user = FEW if phase is Phase.AFTER_FEW else ROOT
    talk.send(frame_of(ApiKey.API_VERSIONS, 0, ["fuzz", "1"]))
    await talk.response()
    is_mutant = phase is Phase.DURING and rng.random() < 0.8
    login = DrawnLogin(rng, broker.issuer, user=user, is_mutant=is_mutant)
    problems = await login.play(talk)
    if problems or is_mutant or phase is not Phase.DURING:
        return problems
    second = DrawnLogin(
        rng, broker.issuer, user=user, mechanism=login.mechanism, is_mutant=rng.random() < 0.8, is_second=True
    )
    return await second.play(talk)


async def _settled(broker: Observed, before: dict[str, int] | None) -> dict[str, int]:
    """Return a report once tasks and descriptors are back to before, or the last report after a while."""
    found = await broker.report()
    until_s = time.monotonic() + (30 if before else 3)
    while time.monotonic() < until_s and (
        before is None or any(found[name] > before[name] for name in ("tasks", "descriptors"))
    ):
        await asyncio.sleep(0.5)
        found = await broker.report()
    return found


async def _is_guarded(broker: Observed) -> bool:
    """Whether the broker refuses a shutdown request from a client without the cluster's secret."""
    async with WireClient(broker.address) as wire:
        response = await wire.call(ControlledShutdownRequest(99))
        return bool(response.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


def _judge(result: Result, broker: Observed, pinger: Pinger) -> None:
    if pinger.problem:
        result.problems.append(pinger.problem)
    if not result.visits_ms:
        result.problems.append("the good client that logs in was never served")
    if "Traceback" in broker.log:
        at = broker.log.index("Traceback")
        result.problems.append(f"the broker has logged a traceback:\n{broker.log[at - 300 : at + 2500]}")
    for name in ("tasks", "descriptors"):
        if result.after[name] > result.before[name] + result.held:  # the broker still waits for those
            result.problems.append(f"{result.after[name]} {name}, {result.before[name]} before")
    if result.after["files"] > result.before["files"] + MAX_MORE_FILES:
        result.problems.append(f"{result.after['files']} open files, {result.before['files']} before")
    growth = result.after["rss_bytes"] - result.before["rss_bytes"]
    if growth > MAX_RSS_GROWTH_BYTES:
        result.problems.append(f"the broker has grown by {growth >> 20} MiB")
    if result.longest_hold_ms > MAX_HOLD_MS:
        stacks = [part.split("\n")[1:5] for part in broker.log.split("\nCurrent thread ")[1:]]
        common = Counter("\n".join(lines) for lines in stacks).most_common(2)
        result.problems.append(
            f"the event loop was held for {result.longest_hold_ms:.0f} ms, at last during the connections"
            f" {pinger.suspects}; the broker's stacks in such pauses:\n"
            + "\n".join(f"{count} x\n{text}" for text, count in common)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if everything held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.processes.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--start", type=int, default=None, help="the number of the first connection")
    parser.add_argument("--count", type=int, default=None, help="so many connections instead of minutes")
    parser.add_argument("--directory", help="keep the broker's data and log here")
    chosen = parser.parse_args(arguments)
    start = chosen.start if chosen.start is not None else time.time_ns() % 1_000_000_000
    directory = Path(chosen.directory or tempfile.mkdtemp(prefix="kafkalite-fuzz-"))
    tell(f"connections from {start} on, broker in {directory}")
    result = asyncio.run(
        run(directory, start=start, seconds=chosen.minutes * 60, count=chosen.count, tell=tell)
    )
    pauses = result.pauses_ms
    if pauses:
        tell(
            f"a quiet client waited p50 {pauses[len(pauses) // 2]:.1f} ms,"
            f" p99 {pauses[len(pauses) * 99 // 100]:.1f} ms, at most {pauses[-1]:.1f} ms;"
            f" the event loop was held for at most {result.longest_hold_ms:.0f} ms"
        )
    visits = sorted(result.visits_ms)
    if visits:
        tell(
            f"{len(visits)} connections of a good client that logs in: p50 {visits[len(visits) // 2]:.0f} ms,"
            f" at most {visits[-1]:.0f} ms"
        )
    for name, number in result.before.items():
        tell(f"{name:<12} {number:>12,} before {result.after.get(name, -1):>12,} after")
    for problem in result.problems:
        tell(f"FAILED: {problem}")
    if result.problems:
        tell(f"the broker's log is {directory}/server.log; again: --start NUMBER --count 1")
        return 1
    if not chosen.directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
