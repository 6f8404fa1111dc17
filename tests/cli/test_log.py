"""kl log on the files of a real broker: intact, torn and damaged."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Broker, Consumer, Producer
from kafkalite.records.header import HEADER_BYTES, scan, seal, stamp
from kafkalite.storage.damage import Damage

Kl = Callable[..., Any]

RECORDS = 300


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with topic t: two partitions, several segments, all records in partition 0."""
    path = tmp_path / "data dir"

    async def fill() -> None:
        async with Broker(listeners=("127.0.0.1:0",), log_dirs=str(path)) as broker:
            async with Admin(broker.bootstrap_servers) as admin:
                await admin.create_topic(
                    "t", 2, 1, configs={"segment.bytes": "4096", "index.interval.bytes": "512"}
                )
            async with Producer(broker.bootstrap_servers) as producer:
                for first in range(0, RECORDS, 10):
                    values = [b"value %d" % number for number in range(first, first + 10)]
                    await producer.send_many(
                        "t", values, [b"k"] * 10, partition=0, timestamps_ms=1431857103000
                    )

    asyncio.run(fill())
    return path


def rows(kl: Kl, *arguments: str | Path) -> list[dict[str, Any]]:
    result = kl("log", *arguments, "-o", "json")
    assert result.code == 0, result.told
    found: list[dict[str, Any]] = json.loads(result.out)
    return found


def logs(kl: Kl, data: Path) -> list[Path]:
    return [Path(row["file"]) for row in rows(kl, "segments", data) if row["partition"] == 0]


def test_segments(kl: Kl, data: Path) -> None:
    found = [row for row in rows(kl, "segments", data) if row["partition"] == 0]
    assert len(found) >= 2
    assert {row["topic"] for row in found} == {"t"}
    offsets = [row["base_offset"] for row in found]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    text = kl("log", "segments", Path(found[0]["file"]).parent).text
    assert text.splitlines()[0].split() == [
        "TOPIC",
        "PARTITION",
        "BASE",
        "OFFSET",
        "SIZE",
        "INDEX",
        "TIMEINDEX",
    ]


def test_dump_batches(kl: Kl, data: Path) -> None:
    found = rows(kl, "dump", data)
    assert sum(row["records"] for row in found) == RECORDS
    assert all(row["problem"] is None for row in found)
    first = logs(kl, data)[0]
    (batch, *_) = rows(kl, "dump", first)
    assert (batch["position"], batch["base_offset"], batch["last_offset"], batch["codec"]) == (
        0,
        0,
        9,
        "none",
    )
    assert batch["max_timestamp"] == "2015-05-17T10:05:03.000Z"
    assert "POSITION" in kl("log", "dump", first).text
    assert rows(kl, "dump", first, "--no-verify") == rows(kl, "dump", first)


def test_dump_records(kl: Kl, data: Path) -> None:
    result = kl("log", "dump", data, "--records", "-o", "jsonl")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["offset"] for record in records] == list(range(RECORDS))
    assert records[7] == {
        "topic": "t",
        "partition": 0,
        "offset": 7,
        "timestamp": 1431857103000,
        "key": "k",
        "value": "value 7",
        "headers": [],
    }
    assert kl("log", "dump", logs(kl, data)[0], "-f", "%o:%s\\n").text.startswith("0:value 0\n1:value 1\n")
    assert kl("log", "dump", data, "-f", "nothing").code == 2


def test_index(kl: Kl, data: Path) -> None:
    entries = rows(kl, "index", data)
    positions = {(row["base_offset"], row["key"]): row["value"] for row in entries if row["kind"] == "offset"}
    assert positions
    batches = {
        (int(Path(row["file"]).stem), row["base_offset"]): row["position"] for row in rows(kl, "dump", data)
    }
    for place, position in positions.items():
        assert batches[place] == position
    index = logs(kl, data)[0].with_suffix(".index")
    assert {row["kind"] for row in rows(kl, "index", index)} == {"offset"}


def test_verify_of_a_good_directory(kl: Kl, data: Path) -> None:
    found = rows(kl, "verify", data)
    assert {row["verdict"] for row in found} == {"good"}
    assert {(row["partition"], row["records"]) for row in found} == {(None, 0), (0, RECORDS), (1, 0)}
    assert [row["topic"] for row in found[:2]] == ["(node)", "__cluster_metadata"]
    assert kl("log", "verify", data).text.splitlines()[0].split()[0] == "TOPIC"
    assert len(rows(kl, "verify", logs(kl, data)[0].parent)) == 1


