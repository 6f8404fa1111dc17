"""Setting, removing and finding quotas of clients."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import ErrorCode, InvalidRequestError
from kafkalite.metadata.quota_commands import find_quotas, number_text
from kafkalite.model import QuotaEntity
from kafkalite.protocol.messages import admin

ALICE = (("user", "alice"),)


def alter(metadata: Any, *entries: Any, validate_only: bool = False) -> list[tuple[int, str | None]]:
    """Submit [(entity parts, {key: text}), …]. Return (error code, message) of each."""
    request = admin.AlterClientQuotasRequest(
        validate_only,
        [
            admin.ClientQuotaAlteration(
                [admin.QuotaEntityName(*part) for part in entity],
                [admin.ClientQuotaChange(*change) for change in changes.items()],
            )
            for entity, changes in entries
        ],
    )
    reply = metadata.submit(request)
    assert reply.error_code == 0, reply.error_message
    assert [one.entity for one in reply.entries] == [entry.entity for entry in request.entries]
    return [(one.error_code, one.error_message) for one in reply.entries]


def test_quotas_are_set_changed_and_removed(new_metadata: Any) -> None:
    metadata = new_metadata()
    assert alter(metadata, (ALICE, {"producer_byte_rate": "1000", "request_percentage": "12.5"})) == [
        (0, None)
    ]
    assert metadata.image.client_quotas == {
        QuotaEntity("alice"): {"producer_byte_rate": 1000.0, "request_percentage": 12.5}
    }
    alter(metadata, (ALICE, {"producer_byte_rate": "2000", "request_percentage": None}))
    assert metadata.image.client_quotas == {QuotaEntity("alice"): {"producer_byte_rate": 2000.0}}
    alter(metadata, (ALICE, {"producer_byte_rate": None}))
    assert metadata.image.client_quotas == {}


def test_entities_are_users_client_ids_both_and_addresses_by_name_or_default(new_metadata: Any) -> None:
    metadata = new_metadata()
    alter(
        metadata,
        ((("user", None), ("client-id", "app")), {"producer_byte_rate": "1"}),
        ((("client-id", None),), {"producer_byte_rate": "2"}),
        ((("ip", "0:0:0:0:0:0:0:1"),), {"connection_creation_rate": "3"}),
        ((("ip", None),), {"connection_creation_rate": "4"}),
    )
    assert set(metadata.image.client_quotas) == {
        QuotaEntity("", "app"),
        QuotaEntity(None, ""),
        QuotaEntity(ip="::1"),
        QuotaEntity(ip=""),
    }


@pytest.mark.parametrize(
    ("entity", "changes", "code"),
    [
        ((), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("host", "a"),), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("user", "a"), ("user", "b")), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("user", "a"), ("ip", "::1")), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("user", ""),), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("client-id", "x" * 256),), {"producer_byte_rate": "1"}, ErrorCode.INVALID_REQUEST),
        ((("ip", "localhost"),), {"connection_creation_rate": "1"}, ErrorCode.INVALID_REQUEST),
        (ALICE, {"connection_creation_rate": "1"}, ErrorCode.INVALID_CONFIG),
        ((("ip", None),), {"producer_byte_rate": "1"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "0"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "-1"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "nan"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "inf"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "-inf"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "-0.0"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "1e308"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "1e999"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "5e-324"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "0.00099"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "9223372036854777856"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"producer_byte_rate": "much"}, ErrorCode.INVALID_CONFIG),
        (ALICE, {"consumer_byte_rate": "1", "bytes": "1"}, ErrorCode.INVALID_CONFIG),
    ],
)
def test_a_wrong_entity_is_refused_and_the_others_are_changed(
    new_metadata: Any, entity: Any, changes: dict[str, str], code: ErrorCode
) -> None:
    metadata = new_metadata()
    bob = ((("user", "bob"),), {"producer_byte_rate": "1"})
    first, second = alter(metadata, (entity, changes), bob)
    assert (first[0], second[0]) == (code, 0)
    assert set(metadata.image.client_quotas) == {QuotaEntity("bob")}


def test_an_entity_is_named_once_in_a_request(new_metadata: Any) -> None:
    results = alter(
        new_metadata(), (ALICE, {"producer_byte_rate": "1"}), (ALICE, {"producer_byte_rate": "2"})
    )
    assert [code for code, _ in results] == [0, ErrorCode.INVALID_REQUEST]


def test_a_check_and_a_change_without_effect_write_nothing(new_metadata: Any) -> None:
    metadata = new_metadata()
    alter(metadata, (ALICE, {"producer_byte_rate": "1"}), validate_only=True)
    assert metadata.image.client_quotas == {}
    alter(metadata, (ALICE, {"producer_byte_rate": "1"}))
    offset = metadata.image.metadata_offset
    alter(metadata, (ALICE, {"producer_byte_rate": "1.0", "request_percentage": None}))
    assert metadata.image.metadata_offset == offset


QUOTAS = {
    QuotaEntity("alice", "app"): {"producer_byte_rate": 1.0},
    QuotaEntity("alice"): {"producer_byte_rate": 2.5},
    QuotaEntity("", "app"): {"producer_byte_rate": 3.0},
    QuotaEntity(ip=""): {"connection_creation_rate": 4.0},
}


@pytest.mark.parametrize(
    ("filters", "strict", "expected"),
    [
        ([], False, {1, 2.5, 3, 4}),
        ([("user", "alice", 0)], False, {1, 2.5}),
        ([("user", "alice", 0)], True, {2.5}),
        ([("user", None, 1)], False, {3}),
        ([("user", None, 2)], False, {1, 2.5, 3}),
        ([("user", None, 2), ("client-id", "app", 0)], False, {1, 3}),
        ([("ip", None, 2)], True, {4}),
    ],
)
def test_quotas_are_found_by_filters(filters: Any, strict: bool, expected: set[float]) -> None:
    components = [admin.QuotaFilter(*one) for one in filters]
    found = find_quotas(QUOTAS, admin.DescribeClientQuotasRequest(components, strict))
    assert {float(text) for one in found for text in one.values.values()} == expected


@pytest.mark.parametrize(
    "filters",
    [
        [("host", "a", 0)],
        [("user", "a", 0), ("user", "b", 0)],
        [("user", None, 0)],
        [("user", "a", 1)],
        [("user", None, 3)],
    ],
)
def test_a_wrong_filter_is_refused(filters: Any) -> None:
    components = [admin.QuotaFilter(*one) for one in filters]
    with pytest.raises(InvalidRequestError):
        find_quotas(QUOTAS, admin.DescribeClientQuotasRequest(components, False))


def test_a_number_has_its_shortest_text() -> None:
    assert [number_text(value) for value in (1000.0, 12.5)] == ["1000", "12.5"]
