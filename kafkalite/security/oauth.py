"""OAUTHBEARER (RFC 7628): a login with a token that an issuer has signed, as sans-IO objects (S7).

::

    client                                       server
    first()                           →
      n,,^Aauth=Bearer <token>^A^A                receive(), and ``username`` is set
                                      ←             (empty)

The token is a JWT (RFC 7519) whose signature the server checks with a key of the issuer's key set (JWKS, RFC
7517). Everybody who obtains a token can log in with it until it expires, so use OAUTHBEARER with TLS. When
the token of a login expires, the session of the connection ends, too.

By RFC 7628, a server responds to an invalid token with a JSON text, and fails the login after the client's
next message. This server fails the login at once, so that no client can avoid the delay and the audit line of
a failed login by sending no second message.

Keys and times are arguments. ``jwt`` (PyJWT, the extra ``oauth``) is imported at its first use.
"""

# Tests: tests/security/test_oauth.py

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kafkalite.errors import (
    IllegalSaslStateError,
    InvalidRequestError,
    MissingExtraError,
    SaslAuthenticationFailedError,
)
from kafkalite.limits import KIB, MAX_USER_NAME_BYTES
from kafkalite.security.scram import saslprep

MAX_MESSAGE_BYTES: Final = 16 * KIB  #: of the client's message, which has one token
#: The longest session of one token. A token that is valid for longer is presented again.
MAX_SESSION_MS: Final = 24 * 3_600_000
MIN_RSA_BITS: Final = 2_048
#: The algorithms by type or curve of a key (RFC 7518, RFC 8037): all have a public and a private key. A key
#: set can't add others, so neither ``none`` nor an HMAC with a public key as its secret is ever accepted.
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
}
_SEPARATOR: Final = "\x01"
_SCHEME: Final = "auth=Bearer "


