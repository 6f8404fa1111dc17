"""kl config: the meaning of options and the source of values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.cli.config import KINDS, registries

Kl = Callable[..., Any]


def test_list_names_every_option(kl: Kl) -> None:
    rows = json.loads(kl("config", "list", "-o", "json").out)
    assert {(row["of"], row["name"]) for row in rows} == {
        (kind, option.name) for kind, registry in registries().items() for option in registry
    }
    assert all(row["doc"] and row["allowed"] for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_list_of_one_kind(kl: Kl, kind: str) -> None:
    rows = [json.loads(line) for line in kl("config", "list", kind, "-o", "jsonl").out.splitlines()]
    assert {row["of"] for row in rows} == {kind}


def explained(kl: Kl, *arguments: str | Path, of: str = "") -> dict[str, Any]:
    documents = json.loads(kl("config", "explain", *arguments, "-o", "json").out)
    (found,) = [each for each in documents if not of or each["of"] == of]
    result: dict[str, Any] = found
    return result


def test_explain_shows_everything(kl: Kl) -> None:
    text = kl("config", "explain", "retention.ms").text
    assert "default  604800000" in text
    assert "a whole number, -1 or more" in text or "a whole number from -1" in text
    assert "How long" in text


def test_a_value_from_file_environment_and_flag(
    kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('"log.retention.ms" = 1000\n')
    name = "log.retention.ms"
    assert explained(kl, name)["from"] == "default"
    found = explained(kl, name, "-f", file)
    assert (found["value"], found["from"]) == ("1000", str(file))
    monkeypatch.setenv("KAFKALITE_LOG_RETENTION_MS", "2000")
    found = explained(kl, name, "-f", file)
    assert (found["value"], found["from"]) == ("2000", "KAFKALITE_LOG_RETENTION_MS")
    found = explained(kl, name, "-f", file, "--set", f"{name}=3000")
    assert (found["value"], found["from"]) == ("3000", "flag")


def test_a_clients_value(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(kl, "linger.ms", "-X", "linger.ms=7")
    assert (found["value"], found["from"]) == ("7", "flag -X")
    assert explained(kl, "linger.ms")["from"] == "default"
    assert explained(kl, "bootstrap.servers", of="producer")["from"] == "default"
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", "there:1")
    found = explained(kl, "bootstrap.servers", of="admin")
    assert (found["value"], found["from"]) == ("there:1", "environment KL_BOOTSTRAP_SERVERS")
    assert explained(kl, "bootstrap.servers", "-b", "flag:1", of="admin")["from"] == "flag -b"
    assert explained(kl, "default.api.timeout.ms", of="admin")["from"].startswith("kl")


def test_a_topics_value(at: Kl) -> None:
    at("topic", "create", "configured", "-c", "retention.ms=5000")
    found = explained(at, "retention.ms", "--topic", "configured")
    assert (found["value"], found["from"]) == ("5000", "topic (configured)")
    assert explained(at, "segment.bytes", "--topic", "configured")["from"] in {"default", "broker"}
    assert at("config", "explain", "retention.ms", "--topic", "nowhere").code == 4


def test_an_unknown_option_gets_the_nearest(kl: Kl) -> None:
    result = kl("config", "explain", "retension.ms")
    assert result.code == 4
    assert "did you mean retention.ms?" in result.told
    assert "kl config list" in kl("config", "explain", "zzzz").told


def test_a_secret_is_not_shown(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKALITE_CLUSTER_SECRET", "a secret of sixteen or more")
    found = explained(kl, "cluster.secret")
    assert (found["value"], found["from"]) == ("(a secret, not shown)", "KAFKALITE_CLUSTER_SECRET")


@pytest.mark.parametrize(
    "arguments",
    [("config", "explain", "session.timeout.ms"), ("topic", "list", "-X", "session.timeout.ms=6000")],
)
def test_an_option_that_the_brokers_have_is_named_instead_of_a_similar_one(
    kl: Kl, arguments: tuple[str, ...]
) -> None:
    text = kl(*arguments).told
    assert "group.consumer.session.timeout.ms" in text
    assert "did you mean" not in text


@pytest.mark.parametrize("node", ["9", "x"])
def test_a_broker_that_does_not_exist_is_named(at: Kl, node: str) -> None:
    for command in (("show", "broker", node), ("set", "broker", node, "log.retention.ms=1d")):
        missing = at("config", *command)
        assert missing.code == 4
        assert missing.told == f"kl: there is no broker {node!r}\n    hint: the node ids are: 1\n"


def test_a_setting_of_another_kind_is_not_called_unknown(at: Kl) -> None:
    at("topic", "create", "shown", "--if-not-exists")
    missing = at("config", "show", "topic", "shown", "log.dirs")
    assert missing.code == 4
    assert missing.told.startswith("kl: log.dirs is no setting of a topic, but of: broker\n")
