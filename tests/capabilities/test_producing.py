"""Capabilities B: the producer, each shown end to end against an embedded broker."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections import Counter, defaultdict

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, ProducerRecord, TopicPartition, simulate
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.clock import Clock
from kafkalite.errors import ConfigError, ErrorCode, KafkaliteError
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages import data
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.records.builder import build_batch
from kafkalite.records.header import CRC_POSITION
from kafkalite.rng import seeded_rng
from kafkalite.testing import SimulatedCluster
from kafkalite.testing.cluster import Cluster
from kafkalite.testing.faults import Fault, Proceed, delay_next, disconnect_next, fail_next
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually, settle

T0 = TopicPartition("t", 0)


async def _read(servers: str, count: int, *topics: str) -> list:
    async with Consumer(*topics, bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
        records: list = []
        while len(records) < count:
            got = await consumer.get_many(count - len(records), timeout_ms=10_000)
            assert got, f"only {len(records)} of {count} records came"
            records += got
        return records


async def _spread(partitioner: object | None, sends: list[tuple], partitions: int = 3) -> list:
    settings = {} if partitioner is None else {"partitioner": partitioner}
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=partitions)
        async with Producer(broker.bootstrap_servers, **settings, batch_size=300) as producer:
            for key, value in sends:
                producer.send_nowait("t", value, key=key)
            await producer.flush()
        return await _read(broker.bootstrap_servers, len(sends), "t")


async def test_records_without_a_key_spread_evenly() -> None:
    """B2: round-robin by batch, without a setting."""
    counts = Counter(r.partition for r in await _spread(None, [(None, b"x" * 10)] * 9000))
    assert set(counts) == {0, 1, 2}
    assert max(counts.values()) - min(counts.values()) <= 30, "at most one batch of 300 bytes apart"


@pytest.mark.parametrize("partition_count", [2, 3, 4, 7])
async def test_full_batches_and_remnants_are_spread_evenly(partition_count: int) -> None:
    """B2: each chunk of lines is one full batch and a remnant, as ``kl produce`` sends them."""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=partition_count)
        async with Producer(broker.bootstrap_servers) as producer:
            for _ in range(200):
                for size in (90, 10):
                    await producer.send_many("t", [b"x" * 100] * size)
        ends = await admin.list_offsets([TopicPartition("t", n) for n in range(partition_count)], "latest")
        counts = [entry.offset for entry in ends.values()]
        assert sum(counts) == 20_000
        assert max(counts) <= min(counts) * 1.05


async def test_a_key_has_one_partition_for_ever() -> None:
    """B3: the same in another process, and the same as Kafka's (murmur2)."""
    keys = [b"key-%d" % i for i in range(1000)]
    placed: dict = defaultdict(set)
    for record in await _spread("roundrobin", [(key, b"x") for key in keys * 10], partitions=7):
        placed[record.key].add(record.partition)
    assert len(placed) == 1000
    assert {len(partitions) for partitions in placed.values()} == {1}
    code = (
        "from kafkalite.records.partitioners import partition_for_key\n"
        "print([partition_for_key(b'key-%d' % i, 7) for i in range(1000)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str([placed[key].pop() for key in keys])


@pytest.mark.parametrize("partitioner", ["random", "sticky", "hash"])
async def test_other_partitioners_reach_every_partition(partitioner: str) -> None:
    """B4"""
    sends = [(b"%d" % i if partitioner == "hash" else None, b"x" * 20) for i in range(3000)]
    records = await _spread(partitioner, sends)
    counts = Counter(record.partition for record in records)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 500, "none of them is nearly empty"


async def test_a_rule_of_the_business_chooses_the_partition() -> None:
    """B5: the donut shop's countries."""
    countries = {b"CA": 0, b"US": 1, b"MX": 2}

    def by_country(topic: str, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        return countries[key or b"US"]

    records = await _spread(by_country, [(key, b"donut") for key in list(countries) * 20])
    assert all(record.partition == countries[record.key] for record in records)


async def test_an_explicit_partition_is_kept_and_checked() -> None:
    """B6"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=3)
        async with Producer(broker.bootstrap_servers) as producer:
            assert (await producer.send("t", b"x", partition=2)).partition == 2
            for wrong in (3, -1):
                with pytest.raises(KafkaliteError, match="partition"):
                    await producer.send("t", b"x", partition=wrong)


async def test_send_nowait_returns_at_once_and_tells_the_offset_later() -> None:
    """B8, B9: 200 calls send nothing and take less than 20 µs each; the callback is called exactly once, also
    for a failure."""
    async with Broker() as broker, Producer(broker.bootstrap_servers, linger_ms=20) as producer:
        await producer.send("t", b"warm")
        called: list = []
        before = broker.statistics().requests["PRODUCE"]
        start_s = time.process_time()
        others = [producer.send_nowait("u", b"x") for _ in range(200)]
        assert time.process_time() - start_s < 0.02
        delivery = producer.send_nowait("t", b"x")
        delivery.add_callback(called.append)
        assert broker.statistics().requests["PRODUCE"] == before
        assert not delivery.done()
        assert not any(other.done() for other in others)
        metadata = await delivery
        await asyncio.sleep(0)
        assert (metadata.topic, metadata.offset) == ("t", 1)
        assert called == [delivery]
        assert delivery.result() == metadata
        await asyncio.gather(*others)
        failures: list = []
        refused = producer.send_nowait("bad name!", b"x")
        refused.add_callback(failures.append)
        with pytest.raises(KafkaliteError):
            await refused
        await asyncio.sleep(0)
        assert failures == [refused]
        assert isinstance(refused.exception(), KafkaliteError)


async def test_send_returns_when_the_record_can_be_read() -> None:
    """B10: not when the leader has it, but when the followers have it too, so that consumers receive it."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t")
        leader = cluster.brokers[cluster.leader("t")]
        partition = leader.partitions.leader("t", 0)
        async with cluster.producer(linger_ms=0) as producer, cluster.consumer() as consumer:
            consumer.assign([T0])
            await producer.send("t", b"0", partition=0)
            cluster.intercept(ApiKey.REPLICA_FETCH, delay_next(None, delay_ms=500))
            sending = asyncio.ensure_future(producer.send("t", b"1", partition=0))
            await eventually(lambda: partition.log.log_end_offset == 2)
            await settle()
            assert not sending.done()
            assert (await consumer.end_offsets([T0]))[T0] == 1, "consumers do not receive it yet"
            assert (await sending).offset == 1
            assert (await consumer.end_offsets([T0]))[T0] == 2


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compression_shrinks_what_is_sent_and_stored(codec: str) -> None:
    """B12: the broker stores and serves the bytes as they came; codecs may be mixed in a partition."""
    sent: list[bytes] = []

    def record(request: Request, _client: Client) -> None:
        if request.api_key == ApiKey.PRODUCE:
            sent.append(bytes(request.payload))

    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=1)
        broker.intercept(record)
        for compression in (None, codec):
            async with Producer(broker.bootstrap_servers, compression_type=compression) as producer:
                await producer.send_many("t", [b"the same words again and again"] * 1000)
        plain, packed = sent
        assert len(packed) < len(plain) / 3
        assert sum(p.size_bytes for p in await admin.describe_log_dirs(["t"])) == len(plain) + len(packed)
        async with WireClient(broker.address) as wire:
            asked = data.FetchPartition("t", 0, -1, 1000, 2**20)
            await wire.call(data.FetchRequest(0, 1, 2**20, 0, [asked]))
            assert wire.last_payload[CRC_POSITION:] == packed[CRC_POSITION:], (
                "checksum, and all that it covers"
            )
        assert len(await _read(broker.bootstrap_servers, 2000, "t")) == 2000


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_acks(acks: object) -> None:
    """B13 on one broker: acks=0 tells no offset; every record arrives."""
    async with Broker() as broker, Producer(broker.bootstrap_servers, acks=acks) as producer:
        metadata = await producer.send("t", b"x")
        assert metadata.offset == (-1 if acks == 0 else 0)
        assert len(await _read(broker.bootstrap_servers, 1, "t")) == 1


