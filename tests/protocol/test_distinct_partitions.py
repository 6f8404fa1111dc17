"""A request names each partition once, and not too many (S23). Covers ``Distinct`` in protocol/codec.py."""

from __future__ import annotations

import time
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from kafkalite.errors import RemoteProtocolError
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, CLUSTER_APIS, ApiKey
from kafkalite.protocol.messages import data, transactions
from kafkalite.protocol.structs import DISTINCT, Struct


def lists_of(cls: type[Struct], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, item type, marker) of each list of structs that begin with a partition's name."""
    found: list[Any] = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if name not in cls._fields:
            continue
        optional = [one for one in get_args(hint) if one is not type(None)]
        if get_origin(hint) not in (list, Annotated) and len(optional) == 1:
            hint = optional[0]
        marker = ""
        if get_origin(hint) is Annotated:
            hint, marker = get_args(hint)
        if (
            get_origin(hint) is list
            and isinstance(item := get_args(hint)[0], type)
            and issubclass(item, Struct)
        ):
            if item._fields[1:2] == ("partition",):
                found.append(((*path, name), item, marker))
            else:
                found += lists_of(item, (*path, name))
    return found


def minimal(hint: Any) -> Any:
    if hint is int:
        return 0
    if hint is bool:
        return False
    if hint is str:
        return ""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint(*(minimal(one) for name, one in get_type_hints(hint).items() if name in hint._fields))
    return [] if get_origin(hint) is list else {} if get_origin(hint) is dict else None


def request_with(cls: type[Struct], path: tuple[str, ...], items: list[Any]) -> Any:
    message = minimal(cls)
    if len(path) == 1:
        return message._replace(**{path[0]: items})
    hint = get_type_hints(cls)[path[0]]
    return message._replace(**{path[0]: [request_with(get_args(hint)[0], path[1:], items)]})


LISTS = [
    pytest.param(api.request, *one, id=f"{ApiKey(api.key).name}-{'.'.join(one[0])}")
    for api in APIS.values()
    for one in lists_of(api.request)
]


def test_the_lists_of_partitions_are_known() -> None:
    assert {one.id.split("-")[0] for one in LISTS} == {
        "PRODUCE", "FETCH", "LIST_OFFSETS", "OFFSETS_FOR_BYTES", "OFFSETS_FOR_LEADER_EPOCH",
        "DELETE_RECORDS",
        "OFFSET_COMMIT", "OFFSET_FETCH", "OFFSET_DELETE", "TXN_OFFSET_COMMIT", "ELECT_LEADERS",
        "ALTER_REPLICA_LOG_DIRS", "ALTER_PARTITION_REASSIGNMENTS", "LIST_PARTITION_REASSIGNMENTS",
        "DESCRIBE_PRODUCERS", "ADD_PARTITIONS_TO_TXN", "WRITE_TXN_MARKERS", "ALTER_PARTITION",
        "REPLICA_FETCH",
        "CHECKPOINT_HIGH_WATERMARKS", "BROKER_REGISTRATION", "BROKER_HEARTBEAT", "REPORT_REPLICAS",
    }  # fmt: skip


@pytest.mark.parametrize("count", [2, 300], ids=["in a small envelope", "in a large one"])
@pytest.mark.parametrize(("cls", "path", "item", "marker"), LISTS)
def test_s23_a_partition_named_twice_is_refused(
    cls: type[Struct], path: tuple[str, ...], item: type[Struct], marker: str, count: int
) -> None:
    first_field = item._fields[0]
    items = [minimal(item)._replace(**{first_field: "t", "partition": number}) for number in range(count)]
    message = request_with(cls, path, items)
    assert codec.decode(cls, codec.encode(message)) == message
    items[-1] = items[0]
    with pytest.raises(RemoteProtocolError, match=r"names partition t-0 twice"):
        codec.decode(cls, codec.encode(request_with(cls, path, items)))


@pytest.mark.parametrize(("cls", "path", "item", "marker"), LISTS)
def test_s23_only_requests_of_nodes_may_name_any_number(
    cls: type[Struct], path: tuple[str, ...], item: type[Struct], marker: str
) -> None:
    key = next(api.key for api in APIS.values() if api.request is cls)
    items = [minimal(item)._replace(partition=number) for number in range(200)]
    envelope = codec.encode((int(key), 0, 1, None, request_with(cls, path, items)))
    assert codec.decode_body(cls, codec.decode_request_head(envelope, 200).body)
    if marker == DISTINCT:
        with pytest.raises(RemoteProtocolError, match=r"200 partitions; max.request.partition.size.limit"):
            codec.decode_body(cls, codec.decode_request_head(envelope, 199).body)
    else:
        assert key in CLUSTER_APIS
        assert codec.decode_body(cls, codec.decode_request_head(envelope, 199).body)


def test_two_markers_may_be_for_the_same_partition() -> None:
    marker = transactions.TxnMarker(1, 0, 0, True, [transactions.TxnPartition("t", 0)])
    request = transactions.WriteTxnMarkersRequest([marker, marker._replace(producer_id=2)])
    assert codec.decode(transactions.WriteTxnMarkersRequest, codec.encode(request)) == request


def test_16000_partitions_are_compared_in_less_than_20_ms() -> None:
    items = [data.FetchPartition("t", number, -1, 0, 0) for number in range(16_000)]
    started_s = time.process_time()
    codec._refuse_repeated(items, "FetchRequest.partitions")
    assert time.process_time() - started_s < 0.02
