"""Draws logins (SASL), and mutants of them, from a source of random numbers.

A mutant is a login whose steps are skipped, repeated, reordered or drawn, or which has a request between
them; or a message is cut, flipped, repeated or huge; or it is well-formed and wrong: another nonce, proof,
identity, user, password or token. The server chooses its nonce itself, so a login is a dialogue and not a
list of frames.
"""

# Tests: tests/processes/test_fuzz.py

from __future__ import annotations

import base64
import functools
import random
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgpack

from kafkalite.errors import KafkaliteError, RemoteProtocolError
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, LOGIN_APIS, ApiKey
from kafkalite.security.oauth import OauthClient
from kafkalite.security.plain import PlainClient
from kafkalite.security.sasl import PLAIN, SCRAM
from kafkalite.security.scram import ScramClient, salted_password
from kafkalite.tls_options import OAUTHBEARER
from proof.processes.drawn_requests import Generator, Row, frame_of
from proof.token_issuer import FOREVER_S, ISSUER, Issuer, signed_by_hand

ROOT: Final = "fuzz-root"  #: a super user
FEW: Final = "fuzz-few"  #: a user with the rights of ``observed.FEW_RIGHTS``
PASSWORD: Final = "correct horse battery staple"
MECHANISMS: Final = (*SCRAM, PLAIN, OAUTHBEARER)
FIRST_ID: Final = 10_000  #: the correlation ids of a login's requests, which no drawn request has
HUGE_BYTES: Final = (5_000, 60_000, 70_000)  #: above the limits of a message, and of a frame before the login

_NAMES: Final = ("handshake", "first message", "final message", "ApiVersions", "a request")
_HANDSHAKE, _FIRST, _FINAL, _VERSIONS, _REQUEST = range(len(_NAMES))
_MADE_UP: Final = b"c=biws,r=nonce,p=AAAA"
#: Computing it takes milliseconds.
_salted = functools.lru_cache(salted_password)


class Peer(Protocol):
    """The broker at the other end of a connection."""

    def send(self, frame: bytes, /) -> None: ...

    async def response(self) -> Row | None:
        """Return the body of the next response; None if the connection has ended, or no response comes."""
        ...


