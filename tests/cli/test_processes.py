"""kl as a process: pipes that close, Ctrl-C, signals, live streams, brokers in the foreground."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite import TopicPartition, sync
from kafkalite.cli.consume import _Job
from kafkalite.cli.dev import parse_topic_specs
from kafkalite.cli.ranges import END, START, OffsetRange
from kafkalite.errors import NoOffsetError

Kl = Callable[..., Any]
Spawn = Callable[..., "subprocess.Popen[bytes]"]

LIMIT_SECONDS = 240


def line_of(stream: Any) -> bytes:
    """The next line, within LIMIT_SECONDS."""
    ready, _, _ = select.select([stream], [], [], LIMIT_SECONDS)
    assert ready, "nothing was printed"
    line: bytes = stream.readline()
    return line


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, err


def environment(servers: str) -> dict[str, str]:
    return {"KL_BOOTSTRAP_SERVERS": servers}


@pytest.fixture
def filled(at: Kl) -> str:
    name = f"pipe-{time.monotonic_ns()}"
    assert at("topic", "create", name).code == 0
    assert at("produce", name, stdin=b"".join(b"%d\n" % n for n in range(5000))).code == 0
    return name


def test_head_ends_a_consume_with_more_output(repository: Path, filled: str, servers: str) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m kafkalite consume {filled} | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=repository,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=os.environ | environment(servers),
    )
    assert done.stdout.split() == [b"0", b"0"]
    assert done.stderr == b""


def test_a_closed_pipe_of_a_group_names_the_committed_records(
    repository: Path, filled: str, servers: str
) -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m kafkalite consume {filled} -g {filled} | head -1",
        shell=True,
        cwd=repository,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=os.environ | environment(servers),
    )
    assert done.stdout == b"0\n"
    found = re.fullmatch(rb"kl: stdout was closed; up to ([\d,]+) records may be committed.*\n", done.stderr)
    assert found, done.stderr
    with sync.Admin(servers) as admin:
        committed = sum(each.committed.offset for each in admin.group_lag(filled) if each.committed)
    assert committed <= int(found[1].replace(b",", b"")) <= 5000


def test_a_closed_pipe_ends_a_consume_that_waits(spawn: Spawn, filled: str, servers: str) -> None:
    process = spawn("consume", filled, "-r", "-1", **environment(servers))
    assert process.stdout is not None
    assert line_of(process.stdout) == b"4999\n"
    process.stdout.close()  # and no further record comes
    assert process.wait(LIMIT_SECONDS) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stdout = None


@pytest.mark.parametrize(
    "command", ["consume {}", "consume {} -g readers", "topic list", "metadata tail", "--version", "--help"]
)
def test_a_closed_stdout_is_an_error(repository: Path, filled: str, servers: str, command: str) -> None:
    done = subprocess.run(
        f"exec '{sys.executable}' -m kafkalite {command.format(filled)} >&-",
        shell=True,
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=os.environ | environment(servers),
    )
    first, *rest = done.stderr.splitlines()
    assert first == "kl: stdout can't be written: Bad file descriptor"
    assert rest == ["    hint: it is closed (>&-); >/dev/null discards the output"]
    assert done.returncode == 1


def test_a_closed_stdout_does_not_matter_without_output(repository: Path, filled: str, servers: str) -> None:
    command = f"echo x | '{sys.executable}' -m kafkalite produce {filled} -q >&-"
    variables = os.environ | environment(servers)
    done = subprocess.run(command, shell=True, cwd=repository, capture_output=True, env=variables)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_server_runs_without_a_stdout(repository: Path, tmp_path: Path) -> None:
    words = f"server start --data '{tmp_path}' --set listeners=127.0.0.1:0"
    command = ["sh", "-c", f"exec '{sys.executable}' -m kafkalite {words} >&-"]
    with subprocess.Popen(command, cwd=repository, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "stdout not written" in line:
                process.terminate()
    assert process.returncode == 0


def test_a_closed_pipe_ends_a_metadata_tail_that_waits(spawn: Spawn, servers: str) -> None:
    process = spawn("metadata", "tail", **environment(servers))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(LIMIT_SECONDS) == 0
    process.stdout = None


def test_characters_without_an_encoding_are_escaped(repository: Path) -> None:
    """The name of a file may have any bytes."""
    program = "import kafkalite.cli as cli; cli._escape_what_has_no_encoding(); print('\\udcff\\ud800')"
    variables = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=repository, capture_output=True, env=variables)
    assert done.stdout == b"\\udcff\\ud800\n"


def test_ctrl_c_is_quiet_and_130(spawn: Spawn, filled: str, servers: str) -> None:
    process = spawn("consume", filled, "-r", "-1", **environment(servers))
    assert line_of(process.stdout) == b"4999\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, b"", b"kl: 1 record\n")


def test_ctrl_c_while_waiting_for_a_line(spawn: Spawn, filled: str, servers: str) -> None:
    process = spawn("produce", filled, **environment(servers))
    assert process.stdin is not None
    process.stdin.write(b"typed\n")
    process.stdin.flush()
    follower = spawn("consume", filled, "-r", "5000", "-n", "1", **environment(servers))
    assert ended(follower)[:2] == (0, b"typed\n")
    process.send_signal(signal.SIGINT)
    code = process.wait(LIMIT_SECONDS)
    assert process.stderr is not None
    told = process.stderr.read()
    assert code == 130
    assert told.startswith(b"kl: 1 record acknowledged")
    assert b"Traceback" not in told


def test_lines_flow_while_stdin_is_open(spawn: Spawn, filled: str, servers: str) -> None:
    follower = spawn("consume", filled, "-r", "end", **environment(servers))
    process = spawn("produce", filled, "-q", **environment(servers))
    assert process.stdin is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:  # the follower's "end" may come after our first lines
        process.stdin.write(b"live\n")
        process.stdin.flush()
        if select.select([follower.stdout], [], [], 0.2)[0]:
            break
    assert line_of(follower.stdout) == b"live\n"
    follower.send_signal(signal.SIGINT)
    assert ended(follower)[0] == 130
    assert ended(process)[0] == 0


def test_dev_makes_topics_and_stops_on_a_signal(spawn: Spawn, kl: Kl) -> None:
    process = spawn("dev", "--port", "0", "--topic", "events:3", "--topic", "users", "--print-env")
    line = line_of(process.stdout)
    found = re.fullmatch(rb"export KL_BOOTSTRAP_SERVERS=(127\.0\.0\.1:\d+)\n", line)
    assert found, line
    address = found[1].decode()
    assert kl("topic", "list", "-b", address, "-o", "name").text.split() == ["events", "users"]
    assert kl("offsets", "events", "-b", address, "-o", "name").text.split() == [
        "events-0",
        "events-1",
        "events-2",
    ]
    process.terminate()
    code, out, err = ended(process)
    assert (code, out) == (0, b"")
    told = err.decode()
    assert f"is up on {address} (in memory" in told
    assert f"export KL_BOOTSTRAP_SERVERS={address}\n  echo hello | kl produce events\n" in told
    assert told.endswith("stopped.\n")


def test_dev_keeps_data_in_the_given_directory(spawn: Spawn, kl: Kl, tmp_path: Path) -> None:
    for expected in (b"", b"kept\n"):
        process = spawn("dev", "--port", "0", "--data", tmp_path / "data", "--topic", "t", "--print-env")
        address = line_of(process.stdout).decode().strip().partition("=")[2]
        assert kl("consume", "t", "-e", "-b", address).out == expected
        assert kl("produce", "t", "-b", address, stdin=b"kept\n").code == 0
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 0


def test_dev_takes_settings_from_the_environment_and_flags_override_them(
    spawn: Spawn, kl: Kl, tmp_path: Path
) -> None:
    variables = {
        "KAFKALITE_LOG_DIRS": str(tmp_path / "data"),
        "KAFKALITE_LISTENERS": "127.0.0.1:0",
        "KAFKALITE_NUM_PARTITIONS": "5",
        "KAFKALITE_LOG_RETENTION_MS": "7000",
    }
    arguments = ("dev", "--topic", "t", "--print-env", "--set", "log.retention.ms=8000")
    process = spawn(*arguments, **variables)
    address = line_of(process.stdout).decode().strip().partition("=")[2]
    assert len(kl("offsets", "t", "-b", address, "-o", "name").text.split()) == 5
    settings = kl("config", "explain", "retention.ms", "--topic", "t", "-b", address)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 0
    assert f"(data in {tmp_path / 'data'})" in err.decode()
    assert "8000" in settings.text, settings


def test_dev_refuses_a_misspelt_variable(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKALITE_NUM_PARTITION", "5")
    for nodes in ("1", "3"):
        result = kl("dev", "--port", "0", "-n", nodes)
        assert result.code == 2
        assert "KAFKALITE_NUM_PARTITION" in result.told


@pytest.mark.parametrize("command", [("dev", "--port", "0"), ("dev", "-n", "3"), ("server", "start")])
def test_a_file_in_place_of_the_data_directory_is_refused_with_advice(
    kl: Kl, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        result = kl(*command, "--data", path)
        assert result.code in {1, 2}
        assert "hint: name a directory; it is created if it does not exist" in result.told


def test_a_refused_data_directory_is_not_changed(kl: Kl, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "photo.jpg").touch()
    result = kl("dev", "--port", "0", "--data", tmp_path / "data")
    assert result.code == 1
    assert "is not empty: it contains photo.jpg" in result.told
    assert [each.name for each in (tmp_path / "data").iterdir()] == ["photo.jpg"]


def test_dev_refuses_a_bad_topic(kl: Kl) -> None:
    for text in ("a:b", "a:1:1:1", "a:0", "../x:1"):
        result = kl("dev", "--topic", text)
        assert result.code == 2
        assert "is not NAME:PARTITIONS:REPLICAS" in result.told


def test_dev_refuses_topics_that_contradict_each_other(kl: Kl) -> None:
    result = kl("dev", "--topic", "a:2", "--topic", "b", "--topic", "a")
    assert result.code == 2
    assert "--topic a: topic 'a' is given before, with other partitions or replicas" in result.told
    assert parse_topic_specs(["a", "b:2", "a"]) == parse_topic_specs(["a", "b:2"])


def test_a_port_in_use_is_reported(kl: Kl) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = kl("dev", "--port", str(port))
    assert result.code == 1
    assert str(port) in result.told
    assert "Traceback" not in result.told


def test_server_starts_serves_and_stops(spawn: Spawn, kl: Kl, tmp_path: Path) -> None:
    settings = tmp_path / "kafkalite.toml"
    settings.write_text('listeners = "127.0.0.1:0"\n"num.partitions" = 2\n')
    process = spawn("server", "start", "-f", settings, "--data", tmp_path / "data", "--log-format", "json")
    line = line_of(process.stdout).decode()
    address = line.strip().rpartition(" ")[2]
    assert kl("topic", "create", "t", "-b", address).text == "t: created, 2 partitions\n"
    process.terminate()
    code, _, err = ended(process)
    assert code == 0
    assert b'"event": "broker started' in err
    assert b'"event": "broker stopped' in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "no data directory: give --data"),
        (
            ("--data", "DATA", "--set", "num.partitions=none"),
            "num.partitions is 'none', but must be a whole number",
        ),
        (("--data", "DATA", "--set", "num.partition=1"), "num.partitions"),
        (("--data", "DATA", "--set", "x"), "is not name=value"),
        (("--data", "DATA", "-f", "missing.toml"), "missing.toml"),
    ],
)
def test_bad_settings_say_key_value_and_what_is_allowed(
    kl: Kl, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    result = kl("server", "start", *(str(tmp_path / "d") if a == "DATA" else a for a in arguments))
    assert result.code == 2
    assert problem in result.told


def test_format_once(kl: Kl, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "formatted already  no" in kl("server", "format", "--data", data, "--dry-run").text
    assert not data.exists()
    first = kl("server", "format", "--data", data, "--node-id", "7", "--cluster-id", "c1", "-o", "json")
    assert first.code == 0, first.told
    assert '"node_id": 7' in first.text
    again = kl("server", "format", "--data", data)
    assert again.code == 5
    assert "is already formatted, for node 7" in again.told
    assert kl("server", "format", "--data", data, "--if-not-formatted", "-o", "json").out == first.out
    assert kl("server", "format").code == 2


def test_a_directory_of_another_cluster_is_refused(kl: Kl, tmp_path: Path) -> None:
    data = tmp_path / "data"
    kl("server", "format", "--data", data, "--cluster-id", "theirs")
    arguments = ["--data", data, "--set", "listeners=127.0.0.1:0", "--set", "cluster.id=ours"]
    result = kl("server", "start", *arguments, "--log-level", "error")
    assert result.code == 1
    assert "theirs" in result.told
    assert "Traceback" not in result.told


def test_r25_a_refused_start_prints_its_cause_and_no_traceback(kl: Kl, tmp_path: Path) -> None:
    """Not even of the steps that are undone, and the secret least of all."""
    data, secret = tmp_path / "data", "a-secret-of-twenty-letters"
    arguments = ["--data", data, "--set", "listeners=127.0.0.1:0", "--set", f"cluster.secret={secret}"]
    kl("server", "format", "--data", data)
    metadata = data / "__cluster_metadata"
    metadata.mkdir()
    (metadata / "raft.log").write_bytes(b"no journal" * 10)
    result = kl("server", "start", *arguments)
    assert result.code == 9
    assert "raft.log" in result.told
    assert "Traceback" not in result.told
    assert "stopping failed" not in result.told
    assert secret not in result.told


def test_a_live_consume_goes_on_when_its_broker_in_memory_starts_again(spawn: Spawn) -> None:
    with sync.Broker(listeners="127.0.0.1:0") as broker:
        servers = broker.bootstrap_servers
        with sync.Producer(servers) as producer:
            producer.send_many("events", [b"1", b"2"])
        consume = spawn("consume", "events", **environment(servers))
        ending = threading.Timer(LIMIT_SECONDS, consume.kill)
        ending.daemon = True
        ending.start()
        # Not line_of: several lines may arrive at once, and select doesn't see those that are buffered.
        assert consume.stderr is not None and consume.stdout is not None
        assert [consume.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
    with sync.Broker(listeners=servers):
        with sync.Admin(servers) as admin:
            admin.create_topic("events")
        told = b""
        while b"going on" not in told:
            line = consume.stderr.readline()
            assert line, told
            told += line
        assert b"events-0: offset 2 does not exist, its log ends at 0" in told
        with sync.Producer(servers) as producer:
            producer.send("events", b"3").result(LIMIT_SECONDS)
        assert consume.stdout.readline() == b"3\n"
    ending.cancel()
    consume.terminate()
    assert ended(consume)[0] == 143


class _Consumer:
    """A consumer at offset 5, and the offsets of its log."""

    def __init__(self, start: int, end: int) -> None:
        self.ends = start, end
        self.sought: list[int] = []

    def position(self, tp: TopicPartition) -> int:
        return 5

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, self.ends[0])

    async def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, self.ends[1])

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        self.sought.append(offset)


@pytest.mark.parametrize(
    ("stop", "offsets", "sought", "told"),
    [
        (None, (8, 9), [8], "the records before offset 8 were deleted before they were read"),
        (END, (8, 9), [8], "going on at offset 8"),
        (None, (0, 3), [0], "its log ends at 3: the topic was created again"),
        (None, (0, 9), [5], ""),
        (END, (0, 3), None, ""),
    ],
)
async def test_a_position_that_is_gone(
    stop: Any, offsets: tuple[int, int], sought: list[int] | None, told: str, capsys: Any
) -> None:
    consumer: Any = _Consumer(*offsets)
    error = NoOffsetError("out of range")
    error.topic_partition = TopicPartition("t", 0)
    job: Any = _Job(("t",), (), OffsetRange(START, stop), None, None, {}, None)  # type: ignore[arg-type]
    if sought is None:
        with pytest.raises(NoOffsetError):
            await job._go_on(consumer, error)
    else:
        await job._go_on(consumer, error)
        assert consumer.sought == sought
    assert told in capsys.readouterr().err
