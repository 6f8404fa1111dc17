"""The ends of sessions, and logins that renew them, while requests are in flight (S8, KIP-368).

A request that the broker accepted in a session gets its response, however late. A request that it accepts
after the session, or behind a login that it refuses, has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.client.cluster.connection import Connection, connect
from kafkalite.client.cluster.login import Login
from kafkalite.client.config import ADMIN_OPTIONS, admin_config
from kafkalite.errors import ErrorCode, RequestTimeoutError, SaslAuthenticationError
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity
from kafkalite.protocol.messages import data
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.records.builder import build_batch
from kafkalite.security.plain import PlainClient
from kafkalite.security.scram import Mechanism, ScramClient
from kafkalite.testing import Cluster
from kafkalite.testing.virtual_clock import VirtualClock
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

PASSWORD = "correct horse battery staple"
METADATA = MetadataRequest([], False)
SESSION_MS = 10_000
SESSION_S = SESSION_MS / 1000


def settings(**more: Any) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "connection_failed_authentication_delay_ms": 1,
        "sasl_enabled_mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN",
        "sasl_allow_plain_without_tls": True,
        "connections_max_reauth_ms": SESSION_MS,
        **more,
    }


@asynccontextmanager
async def virtual(**more: Any) -> AsyncIterator[Cluster]:
    """A broker with the user alice and the topic t, whose sessions take no real time."""
    clock = VirtualClock()
    async with Cluster(**settings(clock=clock, **more)) as cluster:
        await cluster.add_user("alice", PASSWORD)
        await cluster.create_topic("t")
        async with clock.auto_jump():
            yield cluster


def plain(name: str = "alice", password: str = PASSWORD) -> tuple[Any, Any]:
    """Return both requests of a login, which may be sent at once."""
    return SaslHandshakeRequest("PLAIN"), SaslAuthenticateRequest(PlainClient(name, password).first())


async def log_in(wire: WireClient) -> None:
    exchange = ScramClient(Mechanism.SCRAM_SHA_256, "alice", PASSWORD, "client's nonce")
    assert (await wire.call(SaslHandshakeRequest("SCRAM-SHA-256"))).error_code == 0
    message: bytes | None = exchange.first()
    while message is not None:
        response = await wire.call(SaslAuthenticateRequest(message))
        assert response.error_code == 0
        message = exchange.receive(response.auth_bytes)


def fetch(offset: int, wait_ms: int) -> data.FetchRequest:
    return data.FetchRequest(wait_ms, 1, 1_000_000, 0, [data.FetchPartition("t", 0, -1, offset, 1_000_000)])


def produce(size_bytes: int = 1, acks: int = -1) -> tuple[data.ProduceRequest, bytes]:
    batch = bytes(build_batch([bytes(size_bytes)]))
    return data.ProduceRequest(acks, 30_000, None, [data.ProducePartition("t", 0, len(batch))]), batch


def replica(broker: Broker) -> Any:
    """Return the broker's replica of the topic's only partition."""
    return broker.partitions.by_id(broker.image.topics["t"].topic_id, 0).partition


def log_end(cluster: Cluster) -> int:
    end: int = replica(cluster.broker).log.log_end_offset
    return end


async def client(cluster: Cluster, timeout_ms: int = 5_000) -> Connection:
    """Return a client's connection, which renews its session."""
    login = {name.replace("_", "."): text for name, text in cluster.login("alice").items()}
    config = admin_config(
        {option.name: login[option.name] for option in ADMIN_OPTIONS if option.name in login}
    )
    address = cluster.broker.addresses[0]
    return await connect(address, client_id="c", timeout_ms=timeout_ms, login=Login(config))


# --- brokers


async def test_a_fetch_that_waits_at_the_end_of_the_session_gets_its_response() -> None:
    async with virtual() as cluster, WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire)
        began = asyncio.get_running_loop().time()
        wire.send(fetch(0, wait_ms=15_000))
        assert (await wire.response()).message.partitions[0].error_code == 0
        assert asyncio.get_running_loop().time() - began > SESSION_S
        refused = await wire.call(METADATA)
        assert refused.error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert "log in again" in refused.error_message
        await wire.closed()


