"""kl acl."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

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
