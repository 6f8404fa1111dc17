"""Quotas from the admin's request to the client's wait, in virtual time (S16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.quotas.quota_manager import MAX_REQUEST_THROTTLE_MS
from kafkalite.client.admin.admin import Admin
from kafkalite.client.cluster.connection import connect
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import (
    ConnectionFailedError,
    ErrorCode,
    InvalidConfigError,
    RequestTimeoutError,
    ThrottlingQuotaExceededError,
)
from kafkalite.metadata.client_quotas import CLIENT_KEYS
from kafkalite.metadata.quota_commands import MAX_QUOTA, MIN_QUOTA
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity, TopicPartition
from kafkalite.protocol.messages import admin as messages
from kafkalite.protocol.messages import data, metadata
from kafkalite.records.builder import build_batch
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.testing.wire import WireClient

ANYONE = QuotaEntity("ANONYMOUS")
KIB = 1024


class Setting:
    """A broker in virtual time, and an Admin that no quota of these tests names."""

    def __init__(self, broker: Broker, admin: Admin, clock: VirtualClock) -> None:
        self.broker = broker
        self.admin = admin
        self.clock = clock
        self.loop = asyncio.get_running_loop()

    async def limit(self, entity: QuotaEntity = ANYONE, **quotas: float | None) -> None:
        await self.admin.alter_client_quotas(entity, quotas)

    def produce(self, wire: WireClient, size_bytes: int, count: int = 1) -> None:
        """Send ``count`` requests with one batch of about ``size_bytes``, without waiting."""
        batch = bytes(build_batch([bytes(size_bytes - 80)], timestamps_ms=self.clock.wall_ms()))
        for _ in range(count):
            part = data.ProducePartition("t", 0, len(batch))
            wire.send(data.ProduceRequest(1, 10_000, None, [part]), batch)


@asynccontextmanager
async def setting(**settings: Any) -> AsyncIterator[Setting]:
    clock = VirtualClock()
    async with (
        Broker(
            listeners="inproc://", log_dirs="/b", filesystem=MemoryFileSystem(), clock=clock, **settings
        ) as broker,
        Admin(broker.bootstrap_servers) as admin,
    ):
        await admin.create_topic("t")
        async with clock.auto_jump():
            yield Setting(broker, admin, clock)


async def test_quotas_are_described_as_they_were_set() -> None:
    async with setting() as here:
        reporters = QuotaEntity(client_id="report")
        await here.limit(producer_byte_rate=1000, request_percentage=12.5)
        await here.limit(reporters, consumer_byte_rate=1e6)
        everything = await here.admin.describe_client_quotas()
        assert everything == {
            ANYONE: {"producer_byte_rate": 1000, "request_percentage": 12.5},
            reporters: {"consumer_byte_rate": 1e6},
        }
        assert await here.admin.describe_client_quotas(reporters) == {reporters: {"consumer_byte_rate": 1e6}}
        assert await here.admin.describe_client_quotas(QuotaEntity("bob")) == {}
        with pytest.raises(InvalidConfigError, match=r"a number from 0\.001"):
            await here.limit(producer_byte_rate=0)


async def test_quotas_survive_a_restart_of_the_broker() -> None:
    disk = MemoryFileSystem()
    async with (
        Broker(listeners="inproc://", log_dirs="/b", filesystem=disk) as broker,
        Admin(broker.bootstrap_servers) as admin,
    ):
        await admin.alter_client_quotas(ANYONE, {"producer_byte_rate": 1000})
    async with Broker(listeners="inproc://", log_dirs="/b", filesystem=disk) as broker:
        async with Admin(broker.bootstrap_servers) as admin:
            assert await admin.describe_client_quotas() == {ANYONE: {"producer_byte_rate": 1000}}
        assert broker._server.quotas is not None


async def test_a_response_above_the_quota_comes_at_once_and_names_the_throttle_time() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=10 * KIB)
        began = here.loop.time()
        here.produce(wire, 30 * KIB)
        response = await wire.response()
        assert here.loop.time() - began < 0.1
        assert response.message.partitions[0].error_code == 0
        assert 1_900 <= response.throttle_ms <= 2_100


async def test_the_broker_reads_no_request_during_the_throttle_time() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=10 * KIB)
        here.produce(wire, 30 * KIB, count=4)
        times: list[float] = []
        began = here.loop.time()
        for _ in range(4):
            await wire.response()
            times.append(round(here.loop.time() - began))
        assert times == [0, 2, 6, 9]
        assert here.broker.statistics().appended_batches == 4


async def test_requests_that_arrive_in_pieces_during_the_throttle_time_are_served_after_it() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=10 * KIB)
        here.produce(wire, 30 * KIB)
        await wire.response()
        frame = wire.encode(metadata.MetadataRequest(None, False))
        for byte in frame:
            wire.send_raw(bytes([byte]))
            await asyncio.sleep(0.01)
        began = here.loop.time()
        await wire.response()
        assert here.loop.time() - began > 1


async def test_another_client_is_served_during_the_throttle_time() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(QuotaEntity(client_id="wire-client"), producer_byte_rate=10 * KIB)
        here.produce(wire, 100 * KIB)
        assert (await wire.response()).throttle_ms > 8_000
        began = here.loop.time()
        await here.admin.list_topics()
        assert here.loop.time() - began < 0.1


@pytest.mark.parametrize("is_behind_a_slow_request", [False, True])
async def test_new_connections_do_not_evade_the_quota(is_behind_a_slow_request: bool) -> None:
    async with setting() as here, WireClient(here.broker.address) as first:
        await here.limit(producer_byte_rate=10 * KIB)
        here.produce(first, 100 * KIB)
        await first.response()
        for _ in range(20):
            async with WireClient(here.broker.address) as wire:
                if is_behind_a_slow_request:
                    wire.send(metadata.DescribeMetadataRequest("/topics", 1 << 40, 100))
                here.produce(wire, 100 * KIB, count=2)
                if is_behind_a_slow_request:
                    await wire.response()
                refused = await wire.response()
                assert refused.message.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert here.broker.statistics().appended_batches == 1


async def test_the_bytes_that_other_connections_fetched_count_on_a_new_one() -> None:
    async with setting() as here, WireClient(here.broker.address) as first:
        here.produce(first, 200 * KIB)
        await first.response()
        await here.limit(consumer_byte_rate=10 * KIB)
        fetch = data.FetchRequest(0, 0, 10**6, 0, [data.FetchPartition("t", 0, -1, 0, 10**6)])
        first.send(fetch)
        assert (await first.response()).throttle_ms > 15_000
        async with WireClient(here.broker.address) as wire:
            wire.send(fetch)
            refused = await wire.response()
            assert refused.message.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
            assert 15_000 < refused.throttle_ms < 25_000
            wire.send(fetch)
            assert (await wire.response()).payload


async def test_new_producers_and_consumers_of_a_client_over_its_quota_wait_and_succeed() -> None:
    async with setting() as here:
        await here.limit(producer_byte_rate=20 * KIB, consumer_byte_rate=20 * KIB)
        servers = here.broker.bootstrap_servers
        began = here.loop.time()
        for number in range(3):
            async with Producer(servers, clock=here.clock) as producer:
                await producer.send("t", bytes([number]) * 200 * KIB)
        assert here.loop.time() - began > 15
        for _ in range(2):
            async with Consumer(
                "t", bootstrap_servers=servers, auto_offset_reset="earliest", clock=here.clock
            ) as consumer:
                records = [await consumer.get_one(timeout_ms=60_000) for _ in range(3)]
                assert [record.value[0] for record in records if record and record.value] == [0, 1, 2]
        assert here.loop.time() - began > 40


async def test_a_producer_far_above_its_quota_is_held_within_a_tenth_of_it() -> None:
    quota = 100 * KIB
    async with (
        setting() as here,
        Producer(here.broker.bootstrap_servers, linger_ms=0, batch_size=8 * KIB) as producer,
    ):
        await here.limit(producer_byte_rate=quota)
        end = here.loop.time() + 30
        before = here.broker.statistics().appended_bytes

        async def flood() -> None:
            while here.loop.time() < end:
                await producer.send("t", bytes(8_000))

        await asyncio.gather(*(flood() for _ in range(8)))
        rate = (here.broker.statistics().appended_bytes - before) / 30
        assert 0.9 * quota <= rate <= 1.1 * quota


async def test_a_consumer_far_above_its_quota_is_held_within_a_tenth_of_it() -> None:
    quota = 100 * KIB
    async with setting() as here:
        async with Producer(here.broker.bootstrap_servers) as producer:
            for _ in range(500):
                await producer.send("t", bytes(10_000))
            await producer.flush()
        await here.limit(consumer_byte_rate=quota)
        async with Consumer(
            bootstrap_servers=here.broker.bootstrap_servers,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=20 * KIB,
        ) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            end, before = here.loop.time() + 30, here.broker.statistics().fetched_bytes
            while here.loop.time() < end:
                await consumer.get_many(timeout_ms=1_000)
            rate = (here.broker.statistics().fetched_bytes - before) / 30
        assert 0.9 * quota <= rate <= 1.1 * quota


async def test_one_response_to_a_fetch_has_at_most_the_bytes_of_a_window() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        here.produce(wire, 10 * KIB, count=50)
        for _ in range(50):
            await wire.response()
        await here.limit(consumer_byte_rate=10 * KIB)
        asked = data.FetchPartition("t", 0, -1, 0, 2**20)
        wire.send(data.FetchRequest(0, 2**19, 2**20, 0, [asked]))
        response = await wire.response()
        assert 90 * KIB < len(response.payload) <= 100 * KIB
        assert response.throttle_ms <= 11_000


@pytest.mark.parametrize("bound", [MIN_QUOTA, MAX_QUOTA])
async def test_a_broker_serves_clients_with_the_least_and_the_largest_quotas(bound: float) -> None:
    """Every throttle time, and the limit of a response, fits in its field."""
    async with setting() as here:
        await here.limit(QuotaEntity(ip="10.0.0.7"), connection_creation_rate=bound)
        await here.limit(**dict.fromkeys(CLIENT_KEYS, bound))
        quotas = here.broker._server.quotas
        assert quotas is not None
        waits = [quotas.admit_connection("10.0.0.7", 0) for _ in range(3)]
        assert all(0 <= wait_ms < 2**63 for wait_ms in waits)
        async with WireClient(here.broker.address) as wire:
            here.produce(wire, 500 * KIB)
            response = await wire.response()
            assert response.message.partitions[0].error_code == 0
            assert (response.throttle_ms > 1_000_000_000) == (bound == MIN_QUOTA)
        async with WireClient(here.broker.address) as wire:
            part = data.FetchPartition("t", 0, -1, 0, 2**20)
            fetched = await wire.call(data.FetchRequest(0, 1, 2**20, 0, [part]))
            assert fetched.partitions[0].error_code == 0
            assert len(wire.last_payload) > 500 * KIB


#: Each reading of the clock moves it by this much, so a request uses that much time or a little more.
READING_NS = 10_000_000


async def test_request_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(request_percentage=10)
        monkeypatch.setattr(here.clock, "monotonic_ns", partial(next, count(READING_NS, READING_NS)))
        throttle_ms = [0]
        for _ in range(20):
            wire.send(metadata.MetadataRequest(None, False))
            throttle_ms.append((await wire.response()).throttle_ms)
        assert 0 < max(throttle_ms) <= MAX_REQUEST_THROTTLE_MS


async def test_the_time_of_requests_that_waited_for_the_end_of_a_throttle_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are served when it ends, not when they are received."""
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(request_percentage=10)
        charged: list[int] = []
        quotas = here.broker._server.quotas
        assert quotas is not None
        charge = quotas.charge

        def note(*who: Any, busy_ns: int = 0, **costs: int) -> int:
            charged.append(busy_ns)
            return charge(*who, busy_ns=busy_ns, **costs)

        monkeypatch.setattr(quotas, "charge", note)
        monkeypatch.setattr(here.clock, "monotonic_ns", partial(next, count(READING_NS, READING_NS)))
        for _ in range(20):
            wire.send(metadata.MetadataRequest(None, False))
        assert max([(await wire.response()).throttle_ms for _ in range(20)]) > 0
        assert len(charged) == 20
        assert min(charged) >= READING_NS


