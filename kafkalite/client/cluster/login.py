"""The login of a client on a new connection (SASL), as steps that any kind of connection can take.

::

    steps = login.steps()
    request = next(steps)
    while True:                                  # until StopIteration, whose value is the lifetime in ms
        request = steps.send(send_and_receive(request))

``Login`` computes the salted password once for all connections. Computing it takes some milliseconds.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

import base64
import os
from collections.abc import Generator
from typing import Any, Final, NoReturn, TypeAlias

from kafkalite.client.config import CommonConfig
from kafkalite.errors import (
    BrokerError,
    ConfigError,
    IllegalSaslStateError,
    InvalidRequestError,
    SaslAuthenticationError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.security.plain import PlainClient
from kafkalite.security.sasl import PLAIN, SCRAM, ClientExchange
from kafkalite.security.scram import NONCE_BYTES, Mechanism, ScramClient, salted_password, saslprep

LoginSteps: TypeAlias = Generator[Any, Any, int]
"""Yields requests, receives the messages of their responses, and returns the session's lifetime in ms."""

#: The errors of brokers that mean that a login was refused, or is required, or is not offered.
REFUSALS: Final = (IllegalSaslStateError, SaslAuthenticationFailedError, UnsupportedSaslMechanismError)


class Login:
    """Logs in the connections of one client. ``repr`` and errors show no secret (S19).

    Raises ConfigError if the settings lack the user name or the password, or SASLprep refuses them.
    """

    def __init__(self, config: CommonConfig) -> None:
        self._mechanism = config.sasl_mechanism
        self._username = _required("sasl.username", config.sasl_username)
        self._password = _required("sasl.password", config.sasl_password)
        self._salted: dict[tuple[Mechanism, bytes, int], bytes] = {}

    def __repr__(self) -> str:
        return f"<Login {self._mechanism} {self._username!r}>"

    def steps(self) -> LoginSteps:
        """Log in on one connection, also again before its session ends; see the module.

        Raises SaslAuthenticationFailedError if the broker does not prove that it knows the password.
        """
        yield SaslHandshakeRequest(self._mechanism)
        exchange = self._exchange()
        message: bytes | None = exchange.first()
        lifetime_ms = 0
        while message is not None:
            response = yield SaslAuthenticateRequest(message)
            lifetime_ms = response.session_lifetime_ms
            message = exchange.receive(response.auth_bytes)
        return lifetime_ms

    def _exchange(self) -> ClientExchange:
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
    """Raise SaslAuthenticationError for a broker's error that is one of REFUSALS."""
    raise SaslAuthenticationError(f"{address}: {error.message}", hint=error.hint) from error


def _required(key: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(key=key, value=None, allowed="required with security.protocol=SASL_…")
    try:
        return saslprep(value, key)
    except InvalidRequestError as error:
        raise ConfigError(key=key, value=None, allowed=error.message) from None
