"""Access control rules at a broker: every request passes the table, and every list is pruned (S9)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import APIS, CLUSTER_APIS, ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data, groups, metadata
from kafkalite.protocol.structs import Struct
from kafkalite.records.builder import build_batch
from kafkalite.security.acls import (
    ANONYMOUS,
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    Authorizer,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from kafkalite.security.required import ERRORS, REQUIRED, denials
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient
from proof.example_messages import example

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
#: The requests of clients that need a permission.
GUARDED = sorted(key for key in APIS if key not in CLUSTER_APIS and REQUIRED[key].needs)


class _Nobody:
    def allows(self, _operation: Operation, _resource_type: ResourceType, _name: str) -> bool:
        return False

    def allows_on_any(self, _operation: Operation, _resource_type: ResourceType) -> bool:
        return False


def rule(
    operation: Operation,
    resource_type: ResourceType,
    name: str,
    permission: Permission = Permission.ALLOW,
    pattern_type: PatternType = PatternType.LITERAL,
) -> AclBinding:
    return AclBinding(resource_type, pattern_type, name, ANONYMOUS, WILDCARD, operation, permission)


def codes(value: Any) -> Iterator[int]:
    """Yield every error code in a response."""
    if isinstance(value, Struct):
        for name, item in value._asdict().items():
            if name == "error_code":
                yield item
            else:
                yield from codes(item)
    elif isinstance(value, list):
        for item in value:
            yield from codes(item)


def running() -> Broker:
    return Broker(listeners="inproc://", log_dirs="/b", filesystem=MemoryFileSystem())


async def answer(request: Any, authorizer: Authorizer | None) -> set[int]:
    """Return the error codes of a new broker's response."""
    async with Broker(listeners="inproc://", log_dirs="/b", filesystem=MemoryFileSystem()) as broker:
        broker._dispatcher.authorizer = authorizer
        async with WireClient(broker.address) as wire:
            return set(codes(await wire.call(request)))


@pytest.mark.parametrize("key", GUARDED, ids=lambda key: ApiKey(key).name)
async def test_every_request_passes_the_table(key: int) -> None:
    """Without rules, with the right ones, with one of them denied, and as a super user."""
    message = example(APIS[key].request)
    if key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
        message = message._replace(subscribed_pattern=None)
    if key == ApiKey.METADATA:
        message = message._replace(allow_auto_topic_creation=False)
    needed = denials(key, message, _Nobody())
    assert needed
    refusals = {int(ERRORS[one.resource_type]) for one in needed}
    open_answer = await answer(message, None)
    right = [rule(*one) for one in needed]
    assert await answer(message, Authorizer(right)) == open_answer
    assert await answer(message, Authorizer(super_users=[ANONYMOUS])) == open_answer
    wrong = [[], [one._replace(principal="User:bob") for one in right]]
    wrong += [[*right, one._replace(permission=Permission.DENY)] for one in right]
    for rules in wrong:
        found = await answer(message, Authorizer(rules))
        assert found & refusals and found <= refusals | {0}


async def produced(wire: WireClient, *topics: str) -> list[int]:
    batch = build_batch([b"x"])
    partitions = [data.ProducePartition(topic, 0, len(batch)) for topic in topics]
    response = await wire.call(data.ProduceRequest(-1, 1000, None, partitions), *[batch] * len(topics))
    return [one.error_code for one in response.partitions]


