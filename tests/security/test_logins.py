"""Logins at a broker: mechanisms, the attacks that must fail, delays, sessions (S1, S3, S7, S8, S19)."""

from __future__ import annotations

import asyncio
import base64
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import kafkalite
import kafkalite.sync
from kafkalite.broker.server import logins
from kafkalite.broker.server.server import HANDSHAKE_DEADLINE_MS
from kafkalite.client.cluster.login import Login
from kafkalite.errors import ConfigError, ErrorCode, SaslAuthenticationError
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity
from kafkalite.protocol import codec
from kafkalite.protocol.messages.metadata import ApiVersionsRequest, MetadataRequest
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.security import plain
from kafkalite.security.plain import PlainClient
from kafkalite.security.scram import DEFAULT_ITERATIONS, Credential, Mechanism, ScramClient
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.waiting import eventually

PASSWORD = "correct horse battery staple"
REFUSED = ErrorCode.SASL_AUTHENTICATION_FAILED
ILLEGAL = ErrorCode.ILLEGAL_SASL_STATE
SHA_256 = Mechanism.SCRAM_SHA_256
METADATA = MetadataRequest([], False)
PLAIN_MESSAGE = PlainClient("alice", PASSWORD).first()


def settings(**more: Any) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "connection_failed_authentication_delay_ms": 1,
        "sasl_enabled_mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN",
        "sasl_allow_plain_without_tls": True,
        **more,
    }


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(**settings()) as cluster:
        await cluster.add_user("alice", PASSWORD)
        yield cluster


async def authenticate(wire: WireClient, message: bytes) -> Any:
    return await wire.call(SaslAuthenticateRequest(message))


def scram(name: str = "alice", password: str = PASSWORD, mechanism: Mechanism = SHA_256) -> ScramClient:
    return ScramClient(mechanism, name, password, "client's nonce")


async def log_in(wire: WireClient, exchange: Any, mechanism: str = SHA_256.label) -> Any:
    """Log in, and return the last response."""
    response = await wire.call(SaslHandshakeRequest(mechanism))
    message = exchange.first()
    while message is not None and not response.error_code:
        response = await authenticate(wire, message)
        if not response.error_code:
            message = exchange.receive(response.auth_bytes)
    return response


async def closed_after(wire: WireClient, response: Any, code: ErrorCode) -> None:
    assert response.error_code == code
    await wire.closed()


@pytest.mark.parametrize("mechanism", [*Mechanism, "PLAIN"])
async def test_a_user_logs_in(cluster: Cluster, mechanism: Any) -> None:
    is_plain = mechanism == "PLAIN"
    exchange = PlainClient("alice", PASSWORD) if is_plain else scram(mechanism=mechanism)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        response = await log_in(wire, exchange, "PLAIN" if is_plain else mechanism.label)
        assert (response.error_code, response.session_lifetime_ms) == (0, 0)
        assert (await wire.call(METADATA)).error_code == 0
        assert [one.client.principal for one in cluster.broker._server._connections] == ["User:alice"]


async def test_only_a_login_is_served_before_it(cluster: Cluster) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        refused = await wire.call(METADATA)
        assert "set security.protocol of the client to SASL_SSL or SASL_PLAINTEXT" in refused.error_message
        await closed_after(wire, refused, ILLEGAL)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        wire.send(SaslHandshakeRequest(SHA_256.label))
        wire.send(METADATA)  # before the login is complete
        await wire.response()
        await closed_after(wire, (await wire.response()).message, ILLEGAL)


