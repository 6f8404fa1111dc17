"""Spark's tasks read from a follower in their rack (R66, R67, KIP-392)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.records.batch import iter_batches
from kafkalite.testing import SyncCluster
from sparkbridge.brokers.cluster import Fetched, SparkCluster
from sparkbridge.options import ClientOptions, SourceOptions

T0 = TopicPartition("t", 0)
COUNT = 50


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    """Three nodes in the racks rack-1 to rack-3, and 50 records in t-0, one in each batch."""
    made = SyncCluster(3, transport="tcp", replica_selector_class="RackAwareReplicaSelector")
    for node_id, node in made._original.nodes.items():
        node.settings["broker_rack"] = f"rack-{node_id}"
    with made as running:
        running.create_topic("t", partitions=1)
        for number in range(COUNT):
            running.produce("t", [b"%d" % number], partition=0)
        yield running


def client_of(cluster: SyncCluster, rack: str) -> ClientOptions:
    return SourceOptions.parse(
        {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": "t", "kafka.client.rack": rack},
        is_stream=False,
    ).client


def near_of(cluster: SyncCluster) -> int:
    return next(node_id for node_id in (1, 2, 3) if node_id != cluster.leader("t"))


def values(fetched: Fetched) -> list[bytes | None]:
    return [record.value for batch in iter_batches(fetched.payload) for record in batch.records("t", 0)]


def read(spark: SparkCluster, count: int = COUNT) -> list[bytes | None]:
    found: list[bytes | None] = []
    while len(found) < count:
        found += values(spark.fetch(T0, len(found), max_bytes=400, max_wait_ms=1_000))
    return found


def served(cluster: SyncCluster) -> dict[int, int]:
    return {node_id: cluster.statistics(node_id).fetched_bytes for node_id in (1, 2, 3)}


EXPECTED = [b"%d" % number for number in range(COUNT)]


def test_records_come_from_the_follower_in_the_rack(cluster: SyncCluster) -> None:
    near = near_of(cluster)
    before = served(cluster)
    spark = SparkCluster(client_of(cluster, f"rack-{near}"))
    try:
        assert read(spark) == EXPECTED
        assert spark.fetch(T0, COUNT, max_bytes=100).high_watermark == COUNT, "the leader tells the end"
    finally:
        spark.close()
    grown = {node_id for node_id, total in served(cluster).items() if total > before[node_id]}
    assert grown == {near}


@pytest.mark.parametrize(
    "code", [ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.NOT_LEADER_OR_FOLLOWER]
)
def test_r67_what_a_follower_refuses_the_leader_is_asked(cluster: SyncCluster, code: ErrorCode) -> None:
    near = near_of(cluster)
    spark = SparkCluster(client_of(cluster, f"rack-{near}"))

    def refuse(_request: object, proceed: object, _clock: object) -> object:
        answer = proceed()  # type: ignore[operator]
        partitions = answer.message.partitions
        partitions[:] = [one._replace(error_code=int(code), length_bytes=0) for one in partitions]
        return answer._replace(payload=())

    cluster.intercept(ApiKey.FETCH, refuse, node_id=near)
    try:
        assert read(spark) == EXPECTED
    finally:
        cluster.intercept(ApiKey.FETCH, None, node_id=near)
        spark.close()


def test_a_rack_without_a_broker_reads_from_the_leader(cluster: SyncCluster) -> None:
    spark = SparkCluster(replace(client_of(cluster, "nowhere")))
    before = served(cluster)
    try:
        assert read(spark) == EXPECTED
    finally:
        spark.close()
    grown = {node_id for node_id, total in served(cluster).items() if total > before[node_id]}
    assert grown == {cluster.leader("t")}


def test_a_dead_follower_is_left(cluster: SyncCluster) -> None:
    near = near_of(cluster)
    spark = SparkCluster(client_of(cluster, f"rack-{near}"))
    try:
        assert read(spark, 5)[:5] == EXPECTED[:5]
        cluster.kill(near)
        assert read(spark) == EXPECTED
    finally:
        spark.close()
