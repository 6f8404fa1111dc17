"""TLS between two protocols: who refuses whom, and that both sides know why.

That an encrypted stream keeps the promises of every stream is in ``test_seam``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kafkalite.errors import ConfigError, ConnectionFailedError, KafkaliteError, SslAuthenticationError
from kafkalite.tls_options import ClientAuth
from kafkalite.transport import transport_for
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, make_dev_certificates
from kafkalite.transport.tls import TlsTransport, peer_subject
from kafkalite.transport.tls_context import TlsContext
from proof.certificates import DevCertificates
from proof.waiting import eventually

ADDRESS = "127.0.0.1:0"


class Listening:
    """A listener with TLS whose accepted protocols are ``accepted``."""

    def __init__(self, recorder: Any, config: Any, client_auth: ClientAuth) -> None:
        self.accepted: list[Any] = []
        self.context = TlsContext(config, client_auth=client_auth)
        self._recorder = recorder

    def accept(self) -> Any:
        self.accepted.append(self._recorder())
        return self.accepted[-1]

    async def connect(self, config: Any) -> Any:
        """Return a client's protocol after the handshake."""
        return await TlsTransport(transport_for(ADDRESS), TlsContext(config)).connect(
            self.address, self._recorder
        )


@asynccontextmanager
async def listening(recorder: Any, config: Any, client_auth: ClientAuth = "none") -> AsyncIterator[Listening]:
    listening = Listening(recorder, config, client_auth)
    listener = await TlsTransport(transport_for(ADDRESS), listening.context).listen(ADDRESS, listening.accept)
    listening.address = listener.address  # type: ignore[attr-defined]
    try:
        yield listening
    finally:
        listener.close()
        for each in listening.accepted:
            each.transport.abort()
            await each.lost
        await listener.wait_closed()


async def refusal(
    recorder: Any, server: Any, client: Any, client_auth: ClientAuth = "none"
) -> KafkaliteError:
    """Return the error of a client: of its handshake, or of its first read, as TLS 1.3 confirms nothing."""
    async with listening(recorder, server, client_auth) as there:
        error: object
        try:
            error = await (await there.connect(client)).lost
        except KafkaliteError as refused:
            error = refused
        await there.accepted[0].lost  # by then the listener has the client's alert
        assert isinstance(error, KafkaliteError)
        return error


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, str]:
    """The files of another authority."""
    make_dev_certificates(tmp_path / "foreign", ["broker"], ["client"], ["127.0.0.1"])
    return {
        "ssl_truststore_location": str(tmp_path / "foreign" / CA_CERTIFICATE),
        "ssl_keystore_location": str(tmp_path / "foreign" / "client.pem"),
    }


async def test_each_side_knows_the_certificate_of_the_other(
    recorder: Any, dev_certificates: DevCertificates
) -> None:
    both = dev_certificates.config("client.pem")
    async with listening(recorder, dev_certificates.config("broker.pem"), "required") as there:
        connected = await there.connect(both)
        connected.transport.write(b"x")
        await there.accepted[0].read(1)
        assert peer_subject(there.accepted[0].transport) == "CN=client,O=kafkalite development"
        assert peer_subject(connected.transport) == "CN=broker,O=kafkalite development"
        assert connected.transport.get_extra_info("peername")[0] == "127.0.0.1"


async def test_an_anonymous_client_has_no_subject(recorder: Any, dev_certificates: DevCertificates) -> None:
    async with listening(recorder, dev_certificates.config("broker.pem"), "requested") as there:
        connected = await there.connect(dev_certificates.config())
        connected.transport.write(b"x")
        await there.accepted[0].read(1)
        assert peer_subject(there.accepted[0].transport) is None


async def test_a_common_name_is_no_host_name(recorder: Any, dev_certificates: DevCertificates) -> None:
    """S6: only the names for hosts count (RFC 9525); a common name proves nothing."""
    unnamed = dev_certificates.issue("unnamed.pem", "localhost", hosts=())
    async with listening(recorder, dev_certificates.config(str(unnamed))) as there:
        there.address = there.address.replace("127.0.0.1", "localhost")
        with pytest.raises(SslAuthenticationError, match="certificate is not valid for 'localhost'"):
            await there.connect(dev_certificates.config())


