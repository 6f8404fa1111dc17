"""kl acl."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite import sync
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import SyncCluster, drop_next

Kl = Callable[..., Any]


def test_rules_are_added_listed_checked_and_removed(at: Kl) -> None:
    added = at(
        "acl",
        "add",
        "User:acl-a",
        "--operation",
        "read",
        "--operation",
        "ALTER",
        "--topic",
        "t.",
        "--prefixed",
    )
    assert added.code == 0
    assert "User:acl-a may Read Topic prefix 't.'" in added.told
    assert "note: broker 1 does not enforce rules; start it with authorizer.class.name" in added.told
    rows = json.loads(at("acl", "list", "--principal", "User:acl-a", "-o", "json").out)
    assert [(row["operation"], row["pattern_type"], row["host"]) for row in rows] == [
        ("Read", "Prefixed", "*"),
        ("Alter", "Prefixed", "*"),
    ]
    allowed = at("acl", "check", "User:acl-a", "describe", "--topic", "t.x")
    assert allowed.code == 0 and "may Read" in allowed.text
    denied = at("acl", "check", "User:acl-a", "write", "--topic", "t.x")
    assert (
        denied.code == 9 and "no rule allows it" in denied.text and "may not Write Topic 't.x'" in denied.told
    )
    removed = at("acl", "remove", "--principal", "User:acl-a", "-y", "-o", "name")
    assert removed.text.split() == ["t.", "t."]
    assert at("acl", "list", "--principal", "User:acl-a").told == "kl: no such rules\n"


def test_a_denying_rule_wins_only_for_its_host(at: Kl) -> None:
    at("acl", "add", "User:acl-b", "--operation", "all", "--cluster")
    at("acl", "add", "User:*", "--operation", "alter", "--cluster", "--deny", "--host", "10.0.0.7")
    assert at("acl", "check", "User:acl-b", "alter", "--cluster").code == 0
    denied = at("acl", "check", "User:acl-b", "alter", "--cluster", "--host", "10.0.0.7", "-o", "json")
    assert denied.code == 9
    assert json.loads(denied.out)["reason"].startswith("the rule denies it: User:* from 10.0.0.7")
    asked = at("acl", "remove", "--cluster", stdin=b"n\n")
    assert asked.code == 1 and "nothing was removed" in asked.told
    assert at("acl", "remove", "--cluster", stdin=b"y\n").code == 0
    assert at("acl", "check", "User:acl-b", "alter", "--cluster").code == 9


def test_a_check_counts_the_settings_of_the_brokers(kl: Kl) -> None:
    settings = {
        "authorizer_class_name": "StandardAuthorizer",
        "super_users": "User:root; User:ANONYMOUS",
        "allow_everyone_if_no_acl_found": True,
    }
    with sync.Broker(
        listeners="127.0.0.1:0", filesystem=MemoryFileSystem(), log_dirs="/b", **settings
    ) as broker:

        def check(user: str, topic: str) -> Any:
            return kl(
                "-b", broker.addresses[0], "acl", "check", user, "write", "--topic", topic, "-o", "json"
            )

        assert json.loads(check("User:root", "t").out)["reason"] == "User:root is a super user"
        assert "allow.everyone.if.no.acl.found is true" in json.loads(check("User:alice", "t").out)["reason"]
        kl("-b", broker.addresses[0], "acl", "add", "User:bob", "--operation", "write", "--topic", "t")
        assert [check("User:alice", topic).code for topic in ("t", "other")] == [9, 0]


def test_brokers_that_are_fenced_or_do_not_respond_are_left_out(
    kl: Kl, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kafkalite.broker")  # the brokers log in this process
    with SyncCluster(brokers=3, controllers=1) as cluster:
        servers = cluster.bootstrap_servers
        cluster.intercept("DescribeConfigs", drop_next(None), node_id=1)  # live, and does not respond
        cluster.kill(2)
        cluster.wait_until(lambda inside: inside.broker.image.live_brokers() == {1, 3})
        added = kl("-b", servers, "acl", "add", "User:a", "--operation", "read", "--topic", "t")
        assert added.code == 0, added.told
        assert re.findall("note: broker ([0-9])", added.told) == ["3"]
        checked = kl("-b", servers, "acl", "check", "User:a", "read", "--topic", "t")
        assert checked.code == 0, checked.told


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["add", "alice", "--operation", "read", "--topic", "t"], "'User:alice'"),
        (["add", "User:a", "--operation", "read"], "no resource"),
        (["add", "User:a", "--operation", "read", "--topic", "t", "--group", "g"], "name one resource"),
        (["add", "User:a", "--topic", "t"], "--operation"),
        (["remove", "-y"], "select the rules to remove"),
        (["check", "User:a", "read"], "no resource"),
    ],
)
def test_misuse(at: Kl, arguments: list[str], reason: str) -> None:
    result = at("acl", *arguments)
    assert result.code == 2 and reason in result.told


def test_an_operation_that_a_resource_does_not_have_is_explained(at: Kl) -> None:
    result = at("acl", "add", "User:a", "--operation", "write", "--group", "g")
    assert result.code == 1 and "Write is no operation of a Group" in result.told
