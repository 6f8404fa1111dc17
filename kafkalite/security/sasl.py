"""The logins of one connection (SASL), without I/O (S7, S8).

A client chooses a mechanism, then both sides exchange messages that only the mechanism understands. This
module does not depend on the protocol that carries the messages.

A client may log in again on the same connection (KIP-368), as the same user and with the same mechanism.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kafkalite.errors import (
    IllegalSaslStateError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafkalite.security.acls import RESERVED, USER_PREFIX
from kafkalite.security.scram import Mechanism
from kafkalite.tls_options import OAUTHBEARER

SCRAM: Final = {mechanism.label: mechanism for mechanism in Mechanism}
PLAIN: Final = "PLAIN"
#: These send the password or token itself, so they need TLS.
REVEALING: Final = frozenset({PLAIN, OAUTHBEARER})

LOGIN_REQUIRED: Final = (
    "this listener requires a login: set security.protocol of the client to SASL_SSL or SASL_PLAINTEXT, and"
    " sasl.username and sasl.password, or the token of sasl.mechanism=OAUTHBEARER"
)
NO_LOGIN: Final = "this listener requires no login: set security.protocol of the client to SSL or PLAINTEXT"
SESSION_ENDED: Final = "the session of this connection has ended; log in again"


class Exchange(Protocol):
    """The server's end of one login with one mechanism."""

    @property
    def username(self) -> str | None:
        """The user; None before the login is complete."""
        ...

    @property
    def claimed(self) -> str | None:
        """The user that the client claims to be, which is not proved; None if it is not known."""
        ...

    @property
    def lifetime_ms(self) -> int | None:
        """How long the proof of a complete login, such as a token, stays valid; None if it never expires."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether ``receive`` takes longer than an event loop should be blocked."""
        ...

    def receive(self, message: bytes, /) -> bytes:
        """Return the response to the client's next message.

        Raises SaslAuthenticationFailedError and IllegalSaslStateError. After either, the login can't be
        continued.
        """
        ...


class ClientExchange(Protocol):
    """The client's end of one login with one mechanism."""

    def first(self) -> bytes:
        """Return the message that begins the login."""
        ...

    def receive(self, message: bytes, /) -> bytes | None:
        """Return the next message to send, or None if the login is complete."""
        ...


class Login:
    """The server's side of the logins of one connection.

    ``mechanisms`` maps the name of each mechanism that the listener offers to a function that returns a new
    exchange. ``now_ms`` returns the time of a monotonic clock. A complete login begins a session, which ends
    after ``max_session_ms`` (0: no limit), or earlier if the proof of the login expires.
    """

    def __init__(
        self,
        mechanisms: Mapping[str, Callable[[], Exchange]],
        now_ms: Callable[[], int],
        *,
        max_session_ms: int = 0,
    ) -> None:
        self._mechanisms = mechanisms
        self._now_ms = now_ms
        self._max_session_ms = max_session_ms
        self._exchange: Exchange | None = None
        self._ends_ms: int | None = None  # the session
        self.mechanism = ""  #: the mechanism that the client has chosen
        self.username: str | None = None  #: the user, once a login is complete

    def __repr__(self) -> str:
        return f"<Login {self.mechanism or 'not begun'}, {self.username or 'not authenticated'}>"

    @property
    def mechanisms(self) -> list[str]:
        return list(self._mechanisms)

    @property
    def principal(self) -> str:
        """The principal of the user. Read it only after a complete login."""
        assert self.username is not None, "no user has logged in"
        return f"{USER_PREFIX}{self.username}"

    @property
    def claimed(self) -> str | None:
        """The user that the client claims to be in a login that is not complete; None if it is not known."""
        return None if self._exchange is None else self._exchange.claimed

    @property
    def problem(self) -> str | None:
        """The reason why the client may send only login messages now; None if it may send other requests."""
        if self.username is None:
            return LOGIN_REQUIRED
        if self._ends_ms is not None and self._now_ms() >= self._ends_ms:
            return SESSION_ENDED
        return None

    def begin(self, mechanism: str) -> None:
        """Begin a login.

        Raises UnsupportedSaslMechanismError, and IllegalSaslStateError if another login has begun, or if the
        client logs in again with another mechanism.
        """
        if self._exchange is not None:
            raise IllegalSaslStateError(f"a login with {self.mechanism} has begun already")
        if mechanism not in self._mechanisms:
            offered = ", ".join(self._mechanisms)
            raise UnsupportedSaslMechanismError(
                f"this listener does not offer {mechanism[:50]!r}; it offers {offered}"
            )
        if self.username is not None and mechanism != self.mechanism:
            raise IllegalSaslStateError(f"log in again with {self.mechanism}, not {mechanism}")
        self.mechanism = mechanism
        self._exchange = self._mechanisms[mechanism]()

    @property
    def exchange(self) -> Exchange:
        """The exchange that has begun. Raises IllegalSaslStateError if there is none."""
        if self._exchange is None:
            raise IllegalSaslStateError("a login begins with its mechanism (SaslHandshake)")
        return self._exchange

    def advance(self) -> int:
        """Begin a session if the exchange is complete. Call it after the exchange has received a message.

        Return the lifetime of the session in ms; 0 if it has no end, or the login is not complete. Raises
        SaslAuthenticationFailedError if a client that logs in again is another user, or if the user's
        principal is RESERVED. Raises IllegalSaslStateError if no exchange has begun.
        """
        exchange = self.exchange
        username = exchange.username
        if username is None:
            return 0
        if f"{USER_PREFIX}{username}" in RESERVED:
            raise SaslAuthenticationFailedError(f"the name {username!r} is reserved")
        if self.username not in {None, username}:
            raise SaslAuthenticationFailedError("a connection can't change its user; open another one")
        self.username, self._exchange = username, None
        limits = [
            limit for limit in (self._max_session_ms or None, exchange.lifetime_ms) if limit is not None
        ]
        lifetime_ms = min(limits, default=0)
        self._ends_ms = self._now_ms() + lifetime_ms if limits else None
        return lifetime_ms
