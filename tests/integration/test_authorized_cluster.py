"""A cluster that enforces access control rules on clients with certificates (S9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite.client.admin.admin import Admin
from kafkalite.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
)
from kafkalite.security.acls import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from kafkalite.testing import Cluster
from proof.waiting import eventually

ON_BOTH_LOOPS = True
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP


def rule(operation: Operation, resource_type: ResourceType, name: str, **more: Any) -> AclBinding:
    fields = {"pattern_type": PatternType.LITERAL, "permission": Permission.ALLOW, **more}
    return AclBinding(
        resource_type, fields["pattern_type"], name, "User:broker", "*", operation, fields["permission"]
    )


def secured(**settings: Any) -> Cluster:
    return Cluster(
        security_protocol="SSL",
        ssl_client_auth="required",
        authorizer_class_name="StandardAuthorizer",
        ssl_principal_mapping_rules="RULE:^CN=([^,]+),.*$/$1/",
        super_users="User:client",
        **settings,
    )


def other_user(cluster: Cluster) -> dict[str, Any]:
    """Return the settings of a client with the certificate of the brokers, which is no super user.

    Nodes are trusted for their proof of the cluster's secret, not for their certificate.
    """
    keystore = cluster.client_settings["ssl_keystore_location"]
    return {"ssl_keystore_location": keystore.replace("client.pem", "broker.pem")}


async def names(admin: Admin) -> list[str]:
    return [topic.name for topic in await admin.list_topics()]


@pytest.mark.parametrize("brokers", [1, 3])
async def test_rules_decide_what_a_user_may_do(brokers: int) -> None:
    async with secured(brokers=brokers) as cluster, cluster.admin() as boss:
        user = other_user(cluster)
        for topic in ("orders", "secret"):
            await cluster.create_topic(topic, replication_factor=brokers)
            await cluster.produce(topic, [b"x"])
        async with cluster.admin(**user) as admin:
            assert await names(admin) == []
            with pytest.raises(ClusterAuthorizationFailedError, match="User:broker may not Alter Cluster"):
                await admin.create_acls([rule(Operation.ALL, TOPIC, "*")])
            with pytest.raises(TopicAuthorizationFailedError, match="may not Delete Topic 'orders'"):
                await admin.delete_topics(["orders"])
        read = [rule(Operation.READ, TOPIC, "ord", pattern_type=PatternType.PREFIXED)]
        await boss.create_acls(read)
        async with asyncio.timeout(20), cluster.producer(**user) as producer:
            with pytest.raises(ClusterAuthorizationFailedError, match="may Write to no topic"):
                await producer.send("orders", b"y")
            await boss.create_acls([rule(Operation.WRITE, TOPIC, "orders")])
            await eventually(lambda: all(len(one.image.acls) == 2 for one in cluster.brokers.values()))
            await producer.send("orders", b"y")
            with pytest.raises(TopicAuthorizationFailedError, match="'secret'"):
                await producer.send("secret", b"y")
            await producer.send("orders", b"z")
        async with asyncio.timeout(20), cluster.admin(**user) as admin:
            assert await names(admin) == ["orders"]
        await boss.create_acls([rule(Operation.READ, GROUP, "readers")])
        settings = {**user, "auto_offset_reset": "earliest"}
        async with (
            asyncio.timeout(20),
            cluster.consumer("orders", group_id="readers", **settings) as consumer,
        ):
            records: list[bytes | None] = []
            while len(records) < 3:
                records += [record.value for record in await consumer.get_many(timeout_ms=1_000)]
            assert records == [b"x", b"y", b"z"]
        with pytest.raises(GroupAuthorizationFailedError, match="'others'"):
            async with (
                asyncio.timeout(20),
                cluster.consumer("orders", group_id="others", **settings) as consumer,
            ):
                await consumer.get_many(timeout_ms=10_000)
        with pytest.raises(TopicAuthorizationFailedError, match="'secret'"):
            async with asyncio.timeout(20), cluster.consumer("secret", **settings) as consumer:
                await consumer.get_many(timeout_ms=10_000)


async def test_nodes_replicate_fail_over_and_restart_without_rules() -> None:
    async with secured(brokers=3) as cluster, cluster.admin() as boss:
        await cluster.create_topic("orders", partitions=3, replication_factor=3)
        await cluster.produce("orders", [b"%d" % number for number in range(100)])
        deny = rule(Operation.ALL, TOPIC, "*", permission=Permission.DENY)
        await boss.create_acls([deny._replace(principal="User:*"), rule(Operation.ALL, TOPIC, "orders")])
        leader = cluster.leader("orders", 0)
        await cluster.kill(leader)
        await cluster.produce("orders", [b"after"], partition=0)
        await cluster.start(leader)
        assert len(await cluster.records("orders")) == 101
        async with cluster.admin(**other_user(cluster)) as admin:
            assert await names(admin) == [], "the restarted node has the rules, too"
        assert len(await boss.describe_acls(AclFilter())) == 2


async def test_a_resource_without_rules_may_be_open() -> None:
    async with secured(allow_everyone_if_no_acl_found=True) as cluster, cluster.admin() as boss:
        await cluster.create_topic("open")
        await cluster.create_topic("closed")
        await boss.create_acls([rule(Operation.READ, TOPIC, "closed")._replace(principal="User:alice")])
        async with cluster.admin(**other_user(cluster)) as admin:
            assert await names(admin) == ["open"]
            with pytest.raises(TopicAuthorizationFailedError, match="'closed'"):
                await admin.delete_topics(["closed"])
            await admin.delete_topics(["open"])