async def test_pipelined_batches_are_appended_up_to_the_end_of_the_session() -> None:
    """Each batch is acknowledged, or refused and not appended: nothing behind the refusal is served."""
    async with virtual() as cluster, WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire)
        wire.send(fetch(100, wait_ms=15_000))  # the later responses wait for this one
        for number in range(6):
            request, batch = produce()
            wire.send(request, batch)
            await asyncio.sleep(4 if number == 2 else SESSION_S if number == 3 else 0)
        codes = []
        with pytest.raises(ConnectionResetError):
            while True:
                message = (await wire.response()).message
                codes.append(getattr(message, "error_code", 0))
        assert codes == [0] * 5 + [ErrorCode.ILLEGAL_SASL_STATE]
        assert log_end(cluster) == 4


async def test_a_batch_that_waits_for_replicas_at_the_end_of_the_session_is_acknowledged() -> None:
    async with Cluster(brokers=2, controllers=1, **settings(connections_max_reauth_ms=60_000)) as cluster:
        await cluster.add_user("alice", PASSWORD)
        await cluster.create_topic("t", replication_factor=2)
        leader = next(one for one in cluster.brokers.values() if replica(one).is_leader)
        follower = next(node_id for node_id, one in cluster.brokers.items() if one is not leader)
        await eventually(lambda: len(replica(leader).in_sync_replicas) == 2)
        moved = moved_login(leader)
        async with WireClient(leader.addresses[0]) as wire:
            await log_in(wire)
            await cluster.kill(follower)
            for _ in range(2):
                request, batch = produce()
                wire.send(request, batch)
            await eventually(lambda: replica(leader).log.log_end_offset == 2)
            moved(60_001)
            request, batch = produce()
            wire.send(request, batch)
            for offset in range(2):
                partition = (await wire.response()).message.partitions[0]
                assert (partition.error_code, partition.base_offset) == (0, offset)
            assert (await wire.response()).message.error_code == ErrorCode.ILLEGAL_SASL_STATE
            await wire.closed()
            assert replica(leader).log.log_end_offset == 2


def moved_login(broker: Any) -> Callable[[int], None]:
    """Return a function that moves the time of the broker's logins to some ms from now."""
    logins, clock = broker._services.logins, broker._services.logins._clock
    start_ms = clock.monotonic_ms()

    class Moved:
        now_ms = start_ms

        def monotonic_ms(self) -> int:
            return self.now_ms

    moved = logins._clock = Moved()

    def move(after_ms: int) -> None:
        moved.now_ms = start_ms + after_ms

    return move


async def test_a_login_behind_a_fetch_that_waits_renews_the_session() -> None:
    """The session is renewed when the broker reads the login, not when it can send the responses."""
    async with Cluster(**settings()) as cluster:
        await cluster.add_user("alice", PASSWORD)
        await cluster.create_topic("t")
        moved = moved_login(cluster.broker)
        async with WireClient(cluster.broker.addresses[0]) as wire, cluster.producer() as producer:
            for request in plain():
                assert (await wire.call(request)).error_code == 0
            login = next(
                one.client.login
                for one in cluster.broker._server._connections
                if one.client.login is not None and one.client.login.mechanism == "PLAIN"
            )
            ended_ms = login._ends_ms or 0
            moved(SESSION_MS - 1)
            wire.send(fetch(0, wait_ms=20_000))
            for request in (*plain(), METADATA):
                wire.send(request)
            await eventually(lambda: (login._ends_ms or 0) > ended_ms)
            moved(SESSION_MS + 1)
            wire.send(METADATA)
            await producer.send("t", b"x")
            assert [(await wire.response()).message.error_code for _ in range(5)] == [0] * 5


@pytest.mark.parametrize("name", ["mallory", "alice"])
async def test_nothing_behind_a_refused_login_is_served(name: str) -> None:
    """Neither as the user of the connection nor as another. Requests before it get their responses."""
    async with Cluster(**settings(connections_max_reauth_ms=0)) as cluster:
        await cluster.add_user("alice", PASSWORD)
        await cluster.add_user("mallory", "hers")
        await cluster.create_topic("t")
        async with WireClient(cluster.broker.addresses[0]) as wire, cluster.producer() as producer:
            for request in plain():
                assert (await wire.call(request)).error_code == 0
            wire.send(fetch(0, wait_ms=20_000))
            for request in plain(name, "hers"):
                wire.send(request)
            request, batch = produce()
            for _ in range(3):
                wire.send(request, batch)
            connections = cluster.broker._server._connections
            mine = next(one for one in connections if one.client.principal == "User:alice")
            await eventually(lambda: len(mine._queue) >= 3 and mine._queue[2].is_ready)
            await producer.send("t", b"x")
            messages = [(await wire.response()).message for _ in range(3)]
            assert [one.error_code for one in messages[1:]] == [0, ErrorCode.SASL_AUTHENTICATION_FAILED]
            await wire.closed()
            assert log_end(cluster) == 1, "only the batch of the producer"


