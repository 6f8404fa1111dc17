"""Simulated programs that use coordinators: readers of a group, exactly-once jobs, transactional producers,
and teams that write a batch together. They record histories, which the scenario checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.client.producer.producer import Producer
from kafkalite.client.producer.transaction_group import TransactionGroup, TransactionGroupWriter
from kafkalite.errors import (
    BrokerError,
    CommitFailedError,
    InvalidProducerEpochError,
    KafkaliteError,
    NoOffsetError,
    ProducerFencedError,
)
from kafkalite.model import Record, TopicPartition
from kafkalite.testing.sim.simulation import Violation
from proof.histories.history import Poll
from proof.histories.transaction_history import ABORTED, COMMITTED, OPEN, UNKNOWN, Written
from proof.sim.workload import CLIENT_SETTINGS, DELIVERY_TIMEOUT_MS, SIDE_TOPIC, Client, Workload

if TYPE_CHECKING:
    from proof.sim.coordination import Coordination

READERS: Final = "readers"
JOBS: Final = "jobs"
WATCHERS: Final = "watchers"
WATCHED: Final = f"t|{SIDE_TOPIC}.*"
OUTPUT: Final = "out"
LEDGER: Final = "ledger"
APPLICATION: Final = "app"
CONSUMER_SETTINGS: Final[dict[str, Any]] = CLIENT_SETTINGS | {
    "auto_offset_reset": "earliest",
    "max_poll_interval_ms": 4_000,
    "auto_commit_interval_ms": 300,
}
TRANSACTION_TIMEOUT_MS: Final = 3_000
PRODUCER_SETTINGS: Final[dict[str, Any]] = CLIENT_SETTINGS | {
    "delivery_timeout_ms": DELIVERY_TIMEOUT_MS,
    "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
}


class _Ownership(RebalanceListener):
    """Reports which partitions a member believes to own."""

    def __init__(self, coordination: Coordination, client: str) -> None:
        self._coordination = coordination
        self._client = client
        self.session = 0  #: incremented by each assignment; reading then starts at the committed offset
        self.consumer: Consumer | None = None

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.session += 1
        assert self.consumer is not None
        self._coordination.on_assigned(self._client, self.consumer, partitions)

    def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._coordination.on_given_back(self._client, partitions)


class _CoordinatedClient(Client):
    """A client that runs until coordination is over."""

    def __init__(self, coordination: Coordination, name: str) -> None:
        super().__init__(coordination.workload, name)
        self._coordination = coordination
        self._life_count = 0

    @property
    def is_over(self) -> bool:
        return self._coordination.is_over

    def on_error(self, client: str, error: KafkaliteError) -> None:
        self._coordination.forget(client)
        if isinstance(error, CommitFailedError):
            self.simulation.probe("zombie-member-refused")
        elif isinstance(error, (ProducerFencedError, InvalidProducerEpochError)):
            self.simulation.probe("zombie-producer-refused")

    def crash(self) -> None:
        self._coordination.forget_host(self.host.name)
        super().crash()


class GroupReader(_CoordinatedClient):
    """A member of a group that reads the load's topic, and commits explicitly or automatically."""

    async def run(self, client: str) -> None:
        workload, rng = self.workload, self.rng
        self._life_count += 1
        client = f"{client}~{self._life_count}"
        listener = _Ownership(self._coordination, client)
        is_automatic = rng.random() < 0.5
        consumer = listener.consumer = Consumer(
            workload.keys[0].topic,
            bootstrap_servers=workload.bootstrap,
            group_id=READERS,
            enable_auto_commit=is_automatic,
            group_instance_id=self.host.name if rng.random() < 0.3 else None,
            listener=listener,
            rng=self.simulation.rng(client),
            **CONSUMER_SETTINGS,
            **workload.rack_settings(rng),
        )
        async with consumer:
            while not self.is_over:
                records = await consumer.get_many(50, timeout_ms=500)
                self._note(f"{client}-{listener.session}", records)
                if records and not is_automatic:
                    await consumer.commit()
                    self._coordination.on_decided()
                await asyncio.sleep((0.6 if rng.random() < 0.2 else 0.2) * rng.random())
                if rng.random() < 0.03:
                    return  # the member leaves, and another member joins later

    def _note(self, session: str, records: Sequence[Record]) -> None:
        polls: dict[int, Poll] = {}
        for record in records:
            poll = polls.get(record.partition)
            if poll is None:
                poll = polls[record.partition] = Poll(
                    session, record.topic, record.partition, self.simulation.now_ms
                )
                self.workload.history.poll(poll)
            assert record.value is not None
            poll.records.append((record.offset, record.value.decode()))
            self._coordination.processed.add((record.topic, record.partition, record.offset))
        if records:
            self.simulation.trace(f"{session} read {len(records)}")


