"""TLS over the streams of any transport: encryption between a protocol and the transport under it.

``TlsEnd`` is the transport of its protocol, and the protocol of the transport below. This module does not use
asyncio's own TLS, which closes the connection after a failed handshake without sending the alert that states
the reason, and does not report the failure on the listening side.

The protocol of an accepted connection gets ``connection_made`` before the handshake, so that a server's
limits and deadlines also apply to connections that never complete the handshake (S5). The protocol receives
no bytes before the handshake is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from kafkalite.errors import TLS_HINT, ConnectionFailedError, KafkaliteError, SslAuthenticationError
from kafkalite.limits import KIB, MIB
from kafkalite.log_fields import Fields
from kafkalite.transport import has_own_name
from kafkalite.transport.certificates import CertificateError, parse_certificate
from kafkalite.transport.seam import Listener, ProtocolFactory, SecuredProtocol, Transport
from kafkalite.transport.stream_end import StreamEnd
from kafkalite.transport.tcp import format_address, parse_address
from kafkalite.transport.tls_context import TlsContext

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BufferedProtocol)

#: Encrypted bytes are received into one buffer for all connections of a thread: they are decrypted at once.
_RECEIVE_BYTES: Final = 128 * KIB
#: Small writes are joined up to this size: a TLS record has at most 16 KiB, and each costs a call.
_JOINED_BYTES: Final = 16 * KIB
#: A large write is encrypted in parts of this size, and only as fast as the transport below sends them.
_PART_BYTES: Final = 128 * KIB
#: After this many bytes, the rest is encrypted by another callback, so that others run in between.
_TURN_BYTES: Final = MIB

_HANDSHAKE_RECORD: Final = 0x16
_ALERT_RECORD: Final = 0x15
#: A fatal alert, protocol_version, in the oldest record format. Sent to a peer that does not speak TLS.
#: close_notify follows, so that it is longer than the header of a frame.
_NOT_TLS_ALERT: Final = b"\x15\x03\x01\x00\x02\x02\x46\x15\x03\x01\x00\x02\x01\x00"


#: The name in the certificate of a listener that has no host, such as one at ``inproc://name``.
LOCAL_NAME: Final = "localhost"

_thread: Final = threading.local()


class TlsEnd(StreamEnd, asyncio.BufferedProtocol):
    """The encrypted end of a stream.

    ``secured`` completes when the handshake has succeeded, or raises the error that ended it.
    """

    def __init__(
        self, protocol: asyncio.BufferedProtocol, context: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        """``server_name`` is the host to which a client connects, and None on the listening side."""
        loop = asyncio.get_running_loop()
        super().__init__(loop, contextvars.copy_context(), {})
        self._protocol = protocol
        self._is_server = server_name is None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=self._is_server, server_hostname=server_name
        )
        self._below: Any = None
        self.secured: asyncio.Future[None] = loop.create_future()
        self._is_secured = False
        self._has_received = False
        self._has_raw_eof = False
        self._is_below_full = False
        self._unsent: list[memoryview] = []  # what the protocol wrote and is not encrypted yet
        self._unsent_bytes = 0
        self._is_pumping = False  # whether a later callback continues to encrypt
        self._is_shut = False  # whether close_notify was sent
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "closing" if self._is_closing else "open" if self._is_secured else "opening"
        return f"<TlsEnd {state} over {self._below!r}>"

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the verified certificate of the peer if ``name`` is ``peer_certificate``.

        It is in DER, or None if the peer sent none. For any other name, return the value of the transport
        below.
        """
        if name == "peer_certificate":
            return self._tls.getpeercert(binary_form=True) if self._is_secured else default
        return self._below.get_extra_info(name, default) if self._below is not None else default

    # --- called by the transport below

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = transport
        assert self._protocol is not None
        self._protocol.connection_made(self)
        if not self._is_server and not self._is_closing:
            self._handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        try:
            buffer: memoryview = _thread.buffer
        except AttributeError:
            buffer = _thread.buffer = memoryview(bytearray(_RECEIVE_BYTES))
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closing:
            return
        received = _thread.buffer[:nbytes]
        if not self._has_received:
            self._has_received = True
            if received[0] not in (_HANDSHAKE_RECORD, _ALERT_RECORD):
                self._refuse_plaintext()
                return
        self._incoming.write(received)
        if self._is_secured or self._handshake():
            self._deliver()
            self._send_encrypted()

    def eof_received(self) -> bool:
        if not self._is_secured:
            self._fail_handshake(self._cut_off())
        elif not self._is_closing:
            self._has_raw_eof = True
            self._deliver()
        return True  # this end closes the transport itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if not self.secured.done():
            self.secured.set_exception(self._error or self._cut_off())
            self.secured.exception()  # a listener does not await it
        self._lose(self._error or exc)

    def pause_writing(self) -> None:
        self._is_below_full = True

    def resume_writing(self) -> None:
        self._is_below_full = False
        self._pump()

    # --- the handshake

    def _handshake(self) -> bool:
        """Continue the handshake with the received bytes. Return whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_encrypted()
            return False
        except ssl.SSLError as error:
            self._send_encrypted()  # the alert, so that the peer knows the reason too
            self._fail_handshake(explain(error, is_server=self._is_server))
            return False
        if self._is_server and self._tls.session_reused and self._has_expired_peer():
            self._fail_handshake(
                SslAuthenticationError("the client's certificate, of a session that it resumes, has expired")
            )
            return False
        self._is_secured = True
        self._send_encrypted()
        if not self.secured.done():
            self.secured.set_result(None)
        if isinstance(self._protocol, SecuredProtocol):
            self._protocol.connection_secured()
        self._pump()
        return not self._is_closing

    def _has_expired_peer(self) -> bool:
        """Whether the peer's certificate has expired. For a resumed session, OpenSSL does not verify it."""
        der = self._tls.getpeercert(binary_form=True)
        if der is None:
            return False
        try:
            _, _, end = parse_certificate(der)
        except CertificateError:
            return True  # a certificate that this program does not understand proves nothing
        return end < datetime.now(UTC)

    def _peer(self) -> str:
        peer = self._below.get_extra_info("peername")
        return "unknown" if peer is None else format_address(*peer[:2])  # None after an early reset

    def _cut_off(self) -> ConnectionFailedError:
        peer, hint = ("client", "") if self._is_server else ("server", TLS_HINT)
        return ConnectionFailedError(f"the {peer} closed the connection during the TLS handshake", hint=hint)

    def _refuse_plaintext(self) -> None:
        if self._is_server:
            self._below.write(_NOT_TLS_ALERT)
            error = "the client does not speak TLS, which this listener requires"
            self._fail_handshake(
                SslAuthenticationError(error, hint="security.protocol of the client must be SSL or SASL_SSL")
            )
        else:
            error = "the server does not speak TLS"
            self._fail_handshake(SslAuthenticationError(error, hint=TLS_HINT))

    def _fail_handshake(self, error: KafkaliteError) -> None:
        if self._is_closing:
            return
        if self._is_server:
            logger.warning("TLS handshake failed %s", Fields(peer=self._peer(), reason=error))
        self._error = error
        self._is_closing = True
        self._below.close()

    # --- received data

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            if not self._is_closing:
                self._below.resume_reading()
                if not self._is_scheduled:
                    self._wake()

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            if not self._is_closing:
                self._below.pause_reading()

    def _wake(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        """Pass decrypted bytes to the protocol until the protocol pauses reading or there are no more."""
        self._is_scheduled = False
        while self._is_reading and not self._is_closing and self._is_secured:
            if not self._fill():
                break

    def _fill(self) -> bool:
        """Decrypt into one buffer of the protocol. Return whether there may be more."""
        assert self._protocol is not None
        filled, is_drained, is_over = 0, False, False
        try:
            buffer = memoryview(self._protocol.get_buffer(-1))
            try:
                while filled < len(buffer) and not is_over:
                    count: Any = self._tls.read(len(buffer) - filled, buffer[filled:])
                    filled += count
                    is_over = not count
            except ssl.SSLWantReadError:
                is_drained = True
            except ssl.SSLZeroReturnError:
                is_over = True
            except ssl.SSLError as error:
                self._break(explain(error, is_server=self._is_server))
                return False
            if filled:
                self._protocol.buffer_updated(filled)
        except Exception as error:
            self._fail(error)
            return False
        if is_over or (is_drained and self._has_raw_eof):
            if not self._is_closing:
                self._on_eof()
            return False
        return not is_drained

    def _break(self, error: KafkaliteError) -> None:
        """End the stream because its bytes cannot be decrypted, or because the peer sent an alert."""
        if self._is_server:
            logger.warning("TLS failed %s", Fields(peer=self._peer(), reason=error))
        self._send_encrypted()
        self._error = error
        self._is_closing = True
        self._below.close()

    # --- sent data

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue ``data`` for the peer. It may be encrypted later, so the caller must not change it."""
        self.writelines((data,))

    def writelines(self, list_of_data: Any) -> None:
        if self._is_closing or self._has_sent_eof:
            return
        for data in list_of_data:
            view = memoryview(data)
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            if view.nbytes:
                self._unsent.append(view)
                self._unsent_bytes += view.nbytes
        self._pump()
        self._pause_if_full()

    def get_write_buffer_size(self) -> int:
        """Return the number of written bytes that are not encrypted yet."""
        return self._unsent_bytes

    def _pump(self) -> None:
        """Encrypt and send what the protocol wrote, until the buffer of the transport below is full.

        After _TURN_BYTES, a later callback continues.
        """
        left = _TURN_BYTES
        while self._unsent and self._is_secured and not self._is_below_full and left > 0:
            part = self._next_part()
            self._tls.write(part)
            left -= len(part)
            self._unsent_bytes -= len(part)
            self._send_encrypted()
        if self._unsent:
            if left <= 0 and not self._is_pumping:
                self._is_pumping = True
                self._loop.call_soon(self._pump_again, context=self._context)
        elif self._has_sent_eof:
            self._shut_down()
        self._resume_if_drained()

    def _pump_again(self) -> None:
        self._is_pumping = False
        self._pump()

    def _next_part(self) -> Any:
        """Remove from the queue and return the next bytes to encrypt, at most _PART_BYTES."""
        unsent = self._unsent
        first = unsent[0]
        if len(first) > _PART_BYTES:
            unsent[0] = first[_PART_BYTES:]
            return first[:_PART_BYTES]
        count, size = 1, len(first)
        while count < len(unsent) and size + len(unsent[count]) <= _JOINED_BYTES:
            size += len(unsent[count])
            count += 1
        part = first if count == 1 else b"".join(unsent[:count])
        del unsent[:count]
        return part

    def _send_encrypted(self) -> None:
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())

    def _send_eof(self) -> None:
        self._pump()

    def _shut_down(self) -> None:
        """Send close_notify if it is not sent yet, and end the stream below."""
        if not self._is_shut:
            self._is_shut = True
            with contextlib.suppress(ssl.SSLError):  # close_notify of the peer is still missing
                self._tls.unwrap()
            self._send_encrypted()
            if not self._is_closing and self._below.can_write_eof():
                self._below.write_eof()
        if self._is_closing:
            self._below.close()

    def close(self) -> None:
        if not self._is_closing:
            self._has_sent_eof = True
            self._end(None)

    def _reset_peer(self) -> None:
        self._is_shut = True
        self._unsent.clear()
        self._below.abort()

    def _end(self, error: Exception | None) -> None:
        self._is_closing = True
        self._error = self._error or error
        if not self._is_secured:
            self._below.close()
        elif not self._unsent:
            self._shut_down()


class TlsTransport:
    """TLS over the streams of the transport ``below``."""

    def __init__(self, below: Transport, tls: TlsContext) -> None:
        self._below = below
        self._tls = tls

    async def connect(self, address: str, protocol_factory: Callable[[], P]) -> P:
        """Return the connected protocol after the handshake.

        Unless ``ssl.endpoint.identification.algorithm`` is empty, the server's certificate must have the host
        of ``address``, or localhost for ``inproc://name``. Raises SslAuthenticationError if the handshake
        fails, ConnectionFailedError if the connection fails, and ConfigError if ``address`` is malformed or
        the files of the context cannot be used. With TLS 1.3, a server may refuse the client's certificate
        after the handshake; then the connection is lost with SslAuthenticationError.
        """
        made: list[P] = []
        context = self._tls.current()
        host = LOCAL_NAME if has_own_name(address) else parse_address(address)[0]

        def wrap() -> TlsEnd:
            made.append(protocol_factory())
            return TlsEnd(made[-1], context, server_name=host)

        end = await self._below.connect(address, wrap)
        try:
            await end.secured
        except BaseException as error:
            end.abort()
            if isinstance(error, ConnectionFailedError):
                raise type(error)(f"cannot connect to {address}: {error.message}", hint=error.hint) from error
            raise
        return made[-1]

    async def is_refused(self, address: str) -> bool:
        return await self._below.is_refused(address)

    async def listen(self, address: str, protocol_factory: ProtocolFactory) -> Listener:
        """Accept connections, each with the certificates that are current when it is made.

        Raises ListenError, and ConfigError if the files of the context cannot be used.
        """
        self._tls.current()  # raises ConfigError now, and never again
        return await self._below.listen(address, lambda: TlsEnd(protocol_factory(), self._tls.current()))


def peer_subject(transport: asyncio.BaseTransport) -> str | None:
    """Return the distinguished name in the verified certificate of the peer, or None if it sent none.

    Raises CertificateError if the certificate cannot be parsed, because a peer with a certificate must not be
    taken for one without.
    """
    der = transport.get_extra_info("peer_certificate")
    return None if der is None else parse_certificate(der).subject


# {OpenSSL's reason for its own failure: (what is wrong, what to do)}.
_OWN: Final = {
    "WRONG_VERSION_NUMBER": ("the peer does not speak TLS", "check the port and security.protocol"),
    "HTTP_REQUEST": ("the peer speaks HTTP", "check the port"),
    "UNSUPPORTED_PROTOCOL": (
        "the peer offers only versions of TLS that are not enabled",
        "check ssl.enabled.protocols",
    ),
    "NO_SHARED_CIPHER": ("the two sides have no cipher in common", "check ssl.enabled.protocols"),
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "the client sent no certificate",
        "set ssl.keystore.location in the client; this listener has ssl.client.auth=required",
    ),
}
# {the peer's alert: (what is wrong, what to do)}. OpenSSL names them after the version that defined them.
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": ("it requires a certificate", "set ssl.keystore.location"),
    "UNKNOWN_CA": (
        "it does not trust the issuer of {own} certificate",
        "check ssl.truststore.location there",
    ),
    "DECRYPT_ERROR": (
        "it could not verify {own} certificate",
        "was the certificate issued by an authority in ssl.truststore.location there?",
    ),
    "CERTIFICATE_EXPIRED": ("{own} certificate has expired", "renew the certificate"),
    "CERTIFICATE_REVOKED": ("{own} certificate is revoked", "renew the certificate"),
    "CERTIFICATE_UNKNOWN": ("it does not accept {own} certificate", "look at its log"),
    "BAD_CERTIFICATE": ("it does not accept {own} certificate", "does the certificate have the host name?"),
    "UNSUPPORTED_CERTIFICATE": ("it cannot use {own} certificate", "is it a certificate for this purpose?"),
    "PROTOCOL_VERSION": ("it enables other versions of TLS", "check ssl.enabled.protocols on both sides"),
    "HANDSHAKE_FAILURE": (
        "the two sides have no version or cipher in common, or it requires a certificate",
        "check ssl.enabled.protocols and ssl.keystore.location",
    ),
}
# {OpenSSL's code of a certificate's verification: (what is wrong, what to do)}.
_UNKNOWN_ISSUER: Final = (
    "its issuer is not trusted",
    "ssl.truststore.location must have the certificate of the authority that issued it",
)
_VERIFY_CODES: Final = {
    2: _UNKNOWN_ISSUER,
    7: _UNKNOWN_ISSUER,
    9: ("it is not valid yet", "check the clocks of both machines"),
    10: ("it has expired", "renew the certificate"),
    18: _UNKNOWN_ISSUER,
    19: _UNKNOWN_ISSUER,
    20: _UNKNOWN_ISSUER,
    21: _UNKNOWN_ISSUER,
    23: ("it is revoked", "renew the certificate"),
    26: ("it was issued for another purpose", "servers need serverAuth, and clients clientAuth"),
    62: ("", "connect to a name in the certificate, or issue one that has this name"),
    64: ("", "connect to an address in the certificate, or issue one that has this address"),
}


def explain(error: ssl.SSLError, *, is_server: bool) -> KafkaliteError:
    """Return an error that describes ``error`` in words, with a hint if the cause is a known one."""
    peer = "client" if is_server else "server"
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        what, hint = _VERIFY_CODES.get(error.verify_code, ("", ""))
        what = what or error.verify_message.rstrip(".").lower()
        return SslAuthenticationError(f"the {peer}'s certificate is refused: {what}", hint=hint)
    own = "this broker's" if is_server else "this client's"
    for alert, (what, hint) in _ALERTS.items():
        if reason.endswith(f"ALERT_{alert}"):
            return SslAuthenticationError(f"the {peer} refuses: {what.format(own=own)}", hint=hint)
    what, hint = _OWN.get(reason, (f"TLS failed: {reason.lower().replace('_', ' ') or error}", ""))
    return SslAuthenticationError(what, hint=hint)