async def test_acks_0_over_tcp_neither_stalls_nor_loses_the_end() -> None:
    """B13: responses make room for the batches that wait, and close() waits until the last one is sent."""
    async with Broker(listeners="127.0.0.1:0") as broker:
        async with asyncio.timeout(20):
            async with Producer(broker.address, acks=0) as producer:
                for _ in range(10):
                    await producer.send_many("t", [b"x" * 100] * 10_000)
            async with Producer(broker.address, acks=0, batch_size=1000) as producer:
                for _ in range(50_000):
                    producer.send_nowait("u", b"x" * 100, partition=0)
        async with Admin(broker.bootstrap_servers) as admin:
            ends = await admin.list_offsets([TopicPartition("t", 0), TopicPartition("u", 0)], "latest")
        assert [entry.offset for entry in ends.values()] == [100_000, 50_000]


async def test_kafkas_property_names_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """B19: as a dict, as keywords and in the environment; a misspelt name is refused in each."""
    async with Broker() as broker:
        dotted = {
            "bootstrap.servers": broker.bootstrap_servers,
            "linger.ms": 0,
            "acks": "1",
            "compression.type": "gzip",
        }
        keywords = {name.replace(".", "_"): value for name, value in dotted.items()}
        variables = {f"KAFKALITE_CLIENT_{name.upper()}": str(value) for name, value in keywords.items()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        producers = [
            Producer(**dotted),
            Producer(**keywords),
            Producer(config=dotted),
            Producer(config="environment"),
        ]
        for number, producer in enumerate(producers):
            assert producer.config == producers[0].config != Producer().config
            async with producer:
                sent = await producer.send(ProducerRecord("t", b"value", b"key", partition=0))
                assert sent.offset == number
        assert Producer(**{"request.required.acks": "1"}).config.acks == 1
        for wrong in ({"linger_mss": 1}, {"config": {"linger.mss": 1}}):
            with pytest.raises(ConfigError, match=r"linger\.ms"):
                Producer(**wrong)
        monkeypatch.setenv("KAFKALITE_CLIENT_LINGER_MSS", "1")
        with pytest.raises(ConfigError, match="KAFKALITE_CLIENT_LINGER_MS"):
            Producer(config="environment")


async def test_added_partitions_move_few_keys() -> None:
    """B22: only to the added partitions, and not many more than their share."""
    keys = [b"key-%d" % i for i in range(2000)]
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:

        async def placed() -> dict[bytes, int]:
            async with Producer(broker.bootstrap_servers, partitioner="ring") as producer:
                deliveries = [producer.send_nowait("t", b"x", key=key) for key in keys]
                return {key: (await sent).partition for key, sent in zip(keys, deliveries, strict=True)}

        await admin.create_topic("t", partitions=8)
        before = await placed()
        await admin.create_partitions("t", 10)
        after = await placed()
        moved = [key for key in keys if before[key] != after[key]]
        assert {after[key] for key in moved} == {8, 9}
        assert len(moved) < len(keys) * 2 / 10 * 1.5
        assert min(Counter(after.values()).values()) > 100


@simulate(seeds=1)
async def test_a_random_partition_is_kept_for_a_time(cluster: SimulatedCluster) -> None:
    """B23: for partitioner.switch.ms, here in virtual time; then another one is taken at random."""
    async with Admin(cluster.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=4)
    settings: dict = {"partitioner": "timed", "partitioner_switch_ms": 1000, "linger_ms": 0}
    async with Producer(cluster.bootstrap_servers, rng=seeded_rng(3), **settings) as producer:
        chosen: list[tuple[float, int]] = []
        for _ in range(400):
            sent_s = asyncio.get_running_loop().time()
            chosen.append((sent_s, (await producer.send("t", b"x")).partition))
            await asyncio.sleep(0.05)
    starts_s = [next(run)[0] for _, run in itertools.groupby(chosen, lambda each: each[1])]
    kept_s = sorted(end - start for start, end in itertools.pairwise(starts_s))
    assert {partition for _, partition in chosen} == {0, 1, 2, 3}
    assert kept_s[0] >= 0.999
    assert kept_s[len(kept_s) // 2] <= 1.2, "only faults of the seed delay a switch"


async def test_a_record_object_names_topic_key_and_value() -> None:
    """B19"""
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=3)
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send(ProducerRecord("t", b"v", b"k", 2, 5, [("h", b"1")]))
        (record,) = await _read(broker.bootstrap_servers, 1, "t")
    assert (record.topic, record.partition, record.key, record.value) == ("t", 2, b"k", b"v")
    assert (record.timestamp_ms, record.headers) == (5, (("h", b"1"),))


async def test_any_broker_names_the_live_brokers_and_the_leaders() -> None:
    """B15: also after one of them has failed."""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=6, configs={"min.insync.replicas": "2"})
        for is_one_dead in (False, True):
            if is_one_dead:
                await cluster.kill(2)
                await cluster.wait_until(lambda: all(cluster.leader("t", n) in {1, 3} for n in range(6)))
            living = {node_id for node_id, broker in cluster.brokers.items() if broker.is_running}
            leaders = [cluster.leader("t", number) for number in range(6)]
            assert set(leaders) == living, "each leads some"

            async def is_known(node_id: int, living: set[int] = living, leaders: list[int] = leaders) -> bool:
                async with WireClient(cluster.brokers[node_id].address) as wire:
                    answer = await wire.call(MetadataRequest(["t"], False))
                named = {broker.node_id for broker in answer.brokers}
                addresses = {broker.address for broker in answer.brokers}
                (topic,) = answer.topics
                return (
                    named == living
                    and addresses == {cluster.brokers[one].address for one in living}
                    and [one.leader_id for one in topic.partitions] == leaders
                )

            for node_id in living:
                await eventually(lambda n=node_id: is_known(n), f"broker {node_id} knows it", limit_s=5)


