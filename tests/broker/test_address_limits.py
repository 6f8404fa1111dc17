"""Limits on the connections of each address (S16)."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite import Broker
from kafkalite.broker.addresses import resolve_overrides
from kafkalite.broker.quotas.address_limits import AddressLimits, canonical, parse_overrides
from kafkalite.errors import ConfigError
from proof.waiting import eventually


def test_each_address_has_its_own_count() -> None:
    limits = AddressLimits(2, {"10.0.0.7": 1, "10.0.0.8": 0})
    assert limits.admit("10.0.0.1")
    assert limits.admit("10.0.0.1")
    assert not limits.admit("10.0.0.1")
    assert limits.admit("10.0.0.2")
    assert limits.admit("10.0.0.7")
    assert not limits.admit("10.0.0.7")
    assert not limits.admit("10.0.0.8")
    limits.forget("10.0.0.1")
    assert limits.admit("10.0.0.1")


def test_an_address_without_connections_is_not_kept() -> None:
    limits = AddressLimits(1, {})
    for number in range(1000):
        host = f"10.0.{number // 250}.{number % 250}"
        assert limits.admit(host)
        limits.forget(host)
    assert not limits._counts


def test_an_ipv4_peer_of_an_ipv6_listener_has_one_count() -> None:
    limits = AddressLimits(5, {"10.0.0.7": 1})
    assert limits.admit("10.0.0.7")
    assert not limits.admit("::ffff:10.0.0.7")
    limits.forget("::ffff:10.0.0.7")
    assert limits.admit("10.0.0.7")


def test_addresses_have_one_spelling() -> None:
    assert canonical("::ffff:10.0.0.7") == "10.0.0.7"
    assert canonical("fe80::1%eth0") == "fe80::1"
    assert [canonical(host) for host in ("10.0.0.7", "::1", "inproc")] == ["10.0.0.7", "::1", "inproc"]


async def test_rules_and_quotas_see_the_ipv4_address_of_a_client_of_an_ipv6_listener() -> None:
    """Otherwise neither a rule that denies 127.0.0.1 nor a quota of this address would apply to it."""
    async with Broker(listeners="[::]:0", advertised_listeners="localhost:1") as broker:
        port = int(broker._server.addresses[0].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await eventually(lambda: broker._server.connection_count == 1)
        (connection,) = broker._server._connections
        assert connection.host == connection.client.host == "127.0.0.1"
        assert connection.client.peer.startswith("127.0.0.1:")
        writer.close()


def test_overrides() -> None:
    assert parse_overrides(["10.0.0.7:100", " [::1]:5", "::2:7", "localhost:3"]) == {
        "10.0.0.7": 100,
        "::1": 5,
        "::2": 7,
        "localhost": 3,
    }
    assert resolve_overrides({"127.0.0.1": 4}) == {"127.0.0.1": 4}
    assert resolve_overrides({"localhost": 3})["127.0.0.1"] == 3


@pytest.mark.parametrize("text", ["10.0.0.7", "10.0.0.7:", ":5", "10.0.0.7:-1", "10.0.0.7:many"])
def test_a_wrong_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"max\.connections\.per\.ip\.overrides"):
        Broker(max_connections_per_ip_overrides=text)


async def test_a_broker_closes_further_connections_of_an_address(caplog: pytest.LogCaptureFixture) -> None:
    async with Broker(
        listeners="127.0.0.1:0", max_connections_per_ip=100, max_connections_per_ip_overrides="127.0.0.1:2"
    ) as broker:
        host, _, port = broker.address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        await eventually(lambda: broker._server.connection_count == 2)
        reader, writer = await asyncio.open_connection(host, int(port))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await asyncio.wait_for(reader.readexactly(1), 30)
        writer.close()
        assert "all connections of 127.0.0.1 are open; raise max.connections.per.ip" in caplog.text
        other = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        await eventually(lambda: broker._server.connection_count == 3)
        opened[0][1].transport.abort()
        await eventually(lambda: broker._server.connection_count == 2)
        opened.append(await asyncio.open_connection(host, int(port)))
        await eventually(lambda: broker._server.connection_count == 3)
        for _, each in (*opened, other):
            each.transport.abort()
