"""Logins with tokens: key sets, sessions, principals and the settings of clients (S7, S8, S19)."""

from __future__ import annotations

import asyncio
import http.server
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalite
from kafkalite.broker.server import token_keys
from kafkalite.broker.server.token_keys import RETRY_MS, TokenKeys
from kafkalite.errors import (
    ConfigError,
    ErrorCode,
    MissingExtraError,
    SaslAuthenticationError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
)
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.security.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from kafkalite.security.oauth import OauthClient
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.token_issuer import AUDIENCE, ISSUER, Issuer, signed_by_hand

REFUSED = ErrorCode.SASL_AUTHENTICATION_FAILED
METADATA = MetadataRequest([], False)


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def key_file(issuer: Issuer, tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_bytes(issuer.key_set)
    return path


def settings(key_file: Path, **more: Any) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "connection_failed_authentication_delay_ms": 1,
        "sasl_enabled_mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
        "sasl_allow_plain_without_tls": True,
        "sasl_oauthbearer_jwks_endpoint_url": str(key_file),
        "sasl_oauthbearer_expected_audience": AUDIENCE,
        "sasl_oauthbearer_expected_issuer": ISSUER,
        **more,
    }


def with_token(provider: Any) -> dict[str, Any]:
    return {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": provider}


async def log_in(wire: WireClient, token: str) -> Any:
    assert (await wire.call(SaslHandshakeRequest("OAUTHBEARER"))).error_code == 0
    return await wire.call(SaslAuthenticateRequest(OauthClient(token).first()))


async def test_the_user_is_the_subject_and_rules_apply_to_it(key_file: Path, issuer: Issuer) -> None:
    topic, literal = ResourceType.TOPIC, PatternType.LITERAL
    rules = settings(key_file, authorizer_class_name="StandardAuthorizer", super_users="User:client")
    async with Cluster(**rules) as cluster:
        async with cluster.admin() as admin:
            await admin.create_topic("orders")
            await admin.create_acls(
                [
                    AclBinding(topic, literal, "orders", "User:alice", "*", operation, Permission.ALLOW)
                    for operation in (Operation.WRITE, Operation.DESCRIBE)
                ]
            )
        async with cluster.producer(**with_token(lambda: issuer.token("alice"))) as producer:
            await producer.send("orders", b"x")
            principals = {one.client.principal for one in cluster.broker._server._connections}
            assert "User:alice" in principals
        async with cluster.producer(**with_token(lambda: issuer.token("bob"))) as producer:
            with pytest.raises(TopicAuthorizationFailedError, match="User:bob"):
                await producer.send("orders", b"x")


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (lambda issuer: issuer.token(exp=int(time.time()) - 31), r"it expired [3-9]\d s ago"),
        (lambda issuer: issuer.token(iss="x"), "it is from another issuer"),
        (lambda issuer: issuer.token(aud="x"), "it is for another audience"),
        (lambda issuer: Issuer().token(), "its signature is wrong"),
        (lambda _: signed_by_hand({"alg": "none", "kid": "first"}, {"sub": "alice"}), "its algorithm"),
        (lambda _: signed_by_hand(b"[" * 4_000, {}), "it is no signed JWT"),
        (lambda issuer: issuer.token("ANONYMOUS"), "the name 'ANONYMOUS' is reserved"),
        (lambda issuer: issuer.token("*"), r"the name '\*' is reserved"),
        (lambda issuer: issuer.token(more="x" * 20_000), "at most 16384 bytes"),
        (lambda _: signed_by_hand({"alg": "ES256", "kid": "new"}, {}), "it names no key of the issuer"),
    ],
    ids=[
        "expired",
        "issuer",
        "audience",
        "signature",
        "none",
        "nested",
        "anonymous",
        "any",
        "large",
        "key id",
    ],
)
async def test_a_refused_token_is_one_clear_error(
    key_file: Path,
    issuer: Issuer,
    caplog: pytest.LogCaptureFixture,
    token: Callable[[Issuer], str],
    reason: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    text = token(issuer)
    async with Cluster(**settings(key_file)) as cluster:
        with pytest.raises(SaslAuthenticationError, match=reason) as refused:
            async with cluster.admin(**with_token(lambda: text)):
                pass
        assert "unexpected" not in caplog.text and "login refused" in caplog.text
        assert text not in caplog.text + str(refused.value) and text.split(".")[1] not in caplog.text
        async with cluster.admin(**with_token(issuer.token)) as admin:
            await admin.list_topics()
    assert issuer.token().split(".")[1] not in caplog.text


async def test_a_session_ends_with_the_token(key_file: Path, issuer: Issuer) -> None:
    """KIP-368: the connection needs another login then, with a token of the same user."""
    clock = {"wall": 1_000_000_000, "monotonic": 5_000}

    class Moved:
        wall_ms = staticmethod(lambda: clock["wall"])
        monotonic_ms = staticmethod(lambda: clock["monotonic"])

    async with Cluster(**settings(key_file, sasl_oauthbearer_clock_skew_seconds=0)) as cluster:
        from kafkalite.broker.server import logins

        service = cluster.broker._services.logins
        service._clock = Moved()  # type: ignore[assignment]
        service._token_exchange = logins._token_exchanges(service._config, service._clock)

        def pass_ms(duration_ms: int) -> None:
            clock["wall"] += duration_ms
            clock["monotonic"] += duration_ms

        async with WireClient(cluster.broker.addresses[0]) as wire:
            response = await log_in(wire, issuer.token(exp=1_000_060))
            assert (response.error_code, response.session_lifetime_ms) == (0, 60_000)
            pass_ms(59_999)
            assert (await wire.call(METADATA)).error_code == 0
            assert (await log_in(wire, issuer.token(exp=1_000_120))).session_lifetime_ms == 60_001
            pass_ms(60_000)
            assert (await wire.call(METADATA)).error_code == 0
            pass_ms(1)
            ended = await wire.call(METADATA)
            assert ended.error_code == ErrorCode.ILLEGAL_SASL_STATE
            assert "log in again" in ended.error_message
            await wire.closed()
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await log_in(wire, issuer.token())
            other = await log_in(wire, issuer.token("mallory"))
            assert other.error_code == REFUSED
            await wire.closed()


async def test_a_client_gets_a_new_token_before_the_last_one_expires(
    key_file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kafkalite.client.cluster import login

    monkeypatch.setattr(login, "RENEWAL_FACTOR", 0.01)
    calls: list[float] = []

    async def provide() -> str:
        calls.append(time.time())
        return issuer.token(exp=int(time.time()) + 10)

    async with Cluster(**settings(key_file, sasl_oauthbearer_clock_skew_seconds=0)) as cluster:
        await cluster.create_topic("orders")
        async with cluster.producer(**with_token(provide)) as producer:
            await producer.send("orders", b"x")
            accepted, count = cluster.broker.statistics().connections_accepted, len(calls)
            while len(calls) < count + 4:
                await producer.send("orders", b"x")
            assert cluster.broker.statistics().connections_accepted == accepted


async def test_tokens_are_not_asked_for_in_plain_text(key_file: Path, issuer: Issuer) -> None:
    without = settings(key_file, sasl_allow_plain_without_tls=False)
    async with Cluster(**without) as cluster, WireClient(cluster.broker.addresses[0]) as wire:
        refused = await wire.call(SaslHandshakeRequest("OAUTHBEARER"))
        assert refused.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
        await wire.closed()
    encrypted = Cluster(**{**without, "security_protocol": "SASL_SSL"})
    async with encrypted, encrypted.admin(**with_token(issuer.token)) as admin:
        await admin.list_topics()


# --- key sets


class Keys:
    """A TokenKeys with a clock that the test moves."""

    def __init__(self, url: str | Path, refresh_ms: int = 3_600_000) -> None:
        self.now_ms = 0
        self.found = TokenKeys(str(url), refresh_ms=refresh_ms, monotonic_ms=lambda: self.now_ms)

    def has(self, kid: str) -> bool:
        try:
            self.found.find(kid)
        except SaslAuthenticationFailedError:
            return False
        return True


def test_an_unknown_key_is_looked_for_at_most_once_a_minute(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer, reads = Issuer(), []
    key_file.write_bytes(issuer.key_set)
    keys, read = Keys(key_file), token_keys.read_key_set
    monkeypatch.setattr(token_keys, "read_key_set", lambda text: reads.append(0) or read(text))
    assert keys.has("first") and len(reads) == 1
    issuer.rotate("second")
    key_file.write_bytes(issuer.key_set)
    keys.now_ms = RETRY_MS - 1
    assert not keys.has("second") and not keys.has("invented") and len(reads) == 1
    keys.now_ms = RETRY_MS
    assert keys.has("second") and keys.has("first") and len(reads) == 2
    assert not keys.has("invented") and len(reads) == 2


def test_a_key_that_is_withdrawn_is_refused_after_the_refresh(key_file: Path) -> None:
    issuer = Issuer()
    issuer.rotate("second")
    key_file.write_bytes(issuer.key_set)
    keys = Keys(key_file, refresh_ms=100_000)
    assert keys.has("first")
    del issuer.private["first"]
    key_file.write_bytes(issuer.key_set)
    keys.now_ms = 99_999
    assert keys.has("first")
    keys.now_ms = 100_000
    assert keys.has("second") and not keys.has("first")


@pytest.mark.parametrize("content", [None, b"", b'{"keys": []}', b" " * (token_keys.MAX_BYTES + 1)])
def test_the_last_keys_stay_if_the_key_set_cannot_be_read(
    key_file: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    keys = Keys(key_file, refresh_ms=100_000)
    assert keys.has("first")
    valid = key_file.read_bytes()
    key_file.unlink()
    if content is not None:
        key_file.write_bytes(content)
    keys.now_ms = 100_000
    assert keys.has("first") and keys.has("first")
    assert caplog.text.count("key set of tokens not read") == 1
    key_file.write_bytes(valid)
    keys.now_ms += RETRY_MS
    assert keys.has("first")
    assert caplog.text.count("key set of tokens not read") == 1


def test_a_broker_without_keys_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SaslAuthenticationFailedError, match="the broker has no keys"):
        Keys(tmp_path / "missing.json").found.find("first")
    assert "missing.json" in caplog.text


class Served(http.server.BaseHTTPRequestHandler):
    content = b""
    counts: list[str]

    def do_GET(self) -> None:
        type(self).counts.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def endpoint(issuer: Issuer) -> Iterator[tuple[str, type[Served]]]:
    handler = type("Handler", (Served,), {"content": issuer.key_set, "counts": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/jwks", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_come_from_a_url(endpoint: tuple[str, type[Served]], key_file: Path) -> None:
    keys = Keys(endpoint[0])
    assert keys.has("first") and not keys.has("other") and endpoint[1].counts == ["/jwks"]
    assert Keys(f"file://{key_file}").has("first") and Keys(f"file:{key_file}").has("first")


def test_a_server_that_is_down_or_talks_nonsense_is_named(
    endpoint: tuple[str, type[Served]], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint[1].content = b"<html>"
    assert not Keys(endpoint[0]).has("first")
    assert "it is no JSON Web Key Set" in caplog.text
    caplog.clear()
    assert not Keys("http://127.0.0.1:9/jwks").has("first")
    assert "Connection refused" in caplog.text


async def test_a_hanging_issuer_leaves_the_loop_free(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key set is read in a thread: a client that has logged in is served meanwhile."""
    monkeypatch.setattr(token_keys, "TIMEOUT_MS", 400)
    hanging = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{hanging.getsockname()[1]}/"
    with hanging:
        async with (
            Cluster(**settings(tmp_path, sasl_oauthbearer_jwks_endpoint_url=url)) as cluster,
            cluster.admin() as admin,
            WireClient(cluster.broker.addresses[0]) as wire,
        ):
            login = asyncio.ensure_future(log_in(wire, issuer.token()))
            served = 0
            while not login.done():
                await admin.list_topics()
                served += 1
            assert (await login).error_code == REFUSED
            assert served > 10


def test_an_issuer_that_trickles_its_response_is_given_up(
    issuer: Issuer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives before a timeout of the socket. One daemon thread waits at most."""
    monkeypatch.setattr(token_keys, "TIMEOUT_MS", 400)
    released = threading.Event()

    class Trickling(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while not released.wait(0.05):
                self.wfile.write(b"a")
            self.wfile.write(b"\r\n\r\n" + issuer.key_set)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickling)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        keys = Keys(f"http://127.0.0.1:{server.server_address[1]}/jwks")
        # In a thread, so that this test can fail if the key set is waited for without end.
        asking = threading.Thread(target=keys.has, args=("first",), daemon=True)
        asking.start()
        asking.join(10)
        assert not asking.is_alive() and "it was not complete after 400 ms" in caplog.text
        keys.now_ms = RETRY_MS
        assert not keys.has("first") and "has not completed its last response yet" in caplog.text
        (reader,) = [one for one in threading.enumerate() if one.name == "kafkalite-token-keys"]
        assert reader.daemon
        released.set()
        reader.join(10)
        keys.now_ms = 2 * RETRY_MS
        assert keys.has("first")
    finally:
        released.set()
        server.shutdown()
        serving.join()
        server.server_close()


# --- settings


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: None, "one line of ASCII"),
        (lambda: "a token\n", "one line of ASCII"),
        (lambda: time.sleep(0.3), r"(within|no token in) \d+ ms"),  # the rest of the time for the connection
    ],
)
async def test_a_provider_that_fails_is_one_clear_error(key_file: Path, provider: Any, reason: str) -> None:
    async with Cluster(**settings(key_file)) as cluster:
        limits = {"default_api_timeout_ms": 30_000}
        if "no token" in reason:
            limits = {"socket_connection_setup_timeout_ms": 100, "default_api_timeout_ms": 400}
        with pytest.raises(Exception, match=reason):
            async with cluster.admin(**with_token(provider), **limits):
                pass


async def test_a_file_has_the_token_of_each_login(key_file: Path, issuer: Issuer, tmp_path: Path) -> None:
    file = tmp_path / "a token"
    async with Cluster(**settings(key_file)) as cluster:
        for url in (str(file), f"file:{tmp_path}/a%20token", f"file://{tmp_path}/a%20token"):
            login = {"sasl_mechanism": "OAUTHBEARER", "sasl_oauthbearer_token_endpoint_url": url}
            file.unlink(missing_ok=True)
            with pytest.raises(SaslAuthenticationError, match=r"a token can't be read: No such file"):
                async with cluster.admin(**login):
                    pass
            file.write_text(issuer.token() + "\n")
            async with cluster.admin(**login) as admin:
                await admin.list_topics()


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ({}, r"sasl\.oauth\.token\.provider"),
        ({"sasl_oauth_token_provider": "a token"}, "a function, set in Python"),
        ({"sasl_oauthbearer_token_endpoint_url": "https://issuer.example/token"}, "the path or file: URL"),
    ],
)
def test_a_login_with_tokens_needs_their_source(login: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        kafkalite.Producer("localhost:1", security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", **login)


@pytest.mark.parametrize("url", [None, "", "ftp://issuer.example/jwks", "ldap://x"])
def test_a_broker_needs_the_url_of_the_keys(url: str | None) -> None:
    with pytest.raises(ConfigError, match=r"sasl\.oauthbearer\.jwks\.endpoint\.url"):
        kafkalite.BrokerConfig(sasl_enabled_mechanisms="OAUTHBEARER", sasl_oauthbearer_jwks_endpoint_url=url)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("jwt", "cryptography"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match="OAUTHBEARER needs the package PyJWT") as missing:
                TokenKeys("x", refresh_ms=1, monotonic_ms=lambda: 0)
            assert missing.value.hint == "pip install 'kafkalite[oauth]'"


def test_nothing_loads_the_package_before_it_is_needed() -> None:
    code = (
        "import kafkalite.broker.broker, kafkalite.client.cluster.login, sys; assert 'jwt' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