async def test_certificates_that_a_client_refuses(
    recorder: Any,
    dev_certificates: DevCertificates,
    foreign: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S6: expired, of an unknown authority, for another host. The listener's log has the client's reason."""
    monkeypatch.setattr("kafkalite.transport.tls_context._check_validity", lambda path, der: None)
    expired = dev_certificates.issue("gone.pem", not_after=datetime.now(UTC) - timedelta(days=1))
    elsewhere = dev_certificates.issue("elsewhere.pem", hosts=("elsewhere.example",))
    good = dev_certificates.config()
    for server, client, reason, logged in (
        (
            dev_certificates.config(str(expired)),
            good,
            "it has expired",
            "this broker's certificate has expired",
        ),
        (
            dev_certificates.config("broker.pem"),
            dev_certificates.config(**foreign),
            "its issuer is not trusted",
            "it does not trust the issuer of this broker's certificate",
        ),
        (
            dev_certificates.config(str(elsewhere)),
            good,
            "certificate is not valid for '127.0.0.1'",
            "it does not accept this broker's certificate",
        ),
    ):
        caplog.clear()
        error = await refusal(recorder, server, client)
        assert isinstance(error, SslAuthenticationError)
        assert "the server's certificate is refused: " in error.message
        assert reason in error.message
        assert error.hint
        assert f"reason=the client refuses: {logged}" in caplog.text.replace('"', "")


async def test_a_name_that_is_not_checked(recorder: Any, dev_certificates: DevCertificates) -> None:
    elsewhere = dev_certificates.issue("elsewhere.pem", hosts=("elsewhere.example",))
    async with listening(recorder, dev_certificates.config(str(elsewhere))) as there:
        config = dev_certificates.config(ssl_endpoint_identification_algorithm="")
        connected = await there.connect(config)
        assert peer_subject(connected.transport) is not None


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
async def test_clients_that_a_listener_refuses(
    recorder: Any,
    dev_certificates: DevCertificates,
    foreign: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
) -> None:
    """S6: without a certificate, with one of an unknown authority, expired. The client has the reason too."""
    monkeypatch.setattr("kafkalite.transport.tls_context._check_validity", lambda path, der: None)
    expired = dev_certificates.issue("old.pem", not_after=datetime.now(UTC) - timedelta(days=1))
    strange = foreign["ssl_keystore_location"]
    for keystore, reason, logged in (
        (None, "requires a certificate", "the client sent no certificate"),
        (strange, "it does not trust the issuer of this client's certificate", "its issuer is not trusted"),
        (str(expired), "this client's certificate has expired", "it has expired"),
    ):
        caplog.clear()
        client = dev_certificates.config(keystore, ssl_enabled_protocols=version)
        error = await refusal(recorder, dev_certificates.config("broker.pem"), client, "required")
        assert isinstance(error, SslAuthenticationError)
        assert "the server refuses: " in error.message
        assert reason in error.message
        assert logged in caplog.text


async def test_a_resumed_session_does_not_outlive_the_certificate_of_its_client(
    recorder: Any,
    dev_certificates: DevCertificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OpenSSL verifies a certificate once per session, and TLS 1.2 resumes sessions for two hours."""
    keystore = dev_certificates.issue("soon.pem", not_after=datetime.now(UTC) + timedelta(minutes=1))
    context = ssl.create_default_context(cafile=str(dev_certificates / CA_CERTIFICATE))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(keystore)

    def echo(protocol: Any, data: bytes) -> None:
        protocol.transport.write(data)

    def echoing() -> Any:
        protocol = recorder()
        protocol.on_data = echo
        return protocol

    def talk(address: str, earlier: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        host, port = address.rsplit(":", 1)
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host, session=earlier) as client,
        ):
            answer = b""
            with suppress(ConnectionError):
                client.send(b"x")
                answer = client.recv(1)
            return client.session, bool(client.session_reused), answer

    async with listening(echoing, dev_certificates.config("broker.pem"), "required") as there:
        resumable, is_resumed, answer = await asyncio.to_thread(talk, there.address, None)
        assert (is_resumed, answer) == (False, b"x")
        assert (await asyncio.to_thread(talk, there.address, resumable))[1:] == (True, b"x")
        later = Mock(**{"now.return_value": datetime.now(UTC) + timedelta(minutes=2)})
        monkeypatch.setattr("kafkalite.transport.tls.datetime", later)
        assert (await asyncio.to_thread(talk, there.address, resumable))[2] == b""
        assert "of a session that it resumes, has expired" in caplog.text


