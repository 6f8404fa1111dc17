"""kl topic, from creation to deletion, with kl's and Kafka's options."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


def names(kl: Kl) -> list[str]:
    return kl("topic", "list", "-o", "name").text.split()


def test_a_minimum_above_the_number_of_replicas_gets_a_warning(at: Kl) -> None:
    """Kafka accepts it too, but no produce request with acks=all can succeed."""
    warning = "min.insync.replicas 2 is more than its 1 replica"
    for more in (["--dry-run"], []):
        created = at("topic", "create", "strict", "-c", "min.insync.replicas=2", *more)
        assert (created.code, warning in created.told) == (0, True)
    assert warning not in at("topic", "alter", "strict", "-c", "min.insync.replicas=1").told
    assert warning in at("topic", "alter", "strict", "-c", "min.insync.replicas=2").told
    failed = at(
        "produce", "strict", "-X", "delivery.timeout.ms=1500", "-X", "request.timeout.ms=500", stdin=b"x\n"
    )
    assert failed.code != 0
    assert "has 1 replica, fewer than min.insync.replicas 2" in failed.told
    assert "kl topic alter strict -c min.insync.replicas=1" in failed.told
    assert "has a leader" not in failed.told
    assert at("topic", "delete", "strict", "--yes").code == 0


def test_create_list_describe_alter_delete(at: Kl) -> None:
    created = at("topic", "create", "life", "-p", "3", "-c", "retention.ms=60000")
    assert (created.code, created.text, created.told) == (0, "life: created, 3 partitions\n", "")
    assert "life" in names(at)

    (described,) = json.loads(at("topic", "describe", "life", "-o", "json").out)
    assert described["name"] == "life"
    assert described["configs"] == {"retention.ms": {"value": "60000", "source": "topic"}}
    assert [(each["partition"], each["earliest"], each["latest"]) for each in described["partitions"]] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
    ]

    altered = at("topic", "alter", "life", "-c", "retention.ms=70000", "-p", "5")
    assert altered.code == 0, altered.told
    assert altered.text == "life: retention.ms 60000 -> 70000\nlife: partitions 3 -> 5\n"
    assert at("topic", "alter", "life", "--unset", "retention.ms").text == (
        "life: retention.ms 70000 -> 604800000\n"
    )

    deleted = at("topic", "delete", "life", "--yes")
    assert (deleted.code, deleted.text) == (0, "life: deleted\n")
    assert "life" not in names(at)


def test_kafkas_options_are_accepted_and_kls_words_printed(kl: Kl, servers: str) -> None:
    arguments = [
        "--topic",
        "old",
        "--partitions",
        "1",
        "--replication-factor",
        "1",
        "--bootstrap-server",
        servers,
    ]
    created = kl("topic", "create", *arguments)
    assert created.code == 0, created.told
    assert created.told == (
        "kl: in kl's words: kl topic create old --partitions 1 --replication-factor 1"
        f" --bootstrap-server {servers}\n"
    )
    described = kl("topic", "describe", "--topic", "old", "--bootstrap-server", servers)
    assert described.code == 0
    assert described.told.count("in kl's words: kl topic describe old") == 1


def test_the_brokers_may_stand_before_the_command(kl: Kl, servers: str) -> None:
    assert kl("-b", servers, "-o", "json", "topic", "list").code == 0


def test_every_invalid_setting_is_usage(at: Kl) -> None:
    """Whether kl, a client or the broker finds it."""
    assert at("topic", "create", "set").code == 0
    for words in (
        ("topic", "create", "new", "-c", "retention.ms=soon"),
        ("topic", "alter", "set", "-c", "retention.mz=1"),
        ("config", "set", "topic", "set", "retention.ms=soon"),
        ("produce", "set", "-X", "linger.ms=soon"),
        ("consume", "set", "-X", "fetch.min.bytez=1"),
        ("dev", "--set", "num.partitions=none"),
        ("server", "start", "--data", "nowhere", "--set", "num.partitions=none"),
    ):
        assert at(*words).code == 2, words


def test_a_topic_that_exists(at: Kl) -> None:
    assert at("topic", "create", "twice").code == 0
    again = at("topic", "create", "twice")
    assert again.code == 5
    assert "twice" in again.told
    assert "--if-not-exists" in again.told
    assert at("topic", "create", "twice", "--if-not-exists").code == 0


def test_each_failure_is_printed_once(at: Kl) -> None:
    at("topic", "create", "one")
    at("topic", "create", "two")
    result = at("topic", "create", "one", "two")
    assert result.code == 5
    assert result.told.count("'one' already exists") == 1
    assert "kl: 2 of 2 topics failed" in result.told
    missing = at("topic", "delete", "--yes", "gone-1", "gone-2")
    assert missing.code == 4
    assert [missing.told.count(f"kl: gone-{number}: ") for number in (1, 2)] == [1, 1], missing.told


def test_some_of_several_fail(at: Kl) -> None:
    at("topic", "create", "there")
    result = at("topic", "create", "fresh", "there")
    assert result.code == 8
    assert "kl: there: " in result.told
    assert "1 of 2 topics failed" in result.told
    assert "fresh" in names(at)


@pytest.mark.parametrize("name", ["../x", "a b", "x" * 250, "."])
def test_a_bad_name_is_usage(at: Kl, name: str) -> None:
    result = at("topic", "create", "--", name)
    assert result.code == 2
    assert "topic name" in result.told


def test_a_bad_setting_says_what_is_allowed(at: Kl) -> None:
    result = at("topic", "create", "unset", "-c", "retention.ms=soon")
    assert result.code in {1, 2}
    assert "retention.ms" in result.told
    assert "whole number" in result.told
    assert at("topic", "create", "unset", "-c", "retention.ms").code == 2


def test_dry_runs_change_nothing(at: Kl) -> None:
    assert at("topic", "create", "ghost", "--dry-run").text == "ghost: would be created, 1 partition\n"
    assert "ghost" not in names(at)
    at("topic", "create", "still", "-p", "2")
    dry = at("topic", "alter", "still", "-p", "4", "-c", "retention.ms=1000", "--dry-run")
    assert "retention.ms 604800000 -> 1000 (dry run)" in dry.text
    assert "partitions 2 -> 4 (dry run)" in dry.text
    (described,) = json.loads(at("topic", "describe", "still", "-o", "json").out)
    assert (len(described["partitions"]), described["configs"]) == (2, {})
    assert at("topic", "delete", "still", "--dry-run").text == "still: 2 partitions, 0 records\n"
    assert "still" in names(at)


def test_delete_asks_for_confirmation(at: Kl) -> None:
    at("topic", "create", "dear")
    at("produce", "dear", stdin=b"1\n2\n")
    refused = at("topic", "delete", "dear", stdin=b"n\n")
    assert refused.code == 1
    assert "dear: 1 partition, 2 records" in refused.told
    assert "Delete 1 topic, for ever? [y/N]" in refused.told
    assert "nothing was deleted" in refused.told
    assert at("topic", "delete", "dear").code == 1  # no answer on stdin
    assert "dear" in names(at)
    assert at("topic", "delete", "dear", stdin=b"y\n").code == 0
    assert "dear" not in names(at)


def test_a_missing_topic_is_exit_code_4(at: Kl) -> None:
    for verb in ("describe", "delete"):
        result = at("topic", verb, "nowhere")
        assert result.code == 4
        assert "nowhere" in result.told
        assert "kl topic list" in result.told
    assert at("topic", "alter", "nowhere", "-c", "retention.ms=1").code == 4
    assert at("topic", "delete", "nowhere", "--if-exists").code == 0
    assert "nowhere" not in names(at)


def test_delete_some_existing_topics(at: Kl) -> None:
    at("topic", "create", "here")
    result = at("topic", "delete", "here", "nowhere", "-y")
    assert result.code == 8
    assert "here" not in names(at)


def test_verbs_need_a_name(at: Kl) -> None:
    for verb in ("create", "describe", "alter", "delete"):
        assert at("topic", verb).code == 2
    at("topic", "create", "named")
    assert at("topic", "alter", "named").code == 2


def test_describe_for_people(at: Kl) -> None:
    at("topic", "create", "shown", "-p", "2", "-c", "retention.ms=1000")
    at("produce", "shown", "-p", "1", stdin=b"a\nb\n")
    text = at("topic", "describe", "shown").text
    assert "topic     shown\n" in text
    assert "records   2\n" in text
    assert "settings  retention.ms=1000\n" in text
    assert "PARTITION  LEADER  REPLICAS  ISR  ELR  EARLIEST  LATEST  LAG" in text
    assert "SEGMENTS" in at("topic", "describe", "shown", "-o", "wide").text
    assert "durability=" in at("topic", "describe", "shown", "--all-configs").text


@pytest.mark.parametrize("output", ["table", "wide", "name", "json", "jsonl", "yaml"])
def test_every_format_of_list(at: Kl, output: str) -> None:
    at("topic", "create", "listed", "--if-not-exists")
    result = at("topic", "list", "-o", output)
    assert result.code == 0
    assert "listed" in result.text
    if output == "json":
        assert "listed" in [row["name"] for row in json.loads(result.out)]
    if output == "yaml":
        assert "listed" in [row["name"] for row in yaml.safe_load(result.out)]


def test_a_listed_name_that_does_not_exist_is_named(at: Kl) -> None:
    at("topic", "create", "listed", "--if-not-exists")
    missing = at("topic", "list", "listed", "nosuch")
    assert (missing.code, missing.text) == (4, "")
    assert missing.told.startswith("kl: there is no topic 'nosuch'\n")
    at("consume", "listed", "-g", "makes-the-internal-topic", "-e")
    assert at("topic", "list", "__consumer_offsets", "-o", "name").text == "__consumer_offsets\n"


def test_a_setting_that_is_both_set_and_unset_is_refused(at: Kl) -> None:
    at("topic", "create", "altered", "-c", "retention.ms=1d", "--if-not-exists")
    for command in (
        ("topic", "alter", "altered", "-c", "retention.ms=7d", "--unset", "retention.ms"),
        ("config", "set", "topic", "altered", "--unset", "retention.ms", "retention.ms=7d"),
    ):
        refused = at(*command)
        assert (refused.code, refused.told) == (2, "kl: retention.ms is both set and unset\n")
    assert b'"86400000"' in at("config", "show", "topic", "altered", "-o", "json").out


def test_the_end_of_the_input_is_no_answer_and_ends_the_line(at: Kl) -> None:
    at("topic", "create", "kept", "--if-not-exists")
    refused = at("topic", "delete", "kept")
    assert refused.code == 1
    assert "for ever? [y/N] \nkl: nothing was deleted\n" in refused.told


def test_logs_of_a_topic_or_broker_that_does_not_exist_are_no_empty_list(at: Kl) -> None:
    missing = at("log", "dirs", "nosuch")
    assert (missing.code, missing.text) == (4, "")
    missing = at("log", "dirs", "--broker", "7")
    assert (missing.code, missing.told) == (4, "kl: there is no broker '7'\n    hint: the node ids are: 1\n")


def test_the_replicas_that_are_in_sync_are_kept(kl: Kl) -> None:
    with SyncCluster(brokers=3, controllers=1, transport="tcp") as cluster:
        servers = ("-b", cluster.bootstrap_servers)
        assert kl("topic", "create", "orders", "-r", "3", *servers).code == 0

        def replicas() -> list[int]:
            (described,) = json.loads(kl("topic", "describe", "orders", "-o", "json", *servers).out)
            found: list[int] = described["partitions"][0]["replicas"]
            return found

        first, second, third = replicas()
        assert kl("topic", "create", "gone", "-r", "2", *servers).code == 0
        there = {"partitions": [{"topic": "gone", "partition": 0, "replicas": [first, second]}]}
        moved = kl("cluster", "reassign", "apply", "-", "--wait", *servers, stdin=json.dumps(there).encode())
        assert moved.code == 0, moved.told
        fewer = ("topic", "alter", "orders", "--allow-replication-factor-change", *servers)
        cluster.stop(first)
        assert "in sync" not in kl(*fewer, "-r", "2", "--dry-run").told
        cluster.stop(second)
        warned = kl(*fewer, "-r", "2", "--dry-run")
        assert "orders-0: only 1 of the 2 replicas that stay are in sync now" in warned.told
        assert kl(*fewer, "-r", "1").code == 0
        assert replicas() == [third]
        leaderless = ("topic", "alter", "gone", "--allow-replication-factor-change", "-r", "1", *servers)
        refused = kl(*leaderless)
        assert refused.code == 9
        assert "gone-0 has no leader, so any replica may be the last copy of a record" in refused.told


def test_the_replication_factor_cannot_be_lowered(kl: Kl) -> None:
    """Also not with the options of kafka-topics.sh. The other changes of a refused command are not made."""
    with SyncCluster(brokers=2, transport="tcp", broker_session_timeout_ms=60_000) as cluster:
        servers = ("-b", cluster.bootstrap_servers)
        assert kl("topic", "create", "orders", "-r", "2", *servers).code == 0
        for change in (
            ("alter", "orders", "-r", "1"),
            ("alter", "orders", "-r", "1", "-p", "2", "-c", "retention.ms=7d"),
            ("--alter", "--topic", "orders", "--replication-factor", "1"),
        ):
            refused = kl("topic", *change, *servers)
            assert refused.code == 2, refused
            assert "orders has 2 replicas, and 1 are fewer: copies of acknowledged" in refused.told
            assert "hint: add --allow-replication-factor-change" in refused.told
        (described,) = json.loads(kl("topic", "describe", "orders", "-o", "json", *servers).out)
        assert [sorted(each["replicas"]) for each in described["partitions"]] == [[1, 2]]
        assert "retention.ms" not in str(described["configs"])
        dry = kl(
            "topic", "alter", "orders", "-r", "1", "--allow-replication-factor-change", "--dry-run", *servers
        )
        assert dry.text == "orders: 1 partition would get 1 replicas (dry run)\n"
        same = kl("topic", "alter", "orders", "-r", "2", "-p", "2", *servers)
        assert same.code == 0
        assert "partitions 1 -> 2" in same.text
