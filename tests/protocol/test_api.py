"""The table of APIs: complete, and within the codec's bounds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kafkalite.protocol import codec
from kafkalite.protocol.api import (
    API_BY_REQUEST,
    API_KEY_BY_REQUEST,
    APIS,
    LATER_APIS,
    Api,
    ApiKey,
    supported_ranges,
)
from kafkalite.protocol.structs import Struct

each_api = pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.key.name)


def test_every_key_has_an_api() -> None:
    assert set(APIS) == set(ApiKey)


@each_api
def test_a_request_type_has_an_api(api: Api) -> None:
    assert API_KEY_BY_REQUEST[api.request] is api.key
    assert api.request.__name__ == api.response.__name__.replace("Response", "Request")
    assert 0 <= api.min_version <= api.max_version


@each_api
def test_responses_start_with_the_outcome_and_are_not_taken_for_an_error(api: Api) -> None:
    assert api.response._fields[:2] == ("error_code", "error_message")
    assert len(api.response._fields) > 2, "an array of two is the answer that the whole request failed"


@each_api
def test_every_struct_compiles(api: Api) -> None:
    for cls in (api.request, api.response):
        codec.plan_for(cls)


@each_api
def test_there_is_an_example_of_each(api: Api, examples: dict[int, tuple[Struct, Struct]]) -> None:
    request, response = examples[api.key]
    assert (type(request), type(response)) == (api.request, api.response)
    for message in (request, response):
        assert codec.decode(type(message), codec.encode(message)) == message


@pytest.mark.parametrize("key", sorted(LATER_APIS), ids=str)
def test_a_later_version_appends_fields(
    key: tuple[int, int], later_examples: dict[tuple[int, int], tuple[Struct, Struct]]
) -> None:
    """A struct of version n begins with the fields of version n - 1, with the same types."""
    api_key, version = key
    api = LATER_APIS[key]
    before = APIS[api_key] if version == 1 else LATER_APIS[api_key, version - 1]
    assert 1 <= version <= api.max_version == APIS[api_key].max_version
    assert API_BY_REQUEST[api.request] is api
    for older, newer in ((before.request, api.request), (before.response, api.response)):
        assert issubclass(newer, older)
        assert newer._fields[: len(older._fields)] == older._fields
    for message in later_examples[key]:
        assert codec.decode(type(message), codec.encode(message)) == message


def test_supported_ranges_are_sorted_and_whole() -> None:
    ranges = supported_ranges()
    assert [entry.api_key for entry in ranges] == sorted(ApiKey)
    assert all(type(value) is int for entry in ranges for value in entry)


def test_importing_the_protocol_pulls_in_no_shell() -> None:
    """A client loads msgpack and the declarations, but no event loop, socket or server."""
    program = (
        "import sys, kafkalite.protocol.connection\n"
        "unwanted = {'asyncio', 'socket', 'threading', 'inspect', 'dataclasses', 'kafkalite.model'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
