"""kl log dirs --disks and kl log move, on a broker with two data directories."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafkalite import Admin, Broker, Producer
from tests.cli.conftest import Kl


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """The bootstrap servers of a broker, and its two data directories. The first has the log of topic t."""
    home = tmp_path_factory.mktemp("disks")
    first, second = home / "a", home / "b"
    up = threading.Event()
    found: list[str] = []
    ends: list[Callable[[], None]] = []

    async def live() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with Broker(listeners=("127.0.0.1:0",), log_dirs=f"{first},{second}") as broker:
            async with Admin(broker.bootstrap_servers) as admin:
                await admin.create_topic("t", 1)
            async with Producer(broker.bootstrap_servers) as producer:
                await producer.send("t", b"x" * 1000)
            found.append(broker.bootstrap_servers)
            ends.append(lambda: loop.call_soon_threadsafe(stop.set))
            up.set()
            await stop.wait()

    def main() -> None:
        try:
            asyncio.run(live())
        finally:
            up.set()

    thread = threading.Thread(target=main)
    thread.start()
    up.wait()
    yield found[0], first, second
    ends[0]()
    thread.join()


def test_the_directories_are_listed_and_logs_move_between_them(kl: Kl, node: tuple[str, Path, Path]) -> None:
    servers, first, second = node

    def rows() -> dict[str, int]:
        listed = json.loads(kl("log", "dirs", "--disks", "t", "-o", "json", "-b", servers).out)
        assert all(row["state"] == "online" and row["free_bytes"] <= row["total_bytes"] for row in listed)
        return {row["path"]: row["partitions"] for row in listed}

    assert rows() == {str(first): 1, str(second): 0}
    result = kl("log", "move", "t-0", str(second), "--broker", "1", "-b", servers)
    assert (result.code, result.told) == (0, f"kl: 1 log moved to {second}\n")
    assert rows() == {str(first): 0, str(second): 1}
    table = kl("log", "dirs", "--disks", "-b", servers).text
    assert table.splitlines()[0].split() == [
        "NODE", "DIRECTORY", "STATE", "PARTITIONS", "MOVING", "IN", "SIZE", "FREE", "TOTAL", "PROBLEM",
    ]  # fmt: skip
    (row,) = json.loads(kl("log", "dirs", "t", "-o", "json", "-b", servers).out)
    assert (row["path"], row["log_end_offset"]) == (str(second), 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("t-0", "/nowhere", "--broker", "1"), "/nowhere is no working data directory of this broker"),
        (("t-9", "{second}", "--broker", "1"), "this broker has no replica of t-9"),
        (("t", "{second}", "--broker", "1"), "there is no partition 't'"),
        (("t-0", "{second}", "--broker", "7"), "there is no broker '7'"),
    ],
)
def test_impossible_moves_are_named(
    kl: Kl, node: tuple[str, Path, Path], arguments: tuple[str, ...], problem: str
) -> None:
    servers, _, second = node
    result = kl("log", "move", *(each.format(second=second) for each in arguments), "-b", servers)
    assert result.code
    assert problem in result.told
