"""A client written from docs/protocol.md alone, against a scripted server made of our connection objects."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kafkalite.protocol.api import ApiKey, supported_ranges
from kafkalite.protocol.connection import Request, ServerConnection
from kafkalite.protocol.messages.admin import CreatedTopic, CreateTopicsResponse
from kafkalite.protocol.messages.data import (
    FetchedPartition,
    FetchResponse,
    ProducedPartition,
    ProduceResponse,
)
from kafkalite.protocol.messages.metadata import (
    ApiVersionsResponse,
    BrokerMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)
from kafkalite.records import header
from kafkalite.records.batch import RecordBatch

BASE_OFFSET = 456_332


@pytest.fixture(scope="module")
def program(repository: Path) -> Path:
    return repository / "examples" / "foreign_client.py"


def test_it_imports_nothing_of_kafkalite(program: Path) -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == {
        *("collections", "itertools", "json", "pathlib", "socket", "struct", "sys", "time"),
        *("crc32c", "msgpack"),
    }
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(program.read_text())))


def test_its_structs_are_generated_from_the_schema(program: Path, repository: Path, tmp_path: Path) -> None:
    """A field that the schema renames has its new name in the client."""
    schema = (repository / "docs" / "protocol.json").read_text()
    for directory, text in (("same", schema), ("renamed", schema.replace('"node_id"', '"broker_id"'))):
        copy = tmp_path / directory / "examples" / "foreign_client.py"
        copy.parent.mkdir(parents=True)
        copy.write_text(program.read_text())
        (tmp_path / directory / "docs").mkdir()
        (tmp_path / directory / "docs" / "protocol.json").write_text(text)
        code = "import foreign_client; print(*foreign_client.STRUCTS['BrokerMetadata']._fields)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=copy.parent, capture_output=True, text=True, timeout=60
        )
        first = "node_id" if directory == "same" else "broker_id"
        assert done.stdout.split() == [first, "address", "rack"], done.stderr


class ScriptedServer:
    """A server for one connection, with one topic of one partition and one batch."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(30)
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.requests: list[Request] = []
        self.batch = bytearray()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        accepted, _ = self.listening.accept()
        connection = ServerConnection()
        with accepted, self.listening:
            while count := accepted.recv_into(connection.get_buffer(-1)):
                for request in connection.buffer_updated(count):
                    assert isinstance(request, Request), request
                    self.requests.append(request)
                    message, payload = self.answer(request)
                    for buffer in connection.send(request, message, payload):
                        accepted.sendall(buffer)
        connection.eof()

    def answer(self, request: Request) -> tuple[Any, list[bytearray]]:
        message = request.message
        match request.api_key:
            case ApiKey.API_VERSIONS:
                return ApiVersionsResponse(0, None, "scripted", "1", supported_ranges()), []
            case ApiKey.CREATE_TOPICS:
                created = CreatedTopic(message.topics[0].name, 0, None, "0" * 32, 1, 1)
                return CreateTopicsResponse(0, None, [created]), []
            case ApiKey.METADATA:
                partition = PartitionMetadata(0, 0, 1, 0, 0, [1], [1], [])
                topic = TopicMetadata(0, None, message.topics[0], "0" * 32, False, [partition])
                broker = BrokerMetadata(1, self.address, None)
                return MetadataResponse(0, None, "c", 1, [broker], [topic]), []
            case ApiKey.PRODUCE:
                self.batch = bytearray(request.payload)
                header.check(self.batch)
                header.stamp(self.batch, base_offset=BASE_OFFSET, leader_epoch=7)
                topic, number, _ = message.partitions[0]
                return ProduceResponse(
                    0, None, [ProducedPartition(topic, number, 0, None, BASE_OFFSET, -1, 0)]
                ), []
            case ApiKey.FETCH:
                topic, number = message.partitions[0][:2]
                end = BASE_OFFSET + 3
                fetched = FetchedPartition(topic, number, 0, None, end, end, 0, len(self.batch), [])
                return FetchResponse(0, None, [fetched]), [self.batch]
        raise AssertionError(request)


def test_it_speaks_the_protocol(program: Path) -> None:
    server = ScriptedServer()
    done = subprocess.run(
        [sys.executable, str(program), server.address], capture_output=True, text=True, timeout=240
    )
    server.thread.join()
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [(address, cells) for address, _, cells in lines] == [
        ("foreign-0-456332", "b'CA' b'maple'"),
        ("foreign-0-456333", "None b'glazed'"),
        ("foreign-0-456334", "b'US' None"),
    ]
    # It asks for the leader before each of the two requests to it.
    assert [request.api_key for request in server.requests] == [18, 19, 3, 0, 3, 1]
    records = RecordBatch(server.batch).records("foreign", 0)
    assert [(record.key, record.value) for record in records] == [
        (b"CA", b"maple"),
        (None, b"glazed"),
        (b"US", None),
    ]
    assert [record.timestamp_ms - records[0].timestamp_ms for record in records] == [0, 1, 2]
