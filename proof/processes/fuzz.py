"""A mutation fuzzer of all APIs at a real broker: ``python -m proof.processes.fuzz --minutes 10``.

::

    python -m proof.processes.fuzz --start 4711 --count 1      # one connection again

Each connection sends a script that its number determines: well-formed requests of all APIs, whose values fit
each other, and mutants of them: other types, sizes and nesting, flipped, cut and repeated bytes, lengths that
lie, batches that are not what they say. Meanwhile a quiet client measures how long its requests take, and how
long the broker's event loop computed or slept in the meantime.

What must hold: every response has a known error code, and not UNKNOWN_SERVER_ERROR; the log has no traceback;
the event loop is never busy or blocked beyond a bound; afterwards tasks, descriptors and memory are back to
before.
"""

# Long because it has the mutations, the observed broker, and the judge of one programme.

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import ErrorCode, KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import ClientConnection
from kafkalite.protocol.messages.admin import ControlledShutdownRequest
from kafkalite.protocol.messages.data import ProducePartition, ProduceRequest
from kafkalite.protocol.messages.metadata import DescribeClusterRequest
from kafkalite.protocol.structs import Struct
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, seal
from kafkalite.testing.wire import WireClient
from kafkalite.transport.free_ports import free_ports
from proof.console import tell
from proof.waiting import eventually

TOPICS: Final = ("a", "b", "c", "orders")
TEXTS: Final = (*TOPICS, "__consumer_offsets", "__transaction_state", "", ".", "../x", "é" * 200, "g", "t-1")
IDS: Final = ("g", "h", "t-1", "t-2")
INTEGERS: Final = (0, 1, 2, 3, -1, -2, 7, 100, 300, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63))
FRAMES_OF_SCRIPT: Final = 30
CONNECTIONS: Final = 4  #: at a time
CONNECTION_LIMIT_S: Final = 10.0
MAX_HOLD_MS: Final = 500.0
MAX_RSS_GROWTH_BYTES: Final = 48 * 2**20
MAX_MORE_FILES: Final = 100  #: logs keep the files open that were used not long ago
PING_PAUSE_S: Final = 0.02
PING_LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05  #: how often a quiet client that waits looks at the broker
_STACK_AFTER_LOOKS: Final = 5
_TICK_MS: Final = 1_000 / os.sysconf("SC_CLK_TCK")
_SET_UP: Final = "set-up"  #: a group and a transactional id that no script uses
#: The broker stops by them on purpose.
_STOPPING: Final = frozenset({ApiKey.CONTROLLED_SHUTDOWN})

Row = Any


# --- well-formed requests --------------------------------------------------------------------------------


