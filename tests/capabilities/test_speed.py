"""Capabilities B and H that are about speed: latency, throughput, and the cost of an idle broker.

Where a comparison must not depend on the machine, brokers and clients run in virtual time: a message takes
5 to 6 ms, and computing takes none.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kafkalite import Admin, Broker, Consumer, Producer
from kafkalite.clock import Clock
from kafkalite.testing.sim import Simulation
from proof.sim.nodes import SimNode, make_nodes

T = TypeVar("T")

#: Without retries and idempotence, so that what is measured is one request or one record.
PLAIN: dict[str, Any] = {"linger_ms": 0, "enable_idempotence": False}


@dataclass
class Stage:
    """Running brokers, and the clock of the host beside them."""

    nodes: list[SimNode]
    clock: Clock

    @property
    def servers(self) -> str:
        return ",".join(node.address for node in self.nodes)

    @property
    def brokers(self) -> list[Broker]:
        return [node.broker for node in self.nodes if node.broker is not None]

    def producer(self, **settings: Any) -> Producer:
        return Producer(self.servers, clock=self.clock, rng=random.Random(1), **settings)

    def requests(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for broker in self.brokers:
            counts.update(broker.statistics().requests)
        return counts

    async def create_topic(self, partitions: int, **settings: Any) -> None:
        async with Admin(self.servers) as admin:
            await admin.create_topic("t", partitions=partitions, **settings)


def _in_virtual_time(
    body: Callable[[Stage], Coroutine[Any, Any, T]], *, brokers: int = 1, delay_s: float = 0.005
) -> T:
    """Return the result of ``body``, a program of a host beside the brokers."""
    with Simulation(1) as simulation:
        nodes = make_nodes(simulation, brokers, {})
        client = simulation.host("client")

        async def whole() -> T:
            for node in nodes:
                node.start()
            while not all(node.is_running for node in nodes):
                await asyncio.sleep(0.1)
            simulation.network.tuning.delay_s = delay_s
            result: T = await client.run(body(Stage(nodes, client.clock)))
            return result

        found = simulation.run(whole())
        assert simulation.violations == []
        return found


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def test_bytes_are_spread_evenly_over_the_brokers() -> None:
    """B17: leaders are spread over the brokers, and records of any size over the leaders."""

    async def body(stage: Stage) -> list[int]:
        rng = random.Random(1)
        await stage.create_topic(30, replication_factor=1)
        async with stage.producer(batch_size=4_000) as producer:
            for _ in range(4_000):
                producer.send_nowait("t", bytes(rng.randrange(2_000)))
            await producer.flush()
        async with Admin(stage.servers) as admin:
            logs = await admin.describe_log_dirs(["t"])
        sizes: Counter[int] = Counter()
        for log in logs:
            sizes[log.node_id] += log.size_bytes
        return list(sizes.values())

    sizes = _in_virtual_time(body, brokers=3)
    mean = statistics.mean(sizes)
    assert len(sizes) == 3
    assert mean > 1_000_000
    assert all(abs(size - mean) < 0.2 * mean for size in sizes), sizes


def test_less_durability_is_faster_and_so_are_more_brokers() -> None:
    """B20: acks 0, 1 and all, by the latency of a send and by the time of many; then 3 brokers against 1."""

    async def with_acks(stage: Stage) -> dict[str, tuple[float, float]]:
        found = {}
        await stage.create_topic(3, replication_factor=3, configs={"min.insync.replicas": "3"})
        for acks in ("0", "1", "all"):
            settings: Any = {**PLAIN, "acks": acks, "max_request_size": 10_000, "batch_size": 10_000}
            async with stage.producer(**settings) as producer:
                await producer.send("t", b"connects", partition=0)
                started_s = _now_s()
                for _ in range(20):
                    await producer.send("t", b"x", partition=0)
                latency_s = (_now_s() - started_s) / 20
                found[acks] = latency_s, await _time_of_many(producer, 3)
        return found

    times = _in_virtual_time(with_acks, brokers=3)
    (latency_0, many_0), (latency_1, many_1), (latency_all, many_all) = times.values()
    assert latency_0 < latency_1 / 2, times
    assert latency_1 < latency_all / 1.5, times
    assert many_0 <= many_1 < many_all / 1.2, times

    async def alone(stage: Stage) -> float:
        await stage.create_topic(6, replication_factor=1)
        settings: Any = {**PLAIN, "acks": 1, "max_request_size": 10_000, "batch_size": 10_000}
        async with stage.producer(max_in_flight_requests_per_connection=2, **settings) as producer:
            await producer.send_many("t", [b"connects"] * 6)
            return await _time_of_many(producer, 6)

    one, three = (_in_virtual_time(alone, brokers=count) for count in (1, 3))
    assert three < one / 2, (one, three)


async def _time_of_many(producer: Producer, partitions: int) -> float:
    started_s = _now_s()
    for number in range(900):
        producer.send_nowait("t", b"x" * 1000, partition=number % partitions)
    await producer.flush()
    return _now_s() - started_s


def test_linger_and_batch_size_trade_latency_for_requests() -> None:
    """H12: the longer a batch may wait, the fewer requests, and the longer a record takes.

    The same holds for the bytes that a fetch waits for.
    """

    async def of_linger(stage: Stage) -> list[tuple[float, int]]:
        await stage.create_topic(1)
        curve = []
        for linger_ms in (0, 50, 200):
            async with stage.producer(linger_ms=linger_ms) as producer:
                await producer.send("t", b"connects")
                before, tasks = stage.requests(), []
                for _ in range(500):
                    tasks.append(asyncio.create_task(_latency_s(producer)))
                    await asyncio.sleep(0.004)
                latencies_s = await asyncio.gather(*tasks)
                curve.append((statistics.mean(latencies_s), (stage.requests() - before)["PRODUCE"]))
        return curve

    curve = _in_virtual_time(of_linger)
    for (fast, many), (slow, few) in itertools.pairwise(curve):
        assert fast < slow, curve
        assert many > few * 1.5, curve
    assert curve[0][0] < 0.02 < 0.1 < curve[-1][0], curve

    async def of_batch_size(stage: Stage) -> list[int]:
        await stage.create_topic(1)
        counts = []
        for size in (1_000, 4_000, 16_000):
            settings: Any = {"linger_ms": 1_000, "batch_size": size, "max_request_size": size}
            async with stage.producer(**settings) as producer:
                await producer.send_many("t", [b"connects"])
                before = stage.requests()
                for _ in range(1_000):
                    producer.send_nowait("t", b"x" * 100)
                await producer.flush()
                counts.append((stage.requests() - before)["PRODUCE"])
        return counts

    for many, few in itertools.pairwise(_in_virtual_time(of_batch_size)):
        assert many > few * 2

    async def of_fetches(stage: Stage) -> list[tuple[float, int]]:
        await stage.create_topic(1)
        curve = []
        for least_bytes in (1, 2_000, 50_000):
            settings: Any = {"fetch_min_bytes": least_bytes, "fetch_max_wait_ms": 300}
            async with (
                stage.producer(linger_ms=0) as producer,
                Consumer("t", bootstrap_servers=stage.servers, **settings) as consumer,
            ):
                await consumer.get_many(timeout_ms=50)
                before, delays_s = stage.requests(), []
                sending = asyncio.create_task(_send_the_time(producer))
                while len(delays_s) < 300:
                    records = await consumer.get_many(1_000, timeout_ms=5_000)
                    delays_s += [_now_s() - float(record.value or b"0") for record in records]
                await sending
                curve.append((statistics.mean(delays_s), (stage.requests() - before)["FETCH"]))
        return curve

    curve = _in_virtual_time(of_fetches)
    for (fast, many), (slow, few) in itertools.pairwise(curve):
        assert fast < slow, curve
        assert many > few, curve


async def _latency_s(producer: Producer) -> float:
    started_s = _now_s()
    await producer.send_nowait("t", b"x")
    return _now_s() - started_s


async def _send_the_time(producer: Producer) -> None:
    for _ in range(300):
        producer.send_nowait("t", b"%.6f" % _now_s())
        await asyncio.sleep(0.005)


async def test_a_million_records_take_seconds_of_one_core_and_others_are_served_meanwhile(
    tmp_path: Path,
) -> None:
    """H10: written to disk over TCP and read as records by one thread; single records in between are quick.

    ``python -m benchmarks`` measures how quick. A million sales a day are 12 per second.
    """
    async with (
        Broker(listeners="127.0.0.1:0", log_dirs=str(tmp_path)) as broker,
        Admin(broker.bootstrap_servers) as admin,
    ):
        servers = broker.bootstrap_servers
        await admin.create_topic("t", partitions=3, configs={"durability": "page-cache"})
        await admin.create_topic("single", partitions=1, configs={"durability": "page-cache"})
        latencies_s: list[float] = []
        is_done = asyncio.Event()

        async def single() -> None:
            async with Producer(servers, linger_ms=0) as producer:
                while not is_done.is_set():
                    started_s = time.monotonic()
                    await producer.send("single", b"x")
                    latencies_s.append(time.monotonic() - started_s)
                    await asyncio.sleep(0.02)

        used_s = time.process_time()
        singles = asyncio.create_task(single())
        async with Producer(servers) as producer:
            values = [os.urandom(100) for _ in range(1_000)] * 10
            for _ in range(100):
                await producer.send_many("t", values)
        count = 0
        async with Consumer("t", bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
            while count < 1_000_000:
                count += len(await consumer.get_many(10_000, timeout_ms=20_000))
        used_s = time.process_time() - used_s
        is_done.set()
        await singles
    assert count == 1_000_000
    assert used_s < 15
    assert len(latencies_s) >= 10
    assert statistics.median(latencies_s) < 0.25


async def test_a_broker_needs_little_memory_processor_and_disk(tmp_path: Path) -> None:
    """H13: after a thousand records, at most 60 MB of memory, 3 % of a core, 1 MB of disk and 8 threads."""
    command = [sys.executable, "-m", "kafkalite", "server", "start", "--data", str(tmp_path / "data")]
    command += ["--set", "listeners=127.0.0.1:0"]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        address = line.decode().split()[-1]
        async with Producer(address) as producer:
            await producer.send_many("t", [b"x" * 100] * 1_000)
        status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()))
        before_s = _processor_s(process.pid)
        await asyncio.sleep(3)
        used_s = _processor_s(process.pid) - before_s
        disk_bytes = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    finally:
        process.kill()
        await process.wait()
    assert int(status["VmHWM"]) < 60_000, status["VmHWM"]
    assert int(status["Threads"]) <= 8
    assert used_s < 3 * 0.03
    assert disk_bytes < 1_000_000


def _processor_s(process_id: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