class Watcher(_CoordinatedClient):
    """A member of a group that reads all side topics, which an administrator creates and deletes."""

    async def run(self, client: str) -> None:
        rng = self.rng
        async with Consumer(
            bootstrap_servers=self.workload.bootstrap,
            group_id=WATCHERS,
            group_remote_assignor=("uniform", "range")[rng.randrange(2)],
            rng=self.simulation.rng(client),
            **CONSUMER_SETTINGS,
        ) as consumer:
            consumer.subscribe(pattern=WATCHED)
            while not self.is_over:
                if await consumer.get_many(500, timeout_ms=500):
                    self.simulation.probe("watched")
                await asyncio.sleep(0.5 * rng.random())
                if rng.random() < 0.03:
                    return


class Transformer(_CoordinatedClient):
    """Reads the load's topic and writes one record for each, with its offsets in the same transaction."""

    async def run(self, client: str) -> None:
        workload, rng = self.workload, self.rng
        listener = _Ownership(self._coordination, client)
        consumer = listener.consumer = Consumer(
            workload.keys[0].topic,
            bootstrap_servers=workload.bootstrap,
            group_id=JOBS,
            enable_auto_commit=False,
            isolation_level="read_committed",
            listener=listener,
            rng=self.simulation.rng(f"{client} in"),
            **CONSUMER_SETTINGS,
        )
        producer = Producer(
            workload.bootstrap,
            transactional_id=self.host.name,
            clock=self.host.clock,
            rng=self.simulation.rng(f"{client} out"),
            **PRODUCER_SETTINGS,
        )
        async with producer, consumer:
            while not self.is_over:
                records = await consumer.get_many(50, timeout_ms=300)
                if not records:
                    continue
                async with producer.transaction() as transaction:
                    for record in records:
                        value = f"{record.topic}/{record.partition}/{record.offset}".encode()
                        partition = record.partition % self._coordination.output_partitions
                        producer.send_nowait(OUTPUT, value, partition=partition)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0.3 * rng.random())
                    await transaction.send_offsets(consumer)
                self._coordination.on_decided()
                self.simulation.probe("transformed")
                self.simulation.trace(f"{client} made {len(records)}")
                await asyncio.sleep(0.3 * rng.random())


class Transactor(_CoordinatedClient):
    """Writes transactions of a few values to a few partitions, and commits or aborts them.

    Occasionally a second producer with the same transactional id takes over in the middle. Everything that
    the first one does afterwards must fail.
    """

    number = 0

    async def run(self, client: str) -> None:
        rng = self.rng
        async with self._producer(client) as producer:
            while not self.is_over:
                self.number += 1
                transaction = self._coordination.transactions.begin(client, f"{client}#{self.number}", OPEN)
                await producer.begin_transaction()
                await self._write(producer, transaction)
                chance = rng.random()
                if chance < 0.05:
                    await self._be_replaced(client, producer, transaction)
                    return
                if chance < 0.08:
                    await self._oversleep(producer, transaction)
                    return
                if rng.random() < 0.3:
                    await producer.abort_transaction()
                    transaction.outcome = ABORTED
                else:
                    transaction.outcome = UNKNOWN
                    await producer.commit_transaction()
                    transaction.outcome = COMMITTED
                    self._coordination.on_decided()
                self.simulation.trace(f"{transaction.name} {transaction.outcome}")
                await asyncio.sleep(0.6 * rng.random())

    def _producer(self, client: str) -> Producer:
        return Producer(
            self.workload.bootstrap,
            transactional_id=self.host.name,
            clock=self.host.clock,
            rng=self.simulation.rng(client),
            **PRODUCER_SETTINGS,
        )

    async def _write(self, producer: Producer, transaction: Written) -> None:
        rng = self.rng
        for number in range(1 + rng.randrange(6)):
            value = f"{transaction.name}/{number}"
            self._coordination.transactions.write(transaction, value)
            partition = rng.randrange(self._coordination.ledger_partitions)
            producer.send_nowait(LEDGER, value.encode(), partition=partition)
            if rng.random() < 0.2:
                await asyncio.sleep(0.1 * rng.random())

    async def _be_replaced(self, client: str, producer: Producer, transaction: Written) -> None:
        """Continue after another producer with the transactional id was initialized."""
        async with self._producer(f"{client}'"):
            transaction.is_zombie = True
            if await self._is_refused(producer, transaction):
                self.simulation.probe("zombie-producer-refused")

    async def _oversleep(self, producer: Producer, transaction: Written) -> None:
        """Continue after the transaction has timed out and the coordinator has aborted it."""
        await asyncio.sleep((TRANSACTION_TIMEOUT_MS + 1_000) / 1000)
        if await self._is_refused(producer, transaction):
            self.simulation.probe("timeout-abort")

    async def _is_refused(self, producer: Producer, transaction: Written) -> bool:
        transaction.outcome = UNKNOWN
        try:
            await producer.commit_transaction()
        except (ProducerFencedError, InvalidProducerEpochError):
            transaction.outcome = ABORTED
            return True
        transaction.outcome = COMMITTED
        return False