class DrawnLogin:
    """One login, and the request that follows it.

    ``must_succeed``: True if nothing is wrong with it, False if the broker must not accept it, and None if a
    mutation decides.
    """

    def __init__(
        self,
        rng: random.Random,
        issuer: Issuer,
        *,
        user: str = FEW,
        mechanism: str | None = None,
        is_mutant: bool = False,
        is_second: bool = False,
    ) -> None:
        """``is_second``: the connection has a user already, who may send requests if no login fails."""
        self._rng = rng
        self._issuer = issuer
        self._draw = Generator(rng, [ApiKey(key) for key in APIS])
        self._next_id = FIRST_ID * (1 + is_second)
        self.mechanism = mechanism or rng.choice(MECHANISMS)
        self._offered = self.mechanism
        self._steps = [_HANDSHAKE, _FIRST, *([_FINAL] if self.mechanism in SCRAM else [])]
        self._forgeries: dict[int, Callable[[bytes], bytes]] = {}
        self.must_succeed: bool | None = True
        user, password, token = user, PASSWORD, functools.partial(issuer.token, user)
        kind = rng.randrange(4) if is_mutant else -1
        if kind == 0:
            self._mutate_order()
            self.must_succeed = None if is_second else self.must_succeed
        elif kind == 1:
            step = rng.choice(self._steps[1:])
            self._forgeries[step] = self._mutate_bytes
            self.must_succeed = None
        elif kind == 2:
            self.must_succeed = False
            token = functools.partial(self._forged_token, user)
            if rng.random() < 0.5:
                password = "wrong"
            else:
                user = "fuzz-unknown"
        elif kind == 3:
            self.must_succeed = False
            self._forge()
        self._exchange: Any = self._client(user, password, token)

    def _client(self, user: str, password: str, token: Callable[[], str]) -> Any:
        if self.mechanism == PLAIN:
            return PlainClient(user, password)
        if self.mechanism == OAUTHBEARER:
            return OauthClient(token())
        nonce = base64.b64encode(self._rng.randbytes(18)).decode()
        return ScramClient(SCRAM[self.mechanism], user, password, nonce, salt_password=_salted)

    async def play(self, peer: Peer) -> list[str]:
        """Log in, and send a request. Return what is wrong with the responses."""
        message: bytes | None = None
        probe = frame_of(ApiKey.METADATA, self._id(), [[], False])  # everybody may send it after a login
        if self.mechanism not in SCRAM and self._rng.random() < 0.3:  # all at once
            for step in self._steps:
                peer.send(self._frame(step, self._exchange.first()))
            peer.send(probe)
            bodies = [await peer.response() for _ in (*self._steps, probe)]
            return self._judge(bodies[-1])
        for step in self._steps:
            if step == _FIRST:
                message = self._exchange.first()
            peer.send(self._frame(step, message))
            message = self._answer(await peer.response(), message)
        if self.mechanism == OAUTHBEARER and message == b"\x01" and self._rng.random() < 0.5:
            peer.send(self._frame(_FINAL, message))  # after the broker's reason for a refusal
            await peer.response()
        peer.send(probe)
        return self._judge(await peer.response())

    def _judge(self, body: Row | None) -> list[str]:
        """Return what is wrong with the response to the request behind the login."""
        is_served = body is not None and bool(served([body]))
        if self.must_succeed in (None, is_served):
            return []
        verb = "refused" if self.must_succeed else "accepted"
        steps = ", ".join(_NAMES[step] for step in self._steps)
        return [
            f"a login with {self.mechanism} was {verb}, steps {steps}; the response behind it: {body!r:.300}"
        ]

    def _answer(self, body: Row | None, message: bytes | None) -> bytes | None:
        """Return the client's next message after a response, if the response has one of the server."""
        if isinstance(body, list) and len(body) == 4 and body[0] == 0 and isinstance(body[2], bytes):
            with suppress(KafkaliteError):
                return self._exchange.receive(body[2])  # type: ignore[no-any-return]
            return None
        return message

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _frame(self, step: int, message: bytes | None) -> bytes:
        if step == _HANDSHAKE:
            return frame_of(ApiKey.SASL_HANDSHAKE, self._id(), [self._offered])
        if step == _VERSIONS:
            return frame_of(ApiKey.API_VERSIONS, self._id(), ["fuzz", "1"])
        if step == _REQUEST:
            return self._draw.request(self._id())
        forge = self._forgeries.get(step, bytes)
        return frame_of(ApiKey.SASL_AUTHENTICATE, self._id(), [forge(message or _MADE_UP)])

    # --- mutants

    def _mutate_order(self) -> None:
        rng, steps = self._rng, self._steps
        index = rng.randrange(len(steps))
        self.must_succeed = False
        match rng.randrange(7):
            case 0:
                del steps[index]
            case 1:
                steps.insert(index, steps[index])
            case 2:
                other = rng.choice([each for each in range(len(steps)) if each != index])
                steps[index], steps[other] = steps[other], steps[index]
            case 3:
                steps.insert(index, _REQUEST)
                self.must_succeed = None  # a mutant may be a message of the login, in its place
            case 4:
                steps.insert(index, _VERSIONS)
                self.must_succeed = True
            case 5:
                others = [*(each for each in MECHANISMS if each != self.mechanism), "GSSAPI", "", "é" * 1_000]
                self._offered = rng.choice(others)
            case _:
                steps[:] = [rng.randrange(5) for _ in range(rng.randrange(1, 9))]
                self.must_succeed = None

    def _mutate_bytes(self, message: bytes) -> bytes:
        rng = self._rng
        found = bytearray(message)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(found) + 1)
            match rng.randrange(7):
                case 0:
                    del found[at:]
                case 1:
                    found[at : at + 1] = rng.randbytes(1)
                case 2:
                    found[at:at] = found[: rng.randrange(1, 64)]
                case 3:
                    found[at:at] = rng.choice((b",", b"=", b"\0", b"\x01", b"n,,", "é\u00ad\ufb01".encode()))
                case 4:
                    found += bytes(rng.choice(HUGE_BYTES))
                case 5:
                    found += b"," * rng.choice(HUGE_BYTES)
                case _:
                    found[at : at + 1] = bytes([0xFF, 0xFE])
        return bytes(found)

    def _forge(self) -> None:
        """Make one message well-formed and wrong."""
        rng = self._rng
        if self.mechanism == PLAIN:
            self._forgeries[_FIRST] = rng.choice(
                (
                    lambda message: ROOT.encode() + b"x" + message,  # act as another user
                    lambda message: message + b"\0",
                    lambda message: message.replace(b"\0", b""),
                )
            )
        elif self.mechanism == OAUTHBEARER:
            self._forgeries[_FIRST] = rng.choice(
                (
                    lambda message: message.replace(b"n,,", b"n,a=someone,"),
                    lambda message: message.replace(b"auth=", b"oauth="),
                    lambda message: message.replace(b".", b"", 1),
                )
            )
        elif rng.random() < 0.5:
            self._forgeries[_FIRST] = rng.choice(
                (
                    lambda message: message.replace(b"n,,", b"n,a=someone,"),
                    lambda message: message.replace(b"n,,", b"p=tls-unique,,"),
                    lambda message: re.sub(rb"r=.*", b"r=", message),
                    lambda message: re.sub(rb"n=[^,]*", b"n=fuzz-another", message),
                    lambda message: re.sub(rb"n=[^,]*", b"n=", message),
                )
            )
        else:
            size = SCRAM[self.mechanism].digest_bytes
            proof = base64.b64encode(rng.randbytes(size))
            self._forgeries[_FINAL] = rng.choice(
                (
                    lambda message: re.sub(rb"p=.*", b"p=" + proof, message),
                    lambda message: re.sub(rb"p=.*", b"p=" + proof[:-4], message),
                    lambda message: re.sub(rb"r=[^,]*", b"r=" + proof, message),
                    lambda message: re.sub(rb"r=([^,]*)[^,]", rb"r=\1", message),  # not all of the nonce
                    lambda message: message.replace(
                        b"c=biws", b"c=eSws"
                    ),  # not the header of the first message
                )
            )

    def _forged_token(self, user: str) -> str:
        claims = {"sub": user, "iss": ISSUER, "aud": "kafkalite", "exp": FOREVER_S}
        match self._rng.randrange(6):
            case 0:
                return self._issuer.token(user, exp=1)
            case 1:
                return self._issuer.token(user, aud="another service")
            case 2:
                return self._issuer.token(user, iss="another issuer")
            case 3:
                return signed_by_hand({"alg": "none"}, claims)
            case 4:
                return signed_by_hand({"alg": "ES256", "kid": "first"}, claims, self._rng.randbytes(64))
            case _:
                return self._issuer.token(self._rng.choice(("", None, 7, "ANONYMOUS", "*")))


