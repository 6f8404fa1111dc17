"""Access control lists: who may perform which operation on which resource (S9).

A rule, an ``AclBinding``, allows or denies an operation on the resources that its pattern covers. It applies
to one principal or to every user, and to one host or to any. The semantics are those of Kafka's
StandardAuthorizer:

- A request is refused unless a rule allows it. ``allows_without_rules`` changes this for resources that no
  rule covers.
- A rule that denies takes precedence over every rule that allows.
- A rule that allows Read, Write, Delete or Alter also allows Describe, and one that allows AlterConfigs also
  allows DescribeConfigs. A rule that denies one operation denies no other.
- A rule for All is a rule for every operation.
- A super user may do everything; no rule applies to it.

A decision about one resource looks up its name, the wildcard ``*`` and, for each length that a prefix in a
rule has, the beginning of the name with this length. So its cost does not depend on the number of rules.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kafkalite.errors import InvalidRequestError
from kafkalite.model import topic_name_problem

WILDCARD: Final = "*"  #: as the name of a literal pattern, as a host, and in ANY_USER
USER_PREFIX: Final = "User:"
ANY_USER: Final = "User:*"
ANONYMOUS: Final = "User:ANONYMOUS"  #: a client without a certificate and without a login
RESERVED: Final = frozenset({ANY_USER, ANONYMOUS})  #: principals that no login and no certificate proves
CLUSTER_NAME: Final = "kafka-cluster"  #: the name of the only resource of type CLUSTER
MAX_NAME_BYTES: Final = 1_024  #: of a resource name, principal or host in a rule, in UTF-8
_MAX_CACHED: Final = 10_000  # decisions; clients choose hosts and names, so the cache must be bounded


class Operation(enum.IntEnum):
    """What a request does with a resource, with Kafka's numbers."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class ResourceType(enum.IntEnum):
    """The types of resources, with Kafka's numbers."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    USER = 7


class PatternType(enum.IntEnum):
    """Whether the name in a rule is a whole resource name or a prefix. The numbers are Kafka's."""

    LITERAL = 3  #: the resource with this name; the name ``*`` selects all
    PREFIXED = 4  #: the resources whose names begin with this name


class Permission(enum.IntEnum):
    """What a rule does, with Kafka's numbers."""

    DENY = 2
    ALLOW = 3


_Op = Operation
#: The operations of each resource type. A rule may also name ALL.
OPERATIONS: Final[dict[ResourceType, frozenset[Operation]]] = {
    ResourceType.TOPIC: frozenset(
        {
            _Op.READ,
            _Op.WRITE,
            _Op.CREATE,
            _Op.DELETE,
            _Op.ALTER,
            _Op.DESCRIBE,
            _Op.DESCRIBE_CONFIGS,
            _Op.ALTER_CONFIGS,
        }
    ),
    ResourceType.GROUP: frozenset({_Op.READ, _Op.DELETE, _Op.DESCRIBE}),
    ResourceType.CLUSTER: frozenset(
        {
            _Op.CREATE,
            _Op.ALTER,
            _Op.DESCRIBE,
            _Op.CLUSTER_ACTION,
            _Op.DESCRIBE_CONFIGS,
            _Op.ALTER_CONFIGS,
            _Op.IDEMPOTENT_WRITE,
        }
    ),
    ResourceType.TRANSACTIONAL_ID: frozenset({_Op.WRITE, _Op.DESCRIBE}),
    ResourceType.USER: frozenset({_Op.ALTER, _Op.DESCRIBE}),
}
#: {operation: the operations that a rule allowing it also allows}
IMPLIED: Final[dict[Operation, frozenset[Operation]]] = {
    _Op.READ: frozenset({_Op.DESCRIBE}),
    _Op.WRITE: frozenset({_Op.DESCRIBE}),
    _Op.DELETE: frozenset({_Op.DESCRIBE}),
    _Op.ALTER: frozenset({_Op.DESCRIBE}),
    _Op.ALTER_CONFIGS: frozenset({_Op.DESCRIBE_CONFIGS}),
    _Op.ALL: frozenset(Operation),
}


#: Prefixes that are no topic names, but with which names can begin.
_DOT_PREFIXES: Final = frozenset({(PatternType.PREFIXED, "."), (PatternType.PREFIXED, "..")})


