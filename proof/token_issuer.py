"""An issuer of tokens (JWT), with keys that tests make."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "kafkalite"
FOREVER_S = 2**33


class Issuer:
    """Signs tokens with its newest key. ``key_set`` is the JWKS of all its keys."""

    def __init__(self) -> None:
        self.private: dict[str, tuple[Any, str]] = {}  # key and algorithm by key id
        self.rotate("first")

    def rotate(self, kid: str, *, is_ec: bool = True) -> None:
        """Add a key, with which tokens are signed from now on."""
        key: Any = ec.generate_private_key(ec.SECP256R1()) if is_ec else rsa.generate_private_key(65537, 2048)
        self.private[kid] = (key, "ES256" if is_ec else "RS256")

    def jwk(self, kid: str) -> dict[str, Any]:
        """Return a public key as it stands in the key set."""
        key, algorithm = self.private[kid]
        convert: Any = ECAlgorithm if algorithm == "ES256" else RSAAlgorithm
        return {**convert.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}

    @property
    def key_set(self) -> bytes:
        return json.dumps({"keys": [self.jwk(kid) for kid in self.private]}).encode()

    def token(self, subject: Any = "alice", *, kid: str | None = None, **claims: Any) -> str:
        """Return a token that is valid from 0 until ``FOREVER_S``, unless ``claims`` has other times.

        Claims that are None are left out.
        """
        name = kid or list(self.private)[-1]
        key, algorithm = self.private[name]
        usual = {"sub": subject, "iss": ISSUER, "aud": AUDIENCE, "iat": 0, "exp": FOREVER_S}
        given = {claim: value for claim, value in {**usual, **claims}.items() if value is not None}
        return jwt.encode(given, key, algorithm=algorithm, headers={"kid": name})


def signed_by_hand(header: dict[str, Any] | bytes, claims: dict[str, Any], signature: bytes = b"") -> str:
    """Return a token with any header and signature."""
    parts = [
        header if isinstance(header, bytes) else json.dumps(header).encode(),
        json.dumps(claims).encode(),
    ]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, signature))
