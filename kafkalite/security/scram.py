"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): both ends of a login, as sans-IO objects (S7).

A client proves that it knows a password, and the server proves that it knows the user's credential. Neither
sends the password. ::

    client                                        server
    first()                            →
      n,,n=alice,r=<client nonce>                 receive()
                                       ←            r=<client and server nonce>,s=<salt>,i=<iterations>
    receive()                          →
      c=biws,r=<both nonces>,p=<proof>            receive(), and ``username`` is set
                                       ←            v=<server signature>
    receive() returns None

The server stores a salted ``Credential``. It does not suffice to log in, but it lets its reader test
guesses of the password. There is no channel binding; a client on an encrypted connection checks the server's
certificate.

Nonces and salts are arguments, since this module has no source of random numbers.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import stringprep
import unicodedata
from collections.abc import Callable
from typing import Final, NamedTuple

from kafkalite.errors import IllegalSaslStateError, InvalidRequestError, SaslAuthenticationFailedError

MIN_ITERATIONS: Final = 4_096  #: the least that RFC 7677 allows
DEFAULT_ITERATIONS: Final = 8_192
MAX_ITERATIONS: Final = 100_000  #: bounds a client's work for a server that it does not trust yet
MIN_SALT_BYTES: Final = 16
MAX_SALT_BYTES: Final = 64
NONCE_BYTES: Final = 24  #: random bytes in a nonce
MAX_MESSAGE_BYTES: Final = 4_096
_GS2_NO_BINDING: Final = "n,,"  # no channel binding, no authorisation identity
#: The same text for every failed login, so that it does not reveal which users exist.
REFUSAL: Final = "authentication failed: unknown user, or wrong password"


