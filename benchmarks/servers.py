"""The servers of the benchmarks, each in its own process: bare ones, and the broker.

``bare-rpc``     u32 length + msgpack array in, the same out: the cost of an RPC without any work.
``bare-append``  u32 length + bytes in: receive into one buffer, CRC-32C, pwrite, a 16-byte response.
``bare-send``    8 bytes in (position): one megabyte of a mapped file out, unchanged.
``kafkalite``    the broker, ``--durability``, ``--dir``, further settings with ``--set``.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import signal
import struct
import tempfile
from typing import Any

import crc32c
import msgpack
import uvloop

MEBIBYTE = 1024 * 1024


class BareRpc(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= 4:
            (length,) = struct.unpack_from(">I", self.buffer)
            if len(self.buffer) < 4 + length:
                return
            request = msgpack.unpackb(self.buffer[4 : 4 + length])
            self.buffer = self.buffer[4 + length :]
            answer = msgpack.packb([request[2], 0, [0, None, request[4]]])
            self.transport.write(struct.pack(">I", len(answer)) + answer)


class BareAppend(asyncio.BufferedProtocol):
    """Receives each frame into a buffer, checks its CRC, appends it to a file, and responds.

    Starts a new file every GiB, as a log does.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.file_count = 0
        self.roll()
        self.head = bytearray(4)
        self.target = memoryview(self.head)
        self.filled = 0
        self.in_head = True

    def roll(self) -> None:
        self.file_count += 1
        path = os.path.join(self.directory, f"bare-{self.file_count}.log")
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.position = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.target[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled < len(self.target):
            return
        if self.in_head:
            (length,) = struct.unpack(">I", self.head)
            self.target = memoryview(bytearray(length))
        else:
            crc = crc32c.crc32c(self.target)
            if self.position + len(self.target) > 1024 * MEBIBYTE:
                os.close(self.fd)
                self.roll()
            os.pwrite(self.fd, self.target, self.position)
            self.position += len(self.target)
            self.transport.write(struct.pack(">IIQ", 12, crc, self.position))
            self.target = memoryview(self.head)
        self.in_head = not self.in_head
        self.filled = 0


class BareSend(asyncio.Protocol):
    def __init__(self, mapped: memoryview) -> None:
        self.mapped = mapped
        self.pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.pending += data
        while len(self.pending) >= 8:
            (position,) = struct.unpack_from(">Q", self.pending)
            self.pending = self.pending[8:]
            part = self.mapped[position : position + MEBIBYTE]
            self.transport.writelines([struct.pack(">II", 0, len(part)), part])


async def _serve_until_terminated(factory: Any) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    listening = await loop.create_server(factory, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await stopped.wait()
    listening.close()


async def bare(kind: str, directory: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        if kind == "bare-rpc":
            await _serve_until_terminated(BareRpc)
            return
        if kind == "bare-append":
            await _serve_until_terminated(lambda: BareAppend(scratch))
            return
        fd = os.open(os.path.join(scratch, "bare.log"), os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 64 * MEBIBYTE)
        mapped = memoryview(mmap.mmap(fd, 64 * MEBIBYTE, prot=mmap.PROT_READ))
        await _serve_until_terminated(lambda: BareSend(mapped))


async def kafkalite_broker(directory: str, durability: str, settings: list[str]) -> None:
    from kafkalite.broker.broker import Broker
    from kafkalite.broker.config import BrokerConfig

    config = BrokerConfig.from_settings(
        {
            "listeners": "127.0.0.1:0",
            "log.dirs": directory,
            "durability": durability,
            "socket.request.max.bytes": 100 * MEBIBYTE,
            "message.max.bytes": 16 * MEBIBYTE,
            **dict(setting.split("=", 1) for setting in settings),
        },
        source="benchmark",
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with Broker(config) as broker:
        print(*(address.rsplit(":", 1)[1] for address in broker.addresses), flush=True)
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["bare-rpc", "bare-append", "bare-send", "kafkalite"])
    parser.add_argument("--dir")
    parser.add_argument("--durability", default="page-cache")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    if arguments.kind == "kafkalite":
        uvloop.run(kafkalite_broker(arguments.dir, arguments.durability, arguments.set))
    else:
        uvloop.run(bare(arguments.kind, arguments.dir))


if __name__ == "__main__":
    main()
