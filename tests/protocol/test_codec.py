"""The codec: (struct, exact bytes) both ways, and every way a value can be wrong."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from kafkalite.errors import LocalProtocolError, RemoteProtocolError
from kafkalite.limits import MAX_INTEGERS_PER_LIST, MAX_ITEMS_PER_REQUEST
from kafkalite.protocol import codec
from kafkalite.protocol.messages.admin import CreateTopicsRequest, NewTopic
from kafkalite.protocol.messages.data import FetchPartition, FetchRequest, ProducePartition, ProduceRequest
from kafkalite.protocol.messages.metadata import (
    ApiVersionsRequest,
    DescribeClusterRequest,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
)
from kafkalite.protocol.messages.transactions import TxnMarker, WriteTxnMarkersRequest
from kafkalite.protocol.structs import Struct


class Everything(Struct):
    """The types that the codec supports and no message uses yet."""

    blob: bytes
    maybe: int | None
    lists: list[list[str]]
    parts: list[ProducePartition] | None
    settings: dict[str, str] | None


TABLE = [
    (DescribeClusterRequest(), "90"),
    (ApiVersionsRequest("k", ""), "92 a16b a0"),
    (MetadataRequest(None, True), "92 c0 c3"),
    (MetadataRequest([], False), "92 90 c2"),
    (MetadataRequest(["a", "bc"], False), "92 92a161a26263 c2"),
    (
        ProduceRequest(-1, 30000, None, [ProducePartition("t", 0, 65536)]),
        "94 ff cd7530 c0 91 93a17400ce00010000",
    ),
    (
        FetchRequest(500, 1, 1, 0, [FetchPartition("t", 0, -1, 2**63 - 1, -(2**63))]),
        "95 cd01f4 01 01 00 91 95a17400ffcf7fffffffffffffffd38000000000000000",
    ),
    (
        CreateTopicsRequest(1, True, [NewTopic("t", 1, -1, {"k": "v", "l": ""})]),
        "93 01 c3 91 94a17401ff82a16ba176a16ca0",
    ),
    (PartitionMetadata(0, 1, 2, 3, 4, [5, 6], [], [7]), "98 00 01 02 03 04 920506 90 9107"),
    (Everything(b"\0", None, [["a"], []], None, None), "95 c40100 c0 9291a16190 c0 c0"),
    (
        Everything(b"", 1, [], [ProducePartition("t", 0, 1)], {"a": "b"}),
        "95 c400 01 90 91 93a1740001 81a161a162",
    ),
]


@pytest.mark.parametrize(("message", "hexes"), TABLE, ids=lambda value: type(value).__name__)
class TestTable:
    def test_encode(self, message: Struct, hexes: str) -> None:
        assert codec.encode(message).hex() == hexes.replace(" ", "")

    def test_decode_small(self, message: Struct, hexes: str) -> None:
        decoded = codec.decode(type(message), bytes.fromhex(hexes))
        assert decoded == message
        assert type(decoded) is type(message)

    def test_decode_as_a_stream(self, message: Struct, hexes: str) -> None:
        decoded = codec.decode_body(type(message), codec.Stream(bytes.fromhex(hexes)))
        assert decoded == message
        assert type(decoded) is type(message)

    def test_every_truncation_is_refused(self, message: Struct, hexes: str) -> None:
        whole = bytes.fromhex(hexes)
        for cut in range(len(whole)):
            for body in (lambda part: codec.decode(type(message), part), lambda part: _stream(message, part)):
                with pytest.raises(RemoteProtocolError):
                    body(whole[:cut])

    def test_trailing_bytes_are_refused(self, message: Struct, hexes: str) -> None:
        with pytest.raises(RemoteProtocolError):
            codec.decode(type(message), bytes.fromhex(hexes) + b"\0")
        with pytest.raises(RemoteProtocolError, match="1 bytes follow the end of"):
            _stream(message, bytes.fromhex(hexes) + b"\0")


def _stream(message: Struct, data: bytes) -> Struct:
    return codec.decode_body(type(message), codec.Stream(data))


WRONG: list[tuple[type[Struct], Any, str]] = [
    (ProduceRequest, 5, r"ProduceRequest: expected an array of 4, found the integer 5"),
    (ProduceRequest, [1, 2], r"ProduceRequest: expected an array of 4, found an array of 2"),
    (ProduceRequest, [1, 2, None, [], 5], r"ProduceRequest: expected an array of 4, found an array of 5"),
    (ProduceRequest, {}, r"ProduceRequest: expected an array of 4, found a map of 0"),
    (ProduceRequest, [True, 2, None, []], r"ProduceRequest\.acks: .* integer, found a boolean"),
    (ProduceRequest, [None, 2, None, []], r"ProduceRequest\.acks: .* integer, found nil"),
    (ProduceRequest, [1.0, 2, None, []], r"ProduceRequest\.acks: .* integer, found a float"),
    (ProduceRequest, ["1", 2, None, []], r"ProduceRequest\.acks: .* integer, found a string of 1 characters"),
    (ProduceRequest, [2**63, 2, None, []], r"ProduceRequest\.acks: .* found the integer 9223372036854775808"),
    (ProduceRequest, [1, 2, None, {}], r"ProduceRequest\.partitions: expected an array, found a map"),
    (ProduceRequest, [1, 2, None, [[]]], r"ProducePartition: expected an array of 3, found an array of 0"),
    (
        ProduceRequest,
        [1, 2, None, [[b"t", 0, 1]]],
        r"ProducePartition\.topic: expected a string, found 1 bytes",
    ),
    (MetadataRequest, [None, 1], r"MetadataRequest\.allow.*: expected a boolean, found the integer 1"),
    (MetadataRequest, ["t", True], r"MetadataRequest\.topics: expected an array, found a string"),
    (MetadataRequest, [[None], True], r"MetadataRequest\.topics\[\]: expected a string, found nil"),
    (PartitionMetadata, [0, 1, 2, 3, 4, [True], [], []], r"PartitionMetadata\.replicas: .* 128 integers"),
    (
        PartitionMetadata,
        [0, 1, 2, 3, 4, [], [2**63], []],
        r"PartitionMetadata\.isr: expected an array of at most",
    ),
    (PartitionMetadata, [0, 1, 2, 3, 4, 5, [], []], r"PartitionMetadata\.replicas: .* found the integer 5"),
    (NewTopic, ["t", 1, 1, []], r"NewTopic\.configs: expected a map, found an array of 0"),
    (NewTopic, ["t", 1, 1, {"a": 1}], r"NewTopic\.configs\{\}: expected a string, found the integer 1"),
    (NewTopic, ["t", 1, 1, {b"a": "b"}], r"NewTopic\.configs\{\}: expected a string, found 1 bytes"),
    (Everything, ["", None, [], None, None], r"Everything\.blob: expected a byte string, found a string"),
    (Everything, [b"", "1", [], None, None], r"Everything\.maybe: .* 64-bit integer or nil, found a string"),
    (Everything, [b"", 1, [1], None, None], r"Everything\.lists\[\]: expected an array, found the integer"),
    (Everything, [b"", 1, [], 7, None], r"Everything\.parts: expected an array, found the integer 7"),
]


@pytest.mark.parametrize(("cls", "value", "reason"), WRONG)
def test_a_wrong_value_is_named(cls: type[Struct], value: Any, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        codec.decode(cls, msgpack.packb(value))


@pytest.mark.parametrize(("cls", "value", "reason"), WRONG)
def test_a_stream_refuses_the_same(cls: type[Struct], value: Any, reason: str) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode_body(cls, codec.Stream(msgpack.packb(value)))


@pytest.mark.parametrize("read", [codec.decode, lambda cls, data: codec.decode_body(cls, codec.Stream(data))])
@pytest.mark.parametrize(
    ("cls", "hexes"),
    [
        (NewTopic, "94 a174 01 01 82 a161a162 a161a163"),  # a key twice
        (NewTopic, "94 a174 01 01 81 01 a163"),  # a key that is no string
        (NewTopic, "94 a174 01 01 81 90 a163"),  # a key that cannot be one
        (ApiVersionsRequest, "92 a1ff a0"),  # not UTF-8
        (ApiVersionsRequest, "92 d401ff a0"),  # an extension type
        (ApiVersionsRequest, "92 c700ff a0"),  # an empty timestamp
        (ApiVersionsRequest, "92 d6ff00000000 a0"),  # a timestamp
        (ApiVersionsRequest, "92 c1 a0"),  # the byte msgpack never uses
        (ApiVersionsRequest, "92 dbffffffff a0"),  # a string of 4 GiB
        (DescribeClusterRequest, "dd00000001 00"),
    ],
)
def test_unusual_bytes_are_refused(read: Any, cls: type[Struct], hexes: str) -> None:
    with pytest.raises(RemoteProtocolError):
        read(cls, bytes.fromhex(hexes))


@pytest.mark.parametrize("hexes", ["92a16ba0", "dc0002a16ba0", "dd00000002d9016bdb00000000"])
def test_longer_encodings_are_read_too(hexes: str) -> None:
    """Another implementation's msgpack need not choose the shortest form."""
    for body in (codec.decode, lambda cls, data: codec.decode_body(cls, codec.Stream(data))):
        assert body(ApiVersionsRequest, bytes.fromhex(hexes)) == ApiVersionsRequest("k", "")


