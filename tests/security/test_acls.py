"""The authoriser decides as a naive reading of the rules does, says why, and is fast with many rules."""

from __future__ import annotations

import time
import tracemalloc
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.errors import InvalidRequestError
from kafkalite.security.acls import (
    ANY_USER,
    CLUSTER_NAME,
    IMPLIED,
    WILDCARD,
    AclBinding,
    AclFilter,
    Authorizer,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    check_binding,
    label,
    refusal_of,
)

ALICE, BOB, ROOT = "User:alice", "User:bob", "User:root"
HERE, THERE = "10.0.0.1", "10.0.0.2"


def rule(
    operation: Operation = Operation.READ,
    name: str = "orders",
    *,
    principal: str = ALICE,
    host: str = WILDCARD,
    kind: ResourceType = ResourceType.TOPIC,
    pattern: PatternType = PatternType.LITERAL,
    permission: Permission = Permission.ALLOW,
) -> AclBinding:
    return AclBinding(kind, pattern, name, principal, host, operation, permission)


def allows(
    rules: list[AclBinding],
    operation: Operation = Operation.READ,
    name: str = "orders",
    *,
    principal: str = ALICE,
    host: str = HERE,
    kind: ResourceType = ResourceType.TOPIC,
) -> bool:
    authorizer = Authorizer(rules, super_users=[ROOT])
    verdict = authorizer.explain(principal, host, operation, kind, name)
    allowed = authorizer.allows(principal, host, operation, kind, name)
    assert allowed == verdict.is_allowed
    return allowed


def test_without_rules_only_super_users_are_allowed() -> None:
    assert not allows([])
    assert allows([], principal=ROOT)


def test_a_rule_covers_its_principal_host_operation_and_resource_only() -> None:
    rules = [rule(host=HERE)]
    assert allows(rules)
    assert not allows(rules, principal=BOB)
    assert not allows(rules, host=THERE)
    assert not allows(rules, Operation.WRITE)
    assert not allows(rules, name="orders2")
    assert not allows(rules, kind=ResourceType.GROUP)


def test_a_prefixed_rule_covers_every_name_that_begins_with_it() -> None:
    rules = [rule(name="team-a.", pattern=PatternType.PREFIXED)]
    assert allows(rules, name="team-a.orders")
    assert allows(rules, name="team-a.")
    assert not allows(rules, name="team-a")
    assert not allows(rules, name="team-b.orders")


def test_the_wildcard_covers_all_names_only_as_a_literal() -> None:
    assert allows([rule(name=WILDCARD)])
    assert not allows([rule(name=WILDCARD, pattern=PatternType.PREFIXED)])


def test_a_rule_for_any_user_covers_all_users() -> None:
    assert allows([rule(principal=ANY_USER)], principal=BOB)


def test_deny_wins_whatever_is_more_specific() -> None:
    general_deny = rule(name=WILDCARD, principal=ANY_USER, permission=Permission.DENY)
    assert not allows([rule(), general_deny])
    assert allows([rule(), general_deny], principal=ROOT)
    assert allows([rule(Operation.WRITE), general_deny], Operation.WRITE)


def test_denying_all_operations_denies_each() -> None:
    rules = [rule(Operation.ALL), rule(Operation.ALL, host=HERE, permission=Permission.DENY)]
    for operation in set(Operation) - {Operation.ALL}:
        assert not allows(rules, operation)
        assert allows(rules, operation, host=THERE)


@pytest.mark.parametrize("operation", [op for op in IMPLIED if op is not Operation.ALL], ids=label)
def test_a_rule_that_allows_implies_its_description(operation: Operation) -> None:
    (implied,) = IMPLIED[operation]
    assert allows([rule(operation)], implied)
    denied = rule(operation, permission=Permission.DENY)
    assert allows([rule(implied), denied], implied), "a rule that denies implies nothing"
    assert not allows([rule(operation), rule(implied, permission=Permission.DENY)], implied)


def test_a_change_takes_effect_at_once_also_for_cached_decisions() -> None:
    authorizer = Authorizer()

    def decide() -> bool:
        return authorizer.allows(ALICE, HERE, Operation.READ, ResourceType.TOPIC, "orders")

    denial = rule(name="ord", pattern=PatternType.PREFIXED, permission=Permission.DENY)
    assert not decide()
    authorizer.update(added=[rule()])
    assert decide()
    authorizer.update(added=[denial])
    assert not decide()
    authorizer.update(removed=[denial])
    assert decide()
    authorizer.update(removed=[rule(), rule()])
    assert not decide()
    assert len(authorizer) == 0