async def test_records_go_straight_to_the_leader_and_others_refuse_with_its_name() -> None:
    """B16"""
    async with Cluster(brokers=3) as cluster:
        await cluster.create_topic("t", partitions=6)
        leaders = [cluster.leader("t", number) for number in range(6)]
        assert set(leaders) == {1, 2, 3}
        async with cluster.producer(linger_ms=0) as producer:
            for number in range(6):
                await producer.send("t", b"x", partition=number)
        sent = [
            (one.node_id, tp.partition) for one in cluster.requests.of("Produce") for tp in one.partitions
        ]
        assert sorted(sent) == sorted(zip(leaders, range(6), strict=True)), "one request for each record"
        batch = build_batch([b"x"], None, 0)
        for node_id in {1, 2, 3} - {leaders[0]}:
            async with WireClient(cluster.brokers[node_id].address) as wire:
                entry = data.ProducePartition("t", 0, len(batch))
                (produced,) = (
                    await wire.call(data.ProduceRequest(1, 5_000, None, [entry]), batch)
                ).partitions
                asked = data.FetchPartition("t", 0, -1, 0, 1000)
                (fetched,) = (await wire.call(data.FetchRequest(0, 1, 1000, 0, [asked]))).partitions
            for refused in (produced, fetched):
                assert refused.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
                assert f"node {leaders[0]} may" in refused.error_message