class AclBinding(NamedTuple):
    """One rule. Two rules are the same if all their fields are equal."""

    resource_type: int  #: a ResourceType
    pattern_type: int  #: a PatternType
    name: str  #: of the resource, or the prefix of its name
    principal: str  #: ``User:alice``, or ANY_USER
    host: str  #: the client's IP address, or WILDCARD
    operation: int  #: an Operation
    permission: int  #: a Permission

    def __str__(self) -> str:
        verb = "may" if self.permission == Permission.ALLOW else "may not"
        where = "" if self.host == WILDCARD else f" from {self.host}"
        kind = "prefix " if self.pattern_type == PatternType.PREFIXED else ""
        return (
            f"{self.principal}{where} {verb} {label(Operation(self.operation))}"
            f" {label(ResourceType(self.resource_type))} {kind}{self.name!r}"
        )


class AclFilter(NamedTuple):
    """Selects rules. A field that is None selects every value."""

    resource_type: int | None = None
    pattern_type: int | None = None
    name: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: int | None = None
    permission: int | None = None

    def matches(self, binding: AclBinding) -> bool:
        """Whether the rule has the value of every field that is not None."""
        return all(wanted is None or wanted == value for wanted, value in zip(self, binding, strict=True))


EVERY_ACL: Final = AclFilter()


class Verdict(NamedTuple):
    """A decision and its reason."""

    is_allowed: bool
    reason: str  #: a sentence
    rule: AclBinding | None  #: the rule that decided; None for a super user, and if no rule matched


class _Masks:
    """The operations that the rules with one pattern, principal and host allow and deny, as sets of bits."""

    __slots__ = ("allowed", "denied")

    def __init__(self, rules: Iterable[AclBinding]) -> None:
        self.allowed = self.denied = 0
        for rule in rules:
            operation = Operation(rule.operation)
            if rule.permission == Permission.ALLOW:
                self.allowed |= _bits({operation} | IMPLIED.get(operation, frozenset()))
            else:
                self.denied |= _bits(Operation if operation is Operation.ALL else {operation})


_Pattern = tuple[int, int, str]  # resource type, pattern type, name
_Who = tuple[str, str]  # principal, host