async def test_the_body_of_a_request_before_the_login_is_not_decoded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise 64 KiB from anybody would cost the broker 20 ms, more than a login."""
    decoded: list[type] = []

    def decode(struct: Any, body: Any) -> Any:
        decoded.append(struct)
        return decode_body(struct, body)

    decode_body = codec.decode_body
    monkeypatch.setattr(codec, "decode_body", decode)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        decoded.clear()
        wire.send(MetadataRequest([""] * 60_000, False))
        refused = (await wire.response()).message
        assert refused.error_code == ILLEGAL
        assert "security.protocol" in refused.error_message
        assert MetadataRequest not in decoded


async def test_requests_that_arrive_with_the_login_are_served_after_it(cluster: Cluster) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        wire.send_raw(
            wire.encode(SaslHandshakeRequest("PLAIN"))
            + wire.encode(SaslAuthenticateRequest(PLAIN_MESSAGE))
            + b"".join(wire.encode(METADATA) for _ in range(3))
        )
        for _ in range(5):
            assert (await wire.response()).message.error_code == 0


async def test_a_frame_before_the_login_is_small(cluster: Cluster) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        wire.send(SaslHandshakeRequest(SHA_256.label))
        await wire.response()
        wire.send(SaslAuthenticateRequest(bytes(65 * 1024)))
        await wire.closed()
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire, scram())
        names = [f"{number:0200}" for number in range(1_000)]
        assert (await wire.call(MetadataRequest(names, False))).error_code == 0


async def test_a_flood_before_the_login_delays_no_login(cluster: Cluster) -> None:
    """S16: requests without a user are charged to no quota; otherwise all logins would wait for it."""
    async with cluster.admin(**cluster.login("alice")) as admin:
        await admin.alter_client_quotas(QuotaEntity(DEFAULT_ENTITY), {"request_percentage": 0.01})
    async with (
        WireClient(cluster.broker.addresses[0]) as flood,
        WireClient(cluster.broker.addresses[0]) as good,
    ):
        for _ in range(100):
            flood.send(ApiVersionsRequest("flood", "1"))
        assert {(await flood.response()).throttle_ms for _ in range(100)} == {0}
        for request in (SaslHandshakeRequest("PLAIN"), SaslAuthenticateRequest(PLAIN_MESSAGE)):
            good.send(request)
        handshake, login = await good.response(), await good.response()
        assert (handshake.throttle_ms, login.message.error_code) == (0, 0)
        assert login.throttle_ms > 0, "the work of a login is charged to its user"


async def test_changes_with_the_secret_of_the_cluster_are_audited(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kafkalite.audit")
    await cluster.add_user("bob", PASSWORD)
    assert "request allowed principal=cluster.secret" in caplog.text
    assert "api=ALTER_USER_SCRAM_CREDENTIALS resource=bob change=set SCRAM-SHA-256 count=2" in caplog.text


async def test_a_peer_that_does_not_log_in_is_closed(cluster: Cluster) -> None:
    server = cluster.broker._server
    async with (
        WireClient(cluster.broker.addresses[0]) as wire,
        WireClient(cluster.broker.addresses[0]) as good,
    ):
        await log_in(good, scram())
        await wire.call(SaslHandshakeRequest(SHA_256.label))
        server.reap(server.clock.monotonic_ms() + HANDSHAKE_DEADLINE_MS)
        await wire.closed()
        assert (await good.call(METADATA)).error_code == 0


async def test_a_plain_listener_offers_no_login() -> None:
    async with Cluster() as cluster, WireClient(cluster.broker.addresses[0]) as wire:
        refused = await wire.call(SaslHandshakeRequest(SHA_256.label))
        assert "set security.protocol of the client to SSL or PLAINTEXT" in refused.error_message
        await closed_after(wire, refused, ILLEGAL)


async def test_an_unknown_mechanism_is_refused(cluster: Cluster) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        refused = await wire.call(SaslHandshakeRequest("GSSAPI"))
        assert "it offers SCRAM-SHA-256, SCRAM-SHA-512, PLAIN" in refused.error_message
        await closed_after(wire, refused, ErrorCode.UNSUPPORTED_SASL_MECHANISM)


async def test_passwords_are_not_asked_for_in_plain_text() -> None:
    without = settings(sasl_allow_plain_without_tls=False)
    async with Cluster(**without) as cluster, WireClient(cluster.broker.addresses[0]) as wire:
        refused = await wire.call(SaslHandshakeRequest("PLAIN"))
        await closed_after(wire, refused, ErrorCode.UNSUPPORTED_SASL_MECHANISM)
    encrypted = Cluster(**{**without, "security_protocol": "SASL_SSL"})
    async with encrypted, encrypted.admin(sasl_mechanism="PLAIN") as admin:
        await admin.list_topics()


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([b"n,a=mallory,n=alice,r=nonce"], id="identity of another user"),
        pytest.param([b"p=tls-unique,,n=alice,r=nonce"], id="channel binding"),
        pytest.param([b"n,,n=alice,r="], id="empty nonce"),
        pytest.param([b"c=biws,r=nonce,p=AAAA"], id="skipped step"),
        pytest.param([b"n,,n=alice,r=nonce", b"n,,n=alice,r=nonce"], id="first step twice"),
        pytest.param([b"n,,n=alice,r=nonce", b"c=biws,r=nonce,p=AAAA"], id="the client's nonce alone"),
        pytest.param([b""], id="empty"),
        pytest.param([b"\xff\xfe"], id="no text"),
        pytest.param([b"n,,n=,r=nonce"], id="the user without a name"),
    ],
)
async def test_a_forged_message_ends_the_login(cluster: Cluster, messages: list[bytes]) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest(SHA_256.label))
        for message in messages[:-1]:
            assert (await authenticate(wire, message)).error_code == 0
        await closed_after(wire, await authenticate(wire, messages[-1]), REFUSED)


async def test_recorded_messages_are_of_no_use_in_another_login(cluster: Cluster) -> None:
    exchange = scram()
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest(SHA_256.label))
        challenge = await authenticate(wire, exchange.first())
        proof = exchange.receive(challenge.auth_bytes)
        assert proof is not None
        assert (await authenticate(wire, proof)).error_code == 0
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest(SHA_256.label))
        assert (await authenticate(wire, exchange.first())).auth_bytes != challenge.auth_bytes
        await closed_after(wire, await authenticate(wire, proof), REFUSED)


async def test_a_login_begins_with_its_mechanism_and_once(cluster: Cluster) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await closed_after(wire, await authenticate(wire, scram().first()), ILLEGAL)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest(SHA_256.label))
        await closed_after(wire, await wire.call(SaslHandshakeRequest(SHA_256.label)), ILLEGAL)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire, scram())
        await closed_after(wire, await authenticate(wire, scram().first()), ILLEGAL)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
async def test_an_unknown_user_and_a_wrong_password_look_the_same(cluster: Cluster, mechanism: str) -> None:
    found = []
    for name in ("alice", "nobody"):
        async with WireClient(cluster.broker.addresses[0]) as wire:
            is_plain = mechanism == "PLAIN"
            exchange = PlainClient(name, "wrong") if is_plain else scram(name, "wrong")
            found.append(await log_in(wire, exchange, mechanism))
            await wire.closed()
    assert found[0] == found[1]
    assert found[0].error_code == REFUSED


async def test_a_password_costs_the_same_whatever_the_user_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: the time of PLAIN does not reveal users with one mechanism. The work is that of PBKDF2."""
    async with cluster.admin() as admin:
        for label in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            await admin.set_user_password(label, PASSWORD, mechanisms=[label])
        await admin.set_user_password("both", PASSWORD)
    work: list[tuple[Mechanism, int]] = []
    derive = plain.salted_password

    def counted(mechanism: Mechanism, password: str, salt: bytes, iterations: int) -> bytes:
        work.append((mechanism, iterations))
        return derive(mechanism, password, salt, iterations)

    monkeypatch.setattr(plain, "salted_password", counted)
    costs = []
    for name, is_user in (
        ("SCRAM-SHA-256", True),
        ("SCRAM-SHA-512", True),
        ("both", True),
        ("nobody", False),
    ):
        for password in (PASSWORD, "wrong"):
            work.clear()
            async with WireClient(cluster.broker.addresses[0]) as wire:
                response = await log_in(wire, PlainClient(name, password), "PLAIN")
            assert response.error_code == (0 if is_user and password == PASSWORD else REFUSED)
            costs.append(list(work))
    assert costs == [[(mechanism, DEFAULT_ITERATIONS) for mechanism in Mechanism]] * 8