async def test_a_login_during_a_throttle_time_renews_a_session_that_has_ended() -> None:
    async with virtual() as cluster:
        await limit(cluster)
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await log_in(wire)
            request, batch = produce(20_000)
            wire.send(request, batch)
            assert (await wire.response()).throttle_ms > SESSION_MS
            await log_in(wire)
            assert (await wire.call(METADATA)).error_code == 0
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await log_in(wire)
            wire.send(*produce(20_000))
            assert (await wire.response()).throttle_ms > SESSION_MS
            assert (await wire.call(METADATA)).error_code == ErrorCode.ILLEGAL_SASL_STATE
            await wire.closed()


async def limit(cluster: Cluster) -> None:
    """Allow each client to produce 1 KB per second."""
    async with cluster.admin(**cluster.login("alice")) as admin:
        await admin.alter_client_quotas(QuotaEntity(DEFAULT_ENTITY), {"producer_byte_rate": 1_000})


# --- clients


async def test_a_client_keeps_its_requests_until_a_late_login_is_complete() -> None:
    """The responses of a login wait for those before it. The connection stays, with the request in flight."""
    async with virtual() as cluster:
        connection = await client(cluster)
        accepted = cluster.broker.statistics().connections_accepted
        waiting = asyncio.ensure_future(connection.call(fetch(0, wait_ms=30_000), timeout_ms=60_000))
        await asyncio.sleep(SESSION_S + 2)
        assert not connection.can_write
        with pytest.raises(RequestTimeoutError, match="login that renews the session"):
            await connection.call(METADATA, timeout_ms=1_000)
        began = asyncio.get_running_loop().time()
        await connection.call(METADATA, timeout_ms=60_000)
        assert asyncio.get_running_loop().time() - began > 15
        assert waiting.done() and not waiting.exception()
        assert connection.is_open and connection.can_write
        await asyncio.sleep(5 * SESSION_S)
        await connection.call(METADATA, timeout_ms=1_000)
        assert cluster.broker.statistics().connections_accepted == accepted
        connection.close()


async def test_a_throttled_client_renews_its_session_before_it_sends_what_it_kept() -> None:
    async with virtual() as cluster:
        await limit(cluster)
        connection = await client(cluster)
        slow: list[Connection] = []
        connection.on_slow = slow.append
        for _ in range(3):
            request, batch = produce(20_000)
            await connection.call(request, timeout_ms=60_000, payload_parts=[batch])
            assert not connection.can_write, "throttled for longer than the session"
        await connection.call(METADATA, timeout_ms=60_000)
        assert connection.is_open
        assert not slow, "a broker that throttles is not slow"
        connection.close()


async def test_requests_that_wait_for_a_login_fail_with_it() -> None:
    async with virtual() as cluster:
        connection = await client(cluster)
        await cluster.add_user("alice", "another password")
        waiting = asyncio.ensure_future(connection.call(fetch(0, wait_ms=30_000), timeout_ms=60_000))
        await asyncio.sleep(SESSION_S)
        kept = asyncio.ensure_future(connection.call(METADATA, timeout_ms=60_000))
        await waiting
        with pytest.raises(SaslAuthenticationError, match="wrong password"):
            await kept
        assert not connection.is_open


async def test_closing_a_connection_ends_its_login() -> None:
    asked = asyncio.Event()

    async def never() -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with virtual() as cluster:
        connection = await client(cluster)
        assert connection._login is not None
        connection._login._provider = never  # type: ignore[attr-defined]
        await asked.wait()
        connection.close()
        assert connection._renewing is not None
        await asyncio.wait([connection._renewing], timeout=30)
        assert connection._renewing.cancelled()
