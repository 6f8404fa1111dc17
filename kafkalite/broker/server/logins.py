"""The logins of a broker's clients: which mechanisms a listener offers, and how a login ends (S7, S8).

A message of a login is answered at once, or in one of WORKERS threads if its mechanism is slow: PLAIN costs
PBKDF2. A connection has at most one message in progress, since no further request is read before its
response. The answer to a failed login waits for ``connection.failed.authentication.delay.ms``, then the
connection closes.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.server.client import Client, audit
from kafkalite.broker.server.error_responses import refusal
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

logger = logging.getLogger(__name__)

WORKERS: Final = 2
Credentials = Mapping[tuple[str, int], Credential]


class _InProgress(Pending):
    """The response to a message of a login. The connection serves no further request before it."""

    is_exclusive = True


class Logins:
    """Logs in the clients of one broker. ``credentials`` returns those of the users in the metadata."""

    def __init__(self, config: BrokerConfig, clock: Clock, credentials: Callable[[], Credentials]) -> None:
        self._config = config
        self._clock = clock
        self._credentials = credentials
        self._executor: Executor | None = None  # made for the first slow login
        # Until the cluster has a decoy of its own, which the first user brings.
        self._decoys = {mechanism: _random_credential(mechanism) for mechanism in Mechanism}

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
            return PlainServer(self._find_any)
        mechanism = SCRAM[name]
        nonce = base64.b64encode(os.urandom(NONCE_BYTES)).decode()
        return ScramServer(mechanism, partial(self._find, mechanism), nonce)

    def _find(self, mechanism: Mechanism, user: str) -> tuple[Credential, bool]:
        """Return the user's credential and True, or one that looks like it and False (S7)."""
        credentials = self._credentials()
        known = credentials.get((user, int(mechanism)))
        if known is not None and user != DECOY:
            return known, True
        decoy = credentials.get((DECOY, int(mechanism)), self._decoys[mechanism])
        return decoy_credential(decoy, user), False

    def _find_any(self, user: str) -> tuple[Credential, bool]:
        """Return a credential of the user with either mechanism; see ``_find``."""
        found = self._find(Mechanism.SCRAM_SHA_512, user)
        if not found[1] and (user, int(Mechanism.SCRAM_SHA_256)) in self._credentials():
            return self._find(Mechanism.SCRAM_SHA_256, user)
        return found

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
        if self._executor is None:
            self._executor = ThreadPoolExecutor(WORKERS, thread_name_prefix="kafkalite-logins")
        working = asyncio.get_running_loop().run_in_executor(self._executor, exchange.receive, message)
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
        fields = Fields(host=client.host, mechanism=login.mechanism, reason=error.message)
        audit.warning("login refused %s", fields)
        pending = _InProgress()
        closing: Refusal = refusal(error)._replace(closes=True)
        delay_s = self._config.connection_failed_authentication_delay_ms / 1000
        timer = asyncio.get_running_loop().call_later(delay_s, pending.resolve, closing)
        pending.on_cancel = timer.cancel
        return pending

    def close(self) -> None:
        """End the threads."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _random_credential(mechanism: Mechanism) -> Credential:
    key = partial(os.urandom, mechanism.digest_bytes)
    return Credential(int(mechanism), os.urandom(MIN_SALT_BYTES), key(), key(), DEFAULT_ITERATIONS)
