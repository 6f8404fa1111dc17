"""SparkCluster against one broker: topics, offsets, fetches, groups, long polls, the pool."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kafkalite.sync
from kafkalite.client.cluster.routing import Leader
from kafkalite.errors import (
    BrokerError,
    ConnectionFailedError,
    ErrorCode,
    InvalidTopicError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.records.batch import iter_batches
from kafkalite.testing import SyncCluster, disconnect_next, drop_next, fail_next
from sparkbridge.brokers import brokers as brokers_module
from sparkbridge.brokers import cluster as spark_cluster
from sparkbridge.brokers import long_poll as long_poll
from sparkbridge.brokers.cluster import Fetched, SparkCluster, TopicInfo
from sparkbridge.offsets import TopicSnapshot
from sparkbridge.options import ClientOptions

MIB = 1 << 20
LONG_MS = 10_000


def options_for(cluster: SyncCluster, **settings: object) -> ClientOptions:
    return ClientOptions(cluster.bootstrap_servers, **settings)  # type: ignore[arg-type]


@pytest.fixture
def spark(cluster: SyncCluster) -> SparkCluster:
    return SparkCluster.shared(options_for(cluster))


def offsets_in(fetched: Fetched) -> list[int]:
    return [record.offset for batch in iter_batches(fetched.payload) for record in batch]


class Counting:
    """A fault that only counts the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request, proceed: object, clock: object) -> None:
        self.requests.append(request)


# --- topics and snapshots ------------------------------------------------------------------------


def test_topics_by_name_are_those_that_exist(spark: SparkCluster, topic: str) -> None:
    found = spark.topics(names=[topic, "absent"])
    assert list(found) == [topic]
    assert isinstance(found[topic], TopicInfo)
    assert found[topic].partition_count == 3
    assert len(found[topic].topic_id) == 32


def test_a_pattern_matches_whole_names(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.create_topic(f"{topic}-more")
    assert set(spark.topics(pattern=topic)) == {topic}
    assert set(spark.topics(pattern=f"{topic}.*")) == {topic, f"{topic}-more"}
    assert spark.topics(pattern="no") == {}


def test_internal_topics_are_returned_only_by_name(spark: SparkCluster, topic: str) -> None:
    spark.commit_offsets("makes-the-offsets-topic", {TopicPartition(topic, 0): 0})
    assert "__consumer_offsets" not in spark.topics(pattern=".*")
    assert "__consumer_offsets" not in spark.topics()
    assert "__consumer_offsets" in spark.topics(names=["__consumer_offsets"])


def test_a_name_that_no_topic_can_have_is_refused_at_once(spark: SparkCluster) -> None:
    with pytest.raises(InvalidTopicError, match="bad name"):
        spark.topics(names=["bad name"])


def test_a_snapshot_has_starts_and_ends_of_each_partition(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"] * 10, partition=0)
    cluster.produce(topic, [b"x"] * 20, partition=2)
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 2): 5})
    topic_id = spark.topics(names=[topic])[topic].topic_id
    assert spark.snapshot({topic: None, "absent": None}) == {
        topic: TopicSnapshot(topic_id, (0, 0, 5), (10, 0, 20))
    }


