"""kl log dump: the kinds of batches, and the records of coordinators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import (
    Admin,
    Broker,
    Consumer,
    Producer,
    TopicPartition,
    TransactionGroup,
    TransactionGroupWriter,
)
from kafkalite.cli.coordinator_records import as_text

Kl = Callable[..., Any]

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a group, a commit, an abort, a batch of several records, and a compaction."""
    path = tmp_path_factory.mktemp("state")
    few = {"offsets_topic_num_partitions": 2, "transaction_state_log_num_partitions": 2}

    async def fill() -> None:
        async with Broker(listeners="inproc://", log_dirs=str(path), **few) as broker:
            servers = broker.bootstrap_servers
            async with Admin(servers) as admin:
                await admin.create_topic("t", 1)
                await admin.create_topic("compacted", 1, configs=COMPACTED)
                async with Producer(servers, transactional_id="payer") as producer:
                    async with producer.transaction():
                        await producer.send("t", b"kept")
                        await producer.send_offsets({TopicPartition("t", 0): 1}, "g-in-transaction")
                    await producer.begin_transaction()
                    await producer.send("t", b"dropped")
                    await producer.abort_transaction()
                settings: dict[str, Any] = {"bootstrap_servers": servers, "enable_auto_commit": False}
                async with Consumer("t", group_id="g", **settings) as consumer:
                    await consumer.commit({TopicPartition("t", 0): 0})
                async with TransactionGroupWriter("sink", 3, "task-0", servers) as writer:
                    await writer.send("t", b"shared")
                    winner = await writer.prepare()
                async with TransactionGroup("sink", servers) as group:
                    assert (await group.finish(3, [winner], wait_ms=5000)).is_complete
                    await group.retire()
                await admin.alter_group_offsets("gone", {TopicPartition("t", 0): 0})
                await admin.delete_groups(["gone"])
            async with Producer(servers, linger_ms=0) as producer:
                for number in range(60):
                    await producer.send("compacted", bytes(200), key=b"%d" % (number % 3))
            cleaner = broker.housekeeping.cleaner
            assert cleaner is not None
            await cleaner.clean()

    asyncio.run(fill())
    return path


def rows(kl: Kl, *arguments: str | Path) -> list[dict[str, Any]]:
    result = kl("log", "dump", *arguments, "-o", "json")
    assert result.code == 0, result.told
    found: list[dict[str, Any]] = json.loads(result.out)
    return found


def log_of(kl: Kl, data: Path, topic: str) -> Path:
    segments = json.loads(kl("log", "segments", data, "-o", "json").out)
    return Path(next(row["file"] for row in segments if row["topic"] == topic)).parent


def test_each_batch_has_its_kind(kl: Kl, data: Path) -> None:
    found = rows(kl, log_of(kl, data, "t"))
    assert [(row["kind"], row["records"]) for row in found] == [
        ("transactional", 1),
        ("commit", 0),
        ("transactional", 1),
        ("abort", 0),
        ("transactional", 1),
        ("commit", 0),
    ]
    (written, committed, later, *_) = found
    assert written["producer_id"] == committed["producer_id"] >= 0
    assert committed["producer_epoch"] == written["producer_epoch"] + 1 == later["producer_epoch"]
    assert (written["base_sequence"], committed["base_sequence"]) == (0, -1)
    assert (written["coordinator_epoch"], committed["coordinator_epoch"]) == (None, 0)
    assert "KIND" in kl("log", "dump", log_of(kl, data, "t")).text.splitlines()[0]


def test_gaps_of_compaction_are_named(kl: Kl, data: Path) -> None:
    found = rows(kl, log_of(kl, data, "compacted"))
    gaps = [row for row in found if row["kind"] == "gap"]
    assert gaps and all(row["records"] == 0 and row["producer_id"] == -1 for row in gaps)
    assert {row["kind"] for row in found} == {"gap", "data"}
    assert kl("log", "verify", data).code == 0


def test_the_state_of_groups_is_read(kl: Kl, data: Path) -> None:
    found = [row for row in rows(kl, data, "--decode") if row["topic"] == "__consumer_offsets"]
    offsets = [row for row in found if row["kind"] == "offset" and row["key"]["group"] == "g"]
    assert [(row["key"]["topic"], row["key"]["partition"], row["value"]["offset"]) for row in offsets] == [
        ("t", 0, 0)
    ]
    kinds = {row["kind"] for row in found if row["key"].get("group") == "g"}
    assert kinds == {"group", "subscription", "target", "assignment", "event", "offset"}
    events = [row["value"]["cause"] for row in found if row["kind"] == "event" and row["value"]]
    assert events == ["MemberJoined", "MemberLeft"]
    (assigned, *_) = [row["value"] for row in found if row["kind"] == "assignment" and row["value"]]
    assert assigned["assigned"] == ["t-0"]
    gone = [row for row in found if row["key"].get("group") == "gone"]
    assert [row["kind"] for row in gone if row["value"] is None] == ["offset", "group"]
    pending = [row for row in found if row["key"].get("group") == "g-in-transaction"]
    assert [row["producer_id"] >= 0 for row in pending] == [True]
    assert [row["kind"] for row in found].count("commit") == 1


def test_the_state_of_transactions_is_read(kl: Kl, data: Path) -> None:
    found = [row for row in rows(kl, data, "--decode") if row["topic"] == "__transaction_state"]
    states = [
        row["value"]["state"]
        for row in found
        if row["key"].get("transactional_id") == "payer" and row["value"]
    ]
    assert states[0] == "Empty" and states[-1] == "CompleteAbort"
    of_commit = [state for state in dict.fromkeys(states) if "Abort" not in state]
    assert of_commit == ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit"]
    decided, retired = [row for row in found if row["kind"] == "group"]
    assert (decided["key"], decided["value"]) == (
        {"application_id": "sink"},
        {"last_batch": 3, "winners": ["task-0"]},
    )
    assert retired["key"] == decided["key"]
    assert retired["value"].items() > decided["value"].items() and "retired" in retired["value"]
    members = [row["value"] for row in found if row["kind"] == "member"]
    assert {(value["member"], value["batch"]) for value in members} == {("task-0", 3)}
    assert any("t-0" in value["partitions"] for value in members)


def test_as_a_table(kl: Kl, data: Path) -> None:
    shown = kl("log", "dump", data, "--decode").text
    assert "group=g topic=t partition=0" in shown
    assert "transactional_id=payer" in shown and "state=PrepareCommit" in shown
    assert any(line.endswith("removed") for line in shown.splitlines())


def test_decoding_needs_a_coordinators_log(kl: Kl, data: Path) -> None:
    other = kl("log", "dump", log_of(kl, data, "t"), "--decode")
    assert other.code == 4 and "--records" in other.told
    both = kl("log", "dump", data, "--decode", "--records")
    assert both.code == 2 and "leave out --records" in both.told


def test_text_of_a_record() -> None:
    assert as_text(None) == "removed"
    assert as_text({"a": 1, "b": None, "c": ["x", "y"], "d": [], "e": "two words"}) == (
        "a=1 b=- c=x,y d=- e='two words'"
    )
