"""kl log dirs --disks and kl log move, on a broker with two data directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalite import sync
from tests.cli.conftest import Kl, broker_in_a_thread


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """The bootstrap servers of a broker, and its two data directories. The first has the log of topic t."""
    home = tmp_path_factory.mktemp("disks")
    first, second = home / "a", home / "b"
    with broker_in_a_thread(log_dirs=f"{first},{second}") as servers:
        with sync.Admin(servers) as admin:
            admin.create_topic("t", 1)
        with sync.Producer(servers) as producer:
            producer.send("t", b"x" * 1000).result()
        yield servers, first, second


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