def test_a_snapshot_of_some_partitions_has_minus_one_for_the_others(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"] * 10, partition=1)
    found = spark.snapshot({topic: [1, 7]})[topic]
    assert (found.starts, found.ends) == ((-1, 0, -1), (-1, 10, -1))


def test_two_requests_return_starts_and_ends_of_all_partitions(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    counting = Counting()
    cluster.intercept(ApiKey.LIST_OFFSETS, counting)
    spark.snapshot({topic: None})
    cluster.intercept(ApiKey.LIST_OFFSETS, None)
    assert len(counting.requests) == 2  # a request names a partition once (S23)


def test_a_snapshot_has_new_partitions_and_a_topic_created_again(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    before = spark.snapshot({topic: None})[topic]
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        admin.create_partitions(topic, 5)
        grown = spark.snapshot({topic: None})[topic]
        admin.delete_topics([topic])
        assert spark.snapshot({topic: None}) == {}
        admin.create_topic(topic, partitions=2)
    again = spark.snapshot({topic: None})[topic]
    assert [len(found.ends) for found in (before, grown, again)] == [3, 5, 2]
    assert before.topic_id == grown.topic_id != again.topic_id


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_topic_deleted_during_a_snapshot(
    cluster: SyncCluster, spark: SparkCluster, topic: str, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SparkCluster._list_offsets
    left = ["once"]

    def list_offsets(*args: Any) -> Any:
        if left:
            left.pop()
            with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
                admin.delete_topics([topic])
                if comes_back:
                    admin.create_topic(topic, partitions=2)
        return real(*args)

    monkeypatch.setattr(SparkCluster, "_list_offsets", list_offsets)
    found = spark.snapshot({topic: None})
    assert {name: len(told.ends) for name, told in found.items()} == ({topic: 2} if comes_back else {})
    assert not comes_back or found[topic].topic_id == spark.topics(names=[topic])[topic].topic_id


def test_a_topic_that_a_refresh_during_a_snapshot_no_longer_finds(
    cluster: SyncCluster, spark: SparkCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry for another topic refreshes the metadata of all."""
    other = f"{topic}-other"
    cluster.create_topic(other)
    real = SparkCluster._list_offsets
    left = ["once"]

    def list_offsets(self: SparkCluster, brokers: Any, *args: Any) -> Any:
        found = real(self, brokers, *args)
        if left:
            left.pop()
            with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
                admin.delete_topics([topic])
            brokers.refresh([topic, other], brokers.deadline_s())
        return found

    monkeypatch.setattr(SparkCluster, "_list_offsets", list_offsets)
    assert spark.snapshot({topic: None, other: None}).keys() == {other}


def test_a_topic_deleted_during_every_snapshot_is_an_error(
    spark: SparkCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_offsets(*_: Any) -> Any:
        raise UnknownTopicOrPartitionError(topic)

    monkeypatch.setattr(SparkCluster, "_list_offsets", list_offsets)
    with pytest.raises(UnknownTopicOrPartitionError, match=topic):
        spark.snapshot({topic: None})


def test_a_permanent_error_among_retriable_ones_is_raised_at_once(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"], partition=0)
    passing, lasting = TopicPartition(topic, 0), TopicPartition(topic, 1)
    spark.snapshot({topic: None})
    leaders = spark._state.brokers.metadata.topics[topic].leaders
    leaders[0] = Leader(leaders[0].node_id, 99)  # an epoch that the broker does not know
    with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-1"):
        spark.ends_by_bytes({passing: 0, lasting: 5}, {passing: 1, lasting: 6}, 1)


def test_read_committed_ends_at_the_last_stable_offset(cluster: SyncCluster, topic: str) -> None:
    committed = SparkCluster.shared(options_for(cluster))
    uncommitted = SparkCluster.shared(options_for(cluster, is_read_committed=False))
    tp = TopicPartition(topic, 0)
    cluster.produce(topic, [b"x"] * 3, partition=0)
    with kafkalite.sync.Producer(cluster.bootstrap_servers, transactional_id=topic) as producer:
        with producer.transaction():
            producer.send_and_wait(topic, b"y", partition=0)
            assert committed.snapshot({topic: [0]})[topic].ends[0] == 3
            assert uncommitted.snapshot({topic: [0]})[topic].ends[0] == 4
            assert offsets_in(committed.fetch(tp, 0, max_bytes=MIB)) == [0, 1, 2]
            assert offsets_in(uncommitted.fetch(tp, 0, max_bytes=MIB)) == [0, 1, 2, 3]
        assert committed.wait_for_data({tp: 3}, LONG_MS)  # the marker is written later
        assert committed.snapshot({topic: [0]})[topic].ends[0] == 5  # the record and its marker


# --- times ---------------------------------------------------------------------------------------


def test_a_time_is_found_to_the_record_inside_a_batch(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    with kafkalite.sync.Producer(cluster.bootstrap_servers, linger_ms=200) as producer:
        for number in range(100):
            producer.send(topic, b"x", partition=0, timestamp_ms=1_000 + number * 10)
    tp, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert len(list(iter_batches(spark.fetch(tp, 0, max_bytes=MIB).payload))) < 100
    for asked, found in ((0, 0), (1_000, 0), (1_001, 1), (1_500, 50), (1_501, 51), (1_990, 99)):
        assert spark.offsets_for_times({tp: asked, empty: asked}) == {tp: found, empty: None}
    assert spark.offsets_for_times({tp: 1_991}) == {tp: None}
    assert spark.offsets_for_times({}) == {}


def test_invisible_records_are_not_found_by_their_time(cluster: SyncCluster, topic: str) -> None:
    spark = SparkCluster.shared(options_for(cluster))
    tp = TopicPartition(topic, 0)
    settings = {"bootstrap_servers": cluster.bootstrap_servers, "transactional_id": topic}
    with kafkalite.sync.Producer(**settings) as producer:  # type: ignore[arg-type]
        producer.begin_transaction()
        producer.send_and_wait(topic, b"aborted", partition=0, timestamp_ms=5_000)
        producer.abort_transaction()
        assert spark.offsets_for_times({tp: 5_000}) == {tp: None}
        producer.begin_transaction()
        producer.send_and_wait(topic, b"committed", partition=0, timestamp_ms=6_000)
        producer.commit_transaction()
        assert spark.wait_for_data({tp: 2}, LONG_MS)  # the marker is written later
    assert spark.offsets_for_times({tp: 5_000}) == {tp: 2}
    assert spark.offsets_for_times({tp: 6_001}) == {tp: None}  # only a marker is newer


def test_a_time_is_found_although_records_are_deleted_meanwhile(
    cluster: SyncCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp = TopicPartition(topic, 0)
    with kafkalite.sync.Producer(cluster.bootstrap_servers) as producer:
        for number in range(10):
            producer.send_and_wait(topic, b"x", partition=0, timestamp_ms=1_000 + number)
    send_fetch = SparkCluster.send_fetch

    def after_retention(*given: Any, **settings: Any) -> Any:
        with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
            admin.delete_records({tp: 5})
        return send_fetch(*given, **settings)

    monkeypatch.setattr(SparkCluster, "send_fetch", after_retention)
    assert SparkCluster.shared(options_for(cluster)).offsets_for_times({tp: 1_000}) == {tp: 5}


# --- bytes ---------------------------------------------------------------------------------------


def sizes_of(spark: SparkCluster, tp: TopicPartition) -> list[tuple[int, int]]:
    """Return (next offset, bytes) of each batch."""
    batches = iter_batches(spark.fetch(tp, 0, max_bytes=100 * MIB).payload)
    return [(batch.header.next_offset, batch.size_bytes) for batch in batches]


def test_bytes_are_divided_in_proportion_in_whole_batches(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    large, small, empty = (TopicPartition(topic, number) for number in range(3))
    for _ in range(20):
        cluster.produce(topic, [b"x" * 1_000], partition=0)
    for _ in range(10):
        cluster.produce(topic, [b"x" * 1_000], partition=1)
    starts = {large: 0, small: 0, empty: 0}
    ends = {large: 20, small: 10, empty: 0}
    batch_bytes = sizes_of(spark, large)[0][1]
    whole = 30 * batch_bytes
    assert spark.ends_by_bytes(starts, ends, whole) == ends
    assert spark.ends_by_bytes(starts, ends, whole // 2) == {large: 10, small: 5, empty: 0}
    assert spark.ends_by_bytes(starts, {**ends, large: 15}, batch_bytes * 5) == {large: 3, small: 2, empty: 0}
    assert spark.ends_by_bytes({large: 19, small: 10, empty: 0}, ends, 10 * batch_bytes) == ends


def test_a_byte_limit_below_every_batch_still_gives_one_batch(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    for number, count in ((0, 2), (1, 4)):
        for _ in range(count):
            cluster.produce(topic, [b"x" * 1_000], partition=number)
    starts = {TopicPartition(topic, number): 0 for number in range(2)}
    ends = {TopicPartition(topic, 0): 2, TopicPartition(topic, 1): 4}
    reached = spark.ends_by_bytes(starts, ends, 1)
    assert reached == {TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 1}
    steps = 0
    while starts != ends:  # no partition starves
        starts = spark.ends_by_bytes(starts, ends, 1)
        steps += 1
    assert steps == 6


def test_a_waiting_partition_is_served_first(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    """Its single batch is larger than its part, however often it is asked for."""
    small, large = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for _ in range(50):
        cluster.produce(topic, [b"x" * 1_000], partition=0)
    cluster.produce(topic, [b"y" * 3_000], partition=1)
    starts, ends = {small: 0, large: 0}, {small: 50, large: 1}
    one, other = sizes_of(spark, small)[0][1], sizes_of(spark, large)[0][1]
    assert spark.ends_by_bytes(starts, ends, 5 * one) == {small: 4, large: 0}
    assert spark.ends_by_bytes(starts, ends, 5 * one, large) == {small: (5 * one - other) // one, large: 1}
    assert spark.ends_by_bytes(starts, ends, 1, large) == {small: 0, large: 1}
    assert spark.ends_by_bytes(starts, {small: 50, large: 0}, 5 * one, large) == {small: 5, large: 0}
    assert spark.ends_by_bytes({**starts, small: 50}, ends, 1, large) == {small: 50, large: 1}


def test_bytes_from_beyond_the_end_are_an_error(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    tp = TopicPartition(topic, 0)
    with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-0"):
        spark.ends_by_bytes({tp: 10}, {tp: 20}, 100)


# --- fetches -------------------------------------------------------------------------------------


def test_a_fetch_gives_batches_and_positions(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.produce(topic, [b"x"] * 10, partition=1)
    fetched = spark.fetch(TopicPartition(topic, 1), 4, max_bytes=MIB)
    assert isinstance(fetched.payload, memoryview)
    assert [offset for offset in offsets_in(fetched) if offset >= 4] == list(range(4, 10))
    assert (fetched.high_watermark, fetched.last_stable_offset, fetched.log_start_offset) == (10, 10, 0)
    at_end = spark.fetch(TopicPartition(topic, 1), 10, max_bytes=MIB)
    assert len(at_end.payload) == 0


def test_a_fetch_waits_for_a_first_record(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    token = spark.send_fetch(TopicPartition(topic, 0), 0, max_bytes=MIB, max_wait_ms=LONG_MS)
    cluster.produce(topic, [b"x"], partition=0)
    assert offsets_in(spark.receive_fetch(token)) == [0]


def test_fetches_are_sent_ahead(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    for _ in range(3):
        cluster.produce(topic, [b"x" * 1_000], partition=0)
    tp = TopicPartition(topic, 0)
    tokens = [spark.send_fetch(tp, offset, max_bytes=1) for offset in range(3)]
    assert [offsets_in(spark.receive_fetch(token)) for token in reversed(tokens)] == [[2], [1], [0]]


def test_a_dropped_token_does_not_disturb_the_next_request(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"] * 2, partition=0)
    spark.send_fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    assert offsets_in(spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)) == [0, 1]


def test_a_deleted_offset_is_an_error_with_the_existing_ones(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"] * 10, partition=0)
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(topic, 0): 5})
    for offset in (4, 11):
        with pytest.raises(OffsetOutOfRangeError, match=f"{topic}-0 has offsets from 5 to before 10"):
            spark.fetch(TopicPartition(topic, 0), offset, max_bytes=MIB)


def _sleep_by(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], object]) -> None:
    """Replace the client's sleep, but no other thread's."""
    monkeypatch.setattr(brokers_module, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


@pytest.mark.parametrize("partition", [0, 3])
def test_a_missing_topic_or_partition_is_an_error_at_once(
    spark: SparkCluster, topic: str, partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sleep_by(monkeypatch, lambda _: pytest.fail("nothing to wait for"))
    name = topic if partition else "absent"
    with pytest.raises(UnknownTopicOrPartitionError, match=name):
        spark.fetch(TopicPartition(name, partition), 0, max_bytes=MIB)


def test_a_fetch_of_a_deleted_topic_is_an_error(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topics([topic])
    with pytest.raises(UnknownTopicOrPartitionError):
        spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)


def test_a_topic_created_again_is_read_although_its_leader_epochs_restart(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    tp = TopicPartition(topic, 0)
    spark.fetch(tp, 0, max_bytes=MIB)
    leaders = spark._state.brokers.metadata.topics[topic].leaders
    leaders[0] = Leader(leaders[0].node_id, 99)
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topics([topic])
        admin.create_topic(topic)
    cluster.produce(topic, [b"x"], partition=0)
    assert offsets_in(spark.fetch(tp, 0, max_bytes=MIB)) == [0]


@pytest.mark.parametrize(
    "fault",
    [
        lambda: fail_next(3, ErrorCode.NOT_LEADER_OR_FOLLOWER),
        lambda: fail_next(2, ErrorCode.LEADER_NOT_AVAILABLE),
        lambda: disconnect_next(2),
        lambda: disconnect_next(2, after=True),
    ],
)
def test_retriable_errors_are_retried(
    cluster: SyncCluster, spark: SparkCluster, topic: str, fault: Callable[[], object]
) -> None:
    cluster.produce(topic, [b"x"], partition=0)
    for api in (ApiKey.FETCH, ApiKey.LIST_OFFSETS):
        cluster.intercept(api, fault())  # type: ignore[arg-type]
    assert offsets_in(spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)) == [0]
    assert spark.snapshot({topic: None})[topic].ends == (1, 0, 0)


def test_pauses_follow_the_settings(
    cluster: SyncCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"retry.backoff.ms": "7000", "retry.backoff.max.ms": "9000"}
    spark = SparkCluster.shared(options_for(cluster, consumer=settings))
    spark.snapshot({topic: None})
    pauses: list[float] = []
    _sleep_by(monkeypatch, pauses.append)
    cluster.intercept(ApiKey.FETCH, fail_next(4))
    spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    least_and_most = [(5.6, 8.4), (7.2, 10.8), (7.2, 10.8)]  # 20 % less or more
    assert len(pauses) == 3  # none after the first failure
    assert all(least <= pause <= most for (least, most), pause in zip(least_and_most, pauses, strict=True))


def test_a_permanent_error_is_raised_at_once(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.intercept(ApiKey.FETCH, fail_next(1, ErrorCode.CLUSTER_AUTHORIZATION_FAILED))
    with pytest.raises(BrokerError) as caught:
        spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    assert caught.value.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_a_broker_that_never_responds_is_abandoned_and_named(cluster: SyncCluster, topic: str) -> None:
    spark = SparkCluster.shared(options_for(cluster, request_timeout_ms=300))
    spark.snapshot({topic: None})
    cluster.intercept(ApiKey.FETCH, drop_next(1000))
    try:
        with pytest.raises(RequestTimeoutError, match=f"{topic}-0.*{cluster.address}"):
            spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    finally:
        cluster.intercept(ApiKey.FETCH, None)


def test_unreachable_brokers_are_all_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        addresses = [f"127.0.0.1:{listening.getsockname()[1]}" for listening in (one, two)]
    spark = SparkCluster(ClientOptions(",".join(addresses), request_timeout_ms=200))
    with pytest.raises(ConnectionFailedError) as caught:
        spark.topics(names=["t"])
    assert all(address in str(caught.value) for address in addresses)
    assert "bootstrap.servers" in str(caught.value)


def test_a_dead_bootstrap_address_is_skipped(cluster: SyncCluster, topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead:
        address = f"127.0.0.1:{dead.getsockname()[1]}"
    spark = SparkCluster(ClientOptions(f"{address}, {cluster.bootstrap_servers}"))
    assert list(spark.topics(names=[topic])) == [topic]
    spark.close()


# --- groups --------------------------------------------------------------------------------------


def test_committed_offsets_of_a_group_are_returned(spark: SparkCluster, topic: str) -> None:
    group = f"group-of-{topic}"
    assert spark.committed_offsets(group) == {}
    positions = {TopicPartition(topic, 0): 7, TopicPartition(topic, 2): 0}
    spark.commit_offsets(group, positions, "batch 4")
    spark.commit_offsets(group, {})
    assert spark.committed_offsets(group) == positions


def test_offsets_of_a_missing_topic_are_refused(spark: SparkCluster, topic: str) -> None:
    with pytest.raises(UnknownTopicOrPartitionError, match="absent-0"):
        spark.commit_offsets(f"group-of-{topic}", {TopicPartition("absent", 0): 1})


def test_tools_show_committed_offsets(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.produce(topic, [b"x"] * 10, partition=0)
    spark.commit_offsets(f"group-of-{topic}", {TopicPartition(topic, 0): 4}, "batch 4")
    with kafkalite.sync.Admin(cluster.bootstrap_servers) as admin:
        (lag,) = admin.group_lag(f"group-of-{topic}")
        told = admin.committed_offsets(f"group-of-{topic}")
    assert lag.lag == 6
    assert told[TopicPartition(topic, 0)].metadata == "batch 4"


@pytest.mark.parametrize(
    "code",
    [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE],
)
def test_a_coordinator_that_moves_or_loads_is_asked_again(
    cluster: SyncCluster, spark: SparkCluster, topic: str, code: ErrorCode
) -> None:
    group = f"group-of-{topic}"
    spark.committed_offsets(group)  # the coordinator is known
    for api in (ApiKey.OFFSET_FETCH, ApiKey.OFFSET_COMMIT, ApiKey.FIND_COORDINATOR):
        cluster.intercept(api, fail_next(2, code))
    spark.commit_offsets(group, {TopicPartition(topic, 0): 3})
    assert spark.committed_offsets(group) == {TopicPartition(topic, 0): 3}


def test_a_group_with_members_keeps_its_offsets(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    group = f"group-of-{topic}"
    settings = {"bootstrap_servers": cluster.bootstrap_servers, "group_id": group}
    with kafkalite.sync.Consumer(topic, **settings) as consumer:  # type: ignore[arg-type]
        deadline_s = time.monotonic() + 10
        while not consumer.assignment() and time.monotonic() < deadline_s:
            consumer.get_many(timeout_ms=50)
        with pytest.raises(BrokerError) as caught:
            spark.commit_offsets(group, {TopicPartition(topic, 0): 3})
        assert not caught.value.retriable
    assert spark.committed_offsets(group).get(TopicPartition(topic, 0)) != 3


# --- long polls ----------------------------------------------------------------------------------


def positions_of(topic: str, *offsets: int) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, number): offset for number, offset in enumerate(offsets)}


def test_without_new_data_the_wait_ends(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.produce(topic, [b"x"], partition=1)
    assert not spark.wait_for_data(positions_of(topic, 0, 1, 0), 50)
    assert not spark.wait_for_data({}, 1)


def test_existing_data_ends_the_wait_at_once(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.produce(topic, [b"x"], partition=1)
    assert spark.wait_for_data(positions_of(topic, 0, 0, 0), LONG_MS)


def test_data_that_arrives_during_the_wait_ends_it(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    counting = Counting()
    cluster.intercept(ApiKey.FETCH, counting)

    def produce_when_polled() -> None:
        cluster.wait_until(lambda _: counting.requests)
        cluster.produce(topic, [b"x"], partition=2)

    producing = threading.Thread(target=produce_when_polled)
    producing.start()
    assert spark.wait_for_data(positions_of(topic, 0, 0, 0), LONG_MS)
    producing.join(10)
    cluster.intercept(ApiKey.FETCH, None)


def test_an_outstanding_poll_is_kept_for_the_next_wait(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    counting = Counting()
    cluster.intercept(ApiKey.FETCH, counting)
    for _ in range(5):
        assert not spark.wait_for_data(positions_of(topic, 0, 0, 0), 10)
    assert len(counting.requests) == 1
    cluster.produce(topic, [b"x"], partition=0)
    assert spark.wait_for_data(positions_of(topic, 0, 0, 0), LONG_MS)
    assert len(counting.requests) == 1
    assert not spark.wait_for_data(positions_of(topic, 1, 0, 0), 10)
    assert len(counting.requests) == 2
    cluster.intercept(ApiKey.FETCH, None)


def test_an_outstanding_poll_is_replaced_when_the_positions_changed(
    cluster: SyncCluster, spark: SparkCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "POLL_MS", LONG_MS * 6)  # it does not end by itself
    cluster.produce(topic, [b"x"], partition=0)
    assert not spark.wait_for_data({TopicPartition(topic, 0): 1}, 10)
    assert spark.wait_for_data({TopicPartition(topic, 0): 0}, LONG_MS)
    assert not spark.wait_for_data({TopicPartition(topic, 0): 1}, 10)
    cluster.produce(topic, [b"x"], partition=1)
    assert spark.wait_for_data({TopicPartition(topic, 0): 1, TopicPartition(topic, 1): 0}, LONG_MS)


def test_an_old_response_is_compared_with_the_current_position(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    assert not spark.wait_for_data({TopicPartition(topic, 0): 0}, 10)
    cluster.produce(topic, [b"x"], partition=0)  # completes the long poll
    assert not spark.wait_for_data({TopicPartition(topic, 0): 1}, 50)


def test_an_outstanding_poll_does_not_delay_other_requests(cluster: SyncCluster, topic: str) -> None:
    spark = SparkCluster.shared(options_for(cluster, request_timeout_ms=1_000))
    cluster.intercept(ApiKey.FETCH, drop_next(1))  # later responses on its connection never arrive
    assert not spark.wait_for_data(positions_of(topic, 0, 0, 0), 10)
    spark.snapshot({topic: None})
    spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    assert spark.committed_offsets("some-group") == {}


def test_a_poll_receives_no_data(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    cluster.produce(topic, [b"x" * 100_000], partition=0)
    fetched_bytes = cluster.statistics().fetched_bytes
    assert spark.wait_for_data({TopicPartition(topic, 0): 0}, LONG_MS)
    assert cluster.statistics().fetched_bytes == fetched_bytes


def test_records_of_an_open_transaction_are_no_new_data(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    positions = {TopicPartition(topic, 0): 0}
    with kafkalite.sync.Producer(cluster.bootstrap_servers, transactional_id=topic) as producer:
        producer.begin_transaction()
        producer.send_and_wait(topic, b"x", partition=0)
        assert not spark.wait_for_data(positions, 50)
        producer.commit_transaction()
        assert spark.wait_for_data(positions, LONG_MS)


def test_partitions_that_cannot_be_polled_do_not_hide_the_others(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    positions = {**positions_of(topic, 0, 10), TopicPartition("absent", 0): 0}
    assert not spark.wait_for_data(positions, 50)
    cluster.produce(topic, [b"x"], partition=0)
    assert spark.wait_for_data(positions, LONG_MS)


def test_waiting_for_an_unreachable_broker_returns_false_after_the_wait(topic: str) -> None:
    with SyncCluster(transport="tcp") as own:
        own.create_topic(topic)
        spark = SparkCluster(options_for(own))
        positions = {TopicPartition(topic, 0): 0}
        assert not spark.wait_for_data(positions, 10)
        own.kill()
        assert not spark.wait_for_data(positions, 100)
        own.start()
        own.produce(topic, [b"x"], partition=0)
        assert spark.wait_for_data(positions, LONG_MS)
        spark.close()


# --- restarts, the pool, forks -------------------------------------------------------------------


def test_pooled_connections_survive_a_restart_of_their_broker(topic: str) -> None:
    with SyncCluster(transport="tcp") as own:
        own.create_topic(topic)
        own.produce(topic, [b"x"], partition=0)
        spark = SparkCluster.shared(options_for(own))
        tp = TopicPartition(topic, 0)
        spark.commit_offsets("g", {tp: 1})
        for stop in (own.stop, own.kill):
            stop()
            own.start()
            assert offsets_in(spark.fetch(tp, 0, max_bytes=MIB)) == [0]
            stop()
            own.start()
            assert spark.snapshot({topic: None})[topic].ends == (1,)
            stop()
            own.start()
            assert spark.committed_offsets("g") == {tp: 1}


def test_a_fetch_in_flight_survives_the_restart_of_its_broker(topic: str) -> None:
    with SyncCluster(transport="tcp") as own:
        own.create_topic(topic)
        spark = SparkCluster.shared(options_for(own))
        token = spark.send_fetch(TopicPartition(topic, 0), 0, max_bytes=MIB, max_wait_ms=LONG_MS)
        own.kill()
        ahead = spark.send_fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)  # no broker runs
        own.start()
        own.produce(topic, [b"x"], partition=0)
        assert offsets_in(spark.receive_fetch(token)) == [0]
        assert offsets_in(spark.receive_fetch(ahead)) == [0]


def test_a_process_has_one_cluster_for_the_same_options(cluster: SyncCluster) -> None:
    one = SparkCluster.shared(options_for(cluster))
    assert SparkCluster.shared(options_for(cluster)) is one
    assert SparkCluster.shared(options_for(cluster, client_id="other")) is not one
    assert SparkCluster.shared(options_for(cluster, is_read_committed=False)) is not one


def test_the_pool_is_bounded(cluster: SyncCluster, topic: str) -> None:
    first, second = (SparkCluster.shared(options_for(cluster, client_id=name)) for name in ("one", "two"))
    for one in (first, second):
        one.snapshot({topic: None})
    for number in range(spark_cluster.MAX_SHARED - 1):
        SparkCluster.shared(options_for(cluster, client_id=f"more-{number}"))
        assert SparkCluster.shared(options_for(cluster, client_id="one")) is first
    assert (first.connection_count, second.connection_count) == (1, 0)
    assert second.snapshot({topic: None})[topic].ends == (0, 0, 0)  # still usable
    second.close()


def test_one_connection_serves_many_calls(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    for _ in range(5):
        spark.snapshot({topic: None})
        spark.fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
        spark.committed_offsets("some-group")
    assert spark.connection_count == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own_connections(
    cluster: SyncCluster, spark: SparkCluster, topic: str
) -> None:
    cluster.produce(topic, [b"x"], partition=0)
    tp = TopicPartition(topic, 0)
    ahead = spark.send_fetch(tp, 0, max_bytes=MIB)
    assert not spark.wait_for_data({tp: 1}, 10)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        told = b"wrong"
        try:
            held = spark.fetch(tp, 0, max_bytes=MIB)  # the parent's object
            own_count = spark.connection_count
            pooled = SparkCluster.shared(options_for(cluster)).fetch(tp, 0, max_bytes=MIB)
            if own_count == 1 and offsets_in(held) == offsets_in(pooled) == [0]:
                told = b"right"
        finally:
            os.write(write_end, told)
            os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 10) == b"right"
    os.close(read_end)
    os.waitpid(child, 0)
    assert offsets_in(spark.receive_fetch(ahead)) == [0]  # only the parent received its response
    assert spark.connection_count == 2
    cluster.produce(topic, [b"x"], partition=0)
    assert spark.wait_for_data({tp: 1}, LONG_MS)


def test_the_repr(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    token = spark.send_fetch(TopicPartition(topic, 0), 0, max_bytes=MIB)
    assert repr(token) == f"<FetchToken {topic}-0 from 0, sent>"
    spark.receive_fetch(token)
    assert repr(spark) == f"<SparkCluster <Brokers {cluster.address}, 1 connections>>"


def test_a_closed_cluster_can_be_used_again(cluster: SyncCluster, spark: SparkCluster, topic: str) -> None:
    spark.snapshot({topic: None})
    spark_cluster.close_all()
    assert spark.connection_count == 0
    assert spark.snapshot({topic: None})[topic].ends == (0, 0, 0)
    spark.close()


def test_importing_starts_nothing_and_needs_no_event_loop_and_no_spark() -> None:
    program = """
import sys, threading
import sparkbridge.brokers.cluster
unwanted = {"asyncio", "pyspark", "pyarrow", "kafkalite.client.cluster.client", "kafkalite.broker"}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