class Mechanism(enum.IntEnum):
    """The SCRAM mechanisms, with Kafka's numbers."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def label(self) -> str:
        """The name in SASL, such as ``SCRAM-SHA-256``."""
        return self.name.replace("_", "-")

    @property
    def digest(self) -> str:
        """The name of the hash in ``hashlib``."""
        return "sha256" if self is Mechanism.SCRAM_SHA_256 else "sha512"

    @property
    def digest_bytes(self) -> int:
        return 32 if self is Mechanism.SCRAM_SHA_256 else 64


class Credential(NamedTuple):
    """What a server stores instead of a password. ``repr`` shows no secret (S19)."""

    mechanism: int  #: a Mechanism
    salt: bytes
    stored_key: bytes  #: the hash of the client's key
    server_key: bytes
    iterations: int  #: of PBKDF2

    def __repr__(self) -> str:
        return f"Credential({Mechanism(self.mechanism).label}, iterations={self.iterations})"


def salted_password(mechanism: Mechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """Return PBKDF2 of the password. Its cost is that of ``iterations`` HMACs.

    Raises InvalidRequestError for a password that is empty or that SASLprep refuses (RFC 4013).
    """
    prepared = saslprep(password, "a password").encode()
    return hashlib.pbkdf2_hmac(mechanism.digest, prepared, salt, iterations)


def credential_of(mechanism: Mechanism, salted: bytes, salt: bytes, iterations: int) -> Credential:
    """Return the credential to store for a salted password.

    Raises InvalidRequestError if a length or the number of iterations is out of bounds.
    """
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise InvalidRequestError(
            f"a SCRAM credential has {MIN_ITERATIONS} to {MAX_ITERATIONS} iterations, not {iterations}"
        )
    if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
        raise InvalidRequestError(
            f"a SCRAM salt has {MIN_SALT_BYTES} to {MAX_SALT_BYTES} bytes, not {len(salt)}"
        )
    if len(salted) != mechanism.digest_bytes:
        raise InvalidRequestError(
            f"a salted password of {mechanism.label} has {mechanism.digest_bytes} bytes, not {len(salted)}"
        )
    client_key = _hmac(mechanism, salted, b"Client Key")
    stored_key = hashlib.new(mechanism.digest, client_key).digest()
    return Credential(mechanism, salt, stored_key, _hmac(mechanism, salted, b"Server Key"), iterations)


def decoy_credential(decoy: Credential, username: str) -> Credential:
    """Return the credential to use for an unknown user.

    ``decoy`` is a random credential that belongs to no user. The same name always gets the same salt, as a
    known user does. Without knowledge of ``decoy``, the salt looks random.
    """
    salt = _hmac(Mechanism(decoy.mechanism), decoy.server_key, username.encode())[: len(decoy.salt)]
    return decoy._replace(salt=salt)


class ScramServer:
    """The server's end of one login.

    ``find(username)`` returns a credential and whether the user exists. The credential is the user's or, for
    an unknown user, a decoy, so that the responses do not show which users exist.
    """

    is_slow: Final = False
    lifetime_ms: Final = None

    def __init__(
        self, mechanism: Mechanism, find: Callable[[str], tuple[Credential, bool]], nonce: str
    ) -> None:
        self._mechanism = mechanism
        self._find = find
        self._nonce = nonce
        self._steps = iter((self._on_first, self._on_final))
        self._credential: Credential | None = None
        self.claimed: str | None = None  #: the user that the client has claimed to be, and not yet proved
        self._is_known = False
        self._transcript = ""  # the messages that both proofs sign
        self._gs2_header = ""
        self.username: str | None = None  #: the user, once the login is complete

    def __repr__(self) -> str:
        return f"<ScramServer {self._mechanism.label}, {self.username or 'not authenticated'}>"

    def receive(self, message: bytes) -> bytes:
        """Return the response to the client's next message.

        Raises SaslAuthenticationFailedError if the login has failed, and IllegalSaslStateError for a message
        after the end of the login. In both cases the login can't be continued.
        """
        step = next(self._steps, None)
        if step is None:
            raise IllegalSaslStateError("the login is over; begin another one")
        try:
            return step(_decoded(message)).encode()
        except BaseException:
            self._steps = iter(())
            raise

    def _on_first(self, message: str) -> str:
        """Read the client's first message. Return the response with both nonces, salt and iterations."""
        binding, authzid, bare = _split(message, 3)
        if binding not in ("n", "y"):
            raise _failed("channel binding is not supported")
        name, nonce = _attributes(bare, "n", "r")
        try:
            username = saslprep(_unescaped(name), "a user name")
        except InvalidRequestError as error:
            raise _failed(error.message) from error
        if authzid:
            identity = _unescaped(_attribute(authzid, "a"))
            if identity != username:
                raise _failed("a user can't act as another one: the authorisation identity is not supported")
        if not nonce:
            raise _failed("the client's nonce is empty")
        self.claimed = username
        credential, self._is_known = self._find(username)
        self._credential = credential
        self._gs2_header = f"{binding},{authzid},"
        self._nonce = nonce + self._nonce
        reply = f"r={self._nonce},s={_base64(credential.salt)},i={credential.iterations}"
        self._transcript = f"{bare},{reply}"
        return reply

    def _on_final(self, message: str) -> str:
        """Check the client's proof. Return the message with the server's signature."""
        credential, mechanism = self._credential, self._mechanism
        assert credential is not None, "the first message was accepted"
        without_proof, separator, proof_text = message.rpartition(",p=")
        binding, nonce = _attributes(without_proof, "c", "r")
        if not separator or _from_base64(binding) != self._gs2_header.encode():
            raise _failed("the client's final message has no proof, or another header than the first one")
        if not hmac.compare_digest(nonce.encode(), self._nonce.encode()):
            raise _failed("the nonce is not that of this login")
        proof = _from_base64(proof_text)
        if len(proof) != mechanism.digest_bytes:
            raise _failed(f"a proof has {mechanism.digest_bytes} bytes, not {len(proof)}")
        signed = f"{self._transcript},{without_proof}".encode()
        client_key = _xor(proof, _hmac(mechanism, credential.stored_key, signed))
        has_proved = hmac.compare_digest(
            hashlib.new(mechanism.digest, client_key).digest(), credential.stored_key
        )
        signature = _hmac(mechanism, credential.server_key, signed)
        if not (has_proved and self._is_known):
            raise SaslAuthenticationFailedError(REFUSAL)
        self.username = self.claimed
        return f"v={_base64(signature)}"