async def test_produce_and_fetch_refuse_single_topics(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as broker, WireClient(broker.address) as wire:
        new = [admin.NewTopic(name, 1, 1, {}) for name in ("mine", "secret")]
        await wire.call(admin.CreateTopicsRequest(0, False, new))
        rules = [rule(Operation.WRITE, TOPIC, "mine"), rule(Operation.READ, TOPIC, "mine")]
        authorizer = broker._dispatcher.authorizer = Authorizer(rules)
        refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert await produced(wire, "mine", "secret", "missing") == [0, refused, refused]
        assert [record.getMessage() for record in caplog.records if record.name == "kafkalite.audit"] == [
            f"request denied principal=User:ANONYMOUS host=inproc operation=Write resource_type=Topic"
            f" resource={topic}"
            for topic in ("secret", "missing")
        ]
        asked = [data.FetchPartition(name, 0, -1, 0, 1000) for name in ("secret", "mine")]
        found = (await wire.call(data.FetchRequest(0, 1, 2000, 0, asked))).partitions
        assert [(one.topic, one.error_code, one.length_bytes > 0) for one in found] == [
            ("secret", refused, False),
            ("mine", 0, True),
        ]
        described = await wire.call(metadata.MetadataRequest(["mine", "secret", "missing"], False))
        assert [one.error_code for one in described.topics] == [0, refused, refused]
        assert [one.partitions for one in described.topics[1:]] == [[], []]
        assert described.topics[1].topic_id == ""
        assert [one.name for one in (await wire.call(metadata.MetadataRequest(None, False))).topics] == [
            "mine"
        ]
        authorizer.update(removed=rules)
        assert await produced(wire, "mine") == [refused], "an open connection, too"


async def test_a_fetch_that_waits_ends_when_its_rule_is_removed() -> None:
    """Records that are appended later are not sent to a client that may no longer read them."""
    async with (
        running() as broker,
        WireClient(broker.address) as reader,
        WireClient(broker.address) as writer,
    ):
        await writer.call(admin.CreateTopicsRequest(0, False, [admin.NewTopic("t", 1, 1, {})]))
        read, write = rule(Operation.READ, TOPIC, "t"), rule(Operation.WRITE, TOPIC, "t")
        authorizer = broker._dispatcher.authorizer = Authorizer([read, write])
        asked = [data.FetchPartition("t", 0, -1, 0, 1000)]
        reader.send(data.FetchRequest(20_000, 1, 2000, 0, asked))
        await writer.call(metadata.MetadataRequest(["t"], False))  # the fetch was received before
        authorizer.update(removed=[read])
        assert await produced(writer, "t") == [0]
        response = await reader.response()
        assert list(codes(response.message)) == [0, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
        assert not reader.last_payload


async def test_lists_have_only_what_the_client_may_describe() -> None:
    async with running() as broker, WireClient(broker.address) as wire:
        await wire.call(admin.CreateTopicsRequest(0, False, [admin.NewTopic("t", 1, 1, {})]))
        for group in ("seen", "hidden"):
            await wire.call(groups.FindCoordinatorRequest(0, [group]))
            one = groups.CommittedOffset("t", 0, 1, -1, None, 0, "", 0, None)
            await wire.call(groups.OffsetCommitRequest(group, "", -1, None, [one]))
        assert len((await wire.call(groups.ListGroupsRequest([]))).groups) == 2
        broker._dispatcher.authorizer = Authorizer([rule(Operation.DESCRIBE, GROUP, "seen")])
        listed = await wire.call(groups.ListGroupsRequest([]))
        assert [one.group_id for one in listed.groups] == ["seen"]


async def test_a_refusal_names_principal_operation_resource_and_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the audit log has a line for each denied and each administrative request."""
    caplog.set_level(logging.INFO, "kafkalite.audit")
    async with running() as broker, WireClient(broker.address) as wire:
        authorizer = broker._dispatcher.authorizer = Authorizer()
        create = admin.CreateTopicsRequest(0, False, [admin.NewTopic(f"t{n}", 1, 1, {}) for n in range(5)])
        refused: RequestError = await wire.call(create)
        assert refused.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert refused.error_message is not None
        assert "kl acl add 'User:ANONYMOUS' --operation Create --topic 't0'" in refused.error_message
        assert refused.error_message.endswith("; 4 more resources are refused")
        authorizer.update(added=[rule(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME)])
        assert set(codes(await wire.call(create))) == {0}
    denied, allowed = (record.getMessage() for record in caplog.records if record.name == "kafkalite.audit")
    assert denied == (
        "request denied principal=User:ANONYMOUS host=inproc api=CREATE_TOPICS operation=Create"
        " resource_type=Topic resource=t0 count=5"
    )
    assert allowed == "request allowed principal=User:ANONYMOUS host=inproc api=CREATE_TOPICS"
