"""Rules and quotas of users that log in with passwords, over TLS and TCP (S9, S16)."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from kafkalite.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError
from kafkalite.model import QuotaEntity
from kafkalite.security.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from kafkalite.testing import Cluster
from proof.waiting import eventually

ON_BOTH_LOOPS = True


async def test_rules_and_quotas_apply_to_the_user_that_logged_in(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafkalite.client.cluster.connection")
    cluster = Cluster(
        brokers=3,
        transport="tcp",
        security_protocol="SASL_SSL",
        authorizer_class_name="StandardAuthorizer",
        super_users="User:client",
    )
    async with asyncio.timeout(60), cluster, cluster.admin() as boss:
        await cluster.create_topic("orders", replication_factor=3)
        await cluster.create_topic("secret", replication_factor=3)
        for name in ("alice", "bob"):
            await cluster.add_user(name)
        await boss.create_acls(
            [
                AclBinding(
                    ResourceType.TOPIC,
                    PatternType.LITERAL,
                    "orders",
                    f"User:{user}",
                    "*",
                    operation,
                    Permission.ALLOW,
                )
                for user, operation in (
                    ("alice", Operation.WRITE),
                    ("bob", Operation.WRITE),
                    ("bob", Operation.READ),
                )
            ]
        )
        await boss.alter_client_quotas(QuotaEntity("alice"), {"producer_byte_rate": 100_000})
        brokers = cluster.brokers.values()
        await eventually(lambda: all(len(one.image.acls) == 3 and one.image.client_quotas for one in brokers))
        took_s = {}
        for name in ("alice", "bob"):
            caplog.clear()
            async with cluster.producer(**cluster.login(name), compression_type="none") as producer:
                with pytest.raises(
                    TopicAuthorizationFailedError, match=f"User:{name} may not Describe Topic 'secret'"
                ):
                    await producer.send("secret", b"x")
                begun = time.monotonic()
                for _ in range(2):
                    await producer.send("orders", bytes(150_000))
                took_s[name] = time.monotonic() - begun
            assert ("throttled" in caplog.text) == (name == "alice")
        assert took_s["alice"] >= 0.4, "150 KB at 100 KB a second, the second of which waits"
        async with cluster.consumer(
            "orders", auto_offset_reset="earliest", **cluster.login("bob")
        ) as consumer:
            assert len(await consumer.get_many(4, timeout_ms=10_000)) >= 1
        with pytest.raises(TopicAuthorizationFailedError, match="User:alice may not Read Topic 'orders'"):
            async with cluster.consumer(
                "orders", auto_offset_reset="earliest", **cluster.login("alice")
            ) as consumer:
                await consumer.get_many(1, timeout_ms=10_000)
        with pytest.raises(GroupAuthorizationFailedError, match="User:bob"):
            async with cluster.consumer("orders", group_id="g", **cluster.login("bob")) as consumer:
                await consumer.get_many(1, timeout_ms=10_000)
