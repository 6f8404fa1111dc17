"""For every struct of the protocol: round trips, two readers that agree, and proportional memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import RemoteProtocolError
from kafkalite.limits import MIB
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS
from kafkalite.protocol.structs import Struct

MESSAGES = [cls for api in APIS.values() for cls in (api.request, api.response)]
each_message = pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)

#: The cost of refusing an envelope beyond four times its size: the unpacker's own stack and buffers.
CONSTANT = 1 * MIB


@each_message
def test_every_message_survives_the_wire(cls: type[Struct], messages_of: Callable[..., Any]) -> None:
    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(messages_of(cls))
    def holds(message: Struct) -> None:
        data = codec.encode(message)
        for decoded in (codec.decode(cls, data), codec.decode_body(cls, codec.Stream(data))):
            assert decoded == message
            assert type(decoded) is cls

    holds()


def _outcome(read: Callable[[], Any]) -> Any:
    """Return the result of reading; None if it is refused."""
    try:
        return read()
    except RemoteProtocolError:
        return None


@each_message
def test_both_readers_accept_the_same_bytes(cls: type[Struct], messages_of: Callable[..., Any]) -> None:
    """The generated check and the stream refuse a damaged message, or read the same from it."""

    @settings(derandomize=True, deadline=None, max_examples=40)
    @given(messages_of(cls, 2), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2))
    def holds(message: Struct, damage: list[tuple[int, int]]) -> None:
        data = bytearray(codec.encode(message))
        for position, value in damage:
            data[position % len(data)] = value
        whole = _outcome(lambda: codec.decode_body(cls, codec._unpack(data)))
        assert _outcome(lambda: codec.decode_body(cls, codec.Stream(data))) == whole

    holds()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from(MESSAGES), st.binary(max_size=700))
def test_random_bytes_are_refused_or_read(cls: type[Struct], data: bytes) -> None:
    read = _outcome(lambda: codec.decode(cls, data))
    assert read is None or type(read) is cls
    _outcome(lambda: codec.decode_request_head(data))
    _outcome(lambda: codec.decode_response_head(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner),
    max_leaves=20,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sampled_from(MESSAGES), JSON)
def test_any_msgpack_value_is_refused_or_read(cls: type[Struct], value: Any) -> None:
    data = msgpack.packb(value)
    whole = _outcome(lambda: codec.decode_body(cls, codec._unpack(data)))
    assert _outcome(lambda: codec.decode_body(cls, codec.Stream(data))) == whole


def _hostile_envelopes(size: int) -> list[tuple[str, bytes]]:
    """Envelopes of about ``size`` bytes whose headers claim far more bytes."""
    rng = random.Random(size)
    huge = [b"\xdd" + struct.pack(">I", size // 2), b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff"]
    maps = [b"\xdf" + struct.pack(">I", size // 4), b"\xde\xff\xff"]
    head = b"\x95\x01\x00\x07\xc0"  # a Fetch request's envelope, up to its body
    half = b"\xdc" + struct.pack(">H", min(size, 65535) // 2)
    fetch = head + b"\x95\x01\x01\x01\x00"  # ... up to its partitions
    topics = b"\x95\x13\x00\x07\xc0\x93\x01\xc2"  # a CreateTopics request, up to its topics
    hostile = []
    for header in (*huge, *maps):
        deep = header * (size // len(header))
        hostile += [
            ("nested", deep),
            ("nested in the body", head + deep),
            ("nested in the partitions", fetch + deep),
            ("nested in an element", fetch + b"\x91" + deep),
            ("nested in a leaf", fetch + b"\x91\x95" + deep),
            ("nested in a map's value", topics + b"\x91\x94\xa1t\x01\x01\x81\xa1k" + deep),
            ("followed by padding", fetch + header + bytes(size)),
        ]
    hostile += [
        ("nested claims of a half", head + half * (size // 3)),
        ("nested pairs", fetch + b"\x92" * size),
        ("empty arrays for a list", fetch + b"\xdd" + struct.pack(">I", size) + b"\x90" * size),
        ("empty arrays for a name", fetch + b"\x91\x95\xdd" + struct.pack(">I", size) + b"\x90" * size),
        ("empty arrays for a body", head + b"\xdd" + struct.pack(">I", size) + b"\x90" * size),
        ("empty maps for an envelope", b"\xdd" + struct.pack(">I", size) + b"\x80" * size),
        ("a string of 4 GiB", fetch + b"\x91\x95\xdb\xff\xff\xff\xff" + b"x" * size),
        ("a binary of 4 GiB", fetch + b"\x91\x95\xc6\xff\xff\xff\xff" + b"x" * size),
        ("noise", fetch + rng.randbytes(size)),
    ]  # fmt: skip
    return hostile


@pytest.mark.parametrize("size", [500, 5_000, 60_000, 1 * MIB])
def test_refusing_costs_four_times_the_bytes_at_most(size: int) -> None:
    """S2, and Kafka's CVE-2026-111108: no count leads to an allocation without the bytes for it."""
    envelopes = _hostile_envelopes(size)
    for _, envelope in envelopes:  # compile the plans, warm the caches
        _decode_request(envelope)
    tracemalloc.start()
    try:
        for name, envelope in envelopes:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert _decode_request(envelope) is None, name
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before <= 4 * len(envelope) + CONSTANT, name
    finally:
        tracemalloc.stop()


def _decode_request(envelope: bytes) -> Any:
    def read() -> Any:
        head = codec.decode_request_head(envelope)
        return codec.decode_body(APIS[head.api_key].request, head.body)

    return _outcome(read)


def test_the_densest_request_that_is_accepted_costs_what_limits_say() -> None:
    """100,000 elements without a value that Python shares: 25 MB of objects, and their names to compare."""
    items = (
        b"\x95\xa2xy\xce" + struct.pack(">I", number) + b"\xcd\x7f\xff\xcd\x7f\xff\0"
        for number in range(100_000)
    )
    partitions = b"\xdd" + struct.pack(">I", 100_000) + b"".join(items)
    envelope = b"\x95\x01\x00\x07\xc0\x95\x01\x01\x01\x00" + partitions
    _decode_request(envelope[:1000])
    tracemalloc.start()
    try:
        assert len(_decode_request(envelope).partitions) == 100_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 36 * MIB