async def test_changes_of_the_metadata_beyond_the_quota_are_refused_until_they_are_paid_for() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(QuotaEntity(client_id="wire-client"), controller_mutation_rate=1)

        def create(name: str, partitions: int) -> messages.CreateTopicsRequest:
            return messages.CreateTopicsRequest(10_000, False, [messages.NewTopic(name, partitions, 1, {})])

        assert (await wire.call(create("a", 13))).topics[0].error_code == 0
        wire.send(create("b", 1))
        refused = await wire.response()
        assert refused.message.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert 1_500 < refused.throttle_ms <= 2_000
        began = here.loop.time()
        assert (await wire.call(create("b", 1))).topics[0].error_code == 0
        assert here.loop.time() - began > 1.5
        refused = await wire.call(messages.DeleteTopicsRequest(10_000, ["a"]))
        assert refused.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED


async def test_a_request_that_is_refused_anyway_counts_as_the_largest_that_is_not() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(QuotaEntity(client_id="wire-client"), controller_mutation_rate=1_000)
        huge = messages.CreateTopicsRequest(10_000, False, [messages.NewTopic("a", 2**31 - 1, 1, {})] * 9)
        await wire.call(huge)
        await wire.call(huge)
        wire.send(messages.CreateTopicsRequest(10_000, False, [messages.NewTopic("b", 1, 1, {})]))
        assert (await wire.response()).throttle_ms <= 10_000


