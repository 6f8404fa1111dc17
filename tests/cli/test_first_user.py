"""The first user of a node whose only listener requires logins: ``kl user add --this-node``."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite import sync
from proof.certificates import DevCertificates

Kl = Callable[..., Any]
SECRET = "a cluster secret of some length"
PASSWORD = "correct horse battery staple"


@pytest.fixture
def settings(dev_certificates: DevCertificates, tmp_path: Path) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        "listeners": f"SASL_SSL://127.0.0.1:{port}",
        "log.dirs": str(tmp_path / "data"),
        "cluster.secret": SECRET,
        "authorizer.class.name": "StandardAuthorizer",
        "super.users": "User:admin",
        "ssl.keystore.location": str(dev_certificates / "broker.pem"),
        "ssl.truststore.location": str(dev_certificates / "ca.pem"),
    }


def written(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(
        "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in settings.items())
    )
    return path


@pytest.fixture
def file(settings: dict[str, Any], tmp_path: Path) -> Path:
    return written(tmp_path / "node.toml", settings)


@pytest.fixture
def broker(settings: dict[str, Any]) -> Iterator[sync.Broker]:
    with sync.Broker(**{name.replace(".", "_"): value for name, value in settings.items()}) as broker:
        yield broker


def add(kl: Kl, *arguments: str | Path, command: str = "add", password: str = PASSWORD) -> Any:
    stdin = password.encode()
    return kl("user", command, "admin", "--this-node", "--password-file", "-", *arguments, stdin=stdin)


def as_admin(
    kl: Kl,
    broker: sync.Broker,
    certificates: DevCertificates,
    patch: pytest.MonkeyPatch,
    password: str = PASSWORD,
) -> Any:
    """Create a topic as the user admin."""
    login = {"security_protocol": "SASL_SSL", "sasl_username": "admin", "sasl_password": password}
    for name, value in {**certificates.client(), **login}.items():
        patch.setenv(f"KAFKALITE_CLIENT_{name.upper()}", value)
    return kl("topic", "create", f"topic-{password[:5]}", "-b", broker.address)


def test_the_first_user_needs_no_other_listener(
    kl: Kl,
    broker: sync.Broker,
    file: Path,
    dev_certificates: DevCertificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = add(kl, "-f", file)
    assert (added.code, added.told) == (0, "kl: user 'admin' added\n")
    assert as_admin(kl, broker, dev_certificates, monkeypatch).code == 0
    again = add(kl, "-f", file)
    assert again.code == 5 and "kl user rotate admin" in again.told
    assert add(kl, "-f", file, command="rotate", password="another").code == 0
    assert as_admin(kl, broker, dev_certificates, monkeypatch).code == 6
    assert as_admin(kl, broker, dev_certificates, monkeypatch, "another").code == 0


def test_the_settings_may_come_from_the_environment(
    kl: Kl, broker: sync.Broker, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose node listens on every interface."""
    settings["listeners"] = settings["listeners"].replace("127.0.0.1", "0.0.0.0")
    for name, value in settings.items():
        monkeypatch.setenv(f"KAFKALITE_{name.replace('.', '_').upper()}", value)
    assert add(kl).code == 0


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"cluster.secret": "another secret of some length"}, 6, "does not know this cluster's secret"),
        ({"cluster.id": "another"}, 6, "belongs to another cluster"),
        ({"cluster.secret": None}, 2, "set cluster.secret"),
        ({"log.dirs": None}, 2, "neither a cluster.id nor a data directory"),
        ({"log.dirs": "/nonexistent/data"}, 2, "neither a cluster.id nor a data directory"),
        ({"listeners": "SASL_SSL://127.0.0.1:9"}, 3, "127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_named(
    kl: Kl,
    broker: sync.Broker,
    settings: dict[str, Any],
    tmp_path: Path,
    change: dict[str, Any],
    code: int,
    reason: str,
) -> None:
    changed = {name: value for name, value in (settings | change).items() if value is not None}
    begun = time.monotonic()
    refused = add(kl, "-f", written(tmp_path / "changed.toml", changed), "--timeout", "120s")
    assert time.monotonic() - begun < 60, "it is final, so it is not retried"
    assert refused.code == code, refused.told
    assert reason in refused.told
    assert "secret of some length" not in refused.told and PASSWORD not in refused.told


def test_a_file_alone_is_no_login(kl: Kl, file: Path) -> None:
    refused = kl("user", "add", "admin", "-f", file, "--password-file", "-", stdin=b"x")
    assert (refused.code, "--this-node" in refused.told) == (2, True)
