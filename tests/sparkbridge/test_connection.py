"""One blocking connection: responses in order, deadlines, lost connections, errors."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kafkalite.errors import (
    ConnectionFailedError,
    ErrorCode,
    LocalProtocolError,
    NotControllerError,
    RequestTimeoutError,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.data import FetchPartition, FetchRequest
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.testing import SyncCluster, drop_next, fail_next
from sparkbridge.brokers.connection import BrokerConnection


def soon() -> float:
    return time.monotonic() + 10


@pytest.fixture
def connection(cluster: SyncCluster) -> Iterator[BrokerConnection]:
    opened = BrokerConnection.open(cluster.address, client_id="test", deadline_s=soon())
    yield opened
    opened.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def metadata_of(*topics: str) -> MetadataRequest:
    return MetadataRequest(list(topics), False)


def test_a_call_receives_its_response(connection: BrokerConnection, topic: str) -> None:
    reply = connection.call(metadata_of(topic), soon())
    assert [told.name for told in reply.message.topics] == [topic]
    assert connection.in_flight == 0


def test_requests_are_pipelined_and_their_responses_received_in_any_order(
    connection: BrokerConnection, topic: str
) -> None:
    sent = [connection.send(metadata_of(name), soon()) for name in (topic, "absent", topic)]
    assert connection.in_flight == 3
    names = [connection.receive(reply, soon()).message.topics[0].name for reply in reversed(sent)]
    assert names == [topic, "absent", topic]
    assert connection.in_flight == 0


def test_the_response_to_a_dropped_reply_is_skipped(
    cluster: SyncCluster, connection: BrokerConnection, topic: str
) -> None:
    cluster.produce(topic, [b"x" * 500_000], partition=0)
    connection.send(FetchRequest(0, 1, 1 << 20, 0, [FetchPartition(topic, 0, -1, 0, 1 << 20)]), soon())
    reply = connection.call(metadata_of(topic), soon())
    assert reply.message.topics[0].name == topic
    assert connection.in_flight == 0


def test_a_large_payload_is_a_view_of_the_buffer_it_was_received_into(
    cluster: SyncCluster, connection: BrokerConnection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.produce(topic, [bytes([i]) * 100_000 for i in range(5)], partition=0)
    lent: list[memoryview] = []
    protocol = connection._protocol

    class Watching:
        def __getattr__(self, name: str) -> object:
            return getattr(protocol, name)

        def get_buffer(self) -> memoryview:
            lent.append(protocol.get_buffer())
            return lent[-1]

    monkeypatch.setattr(connection, "_protocol", Watching())
    request = FetchRequest(0, 1, 1 << 20, 0, [FetchPartition(topic, 0, -1, 0, 1 << 20)])
    payload = connection.call(request, soon()).payload
    assert isinstance(payload, memoryview)
    assert len(payload) > 500_000
    assert any(buffer.obj is payload.obj for buffer in lent)


def test_an_unanswered_request_ends_at_the_deadline_and_closes_the_connection(
    cluster: SyncCluster, connection: BrokerConnection, topic: str
) -> None:
    cluster.intercept(ApiKey.METADATA, drop_next(1))
    first = connection.send(metadata_of(topic), soon())
    second = connection.send(metadata_of(topic), soon())
    with pytest.raises(RequestTimeoutError, match=cluster.address):
        connection.receive(first, time.monotonic() + 0.05)
    assert not connection.is_open
    with pytest.raises(RequestTimeoutError):
        connection.receive(second, soon())
    with pytest.raises(RequestTimeoutError):
        connection.send(metadata_of(topic), soon())


def test_waiting_leaves_the_connection_open(
    cluster: SyncCluster, connection: BrokerConnection, topic: str
) -> None:
    request = FetchRequest(10_000, 1, 1 << 20, 0, [FetchPartition(topic, 0, -1, 0, 1 << 20)])
    reply = connection.send(request, soon())
    assert not connection.wait(reply, time.monotonic() + 0.05)
    cluster.produce(topic, [b"x"], partition=0)
    assert connection.receive(reply, soon()).message.partitions[0].high_watermark == 1


def test_an_error_of_the_whole_request_is_raised_and_the_connection_stays_open(
    cluster: SyncCluster, connection: BrokerConnection, topic: str
) -> None:
    cluster.intercept(ApiKey.METADATA, fail_next(1, ErrorCode.NOT_CONTROLLER))
    with pytest.raises(NotControllerError):
        connection.call(metadata_of(topic), soon())
    assert connection.call(metadata_of(topic), soon()).message.topics[0].name == topic


def test_a_connection_to_an_unused_port_is_refused(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with pytest.raises(ConnectionFailedError, match=f"{address}.*refused"):
        BrokerConnection.open(address, client_id="test", deadline_s=soon())


@pytest.mark.parametrize("address", ["nowhere", ":9092", "host:", "host:port", "host:99999"])
def test_an_invalid_address_is_named(address: str) -> None:
    with pytest.raises(ConnectionFailedError, match="is not an address"):
        BrokerConnection.open(address, client_id="test", deadline_s=soon())


def test_a_server_that_never_responds_is_abandoned(listener: socket.socket) -> None:
    with pytest.raises(ConnectionFailedError, match="did not respond"):
        BrokerConnection.open(address_of(listener), client_id="test", deadline_s=time.monotonic() + 0.05)


def test_a_server_with_another_protocol_is_named(listener: socket.socket) -> None:
    def speak() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(1000)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            accepted.recv(1000)

    speaker = threading.Thread(target=speak)
    speaker.start()
    with pytest.raises(ConnectionFailedError, match="broke the protocol"):
        BrokerConnection.open(address_of(listener), client_id="test", deadline_s=soon())
    speaker.join(10)


def test_a_connection_that_is_lost_fails_all_that_is_in_flight(topic: str, cluster: SyncCluster) -> None:
    with SyncCluster(transport="tcp") as own:
        own.create_topic(topic)
        connection = BrokerConnection.open(own.address, client_id="test", deadline_s=soon())
        request = FetchRequest(60_000, 1, 1, 0, [FetchPartition(topic, 0, -1, 0, 1)])
        sent = [connection.send(request, soon()) for _ in range(2)]
        own.kill()
        for reply in sent:
            with pytest.raises(ConnectionFailedError, match=connection.address):
                connection.receive(reply, soon())
        assert not connection.is_open


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_server_that_closes_the_connection_in_the_handshake_is_named(
    listener: socket.socket, is_reset: bool
) -> None:
    def hang_up() -> None:
        accepted, _ = listener.accept()
        if is_reset:  # closing with unread bytes resets the connection
            select.select([accepted], [], [], 10)
        else:
            accepted.recv(1_000)
        accepted.close()

    server = threading.Thread(target=hang_up)
    server.start()
    with pytest.raises(ConnectionFailedError, match=r"broke|closed"):
        BrokerConnection.open(address_of(listener), client_id="test", deadline_s=soon())
    server.join(10)


def test_a_server_that_stops_reading_ends_the_sending(
    connection: BrokerConnection, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(listener.getsockname()) as deaf:
        monkeypatch.setattr(connection, "_sock", deaf)
        names = ["t" * 200] * 5_000
        with pytest.raises(RequestTimeoutError, match="accepted no more"):
            for _ in range(100):
                connection.send(metadata_of(*names), time.monotonic() + 0.1)
    assert not connection.is_open
    assert repr(connection).endswith("closed, 0 in flight>")


def test_a_write_interrupted_by_a_signal_closes_the_connection(
    connection: BrokerConnection, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the request may be sent; the next request would be read as its rest."""

    class Interrupted(Exception):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    with socket.create_connection(listener.getsockname()) as deaf:
        monkeypatch.setattr(connection, "_sock", deaf)
        names = ["t" * 200] * 5_000
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Interrupted):
                for _ in range(1_000):
                    connection.send(metadata_of(*names), soon())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert not connection.is_open
    assert connection.in_flight == 0


def test_an_idle_connection_whose_broker_stopped_is_stale() -> None:
    with SyncCluster(transport="tcp") as own:
        connection = BrokerConnection.open(own.address, client_id="test", deadline_s=soon())
        assert not connection.is_stale
        own.kill()
        select.select([connection], [], [], 10)
        assert connection.is_stale
    connection.close()


def test_an_api_that_the_broker_lacks_is_a_local_error(
    connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection._protocol, "_versions", {})
    with pytest.raises(LocalProtocolError):
        connection.send(metadata_of("t"), soon())
    assert connection.in_flight == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_closing_in_a_forked_child_keeps_the_parents_connection(
    connection: BrokerConnection, topic: str
) -> None:
    child = os.fork()
    if child == 0:
        connection.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert connection.call(metadata_of(topic), soon()).message.topics[0].name == topic


def test_a_read_interrupted_by_a_signal_closes_the_connection(
    connection: BrokerConnection, topic: str
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    request = FetchRequest(60_000, 1, 1, 0, [FetchPartition(topic, 0, -1, 0, 1)])
    reply = connection.send(request, soon())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            connection.receive(reply, soon())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reply.is_done
    assert not connection.is_open