async def test_an_admin_waits_and_repeats_what_its_quota_refused() -> None:
    async with setting() as here:
        await here.limit(controller_mutation_rate=1)
        await here.admin.create_topic("a", partitions=15)
        began = here.loop.time()
        await here.admin.create_topic("b", partitions=1)
        assert 3.5 < here.loop.time() - began < 6
        await here.admin.create_partitions("b", 12)
        began = here.loop.time()
        await here.admin.delete_topics(["a"])
        assert here.loop.time() - began > 5


async def test_a_wait_beyond_the_timeout_is_an_error_that_names_the_quota() -> None:
    async with setting() as here:
        await here.limit(controller_mutation_rate=1)
        async with Admin(here.broker.bootstrap_servers, default_api_timeout_ms=2_000) as admin:
            await admin.create_topic("a", partitions=100)
            with pytest.raises((RequestTimeoutError, ThrottlingQuotaExceededError), match=r"quota|_rate"):
                await admin.create_topic("b")


async def test_a_metadata_request_creates_no_topic_beyond_the_quota() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(QuotaEntity(client_id="wire-client"), controller_mutation_rate=1)
        topics = [messages.NewTopic("a", 20, 1, {})]
        await wire.call(messages.CreateTopicsRequest(10_000, False, topics))
        (topic,) = (await wire.call(metadata.MetadataRequest(["b"], True))).topics
        assert topic.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert "b" not in here.broker.image.topics


