"""The logins of a broker's clients: which mechanisms a listener offers, and how a login ends (S7, S8).

A message of a login is answered at once, or in one of WORKERS threads if its mechanism is slow: PLAIN costs
PBKDF2, and OAUTHBEARER may read the issuer's keys. The threads serve the hosts of clients in turn. A
connection has at most one message in progress, because it serves no further request before the response to
the message. The response to a failed login is sent after ``connection.failed.authentication.delay.ms``. Then
the connection closes.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.server.client import Client, audit
from kafkalite.broker.server.error_responses import refusal
from kafkalite.broker.server.fair_threads import FairThreads
from kafkalite.broker.server.responses import Pending, Refusal, Reply, Response
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, IllegalSaslStateError
from kafkalite.log_fields import Fields
from kafkalite.metadata.security_commands import DECOY
from kafkalite.protocol.messages.security import SaslAuthenticateResponse, SaslHandshakeResponse
from kafkalite.security.plain import PlainServer
from kafkalite.security.sasl import NO_LOGIN, PLAIN, SCRAM, Exchange, Login
from kafkalite.security.scram import (
    DEFAULT_ITERATIONS,
    MIN_SALT_BYTES,
    NONCE_BYTES,
    Credential,
    Mechanism,
    ScramServer,
    decoy_credential,
)
from kafkalite.tls_options import OAUTHBEARER

logger = logging.getLogger(__name__)

WORKERS: Final = 2
Credentials = Mapping[tuple[str, int], Credential]


class _InProgress(Pending):
    """The response to a message of a login. The connection serves no further request before it."""

    is_exclusive = True


class Logins:
    """Logs in the clients of one broker. ``credentials`` returns those of the users in the metadata.

    Raises MissingExtraError if OAUTHBEARER is enabled without its packages.
    """

    def __init__(self, config: BrokerConfig, clock: Clock, credentials: Callable[[], Credentials]) -> None:
        self._config = config
        self._clock = clock
        self._credentials = credentials
        self._threads: FairThreads[bytes] | None = None  # made for the first slow login
        is_enabled = OAUTHBEARER in config.sasl_enabled_mechanisms
        self._token_exchange = _token_exchanges(config, clock) if is_enabled else None

    def new(self, is_encrypted: bool) -> Login:
        """Return the login of a new connection to a listener with or without TLS."""
        offered = self._config.offered_mechanisms(is_encrypted=is_encrypted)
        return Login(
            {name: partial(self._exchange, name) for name in offered},
            self._clock.monotonic_ms,
            max_session_ms=self._config.connections_max_reauth_ms,
        )

    def _exchange(self, name: str) -> Exchange:
        if name == PLAIN:
            return PlainServer(self._find_all)
        if name == OAUTHBEARER and self._token_exchange is not None:
            return self._token_exchange()
        mechanism = SCRAM[name]
        nonce = base64.b64encode(os.urandom(NONCE_BYTES)).decode()
        return ScramServer(mechanism, partial(self._find, mechanism), nonce)

    @cached_property
    def _decoys(self) -> dict[Mechanism, Credential]:
        """This broker's own decoys, used until the cluster's decoys are stored with its first user."""
        return {mechanism: _random_credential(mechanism) for mechanism in Mechanism}

    def _find(self, mechanism: Mechanism, user: str) -> tuple[Credential, bool]:
        """Return the user's credential and True, or a decoy and False if there is no such credential (S7).

        The decoy is always computed, because otherwise the time would show which users exist.
        """
        credentials = self._credentials()
        decoy = decoy_credential(credentials.get((DECOY, int(mechanism)), self._decoys[mechanism]), user)
        known = credentials.get((user, int(mechanism)))
        return (decoy, False) if known is None or user == DECOY else (known, True)

    def _find_all(self, user: str) -> list[tuple[Credential, bool]]:
        """Return the result of ``_find`` for each SCRAM mechanism."""
        return [self._find(mechanism, user) for mechanism in Mechanism]

    def begin(self, client: Client, mechanism: str) -> Response:
        """Begin a login with a mechanism, and return the mechanisms that the listener offers."""
        try:
            login = self._login(client)
            login.begin(mechanism)
        except BrokerError as error:
            return refusal(error)._replace(closes=True)
        return Reply(SaslHandshakeResponse(0, None, login.mechanisms))

    def step(self, client: Client, message: bytes) -> Response | Pending:
        """Pass the client's next message to its login. Return the response."""
        try:
            exchange = self._login(client).exchange
        except BrokerError as error:
            return refusal(error)._replace(closes=True)
        if exchange.is_slow:
            return self._step_in_thread(client, exchange, message)
        try:
            return self._advance(client, exchange.receive(message))
        except BrokerError as error:
            return self._refused(client, error)

    def _login(self, client: Client) -> Login:
        if client.login is None:
            raise IllegalSaslStateError(NO_LOGIN)
        return client.login

    def _step_in_thread(self, client: Client, exchange: Exchange, message: bytes) -> Pending:
        if self._threads is None:
            self._threads = FairThreads(WORKERS, "kafkalite-logins")
        working = self._threads.run(client.host, partial(exchange.receive, message))
        pending = _InProgress(working.cancel)

        def finish(done: asyncio.Future[bytes]) -> None:
            if done.cancelled() or pending.is_done:
                return
            error = done.exception()
            try:
                if error is not None:
                    raise error
                pending.resolve(self._advance(client, done.result()))
            except BrokerError as failure:
                self._refused(client, failure).then(pending.resolve)
            except Exception as failure:
                logger.error("login failed %s", Fields(peer=client.peer), exc_info=failure)
                pending.resolve(refusal(failure)._replace(closes=True))

        working.add_done_callback(finish)
        return pending

    def _advance(self, client: Client, message: bytes) -> Reply:
        """Return the response with the server's next message. Record the user if the login is complete."""
        login = self._login(client)
        is_first = login.username is None
        lifetime_ms = login.advance()
        if login.username is not None and is_first:
            client.authenticate(principal=login.principal)
            fields = Fields(peer=client.peer, principal=client.principal, mechanism=login.mechanism)
            logger.debug("client logged in %s", fields)
        return Reply(SaslAuthenticateResponse(0, None, message, lifetime_ms))

    def _refused(self, client: Client, error: BrokerError) -> Pending:
        """Return the refusal of a login, which is sent after the delay. Then the connection closes (S8)."""
        login = self._login(client)
        claimed = {} if login.claimed is None else {"user": login.claimed}
        fields = Fields(host=client.host, mechanism=login.mechanism, **claimed, reason=error.message)
        audit.warning("login refused %s", fields)
        pending = _InProgress()
        closing: Refusal = refusal(error)._replace(closes=True)
        delay_s = self._config.connection_failed_authentication_delay_ms / 1000
        timer = asyncio.get_running_loop().call_later(delay_s, pending.resolve, closing)
        pending.on_cancel = timer.cancel
        return pending

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()


