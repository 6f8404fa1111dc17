"""Fuzzing, S20: any input, in any chunks, gives valid events or the one documented error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import ErrorCode, RemoteProtocolError
from kafkalite.protocol.api import APIS
from kafkalite.protocol.connection import (
    BadRequest,
    ClientConnection,
    Request,
    RequestError,
    Response,
    ServerConnection,
)
from kafkalite.protocol.frames import Frame
from kafkalite.protocol.structs import Struct

Feed = Callable[..., list[Any]]
Examples = dict[int, tuple[Struct, Struct]]
CHUNKS = st.sampled_from([1, 2, 5, 64, 1 << 30])


def server_events(feed: Feed, server: ServerConnection, wire: bytes, chunk: int) -> list[Any] | None:
    """Return the checked events; None if the stream is invalid from the start."""
    try:
        events = feed(server, [wire], chunk)
    except RemoteProtocolError as error:
        assert error.message
        return None
    for event in events:
        if isinstance(event, Request):
            assert type(event.message) is APIS[event.api_key].request
        else:
            assert isinstance(event, BadRequest)
            assert event.error_code in set(ErrorCode)
            assert server.send_error(event, event.error_code, event.error_message)
    return events


def wire_of(examples: Examples, payload_of: Any) -> tuple[bytes, bytes]:
    """All examples as a client's stream and as the server's, the handshake first."""
    client, server = ClientConnection("fuzz"), ServerConnection()
    there, back = [], []
    for number, key in enumerate(sorted(APIS, key=lambda key: key != 18)):
        message, answer = examples[key]
        _, buffers = client._request(APIS[key], 0, message, payload_of(message))
        there += buffers
        request = Request(key, 0, number, None, message, memoryview(b""))
        back += server.send(request, answer, payload_of(answer))
    return b"".join(map(bytes, there)), b"".join(map(bytes, back))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(wire=st.binary(max_size=300), chunk=CHUNKS, greeted=st.booleans())
def test_random_bytes_at_the_server(feed: Feed, wire: bytes, chunk: int, greeted: bool) -> None:
    server = ServerConnection()
    if greeted:
        feed(server, ClientConnection().handshake()[1])
    server_events(feed, server, wire, chunk)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(wire=st.binary(max_size=300), chunk=CHUNKS)
def test_random_envelopes_at_the_server(feed: Feed, wire: bytes, chunk: int) -> None:
    """Valid frames around random bytes reach the decoder; random streams end at the lengths."""
    server = ServerConnection()
    feed(server, ClientConnection().handshake()[1])
    events = server_events(feed, server, len(wire).to_bytes(4, "big") + bytes(4) + wire, chunk)
    assert events is None or len(events) <= 1


DAMAGE = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert"]), st.integers(0, 1 << 16), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def damaged(wire: bytes, damage: list[tuple[str, int, int]]) -> bytes:
    data = bytearray(wire)
    for how, position, value in damage:
        at = position % len(data)
        match how:
            case "set":
                data[at] = value
            case "cut":
                del data[at : at + 1 + value % 8]
            case _:
                data[at:at] = bytes([value]) * (1 + value % 4)
    return bytes(data)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(damage=DAMAGE, chunk=CHUNKS)
def test_damaged_requests(
    feed: Feed, examples: Examples, payload_of: Any, damage: list[tuple[str, int, int]], chunk: int
) -> None:
    wire = damaged(wire_of(examples, payload_of)[0], damage)
    whole = server_events(feed, ServerConnection(), wire, 1 << 30)
    pieces = server_events(feed, ServerConnection(), wire, chunk)
    if whole is not None and pieces is not None:
        assert [event[:3] for event in whole] == [event[:3] for event in pieces], "chunks change nothing"


@settings(derandomize=True, deadline=None, max_examples=300)
@given(damage=DAMAGE, chunk=CHUNKS)
def test_damaged_answers(
    feed: Feed, examples: Examples, payload_of: Any, damage: list[tuple[str, int, int]], chunk: int
) -> None:
    client = ClientConnection("fuzz")
    for key in sorted(APIS, key=lambda key: key != 18):
        client._request(APIS[key], 0, examples[key][0], ())
    try:
        responses = feed(client, [damaged(wire_of(examples, payload_of)[1], damage)], chunk)
    except RemoteProtocolError as error:
        assert error.message
        return
    for response in responses:
        assert isinstance(response, Response)
        assert type(response.message) is RequestError or response.message.error_code is not None


def test_nothing_leaks(feed: Feed, examples: Examples, payload_of: Any) -> None:
    """A hundred connections fed truncated, damaged and unexpected streams leave no object alive."""
    wire, back = wire_of(examples, payload_of)

    def alive() -> int:
        gc.collect()
        kinds = (Frame, Request, BadRequest, Response, ServerConnection, ClientConnection, memoryview)
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    def use(number: int) -> None:
        server_events(feed, ServerConnection(), wire[: len(wire) - number], 1 + number)
        server_events(feed, ServerConnection(), damaged(wire, [("set", number * 7, 0xC1)]), 1 + number)
        client = ClientConnection()
        client.handshake()
        with pytest.raises(RemoteProtocolError):  # only the first of the responses is expected
            feed(client, [back])

    use(0)
    before = alive()
    for number in range(100):
        use(number)
    assert alive() == before
