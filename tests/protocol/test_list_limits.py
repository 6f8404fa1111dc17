"""The lists and maps of a client's request have limits, and long ones are decoded in steps (S24, S25)."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from kafkalite.errors import RemoteProtocolError
from kafkalite.limits import MAX_ENTRIES_PER_MAP, MAX_TOPICS_PER_REQUEST, MAX_USERS_PER_REQUEST
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, CLUSTER_APIS, ApiKey
from kafkalite.protocol.messages.admin import CreateTopicsRequest, DeleteTopicsRequest, NewTopic
from kafkalite.protocol.messages.groups import ListGroupsRequest
from kafkalite.protocol.messages.security import DescribeUserScramCredentialsRequest
from kafkalite.protocol.structs import AtMost, Struct


def lists_of(cls: type[Struct]) -> list[tuple[type[Struct], str, Any]]:
    """Return (struct, field, marker or None) of each list in a request, and in the items of its lists."""
    found: list[tuple[type[Struct], str, Any]] = []
    for name, hint in get_type_hints(cls, include_extras=True).items():
        marker = None
        if get_args(hint)[1:] == (NoneType,):
            hint = get_args(hint)[0]
        if get_origin(hint) is Annotated:
            hint, marker = get_args(hint)
        if name in cls._fields and get_origin(hint) is list:
            (item,) = get_args(hint)
            if item is not int:  # codec.py limits these
                found.append((cls, name, marker))
            if issubclass(item, Struct):
                found += lists_of(item)
    return found


OF_CLIENTS = [one for api in APIS.values() if api.key not in CLUSTER_APIS for one in lists_of(api.request)]
LIMITED = [
    pytest.param(cls, name, marker.max_items, id=f"{cls.__name__}.{name}")
    for cls, name, marker in OF_CLIENTS
    if isinstance(marker, AtMost)
]


def test_s25_every_list_of_a_client_has_a_limit() -> None:
    assert len(LIMITED) > 20
    assert [(cls.__name__, name) for cls, name, marker in OF_CLIENTS if marker is None] == []


def minimal(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint(*(minimal(get_type_hints(hint)[name]) for name in hint._fields))
    if get_origin(hint) in (list, dict):
        return get_origin(hint)()
    return None if NoneType in get_args(hint) else hint()


@pytest.mark.parametrize(("cls", "name", "limit"), LIMITED)
def test_s25_a_longer_list_is_refused(cls: type[Struct], name: str, limit: int) -> None:
    hint = get_type_hints(cls)[name]
    item = get_args(get_args(hint)[0] if NoneType in get_args(hint) else hint)[0]
    plan = codec.plan_for(cls)

    def refusal_of(count: int, *, in_steps: bool) -> str:
        body = codec.encode(minimal(cls)._replace(**{name: [minimal(item)] * count}))
        try:
            if not in_steps:
                codec.decode(cls, body)
            elif plan.read_in_turns is not None:
                list(codec.decode_body_in_turns(cls, codec.Stream(body)))
        except RemoteProtocolError as error:
            return error.message
        return ""

    for in_steps in (False, True):
        assert refusal_of(limit, in_steps=in_steps) == ""
        words = f"{cls.__name__}.{name}: at most {limit} elements in one request, found {limit + 1}"
        assert refusal_of(limit + 1, in_steps=in_steps) == words


def test_s25_a_small_envelope_with_too_many_states_is_refused() -> None:
    body = codec.encode(ListGroupsRequest(["Dead"] * 17))
    assert len(body) < codec.SMALL_ENVELOPE_BYTES
    with pytest.raises(RemoteProtocolError, match="at most 16 elements in one request, found 17"):
        codec.decode(ListGroupsRequest, body)


@pytest.mark.parametrize("value", ["", "x" * 20], ids=["in a small envelope", "in a large one"])
def test_s25_a_map_with_too_many_entries_is_refused(value: str) -> None:
    def decode(count: int) -> Any:
        topic = NewTopic("t", 1, 1, {chr(32 + number): value for number in range(count)})
        return codec.decode(NewTopic, codec.encode(topic))

    assert len(decode(MAX_ENTRIES_PER_MAP).configs) == MAX_ENTRIES_PER_MAP
    with pytest.raises(RemoteProtocolError, match=r"NewTopic\.configs: at most 128 elements"):
        decode(MAX_ENTRIES_PER_MAP + 1)


def steps_of(message: Struct) -> int:
    envelope = codec.encode((0, 0, 1, None, message))
    body = codec.decode_request_head(envelope, 20_000).body
    with pytest.raises(codec.LongBodyError):
        codec.decode_body(type(message), body)
    *steps, decoded = codec.decode_body_in_turns(type(message), body)
    assert decoded == message
    return len(steps)


def test_s24_a_long_list_of_any_kind_is_decoded_in_steps() -> None:
    names = [f"t{number:05}" for number in range(MAX_TOPICS_PER_REQUEST)]
    assert steps_of(DeleteTopicsRequest(1, names)) == MAX_TOPICS_PER_REQUEST / codec.ITEMS_PER_TURN
    configs = {f"option-{number}": "x" for number in range(MAX_ENTRIES_PER_MAP)}
    topics = [NewTopic(name, 1, 1, configs) for name in names[:200]]
    assert steps_of(CreateTopicsRequest(1, False, topics)) == 200 / codec.NESTED_ITEMS_PER_TURN


def test_s25_a_list_that_is_too_long_is_not_decoded() -> None:
    """The refusal comes with the length, before the first item: it costs nothing (see limits.py)."""
    users = DescribeUserScramCredentialsRequest(["u"] * 90_000)
    body = codec.decode_request_head(codec.encode((int(ApiKey.METADATA), 0, 1, None, users))).body
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_USERS_PER_REQUEST} elements"):
        codec.decode_body(DescribeUserScramCredentialsRequest, body)
    assert body._unpacker.tell() < 20
