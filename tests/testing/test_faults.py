"""Faults by API name, topic, partition, probability and count; refused mistakes; recorded requests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kafkalite import sync
from kafkalite.errors import ConfigError, ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import API_KEY_BY_REQUEST, APIS, ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data, groups, metadata
from kafkalite.testing import Cluster, SyncCluster, WireClient, delay_next, drop_next, fail_next
from kafkalite.testing.requests import KEPT_REQUESTS, ClientRequest, RequestLog, names_in


def list_offsets(topic: str, partition: int) -> data.ListOffsetsRequest:
    return data.ListOffsetsRequest(0, [data.ListOffsetsPartition(topic, partition, -1, -1)])


async def _refused(wire: WireClient, *keys: tuple[str, int]) -> list[bool]:
    return [isinstance(await wire.call(list_offsets(*key)), RequestError) for key in keys]


@pytest.mark.parametrize("name", ["ListOffsets", "LIST_OFFSETS", "list_offsets", ApiKey.LIST_OFFSETS, 2])
async def test_an_api_is_named_by_string_or_key(name: Any) -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:
        cluster.intercept(name, fail_next())
        assert await _refused(wire, ("t", 0), ("t", 0)) == [True, False]


async def test_a_fault_strikes_the_topic_and_partition_that_it_names() -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:
        keys = ("a", 0), ("a", 1), ("b", 1)
        for conditions, expected in (
            ({"topic": "a"}, [True, True, False]),
            ({"topic": "a", "partition": 1}, [False, True, False]),
            ({"partition": 1}, [False, True, True]),
            ({"node_id": 1}, [True, True, True]),
        ):
            cluster.intercept("ListOffsets", fail_next(None), **conditions)  # type: ignore[arg-type]
            assert await _refused(wire, *keys) == expected
            cluster.intercept("ListOffsets", None, node_id=conditions.get("node_id"))  # type: ignore[arg-type]
            assert await _refused(wire, *keys) == [False] * 3


async def test_a_fault_may_remove_itself() -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:

        def remove(*_: Any) -> None:
            cluster.intercept("ListOffsets", None)

        cluster.intercept("ListOffsets", remove)
        assert await _refused(wire, ("t", 0), ("t", 0)) == [False, False]


async def test_the_count_of_a_fault_counts_only_requests_that_it_received() -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:
        cluster.intercept("ListOffsets", fail_next(2), topic="b")
        assert await _refused(wire, ("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 0)) == [
            False,
            True,
            False,
            True,
            False,
        ]


async def test_the_more_precise_fault_comes_first() -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:
        cluster.intercept("ListOffsets", fail_next(1, "NOT_CONTROLLER"))
        cluster.intercept("ListOffsets", fail_next(1, ErrorCode.SHUTTING_DOWN), topic="a")
        codes = [(await wire.call(list_offsets("a", 0))).error_code for _ in range(3)]
        assert codes == [ErrorCode.SHUTTING_DOWN, ErrorCode.NOT_CONTROLLER, 0]


async def test_a_probability_is_drawn_from_the_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        async with Cluster(seed=seed) as cluster, WireClient(cluster.bootstrap_servers) as wire:
            cluster.intercept("ListOffsets", fail_next(None), probability=0.5)
            runs.append(await _refused(wire, *[("t", 0)] * 40))
    assert runs[0] == runs[1] != runs[2]
    assert 5 < sum(runs[0]) < 35


@pytest.mark.parametrize(
    ("api", "fault", "conditions", "message"),
    [
        ("Prodcue", drop_next(), {}, "did you mean 'Produce'"),
        ("find coordinator!", drop_next(), {}, "did you mean 'FindCoordinator'"),
        ("Heartbeat", drop_next(), {}, "did you mean 'ConsumerGroupHeartbeat'"),
        ("JOIN_GROUP", drop_next(), {}, "did you mean 'ConsumerGroupHeartbeat'"),
        ("", drop_next(), {}, "such as 'Produce'"),
        (9_999, drop_next(), {}, "api is 9999"),
        (True, drop_next(), {}, "api is True"),
        ("Produce", drop_next(), {"topic": 7}, "topic is 7, but must be the name of a topic"),
        ("Produce", drop_next(), {"topic": b"t"}, "the name of a topic"),
        ("Produce", drop_next(), {"partition": "0"}, "partition is '0'"),
        ("Produce", drop_next(), {"partition": -1}, "0 or more"),
        ("FindCoordinator", drop_next(), {"topic": "t"}, "whose requests name no topic"),
        ("Metadata", drop_next(), {"topic": "t", "partition": 0}, "whose requests name no partition"),
        ("ReplicaFetch", drop_next(), {"topic": "t"}, "whose requests name no topic"),
        ("Produce", drop_next(), {"probability": 0}, "above 0 and at most 1"),
        ("Produce", drop_next(), {"probability": 50}, "above 0 and at most 1"),
        (
            "Produce",
            drop_next(),
            {"probability": "a"},
            "probability is 'a', but must be above 0 and at most 1",
        ),
        ("Produce", drop_next(), {"probability": None}, "above 0 and at most 1"),
        ("Produce", drop_next(), {"node_id": 2}, "node_id is 2, but must be one of 1"),
        ("Produce", drop_next, {}, "a fault, such as fail_next()"),
        ("Produce", "drop", {}, "a fault, such as fail_next()"),
    ],
)
def test_a_mistake_is_refused(api: Any, fault: Any, conditions: dict[str, Any], message: str) -> None:
    with SyncCluster() as cluster, pytest.raises(ConfigError, match=message):
        cluster.intercept(api, fault, **conditions)


def test_a_mistake_in_a_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'NOT_CONTROLLER'"):
        fail_next(error_code="NOT_CONTROLER")
    for count in (0, -1, "2", True):
        with pytest.raises(ConfigError, match="1 or more"):
            delay_next(count, delay_ms=1)  # type: ignore[arg-type]


def test_requests_say_who_asked_what_and_when() -> None:
    with SyncCluster() as cluster:
        with sync.Producer(cluster.bootstrap_servers, client_id="shop") as producer:
            producer.send("orders", b"1", partition=0).result(10)
        (request,) = cluster.requests.of("Produce", topic="orders", partition=0, client_id="shop")
        assert (request.api, request.client_id, request.node_id) == ("Produce", "shop", 1)
        assert request.partitions == (TopicPartition("orders", 0),)
        assert abs(request.time_ms - cluster.cluster.clock.wall_ms()) < 60_000
        assert cluster.requests.of("Produce", topic="others") == []
        assert cluster.requests.of("Produce", client_id="others") == []
        assert cluster.requests.of("Fetch") == []
        assert next(each.api for each in cluster.requests) == "ApiVersions"
        with pytest.raises(ConfigError, match="did you mean 'Produce'"):
            cluster.requests.of("Prodduce")
        with pytest.raises(ConfigError, match="name no topic"):
            cluster.requests.of("EndTxn", topic="orders")
        cluster.requests.clear()
        assert len(cluster.requests) == 0


async def test_a_refused_request_is_recorded_too() -> None:
    async with Cluster() as cluster:
        await cluster.create_topic("t")
        cluster.intercept("Produce", fail_next(2), topic="t")
        await cluster.produce("t", [b"1"])
        assert len(cluster.requests.of("Produce", topic="t")) == 3


async def test_requests_of_nodes_are_not_recorded() -> None:
    async with Cluster(brokers=2) as cluster:
        await cluster.create_topic("t")
        await cluster.produce("t", [b"1"])
        assert cluster.statistics().requests["REPLICA_FETCH"] > 0
        assert cluster.requests.of("ReplicaFetch") == []
        assert len(cluster.requests.of("CreateTopics", topic="t")) >= 1


def test_the_memory_of_requests_is_bounded() -> None:
    log = RequestLog()
    for number in range(KEPT_REQUESTS + 5):
        log.add(ClientRequest("Fetch", "", (), (), number, 1))
    assert len(log) == KEPT_REQUESTS
    assert log[0].time_ms == 5
    assert sys.getsizeof(log[0]) < 200


def test_the_topics_of_every_kind_of_request_are_found() -> None:
    key = TopicPartition("t", 3)
    for message, expected in (
        (list_offsets("t", 3), (("t",), (key,))),
        (groups.OffsetFetchRequest("g", "", 0, False, [groups.GroupPartition("t", 3)]), (("t",), (key,))),
        (groups.OffsetFetchRequest("g", "", 0, False, None), ((), ())),
        (metadata.MetadataRequest(["t", "u"], False), (("t", "u"), ())),
        (admin.CreateTopicsRequest(1, False, [admin.NewTopic("t", 1, 1, {})]), (("t",), ())),
        (admin.DeleteTopicsRequest(1, ["t"]), (("t",), ())),
        (
            admin.DescribeConfigsRequest(
                [admin.ConfigResource(*each) for each in (("topic", "t"), ("broker", "1"))]
            ),
            (("t",), ()),
        ),
        (groups.FindCoordinatorRequest(*_blank(groups.FindCoordinatorRequest)), ((), ())),
    ):
        assert names_in(message) == expected, message
    assert {API_KEY_BY_REQUEST[api.request] for api in APIS.values()} == set(ApiKey)


def _blank(kind: type) -> list[Any]:
    return [[] for _ in kind._fields]  # type: ignore[attr-defined]