async def test_the_first_response_of_scram_costs_the_same_for_a_known_user(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: its time does not reveal which users exist. Work that only unknown users cause can be measured."""
    work: list[str] = []
    made = logins.decoy_credential

    def counted(decoy: Credential, username: str) -> Credential:
        work.append(username)
        return made(decoy, username)

    monkeypatch.setattr(logins, "decoy_credential", counted)
    for name in ("alice", "nobody"):
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await wire.call(SaslHandshakeRequest(SHA_256.label))
            assert (await authenticate(wire, scram(name).first())).error_code == 0
    assert work == ["alice", "nobody"]


async def test_an_unknown_user_gets_the_salt_of_a_user_each_time(cluster: Cluster) -> None:
    """Two attempts get the same salt and number of iterations, as for a user that exists."""
    salts = []
    for _ in range(2):
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await wire.call(SaslHandshakeRequest(SHA_256.label))
            challenge = (await authenticate(wire, scram("nobody").first())).auth_bytes.decode()
            salts.append(challenge.split(",", 1)[1])
    assert salts[0] == salts[1]
    assert len(base64.b64decode(salts[0].split(",")[0][2:])) == 16


@pytest.mark.parametrize(
    "message",
    [
        b"mallory\0alice\0" + PASSWORD.encode(),
        b"alice\0" + PASSWORD.encode(),
        b"\0\0",
        b"\0alice\0",
        b"\xff\0\0",
    ],
)
async def test_a_forged_message_of_plain_is_refused(cluster: Cluster, message: bytes) -> None:
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest("PLAIN"))
        refused = await authenticate(wire, message)
        assert PASSWORD not in refused.error_message
        await closed_after(wire, refused, REFUSED)


async def test_the_answer_to_a_failed_login_is_delayed() -> None:
    cluster = Cluster(**settings(connection_failed_authentication_delay_ms=300))
    async with cluster, WireClient(cluster.broker.addresses[0]) as wire:
        begun = time.monotonic()
        refused = await log_in(wire, scram("nobody"))
        await closed_after(wire, refused, REFUSED)
        assert time.monotonic() - begun >= 0.29


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
async def test_a_storm_of_failed_logins_leaves_the_loop_free(cluster: Cluster, mechanism: str) -> None:
    """1,000 wrong passwords, 50 at a time: a client that has logged in is served meanwhile (S8)."""
    address = cluster.broker.addresses[0]
    left = iter(range(1_000 if mechanism != "PLAIN" else 200))
    begun = asyncio.Event()

    async def guess() -> None:
        for _ in left:
            async with WireClient(address) as wire:
                # The work of the client is left out: any proof is wrong.
                await wire.call(SaslHandshakeRequest(mechanism))
                if mechanism == "PLAIN":
                    refused = await authenticate(wire, b"\0alice\0wrong")
                else:
                    challenge = await authenticate(wire, b"n,,n=alice,r=nonce")
                    nonce = challenge.auth_bytes.split(b",")[0]
                    wrong = base64.b64encode(bytes(32))
                    refused = await authenticate(wire, b"c=biws," + nonce + b",p=" + wrong)
                begun.set()
                await closed_after(wire, refused, REFUSED)

    async with WireClient(address) as good:
        await log_in(good, scram())
        async with asyncio.TaskGroup() as storm:
            guesses = [storm.create_task(guess()) for _ in range(50)]
            await begun.wait()
            waits_s: list[float] = []
            while not all(one.done() for one in guesses):
                sent = time.monotonic()
                assert (await good.call(METADATA)).error_code == 0
                waits_s.append(time.monotonic() - sent)
                await asyncio.sleep(0.005)
    assert len(waits_s) > 5
    assert statistics.median(waits_s) < 1.0
    await eventually(lambda: cluster.broker._server.connection_count == 0)


async def test_secrets_are_in_no_log_and_no_repr(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """S13, S19: the names of users are logged, with control characters escaped."""
    caplog.set_level(logging.DEBUG)
    for password in (PASSWORD, "a wrong password"):
        for mechanism in ("SCRAM-SHA-512", "PLAIN"):
            login = {**cluster.login("alice"), "sasl_password": password, "sasl_mechanism": mechanism}
            admin = cluster.admin(**login)
            shown = f"{admin!r} {admin._cluster.config!r} {admin._cluster.login!r}"
            try:
                await admin.start()
            except SaslAuthenticationError as error:
                shown += f"{error!r} {error}"
            await admin.close()
            assert password not in shown
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await wire.call(SaslHandshakeRequest("PLAIN\n"))
    text = caplog.text + repr(cluster.broker.config)
    assert "login refused" in text and "client logged in" in text
    for mechanism in ("SCRAM-SHA-512", "PLAIN"):
        assert f"mechanism={mechanism} user=alice reason=" in text, "the audit log names the claimed user"
    stored = [c.stored_key for c in cluster.broker.image.credentials.values()]
    for secret in (
        PASSWORD,
        "a wrong password",
        base64.b64encode(PASSWORD.encode()).decode(),
        cluster.secret,
    ):
        assert secret not in text
    assert not any(repr(key)[2:-1] in text for key in stored)
    assert "wrong" not in repr(SaslAuthenticateRequest(b"\0alice\0wrong"))


# --- sessions


async def test_a_session_ends_unless_the_user_logs_in_again() -> None:
    async with Cluster(**settings(connections_max_reauth_ms=60_000)) as cluster:
        await cluster.add_user("alice", PASSWORD)
        move = _moved_login(cluster)
        async with WireClient(cluster.broker.addresses[0]) as wire:
            assert (await log_in(wire, scram())).session_lifetime_ms == 60_000
            move(59_999)
            assert (await wire.call(METADATA)).error_code == 0
            assert (await log_in(wire, scram())).session_lifetime_ms == 60_000
            move(60_001)
            assert (await wire.call(METADATA)).error_code == 0
            move(119_999)
            await closed_after(wire, await wire.call(METADATA), ILLEGAL)


def _moved_login(cluster: Cluster) -> Callable[[int], None]:
    """Return a function that sets the time of the broker's logins, in ms from now."""
    logins, start_ms = cluster.broker._services.logins, cluster.clock.monotonic_ms()

    class Moved:
        now_ms = start_ms

        def monotonic_ms(self) -> int:
            return self.now_ms

    moved = Moved()
    logins._clock = moved  # type: ignore[assignment]

    def move(after_ms: int) -> None:
        moved.now_ms = start_ms + after_ms

    return move


async def test_a_connection_keeps_its_user_and_mechanism(cluster: Cluster) -> None:
    await cluster.add_user("mallory", "hers")
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire, scram())
        await closed_after(wire, await log_in(wire, scram("mallory", "hers")), REFUSED)
    async with WireClient(cluster.broker.addresses[0]) as wire:
        await log_in(wire, scram())
        again = await log_in(wire, scram(mechanism=Mechanism.SCRAM_SHA_512), "SCRAM-SHA-512")
        await closed_after(wire, again, ILLEGAL)


