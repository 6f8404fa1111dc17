"""Feature levels of whole clusters: what nodes say of themselves, and what a level allows (R90, R91, R92)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kafkalite.broker.cluster import controller_channel
from kafkalite.errors import InvalidUpdateVersionError, UnsupportedVersionError
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import API_BY_REQUEST, APIS
from kafkalite.raft import controller_node
from kafkalite.testing import Cluster

FEATURE = "metadata.version"
CONTROLLERS = (101, 102, 103)
TP = TopicPartition("t", 0)


@pytest.fixture
async def earlier(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Two brokers and three controllers, whose log was begun by a version without levels."""
    monkeypatch.setattr(controller_node, "newest_levels", list)
    async with Cluster(brokers=2, controllers=3) as cluster:
        yield cluster


async def test_a_cluster_is_upgraded_by_command_when_every_node_runs(earlier: Cluster) -> None:
    """The controllers are no brokers, and say what they support when they connect."""
    async with earlier.admin() as admin:
        await admin.create_topic("t", replication_factor=1)
        (replica,) = (await admin.describe_topic("t")).partitions[0].replicas
        with pytest.raises(UnsupportedVersionError, match="kl cluster features upgrade"):
            await admin.alter_partition_reassignments({TP: [3 - replica]})
        found = (await admin.describe_features())[FEATURE]
        assert (found.finalized_level, found.common_level) == (1, 2)
        assert found.nodes == dict.fromkeys((1, 2, *CONTROLLERS), (1, 2))
        await admin.update_features({FEATURE: 2}, validate_only=True)
        assert (await admin.describe_features())[FEATURE].finalized_level == 1
        await admin.update_features({FEATURE: 2})
        found = (await admin.describe_features())[FEATURE]
        assert (found.finalized_level, found.common_level) == (2, 2)
        await admin.alter_partition_reassignments({TP: [3 - replica]})
        with pytest.raises(InvalidUpdateVersionError, match="can't be lowered"):
            await admin.update_features({FEATURE: 1})


async def test_a_node_that_does_not_run_prevents_the_level_by_name(earlier: Cluster) -> None:
    active = earlier.controller_id
    down = next(node_id for node_id in CONTROLLERS if node_id != active)
    await earlier.stop(down)
    await earlier.stop(2)
    async with earlier.admin() as admin:
        with pytest.raises(InvalidUpdateVersionError) as refused:
            await admin.update_features({FEATURE: 2})
        assert "node 2 (it does not run" in str(refused.value)
        assert f"node {down} (it does not run" in str(refused.value)
        assert (await admin.describe_features())[FEATURE].nodes[down] is None
        await earlier.start(down, 2)
        while (await admin.describe_features())[FEATURE].common_level < 2:
            await asyncio.sleep(0.01)
        await admin.update_features({FEATURE: 2})


async def test_a_broker_of_an_earlier_version_stops_with_the_name_of_the_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Cluster(brokers=2, controllers=1) as cluster:
        await cluster.stop(2)

        def as_earlier(request, _connection):  # type: ignore[no-untyped-def]
            earlier = APIS[API_BY_REQUEST[type(request)].key].request
            return earlier(*request[: len(earlier._fields)])

        monkeypatch.setattr(controller_channel, "readable", as_earlier)
        with pytest.raises(
            UnsupportedVersionError, match=r"metadata\.version 2 is finalised in this cluster"
        ):
            await cluster.restart(2)