class Authorizer:
    """Decides by its rules who may do what. A change of the rules takes effect at once."""

    def __init__(
        self,
        rules: Iterable[AclBinding] = (),
        *,
        super_users: Iterable[str] = (),
        allows_without_rules: bool = False,
    ) -> None:
        """With ``allows_without_rules``, everybody may do everything on a resource that no rule covers."""
        self._super_users = frozenset(super_users)
        self._allows_without_rules = allows_without_rules
        self._rules: dict[_Pattern, dict[_Who, dict[AclBinding, None]]] = {}
        self._masks: dict[_Pattern, dict[_Who, _Masks]] = {}
        self._prefix_lengths: dict[int, Counter[int]] = {kind: Counter() for kind in ResourceType}
        self._cache: dict[tuple[str, str, int, str], int] = {}  # {who and resource: bits of operations}
        self._count = 0
        self.update(added=rules)

    def __repr__(self) -> str:
        return f"<Authorizer with {self._count} rules>"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[AclBinding]:
        """Yield every rule."""
        for by_who in self._rules.values():
            for rules in by_who.values():
                yield from rules

    def update(self, *, added: Iterable[AclBinding] = (), removed: Iterable[AclBinding] = ()) -> None:
        """Remove and then add rules, and forget the cached decisions.

        It has no effect to add a rule that is present, or to remove a rule that is absent.
        """
        changed: set[tuple[_Pattern, _Who]] = set()
        for rule in removed:
            pattern, who = _place(rule)
            if self._rules.get(pattern, {}).get(who, {}).pop(rule, rule) is None:
                self._count -= 1
                changed.add((pattern, who))
        for rule in added:
            pattern, who = _place(rule)
            rules = self._rules.setdefault(pattern, {}).setdefault(who, {})
            if rule not in rules:
                rules[rule] = None
                self._count += 1
                changed.add((pattern, who))
        for pattern, who in changed:
            self._refresh(pattern, who)
        self._cache.clear()

    def _refresh(self, pattern: _Pattern, who: _Who) -> None:
        """Derive the masks and the prefix lengths from the rules of one pattern, principal and host."""
        had_masks = pattern in self._masks
        if rules := self._rules[pattern][who]:
            self._masks.setdefault(pattern, {})[who] = _Masks(rules)
        else:
            del self._rules[pattern][who]
            self._masks.get(pattern, {}).pop(who, None)
            if not self._rules[pattern]:
                del self._rules[pattern]
                self._masks.pop(pattern, None)
        has_masks = pattern in self._masks
        resource_type, pattern_type, name = pattern
        if pattern_type == PatternType.PREFIXED and had_masks != has_masks:
            lengths = self._prefix_lengths[resource_type]
            lengths[len(name)] += 1 if has_masks else -1
            if not lengths[len(name)]:
                del lengths[len(name)]

    def allows(self, principal: str, host: str, operation: int, resource_type: int, name: str) -> bool:
        """Whether ``principal`` at the IP address ``host`` may perform ``operation`` on the resource.

        The name WILDCARD stands for all resources of the type. The result is then False if a rule denies the
        operation on any of them.
        """
        key = (principal, host, resource_type, name)
        allowed = self._cache.get(key)
        if allowed is None:
            if principal in self._super_users:
                return True
            allowed = self._allowed(principal, host, resource_type, name)
            if len(name) <= MAX_NAME_BYTES:  # clients choose names, and only the number of entries is bounded
                if len(self._cache) >= _MAX_CACHED:
                    self._cache.clear()
                self._cache[key] = allowed
        return allowed >> operation & 1 == 1

    def allows_on_any(self, principal: str, host: str, operation: int, resource_type: int) -> bool:
        """Whether ``principal`` may perform ``operation`` on at least one resource of this type (KIP-679).

        A rule that allows is ignored if a rule denies the operation on every resource that the former covers.
        The cost grows with the number of patterns.
        """
        if principal in self._super_users:
            return True
        whos = _whos(principal, host)
        allowed: list[_Pattern] = []
        denied: set[_Pattern] = set()
        for pattern, by_who in self._masks.items():
            if pattern[0] == resource_type:
                masks = [by_who[who] for who in whos if who in by_who]
                if any(mask.denied >> operation & 1 for mask in masks):
                    denied.add(pattern)
                elif any(mask.allowed >> operation & 1 for mask in masks):
                    allowed.append(pattern)
        if (resource_type, PatternType.LITERAL, WILDCARD) in denied:
            return False
        if self._allows_without_rules and (resource_type, PatternType.LITERAL, WILDCARD) not in self._masks:
            return True  # some name is covered by no rule
        return any(
            (pattern_type == PatternType.LITERAL and name == WILDCARD)
            or not any(
                (resource_type, PatternType.PREFIXED, name[:length]) in denied
                for length in range(1, len(name) + 1)
            )
            for _, pattern_type, name in allowed
        )

    def explain(self, principal: str, host: str, operation: int, resource_type: int, name: str) -> Verdict:
        """Return the decision that ``allows`` makes, with the reason and the rule that decided, if any."""
        if principal in self._super_users:
            return Verdict(True, f"{principal} is a super user", None)
        found = [
            rule
            for pattern in self._touching(resource_type, name)
            for who in _whos(principal, host)
            for rule in self._rules[pattern].get(who, ())
        ]
        for rule in found:
            if rule.permission == Permission.DENY and rule.operation in (operation, Operation.ALL):
                return Verdict(False, f"the rule denies it: {rule}", rule)
        covering = self._patterns(resource_type, name)
        for rule in found:
            given = Operation(rule.operation)
            if _place(rule)[0] not in covering:
                continue
            if rule.permission == Permission.ALLOW and (
                given == operation or operation in IMPLIED.get(given, ())
            ):
                return Verdict(True, f"the rule allows it: {rule}", rule)
        if self._allows_without_rules and not self._touching(resource_type, name):
            return Verdict(True, "no rule covers it, and allow.everyone.if.no.acl.found is true", None)
        return Verdict(False, "no rule allows it", None)

    def _allowed(self, principal: str, host: str, resource_type: int, name: str) -> int:
        """Return the bits of the operations that are allowed on one resource."""
        allowed = denied = 0
        whos = _whos(principal, host)
        covering = set(self._patterns(resource_type, name))
        touching = self._touching(resource_type, name)
        if self._allows_without_rules and not touching:
            return _bits(Operation)
        for pattern in touching:
            by_who = self._masks[pattern]
            for who in whos:
                masks = by_who.get(who)
                if masks is not None:
                    denied |= masks.denied
                    if pattern in covering:
                        allowed |= masks.allowed
        return allowed & ~denied

    def _touching(self, resource_type: int, name: str) -> list[_Pattern]:
        """Return the patterns of rules that cover the resource; for WILDCARD, all patterns of the type."""
        if name != WILDCARD:
            return self._patterns(resource_type, name)
        return [pattern for pattern in self._masks if pattern[0] == resource_type]

    def _patterns(self, resource_type: int, name: str) -> list[_Pattern]:
        """Return the patterns of rules that cover the resource."""
        patterns = [
            (resource_type, int(PatternType.LITERAL), name),
            (resource_type, int(PatternType.LITERAL), WILDCARD),
        ]
        patterns += [
            (resource_type, int(PatternType.PREFIXED), name[:length])
            for length in self._prefix_lengths[resource_type]
            if length <= len(name)
        ]
        return [pattern for pattern in patterns if pattern in self._masks]


