"""Access control rules at a broker: every request passes the table, and every list is pruned (S9)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.turns import PARTITIONS_PER_TURN, InTurns
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import APIS, CLUSTER_APIS, LOGIN_APIS, ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data, groups, metadata
from kafkalite.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from kafkalite.protocol.structs import Struct
from kafkalite.records.builder import build_batch
from kafkalite.security import required
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
from kafkalite.security.oauth import OauthClient
from kafkalite.security.required import ERRORS
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient
from proof.authorization_matrix import USER, cases, needs, request_of

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
REFUSALS = {int(code) for code in ERRORS.values()}
#: Refused to super users: these need a proof of the cluster's secret.
WITH_SECRET = CLUSTER_APIS | {ApiKey.CONTROLLED_SHUTDOWN, ApiKey.ELECT_LEADERS}


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


async def test_the_matrix_over_sockets(tmp_path: Path) -> None:
    """Each API under each of the rules, by users that log in over TCP, and as a super user. Requests of nodes
    are refused to all of them (S10)."""
    pytest.importorskip("jwt")
    from proof.token_issuer import AUDIENCE, Issuer

    issuer = Issuer()
    (tmp_path / "keys").write_bytes(issuer.key_set)
    cluster = Cluster(
        transport="tcp",
        security_protocol="SASL_PLAINTEXT",
        sasl_enabled_mechanisms="SCRAM-SHA-512,OAUTHBEARER",
        sasl_allow_plain_without_tls=True,
        sasl_oauthbearer_jwks_endpoint_url=str(tmp_path / "keys"),
        sasl_oauthbearer_expected_audience=AUDIENCE,
        authorizer_class_name="StandardAuthorizer",
        super_users="User:client;User:boss",
    )

    async def codes_of(user: str, message: Any) -> set[int]:
        async with WireClient(cluster.broker.addresses[0]) as wire:
            await wire.call(SaslHandshakeRequest("OAUTHBEARER"))
            token = OauthClient(issuer.token(user)).first()
            assert (await wire.call(SaslAuthenticateRequest(token))).error_code == 0
            return set(codes(await wire.call(message)))

    planned = {
        (key, f"{ApiKey(key).name}-{number}"): case
        for key in APIS.keys() - LOGIN_APIS
        for number, case in enumerate(cases(key))
    }
    rules = list(
        dict.fromkeys(
            one._replace(principal=f"User:{user}") if one.principal == USER else one
            for (_, user), case in planned.items()
            for one in case.rules
        )
    )
    wrong: list[str] = []
    async with cluster:
        async with cluster.admin() as admin:
            for first in range(0, len(rules), 100):
                await admin.create_acls(rules[first : first + 100])
        open_answers = {key: await codes_of("boss", request_of(key)) for key in APIS.keys() - LOGIN_APIS}
        for (key, user), case in planned.items():
            message = request_of(key)
            refusals = {int(ERRORS[one.resource_type]) for one in needs(key, message)}
            found = await codes_of(user, message)
            if case.is_allowed or key in CLUSTER_APIS:
                is_right = found & REFUSALS == open_answers[key] & REFUSALS
            else:
                is_right = bool(found & refusals) and found <= refusals | {0}
            if not is_right:
                wrong.append(f"{user} {case.name!r}: {found}, as a super user {open_answers[key]}")
    assert not wrong, "\n".join(wrong)
    assert {key for key, found in open_answers.items() if found & REFUSALS} == WITH_SECRET
    assert len(planned) > 4 * len(open_answers), "the matrix is there"


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
            "request denied principal=User:ANONYMOUS host=inproc api=PRODUCE operation=Write"
            " resource_type=Topic resource=secret count=2"
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


async def test_a_request_for_thousands_of_topics_that_are_refused_has_few_lines_in_the_audit_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise a client without any permission fills the disk, and keeps all others waiting."""
    count, refused = 5_000, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    async with running() as broker, WireClient(broker.address) as wire:
        broker._dispatcher.authorizer = Authorizer([])
        names = [f"t{number}" for number in range(count)]
        described = await wire.call(metadata.MetadataRequest(names, False))
        assert [one.error_code for one in described.topics] == [refused] * count
        asked = [data.FetchPartition(name, 0, -1, 0, 1000) for name in names]
        fetched = await wire.call(data.FetchRequest(0, 1, 2000, 0, asked))
        assert [one.error_code for one in fetched.partitions] == [refused] * count
        sent = [data.ProducePartition(name, 0, 0) for name in names]
        appended = await wire.call(data.ProduceRequest(-1, 1000, None, sent))
        assert [one.error_code for one in appended.partitions] == [refused] * count
        lines = [record.getMessage() for record in caplog.records if record.name == "kafkalite.audit"]
        assert sum(int(line.rpartition("count=")[2]) for line in lines) == 3 * count
        assert len(lines) <= 1 + 2 * math.ceil(count / PARTITIONS_PER_TURN)


