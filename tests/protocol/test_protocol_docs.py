"""docs/protocol.md agrees with the code: structs, errors, limits, the worked example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from kafkalite import errors, limits
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import APIS
from kafkalite.protocol.connection import ClientConnection, Request, ServerConnection
from kafkalite.protocol.messages.data import (
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
)
from kafkalite.protocol.structs import Struct
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "protocol.md").read_text()


def _notation(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return f"[{_notation(arguments[0])}]"
    if get_origin(hint) is dict:
        return f"{{{_notation(arguments[0])}: {_notation(arguments[1])}}}"
    if arguments:
        return _notation(arguments[0]) + "?"
    return str(hint.__name__)


def _structs() -> dict[str, type[Struct]]:
    """Return every struct of the wire protocol by name."""
    found: dict[str, type[Struct]] = {}

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and issubclass(hint, Struct):
            found[hint.__name__] = hint
            for inner in (get_type_hints(hint)[name] for name in hint._fields):
                visit(inner)
        for argument in get_args(hint):
            visit(argument)

    for api in APIS.values():
        visit(api.request)
        visit(api.response)
    return found


def test_every_struct_has_its_fields_in_order(page: str) -> None:
    documented: dict[str, list[str]] = {}
    for block in re.findall(r"^```struct\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for paragraph in block.strip().split("\n\n"):
            name, *fields = paragraph.splitlines()
            assert name not in documented, f"{name} stands twice"
            documented[name] = [re.split(r"\s{2,}", field.strip())[0] for field in fields]
    expected = {
        name: [f"{field}: {_notation(get_type_hints(cls)[field])}" for field in cls._fields]
        for name, cls in _structs().items()
    }
    assert documented == expected


def test_every_api_has_its_section(page: str) -> None:
    sections = {int(key): name for name, key in re.findall(r"^### (\w+) \((\d+)\)$", page, re.MULTILINE)}
    assert {key: f"{name}Request" for key, name in sections.items()} == {
        key: api.request.__name__ for key, api in APIS.items()
    }


def test_every_error_is_there_and_is_marked_as_clients_treat_it(page: str) -> None:
    rows = re.findall(r"^\| (-?\d+) \| ([A-Z_]+) \| (yes)? ?\| (yes)? ?\|$", page, re.MULTILINE)
    documented = {name: (int(code), retry == "yes", refresh == "yes") for code, name, retry, refresh in rows}
    expected = {ErrorCode.NONE.name: (0, False, False)}
    for code in set(ErrorCode) - {ErrorCode.NONE}:
        error = errors.broker_error(code)
        expected[code.name] = (code, error.retriable, error.refresh_metadata)
    assert documented == expected
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", page)) - {"NO_OFFSET", "NO_EPOCH", "NO_TIMESTAMP"}
    assert named <= set(ErrorCode.__members__)


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ("envelope before ApiVersions", limits.MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE),
        ("payload before ApiVersions", limits.MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE),
        ("envelope", limits.MAX_ENVELOPE_BYTES),
        ("payload", limits.MAX_PAYLOAD_BYTES),
        ("elements in all arrays of one request", limits.MAX_ITEMS_PER_REQUEST),
        ("elements of an `[int]`", limits.MAX_INTEGERS_PER_LIST),
        ("characters of a client id", limits.MAX_CLIENT_ID_LENGTH),
        ("characters of a topic name", limits.MAX_TOPIC_NAME_LENGTH),
        ("characters of an error message", limits.MAX_ERROR_MESSAGE_LENGTH),
        ("requests in flight on one connection", limits.MAX_IN_FLIGHT_PER_CONNECTION),
        ("records of a batch", limits.MAX_RECORDS_PER_BATCH),
        ("bytes a compressed batch unpacks to", limits.MAX_DECOMPRESSED_BYTES),
    ],
)
def test_limits_are_those_of_the_code(page: str, what: str, limit: int) -> None:
    row = re.search(rf"^\| {re.escape(what)} \| (.*) \|$", page, re.MULTILINE)
    assert row is not None
    assert limit in [int(number.replace(",", "")) for number in re.findall(r"\b[\d,]+\b", row[1])]


@pytest.fixture(scope="module")
def example(page: str) -> dict[str, bytes]:
    blocks = re.findall(r"^```hex ([\w ]+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return {
        name: bytes.fromhex(" ".join(line.split(";")[0] for line in text.splitlines()))
        for name, text in blocks
    }


class TestWorkedExample:
    def test_our_client_sends_these_bytes(self, example: dict[str, bytes]) -> None:
        client = ClientConnection("demo")
        assert b"".join(map(bytes, client.handshake("demo", "1")[1])) == example["handshake request"]
        batch = bytes(build_batch([b"hello", b"world"], [None, b"k"], [1_700_000_000_000, 1_700_000_000_005]))
        request = ProduceRequest(1, 1000, None, [ProducePartition("greetings", 0, len(batch))])
        _, buffers = client._request(APIS[0], 0, request, [batch])
        assert b"".join(map(bytes, buffers)) == example["produce request"]

    def test_our_server_answers_with_these(self, example: dict[str, bytes], feed: Any) -> None:
        server = ServerConnection()
        _, request = feed(server, [example["handshake request"], example["produce request"]])
        assert isinstance(request, Request)
        batch = RecordBatch(request.payload)
        assert [(r.key, r.value) for r in batch.records("greetings", 0)] == [
            (None, b"hello"),
            (b"k", b"world"),
        ]
        answer = ProduceResponse(0, None, [ProducedPartition("greetings", 0, 0, None, 0, -1, 0)])
        assert b"".join(map(bytes, server.send(request, answer))) == example["produce response"]
