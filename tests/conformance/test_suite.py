"""The suite passes at a broker, finds each planted fault by the check that is named for it, and cleans up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kafkalite
from kafkalite.broker.coordination import coordinators
from kafkalite.broker.handlers import fetch, produce
from kafkalite.cli.app import run as run_command
from kafkalite.conformance import suite
from kafkalite.groups import heartbeat
from kafkalite.groups.offset_rules import OffsetRules
from kafkalite.protocol import codec, connection
from kafkalite.protocol.connection import ServerConnection
from kafkalite.records import header
from kafkalite.replication.partition import Partition
from kafkalite.storage.log import Log
from kafkalite.storage.producer_state import ProducerStates
from kafkalite.transactions import machine

Patch = pytest.MonkeyPatch


async def results_of(broker: Any, **options: Any) -> dict[str, suite.Result]:
    """Run the suite in a thread, because it blocks, while the broker serves in this one."""
    found = await asyncio.to_thread(lambda: list(suite.run(broker.address, limit_s=120, **options)))
    return {result.name: result for result in found}


def failures(results: dict[str, suite.Result]) -> dict[str, str]:
    return {name: result.detail for name, result in results.items() if result.status == suite.FAILED}


async def test_a_broker_passes_and_nothing_stays() -> None:
    async with kafkalite.Broker() as broker:
        results = await results_of(broker)
        assert failures(results) == {}
        assert len(results) == len(suite.CHECKS) > 60
        async with kafkalite.Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            assert [name for name in await admin.list_topics() if not name.startswith("__")] == []
            assert list(await admin.list_groups()) == []


async def test_a_cluster_of_three_passes() -> None:
    # No session of a broker ends while a busy machine stands still: the suite judges single responses.
    settings = {"broker_session_timeout_ms": 60_000, "controller_quorum_fetch_timeout_ms": 10_000}
    async with kafkalite.testing.Cluster(brokers=3, transport="tcp", **settings) as cluster:
        address = cluster.bootstrap_servers.split(",")[1]
        results = await asyncio.to_thread(lambda: list(suite.run(address, limit_s=120)))
        assert failures({result.name: result for result in results}) == {}


def test_the_names_are_unique_and_the_sections_exist(repository: Path) -> None:
    names = [check.name for check in suite.CHECKS]
    assert len(set(names)) == len(names)
    page = (repository / "docs" / "protocol.md").read_text()
    sections = set(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", page, re.MULTILINE))
    assert {check.section for check in suite.CHECKS} <= sections


def handshake_not_required(patch: Patch) -> None:
    init = ServerConnection.__init__

    def open_at_once(self: ServerConnection, **options: Any) -> None:
        init(self, **options)
        self.has_handshake = True
        self.open_limits()

    patch.setattr(ServerConnection, "__init__", open_at_once)


def large_first_request(patch: Patch) -> None:
    patch.setattr(connection, "MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE", 1 << 20)


def payload_not_compared(patch: Patch) -> None:
    patch.setattr(connection, "_match_payload", lambda *_: None)


def trailing_bytes_ignored(patch: Patch) -> None:
    def unpack(data: Any) -> Any:
        unpacker = msgpack.Unpacker(max_ext_len=0, object_pairs_hook=codec._dict_of_unique)
        unpacker.feed(data)
        try:
            return unpacker.unpack()
        except (ValueError, msgpack.OutOfData) as error:
            raise codec.RemoteProtocolError(str(error)) from error

    patch.setattr(codec, "_unpack", unpack)


def repeated_keys_accepted(patch: Patch) -> None:
    patch.setattr(codec, "_dict_of_unique", dict)


def other_correlation_id(patch: Patch) -> None:
    send = ServerConnection.send

    def later(self: Any, request: Any, *rest: Any, **options: Any) -> Any:
        return send(self, request._replace(correlation_id=request.correlation_id // 2), *rest, **options)

    patch.setattr(ServerConnection, "send", later)


def duplicates_appended(patch: Patch) -> None:
    patch.setattr(ProducerStates, "check", lambda *_: None)


def repetitions_by_sequence_alone(patch: Patch) -> None:
    from kafkalite.storage.producer_state import SequencedBatch

    patch.setattr(SequencedBatch, "is_repeated_by", lambda *_: True)


def checksum_not_compared(patch: Patch) -> None:
    patch.setattr(produce.batch_header, "check", lambda batch: header.parse_header(batch))


def columns_not_read(patch: Patch) -> None:
    patch.setattr(produce, "check_readable", lambda *_: None)


def open_transactions_readable(patch: Patch) -> None:
    patch.setattr(Log, "last_stable_offset", lambda _self, high_watermark: high_watermark)


def aborted_not_listed(patch: Patch) -> None:
    patch.setattr(Partition, "aborted_between", lambda *_: [])


def producers_not_fenced(patch: Patch) -> None:
    patch.setattr(machine, "must_abort_first", lambda _: False)


def commits_not_fenced(patch: Patch) -> None:
    patch.setattr(OffsetRules, "check_member", lambda *_: None)


def heartbeats_not_fenced(patch: Patch) -> None:
    patch.setattr(heartbeat, "_check_epoch", lambda *_: None)


def other_hash(patch: Patch) -> None:
    patch.setattr(coordinators, "partition_of", lambda key, count: sum(key.encode()) % count)


def any_isolation_level(patch: Patch) -> None:
    patch.setattr(fetch, "is_read_committed", lambda level: level != 0)


def no_long_poll(patch: Patch) -> None:
    patch.setattr(fetch, "_hold", lambda _services, _message, read: read.reply)


def bounds_not_reported(patch: Patch) -> None:
    refused = fetch._refused

    def without(*arguments: Any) -> Any:
        return refused(*arguments)._replace(log_start_offset=-1, high_watermark=-1)

    patch.setattr(fetch, "_refused", without)


PLANTED: list[tuple[Callable[[Patch], None], str]] = [
    (handshake_not_required, "handshake.first-request"),
    (large_first_request, "handshake.limit"),
    (payload_not_compared, "frames.payload-lengths"),
    (trailing_bytes_ignored, "envelope.trailing-bytes"),
    (repeated_keys_accepted, "envelope.map-keys"),
    (other_correlation_id, "frames.order"),
    (duplicates_appended, "idempotence.repetition"),
    (repetitions_by_sequence_alone, "idempotence.gap"),
    (checksum_not_compared, "produce.checksum"),
    (columns_not_read, "produce.layout"),
    (open_transactions_readable, "transactions.commit"),
    (aborted_not_listed, "transactions.abort"),
    (producers_not_fenced, "transactions.fencing"),
    (commits_not_fenced, "groups.commits-of-members"),
    (heartbeats_not_fenced, "groups.fencing"),
    (other_hash, "coordinators.partition"),
    (any_isolation_level, "fetch.isolation-level"),
    (no_long_poll, "fetch.long-poll"),
    (bounds_not_reported, "fetch.offsets"),
]


@pytest.mark.parametrize(("plant", "check"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
async def test_a_planted_fault_is_found(
    plant: Callable[[Patch], None], check: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    async with kafkalite.Broker() as broker:
        results = await results_of(broker, is_wanted=lambda name: name == check)
        assert list(failures(results)) == [check]
        assert results[check].detail


@pytest.mark.parametrize("error", [KeyError("t"), IndexError(), TypeError(), AttributeError(), ValueError()])
async def test_another_response_than_a_check_expects_is_a_failure(
    monkeypatch: Patch, error: Exception
) -> None:
    def check(_cluster: Any) -> None:
        raise error

    monkeypatch.setattr(suite, "CHECKS", (suite.Check("planted", "1", check),))
    async with kafkalite.Broker() as broker:
        assert failures(await results_of(broker)) == {"planted": f"an unexpected response: {error!r}"}


async def test_no_check_begins_after_the_limit() -> None:
    async with kafkalite.Broker() as broker:
        found = await asyncio.to_thread(lambda: list(suite.run(broker.address, limit_s=1e-9)))
    assert {result.status for result in found[1:]} == {suite.LATE}


class TestCommand:
    async def _run(self, *arguments: str) -> int:
        return await asyncio.to_thread(run_command, ["conformance", *arguments])

    async def test_a_line_for_each_check(self, capfd: pytest.CaptureFixture[str]) -> None:
        async with kafkalite.Broker() as broker:
            assert await self._run(broker.address, "--only", "frames.*") == 0
            out, err = capfd.readouterr()
            assert "ok    frames.order" in out
            assert "5 of 5 checks passed" in err

    async def test_json_and_the_exit_code_of_a_failure(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: Patch
    ) -> None:
        checksum_not_compared(monkeypatch)
        async with kafkalite.Broker() as broker:
            assert await self._run(broker.address, "--json", "--only", "produce.checksum") == 9
        (line,) = capfd.readouterr().out.splitlines()
        result = json.loads(line)
        assert (result["name"], result["status"], result["section"]) == ("produce.checksum", "failed", "5")

    async def test_an_address_without_a_server(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert await self._run("127.0.0.1:1") == 3
        assert "127.0.0.1:1 cannot be reached" in capfd.readouterr().err

    async def test_a_server_of_another_protocol_is_named(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Http(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def data_received(self, data: bytes) -> None:
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                self.transport.close()

        server = await asyncio.get_running_loop().create_server(Http, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            assert await self._run(f"127.0.0.1:{port}", "--only", "frames.order") == 9
        assert "the peer speaks HTTP" in capfd.readouterr().out

    async def test_misuse(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert await self._run() == 2
        assert await self._run("--only", "nothing", "x:1") == 2
        assert "--list" in capfd.readouterr().err

    async def test_the_schema_is_the_file(self, repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert await self._run("--schema") == 0
        printed = json.loads(capfd.readouterr().out)
        assert printed == json.loads((repository / "docs" / "protocol.json").read_text())

    async def test_the_names_are_listed(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert await self._run("--list") == 0
        assert "idempotence.repetition        section 5.1" in capfd.readouterr().out