class ScramClient:
    """The client's end of one login.

    Raises InvalidRequestError if SASLprep refuses the user name or the password. ``salt_password`` is
    ``salted_password``, or a function that caches its results.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        username: str,
        password: str,
        nonce: str,
        *,
        salt_password: Callable[[Mechanism, str, bytes, int], bytes] = salted_password,
    ) -> None:
        self._salt_password = salt_password
        self._mechanism = mechanism
        self._username = saslprep(username, "a user name")
        self._password = saslprep(password, "a password")
        self._nonce = nonce
        self._steps = iter((self._on_first, self._on_final))
        self._signature = b""

    def __repr__(self) -> str:
        return f"<ScramClient {self._mechanism.label} {self._username!r}>"

    def first(self) -> bytes:
        """Return the message that begins the login."""
        return f"{_GS2_NO_BINDING}{self._bare()}".encode()

    def receive(self, message: bytes) -> bytes | None:
        """Return the next message to send, or None: the login is complete, and the server has proved itself.

        Raises SaslAuthenticationFailedError if the message is wrong or is the server's refusal, and
        IllegalSaslStateError for a message after the end of the login. Then close the connection.
        """
        step = next(self._steps, None)
        if step is None:
            raise IllegalSaslStateError("the login is over; begin another one")
        try:
            return step(_decoded(message))
        except BaseException:
            self._steps = iter(())
            raise

    def _bare(self) -> str:
        name = self._username.replace("=", "=3D").replace(",", "=2C")
        return f"n={name},r={self._nonce}"

    def _on_first(self, message: str) -> bytes:
        """Read salt and iterations. Return the message with the proof."""
        nonce, salt_text, iterations_text = _attributes(message, "r", "s", "i")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise _failed("the server's nonce does not continue the client's")
        salt = _from_base64(salt_text)
        is_number = iterations_text.isascii() and iterations_text.isdigit() and len(iterations_text) < 10
        iterations = int(iterations_text) if is_number else 0
        if not salt or not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise _failed(
                f"the server demands {iterations_text[:20]!r} iterations with a salt of {len(salt)} bytes;"
                f" {MIN_ITERATIONS} to {MAX_ITERATIONS} iterations and a salt are accepted"
            )
        mechanism = self._mechanism
        salted = self._salt_password(mechanism, self._password, salt, iterations)
        client_key = _hmac(mechanism, salted, b"Client Key")
        stored_key = hashlib.new(mechanism.digest, client_key).digest()
        without_proof = f"c={_base64(_GS2_NO_BINDING.encode())},r={nonce}"
        signed = f"{self._bare()},{message},{without_proof}".encode()
        proof = _xor(client_key, _hmac(mechanism, stored_key, signed))
        self._signature = _hmac(mechanism, _hmac(mechanism, salted, b"Server Key"), signed)
        return f"{without_proof},p={_base64(proof)}".encode()

    def _on_final(self, message: str) -> None:
        """Check the server's signature."""
        if message.startswith("e="):
            raise SaslAuthenticationFailedError(f"the server refused the login: {message[2:100]!r}")
        (signature,) = _attributes(message, "v")
        if not hmac.compare_digest(_from_base64(signature), self._signature):
            raise _failed("the server does not know this user's credential")


def saslprep(text: str, what: str) -> str:
    """Return ``text`` as SASLprep normalises it (RFC 4013), so that Unicode variants of a text become equal.

    Raises InvalidRequestError if the result is empty, contains a prohibited or unassigned character, or mixes
    directions of writing. The error contains ``what``, not the text, which may be a password.
    """
    mapped = "".join(
        " " if stringprep.in_table_c12(one) else one for one in text if not stringprep.in_table_b1(one)
    )
    prepared = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if not prepared:
        raise InvalidRequestError(f"{what} must not be empty")
    if any(in_table(one) for one in prepared for in_table in _PROHIBITED):
        raise InvalidRequestError(f"{what} contains a control or other character that SASLprep prohibits")
    is_right_to_left = [stringprep.in_table_d1(one) for one in prepared]
    if any(is_right_to_left):
        is_left_to_right = any(stringprep.in_table_d2(one) for one in prepared)
        if is_left_to_right or not (is_right_to_left[0] and is_right_to_left[-1]):
            raise InvalidRequestError(f"{what} mixes directions of writing, which SASLprep prohibits")
    return prepared


_PROHIBITED: Final = (
    stringprep.in_table_a1,
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def _failed(reason: str) -> SaslAuthenticationFailedError:
    return SaslAuthenticationFailedError(f"authentication failed: {reason}")


def _decoded(message: bytes) -> str:
    if len(message) > MAX_MESSAGE_BYTES:
        raise _failed(f"a SCRAM message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
    try:
        return bytes(message).decode()
    except UnicodeDecodeError as error:
        raise _failed("a SCRAM message is not UTF-8") from error


def _split(message: str, count: int) -> list[str]:
    parts = message.split(",", count - 1)
    if len(parts) != count:
        raise _failed("a SCRAM message is incomplete")
    return parts


def _attributes(message: str, *names: str) -> list[str]:
    """Return the values of the attributes with which the message must begin. Further ones are ignored.

    A mandatory extension (``m=``) is refused, because it comes before the first expected attribute.
    """
    parts = message.split(",")
    if len(parts) < len(names):
        raise _failed("a SCRAM message is incomplete")
    return [_attribute(part, name) for part, name in zip(parts, names, strict=False)]


def _attribute(part: str, name: str) -> str:
    if not part.startswith(f"{name}="):
        raise _failed(f"a SCRAM message lacks the attribute {name!r} in its place")
    return part[2:]


def _unescaped(name: str) -> str:
    """Return a user name with ``=2C`` and ``=3D`` replaced. Any other ``=`` is refused."""
    plain = name.replace("=2C", ",").replace("=3D", "\0")
    if "=" in plain or "\0" in name:
        raise _failed("a user name has an invalid escape")
    return plain.replace("\0", "=")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except binascii.Error as error:
        raise _failed("a SCRAM message has invalid base64") from error


def _hmac(mechanism: Mechanism, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, mechanism.digest)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