async def test_versions_without_a_common_one(
    recorder: Any, dev_certificates: DevCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    server = dev_certificates.config("broker.pem", ssl_enabled_protocols="TLSv1.3")
    client = dev_certificates.config(ssl_enabled_protocols="TLSv1.2")
    error = await refusal(recorder, server, client)
    assert "the server refuses: it enables other versions of TLS" in error.message
    assert "the peer offers only versions of TLS that are not enabled" in caplog.text


async def test_a_client_in_plain_text(
    recorder: Any, dev_certificates: DevCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(recorder, dev_certificates.config("broker.pem")) as there:
        plain = await transport_for(ADDRESS).connect(there.address, recorder)
        plain.transport.write(b"GET / HTTP/1.1\r\n\r\n")
        await plain.lost
        assert bytes(plain.received).startswith(b"\x15\x03"), "a TLS alert, which other clients recognise"
        await there.accepted[0].lost
        assert "the client does not speak TLS, which this listener requires" in caplog.text


@pytest.mark.parametrize("answer", [b"\0\0\0\x10hello", b""])
async def test_a_server_in_plain_text(
    recorder: Any, dev_certificates: DevCertificates, answer: bytes
) -> None:
    """It answers something else, or closes the connection."""

    class Plain(recorder):  # type: ignore[misc]
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.transport.write(answer)
            self.transport.close()

    listener = await transport_for(ADDRESS).listen(ADDRESS, Plain)
    with pytest.raises(
        ConnectionFailedError, match=r"does not speak TLS|closed the connection during"
    ) as caught:
        await TlsTransport(transport_for(ADDRESS), TlsContext(dev_certificates.config())).connect(
            listener.address, recorder
        )
    assert "security.protocol" in caught.value.hint
    listener.close()
    await listener.wait_closed()


async def test_a_silent_client_is_already_a_connection(
    recorder: Any, dev_certificates: DevCertificates
) -> None:
    """S5: a server counts it and may close it, before and during the handshake."""
    async with listening(recorder, dev_certificates.config("broker.pem")) as there:
        silent = await transport_for(ADDRESS).connect(there.address, recorder)
        await eventually(lambda: len(there.accepted) == 1 and there.accepted[0].transport is not None)
        silent.transport.write(b"\x16\x03\x01")  # the beginning of a handshake
        there.accepted[0].transport.abort()
        await silent.lost
        assert there.accepted[0].calls == ["made", "lost"]


async def test_bytes_after_the_handshake_that_are_not_encrypted_end_the_stream(
    recorder: Any, dev_certificates: DevCertificates
) -> None:
    async with listening(recorder, dev_certificates.config("broker.pem")) as there:
        connected = await there.connect(dev_certificates.config())
        connected.transport._below.write(b"\x17\x03\x03\x00\x20" + b"forged" * 6)
        error = await there.accepted[0].lost
        assert isinstance(error, SslAuthenticationError)
        assert bytes(there.accepted[0].received) == b""
        await connected.lost


async def test_renewed_certificates_reach_new_connections_and_keep_old_ones(
    recorder: Any, dev_certificates: DevCertificates, tmp_path: Path
) -> None:
    keystore = tmp_path / "broker.pem"
    keystore.write_bytes((dev_certificates / "broker.pem").read_bytes())
    async with listening(recorder, dev_certificates.config(str(keystore))) as there:
        first = await there.connect(dev_certificates.config())
        keystore.write_bytes(dev_certificates.authority.issue("renewed", ["127.0.0.1"]))
        second = await there.connect(dev_certificates.config())
        assert peer_subject(first.transport) == "CN=broker,O=kafkalite development"
        assert peer_subject(second.transport) == "CN=renewed,O=kafkalite development"
        for connected, accepted in zip((first, second), there.accepted, strict=True):
            connected.transport.write(b"still here")
            assert await accepted.read(10) == b"still here"


async def test_a_listener_with_an_unusable_keystore_does_not_start(
    recorder: Any, dev_certificates: DevCertificates, tmp_path: Path
) -> None:
    config = dev_certificates.config(str(tmp_path / "missing.pem"))
    transport = TlsTransport(transport_for(ADDRESS), TlsContext(config, client_auth="none"))
    with pytest.raises(ConfigError, match="a file that exists"):
        await transport.listen(ADDRESS, recorder)


async def test_a_cancelled_handshake_leaves_no_connection(
    recorder: Any, dev_certificates: DevCertificates
) -> None:
    accepted: list[Any] = []

    def accept() -> Any:
        accepted.append(recorder())
        return accepted[-1]

    listener = await transport_for(ADDRESS).listen(ADDRESS, accept)  # never responds
    dialling = asyncio.ensure_future(
        TlsTransport(transport_for(ADDRESS), TlsContext(dev_certificates.config())).connect(
            listener.address, recorder
        )
    )
    await eventually(lambda: bool(accepted) and len(accepted[0].received) > 0)
    dialling.cancel()
    await asyncio.wait([dialling])
    assert dialling.cancelled()
    await accepted[0].lost
    listener.close()
    await listener.wait_closed()


async def test_the_log_of_a_listener_has_no_other_lines(
    recorder: Any, dev_certificates: DevCertificates, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="kafkalite"):
        async with listening(recorder, dev_certificates.config("broker.pem")) as there:
            connected = await there.connect(dev_certificates.config())
            connected.transport.write(b"x")
            await there.accepted[0].read(1)
            connected.transport.close()
            await connected.lost
            await there.accepted[0].lost
    assert caplog.records == []
