"""The table of permissions: every API has an entry, and every resource that a request names is decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args, get_type_hints

import pytest

from kafkalite.broker.server.turns import finished
from kafkalite.protocol.api import APIS, CLUSTER_APIS, LOGIN_APIS, ApiKey
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.protocol.structs import Struct
from kafkalite.security import required
from kafkalite.security.acls import CLUSTER_NAME, OPERATIONS, Authorizer, Operation, ResourceType
from kafkalite.security.required import ERRORS, REQUIRED, Denial
from proof.authorization_document import PAGE, render_page
from proof.authorization_matrix import USER, Recorder, cases, request_of, rule
from proof.example_messages import example

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID
#: The fields of messages that name a resource, and its type. ``name`` and ``names`` are topics in the APIs
#: that no cluster permission covers.
NAMING = {
    "topic": TOPIC,
    "topics": TOPIC,
    "name": TOPIC,
    "names": TOPIC,
    "subscribed_topics": TOPIC,
    "group_id": GROUP,
    "group_ids": GROUP,
    "keys": GROUP,
    "transactional_id": TRANSACTIONAL_ID,
    "transactional_ids": TRANSACTIONAL_ID,
    "application_id": TRANSACTIONAL_ID,
}
#: Fields with other names of things, which are no resources.
NOT_NAMING = {"software_name", "key", "subscribed_pattern", "assignor"}
ids = pytest.mark.parametrize("key", sorted(APIS), ids=lambda key: ApiKey(key).name)


def denials(*arguments: Any) -> list[Denial] | None:
    return finished(required.denials(*arguments))


def permitted(*arguments: Any) -> Any:
    return finished(required.permitted(*arguments))


def visible(*arguments: Any) -> Any:
    return finished(required.visible(*arguments))


@dataclass
class Of:
    """The Access of one principal under an authoriser."""

    authorizer: Authorizer
    principal: str = USER

    def allows(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return self.authorizer.allows(self.principal, "10.0.0.1", operation, resource_type, name)

    def allows_on_any(self, operation: Operation, resource_type: ResourceType) -> bool:
        return self.authorizer.allows_on_any(self.principal, "10.0.0.1", operation, resource_type)


def named(value: Any, field_name: str = "") -> Iterator[tuple[ResourceType, str]]:
    """Yield (type, name) of every resource in an example."""
    if isinstance(value, Struct):
        for name, item in value._asdict().items():
            yield from named(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from named(item, field_name)
    elif isinstance(value, str) and field_name in NAMING:
        yield NAMING[field_name], value


def covers_everything(key: int) -> bool:
    """Whether the API needs a permission on the cluster, or is only used between nodes before a login."""
    return any(
        need.resource_type is CLUSTER and need.otherwise is None for need in REQUIRED[key].needs
    ) or key in (ApiKey.CLUSTER_HELLO, ApiKey.CLUSTER_PROOF)


def test_every_api_has_an_entry() -> None:
    assert REQUIRED.keys() == APIS.keys()


def test_an_api_without_an_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Recorder(answer=True)
    assert denials(ApiKey.API_VERSIONS, None, everything) == []
    monkeypatch.setattr(required, "REQUIRED", {})
    assert denials(ApiKey.API_VERSIONS, None, everything) is None


def test_only_logins_and_versions_are_open_to_everybody() -> None:
    is_open = {key for key, requirement in REQUIRED.items() if not requirement.needs}
    lists = {ApiKey.LIST_GROUPS, ApiKey.LIST_TRANSACTIONS}
    assert is_open - lists == LOGIN_APIS
    assert all(REQUIRED[key].lists for key in lists)


def test_requests_between_nodes_need_cluster_action() -> None:
    for key in CLUSTER_APIS:
        assert [need.operation for need in REQUIRED[key].needs] == [Operation.CLUSTER_ACTION]


@ids
def test_every_resource_that_a_request_names_is_decided(key: int) -> None:
    if covers_everything(key):
        return
    message = example(APIS[key].request)
    nobody = Recorder()
    found = denials(key, message, nobody)
    assert found is not None
    asked = {(resource_type, name) for _, resource_type, name in nobody.asked}
    assert set(named(message)) <= asked
    assert {(one.operation, one.resource_type, one.name) for one in found} <= nobody.asked
    assert bool(found) == bool(REQUIRED[key].needs)


@ids
def test_a_response_contains_no_resource_that_the_request_could_not_name(key: int) -> None:
    if covers_everything(key):
        return
    request = example(APIS[key].request)
    if key == ApiKey.METADATA:
        request = request._replace(topics=None)
    response = visible(key, request, example(APIS[key].response), Recorder())
    decided = {need.resource_type for need in REQUIRED[key].needs}
    left = {resource_type for resource_type, _ in named(response)}
    assert left <= decided
    full = example(APIS[key].response)
    assert visible(key, request, full, Recorder(answer=True)) == full


def test_every_name_in_a_message_is_known_to_these_tests() -> None:
    """A new field for a name must be added to NAMING, or be declared as none."""

    def fields(hint: Any) -> Iterator[str]:
        if isinstance(hint, type) and issubclass(hint, Struct):
            for name, inner in get_type_hints(hint).items():
                if not name.startswith("_"):
                    yield name
                    yield from fields(inner)
        else:
            yield from chain.from_iterable(map(fields, get_args(hint)))

    suspicious = {
        name
        for key, api in APIS.items()
        if not covers_everything(key)
        for name in chain(fields(api.request), fields(api.response))
        if any(word in name for word in ("topic", "group", "transactional", "application", "name", "key"))
    }
    structs = {"topic_id", "group_epoch", "api_key", "key_type", "groups", "validate_only"}
    timeouts = {"transaction_timeout_ms", "allow_auto_topic_creation"}
    assert suspicious - set(NAMING) - NOT_NAMING - structs - timeouts == set()


@ids
def test_the_matrix_of_rules(key: int) -> None:
    """Each API under no rule, wrong rules, the right ones, allowed and denied, and as a super user."""
    message = request_of(key)
    for case in cases(key):
        found = denials(key, message, Of(Authorizer(case.rules)))
        assert (found == []) == case.is_allowed, case
        assert denials(key, message, Of(Authorizer(case.rules, super_users=[USER]))) == [], case


def test_another_permission_may_suffice() -> None:
    def allowed(key: ApiKey, message: Any, *rules: Any) -> bool:
        return denials(key, message, Of(Authorizer(rules))) == []

    create = example(APIS[ApiKey.CREATE_TOPICS].request)
    assert allowed(ApiKey.CREATE_TOPICS, create, rule(Denial(Operation.CREATE, CLUSTER, CLUSTER_NAME)))
    init = example(APIS[ApiKey.INIT_PRODUCER_ID].request)._replace(transactional_id=None)
    assert not allowed(ApiKey.INIT_PRODUCER_ID, init)
    assert allowed(ApiKey.INIT_PRODUCER_ID, init, rule(Denial(Operation.WRITE, TOPIC, "orders")))
    assert not allowed(ApiKey.INIT_PRODUCER_ID, init, rule(Denial(Operation.READ, TOPIC, "orders")))
    idempotent = rule(Denial(Operation.IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME))
    assert allowed(ApiKey.INIT_PRODUCER_ID, init, idempotent)


def test_a_client_that_may_not_create_topics_does_not_create_them_by_asking_for_them() -> None:
    message = MetadataRequest(["a", "b"], allow_auto_topic_creation=True)
    on_a, on_b = (rule(Denial(Operation.CREATE, TOPIC, name)) for name in ("a", "b"))
    on_all = rule(Denial(Operation.CREATE, CLUSTER, CLUSTER_NAME))
    for rules, may_create in (([], False), ([on_a], False), ([on_a, on_b], True), ([on_all], True)):
        assert permitted(message, Of(Authorizer(rules))).allow_auto_topic_creation == may_create
    for other in (MetadataRequest(None, True), MetadataRequest(["a"], False)):
        assert permitted(other, Of(Authorizer())) == other


def test_configs_of_brokers_belong_to_the_cluster() -> None:
    message = example(APIS[ApiKey.DESCRIBE_CONFIGS].request)
    resource = message.resources[0]
    message = message._replace(resources=[resource, resource._replace(resource_type="broker", name="1")])
    found = denials(ApiKey.DESCRIBE_CONFIGS, message, Recorder())
    assert found == [
        Denial(Operation.DESCRIBE_CONFIGS, TOPIC, resource.name),
        Denial(Operation.DESCRIBE_CONFIGS, CLUSTER, CLUSTER_NAME),
    ]


def test_coordinators_are_found_by_the_type_of_their_keys() -> None:
    message = example(APIS[ApiKey.FIND_COORDINATOR].request)
    for key_type, expected in ((0, GROUP), (1, TRANSACTIONAL_ID)):
        found = denials(ApiKey.FIND_COORDINATOR, message._replace(key_type=key_type), Recorder())
        assert found == [Denial(Operation.DESCRIBE, expected, "keys")]


def test_the_lists_of_a_limited_client_have_only_what_it_may_describe() -> None:
    response: Any = example(APIS[ApiKey.METADATA].response)
    mine, other = response.topics[0]._replace(name="mine"), response.topics[0]._replace(name="other")
    response = response._replace(topics=[mine, other])
    read = Of(Authorizer([rule(Denial(Operation.READ, TOPIC, "mine"))]))
    everything = MetadataRequest(None, allow_auto_topic_creation=False)
    assert visible(ApiKey.METADATA, everything, response, read).topics == [mine]
    named_both = everything._replace(topics=["mine", "other"])
    assert visible(ApiKey.METADATA, named_both, response, read) == response, "the handler decides each"


def test_every_need_is_an_operation_of_its_resource() -> None:
    for requirement in REQUIRED.values():
        for need in requirement.needs:
            assert need.operation in OPERATIONS[need.resource_type]
            assert need.resource_type in ERRORS


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert render_page(page) == page
    assert page.count("\n| ") > len(APIS), "the table is there"