async def test_a_client_logs_in_again_by_itself() -> None:
    """KIP-368: the connection stays, with requests in flight."""
    from kafkalite.client.cluster import login

    async with Cluster(**settings(connections_max_reauth_ms=10_000)) as cluster:
        await cluster.create_topic("orders")
        steps: list[Any] = []
        begin = Login.steps

        def counted(self: Login, exchange: Any) -> Any:
            steps.append(self)
            return begin(self, exchange)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Login, "steps", counted)
            patch.setattr(login, "RENEWAL_FACTOR", 0.01)
            async with cluster.producer() as producer:
                await producer.send("orders", b"x")
                accepted = cluster.broker.statistics().connections_accepted
                count = len(steps)
                while len(steps) < count + 6:
                    await producer.send("orders", b"x")
                assert cluster.broker.statistics().connections_accepted == accepted


@pytest.mark.parametrize("lifetime_ms", [-(2**63), -1, 2**63 - 1])
async def test_an_absurd_lifetime_of_a_session_is_bounded(lifetime_ms: int) -> None:
    """A false server must not make a client log in without end, or fail."""
    begin = Login.steps
    count = 0

    def lying(self: Login, exchange: Any) -> Any:
        nonlocal count
        count += 1
        yield from begin(self, exchange)
        return lifetime_ms

    async with Cluster(**settings()) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Login, "steps", lying)
            async with cluster.admin() as admin:
                before = count
                for _ in range(20):
                    await admin.list_topics()
                assert count == before
                connection = admin._cluster._connections()[0]
                assert connection._renewal is not None
                delay_s = connection._renewal.when() - asyncio.get_running_loop().time()
                assert 0.5 < delay_s < 24 * 3600