def test_a_list_of_integers_is_short() -> None:
    longest = PartitionMetadata(0, 0, 0, 0, 0, list(range(MAX_INTEGERS_PER_LIST)), [], [])
    assert codec.decode(PartitionMetadata, codec.encode(longest)) == longest
    longer = longest._replace(replicas=[*longest.replicas, 1])
    for data in (codec.encode(longer), codec.encode(longer._replace(isr=[2**40] * 100))):
        with pytest.raises(RemoteProtocolError):
            codec.decode(PartitionMetadata, data)


def test_counts_are_compared_with_the_bytes_left() -> None:
    """S2: a FetchPartition has at least 6 bytes, so 1000 of them do not fit in 5,999."""
    head = bytes.fromhex("95 01 01 01 00 dc03e8")
    with pytest.raises(RemoteProtocolError, match="1000 elements announced, 5999 bytes left"):
        codec.decode(FetchRequest, head + b"\x95\xa0\0\0\0\0" * 999 + b"\x95\xa0\0\0\0")
    partitions = b"".join(b"\x95\xa0\xcd" + number.to_bytes(2, "big") + b"\0\0\0" for number in range(1000))
    whole = codec.decode(FetchRequest, head + partitions)
    assert len(whole.partitions) == 1000


def test_a_request_has_a_bounded_number_of_elements() -> None:
    def envelope(count: int) -> bytes:
        return codec.encode((27, 0, 1, None, WriteTxnMarkersRequest([TxnMarker(1, 0, 0, True, [])] * count)))

    head = codec.decode_request_head(envelope(MAX_ITEMS_PER_REQUEST))
    assert len(codec.decode_body(WriteTxnMarkersRequest, head.body).markers) == MAX_ITEMS_PER_REQUEST
    head = codec.decode_request_head(envelope(MAX_ITEMS_PER_REQUEST + 1))
    with pytest.raises(RemoteProtocolError, match="more elements in one envelope than limits allow"):
        codec.decode_body(WriteTxnMarkersRequest, head.body)


