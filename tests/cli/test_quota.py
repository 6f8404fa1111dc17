"""kl quota: what it sets, removes, lists and describes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Kl = Callable[..., Any]


def rows(at: Kl, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(at("quota", *words, "-o", "json").out)
    return found


def test_quotas_are_set_listed_and_removed(at: Kl) -> None:
    done = at("quota", "set", "--user", "alice", "--default-client-id", "producer_byte_rate=1000000")
    assert (done.code, done.text) == (0, "user alice, default client id: producer_byte_rate set\n")
    assert at("quota", "set", "--default-ip", "connection_creation_rate=1000").code == 0
    listed = {
        (row["user"], row["client_id"], row["ip"], row["key"]): row["value"] for row in rows(at, "list")
    }
    assert listed["alice", "(default)", None, "producer_byte_rate"] == 1_000_000
    assert listed[None, None, "(default)", "connection_creation_rate"] == 1000
    done = at("quota", "unset", "--user", "alice", "--default-client-id")
    assert done.text == "user alice, default client id: producer_byte_rate removed\n"
    assert at("quota", "unset", "--default-ip", "connection_creation_rate").code == 0
    assert not [row for row in rows(at, "list") if row["user"] == "alice" or row["ip"]]


def test_the_quotas_that_apply_to_a_client_are_described(at: Kl) -> None:
    at("quota", "set", "--user", "bob", "producer_byte_rate=1", "consumer_byte_rate=2")
    at("quota", "set", "--user", "bob", "--client-id", "report", "consumer_byte_rate=1.5")
    described = {row["key"]: row for row in rows(at, "describe", "--user", "bob", "--client-id", "report")}
    assert {key: row["value"] for key, row in described.items()} == {
        "producer_byte_rate": 1,
        "consumer_byte_rate": 1.5,
    }
    assert described["consumer_byte_rate"]["client_id"] == "report"
    assert described["producer_byte_rate"]["client_id"] is None
    at("quota", "unset", "--user", "bob")
    at("quota", "unset", "--user", "bob", "--client-id", "report")


def test_a_dry_run_sets_nothing(at: Kl) -> None:
    done = at("quota", "set", "--user", "carol", "producer_byte_rate=1", "--dry-run")
    assert (done.code, done.text) == (0, "user carol: producer_byte_rate would be set\n")
    assert not [row for row in rows(at, "list") if row["user"] == "carol"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("set", "producer_byte_rate=1"), 2, "--user"),
        (("set", "--user", "a", "--default-user", "producer_byte_rate=1"), 2, "exclude each other"),
        (("set", "--user", "", "producer_byte_rate=1"), 2, "is empty"),
        (("set", "--user", "a", "producer_byte_rate=much"), 2, "no number"),
        (("set", "--user", "a", "producer_byte_rate=0"), 2, "a number from 0.001"),
        (("set", "--user", "a", "producer_byte_rate=nan"), 2, "a number from 0.001"),
        (("set", "--user", "a", "producer_byte_rate=-1"), 2, "a number from 0.001"),
        (("set", "--user", "a", "producer_byte_rate=1e308"), 2, "to 9223372036854775808"),
        (("set", "--user", "a", "bytes=1"), 2, "producer_byte_rate"),
        (
            ("set", "--client-id", "r", "nosuch=3"),
            2,
            "kl: client id r: nosuch: no quota of this entity; these are: prod",
        ),
        (("set", "--user", "a", "producer_rate=3"), 2, "did you mean producer_byte_rate?"),
        (("set", "--ip", "localhost", "connection_creation_rate=1"), 1, "no IP address"),
        (("unset", "--user", "nobody"), 4, "no quota"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(
    at: Kl, words: tuple[str, ...], code: int, message: str
) -> None:
    done = at("quota", *words)
    assert (done.code, message in done.told) == (code, True), done.told
