"""The client in Rust: its structs are generated from the schema, it is built, and it uses a real broker."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kafkalite
from kafkalite.conformance.listener import Listener
from kafkalite.conformance.schema import schema
from kafkalite.protocol.api import ApiKey

CARGO = shutil.which("cargo")


@pytest.fixture(scope="module")
def crate(repository: Path) -> Path:
    return repository / "examples" / "foreign_client_rust"


def generate(repository: Path, path: Path) -> str:
    """Return the structs in Rust that the generator makes of a schema file."""
    command = [sys.executable, str(repository / "examples" / "generate_structs.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_it_has_no_dependencies_and_knows_no_registry(crate: Path) -> None:
    lock = (crate / "Cargo.lock").read_text()
    assert re.findall(r'^name = "(.*)"$', lock, re.MULTILINE) == ["foreign-client"]
    assert "://" not in lock + (crate / "Cargo.toml").read_text()


def test_the_generator_follows_the_schema(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "protocol.json"
    document = schema()
    path.write_text(json.dumps(document))
    before = generate(repository, path)
    assert "pub struct FetchPartition {\n    pub topic: String,\n    pub partition: i64," in before
    assert f"pub const PRODUCE: i64 = {ApiKey.PRODUCE:d};" in before
    document["structs"]["FetchPartition"][0]["type"] = "[bytes]?"
    path.write_text(json.dumps(document))
    assert "pub topic: Option<Vec<Bytes>>," in generate(repository, path)


@pytest.fixture(scope="module")
def program(repository: Path, crate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built from a copy with generated structs."""
    if CARGO is None:
        pytest.skip("NOT TESTED: there is no cargo, so the client in Rust was not built")
    copy = tmp_path_factory.mktemp("rust") / "foreign_client_rust"
    shutil.copytree(crate, copy, ignore=shutil.ignore_patterns("target", "messages.rs"))
    structs = generate(repository, repository / "docs" / "protocol.json")
    (copy / "src" / "messages.rs").write_text(structs)
    done = subprocess.run(
        [CARGO, "build", "--offline", "--locked", "--quiet"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return copy / "target" / "debug" / "foreign-client"


async def _run(program: Path, *arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program, *arguments, stdout=pipe, stderr=pipe)
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_it_produces_once_fetches_and_uses_a_group(program: Path) -> None:
    async with kafkalite.Broker() as broker:
        for base in (0, 3):  # the second time, the topic is there
            code, out, errors = await _run(program, broker.address, "rust")
            assert code == 0, errors
            *records, group = out.splitlines()
            assert [line.split(" ")[0::2] for line in records] == [
                [f"rust-0-{base}", "CA"],
                [f"rust-0-{base + 1}", "null"],
                [f"rust-0-{base + 2}", "US"],
            ]
            assert group == "rust-group had rust [0], committed 3"
        async with kafkalite.Consumer(
            "rust", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            found = [await consumer.get_one() for _ in range(6)]
        assert [record.value for record in found] == [b"maple", b"glazed", None] * 2


async def test_it_passes_the_checks_of_clients(program: Path) -> None:
    async with Listener("127.0.0.1:0") as listener:
        code, _, errors = await _run(program, listener.address, "rust")
        assert code == 0, errors
    results = {result.name: result for result in listener.judge.results()}
    assert {name: result.detail for name, result in results.items() if result.status == "failed"} == {}
    for name in ("idempotence.sequences", "idempotence.repetition", "groups.owned", "groups.commits"):
        assert results[name].status == "passed", name


async def test_its_errors_are_named(program: Path) -> None:
    async with kafkalite.Broker() as broker:
        code, _, errors = await _run(program, broker.address, "a/b")
        assert (code, errors) == (1, "foreign-client: CreateTopics: INVALID_TOPIC_EXCEPTION\n")
    code, _, errors = await _run(program, broker.address)
    assert code == 1
    assert "foreign-client:" in errors
