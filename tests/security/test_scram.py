"""SCRAM logins: the RFC's vectors, both ends against each other, and the attacks that must fail (S7)."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.errors import IllegalSaslStateError, InvalidRequestError, SaslAuthenticationFailedError
from kafkalite.security import scram
from kafkalite.security.scram import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    REFUSAL,
    Credential,
    Mechanism,
    ScramClient,
    ScramServer,
    credential_of,
    decoy_credential,
    salted_password,
    saslprep,
)

SALT = bytes(range(16))
SHA_256 = Mechanism.SCRAM_SHA_256

# RFC 7677, section 3.
RFC_SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
RFC_CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
RFC_SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
RFC_MESSAGES = [
    b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
    b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
]


def made(password: str, mechanism: Mechanism = SHA_256, salt: bytes = SALT) -> Credential:
    salted = salted_password(mechanism, password, salt, MIN_ITERATIONS)
    return credential_of(mechanism, salted, salt, MIN_ITERATIONS)


ALICE = made("secret of alice")
MALLORY = made("secret of mallory", salt=SALT[::-1])
DECOY = made("nobody's")


def find(name: str) -> tuple[Credential, bool]:
    known = {"alice": ALICE, "mallory": MALLORY, "a=b,c": ALICE}.get(name)
    return (known, True) if known is not None else (decoy_credential(DECOY, name), False)


def server(nonce: str = "server") -> ScramServer:
    return ScramServer(SHA_256, find, nonce)


def client(name: str = "alice", password: str = "secret of alice") -> ScramClient:
    return ScramClient(SHA_256, name, password, "client")


def log_in(a: ScramClient, b: ScramServer) -> None:
    proof = a.receive(b.receive(a.first()))
    assert proof is not None
    assert a.receive(b.receive(proof)) is None


def test_the_vectors_of_rfc_7677() -> None:
    credential = made("pencil", salt=RFC_SALT)
    there = ScramServer(SHA_256, lambda _: (credential, True), RFC_SERVER_NONCE)
    here = ScramClient(SHA_256, "user", "pencil", RFC_CLIENT_NONCE)
    assert here.first() == RFC_MESSAGES[0]
    assert there.receive(RFC_MESSAGES[0]) == RFC_MESSAGES[1]
    assert here.receive(RFC_MESSAGES[1]) == RFC_MESSAGES[2]
    assert there.receive(RFC_MESSAGES[2]) == RFC_MESSAGES[3]
    assert here.receive(RFC_MESSAGES[3]) is None
    assert there.username == "user"


@pytest.mark.parametrize("mechanism", Mechanism, ids=lambda m: m.label)
def test_a_proof_follows_the_formulas_of_rfc_5802(mechanism: Mechanism) -> None:
    """The formulas, written down once more without the code under test."""

    def mac(key: bytes, text: bytes) -> bytes:
        return hmac.new(key, text, mechanism.digest).digest()

    credential = made("pencil", mechanism)
    there = ScramServer(mechanism, lambda _: (credential, True), "S")
    here = ScramClient(mechanism, "user", "pencil", "C")
    first = there.receive(here.first())
    final = here.receive(first)
    assert final is not None
    salted = hashlib.pbkdf2_hmac(mechanism.digest, b"pencil", SALT, MIN_ITERATIONS)
    signed = b"n=user,r=C," + first + b"," + final[: final.index(b",p=")]
    client_key = mac(salted, b"Client Key")
    signature = mac(hashlib.new(mechanism.digest, client_key).digest(), signed)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    assert final.endswith(b",p=" + base64.b64encode(proof))
    assert there.receive(final) == b"v=" + base64.b64encode(mac(mac(salted, b"Server Key"), signed))


@given(name=st.text(min_size=1, max_size=12), password=st.text(min_size=1, max_size=12))
def test_both_ends_agree_on_every_name_and_password(name: str, password: str) -> None:
    try:
        here = ScramClient(SHA_256, name, password, "C")
    except InvalidRequestError:
        return
    credential = made(password)
    asked = []

    def known(who: str) -> tuple[Credential, bool]:
        asked.append(who)
        return credential, True

    there = ScramServer(SHA_256, known, "S")
    log_in(here, there)
    assert [there.username] == asked == [saslprep(name, "a user name")]


def test_a_name_with_separators_is_escaped() -> None:
    there = server()
    here = client("a=b,c")
    assert here.first() == b"n,,n=a=3Db=2Cc,r=client"
    log_in(here, there)
    assert there.username == "a=b,c"


@pytest.mark.parametrize("name", ["alice", "nobody"])
def test_a_wrong_password_and_an_unknown_user_get_the_same_response(name: str) -> None:
    there, here = server(), client(name, "wrong")
    proof = here.receive(there.receive(here.first()))
    assert proof is not None
    with pytest.raises(SaslAuthenticationFailedError) as caught:
        there.receive(proof)
    assert caught.value.message == REFUSAL
    assert there.username is None


def test_an_unknown_user_costs_the_same_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def operations(name: str) -> list[str]:
        done: list[str] = []
        there, here = server(), client(name, "wrong")
        proof = here.receive(there.receive(here.first()))
        assert proof is not None
        for function in ("_hmac", "_xor"):
            original = getattr(scram, function)

            def counted(*args: object, _name: str = function, _call: object = original) -> object:
                done.append(_name)
                return _call(*args)  # type: ignore[operator]

            monkeypatch.setattr(scram, function, counted)
        with pytest.raises(SaslAuthenticationFailedError):
            there.receive(proof)
        monkeypatch.undo()
        return done

    assert operations("alice") == operations("nobody") == ["_hmac", "_xor", "_hmac"]


def test_an_unknown_user_seems_to_have_a_credential_of_its_own() -> None:
    def salt(name: str) -> bytes:
        return server().receive(client(name).first()).split(b",")[1]

    assert salt("nobody") == salt("nobody")
    assert len({salt(name) for name in ("nobody", "somebody", "alice")}) == 3
    assert len(salt("nobody")) == len(salt("alice"))


def test_an_unknown_user_is_refused_even_with_the_decoys_password() -> None:
    there, here = server(), client("nobody", "nobody's")
    first = there.receive(here.first())
    # The attacker knows the decoy's keys, and proves them over the transcript of this login.
    without_proof = b"c=biws,r=clientserver"
    signed = b"n=nobody,r=client," + first + b"," + without_proof
    salted = salted_password(SHA_256, "nobody's", SALT, MIN_ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    with pytest.raises(SaslAuthenticationFailedError):
        there.receive(without_proof + b",p=" + base64.b64encode(proof))
    assert there.username is None


class TestAttacks:
    def test_a_user_cannot_act_as_another_one(self) -> None:
        with pytest.raises(SaslAuthenticationFailedError, match="act as another"):
            server().receive(b"n,a=alice,n=mallory,r=client")

    def test_a_user_may_name_itself_as_the_identity(self) -> None:
        assert server().receive(b"n,a=alice,n=alice,r=client").startswith(b"r=clientserver,")

    def test_a_replayed_proof_is_refused(self) -> None:
        here, there = client(), server("first")
        proof = here.receive(there.receive(here.first()))
        assert proof is not None
        there.receive(proof)
        other = server("second")
        other.receive(here.first())
        with pytest.raises(SaslAuthenticationFailedError, match="nonce is not that of this login"):
            other.receive(proof)
        assert other.username is None

    @pytest.mark.parametrize("nonce", [b"client", b"server", b"clientserverx", b"clientserve", b""])
    def test_a_wrong_nonce_is_refused_before_the_proof(self, nonce: bytes) -> None:
        there, here = server(), client()
        proof = here.receive(there.receive(here.first()))
        assert proof is not None
        with pytest.raises(SaslAuthenticationFailedError, match="nonce"):
            there.receive(proof.replace(b"r=clientserver", b"r=" + nonce))

    def test_a_skipped_step_is_refused(self) -> None:
        there = server()
        with pytest.raises(SaslAuthenticationFailedError):
            there.receive(RFC_MESSAGES[2])
        with pytest.raises(IllegalSaslStateError):
            there.receive(client().first())
        assert there.username is None

    def test_a_failed_login_is_over(self) -> None:
        there, here = server(), client(password="wrong")
        proof = here.receive(there.receive(here.first()))
        assert proof is not None
        for error in (SaslAuthenticationFailedError, IllegalSaslStateError):
            with pytest.raises(error):
                there.receive(proof)

    def test_a_complete_login_is_over(self) -> None:
        there, here = server(), client()
        log_in(here, there)
        with pytest.raises(IllegalSaslStateError):
            there.receive(here.first())
        with pytest.raises(IllegalSaslStateError):
            here.receive(b"v=")
        assert there.username == "alice"

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b"n",
            b"n,,",
            b"n,,n=alice",
            b"n,,n=alice,r=",
            b"n,,m=x,n=alice,r=client",  # a mandatory extension
            b"p=tls-unique,,n=alice,r=client",
            b"n,,r=client,n=alice",
            b"n,,n=al=ice,r=client",
            b"n,,n=al\0ice,r=client",
            b"n,,n=,r=client",
            b"n,,n=\xff,r=client",
            b"n,,n=alice,r=" + b"x" * 5_000,
        ],
    )
    def test_a_malformed_first_message_is_refused(self, message: bytes) -> None:
        with pytest.raises(SaslAuthenticationFailedError):
            server().receive(message)

    def test_a_changed_header_of_the_first_message_is_refused(self) -> None:
        """A server that ignored it would let an attacker change the identity under a valid proof."""
        there, here = server(), client()
        proof = here.receive(there.receive(here.first()))
        assert proof is not None
        with pytest.raises(SaslAuthenticationFailedError, match="another header than the first"):
            there.receive(proof.replace(b"c=biws", b"c=eSws"))

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b"c=biws,r=clientserver",
            b"c=eSws,r=clientserver,p=" + b"A" * 43 + b"=",  # the header of another first message
            b"c=biws,r=clientserver,p=AAAA",
            b"c=biws,r=clientserver,p=!",
            b"c=biws,p=AAAA",
        ],
    )
    def test_a_malformed_final_message_is_refused(self, message: bytes) -> None:
        there = server()
        there.receive(client().first())
        with pytest.raises(SaslAuthenticationFailedError):
            there.receive(message)
        assert there.username is None

    @given(st.binary(max_size=80), st.binary(max_size=80))
    def test_no_message_raises_anything_else(self, first: bytes, second: bytes) -> None:
        for end, messages in (
            (server(), (b"n,," + first, second)),
            (client(), (b"r=client" + first, second)),
        ):
            for message in messages:
                try:
                    end.receive(message)
                except (SaslAuthenticationFailedError, IllegalSaslStateError):
                    break
        assert server().username is None


class TestClient:
    @pytest.mark.parametrize(
        "first",
        [
            b"r=other,s=AAAA,i=4096",
            b"r=client,s=AAAA,i=4096",  # no nonce of the server
            b"r=clientserver,s=,i=4096",
            b"r=clientserver,s=AAAA,i=4095",
            b"r=clientserver,s=AAAA,i=-4096",
            b"r=clientserver,s=AAAA,i=" + str(MAX_ITERATIONS + 1).encode(),
            b"r=clientserver,s=AAAA,i=99999999999999999999",
            b"r=clientserver,s=AAAA",
            b"m=x,r=clientserver,s=AAAA,i=4096",
        ],
    )
    def test_a_server_that_deviates_is_refused(self, first: bytes) -> None:
        with pytest.raises(SaslAuthenticationFailedError):
            client().receive(first)

    @pytest.mark.parametrize("final", [b"v=AAAA", b"v=", b"", b"e=other-error", b"x=AAAA"])
    def test_a_server_that_does_not_prove_itself_is_refused(self, final: bytes) -> None:
        here = client()
        here.receive(server().receive(here.first()))
        with pytest.raises(SaslAuthenticationFailedError):
            here.receive(final)


class TestSaslprep:
    """The examples of RFC 4013, section 3, and more."""

    @pytest.mark.parametrize(
        ("text", "prepared"),
        [
            ("I\u00adX", "IX"),
            ("user", "user"),
            ("USER", "USER"),
            ("\u00aa", "a"),
            ("\u2168", "IX"),
            ("a\u00a0b", "a b"),
        ],
    )
    def test_it_normalises(self, text: str, prepared: str) -> None:
        assert saslprep(text, "x") == prepared

    @pytest.mark.parametrize(
        "text", ["\u0007", "\u0627\u0031", "\u0627a\u0627", "", "\u00ad", "\u0221", "a\ue000"]
    )
    def test_it_prohibits(self, text: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            saslprep(text, "a password")
        assert not text or text not in caught.value.message


def test_no_secret_is_in_a_repr() -> None:
    there, here = server(), client()
    log_in(here, there)
    shown = f"{ALICE!r} {ALICE} {there!r} {here!r}"
    assert "secret of alice" not in shown
    assert shown.startswith("Credential(SCRAM-SHA-256, iterations=4096)")
    for secret in (ALICE.salt, ALICE.stored_key, ALICE.server_key):
        assert repr(secret) not in shown
        assert secret.hex() not in shown


@pytest.mark.parametrize(
    ("salted", "salt", "iterations"),
    [
        (bytes(31), SALT, MIN_ITERATIONS),
        (bytes(32), SALT[:15], MIN_ITERATIONS),
        (bytes(32), bytes(65), MIN_ITERATIONS),
        (bytes(32), SALT, MIN_ITERATIONS - 1),
        (bytes(32), SALT, MAX_ITERATIONS + 1),
    ],
)
def test_a_weak_credential_is_refused(salted: bytes, salt: bytes, iterations: int) -> None:
    with pytest.raises(InvalidRequestError):
        credential_of(SHA_256, salted, salt, iterations)
