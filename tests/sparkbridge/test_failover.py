"""SparkCluster against three brokers: leaders and coordinators die, move and return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

import kafkalite.sync
from kafkalite.errors import (
    ConnectionFailedError,
    ErrorCode,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.metadata import TopicMetadata
from kafkalite.records.batch import iter_batches
from kafkalite.testing import SyncCluster, drop_next
from sparkbridge.brokers import brokers as brokers_module
from sparkbridge.brokers import groups as groups_module
from sparkbridge.brokers.cluster import Fetched, SparkCluster
from sparkbridge.offsets import StreamOffset
from sparkbridge.options import ClientOptions, SourceOptions
from sparkbridge.source import snapshots

MIB = 1 << 20
LONG_MS = 20_000
_numbers = count(1)


@pytest.fixture(scope="module")
def brokers() -> Iterator[SyncCluster]:
    with SyncCluster(3, transport="tcp") as running:
        yield running
        running.kill()  # dropped requests would delay an orderly stop


@pytest.fixture
def three(brokers: SyncCluster) -> SyncCluster:
    """All three run and know each other."""
    brokers.start()
    brokers.wait_until(lambda inner: all(broker.is_running for broker in inner.brokers.values()))
    return brokers


@pytest.fixture
def replicated(three: SyncCluster) -> str:
    """A topic with six partitions on all three brokers, each with its number as first record."""
    name = f"replicated-{next(_numbers)}"
    three.create_topic(name, partitions=6, configs={"min.insync.replicas": "1"})
    for number in range(6):
        three.produce(name, [b"%d" % number], partition=number)
    return name


@pytest.fixture
def spark(three: SyncCluster) -> Iterator[SparkCluster]:
    one = SparkCluster(ClientOptions(three.bootstrap_servers))
    yield one
    one.close()


def values_in(fetched: Fetched) -> list[bytes | None]:
    return [record.value for batch in iter_batches(fetched.payload) for record in batch]


def moved(three: SyncCluster, tp: TopicPartition, away_from: int) -> None:
    three.wait_until(lambda inner: inner.leader(*tp) not in (away_from, -1), what=f"{tp} has another leader")


def test_each_partition_is_read_from_its_leader(
    three: SyncCluster, spark: SparkCluster, replicated: str
) -> None:
    assert len({three.leader(replicated, number) for number in range(6)}) > 1
    assert spark.snapshot({replicated: None})[replicated].ends == (1,) * 6
    tokens = [spark.send_fetch(TopicPartition(replicated, n), 0, max_bytes=MIB) for n in range(6)]
    assert [values_in(spark.receive_fetch(token)) for token in tokens] == [[b"%d" % n] for n in range(6)]
    times = spark.offsets_for_times({TopicPartition(replicated, n): 0 for n in range(6)})
    assert set(times.values()) == {0}
    starts = {TopicPartition(replicated, n): 0 for n in range(6)}
    ends = {TopicPartition(replicated, n): 1 for n in range(6)}
    assert spark.ends_by_bytes(starts, ends, 1 << 30) == ends


def test_a_topic_that_no_broker_knows_is_an_error_long_before_the_request_timeout(
    spark: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers_module, "MISSING_TOPIC_GRACE_MS", 200)
    absent = TopicPartition("absent", 0)
    began_s = time.monotonic()
    with pytest.raises(UnknownTopicOrPartitionError, match="absent"):
        spark.fetch(absent, 0, max_bytes=MIB)
    with pytest.raises(UnknownTopicOrPartitionError, match="absent"):
        spark.commit_offsets("group", {absent: 3})
    assert time.monotonic() - began_s < LONG_MS / 1000


def test_fetches_move_to_the_next_leader_when_theirs_is_killed(
    three: SyncCluster, spark: SparkCluster, replicated: str
) -> None:
    tp = TopicPartition(replicated, 0)
    leader = three.leader(*tp)
    tokens = [spark.send_fetch(tp, 0, max_bytes=MIB)]
    assert values_in(spark.receive_fetch(tokens.pop())) == [b"0"]
    waiting = spark.send_fetch(tp, 1, max_bytes=MIB, max_wait_ms=LONG_MS)
    ahead = spark.send_fetch(tp, 0, max_bytes=MIB)
    three.kill(leader)
    assert values_in(spark.receive_fetch(ahead)) == [b"0"]
    assert spark.snapshot({replicated: None})[replicated].ends == (1,) * 6
    three.produce(replicated, [b"more"], partition=0)
    assert values_in(spark.receive_fetch(waiting)) == [b"more"]
    three.start(leader)
    assert values_in(spark.fetch(tp, 0, max_bytes=MIB)) == [b"0", b"more"]


def test_a_leader_that_hangs_is_abandoned_when_others_report_a_new_one(
    three: SyncCluster, spark: SparkCluster, replicated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers_module, "PATIENCE_S", 0.1)
    tp = TopicPartition(replicated, 0)
    preferred = three.leader(*tp)
    three.kill(preferred)
    moved(three, tp, preferred)
    three.start(preferred)
    hanging = three.leader(*tp)
    assert values_in(spark.fetch(tp, 0, max_bytes=MIB)) == [b"0"]
    three.intercept(ApiKey.FETCH, drop_next(1_000), node_id=hanging)
    try:
        token = spark.send_fetch(tp, 0, max_bytes=MIB)
        with kafkalite.sync.Admin(three.bootstrap_servers) as admin:
            three.wait_until(
                lambda inner: preferred in inner.broker.image.partition(*tp).isr, what="it is in sync"
            )
            admin.elect_leaders([tp])
        assert values_in(spark.receive_fetch(token)) == [b"0"]
    finally:
        three.intercept(ApiKey.FETCH, None, node_id=hanging)


def test_a_coordinator_that_dies_is_found_again(
    three: SyncCluster, spark: SparkCluster, replicated: str
) -> None:
    tp = TopicPartition(replicated, 0)
    group = f"group-of-{replicated}"
    spark.commit_offsets(group, {tp: 1})
    address = spark._state.groups._coordinators[group]
    coordinator = next(n for n, broker in three.cluster.brokers.items() if address in broker.addresses)
    three.kill(coordinator)
    assert spark.committed_offsets(group) == {tp: 1}
    spark.commit_offsets(group, {tp: 2})
    three.start(coordinator)
    assert spark.committed_offsets(group) == {tp: 2}


def test_a_coordinator_that_does_not_respond_is_asked_again(
    three: SyncCluster, spark: SparkCluster, replicated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "PATIENCE_S", 0.1)
    group = f"group-of-{replicated}"
    three.intercept(ApiKey.OFFSET_FETCH, drop_next(1))
    assert spark.committed_offsets(group) == {}


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_any_broker_serves_the_metadata_when_one_is_silent(
    three: SyncCluster, spark: SparkCluster, replicated: str, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers_module, "STAGGER_S", 0.1)
    three.intercept(ApiKey.METADATA, drop_next(1_000), node_id=silent)
    try:
        for _ in range(3):
            assert list(spark.topics(names=[replicated])) == [replicated]
    finally:
        three.intercept(ApiKey.METADATA, None, node_id=silent)


def test_new_data_is_noticed_at_any_leader_and_at_the_next_one(
    three: SyncCluster, spark: SparkCluster, replicated: str
) -> None:
    positions = {TopicPartition(replicated, number): 1 for number in range(6)}
    assert not spark.wait_for_data(positions, 20)
    for number in range(6):
        tp = TopicPartition(replicated, number)
        three.produce(replicated, [b"more"], partition=number)
        assert spark.wait_for_data(positions, LONG_MS)
        positions[tp] = 2
        assert not spark.wait_for_data(positions, 20)
    tp = TopicPartition(replicated, 3)
    leader = three.leader(*tp)
    three.kill(leader)
    producing = threading.Thread(target=three.produce, args=(replicated, [b"x"]), kwargs={"partition": 3})
    producing.start()
    assert spark.wait_for_data(positions, LONG_MS)
    producing.join(20)
    three.start(leader)


def test_a_dead_leader_does_not_delay_new_data_of_another(
    three: SyncCluster, spark: SparkCluster, replicated: str
) -> None:
    leaders = [three.leader(replicated, number) for number in range(6)]
    dead = leaders[0]
    living = next(number for number in range(6) if leaders[number] != dead)
    name = f"lone-{replicated}"
    three.create_topic(name, partitions=6, replication_factor=1)
    lone = next(number for number in range(6) if three.leader(name, number) == dead)
    positions = {TopicPartition(name, lone): 0, TopicPartition(replicated, living): 1}
    assert not spark.wait_for_data(positions, 20)
    three.kill(dead)
    assert not spark.wait_for_data(positions, 50)
    three.produce(replicated, [b"x"], partition=living)
    assert spark.wait_for_data(positions, LONG_MS)
    three.start(dead)


def test_a_partition_without_a_leader_is_waited_for_and_then_named(
    three: SyncCluster, spark: SparkCluster
) -> None:
    name = f"lone-{next(_numbers)}"
    three.create_topic(name, replication_factor=1)
    three.produce(name, [b"x"], partition=0)
    tp = TopicPartition(name, 0)
    assert values_in(spark.fetch(tp, 0, max_bytes=MIB)) == [b"x"]
    leader = three.leader(name)
    three.kill(leader)
    three.wait_until(lambda inner: inner.leader(name) == -1, what="the dead leader is fenced")
    hasty = SparkCluster(ClientOptions(three.bootstrap_servers, request_timeout_ms=300))
    with pytest.raises((RequestTimeoutError, ConnectionFailedError), match=name):
        hasty.fetch(tp, 0, max_bytes=MIB)
    with pytest.raises((RequestTimeoutError, ConnectionFailedError)):
        hasty.snapshot({name: None})
    hasty.close()
    token = spark.send_fetch(tp, 0, max_bytes=MIB)
    three.start(leader)
    assert values_in(spark.receive_fetch(token)) == [b"x"]


def test_if_all_brokers_are_unreachable_the_error_names_them(three: SyncCluster, replicated: str) -> None:
    spark = SparkCluster(ClientOptions(three.bootstrap_servers, request_timeout_ms=500))
    spark.snapshot({replicated: None})
    three.kill()
    with pytest.raises(ConnectionFailedError) as caught:
        spark.fetch(TopicPartition(replicated, 0), 0, max_bytes=MIB)
    assert all(address in str(caught.value) for address in three.bootstrap_servers.split(","))
    three.start()
    spark.close()


@pytest.mark.parametrize("lag", ["no topic", "an older topic", "fewer partitions"])
def test_one_lagging_broker_does_not_make_a_topic_missing(
    three: SyncCluster, replicated: str, lag: str
) -> None:
    """Its response alone would fail the query, or with failOnDataLoss=false skip existing records."""
    lagged: list[str] = []

    def lagging(_request: Any, proceed: Any, _clock: Any) -> Any:
        def older(topic: TopicMetadata) -> TopicMetadata:
            if lag == "no topic":
                return topic._replace(error_code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), partitions=[])
            if lag == "an older topic":
                return topic._replace(topic_id="0" * 32)
            return topic._replace(partitions=topic.partitions[:3])

        answer = proceed()
        lagged.append(lag)
        return answer._replace(message=answer.message._replace(topics=[*map(older, answer.message.topics)]))

    servers = three.bootstrap_servers.split(",")
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": servers[0], "subscribe": replicated, "startingOffsets": "earliest"},
        is_stream=True,
    )
    knowing = SparkCluster(replace(options.client, bootstrap_servers=servers[1]))
    known = knowing.snapshot({replicated: None})
    knowing.close()
    end = StreamOffset(
        {TopicPartition(replicated, n): 1 for n in range(6)}, {replicated: known[replicated].topic_id}
    )
    three.intercept(ApiKey.METADATA, lagging, node_id=1)
    asks = [snapshots.first_snapshot] if lag == "no topic" else []
    asks.append(lambda spark, options: snapshots.steady_snapshot(spark, options, end))
    asks.append(lambda spark, options: snapshots.replay_snapshot(spark, options, end))
    try:
        for ask in asks:
            spark = SparkCluster(options.client)
            assert ask(spark, options) == known
            spark.close()
            assert lagged, "no response was older"
            lagged.clear()
    finally:
        three.intercept(ApiKey.METADATA, None, node_id=1)
