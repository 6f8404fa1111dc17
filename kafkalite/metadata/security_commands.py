"""Decisions about access control rules and users' SCRAM credentials."""

from __future__ import annotations

from collections.abc import Iterable

from kafkalite.errors import (
    BrokerError,
    InvalidRequestError,
    PolicyViolationError,
    ResourceNotFoundError,
    UnacceptableCredentialError,
)
from kafkalite.limits import MAX_ACLS, MAX_ACLS_PER_REQUEST, MAX_CREDENTIALS, MAX_USER_NAME_BYTES
from kafkalite.metadata.decision import Decision, outcome
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.records import AclRecord, MetadataRecord, ScramCredentialRecord
from kafkalite.protocol.messages.security import (
    Acl,
    AclResult,
    AclSelection,
    AlteredUser,
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DeletedAcls,
    ScramCredentialChange,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from kafkalite.security.acls import RESERVED, USER_PREFIX, AclBinding, AclFilter, check_binding
from kafkalite.security.scram import Mechanism, credential_of, saslprep

DECOY = ""  #: the user whose random credential unknown users seem to have


def create_acls(image: ClusterImage, command: CreateAclsRequest) -> Decision:
    """Add rules. A rule that exists is no error.

    Errors, per rule: INVALID_REQUEST (it could never apply), POLICY_VIOLATION (MAX_ACLS exist); of the whole
    request INVALID_REQUEST (too many rules).
    """
    problem = _too_many(len(command.acls))
    if problem is not None:
        return Decision(CreateAclsResponse(*outcome(problem), []))
    added: dict[AclBinding, None] = {}
    results: list[AclResult] = []
    for acl in command.acls:
        binding = AclBinding(*acl)
        try:
            check_binding(binding)
            if binding not in image.acls and len(image.acls) + len(added) >= MAX_ACLS:
                raise PolicyViolationError(f"the cluster has {MAX_ACLS} ACLs, which is the maximum")
        except BrokerError as error:
            results.append(AclResult(*outcome(error)))
            continue
        results.append(AclResult(0, None))
        if binding not in image.acls:
            added[binding] = None
    return Decision(CreateAclsResponse(0, None, results), [AclRecord(*one, True) for one in added])


def delete_acls(image: ClusterImage, command: DeleteAclsRequest) -> Decision:
    """Remove the rules that each selection selects. It is no error if there are none.

    Errors: of the whole request INVALID_REQUEST (too many selections, or more than MAX_ACLS_PER_REQUEST rules
    selected). Then nothing is removed.
    """
    left, results = set(image.acls), []
    removed: list[AclBinding] = []
    problem = _too_many(len(command.selections))
    for selection in () if problem is not None else command.selections:
        found = selected(left, selection)
        left.difference_update(found)
        removed += found
        results.append(DeletedAcls(0, None, [Acl(*one) for one in found]))
    problem = problem or _too_many(len(removed))
    if problem is not None:
        return Decision(DeleteAclsResponse(*outcome(problem), []))
    return Decision(DeleteAclsResponse(0, None, results), [AclRecord(*one, False) for one in removed])


def selected(bindings: Iterable[AclBinding], selection: AclSelection) -> list[AclBinding]:
    """Return the rules that ``selection`` selects, sorted."""
    matches = AclFilter(*selection).matches
    return sorted(filter(matches, bindings))


def alter_user_scram_credentials(image: ClusterImage, command: AlterUserScramCredentialsRequest) -> Decision:
    """Set and remove credentials. The changes of one user are applied together or not at all.

    The broker that received the request adds a random credential of the user DECOY. It is stored if DECOY has
    no credential of this mechanism yet. The reply has a result for DECOY only if this fails.

    Errors, per user: INVALID_REQUEST (the name, an unknown mechanism, or two changes of one credential),
    UNACCEPTABLE_CREDENTIAL (its salt, iterations or length), RESOURCE_NOT_FOUND (nothing to delete),
    POLICY_VIOLATION (MAX_CREDENTIALS exist); of the whole request INVALID_REQUEST (too many changes).
    """
    problem = _too_many(len(command.deletions) + sum(one.user != DECOY for one in command.upsertions))
    if problem is not None:
        return Decision(AlterUserScramCredentialsResponse(*outcome(problem), []))
    by_user: dict[str, list[ScramCredentialChange]] = {}
    all_changes: list[ScramCredentialChange] = [*command.deletions, *command.upsertions]
    for change in all_changes:
        by_user.setdefault(change.user, []).append(change)
    records: list[MetadataRecord] = []
    results: list[AlteredUser] = []
    count = len(image.credentials)
    for user, changes in by_user.items():
        try:
            new_records = _alter_one(image, user, changes)
            growth = sum(_growth(image, one) for one in new_records)
            if growth > 0 and count + growth > MAX_CREDENTIALS:
                raise PolicyViolationError(f"the cluster has {MAX_CREDENTIALS} credentials, the maximum")
        except BrokerError as error:
            results.append(AlteredUser(user, *outcome(error)))
            continue
        records += new_records
        count += growth
        if user != DECOY:
            results.append(AlteredUser(user, 0, None))
    return Decision(AlterUserScramCredentialsResponse(0, None, results), records)


def _growth(image: ClusterImage, record: ScramCredentialRecord) -> int:
    """Return by how many credentials ``record`` changes their number."""
    return bool(record.iterations) - ((record.user, record.mechanism) in image.credentials)


def _alter_one(
    image: ClusterImage, user: str, changes: list[ScramCredentialChange]
) -> list[ScramCredentialRecord]:
    """Return the records for the changes of one user. Raises BrokerError."""
    if user != DECOY and (len(user.encode()) > MAX_USER_NAME_BYTES or saslprep(user, "a user name") != user):
        raise InvalidRequestError(
            f"a user name has at most {MAX_USER_NAME_BYTES} bytes and is normalised by SASLprep"
        )
    sets_one = any(isinstance(change, ScramCredentialUpsertion) for change in changes)
    if sets_one and f"{USER_PREFIX}{user}" in RESERVED:
        raise InvalidRequestError(f"the name {user!r} is reserved")
    records: dict[int, ScramCredentialRecord] = {}
    for change in changes:
        try:
            mechanism = Mechanism(change.mechanism)
        except ValueError:
            raise InvalidRequestError(f"SCRAM mechanism {change.mechanism} is unknown") from None
        if mechanism in records:
            raise InvalidRequestError(f"the request changes the {mechanism.label} credential twice")
        exists = (user, int(mechanism)) in image.credentials
        if isinstance(change, ScramCredentialDeletion):
            if not exists:
                raise ResourceNotFoundError(f"the user has no {mechanism.label} credential")
            records[mechanism] = ScramCredentialRecord(user, int(mechanism), b"", b"", b"", 0)
        elif isinstance(change, ScramCredentialUpsertion) and (user != DECOY or not exists):
            records[mechanism] = _upserted(mechanism, change)
    return list(records.values())


def _upserted(mechanism: Mechanism, change: ScramCredentialUpsertion) -> ScramCredentialRecord:
    try:
        credential = credential_of(mechanism, change.salted_password, change.salt, change.iterations)
    except InvalidRequestError as error:
        raise UnacceptableCredentialError(error.message) from error
    return ScramCredentialRecord(change.user, int(mechanism), *credential[1:])


def _too_many(count: int) -> InvalidRequestError | None:
    if count <= MAX_ACLS_PER_REQUEST:
        return None
    return InvalidRequestError(
        f"one request changes at most {MAX_ACLS_PER_REQUEST} ACLs or credentials, this one {count}"
    )
