"""Clients that write and read during faults and record everything in a History.

They use one event loop and real clients, and work with any cluster that is reachable over the network.
``proof.processes.faults`` causes the faults.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import BufferFullError, KafkaliteError
from kafkalite.model import TopicPartition
from proof.histories.history import History, Poll, Send

#: The maximum number of unacknowledged sends of one producer.
WINDOW: Final = 64
#: The pause between two sends of one producer: enough load to matter, but not to starve the servers.
_PAUSE_S: Final = 0.001
_POLL_MS: Final = 200
_PADDING_MARK: Final = b"#"
_CLOSE_LIMIT_S: Final = 10.0
_READ_LIMIT_S: Final = 60.0

_PRODUCER_SETTINGS: Final[dict[str, Any]] = {
    "acks": "all",
    "linger_ms": 1,
    "request_timeout_ms": 2_000,
    "delivery_timeout_ms": 20_000,
    "retry_backoff_max_ms": 200,
    "reconnect_backoff_max_ms": 200,
}
_CONSUMER_SETTINGS: Final[dict[str, Any]] = {
    "auto_offset_reset": "earliest",
    "request_timeout_ms": 3_000,
    "reconnect_backoff_max_ms": 200,
}


class Workload:
    """Producers and consumers of one topic, from ``async with`` to its end."""

    def __init__(
        self,
        bootstrap_servers: Callable[[], str],
        topic: str,
        partitions: int,
        *,
        producers: int = 2,
        consumers: int = 1,
        padding_bytes: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """``padding_bytes`` are added to each record, but not to the history."""
        self.history = History()
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._partitions = partitions
        self._settings = {**_PRODUCER_SETTINGS, **(settings or {})}
        self._counts = (producers, consumers)
        self._padding = _PADDING_MARK + b"." * padding_bytes if padding_bytes else b""
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._acknowledged = asyncio.Event()
        #: by partition: the time in seconds at which its last acknowledged send began
        self.last_acknowledged_s: dict[int, float] = {}
        self._last_answer_s: dict[int, float] = {}
        self._longest_pause_s = 0.0

    async def __aenter__(self) -> Self:
        producers, consumers = self._counts
        self._tasks = [asyncio.create_task(self._produce(f"producer-{n}")) for n in range(producers)]
        self._tasks += [asyncio.create_task(self._consume(f"consumer-{n}")) for n in range(consumers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop sending and polling. Return when every send has an outcome. Raises the clients' errors."""
        self._is_over = True
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    def take_longest_pause_s(self) -> float:
        """Return the longest time since the last call in which some partition acknowledged nothing."""
        longest_s, self._longest_pause_s = self._longest_pause_s, 0.0
        return longest_s

    async def until_served(self, limit_s: float) -> float:
        """Return when every partition has acknowledged a record sent after this call. Return the seconds that
        it took.

        Raises TimeoutError with the other partitions after ``limit_s``.
        """
        began_s = time.monotonic()

        def unserved() -> list[int]:
            return [
                each for each in range(self._partitions) if self.last_acknowledged_s.get(each, 0.0) <= began_s
            ]

        try:
            async with asyncio.timeout(limit_s):
                while unserved():
                    await self._acknowledged.wait()
        except TimeoutError:
            raise TimeoutError(
                f"no send to {self._topic} partitions {unserved()} was acknowledged in {limit_s:g} s"
            ) from None
        return time.monotonic() - began_s

    # --- producers

    async def _produce(self, name: str) -> None:
        """Run one producer after another. When one has failed permanently, create the next one."""
        number = life = 0
        while not self._is_over:
            life += 1
            client = f"{name}.{life}"
            producer = Producer(self._bootstrap_servers(), **self._settings)
            try:
                await producer.start()
            except KafkaliteError:  # no broker is reachable
                await asyncio.sleep(0.1)
                continue
            try:
                number = await self._send_all(producer, client, number)
            finally:
                with suppress(KafkaliteError, TimeoutError):  # each send has received its own error
                    async with asyncio.timeout(_CLOSE_LIMIT_S):
                        await producer.close()

    async def _send_all(self, producer: Producer, client: str, number: int) -> int:
        """Send until the end, or until the producer has failed permanently. Return the next number."""
        waiting: set[asyncio.Task[None]] = set()
        while not self._is_over:
            if len(waiting) >= WINDOW:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            partition = number % self._partitions
            send = Send(client, self._topic, partition, f"{client}:{number}", number, _now_ms())
            number += 1
            try:
                delivery = producer.send_nowait(
                    self._topic, send.value.encode() + self._padding, partition=partition
                )
            except BufferFullError:
                await asyncio.sleep(_PAUSE_S)
                continue
            except KafkaliteError:
                break
            self.history.send(send)
            waiting.add(asyncio.create_task(self._outcome(delivery, send)))
            await asyncio.sleep(_PAUSE_S)
        if waiting:
            await asyncio.wait(waiting)
        return number

    async def _outcome(self, delivery: Any, send: Send) -> None:
        began_s = time.monotonic()
        try:
            receipt = await delivery
        except KafkaliteError as error:
            self.history.info(send, f"{type(error).__name__}: {error}", _now_ms())
            return
        self.history.ok(send, receipt.offset, _now_ms())
        self.last_acknowledged_s[send.partition] = began_s
        now_s = time.monotonic()
        pause_s = now_s - self._last_answer_s.get(send.partition, now_s)
        self._longest_pause_s = max(self._longest_pause_s, pause_s)
        self._last_answer_s[send.partition] = now_s
        self._acknowledged.set()
        self._acknowledged = asyncio.Event()

    # --- consumers

    async def _consume(self, name: str) -> None:
        """Read every partition from its beginning. Replace a consumer that has failed permanently."""
        life = 0
        while not self._is_over:
            life += 1
            consumer = Consumer(bootstrap_servers=self._bootstrap_servers(), **_CONSUMER_SETTINGS)
            try:
                await consumer.start()
                consumer.assign([TopicPartition(self._topic, each) for each in range(self._partitions)])
                while not self._is_over:
                    self._note(f"{name}.{life}", await consumer.get_many(1_000, timeout_ms=_POLL_MS))
            except KafkaliteError:
                await asyncio.sleep(0.1)
            finally:
                with suppress(KafkaliteError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_LIMIT_S):
                        await consumer.close()

    def _note(self, session: str, records: list[Any]) -> None:
        polls: dict[int, Poll] = {}
        for record in records:
            poll = polls.get(record.partition)
            if poll is None:
                poll = polls[record.partition] = Poll(session, self._topic, record.partition, _now_ms())
                self.history.poll(poll)
            poll.records.append((record.offset, _text(record)))

    # --- at the end

    async def read_finally(self) -> None:
        """Read all records into the history."""
        partitions = [TopicPartition(self._topic, each) for each in range(self._partitions)]
        found: dict[TopicPartition, list[tuple[int, str]]] = {each: [] for each in partitions}
        async with (
            asyncio.timeout(_READ_LIMIT_S),
            Consumer(bootstrap_servers=self._bootstrap_servers(), **_CONSUMER_SETTINGS) as consumer,
        ):
            consumer.assign(partitions)
            await consumer.seek_to_beginning()
            ends = await consumer.end_offsets(partitions)
            while any((consumer.position(each) or 0) < ends[each] for each in partitions):
                for record in await consumer.get_many(10_000, timeout_ms=1_000):
                    key = TopicPartition(record.topic, record.partition)
                    found[key].append((record.offset, _text(record)))
        for key, records in found.items():
            self.history.read_finally(key, records)


def _text(record: Any) -> str:
    text, _, _ = (record.value or b"").partition(_PADDING_MARK)
    return str(text.decode())


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
