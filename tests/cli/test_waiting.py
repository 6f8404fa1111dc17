"""A command that waits names the reason within two seconds, and how much was acknowledged."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafkalite.cli import consume, group_consume
from kafkalite.cli.client_warnings import installed
from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import ApiKey
from kafkalite.testing import SyncCluster, fail_next

Kl = Callable[..., Any]
Spawn = Callable[..., "subprocess.Popen[bytes]"]
LIMIT = "2s"


@pytest.fixture(params=["silent", "http"])
def wrong_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address where no broker listens, but a server that is silent or speaks HTTP."""
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            accepted.append(peer)
            if request.param == "http":
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    for peer in accepted:
        peer.close()


@pytest.mark.parametrize(
    "command", [("topic", "list"), ("produce", "t"), ("consume", "t"), ("cluster", "status")]
)
def test_a_wrong_server_on_the_port_is_named(kl: Kl, wrong_server: str, command: tuple[str, ...]) -> None:
    done = kl(*command, "-b", wrong_server, "--timeout", LIMIT, stdin=b"x\n")
    assert done.code in {3, 7}
    is_http = "the peer speaks HTTP" in done.told
    assert is_http or f"{wrong_server} does not respond; does a kafkalite broker run there?" in done.told


def test_records_that_are_refused_are_told_with_the_number_that_was_acknowledged(kl: Kl) -> None:
    with SyncCluster() as cluster:
        servers = cluster.bootstrap_servers
        assert kl("topic", "create", "t", "-b", servers).code == 0
        seen = 0

        def refuse_all_but_the_first(request: Any, proceed: Any, clock: Any) -> Any:
            nonlocal seen
            seen += 1
            return None if seen == 1 else refuse(request, proceed, clock)

        refuse = fail_next(None, ErrorCode.KAFKA_STORAGE_ERROR)
        cluster.intercept(ApiKey.PRODUCE, refuse_all_but_the_first)
        lines = b"".join(b"%d\n" % number for number in range(25_000))
        done = kl("produce", "t", "-b", servers, "--timeout", LIMIT, stdin=lines)
        assert done.code == 7
        waiting, gave_up = done.told.splitlines()
        assert (
            waiting.startswith("kl: waiting: refused by a test") and "10,000 records acknowledged" in waiting
        )
        assert gave_up.startswith("kl: gave up after 2 s; the last error: refused by a test")
        assert gave_up.endswith("10,000 records acknowledged, 10,000 without an acknowledgement")

        seen = 0
        limits = ("-X", "delivery.timeout.ms=1500", "-X", "request.timeout.ms=1000")
        partial = kl("produce", "t", "-b", servers, *limits, stdin=lines)
        assert partial.code == 8
        assert "10,000 records acknowledged, then 10,000 not: " in partial.told
        assert "the last attempt failed: refused by a test" in partial.told


def test_a_transaction_that_waits_is_not_said_to_be_aborted(kl: Kl) -> None:
    with SyncCluster() as cluster:
        servers = cluster.bootstrap_servers
        assert kl("topic", "create", "t", "-b", servers).code == 0
        cluster.intercept(ApiKey.PRODUCE, fail_next(None, ErrorCode.KAFKA_STORAGE_ERROR))
        done = kl("produce", "t", "--txn", "-b", servers, "--timeout", LIMIT, stdin=b"x\n")
        assert done.code == 7
        waiting, gave_up = done.told.splitlines()
        assert waiting.endswith("; 0 records acknowledged, in a transaction that is not committed")
        assert gave_up.endswith("; 0 records acknowledged, in a transaction that is not committed")


def test_an_interrupted_produce_names_the_records_without_an_acknowledgement(spawn: Spawn) -> None:
    with SyncCluster(transport="tcp") as cluster:
        servers = cluster.bootstrap_servers
        cluster.produce("t", [b"x"])
        cluster.intercept(ApiKey.PRODUCE, fail_next(None, ErrorCode.KAFKA_STORAGE_ERROR))
        process = spawn("produce", "t", "-b", servers)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"1\n2\n")
        process.stdin.flush()
        assert b"waiting: " in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 130
        assert told == b"kl: to t: 0 records acknowledged, 2 without an acknowledgement\n"


