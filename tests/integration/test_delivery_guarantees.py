"""At least once, at most once, exactly once: the client is killed after every step and restarted.

A killed client does not leave its group: connections are cut, heartbeats end, nothing more is committed. The
successor gets the partitions when the session has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Broker, Consumer, Producer, TopicPartition
from kafkalite.errors import CommitFailedError

RECORDS = 6
GROUP = {"group_id": "g", "auto_offset_reset": "earliest", "fetch_max_wait_ms": 20, "max_poll_records": 2}


class Death(Exception):
    """Whatever ends a process between two lines."""


class Steps:
    """Counts the steps of all lives, and dies at one of them."""

    def __init__(self, fatal: int) -> None:
        self.count = 0
        self.fatal = fatal

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            raise Death


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(
        group_consumer_session_timeout_ms=200, group_consumer_heartbeat_interval_ms=40
    ) as broker:
        async with Producer(broker.bootstrap_servers, linger_ms=0) as producer:
            await producer.send_many("in", [b"%d" % i for i in range(RECORDS)], partition=0)
        yield broker


async def _kill(consumer: Consumer) -> None:
    """End a consumer as the end of its process would."""
    group = consumer._group
    assert group is not None and group._heartbeats._task is not None
    group._heartbeats._task.cancel()
    group._is_closing = True
    for timer in (group._watch_timer, group._commit_timer):
        if timer is not None:
            timer.cancel()
    consumer._life = "closed"
    consumer._fetcher.close()
    await consumer._cluster.close()


async def _live_until_done(make: Callable[[], Consumer], work: Callable[[Consumer], Awaitable[None]]) -> int:
    """Run ``work`` with one consumer after the other until one gets through; how many lives it took."""
    for lives in range(1, 20):
        consumer = make()
        try:
            await consumer.start()
            await work(consumer)
        except Death:
            await _kill(consumer)
        else:
            await consumer.close()
            return lives
    raise AssertionError("it never ends")


async def _crash_everywhere(
    broker: Broker,
    settings: dict[str, Any],
    loop: Callable[[Consumer, Steps, list[int]], Awaitable[None]],
    check: Callable[[Counter[int]], bool],
) -> None:
    """Die at step 1, at step 2 ... until no step is left; ``check`` what was processed each time."""
    fatal = 0
    while True:
        fatal += 1
        steps = Steps(fatal)
        processed: list[int] = []
        settings = {**settings, "group_id": f"g-{fatal}"}
        lives = await _live_until_done(
            lambda given=settings: Consumer("in", bootstrap_servers=broker.bootstrap_servers, **given),
            lambda consumer, steps=steps, processed=processed: loop(consumer, steps, processed),
        )
        assert check(Counter(processed)), f"died at step {fatal}: {processed}"
        if lives == 1:
            assert fatal > RECORDS, "there were steps to die at"
            return


def _is_through(consumer: Consumer, topic: str = "in") -> bool:
    """Whether it has the partition, and was given the last record."""
    tp = TopicPartition(topic, 0)
    return tp in consumer.assignment() and consumer.position(tp) == RECORDS


async def _by_hand(consumer: Consumer, step: Steps, processed: list[int]) -> None:
    """Process, then commit."""
    while not _is_through(consumer):
        records = await consumer.get_many(timeout_ms=100)
        for record in records:
            step()
            processed.append(record.offset)
            step()
        if records:
            await consumer.commit()
            step()


async def _iterate(consumer: Consumer, step: Steps, processed: list[int]) -> None:
    """Let auto-commit do it, until nothing comes for a while after the last record."""
    while not _is_through(consumer):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                loop = asyncio.get_running_loop()
                patience.reschedule(loop.time() + 0.1)
                async for record in consumer:
                    step()
                    processed.append(record.offset)
                    step()
                    patience.reschedule(loop.time() + 0.1)


def _at_least_once(processed: Counter[int]) -> bool:
    return set(processed) == set(range(RECORDS))


def _at_most_once(processed: Counter[int]) -> bool:
    return set(processed.values()) <= {1}


@pytest.mark.parametrize("loop", [_by_hand, _iterate])
async def test_at_least_once(broker: Broker, loop: Any) -> None:
    settings = {**GROUP, "enable_auto_commit": loop is _iterate, "auto_commit_interval_ms": 0}
    await _crash_everywhere(broker, settings, loop, _at_least_once)


async def test_at_most_once(broker: Broker) -> None:
    settings = {**GROUP, "processing_guarantee": "at_most_once"}
    await _crash_everywhere(broker, settings, _iterate, _at_most_once)


async def test_a_transaction_is_exactly_once(broker: Broker) -> None:
    """Read, process, write: offsets and results are one transaction; the client dies after every step."""
    for fatal in range(1, 100):
        steps, out = Steps(fatal), f"out-{fatal}"
        settings: dict[str, Any] = {**GROUP, "group_id": f"tx-{fatal}", "enable_auto_commit": False}

        async def work(consumer: Consumer, steps: Steps = steps, out: str = out, fatal: int = fatal) -> None:
            producer = Producer(
                broker.bootstrap_servers, linger_ms=0, transactional_id=f"tx-{fatal}", retry_backoff_ms=1
            )
            await producer.start()
            try:
                while not _is_through(consumer):
                    records = await consumer.get_many(timeout_ms=100)
                    if not records:
                        continue
                    await producer.begin_transaction()
                    steps()
                    for record in records:
                        await producer.send(out, record.value)
                        steps()
                    await producer.send_offsets(consumer)
                    steps()
                    await producer.commit_transaction()
                    steps()
            except (
                Death,
                CommitFailedError,
            ) as end:  # on a stalled machine, a member may be expelled: it ends, too
                await producer._sender.cluster.close()  # without a word to the coordinator
                with contextlib.suppress(Exception):
                    await producer.close(timeout_ms=0)
                raise Death from end
            await producer.close()

        lives = await _live_until_done(
            lambda settings=settings: Consumer(
                "in", bootstrap_servers=broker.bootstrap_servers, isolation_level="read_committed", **settings
            ),
            work,
        )
        async with Consumer(
            out,
            bootstrap_servers=broker.bootstrap_servers,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=10,
        ) as reader:
            values: list[int] = []
            async with asyncio.timeout(20):
                while len(values) < RECORDS:
                    values += [int(record.value or b"") for record in await reader.get_many(timeout_ms=1_000)]
            values += [int(record.value or b"") for record in await reader.get_many(timeout_ms=30)]
        assert values == list(range(RECORDS)), f"died at step {fatal}"
        if lives == 1:
            assert fatal > RECORDS
            break


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, repository: Path) -> ModuleType:
    """The module of examples/external_offsets."""
    path = repository / "examples/external_offsets/ledger.py"
    spec = importlib.util.spec_from_file_location("ledger", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ledger", module)
    spec.loader.exec_module(module)
    return module


async def test_offsets_kept_with_the_results_are_exactly_once(
    broker: Broker, example: ModuleType, tmp_path: Path
) -> None:
    async with Producer(broker.bootstrap_servers, linger_ms=0) as producer:
        await producer.send_many("payments", [b"1"] * RECORDS, [b"alice", b"bob"] * 3, partition=0)
    for fatal in range(1, 2 * RECORDS + 2):
        ledger = example.Ledger(tmp_path / f"{fatal}.db")
        steps = Steps(fatal)

        async def work(consumer: Consumer, ledger: Any = ledger, steps: Steps = steps) -> None:
            while not _is_through(consumer, "payments"):
                await example.keep_ledger(consumer, ledger, steps, idle_ms=120)

        await _live_until_done(
            lambda ledger=ledger: example.ledger_consumer(broker.bootstrap_servers, ledger), work
        )
        assert ledger.balances() == {"alice": 3, "bob": 3}
        ledger.close()


async def test_a_member_thought_dead_can_not_spoil_the_results(
    broker: Broker, example: ModuleType, tmp_path: Path
) -> None:
    """A zombie still holds records that its heir has applied: the database knows."""
    async with Producer(broker.bootstrap_servers, linger_ms=0) as producer:
        await producer.send_many("payments", [b"1"] * RECORDS, [b"alice"] * RECORDS, partition=0)
    ledger = example.Ledger(tmp_path / "db")
    zombie = example.ledger_consumer(broker.bootstrap_servers, ledger)
    await zombie.start()
    held = await zombie.get_many(timeout_ms=2_000)
    await _kill(zombie)
    async with example.ledger_consumer(broker.bootstrap_servers, ledger) as heir:
        while not _is_through(heir, "payments"):
            await example.keep_ledger(heir, ledger)
    assert held and [ledger.apply(record) for record in held] == [False] * len(held)
    assert ledger.balances() == {"alice": RECORDS}
    ledger.close()


def test_the_example_runs(repository: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-W", "error", str(repository / "examples/external_offsets/run.py")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the ledger says {'alice': 50, 'bob': 50}"
