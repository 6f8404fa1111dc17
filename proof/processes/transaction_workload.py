"""Exactly-once jobs and transactional producers that run during faults, and their histories.

The jobs are separate processes (``transform_job``), so that they can be killed and stopped like brokers. The
other clients run in the caller's event loop. ``proof.processes.transactions`` causes the faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import Record, TopicPartition
from kafkalite.rng import Rng
from proof.histories.history import Anomaly
from proof.histories.transaction_history import (
    ABORTED,
    COMMITTED,
    OPEN,
    UNKNOWN,
    Place,
    TransactionHistory,
    TransformHistory,
    Written,
    check_transactions,
    check_transform,
)
from proof.processes.transform_job import GROUP, INPUT, OUTPUT, PRODUCER_SETTINGS, SETTINGS

LEDGER: Final = "ledger"
PARTITIONS: Final = 3
_FEED_PAUSE_S: Final = 0.005
_RETRY_PAUSE_S: Final = 0.1
_POLL_MS: Final = 200
_CLOSE_LIMIT_S: Final = 10.0


class JobProcess:
    """One ``transform_job`` process on this machine."""

    def __init__(self, name: str, directory: Path, bootstrap_servers: Callable[[], str]) -> None:
        self.name = name  #: also its transactional id
        self._directory = directory
        self.log_path = directory / f"{name}.log"
        self._bootstrap_servers = bootstrap_servers
        self._process: asyncio.subprocess.Process | None = None

    def double(self) -> JobProcess:
        """Return another process with the same name, which is not started."""
        return JobProcess(self.name, self._directory, self._bootstrap_servers)

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        words = ["-m", "proof.processes.transform_job", self._bootstrap_servers(), "--id", self.name]
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send_signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def end(self, number: int = signal.SIGKILL) -> None:
        """Send the signal and wait for the end. Kill the process if it does not end in time."""
        if self._process is None:
            return
        self.send_signal(signal.SIGCONT)
        self.send_signal(number)
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self._process.wait()

    @property
    def refusals(self) -> Counter[str]:
        """The errors with which brokers refused its requests, counted by name over all its runs."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return Counter(line.partition(":")[0] for line in text.splitlines() if ":" in line)


