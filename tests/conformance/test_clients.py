"""kl conformance --listen: our client and the foreign ones pass, and faults of a client are found."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kafkalite
from kafkalite.cli.app import run as run_command
from kafkalite.conformance.client_checks import (
    CLIENT_CHECKS,
    FAILED,
    PASSED,
    UNTOUCHED,
    ClientResult,
    Judge,
    Watched,
)
from kafkalite.conformance.listener import Listener
from kafkalite.conformance.peer import Cluster, Peer, envelope, frame
from kafkalite.conformance.record_checks import batch_of, fetch, produce
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import InitProducerIdRequest, ProducePartition
from kafkalite.protocol.messages.groups import ConsumerGroupHeartbeatRequest, OffsetCommitRequest
from kafkalite.protocol.messages.transactions import EndTxnRequest

Client = Callable[[str], Awaitable[None]]


async def judged(client: Client, *, has_faults: bool = False) -> dict[str, ClientResult]:
    async with Listener("127.0.0.1:0", has_faults=has_faults) as listener:
        async with asyncio.timeout(60):
            await client(listener.address)
    return {result.name: result for result in listener.judge.results()}


def failures(results: dict[str, ClientResult]) -> dict[str, str]:
    return {name: result.detail for name, result in results.items() if result.status == FAILED}


async def everything(address: str) -> None:
    """A client that does all that the checks are about."""
    settings = {"bootstrap_servers": address, "auto_offset_reset": "earliest"}
    async with kafkalite.Producer(address, linger_ms=0) as producer:
        for number in range(20):
            await producer.send("t", b"%d" % number)
        await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(200)))
    async with kafkalite.Consumer("t", group_id="g", **settings) as consumer:
        read = 0
        while read < 220:
            read += len(await consumer.get_many(timeout_ms=10_000))
        await consumer.commit()
    async with (
        kafkalite.Consumer("t", group_id="h", enable_auto_commit=False, **settings) as consumer,
        kafkalite.Producer(address, transactional_id="x") as producer,
    ):
        for _ in range(2):
            record = await consumer.get_one(timeout_ms=10_000)
            async with producer.transaction():
                producer.send_nowait("u", record.value)  # type: ignore[union-attr]
                await producer.send_offsets(consumer)


async def test_our_client_passes_every_check() -> None:
    results = await judged(everything, has_faults=True)
    assert failures(results) == {}
    assert [name for name, result in results.items() if result.status == UNTOUCHED] == []
    assert list(results) == list(CLIENT_CHECKS)


def program(*command: str | Path) -> Client:
    async def run(address: str) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, address, stdout=pipe, stderr=pipe)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()

    return run


@pytest.mark.parametrize("has_faults", [False, True])
async def test_the_foreign_client_in_python_passes(repository: Path, has_faults: bool) -> None:
    client = program(sys.executable, repository / "examples" / "foreign_client.py")
    results = await judged(client, has_faults=has_faults)
    assert failures(results) == {}
    for name in ("retries.produce", "retries.fetch", "metadata.refresh"):
        assert results[name].status == (PASSED if has_faults else UNTOUCHED)
    assert results["groups.epoch"].status == UNTOUCHED
    assert results["produce.batch"].status == PASSED


async def test_a_producer_without_acknowledgements_need_not_repeat_a_batch() -> None:
    async def client(address: str) -> None:
        async with kafkalite.Producer(address, acks=0) as producer:
            for number in range(3):
                await producer.send("t", b"%d" % number)
                await producer.flush()
        settings = {"bootstrap_servers": address, "auto_offset_reset": "latest"}
        async with kafkalite.Consumer("t", **settings):  # its response comes after those of the batches
            pass

    results = await judged(client, has_faults=True)
    assert failures(results) == {}
    assert results["produce.batch"].times == 3


async def test_an_exception_of_the_judge_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Watched, "_on_event", fail)
    async with Listener("127.0.0.1:0") as listener:
        _, writer = await asyncio.open_connection(*listener.address.split(":"))
        writer.write(frame(envelope(18, ["test", "1"])))
        async with asyncio.timeout(20):
            while not failures({each.name: each for each in listener.judge.results()}):
                await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
    found = failures({each.name: each for each in listener.judge.results()})
    assert found == {"frames.layout": "it could not be judged: ZeroDivisionError: a mistake"}
    assert "the judge failed" in caplog.text


async def test_the_end_of_a_listener_closes_every_connection() -> None:
    """Also those of which the task has not begun, or waits for a connection to the broker."""
    async with Listener("127.0.0.1:0") as listener:
        opened = [await asyncio.open_connection(*listener.address.split(":")) for _ in range(20)]
    for reader, writer in opened:
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                assert await reader.read() == b""
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_two_requests_with_one_correlation_id_leave_none_in_flight() -> None:
    judge = Judge()
    watched = judge.connect()
    parts = [list(ProducePartition("t", 0, len(batch_of(b"1"))))]
    watched.from_client(frame(envelope(18, ["test", "1"])))
    for _ in range(2):
        watched.from_client(
            frame(envelope(0, [-1, 5000, None, parts], correlation_id=9), bytes(batch_of(b"1")))
        )
    watched.end()
    assert judge._in_flight == {TopicPartition("t", 0): 0}


def test_the_sections_exist(repository: Path) -> None:
    page = (repository / "docs" / "protocol.md").read_text()
    for name, (section, _) in CLIENT_CHECKS.items():
        assert f"# {section}. " in page or f"# {section} " in page, name


# --- clients with one fault each


def other_first_request(address: str) -> None:
    with Peer(address, handshake=False) as peer:
        peer.send(frame(envelope(3, [None, False])))
        peer.error()


def does_not_wait_for_the_versions(address: str) -> None:
    with Peer(address, handshake=False) as peer:
        first, second = envelope(18, ["test", "1"]), envelope(3, [[], False], correlation_id=2)
        peer.send(frame(first) + frame(second))
        peer.read()
        peer.read()


def other_fields(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(envelope(3, [[], False, 1])))
        peer.error()


def empty_frame(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(b""))
        peer.is_closed()


def end_inside_a_frame(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(envelope(3, [[], False]))[:-1])


def other_version(address: str) -> None:
    with Peer(address) as peer:
        peer.send(frame(envelope(3, [[], False], version=7)))
        peer.error()


def one_correlation_id_for_two(address: str) -> None:
    with Peer(address) as peer:
        peer.send(2 * frame(envelope(3, [[], False], correlation_id=9)))
        peer.read()
        peer.read()


def wrong_checksum(cluster: Cluster) -> None:
    batch = batch_of(b"1")
    batch[-1] ^= 1
    produce(cluster.peer(), cluster.topic(), batch)


def _producer(peer: Peer, transactional_id: str | None = None) -> tuple[int, int]:
    found = peer.ask(InitProducerIdRequest(transactional_id, 60_000, -1, -1)).message
    return found.producer_id, found.producer_epoch


def _numbered(producer: tuple[int, int], sequence: int, value: bytes = b"1") -> bytearray:
    return batch_of(value, producer_id=producer[0], producer_epoch=producer[1], base_sequence=sequence)


def own_producer_id(cluster: Cluster) -> None:
    produce(cluster.peer(), cluster.topic(), _numbered((77, 0), 0))


def gap(cluster: Cluster) -> None:
    peer, topic = cluster.peer(), cluster.topic()
    producer = _producer(peer)
    produce(peer, topic, _numbered(producer, 0))
    produce(peer, topic, _numbered(producer, 2))


def other_bytes_in_a_repetition(cluster: Cluster) -> None:
    peer, topic = cluster.peer(), cluster.topic()
    producer = _producer(peer)
    for value in (b"1", b"2"):
        produce(peer, topic, _numbered(producer, 0, value))


def six_in_flight(cluster: Cluster) -> None:
    peer, topic = cluster.peer(), cluster.topic()
    producer = _producer(peer)
    batches = [_numbered(producer, number) for number in range(6)]
    parts = [ProducePartition(topic, 0, len(batch)) for batch in batches]
    # One piece, so that no response can arrive in between.
    peer.send(
        b"".join(
            frame(envelope(0, [-1, 5000, None, [list(part)]], correlation_id=100 + number), bytes(batch))
            for number, (part, batch) in enumerate(zip(parts, batches, strict=True))
        )
    )
    for _ in range(6):
        peer.read()


def no_repetition(cluster: Cluster) -> None:
    produce(cluster.peer(), cluster.topic(), batch_of(b"1"))


def repetition_without_metadata(cluster: Cluster) -> None:
    peer, topic = cluster.peer(), cluster.topic()
    batch = batch_of(b"1")
    for _ in range(2):
        produce(peer, topic, batch)


def no_second_fetch(cluster: Cluster) -> None:
    fetch(cluster.peer(), cluster.topic(), 0)


def _beat(group: str, epoch: int, **fields: Any) -> ConsumerGroupHeartbeatRequest:
    values = {"rebalance_timeout_ms": -1, "topics": None, "owned": None} | fields
    return ConsumerGroupHeartbeatRequest(
        group,
        "m",
        epoch,
        None,
        values["rebalance_timeout_ms"],
        values["topics"],
        None,
        None,
        values["owned"],
        0,
    )


def _joined(cluster: Cluster) -> tuple[Peer, str, int]:
    topic, group = cluster.topic(), cluster.name("group")
    peer = cluster.coordinator(0, group)
    answer = peer.ask(_beat(group, 0, rebalance_timeout_ms=60_000, topics=[topic]))
    return peer, group, answer.message.member_epoch


def no_coordinator(cluster: Cluster) -> None:
    peer = cluster.peer()
    peer.ask(_beat("g", 0, rebalance_timeout_ms=60_000, topics=[cluster.topic()]))


def joins_again_and_again(cluster: Cluster) -> None:
    peer, group, _ = _joined(cluster)
    peer.ask(_beat(group, 0, rebalance_timeout_ms=60_000, topics=["t"]))


def another_epoch(cluster: Cluster) -> None:
    peer, group, epoch = _joined(cluster)
    peer.ask(_beat(group, epoch + 1, owned=[]))


def names_nothing_at_a_new_epoch(cluster: Cluster) -> None:
    peer, group, epoch = _joined(cluster)
    peer.ask(_beat(group, epoch))


def commits_at_another_epoch(cluster: Cluster) -> None:
    peer, group, epoch = _joined(cluster)
    peer.ask(OffsetCommitRequest(group, "m", epoch + 1, None, []))


def does_not_leave(cluster: Cluster) -> None:
    _joined(cluster)


def ends_a_transaction_of_before(cluster: Cluster) -> None:
    name = cluster.name("x")
    peer = cluster.coordinator(1, name)
    producer_id, epoch = _producer(peer, name)
    _producer(peer, name)
    peer.ask(EndTxnRequest(name, producer_id, epoch, True))


PLANTED: list[tuple[Callable[[Any], None], str]] = [
    (other_first_request, "handshake.first-request"),
    (does_not_wait_for_the_versions, "handshake.response-first"),
    (other_fields, "envelope.body"),
    (empty_frame, "frames.layout"),
    (end_inside_a_frame, "frames.layout"),
    (other_version, "versions.offered"),
    (one_correlation_id_for_two, "correlation-ids.unique"),
    (wrong_checksum, "produce.batch"),
    (own_producer_id, "idempotence.producer-id"),
    (gap, "idempotence.sequences"),
    (other_bytes_in_a_repetition, "idempotence.repetition"),
    (six_in_flight, "idempotence.in-flight"),
    (no_coordinator, "groups.coordinator"),
    (joins_again_and_again, "groups.epoch"),
    (another_epoch, "groups.epoch"),
    (names_nothing_at_a_new_epoch, "groups.owned"),
    (commits_at_another_epoch, "groups.commits"),
    (does_not_leave, "groups.leave"),
    (ends_a_transaction_of_before, "transactions.identity"),
]
WITH_FAULTS: list[tuple[Callable[[Any], None], str]] = [
    (no_repetition, "retries.produce"),
    (no_second_fetch, "retries.fetch"),
    (repetition_without_metadata, "metadata.refresh"),
]


def scripted(script: Callable[[Any], None]) -> Client:
    """A client that runs ``script`` in a thread, because it blocks."""

    def run(address: str) -> None:
        if "address" in script.__code__.co_varnames[:1]:
            script(address)
            return
        cluster = Cluster(address, "test")
        try:
            script(cluster)
        finally:
            cluster.forget()

    return lambda address: asyncio.to_thread(run, address)


@pytest.mark.parametrize(
    ("script", "check", "has_faults"),
    [
        pytest.param(script, check, has_faults, id=script.__name__)
        for scripts, has_faults in ((PLANTED, False), (WITH_FAULTS, True))
        for script, check in scripts
    ],
)
async def test_a_fault_of_a_client_is_found(
    script: Callable[[Any], None], check: str, has_faults: bool
) -> None:
    results = await judged(scripted(script), has_faults=has_faults)
    of_members = {"groups.leave"} if check.startswith("groups.") else set()  # these scripts do not leave
    assert check in failures(results)
    assert failures(results).keys() - of_members <= {check}
    assert results[check].detail != CLIENT_CHECKS[check][1], "it says what was found"


# --- the command


def _command(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kafkalite", "conformance", "--listen", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told = process.stderr.readline()
    return process, told.partition("listening at ")[2].split()[0]


def test_a_table_after_ctrl_c(repository: Path) -> None:
    process, address = _command("--faults")
    subprocess.run([sys.executable, repository / "examples" / "foreign_client.py", address], check=True)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    lines = {line.split()[1]: line for line in out.splitlines()}
    assert list(lines) == list(CLIENT_CHECKS)
    assert lines["metadata.refresh"].startswith("ok  ")
    assert lines["groups.epoch"].startswith("-   ")
    assert "0 failed" in errors


def test_a_failure_is_exit_code_9_and_json_has_the_detail() -> None:
    process, address = _command("--json")
    other_version(address)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "1 check failed" in errors
    found = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert found["versions.offered"]["status"] == "failed"
    assert "not 7" in found["versions.offered"]["detail"]


def test_no_client_is_a_failure_and_the_limit_ends_it() -> None:
    process, _ = _command("--limit", "0.2")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "no client has connected" in errors


def test_misuse(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["conformance", "--listen", "127.0.0.1:0", "x:1"]) == 2
    assert run_command(["conformance", "--faults", "x:1"]) == 2
    assert "--faults needs --listen" in capfd.readouterr().err


def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert run_command(["conformance", "--listen", address]) == 1
    assert f"cannot listen on {address}: the port is in use" in capfd.readouterr().err