async def test_refusals_of_ten_thousand_long_names_fit_in_a_response() -> None:
    """A text of each, which repeats the name, made the response too large: UNKNOWN_SERVER_ERROR."""
    names = [f"{number:0240}" for number in range(10_000)]
    async with running() as broker, WireClient(broker.address) as wire:
        broker._dispatcher.authorizer = Authorizer([])
        described = (await wire.call(metadata.MetadataRequest(names, False))).topics
        assert [one.name for one in described] == names
        assert {one.error_code for one in described} == {ErrorCode.TOPIC_AUTHORIZATION_FAILED}
        assert described[0].error_message.count(names[0]) == 2, "the refusal and the command"
        assert described[99].error_message == "not allowed, like the first 10 topics"
        assert described[100].error_message is None


async def test_s24_rules_for_many_names_are_checked_in_steps_and_requests_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    called: list[int] = []
    take_step = InTurns._next
    monkeypatch.setattr(InTurns, "_next", lambda self: (steps.append(1), take_step(self)))
    monkeypatch.setattr(required, "NAMES_PER_TURN", 10)
    names = [f"t{number}" for number in range(35)]
    async with running() as broker, WireClient(broker.address) as wire:
        dispatcher = broker._dispatcher
        call = dispatcher._call
        monkeypatch.setattr(
            dispatcher,
            "_call",
            lambda request, client: (called.append(request.api_key), call(request, client))[1],
        )
        everything = AclBinding(TOPIC, PatternType.LITERAL, WILDCARD, ANONYMOUS, "*", 2, Permission.ALLOW)
        dispatcher.authorizer = Authorizer([everything])
        wire.send(admin.CreateTopicsRequest(0, False, [admin.NewTopic(name, 1, 1, {}) for name in names]))
        wire.send(metadata.MetadataRequest(None, False))
        created, listed = [(await wire.response()).message for _ in range(2)]
        assert [one.error_code for one in created.topics] == [0] * 35
        assert len(listed.topics) == 35, "the second request was served after the first one"
        assert called == [ApiKey.CREATE_TOPICS, ApiKey.METADATA]
        assert len(steps) == 3 + 3, "after the first step: three for names to create, three for those listed"
        dispatcher.authorizer = Authorizer([])
        refused: RequestError = await wire.call(
            data.ListOffsetsRequest(0, [data.ListOffsetsPartition(name, 0, -1, -1) for name in names])
        )
        assert refused.error_message is not None and "34 more resources" in refused.error_message
        dispatcher.authorizer = Authorizer([rule(Operation.DESCRIBE, TOPIC, "t7")])
        steps.clear()
        assert [one.name for one in (await wire.call(metadata.MetadataRequest(None, False))).topics] == ["t7"]
        assert len(steps) == 3


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
    assert allowed == (
        "request allowed principal=User:ANONYMOUS host=inproc api=CREATE_TOPICS resource=t0"
        " change=1 partitions, 1 replicas count=5"
    )
