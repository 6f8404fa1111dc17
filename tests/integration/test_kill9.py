"""kill -9 of a real ``kl server start`` in mid-write: what was acknowledged is there, once, in order."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Consumer, Producer, TopicPartition
from kafkalite.errors import KafkaliteError
from kafkalite.records.header import scan

TOPIC = "ledger"
PARTITIONS = 2
ROUNDS = 3
KILL_AFTER_ACKNOWLEDGED = 400


class Server:
    """One ``kl server start``: where it listens, and all it printed."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address
        self.lines: list[str] = []


@asynccontextmanager
async def running(data: Path, repository: Path) -> AsyncIterator[Server]:
    arguments = ["server", "start", "--set", f"log.dirs={data}", "--set", "listeners=127.0.0.1:0"]
    arguments += ["--set", "durability=fsync", "--log-format", "console"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kafkalite",
        *arguments,
        cwd=repository,
        env=os.environ | {"NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    server = Server(process, "")
    up = asyncio.Event()

    async def read(stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            server.lines.append(line.decode())
            ready = re.search(r"is up on (\S+)", server.lines[-1])
            if ready:
                server.address = ready.group(1)
                up.set()
        up.set()

    reading = asyncio.create_task(read(process.stdout))
    try:
        await up.wait()
        assert server.address, "".join(server.lines)
        yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def send_until_killed(
    address: str, first: int, process: asyncio.subprocess.Process
) -> tuple[int, dict[int, Any]]:
    """Number records from ``first`` on, each sent once; kill -9 once enough are acknowledged.

    Returns the next number and {number: RecordMetadata} of the acknowledged ones.
    """
    acknowledged: dict[int, Any] = {}
    number = first

    async def one(delivery: Any, mine: int) -> None:
        try:
            acknowledged[mine] = await delivery
        except KafkaliteError:
            return
        if len(acknowledged) == KILL_AFTER_ACKNOWLEDGED:
            process.send_signal(signal.SIGKILL)

    producer = Producer(
        address, acks="all", retries=0, linger_ms=1, delivery_timeout_ms=1_000, default_api_timeout_ms=5_000
    )
    await producer.start()
    waiting: set[asyncio.Task[None]] = set()
    try:
        while process.returncode is None and number < first + 1_000_000:
            for _ in range(20):
                delivery = producer.send_nowait(TOPIC, b"%d" % number, partition=number % PARTITIONS)
                waiting.add(asyncio.create_task(one(delivery, number)))
                number += 1
            await asyncio.wait(waiting, timeout=0.001)
            waiting = {task for task in waiting if not task.done()}
            if len(waiting) > 2_000:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await process.wait()
        if waiting:
            await asyncio.wait(waiting)
    finally:
        with suppress(KafkaliteError):  # of what was on its way when the server died
            await producer.close()
    return number, acknowledged


async def read_all(address: str) -> dict[int, list[Any]]:
    """All records by partition, in the order of their offsets."""
    partitions = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    found: dict[int, list[Any]] = {partition: [] for partition in range(PARTITIONS)}
    async with Consumer(bootstrap_servers=address) as consumer:
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        while any(consumer.position(partition) != ends[partition] for partition in partitions):
            for record in await consumer.get_many(10_000, timeout_ms=5_000):
                found[record.partition].append(record)
    return found


def check(stored: dict[int, list[Any]], acknowledged: dict[int, Any]) -> None:
    for partition, records in stored.items():
        assert [record.offset for record in records] == list(range(len(records))), "offsets without a gap"
        numbers = [int(record.value) for record in records]
        assert len(set(numbers)) == len(numbers), "a record that was sent once is there twice"
        assert numbers == sorted(numbers), "records are in the order they were sent"
        by_number = dict(zip(numbers, records, strict=True))
        for number, metadata in acknowledged.items():
            if number % PARTITIONS == partition:
                assert number in by_number, f"record {number} was acknowledged and is gone"
                assert by_number[number].offset == metadata.offset


@pytest.mark.slow
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, repository: Path) -> None:
    data = tmp_path / "data"
    acknowledged: dict[int, Any] = {}
    number = 0
    for round_number in range(ROUNDS):
        async with running(data, repository) as server:
            if round_number == 0:
                async with Admin(server.address) as admin:
                    await admin.create_topic(TOPIC, PARTITIONS, 1)
            else:
                check(await read_all(server.address), acknowledged)
            number, fresh = await send_until_killed(server.address, number, server.process)
            assert len(fresh) >= KILL_AFTER_ACKNOWLEDGED
            acknowledged |= fresh
    async with running(data, repository) as server:
        check(await read_all(server.address), acknowledged)


def torn_tail(data: Path) -> Path:
    """Append the first half of a batch to a log, as a crash in the middle of a write leaves it."""
    (log, *_) = sorted(
        path for path in data.rglob("*.log") if path.stat().st_size > 0 and "-" in path.parent.name
    )
    content = log.read_bytes()
    batches = list(scan(content, 0, len(content)))
    assert batches, f"{log} holds no batch"
    position, _, _, _, length = batches[-1]
    end = position + length
    with log.open("r+b") as stream:
        stream.seek(end)
        stream.write(content[position : position + length // 2 + 1])
    return log


@pytest.mark.slow
async def test_a_torn_tail_is_cut_with_one_log_line(tmp_path: Path, repository: Path) -> None:
    data = tmp_path / "data"
    async with running(data, repository) as server:
        async with Admin(server.address) as admin:
            await admin.create_topic(TOPIC, PARTITIONS, 1)
        _, acknowledged = await send_until_killed(server.address, 0, server.process)
    torn_tail(data)
    async with running(data, repository) as server:
        check(await read_all(server.address), acknowledged)
        cuts = [line for line in server.lines if re.search(r"torn tail cut", line)]
        assert len(cuts) == 1, "".join(server.lines)
        server.process.terminate()
        assert await server.process.wait() == 0
