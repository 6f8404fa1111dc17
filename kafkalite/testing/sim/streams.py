"""Streams between simulated hosts: the Transport for ``sim://host:port`` addresses.

Two ``SimEnd`` form a connection, with a ``network.Link`` in each direction. The protocol of an end is called
in the process that opened the end, so the protocol pauses and dies with that process.
"""

# Tests: tests/sim/test_network.py

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kafkalite.errors import ConfigError, ConnectionFailedError, ListenError
from kafkalite.testing.sim.loop import Process, SimLoop, current_process
from kafkalite.testing.sim.network import Item, Link, Network, Pipe
from kafkalite.transport.seam import P, ProtocolFactory
from kafkalite.transport.stream_end import StreamEnd

SCHEME: Final = "sim://"

#: Connecting to a host that does not respond fails after this time, as with a real kernel.
DIAL_TIMEOUT_S: Final = 20.0


def _network() -> Network:
    loop = asyncio.get_running_loop()
    network = loop.network if isinstance(loop, SimLoop) else None
    assert isinstance(network, Network), "sim:// addresses are for a SimLoop"
    return network


def parse_address(address: str) -> tuple[str, int]:
    """Return ``sim://host:port`` as (host, port). Raises ConfigError."""
    host, colon, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or not colon or not port.isdecimal():
        raise ConfigError(key="address", value=address, allowed="sim://host:port")
    return host, int(port)


class SimTransport:
    """The Transport for ``sim://`` addresses, for code that runs on a SimLoop."""

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        end = await self._dial(address)
        if end is None:
            raise ConnectionFailedError(
                f"cannot connect to {address}: connection refused", hint="does a broker run there?"
            )
        protocol = protocol_factory()
        end.open(protocol)
        return protocol

    async def is_refused(self, address: str) -> bool:
        try:
            end = await self._dial(address)
        except ConnectionFailedError:
            return False
        if end is not None:
            end.give_up()
        return end is None

    async def _dial(self, address: str) -> SimEnd | None:
        """Return the dialler's end of a new connection, or None if the host refuses the connection. Raises
        ConnectionFailedError if the host does not respond."""
        host, port = parse_address(address)
        network = _network()
        loop = network.loop
        process = current_process.get(loop.root)
        answered: asyncio.Future[SimEnd | None] = loop.create_future()
        out = network.link(process.host_name, host)
        back = network.link(host, process.host_name)
        own_port = network.next_port()
        end = SimEnd(network, process, out, peername=(f"{SCHEME}{host}", port), is_dialler=True)
        end.name_socket((f"{SCHEME}{process.host_name}", own_port))

        def on_reply(item: Item) -> None:
            if not answered.done():
                answered.set_result(end if item.kind == "call" else None)

        def on_dial(_item: Item) -> None:
            listener = network.listeners.get(address)
            if not network.has_power(host) or answered.cancelled() or process.is_dead:
                return
            reply = Pipe(back, on_reply)
            if listener is None:
                reply.send(Item("reset", b""))
                return
            far = SimEnd(
                network,
                listener.process,
                back,
                peername=(f"{SCHEME}{process.host_name}", own_port),
                is_dialler=False,
            )
            far.name_socket((f"{SCHEME}{host}", port))
            end.join(far)
            reply.send(Item("call", b""))
            assert isinstance(listener, SimListener)
            loop.call_soon(listener.open, far, context=far._context)

        Pipe(out, on_dial).send(Item("call", b""))
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                return await answered
        except TimeoutError:
            end.give_up()
            raise ConnectionFailedError(f"cannot connect to {address}: no answer") from None
        except BaseException:
            end.give_up()
            raise

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> SimListener:
        host, port = parse_address(address)
        network = _network()
        process = current_process.get(network.loop.root)
        if host != process.host_name:
            raise ListenError(f"cannot listen on {address}: this is host {process.host_name!r}")
        if port == 0:
            address = f"{SCHEME}{host}:{network.next_port()}"
        if address in network.listeners:
            raise ListenError(f"cannot listen on {address}: the port is in use")
        listener = SimListener(network, address, protocol_factory, process)
        network.listeners[address] = listener
        return listener


class SimListener:
    def __init__(self, network: Network, address: str, factory: ProtocolFactory, process: Process) -> None:
        self.address = address
        self.process = process
        self._network = network
        self._factory = factory

    def __repr__(self) -> str:
        return f"<SimListener {self.address}>"

    def open(self, end: SimEnd) -> None:
        if self._network.listeners.get(self.address) is not self:
            end.abort()
        else:
            end.open(self._factory())

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    async def wait_closed(self) -> None:
        return


