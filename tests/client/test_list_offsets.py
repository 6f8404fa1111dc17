"""Listing offsets: leaders that move, omitted partitions, and exact records by time."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.client.cluster import list_offsets as module
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.list_offsets import list_offsets, offsets_for_times
from kafkalite.client.config import admin_config
from kafkalite.errors import (
    ErrorCode,
    InvalidRequestError,
    KafkaStorageError,
    LeaderNotAvailableError,
    OffsetOutOfRangeError,
)
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP, TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.records.builder import build_batch
from kafkalite.rng import seeded_rng

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


async def _cluster(broker: Any) -> ClusterClient:
    settings = {
        "bootstrap.servers": broker.address,
        "retry.backoff.ms": 1,
        "retry.backoff.max.ms": 5,
        "reconnect.backoff.ms": 1,
    }
    cluster = ClusterClient(admin_config(settings), rng=seeded_rng(1))
    await cluster.start()
    return cluster


async def test_each_leader_is_asked_for_its_partitions(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    first.topics["t"] = 2
    first.leaders |= {("t", 0): 1, ("t", 1): 2}
    first.append("t", 1, build_batch([b"x", b"y"]))
    cluster = await _cluster(first)
    found = await list_offsets(cluster, {T1: LATEST, T0: LATEST})
    assert [(tp, entry.offset) for tp, entry in found.items()] == [(T1, 2), (T0, 0)]
    assert second.count(ApiKey.LIST_OFFSETS) == 1
    first.leaders["t", 1] = 1
    first.epochs["t", 1] = 2
    assert (await list_offsets(cluster, {T1: EARLIEST}))[T1].offset == 0
    await cluster.close()


async def test_only_missing_partitions_are_requested_again(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 2
    fake_broker.fault(
        ApiKey.LIST_OFFSETS, make_fault(code=int(ErrorCode.OFFSET_NOT_AVAILABLE), only=("t", 1)), times=2
    )
    cluster = await _cluster(fake_broker)
    assert len(await list_offsets(cluster, {T0: LATEST, T1: LATEST})) == 2
    asked = [r.message.partitions for r in fake_broker.requests if r.api_key == ApiKey.LIST_OFFSETS]
    assert [len(partitions) for partitions in asked] == [2, 1, 1]
    await cluster.close()


async def test_final_errors_and_timeouts(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    cluster = await _cluster(fake_broker)
    fake_broker.fault(ApiKey.LIST_OFFSETS, make_fault(code=int(ErrorCode.INVALID_REQUEST)))
    with pytest.raises(InvalidRequestError, match="t-0"):
        await list_offsets(cluster, {T0: LATEST})
    fake_broker.leaders["t", 0] = -1
    fake_broker.epochs["t", 0] = 2
    cluster.request_refresh(urgent=True)
    await cluster.changed(cluster.now_ms() + 1000)
    with pytest.raises(LeaderNotAvailableError, match="t-0 has no leader"):
        await list_offsets(cluster, {T0: LATEST}, timeout_ms=20)
    await cluster.close()


async def test_r24_a_storage_error_is_final_after_a_while(
    fake_broker: Any, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader change may help at first, but the end of a damaged log stays unknown."""
    fake_broker.topics["t"] = 1
    cluster = await _cluster(fake_broker)
    error = make_fault(code=int(ErrorCode.KAFKA_STORAGE_ERROR))
    fake_broker.fault(ApiKey.LIST_OFFSETS, error, times=2)
    assert (await list_offsets(cluster, {T0: LATEST}))[T0].offset == 0
    fake_broker.fault(ApiKey.LIST_OFFSETS, error, times=1_000)
    monkeypatch.setattr(module, "STORAGE_ERROR_PATIENCE_MS", 100)  # instead of 5 s
    with pytest.raises(KafkaStorageError, match="t-0"):
        await list_offsets(cluster, {T0: LATEST})
    await cluster.close()


async def test_a_time_is_found_to_the_record(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.topics["t"] = 1
    fake_broker.append("t", 0, build_batch([b"a", b"b", b"c"], None, [50, 30, 70]))
    fake_broker.append("t", 0, build_batch([b"d"], None, [60]))
    cluster = await _cluster(fake_broker)
    for wanted, offset, time_ms in ((0, 0, 50), (51, 2, 70), (70, 2, 70), (MAX_TIMESTAMP, 2, 70)):
        found = (await offsets_for_times(cluster, {T0: wanted}))[T0]
        assert found is not None
        assert (found.offset, found.timestamp_ms, found.leader_epoch) == (offset, time_ms, 1)
    assert (await offsets_for_times(cluster, {T0: 71}))[T0] is None
    fake_broker.fault(ApiKey.FETCH, make_fault(code=int(ErrorCode.OFFSET_OUT_OF_RANGE)))
    with pytest.raises(OffsetOutOfRangeError, match="t-0"):
        await offsets_for_times(cluster, {T0: 51})
    fake_broker.logs["t", 0].read = lambda offset, max_bytes: b""
    found = (await offsets_for_times(cluster, {T0: 51}))[T0]
    assert found is not None and found.offset == 0, "what was deleted meanwhile: where the batch began"
    await cluster.close()
