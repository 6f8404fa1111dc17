"""Every client over TLS, and its error if a certificate or the protocol of the listener is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

import kafkalite
from kafkalite.errors import ConfigError, ConnectionFailedError, KafkaliteError, SslAuthenticationError
from kafkalite.transport.certificates import _element, _elements, pem_certificates
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, DevAuthority, make_dev_certificates
from proof.certificates import DevCertificates


async def error_of(broker: kafkalite.Broker, settings: dict[str, Any]) -> KafkaliteError:
    """Return the error with which an Admin, and the blocking Producer, refuse to open; both are the same."""
    with pytest.raises(KafkaliteError) as caught:
        async with kafkalite.Admin(broker.address, **settings):
            pass
    return caught.value


async def test_a_record_travels_encrypted(dev_certificates: DevCertificates) -> None:
    client = dev_certificates.client("client.pem")
    async with kafkalite.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        assert not broker.address.startswith("SSL://")
        async with kafkalite.Producer(broker.address, **client) as producer:
            await producer.send("orders", b"x" * 500_000)
        consumer = kafkalite.Consumer(
            ["orders"], bootstrap_servers=broker.address, auto_offset_reset="earliest", **client
        )
        async with consumer:
            assert (await anext(aiter(consumer))).value == b"x" * 500_000
        async with kafkalite.Admin(broker.address, **client) as admin:
            described = await admin.describe_cluster()
            assert [each.address for each in described.brokers] == [broker.address]


async def test_a_large_response_passes_a_slow_reader(dev_certificates: DevCertificates) -> None:
    """Several megabytes wait in the broker, encrypted only as fast as the client reads."""
    client = dev_certificates.client()
    async with kafkalite.Broker(**dev_certificates.broker(message_max_bytes=4 << 20)) as broker:
        async with kafkalite.Producer(broker.address, max_request_size=4 << 20, **client) as producer:
            for number in range(8):
                await producer.send("orders", bytes([number]) * (3 << 20))
        consumer = kafkalite.Consumer(
            ["orders"],
            bootstrap_servers=broker.address,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=32 << 20,
            **client,
        )
        async with consumer:
            for number in range(8):
                record = await anext(aiter(consumer))
                assert record.value == bytes([number]) * (3 << 20)


async def test_one_broker_serves_both_protocols(dev_certificates: DevCertificates) -> None:
    """Each client is given the addresses of the listener that it uses."""
    listeners = ("127.0.0.1:0", "SSL://127.0.0.1:0")
    async with kafkalite.Broker(**dev_certificates.broker(listeners=listeners)) as broker:
        plain, encrypted = broker.addresses
        for address, settings in ((plain, {}), (encrypted, dev_certificates.client())):
            async with kafkalite.Producer(address, **settings) as producer:
                await producer.send("orders", b"x")
            async with kafkalite.Admin(address, **settings) as admin:
                assert [each.address for each in (await admin.describe_cluster()).brokers] == [address]


async def test_tls_inside_one_process(dev_certificates: DevCertificates) -> None:
    async with (
        kafkalite.Broker(**dev_certificates.broker(listeners="SSL://inproc://")) as broker,
        kafkalite.Producer(broker.address, **dev_certificates.client()) as producer,
    ):
        await producer.send("orders", b"x")


async def test_a_client_that_opens_fails_at_once(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    """A refused certificate stays refused, so there is no retry until default.api.timeout.ms."""
    make_dev_certificates(tmp_path, [], ["client"], [])
    foreign = {"ssl_truststore_location": str(tmp_path / CA_CERTIFICATE)}
    async with kafkalite.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        for settings, reason in (
            (dev_certificates.client(), "it requires a certificate"),
            (dev_certificates.client("client.pem", **foreign), "its issuer is not trusted"),
            (
                dev_certificates.client(str(tmp_path / "client.pem")),
                "the issuer of this client's certificate",
            ),
        ):
            error = await error_of(broker, settings)
            assert isinstance(error, SslAuthenticationError)
            assert reason in error.message
            assert broker.address in error.message
        assert broker.statistics().connections_accepted == 3, "one attempt each"


async def test_a_wrong_host(dev_certificates: DevCertificates) -> None:
    keystore = dev_certificates.issue("elsewhere.pem", hosts=["elsewhere.example"])
    async with kafkalite.Broker(**dev_certificates.broker(str(keystore))) as broker:
        error = await error_of(broker, dev_certificates.client())
        assert isinstance(error, SslAuthenticationError)
        assert "certificate is not valid for '127.0.0.1'" in error.message


async def test_a_slow_broker_over_tls_is_not_lost(
    dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe that explains a slow response speaks TLS too: in plain text, it would reach no node."""
    monkeypatch.setattr("kafkalite.client.cluster.client.PROBE_MS", 60_000)  # machines may be busy
    async with (
        kafkalite.Broker(**dev_certificates.broker()) as broker,
        kafkalite.Producer(broker.address, **dev_certificates.client()) as producer,
    ):
        await producer.send("orders", b"a")
        cluster = producer._sender.cluster
        monkeypatch.setattr(cluster, "_open_connections", list)  # so it needs a new connection
        assert await cluster._accepts(broker.address)
        await cluster._probe()
        assert cluster._lost_nodes() == []


