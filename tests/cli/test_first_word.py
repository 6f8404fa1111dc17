"""Every command of kl says its first word within two seconds, whatever is wrong at the other end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from kafkalite.cli.app import root
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import SyncCluster

pytestmark = pytest.mark.slow

LIMIT_S = 2.0
#: For a process while eight of them, which mostly wait, and other tests share the processors.
MARGIN_S = 6.0
AT_ONCE = 8
#: More than a log reserves ahead, so that they do not fit on a full disk.
RECORDS = (b"x" * 1_000 + b"\n") * 8_000

#: The arguments of each command that talks to brokers.
ARGUMENTS: dict[str, str] = {
    "produce": "t",
    "consume": "t",
    "cat": "t",
    "fetch": "t-0-0",
    "topic alter": "t -c retention.ms=1d",
    "topic create": "new",
    "topic delete": "t --yes",
    "topic delete-records": "t --before 1 --yes",
    "topic describe": "t",
    "topic list": "",
    "group commit": "g t-0=0",
    "group delete": "g",
    "group describe": "g",
    "group explain": "g",
    "group lag": "g",
    "group list": "",
    "group members": "g",
    "group reset-offsets": "g --to-earliest",
    "group watch": "g",
    "txn abort": "x",
    "txn describe": "x",
    "txn find-hanging": "",
    "txn list": "",
    "txn retire": "x",
    "offsets": "t",
    "cluster balance": "",
    "cluster brokers": "",
    "cluster controller": "",
    "cluster decommission": "1 --yes",
    "cluster describe": "",
    "cluster elect": "t",
    "cluster features describe": "",
    "cluster features upgrade": "--metadata-version 2",
    "cluster reassign apply": "{plan}",
    "cluster reassign cancel": "--all",
    "cluster reassign plan": "t -r 1",
    "cluster reassign status": "",
    "cluster shutdown": "1 --secret-file {secret}",
    "cluster status": "",
    "cluster wait": "",
    "acl add": "User:a --operation read --topic t",
    "acl check": "User:a read --topic t",
    "acl list": "",
    "acl remove": "--topic t --yes",
    "quota set": "--user a producer_byte_rate=1000",
    "quota unset": "--user a",
    "quota list": "",
    "quota describe": "--user a",
    "user add": "a --password-file {secret}",
    "user delete": "a",
    "user list": "",
    "user rotate": "a --password-file {secret}",
    "metadata cat": "/topics/t",
    "metadata ls": "/",
    "metadata quorum add-voter": "2",
    "metadata quorum remove-voter": "2 -y",
    "metadata tail": "",
    "config set": "topic t retention.ms=1d",
    "config show": "topic t",
    "context add": "name",
    "log dirs": "",
    "log move": "t-0 /d --broker 1",
    "bench consume": "",
    "bench e2e": "",
    "bench produce": "",
    "conformance": "",
}
#: The commands that talk to no broker, or, as `pipeline run`, to Spark first.
ALONE = {
    *(
        "dev",
        "server format",
        "server start",
        "config explain",
        "config list",
        "cheat",
        "completion",
        "tls dev-certs",
        "version",
    ),
    *("context delete", "context list", "context use"),
    *("pipeline list", "pipeline run", "pipeline validate", "pipeline warm-up"),
    *("log accept-loss", "log dump", "log index", "log segments", "log verify"),
}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


def test_every_command_is_listed_here() -> None:
    assert set(commands(root)) == ARGUMENTS.keys() | ALONE


class Word(NamedTuple):
    """The first line that a command wrote, or the exit code if it ended in silence."""

    seconds: float
    text: str
    code: int | None


#: Imports the commands once, then forks a process for each line of descriptor 3: arguments, environment and
#: paths as JSON. It prints the process's id. The process writes its exit code to a file.
FORKS = """
import json, os, sys
import click, uvloop
import kafkalite.client.admin.admin, kafkalite.client.consumer.consumer, kafkalite.client.producer.producer
from kafkalite.cli.app import root, run

def load(group):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            load(command)

