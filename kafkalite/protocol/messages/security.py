"""Requests for logins, access control rules, and users' SCRAM credentials, with Kafka's numbers."""

# Tests: tests/protocol/test_golden.py

from __future__ import annotations

from typing import Annotated

from kafkalite.limits import MAX_ACLS_PER_REQUEST, MAX_USERS_PER_REQUEST
from kafkalite.protocol.structs import ApiResponse, AtMost, Struct


class SaslHandshakeRequest(Struct):
    mechanism: str  #: "SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN" or "OAUTHBEARER"


class SaslHandshakeResponse(ApiResponse):
    mechanisms: list[str]  #: those of the listener


class SaslAuthenticateRequest(Struct):
    """The client's next message of a login. ``repr`` hides it because it may contain a password (S19)."""

    auth_bytes: bytes

    def __repr__(self) -> str:
        return f"SaslAuthenticateRequest({len(self.auth_bytes)} bytes)"


class SaslAuthenticateResponse(ApiResponse):
    auth_bytes: bytes  #: the server's next message of the login
    #: How long the connection may be used before the next login on it, in ms. 0: no limit, or the login is
    #: not complete.
    session_lifetime_ms: int

    def __repr__(self) -> str:
        return f"SaslAuthenticateResponse({self.error_code}, {len(self.auth_bytes)} bytes)"


class Acl(Struct):
    resource_type: int  #: 2: topic, 3: group, 4: cluster, 5: transactional id, 7: user
    pattern_type: int  #: 3: literal (the name "*" covers all), 4: prefixed
    name: str  #: of the resource, or the prefix of its name; of the cluster "kafka-cluster"
    principal: str  #: "User:alice", or "User:*" for every user
    host: str  #: the client's IP address, or "*"
    #: 2: all, 3: read, 4: write, 5: create, 6: delete, 7: alter, 8: describe, 9: cluster action,
    #: 10: describe configs, 11: alter configs, 12: idempotent write
    operation: int
    permission: int  #: 2: deny, 3: allow


class CreateAclsRequest(Struct):
    acls: Annotated[list[Acl], AtMost(MAX_ACLS_PER_REQUEST)]


class AclResult(Struct):
    error_code: int
    error_message: str | None


class CreateAclsResponse(ApiResponse):
    results: list[AclResult]  #: in the order of the request


class AclSelection(Struct):
    """Selects rules. For each field here that is not None, a selected rule has the same value."""

    resource_type: int | None
    pattern_type: int | None
    name: str | None
    principal: str | None
    host: str | None
    operation: int | None
    permission: int | None


class DescribeAclsRequest(AclSelection):
    pass


class DescribeAclsResponse(ApiResponse):
    acls: list[Acl]


class DeleteAclsRequest(Struct):
    selections: Annotated[list[AclSelection], AtMost(MAX_ACLS_PER_REQUEST)]


class DeletedAcls(AclResult):
    acls: list[Acl]  #: the rules that this selection has removed


class DeleteAclsResponse(ApiResponse):
    results: list[DeletedAcls]  #: in the order of the request


class DescribeUserScramCredentialsRequest(Struct):
    users: Annotated[list[str], AtMost(MAX_USERS_PER_REQUEST)] | None  #: None: all users


class ScramMechanismInfo(Struct):
    mechanism: int  #: 1: SCRAM-SHA-256, 2: SCRAM-SHA-512
    iterations: int


class UserScramCredentials(Struct):
    user: str
    error_code: int
    error_message: str | None
    credentials: list[ScramMechanismInfo]


class DescribeUserScramCredentialsResponse(ApiResponse):
    users: list[UserScramCredentials]


class ScramCredentialChange(Struct):
    user: str
    mechanism: int


class ScramCredentialDeletion(ScramCredentialChange):
    pass


class ScramCredentialUpsertion(ScramCredentialChange):
    """A credential to add or replace. The client computes ``salted_password``; the password is not sent."""

    iterations: int
    salt: bytes
    salted_password: bytes  #: PBKDF2 of the password with this salt and iteration count; a secret

    def __repr__(self) -> str:
        return f"ScramCredentialUpsertion({self.user!r}, {self.mechanism}, iterations={self.iterations})"


class AlterUserScramCredentialsRequest(Struct):
    deletions: Annotated[list[ScramCredentialDeletion], AtMost(MAX_ACLS_PER_REQUEST)]
    upsertions: Annotated[list[ScramCredentialUpsertion], AtMost(MAX_ACLS_PER_REQUEST)]


class AlteredUser(Struct):
    user: str
    error_code: int
    error_message: str | None


class AlterUserScramCredentialsResponse(ApiResponse):
    users: list[AlteredUser]
