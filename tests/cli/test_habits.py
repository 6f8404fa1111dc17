"""Command lines of kcat and of Kafka's scripts do in kl what they do there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kafkalite.cli.app import COMMANDS
from kafkalite.cli.cheat import SHEET
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.habits import translate
from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-C -b h:1 -t events -o beginning -e", "consume events -b h:1 -r start -e"),
        ("-b h:1 -C -tevents -p 0 -o -10 -c 5", "consume events -b h:1 -p 0 -r -10 -n 5"),
        ("-C -t events -J -q", "consume events --output=jsonl"),
        (
            "-C -t events -o s@1431857103000 -o e@1431857104000",
            "consume events --from 1431857103000 --to 1431857104000",
        ),
        ("-G billing events orders -o stored", "consume -g billing events orders"),
        ("-P -b h:1 -t events -K: -z lz4", "produce events -b h:1 -K: -z lz4"),
        ("-P -t events -l file.txt", "produce events file.txt"),
        ("-L -b h:1", "topic list -b h:1"),
        ("-L -t events", "topic describe events"),
        ("-L -J -b h:1", "topic list -o json -b h:1"),
        ("-b h:1 -J -L -t events -q", "topic describe events -b h:1 -o json"),
        (
            "topic --create --zookeeper h:2181 --replication-factor 1 --partitions 3 --topic purchases",
            "topic create purchases --replication-factor 1 --partitions 3",
        ),
        ("kafka-topics.sh --list --bootstrap-server h:1", "topic list --bootstrap-server h:1"),
        (
            "topic create --topic T --partitions 1 --replication-factor 1 --bootstrap-server h:1",
            "topic create T --partitions 1 --replication-factor 1 --bootstrap-server h:1",
        ),
        ("bin/kafka-topics.sh --list --zookeeper h:2181", "topic list"),
        ("topic --describe --topic=a,b", "topic describe a b"),
        ("topic ls", "topic list"),
        ("topic rm events -y", "topic delete events -y"),
        ("topics ls", "topic list"),
        ("consume --topic events --from-beginning --max-messages 5", "consume events --from-beginning -n 5"),
        ("consume --topic events --partition 1 --offset 42", "consume events --partition 1 -r 42"),
        ("consume --topic events --offset earliest", "consume events -r start"),
        ("consume events --timeout-ms 500", "consume events --timeout 500ms"),
        ("consume events --isolation-level read_committed", "consume events --read-committed"),
        (
            "kafka-console-consumer --topic events --group g",
            "consume events --group g -X auto.offset.reset=latest",
        ),
        (
            "kafka-console-consumer --topic events --group g --from-beginning",
            "consume events --group g --from-beginning",
        ),
        ("kafka-console-consumer.sh --topic events -n 1", "consume events -n 1 -r end"),
        ("kafka-console-consumer.sh --topic events --from-beginning", "consume events --from-beginning"),
        ("kafka-console-consumer.sh --topic events --offset=7", "consume events -r 7"),
        ("bin/kafka-get-offsets.sh --topic events -b h:1", "offsets events -b h:1"),
        ("kcat -C -t events -e", "consume events -e"),
        ("kcat -L -b h:1", "topic list -b h:1"),
        (
            "consume --topic events --property print.key=true --property key.separator=:",
            "consume events -f '%k:%s\\n'",
        ),
        ("consume --topic events --property print.key=true", "consume events -f '%k\\t%s\\n'"),
        ("produce --topic e --property parse.key=true", "produce e -K '\\t'"),
        ("produce --broker-list h:1 --topic events", "produce events -b h:1"),
        ("produce --topic e --property parse.key=true --property key.separator=:", "produce e -K :"),
        ("group --describe --group billing", "group describe billing"),
        ("group --describe --all-groups", "group describe --all-groups"),
        ("kafka-consumer-groups.sh --describe --group g --members", "group members g"),
        (
            "group --reset-offsets --group g --topic t --to-earliest --execute",
            "group reset-offsets g --topic t --to-earliest --execute",
        ),
        (
            "kafka-configs --alter --entity-type brokers --entity-name 1 --add-config a=1,b=2",
            "config set broker 1 a=1 b=2",
        ),
        (
            "kafka-configs --alter --entity-type topics --entity-name t"
            " --add-config cleanup.policy=[compact,delete],retention.ms=5",
            "config set topic t cleanup.policy=compact,delete retention.ms=5",
        ),
        (
            "kafka-configs --alter --entity-type topics --entity-name t --delete-config a,b",
            "config set topic t --unset a --unset b",
        ),
        ("-P -t events -k '' -p 0", "produce events -k '' -p 0"),
        ("-b h:1 -t offsets -C -e", "consume offsets -b h:1 -e"),
        ("kafka-log-dirs --describe --topic-list a,b", "log dirs a b"),
    ],
)
def test_their_words_become_ours(theirs: str, ours: str) -> None:
    said = translate(shlex.split(theirs), COMMANDS)
    assert said == shlex.split(ours)


@pytest.mark.parametrize(
    "line",
    [
        "topic list",
        "-b h:1 consume events -P 3 -o json",
        "-b h:1 -o json topic list",
        "group reset-offsets g --topic orders:0,2 --shift-by -100",
        "cluster wait --topic events --timeout 10s",
        "dev --topic events:3",
        "config explain retention.ms --topic events",
        "produce t -k --topic-like-key -- -file",
        "bench produce",
        "--help",
        "",
    ],
)
def test_our_own_words_stay_as_they_are(line: str) -> None:
    assert translate(shlex.split(line), COMMANDS) == shlex.split(line)


def test_every_command_of_the_cheat_sheet_exists(kl: Kl) -> None:
    for _, rows in SHEET:
        for theirs, ours in rows:
            if theirs:
                with suppress(UsageError):  # names the command of kl
                    assert translate(shlex.split(theirs), COMMANDS)[0] in COMMANDS, theirs
            program, *words = shlex.split(ours)
            assert program == "kl"
            depth = 2 if words[0] in {"topic", "group", "log", "config", "cluster", "metadata"} else 1
            assert kl(*words[:depth], "--help").code == 0, ours
    assert "kcat -C -t events" in kl("cheat").text


def test_a_script_that_is_not_translated_names_the_command_of_kl(kl: Kl) -> None:
    done = kl("bin/kafka-metadata-quorum.sh", "describe", "--status")
    assert done.code == 2
    assert done.told == (
        "kl: the flags of kafka-metadata-quorum are not translated\n"
        "    hint: use 'kl metadata quorum'; see 'kl cheat'\n"
    )


def test_a_topic_is_created_read_and_written_in_their_words(kl: Kl, servers: str) -> None:
    created = kl(
        *("bin/kafka-topics.sh", "--create", "--zookeeper", "localhost:2181", "--replication-factor", "1"),
        *("--partitions", "3", "--topic", "purchases", "--config", "retention.ms=7d", "-b", servers),
    )
    assert created.code == 0, created.told
    assert created.told == (
        "kl: in kl's words: kl topic create purchases --replication-factor 1 --partitions 3"
        f" --config retention.ms=7d -b {servers}\n"
    ), "the whole command line, no flag is dropped"
    described = json.loads(kl("topic", "describe", "purchases", "-b", servers, "-o", "json").out)[0]
    assert len(described["partitions"]) == 3
    assert described["configs"]["retention.ms"] == {"value": str(7 * 86_400_000), "source": "topic"}
    many = kl("topic", "--create", "--replication-factor", "2", "--topic", "too-many", "-b", servers)
    assert many.code == 2 and "replica" in many.told, "the replication factor is not ignored"
    assert (
        kl("-P", "-b", servers, "-t", "purchases", "-K:", "-p", "1", stdin=b"CA:maple\nUS:glazed\n").code == 0
    )
    read = kl("-C", "-b", servers, "-t", "purchases", "-o", "beginning", "-e", "-q", "-f", "%k=%s\\n")
    assert read.text == "CA=maple\nUS=glazed\n"
    printed = kl(
        *(
            "consume",
            "--topic",
            "purchases",
            "--property",
            "print.key=true",
            "--max-messages",
            "1",
            "-b",
            servers,
        )
    )
    assert printed.text == "CA\tmaple\n"
    assert "purchases" in kl("-L", "-b", servers).text
    listing = json.loads(kl("-L", "-J", "-b", servers).text)
    assert [topic["name"] for topic in listing if topic["name"] == "purchases"]


def test_patterns_name_topics(at: Kl) -> None:
    assert at("topic", "create", "pattern-a", "pattern-b", "other").code == 0
    assert at("topic", "list", "pattern-.*", "-o", "name").text.split() == ["pattern-a", "pattern-b"]
    described = json.loads(at("topic", "describe", "pattern-[ab]", "-o", "json").out)
    assert [each["name"] for each in described] == ["pattern-a", "pattern-b"]
    for name in ("pattern-a", "pattern-b"):
        assert at("produce", name, stdin=b"x\n").code == 0
    assert at("consume", "pattern-.*", "-e").text == "x\nx\n"
    unmatched = at("topic", "list", "pattern*")
    assert unmatched.code == 4
    assert "no topic matches 'pattern*'" in unmatched.told and "regular expression" in unmatched.told
    listed = at("consume", "pattern-a,pattern-b", "-e")
    assert listed.code == 4 and "separate topics with spaces" in listed.told
    assert at("topic", "list", "pattern-(").code == 2
    assert at("topic", "delete", "pattern-.*", "--yes").text == "pattern-a: deleted\npattern-b: deleted\n"


def test_delete_records_up_to_an_offset_a_time_and_the_end(at: Kl) -> None:
    assert at("topic", "create", "shrinking", "-p", "2").code == 0
    lines = b"".join(b'{"value":"%d","timestamp":%d}\n' % (n, 1_000_000_000_000 + n) for n in range(6))
    assert at("produce", "shrinking", "-i", "jsonl", "-p", "0", stdin=lines).code == 0
    dry = at("topic", "delete-records", "shrinking", "--before", "2", "-p", "0", "--dry-run", "-o", "json")
    assert [(row["new_start"], row["records"]) for row in json.loads(dry.out)] == [(2, 2)]
    assert at("topic", "delete-records", "shrinking", "--before", "2", "-p", "0", stdin=b"n\n").code == 1
    assert at("topic", "delete-records", "shrinking", "--before", "2", "-p", "0", "--yes").code == 0
    assert at("consume", "shrinking", "-e").text == "2\n3\n4\n5\n"
    by_time = at("topic", "delete-records", "shrinking", "--before", "2001-09-09T01:46:40.004Z", "--yes")
    assert by_time.code == 0, by_time.told
    assert at("consume", "shrinking", "-e").text == "4\n5\n"
    above = at("topic", "delete-records", "shrinking", "--before", "1700000000", "-p", "0", "--yes")
    assert above.code == 2 and "ends at 6, below 1700000000" in above.told, "an offset, and no time"
    assert at("topic", "delete-records", "shrinking", "--before", "end", "--yes").code == 0
    assert at("consume", "shrinking", "-e").text == ""
    assert "there is no earlier record" in at("topic", "delete-records", "shrinking", "--before", "end").told
    assert at("topic", "delete-records", "shrinking", "--before", "soon").code == 2


def test_the_logs_of_running_brokers_are_listed(at: Kl) -> None:
    assert at("produce", "sized", stdin=b"x\n").code == 0
    (row,) = json.loads(at("log", "dirs", "sized", "-o", "json").out)
    assert (row["topic"], row["log_end_offset"], row["offline_reason"]) == ("sized", 1, None)
    assert row["size_bytes"] > 0 and row["name"] == "sized-0"


def test_settings_of_a_running_broker_are_shown_and_changed(at: Kl) -> None:
    assert at("config", "set", "broker", "1", "log.retention.ms=8d").code == 0
    shown = {row["name"]: row for row in json.loads(at("config", "show", "broker", "1", "-o", "json").out)}
    assert shown["log.retention.ms"]["value"] == str(8 * 86_400_000)
    assert "advertised.listeners" not in shown, "only what differs from the defaults"
    assert at("config", "set", "broker", "1", "--unset", "log.retention.ms").code == 0
    one = at("config", "show", "broker", "1", "log.retention.ms", "-o", "json")
    assert json.loads(one.out)[0]["value"] != shown["log.retention.ms"]["value"]
    assert at("config", "show", "broker", "1", "no.such").code == 4
    assert at("config", "set", "broker", "1").code == 2
    fixed = at("config", "set", "broker", "1", "node.id=7")
    assert fixed.code == 2
    assert "node.id: no option that can be changed while the broker runs" in fixed.told
    for option in ("log.retention.msec=7", "num.partition=3"):
        unknown = at("config", "set", "broker", "1", option)
        assert unknown.code == 2
        assert "unknown option; did you mean" in unknown.told
    assert at("config", "set", "broker", "99", "log.retention.ms=7d").code != 0


def test_each_broker_describes_its_own_settings(kl: Kl) -> None:
    with SyncCluster(brokers=3) as cluster:
        for node_id in ("1", "2", "3"):
            shown = kl(
                "config", "show", "broker", node_id, "node.id", "-b", cluster.bootstrap_servers, "-o", "json"
            )
            assert json.loads(shown.out)[0]["value"] == node_id, shown.told


def test_all_groups_are_described(at: Kl) -> None:
    assert at("produce", "shared", stdin=b"x\n").code == 0
    for group in ("one", "two"):
        assert at("consume", "shared", "-g", group, "-e", "--timeout", "20s").code == 0
    described = at("group", "describe", "--all-groups")
    assert described.code == 0
    assert [line.split()[1] for line in described.text.splitlines() if line.startswith("group ")] == [
        "one",
        "two",
    ]
    assert at("group", "describe").code == 2


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("kafka-acls.sh --list", "'kl acl list'"),
        ("bin/kafka-server-stop.sh", "'kl cluster shutdown NODE'"),
        ("kafka-reassign-partitions.sh --list", "kl has no counterpart of kafka-reassign-partitions.sh"),
        ("kafka-features describe", "'kl cluster features describe' or 'kl cluster features upgrade'"),
        ("kafka-jmx describe", "kl has no counterpart of kafka-jmx"),
        ("connect-standalone.sh a.properties", "kl has no counterpart of connect-standalone.sh"),
        ("-Q -b h:1 -t events:0:-1", "'kl offsets TOPIC'"),
        ("kcat -b h:1 -Q -t events:0:-1", "'kl offsets TOPIC'"),
    ],
)
def test_scripts_that_are_not_translated_name_the_command_or_that_there_is_none(
    kl: Kl, theirs: str, words: str
) -> None:
    refused = kl(*shlex.split(theirs))
    assert refused.code == 2
    assert words in refused.told and "'kl cheat'" in refused.told


def test_a_duration_that_is_not_understood_shows_the_units(at: Kl) -> None:
    refused = at("topic", "create", "timed", "-c", "retention.ms=7x")
    assert refused.code == 2
    assert ", or a time such as 90s or 7d" in refused.told
    assert "such as" not in at("topic", "create", "timed", "-c", "segment.bytes=7x").told


def test_setting_names_are_completed() -> None:
    from kafkalite.cli.registries import complete_setting

    found = complete_setting("topic", suffix="=")(None, None, "retention.")  # type: ignore[arg-type]
    assert found == ["retention.bytes=", "retention.ms=", "retention.topic.bytes="]
    assert "linger.ms" in complete_setting()(None, None, "linger")  # type: ignore[arg-type]