def _random_credential(mechanism: Mechanism) -> Credential:
    key = partial(os.urandom, mechanism.digest_bytes)
    return Credential(int(mechanism), os.urandom(MIN_SALT_BYTES), key(), key(), DEFAULT_ITERATIONS)


def _token_exchanges(config: BrokerConfig, clock: Clock) -> Callable[[], Exchange]:
    """Return a function that begins a login with a token. Raises MissingExtraError."""
    from kafkalite.broker.server.token_keys import TokenKeys
    from kafkalite.security.oauth import OauthServer, TokenRules

    url = config.sasl_oauthbearer_jwks_endpoint_url
    assert url is not None, "OAUTHBEARER requires it"
    refresh_ms = config.sasl_oauthbearer_jwks_endpoint_refresh_ms
    keys = TokenKeys(url, refresh_ms=refresh_ms, monotonic_ms=clock.monotonic_ms)
    rules = TokenRules(
        audience=config.sasl_oauthbearer_expected_audience,
        issuer=config.sasl_oauthbearer_expected_issuer,
        sub_claim=config.sasl_oauthbearer_sub_claim_name,
        scope_claim=config.sasl_oauthbearer_scope_claim_name,
        skew_s=config.sasl_oauthbearer_clock_skew_seconds,
    )
    return partial(OauthServer, rules, keys.find, clock.wall_ms)
