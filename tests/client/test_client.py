"""Bootstrap, metadata refreshes, reconnecting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kafkalite import Broker
from kafkalite.client.cluster.client import ClusterClient, Purpose
from kafkalite.client.config import admin_config
from kafkalite.errors import (
    ClientClosedError,
    ConnectionFailedError,
    ErrorCode,
    InvalidTopicError,
    KafkaliteError,
    NotControllerError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.rng import seeded_rng
from kafkalite.testing.sim import Simulation
from kafkalite.testing.sim.streams import SimTransport
from proof.waiting import eventually, settle

FAST = {
    "retry.backoff.ms": 1,
    "retry.backoff.max.ms": 5,
    "reconnect.backoff.ms": 1,
    "reconnect.backoff.max.ms": 5,
    "default.api.timeout.ms": 2000,
}


def _client(*addresses: str, auto_create: bool = True, **settings: Any) -> ClusterClient:
    config = admin_config({"bootstrap.servers": ",".join(addresses), **FAST, **settings})
    return ClusterClient(config, allow_auto_topic_creation=auto_create, rng=seeded_rng(1))


async def test_the_bootstrap_connection_is_reused_for_its_broker(fake_broker: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    assert client.metadata.addresses == {1: fake_broker.address}
    assert client.connection_now(1) is not None
    assert len(fake_broker.connections) == 1
    await client.close()
    await client.close()
    assert client.is_closed


async def test_r56_an_older_bootstrap_connection_does_not_replace_a_lost_one(fake_broker: Any) -> None:
    client = _client(fake_broker.address, **{"reconnect.backoff.ms": 1_000})
    await client.start()
    lost = await client.connection(1)
    older = await client._new_connection()  # for metadata; commits were sent on the other one
    lost.give_up()
    await eventually(lambda: client.connection_now(1) is not lost)
    await client._refresh_once()
    assert older.is_open
    assert client.connection_now(1) is not older
    await client.close()


async def test_the_first_address_that_responds_is_used(fake_broker: Any) -> None:
    client = _client("inproc://nobody", fake_broker.address)
    await client.start()
    assert client.metadata.cluster_id == "fake-cluster"
    await client.close()


async def test_an_unreachable_cluster_is_reported_with_all_addresses() -> None:
    client = _client("inproc://nobody", "inproc://nowhere")
    with pytest.raises(ConnectionFailedError, match=r"nobody.*nowhere.*kl dev"):
        await client.start()
    assert client.is_closed


async def test_an_error_names_a_controller_and_a_broker_that_is_not_live(fake_cluster: list[Any]) -> None:
    client = _client(fake_cluster[1].address)
    await client.start()
    address = fake_cluster[0].address
    await fake_cluster[0].stop()
    with pytest.raises(ConnectionFailedError, match=rf"node 1, the controller: .*{address}"):
        await client.connection(1)
    del fake_cluster[1].peers[1]
    await client._refresh_once()
    reason = f"broker 1 is not among the live brokers: it was stopped, or does not respond at {address}"
    with pytest.raises(ConnectionFailedError, match=reason):
        await client.connection(1)
    await client.close()


async def test_an_unknown_host_name_is_named_as_the_cause() -> None:
    with pytest.raises(ConnectionFailedError, match=r"nosuch\.invalid:9092: .*\(check the host name\)"):
        await _client("nosuch.invalid:9092").start()


class Silent(asyncio.BufferedProtocol):
    """A server that accepts connections, reads requests and never responds."""

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(4096)

    def buffer_updated(self, nbytes: int) -> None:
        pass


@pytest.mark.parametrize(
    ("settings", "limit_ms"),
    [
        ({}, 10_000),
        ({"socket.connection.setup.timeout.ms": 3_000}, 3_000),
        ({"default.api.timeout.ms": 2_000}, 2_000),
    ],
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_start_at_ports_that_never_respond_ends_after_the_time_that_its_error_names(
    settings: dict[str, int], limit_ms: int, nodes: int
) -> None:
    reason = rf"silent0:1 did not .* {limit_ms} ms.*another program may listen there"

    async def accept(address: str) -> None:
        await SimTransport().listen(address, Silent)
        await asyncio.sleep(1e6)

    async def open_client() -> float:
        client = ClusterClient(admin_config({"bootstrap.servers": addresses, **settings}))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionFailedError, match=reason):
            await client.start()
        return asyncio.get_running_loop().time() - began_s

    addresses = [f"sim://silent{number}:1" for number in range(nodes)]
    with Simulation(seed=1) as simulation:
        for number, address in enumerate(addresses):
            simulation.host(f"silent{number}").run(accept(address))
        passed_s = simulation.run(open_client(), on=simulation.host("client"))
    assert passed_s == pytest.approx(limit_ms / 1000, abs=0.05)


async def test_a_client_that_opens_survives_the_kills_of_its_broker() -> None:
    """The broker is killed while the client dials, is away for longer than three attempts, and comes back."""
    kills = 5
    killed = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        writers.append(writer)
        if len(writers) == kills:
            listening.close()
            killed.set()

    listening = await asyncio.start_server(die, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    client = _client(f"{host}:{port}", **{"default.api.timeout.ms": 20_000})
    starting = asyncio.ensure_future(client.start())
    async with asyncio.timeout(30):
        await killed.wait()
    await asyncio.sleep(0.3)
    assert not starting.done()
    async with Broker(listeners=f"{host}:{port}"):
        await starting
        await client.close()


async def test_lost_connections_end_the_start_when_the_time_limit_of_calls_has_passed() -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with await asyncio.start_server(die, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        client = _client(f"{host}:{port}", **{"default.api.timeout.ms": 500})
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionFailedError, match=r"closed the connection.*max\.connections"):
            await client.start()
        assert asyncio.get_running_loop().time() - began > 0.3


async def test_a_server_of_another_protocol_is_no_broker_that_closes_connections() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        with pytest.raises(ConnectionFailedError, match=r"the peer speaks HTTP.*another program listens"):
            await _client(f"{host}:{port}").start()


async def test_a_final_error_ends_the_start_at_once(fake_broker: Any, make_fault: Any) -> None:
    fake_broker.always[ApiKey.METADATA] = make_fault(refuse=int(ErrorCode.INVALID_REQUEST))
    client = _client(fake_broker.address)
    with pytest.raises(KafkaliteError, match="refused by the test"):
        await client.start()
    assert fake_broker.count(ApiKey.METADATA) == 1


async def test_a_tracked_topic_gets_its_metadata(fake_broker: Any) -> None:
    fake_broker.topics["t"] = 3
    client = _client(fake_broker.address)
    await client.start()
    assert await client.topic_partition_count("t", client.now_ms() + 1000) == 3
    assert await client.topic_partition_count("t", client.now_ms()) == 3
    assert client.metadata.leader(TopicPartition("t", 2)).node_id == 1
    await client.close()


async def test_a_topic_may_take_a_moment_to_come(fake_broker: Any) -> None:
    client = _client(fake_broker.address, auto_create=False)
    await client.start()
    waiting = asyncio.ensure_future(client.topic_partition_count("late", client.now_ms() + 5000))
    await eventually(lambda: fake_broker.count(ApiKey.METADATA))
    fake_broker.topics["late"] = 2
    assert await waiting == 2
    await client.close()


async def test_a_topic_that_is_never_created_and_an_invalid_one(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address, auto_create=False)
    await client.start()
    with pytest.raises(UnknownTopicOrPartitionError):
        await client.topic_partition_count("never", client.now_ms() + 30)
    fake_broker.always[ApiKey.METADATA] = make_fault(code=int(ErrorCode.INVALID_TOPIC_EXCEPTION))
    with pytest.raises(InvalidTopicError):
        await client.topic_partition_count("b@d", client.now_ms() + 5000)
    await client.close()


async def test_without_any_metadata_the_reason_is_raised(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    fake_broker.always[ApiKey.METADATA] = make_fault(refuse=int(ErrorCode.NOT_CONTROLLER))
    with pytest.raises(NotControllerError):
        await client.topic_partition_count("t", client.now_ms() + 50)
    client.last_error = None
    assert "no metadata" in str(client.topic_error("t"))
    await client.close()


async def test_it_reconnects_when_a_broker_comes_back(fake_broker: Any) -> None:
    changes: list[int] = []
    config = admin_config({"bootstrap.servers": fake_broker.address, **FAST})
    client = ClusterClient(config, on_change=lambda: changes.append(1), rng=seeded_rng(1))
    await client.start()
    await fake_broker.stop()
    await eventually(lambda: client.connection_now(1) is None)
    for _ in range(20):
        client.connection_now(1)
        await asyncio.sleep(0.001)
    with pytest.raises(ConnectionFailedError):
        await client.connection(1)
    await fake_broker.start()
    await eventually(lambda: client.connection_now(1) is not None)
    assert changes
    await client.close()


async def test_refreshing_continues_until_a_broker_responds(fake_broker: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    await fake_broker.stop()
    fake_broker.topics["t"] = 1
    client.track("t")
    await settle()
    assert client.metadata.partition_count("t") is None
    await fake_broker.start()
    await eventually(lambda: client.metadata.partition_count("t") == 1)
    await client.close()


async def test_refreshes_are_not_more_frequent_than_the_backoff(fake_broker: Any) -> None:
    client = _client(fake_broker.address, **{"retry.backoff.ms": 10_000, "retry.backoff.max.ms": 10_000})
    await client.start()
    for _ in range(50):
        client.request_refresh()
        await asyncio.sleep(0)
    assert fake_broker.count(ApiKey.METADATA) == 1
    await client.close()


async def test_a_topic_tracked_during_a_refresh_is_in_the_next(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    held = asyncio.Event()
    fake_broker.fault(ApiKey.METADATA, make_fault(hold=held))
    client.track("a")
    await eventually(lambda: fake_broker.count(ApiKey.METADATA) == 2)
    client.track("b")
    held.set()
    await eventually(lambda: client.metadata.partition_count("b") == 1)
    await client.close()


@pytest.mark.parametrize("refusal", [ErrorCode.NONE, ErrorCode.NOT_CONTROLLER])
async def test_a_topic_tracked_during_a_refresh_does_not_wait_for_the_pause(
    fake_broker: Any, make_fault: Any, refusal: ErrorCode
) -> None:
    client = _client(fake_broker.address, **{"retry.backoff.max.ms": 60_000})
    await client.start()
    await client.refreshed()
    held = asyncio.Event()
    fake_broker.fault(ApiKey.METADATA, make_fault(hold=held, refuse=int(refusal)))
    client.request_refresh()
    await eventually(lambda: fake_broker.count(ApiKey.METADATA) == 3)
    client._refresh_pause_ms = 60_000
    client.track("a")
    held.set()
    await eventually(lambda: client.metadata.partition_count("a") == 1, limit_s=2)
    await client.close()


async def test_metadata_is_fetched_again_by_age(fake_broker: Any) -> None:
    client = _client(fake_broker.address, **{"metadata.max.age.ms": 5})
    await client.start()
    await eventually(lambda: fake_broker.count(ApiKey.METADATA) > 3)
    await client.close()


async def test_each_purpose_has_its_own_connection(fake_broker: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    main = await client.connection(1, Purpose.MAIN)
    fetch = await client.connection(1, Purpose.FETCH)
    assert main is not fetch
    client.drop_connection(1, Purpose.FETCH)
    client.drop_connection(1, Purpose.FETCH)
    assert await client.connection(1, Purpose.FETCH) is not fetch
    assert await client.connection(1, Purpose.MAIN) is main
    await client.close()


@pytest.mark.parametrize("way", ["connection", "call"])
async def test_closing_the_client_during_a_dial_raises_that_it_is_closed(
    fake_broker: Any, make_fault: Any, way: str
) -> None:
    client = _client(fake_broker.address)
    await client.start()
    client.drop_connection(1, Purpose.MAIN)
    fake_broker.always[ApiKey.API_VERSIONS] = make_fault(drop=True)
    before = fake_broker.count(ApiKey.API_VERSIONS)
    ways = {"connection": client.connection(1), "call": client.call(MetadataRequest(None, False), node_id=1)}
    waiting = asyncio.ensure_future(ways.pop(way))
    for unused in ways.values():
        unused.close()
    await eventually(lambda: fake_broker.count(ApiKey.API_VERSIONS) > before)
    await client.close()
    with pytest.raises(ClientClosedError):
        await waiting


async def test_cancelling_a_wait_for_a_dial_leaves_the_dial(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    held = asyncio.Event()
    fake_broker.fault(ApiKey.API_VERSIONS, make_fault(hold=held))
    waiting = asyncio.ensure_future(client.connection(1, Purpose.FETCH))
    await eventually(lambda: fake_broker.count(ApiKey.API_VERSIONS) == 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.set()
    await client.connection(1, Purpose.FETCH)
    assert fake_broker.count(ApiKey.API_VERSIONS) == 2
    await client.close()


async def test_a_broker_that_is_not_in_the_metadata(fake_broker: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    with pytest.raises(ConnectionFailedError, match="broker 9 is not among the live"):
        await client.connection(9)
    await client.close()


async def test_calls_are_retried_until_they_succeed(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    passing = make_fault(refuse=int(ErrorCode.NOT_CONTROLLER))
    fake_broker.fault(ApiKey.METADATA, passing, make_fault(close=True), passing)
    answer = await client.call(MetadataRequest(None, False))
    assert answer.message.cluster_id == "fake-cluster"
    await client.close()


async def test_calls_end_with_the_last_error_in_time(fake_broker: Any, make_fault: Any) -> None:
    client = _client(fake_broker.address)
    await client.start()
    fake_broker.always[ApiKey.METADATA] = make_fault(refuse=int(ErrorCode.NOT_CONTROLLER))
    with pytest.raises(NotControllerError):
        await client.call(MetadataRequest(None, False), node_id=1, timeout_ms=30)
    await client.close()
    with pytest.raises(ClientClosedError):
        await client.call(MetadataRequest(None, False))
    with pytest.raises(ClientClosedError):
        await client.connection(1, Purpose.FETCH)
    with pytest.raises(ClientClosedError):
        await client.changed(0)


async def test_metadata_of_all_topics_when_asked(fake_broker: Any) -> None:
    fake_broker.topics |= {"a": 1, "b": 2}
    client = _client(fake_broker.address)
    client.topics = None
    await client.start()
    assert sorted(client.metadata.topics) == ["a", "b"]
    client.track("c")
    del fake_broker.topics["a"]
    client.request_refresh(urgent=True)
    await eventually(lambda: sorted(client.metadata.topics) == ["b"])
    await client.close()


async def test_a_broker_that_comes_back_elsewhere(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    client = _client(first.address)
    await client.start()
    await client.connection(2)
    await second.stop()
    second.address = f"{second.address}-moved"
    await second.start()
    await eventually(lambda: client.connection_now(2) is not None)
    assert client.metadata.addresses[2] == second.address
    await client.close()


async def test_all_known_brokers_gone_the_bootstrap_addresses_are_tried(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    client = _client(first.address, second.address)
    await client.start()
    del first.peers[2]
    client.request_refresh(urgent=True)
    await eventually(lambda: client.metadata.addresses == {1: first.address})
    await first.stop()
    first.peers[2] = second
    await eventually(lambda: 2 in client.metadata.addresses)
    await client.close()


async def test_metadata_is_fetched_past_a_silent_broker(fake_cluster: list[Any], make_fault: Any) -> None:
    first, second = fake_cluster
    first.always[ApiKey.API_VERSIONS] = make_fault(drop=True)
    client = _client(first.address, second.address)
    async with asyncio.timeout(30):
        await client.start()
        first.topics["t"] = 1
        assert await client.topic_partition_count("t", client.now_ms() + 3000) == 1
    await client.close()


async def test_r23_metadata_comes_from_a_broker_that_reaches_a_controller(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    first.controller_id = -1
    client = _client(first.address, second.address)
    await client.start()
    assert client.metadata.controller_id == 1
    assert first.count(ApiKey.METADATA) == 1
    second.controller_id = -1  # better outdated than none
    client.request_refresh(urgent=True)
    await eventually(lambda: client.metadata.controller_id == -1)
    await client.close()


async def test_outdated_metadata_is_used_if_no_other_broker_can_be_reached(fake_cluster: list[Any]) -> None:
    first, second = fake_cluster
    first.controller_id = -1
    await second.stop()
    client = _client(first.address, second.address)
    await client.start()
    assert client.metadata.addresses
    await client.close()


async def test_a_client_that_knows_no_broker_does_not_warn_of_lost_ones(caplog: Any) -> None:
    client = _client("127.0.0.1:1")
    client._note_lost_majority()
    assert not client.setbacks
    assert caplog.messages == []