async def test_a_removed_quota_no_longer_throttles() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=10 * KIB)
        await here.limit(producer_byte_rate=None)
        here.produce(wire, 500 * KIB)
        assert (await wire.response()).throttle_ms == 0
        assert here.broker._server.quotas is None


async def test_a_stopping_broker_does_not_wait_for_throttled_clients() -> None:
    async with setting() as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=10 * KIB)
        here.produce(wire, 1000 * KIB)
        assert (await wire.response()).throttle_ms > 60_000
        began = here.loop.time()
        await here.broker.stop()
        assert here.loop.time() - began < 4


async def test_a_connection_that_is_throttled_for_long_is_closed_when_nothing_moves() -> None:
    """The broker does not read from it, so it does not notice that the client is gone."""
    async with setting(connections_max_idle_ms=10_000) as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=1)
        here.produce(wire, 60 * KIB)
        assert (await wire.response()).throttle_ms > 50_000_000
        await asyncio.sleep(50)
        assert wire.is_closed


async def test_a_throttled_connection_is_not_idle() -> None:
    async with setting(connections_max_idle_ms=10_000) as here, WireClient(here.broker.address) as wire:
        await here.limit(producer_byte_rate=KIB)
        here.produce(wire, 60 * KIB)
        await wire.response()
        await asyncio.sleep(50)
        assert not wire.is_closed


async def test_a_client_sends_nothing_during_the_throttle_time_and_its_requests_do_not_time_out() -> None:
    async with setting() as here:
        await here.limit(producer_byte_rate=KIB)
        connection = await connect(here.broker.address, client_id="c", timeout_ms=5_000)
        batch = bytes(build_batch([bytes(20 * KIB)], timestamps_ms=here.clock.wall_ms()))
        produce = data.ProduceRequest(1, 1_000, None, [data.ProducePartition("t", 0, len(batch))])
        first = asyncio.ensure_future(connection.call(produce, timeout_ms=1_000, payload_parts=[batch]))
        second = asyncio.ensure_future(
            connection.call(metadata.MetadataRequest(None, False), timeout_ms=1_000)
        )
        await first
        assert not connection.can_write
        with pytest.raises(RequestTimeoutError, match="quota"):
            await connection.call(metadata.MetadataRequest(None, False), timeout_ms=1_000)
        began = here.loop.time()
        third = connection.call(metadata.MetadataRequest(None, False), timeout_ms=60_000)
        await asyncio.gather(second, third)
        assert here.loop.time() - began > 15
        assert connection.can_write
        connection.close()


async def test_closing_a_throttled_connection_fails_the_requests_that_wait() -> None:
    async with setting() as here:
        await here.limit(producer_byte_rate=KIB)
        connection = await connect(here.broker.address, client_id="c", timeout_ms=5_000)
        batch = bytes(build_batch([bytes(20 * KIB)], timestamps_ms=here.clock.wall_ms()))
        produce = data.ProduceRequest(1, 1_000, None, [data.ProducePartition("t", 0, len(batch))])
        await connection.call(produce, timeout_ms=1_000, payload_parts=[batch])
        waiting = asyncio.ensure_future(
            connection.call(metadata.MetadataRequest(None, False), timeout_ms=60_000)
        )
        await asyncio.sleep(1)
        connection.give_up()
        with pytest.raises(ConnectionFailedError):
            await waiting


async def test_connections_beyond_the_rate_of_their_address_are_closed() -> None:
    async with Broker(listeners="127.0.0.1:0") as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.alter_client_quotas(QuotaEntity(ip=DEFAULT_ENTITY), {"connection_creation_rate": 0.5})
        held = []
        for _ in range(6):
            held.append(await connect(broker.address, client_id="c", timeout_ms=10_000))
        with pytest.raises(ConnectionFailedError):
            await connect(broker.address, client_id="c", timeout_ms=10_000)
        assert broker.statistics().connections_refused == 1
        await admin.list_topics()
        for connection in held:
            connection.close()
