"""Both ends of a connection: the handshake, every API, and the treatment of invalid input."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from kafkalite.limits import MAX_CLIENT_ID_LENGTH, MAX_ERROR_MESSAGE_LENGTH
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import (
    MAX_CORRELATION_ID,
    NO_CORRELATION_ID,
    BadRequest,
    ClientConnection,
    Request,
    RequestError,
    ServerConnection,
)
from kafkalite.protocol.frames import encode_frame
from kafkalite.protocol.messages.data import (
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchRequestV1,
    FetchResponse,
    FetchResponseV1,
    PreferredReplica,
    ProducePartition,
    ProduceRequest,
)
from kafkalite.protocol.messages.metadata import (
    ApiVersionRange,
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    MetadataRequest,
)
from kafkalite.protocol.structs import Struct

Feed = Callable[..., list[Any]]
Examples = dict[int, tuple[Struct, Struct]]
Parts = Callable[[Struct], tuple[bytes, ...]]


def request_bytes(
    key: int, message: Any, *, version: int = 0, correlation_id: Any = 1, client_id: Any = None
) -> bytes:
    envelope = codec.encode((key, version, correlation_id, client_id, message))
    return b"".join(bytes(part) for part in encode_frame(envelope))


def _with_payload(frame: bytes, payload: bytes) -> bytes:
    return frame[:4] + struct.pack(">I", len(payload)) + frame[8:] + payload


HELLO = request_bytes(ApiKey.API_VERSIONS, ApiVersionsRequest("test", "1"))


class TestHandshake:
    def test_it_agrees_on_versions(self, make_pair: Any) -> None:
        pair = make_pair()
        assert not pair.client.is_ready
        assert not pair.client.is_ready
        pair.handshake()
        assert pair.client.is_ready
        assert pair.server.has_handshake
        assert pair.client._versions == {key: api.max_version for key, api in APIS.items()}
        assert pair.client.in_flight == 0

    @pytest.mark.parametrize("chunk", [1, 3, 1 << 30])
    def test_in_any_chunks(self, make_pair: Any, chunk: int) -> None:
        assert make_pair(chunk=chunk).handshake().client.is_ready

    def test_the_exact_bytes(self) -> None:
        correlation_id, buffers = ClientConnection("me").handshake("kl", "1.0")
        assert correlation_id == 0
        assert b"".join(map(bytes, buffers)) == bytes.fromhex(
            "0000000f 00000000 95 12 00 00 a26d65 92 a26b6c a3312e30"
        )

    def test_nothing_is_sent_before_the_response(self) -> None:
        client = ClientConnection()
        with pytest.raises(LocalProtocolError, match="METADATA cannot be sent before"):
            client.send(MetadataRequest(None, False))
        assert client.in_flight == 0

    def test_another_first_request_is_refused_and_ends_the_connection(self, feed: Feed) -> None:
        server = ServerConnection()
        (bad,) = feed(server, [request_bytes(ApiKey.METADATA, MetadataRequest(None, False)), HELLO])
        assert bad == BadRequest(
            1, ErrorCode.INVALID_REQUEST, "the first request must be ApiVersions", ApiKey.METADATA, 0, True
        )
        assert feed(server, [HELLO]) == [], "nothing more is read"
        server.eof()
        assert repr(server) == "<ServerConnection closing>"

    def test_limits_are_small_until_it_has_arrived(self, feed: Feed) -> None:
        """S1: 64 KiB of envelope, no payload."""
        for header in (struct.pack(">II", 64 * 1024 + 1, 0), struct.pack(">II", 1, 1)):
            with pytest.raises(RemoteProtocolError, match="a frame announces"):
                feed(ServerConnection(), [header])
        (request,) = feed(ServerConnection(), [request_bytes(18, ApiVersionsRequest("x" * 65_000, "1"))])
        assert isinstance(request, Request)

    def test_a_refused_handshake_does_not_open_the_limits(self, feed: Feed) -> None:
        server = ServerConnection()
        (bad,) = feed(server, [request_bytes(ApiKey.API_VERSIONS, ApiVersionsRequest("a", "b"), version=9)])
        assert (bad.error_code, bad.fatal) == (ErrorCode.UNSUPPORTED_VERSION, False)
        assert bad.error_message == "API_VERSIONS has versions 0 to 0, not 9"
        with pytest.raises(RemoteProtocolError):
            feed(server, [struct.pack(">II", 1, 1)])

    def test_requests_may_follow_in_the_same_read(self, feed: Feed) -> None:
        message = ProduceRequest(1, 1, None, [ProducePartition("t", 0, 70_000)])
        envelope = codec.encode((ApiKey.PRODUCE, 0, 2, None, message))
        events = feed(ServerConnection(), [HELLO, *encode_frame(envelope, [b"x" * 70_000])])
        assert [type(event) for event in events] == [Request, Request]
        assert len(events[1].payload) == 70_000

    def test_configured_limits_hold_after_it(self, feed: Feed, make_pair: Any) -> None:
        pair = make_pair(max_envelope_bytes=200, max_payload_bytes=1000).handshake()
        for header, reason in (
            (struct.pack(">II", 201, 0), "201 bytes"),
            (struct.pack(">II", 1, 1001), "1001"),
        ):
            server = ServerConnection(max_envelope_bytes=200, max_payload_bytes=1000)
            feed(server, [HELLO])
            with pytest.raises(RemoteProtocolError, match=reason):
                feed(server, [header])
        message = ProduceRequest(1, 1, None, [ProducePartition("t", 0, 1000)])
        assert isinstance(pair.ask(message, [b"x" * 1000]), Request)

    def test_an_older_or_newer_broker(self, feed: Feed) -> None:
        client = ClientConnection()
        client.handshake()
        ranges = [
            ApiVersionRange(ApiKey.METADATA, 1, 5),
            ApiVersionRange(ApiKey.FETCH, 0, 5),
            ApiVersionRange(999, 0, 0),
        ]
        answer = ApiVersionsResponse(0, None, "other", "9", ranges)
        feed(client, encode_frame(codec.encode((0, 0, answer))))
        assert client._versions[ApiKey.FETCH] == 1
        assert client.supports(FetchRequestV1)
        for message in (MetadataRequest(None, False), DescribeClusterRequest()):
            with pytest.raises(LocalProtocolError, match="the broker supports no common version of"):
                client.send(message)

    def test_a_broker_without_the_version_of_a_request(self, feed: Feed) -> None:
        client = ClientConnection()
        assert not client.supports(FetchRequest)
        client.handshake()
        answer = ApiVersionsResponse(0, None, "older", "0", [ApiVersionRange(ApiKey.FETCH, 0, 0)])
        feed(client, encode_frame(codec.encode((0, 0, answer))))
        assert (client.supports(FetchRequest), client.supports(FetchRequestV1)) == (True, False)
        client.send(FetchRequest(0, 0, 0, 0, []))
        with pytest.raises(LocalProtocolError, match="FETCH up to version 0, not 1"):
            client.send(FetchRequestV1(0, 0, 0, 0, [], "rack"))

    @pytest.mark.parametrize("count", [1, 3_000])
    def test_each_version_has_its_structs(self, pair: Any, feed: Feed, count: int) -> None:
        """Also in a request of so many partitions that it is decoded in turns."""
        asked = [FetchPartition("t", number, -1, 0, 1) for number in range(count)]
        for message in (FetchRequest(0, 0, 0, 0, asked), FetchRequestV1(0, 0, 0, 0, asked, "rack")):
            _, buffers = pair.client.send(message)
            events = feed(pair.server, buffers)
            while pair.server.has_more:
                events += pair.server.next_requests()
            (request,) = events
            assert request.message == message
            response = FetchResponse(0, None, [])
            if request.api_version:
                response = FetchResponseV1(0, None, [], [PreferredReplica("t", 0, 3)])
            assert pair.answer(request, response).message == response

    def test_a_failed_one_leaves_the_client_unready(self, make_pair: Any, feed: Feed) -> None:
        pair = make_pair()
        _, buffers = pair.client.handshake()
        (request,) = feed(pair.server, buffers)
        error = pair.refuse(request, ErrorCode.SHUTTING_DOWN, "going down")
        assert error == RequestError(ErrorCode.SHUTTING_DOWN, "going down")
        assert not pair.client.is_ready


@pytest.mark.parametrize("key", sorted(APIS), ids=lambda key: ApiKey(key).name)
@pytest.mark.parametrize("chunk", [1, 1 << 30])
def test_every_api_goes_there_and_back(
    make_pair: Any, examples: Examples, payload_of: Parts, key: int, chunk: int
) -> None:
    pair = make_pair(chunk=chunk).handshake()
    message, answer = examples[key]
    request = pair.ask(message, payload_of(message))
    assert isinstance(request, Request)
    assert (request.api_key, request.api_version, request.client_id) == (key, 0, "test-client")
    assert request.message == message
    assert bytes(request.payload) == b"".join(payload_of(message))
    response = pair.answer(request, answer, payload_of(answer))
    assert response.message == answer
    assert bytes(response.payload) == b"".join(payload_of(answer))
    assert pair.client.in_flight == 0


class TestPipelining:
    def test_responses_are_matched_by_correlation_id(self, pair: Any, feed: Feed) -> None:
        sent = [pair.client.send(MetadataRequest([str(i)], False)) for i in range(5)]
        assert pair.client.in_flight == 5
        requests = feed(pair.server, [buffer for _, buffers in sent for buffer in buffers])
        assert [request.correlation_id for request in requests] == [number for number, _ in sent]
        answers = [
            buffer
            for request in requests
            for buffer in pair.server.send_error(request, 3, request.message.topics[0])
        ]
        responses = feed(pair.client, answers)
        assert [response.message.error_message for response in responses] == ["0", "1", "2", "3", "4"]
        assert pair.client.in_flight == 0

    def test_ids_start_again_after_the_largest(self, pair: Any) -> None:
        pair.client._next_id = MAX_CORRELATION_ID
        assert pair.client.send(DescribeClusterRequest())[0] == MAX_CORRELATION_ID
        assert pair.client.send(DescribeClusterRequest())[0] == 0

    def test_the_throttle_time_is_reported(self, pair: Any, feed: Feed) -> None:
        request = pair.ask(DescribeClusterRequest())
        answer = DescribeClusterResponse(0, None, "c", 1, 0, [])
        (response,) = feed(pair.client, pair.server.send(request, answer, throttle_ms=250))
        assert response.throttle_ms == 250

    def test_parts_are_sent_as_they_are(self, pair: Any) -> None:
        message = ProduceRequest(1, 1, None, [ProducePartition("t", 0, 3), ProducePartition("t", 1, 2)])
        parts = [b"abc", memoryview(b"de")]
        _, buffers = pair.client.send(message, parts)
        assert [a is b for a, b in zip(buffers[1:], parts, strict=True)] == [True, True]

    def test_reprs_show_the_state(self, make_pair: Any) -> None:
        pair = make_pair()
        assert repr(pair.client) == "<ClientConnection before handshake, 0 in flight>"
        assert repr(pair.server) == "<ServerConnection before handshake>"
        pair.handshake()
        pair.client.send(DescribeClusterRequest())
        assert repr(pair.client) == "<ClientConnection ready, 1 in flight>"
        assert repr(pair.server) == "<ServerConnection ready>"


BAD = [
    ("unknown api", request_bytes(999, []), ErrorCode.UNKNOWN_API, "there is no api 999"),
    ("negative api", request_bytes(-1, []), ErrorCode.UNKNOWN_API, "there is no api -1"),
    (
        "unknown version",
        request_bytes(3, [], version=7),
        ErrorCode.UNSUPPORTED_VERSION,
        "METADATA has versions 0 to 0, not 7",
    ),
    (
        "negative version",
        request_bytes(3, [], version=-1),
        ErrorCode.UNSUPPORTED_VERSION,
        "METADATA has versions 0 to 0, not -1",
    ),
    (
        "too few fields",
        request_bytes(3, [None]),
        ErrorCode.INVALID_REQUEST,
        "MetadataRequest: expected an array of 2, found an array of 1",
    ),
    (
        "a wrong type",
        request_bytes(3, [None, 0]),
        ErrorCode.INVALID_REQUEST,
        "MetadataRequest.allow_auto_topic_creation: expected a boolean, found the integer 0",
    ),
    (
        "wrong in a large body",
        request_bytes(3, [["t" * 600, 5], True]),
        ErrorCode.INVALID_REQUEST,
        "MetadataRequest.topics[]: expected a string, found the integer 5",
    ),
    (
        "long client id",
        request_bytes(60, [], client_id="c" * (MAX_CLIENT_ID_LENGTH + 1)),
        ErrorCode.INVALID_REQUEST,
        "a client id has at most 255 characters",
    ),
    (
        "payload missing",
        request_bytes(0, [1, 1, None, [["t", 0, 5]]]),
        ErrorCode.INVALID_REQUEST,
        "the body announces 5 bytes of payload, the frame has 0",
    ),
    (
        "negative length",
        request_bytes(0, [1, 1, None, [["t", 0, 5], ["t", 1, -5]]]),
        ErrorCode.INVALID_REQUEST,
        "a negative length_bytes: -5",
    ),
    (
        "unasked payload",
        _with_payload(request_bytes(60, []), b"x"),
        ErrorCode.INVALID_REQUEST,
        "the body announces 0 bytes of payload, the frame has 1",
    ),
]


@pytest.mark.parametrize(("wire", "code", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
class TestBadRequests:
    def test_they_get_a_named_error_and_the_connection_stays_open(
        self, pair: Any, feed: Feed, wire: bytes, code: ErrorCode, message: str
    ) -> None:
        bad, next_request = feed(pair.server, [wire, request_bytes(60, [], correlation_id=2)])
        assert isinstance(bad, BadRequest)
        assert (bad.correlation_id, bad.error_code, bad.error_message) == (1, code, message)
        assert not bad.fatal
        assert isinstance(next_request, Request)
        assert next_request.message == DescribeClusterRequest()

    def test_byte_by_byte(self, pair: Any, feed: Feed, wire: bytes, code: ErrorCode, message: str) -> None:
        (bad,) = feed(pair.server, [wire], chunk=1)
        assert (bad.error_code, bad.error_message) == (code, message)


class TestErrorAnswers:
    def test_the_exact_bytes(self, pair: Any) -> None:
        bad = BadRequest(5, 42, "no", 3, 0, False)
        assert b"".join(
            pair.server.send_error(bad, 42, "no")
        ).hex() == "000000080000000093 05 00 92 2a a26e6f".replace(" ", "")

    def test_it_reaches_the_sender_of_the_request(self, pair: Any) -> None:
        request = pair.ask(DescribeClusterRequest())
        assert pair.refuse(request, ErrorCode.NOT_CONTROLLER, None) == RequestError(41, None)

    def test_long_texts_are_cut(self, pair: Any) -> None:
        request = pair.ask(DescribeClusterRequest())
        error = pair.refuse(request, ErrorCode.INVALID_REQUEST, "ü" * 5000)
        assert error.error_message == "ü" * MAX_ERROR_MESSAGE_LENGTH

    def test_it_needs_an_error(self, pair: Any) -> None:
        with pytest.raises(AssertionError):
            pair.server.send_error(pair.ask(DescribeClusterRequest()), 0)


class TestDamagedStreams:
    """Without a frame boundary or a correlation id, the connection ends."""

    DAMAGE = (
        ("zero length", bytes(8)),
        ("oversize", b"\x7f\xff\xff\xff" + bytes(4)),
        ("negative", b"\xff" * 8),
        ("not msgpack", b"\0\0\0\1\0\0\0\0\xc1"),
        ("not an envelope", b"\0\0\0\1\0\0\0\0\x90"),
        ("no correlation id", request_bytes(3, [None, False], correlation_id="x")),
    )

    @pytest.mark.parametrize(("name", "wire"), DAMAGE, ids=[name for name, _ in DAMAGE])
    def test_alone_it_raises(self, pair: Any, feed: Feed, name: str, wire: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            feed(pair.server, [wire])
        assert feed(pair.server, [HELLO]) == []

    @pytest.mark.parametrize(("name", "wire"), DAMAGE, ids=[name for name, _ in DAMAGE])
    def test_behind_whole_requests_it_is_a_fatal_event(
        self, pair: Any, feed: Feed, name: str, wire: bytes
    ) -> None:
        request, damage = feed(pair.server, [request_bytes(60, []), wire, request_bytes(60, [])])
        assert isinstance(request, Request)
        assert (damage.correlation_id, damage.error_code) == (NO_CORRELATION_ID, ErrorCode.INVALID_REQUEST)
        assert damage.fatal
        farewell = pair.server.send_error(damage, damage.error_code, damage.error_message)
        with pytest.raises(RemoteProtocolError, match="the broker refused the request: "):
            feed(pair.client, farewell)

    def test_an_end_inside_a_frame(self, pair: Any, feed: Feed) -> None:
        pair.server.eof()
        pair.client.eof()
        for connection in (pair.server, pair.client):
            feed(connection, [b"\0\0"])
            with pytest.raises(RemoteProtocolError, match="the stream ended inside a frame"):
                connection.eof()


class TestBadAnswers:
    def ask(self, pair: Any) -> int:
        return pair.client.send(DescribeClusterRequest())[0]

    def test_to_an_unknown_request(self, pair: Any, feed: Feed) -> None:
        with pytest.raises(RemoteProtocolError, match="a response to an unknown request: correlation id 77"):
            feed(pair.client, encode_frame(codec.encode((77, 0, [0, None]))))

    def test_twice(self, pair: Any, feed: Feed) -> None:
        answer = encode_frame(codec.encode((self.ask(pair), 0, [3, None])))
        feed(pair.client, answer)
        with pytest.raises(RemoteProtocolError, match="to an unknown request"):
            feed(pair.client, answer)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ([0, None], "DESCRIBE_CLUSTER received an error response without a code"),
            ([0, None, "c", 1, 0], "DescribeClusterResponse: expected an array of 6"),
            (None, "expected an array of 6, found nil"),
            ([0, None, "c", 1, 0, [[1, 2, None, 0, False, False, 0]]], r"BrokerDescription\.address"),
        ],
    )
    def test_of_a_wrong_shape(self, pair: Any, feed: Feed, body: Any, reason: str) -> None:
        with pytest.raises(RemoteProtocolError, match=reason):
            feed(pair.client, encode_frame(codec.encode((self.ask(pair), 0, body))))

    def test_with_a_payload_of_another_length(self, pair: Any, feed: Feed, examples: Examples) -> None:
        number, _ = pair.client.send(examples[ApiKey.FETCH][0])
        answer = FetchResponse(0, None, [FetchedPartition("t", 0, 0, None, 1, 1, 0, 10, [])])
        with pytest.raises(RemoteProtocolError, match="announces 10 bytes of payload, the frame has 9"):
            feed(pair.client, encode_frame(codec.encode((number, 0, answer)), [bytes(9)]))


def test_an_unsent_request_expects_no_response(pair: Any) -> None:
    with pytest.raises(LocalProtocolError):
        pair.client.send(MetadataRequest(["\ud800"], True))
    assert pair.client.in_flight == 0