def test_a_lost_quorum_is_the_first_reason_that_every_command_names(
    kl: Kl, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "kafkalite.broker")  # the brokers log in this process
    with SyncCluster(brokers=3) as cluster:
        servers = cluster.bootstrap_servers
        assert kl("produce", "t", "-b", servers, stdin=b"x\n").code == 0
        for node_id in (1, 2):
            cluster.kill(node_id)
        *_, left = servers.split(",")  # the only node that can be reached
        commands = (
            ("topic", "create", "other"),
            ("produce", "t"),
            ("produce", "t", "--txn"),
            ("consume", "t", "-e"),
            ("consume", "t", "-e", "-g", "g"),
            ("group", "list"),
        )
        for command in commands:
            if handler := installed():  # of the commands before, which have printed the same warning
                logging.getLogger("kafkalite").removeHandler(handler)
            done = kl(*command, "-b", left, "--timeout", "3s", stdin=b"x\n")
            assert done.code != 0, command
            first, *_, last = [line for line in done.told.splitlines() if "hint:" not in line]
            assert first.startswith("kl: waiting: the quorum of controllers is "), (command, done.told)
            assert "lost: 1 of 3 nodes can be reached" in last, (command, done.told)
            assert "start node 1 (" in last and "and node 2 (" in last, (command, done.told)
            assert "longer --timeout" not in done.told
        status = json.loads(kl("cluster", "status", "-b", servers, "-o", "json").out)
        assert any("the quorum of controllers is lost" in problem for problem in status["problems"])


def test_a_lost_quorum_has_one_exit_code(kl: Kl, caplog: pytest.LogCaptureFixture) -> None:
    """Commands that need no controller or leader succeed, and --check fails with its own code."""
    caplog.set_level(logging.CRITICAL, "kafkalite.broker")  # the brokers log in this process
    with SyncCluster(brokers=3) as cluster:
        servers = cluster.bootstrap_servers
        assert kl("produce", "t", "-b", servers, stdin=b"x\n").code == 0
        assert kl("consume", "t", "-g", "g", "-n", "1", "-b", servers).code == 0
        for node_id in (1, 2):
            cluster.kill(node_id)
        commands = """
            topic create u | topic create u v | topic describe t | topic alter t -c retention.ms=7d
            topic delete t -y | topic delete t u -y | topic delete-records t --before end -y
            produce t -X delivery.timeout.ms=1000 -X request.timeout.ms=500 | produce t --txn
            consume t -e | consume t -e -g g | fetch t-0-0 | offsets t
            group list | group describe g | group lag g | group delete g | group delete g h
            group reset-offsets g --to-earliest | group commit g t-0=0 | group explain g
            txn list | txn describe x | txn abort x | txn find-hanging
            cluster elect | cluster wait --timeout 1s | acl add User:a --operation read --topic t
            quota set --client-id r consumer_byte_rate=5 | config set broker 3 log.retention.ms=8d
            log dirs | topic list
        """
        codes = {}
        for command in (each.strip() for line in commands.splitlines() for each in line.split("|")):
            if command:
                timeout = ("-X", "default.api.timeout.ms=400")  # --timeout has its own error
                codes[command] = kl(*command.split(), "-b", servers, *timeout, stdin=b"x\n").code
        assert codes.pop("topic list") == 0
        assert {command: code for command, code in codes.items() if code != 7} == {}
        assert kl("cluster", "status", "--check", "-b", servers).code == 9


def test_a_group_without_a_coordinator_names_the_lost_quorum_first(
    kl: Kl, caplog: pytest.LogCaptureFixture
) -> None:
    """The remaining broker can't create __consumer_offsets, and that is not the reason to name."""
    caplog.set_level(logging.CRITICAL, "kafkalite.broker")  # the brokers log in this process
    with SyncCluster(brokers=3) as cluster:
        cluster.produce("t", [b"x"])
        *_, left = cluster.bootstrap_servers.split(",")
        cluster.stop(1, 2)  # in order, so that the last broker knows that they have left
        while json.loads(kl("cluster", "status", "-b", left, "-o", "json").out)["controller_id"] is not None:
            time.sleep(0.1)
        if handler := installed():
            logging.getLogger("kafkalite").removeHandler(handler)
        done = kl("consume", "t", "-e", "-g", "g", "-b", left, "--timeout", "4s")
    assert done.code == 7
    last = [line for line in done.told.splitlines() if "hint:" not in line][-1]
    assert "the last error: the quorum of controllers is lost: 1 of 3 nodes can be reached" in last, done.told
    assert "start node 1 (" in last and "and node 2 (" in last
    assert "__consumer_offsets" not in last


@pytest.mark.parametrize(
    ("module", "lookup", "options"), [(consume, "spans", ()), (group_consume, "matching_topics", ("-g", "g"))]
)
def test_the_time_limit_of_consume_includes_the_lookups_before_the_first_fetch(
    at: Kl, monkeypatch: pytest.MonkeyPatch, module: Any, lookup: str, options: tuple[str, ...]
) -> None:
    async def late(*_arguments: Any) -> list[Any]:
        await asyncio.sleep(30)
        raise AssertionError("the time limit did not apply")

    assert at("produce", "limited", stdin=b"x").code == 0
    monkeypatch.setattr(module, lookup, late)
    done = at("consume", "limited", "-e", *options, "--timeout", "1s")
    assert done.code == 7
    assert done.told.startswith("kl: gave up after 1 s")
