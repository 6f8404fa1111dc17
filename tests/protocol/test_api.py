"""The table of APIs: complete, and within the codec's bounds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kafkalite.protocol import codec
from kafkalite.protocol.api import API_KEY_BY_REQUEST, APIS, Api, ApiKey, supported_ranges
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
