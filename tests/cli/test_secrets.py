"""Secrets are in no log, error, output, metadata dump or process list, at the most talkative level (S19)."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Broker, sync
from kafkalite.client.cluster.login import Login
from kafkalite.errors import KafkaliteError, SaslAuthenticationError
from kafkalite.security.scram import salted_password
from proof.certificates import DevCertificates
from proof.token_issuer import Issuer

Spawn = Callable[..., "subprocess.Popen[bytes]"]
PASSWORD, NEW_PASSWORD, WRONG = "pass-Word-alice-0001", "pass-Word-alice-0002", "pass-Word-wrong-0003"
CLUSTER_SECRET, OTHER_SECRET = "cluster-Secret-of-this-test-0004", "cluster-Secret-of-another-0005"
KEY_PASSWORD = "key-Password-of-the-node-0006"
TEXTS = [PASSWORD, NEW_PASSWORD, WRONG, CLUSTER_SECRET, OTHER_SECRET, KEY_PASSWORD]
DEADLINE_S = 60


def forms(secret: bytes) -> Iterator[bytes]:
    """Yield ``secret`` as a text may have it: itself, in hexadecimal, in base64, and as Python shows it."""
    yield secret
    yield secret.hex().encode()
    for offset in range(3):  # where it begins within the groups of base64
        whole = secret[offset : len(secret) - (len(secret) - offset) % 3]
        yield base64.b64encode(whole)
        yield base64.urlsafe_b64encode(whole)
    yield repr(secret)[2:-1].encode()


def found(secrets: Iterable[bytes], text: bytes) -> list[bytes]:
    return [form for secret in secrets for form in forms(secret) if form in text]


class Everything:
    """Runs commands, and collects what they print and how the process list shows them."""

    def __init__(self, spawn: Spawn, environment: dict[str, str]) -> None:
        self._spawn = spawn
        self._environment = environment
        self.seen: dict[str, bytes] = {}

    def start(self, *arguments: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        process = self._spawn(*arguments, **{**self._environment, **environment})
        name = " ".join(map(str, arguments))
        self.seen[f"process list: {name}"] = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        return process

    def kl(self, *arguments: str | Path, stdin: str = "", code: int = 0, **environment: str) -> None:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(stdin.encode(), timeout=DEADLINE_S)
        assert process.returncode == code, err.decode()
        self.seen[f"{len(self.seen)}: {arguments}"] = out + err


@pytest.fixture
def node(dev_certificates: DevCertificates, tmp_path: Path) -> dict[str, Any]:
    issuer = Issuer()
    (tmp_path / "jwks.json").write_bytes(issuer.key_set)
    dev_certificates.issue("protected.pem", password=KEY_PASSWORD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "listeners": f"SASL_SSL://127.0.0.1:{port}",
        "log.dirs": str(tmp_path / "data"),
        "cluster.secret": CLUSTER_SECRET,
        "authorizer.class.name": "StandardAuthorizer",
        "super.users": "User:alice",
        "ssl.keystore.location": str(dev_certificates / "protected.pem"),
        "ssl.key.password": KEY_PASSWORD,
        "ssl.truststore.location": str(dev_certificates / "ca.pem"),
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": str(tmp_path / "jwks.json"),
        "connection.failed.authentication.delay.ms": 1,
    }
    (tmp_path / "node.toml").write_text(
        "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in settings.items())
    )
    (tmp_path / "other-secret").write_text(OTHER_SECRET)
    return {"issuer": issuer, "settings": settings, "address": f"127.0.0.1:{port}"}


def shown_by_clients(
    address: str, tls: dict[str, Any], logins: list[dict[str, Any]], is_right: bool
) -> bytes:
    """Log in with each of ``logins``. Return what clients, configs and errors show of themselves."""
    texts: list[str] = []
    for login in logins:
        settings = {**tls, **login, "security_protocol": "SASL_SSL", "default_api_timeout_ms": 20_000}
        clients = [
            sync.Producer(address, **settings),
            sync.Consumer("t", bootstrap_servers=address, **settings),
        ]
        for client in clients:
            try:
                with client:
                    if isinstance(client, sync.Producer):
                        client.send("t", b"x").result()
                    else:
                        client.get_many(1, timeout_ms=100)
                assert is_right, login
            except KafkaliteError as error:
                assert isinstance(error, SaslAuthenticationError) and not is_right, login
                texts += [f"{error!r}{error}", *traceback.format_exception(error)]
            config = client._original.config
            texts.append(f"{client!r}{client._original!r}{config!r}{config}{Login(config)!r}")
    return "".join(texts).encode()


def stored_keys(settings: dict[str, Any]) -> list[bytes]:
    """Return the keys of all users in the metadata of the stopped node."""

    async def read() -> list[bytes]:
        async with Broker(listeners="inproc://secrets", log_dirs=settings["log.dirs"]) as broker:
            users = [one for (user, _), one in broker.image.credentials.items() if user]
            return [key for one in users for key in (one.stored_key, one.server_key)]

    return asyncio.run(read())


@pytest.mark.slow
def test_secrets_are_shown_nowhere(
    spawn: Spawn,
    node: dict[str, Any],
    dev_certificates: DevCertificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(1)
    derived: list[bytes] = []
    tls, issuer, address = dev_certificates.client(), node["issuer"], node["address"]
    token, refused_token = issuer.token("alice"), issuer.token("alice", exp=1)
    login = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": PASSWORD}
    environment = {f"KAFKALITE_CLIENT_{name.upper()}": value for name, value in {**tls, **login}.items()}
    everything = Everything(spawn, {**environment, "KL_BOOTSTRAP_SERVERS": address, "KL_LOG_LEVEL": "debug"})
    run, file = everything.kl, tmp_path / "node.toml"
    server = everything.start("server", "start", "-f", file, "--debug", PYTHONASYNCIODEBUG="1")
    assert server.stdout is not None and b"is up on" in server.stdout.readline()

    # users, right and wrong, and everything that describes the node
    as_node = ("--this-node", "-f", file, "--debug", "--password-file", "-")
    run("user", "add", "alice", *as_node, stdin=PASSWORD)
    run("user", "add", "alice", *as_node, stdin=WRONG, code=5)
    run("user", "add", "carol", *as_node, stdin=f"{WRONG}\x07", code=1)
    run("topic", "create", "t", "--debug")
    for mechanism in ("SCRAM-SHA-512", "PLAIN"):
        wrong = {"KAFKALITE_CLIENT_SASL_MECHANISM": mechanism, "KAFKALITE_CLIENT_SASL_PASSWORD": WRONG}
        run("topic", "list", "--debug", code=6, **wrong)
    run("cluster", "shutdown", "1", "--secret-file", tmp_path / "other-secret", "--debug", code=6)
    for command in (
        ("user", "list", "-o", "json"),
        ("metadata", "cat", "/brokers/1"),
        ("metadata", "ls", "/"),
        ("config", "show", "broker", "1", "-o", "json"),
        ("config", "explain", "cluster.secret", "ssl.key.password", "-f", file),
        ("config", "explain", "sasl.password"),
        ("cluster", "status", "-o", "json"),
    ):
        run(*command)

    # clients in this process
    right = [{**login, "sasl_mechanism": name} for name in ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")]
    tokens = [
        {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": lambda text=text: text}
        for text in (token, refused_token)
    ]
    derive = salted_password

    def recorded(*arguments: Any) -> bytes:
        derived.append(derive(*arguments))
        return derived[-1]

    monkeypatch.setattr("kafkalite.client.cluster.login.salted_password", recorded)
    refused = [{**one, "sasl_password": WRONG} for one in right]
    seen = everything.seen
    seen["clients"] = shown_by_clients(address, tls, [*right, tokens[0]], True)
    seen["refused clients"] = shown_by_clients(address, tls, [*refused, tokens[1]], False)
    assert len(derived) >= 4

    seen["process list at the end"] = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    tail = everything.start("metadata", "tail", "-n", "1")
    for number in range(20):  # alice's password changes later: the command may not have logged in yet
        run("user", "add" if number == 0 else "rotate", "dora", *as_node, stdin=NEW_PASSWORD)
        run("topic", "create", f"t-{number}")
        if tail.poll() is not None:
            break
    seen["metadata tail"] = b"".join(tail.communicate(timeout=DEADLINE_S))
    run("user", "rotate", "alice", *as_node, stdin=NEW_PASSWORD)
    run("topic", "create", "t-new", KAFKALITE_CLIENT_SASL_PASSWORD=NEW_PASSWORD)
    assert b"metadata_offset" in seen["metadata tail"]
    server.terminate()
    out, seen["log of the server"] = server.communicate(timeout=DEADLINE_S)
    run("log", "dump", tmp_path / "data", "--records", "-o", "json")
    run("log", "verify", tmp_path / "data", "-o", "json")
    seen["log of the clients"] = caplog.text.encode() + out
    for proof in (b"client logged in", b"login refused", b"User:alice"):
        assert proof in seen["log of the server"]

    files = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    parts = [part for text in (token, refused_token) for part in text.split(".")[1:]]
    plain = [text.encode() for text in (*TEXTS, *parts)]
    assert found(plain, files) == []
    keys = stored_keys(node["settings"])
    assert all(key in files for key in keys), "the log itself has the keys, which are in none of its dumps"
    for where, text in seen.items():
        assert found([*plain, *derived, *keys], text) == [], where
