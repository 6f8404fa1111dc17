"""The SASL login of a client on a connection, as a generator that does no I/O.

The generator yields the requests. The caller sends them, and passes back the messages of the responses::

    steps = login.steps(await login.exchange(timeout_ms))
    try:
        request = next(steps)
        while True:
            request = steps.send(send_and_receive(request))
    except StopIteration as complete:
        lifetime_ms = complete.value  # of the session

A lifetime of 0 means that the session does not end.

``Login`` keeps the salted password (SCRAM) for further connections, because it takes some milliseconds to
compute. A token (OAUTHBEARER) is fetched for each login.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

import asyncio
import base64
import inspect
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias
from urllib.parse import unquote

from kafkalite.client.config import CommonConfig, TokenProvider
from kafkalite.errors import (
    BrokerError,
    ClusterAuthorizationFailedError,
    ConfigError,
    IllegalSaslStateError,
    InconsistentClusterIdError,
    InvalidRequestError,
    SaslAuthenticationError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.security.oauth import OauthClient, is_token
from kafkalite.security.plain import PlainClient
from kafkalite.security.sasl import PLAIN, SCRAM, ClientExchange
from kafkalite.security.scram import NONCE_BYTES, Mechanism, ScramClient, salted_password, saslprep
from kafkalite.tls_options import OAUTHBEARER

LoginSteps: TypeAlias = Generator[Any, Any, int]
"""Yields requests, receives the messages of their responses, and returns the session's lifetime in ms."""

#: A client logs in again after this part of its session, as Kafka's do (KIP-368).
MIN_SESSION_MS: Final = 1_000  #: a session that is shorter, or negative, counts as this long
RENEWAL_FACTOR: Final = 0.85
#: After this part of its session, a client keeps its requests until the new login is complete: the broker
#: would refuse those that arrive after the session, and close the connection.
PAUSE_FACTOR: Final = 0.95
#: The errors of brokers that mean that a login was refused, or is required, or is not offered.
REFUSALS: Final = (
    ClusterAuthorizationFailedError,
    IllegalSaslStateError,
    InconsistentClusterIdError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)


class ConnectionLogin(Protocol):
    """Logs in connections: as a user (``Login``), or with the cluster's secret (``OperatorLogin``)."""

    async def exchange(self, timeout_ms: int, /) -> Any:
        """Return the argument of ``steps`` for one login.

        Raises SaslAuthenticationError if there is no token to log in with.
        """

    def steps(self, exchange: Any, /) -> LoginSteps: ...


_NO_TOKEN: Final = "check sasl.oauth.token.provider, or the file in sasl.oauthbearer.token.endpoint.url"


class Login:
    """Logs in the connections of one client as a user. ``repr`` and error messages show no secret (S19).

    Raises ConfigError if a mechanism other than OAUTHBEARER lacks sasl.username or sasl.password, or if
    SASLprep refuses one of them.
    """

    def __init__(self, config: CommonConfig) -> None:
        self._mechanism = config.sasl_mechanism
        self._provider: TokenProvider | None = None
        self._username = self._password = ""
        if self._mechanism == OAUTHBEARER:
            self._provider = config.sasl_oauth_token_provider or partial(
                _token_of_file, config.sasl_oauthbearer_token_endpoint_url or ""
            )
        else:
            self._username = _required("sasl.username", config.sasl_username)
            self._password = _required("sasl.password", config.sasl_password)
        self._salted: dict[tuple[Mechanism, bytes, int], bytes] = {}

    def __repr__(self) -> str:
        return f"<Login {self._mechanism} {self._username!r}>"

    def steps(self, exchange: ClientExchange) -> LoginSteps:
        """Yield the requests of one login on a connection; see the module.

        Raises SaslAuthenticationFailedError if a message of the broker is wrong, for example (with SCRAM) if
        it does not prove that the broker knows the password.
        """
        yield SaslHandshakeRequest(self._mechanism)
        message: bytes | None = exchange.first()
        lifetime_ms = 0
        while message is not None:
            response = yield SaslAuthenticateRequest(message)
            lifetime_ms = response.session_lifetime_ms
            message = exchange.receive(response.auth_bytes)
        return lifetime_ms

    async def exchange(self, timeout_ms: int) -> ClientExchange:
        """Return the client's end of one login. Raises SaslAuthenticationError if no token can be used."""
        if self._provider is not None:
            return OauthClient(await _token(self._provider, timeout_ms))
        if self._mechanism == PLAIN:
            return PlainClient(self._username, self._password)
        nonce = base64.b64encode(os.urandom(NONCE_BYTES)).decode()
        return ScramClient(
            SCRAM[self._mechanism], self._username, self._password, nonce, salt_password=self._salt
        )

    def _salt(self, mechanism: Mechanism, password: str, salt: bytes, iterations: int) -> bytes:
        key = (mechanism, salt, iterations)
        salted = self._salted.get(key)
        if salted is None:
            self._salted.clear()  # a server can't make the client remember many
            salted = self._salted[key] = salted_password(mechanism, password, salt, iterations)
        return salted


def raise_refusal(address: str, error: BrokerError) -> NoReturn:
    """Raise SaslAuthenticationError with the message and hint of ``error``, which is one of REFUSALS."""
    raise SaslAuthenticationError(f"{address}: {error.message}", hint=error.hint) from error


async def _token(provider: TokenProvider, timeout_ms: int) -> str:
    """Return a token of ``provider``, which may block. Raises SaslAuthenticationError.

    A SaslAuthenticationError of the provider is raised unchanged. Any other exception of the provider becomes
    the cause of a SaslAuthenticationError, without its text, which may contain secrets.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            found = provider() if inspect.iscoroutinefunction(provider) else await asyncio.to_thread(provider)
            token = await found if inspect.isawaitable(found) else found
    except SaslAuthenticationError:
        raise
    except Exception as error:
        reason = f"no token in {timeout_ms} ms" if isinstance(error, TimeoutError) else type(error).__name__
        raise SaslAuthenticationError(
            f"there is no token to log in with: {reason}", hint=_NO_TOKEN
        ) from error
    if not is_token(token):
        raise SaslAuthenticationError(
            "there is no token to log in with: it must be one line of ASCII without spaces", hint=_NO_TOKEN
        )
    return token


def _token_of_file(url: str) -> str:
    path = unquote(url.removeprefix("file:").removeprefix("//")) if url.startswith("file:") else url
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise SaslAuthenticationError(
            f"the token in {path} can't be read: {reason}", hint=_NO_TOKEN
        ) from None


def _required(key: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(key=key, value=None, allowed="required with security.protocol=SASL_…")
    try:
        return saslprep(value, key)
    except InvalidRequestError as error:
        raise ConfigError(key=key, value=None, allowed=error.message) from None
