"""Simulated streams: data arrives complete and in order, and breaks are reported as TCP reports them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from kafkalite.errors import ConfigError, ConnectionFailedError, ListenError
from kafkalite.testing.sim import Simulation
from kafkalite.testing.sim.network import Tuning
from kafkalite.testing.sim.streams import SimTransport, parse_address

ADDRESS = "sim://server:1"


class Recorder(asyncio.BufferedProtocol):
    """Records its calls, and sends back what it receives if it is an echo."""

    made: ClassVar[list[Recorder]] = []  # the accepted one comes before the dialler

    def __init__(self, *, echoes: bool = False, buffer_bytes: int = 64) -> None:
        self.echoes = echoes
        self.buffer = bytearray(buffer_bytes)
        self.received = b""
        self.events: list[str] = []
        self.transport: Any = None
        Recorder.made.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += bytes(self.buffer[:nbytes])
        if self.echoes:
            self.transport.write(bytes(self.buffer[:nbytes]))

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def pause_writing(self) -> None:
        self.events.append("paused")

    def resume_writing(self) -> None:
        self.events.append("resumed")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("reset" if isinstance(exc, ConnectionResetError) else "lost")


async def serve(*, echoes: bool = True) -> None:
    await SimTransport().listen(ADDRESS, lambda: Recorder(echoes=echoes))
    await asyncio.sleep(1e6)


async def dial() -> Recorder:
    return await SimTransport().connect(ADDRESS, Recorder)


def play(
    story: Callable[[Simulation], Awaitable[None]], *, seed: int = 1, echoes: bool = True, tuning: Any = None
) -> None:
    """Run ``story`` on host "client" against a server on host "server"."""
    Recorder.made = []
    with Simulation(seed) as simulation:
        if tuning is not None:
            simulation.network.tuning = tuning
        simulation.host("server").run(serve(echoes=echoes))
        client = simulation.host("client")

        async def with_server() -> None:
            await asyncio.sleep(0.01)
            await story(simulation)

        simulation.run(with_server(), on=client)
        assert simulation.violations == []


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_completely_and_in_order(seed: int) -> None:
    sent = b"".join(b"%d," % number for number in range(300))

    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        position = 0
        while position < len(sent):
            recorder.transport.writelines([sent[position : position + 7], sent[position + 7 : position + 10]])
            position += 10
            await asyncio.sleep(0.0005)
        await asyncio.sleep(1)
        assert recorder.received == sent

    play(story, seed=seed, tuning=Tuning(jitter_s=0.01, spike_rate=0.2, split_rate=0.5))


def test_a_connection_to_an_unused_port_is_refused() -> None:
    async def story(simulation: Simulation) -> None:
        with pytest.raises(ConnectionFailedError, match="refused"):
            await SimTransport().connect("sim://server:2", Recorder)
        assert await SimTransport().is_refused("sim://server:2")
        assert not await SimTransport().is_refused(ADDRESS)

    play(story)


def test_a_host_that_does_not_respond_refuses_nothing() -> None:
    async def story(simulation: Simulation) -> None:
        simulation.host("server").lose_power()
        assert not await SimTransport().is_refused(ADDRESS)

    play(story)


def test_a_cut_holds_back_and_loses_nothing() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        link = simulation.network.link("client", "server")
        link.cut()
        recorder.transport.write(b"one,")
        recorder.transport.write(b"two")
        await asyncio.sleep(30)
        assert recorder.received == b""
        link.heal()
        recorder.transport.write(b",three")
        await asyncio.sleep(2)
        assert recorder.received == b"one,two,three"

    play(story)


def test_a_cut_may_be_one_way() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        simulation.network.link("server", "client").cut()
        recorder.transport.write(b"heard")
        await asyncio.sleep(1)
        assert recorder.received == b""
        assert Recorder.made[0].received == b"heard"

    play(story)


def test_connecting_over_a_cut_link_waits() -> None:
    async def story(simulation: Simulation) -> None:
        link = simulation.network.link("client", "server")
        link.cut()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await dial()
        link.heal()
        await asyncio.sleep(2)
        assert all(recorder.events in ([], ["made", "reset"]) for recorder in Recorder.made)

    play(story)


def test_the_kernel_closes_the_connections_of_a_killed_peer() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        simulation.host("server").kill()
        await asyncio.sleep(0.1)
        assert recorder.events[-1] in {"lost", "reset"}
        with pytest.raises(ConnectionFailedError):
            await dial()

    play(story)


def test_a_host_without_power_sends_nothing_until_it_is_back() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        server = simulation.host("server")
        server.lose_power()
        recorder.transport.write(b"anybody?")
        await asyncio.sleep(30)
        assert recorder.events == ["made"]
        with pytest.raises(ConnectionFailedError, match="no answer"):
            await dial()
        server.run(serve())
        await asyncio.sleep(5)
        assert recorder.events == ["made", "reset"]
        assert (await dial()).events == ["made"]

    play(story)


def test_a_paused_peer_accepts_and_does_not_answer() -> None:
    async def story(simulation: Simulation) -> None:
        server = simulation.host("server")
        server.pause()
        recorder = await dial()
        recorder.transport.write(b"hello")
        await asyncio.sleep(5)
        assert recorder.received == b""
        server.resume()
        await asyncio.sleep(0.1)
        assert recorder.received == b"hello"

    play(story)


def test_a_reset_breaks_both_sides() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        recorder.transport.write(b"x" * 1000)
        await asyncio.sleep(0.1)
        assert simulation.network.reset_connections("client", "server") == 1
        await asyncio.sleep(0.1)
        assert recorder.events[-1] == "reset"
        assert Recorder.made[0].events[-1] == "reset"
        assert simulation.network.ends() == []

    play(story)


def test_close_sends_what_was_written_first() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        recorder.transport.write(b"last words")
        recorder.transport.close()
        recorder.transport.write(b"not these")
        await asyncio.sleep(0.1)
        assert Recorder.made[0].received == b"last words"
        assert Recorder.made[0].events == ["made", "eof", "lost"]
        assert recorder.events == ["made", "lost"]

    play(story, echoes=False)


def test_a_writer_is_held_up_by_a_reader_that_does_not_read() -> None:
    async def story(simulation: Simulation) -> None:
        recorder = await dial()
        await asyncio.sleep(0.1)
        far = Recorder.made[0]
        far.transport.pause_reading()
        recorder.transport.write(b"y" * 100_000)
        await asyncio.sleep(1)
        assert recorder.events == ["made", "paused"]
        assert recorder.transport.get_write_buffer_size() == 100_000
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert recorder.events == ["made", "paused", "resumed"]
        assert len(far.received) == 100_000

    play(story, echoes=False)


def test_addresses() -> None:
    assert parse_address("sim://b1:9092") == ("b1", 9092)
    for wrong in ("sim://b1", "sim://:1", "b1:9092", "sim://b1:x"):
        with pytest.raises(ConfigError):
            parse_address(wrong)


def test_a_host_listens_on_its_own_name_once() -> None:
    async def story(simulation: Simulation) -> None:
        with pytest.raises(ListenError, match="this is host"):
            await SimTransport().listen(ADDRESS, Recorder)
        first = await SimTransport().listen("sim://client:0", Recorder)
        with pytest.raises(ListenError, match="in use"):
            await SimTransport().listen(first.address, Recorder)
        first.close()
        await first.wait_closed()
        (await SimTransport().listen(first.address, Recorder)).close()

    play(story)
