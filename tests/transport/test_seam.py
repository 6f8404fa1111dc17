"""What every transport promises, checked on each of them, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from kafkalite.errors import ConnectionFailedError, ListenError
from kafkalite.transport import Transport, transport_for
from kafkalite.transport.tls import TlsTransport
from kafkalite.transport.tls_context import TlsContext
from proof.certificates import DevCertificates
from proof.waiting import eventually

ADDRESSES = {"tcp": "127.0.0.1:0", "inproc": "inproc://"}
STREAMS = [*ADDRESSES, *(f"TLS over {name}" for name in ADDRESSES)]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=STREAMS)
def address(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, dev_certificates: DevCertificates
) -> str:
    """An address to listen on. For TLS, the transport of every address encrypts."""
    if request.param not in ADDRESSES:
        config = dev_certificates.config("broker.pem")
        server, client = TlsContext(config, client_auth="none"), TlsContext(config)
        below = transport_for
        monkeypatch.setitem(
            globals(), "transport_for", lambda address: Encrypted(below(address), server, client)
        )
    return ADDRESSES[request.param.rpartition(" ")[2]]


class Encrypted(TlsTransport):
    """Listens with the context of a server, and connects with that of a client."""

    def __init__(self, below: Transport, server: TlsContext, client: TlsContext) -> None:
        super().__init__(below, client)
        self.listen = TlsTransport(below, server).listen  # type: ignore[method-assign]


@pytest.fixture(params=sorted(LOOPS))
def run(request: pytest.FixtureRequest) -> Any:
    """Run a coroutine on each kind of loop."""

    def run(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(coroutine)

    return run


class Joined:
    """A listener, and a connection through it: ``client`` and ``server`` are its two recorders."""

    def __init__(self, address: str, recorder: Callable[..., Any], **options: Any) -> None:
        self._address, self._recorder, self._options = address, recorder, options

    async def __aenter__(self) -> Joined:
        self.accepted: list[Any] = []

        def accept() -> Any:
            self.accepted.append(self._recorder(**self._options))
            return self.accepted[-1]

        self.listener = await transport_for(self._address).listen(self._address, accept)
        self.client = await transport_for(self.listener.address).connect(
            self.listener.address, self._recorder
        )
        self.server = await self.accept(1)
        return self

    async def accept(self, count: int) -> Any:
        """Return the last of ``count`` accepted protocols, once it is connected."""
        await eventually(lambda: len(self.accepted) >= count and self.accepted[-1].transport is not None)
        return self.accepted[-1]

    async def __aexit__(self, *exc_info: object) -> None:
        self.listener.close()
        for end in (self.client, *self.accepted):
            end.transport.abort()
            await end.lost
        await self.listener.wait_closed()


def test_the_address_decides_which_transport_carries_the_bytes(run: Any, recorder: Any) -> None:
    """The same name means two addresses: a socket of the kernel, and an object of this process."""

    async def check() -> None:
        async with Joined("127.0.0.1:0", recorder) as over_tcp:
            port = over_tcp.listener.address.rpartition(":")[2]
            async with Joined(f"inproc://127.0.0.1:{port}", recorder) as in_process:
                sockets = [
                    joined.client.transport.get_extra_info("socket") for joined in (over_tcp, in_process)
                ]
                assert sockets[0].getpeername() == ("127.0.0.1", int(port))
                assert sockets[1] is None
                over_tcp.client.transport.write(b"tcp")
                in_process.client.transport.write(b"inproc")
                assert await over_tcp.server.read(3) == b"tcp"
                assert await in_process.server.read(6) == b"inproc"

    run(check())


def test_bytes_arrive_in_order_both_ways(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        async with Joined(address, recorder, buffer_bytes=7) as joined:
            joined.client.transport.write(b"hello ")
            joined.client.transport.writelines([b"", bytearray(b"wor"), memoryview(b"ld"), b"!" * 100])
            assert await joined.server.read(111) == b"hello world" + b"!" * 100
            joined.server.transport.write(b"and back")
            assert await joined.client.read(8) == b"and back"
            assert joined.client.calls == ["made"]

    run(check())


def test_a_large_write_arrives_whole(run: Any, address: str, recorder: Any) -> None:
    data = bytes(range(256)) * 20_000  # 5 MB

    async def check() -> None:
        async with Joined(address, recorder, buffer_bytes=100_001) as joined:
            joined.client.transport.write(data)
            assert await joined.server.read(len(data)) == data

    run(check())


def test_close_delivers_what_was_written_and_then_the_end(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        async with Joined(address, recorder) as joined:
            joined.client.transport.write(b"last words")
            joined.client.transport.close()
            assert joined.client.transport.is_closing()
            joined.client.transport.close()
            assert await joined.client.lost is None
            assert await joined.server.lost is None
            assert bytes(joined.server.received) == b"last words"
            assert joined.server.calls == ["made", "eof", "lost"]
            assert joined.client.calls == ["made", "lost"]

    run(check())


def test_half_close(run: Any, address: str, recorder: Any) -> None:
    """The client has sent its last request; the server still responds."""

    async def check() -> None:
        async with Joined(address, recorder) as joined:
            joined.server.keep_open_at_eof = True
            assert joined.client.transport.can_write_eof()
            joined.client.transport.write(b"question")
            joined.client.transport.write_eof()
            await joined.server.read(8)
            await eventually(lambda: "eof" in joined.server.calls)
            joined.server.transport.write(b"answer")
            assert await joined.client.read(6) == b"answer"
            joined.server.transport.close()
            assert await joined.client.lost is None

    run(check())


def test_abort_reaches_the_other_end(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        async with Joined(address, recorder) as joined:
            joined.client.transport.write(b"x")
            await joined.server.read(1)
            joined.client.transport.abort()
            assert await joined.client.lost is None
            assert await joined.server.lost is None or "lost" in joined.server.calls

    run(check())


def test_a_reader_that_stops_makes_the_writer_pause(run: Any, address: str, recorder: Any) -> None:
    """Back-pressure: data that the peer does not read is bounded, and flows again when it reads."""

    async def check() -> None:
        async with Joined(address, recorder) as joined:
            writer, reader = joined.client, joined.server
            writer.transport.set_write_buffer_limits(high=10_000, low=1_000)
            reader.transport.pause_reading()
            sent = 0
            while "pause" not in writer.calls and sent < 64 << 20:
                writer.transport.write(b"x" * 8192)
                sent += 8192
                await asyncio.sleep(0)
            assert "pause" in writer.calls
            assert writer.transport.get_write_buffer_size() > 10_000
            assert "resume" not in writer.calls
            reader.transport.resume_reading()
            assert len(await reader.read(sent)) == sent
            await eventually(lambda: "resume" in writer.calls)
            assert writer.transport.get_write_buffer_size() == 0
            assert writer.calls == ["made", "pause", "resume"]

    run(check())


def test_a_connection_to_an_unused_port_is_refused(run: Any, recorder: Any) -> None:
    async def check(address: str) -> None:
        with pytest.raises(ConnectionFailedError, match=f"cannot connect to {address}"):
            await transport_for(address).connect(address, recorder)

    run(check("127.0.0.1:1"))
    run(check("inproc://nobody"))


def test_an_address_in_use(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        transport = transport_for(address)
        listener = await transport.listen(address, recorder)
        with pytest.raises(
            ListenError, match=f"cannot listen on {listener.address}: the (port|name) is in use"
        ):
            await transport.listen(listener.address, recorder)
        listener.close()
        await listener.wait_closed()
        again = await transport.listen(listener.address, recorder)
        assert again.address == listener.address
        assert listener.address in repr(again)
        again.close()
        again.close()
        await again.wait_closed()
        with pytest.raises(ConnectionFailedError):
            await transport.connect(listener.address, recorder)

    run(check())


def test_connections_outlive_their_listener(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        async with Joined(address, recorder) as joined:
            joined.listener.close()
            joined.client.transport.write(b"still here")
            assert await joined.server.read(10) == b"still here"

    run(check())


def test_each_side_has_both_names(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        async with Joined(address, recorder) as joined:
            client, server = joined.client.transport, joined.server.transport
            assert client.get_extra_info("peername") == server.get_extra_info("sockname")
            assert client.get_extra_info("sockname") == server.get_extra_info("peername")
            assert client.get_extra_info("nothing", "default") == "default"

    run(check())


def test_a_protocol_that_fails_breaks_its_connection_only(run: Any, address: str, recorder: Any) -> None:
    async def check() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        async with Joined(address, recorder) as joined:

            def fail(recorder: Any, data: bytes) -> None:
                raise LookupError("a bug")

            joined.server.on_data = fail
            joined.client.transport.write(b"x")
            await joined.server.lost
            await joined.client.lost
            assert any(isinstance(context["exception"], LookupError) for context in told)
            other = await transport_for(joined.listener.address).connect(joined.listener.address, recorder)
            await joined.accept(2)
            other.transport.abort()
            await other.lost

    run(check())