class Generator:
    """Draws requests, mutants and frames from one random source."""

    def __init__(self, rng: random.Random, keys: Sequence[ApiKey]) -> None:
        self._rng = rng
        self._keys = keys

    def script(self) -> list[bytes]:
        """Return the bytes that one connection sends, frame by frame."""
        rng = self._rng
        handshake = self._frame(ApiKey.API_VERSIONS, 0, self._row(APIS[ApiKey.API_VERSIONS].request))
        frames = [] if rng.random() < 0.03 else [handshake]
        for number in range(1, rng.randrange(2, FRAMES_OF_SCRIPT)):
            frame = self.request(number)
            if rng.random() < 0.15:
                frame = self._mutate_bytes(frame)
            frames.append(frame)
        if rng.random() < 0.2:
            frames[-1] = frames[-1][: rng.randrange(max(len(frames[-1]), 1))]
        return frames

    def request(self, correlation_id: int) -> bytes:
        rng = self._rng
        key = rng.choice(self._keys)
        payload = b""
        if key == ApiKey.PRODUCE and rng.random() < 0.9:
            row, payload = self._produce()
        else:
            row = self._row(APIS[key].request)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 5))):
            row = self._mutate_row(row)
        version = rng.choice((0, 0, 0, 0, 0, 0, 0, 1, -1, 2**31))
        return self._frame(key, correlation_id, row, payload, version)

    def _produce(self) -> tuple[Row, bytes]:
        rng = self._rng
        batches = [self._batch() for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        partitions = [
            tuple(ProducePartition(rng.choice(TOPICS), rng.randrange(3), len(batch))) for batch in batches
        ]
        row = list(self._row(ProduceRequest))
        row[ProduceRequest._fields.index("partitions")] = partitions
        return row, b"".join(batches)

    def _batch(self) -> bytes:
        rng = self._rng
        now_ms = time.time_ns() // 1_000_000
        values = [rng.randbytes(rng.choice((0, 1, 20, 500))) for _ in range(rng.choice((1, 1, 3, 50)))]
        batch = bytearray(build_batch(values, timestamps_ms=now_ms))
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            batch[rng.randrange(len(batch))] = rng.randrange(256)
        if rng.random() < 0.2:
            batch = batch[: rng.randrange(1, len(batch) + 1)]
        if rng.random() < 0.5 and len(batch) >= HEADER_BYTES:
            with suppress(KafkaliteError, struct.error, ValueError):
                seal(batch)
        return bytes(batch)

    def _row(self, kind: type[Struct]) -> Row:
        return [self._value(name, hint) for name, hint in hints(kind).items()]

    def _value(self, name: str, hint: Any) -> Any:
        rng = self._rng
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            inner = [each for each in typing.get_args(hint) if each is not type(None)]
            return None if rng.random() < 0.3 else self._value(name, inner[0])
        if origin is list:
            (inner_hint,) = typing.get_args(hint)
            entries = [self._value(name, inner_hint) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
            return entries * rng.choice((1, 1, 1, 1, 1, 2, 200))
        if isinstance(hint, type) and issubclass(hint, Struct):
            return self._row(hint)
        if hint is bool:
            return rng.random() < 0.5
        if hint is int:
            return self._integer(name)
        if hint is bytes:
            return rng.randbytes(rng.randrange(100))
        if hint is float:
            return rng.random()
        if "topic" in name or name == "name":
            return rng.choice(TOPICS if rng.random() < 0.9 else TEXTS)
        return rng.choice(IDS if rng.random() < 0.8 else TEXTS)

    def _integer(self, name: str) -> int:
        rng = self._rng
        if name.endswith("_ms") and rng.random() < 0.9:
            return rng.randrange(50)
        if rng.random() < 0.8:
            return rng.choice((0, 0, 1, 1, 2, 3, -1))
        return rng.choice(INTEGERS)

    # --- mutants

    def _mutate_row(self, row: Row) -> Row:
        """Return the row with one element, at any depth, replaced, removed, added or nested."""
        rng = self._rng
        if not isinstance(row, list | tuple) or not row or rng.random() < 0.1:
            return self._junk()
        found = list(row)
        index = rng.randrange(len(found))
        action = rng.randrange(8)
        if action == 0:
            del found[index]
        elif action == 1:
            found.insert(index, self._junk())
        elif action == 2:
            found.append(self._junk())
        elif action <= 4:
            found[index] = self._junk()
        else:
            found[index] = self._mutate_row(found[index])
        return found

    def _junk(self) -> Any:
        rng = self._rng
        kind = rng.randrange(11)
        if kind == 0:
            return None
        if kind <= 3:
            return rng.choice(INTEGERS)
        if kind == 4:
            return rng.choice((0.5, float("nan"), float("inf"), True, False))
        if kind == 5:
            return rng.choice(TEXTS)
        if kind == 6:
            return rng.randbytes(rng.choice((0, 5, 1000)))
        if kind == 7:
            return [self._junk() for _ in range(rng.randrange(4))]
        if kind == 8:
            return {rng.choice(TEXTS): rng.choice(INTEGERS)}
        if kind == 9:
            return msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.randrange(20)))
        nested: Any = []
        for _ in range(rng.choice((3, 30, 400))):
            nested = [nested]
        return nested

    def _mutate_bytes(self, frame: bytes) -> bytes:
        rng = self._rng
        data = bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(max(len(data), 1))
            action = rng.randrange(5)
            if action == 0 and data:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)])
            elif action == 1:
                del data[at : at + rng.randrange(1, 9)]
            elif action == 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            elif action == 3:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            else:
                length = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(1 << 20)))
                data[rng.choice((0, 4)) :][:4] = struct.pack(">I", length)
        return bytes(data)

    @staticmethod
    def _frame(key: ApiKey, correlation_id: int, row: Row, payload: bytes = b"", version: int = 0) -> bytes:
        envelope = bytes(msgpack.packb([int(key), version, correlation_id, "fuzz", row]))
        return struct.pack(">II", len(envelope), len(payload)) + envelope + payload


