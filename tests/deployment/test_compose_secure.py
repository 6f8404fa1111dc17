"""docker-compose.secure.yml without an engine: its nodes and its kl, as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("cryptography")

from kafkalite.parent_pipe import PARENT_PIPE, stdin_for_children
from kafkalite.transport.free_ports import free_ports

pytestmark = pytest.mark.slow

FILES = ("docker-compose.yml", "docker-compose.secure.yml")
NODES = ("node1", "node2", "node3")
PASSWORD = "a long password"
LIMIT_S = 60


class Composed:
    """The services of both files, merged as docker-compose does it. ``here`` replaces addresses and paths."""

    def __init__(self, repository: Path, directory: Path) -> None:
        self._files = [yaml.safe_load((repository / name).read_text())["services"] for name in FILES]
        self._image = dict(re.findall(r"(KAFKALITE_\w+)=(\S+)", (repository / "Dockerfile").read_text()))
        self._certificates = directory / "certificates"
        self._places: dict[str, str] = {}  # {address in the compose file: address here}

    def place(self, address: str) -> str:
        return self._places.setdefault(address, f"127.0.0.1:{free_ports(1)[0]}")

    def certify(self) -> None:
        command = [str(self._certificates) if each == "/var/lib/kafkalite" else each for each in self.command]
        run({}, *command)

    @property
    def command(self) -> list[str]:
        found: list[str] = self._files[1]["certificates"]["command"]
        return found

    def environment(self, service: str) -> dict[str, str]:
        variables: dict[str, str] = dict(self._image)
        for services in self._files:
            variables |= services[service].get("environment", {})
        return {key: self.here(key, value, service) for key, value in variables.items()}

    def here(self, key: str, value: str, service: str) -> str:
        value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value).replace("$$", "$")
        if any(word in key for word in ("LISTENERS", "VOTERS", "SERVERS")):
            value = re.sub(r"0\.0\.0\.0|127\.0\.0\.1", service, value)
            value = re.sub(r"node\d:\d+", lambda found: self.place(found[0]), value)
        return value.replace("/certificates/", f"{self._certificates}/")


def call(environment: Mapping[str, str], *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    others = {name: text for name, text in os.environ.items() if not name.startswith(("KAFKALITE_", "KL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "kafkalite", *arguments],
        env={**others, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def run(environment: Mapping[str, str], *arguments: str, stdin: str = "") -> str:
    """Return the output of kl, which must succeed."""
    code, out, errors = call(environment, *arguments, stdin=stdin)
    assert code == 0, errors
    return out


def refusal(environment: Mapping[str, str], *arguments: str) -> str:
    """Return the error of kl, which must fail."""
    code, _, errors = call(environment, *arguments)
    assert code != 0
    return errors


@pytest.fixture
def composed(repository: Path, tmp_path: Path) -> Iterator[Composed]:
    """The three nodes, running."""
    found = Composed(repository, tmp_path)
    found.certify()
    processes = []
    try:
        for name in NODES:
            directory = {"KAFKALITE_LOG_DIRS": str(tmp_path / name), PARENT_PIPE: "1"}
            with (tmp_path / f"{name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "kafkalite", "server", "start"],
                        env={**os.environ, **found.environment(name), **directory},
                        stdin=stdin_for_children(),
                        stdout=log,
                        stderr=log,
                    )
                )
        yield found
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        for name in NODES:
            print((tmp_path / f"{name}.log").read_text()[-3_000:])


def test_only_the_two_kinds_of_clients_are_served_as_rules_allow(composed: Composed) -> None:
    """The commands are those of the file's first comment: kl in a container, then alice on this machine."""
    admin = composed.environment("kl")
    run(admin, "cluster", "wait", "--brokers", "3", "--whole", "--timeout", "40s")
    own = composed.environment("node2")
    run(own, "cluster", "wait", "--this-node", "--quiet", "--timeout", "20s")  # the health check of the image
    run(admin, "topic", "create", "orders")
    (described,) = json.loads(run(admin, "topic", "describe", "orders", "-o", "json"))
    assert len(described["partitions"][0]["replicas"]) == 3
    run(admin, "user", "add", "alice", "--password-file", "-", stdin=f"{PASSWORD}\n")
    rule = ("--operation", "read", "--operation", "write", "--topic", "orders")
    run(admin, "acl", "add", "User:alice", *rule)

    alice = {
        "KL_BOOTSTRAP_SERVERS": composed.place("node1:19091"),
        "KAFKALITE_CLIENT_SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKALITE_CLIENT_SSL_TRUSTSTORE_LOCATION": admin["KAFKALITE_CLIENT_SSL_TRUSTSTORE_LOCATION"],
        "KAFKALITE_CLIENT_SASL_USERNAME": "alice",
        "KAFKALITE_CLIENT_SASL_PASSWORD": PASSWORD,
    }
    run(alice, "produce", "orders", "-q", stdin="an order\n")
    assert run(alice, "consume", "orders", "-e") == "an order\n"
    assert "User:alice" in refusal(alice, "topic", "create", "others")
    wrong = {**alice, "KAFKALITE_CLIENT_SASL_PASSWORD": "another"}
    assert "wrong password" in refusal(wrong, "topic", "list")
    without = {name: text for name, text in admin.items() if "KEYSTORE" not in name}
    assert "it requires a certificate" in refusal(without, "topic", "list")
    for address in ("node1:9092", "node2:19092"):
        plain = {"KL_BOOTSTRAP_SERVERS": composed.place(address)}
        assert "the peer speaks TLS" in refusal(plain, "topic", "list")


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="there is no docker-compose")
def test_docker_compose_takes_both_files(repository: Path) -> None:
    files = [part for name in FILES for part in ("-f", name)]
    done = subprocess.run(
        ["docker-compose", *files, "--profile", "tools", "config"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
        env={name: text for name, text in os.environ.items() if not name.startswith("KAFKALITE_")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    for name in NODES:
        listeners = services[name]["environment"]["KAFKALITE_LISTENERS"].split(",")
        assert [each.partition("://")[0] for each in listeners] == ["SSL", "SASL_SSL"]
        assert services[name]["ports"], "the ports of the first file"
        assert services[name]["depends_on"]["certificates"]["condition"] == "service_completed_successfully"
