"""Real disks: full ones, restarts with data, modes of files, directories of others."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite import Admin, Producer
from kafkalite.broker.broker import Broker
from kafkalite.errors import DataDirectoryError, ErrorCode, ListenError
from kafkalite.model import TopicPartition
from kafkalite.testing.wire import WireClient
from proof.waiting import settle

Make = Callable[..., Any]

MIB = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of sixteen megabytes."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs of fixed size needs root: THE FULL DISK IS NOT TESTED HERE")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted, THE FULL DISK IS NOT TESTED HERE: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


async def test_the_event_loop_never_waits_for_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs of records, metadata and new, changed and deleted topics run in other threads."""
    loop_thread, on_loop, elsewhere = threading.get_ident(), list[str](), list[str]()

    def watch(name: str) -> None:
        sync = getattr(os, name)

        def watched(descriptor: int) -> None:
            seen = on_loop if threading.get_ident() == loop_thread else elsewhere
            seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        monkeypatch.setattr(os, name, watched)

    async with (
        Broker(log_dirs=tmp_path / "data", listeners="127.0.0.1:0") as broker,
        Admin(broker.address) as admin,
        Producer(broker.address, linger_ms=0) as producer,
    ):
        watch("fsync")
        watch("fdatasync")
        await admin.create_topic("t", 3, configs={"segment.bytes": "1024"})
        for number in range(30):
            await producer.send("t", bytes(500), partition=number % 3)
        await admin.alter_configs("topic", "t", {"retention.bytes": "1024"})
        await admin.delete_records({TopicPartition("t", 0): 5})
        await broker._housekeeping.retain()
        await broker._housekeeping.record()
        await admin.delete_topics(["t"])
        assert on_loop == []
        assert len(elsewhere) > 10


async def test_a_full_disk_refuses_producers_serves_readers_and_recovers(
    small_disk: Path, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(8 * MIB))
    async with (
        Broker(log_dirs=small_disk / "data", message_max_bytes=2 * MIB) as broker,
        WireClient(broker.address) as wire,
    ):
        await wire.call(new_topic("t"))
        batch = batch_of(b"x" * MIB)
        codes: list[int] = []
        while not codes or codes[-1] == 0:
            codes.append((await wire.call(produce(batch), batch)).partitions[0].error_code)
            assert len(codes) < 20
        assert codes[-1] == ErrorCode.KAFKA_STORAGE_ERROR
        acknowledged = codes.count(0)
        assert acknowledged >= 2
        for offset in range(acknowledged):
            (read,) = (await wire.call(fetch(offset, max_bytes=1))).partitions
            assert (read.error_code, read.length_bytes) == (0, len(batch))
        refused = (await wire.call(produce(batch), batch)).partitions[0]
        assert refused.error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert "space" in refused.error_message
        created = await wire.call(new_topic("another"))
        assert created.error_code in (0, ErrorCode.KAFKA_STORAGE_ERROR)

        ballast.unlink()
        (result,) = (await wire.call(produce(batch), batch)).partitions
        assert (result.error_code, result.base_offset) == (0, acknowledged)
        assert broker.statistics().offline_partition_count == 0


async def test_records_survive_a_clean_restart_and_a_kill(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, fetch: Make
) -> None:
    count = 0
    for kill in (False, True, False):
        broker = Broker(log_dirs=tmp_path)
        await broker.start()
        async with WireClient(broker.address) as wire:
            await wire.call(new_topic("t", **{"segment.bytes": "20000"}))
            (before,) = (await wire.call(fetch(0))).partitions
            assert before.high_watermark == count
            for _ in range(50):
                batch = batch_of(b"x" * 1000)
                assert (await wire.call(produce(batch), batch)).partitions[0].error_code == 0
            count += 50
        await (broker.kill() if kill else broker.stop())
    async with Broker(log_dirs=tmp_path) as broker, WireClient(broker.address) as wire:
        (read,) = (await wire.call(fetch(0))).partitions
        assert read.high_watermark == count


async def test_files_are_for_their_owner_alone(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    """S15."""
    place = tmp_path / "data"
    async with Broker(log_dirs=place) as broker, WireClient(broker.address) as wire:
        await wire.call(new_topic("t"))
        batch = batch_of()
        await wire.call(produce(batch), batch)
    for path in [place, *place.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


async def test_topics_lie_under_their_ids_never_under_a_name_from_outside(
    tmp_path: Path, new_topic: Make
) -> None:
    """S14."""
    async with Broker(log_dirs=tmp_path) as broker, WireClient(broker.address) as wire:
        for name in ("...", ".hidden", "a" * 249, "CON"):
            created = await wire.call(new_topic(name))
            assert created.topics[0].error_code == 0
        names = {path.name for path in tmp_path.iterdir()}
    ids = [name for name in names if len(name) == 34 and name.endswith("-0")]
    assert len(ids) == 4


async def test_strange_directories_and_taken_ports_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "photos.txt").write_text("mine")
    with pytest.raises(DataDirectoryError, match=r"photos\.txt"):
        await Broker(log_dirs=tmp_path).start()
    async with Broker() as broker:
        with pytest.raises(ListenError, match=f"cannot listen on {broker.address}: the port is in use"):
            await Broker(listeners=broker.address).start()


async def test_fsync_rounds_do_not_stop_the_loop(
    tmp_path: Path, new_topic: Make, batch_of: Make, produce: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes its time delays acknowledgements, and nothing else."""
    import threading

    from kafkalite.storage.disk import RealFile

    gate = threading.Event()
    sync = RealFile.sync

    def slow_sync(self: RealFile) -> None:
        gate.wait(10)
        sync(self)

    async with (
        Broker(log_dirs=tmp_path) as broker,
        WireClient(broker.address) as writer,
        WireClient(broker.address) as other,
    ):
        await writer.call(new_topic("t"))
        monkeypatch.setattr(RealFile, "sync", slow_sync)
        batch = batch_of()
        for _ in range(10):
            writer.send(produce(batch), batch)
        for _ in range(5):
            assert (await other.call(new_topic("t"))).topics[0].error_code == 36
        await settle()
        assert not writer._responses
        gate.set()
        for expected in range(10):
            assert (await writer.response()).message.partitions[0].base_offset == expected
        assert broker.statistics().sync_rounds <= 3
