"""Checks of connections, frames, envelopes and versions, with invalid bytes, and of Metadata and
CreateTopics."""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

from typing import Any, Final

import msgpack

from kafkalite.conformance.declared import Checks
from kafkalite.conformance.peer import Cluster, Peer, Violation, envelope, expect, frame, name_of
from kafkalite.limits import (
    MAX_CLIENT_ID_LENGTH,
    MAX_ENVELOPE_BYTES,
    MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE,
    MAX_PAYLOAD_BYTES,
    MAX_TOPIC_NAME_LENGTH,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.admin import CreateTopicsRequest, NewTopic
from kafkalite.protocol.messages.metadata import ApiVersionsRequest, DescribeClusterRequest, MetadataRequest

FRAME_CHECKS: Final = Checks()
check = FRAME_CHECKS.check
_METADATA: Final = int(ApiKey.METADATA)
_GOOD_BODY: Final[list[Any]] = [[], False]
_MINIMUM: Final = frozenset({ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.METADATA, ApiKey.API_VERSIONS})


def _lengths(envelope_bytes: int, payload_bytes: int) -> bytes:
    return envelope_bytes.to_bytes(4, "big") + payload_bytes.to_bytes(4, "big")


@check("handshake.versions", "4")
def _versions(cluster: Cluster) -> None:
    with cluster.connect(handshake=False) as peer:
        apis = peer.ask(ApiVersionsRequest("conformance", "1")).message.apis
        keys = [one.api_key for one in apis]
        expect(len(set(keys)), len(keys), "keys of ApiVersions, each once")
        missing = _MINIMUM - set(keys)
        if missing:
            raise Violation(f"ApiVersions lacks {', '.join(sorted(key.name for key in missing))}")
        for one in apis:
            if one.min_version > one.max_version:
                raise Violation(f"API {one.api_key} has versions {one.min_version} to {one.max_version}")


@check("handshake.first-request", "1")
def _first_request(cluster: Cluster) -> None:
    with cluster.connect(handshake=False) as peer:
        peer.send(frame(envelope(_METADATA, _GOOD_BODY, correlation_id=77)))
        _expect_error(peer, 77, "INVALID_REQUEST", "Metadata before ApiVersions")
        expect(peer.is_closed(), True, "the connection is closed after it")


@check("handshake.limit", "4")
def _handshake_limit(cluster: Cluster) -> None:
    for lengths in (_lengths(MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE + 1, 0), _lengths(100, 1)):
        with cluster.connect(handshake=False) as peer:
            peer.send(lengths)
            expect(peer.is_closed(), True, "a frame over the limits before ApiVersions closes")


@check("frames.pieces", "2")
def _pieces(cluster: Cluster) -> None:
    with cluster.connect() as peer:
        for byte in frame(envelope(_METADATA, _GOOD_BODY, correlation_id=5)):
            peer.send(bytes([byte]))
        expect(peer.answer(ApiKey.METADATA, 5).error, "NONE", "a request in single bytes")


@check("frames.order", "1")
def _order(cluster: Cluster) -> None:
    requests = [MetadataRequest([], False), DescribeClusterRequest()] * 40
    keys = [ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER] * 40
    with cluster.connect() as peer:
        numbers = [peer.post(request) for request in requests]
        for key, number in zip(keys, numbers, strict=True):
            expect(peer.answer(key, number).error, "NONE", "pipelined requests")


def _closes(cluster: Cluster, data: bytes, what: str) -> None:
    with cluster.connect() as peer:
        peer.send(data)
        expect(peer.is_closed(), True, what)


@check("frames.zero-length", "4")
def _zero_length(cluster: Cluster) -> None:
    _closes(cluster, _lengths(0, 0), "an envelope of 0 bytes closes")


@check("frames.too-long", "4")
def _too_long(cluster: Cluster) -> None:
    _closes(cluster, _lengths(MAX_ENVELOPE_BYTES + 1, 0), "an envelope over its limit closes")
    _closes(cluster, _lengths(10, MAX_PAYLOAD_BYTES + 1), "a payload over its limit closes")
    _closes(cluster, b"\xff" * 8, "lengths of 2^32 - 1 close")


@check("frames.payload-lengths", "4")
def _payload_lengths(cluster: Cluster) -> None:
    with cluster.connect() as peer:
        body = [1, 1000, None, [["t", 0, 10]]]
        peer.send(frame(envelope(int(ApiKey.PRODUCE), body, correlation_id=3), b"123"))
        _expect_error(peer, 3, "INVALID_REQUEST", "lengths that do not add up to the payload")
        _still_serves(peer)


def _still_serves(peer: Peer) -> None:
    expect(peer.ask(MetadataRequest([], False)).error, "NONE", "the next request on the connection")


def _is_refused(cluster: Cluster, data: bytes, what: str) -> None:
    """Raise Violation unless the server refuses the envelope ``data`` and then serves a new connection.

    It may respond INVALID_REQUEST or close the connection. ``what`` describes the envelope.
    """
    with cluster.connect() as peer:
        peer.send(frame(data))
        try:
            expect(peer.error()[1], "INVALID_REQUEST", what)
        except Violation as violation:
            if "closed instead" not in str(violation):
                raise Violation(f"{what}: {violation}") from None
    with cluster.connect() as peer:
        _still_serves(peer)


_HEAD: Final = envelope(_METADATA, None)[:-1]  # all but the body


@check("envelope.trailing-bytes", "4")
def _trailing(cluster: Cluster) -> None:
    _is_refused(cluster, envelope(_METADATA, _GOOD_BODY) + b"\xc0", "a byte after the envelope")
    many = envelope(_METADATA, [["t" * 100] * 20, False])
    _is_refused(cluster, many + b"\xc0", "a byte after a long envelope")


@check("envelope.missing-bytes", "4")
def _missing(cluster: Cluster) -> None:
    _is_refused(cluster, envelope(_METADATA, [["topic"], False])[:-3], "an envelope that is cut off")


@check("envelope.utf-8", "3")
def _utf_8(cluster: Cluster) -> None:
    _is_refused(cluster, _HEAD + b"\x92\x91\xa2\xff\xfe\xc2", "text that is not UTF-8")


@check("envelope.extension-types", "3")
def _extensions(cluster: Cluster) -> None:
    _is_refused(cluster, _HEAD + b"\x92\x91\xd4\x05\x00\xc2", "an extension type")


@check("envelope.map-keys", "3")
def _map_keys(cluster: Cluster) -> None:
    head = envelope(int(ApiKey.CREATE_TOPICS), None)[:-1]
    body = b"\x93\xcd\x03\xe8\xc3\x91\x94\xa1t\x01\x01\x82\xa1a\xa1b\xa1a\xa1c"
    _is_refused(cluster, head + body, "a map with a key twice")


@check("envelope.nesting", "4")
def _nesting(cluster: Cluster) -> None:
    _is_refused(cluster, _HEAD + b"\x91" * 400 + b"\xc0", "400 nested arrays")
    _is_refused(cluster, _HEAD + b"\x91" * 100_000 + b"\xc0", "100,000 nested arrays")


@check("envelope.counts", "4")
def _counts(cluster: Cluster) -> None:
    for count in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        _is_refused(cluster, _HEAD + b"\x92" + count + b"\xa1a", "a count beyond the envelope")
        _is_refused(cluster, _HEAD + b"\x92" + count + b"\xa1a" * 600, "a count beyond a long envelope")


def _answers_invalid(cluster: Cluster, data: bytes, what: str, error: str = "INVALID_REQUEST") -> None:
    """Send the envelope ``data``. Raise Violation unless the server responds ``error`` and keeps serving."""
    with cluster.connect() as peer:
        peer.send(frame(data))
        _expect_error(peer, 1, error, what)
        _still_serves(peer)


def _expect_error(peer: Peer, number: int, error: str, what: str) -> None:
    expect(" ".join(map(str, peer.error())), f"{number} {error}", f"{what}: correlation id and error")


@check("body.width", "3")
def _width(cluster: Cluster) -> None:
    _answers_invalid(cluster, envelope(_METADATA, [[], False, 0]), "a body with a field too many")
    _answers_invalid(cluster, envelope(_METADATA, [[]]), "a body with a field too few")


@check("body.types", "3")
def _types(cluster: Cluster) -> None:
    _answers_invalid(cluster, envelope(_METADATA, [[], 0]), "an integer for a boolean")
    _answers_invalid(cluster, envelope(_METADATA, [[b"t"], False]), "bytes for text")
    body: list[Any] = [True, 1000, None, []]
    _answers_invalid(cluster, envelope(int(ApiKey.PRODUCE), body), "a boolean for an integer")
    body = [1.0, 1000, None, []]
    _answers_invalid(cluster, envelope(int(ApiKey.PRODUCE), body), "a float for an integer")


@check("body.integers", "3")
def _integers(cluster: Cluster) -> None:
    for wide in (b"\xd3" + bytes(7) + b"\x07", b"\xcf" + bytes(7) + b"\x07", b"\xcd\x00\x07"):
        data = b"\x95" + b"\x03\x00" + wide + b"\xc0" + msgpack.packb(_GOOD_BODY)
        with cluster.connect() as peer:
            peer.send(frame(data))
            expect(peer.answer(ApiKey.METADATA, 7).error, "NONE", "an integer in a wide encoding")
    body: list[Any] = [1, 2**64 - 1, None, []]
    _answers_invalid(cluster, envelope(int(ApiKey.PRODUCE), body), "an integer above 2^63 - 1")


@check("requests.unknown-api", "4")
def _unknown_api(cluster: Cluster) -> None:
    _answers_invalid(cluster, envelope(999, []), "an unknown API", "UNKNOWN_API")


@check("requests.unknown-version", "4")
def _unknown_version(cluster: Cluster) -> None:
    data = envelope(_METADATA, _GOOD_BODY, version=99)
    _answers_invalid(cluster, data, "an unknown version", "UNSUPPORTED_VERSION")


@check("requests.client-id", "4")
def _client_id(cluster: Cluster) -> None:
    longest = "c" * MAX_CLIENT_ID_LENGTH
    with cluster.connect() as peer:
        peer.send(frame(envelope(_METADATA, _GOOD_BODY, client=longest)))
        expect(peer.answer(ApiKey.METADATA, 1).error, "NONE", "the longest client id")
    _answers_invalid(
        cluster, envelope(_METADATA, _GOOD_BODY, client=longest + "c"), "a client id over its limit"
    )


@check("requests.correlation-id", "1")
def _correlation_id(cluster: Cluster) -> None:
    with cluster.connect() as peer:
        peer.send(frame(envelope(_METADATA, _GOOD_BODY, correlation_id=2**31 - 1)))
        expect(peer.answer(ApiKey.METADATA, 2**31 - 1).error, "NONE", "the largest correlation id")
    _closes(
        cluster, frame(envelope(_METADATA, _GOOD_BODY, correlation_id=-1)), "the correlation id -1 closes"
    )


@check("requests.other-nodes", "7")
def _other_nodes(cluster: Cluster) -> None:
    body = [1, 1]
    data = envelope(int(ApiKey.ALLOCATE_PRODUCER_IDS), body)
    _answers_invalid(cluster, data, "a request of nodes without proof", "CLUSTER_AUTHORIZATION_FAILED")


@check("metadata.topics", "6")
def _topics(cluster: Cluster) -> None:
    topic = cluster.topic(3)
    missing = cluster.name("missing")
    response = cluster.peer().ask(MetadataRequest([topic, missing, "a/b"], False)).message
    found = {one.name: one for one in response.topics}
    expect(sorted(one.partition for one in found[topic].partitions), [0, 1, 2], "partitions")
    expect(len(found[topic].topic_id), 32, "characters of a topic id")
    nodes = {broker.node_id for broker in response.brokers}
    for one in found[topic].partitions:
        expect({one.leader_id, *one.isr} <= set(one.replicas), True, "leader and ISR are replicas")
        expect(one.leader_id in nodes, True, "the leader is among the brokers")
    expect(name_of(found[missing].error_code), "UNKNOWN_TOPIC_OR_PARTITION", "a topic that does not exist")
    expect(name_of(found["a/b"].error_code), "INVALID_TOPIC_EXCEPTION", "a name that is not valid")


@check("topics.create", "6")
def _create(cluster: Cluster) -> None:
    topic = cluster.topic()
    long_name = "n" * (MAX_TOPIC_NAME_LENGTH + 1)
    names = [topic, long_name, "..", cluster.name("half")]
    configs: list[dict[str, str]] = [{}, {}, {}, {"retention.ms": "soon"}]
    new = [NewTopic(name, 1, -1, config) for name, config in zip(names, configs, strict=True)]
    response = cluster.peer().ask(CreateTopicsRequest(5000, True, new)).message
    expect(
        [name_of(one.error_code) for one in response.topics],
        ["TOPIC_ALREADY_EXISTS", "INVALID_TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION", "INVALID_CONFIG"],
        "CreateTopics",
    )
