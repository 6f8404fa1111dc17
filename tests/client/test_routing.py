"""The metadata cache, response by response."""

from __future__ import annotations

from kafkalite.client.cluster.routing import NO_NODE, Leader, MetadataCache
from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.metadata import (
    BrokerMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)

T0 = TopicPartition("t", 0)


def _partition(number: int, leader: int = 1, epoch: int = 1) -> PartitionMetadata:
    return PartitionMetadata(0, number, leader, epoch, 0, [1], [1], [])


def _topic(
    *partitions: PartitionMetadata, name: str = "t", topic_id: str = "a", code: int = 0
) -> TopicMetadata:
    return TopicMetadata(code, "why" if code else None, name, topic_id, False, list(partitions))


def _response(*topics: TopicMetadata, brokers: tuple[int, ...] = (1,)) -> MetadataResponse:
    listed = [BrokerMetadata(node_id, f"host:{node_id}", None) for node_id in brokers]
    return MetadataResponse(0, None, "cluster", 1, listed, list(topics))


def _cache(*topics: TopicMetadata) -> MetadataCache:
    cache = MetadataCache()
    cache.update(_response(*topics), complete=False)
    return cache


def test_it_knows_leaders_and_counts() -> None:
    cache = _cache(_topic(_partition(1, leader=2), _partition(0)))
    assert cache.leader(T0) == Leader(1, 1)
    assert cache.leader(TopicPartition("t", 1)) == Leader(2, 1)
    assert cache.partition_count("t") == 2
    assert cache.partitions(["x", "t"]) == [T0, TopicPartition("t", 1)]
    assert (cache.cluster_id, cache.controller_id, cache.addresses) == ("cluster", 1, {1: "host:1"})


def test_unknown_partitions_have_no_leader() -> None:
    cache = _cache(_topic(_partition(0)))
    for tp in (TopicPartition("x", 0), TopicPartition("t", 1), TopicPartition("t", -1)):
        assert cache.leader(tp).node_id == NO_NODE
    assert cache.partition_count("x") is None


def test_an_older_leader_epoch_never_replaces_a_newer_one() -> None:
    """KIP-320"""
    cache = _cache(_topic(_partition(0, leader=2, epoch=5)))
    assert not cache.update(_response(_topic(_partition(0, leader=1, epoch=4))), complete=False)
    assert cache.leader(T0) == Leader(2, 5)
    assert cache.update(_response(_topic(_partition(0, leader=3, epoch=6))), complete=False)
    assert cache.leader(T0) == Leader(3, 6)


def test_a_recreated_topic_starts_over() -> None:
    cache = _cache(_topic(_partition(0, epoch=9), _partition(1)))
    cache.update(_response(_topic(_partition(0, leader=4, epoch=0), topic_id="b")), complete=False)
    assert cache.leader(T0) == Leader(4, 0)
    assert cache.partition_count("t") == 1


def test_an_unchanged_response_changes_nothing() -> None:
    cache = _cache(_topic(_partition(0)))
    assert not cache.update(_response(_topic(_partition(0))), complete=False)


def test_a_partition_missing_in_between_has_no_leader() -> None:
    cache = _cache(_topic(_partition(2)))
    assert cache.partition_count("t") == 3
    assert cache.leader(T0).node_id == NO_NODE
    assert cache.leader(TopicPartition("t", 2)).node_id == 1


def test_a_complete_response_drops_omitted_topics() -> None:
    cache = _cache(_topic(_partition(0)), _topic(name="gone", code=int(ErrorCode.LEADER_NOT_AVAILABLE)))
    cache.update(_response(_topic(_partition(0), name="other")), complete=True)
    assert list(cache.topics) == ["other"]
    assert cache.errors == {}


def test_errors_of_topics() -> None:
    cache = _cache(_topic(_partition(0)))
    cache.update(
        _response(
            _topic(code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)),
            _topic(name="bad", code=int(ErrorCode.INVALID_TOPIC_EXCEPTION)),
            _topic(name="new", code=int(ErrorCode.LEADER_NOT_AVAILABLE)),
        ),
        complete=False,
    )
    assert cache.partition_count("t") is None, "a deleted topic is forgotten"
    assert cache.fatal_error("t") is None, "it may be about to be created"
    assert cache.fatal_error("new") is None
    assert cache.fatal_error("bad") == (ErrorCode.INVALID_TOPIC_EXCEPTION, "why")
    assert cache.fatal_error("never-asked") is None
    cache.update(_response(_topic(_partition(0), name="bad")), complete=False)
    assert cache.fatal_error("bad") is None