def test_the_explanation_names_the_rule_that_decided() -> None:
    denial = rule(name="ord", pattern=PatternType.PREFIXED, host=HERE, permission=Permission.DENY)
    authorizer = Authorizer([rule(), denial], super_users=[ROOT])
    where = (Operation.READ, ResourceType.TOPIC, "orders")
    assert authorizer.explain(ALICE, THERE, *where).rule == rule()
    denied = authorizer.explain(ALICE, HERE, *where)
    assert (denied.is_allowed, denied.rule) == (False, denial)
    assert "User:alice from 10.0.0.1 may not Read Topic prefix 'ord'" in denied.reason
    assert authorizer.explain(BOB, HERE, *where).reason == "no rule allows it"
    assert "super user" in authorizer.explain(ROOT, HERE, *where).reason


NAMES = ["a", "ab", "abc", "b", WILDCARD]
bindings = st.builds(
    AclBinding,
    st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
    st.sampled_from(PatternType),
    st.sampled_from(NAMES),
    st.sampled_from([ALICE, BOB, ANY_USER]),
    st.sampled_from([HERE, WILDCARD]),
    st.sampled_from([Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.ALL]),
    st.sampled_from(Permission),
)


def oracle(rules: set[AclBinding], principal: str, host: str, operation: int, kind: int, name: str) -> bool:
    """Decide by trying every rule."""
    if principal == ROOT:
        return True
    answers = set()
    for one in rules:
        covers = (
            name.startswith(one.name)
            if one.pattern_type == PatternType.PREFIXED
            else (one.name in (name, WILDCARD))
        ) or (name == WILDCARD and one.permission == Permission.DENY)
        if not (covers and one.resource_type == kind and one.principal in (principal, ANY_USER)):
            continue
        given = Operation(one.operation)
        is_implied = one.permission == Permission.ALLOW and operation in IMPLIED.get(given, ())
        if one.host in (host, WILDCARD) and (given in (operation, Operation.ALL) or is_implied):
            answers.add(one.permission)
    return answers == {Permission.ALLOW}


@given(before=st.sets(bindings, max_size=12), after=st.sets(bindings, max_size=12))
def test_decisions_agree_with_a_naive_reading_of_the_rules(
    before: set[AclBinding], after: set[AclBinding]
) -> None:
    authorizer = Authorizer(before, super_users=[ROOT])
    for rules in (before, after):
        if rules is after:
            authorizer.update(added=after - before, removed=before - after)
        assert set(authorizer) == rules
        for who in product([ALICE, BOB, ROOT], [HERE, THERE]):
            for operation, kind in product([Operation.READ, Operation.DESCRIBE], ResourceType):
                expected = {
                    name: oracle(rules, *who, operation, kind, name) for name in [*NAMES, "abcd", "c"]
                }
                for name, is_allowed in expected.items():
                    assert authorizer.allows(*who, operation, kind, name) == is_allowed
                    verdict = authorizer.explain(*who, operation, kind, name)
                    assert verdict.is_allowed == is_allowed
                    assert verdict.rule is None or verdict.rule in rules
                # Names that no rule mentions stand for all others that a pattern covers.
                others = [f"{name}{end}" for name in ["", *NAMES] for end in ["", "~", "c~", "bc~"]]
                exists = any(oracle(rules, *who, operation, kind, name) for name in others if name)
                assert authorizer.allows_on_any(*who, operation, kind) == exists


def test_all_topics_are_not_allowed_while_one_of_them_is_denied() -> None:
    """A pattern subscription would show the denied one."""
    every = rule(name=WILDCARD)
    assert allows([every], name=WILDCARD)
    for pattern in PatternType:
        denied = rule(name="secret", pattern=pattern, permission=Permission.DENY)
        assert not allows([every, denied], name=WILDCARD)
        assert allows([every, denied])
        assert allows([every, denied._replace(principal=BOB)], name=WILDCARD)
        assert allows([every, denied._replace(resource_type=ResourceType.GROUP)], name=WILDCARD)
    assert not allows([rule(name="secret")], name=WILDCARD)
    opened = Authorizer([rule(name="secret", principal=BOB)], allows_without_rules=True)
    assert not opened.allows(ALICE, HERE, Operation.READ, ResourceType.TOPIC, WILDCARD)
    assert opened.allows(ALICE, HERE, Operation.READ, ResourceType.TOPIC, "orders")