async def test_protocols_that_do_not_match(
    dev_certificates: DevCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides report it, whichever of them encrypts."""
    caplog.set_level(logging.INFO)
    async with kafkalite.Broker(**dev_certificates.broker()) as broker:
        error = await error_of(broker, {})
        assert isinstance(error, ConnectionFailedError)
        assert f"{broker.address} broke the protocol: the peer speaks TLS" in error.message
        assert "security.protocol" in error.hint
        assert "the client does not speak TLS, which this listener requires" in caplog.text
    async with kafkalite.Broker() as broker:
        error = await error_of(broker, dev_certificates.client())
        assert isinstance(error, ConnectionFailedError)
        assert "the server closed the connection during the TLS handshake" in error.message
        assert "security.protocol" in error.hint
        assert "the peer speaks TLS, and this side plain text" in caplog.text


async def test_the_principal_of_a_client(dev_certificates: DevCertificates) -> None:
    """S6: from its whole distinguished name by the rules; a client that none covers is refused."""
    seen: set[str] = set()
    rules = "RULE:^CN=(client),O=kafkalite development$/$1/U,RULE:^CN=(b.*),O=x$/$1/"
    listeners = ("SSL://127.0.0.1:0", "127.0.0.1:0")
    settings = dev_certificates.broker(
        listeners=listeners, ssl_client_auth="requested", ssl_principal_mapping_rules=rules
    )
    async with kafkalite.Broker(**settings) as broker:
        broker.intercept(lambda request, client: seen.add(client.principal))
        for address, client, principal in (
            (broker.addresses[0], dev_certificates.client("client.pem"), "User:CLIENT"),
            (broker.addresses[0], dev_certificates.client(), "User:ANONYMOUS"),
            (broker.addresses[1], {}, "User:ANONYMOUS"),
        ):
            seen.clear()
            async with kafkalite.Admin(address, **client):
                pass
            assert seen == {principal}
        seen.clear()
        short = {"default_api_timeout_ms": 300}
        error = await error_of(broker, dev_certificates.client("broker.pem", **short))
        assert isinstance(error, ConnectionFailedError)
        assert seen == set()


async def test_a_certificate_that_is_not_understood_is_refused(
    dev_certificates: DevCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    """S6: its owner is not ANONYMOUS. OpenSSL accepts the year 0, and Python's dates do not."""
    keystore = dev_certificates.issue("early.pem", "client")
    keystore.write_bytes(from_year_0(keystore.read_bytes(), dev_certificates.authority))
    context = ssl.create_default_context(cafile=str(dev_certificates / CA_CERTIFICATE))
    context.load_cert_chain(keystore)
    async with kafkalite.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        host, _, port = broker.addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read(1) == b""
        writer.close()
    (line,) = [line for line in caplog.messages if "connection refused" in line]
    assert "year 0 is out of range" in line


def from_year_0(pem: bytes, authority: DevAuthority) -> bytes:
    """Return a keystore whose certificate is valid from the year 0 on, signed by its authority again."""
    _, content, _ = _element(pem_certificates(pem)[0], 0)
    signed, algorithm, _ = (whole for _, _, whole in _elements(content))
    parts = [whole for _, _, whole in _elements(_element(signed, 0)[1])]
    _, end = (whole for _, _, whole in _elements(_element(parts[4], 0)[1]))
    parts[4] = _der(0x30, _der(0x18, b"00000101000000Z") + end)
    signed = _der(0x30, b"".join(parts))
    signature = authority._key.sign(signed, ec.ECDSA(hashes.SHA256()))
    whole = _der(0x30, signed + algorithm + _der(0x03, b"\0" + signature))
    certificate = ssl.DER_cert_to_PEM_cert(whole).encode()
    return pem[: pem.index(b"-----BEGIN CERTIFICATE")] + certificate + authority.pem


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 0x80 else b"\x82" + size.to_bytes(2, "big")
    return bytes([tag]) + length + content


async def test_files_that_cannot_be_used(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    async with kafkalite.Broker(**dev_certificates.broker()) as broker:
        missing = tmp_path / "missing.pem"
        error = await error_of(broker, dev_certificates.client(ssl_truststore_location=str(missing)))
        assert isinstance(error, ConfigError)
        assert error.message == f"ssl.truststore.location is '{missing}', but must be a file that exists"
        assert broker.statistics().connections_accepted == 0


async def test_renewed_certificates_reach_new_clients_of_a_running_broker(
    dev_certificates: DevCertificates, tmp_path: Path
) -> None:
    keystore = tmp_path / "broker.pem"
    keystore.write_bytes((dev_certificates / "broker.pem").read_bytes())
    client = dev_certificates.client()
    async with (
        kafkalite.Broker(**dev_certificates.broker(str(keystore))) as broker,
        kafkalite.Producer(broker.address, **client) as producer,
    ):
        await producer.send("orders", b"before")
        accepted = broker.statistics().connections_accepted
        keystore.write_bytes(dev_certificates.authority.issue("renewed", ["elsewhere.example"]))
        error = await error_of(broker, client)
        assert isinstance(error, SslAuthenticationError), "new connections get the new certificate"
        await producer.send("orders", b"after")
        assert broker.statistics().connections_accepted == accepted + 1, "the producer kept its connection"


async def test_an_authority_that_is_replaced_keeps_open_connections_and_refuses_new_ones(
    dev_certificates: DevCertificates, tmp_path: Path
) -> None:
    """S6: also while a request is in flight. A certificate of the new authority is accepted at once."""
    other = DevCertificates(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes((dev_certificates / CA_CERTIFICATE).read_bytes())
    settings = dev_certificates.broker(ssl_truststore_location=str(trusted), ssl_client_auth="required")
    old = dev_certificates.client("client.pem")
    new = dev_certificates.client(str(other / "client.pem"))
    async with (
        kafkalite.Broker(**settings) as broker,
        kafkalite.Producer(broker.address, **old) as producer,
        kafkalite.Consumer(["orders"], bootstrap_servers=broker.address, **old) as consumer,
    ):
        await producer.send("orders", b"before")
        waiting = asyncio.ensure_future(consumer.get_many(1, timeout_ms=20_000))
        kept = set(broker._server._connections)
        refused = await error_of(broker, new)
        assert isinstance(refused, SslAuthenticationError)
        trusted.write_bytes((other / CA_CERTIFICATE).read_bytes())
        refused = await error_of(broker, old)
        assert isinstance(refused, SslAuthenticationError)
        assert "does not trust the issuer of this client's certificate" in refused.message
        async with kafkalite.Admin(broker.address, **new) as admin:
            await admin.list_topics()
        trusted.write_bytes(b"half a file")
        async with kafkalite.Admin(broker.address, **new) as admin:
            await admin.list_topics()
        await producer.send("orders", b"after")
        assert await waiting
        assert kept and kept <= set(broker._server._connections)


def test_blocking_clients(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    from kafkalite import sync

    client = dev_certificates.client("client.pem")
    with sync.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        with sync.Producer(broker.address, **client) as producer:
            producer.send("orders", b"x").result(10)
        refused = sync.Producer(broker.address, **dev_certificates.client())
        with pytest.raises(SslAuthenticationError, match="it requires a certificate"), refused:
            pass


def test_versions_are_checked_with_the_settings(dev_certificates: DevCertificates) -> None:
    with pytest.raises(ConfigError, match=r"ssl\.enabled\.protocols is 'TLSv1\.1', but must be TLSv1\.2"):
        kafkalite.Producer("localhost:1", **dev_certificates.client(ssl_enabled_protocols="TLSv1.1"))
    with pytest.raises(ConfigError, match=r"security\.protocol is 'TLS', but must be one of"):
        kafkalite.Producer("localhost:1", security_protocol="TLS")  # type: ignore[arg-type]
