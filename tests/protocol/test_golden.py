"""Frozen bytes of every message: tests/golden/protocol. A change there is a change of the protocol.

``UPDATE_GOLDEN=1`` writes them again; the changelog must then name the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.protocol.api import APIS, LATER_APIS, ApiKey
from kafkalite.protocol.connection import (
    BadRequest,
    ClientConnection,
    Request,
    RequestError,
    ServerConnection,
)
from kafkalite.protocol.structs import Struct

CORRELATION_ID = 7
CLIENT_ID = "golden"
Examples = dict[int, tuple[Struct, Struct]]
Later = dict[tuple[int, int], tuple[Struct, Struct]]
Feed = Callable[..., list[Any]]


def name_of(key: int, direction: str, version: int = 0) -> str:
    return f"{ApiKey(key).name.lower().replace('_', '-')}-v{version}-{direction}.hex"


def render(title: str, message: Struct, wire: bytes) -> str:
    """Comment lines with the message, then the frame, 32 bytes a line."""
    lines = [f"# {title}", f"# {message!r}"]
    lines += [wire[at : at + 32].hex(" ") for at in range(0, len(wire), 32)]
    return "\n".join(lines) + "\n"


def parse(text: str) -> bytes:
    return bytes.fromhex(" ".join(line for line in text.splitlines() if not line.startswith("#")))


def frames(examples: Examples, later: Later, payload_of: Any) -> dict[str, str]:
    """Return file name -> content, for every API in every version and for the error response."""
    found = {}
    server = ServerConnection()
    every = {(key, 0): pair for key, pair in examples.items()} | later
    for (key, version), (message, answer) in every.items():
        client = ClientConnection(CLIENT_ID)
        client._next_id = CORRELATION_ID
        _, sent = client._request(APIS[key], version, message, payload_of(message))
        title = f"{ApiKey(key).name}, version {version}, correlation id {CORRELATION_ID}"
        wire = b"".join(map(bytes, sent))
        found[name_of(key, "request", version)] = render(f"{title}, client id {CLIENT_ID}", message, wire)
        request = Request(key, version, CORRELATION_ID, CLIENT_ID, message, memoryview(b""))
        wire = b"".join(map(bytes, server.send(request, answer, payload_of(answer))))
        found[name_of(key, "response", version)] = render(f"Answer to {title}", answer, wire)
    bad = BadRequest(CORRELATION_ID, 1000, "there is no api 999", 999, 0, False)
    wire = b"".join(server.send_error(bad, bad.error_code, bad.error_message))
    error = RequestError(bad.error_code, bad.error_message)
    found["error-response.hex"] = render("Answer to any request that failed as a whole", error, wire)
    return found


@pytest.fixture(scope="session")
def golden(repository: Path) -> Path:
    return repository / "tests" / "golden" / "protocol"


def test_the_bytes_are_what_they_were(
    golden: Path, examples: Examples, later_examples: Later, payload_of: Any
) -> None:
    expected = frames(examples, later_examples, payload_of)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.mkdir(parents=True, exist_ok=True)
        for old in golden.glob("*.hex"):
            old.unlink()
        for name, content in expected.items():
            (golden / name).write_text(content)
    assert {path.name for path in golden.glob("*.hex")} == set(expected)
    for name, content in expected.items():
        assert (golden / name).read_text() == content, f"{name} differs: the protocol changed"


@pytest.mark.parametrize("key", sorted(APIS), ids=lambda key: ApiKey(key).name)
@pytest.mark.parametrize("chunk", [1, 1 << 30])
def test_the_bytes_are_read_back(
    golden: Path, examples: Examples, feed: Feed, payload_of: Any, key: int, chunk: int
) -> None:
    message, answer = examples[key]
    server = ServerConnection()
    feed(server, ClientConnection().handshake()[1])
    (request,) = feed(server, [parse((golden / name_of(key, "request")).read_text())], chunk)
    assert (request.correlation_id, request.client_id) == (CORRELATION_ID, CLIENT_ID)
    assert request.message == message
    assert bytes(request.payload) == b"".join(payload_of(message))
    client = ClientConnection()
    client._next_id = CORRELATION_ID
    client._request(APIS[key], 0, message, payload_of(message))
    (response,) = feed(client, [parse((golden / name_of(key, "response")).read_text())], chunk)
    assert response.message == answer
    assert bytes(response.payload) == b"".join(payload_of(answer))


@pytest.mark.parametrize("key", sorted(LATER_APIS), ids=lambda key: f"{ApiKey(key[0]).name}-v{key[1]}")
@pytest.mark.parametrize("chunk", [1, 1 << 30])
def test_the_bytes_of_later_versions_are_read_back(
    golden: Path, later_examples: Later, feed: Feed, payload_of: Any, key: tuple[int, int], chunk: int
) -> None:
    message, answer = later_examples[key]
    server = ServerConnection()
    feed(server, ClientConnection().handshake()[1])
    (request,) = feed(server, [parse((golden / name_of(key[0], "request", key[1])).read_text())], chunk)
    assert (request.api_version, request.message) == (key[1], message)
    client = ClientConnection()
    client._next_id = CORRELATION_ID
    client._request(LATER_APIS[key], key[1], message, payload_of(message))
    (response,) = feed(client, [parse((golden / name_of(key[0], "response", key[1])).read_text())], chunk)
    assert response.message == answer
    assert bytes(response.payload) == b"".join(payload_of(answer))
