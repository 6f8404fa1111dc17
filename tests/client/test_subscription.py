"""Subscriptions under changing metadata: no single response invalidates a position."""

from __future__ import annotations

import pytest

from kafkalite.client.cluster.routing import MetadataCache
from kafkalite.client.consumer.subscription import FORGET_AFTER_MS, Subscription
from kafkalite.errors import ErrorCode
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.metadata import MetadataResponse, PartitionMetadata, TopicMetadata

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def _tell(cache: MetadataCache, *, count: int = 2, topic_id: str = "a", controller_id: int = 1) -> None:
    """Apply a response with ``count`` partitions of t; with none, one that does not know t."""
    partitions = [PartitionMetadata(0, number, 1, 1, 0, [1], [1], []) for number in range(count)]
    code = 0 if count else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    topic = TopicMetadata(code, None, "t", topic_id if count else "", False, partitions)
    cache.update(MetadataResponse(0, None, "c", controller_id, [], [topic]), complete=False)


@pytest.fixture(params=["names", "pattern"])
def subscription(request: pytest.FixtureRequest) -> Subscription:
    return (
        Subscription(["t"], None, "latest") if request.param == "names" else Subscription([], "t", "latest")
    )


def test_a_topic_is_kept_until_responses_omit_it_for_long_enough(subscription: Subscription) -> None:
    cache = MetadataCache()
    assert subscription.select(cache, 0) == ({}, {}, False)
    _tell(cache)
    assert subscription.select(cache, 0) == ({T0: "latest", T1: "latest"}, {}, False)
    _tell(cache, count=0)
    assert list(subscription.select(cache, 10).partitions) == [T0, T1]
    assert subscription.select(cache, 10 * FORGET_AFTER_MS).is_missing_some, "that is the same answer"
    _tell(cache, count=0)
    assert list(subscription.select(cache, 9 + FORGET_AFTER_MS).partitions) == [T0, T1]
    _tell(cache, count=0)
    assert subscription.select(cache, 10 + FORGET_AFTER_MS) == ({}, {}, False)


def test_responses_without_a_controller_drop_nothing(subscription: Subscription) -> None:
    cache = MetadataCache()
    _tell(cache)
    subscription.select(cache, 0)
    for now_ms in (0, FORGET_AFTER_MS, 10 * FORGET_AFTER_MS):
        _tell(cache, count=0, controller_id=-1)
        assert subscription.select(cache, now_ms).is_missing_some
    _tell(cache, count=1)
    selection = subscription.select(cache, 10 * FORGET_AFTER_MS)
    assert (list(selection.partitions), selection.is_missing_some) == ([T0, T1], False)
    assert not selection.replaced, "it has the id it had"


@pytest.mark.parametrize("is_seen_missing", [True, False])
def test_a_topic_with_another_id_starts_over(subscription: Subscription, is_seen_missing: bool) -> None:
    cache = MetadataCache()
    _tell(cache)
    subscription.select(cache, 0)
    if is_seen_missing:
        _tell(cache, count=0)
        subscription.select(cache, 1)
    _tell(cache, count=1, topic_id="b")
    assert subscription.select(cache, 2) == ({T0: "earliest"}, {T0: "earliest"}, False)
    assert subscription.select(cache, 3).replaced == {}
