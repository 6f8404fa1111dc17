"""The parts specific to the in-process transport: names, two threads, lost loops, fairness."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from kafkalite.errors import ConnectionFailedError, ListenError
from kafkalite.transport import inproc
from kafkalite.transport.inproc import InprocEnd, InprocTransport
from proof.waiting import eventually

TRANSPORT = InprocTransport()


async def join(recorder: Any, name: str = "inproc://", **options: Any) -> tuple[Any, Any]:
    """Return a client's and a server's protocol, connected; the name is free again."""
    accepted = []
    listener = await TRANSPORT.listen(name, lambda: accepted.append(recorder(**options)) or accepted[0])
    client = await TRANSPORT.connect(listener.address, recorder)
    await eventually(lambda: accepted)
    listener.close()
    return client, accepted[0]


async def end(*protocols: Any) -> None:
    for protocol in protocols:
        protocol.transport.abort()
        await protocol.lost


class TestNames:
    async def test_a_given_name(self, recorder: Any) -> None:
        listener = await TRANSPORT.listen("inproc://mine", recorder)
        assert listener.address == "inproc://mine"
        assert repr(listener) == "<InprocListener inproc://mine>"
        with pytest.raises(
            ListenError, match=r"inproc://mine: the name is in use in this process \(close the"
        ):
            await TRANSPORT.listen("inproc://mine", recorder)
        assert not await TRANSPORT.is_refused("inproc://mine")
        listener.close()
        assert await TRANSPORT.is_refused("inproc://mine")
        with pytest.raises(ConnectionFailedError, match="no listener in this process has that name"):
            await TRANSPORT.connect("inproc://mine", recorder)

    async def test_generated_names_differ_and_avoid_given_ones(self, recorder: Any) -> None:
        first = await TRANSPORT.listen("inproc://", recorder)
        number = int(first.address.removeprefix("inproc://"))
        mine = await TRANSPORT.listen(f"inproc://{number + 1}", recorder)
        second = await TRANSPORT.listen("inproc://", recorder)
        assert len({first.address, mine.address, second.address}) == 3
        for listener in (first, mine, second):
            listener.close()

    async def test_closing_an_old_listener_spares_the_new_one(self, recorder: Any) -> None:
        old = await TRANSPORT.listen("inproc://x", recorder)
        old.close()
        new = await TRANSPORT.listen("inproc://x", recorder)
        old.close()
        assert inproc._listeners["inproc://x"] is new
        new.close()

    async def test_a_listener_closed_before_it_accepted(self, recorder: Any) -> None:
        listener = await TRANSPORT.listen("inproc://", recorder)
        client = await TRANSPORT.connect(listener.address, recorder)
        client.transport.write(b"hello?")
        listener.close()
        assert isinstance(await client.lost, ConnectionResetError)

    async def test_a_factory_that_fails(self, recorder: Any) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

        def fail() -> Any:
            raise LookupError("no more")

        listener = await TRANSPORT.listen("inproc://", fail)
        client = await TRANSPORT.connect(listener.address, recorder)
        assert isinstance(await client.lost, ConnectionResetError)
        assert isinstance(told[0]["exception"], LookupError)
        listener.close()


class TestDelivery:
    async def test_one_read_gathers_what_was_written_in_pieces(self, recorder: Any) -> None:
        client, server = await join(recorder)
        client.transport.writelines([b"a", b"b", b"c"])
        assert await server.read(3) == b"abc"
        assert len(server.hints) == 1
        await end(client, server)

    async def test_a_protocol_is_never_called_from_inside_its_peers_call(self, recorder: Any) -> None:
        client, server = await join(recorder)
        inside: list[str] = []

        def answer(protocol: Any, data: bytes) -> None:
            assert not inside
            inside.append("busy")
            if len(data) < 5:
                protocol.transport.write(data + b"x")
            inside.clear()

        client.on_data = server.on_data = answer
        client.transport.write(b"x")
        assert await server.read(1 + 3) and await server.read(9) == b"x" + b"xxx" + b"xxxxx"
        await end(client, server)

    async def test_views_of_other_shapes(self, recorder: Any) -> None:
        client, server = await join(recorder)
        client.transport.write(memoryview(b"abcdefgh").cast("I"))
        assert await server.read(8) == b"abcdefgh"
        await end(client, server)

    async def test_a_flood_does_not_starve_other_callbacks(self, recorder: Any) -> None:
        """At most one MiB is delivered in one call of the loop."""
        client, server = await join(recorder, buffer_bytes=1 << 20)
        client.transport.write(bytes(3 << 20))
        seen = []
        while len(server.received) < 3 << 20:
            await asyncio.sleep(0)
            seen.append(len(server.received))
        assert sorted(set(seen) - {0}) == [1 << 20, 2 << 20, 3 << 20]
        await end(client, server)

    async def test_pausing_in_the_middle_of_a_delivery(self, recorder: Any) -> None:
        client, server = await join(recorder, buffer_bytes=4)
        server.on_data = lambda protocol, data: protocol.transport.pause_reading()
        client.transport.write(b"aaaabbbb")
        await server.read(4)
        await asyncio.sleep(0)
        assert bytes(server.received) == b"aaaa"
        assert not server.transport.is_reading()
        server.transport.resume_reading()
        assert server.transport.is_reading()
        assert await server.read(8) == b"aaaabbbb"
        await end(client, server)

    async def test_an_empty_buffer_is_the_protocols_error(self, recorder: Any) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        client, server = await join(recorder, buffer_bytes=0)
        client.transport.write(b"x")
        error = await server.lost
        assert "empty buffer" in str(error)
        assert told[0]["exception"] is error
        assert isinstance(await client.lost, ConnectionResetError)

    async def test_eof_received_may_fail(self, recorder: Any) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        client, server = await join(recorder)

        def fail() -> bool:
            raise LookupError("a bug")

        server.eof_received = fail
        client.transport.write_eof()
        assert isinstance(await server.lost, LookupError)
        assert isinstance(await client.lost, ConnectionResetError)
        assert len(told) == 1


class TestClosing:
    async def test_a_writer_paused_on_a_closing_peer_is_resumed(self, recorder: Any) -> None:
        """No reader will receive its data, so it must not wait."""
        client, server = await join(recorder)
        server.transport.pause_reading()
        client.transport.write(bytes(100_000))
        assert client.calls == ["made", "pause"]
        server.transport.close()
        await client.lost
        assert sorted(client.calls[2:]) == ["eof", "lost", "resume"]
        assert client.transport.get_write_buffer_size() == 0

    async def test_what_is_written_after_the_end_is_dropped(self, recorder: Any) -> None:
        client, server = await join(recorder)
        server.transport.close()
        client.transport.write(b"the other end is closing")
        assert client.transport.get_write_buffer_size() == 0
        await client.lost
        client.transport.write(b"this end is closed")
        client.transport.write_eof()
        client.transport.abort()
        assert not server.received

    async def test_a_reset_reaches_a_paused_reader(self, recorder: Any) -> None:
        client, server = await join(recorder)
        server.transport.pause_reading()
        client.transport.write(b"never read")
        client.transport.abort()
        assert isinstance(await server.lost, ConnectionResetError)
        assert not server.received

    async def test_closing_inside_buffer_updated(self, recorder: Any) -> None:
        client, server = await join(recorder, buffer_bytes=1)
        server.on_data = lambda protocol, data: protocol.transport.close()
        client.transport.write(b"abc")
        await client.lost
        assert bytes(server.received) == b"a"

    async def test_failing_after_closing_inside_buffer_updated(self, recorder: Any) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        client, server = await join(recorder)

        def fail(protocol: Any, data: bytes) -> None:
            protocol.transport.close()
            raise LookupError("too late")

        server.on_data = fail
        client.transport.write(b"abc")
        assert await server.lost is None
        assert len(told) == 1
        await client.lost

    async def test_nothing_is_kept_alive(self, recorder: Any) -> None:
        client, server = await join(recorder)
        ends = [weakref.ref(client.transport), weakref.ref(server.transport)]
        client.transport.write(b"x" * 1000)
        await end(client, server)
        del client, server
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() for ref in ends] == [None, None]

    async def test_repr_shows_the_state(self, recorder: Any) -> None:
        client, server = await join(recorder)
        server.transport.pause_reading()
        client.transport.write(b"12345")
        assert repr(client.transport).endswith("open, 5 bytes to send>")
        await end(client, server)
        assert repr(client.transport).endswith("closing, 0 bytes to send>")
        fresh = InprocEnd(asyncio.get_running_loop(), ("a", 1), ("b", 2))
        assert repr(fresh) == "<InprocEnd b#2 opening, 0 bytes to send>"


class TestLimits:
    async def test_as_asyncio_computes_them(self, recorder: Any) -> None:
        client, server = await join(recorder)
        transport = client.transport
        assert transport.get_write_buffer_limits() == (16384, 65536)
        transport.set_write_buffer_limits(high=1000)
        assert transport.get_write_buffer_limits() == (250, 1000)
        transport.set_write_buffer_limits(low=100)
        assert transport.get_write_buffer_limits() == (100, 400)
        transport.set_write_buffer_limits()
        assert transport.get_write_buffer_limits() == (16384, 65536)
        with pytest.raises(ValueError, match="low 5 and high 1"):
            transport.set_write_buffer_limits(high=1, low=5)
        await end(client, server)

    async def test_the_protocol_may_be_exchanged(self, recorder: Any) -> None:
        client, server = await join(recorder)
        other = recorder()
        other.transport = server.transport
        assert server.transport.get_protocol() is server
        server.transport.set_protocol(other)
        client.transport.write(b"x")
        assert await other.read(1) == b"x"
        await end(client, other)


class Thread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def run(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class TestTwoThreads:
    """A blocking client runs its loop in a thread and talks to a broker in another."""

    async def test_every_byte_arrives_under_back_pressure(self, recorder: Any) -> None:
        thread = Thread()
        accepted: list[Any] = []

        class Echo(recorder):  # type: ignore[misc]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                transport.set_write_buffer_limits(high=3000, low=500)
                accepted.append(self)

            def buffer_updated(self, nbytes: int) -> None:
                self.transport.write(bytes(self._buffer[:nbytes]))

            def pause_writing(self) -> None:
                self.transport.pause_reading()

            def resume_writing(self) -> None:
                self.transport.resume_reading()

        listener = await thread.run(TRANSPORT.listen("inproc://", lambda: Echo(buffer_bytes=1000)))
        client = await TRANSPORT.connect(listener.address, recorder)
        client.transport.set_write_buffer_limits(high=5000, low=100)
        sent = bytearray()
        for number in range(2000):
            piece = number.to_bytes(4, "big") * (1 + number % 50)
            sent += piece
            client.transport.write(piece)
            await eventually(lambda: client.calls[-1] != "pause")
        assert await client.read(len(sent)) == sent
        client.transport.close()
        assert await client.lost is None
        await thread.run(_lost(accepted[0]))
        listener.close()
        thread.close()

    async def test_a_loop_that_closed_is_a_reset(self, recorder: Any) -> None:
        thread = Thread()
        listener = await thread.run(TRANSPORT.listen("inproc://", recorder))
        client = await TRANSPORT.connect(listener.address, recorder)
        idle = await TRANSPORT.connect(listener.address, recorder)
        thread.close()
        client.transport.write(b"x")
        assert isinstance(await client.lost, ConnectionResetError)
        idle.transport.close()
        assert await idle.lost is None
        with pytest.raises(ConnectionFailedError, match="the event loop of its broker is closed"):
            await TRANSPORT.connect(listener.address, recorder)
        assert listener.address not in inproc._listeners

    async def test_a_paused_writer_whose_loop_closed_is_released(self, recorder: Any) -> None:
        accepted: list[Any] = []

        def accept() -> Any:
            accepted.append(recorder())
            return accepted[0]

        listener = await TRANSPORT.listen("inproc://", accept)
        thread = Thread()
        client = await thread.run(TRANSPORT.connect(listener.address, recorder))
        await eventually(lambda: bool(accepted and accepted[0].transport))
        server = accepted[0]
        server.transport.pause_reading()
        await thread.run(_write(client, bytes(100_000)))
        assert "pause" in client.calls
        thread.close()
        server.transport.resume_reading()
        assert len(await server.read(100_000)) == 100_000
        server.transport.write(b"anybody there?")
        assert isinstance(await server.lost, ConnectionResetError)
        listener.close()


async def _lost(protocol: Any) -> Any:
    return await protocol.lost


async def _write(protocol: Any, data: bytes) -> None:
    protocol.transport.write(data)