@pytest.mark.parametrize("size", [10, 1000])
class TestHeads:
    def test_request(self, size: int) -> None:
        body = ApiVersionsRequest("k" * size, "1")
        head = codec.decode_request_head(codec.encode((18, 0, 7, "me", body)))
        assert head[:4] == (18, 0, 7, "me")
        assert codec.decode_body(ApiVersionsRequest, head.body) == body

    def test_response(self, size: int) -> None:
        body = ApiVersionsRequest("k" * size, "1")
        head = codec.decode_response_head(codec.encode((7, 250, body)))
        assert head[:2] == (7, 250)
        assert codec.decode_body(ApiVersionsRequest, head.body) == body

    @pytest.mark.parametrize(
        "fields",
        [
            ("18", 0, 7, "me"),
            (18, None, 7, "me"),
            (18, 0, True, "me"),
            (18, 0, 7, b"me"),
            (18, 0, -1, "me"),
            (18, 0, 2**31, "me"),
        ],
    )
    def test_wrong_request(self, size: int, fields: tuple[Any, ...]) -> None:
        with pytest.raises(RemoteProtocolError, match="request envelope"):
            codec.decode_request_head(codec.encode((*fields, "x" * size)))

    @pytest.mark.parametrize("fields", [("7", 0), (7, False), (7, -1), (None, None)])
    def test_wrong_response(self, size: int, fields: tuple[Any, ...]) -> None:
        with pytest.raises(RemoteProtocolError, match="response envelope"):
            codec.decode_response_head(codec.encode((*fields, "x" * size)))

    @pytest.mark.parametrize("value", [None, 5, "text" * 200, {}, [], [18, 0, 7, "me"], [1] * 6])
    def test_not_an_envelope(self, size: int, value: Any) -> None:
        with pytest.raises(RemoteProtocolError):
            codec.decode_request_head(msgpack.packb(value) + b"\0" * (size - 10))


def test_a_response_body_of_two_is_the_error() -> None:
    class Failure(Struct):
        error_code: int
        error_message: str | None

    for text in ("short", "long" * 300):
        failure = Failure(42, text)
        for header in (b"\x92", b"\xdc\0\2", b"\xdd\0\0\0\2"):
            envelope = b"\x93\x07\x00" + header + codec.encode(failure)[1:]
            body = codec.decode_response_head(envelope).body
            assert codec.decode_response_body(MetadataResponse, Failure, body) == failure
    long = MetadataResponse(0, "m" * 600, "c", 1, [], [])
    for message in (long, long._replace(error_message=None)):
        body = codec.decode_response_head(codec.encode((7, 0, message))).body
        assert codec.decode_response_body(MetadataResponse, Failure, body) == message


@pytest.mark.parametrize(
    "message",
    [
        ProduceRequest(2**64, 1, None, []),
        ProduceRequest(object(), 1, None, []),  # type: ignore[arg-type]
        MetadataRequest(["\ud800"], True),
    ],
)
def test_an_unencodable_value_is_a_local_error(message: Struct) -> None:
    with pytest.raises(LocalProtocolError, match="cannot encode"):
        codec.encode(message)


def test_types_without_a_wire_form_are_found_at_compile_time() -> None:
    class Wrong(Struct):
        ratio: float

    with pytest.raises(AssertionError, match=r"Wrong\.ratio: the wire has no"):
        codec.plan_for(Wrong)


def test_plans_are_compiled_once() -> None:
    assert codec.plan_for(ProduceRequest) is codec.plan_for(ProduceRequest)
