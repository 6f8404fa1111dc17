"""Arguments that are not UTF-8 or empty: kl exits with 2 at once, and names the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafkalite import sync

BAD = b"\xff\xfe".decode("utf-8", "surrogateescape")
HERE = ("-b", "127.0.0.1:1")  # no test connects to it


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("produce", BAD), "'[TOPIC]'"),
        (("consume", "t", "-g", BAD), "'-g' / '--group'"),
        (("topic", "create", BAD), "'NAME…'"),
        (("topic", "create", "t", "-c", f"a={BAD}"), "'-c' / '--config'"),
        (("group", "describe", BAD), "'GROUP…'"),
        (("acl", "add", f"User:{BAD}"), "'PRINCIPAL'"),
        (("txn", "describe", BAD), "'TRANSACTIONAL_ID'"),
        (("-X", f"client.id={BAD}", "topic", "list"), "'-X'"),
        (("topic", "list", "--context", BAD), "'--context'"),
    ],
)
def test_a_name_that_is_not_utf8_is_refused(kl: Any, arguments: tuple[str, ...], named: str) -> None:
    refused = kl(*arguments, *HERE)
    assert refused.code == 2, refused.told
    assert f"invalid value for {named}: " in refused.told
    assert "\\udcff\\udcfe' is not UTF-8" in refused.told


def test_keys_headers_and_formats_are_any_bytes(kl: Any) -> None:
    with sync.Broker() as broker:
        sent = kl("produce", "t", "-k", BAD, "-H", f"h={BAD}", "-b", broker.bootstrap_servers, stdin=b"v")
        assert sent.code == 0, sent.told
        with sync.Consumer(
            "t", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            record = consumer.get_one(timeout_ms=10_000)
    assert record is not None
    assert (record.key, list(record.headers)) == (b"\xff\xfe", [("h", b"\xff\xfe")])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *(((f"group {verb}", ""), "a group id must not be empty") for verb in ("describe", "lag", "members")),
        *(((f"group {verb}", ""), "a group id must not be empty") for verb in ("explain", "delete")),
        (("txn describe", ""), "a transactional id must not be empty"),
        (("txn abort", ""), "a transactional id must not be empty"),
        (("context add", "", "--offline"), "the name of a context must not be empty"),
        (("topic list", "--context", ""), "the name of a context must not be empty"),
        (("topic list", "-b", ""), "the list of brokers must not be empty"),
        (("topic list", "--bootstrap-server", ""), "the list of brokers must not be empty"),
        (("dev", "--data", ""), "--data is empty"),
        (("server start", "--data", ""), "--data is empty"),
    ],
)
def test_an_empty_name_is_refused(
    kl: Any, arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here))
    monkeypatch.chdir(here)
    command, *rest = arguments
    refused = kl(*command.split(), *rest)
    assert refused.code == 2, refused.told
    assert told in refused.told
    assert not list(here.iterdir())
