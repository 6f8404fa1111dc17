"""Rules and credentials in the metadata log: what is stored, refused, replayed and never shown."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import ErrorCode, StorageError
from kafkalite.metadata import record_codec, security_commands
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.records import ScramCredentialRecord
from kafkalite.metadata.security_commands import DECOY
from kafkalite.protocol.messages.security import (
    Acl,
    AclSelection,
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from kafkalite.security.acls import AclBinding, Authorizer

READ, WRITE = 3, 4
SALT = bytes(range(16))
SECRET = b"salted password of a user, 32 by"


def acl(operation: int = READ, name: str = "orders", principal: str = "User:alice") -> Acl:
    return Acl(2, 3, name, principal, "*", operation, 3)


def binding(operation: int = READ, name: str = "orders") -> AclBinding:
    return AclBinding(*acl(operation, name))


def everything(**wanted: Any) -> AclSelection:
    fields: dict[str, Any] = dict.fromkeys(AclSelection._fields)
    return AclSelection(**(fields | wanted))


def upsertion(user: str = "alice", mechanism: int = 1, **changes: Any) -> ScramCredentialUpsertion:
    return ScramCredentialUpsertion(user, mechanism, 4_096, SALT, SECRET)._replace(**changes)


def altered(metadata: Any, *changes: Any) -> list[tuple[str, int]]:
    deletions = [one for one in changes if isinstance(one, ScramCredentialDeletion)]
    upsertions = [one for one in changes if isinstance(one, ScramCredentialUpsertion)]
    reply = metadata.submit(AlterUserScramCredentialsRequest(deletions, upsertions))
    return [(one.user, one.error_code) for one in reply.users] or [("", reply.error_code)]


def test_rules_are_added_once_and_removed_by_selection(metadata: Any) -> None:
    reply = metadata.submit(CreateAclsRequest([acl(), acl(WRITE), acl()]))
    assert [one.error_code for one in reply.results] == [0, 0, 0]
    assert metadata.image.acls == {binding(), binding(WRITE)}
    before = len(metadata.records)
    metadata.submit(CreateAclsRequest([acl()]))
    assert len(metadata.records) == before, "a rule that exists is not written again"
    reply = metadata.submit(DeleteAclsRequest([everything(operation=READ), everything(name="other")]))
    assert [one.acls for one in reply.results] == [[acl()], []]
    assert metadata.image.acls == {binding(WRITE)}
    reply = metadata.submit(DeleteAclsRequest([everything(), everything()]))
    assert [one.acls for one in reply.results] == [[acl(WRITE)], []], "each rule is removed once"
    assert metadata.image.acls == set()


def test_a_rule_that_could_never_apply_does_not_affect_the_others(metadata: Any) -> None:
    reply = metadata.submit(CreateAclsRequest([acl(principal="alice"), acl()]))
    assert [one.error_code for one in reply.results] == [ErrorCode.INVALID_REQUEST, 0]
    assert metadata.image.acls == {binding()}


def test_the_number_of_rules_is_bounded(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_commands, "MAX_ACLS", 2)
    reply = metadata.submit(CreateAclsRequest([acl(name=name) for name in "abc"]))
    assert [one.error_code for one in reply.results] == [0, 0, ErrorCode.POLICY_VIOLATION]
    reply = metadata.submit(CreateAclsRequest([acl(name="a")]))
    assert reply.results[0].error_code == 0, "one that exists takes no room"


def test_the_changes_of_one_request_are_bounded(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata.submit(CreateAclsRequest([acl(name=name) for name in "abc"]))
    monkeypatch.setattr(security_commands, "MAX_ACLS_PER_REQUEST", 2)
    for command in (
        CreateAclsRequest([acl(name=name) for name in "def"]),
        DeleteAclsRequest([everything()]),
        DeleteAclsRequest([everything(name="a")] * 3),
        AlterUserScramCredentialsRequest([], [upsertion(name) for name in "abc"]),
    ):
        reply = metadata.submit(command)
        assert reply.error_code == ErrorCode.INVALID_REQUEST
    assert len(metadata.image.acls) == 3
    assert altered(metadata, upsertion(), upsertion("bob"), upsertion(DECOY)) == [("alice", 0), ("bob", 0)]


def test_the_changes_of_an_image_update_an_authorizer(metadata: Any) -> None:
    authorizer = Authorizer()

    def follow(command: Any) -> bool:
        before = metadata.image.acls
        metadata.submit(command)
        after = metadata.image.acls
        authorizer.update(added=after - before, removed=before - after)
        return authorizer.allows("User:alice", "10.0.0.1", READ, 2, "orders")

    assert follow(CreateAclsRequest([acl()]))
    assert not follow(CreateAclsRequest([acl()._replace(permission=2)]))
    assert follow(DeleteAclsRequest([everything(permission=2)]))


def test_credentials_are_set_replaced_and_removed(metadata: Any) -> None:
    assert altered(metadata, upsertion(), upsertion(mechanism=2, salted_password=bytes(64))) == [("alice", 0)]
    first = metadata.image.credentials["alice", 1]
    assert (first.salt, first.iterations) == (SALT, 4_096)
    assert altered(metadata, upsertion(iterations=8_192)) == [("alice", 0)]
    assert metadata.image.credentials["alice", 1].iterations == 8_192
    assert altered(metadata, ScramCredentialDeletion("alice", 1)) == [("alice", 0)]
    assert list(metadata.image.credentials) == [("alice", 2)]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (upsertion(iterations=4_095), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (upsertion(iterations=10**9), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (upsertion(salt=b"short"), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (upsertion(salted_password=b"short"), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (upsertion(mechanism=3), ErrorCode.INVALID_REQUEST),
        (upsertion("a\n"), ErrorCode.INVALID_REQUEST),
        (upsertion("\u2168"), ErrorCode.INVALID_REQUEST),
        (upsertion("x" * 256), ErrorCode.INVALID_REQUEST),
        (ScramCredentialDeletion("bob", 1), ErrorCode.RESOURCE_NOT_FOUND),
    ],
)
def test_a_bad_change_of_one_user_does_not_affect_another(
    metadata: Any, change: Any, code: ErrorCode
) -> None:
    found = dict(altered(metadata, change, upsertion("carol")))
    assert found == {change.user: code, "carol": 0}
    assert list(metadata.image.credentials) == [("carol", 1)]


def test_two_changes_of_one_credential_are_refused_together(metadata: Any) -> None:
    altered(metadata, upsertion())
    change = upsertion(iterations=8_192)
    assert altered(metadata, ScramCredentialDeletion("alice", 1), change) == [("alice", 42)]
    assert metadata.image.credentials["alice", 1].iterations == 4_096


def test_the_decoy_is_stored_once_and_has_no_result(metadata: Any) -> None:
    assert altered(metadata, upsertion(), upsertion(DECOY)) == [("alice", 0)]
    first = metadata.image.credentials[DECOY, 1]
    altered(metadata, upsertion("bob"), upsertion(DECOY, salted_password=SECRET[::-1]))
    assert metadata.image.credentials[DECOY, 1] == first


def test_the_number_of_credentials_is_bounded(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_commands, "MAX_CREDENTIALS", 2)
    found = altered(metadata, *[upsertion(name) for name in "abc"])
    assert found == [("a", 0), ("b", 0), ("c", ErrorCode.POLICY_VIOLATION)]
    assert altered(metadata, upsertion("a", iterations=5000)) == [("a", 0)], (
        "a replaced one is not another one"
    )
    assert altered(metadata, ScramCredentialDeletion("a", 1)) == [("a", 0)], "removal is always possible"
    found = altered(metadata, ScramCredentialDeletion("b", 1), upsertion("c"), upsertion("d"), upsertion("e"))
    assert found == [("b", 0), ("c", 0), ("d", 0), ("e", ErrorCode.POLICY_VIOLATION)]


def test_an_image_with_rules_and_credentials_survives_its_records(metadata: Any) -> None:
    metadata.submit(CreateAclsRequest([acl(), acl(WRITE)]))
    altered(metadata, upsertion(), upsertion(DECOY))
    image = metadata.image
    records = record_codec.from_bytes(record_codec.to_bytes(image.to_records()))
    offset = image.metadata_offset
    assert Delta(EMPTY).replay_all(records).apply(offset) == image
    other = Delta(EMPTY).replay_all(
        [ScramCredentialRecord("old", 1, SALT, b"k", b"s", 1), *Delta(EMPTY).before.to_records()]
    )
    assert Delta.to_snapshot(other.apply(1), records).apply(offset) == image, "a snapshot replaces everything"


def test_unchanged_rules_are_the_same_object(metadata: Any) -> None:
    metadata.submit(CreateAclsRequest([acl()]))
    before = metadata.image.acls
    altered(metadata, upsertion())
    assert metadata.image.acls is before


def test_no_secret_is_in_a_repr_or_an_error(metadata: Any) -> None:
    command = AlterUserScramCredentialsRequest([], [upsertion()])
    metadata.submit(command)
    shown = f"{command} {metadata.image!r} {metadata.records!r}"
    credential = metadata.image.credentials["alice", 1]
    for secret in (SECRET, SALT, credential.stored_key, credential.server_key):
        assert repr(secret)[2:-1] not in shown
    assert "alice" in shown
    with pytest.raises(StorageError) as caught:
        record_codec.from_array([10, 0, "alice", 1, SECRET, 5])
    assert "salted" not in str(caught.value)
