"""The clients of a run: producers, consumers and a final reader. Each records what it receives.

They are the product's own Producer, Consumer and Admin, on separate hosts, where they may be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.delivery import Delivery
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import BrokerError, BufferFullError, KafkaliteError, NoOffsetError, RecordTooLargeError
from kafkalite.model import LATEST, Record, TopicPartition
from kafkalite.rng import Rng
from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.histories.history import History, Poll, Send

#: Short timeouts, for runs that take seconds of virtual time.
CLIENT_SETTINGS: Final[dict[str, Any]] = {
    "request_timeout_ms": 2_000,
    "default_api_timeout_ms": 8_000,
    "socket_connection_setup_timeout_ms": 1_000,
    "retry_backoff_ms": 50,
    "retry_backoff_max_ms": 500,
    "reconnect_backoff_ms": 20,
    "reconnect_backoff_max_ms": 300,
    "metadata_max_age_ms": 5_000,
}
#: Topics that are created and deleted have names with this prefix. They have no records.
SIDE_TOPIC: Final = "side-"
DELIVERY_TIMEOUT_MS: Final = 6_000
RESTART_S: Final = 0.3


@dataclass
class Load:
    """The number and kinds of clients, drawn from the seed."""

    producers: int = 2
    consumers: int = 2
    pause_s: float = 0.08  #: mean time between two bursts of a producer
    burst: int = 4  #: maximum number of records in a burst
    value_bytes: int = 40
    deletes_records: bool = False  #: whether an administrator occasionally deletes records
    changes_min_isr: bool = False  #: whether an administrator sets min.insync.replicas to 1 and to 2
    group_readers: int = 0  #: members of one consumer group
    transformers: int = 0  #: exactly-once jobs: each consumes, produces and commits in one transaction
    transactors: int = 0  #: producers of transactions, some of which are fenced
    batch_teams: int = 0  #: drivers of transaction groups with their writers
    watchers: int = 0  #: members of a group that reads topics which are created and deleted
    committed_readers: int = 0  #: read_committed readers of the output of all these
    producer_settings: dict[str, Any] = field(default_factory=dict)
    consumer_settings: dict[str, Any] = field(default_factory=dict)
    racks: tuple[str, ...] = ()  #: of the brokers, one of which each consumer is in (KIP-392); empty: none


class Client:
    """A program on its own host, which is restarted when it was killed or has failed."""

    def __init__(self, workload: Workload, name: str) -> None:
        self.workload = workload
        self.simulation = workload.simulation
        self.host: Host = self.simulation.host(name)
        self.rng = self.simulation.rng(f"client {name}")
        self.run_count = 0
        self.is_done = False

    def start(self) -> None:
        self.host.kill()
        self.run_count += 1
        self.host.run(self._main(f"{self.host.name}.{self.run_count}"))

    def crash(self) -> None:
        """Kill the program. Another one is started."""
        self.simulation.note(f"crash {self.host}")
        self.start()

    async def _main(self, client: str) -> None:
        while not self.is_over:
            try:
                await self.run(client)
            except KafkaliteError as error:
                self.simulation.note(f"{client} failed: {error!r}")
                self.on_error(client, error)
                await asyncio.sleep(RESTART_S)
                self.run_count += 1
                client = f"{self.host.name}.{self.run_count}"
        self.is_done = True

    @property
    def is_over(self) -> bool:
        return self.workload.is_over

    def on_error(self, client: str, error: KafkaliteError) -> None:
        """Record an error from which a client could not recover, mostly a timeout."""

    async def run(self, client: str) -> None:
        raise NotImplementedError


class ProducerClient(Client):
    """Sends bursts of unique values to random partitions."""

    number = 0

    async def run(self, client: str) -> None:
        workload, load, rng = self.workload, self.workload.load, self.rng
        settings = CLIENT_SETTINGS | {"delivery_timeout_ms": DELIVERY_TIMEOUT_MS} | load.producer_settings
        async with Producer(
            workload.bootstrap, clock=self.host.clock, rng=self.simulation.rng(client), **settings
        ) as producer:
            while not self.is_over:
                for _ in range(1 + rng.randrange(load.burst)):
                    self._send(producer, client, workload.keys[rng.randrange(len(workload.keys))])
                await asyncio.sleep(load.pause_s * 2 * rng.random())

    def _send(self, producer: Producer, client: str, key: TopicPartition) -> None:
        workload = self.workload
        self.number += 1
        number = self.number
        value = f"{client}/{key.partition}/{number}/".ljust(workload.load.value_bytes, "x")
        send = Send(client, *key, value, number, self.simulation.now_ms)
        send.acks = int(producer.config.acks)
        send.is_idempotent = workload.is_idempotent(producer)
        try:
            delivery = producer.send_nowait(key.topic, value.encode(), partition=key.partition)
        except (BufferFullError, RecordTooLargeError):
            return
        workload.history.send(send)
        delivery.add_callback(lambda done: self._on_delivery(send, done))

    def _on_delivery(self, send: Send, delivery: Delivery) -> None:
        history, now_ms = self.workload.history, self.simulation.now_ms
        error = delivery.exception()
        if error is None:
            offset = delivery.result().offset
            history.ok(send, offset if offset >= 0 else None, now_ms)
            self.workload.on_ok(send)
        else:
            history.info(send, repr(error), now_ms)
        self.simulation.trace(f"{send.value.rstrip('x')} {send.outcome} {send.offset}")


class ConsumerClient(Client):
    """Reads every partition from the beginning, and occasionally again from a random offset."""

    async def run(self, client: str) -> None:
        workload, rng = self.workload, self.rng
        settings = CLIENT_SETTINGS | {"auto_offset_reset": "none"} | workload.load.consumer_settings
        settings |= workload.rack_settings(rng)
        async with Consumer(
            bootstrap_servers=workload.bootstrap, rng=self.simulation.rng(client), **settings
        ) as consumer:
            consumer.assign(workload.keys)
            starts = await consumer.beginning_offsets(workload.keys) if workload.load.deletes_records else {}
            for key in workload.keys:
                await consumer.seek(key, starts.get(key, 0))
            session = 0
            while not self.is_over:
                records = await consumer.get_many(timeout_ms=500)
                self._note(f"{client}-{session}", records)
                if records and consumer._fetcher.assigned.near_nodes():
                    self.simulation.probe("near-read")
                if rng.random() < 0.02:
                    session += 1
                    for key in workload.keys:
                        await consumer.seek(key, rng.randrange((consumer.position(key) or 0) + 1))
                if rng.random() < 0.3:
                    await asyncio.sleep(0.3 * rng.random())

    def _note(self, session: str, records: Sequence[Record]) -> None:
        polls: dict[int, Poll] = {}
        now_ms = self.simulation.now_ms
        for record in records:
            poll = polls.get(record.partition)
            if poll is None:
                poll = polls[record.partition] = Poll(session, record.topic, record.partition, now_ms)
                self.workload.history.poll(poll)
            assert record.value is not None
            poll.records.append((record.offset, record.value.decode()))
        if records:
            self.simulation.trace(f"{session} read {len(records)}")

    def on_error(self, client: str, error: KafkaliteError) -> None:
        if isinstance(error, NoOffsetError) and not self.workload.load.deletes_records:
            self.simulation.violate(Violation("lost-position", f"{client}: {error}"))


class AdministratorClient(Client):
    """Creates, changes and deletes its own topics, and describes everything."""

    def __init__(
        self, workload: Workload, name: str, pause_s: float, replication_factor: int, node_ids: Sequence[int]
    ) -> None:
        super().__init__(workload, name)
        self._node_ids = node_ids
        self._has_spare = len(node_ids) > 3
        self._pause_s = pause_s
        self._replication_factor = replication_factor

    async def run(self, client: str) -> None:
        workload, rng = self.workload, self.rng
        rng_of_client = self.simulation.rng(client)
        async with Admin(workload.bootstrap, rng=rng_of_client, **CLIENT_SETTINGS) as admin:
            while not self.is_over:
                await asyncio.sleep(self._pause_s * 2 * rng.random())
                try:
                    choices = 14 if self._has_spare else 8  # with a spare broker, half of them are moves
                    await self._act(admin, f"{SIDE_TOPIC}{rng.randrange(3)}", rng.randrange(choices))
                except BrokerError as error:
                    self.simulation.trace(f"{client} {type(error).__name__}")

    async def _act(self, admin: Admin, topic: str, choice: int) -> None:
        simulation, rng = self.simulation, self.rng
        if choice == 0:
            await admin.create_topic(
                topic, partitions=1 + rng.randrange(4), replication_factor=self._replication_factor
            )
            simulation.probe("topic-created")
        elif choice == 1:
            await admin.delete_topics([topic])
            simulation.probe("topic-deleted")
        elif choice == 2:
            await admin.describe_topics([self.workload.keys[0].topic])
        elif choice == 3:
            await admin.describe_cluster()
        elif choice == 4 and self._replication_factor > 1:
            await admin.elect_leaders([*self.workload.keys, *self.workload.coordinator_keys])
            simulation.probe("leaders-elected")
        elif choice == 5 and self.workload.load.deletes_records:
            key = self.workload.keys[rng.randrange(len(self.workload.keys))]
            found = (await admin.list_offsets([key], LATEST))[key]
            end = found.offset if found is not None else 0
            await admin.delete_records({key: rng.randrange(end + 1)})
            simulation.probe("records-deleted")
        elif choice == 6 and self.workload.load.changes_min_isr:
            minimum = str(1 + rng.randrange(2))
            await admin.alter_configs("topic", self.workload.keys[0].topic, {"min.insync.replicas": minimum})
            simulation.probe("min-isr-changed")
        elif choice >= 7 and self._replication_factor > 1 and not self.workload.load.changes_min_isr:
            await self._reassign(admin)
        else:
            await admin.list_topics()

    async def _reassign(self, admin: Admin) -> None:
        """Give a partition two or three other replicas, or cancel that. A replica that was removed returns
        later (R61, R62).

        If there are more brokers than replicas, one of the topics that come and go may move, too (R63).
        """
        rng = self.rng
        keys = list(self.workload.keys)
        target = list(self._node_ids)
        if self._has_spare:
            names = sorted(one.name for one in await admin.list_topics() if one.name.startswith(SIDE_TOPIC))
            keys += [TopicPartition(name, 0) for name in names]
        key = keys[rng.randrange(len(keys))]
        rng.shuffle(target)
        count = rng.randrange(4)
        await admin.alter_partition_reassignments(
            {key: target[: max(count, 2)] if count else None}, allow_replication_factor_change=True
        )
        self.simulation.probe("reassigned")
        if count and self._has_spare:
            self.simulation.probe("reassigned-among-four")


class Workload:
    """All clients of a run and the history that they record."""

    def __init__(
        self, simulation: Simulation, bootstrap: Sequence[str], keys: Sequence[TopicPartition], load: Load
    ) -> None:
        self.simulation = simulation
        self.bootstrap = list(bootstrap)
        self.keys = list(keys)
        self.load = load
        self.history = History()
        self.is_over = False
        self.on_ok: Callable[[Send], None] = lambda send: None
        self.others: list[Client] = []
        self.coordinator_keys: list[TopicPartition] = []  #: of internal topics, once they exist
        self.producers = [ProducerClient(self, f"p{number}") for number in range(1, load.producers + 1)]
        self.consumers = [ConsumerClient(self, f"c{number}") for number in range(1, load.consumers + 1)]

    @property
    def clients(self) -> list[Client]:
        return [*self.producers, *self.consumers, *self.others]

    def rack_settings(self, rng: Rng) -> dict[str, Any]:
        """Return the setting that puts a consumer into the rack of a broker, if the brokers have racks."""
        racks = self.load.racks
        return {"client_rack": racks[rng.randrange(len(racks))]} if racks else {}

    def add_administrator(
        self, pause_s: float, replication_factor: int, node_ids: Sequence[int] = (1, 2, 3)
    ) -> None:
        """Add an administrator of the topics, who moves partitions between the brokers ``node_ids``."""
        self.others.append(AdministratorClient(self, "a1", pause_s, replication_factor, node_ids))

    @staticmethod
    def is_idempotent(producer: Producer) -> bool:
        return bool(getattr(producer.config, "enable_idempotence", False))

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def create_topics(self, replication_factor: int, configs: dict[str, str]) -> None:
        """Create the topics, with retries. Runs on the client host that calls it."""
        topics: dict[str, int] = {}
        for topic, _ in self.keys:
            topics[topic] = topics.get(topic, 0) + 1
        settings = CLIENT_SETTINGS | {"default_api_timeout_ms": 20_000}
        async with Admin(self.bootstrap, rng=self.simulation.rng("admin"), **settings) as admin:
            for topic, partitions in topics.items():
                await admin.create_topic(
                    topic, partitions=partitions, replication_factor=replication_factor, configs=configs
                )

    async def probe(self) -> None:
        """Produce one record to every partition. Raises KafkaliteError."""
        settings = CLIENT_SETTINGS | {"delivery_timeout_ms": DELIVERY_TIMEOUT_MS}
        async with Producer(
            self.bootstrap,
            clock=self.simulation.host("admin").clock,
            rng=self.simulation.rng("probe"),
            **settings,
        ) as producer:
            for key in self.keys:
                value = f"probe/{key.partition}"
                send = self.history.send(Send("probe", *key, value, key.partition, self.simulation.now_ms))
                send.is_idempotent = self.is_idempotent(producer)
                done = await producer.send(key.topic, value.encode(), partition=key.partition)
                self.history.ok(send, done.offset, self.simulation.now_ms)

    async def read_everything(self) -> None:
        """Read every partition from its first record to its end."""
        async with Consumer(
            bootstrap_servers=self.bootstrap,
            rng=self.simulation.rng("final reader"),
            auto_offset_reset="none",
            **CLIENT_SETTINGS,
        ) as consumer:
            consumer.assign(self.keys)
            ends = await consumer.end_offsets(self.keys)
            records: dict[TopicPartition, list[tuple[int, str]]] = {key: [] for key in self.keys}
            starts = await consumer.beginning_offsets(self.keys)
            for key in self.keys:
                if starts[key] > 0 and not self.load.deletes_records:
                    raise Violation("final-read", f"{key} begins at {starts[key]}: no records were deleted")
                await consumer.seek(key, starts[key])
            while any((consumer.position(key) or 0) < ends[key] for key in self.keys):
                batch = await consumer.get_many(timeout_ms=5_000)
                if not batch:
                    raise Violation("final-read", f"nothing came for 5 s, of {ends}", kind="liveness")
                for record in batch:
                    assert record.value is not None
                    key = TopicPartition(record.topic, record.partition)
                    records[key].append((record.offset, record.value.decode()))
        for key in self.keys:
            self.history.read_finally(key, records[key], start=starts[key])
