"""Admin's access control rules and users, in both kinds of client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kafkalite import Admin, Broker, sync
from kafkalite.client.admin import credentials
from kafkalite.errors import (
    ClientError,
    InvalidRequestError,
    ResourceNotFoundError,
    UnacceptableCredentialError,
)
from kafkalite.security.acls import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from kafkalite.security.scram import Credential, Mechanism, ScramClient, ScramServer, decoy_credential

READ = AclBinding(
    ResourceType.TOPIC, PatternType.LITERAL, "orders", "User:alice", "*", Operation.READ, Permission.ALLOW
)
WRITE = READ._replace(operation=Operation.WRITE)


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(listeners="inproc://") as running:
        yield running


@pytest_asyncio.fixture
async def admin(broker: Broker) -> AsyncIterator[Admin]:
    async with Admin(broker.bootstrap_servers) as opened:
        yield opened


async def test_rules_are_created_described_and_deleted(admin: Admin) -> None:
    await admin.create_acls([WRITE, READ])
    assert await admin.describe_acls() == [READ, WRITE]
    assert await admin.describe_acls(AclFilter(operation=Operation.WRITE)) == [WRITE]
    assert await admin.describe_acls(AclFilter(principal="User:bob")) == []
    assert await admin.delete_acls([AclFilter(operation=Operation.WRITE)]) == [WRITE]
    assert await admin.describe_acls() == [READ]


async def test_a_rule_that_could_never_apply_is_named_and_the_others_are_added(admin: Admin) -> None:
    with pytest.raises(InvalidRequestError, match=r"alice on 'orders': a principal is 'User:'"):
        await admin.create_acls([READ._replace(principal="alice"), WRITE])
    assert await admin.describe_acls() == [WRITE]
    for bad in ("User:alice", [("orders", "User:alice")]):
        with pytest.raises(ClientError):
            await admin.create_acls(bad)  # type: ignore[arg-type]


def _logs_in(broker: Broker, user: str, password: str, mechanism: Mechanism) -> bool:
    """Log in against what the broker has stored."""
    known = broker.controller.image.credentials

    def find(name: str) -> tuple[Credential, bool]:
        stored = known.get((name, int(mechanism)))
        return (stored, True) if stored else (decoy_credential(known["", int(mechanism)], name), False)

    there, here = ScramServer(mechanism, find, "S"), ScramClient(mechanism, user, password, "C")
    proof = here.receive(there.receive(here.first()))
    assert proof is not None
    try:
        return here.receive(there.receive(proof)) is None
    except Exception:
        return False


async def test_a_user_can_log_in_with_its_password_and_no_other(admin: Admin, broker: Broker) -> None:
    await admin.set_user_password("alice", "correct horse")
    for mechanism in Mechanism:
        assert _logs_in(broker, "alice", "correct horse", mechanism)
        assert not _logs_in(broker, "alice", "wrong", mechanism)
        assert not _logs_in(broker, "bob", "correct horse", mechanism)
    await admin.set_user_password("alice", "battery staple", mechanisms=["SCRAM-SHA-512"])
    assert _logs_in(broker, "alice", "correct horse", Mechanism.SCRAM_SHA_256)
    assert _logs_in(broker, "alice", "battery staple", Mechanism.SCRAM_SHA_512)
    assert not _logs_in(broker, "alice", "correct horse", Mechanism.SCRAM_SHA_512)


async def test_users_are_described_and_deleted(admin: Admin) -> None:
    await admin.set_user_password("bob", "secret", mechanisms=["SCRAM-SHA-256"], iterations=4_096)
    await admin.set_user_password("alice", "secret")
    both = {"SCRAM-SHA-256": 8_192, "SCRAM-SHA-512": 8_192}
    assert await admin.describe_users() == {"alice": both, "bob": {"SCRAM-SHA-256": 4_096}}
    assert await admin.describe_users(["alice"]) == {"alice": both}
    await admin.delete_user("alice")
    assert list(await admin.describe_users()) == ["bob"]
    for call in (admin.delete_user("alice"), admin.describe_users(["alice"])):
        with pytest.raises(ResourceNotFoundError, match="'alice'"):
            await call


async def test_a_bad_password_is_refused_without_showing_it(admin: Admin) -> None:
    for name, password in (("alice", "hidden\n"), ("alice", ""), ("\n", "hidden"), ("", "hidden")):
        with pytest.raises(InvalidRequestError) as caught:
            await admin.set_user_password(name, password)
        assert "hidden" not in str(caught.value)
    with pytest.raises(UnacceptableCredentialError, match="4096 to 100000 iterations"):
        await admin.set_user_password("alice", "hidden", iterations=1)
    for count in (-1, 0, 10**9):
        with pytest.raises(UnacceptableCredentialError, match="4096 to 100000 iterations"):
            await admin.set_user_password("alice", "hidden", iterations=count)
    with pytest.raises(ClientError, match="no SCRAM mechanism"):
        await admin.set_user_password("alice", "hidden", mechanisms=["PLAIN"])
    assert await admin.describe_users() == {}


def test_each_salt_is_new() -> None:
    both = [
        one
        for _ in range(2)
        for one in credentials.salted_passwords("alice", "x", credentials.MECHANISMS, 4_096)
    ]
    assert len({one.salt for one in both}) == 4


def test_the_blocking_twin() -> None:
    with sync.Broker(listeners="inproc://") as broker, sync.Admin(broker.bootstrap_servers) as admin:
        admin.create_acls([READ])
        assert admin.describe_acls(AclFilter(name="orders")) == [READ]
        assert admin.delete_acls([AclFilter()]) == [READ]
        admin.set_user_password("alice", "secret", mechanisms=["SCRAM-SHA-256"])
        assert admin.describe_users() == {"alice": {"SCRAM-SHA-256": 8_192}}
        admin.delete_user("alice")
        assert admin.describe_users() == {}
