"""Requests for rules and credentials at a broker: stored, described, and without secrets."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.handlers import security as handlers
from kafkalite.errors import ErrorCode
from kafkalite.limits import MAX_ENVELOPE_BYTES
from kafkalite.protocol.messages import security
from kafkalite.protocol.messages.metadata import DescribeMetadataRequest
from kafkalite.security.scram import DEFAULT_ITERATIONS
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient

ACL = security.Acl(2, 3, "orders", "User:alice", "*", 3, 3)
ANY = (None,) * 7
SECRET = os.urandom(32)


def upsert(*users: str) -> security.AlterUserScramCredentialsRequest:
    salt = bytes(16)
    return security.AlterUserScramCredentialsRequest(
        [], [security.ScramCredentialUpsertion(user, 1, 4_096, salt, SECRET) for user in users]
    )


async def test_rules_are_created_described_and_deleted(wire: WireClient) -> None:
    created = await wire.call(security.CreateAclsRequest([ACL, ACL._replace(host="\n")]))
    assert [one.error_code for one in created.results] == [0, ErrorCode.INVALID_REQUEST]
    assert (await wire.call(security.DescribeAclsRequest(*ANY))).acls == [ACL]
    one = security.DescribeAclsRequest(2, None, None, "User:bob", None, None, None)
    assert (await wire.call(one)).acls == []
    deleted = await wire.call(security.DeleteAclsRequest([security.AclSelection(*ANY)]))
    assert deleted.results[0].acls == [ACL]
    assert (await wire.call(security.DescribeAclsRequest(*ANY))).acls == []


async def test_credentials_are_described_without_salts_and_keys(wire: WireClient) -> None:
    assert [one.error_code for one in (await wire.call(upsert("bob", "alice"))).users] == [0, 0]
    listed = await wire.call(security.DescribeUserScramCredentialsRequest(None))
    info = security.ScramMechanismInfo(1, 4_096)
    assert [(one.user, one.credentials) for one in listed.users] == [("alice", [info]), ("bob", [info])]
    found = await wire.call(security.DescribeUserScramCredentialsRequest(["bob", "carol"]))
    assert [one.error_code for one in found.users] == [0, ErrorCode.RESOURCE_NOT_FOUND]
    removed = security.AlterUserScramCredentialsRequest([security.ScramCredentialDeletion("bob", 1)], [])
    assert (await wire.call(removed)).users == [security.AlteredUser("bob", 0, None)]
    assert [
        one.user for one in (await wire.call(security.DescribeUserScramCredentialsRequest(None))).users
    ] == ["alice"]


async def test_unknown_users_get_a_random_decoy_that_no_client_can_set(
    broker: Broker, wire: WireClient
) -> None:
    for request in (upsert(""), upsert("alice", "")):
        assert (await wire.call(request)).error_code == ErrorCode.INVALID_REQUEST
    await wire.call(upsert("alice"))
    credentials = broker.controller.image.credentials
    assert set(credentials) == {("", 1), ("", 2), ("alice", 1)}
    assert credentials["", 1].iterations == DEFAULT_ITERATIONS
    assert credentials["", 1].salt != bytes(16)
    await wire.call(upsert("bob"))
    assert broker.controller.image.credentials["", 1] == credentials["", 1]


async def test_rules_and_credentials_survive_a_restart() -> None:
    filesystem = MemoryFileSystem()
    settings: dict[str, Any] = {"listeners": "inproc://", "log_dirs": "/b", "filesystem": filesystem}
    async with Broker(**settings) as broker, WireClient(broker.address) as wire:
        await wire.call(security.CreateAclsRequest([ACL]))
        await wire.call(upsert("alice"))
        before = broker.controller.image
    async with Broker(**settings) as broker:
        assert broker.controller.image.acls == before.acls
        assert broker.controller.image.credentials == before.credentials


async def test_more_rules_than_a_response_can_have_are_an_error(
    wire: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.call(security.CreateAclsRequest([ACL]))
    monkeypatch.setattr(handlers, "MAX_ENVELOPE_BYTES", 1_024 + 20)
    refused = await wire.call(security.DescribeAclsRequest(*ANY))
    assert refused.error_code == ErrorCode.INVALID_REQUEST
    assert "select fewer" in refused.error_message
    assert MAX_ENVELOPE_BYTES > 1_024 + 20


async def test_no_secret_is_in_the_log_or_the_metadata_tree(
    broker: Broker, wire: WireClient, caplog: pytest.LogCaptureFixture
) -> None:
    """S13, S19."""
    with caplog.at_level(logging.DEBUG):
        await wire.call(upsert("alice"))
    shown = caplog.text + repr(broker.controller.image)
    waiting = ["/"]
    while waiting:
        found = await wire.call(DescribeMetadataRequest(waiting.pop(), -1, 0))
        shown += "".join(node.value for node in found.nodes)
        waiting += [node.path for node in found.nodes[1:] if not node.value]
    keys = broker.controller.image.credentials["alice", 1]
    for secret in (SECRET, keys.stored_key, keys.server_key):
        assert secret.hex() not in shown and repr(secret)[2:-1] not in shown
