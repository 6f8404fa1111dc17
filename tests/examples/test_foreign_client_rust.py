"""The client in Rust: its structs are generated from the schema, it is built, and it uses a real broker."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

import kafkalite
from kafkalite.conformance.listener import Listener
from kafkalite.conformance.schema import schema
from kafkalite.protocol.api import ApiKey
from kafkalite.testing import Cluster
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, make_dev_certificates
from proof.certificates import DevCertificates

CARGO = shutil.which("cargo")
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"  # cargo's name for it


@pytest.fixture(scope="module")
def crate(repository: Path) -> Path:
    return repository / "examples" / "foreign_client_rust"


def generate(repository: Path, path: Path) -> str:
    """Return the structs in Rust that the generator makes of a schema file."""
    command = [sys.executable, str(repository / "examples" / "generate_structs.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_its_crates_are_few_and_pinned_and_it_knows_no_registry(crate: Path) -> None:
    """The protocol needs no crate; these are for TLS and SCRAM."""
    manifest, lock = (crate / "Cargo.toml").read_text(), (crate / "Cargo.lock").read_text()
    dependencies = manifest.split("[dependencies]\n")[1].split("\n\n")[0]
    assert re.findall(r"^(\S+) =", dependencies, re.MULTILINE) == ["ring", "rustls"]
    packages = lock.split("[[package]]\n")[1:]
    assert sum("checksum = " in each for each in packages) == len(packages) - 1, "all but the client itself"
    assert "://" not in lock + manifest


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
def built(repository: Path, crate: Path) -> Iterator[Path]:
    """A copy of the crate with generated structs, kept in the virtual environment: its crates are compiled
    once. Cargo.lock gets the name of the registry, which only cargo needs."""
    if CARGO is None:
        pytest.skip("NOT TESTED: there is no cargo, so the client in Rust was not built")
    copy = Path(sys.prefix) / "rust-client"
    lock = re.sub(
        r"^(?=checksum = )", f'source = "{REGISTRY}"\n', (crate / "Cargo.lock").read_text(), flags=re.M
    )
    files = {path.relative_to(crate): path.read_text() for path in crate.glob("src/*.rs")}
    files[Path("src/messages.rs")] = generate(repository, repository / "docs" / "protocol.json")
    files |= {Path("Cargo.toml"): (crate / "Cargo.toml").read_text(), Path("Cargo.lock"): lock}
    (copy / "src").mkdir(parents=True, exist_ok=True)
    with (copy / "in-use").open("w") as in_use:  # other workers of this run build it, too
        fcntl.flock(in_use, fcntl.LOCK_EX)
        for name, text in files.items():
            if not (copy / name).exists() or (copy / name).read_text() != text:
                (copy / name).write_text(text)
        fetched = cargo(copy, "fetch", "--locked")
        if fetched.returncode != 0 and "lock file" not in fetched.stderr:
            pytest.skip(f"NOT TESTED: the crates of the client in Rust were not fetched: {fetched.stderr}")
        done = cargo(copy, "build", "--offline", "--locked", "--quiet")
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    yield copy


def cargo(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CARGO is not None
    return subprocess.run([CARGO, *arguments], cwd=directory, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def program(built: Path) -> Path:
    return built / "target" / "debug" / "foreign-client"


def test_its_own_tests_with_the_example_of_rfc_7677(built: Path) -> None:
    done = cargo(built, "test", "--offline", "--locked", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed; 0 failed" in done.stdout


async def _run(
    program: Path, *arguments: str, settings: Mapping[str, Any] | None = None
) -> tuple[int | None, str, str]:
    given = {f"KAFKALITE_CLIENT_{name.upper()}": str(value) for name, value in (settings or {}).items()}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=pipe, stderr=pipe, env={**os.environ, **given}
    )
    async with asyncio.timeout(60):
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


# --- TLS and logins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("security_protocol", ["SASL_SSL", "SSL"])
async def test_it_produces_and_fetches_over_tls(
    program: Path, security_protocol: Literal["SASL_SSL", "SSL"]
) -> None:
    """With a login by SCRAM-SHA-256, and with certificates on both sides; also at the group's coordinator."""
    auth = {"ssl_client_auth": "required"} if security_protocol == "SSL" else {}
    async with Cluster(
        transport="tcp", security_protocol=security_protocol, sasl_enabled_mechanisms="SCRAM-SHA-256", **auth
    ) as cluster:
        settings = dict(cluster.client_settings)
        if security_protocol == "SASL_SSL":
            del settings["ssl_keystore_location"]
        code, out, errors = await _run(program, cluster.bootstrap_servers, "rust", settings=settings)
        assert code == 0, errors
        assert out.splitlines()[-1] == "rust-group had rust [0], committed 3"
        consumer = cluster.consumer("rust", auto_offset_reset="earliest", sasl_mechanism="SCRAM-SHA-256")
        async with consumer:
            found = [(await consumer.get_one()).value for _ in range(3)]
        assert found == [b"maple", b"glazed", None]


