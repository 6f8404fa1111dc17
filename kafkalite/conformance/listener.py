"""A broker behind a proxy that checks the requests of clients, for ``kl conformance --listen``.

The broker is real and in memory. Its advertised address is that of the proxy, so that clients also connect to
the proxy after a Metadata response. With ``--faults``, the first Produce and the first Fetch of each
partition fail with NOT_LEADER_OR_FOLLOWER. A client must then refresh its metadata and repeat the request.
"""

# Tests: tests/conformance/test_clients.py

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.responses import Reply
from kafkalite.conformance.client_checks import Judge
from kafkalite.errors import ErrorCode
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, TopicPartition
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    FetchedPartition,
    FetchRequest,
    FetchRequestV1,
    FetchResponse,
    FetchResponseV1,
    ProducedPartition,
    ProduceRequest,
    ProduceResponse,
)
from kafkalite.transport.free_ports import free_ports
from kafkalite.transport.tcp import listen_error, parse_address

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 16
_INJECTED: Final = "a fault of kl conformance --listen --faults"


class Listener:
    """Serves clients while in ``async with``. ``judge`` has the results."""

    def __init__(self, address: str, *, has_faults: bool = False) -> None:
        """``address`` is HOST:PORT; port 0 selects a free port. ``has_faults`` is the option ``--faults``."""
        self._host, self._port = parse_address(address)
        self._has_faults = has_faults
        self._failed: set[tuple[type, TopicPartition]] = set()  #: the requests that were refused once
        #: By task that serves a client: its connections to the client and to the broker.
        self._clients: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self.judge = Judge()

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port)
        except (OSError, UnicodeError) as error:
            raise listen_error(f"{self._host}:{self._port}", error) from error
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
        (port,) = free_ports(1)
        self._inner = ("127.0.0.1", port)
        self._broker = Broker(listeners=(f"127.0.0.1:{port}",), advertised_listeners=(self.address,))
        await self._broker.start()
        if self._has_faults:
            self._broker.intercept(self._fail)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        clients = dict(self._clients)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for writers in clients.values():  # a task that was cancelled before it began has closed nothing
            await _close(writers)
        await self._broker.stop()

    def _fail(self, request: Request, _client: Client) -> Reply | None:
        """Return an error response to a Produce or Fetch that is the first for any of its partitions.

        Return None for any other request, which the broker then handles.
        """
        message = request.message
        if not isinstance(message, ProduceRequest | FetchRequest):
            return None
        keys = [TopicPartition(part.topic, part.partition) for part in message.partitions]
        new = [(type(message), tp) for tp in keys if (type(message), tp) not in self._failed]
        if not new:
            return None
        self._failed.update((type(message), tp) for tp in keys)
        code = int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        if isinstance(message, FetchRequest):
            unfetched = [_unfetched(tp, code) for tp in keys]
            if isinstance(message, FetchRequestV1):
                return Reply(FetchResponseV1(0, None, unfetched, []))
            return Reply(FetchResponse(0, None, unfetched))
        return Reply(ProduceResponse(0, None, [_unproduced(tp, code) for tp in keys]))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        task = asyncio.get_running_loop().create_task(self._serve(reader, writers))
        self._clients[task] = writers
        task.add_done_callback(self._clients.pop)

    async def _serve(self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]) -> None:
        """Serve a client. ``writers`` has the client's connection; the connection to the broker is added to
        it."""
        watched = self.judge.connect()
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._inner)
            writers.append(server_writer)
            pumps = [
                asyncio.ensure_future(_pump(reader, server_writer, watched.from_client)),
                asyncio.ensure_future(_pump(server_reader, writers[0], watched.from_server)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                for ended in await asyncio.gather(*pumps, return_exceptions=True):
                    self._report(ended)
        finally:
            watched.end()
            await _close(writers)

    def _report(self, ended: BaseException | None) -> None:
        """Log an exception of the judge, and count it as a violation of the check ``frames.layout``."""
        if isinstance(ended, Exception):
            logger.error("the judge failed at what a client sent", exc_info=ended)
            violation = f"it could not be judged: {type(ended).__name__}: {ended}"
            self.judge.check("frames.layout", False, violation)


def _unfetched(tp: TopicPartition, code: int) -> FetchedPartition:
    return FetchedPartition(*tp, code, _INJECTED, NO_OFFSET, NO_OFFSET, NO_OFFSET, 0, [])


def _unproduced(tp: TopicPartition, code: int) -> ProducedPartition:
    return ProducedPartition(*tp, code, _INJECTED, NO_OFFSET, NO_TIMESTAMP, NO_OFFSET)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: Callable[[bytes], None]
) -> None:
    """Copy bytes from ``reader`` to ``writer`` until either side closes. Call ``watch`` with all bytes before
    they are written."""
    with suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            watch(data)
            writer.write(data)
            await writer.drain()


async def _close(writers: list[asyncio.StreamWriter]) -> None:
    """Close the connections, and wait until their sockets are closed. May be called twice."""
    for writer in writers:
        writer.close()
    for writer in writers:
        with suppress(OSError):
            # Without a shield, a cancelled task would cancel the future that the next call waits for.
            await asyncio.shield(writer.wait_closed())
