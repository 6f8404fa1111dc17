"""The matrix of access control (S9): each API under no rule, wrong rules, the right ones, and denials.

Generated from the table of permissions (``kafkalite.security.required``), so that an API without an entry
fails every test that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kafkalite.broker.server.turns import finished
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.security.acls import (
    IMPLIED,
    OPERATIONS,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from kafkalite.security.required import Denial, denials
from proof.example_messages import example

USER, OTHER_USER = "User:alice", "User:bob"


@dataclass
class Recorder:
    """An Access with fixed answers, which records the questions."""

    answer: bool = False
    asked: set[tuple[Operation, ResourceType, str]] = field(default_factory=set)

    def allows(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        self.asked.add((operation, resource_type, name))
        return self.answer

    def allows_on_any(self, operation: Operation, resource_type: ResourceType) -> bool:
        return self.answer


class Case(NamedTuple):
    """Rules for one principal, and whether they allow the request."""

    name: str
    rules: list[AclBinding]
    is_allowed: bool


def request_of(key: int) -> Any:
    """Return an example of a request whose needs are independent of each other, and that creates nothing by
    the way."""
    message = example(APIS[key].request)
    if key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
        return message._replace(subscribed_pattern=None)  # its rule would cover the topics, too
    if key == ApiKey.METADATA:
        return message._replace(allow_auto_topic_creation=False)
    return message


def needs(key: int, message: Any) -> list[Denial]:
    """Return what the message needs. Fails if the API has no entry in the table."""
    found = finished(denials(key, message, Recorder()))
    assert found is not None, f"{ApiKey(key).name} has no entry in the table of permissions"
    return found


def rule(denial: Denial, permission: Permission = Permission.ALLOW, user: str = USER) -> AclBinding:
    operation, resource_type, name = denial
    return AclBinding(resource_type, PatternType.LITERAL, name, user, WILDCARD, operation, permission)


def cases(key: int) -> Iterator[Case]:
    """Yield the cases of one API for USER, who is no super user."""
    needed = needs(key, request_of(key))
    right = [rule(one) for one in needed]
    yield Case("no rule", [], not right)
    yield Case("right", right, True)
    if not right:
        return
    yield Case("of another user", [one._replace(principal=OTHER_USER) for one in right], False)
    for index, one in enumerate(right):
        others = right[:index] + right[index + 1 :]
        what = f"{Operation(one.operation).name} {one.name}"
        yield Case(f"without {what}", others, False)
        yield Case(f"denied {what}", [*right, one._replace(permission=Permission.DENY)], False)
        if one.resource_type != ResourceType.CLUSTER:  # which is the only one
            yield Case(
                f"other name than {what}",
                [*others, one._replace(name=f"{one.name}-other".lstrip("*"))],
                False,
            )
        for wrong in sorted(OPERATIONS[ResourceType(one.resource_type)]):
            if wrong != one.operation and one.operation not in IMPLIED.get(wrong, ()):
                yield Case(f"{wrong.name} for {what}", [*others, one._replace(operation=wrong)], False)
                break
