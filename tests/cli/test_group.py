"""kl group, and kl consume -g: from the first record to the deleted group."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite import Broker, sync
from kafkalite.cli import connect
from kafkalite.cli.exit_codes import TimedOutError
from kafkalite.cli.group_consume import GroupJob, Holders
from kafkalite.cli.invocation import Invocation
from kafkalite.cli.printers import make_printer
from kafkalite.errors import CoordinatorNotAvailableError
from kafkalite.model import GroupMetadata, Record, TimestampType, TopicPartition
from kafkalite.testing.sim import Simulation

Kl = Callable[..., Any]
Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def filled(at: Kl, request: pytest.FixtureRequest) -> str:
    """A topic of two partitions with three and two records, named after the test."""
    topic = f"t-{request.node.name.replace('_', '-')}"[:80].rstrip("-")
    assert at("topic", "create", topic, "-p", "2").code == 0
    assert at("produce", topic, "-p", "0", stdin=b"a\nb\nc\n").code == 0
    assert at("produce", topic, "-p", "1", stdin=b"d\ne\n").code == 0
    return topic


def lag(kl: Kl, group: str) -> list[tuple[int, int | None, int, int | None]]:
    rows = json.loads(kl("group", "lag", group, "-o", "json").out)
    return [(row["partition"], row["committed"], row["end"], row["lag"]) for row in rows]


def test_a_group_continues_at_its_committed_offsets(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    read = at("consume", filled, "-g", group, "-n", "4", "--timeout", "20s")
    assert (read.code, len(read.text.split())) == (0, 4), read.told
    rest = at("consume", filled, "-g", group, "-e", "--timeout", "20s")
    assert rest.code == 0, rest.told
    assert sorted(read.text.split() + rest.text.split()) == ["a", "b", "c", "d", "e"]
    assert lag(at, group) == [(0, 3, 3, 0), (1, 2, 2, 0)]
    assert at("produce", filled, "-p", "1", stdin=b"f\n").code == 0
    table = at("group", "lag", group, "--max", "0")
    assert table.code == 9
    assert table.text.splitlines()[-1] == "1 record behind in 2 partitions"
    assert "1 record behind, more than 0" in table.told


def test_the_group_is_listed_and_described(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    assert at("consume", filled, "-g", group, "-e", "--timeout", "20s").code == 0
    assert group in at("group", "list", "-o", "name").text.split()
    listed = {row["name"]: row for row in json.loads(at("group", "list", "-o", "json").out)}
    assert (listed[group]["state"], listed[group]["members"]) == ("Empty", 0)
    assert group in at("group", "list", "--state", "Empty", "-o", "name").text.split()
    assert group not in at("group", "list", "--state", "Stable", "-o", "name").text.split()
    (described,) = [json.loads(at("group", "describe", group, "-o", "json").out)]
    assert (described["state"], described["member_count"], described["lag"]) == ("Empty", 0, 0)
    shown = at("group", "describe", group)
    assert shown.code == 0 and "COMMITTED" in shown.text
    nobody = at("group", "members", group)
    assert (nobody.code, nobody.told) == (0, f"kl: group {group!r} has no members now\n")


def test_a_member_without_a_partition_says_so_and_waits_for_records_that_others_hold(
    at: Kl, filled: str, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalite.cli.group_consume._IDLE_S", 0.3)
    settings: dict[str, Any] = {"group_id": "full", "bootstrap_servers": servers}
    with sync.Consumer(filled, **settings) as first, sync.Consumer(filled, **settings) as second:
        deadline = time.monotonic() + 20
        while len(first.assignment()) != 1 or len(second.assignment()) != 1:
            first.get_many(timeout_ms=20)
            second.get_many(timeout_ms=20)
            assert time.monotonic() < deadline
        idle = at("consume", filled, "-g", "full", "-e", "--timeout", "2s")
        assert (idle.code, idle.text) == (7, "")
        assert "no partition for this member: others have all of them; waiting until they leave" in idle.told
        monkeypatch.setattr("kafkalite.cli.group_consume._IDLE_LIMIT_S", 0.6)
        limited = at("consume", filled, "-g", "full", "-e")
        assert limited.code == 7, "without --timeout there is a limit, too"
        ends = {TopicPartition(filled, 0): 3, TopicPartition(filled, 1): 2}
        for member in (first, second):
            member.commit({tp: ends[tp] for tp in member.assignment()})
        done = at("consume", filled, "-g", "full", "-e", "--timeout", "20s")
        assert (done.code, done.text) == (0, ""), "others have read everything"


def test_a_member_without_a_partition_names_the_silence_of_the_others() -> None:
    assert "has not assigned" in Holders([], 5_000, 45_000).explain("g")
    alive = Holders([1_200, 4_300], 5_000, 45_000)
    assert not alive.late_ms
    assert "the last heartbeat was 4 s ago" in alive.explain("g")
    assert "until its session ends, in up to 43 s" in alive.explain("g")
    deleted = Holders([], 5_000, 45_000, ("t",)).explain("g")
    assert deleted == "group 'g' has no partition for this member: there is no topic 't'"
    dead = Holders([14_000, 16_000, 300], 5_000, 45_000).explain("g")
    assert "2 members that have partitions sent no heartbeat for 14 s" in dead
    assert "the session ends in 31 s" in dead


def test_a_consumer_that_waits_for_a_killed_member_says_so(
    at: Kl, filled: str, servers: str, spawn: Spawn
) -> None:
    first = spawn("consume", filled, "-g", "killed", KL_BOOTSTRAP_SERVERS=servers)
    assert first.stdout is not None
    assert len([first.stdout.readline() for _ in range(5)]) == 5
    first.kill()
    first.communicate()
    second = at("consume", filled, "-g", "killed", "-n", "1", "--timeout", "4s")
    assert second.code == 7
    assert "group 'killed' has no partition for this member: others have all of them" in second.told
    told = r"a member that was killed keeps its partitions until its session ends, in up to \d+ s"
    assert re.search(told, second.told)


def test_sigterm_leaves_the_group(at: Kl, filled: str, servers: str, spawn: Spawn) -> None:
    first = spawn("consume", filled, "-g", "leaver", KL_BOOTSTRAP_SERVERS=servers)
    assert first.stdout is not None
    assert len([first.stdout.readline() for _ in range(5)]) == 5
    first.terminate()
    out, err = first.communicate(timeout=20)
    assert (first.returncode, out, err) == (143, b"", b"kl: 5 records\n")
    described = json.loads(at("group", "describe", "leaver", "-o", "json").out)
    assert (described["state"], described["member_count"], described["lag"]) == ("Empty", 0, 0)
    assert at("produce", filled, "-p", "1", stdin=b"f\n").code == 0
    second = at("consume", filled, "-g", "leaver", "-e", "--timeout", "10s")
    assert (second.code, second.text) == (0, "f\n"), second.told


class Slow:
    """A consumer, and an Admin, of a cluster that never responds to the request ``silent``."""

    def __init__(self, silent: str, *, owns: bool) -> None:
        self.silent = silent
        self.partitions = [TopicPartition("t", 0)] if owns else []
        self.unread = [Record("t", 0, 0, 0, TimestampType.CREATE_TIME, None, b"printed", [])] if owns else []

    async def __aenter__(self) -> Slow:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def subscribe(self, *topics: str) -> None:
        pass

    def assignment(self) -> list[TopicPartition]:
        return self.partitions

    def position(self, tp: TopicPartition) -> int:
        return 0

    def group_metadata(self) -> GroupMetadata:
        return GroupMetadata("g", "member", 1, None)

    async def get_many(self, max_records: int, *, timeout_ms: int) -> list[Record]:
        if not self.unread:
            await asyncio.sleep(timeout_ms / 1000)
        found, self.unread = self.unread, []
        return found

    async def respond(self, request: str, response: Any = None) -> Any:
        if request == self.silent:
            await asyncio.sleep(1e6)
        return response

    async def commit(self) -> None:
        await self.respond("commit")

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return await self.respond("end_offsets", dict.fromkeys(partitions, 5))

    async def describe_group(self, group_id: str) -> Any:
        await self.respond("describe_group")
        raise CoordinatorNotAvailableError("fake")

    async def group_lag(self, group_id: str) -> Any:
        await self.respond("group_lag")
        await asyncio.sleep(4)  # begins before the limit, and ends after it
        return [SimpleNamespace(committed=1, end_offset=2, lag=1)]


@pytest.mark.parametrize(
    ("silent", "owns", "late_s"),
    [
        ("commit", True, 1.0),
        ("end_offsets", True, 0.0),
        ("describe_group", False, 0.0),
        ("group_lag", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_no_request_of_a_member_takes_longer_than_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, silent: str, owns: bool, late_s: float
) -> None:
    """In virtual time. Only the commit of printed records may take a second longer."""
    slow = Slow(silent, owns=owns)
    monkeypatch.setattr(connect, "admin", lambda _: slow)
    monkeypatch.setattr(connect, "consumer", lambda *_, **__: slow)
    virtual = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("kafkalite.cli.group_consume.time", virtual)

    async def consume() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        job = GroupJob(
            ("t",), "g", True, None, 6_000, {}, make_printer("value", None), _held_at=virtual.monotonic()
        )
        with pytest.raises(TimedOutError, match=r"timed out after [01] record"):
            await job.run(Invocation())
        return loop.time() - began_s

    with Simulation(seed=1) as simulation:
        passed_s = simulation.run(consume(), on=simulation.host("client"))
    assert passed_s == pytest.approx(6 + late_s, abs=0.01)


def test_a_deleted_topic_of_a_group_is_shown_as_deleted(at: Kl, filled: str, servers: str) -> None:
    kept = f"{filled[:70]}-kept"
    assert at("produce", kept, stdin=b"x\n").code == 0
    settings: dict[str, Any] = {"group_id": "mixed", "bootstrap_servers": servers}
    with sync.Consumer(filled, kept, auto_offset_reset="earliest", **settings) as holder:
        assert len(holder.assignment()) == 3
        assert at("topic", "delete", filled, "--yes").code == 0
        shown = at("group", "lag", "mixed")
        assert shown.code == 0, shown.told
        assert shown.text.splitlines()[-1].endswith("2 partitions deleted")
        rows = json.loads(at("group", "lag", "mixed", "-o", "json").out)
        assert [(row["topic"], row["end"]) for row in rows] == [(filled, None), (filled, None), (kept, 1)]
        assert at("group", "describe", "mixed").code == 0


def test_pending_revocations_are_named(at: Kl, filled: str, servers: str) -> None:
    settings: dict[str, Any] = {"group_id": "slow", "bootstrap_servers": servers}
    with sync.Consumer(filled, client_id="holder", **settings) as holder:
        assert len(holder.assignment()) == 2
        newcomer = threading.Thread(target=_join_and_leave, args=(filled, settings))
        newcomer.start()
        deadline = time.monotonic() + 20
        while (told := at("group", "explain", "slow").text).find("waits for:") < 0:
            assert time.monotonic() < deadline, told
        assert re.search(
            r"- holder \(\w{8}\) has not revoked \S+-[01], assigned to newcomer \(\w{8}\)\n", told
        )
        described = at("group", "describe", "slow")
        assert "assigned to newcomer" in described.text.replace(";", "\n")
        assert len(lag(at, "slow")) == 2, "the partition on its way is listed too"
        while newcomer.is_alive():
            holder.get_many(timeout_ms=20)  # here the partition is revoked
            assert time.monotonic() < deadline
        newcomer.join()


def _join_and_leave(topic: str, settings: dict[str, Any]) -> None:
    with sync.Consumer(topic, client_id="newcomer", **settings) as consumer:
        while not consumer.assignment():
            consumer.get_many(timeout_ms=20)


def test_explain_shows_the_cause_of_every_generation(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    for _ in range(2):
        assert at("consume", filled, "-g", group, "-e", "--timeout", "20s").code == 0
    events = json.loads(at("group", "explain", group, "-o", "json").out)
    causes = [event["cause"] for event in events]
    assert causes.count("MemberJoined") == 2 and causes.count("MemberLeft") == 2
    generations = [event["generation"] for event in events]
    assert generations == sorted(set(generations))
    story = at("group", "explain", group).text
    assert "MemberJoined" in story and "waits for nothing" in story


def test_reset_only_shows_the_change_without_execute(at: Kl, filled: str, tmp_path: Path) -> None:
    group = f"g-{filled}"
    assert at("consume", filled, "-g", group, "-e", "--timeout", "20s").code == 0
    shown = at("group", "reset-offsets", group, "--to-earliest", "-o", "json")
    assert [(row["current"], row["offset"], row["change"]) for row in json.loads(shown.out)] == [
        (3, 0, -3),
        (2, 0, -2),
    ]
    assert shown.told == "kl: nothing was changed; --execute makes the change\n"
    assert lag(at, group) == [(0, 3, 3, 0), (1, 2, 2, 0)]

    done = at("group", "reset-offsets", group, "--topic", f"{filled}:0", "--shift-by", "-2", "--execute")
    assert done.code == 0, done.told
    assert lag(at, group) == [(0, 1, 3, 2), (1, 2, 2, 0)]
    again = at("consume", filled, "-g", group, "-e", "--timeout", "20s")
    assert again.text.split() == ["b", "c"]

    exported = at("group", "reset-offsets", group, "--to-offset", "1", "--export")
    assert exported.text == f"{filled},0,1\n{filled},1,1\n"
    path = tmp_path / "offsets.csv"
    path.write_text(exported.text)
    assert at("group", "reset-offsets", group, "--from-file", path, "--execute").code == 0
    assert lag(at, group) == [(0, 1, 3, 2), (1, 1, 2, 1)]
    assert at("group", "reset-offsets", group, "--to-latest", "--execute").code == 0
    assert lag(at, group) == [(0, 3, 3, 0), (1, 2, 2, 0)]
    assert at("group", "reset-offsets", group, "--by-duration", "1h", "--execute").code == 0
    assert lag(at, group) == [(0, 0, 3, 3), (1, 0, 2, 2)]
    assert at("group", "reset-offsets", group, "--to-datetime", "tomorrow", "--execute").code == 0
    assert lag(at, group) == [(0, 3, 3, 0), (1, 2, 2, 0)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"t,0,1\nt\xff,0,1\n", "is not UTF-8"),
        (b"t,0,1\nt,0\n", "line 2: 't,0' is not topic,partition,offset"),
        (b"t,0,1\n" + b"t" * 200_000 + b",0,1\n", "is not CSV: field larger than field limit"),
    ],
)
def test_a_file_without_offsets_is_refused(at: Kl, tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "offsets.csv"
    path.write_bytes(content)
    refused = at("group", "reset-offsets", "g", "--from-file", path)
    assert refused.code == 2
    assert str(path) in refused.told and told in refused.told


def test_a_group_can_be_set_up_before_it_reads(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    nothing = at("group", "reset-offsets", group, "--to-latest")
    assert nothing.code == 4 and "--topic TOPIC" in nothing.told
    assert at("group", "reset-offsets", group, "--topic", filled, "--to-offset", "2", "--execute").code == 0
    assert at("consume", filled, "-g", group, "-e", "--timeout", "20s").text.split() == ["c"]


def test_a_group_id_that_is_too_long_is_refused_in_one_line(at: Kl, filled: str) -> None:
    done = at("consume", filled, "-g", "g" * 300, "-e")
    assert (done.code, done.told) == (2, "kl: a group id has 1 to 255 characters\n")


def test_commit_and_delete(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    done = at("group", "commit", group, f"{filled}-0=1", "--metadata", "by hand")
    assert done.code == 0, done.told
    (row,) = json.loads(at("group", "lag", group, "-o", "json").out)
    assert (row["committed"], row["metadata"]) == (1, "by hand")
    beyond = at("group", "commit", group, f"{filled}-0=9")
    assert beyond.code == 2 and "has offsets 0 to 3, not 9" in beyond.told
    assert at("group", "delete", group).told == f"kl: group {group!r} deleted\n"
    assert at("group", "lag", group).code == 4
    missing = at("group", "delete", group)
    assert missing.code == 4 and "kl group list" in missing.told


def test_watch_repeats_count_times(at: Kl, filled: str) -> None:
    group = f"g-{filled}"
    assert at("group", "commit", group, f"{filled}-0=1").code == 0
    watched = at("group", "watch", group, "--every", "10ms", "-n", "2", "-o", "jsonl")
    looks = [json.loads(line) for line in watched.text.splitlines()]
    assert [(look["state"], look["lag"]) for look in looks] == [("Empty", 2), ("Empty", 2)]
    assert looks[1]["committed_per_s"] == 0


def test_a_group_whose_topic_was_deleted_has_no_partitions(at: Kl) -> None:
    assert at("produce", "doomed", stdin=b"x\n").code == 0
    assert at("consume", "doomed", "-g", "mourner", "-e", "--timeout", "20s").code == 0
    assert at("topic", "delete", "doomed", "--yes").code == 0
    while json.loads(at("group", "lag", "mourner", "-o", "json").out):  # the offsets are deleted soon
        time.sleep(0.05)
    shown = at("group", "lag", "mourner")
    assert shown.code == 0
    assert "0 partitions" not in shown.text
    assert "kl: group 'mourner' has no partitions: neither assigned ones nor committed offsets" in shown.told


def test_the_lag_of_a_group_that_has_committed_nothing_is_unknown(at: Kl, filled: str, servers: str) -> None:
    group = f"g-{filled}"
    with sync.Consumer(filled, group_id=group, bootstrap_servers=servers) as member:
        assert len(member.assignment()) == 2
        assert lag(at, group) == [(0, None, 3, None), (1, None, 2, None)]
        shown = at("group", "lag", group)
        unknown = "lag unknown in 2 partitions; nothing committed in 2 partitions"
        assert (shown.code, shown.text.splitlines()[-1]) == (0, unknown)
        assert shown.text.splitlines()[1].split()[1:4] == ["-", "3", "-"]
        checked = at("group", "lag", group, "--max", "100")
        assert (checked.code, "nothing is committed in 2 partitions" in checked.told) == (9, True)
        assert json.loads(at("group", "describe", group, "-o", "json").out)["lag"] is None
        assert "lag unknown" in at("group", "watch", group, "-n", "1").text


def test_partitions_without_a_commit_are_not_in_the_sum_of_the_lag(at: Kl, filled: str, servers: str) -> None:
    group = f"g-{filled}"
    assert at("group", "commit", group, f"{filled}-0=1").code == 0
    assert at("group", "lag", group, "--max", "2").code == 0
    with sync.Consumer(filled, group_id=group, bootstrap_servers=servers) as member:
        assert len(member.assignment()) == 2
        shown = at("group", "lag", group).text.splitlines()[-1]
        assert shown == "2 records behind in 2 partitions; nothing committed in 1 partition"
        assert at("group", "lag", group, "--max", "2").code == 9


def test_the_lag_of_a_partition_without_records_is_zero_without_a_commit(at: Kl, servers: str) -> None:
    assert at("topic", "create", "empty-lag").code == 0
    with sync.Consumer("empty-lag", group_id="empty-lag", bootstrap_servers=servers) as member:
        assert len(member.assignment()) == 1
        shown = at("group", "lag", "empty-lag", "--max", "0")
        assert (shown.code, shown.text.splitlines()[-1]) == (
            0,
            "0 records behind in 1 partition; nothing committed in 1 partition",
        )


def test_a_missing_group_is_reported_once(at: Kl, filled: str) -> None:
    for command in ("describe", "members", "lag", "explain", "delete"):
        missing = at("group", command, "nobody")
        assert missing.code == 4
        assert missing.told == "kl: there is no group 'nobody'\n    hint: 'kl group list' shows the groups\n"
    both = at("group", "delete", "nobody", "nobody-else")
    assert both.code == 8
    assert both.told.splitlines() == [
        "kl: there is no group 'nobody'",
        "kl: there is no group 'nobody-else'",
        "kl: 2 of 2 groups were not deleted",
    ]
    no_topic = at("group", "commit", "g", "nosuch-0=1")
    assert no_topic.code == 4 and no_topic.told.startswith("kl: topic 'nosuch': there is no such topic\n")
    no_partition = at("group", "commit", "g", f"{filled}-7=1")
    assert no_partition.code == 4 and "has partitions 0 to 1, not 7" in no_partition.told


async def test_a_member_whose_topic_was_deleted_looks_for_it(servers: str) -> None:
    current = Invocation(bootstrap=servers)
    job = GroupJob(
        ("gone",), "gone-group", False, None, None, {}, make_printer("value", None), _subscribed=("gone",)
    )
    async with connect.admin(current) as admin:
        await admin.create_topic("still-there")
        await admin.alter_group_offsets("gone-group", {TopicPartition("still-there", 0): 0})
    assert (await job._holders(current, "m")).missing == ("gone",)
    job._subscribed = ("still-there",)
    assert (await job._holders(current, "m")).missing == ()


def test_an_offset_outside_the_log_is_reported(at: Kl, filled: str) -> None:
    shown = at("group", "reset-offsets", "g", "--topic", filled, "--to-offset", "99", "-o", "json")
    assert [row["offset"] for row in json.loads(shown.out)] == [3, 2]
    assert f"kl: {filled}-0 has offsets 0 to 3: it is set to 3, not 99\n" in shown.told


def test_a_group_with_members_is_not_changed(at: Kl, servers: str, filled: str) -> None:
    with sync.Consumer(filled, group_id="busy", bootstrap_servers=servers) as consumer:
        consumer.get_many(timeout_ms=1)
        for change in (
            ("delete", "busy"),
            ("commit", "busy", f"{filled}-0=1"),
            ("reset-offsets", "busy", "--topic", filled, "--to-earliest", "--execute"),
        ):
            refused = at("group", *change)
            assert refused.code == 1, change
            assert "group 'busy' has members" in refused.told and "consumers first" in refused.told
        (row,) = json.loads(at("group", "members", "busy", "-o", "json").out)
        assert row["count"] == 2
        wide = at("group", "members", "busy", "-o", "wide").text
        assert "LAST HEARTBEAT" in wide and " ago\n" in wide


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["group", "reset-offsets", "g"], "exactly one of"),
        (["group", "reset-offsets", "g", "--to-earliest", "--to-latest"], "exactly one of"),
        (["group", "reset-offsets", "g", "--to-earliest", "--execute", "--dry-run"], "either --execute or"),
        (["group", "reset-offsets", "g", "--to-datetime", "soonish"], "is not a time"),
        (["group", "commit", "g", "orders=5"], "TOPIC-PARTITION=OFFSET"),
        (["group", "commit", "g", "orders-\u00b2=1"], "TOPIC-PARTITION=OFFSET"),
        (["txn", "abort", "--hanging", "orders-\u00b2"], "--hanging takes TOPIC-PARTITION"),
        (["consume", "t", "-g", "g", "-r", "5:"], "a group continues at its committed offsets"),
        (["txn", "abort"], "no transaction given"),
        (["txn", "abort", "--hanging", "orders-0"], "--start-offset"),
        (["txn", "abort", "x", "--hanging", "orders-0"], "without a TRANSACTIONAL_ID"),
    ],
)
def test_invalid_combinations_are_usage_errors(at: Kl, arguments: list[str], told: str) -> None:
    refused = at(*arguments)
    assert refused.code == 2
    assert told in refused.told and "Traceback" not in refused.told


async def test_describing_all_groups_without_groups_says_so(kl: Kl) -> None:
    async with Broker(listeners=("127.0.0.1:0",)) as broker:
        describe = ("group", "describe", "--all-groups", "-b", broker.bootstrap_servers)
        done = await asyncio.to_thread(kl, *describe)
        assert (done.code, done.out) == (0, b"")
        assert done.told == "kl: no groups; 'kl consume TOPIC -g GROUP' creates one\n"
        assert (await asyncio.to_thread(kl, *describe, "-o", "json")).told == ""
