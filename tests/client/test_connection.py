"""One connection: responses, errors, timeouts, and closing by either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from kafkalite.client.cluster import connection as module
from kafkalite.client.cluster.connection import Connection, Response, connect
from kafkalite.errors import (
    ClientClosedError,
    ConnectionFailedError,
    ErrorCode,
    InvalidRequestError,
    RequestTimeoutError,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.metadata import MetadataRequest, MetadataResponse
from proof.waiting import eventually, settle

ALL = MetadataRequest(None, False)


async def _connect(broker: Any, timeout_ms: int = 5000) -> Connection:
    return await connect(broker.address, client_id="test", timeout_ms=timeout_ms)


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_returns_the_response(fake_broker: Any) -> None:
    connection = await _connect(fake_broker)
    answer = await connection.call(ALL, timeout_ms=1000)
    assert answer.message.cluster_id == "fake-cluster"
    assert len(answer.payload) == 0
    assert repr(connection) == f"<Connection to {fake_broker.address}, open, 0 in flight>"
    connection.close()
    await _settle()
    assert "closed" in repr(connection)


async def test_an_error_of_the_whole_request_is_raised_by_name(fake_broker: Any, make_fault: Any) -> None:
    connection = await _connect(fake_broker)
    fake_broker.fault(ApiKey.METADATA, make_fault(refuse=int(ErrorCode.INVALID_REQUEST)))
    with pytest.raises(InvalidRequestError, match="refused by the test"):
        await connection.call(ALL, timeout_ms=1000)
    connection.close()
    await _settle()


async def test_responses_keep_their_order(fake_broker: Any, make_fault: Any) -> None:
    connection = await _connect(fake_broker)
    held = asyncio.Event()
    fake_broker.fault(ApiKey.METADATA, make_fault(hold=held))
    seen: list[int] = []
    for number in range(3):
        connection.request(ALL, lambda *_, number=number: seen.append(number), 1000)
    await _settle()
    assert (seen, connection.in_flight) == ([], 3)
    held.set()
    await eventually(lambda: len(seen) >= 3)
    assert seen == [0, 1, 2]
    connection.close()
    await _settle()


async def test_a_timeout_fails_the_request_and_all_behind_it(
    fake_broker: Any, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWEEP_INTERVAL_S", 0.01)
    connection = await _connect(fake_broker)
    fake_broker.fault(ApiKey.METADATA, make_fault(drop=True))
    impatient = asyncio.ensure_future(connection.call(ALL, timeout_ms=30))
    patient = asyncio.ensure_future(connection.call(ALL, timeout_ms=60_000))
    for waiting in (impatient, patient):
        with pytest.raises(RequestTimeoutError, match="did not respond within 30 ms"):
            await waiting
    await _settle()
    assert not connection.is_open
    with pytest.raises(RequestTimeoutError):
        connection.request(ALL, lambda *_: None, 1000)


async def test_a_cancelled_call_drops_its_response(fake_broker: Any, make_fault: Any) -> None:
    """The responses of cancelled calls arrive, go to no other call, and raise nothing in the loop."""
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context))
    connection = await _connect(fake_broker)
    held = asyncio.Event()
    fake_broker.fault(ApiKey.METADATA, *[make_fault(hold=held, refuse=42) for _ in range(2)])
    calls = [asyncio.ensure_future(connection.call(ALL, timeout_ms=1000)) for _ in range(2)]
    await _settle()
    for call in calls:
        call.cancel()
    await _settle()
    assert all(call.cancelled() for call in calls)
    assert connection.in_flight == 2, "the broker still responds to them"
    held.set()
    assert isinstance((await connection.call(ALL, timeout_ms=1000)).message, MetadataResponse)
    assert (connection.in_flight, raised) == (0, [])
    connection.close()
    await _settle()


async def test_a_held_request_times_out_alone_if_the_throttle_time_grows(fake_broker: Any) -> None:
    connection = await _connect(fake_broker)
    errors: list[Exception | None] = []
    connection._begin_throttle(20)
    connection.request(ALL, lambda *result: errors.append(result[2]), 40)
    connection._begin_throttle(500)
    await eventually(lambda: errors)
    assert isinstance(errors[0], RequestTimeoutError)
    assert "throttles this client" in str(errors[0])
    assert connection.is_open
    connection.close()
    await _settle()


async def test_a_lost_connection_fails_what_is_in_flight(fake_broker: Any, make_fault: Any) -> None:
    connection = await _connect(fake_broker)
    lost: list[Connection] = []
    connection.on_lost = lost.append
    fake_broker.fault(ApiKey.METADATA, make_fault(close=True))
    with pytest.raises(ConnectionFailedError, match="closed the connection"):
        await connection.call(ALL, timeout_ms=1000)
    await _settle()
    assert lost == [connection]
    with pytest.raises(ConnectionFailedError):
        connection.request(ALL, lambda *_: None, 1000)


async def test_closing_fails_what_is_in_flight(fake_broker: Any, make_fault: Any) -> None:
    connection = await _connect(fake_broker)
    fake_broker.fault(ApiKey.METADATA, make_fault(drop=True))
    waiting = asyncio.ensure_future(connection.call(ALL, timeout_ms=1000))
    await _settle()
    connection.close()
    with pytest.raises(ClientClosedError, match="closed by this client"):
        await waiting
    await _settle()


async def test_a_failing_callback_is_reported_and_affects_no_other(fake_broker: Any) -> None:
    connection = await _connect(fake_broker)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def fail(*_: object) -> None:
        raise ValueError("in a callback")

    connection.request(ALL, fail, 1000)
    answer = await connection.call(ALL, timeout_ms=1000)
    assert isinstance(answer, Response)
    assert [str(context["exception"]) for context in reported] == ["in a callback"]
    connection.close()
    await _settle()


async def test_back_pressure_of_the_socket_is_passed_on(fake_broker: Any) -> None:
    connection = await _connect(fake_broker)
    told: list[bool] = []
    connection.on_writable = lambda: told.append(connection.can_write)
    connection.pause_writing()
    assert not connection.can_write
    connection.resume_writing()
    assert told == [True]
    connection.on_writable = None
    connection.pause_writing()
    connection.resume_writing()
    connection.close()
    await _settle()


class _Babbler(asyncio.Protocol):
    """A server of another protocol, or a silent one. ``accepted`` completes with the first connection."""

    words: ClassVar[bytes]
    accepted: ClassVar[asyncio.Future[Any]]
    lost: ClassVar[asyncio.Event]

    def connection_made(self, transport: Any) -> None:
        self.accepted.set_result(transport)
        if self.words:
            transport.write(self.words)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@asynccontextmanager
async def _babble(words: bytes) -> AsyncIterator[str]:
    """Yield the address of the server. At the end, its connection is closed."""
    loop = asyncio.get_running_loop()
    lost = asyncio.Event()
    kind = type("Babbler", (_Babbler,), {"words": words, "accepted": loop.create_future(), "lost": lost})
    server = await loop.create_server(kind, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        (await kind.accepted).abort()
        await lost.wait()


async def test_a_server_of_another_protocol_is_refused() -> None:
    async with _babble(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        with pytest.raises(ConnectionFailedError, match="broke the protocol"):
            await connect(address, client_id="test", timeout_ms=5000)


async def test_connecting_to_a_silent_peer_times_out() -> None:
    async with _babble(b"") as address:
        with pytest.raises(ConnectionFailedError, match="within 50 ms"):
            await connect(address, client_id="test", timeout_ms=50)


async def test_cancelling_a_connect_leaves_nothing_open() -> None:
    async with _babble(b"") as address:
        connecting = asyncio.ensure_future(connect(address, client_id="test", timeout_ms=5000))
        await settle()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_no_broker_at_the_address() -> None:
    with pytest.raises(ConnectionFailedError):
        await connect("inproc://nobody", client_id="test", timeout_ms=50)


async def test_before_it_is_connected() -> None:
    connection = Connection(client_id="test", address="[::1]:9", loop=asyncio.get_running_loop())
    assert connection.peer == "[::1]:9"
    assert not connection.is_open
    with pytest.raises(ConnectionFailedError, match="is closed"):
        connection.request(ALL, lambda *_: None, 1000)


async def test_the_peer_is_named_as_the_system_knows_it() -> None:
    class Transport:
        name: Any = ("::1", 9092, 0, 0)

        def get_extra_info(self, what: str) -> Any:
            return self.name

    connection = Connection(client_id="test", address="localhost:9092", loop=asyncio.get_running_loop())
    transport: Any = Transport()
    connection.connection_made(transport)
    assert connection.peer == "[::1]:9092"
    transport.name = ("127.0.0.1", 9092)
    assert connection.peer == "127.0.0.1:9092"
    transport.name = None
    assert connection.peer == "localhost:9092"