@functools.cache
def hints(kind: type[Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields, in order."""
    found = typing.get_type_hints(kind)
    return {name: found[name] for name in kind._fields}


# --- responses -------------------------------------------------------------------------------------------


def bad_codes(data: bytes, keys: dict[int, int]) -> tuple[Counter[str], list[str]]:
    """Return the error codes in a stream of responses, and what is wrong with them.

    ``keys`` maps correlation ids to API keys. Responses with other correlation ids may be to any API.
    """
    seen: Counter[str] = Counter()
    problems: list[str] = []
    position = 0
    while position + 8 <= len(data):
        envelope_bytes, payload_bytes = struct.unpack_from(">II", data, position)
        end = position + 8 + envelope_bytes
        if end + payload_bytes > len(data):
            break
        correlation_id, _, body = msgpack.unpackb(data[position + 8 : end], strict_map_key=False)
        position = end + payload_bytes
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
    return list(_codes_in(api.response, body)) if api is not None else []


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


# --- the broker ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Observed:
    """A real broker that reports on itself."""

    directory: Path
    address: str = ""
    process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    async def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2)
        self.address = f"127.0.0.1:{ports[0]}"
        settings = {
            "node.id": "1",
            "process.roles": "broker,controller",
            "cluster.id": "fuzzed",
            "cluster.secret": "a-secret-for-tests-only",
            "controller.quorum.voters": f"1@127.0.0.1:{ports[1]}",
            "controller.listeners": f"127.0.0.1:{ports[1]}",
            "listeners": self.address,
            "log.dirs": str(self.directory / "data"),
            "durability": "page-cache",
        }
        file = self.directory / "server.toml"
        file.write_text("".join(f'"{name}" = {json.dumps(value)}\n' for name, value in settings.items()))
        words = [sys.executable, "-m", "proof.processes.observed_server", str(self.directory / "report")]
        with (self.directory / "server.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *words, "server", "start", "--file", str(file), stdout=log, stderr=log
            )

        async def is_up() -> bool:
            assert self.process is not None
            if self.process.returncode is not None:
                raise AssertionError(f"the broker ended:\n{self.log[-2000:]}")
            with suppress(OSError, ConnectionError, KafkaliteError):
                async with WireClient(self.address) as wire:
                    return bool((await wire.call(DescribeClusterRequest())).controller_id == 1)
            return False

        await eventually(is_up, "the broker is up", limit_s=60)

    async def report(self) -> dict[str, int]:
        """Return tasks, descriptors and rss_bytes of the broker."""
        path = self.directory / "report"
        path.unlink(missing_ok=True)
        assert self.process is not None
        assert self.process.returncode is None, f"the broker ended:\n{self.log[-2000:]}"
        os.kill(self.process.pid, signal.SIGUSR1)
        await eventually(path.exists, "the report of the broker")
        found: dict[str, int] = json.loads(path.read_text())
        return found

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Pinger(threading.Thread):
    """A quiet client in a thread of its own. ``times_ms``: how long each request took.

    ``holds_ms``: how long the broker's event loop computed or slept during each. The time in which it could
    not run because other processes used the processors is not counted. ``suspects``: the connections that
    were open during the longest one. A broker that takes long is made to log its stack.
    """

    def __init__(self, address: str, pid: int, in_flight: set[int]) -> None:
        super().__init__(daemon=True)
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.settimeout(_LOOK_S)
        self._pid = pid
        self._wire = ClientConnection("quiet")
        self._is_over = threading.Event()
        self._in_flight = in_flight
        self._stat = Path(f"/proc/{pid}/task/{pid}/stat")
        self.times_ms: list[float] = []
        self.holds_ms: list[float] = []
        self.suspects: list[int] = []
        self.problem = ""

    def run(self) -> None:
        try:
            self._call(self._wire.handshake()[1])
            while not self._is_over.wait(PING_PAUSE_S):
                began_s, suspects = time.perf_counter(), list(self._in_flight)
                _, began_ms = self._loop()
                slept_ms = self._call(self._wire.send(DescribeClusterRequest())[1])
                held_ms = slept_ms + self._loop()[1] - began_ms
                if held_ms > max(self.holds_ms, default=0.0):
                    self.suspects = sorted({*suspects, *self._in_flight})
                self.times_ms.append((time.perf_counter() - began_s) * 1000)
                self.holds_ms.append(held_ms)
        except (OSError, KafkaliteError) as error:
            self.problem = f"the quiet client was not served: {error!r}"

    def _loop(self) -> tuple[str, float]:
        """Return the state of the broker's main thread (proc(5)), and the CPU time that it has used in ms."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) * _TICK_MS

    def _call(self, buffers: Sequence[Any]) -> float:
        """Send a request and wait for its response. Return how long the event loop slept meanwhile, in ms."""
        self._socket.sendall(b"".join(bytes(each) for each in buffers))
        limit_s = time.monotonic() + PING_LIMIT_S
        looks = sleeps = 0
        while True:
            try:
                read = self._socket.recv_into(self._wire.get_buffer())
            except TimeoutError:
                if time.monotonic() > limit_s:
                    raise
                looks += 1
                sleeps += self._loop()[0] != "R"
                if looks % _STACK_AFTER_LOOKS == 0:
                    os.kill(self._pid, signal.SIGUSR2)
                continue
            if not read:
                raise ConnectionResetError("the broker closed the connection")
            if self._wire.buffer_updated(read):
                return sleeps * _LOOK_S * 1_000

    def stop(self) -> None:
        self._is_over.set()
        self.join()
        self._socket.close()


# --- a run -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    connections: int = 0
    frames: int = 0
    held: int = 0  #: connections that the fuzzer ended while a request waited, which may take 10 minutes
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)  #: numbers of the open connections
    pauses_ms: list[float] = field(default_factory=list)
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
        await _set_up(broker.address)
        keys = [key for key in ApiKey if key in APIS and (key not in _STOPPING or await _is_guarded(broker))]
        assert broker.process is not None
        pinger = Pinger(broker.address, broker.process.pid, result.in_flight)
        pinger.start()
        if count is None:  # fill caches and the allocator before the first measurement
            await _attack(broker, keys, Result(), start - 1_000_000, min(seconds / 5, 60.0), None)
        await _tidy(broker.address)
        result.before = await _settled(broker, None)
        pinger.times_ms.clear()
        pinger.holds_ms.clear()
        await _attack(broker, keys, result, start, seconds, count)
        result.pauses_ms = sorted(pinger.times_ms)
        result.longest_hold_ms = max(pinger.holds_ms, default=0.0)
        await _tidy(broker.address)
        result.after = await _settled(broker, result.before)
        pinger.stop()
        _judge(result, broker, pinger)
    finally:
        await broker.stop()
    tell(
        f"{result.connections} connections, {result.frames} frames, {result.held} held, error codes: "
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
            script = Generator(random.Random(number), keys).script()
            result.in_flight.add(number)
            problems = await _connection(broker.address, script, result)
            result.in_flight.discard(number)
            result.problems += [f"connection {number}: {each}" for each in problems]
            result.connections += 1
            result.frames += len(script)
            assert broker.process is not None
            if broker.process.returncode is not None:
                result.problems.append(f"connection {number}: the broker has ended:\n{broker.log[-3000:]}")
                return

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def _connection(address: str, script: Sequence[bytes], result: Result) -> list[str]:
    """Play one script. Return what is wrong with the responses."""
    keys: dict[int, int] = {}
    for frame in script:
        with suppress(ValueError, TypeError, msgpack.UnpackException, struct.error):
            length = struct.unpack_from(">I", frame)[0]
            key, _, correlation_id, *_ = msgpack.unpackb(frame[8 : 8 + length], strict_map_key=False)
            keys.setdefault(correlation_id, key)
    received = bytearray()
    try:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        return [f"no connection: {error}"]
    try:
        async with asyncio.timeout(CONNECTION_LIMIT_S):
            for frame in script:
                writer.write(frame)
                await writer.drain()
            writer.write_eof()
            while part := await reader.read(1 << 16):
                received += part
    except TimeoutError:
        result.held += 1  # a request may wait as long as it says
    except OSError:
        pass  # the broker closes a connection whose bytes are not frames
    finally:
        writer.close()
    codes, problems = bad_codes(bytes(received), keys)
    result.codes += codes
    return problems


async def _set_up(address: str) -> None:
    """Create topics, and use group and transaction coordinators once, so that their logs exist."""
    async with Admin(address) as admin:
        await admin.create_topics(dict.fromkeys(TOPICS, 3), return_exceptions=True)
        await admin.alter_group_offsets(_SET_UP, {TopicPartition(TOPICS[0], 0): 0})
    async with Producer(address, transactional_id=_SET_UP) as producer, producer.transaction():
        await producer.send(TOPICS[0], b"x")


async def _tidy(address: str) -> None:
    """Delete what scripts have created, so that what remains can be compared."""
    async with Admin(address) as admin:
        names = [each.name for each in await admin.list_topics() if not each.is_internal]
        await admin.delete_topics(names, return_exceptions=True)
        groups = [each.group_id for each in await admin.list_groups()]
        await admin.delete_groups(groups, return_exceptions=True)
    await _set_up(address)


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