class VerificationKey(NamedTuple):
    """A public key of an issuer, and the algorithms of the signatures that it may verify."""

    key: Any
    algorithms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must contain, besides a valid signature.

    The token must name one of the audiences in ``audience``, and ``issuer`` as its issuer. If ``audience`` is
    empty, any audience is accepted; if ``issuer`` is None, any issuer.
    """

    audience: tuple[str, ...] = ()
    issuer: str | None = None
    sub_claim: str = "sub"  #: the claim with the name of the user
    scope_claim: str = "scope"
    skew_s: int = 30  #: how much the clocks of issuer and broker may differ


class Token(NamedTuple):
    """The contents of a valid token."""

    username: str
    lifetime_ms: int  #: how long the token stays valid, 1 or more


def read_key_set(text: bytes) -> dict[str, VerificationKey]:
    """Return the keys of a key set by their id (``kid``; "" for a key without one).

    Skips keys that are malformed, are not for signatures, have no algorithm of ALGORITHMS, or are RSA keys of
    less than MIN_RSA_BITS. Raises ValueError if the text is no key set or has no usable key, and
    MissingExtraError.
    """
    jwt = _jwt()
    try:
        entries = json.loads(text)["keys"]
        found = [entry for entry in entries if entry.get("use", "sig") == "sig"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("it is no JSON Web Key Set: an object with a list of 'keys'") from error
    keys: dict[str, VerificationKey] = {}
    for entry in found:
        algorithms = ALGORITHMS.get(str(entry.get("crv", entry.get("kty"))), ())
        if "alg" in entry:
            algorithms = tuple(name for name in algorithms if name == entry["alg"])
        if not algorithms:
            continue
        try:
            key = jwt.PyJWK(entry, algorithm=algorithms[0]).key
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        if getattr(key, "key_size", MIN_RSA_BITS) < MIN_RSA_BITS and entry["kty"] == "RSA":
            continue
        keys[str(entry.get("kid", ""))] = VerificationKey(key, algorithms)
    if not keys:
        raise ValueError(f"it has no key for signatures of {', '.join(sum(ALGORITHMS.values(), ()))}")
    return keys


def key_of(keys: Mapping[str, VerificationKey], kid: str | None) -> VerificationKey | None:
    """Return the key with the id ``kid``, or None if there is none.

    If ``kid`` is None, return the only key of the set, or the key without an id if there are several keys.
    """
    if kid is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(kid or "")


def validated(
    text: str, find_key: Callable[[str | None], VerificationKey], rules: TokenRules, now_ms: int
) -> Token:
    """Check the token ``text``, and return its contents.

    ``find_key`` returns the key with an id, and raises SaslAuthenticationFailedError if there is none.
    ``now_ms`` is the time since the Unix epoch. Raises SaslAuthenticationFailedError if the token is not
    valid. The error does not contain the token, and reveals claims only if the signature is valid.
    """
    jwt = _jwt()
    try:
        key = find_key(jwt.get_unverified_header(text).get("kid"))
        # This broker's clock decides about times, below.
        options = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False}
        claims = jwt.decode(
            text,
            key.key,
            algorithms=list(key.algorithms),
            audience=rules.audience or None,
            issuer=rules.issuer,
            options={**options, "verify_aud": bool(rules.audience)},
        )
    except jwt.InvalidAlgorithmError:
        raise _failed("its algorithm is not one of its key") from None
    except jwt.InvalidSignatureError:
        raise _failed("its signature is wrong") from None
    except jwt.InvalidAudienceError:
        raise _failed("it is for another audience") from None
    except jwt.InvalidIssuerError:
        raise _failed("it is from another issuer") from None
    except jwt.MissingRequiredClaimError as error:
        raise _failed(f"it lacks the claim {error.claim!r}") from None
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise _failed("it is no signed JWT") from None
    return Token(_username(claims, rules), _lifetime_ms(claims, rules, now_ms))


def _lifetime_ms(claims: Mapping[str, Any], rules: TokenRules, now_ms: int) -> int:
    """Return for how many ms the token stays valid, at most MAX_SESSION_MS.

    Raises SaslAuthenticationFailedError if it is not valid now, or never expires.
    """
    skew_ms = rules.skew_s * 1000
    expires_ms = _time_ms(claims, "exp")
    if expires_ms is None:
        raise _failed("it lacks the claim 'exp': a token must expire")
    if now_ms >= expires_ms + skew_ms:
        raise _failed(f"it expired {(now_ms - expires_ms) // 1000} s ago")
    for claim in ("nbf", "iat"):
        begins_ms = _time_ms(claims, claim)
        if begins_ms is not None and begins_ms > now_ms + skew_ms:
            raise _failed(f"it is not valid yet, by {(begins_ms - now_ms) // 1000} s: compare the clocks")
    return min(math.ceil(expires_ms + skew_ms - now_ms), MAX_SESSION_MS)


def _time_ms(claims: Mapping[str, Any], claim: str) -> float | None:
    """Return the time in a claim in ms since the Unix epoch, or None if the token does not have the claim.

    Raises SaslAuthenticationFailedError if the claim is not a time.
    """
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        raise _failed(f"its claim {claim!r} is no time")
    return value * 1000


def _username(claims: Mapping[str, Any], rules: TokenRules) -> str:
    """Return the name of the user, exactly as the issuer wrote it.

    Raises SaslAuthenticationFailedError for a name that SASLprep would change: otherwise two users of the
    issuer could become one user here.
    """
    name, scope = claims.get(rules.sub_claim), claims.get(rules.scope_claim, "")
    scopes = scope if isinstance(scope, list) else [scope]
    if not all(isinstance(one, str) for one in scopes):
        raise _failed(f"its claim {rules.scope_claim!r} is neither a text nor a list of texts")
    try:
        is_fit = isinstance(name, str) and saslprep(name, "a user name") == name
    except InvalidRequestError:
        is_fit = False
    if not isinstance(name, str) or not is_fit or len(name.encode()) > MAX_USER_NAME_BYTES:
        raise _failed(
            f"its claim {rules.sub_claim!r} is no user name: a text of 1 to {MAX_USER_NAME_BYTES} bytes that"
            " SASLprep does not change"
        )
    return name


class OauthServer:
    """The server's end of one login.

    ``find_key`` is passed to ``validated``. ``now_ms`` returns the time since the Unix epoch. ``receive`` may
    block, because ``find_key`` may read the key set again.
    """

    is_slow: Final = True

    def __init__(
        self, rules: TokenRules, find_key: Callable[[str | None], VerificationKey], now_ms: Callable[[], int]
    ) -> None:
        self._rules = rules
        self._find_key = find_key
        self._now_ms = now_ms
        self._is_over = False
        self.claimed: str | None = None
        self.username: str | None = None  #: the user, once the login is complete
        self.lifetime_ms: int | None = None

    def __repr__(self) -> str:
        return f"<OauthServer {self.username or 'not authenticated'}>"

    def receive(self, message: bytes) -> bytes:
        """Check the only message of the login. Return the empty response.

        Raises SaslAuthenticationFailedError, and IllegalSaslStateError for a second message.
        """
        if self._is_over:
            raise IllegalSaslStateError("the login is over; begin another one")
        self._is_over = True
        identity, text = _parse(message)
        token = validated(text, self._find_key, self._rules, self._now_ms())
        self.claimed = token.username
        if identity not in {"", token.username}:
            raise SaslAuthenticationFailedError(
                "a user can't act as another one: the authorisation identity is not supported"
            )
        self.username, self.lifetime_ms = token
        return b""


def _parse(message: bytes) -> tuple[str, str]:
    """Return the authorisation identity and the token.

    Raises SaslAuthenticationFailedError, without showing any part of the message (S19).
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise SaslAuthenticationFailedError(
            f"a message of OAUTHBEARER has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}"
        )
    header, separator, rest = bytes(message).decode("utf-8", "replace").partition(_SEPARATOR)
    pairs = rest.split(_SEPARATOR)
    tokens = [
        pair[len(_SCHEME) :].strip() for pair in pairs if pair[: len(_SCHEME)].lower() == _SCHEME.lower()
    ]
    parts = header.split(",")
    is_whole = separator and pairs[-2:] == ["", ""] and len(parts) == 3 and parts[0] in {"n", "y"}
    if not is_whole or len(tokens) != 1 or not (parts[1] == "" or parts[1].startswith("a=")):
        raise SaslAuthenticationFailedError(
            "a message of OAUTHBEARER is n,,^Aauth=Bearer TOKEN^A^A (RFC 7628)"
        )
    return parts[1][2:].replace("=2C", ",").replace("=3D", "="), tokens[0]


