"""kl log verify reports on every file of a data directory, and names each one that has a flipped byte."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Broker, Consumer, Producer
from kafkalite.cli.exit_codes import CHECK_FAILED, USAGE
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.file_check import UNCHECKED
from kafkalite.storage.log_store import LogStore
from proof.waiting import eventually

Kl = Callable[..., Any]


async def _fill(path: Path) -> None:
    """Fill the directory of a voter: topic t, offsets of a group, a snapshot of the metadata."""
    settings: dict[str, Any] = {
        "log_dirs": str(path),
        "listeners": "inproc://verified",
        "cluster_id": "verified",
        "cluster_secret": "a secret of this test",
        "controller_quorum_voters": "1@inproc://verified-voter",
        "offsets_topic_num_partitions": 1,
        "offsets_topic_replication_factor": 1,
        "metadata_log_max_record_bytes_between_snapshots": 1024,
    }
    async with Broker(**settings) as broker:
        async with Admin(broker.address) as admin:
            await admin.create_topic("t", 1, configs={"segment.bytes": "4096", "index.interval.bytes": "512"})
        async with Producer(broker.address) as producer:
            for number in range(40):
                await producer.send("t", b"%d" % number * 100)
        member = Consumer("t", bootstrap_servers=broker.address, group_id="g", auto_offset_reset="earliest")
        async with member:
            await member.get_many(5)
            await member.commit()
        async with Admin(broker.address) as admin:
            for number in range(12):
                await admin.create_topic(f"u{number}", 1)
            # The log keeps up to 1,024 bytes of entries that a snapshot contains. So it has dropped some
            # when a second snapshot is stored.
            snapshot = path / "__cluster_metadata" / "raft.snapshot"
            await eventually(snapshot.exists)
            first = snapshot.read_bytes()
            for number in range(40):
                await admin.alter_configs("topic", "t", {"retention.ms": str(10**12 + number)})
            await eventually(lambda: snapshot.read_bytes() != first)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified") / "data"
    asyncio.run(_fill(path))
    return path


def _verdicts(result: Any) -> dict[str, dict[str, str]]:
    return {row["file"]: row for row in json.loads(result.out)}


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_file_of_a_sound_directory_is_listed(kl: Kl, source: Path) -> None:
    result = kl("log", "verify", "--files", source, "-o", "json")
    assert result.code == 0, result.told
    verdicts = _verdicts(result)
    assert set(verdicts) == set(map(str, _files(source)))
    names = {Path(file).name for file in verdicts}
    assert {"start-count", "quorum-voters", "raft.log", "raft.end", "raft.snapshot", "boot-id"} <= names
    assert {row["verdict"] for row in verdicts.values()} == {"sound", UNCHECKED}
    for row in verdicts.values():
        assert bool(row["reason"]) is (row["verdict"] == UNCHECKED), row
    table = kl("log", "verify", "--files", source).text
    assert table.split()[:3] == ["FILE", "VERDICT", "REASON"]
    assert all(file in table for file in verdicts)


def test_a_flipped_byte_is_named_or_the_listing_says_why_it_cannot_be_told(
    kl: Kl, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    shutil.copytree(source, path)
    silent: list[str] = []
    flipped = 0
    for file in _files(path):
        content = file.read_bytes()
        for position in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1} - {-1}):
            if position >= len(content):
                continue
            changed = bytearray(content)
            changed[position] ^= 0x10
            file.write_bytes(changed)
            result = kl("log", "verify", "--files", path, "-o", "json")
            row = _verdicts(result)[str(file)]
            flipped += 1
            is_named = row["verdict"] not in ("sound", UNCHECKED) and f"{file}: position" in result.told
            if not is_named and not (row["verdict"] == UNCHECKED and row["reason"]):
                silent.append(f"{file.name} at {position} of {len(content)}: {row}")
            if row["verdict"] == "damaged":
                assert result.code == CHECK_FAILED
            file.write_bytes(content)
    assert flipped > 40
    assert not silent
    assert kl("log", "verify", path).code == 0


@pytest.mark.parametrize("name", ["raft.log", "raft.snapshot"])
def test_damaged_metadata_is_a_failed_check(kl: Kl, source: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "data"
    shutil.copytree(source, path)
    file = path / "__cluster_metadata" / name
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)
    for checked in (path, file.parent):
        result = kl("log", "verify", checked)
        assert result.code == CHECK_FAILED
        assert f"{file}: position 0: " in result.told
        (line,) = [one for one in result.text.splitlines() if one.startswith("__cluster_metadata")]
        assert "damaged" in line
    file.unlink()
    assert kl("log", "verify", path).code == CHECK_FAILED


def test_missing_metadata_is_a_failed_check(kl: Kl, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(source, path)
    shutil.rmtree(path / "__cluster_metadata")
    result = kl("log", "verify", path)
    assert result.code == CHECK_FAILED
    assert f"{path / '__cluster_metadata'}: position 0: the directory is missing" in result.told


@pytest.mark.parametrize("name", ["recovery-points", "clean-shutdown", "boot-id"])
def test_a_directory_in_the_place_of_a_file_that_is_rebuilt_is_no_damage(
    kl: Kl, source: Path, tmp_path: Path, name: str
) -> None:
    """The next start sets it aside, and loses nothing."""
    path = tmp_path / "data"
    shutil.copytree(source, path)
    (path / name).unlink()
    (path / name).mkdir()
    result = kl("log", "verify", path)
    assert result.code == 0, result.told
    assert f"{path / name}: position 0: " in result.told
    (line,) = [one for one in result.text.splitlines() if one.startswith("(node)")]
    assert "repairable" in line
    store = LogStore.open(RealFileSystem(), str(path), cluster_id="verified", node_id=1)
    store.load({})
    store.close(clean=False)


def test_logs_are_listed_in_the_order_of_their_numbers(kl: Kl, tmp_path: Path) -> None:
    async def fill() -> None:
        settings = {"log_dirs": str(tmp_path / "data"), "listeners": "inproc://numbers"}
        async with Broker(**settings) as broker, Admin(broker.address) as admin:
            await admin.create_topic("b", 12)
            await admin.create_topic("a", 2)

    asyncio.run(fill())
    rows = json.loads(kl("log", "verify", tmp_path / "data", "-o", "json").out)
    logs = [(row["topic"], row["partition"]) for row in rows if row["topic"] in {"a", "b"}]
    assert logs == [("a", 0), ("a", 1), *(("b", number) for number in range(12))]
    segments = json.loads(kl("log", "segments", tmp_path / "data", "-o", "json").out)
    assert [row["partition"] for row in segments if row["topic"] == "b"] == sorted(
        row["partition"] for row in segments if row["topic"] == "b"
    )


@pytest.mark.parametrize("command", [("verify",), ("accept-loss", "--yes")])
def test_a_path_that_is_no_directory_of_a_log_is_a_wrong_command_line(
    kl: Kl, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    result = kl("log", *command, tmp_path / "file")
    assert result.code == USAGE
    assert "hint: " in result.told


def test_accept_loss_refuses_a_wrong_name_before_it_reports_any_loss(kl: Kl, tmp_path: Path) -> None:
    result = kl("log", "accept-loss", tmp_path / "misspelt", "--yes")
    assert result.code == USAGE
    assert result.told.startswith(f"kl: {tmp_path / 'misspelt'} is not the directory of a log\n")