class SimEnd(StreamEnd):
    """One end of a connection, owned by one process."""

    def __init__(
        self, network: Network, process: Process, out: Link, peername: tuple[str, int], *, is_dialler: bool
    ) -> None:
        super().__init__(network.loop, process.context(), {"peername": peername})
        self.process = process
        self.is_dialler = is_dialler
        self.peer_host = out.target
        self.peer: SimEnd = self
        self._network = network
        self._out = Pipe(out, self._deliver_to_peer)
        self._was_opened = False
        self._arrived: deque[Item] = deque()

    def __repr__(self) -> str:
        return f"<SimEnd {self.get_extra_info('sockname')} to {self.get_extra_info('peername')}>"

    def name_socket(self, name: tuple[str, int]) -> None:
        self._extra["sockname"] = name  # type: ignore[attr-defined]

    def join(self, peer: SimEnd) -> None:
        """Connect this end to ``peer``. Either end may be open already."""
        self.peer, peer.peer = peer, self
        self._network.add(self)
        self._network.add(peer)

    def open(self, protocol: asyncio.BufferedProtocol) -> None:
        if self._is_closing:  # the connection was reset before ``connect`` returned
            self._loop.call_soon(_refused, protocol, self, context=self._context)
            return
        self._protocol = protocol
        self._was_opened = True
        protocol.connection_made(self)
        if self._arrived:
            self._wake()

    def give_up(self) -> None:
        """Stop waiting for the connection to be established. If the peer has accepted it already, abort
        it."""
        if self.peer is not self:
            self.abort()

    def _deliver_to_peer(self, item: Item) -> None:
        self.peer._take(item)

    def _take(self, item: Item) -> None:
        """Queue ``item`` for delivery, as the kernel of this end's host would. Runs outside the process of
        this end."""
        if self._is_closing or self.process.is_dead:
            return
        if item.kind == "reset":
            if self._network.rng.random() < 0.5:
                self._arrived.clear()
            self._out.break_off()
        self._arrived.append(item)
        if self._was_opened:
            self._wake()

    def _wake(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        """Pass received data to the protocol, in its process, as long as the protocol reads."""
        self._is_scheduled = False
        while self._arrived and not self._is_closing:
            kind = self._arrived[0].kind
            if kind == "reset":
                self._end(ConnectionResetError("connection reset by peer"))
            elif not self._is_reading:
                break
            elif kind == "eof":
                self._arrived.popleft()
                self._on_eof()
            else:
                self._fill(self._arrived.popleft().data)

    def _fill(self, data: bytes) -> None:
        assert self._protocol is not None
        position = 0
        try:
            while position < len(data) and not self._is_closing:
                buffer: Any = self._protocol.get_buffer(len(data) - position)
                count = min(len(buffer), len(data) - position)
                buffer[:count] = data[position : position + count]
                position += count
                self._protocol.buffer_updated(count)
        except Exception as error:
            self._fail(error)
        self._taken_bytes += len(data)
        peer = self.peer
        if peer._is_paused and peer.get_write_buffer_size() <= peer._low_water_bytes:
            self._loop.call_later(self._out.link.delay_s(), peer._resume_if_drained, context=peer._context)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._has_sent_eof or not data:
            return
        self._send(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        if not self._is_closing and not self._has_sent_eof:
            self._send(b"".join(list_of_data))

    def _send(self, data: bytes) -> None:
        if not data:
            return
        self._network.before_write(self.process)
        if self._is_closing:
            return
        self._sent_bytes += len(data)
        split_rate = self._out.link.tuning.split_rate
        rng = self._network.rng
        if split_rate and len(data) > 1 and rng.random() < split_rate:
            middle = 1 + rng.randrange(len(data) - 1)
            self._out.send(Item("data", data[:middle]))
            data = data[middle:]
        self._out.send(Item("data", data))
        self._pause_if_full()

    def _send_eof(self) -> None:
        self._out.send(Item("eof", b""))

    def get_write_buffer_size(self) -> int:
        return self._sent_bytes - self.peer._taken_bytes

    def _reset_peer(self) -> None:
        self._out.send(Item("reset", b""))

    def _end(self, error: Exception | None) -> None:
        self._is_closing = True
        self._arrived.clear()
        self._network.discard(self)
        if self._was_opened:
            self._loop.call_soon(self._lose, error, context=self._context)

    def reset_both(self) -> None:
        """Break the connection. Each side notices it separately."""
        for end in (self, self.peer):
            end._out.break_off()
            end.on_reset_by_peer()

    def on_reset_by_peer(self) -> None:
        self._take(Item("reset", b""))

    def on_own_death(self, *, is_polite: bool) -> None:
        """After the written data, send a reset, or EOF if ``is_polite`` and no data is unread."""
        self._is_closing = True
        self._out.send(Item("eof" if is_polite and not self._arrived else "reset", b""))

    def vanish(self) -> None:
        """Drop the data in transit without notifying the peer, because the host has lost power."""
        self._is_closing = True
        self._out.break_off()


def _refused(protocol: asyncio.BufferedProtocol, end: SimEnd) -> None:
    """Call ``connection_made`` and ``connection_lost``: the connection broke before it was established."""
    protocol.connection_made(end)
    protocol.connection_lost(ConnectionResetError("connection reset by peer"))
