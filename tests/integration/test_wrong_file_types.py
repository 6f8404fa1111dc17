"""A directory, link, pipe or device in the place of each file of a data directory.

The files are those of real directories, so a new kind of file is tested as soon as a broker writes it. Each
start ends within START_S: it names the file, or does without it and serves all records.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.cli.exit_codes import CHECK_FAILED, exit_code_for
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError
from kafkalite.model import TopicPartition
from kafkalite.storage.disk import RealFileSystem
from proof.waiting import eventually

pytestmark = pytest.mark.slow

START_S: Final = 15.0  # usually a tenth of a second; a pipe that is opened blocks for ever
VALUES: Final = [b"%d" % number * 200 for number in range(40)]
PARTITION: Final = TopicPartition("t", 0)
IS_VOTER: Final = {"lone": False, "voter": True}


def _broker(path: Path, *, is_voter: bool) -> Broker:
    settings: dict[str, Any] = {
        "node_id": 1,
        "cluster_id": "types",
        "listeners": "inproc://types",
        "log_dirs": str(path),
        "offsets_topic_num_partitions": 1,
        "transaction_state_log_num_partitions": 1,
    }
    if is_voter:
        settings |= {
            "cluster_secret": "a secret of this test",
            "controller_quorum_voters": "1@inproc://types-voter",
            "offsets_topic_replication_factor": 1,
            "transaction_state_log_replication_factor": 1,
            "transaction_state_log_min_isr": 1,
        }
    return Broker(filesystem=RealFileSystem(), **settings)


async def _fill(path: Path, *, is_voter: bool, is_clean: bool) -> None:
    broker = _broker(path, is_voter=is_voter)
    await broker.start()
    async with Admin(broker.address) as admin:
        await admin.create_topic("t", partitions=1, configs={"segment.bytes": "4096"})
    async with Producer(broker.address) as producer:
        for value in VALUES:
            await producer.send("t", value, partition=0)
    async with Consumer(
        "t", bootstrap_servers=broker.address, group_id="g", auto_offset_reset="earliest"
    ) as one:
        await one.get_many(5)
        await one.commit()
    await eventually((path / "recovery-points").exists, "the first checkpoint")
    await (broker.stop() if is_clean else broker.kill())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns the data directory of a stopped node with records, made on first use."""
    made: dict[tuple[str, bool], Path] = {}

    def fill(role: str, is_clean: bool) -> Path:
        if (role, is_clean) not in made:
            path = tmp_path_factory.mktemp(role) / "data"
            asyncio.run(_fill(path, is_voter=IS_VOTER[role], is_clean=is_clean))
            made[role, is_clean] = path
        return made[role, is_clean]

    return fill


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"kept")


def _link(path: Path) -> None:
    target = path.with_name("target-of-" + path.name)
    target.write_bytes(b"")
    path.symlink_to(target.name)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("this user may not create devices")


KINDS: Final[dict[str, Callable[[Path], None]]] = {
    "a directory": _directory,
    "a symbolic link": _link,
    "a named pipe": os.mkfifo,
    "a socket": _socket,
    "a character device": _device,
}


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``, also inside a system call that blocks."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def _outcome(path: Path, *, is_voter: bool) -> str:
    """Start a broker. Return the error of the start or of the partition, or "" if all records were read."""
    broker = _broker(path, is_voter=is_voter)
    try:
        with _alarm(START_S):
            await broker.start()
    except KafkaliteError as error:
        assert exit_code_for(error) == CHECK_FAILED, repr(error)
        assert error.hint
        return str(error)
    try:
        async with asyncio.timeout(20), Consumer(bootstrap_servers=broker.address) as consumer:
            async with Admin(broker.address) as admin:
                (log,) = await admin.describe_log_dirs(["t"])
            if log.offline_reason is not None:
                return log.offline_reason
            consumer.assign([PARTITION])
            await consumer.seek_to_beginning(PARTITION)
            found: list[bytes | None] = []
            while len(found) < len(VALUES):
                found += [record.value for record in await consumer.get_many(100, timeout_ms=5_000)]
            assert found == VALUES
            async with Producer(broker.address) as producer:  # the log takes records, too
                await producer.send("t", b"more", partition=0)
    finally:
        await broker.stop()
    return ""


@pytest.mark.parametrize(
    ("kind", "role", "is_clean"),
    [
        *((kind, "lone", False) for kind in KINDS),
        *((kind, "voter", False) for kind in ("a directory", "a named pipe")),
        *((kind, "lone", True) for kind in ("a directory", "a named pipe")),
    ],
)
def test_r25_whatever_is_in_the_place_of_a_file_is_named_or_not_needed(
    kind: str, role: str, is_clean: bool, filled: Callable[..., Path], tmp_path: Path
) -> None:
    source = filled(role, is_clean)
    # A thread of the broker that was killed may still be renaming its last temporary file.
    files = [file for file in source.rglob("*") if file.is_file() and file.suffix != ".tmp"]
    names = sorted(str(file.relative_to(source)) for file in files)
    assert len(names) > 10
    unnamed: dict[str, str] = {}
    for number, name in enumerate(names):
        path = tmp_path / str(number)
        shutil.copytree(source, path)
        file = path / name
        file.unlink()
        KINDS[kind](file)
        try:
            outcome = asyncio.run(_outcome(path, is_voter=IS_VOTER[role]))
        except Exception as error:  # every file is tried, so that one report names all
            unnamed[name] = repr(error)
            continue
        if outcome and not (str(file) in outcome and kind in outcome):
            unnamed[name] = outcome
        if kind == "a directory":
            assert list(path.rglob("inside")), f"{name}: the directory's content is lost"
    assert not unnamed