def label(value: Operation | ResourceType | Permission | PatternType) -> str:
    """Return Kafka's spelling of a name, such as ``DescribeConfigs`` or ``TransactionalId``."""
    return value.name.title().replace("_", "")


def refusal_of(principal: str, operation: Operation, resource_type: ResourceType, name: str) -> str:
    """Return the error message for an operation that is not allowed, with a command that allows it.

    A name is cut to MAX_NAME_BYTES characters.
    """
    name = name[:MAX_NAME_BYTES]
    option = resource_type.name.lower().replace("_", "-")
    target = "--cluster" if resource_type is ResourceType.CLUSTER else f"--{option} {name!r}"
    refused = f"{principal} may not {label(operation)} {label(resource_type)} {name!r}"
    if operation is Operation.IDEMPOTENT_WRITE:  # which Write on any topic allows, too
        refused = f"{principal} may Write to no topic"
        operation, target = Operation.WRITE, "--topic NAME"
    allows = f"kl acl add {principal!r} --operation {label(operation)} {target}"
    return f"{refused}; an administrator allows it with {allows}"


def check_binding(binding: AclBinding) -> None:
    """Raise InvalidRequestError if a rule can't be stored, because it could never apply or is malformed."""
    try:
        resource_type = ResourceType(binding.resource_type)
        operation = Operation(binding.operation)
        PatternType(binding.pattern_type)
        Permission(binding.permission)
    except ValueError as error:
        raise InvalidRequestError(f"an ACL has an unknown number: {error}") from error
    if operation is not Operation.ALL and operation not in OPERATIONS[resource_type]:
        allowed = ", ".join(sorted(label(one) for one in OPERATIONS[resource_type]))
        raise InvalidRequestError(
            f"{label(operation)} is no operation of a {label(resource_type)}; use All or one of {allowed}"
        )
    if resource_type is ResourceType.CLUSTER and binding[1:3] != (PatternType.LITERAL, CLUSTER_NAME):
        raise InvalidRequestError(
            f"the only resource of type Cluster is {CLUSTER_NAME!r}, literal; the ACL names {binding.name!r}"
        )
    check_principal(binding.principal)
    if not _is_name(binding.name):
        raise InvalidRequestError(
            f"the resource name of an ACL has 1 to {MAX_NAME_BYTES} bytes of printable characters;"
            f" it is {binding.name[:80]!r}"
        )
    if resource_type is ResourceType.TOPIC and binding[1:3] != (PatternType.LITERAL, WILDCARD):
        problem = topic_name_problem(binding.name)
        if problem is not None and binding[1:3] not in _DOT_PREFIXES:
            raise InvalidRequestError(f"the ACL covers no topic: {problem}"[:400])
    _check_host(binding.host)


def _check_host(host: str) -> None:
    """Raise InvalidRequestError unless ``host`` is WILDCARD or an IP address as brokers write it.

    Rules are compared as text, so a network, a name, or another spelling of an address would never apply.
    """
    if host == WILDCARD:
        return
    try:
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        spelling = str(address if mapped is None else mapped).partition("%")[0]
    except ValueError:
        raise InvalidRequestError(
            f"the host of an ACL is '*' or one IP address, not a name or a network; it is {host[:80]!r}"
        ) from None
    if spelling != host:
        raise InvalidRequestError(f"write the host {host[:80]!r} of an ACL as {spelling!r}")


def super_users_of(text: str) -> tuple[str, ...]:
    """Return the principals in ``text``, a value of ``super.users``. Semicolons separate them."""
    return tuple(each.strip() for each in text.split(";") if each.strip())


def check_principal(principal: str) -> None:
    """Raise InvalidRequestError unless ``principal`` is ``User:`` and a name.

    A name has 1 to MAX_NAME_BYTES bytes of printable characters.
    """
    if not principal.startswith(USER_PREFIX) or not _is_name(principal.removeprefix(USER_PREFIX)):
        raise InvalidRequestError(f"a principal is 'User:' and a name; it is {principal[:80]!r}")


def _is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text.encode()) <= MAX_NAME_BYTES


def _whos(principal: str, host: str) -> tuple[_Who, ...]:
    return (principal, host), (principal, WILDCARD), (ANY_USER, host), (ANY_USER, WILDCARD)


def _place(rule: AclBinding) -> tuple[_Pattern, _Who]:
    return (rule.resource_type, rule.pattern_type, rule.name), (rule.principal, rule.host)


def _bits(operations: Iterable[Operation]) -> int:
    return sum(1 << operation for operation in set(operations))