def test_a_flipped_byte_is_damage(kl: Kl, data: Path) -> None:
    log = logs(kl, data)[0]
    content = bytearray(log.read_bytes())
    content[100] ^= 1
    log.write_bytes(content)
    result = kl("log", "verify", data)
    assert result.code == 9
    assert "damaged" in result.text
    assert f"{log}: position 0: " in result.told
    assert "CRC" in result.told
    assert rows(kl, "dump", log)[0]["problem"]
    dumped = kl("log", "dump", log, "--records", "-o", "jsonl")
    assert json.loads(dumped.out.splitlines()[0])["offset"] == 10
    assert "position 0" in dumped.told


def test_verify_reports_what_a_start_would_find(kl: Kl, data: Path) -> None:
    """R24: also damage that no single file shows."""
    segment, second = logs(kl, data)
    segment.unlink()
    result = kl("log", "verify", data, "-o", "json")
    assert result.code == 9
    (row,) = [one for one in json.loads(result.out) if one["partition"] == 0]
    first, last = int(segment.stem), int(second.stem)
    assert row["damage"]["sound_end_offset"] == first
    assert row["damage"]["records_in_doubt"] == last - first
    assert f"kl log accept-loss {segment.parent}" in result.told
    for path in segment.parent.iterdir():
        path.unlink()
    segment.parent.rmdir()
    assert "the directory is missing" in kl("log", "verify", data).told


def test_accepting_a_loss_names_damage_that_only_reading_shows(kl: Kl, data: Path) -> None:
    """R45: a start does not read closed segments, but the repair does."""
    segment = logs(kl, data)[0]
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    refused = kl("log", "accept-loss", segment.parent)
    assert refused.code != 0
    assert f"{segment}: position 0: " in refused.told
    assert "records there are lost" in refused.told
    assert "no damage" not in refused.told


def test_accepting_a_loss_keeps_the_segment_after_a_gap(kl: Kl, data: Path) -> None:
    """R45: records are missing between two segments; the second one is intact."""
    first, second = logs(kl, data)
    last = [row["position"] for row in rows(kl, "dump", first)][-1]
    with first.open("rb+") as file:
        file.truncate(last)
    refused = kl("log", "accept-loss", first.parent)
    assert refused.code != 0
    assert f"{second}: position 0: the segment before it ends at offset" in refused.told
    assert "the records between them are lost, and this segment is kept" in refused.told
    (row,) = rows(kl, "accept-loss", first.parent, "--yes")
    assert row["lost_records"] == 10
    kept = rows(kl, "dump", first.parent)
    assert sum(one["records"] for one in kept if one["problem"] is None) == RECORDS - 10


def test_accepting_an_older_copy_of_the_metadata(kl: Kl, data: Path) -> None:
    """A log directory of the same name elsewhere is refused with a reason."""
    metadata = data / "__cluster_metadata"
    asked = kl("log", "accept-loss", metadata)
    assert asked.code != 0
    assert "no damage was found" in asked.told
    (row,) = rows(kl, "accept-loss", metadata, "--yes")
    assert (row["directory"], row["lost_records"]) == (str(metadata), 0)
    missing = kl("log", "accept-loss", data.parent / "__cluster_metadata", "--yes")
    assert (missing.code != 0, "is not formatted" in missing.told) == (True, True)