class OauthClient:
    """The client's end of one login."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._was_refused = False

    def __repr__(self) -> str:
        return "<OauthClient>"

    def first(self) -> bytes:
        """Return the message that begins the login. It contains the token."""
        return f"n,,{_SEPARATOR}{_SCHEME}{self._token}{_SEPARATOR * 2}".encode()

    def receive(self, message: bytes) -> bytes | None:
        """Return None if ``message`` is empty: the server has accepted the login.

        Any other message is the reason for a refusal (RFC 7628). Return the message that the server awaits
        before it fails the login. Raises SaslAuthenticationFailedError if the server sends a second reason.
        """
        if not message:
            return None
        if self._was_refused:
            raise _failed("the server sent a second message")
        self._was_refused = True
        return _SEPARATOR.encode()


def is_token(token: object) -> bool:
    """Whether ``token`` can be sent: a text of one or more printable ASCII characters, without spaces."""
    is_text = isinstance(token, str) and token.isascii() and token.isprintable()
    return is_text and bool(token) and " " not in str(token)


def _failed(reason: str) -> SaslAuthenticationFailedError:
    return SaslAuthenticationFailedError(f"the token is refused: {reason}")


def check_installed() -> None:
    """Raise MissingExtraError unless the packages of the extra ``oauth`` are installed."""
    _jwt()


def _jwt() -> Any:
    """Return the module ``jwt`` with its asymmetric algorithms. Raises MissingExtraError."""
    try:
        import cryptography  # noqa: F401
        import jwt
    except ImportError as error:
        raise MissingExtraError("OAUTHBEARER", "PyJWT", "oauth") from error
    return jwt