class TransactionWorkload:
    """Writes records to ``in``, has jobs transform them into ``out``, and writes transactions to ``ledger``.

    Use it with ``async with``. The topics must exist, with PARTITIONS partitions each.
    """

    def __init__(
        self,
        bootstrap_servers: Callable[[], str],
        directory: Path,
        rng: Rng,
        *,
        jobs: int = 2,
        transactors: int = 2,
    ) -> None:
        self.history = TransactionHistory()
        self.fed: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)  #: acknowledged records, by partition
        self.jobs = [JobProcess(f"job-{number}", directory, bootstrap_servers) for number in range(jobs)]
        self.refused: Counter[str] = Counter()  #: errors that transactors were refused with
        self._servers = bootstrap_servers
        self._rng = rng
        self._transactors = [f"transactor-{number}" for number in range(transactors)]
        self._is_over = self._is_fed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._feeders: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()
        self._seen_s: dict[tuple[str, int], float] = {}  # when a reader last read a new record, by partition
        self._committed_s: dict[str, float] = {}  # when a transactor began its last committed transaction
        self._final: dict[int, list[str]] = {}

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(job.start() for job in self.jobs))
        except BaseException:
            await self.kill()
            raise
        self._feeders = [asyncio.create_task(self._again("feeder", self._feed))]
        self._tasks = [asyncio.create_task(self._again("reader", self._read))]
        for name in self._transactors:
            self._tasks.append(asyncio.create_task(self._again(name, partial(self._transact, name))))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Kill every process and task that still runs."""
        tasks = [*self._tasks, *self._feeders]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(job.end() for job in self.jobs))

    async def _again(self, name: str, life: Callable[[], Awaitable[None]]) -> None:
        """Run ``life`` repeatedly until the workload is over."""
        while not self._is_over and not (self._is_fed and name == "feeder"):
            try:
                await life()
            except KafkaliteError as error:
                if name in self._transactors:
                    self.refused[type(error).__name__] += 1
                await asyncio.sleep(_RETRY_PAUSE_S)

    # --- the programs ----------------------------------------------------------------------------------

    async def _feed(self) -> None:
        async with Producer(self._servers(), linger_ms=1, acks="all", **SETTINGS) as producer:
            while not self._is_fed:
                partition = self._rng.randrange(PARTITIONS)
                receipt = await producer.send(INPUT, b"x", partition=partition)
                self.fed[partition] = max(self.fed[partition], receipt.offset + 1)
                await asyncio.sleep(_FEED_PAUSE_S)

    async def _transact(self, name: str) -> None:
        """Write transactions of a few values, and commit most of them. The next run fences this one."""
        rng, history = self._rng, self.history
        async with Producer(self._servers(), transactional_id=name, **PRODUCER_SETTINGS) as producer:
            while not self._is_over:
                began_s = time.monotonic()
                transaction = history.begin(name, f"{name}#{len(history.transactions)}", OPEN)
                await producer.begin_transaction()
                for number in range(1 + rng.randrange(6)):
                    self._send(producer, transaction, number, rng.randrange(PARTITIONS))
                    await asyncio.sleep(0.01 * rng.random())
                if rng.random() < 0.25:
                    await producer.abort_transaction()
                    transaction.outcome = ABORTED
                else:
                    transaction.outcome = UNKNOWN
                    await producer.commit_transaction()
                    transaction.outcome = COMMITTED
                    self._committed_s[name] = began_s
                    self._moved.set()

    def _send(self, producer: Producer, transaction: Written, number: int, partition: int) -> None:
        value = f"{transaction.name}/{number}"
        self.history.write(transaction, value)
        producer.send_nowait(LEDGER, value.encode(), partition=partition)

    async def _read(self) -> None:
        """Read committed records."""
        async with self._reader() as reader:
            reader.assign([TopicPartition(topic, n) for topic in (OUTPUT, LEDGER) for n in range(PARTITIONS)])
            while not self._is_over:
                records = await reader.get_many(1_000, timeout_ms=_POLL_MS)
                for record in records:
                    if record.topic == LEDGER:
                        self.history.read_at(_place(record), (record.value or b"").decode())
                    self._seen_s[record.topic, record.partition] = time.monotonic()
                self._moved.set()

    def _reader(self, isolation: str = "read_committed") -> Consumer:
        settings: dict[str, Any] = SETTINGS | {"auto_offset_reset": "earliest", "isolation_level": isolation}
        return Consumer(bootstrap_servers=self._servers(), **settings)

    # --- waiting ---------------------------------------------------------------------------------------

    async def until_served(self, limit_s: float) -> float:
        """Return when each transactor has committed a transaction that began after this call, and a new
        record was read in every partition of the output. Return the seconds that took. Raises
        TimeoutError with the names that are missing.
        """
        began_s = time.monotonic()

        def waiting_for() -> list[str]:
            names = [name for name in self._transactors if self._committed_s.get(name, 0.0) <= began_s]
            outputs = [(OUTPUT, number) for number in range(PARTITIONS)]
            return names + [f"{t}-{n}" for t, n in outputs if self._seen_s.get((t, n), 0.0) <= began_s]

        await self._until(waiting_for, limit_s)
        return time.monotonic() - began_s

    async def _until(self, waiting_for: Callable[[], list[str]], limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while waiting_for():
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise TimeoutError(f"nothing new of {waiting_for()} in {limit_s:g} s") from None

    async def finish(self, limit_s: float) -> None:
        """Stop the input. Return when all of it is transformed, all clients have ended, and no transaction is
        open.

        Raises TimeoutError.
        """
        self._is_fed = True
        await asyncio.gather(*self._feeders)
        try:
            async with asyncio.timeout(limit_s):
                await self._until_transformed()
                self._is_over = True
                await asyncio.gather(*self._tasks)
                await asyncio.gather(*(job.end(signal.SIGTERM) for job in self.jobs))
                await self._read_finally()
        except TimeoutError:
            raise TimeoutError(f"the jobs' input or open transactions are left after {limit_s:g} s") from None

    async def _until_transformed(self) -> None:
        """Wait until the jobs' group has committed the offsets of the whole input."""
        async with Admin(self._servers(), **SETTINGS) as admin, self._reader() as reader:
            keys = [TopicPartition(INPUT, number) for number in range(PARTITIONS)]
            while True:
                with suppress(KafkaliteError):
                    ends = await reader.end_offsets(keys)
                    committed = await admin.committed_offsets(GROUP)
                    if all(tp in committed and committed[tp].offset >= ends[tp] for tp in keys):
                        self.fed = {tp.partition: ends[tp] for tp in keys}
                        return
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read_finally(self) -> None:
        """Read all topics. Called when no transaction is open."""
        keys = [TopicPartition(topic, number) for topic in (OUTPUT, LEDGER) for number in range(PARTITIONS)]
        found: dict[Place, str] = {}
        async with self._reader() as reader, self._reader("read_uncommitted") as other:
            while True:
                ends = await reader.end_offsets(keys)
                if ends == await other.end_offsets(keys):
                    break
                await asyncio.sleep(_RETRY_PAUSE_S)
            reader.assign(keys)
            while any((reader.position(key) or 0) < ends[key] for key in keys):
                for record in await reader.get_many(10_000, timeout_ms=1_000):
                    found[_place(record)] = (record.value or b"").decode()
        self.history.read_finally_at({place: value for place, value in found.items() if place[0] == LEDGER})
        for place in sorted(place for place in found if place[0] == OUTPUT):
            self._final.setdefault(place[1], []).append(found[place])

    # --- the verdict -----------------------------------------------------------------------------------

    @property
    def transformed(self) -> int:
        return sum(map(len, self._final.values()))

    def check(self) -> list[Anomaly]:
        """Return the anomalies of the histories. To be called after ``finish``."""
        transform = TransformHistory()
        for number, end in self.fed.items():
            transform.inputs[INPUT, number] = list(range(end))
        for number, values in self._final.items():
            transform.outputs[number] = [_source(value) for value in values]
        return check_transactions(self.history) + check_transform(transform)


def _place(record: Record) -> Place:
    return (record.topic, record.partition, record.offset)


def _source(value: str) -> tuple[str, int, int]:
    topic, partition, offset = value.split("/")
    return topic, int(partition), int(offset)