async def test_a_client_whose_session_ended_connects_again() -> None:
    async with Cluster(**settings(connections_max_reauth_ms=60_000)) as cluster:
        await cluster.create_topic("orders")
        move = _moved_login(cluster)
        async with cluster.producer() as producer:
            await producer.send("orders", b"x")
            accepted = cluster.broker.statistics().connections_accepted
            move(120_000)  # without a login in between, as after a suspended machine
            await producer.send("orders", b"x")
            assert cluster.broker.statistics().connections_accepted > accepted


# --- clients


async def test_a_login_that_the_listener_does_not_require_is_one_clear_error() -> None:
    """Its hint does not blame a limit of connections."""
    async with kafkalite.Broker() as broker:
        login = {"sasl_username": "alice", "sasl_password": PASSWORD}
        with pytest.raises(SaslAuthenticationError, match="requires no login: set security") as caught:
            async with kafkalite.Admin(broker.address, security_protocol="SASL_PLAINTEXT", **login):
                pass
    assert caught.value.hint == ""


@pytest.mark.parametrize(
    "wrong",
    [
        ({"sasl_password": "wrong"}, "unknown user, or wrong password"),
        ({"sasl_username": "nobody"}, "unknown user, or wrong password"),
        ({"sasl_mechanism": "PLAIN", "sasl_password": "wrong"}, "unknown user, or wrong password"),
        ({"security_protocol": "PLAINTEXT"}, r"set security\.protocol of the client to SASL_SSL"),
    ],
)
async def test_a_refused_login_is_one_clear_error_at_once(
    cluster: Cluster, wrong: tuple[dict[str, Any], str]
) -> None:
    begun = time.monotonic()
    for make in (cluster.producer, cluster.admin, lambda **more: cluster.consumer("orders", **more)):
        client = make(**{**cluster.login("alice"), **wrong[0]})  # type: ignore[operator]
        with pytest.raises(SaslAuthenticationError, match=wrong[1]):
            await client.start()
        await client.close()
    assert time.monotonic() - begun < 30, "not after default.api.timeout.ms, 60 s"


