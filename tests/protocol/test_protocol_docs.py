"""docs/protocol.md and docs/protocol.json agree with the code: structs, errors, limits, example."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kafkalite.conformance.schema import schema
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import APIS
from kafkalite.protocol.connection import ClientConnection, Request, ServerConnection
from kafkalite.protocol.messages.data import (
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
)
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.partitioners import murmur2
from proof.protocol_document import PAGE, SCHEMA, render_json, render_page


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_the_page_is_made_from_the_schema(page: str) -> None:
    """``python -m proof.protocol_document`` writes both files again."""
    assert render_page(page, schema()) == page


def test_the_schema_file_is_that_of_the_code() -> None:
    assert SCHEMA.read_text() == render_json(schema())


def test_a_changed_field_makes_the_page_stale(page: str) -> None:
    changed = schema()
    changed["structs"]["FetchRequest"][0]["type"] = "str"
    assert render_page(page, changed) != page
    changed = schema()
    changed["apis"][0]["errors"]["item"].popitem()
    assert render_page(page, changed) != page
    changed = schema()
    changed["deadlines"][0]["value"] += 1
    assert render_page(page, changed) != page
    changed = schema()
    changed["structs"]["NewRequest"] = []
    with pytest.raises(ValueError, match="NewRequest"):
        render_page(page, changed)


def test_every_api_has_its_section(page: str) -> None:
    sections = {int(key): name for name, key in re.findall(r"^### (\w+) \((\d+)\)$", page, re.MULTILINE)}
    assert {key: f"{name}Request" for key, name in sections.items()} == {
        key: api.request.__name__ for key, api in APIS.items()
    }


def test_the_page_has_no_words_of_python(page: str) -> None:
    """The words of the page are those of the protocol, not of Python."""
    outside = re.sub(r"^```hex.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\b(?:None|True|False)\b|(?<!`)``(?!`)", outside)


def test_every_named_error_exists(page: str) -> None:
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", page)) - {"NO_OFFSET", "NO_EPOCH", "NO_TIMESTAMP"}
    assert named <= set(ErrorCode.__members__)


def test_the_hashes_of_the_page(page: str) -> None:
    rows = re.findall(r"^\| (\(empty\)|`\w+`) \| (0x[0-9a-f]{8}) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for key, value in rows:
        data = b"" if key == "(empty)" else key.strip("`").encode()
        assert murmur2(data) & 0xFFFFFFFF == int(value, 16)


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
