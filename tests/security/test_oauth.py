"""OAUTHBEARER: the tokens that are refused, and the messages of both sides (S7, S19)."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from kafkalite.errors import IllegalSaslStateError, SaslAuthenticationFailedError
from kafkalite.security.oauth import (
    ALGORITHMS,
    MAX_MESSAGE_BYTES,
    MAX_SESSION_MS,
    OauthClient,
    OauthServer,
    Token,
    TokenRules,
    VerificationKey,
    is_token,
    key_of,
    read_key_set,
    validated,
)
from proof.token_issuer import AUDIENCE, ISSUER, Issuer, signed_by_hand

NOW_S = 1_000_000
RULES = TokenRules(audience=(AUDIENCE, "other"), issuer=ISSUER, skew_s=30)
CLAIMS = {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "iat": 0, "exp": 2_000_000_000}


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    issuer = Issuer()
    issuer.rotate("rsa", is_ec=False)
    issuer.rotate("ec")
    return issuer


def check(issuer: Issuer, token: str, *, rules: TokenRules = RULES, now_s: float = NOW_S) -> Token:
    keys = read_key_set(issuer.key_set)

    def find(kid: str | None) -> VerificationKey:
        key = key_of(keys, kid)
        if key is None:
            raise SaslAuthenticationFailedError("no such key")
        return key

    return validated(token, find, rules, round(now_s * 1000))


def refusal(issuer: Issuer, token: str, **more: Any) -> str:
    with pytest.raises(SaslAuthenticationFailedError) as refused:
        check(issuer, token, **more)
    assert refused.value.__cause__ is None, "a cause may contain the token"
    return refused.value.message


@pytest.mark.parametrize("kid", ["rsa", "ec"])
def test_a_good_token(issuer: Issuer, kid: str) -> None:
    found = check(issuer, issuer.token(kid=kid, exp=NOW_S + 60))
    assert found == Token("alice", 90_000)


def test_a_token_for_several_audiences_is_good_for_each(issuer: Issuer) -> None:
    assert check(issuer, issuer.token(aud=["a", "other"])).username == "alice"


def test_without_expectations_every_audience_and_issuer_is_accepted(issuer: Issuer) -> None:
    assert check(issuer, issuer.token(aud="x", iss="y"), rules=TokenRules()).username == "alice"
    assert check(issuer, issuer.token(aud=None, iss=None), rules=TokenRules()).username == "alice"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": NOW_S - 31}, "it expired 31 s ago"),
        ({"exp": NOW_S - 30}, "it expired 30 s ago"),
        ({"exp": None}, "a token must expire"),
        ({"exp": "2000000000"}, "its claim 'exp' is no time"),
        ({"exp": True}, "its claim 'exp' is no time"),
        ({"exp": float("inf")}, "its claim 'exp' is no time"),
        ({"exp": float("nan")}, "its claim 'exp' is no time"),
        ({"exp": 10**400}, "its claim 'exp' is no time"),
        ({"nbf": NOW_S + 31}, "it is not valid yet, by 31 s"),
        ({"iat": NOW_S + 31}, "it is not valid yet, by 31 s"),
        ({"iss": "https://other.example"}, "it is from another issuer"),
        ({"iss": None}, "it lacks the claim 'iss'"),
        ({"aud": "elsewhere"}, "it is for another audience"),
        ({"aud": None}, "it lacks the claim 'aud'"),
        ({"sub": None}, "its claim 'sub' is no user name"),
        ({"sub": ""}, "its claim 'sub' is no user name"),
        ({"sub": 7}, "its claim 'sub' is no user name"),
        ({"sub": ["alice"]}, "its claim 'sub' is no user name"),
        ({"sub": "a\nb"}, "its claim 'sub' is no user name"),
        ({"sub": "x" * 256}, "its claim 'sub' is no user name"),
        ({"scope": 7}, "its claim 'scope' is neither a text nor a list of texts"),
        ({"scope": ["read", 7]}, "its claim 'scope' is neither a text nor a list of texts"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(issuer: Issuer, claims: dict[str, Any], reason: str) -> None:
    assert reason in refusal(issuer, issuer.token(**claims))


def test_the_clocks_may_differ_by_the_skew(issuer: Issuer) -> None:
    assert check(issuer, issuer.token(exp=NOW_S - 29)).lifetime_ms == 1_000
    assert check(issuer, issuer.token(iat=NOW_S + 29, nbf=NOW_S + 29)).username == "alice"
    exact = TokenRules(skew_s=0)
    assert "it expired 0 s ago" in refusal(issuer, issuer.token(exp=NOW_S), rules=exact)
    assert check(issuer, issuer.token(exp=NOW_S + 0.0005), rules=exact).lifetime_ms == 1, "0 is no limit"


def test_no_token_is_good_for_longer_than_a_day(issuer: Issuer) -> None:
    assert check(issuer, issuer.token(exp=2**52)).lifetime_ms == MAX_SESSION_MS


def test_names_that_would_become_equal_are_refused(issuer: Issuer) -> None:
    """SASLprep would make the full-width letters those of another user."""
    assert "its claim 'sub' is no user name" in refusal(issuer, issuer.token("\uff41lice"))


def test_the_claims_of_name_and_scope_are_settings(issuer: Issuer) -> None:
    rules = TokenRules(sub_claim="email", scope_claim="scp")
    token = issuer.token(None, email="alice@example.org", scope=7, scp=["a", "b"])
    assert check(issuer, token, rules=rules).username == "alice@example.org"
    assert "'email' is no user name" in refusal(issuer, issuer.token("alice"), rules=rules)


# --- signatures


def test_a_token_without_a_signature_is_refused(issuer: Issuer) -> None:
    for header in ({"alg": "none"}, {"alg": "None"}, {"alg": "NONE"}, {"alg": ""}, {}):
        token = signed_by_hand({**header, "kid": "ec"}, CLAIMS)
        assert "its algorithm is not one of its key" in refusal(issuer, token)


@pytest.mark.parametrize("kid", ["rsa", "ec"])
def test_a_public_key_is_no_secret_of_an_hmac(issuer: Issuer, kid: str) -> None:
    """The attack on libraries that let the token choose: HS256 with the published key as the secret."""
    public = issuer.private[kid][0].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    unsigned = signed_by_hand({"alg": "HS256", "kid": kid}, CLAIMS).rpartition(".")[0]
    for secret in (pem, pem.strip(), json.dumps(issuer.jwk(kid)).encode()):
        signature = hmac.digest(secret, unsigned.encode(), hashlib.sha256)
        token = signed_by_hand({"alg": "HS256", "kid": kid}, CLAIMS, signature)
        assert "its algorithm is not one of its key" in refusal(issuer, token)


def test_a_token_of_another_key_is_refused(issuer: Issuer) -> None:
    other = Issuer()
    other.rotate("ec")
    assert "its signature is wrong" in refusal(issuer, other.token(kid="ec"))
    header, _, signature = issuer.token().split(".")
    mallory = issuer.token("mallory").split(".")[1]
    assert "its signature is wrong" in refusal(issuer, f"{header}.{mallory}.{signature}")
    other.rotate("another")
    assert "no such key" in refusal(issuer, other.token())


def test_a_key_verifies_its_own_algorithm_alone(issuer: Issuer) -> None:
    key = issuer.private["rsa"][0]
    token = jwt.encode(CLAIMS, key, algorithm="PS512", headers={"kid": "rsa"})
    assert check(issuer, token).username == "alice"
    strict = read_key_set(json.dumps({"keys": [{**issuer.jwk("rsa"), "alg": "RS256"}]}).encode())
    with pytest.raises(SaslAuthenticationFailedError, match="algorithm"):
        validated(token, lambda _kid: strict["rsa"], RULES, NOW_S * 1000)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "a.b.c",
        "a.b",
        "\u00fc.\u00fc.\u00fc",
        signed_by_hand(b"[" * 5_000, CLAIMS),
        signed_by_hand(b"[]", CLAIMS),
        signed_by_hand(b"\xff", CLAIMS),
        signed_by_hand({"alg": "ES256", "kid": 7}, CLAIMS),
        signed_by_hand({"alg": ["ES256"], "kid": "ec"}, CLAIMS),
    ],
)
def test_texts_that_are_no_token(issuer: Issuer, token: str) -> None:
    assert "the token is refused" in refusal(issuer, token)


@pytest.mark.parametrize("extension", ["exp", "b64", "unknown"])
def test_a_critical_extension_is_refused(issuer: Issuer, extension: str) -> None:
    headers = {"kid": "ec", "crit": [extension], extension: True}
    token = jwt.encode(CLAIMS, issuer.private["ec"][0], algorithm="ES256", headers=headers)
    assert "the token is refused" in refusal(issuer, token)


# --- key sets


def test_keys_for_other_purposes_are_skipped(issuer: Issuer) -> None:
    small = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
    odd = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256K1()).public_key(), as_dict=True)
    keys = [
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0", "alg": "HS256"},
        {"kty": "oct", "kid": "curve", "crv": "P-256", "k": "c2VjcmV0"},
        {**issuer.jwk("ec"), "kid": "hmac", "alg": "HS256"},
        {**issuer.jwk("ec"), "kid": "encryption", "use": "enc"},
        {**issuer.jwk("ec"), "kid": "broken", "x": "AAAA"},
        {**small, "kid": "small"},
        {**odd, "kid": "odd"},
        {"kty": "future", "kid": "future"},
        issuer.jwk("ec"),
    ]
    assert list(read_key_set(json.dumps({"keys": keys}).encode())) == ["ec"]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7]}', b'{"keys": []}', b"[" * 100_000, b"\xff"]
)
def test_texts_that_are_no_key_set(text: bytes) -> None:
    with pytest.raises(ValueError, match="key"):
        read_key_set(text)


def test_a_token_without_a_key_id_needs_a_single_key(issuer: Issuer) -> None:
    one = {"": VerificationKey("a", ())}
    assert key_of({"x": VerificationKey("a", ())}, None) == one[""] == key_of(one, None)
    assert key_of({**one, "x": VerificationKey("b", ())}, None) == one[""]
    assert key_of({"x": one[""], "y": one[""]}, None) is None
    assert key_of(one, "x") is None


def test_no_algorithm_has_a_shared_secret() -> None:
    assert not {name for names in ALGORITHMS.values() for name in names if name.startswith(("HS", "n"))}


# --- messages


def server(issuer: Issuer) -> OauthServer:
    keys = read_key_set(issuer.key_set)
    return OauthServer(RULES, lambda kid: keys[kid or ""], lambda: NOW_S * 1000)


def test_both_sides_log_in(issuer: Issuer) -> None:
    token = issuer.token(exp=NOW_S + 100)
    client, exchange = OauthClient(token), server(issuer)
    message = client.first()
    assert message == b"n,,\x01auth=Bearer " + token.encode() + b"\x01\x01"
    assert client.receive(exchange.receive(message)) is None
    assert (exchange.username, exchange.lifetime_ms) == ("alice", 130_000)
    assert token not in f"{client!r}{exchange!r}"
    with pytest.raises(IllegalSaslStateError):
        exchange.receive(message)


@pytest.mark.parametrize(
    "around",
    [
        b"n,a=alice,\x01auth=Bearer %s\x01\x01",
        b"y,,\x01host=h\x01port=9092\x01auth=bearer %s\x01extension=x\x01\x01",
    ],
)
def test_other_forms_of_the_message(issuer: Issuer, around: bytes) -> None:
    exchange = server(issuer)
    exchange.receive(around % issuer.token().encode())
    assert exchange.username == "alice"


@pytest.mark.parametrize(
    "around",
    [
        b"%s",
        b"n,,\x01auth=Bearer %s",
        b"n,,\x01auth=Bearer %s\x01",
        b"n,,\x01auth=Basic %s\x01\x01",
        b"p=tls-unique,,\x01auth=Bearer %s\x01\x01",
        b"n,b=alice,\x01auth=Bearer %s\x01\x01",
        b"n,a=mallory,\x01auth=Bearer %s\x01\x01",
        b"n,,\x01auth=Bearer x\x01auth=Bearer %s\x01\x01",
        b"n,,auth=Bearer %s\x01\x01",
    ],
)
def test_a_forged_message_is_refused(issuer: Issuer, around: bytes) -> None:
    exchange, token = server(issuer), issuer.token()
    with pytest.raises(SaslAuthenticationFailedError) as refused:
        exchange.receive(around % token.encode())
    assert token not in str(refused.value)
    assert exchange.username is None
    with pytest.raises(IllegalSaslStateError):
        exchange.receive(OauthClient(token).first())


def test_a_large_message_is_refused_unread(issuer: Issuer) -> None:
    """The same token, with a claim that fills the message, is accepted up to the limit."""
    exchange, large = server(issuer), OauthClient(issuer.token(more="x" * MAX_MESSAGE_BYTES)).first()
    with pytest.raises(SaslAuthenticationFailedError, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
        exchange.receive(large)
    fitting = OauthClient(issuer.token(more="x" * (MAX_MESSAGE_BYTES * 3 // 4 - 300))).first()
    assert MAX_MESSAGE_BYTES - 300 < len(fitting) <= MAX_MESSAGE_BYTES
    other = server(issuer)
    other.receive(fitting)
    assert other.username == "alice"


def test_a_client_returns_the_refusal_of_another_server(issuer: Issuer) -> None:
    client = OauthClient("x")
    assert client.receive(b'{"status":"invalid_token"}') == b"\x01"
    with pytest.raises(SaslAuthenticationFailedError):
        client.receive(b'{"status":"invalid_token"}')


@pytest.mark.parametrize("text", ["", "a b", "a\n", "a\x01", "\u00fc", None, b"a", 7])
def test_texts_that_cannot_be_sent(text: Any) -> None:
    assert not is_token(text)
    assert is_token("abc.def-_.ghi")