async def test_a_client_with_a_login_says_that_the_listener_has_none() -> None:
    async with Cluster() as cluster:
        login = {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "a", "sasl_password": "b"}
        with pytest.raises(SaslAuthenticationError, match=r"set security\.protocol of the client to SSL"):
            async with cluster.admin(**login):
                pass


async def test_a_blocking_client_logs_in() -> None:
    def use(servers: str, login: dict[str, Any]) -> None:
        with kafkalite.sync.Producer(servers, **login) as producer:
            producer.send("orders", b"x").result()
        with (
            pytest.raises(SaslAuthenticationError, match="wrong password"),
            kafkalite.sync.Producer(servers, **{**login, "sasl_password": "no"}),
        ):
            pass

    async with Cluster(**settings(transport="tcp")) as cluster:
        await asyncio.to_thread(use, cluster.bootstrap_servers, cluster.client_settings)


@pytest.mark.parametrize("missing", ["sasl_username", "sasl_password"])
def test_a_login_needs_user_and_password(missing: str) -> None:
    login = {"sasl_username": "alice", "sasl_password": "x"}
    del login[missing]
    with pytest.raises(ConfigError, match=missing.replace("_", ".")):
        kafkalite.Producer("localhost:1", security_protocol="SASL_SSL", **login)  # type: ignore[arg-type]