def served(bodies: list[Row]) -> list[str]:
    """Return, as texts, the bodies of responses to requests that a broker serves only after a login."""
    return [f"{body!r:.300}" for body in bodies if not _is_refusal(body) and not _is_of_login(body)]


def _is_refusal(body: Row) -> bool:
    return isinstance(body, list) and len(body) == 2 and isinstance(body[0], int) and body[0] != 0


def _is_of_login(body: Row) -> bool:
    """Whether the body is a response that a client without a login may get."""
    for key in LOGIN_APIS - {ApiKey.CLUSTER_PROOF}:  # no client here proves the secret of the cluster
        with suppress(RemoteProtocolError):
            codec.decode_body(APIS[key].response, body)
            return True
    return False


def responses_in(data: bytes | bytearray) -> list[tuple[int, Row]]:
    """Return correlation id and body of each complete response in a stream."""
    found: list[tuple[int, Row]] = []
    position = 0
    while position + 8 <= len(data):
        envelope_bytes, payload_bytes = struct.unpack_from(">II", data, position)
        end = position + 8 + envelope_bytes
        if end + payload_bytes > len(data):
            break
        correlation_id, _, body = msgpack.unpackb(bytes(data[position + 8 : end]), strict_map_key=False)
        found.append((correlation_id, body))
        position = end + payload_bytes
    return found