def test_names_beyond_the_limit_of_rules_are_not_kept() -> None:
    authorizer = Authorizer([rule(name="x", pattern=PatternType.PREFIXED)])
    tracemalloc.start()
    try:
        for n in range(20):
            long = f"{n}" + "x" * 1_000_000
            assert not authorizer.allows(ALICE, HERE, Operation.READ, ResourceType.TOPIC, long)
            assert authorizer.allows(
                ALICE, HERE, Operation.READ, ResourceType.TOPIC, long.lstrip("0123456789")
            )
            assert len(refusal_of(ALICE, Operation.READ, ResourceType.TOPIC, long)) < 5_000
        del long
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_decision_takes_microseconds_with_ten_thousand_rules() -> None:
    rules = [
        rule(
            name=f"team-{n % 500:03}.topic-{n}"[: 6 + n % 12],
            principal=f"User:{n % 97}",
            pattern=PatternType.PREFIXED if n % 2 else PatternType.LITERAL,
            host=HERE if n % 3 else WILDCARD,
        )
        for n in range(20_000)
    ]
    authorizer = Authorizer(dict.fromkeys(rules))
    assert len(authorizer) > 10_000

    def cost_us(names: list[str]) -> float:
        began = time.process_time_ns()
        for name in names:
            authorizer.allows("User:7", HERE, Operation.READ, ResourceType.TOPIC, name)
        return (time.process_time_ns() - began) / 1_000 / len(names)

    distinct = [f"team-{n % 500:03}.topic-{n}" for n in range(5_000)]
    new_us, cached_us = cost_us(distinct), cost_us(["team-001.topic-1"] * 20_000)
    print(f"a decision with {len(authorizer)} rules: {new_us:.1f} us, cached {cached_us:.2f} us")
    assert new_us < 1_000  # a scan of the rules takes several milliseconds


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        (rule(Operation.CLUSTER_ACTION), "no operation of a Topic"),
        (rule(principal="alice"), "a principal is 'User:' and a name"),
        (rule(principal="User:"), "a principal is 'User:' and a name"),
        (rule(principal="User:a\n"), "a principal is 'User:' and a name"),
        (rule(name=""), "resource name"),
        (rule(name="x" * 1_025), "resource name"),
        (rule(host="\x1b[1m"), "host"),
        (rule(host=""), "host"),
        (rule(host="localhost"), "not a name or a network"),
        (rule(host="10.0.0.0/8"), "not a name or a network"),
        (rule(host="10.0.0.1 "), "not a name or a network"),
        (rule(host="010.0.0.1"), "not a name or a network"),
        (rule(host="0:0:0:0:0:0:0:1"), "as '::1'"),
        (rule(host="FD00::1"), "as 'fd00::1'"),
        (rule(host="::ffff:10.0.0.1"), "as '10.0.0.1'"),
        (rule(host="fe80::1%eth0"), "as 'fe80::1'"),
        (rule(name="ord\u0435rs"), "covers no topic"),
        (rule(name="secret*", pattern=PatternType.PREFIXED), "covers no topic"),
        (rule(name="*", pattern=PatternType.PREFIXED), "covers no topic"),
        (rule(name=".."), "covers no topic"),
        (rule(Operation.ALTER, "other", kind=ResourceType.CLUSTER), "only resource of type Cluster"),
        (rule()._replace(operation=99), "unknown number"),
        (rule()._replace(resource_type=6), "unknown number"),
        (rule()._replace(pattern_type=1), "unknown number"),
        (rule()._replace(permission=1), "unknown number"),
    ],
)
def test_a_rule_that_could_never_apply_is_refused(binding: AclBinding, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        check_binding(binding)


def test_valid_rules_are_accepted() -> None:
    check_binding(rule())
    check_binding(rule(name="..", pattern=PatternType.PREFIXED))
    check_binding(rule(Operation.READ, "gr\u00fcn *", kind=ResourceType.GROUP))
    check_binding(rule(host="10.0.0.1"))
    check_binding(rule(host="fd00::1"))
    check_binding(rule(Operation.ALTER, CLUSTER_NAME, kind=ResourceType.CLUSTER))
    check_binding(rule(Operation.ALL, WILDCARD, principal=ANY_USER, kind=ResourceType.USER))


def test_a_filter_selects_rules_by_the_fields_that_it_names() -> None:
    assert AclFilter().matches(rule())
    assert AclFilter(name="orders", principal=ALICE).matches(rule())
    assert not AclFilter(name="orders", principal=BOB).matches(rule())
    assert not AclFilter(permission=Permission.DENY).matches(rule())