def _failing(*faults: Fault, every: int) -> Fault:
    """Return a fault that passes each ``every``-th request to the next of ``faults``, in turn."""
    turns, ways = itertools.count(1), itertools.cycle(faults)

    def fault(request: Request, proceed: Proceed, clock: Clock) -> Response | Pending | None:
        return next(ways)(request, proceed, clock) if next(turns) % every == 0 else None

    return fault


async def test_records_keep_their_order_although_requests_fail() -> None:
    """B7: several batches are in flight, and each third request is refused, lost, or loses its response."""
    values = [b"%d" % number for number in range(3_000)]
    async with Cluster() as cluster:
        await cluster.create_topic("t")
        settings = {
            "max_request_size": 4096,
            "linger_ms": 0,
            "retry_backoff_ms": 1,
            "retry_backoff_max_ms": 5,
        }
        async with cluster.producer(**settings) as producer:
            await producer.send("t", b"first", partition=0)
            faults = fail_next(None), disconnect_next(None), disconnect_next(None, after=True)
            cluster.intercept(ApiKey.PRODUCE, _failing(*faults, every=3))
            placed = await producer.send_many("t", values, partition=0)
            assert producer.statistics().retries > 3
        assert [batch.base_offset for batch in placed] == sorted(batch.base_offset for batch in placed)
        assert [record.value for record in await cluster.records("t")] == [b"first", *values]


async def test_lost_responses_make_no_duplicates() -> None:
    """B18: every second response is lost, after the broker has stored the records."""
    async with Cluster() as cluster:
        await cluster.create_topic("t")
        cluster.intercept(ApiKey.PRODUCE, _failing(disconnect_next(None, after=True), every=2))
        async with cluster.producer(linger_ms=0, retry_backoff_ms=1, retry_backoff_max_ms=5) as producer:
            offsets = [(await producer.send("t", b"%d" % number, partition=0)).offset for number in range(30)]
            assert producer.statistics().retries >= 15
        assert offsets == list(range(30))
        assert [record.value for record in await cluster.records("t")] == [b"%d" % n for n in range(30)]