load(root)
for line in os.fdopen(3):
    arguments, environment, records, output, code = json.loads(line)
    written = os.open(output, os.O_WRONLY)
    child = os.fork()
    if child:
        os.close(written)
        os.write(1, b"%d\\n" % child)
        continue
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(records, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(written)
    os.close(3)
    ended = run(arguments)
    with open(code, "w") as file:
        file.write(str(ended))
    os._exit(0)
"""


class Forks:
    """Starts commands as processes that need not import their modules again."""

    def __init__(self) -> None:
        source, self._jobs = os.pipe()
        command = f"import os; os.dup2({source}, 3) if {source} != 3 else None\n{FORKS}"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", command], stdout=subprocess.PIPE, pass_fds=(source,)
        )
        os.close(source)
        self._lock = threading.Lock()

    def start(self, *job: object) -> int:
        """Return the id of the process, which stays a zombie when it has ended."""
        assert self._process.stdout is not None
        with self._lock:
            os.write(self._jobs, json.dumps(job).encode() + b"\n")
            return int(self._process.stdout.readline())

    def close(self) -> None:
        os.close(self._jobs)
        self._process.communicate()


def first_word(command: str, address: str, directory: Path, forks: Forks) -> Word:
    """Start ``command``, and end it when it has written a line."""
    name = command.replace(" ", "-")
    files = {"secret": directory / "secret", "plan": directory / "plan.json"}
    arguments = [*command.split(), *ARGUMENTS[command].format(**files).split()]
    arguments += [address] if command == "conformance" else ["-b", address]
    records, output, code = (directory / f"{name}.{kind}" for kind in ("records", "output", "code"))
    records.write_bytes(RECORDS)
    output.unlink(missing_ok=True)
    os.mkfifo(output)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KL_")}
    environment |= {"XDG_CONFIG_HOME": str(directory / f"{name}-config")}
    began = time.monotonic()
    opened = os.open(output, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the other end
    os.set_blocking(opened, True)
    process = forks.start(arguments, environment, str(records), str(output), str(code))
    ending = threading.Timer(LIMIT_S + MARGIN_S, os.kill, (process, signal.SIGKILL))
    ending.start()
    with os.fdopen(opened, "rb") as stream:
        line = stream.readline()
        seconds = time.monotonic() - began
        ending.cancel()
        os.kill(process, signal.SIGKILL if line else 0)
        stream.read()
    return Word(seconds, line.decode(), None if line or not code.exists() else int(code.read_text()))


def first_words(address: str, directory: Path) -> dict[str, Word]:
    names = list(ARGUMENTS)
    (directory / "secret").write_text('cluster.secret = "s"\n')
    (directory / "plan.json").write_text('{"partitions": [{"topic": "t", "partition": 0, "replicas": [1]}]}')
    with closing(Forks()) as forks:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda name: first_word(name, address, directory, forks), names)
            words = dict(zip(names, found, strict=True))
        for name, word in words.items():
            if word.seconds >= LIMIT_S + MARGIN_S:  # it may not have got a processor: once more, alone
                words[name] = first_word(name, address, directory, forks)
    return words


def check(words: dict[str, Word], *reasons: str) -> None:
    """Each command wrote something in time, with one of ``reasons`` if any are given, or ended well."""
    misused = {name: word for name, word in words.items() if "no such option" in word.text or word.code == 2}
    assert not misused, "the arguments in this file are wrong"
    late = {name: word for name, word in words.items() if word.seconds >= LIMIT_S + MARGIN_S}
    assert not late, "these commands are silent"
    if reasons:
        wrong = {
            name: word for name, word in words.items() if not any(reason in word.text for reason in reasons)
        }
        assert not wrong, "these commands name another cause"
    else:
        mute = {name: word for name, word in words.items() if not word.text and word.code != 0}
        assert not mute, "these commands failed without a word"


@pytest.fixture
def serve() -> Iterator[object]:
    """Return a function that listens, and answers each connection with the given bytes, or with nothing."""
    opened: list[socket.socket] = []

    def start(answer: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        opened.append(listening)

        def run() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                opened.append(peer)
                if answer:
                    try:
                        peer.recv(100)
                        peer.sendall(answer)
                    except OSError:
                        continue

        threading.Thread(target=run, daemon=True).start()
        return f"127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for each in opened:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def test_a_silent_port(serve: object, tmp_path: Path) -> None:
    address = serve(b"")  # type: ignore[operator]
    check(
        first_words(address, tmp_path),
        "does not respond",
        "is slow to respond",
        "did not complete a connection",
    )


def test_a_server_of_another_protocol(serve: object, tmp_path: Path) -> None:
    address = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")  # type: ignore[operator]
    check(first_words(address, tmp_path), "HTTP")


def test_a_closed_port(tmp_path: Path) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    check(first_words(address, tmp_path), "refused", "cannot be reached", "no broker could be reached")


def test_a_lost_quorum(tmp_path: Path) -> None:
    with SyncCluster(brokers=3, transport="tcp") as cluster:
        cluster.produce("t", [b"1"])
        cluster.kill(1, 2)
        check(first_words(cluster.bootstrap_servers, tmp_path))


def test_a_full_disk(tmp_path: Path) -> None:
    with SyncCluster(transport="tcp") as cluster:
        cluster.produce("t", [b"1"])
        disk = cluster.cluster.filesystem
        assert isinstance(disk, MemoryFileSystem)
        disk.capacity_bytes = 1
        words = first_words(cluster.bootstrap_servers, tmp_path)
        del words[
            "metadata tail"
        ]  # it has nothing to say: the broker responds, and the metadata stays as it is
        check(words)
        for name in ("produce", "topic create", "config set"):
            assert "space" in words[name].text or "full" in words[name].text, words[name]