async def refusal(program: Path, address: str, settings: Mapping[str, Any]) -> str:
    """Return the one line with which the program ends."""
    code, out, errors = await _run(program, address, "rust", settings=settings)
    assert (code, out) == (1, "")
    (line,) = errors.splitlines()
    return line


async def test_a_wrong_password_is_one_clear_error(program: Path) -> None:
    async with Cluster(transport="tcp", security_protocol="SASL_SSL") as cluster:
        settings = cluster.client_settings
        line = await refusal(program, cluster.bootstrap_servers, {**settings, "sasl_password": "s3cret"})
        assert line.startswith(f"foreign-client: {cluster.bootstrap_servers}: ")
        assert line.endswith(
            "SASL_AUTHENTICATION_FAILED: authentication failed: unknown user, or wrong password"
        )
        assert "s3cret" not in line
        del settings["sasl_password"]
        assert "sasl.password is not set" in await refusal(program, cluster.bootstrap_servers, settings)
        plain = {"security_protocol": "PLAINTEXT"}
        line = await refusal(program, cluster.bootstrap_servers, plain)
        assert "the server speaks TLS (check security.protocol)" in line


async def test_refused_certificates_name_the_reason(
    program: Path, dev_certificates: DevCertificates, tmp_path: Path
) -> None:
    """Another host, an unknown authority, expired, and none or an expired one of the client."""
    client = dev_certificates.client()
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
    short = dev_certificates.issue("rust-short.pem", not_after=soon)
    elsewhere = dev_certificates.issue("rust-elsewhere.pem", hosts=["elsewhere.example"])
    old = dev_certificates.issue("rust-old.pem", not_after=datetime.now(UTC) - timedelta(days=1))
    make_dev_certificates(tmp_path, [], [], [])
    foreign = {"ssl_truststore_location": str(tmp_path / CA_CERTIFICATE)}
    async with kafkalite.Broker(**dev_certificates.broker(str(short))) as broker:
        assert (await _run(program, broker.address, "rust", settings=client))[0] == 0
        while datetime.now(UTC) <= soon + timedelta(seconds=1):  # a broker starts with none that has expired
            await asyncio.sleep(0.05)
        line = await refusal(program, broker.address, client)
        assert f"{broker.address}: the server's certificate is refused: certificate expired" in line
    async with kafkalite.Broker(**dev_certificates.broker(str(elsewhere))) as broker:
        line = await refusal(program, broker.address, client)
        assert (
            f"{broker.address}: the server's certificate is refused: certificate not valid for name" in line
        )
    async with kafkalite.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        for settings, reason in (
            ({**client, **foreign}, "the server's certificate is refused: its issuer is not trusted"),
            (client, "the server refuses this client: CertificateRequired"),
            (dev_certificates.client(str(old)), "the server refuses this client: CertificateExpired"),
            (dev_certificates.client(str(tmp_path / "none.pem")), "ssl.keystore.location"),
        ):
            assert reason in await refusal(program, broker.address, settings)
    async with kafkalite.Broker() as broker:
        line = await refusal(program, broker.address, client)
        assert f"{broker.address}: the server closed the connection" in line
