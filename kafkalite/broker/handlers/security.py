"""Handlers for logins, access control rules and users' SCRAM credentials.

The active controller decides every change. The response is sent when this broker's image shows it.
"""

# Tests: tests/broker/test_security.py

from __future__ import annotations

import os
from typing import Final

from kafkalite.broker.server.client import Client
from kafkalite.broker.server.responses import Pending, Reply, Response
from kafkalite.broker.services import Services
from kafkalite.errors import ErrorCode, InvalidRequestError
from kafkalite.limits import KIB, MAX_ENVELOPE_BYTES
from kafkalite.metadata.security_commands import DECOY, selected
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.security import (
    Acl,
    AclSelection,
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
    ScramCredentialUpsertion,
    ScramMechanismInfo,
    UserScramCredentials,
)
from kafkalite.security.scram import DEFAULT_ITERATIONS, MIN_SALT_BYTES, Mechanism

_ACL_BYTES: Final = 16  # of a rule in a response, beside its texts


def sasl_handshake(services: Services, request: Request, client: Client) -> Response:
    """Begin a login with the mechanism that the client chooses. A client may log in repeatedly (KIP-368).

    Errors: ILLEGAL_SASL_STATE (the listener requires no login, or a login has begun),
    UNSUPPORTED_SASL_MECHANISM. Each closes the connection.
    """
    message: SaslHandshakeRequest = request.message
    return services.logins.begin(client, message.mechanism)


def sasl_authenticate(services: Services, request: Request, client: Client) -> Response | Pending:
    """Pass the client's next message to its login, and return the server's next message.

    When the exchange of messages is complete, the client is logged in.

    Errors: ILLEGAL_SASL_STATE (no SaslHandshake came before), SASL_AUTHENTICATION_FAILED (after a delay).
    Each closes the connection.
    """
    message: SaslAuthenticateRequest = request.message
    return services.logins.step(client, message.auth_bytes)


async def change_security(services: Services, request: Request, _client: Client) -> Response:
    """Add and remove access control rules.

    Errors: those of ``metadata.security_commands``; of the whole request NOT_CONTROLLER,
    REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands wait).
    """
    return Reply(await services.channel.decide(request.message, timeout_ms=0))


def describe_acls(services: Services, request: Request, _client: Client) -> Reply:
    """Return the rules that a selection selects, sorted.

    Errors: INVALID_REQUEST (more rules than a response can have).
    """
    message: DescribeAclsRequest = request.message
    found = selected(services.controller.image.acls, AclSelection(*message))
    size_bytes = sum(len(f"{acl.name}{acl.principal}{acl.host}".encode()) + _ACL_BYTES for acl in found)
    if size_bytes > MAX_ENVELOPE_BYTES - KIB:
        raise InvalidRequestError(f"{len(found)} ACLs do not fit in a response; select fewer")
    return Reply(DescribeAclsResponse(0, None, [Acl(*binding) for binding in found]))


async def alter_user_scram_credentials(services: Services, request: Request, _client: Client) -> Response:
    """Set and remove the SCRAM credentials of users.

    Unless the cluster has them already, also adds random credentials that belong to no user, one for each
    mechanism. They make logins of unknown users look like those of known ones. The controller cannot create
    them, because its decisions are reproducible.

    Errors, per user: INVALID_REQUEST, UNACCEPTABLE_CREDENTIAL, RESOURCE_NOT_FOUND, POLICY_VIOLATION; of the
    whole request INVALID_REQUEST (an empty user name, or too many changes), NOT_CONTROLLER,
    REQUEST_TIMED_OUT, KAFKA_STORAGE_ERROR, THROTTLING_QUOTA_EXCEEDED (too many commands wait).
    """
    message: AlterUserScramCredentialsRequest = request.message
    if DECOY in {one.user for one in message.deletions} | {one.user for one in message.upsertions}:
        raise InvalidRequestError("a user name has at least one character")
    known = services.controller.image.credentials
    decoys = [
        ScramCredentialUpsertion(
            DECOY,
            int(mechanism),
            DEFAULT_ITERATIONS,
            os.urandom(MIN_SALT_BYTES),
            os.urandom(mechanism.digest_bytes),
        )
        for mechanism in Mechanism
        if (DECOY, int(mechanism)) not in known
    ]
    message = message._replace(upsertions=[*message.upsertions, *decoys])
    reply: AlterUserScramCredentialsResponse = await services.channel.decide(message, timeout_ms=0)
    return Reply(reply)


def describe_user_scram_credentials(services: Services, request: Request, _client: Client) -> Reply:
    """Return the mechanisms and iteration counts of the named users, or of all users in the order of names.

    Salts and keys are never returned.

    Errors, per user: RESOURCE_NOT_FOUND.
    """
    message: DescribeUserScramCredentialsRequest = request.message
    by_user: dict[str, list[ScramMechanismInfo]] = {}
    for (user, mechanism), credential in sorted(services.controller.image.credentials.items()):
        if user != DECOY:
            by_user.setdefault(user, []).append(ScramMechanismInfo(mechanism, credential.iterations))
    users = sorted(by_user) if message.users is None else list(dict.fromkeys(message.users))
    missing = (int(ErrorCode.RESOURCE_NOT_FOUND), "there is no such user")
    described = [
        UserScramCredentials(user, 0, None, by_user[user])
        if user in by_user
        else UserScramCredentials(user, *missing, [])
        for user in users
    ]
    return Reply(DescribeUserScramCredentialsResponse(0, None, described))