@pytest.mark.parametrize("damage", ["flip", "older", "missing"])
def test_lost_metadata_is_verified_announced_and_accepted(kl: Kl, data: Path, damage: str) -> None:
    """R45: verify and accept-loss count the same records in doubt as the start that refuses them."""
    journal = data / "__cluster_metadata" / "raft.log"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "older":
        del content[len(content) // 2 :]
        (journal.parent / "raft.end").unlink()
    journal.write_bytes(content)
    if damage == "missing":
        shutil.rmtree(journal.parent)
    verified = kl("log", "verify", data)
    assert (verified.code, "kl log accept-loss" in verified.told) == (9, damage != "flip")
    asked = kl("log", "accept-loss", journal.parent)
    found = re.search(r"at least (\d+) records? in doubt", asked.told)
    assert found is not None
    (row,) = rows(kl, "accept-loss", journal.parent, "--yes")
    assert (row["lost_records"], row["topic"]) == (int(found[1]), "__cluster_metadata")
    assert kl("log", "verify", data).code == 0
    assert rows(kl, "accept-loss", journal.parent, "--yes")[0]["lost_records"] == 0


def test_accepting_a_loss_announces_what_it_does(kl: Kl, data: Path) -> None:
    """R45: a segment of another log is set aside, so no batch in it is corrected."""
    segment, second = logs(kl, data)[:2]
    foreign = bytearray(segment.read_bytes())
    for position, base_offset, _, _, length in scan(foreign, 0, len(foreign)):
        batch = memoryview(foreign)[position : position + length]
        batch[HEADER_BYTES + 20] ^= 1
        stamp(batch, base_offset=base_offset, leader_epoch=9)
        seal(batch)
    segment.write_bytes(foreign)
    lost = int(second.stem) - int(segment.stem)
    asked = kl("log", "accept-loss", segment.parent)
    assert f"{segment}: none of its batches is kept" in asked.told
    assert "it is corrected" not in asked.told
    assert f"{lost} records would be lost" in asked.told
    assert "kl log accept-loss" not in asked.told, "the advice is to run this command"
    (row,) = json.loads(kl("log", "accept-loss", segment.parent, "--yes", "-o", "json").out)
    assert (row["lost_records"], row["corrected_batches"]) == (lost, 0)


def test_accepting_a_loss_asks_first_and_makes_the_log_usable(kl: Kl, data: Path) -> None:
    """R45"""
    segment, second = logs(kl, data)
    first, last = int(segment.stem), int(second.stem)
    segment.unlink()
    refused = kl("log", "accept-loss", segment.parent)
    assert refused.code != 0
    assert f"{last - first} records in doubt" in refused.told
    assert not segment.exists()
    result = kl("log", "accept-loss", segment.parent, "--yes", "-o", "json")
    (row,) = json.loads(result.out)
    assert (row["topic"], row["partition"], row["lost_records"]) == ("t", 0, last - first)
    assert row["log_end_offset"] == RECORDS
    (after,) = [one for one in rows(kl, "verify", data) if one["partition"] == 0]
    assert (after["verdict"], after["records"], after["log_end_offset"]) == (
        "repairable",  # the next start rebuilds leader-epochs from the batches
        RECORDS - (last - first),
        RECORDS,
    )
    assert kl("log", "accept-loss", data, "--yes").code != 0


def started(data: Path) -> list[tuple[str | None, int]]:
    """Start a broker. Return (why it is offline, log end offset) of partitions 0 and 1."""

    async def main() -> list[tuple[str | None, int]]:
        async with (
            Broker(listeners=("127.0.0.1:0",), log_dirs=str(data)) as broker,
            Admin(broker.bootstrap_servers) as admin,
        ):
            found = sorted(await admin.describe_log_dirs(["t"]), key=lambda one: one.partition)
        return [(one.offline_reason, one.log_end_offset) for one in found]

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["directory", "symbolic link"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_is_in_the_place_of_a_segment_is_named_and_set_aside(
    kl: Kl, data: Path, kind: str, number: int
) -> None:
    """R24, R45: the other segments count as sound, and nothing is removed."""
    segments = logs(kl, data)
    segment = segments[number]
    first, end = [*(int(one.stem) for one in segments), RECORDS][number : number + 2]
    segment.rename(data / "moved")
    if kind == "directory":
        segment.mkdir()
        (segment / "inside").write_bytes(b"kept")
    else:
        segment.symlink_to(data / "moved")
    verified = kl("log", "verify", data)
    assert f"{segment}: position 0: cannot be opened as a file: it is a {kind}" in verified.told
    in_doubt = f"is a {kind}, but must be a regular file; sound below offset {first}, at least {end - first}"
    assert in_doubt in verified.told
    reason, sound_end = started(data)[0]
    assert in_doubt in str(reason)
    assert sound_end == first
    sound = {one: one.read_bytes() for one in segments if one != segment}
    (row,) = json.loads(kl("log", "accept-loss", segment.parent, "--yes", "-o", "json").out)
    assert (row["lost_records"], row["log_end_offset"]) == (end - first, RECORDS)
    kept = segment.with_name(segment.name + ".damaged-1")
    assert str(kept) in row["kept"]
    if kind == "directory":
        assert (kept / "inside").read_bytes() == b"kept"
    else:
        assert kept.readlink() == data / "moved"
    for one, content in sound.items():
        aside = one.with_name(one.name + ".damaged-1")  # it got a gap batch
        assert content in (one.read_bytes(), aside.read_bytes() if aside.exists() else b"")
    assert started(data) == [(None, RECORDS), (None, 0)]


def test_a_file_in_the_place_of_a_log_directory_is_named_and_set_aside(kl: Kl, data: Path) -> None:
    """R24, R45"""
    log = logs(kl, data)[0].parent
    shutil.rmtree(log)
    log.write_bytes(b"kept")
    named = f"{log} is a regular file, but must be a directory"
    verified = kl("log", "verify", data)
    assert verified.code == 9
    assert named in verified.told
    assert "t 1" in re.sub(" +", " ", verified.text), "the other log is verified"
    reason = str(started(data)[0][0])
    assert named in reason
    assert f"kl log accept-loss {log}" in reason
    accepted = kl("log", "accept-loss", log, "--yes", "-o", "json")
    assert f"{named}: all records of the log are lost" in accepted.told
    (row,) = json.loads(accepted.out)
    assert (row["lost_records"], row["log_end_offset"]) == (RECORDS, RECORDS)
    assert [Path(one).read_bytes() for one in row["kept"]] == [b"kept"]
    assert started(data) == [(None, RECORDS), (None, 0)]


def test_each_of_two_exchanged_log_directories_is_named(kl: Kl, data: Path) -> None:
    """R42: the start and the command give the same cause and the same way out."""
    full = logs(kl, data)[0].parent
    empty = full.with_name(full.name[:-1] + "1")

    def exchange() -> None:
        full.rename(data / "moved")
        empty.rename(full)
        (data / "moved").rename(empty)

    exchange()
    for (reason, _), directory, home in zip(started(data), (full, empty), (empty, full), strict=True):
        cause, remedy = (
            f"{directory} holds the log t-{home.name[-1]}",
            f"rename it to {home}; or move it away",
        )
        assert str(reason).startswith(cause)
        assert remedy in str(reason)
        refused = kl("log", "accept-loss", directory, "--yes")
        assert refused.code == 1
        assert cause in refused.told
        assert remedy in refused.told
    exchange()
    assert started(data) == [(None, RECORDS), (None, 0)]


def test_a_torn_tail_is_no_damage(kl: Kl, data: Path) -> None:
    log = logs(kl, data)[-1]
    last = rows(kl, "dump", log)[-1]
    end = last["position"] + last["bytes"]
    content = log.read_bytes()
    log.write_bytes(content[:end] + content[:70])
    result = kl("log", "verify", data)
    assert result.code == 0, result.told
    assert "torn tail" in result.text
    assert "repaired at the next start" in result.told


def test_a_torn_index_is_reported(kl: Kl, data: Path) -> None:
    index = logs(kl, data)[0].with_suffix(".index")
    index.write_bytes(index.read_bytes() + b"junk")
    assert "no intact block from byte" in kl("log", "index", index).told


@pytest.mark.parametrize("verb", ["segments", "dump", "index", "verify"])
def test_a_path_without_a_log(kl: Kl, tmp_path: Path, verb: str) -> None:
    assert kl("log", verb, tmp_path / "nowhere").code == 4
    empty = tmp_path / "empty"
    empty.mkdir()
    result = kl("log", verb, empty)
    assert result.code == 4
    assert "holds no log" in result.told


def test_a_file_of_another_kind_is_usage(kl: Kl, data: Path) -> None:
    assert kl("log", "dump", data / "node.json").code == 2
    assert kl("log", "index", logs(kl, data)[0]).code == 2


def test_a_log_without_a_topic_name(kl: Kl, data: Path) -> None:
    log = logs(kl, data)[0]
    (log.parent / "partition.json").unlink()
    assert rows(kl, "segments", log.parent)[0]["topic"] == log.parent.name.rpartition("-")[0]


def test_accepting_a_loss_fails_if_the_log_is_still_damaged(
    kl: Kl, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = Damage("a broken segment", 1, 2, "restore it")
    monkeypatch.setattr("kafkalite.storage.accept_loss.damage_of", lambda *_: damage)
    result = kl("log", "accept-loss", logs(kl, data)[0].parent, "--yes")
    assert result.code == 9
    assert "a broken segment" in result.told


def test_verify_counts_every_damaged_log(kl: Kl, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = Damage("the end of the log is missing", 1, 2, "restore it")
    monkeypatch.setattr("kafkalite.storage.inspect.damage_of", lambda *_: damage)
    result = kl("log", "verify", data)
    assert result.code == 9
    assert "2 problems in" in result.told, "the data directory has two logs"


def test_dump_of_a_data_directory_names_the_partition_of_each_batch(kl: Kl, data: Path) -> None:
    batches = rows(kl, "dump", data)
    assert {(row["topic"], row["partition"]) for row in batches} == {("t", 0)}, "partition 1 is empty"
    heading, first, *_ = kl("log", "dump", data).text.splitlines()
    assert heading.split()[:2] == ["TOPIC", "PARTITION"]
    assert first.split()[:2] == ["t", "0"]


def test_accepting_the_loss_of_markers_names_the_transactions_before_and_after(
    kl: Kl, tmp_path: Path
) -> None:
    """R45"""
    data = tmp_path / "data"

    async def fill() -> None:
        async with Broker(listeners="inproc://", log_dirs=str(data)) as broker:
            async with Admin(broker.bootstrap_servers) as admin:
                await admin.create_topic("t", 1, 1)
            async with Producer(broker.bootstrap_servers, transactional_id="payer") as producer:
                for outcome in ("commit", "abort", "commit", "commit"):
                    await producer.begin_transaction()
                    await producer.send_many("t", [b"1", b"2", b"3"], partition=0)
                    await producer.flush()
                    if outcome == "commit":
                        await producer.commit_transaction()
                    else:
                        await producer.abort_transaction()

    async def read() -> list[int]:
        async with Broker(listeners="inproc://", log_dirs=str(data)) as broker:
            settings: dict[str, Any] = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
            async with Consumer("t", bootstrap_servers=broker.bootstrap_servers, **settings) as consumer:
                found: list[int] = []
                while len(found) < 6:
                    found.append((await consumer.getone()).offset)
                return found

    asyncio.run(fill())
    (segment,) = [Path(row["file"]) for row in rows(kl, "segments", data) if row["topic"] == "t"]
    content = bytearray(segment.read_bytes())
    for batch in rows(kl, "dump", segment):
        if batch["kind"] in ("commit", "abort") and batch["base_offset"] in (7, 15):
            content[batch["position"] + 70] ^= 1
    segment.write_bytes(content)
    asked = kl("log", "accept-loss", segment.parent)
    done = kl("log", "accept-loss", segment.parent, "--yes", "-o", "json")
    for result in (asked, done):
        assert "1 transaction of unknown outcome" in result.told
        assert "unknown outcome: offsets 4 to 6 (3 records) of producer " in result.told
        assert "no marker at the end of the log: offsets 12 to 14 (3 records) of producer " in result.told
        assert "kl txn abort --hanging t-0 --producer " in result.told
    (row,) = json.loads(done.out)
    (unknown,) = row["unknown_transactions"]
    assert (unknown["first_offset"], unknown["last_offset"], unknown["record_count"]) == (4, 6, 3)
    assert [one["first_offset"] for one in row["open_transactions"]] == [12]
    assert row["lost_records"] == 2
    assert asyncio.run(read()) == [0, 1, 2, 8, 9, 10]


@pytest.mark.parametrize("content", [None, b"", b'{"format_version": 1}'])
def test_a_lost_or_damaged_node_json_is_written_again(kl: Kl, data: Path, content: bytes | None) -> None:
    """R25: the error names the command. Other ids are refused, and no record is lost."""
    file = data / "node.json"
    cluster_id = json.loads(file.read_bytes())["cluster_id"]
    restore = ("server", "format", "--restore", "--data", data, "--cluster-id", cluster_id, "--node-id")
    assert "has an intact node.json" in kl(*restore, "1").told
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    refused = kl("server", "start", "--data", data, "--set", "listeners=127.0.0.1:0", "--log-level", "error")
    metadata = kl("log", "accept-loss", data / "__cluster_metadata")
    for result in (refused, metadata):
        assert result.code == 1
        assert f"kl server format --restore --data {data} --cluster-id ID --node-id N" in result.told
    assert kl(*restore[:-3], "--node-id", "1").code == 2, "no cluster id"
    other = kl(*restore, "2")
    assert other.code == 1
    assert "node 1" in other.told
    assert file.exists() is (content is not None)
    restored = kl(*restore, "1", "-o", "json")
    assert restored.code == 0, restored.told
    assert json.loads(file.read_bytes())["cluster_id"] == cluster_id
    assert [one.read_bytes() for one in data.glob("node.json.damaged-*")] == (
        [] if content is None else [content]
    )
    assert started(data) == [(None, RECORDS), (None, 0)]

    async def read() -> int:
        async with (
            Broker(listeners=("127.0.0.1:0",), log_dirs=str(data)) as broker,
            Consumer(
                "t", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
            ) as consumer,
        ):
            found = 0
            while found < RECORDS:
                found += len(await consumer.get_many(RECORDS, timeout_ms=5_000))
            return found

    assert asyncio.run(asyncio.wait_for(read(), 20)) == RECORDS
