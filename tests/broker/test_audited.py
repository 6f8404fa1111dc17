"""The audit log names what an administrative request changes, and contains no secret (S19)."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.broker.server.audited import changes_of
from kafkalite.broker.server.dispatch import AUDITED
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.messages import admin, data, groups, security, transactions
from proof.example_messages import example

API_BY_KEY = {key: api.request for key, api in APIS.items()}
SECRET = "hunter2"
ALICE = [admin.QuotaEntityName("user", "alice"), admin.QuotaEntityName("client-id", None)]
LIMITS = [admin.ClientQuotaChange("producer_byte_rate", "1000"), admin.ClientQuotaChange("ip", None)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            admin.CreateTopicsRequest(0, True, [admin.NewTopic("t", 3, 2, {"x": SECRET})]),
            {"resource": "t", "change": "3 partitions, 2 replicas", "count": 1, "validate_only": "true"},
        ),
        (admin.DeleteTopicsRequest(0, ["t", "u"]), {"resource": "t", "count": 2}),
        (admin.DeleteTopicsRequest(0, []), {"count": 0}),
        (
            admin.CreatePartitionsRequest(0, False, [admin.PartitionCount("t", 6)]),
            {"resource": "t", "change": "6 partitions", "count": 1},
        ),
        (
            admin.AlterConfigsRequest(
                False,
                [
                    admin.ConfigChange("broker", "1", "ssl.key.pasword", SECRET),
                    admin.ConfigChange("topic", "t", "retention.ms", None),
                ],
            ),
            {"resource": "broker 1", "change": "set ssl.key.pasword", "count": 2},
        ),
        (
            admin.AlterClientQuotasRequest(False, [admin.ClientQuotaAlteration(ALICE, LIMITS)]),
            {
                "resource": "user=alice,client-id=<default>",
                "change": "producer_byte_rate=1000,ip=removed",
                "count": 1,
            },
        ),
        (
            security.CreateAclsRequest([security.Acl(2, 4, "a", "User:alice", "*", 3, 3)]),
            {"resource": "User:alice may Read Topic prefix 'a'", "count": 1},
        ),
        (
            security.DeleteAclsRequest(
                [security.AclSelection(None, None, None, "User:alice", None, None, None)]
            ),
            {"resource": "principal=User:alice", "count": 1},
        ),
        (
            security.AlterUserScramCredentialsRequest(
                [security.ScramCredentialDeletion("bob", 1)],
                [security.ScramCredentialUpsertion("alice", 2, 4096, b"salt", SECRET.encode())],
            ),
            {"resource": "alice", "change": "set SCRAM-SHA-512", "count": 2},
        ),
        (
            security.AlterUserScramCredentialsRequest([security.ScramCredentialDeletion("bob", 9)], []),
            {"resource": "bob", "change": "remove mechanism 9", "count": 1},
        ),
        (admin.ElectLeadersRequest(0, False, None), {"resource": "*"}),
        (
            groups.OffsetDeleteRequest("g", [groups.GroupPartition("t", 0), groups.GroupPartition("t", 1)]),
            {"resource": "g", "change": "t-0", "count": 2},
        ),
        (
            data.DeleteRecordsRequest(0, [data.DeleteRecordsPartition("t", 0, 7)]),
            {"resource": "t-0", "change": "before offset 7", "count": 1},
        ),
        (
            transactions.AbortTransactionRequest("t", 0, 5, 7),
            {"resource": "t-0", "change": "producer 5 at offset 7", "count": 1},
        ),
    ],
)
def test_a_line_names_the_first_item_and_their_number(message: Any, expected: dict[str, Any]) -> None:
    key = next(key for key in AUDITED if API_BY_KEY[key] is type(message))
    fields = changes_of(key, message)
    assert fields == expected
    assert SECRET not in str(fields)


def test_a_rule_with_an_unknown_number_is_named_too() -> None:
    """It is refused by the controller, after the line was written."""
    rule = security.Acl(99, 3, "a", "User:alice", "*", 3, 3)
    assert "99" in str(changes_of(ApiKey.CREATE_ACLS, security.CreateAclsRequest([rule])))


@pytest.mark.parametrize("key", sorted(AUDITED))
def test_every_audited_request_is_described(key: ApiKey) -> None:
    fields = changes_of(key, example(API_BY_KEY[key]))
    assert fields.get("resource") or fields["count"] == 0