class BatchTeam(_CoordinatedClient):
    """A driver and its writers, which write the batches of one application as a Spark job does.

    The driver only remembers the number of the next batch. After a crash it requests the last decision.
    """

    async def run(self, client: str) -> None:
        rng = self.rng
        settings: dict[str, Any] = CLIENT_SETTINGS
        group = TransactionGroup(
            APPLICATION, self.workload.bootstrap, rng=self.simulation.rng(client), **settings
        )
        async with group:
            batch_id = await group.last_batch_id() + 1
            while not self.is_over:
                writers = [self._write(client, batch_id, number) for number in range(1 + rng.randrange(3))]
                prepared = await asyncio.gather(*writers)
                winners = [each for each in prepared if each is not None and rng.random() < 0.8]
                for _, written in winners:
                    written.outcome = UNKNOWN
                result = await group.finish(batch_id, [winner for winner, _ in winners])
                for each in prepared:
                    # A delayed request of an earlier driver may already have decided a repeated batch.
                    if each is not None:
                        each[1].outcome = COMMITTED if each[0].writer in result.winners else ABORTED
                self._coordination.on_decided()
                self.simulation.probe("batch-repeated" if result.is_repeated else "batch-decided")
                if rng.random() < 0.2:
                    again = await group.finish(batch_id, [])
                    assert again.is_repeated and again.winners == result.winners, "a batch is decided once"
                batch_id += 1
                await asyncio.sleep(0.8 * rng.random())

    async def _write(self, client: str, batch_id: int, number: int) -> tuple[Any, Written] | None:
        """Run one attempt. Return the prepared result, or None if the batch was already decided or the
        attempt failed.
        """
        member = f"{client}/{batch_id}/{number}"
        written = self._coordination.transactions.begin(client, member, OPEN)
        writer = TransactionGroupWriter(
            APPLICATION,
            batch_id,
            member,
            self.workload.bootstrap,
            clock=self.host.clock,
            rng=self.simulation.rng(member),
            **PRODUCER_SETTINGS,
        )
        try:
            async with writer:
                if writer.is_finished:
                    return None
                for count in range(1 + self.rng.randrange(3)):
                    value = f"{member}/{count}"
                    self._coordination.transactions.write(written, value)
                    partition = self.rng.randrange(self._coordination.ledger_partitions)
                    writer.send_nowait(LEDGER, value.encode(), partition=partition)
                return await writer.prepare(), written
        except BrokerError:
            return None


class CommittedReader(_CoordinatedClient):
    """Reads the output of transactions with read_committed, and occasionally again from the beginning."""

    async def run(self, client: str) -> None:
        coordination, rng = self._coordination, self.rng
        keys = coordination.written
        async with Consumer(
            bootstrap_servers=self.workload.bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="none",
            rng=self.simulation.rng(client),
            **CLIENT_SETTINGS,
            **self.workload.rack_settings(rng),
        ) as consumer:
            consumer.assign(keys)
            for key in keys:
                await consumer.seek(key, 0)
            while not self.is_over:
                for record in await consumer.get_many(100, timeout_ms=500):
                    assert record.value is not None
                    place = (record.topic, record.partition, record.offset)
                    coordination.transactions.read_at(place, record.value.decode())
                    self.simulation.probe("read-committed")
                await asyncio.sleep(0.4 * rng.random())
                if rng.random() < 0.05:
                    return

    def on_error(self, client: str, error: KafkaliteError) -> None:
        if isinstance(error, NoOffsetError):
            self.simulation.violate(Violation("lost-position", f"{client}: {error}"))


def make_clients(coordination: Coordination, workload: Workload) -> list[Client]:
    """Create the clients of each kind that the load requests."""
    load = workload.load
    return [
        *(GroupReader(coordination, f"g{number}") for number in range(1, load.group_readers + 1)),
        *(Transformer(coordination, f"x{number}") for number in range(1, load.transformers + 1)),
        *(Transactor(coordination, f"w{number}") for number in range(1, load.transactors + 1)),
        *(BatchTeam(coordination, f"team{number}") for number in range(1, load.batch_teams + 1)),
        *(Watcher(coordination, f"v{number}") for number in range(1, load.watchers + 1)),
        *(CommittedReader(coordination, f"r{number}") for number in range(1, load.committed_readers + 1)),
    ]
