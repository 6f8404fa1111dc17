"""PLAIN (RFC 4616): a login that sends the password, which is compared with a stored SCRAM credential.

::

    authorisation identity NUL user name NUL password

Without TLS, everybody on the network path can read the password. The comparison computes PBKDF2, which is
slow on purpose, so a broker does it in another thread than that of its event loop.
"""

# Tests: tests/security/test_logins.py

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Final

from kafkalite.errors import IllegalSaslStateError, InvalidRequestError, SaslAuthenticationFailedError
from kafkalite.security.scram import REFUSAL, Credential, Mechanism, credential_of, salted_password, saslprep

MAX_MESSAGE_BYTES: Final = 4_096


class PlainServer:
    """The server's end of one login.

    ``find(username)`` returns, for each SCRAM mechanism, the user's credential and True, or a decoy and
    False. The password is compared with all of them, so that the time does not show which users exist.
    """

    is_slow: Final = True
    lifetime_ms: Final = None

    def __init__(self, find: Callable[[str], Sequence[tuple[Credential, bool]]]) -> None:
        self._find = find
        self._is_over = False
        self.claimed: str | None = None
        self.username: str | None = None  #: the user, once the login is complete

    def __repr__(self) -> str:
        return f"<PlainServer {self.username or 'not authenticated'}>"

    def receive(self, message: bytes) -> bytes:
        """Check the only message of the login. Return the empty response.

        Raises SaslAuthenticationFailedError, and IllegalSaslStateError for a second message.
        """
        if self._is_over:
            raise IllegalSaslStateError("the login is over; begin another one")
        self._is_over = True
        username, password = _parse(message)
        self.claimed = username
        matches = [_is_of(credential, password) and is_known for credential, is_known in self._find(username)]
        if not any(matches):
            raise SaslAuthenticationFailedError(REFUSAL)
        self.username = username
        return b""


def _is_of(credential: Credential, password: str) -> bool:
    """Whether the credential is that of the password.

    Raises SaslAuthenticationFailedError if SASLprep refuses the password.
    """
    mechanism = Mechanism(credential.mechanism)
    try:
        salted = salted_password(mechanism, password, credential.salt, credential.iterations)
    except InvalidRequestError as error:
        raise SaslAuthenticationFailedError(error.message) from None
    given = credential_of(mechanism, salted, credential.salt, credential.iterations)
    return hmac.compare_digest(given.stored_key, credential.stored_key)


def _parse(message: bytes) -> tuple[str, str]:
    """Return user name and password.

    Raises SaslAuthenticationFailedError, without showing any part of the message (S19).
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise SaslAuthenticationFailedError(f"a message of PLAIN has at most {MAX_MESSAGE_BYTES} bytes")
    try:
        authzid, name, password = message.decode().split("\0")
        username = saslprep(name, "a user name")
    except InvalidRequestError as error:
        raise SaslAuthenticationFailedError(error.message) from None
    except ValueError:
        raise SaslAuthenticationFailedError(
            "a message of PLAIN is an identity, a user name and a password in UTF-8"
        ) from None
    if authzid not in {"", username}:
        raise SaslAuthenticationFailedError(
            "a user can't act as another one: the authorisation identity is not supported"
        )
    return username, password


class PlainClient:
    """The client's end of one login."""

    def __init__(self, username: str, password: str) -> None:
        self._username, self._password = username, password

    def __repr__(self) -> str:
        return f"<PlainClient {self._username!r}>"

    def first(self) -> bytes:
        """Return the message that begins the login. It contains the password."""
        return f"\0{self._username}\0{self._password}".encode()

    def receive(self, _message: bytes) -> None:
        """Return None, because any message of the server means that it has accepted the login."""
