"""kl context: names for clusters, and the order of flag, environment, context and default."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


def test_a_context_knows_all_brokers_of_its_cluster(kl: Kl) -> None:
    """So the commands survive the loss of the broker that was named."""
    with SyncCluster(brokers=3) as cluster:
        first, *_ = cluster.bootstrap_servers.split(",")
        assert kl("context", "add", "three", "-b", first, "-X", "client.id=me").code == 0
        (row,) = json.loads(kl("context", "list", "-o", "json").out)
        assert sorted(row["servers"].split(",")) == sorted(cluster.bootstrap_servers.split(","))
        assert (row["name"], row["used"], row["properties"]) == ("three", True, {"client.id": "me"})
        cluster.kill(1)
        assert kl("topic", "list").code == 0
        explained = kl("config", "explain", "bootstrap.servers", "client.id", "-o", "json")
        sources = {
            each["name"]: each["from"] for each in json.loads(explained.out) if each["of"] == "producer"
        }
        assert sources["bootstrap.servers"] == "context three"


def test_flag_before_environment_before_context(
    kl: Kl, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kl("context", "add", "gone", "-b", "localhost:1", "--offline").code == 0
    assert kl("topic", "list").code == 3
    assert kl("topic", "list", "-b", servers).code == 0
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", servers)
    assert kl("topic", "list").code == 0
    assert kl("--context", "gone", "topic", "list").code == 3
    monkeypatch.delenv("KL_BOOTSTRAP_SERVERS")
    assert kl("context", "add", "gone", "--offline").code == 5
    assert kl("context", "add", "here", "-b", servers).code == 0
    assert kl("topic", "list").code == 0
    assert kl("context", "use", "gone").code == 0
    assert kl("topic", "list").code == 3
    assert kl("context", "delete", "gone").code == 0
    assert kl("context", "list", "-o", "name").text == "here\n"
    assert kl("context", "use", "gone").code == 4
    assert kl("--context", "gone", "topic", "list").code == 4


def test_a_damaged_file_of_contexts_is_named(kl: Kl, tmp_path: Path) -> None:
    file = tmp_path / "config" / "kafkalite" / "contexts.toml"
    file.parent.mkdir(parents=True)
    file.write_text("used = ")
    result = kl("topic", "list")
    assert result.code == 2
    assert f"{file} is no file of contexts" in result.told


PROPERTIES = b'used = "a"\n[contexts.a]\nservers = "h:1"\nproperties = 5\n'


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("contexts = 5\n", "contexts must be a table, and is 5"),
        ("contexts.a = 5\n", "contexts.a must be a table, and is 5"),
        ("[contexts.a]\nproperties = {}\n", "contexts.a has no servers"),
    ],
)
def test_a_wrong_part_of_the_file_is_named(kl: Kl, tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "config" / "kafkalite" / "contexts.toml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    result = kl("topic", "list")
    assert result.code == 2
    assert f"{file} is no file of contexts: {told}" in result.told


@pytest.mark.parametrize("content", [b"\xff", b"[contexts.a]\nservers = 3\n", b"used = 3\n", PROPERTIES])
def test_a_file_of_something_else_is_named(kl: Kl, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config" / "kafkalite" / "contexts.toml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    result = kl("topic", "list")
    assert result.code == 2
    assert f"{file} is no file of contexts" in result.told


def test_files_of_a_context_are_found_from_any_directory(
    kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("-X", "ssl.truststore.location=certs/ca.pem", "-X", "client.id=a/b")
    assert kl("context", "add", "closed", "-b", "localhost:1", "--offline", *options).code == 0
    (row,) = json.loads(kl("context", "list", "-o", "json").out)
    assert row["properties"] == {
        "ssl.truststore.location": str(tmp_path / "certs" / "ca.pem"),
        "client.id": "a/b",
    }


def test_any_text_may_stand_in_a_context(kl: Kl) -> None:
    name, value = "dev \N{GRINNING FACE} \x7f\n", 'é"\\\N{GRINNING FACE}'
    assert kl("context", "add", name, "--offline", "-b", "h:1", "-X", f"client.id={value}").code == 0
    (row,) = json.loads(kl("context", "list", "-o", "json").out)
    assert (row["name"], row["properties"]) == (name, {"client.id": value})
    refused = kl("context", "add", "\udcff", "--offline", "-b", "h:1")
    assert refused.code == 2 and "is not UTF-8" in refused.told
    assert len(json.loads(kl("context", "list", "-o", "json").out)) == 1
