"""Provides the TLS context and the login for the connections of one client, from the client's config."""

# Tests: tests/sparkbridge/test_security.py

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from kafkalite.client.config import CommonConfig
from kafkalite.errors import TLS_HINT, ConnectionFailedError, SslAuthenticationError
from kafkalite.tls_options import WITH_LOGIN, WITH_TLS

if TYPE_CHECKING:
    from kafkalite.client.cluster.login import Login
    from kafkalite.transport.tls_context import TlsContext


class ConnectionSecurity:
    """The TLS context and the login for all connections of one client.

    Raises ConfigError if the settings of the login are invalid.
    """

    def __init__(self, config: CommonConfig) -> None:
        self.tls: TlsContext | None = None  #: None if the client connects in plain text
        self.login: Login | None = None  #: None if the client does not log in
        if config.security_protocol in WITH_TLS:
            from kafkalite.transport.tls_context import TlsContext

            self.tls = TlsContext(config)
        if config.security_protocol in WITH_LOGIN:
            from kafkalite.client.cluster.login import Login

            self.login = Login(config)

    def encrypted(self, sock: socket.socket, address: str, host: str) -> ssl.SSLSocket:
        """Return a blocking socket that encrypts ``sock``, which is connected to ``address``.

        With ssl.endpoint.identification.algorithm=https, the certificate of the server must contain ``host``.
        Raises ConnectionFailedError if the server closes the connection, SslAuthenticationError if TLS fails
        for another reason, TimeoutError after the timeout of ``sock``, another OSError if the socket fails,
        and ConfigError if the files of certificates cannot be used.
        """
        assert self.tls is not None, "there is TLS"
        wrapped = self.tls.current().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except OSError as error:
            wrapped.close()
            if isinstance(error, ssl.SSLEOFError | ConnectionError):
                closed = "the server closed the connection during the TLS handshake"
                raise ConnectionFailedError(closed, hint=TLS_HINT) from error
            raise self.refusal(error, address) or error from error
        return wrapped

    def refusal(self, error: OSError, address: str) -> SslAuthenticationError | None:
        """Return the error that explains ``error`` of an encrypted socket, or None if it is no SSLError.

        With TLS 1.3, the server's refusal of a client certificate arrives after the handshake.
        """
        if not isinstance(error, ssl.SSLError):
            return None
        from kafkalite.transport.tls import explain

        reason = explain(error, is_server=False)
        return SslAuthenticationError(f"cannot connect to {address}: {reason.message}", hint=reason.hint)
