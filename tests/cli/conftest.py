"""kl in this process: arguments in, exit code and bytes out; a broker on its own thread."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kafkalite.cli.app import run
from kafkalite.cli.client_warnings import SparseHandler


class Result(NamedTuple):
    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def told(self) -> str:
        return self.err.decode()


Kl = Callable[..., Result]


@contextmanager
def broker_in_a_thread(**settings: str) -> Iterator[str]:
    """Run an embedded broker, and yield its bootstrap servers."""
    from kafkalite import Broker

    up = threading.Event()
    found: list[str] = []
    ends: list[Callable[[], None]] = []

    async def live() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Broker(listeners=("127.0.0.1:0",), **settings) as broker:
            found.append(broker.bootstrap_servers)
            ends.append(lambda: loop.call_soon_threadsafe(stop.set))
            up.set()
            await stop.wait()

    def main() -> None:
        try:
            asyncio.run(live())
        finally:
            up.set()

    thread = threading.Thread(target=main, name="test-broker")
    thread.start()
    up.wait()
    assert found, "the broker did not start"
    yield found[0]
    ends[0]()
    thread.join()


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """The bootstrap servers of an embedded broker that lives as long as the module."""
    with broker_in_a_thread() as started:
        yield started


@pytest.fixture
def kl(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Kl]:
    """Run a command line in this process."""
    monkeypatch.delenv("KL_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no contexts of the user

    def invoke(*arguments: str | Path, stdin: bytes = b"") -> Result:
        source = tmp_path / "stdin"
        source.write_bytes(stdin)
        with source.open() as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            capfdbinary.readouterr()
            code = run([str(argument) for argument in arguments])
            out, err = capfdbinary.readouterr()
        return Result(code, out, err)

    yield invoke
    logger = logging.getLogger("kafkalite")
    logger.handlers[:] = [each for each in logger.handlers if not isinstance(each, SparseHandler)]


@pytest.fixture
def at(kl: Kl, servers: str, monkeypatch: pytest.MonkeyPatch) -> Kl:
    """``kl`` that finds the broker through the environment."""
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", servers)
    return kl


Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(repository: Path) -> Iterator[Spawn]:
    """Start kl as a process; killed at the end if it still runs."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(
        *arguments: str | Path, module: str = "kafkalite", **environment: str
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=repository,
            env=os.environ | environment,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
