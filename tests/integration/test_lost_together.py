"""A single node whose log and recovery points are lost or replaced together: the log is damaged (R25)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from proof.waiting import eventually

#: The records before an older copy was made, and all of them.
EARLIER: Final = 20
ALL: Final = 50


def _broker(path: Path) -> Broker:
    return Broker(log_dirs=str(path), listeners="inproc://")


async def _fill(path: Path, older: Path, *, is_clean: bool) -> Path:
    """Write ALL records. ``older`` gets a copy of the directory after EARLIER ones, made in between.
    Return the directory of the log."""
    broker = _broker(path)
    await broker.start()
    async with Admin(broker.address) as admin, Producer(broker.address) as producer:
        await admin.create_topic("t", 1)
        (log,) = path.glob("*-0")

        async def write(first: int, end: int) -> None:
            for number in range(first, end):
                await producer.send("t", b"%d" % number)
            line = f"{log.name} {end} ".encode()
            copy = path / "recovery-points.copy"  # it is written last
            await eventually(lambda: copy.exists() and line in copy.read_bytes(), "a checkpoint")

        await write(0, EARLIER)
        shutil.copytree(path, older)
        await write(EARLIER, ALL)
    await (broker.stop() if is_clean else broker.kill())
    return log


async def _reason(path: Path) -> str | None:
    async with _broker(path) as broker, Admin(broker.address) as admin:
        (log,) = await admin.describe_log_dirs(["t"])
        return log.offline_reason


def _lose(path: Path, older: Path, name: str) -> None:
    for lost in (name, "recovery-points"):
        _remove(path / lost)


def _replace(path: Path, older: Path, name: str) -> None:
    _lose(path, older, name)
    shutil.copytree(older / name, path / name)
    shutil.copy(older / "recovery-points", path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("damage", [_lose, _replace])
def test_r25_a_log_and_its_recovery_point_lost_together_are_missed(
    damage: Callable[[Path, Path, str], None], is_clean: bool, tmp_path: Path
) -> None:
    path, older = tmp_path / "data", tmp_path / "older"
    log = asyncio.run(_fill(path, older, is_clean=is_clean))
    (path / "clean-shutdown").unlink(missing_ok=True)
    damage(path, older, log.name)
    for _ in range(2):  # a second start does not forget it
        reason = asyncio.run(_reason(path))
        assert reason is not None
        lost = ALL if damage is _lose else ALL - EARLIER
        assert f"{lost} records in doubt" in reason
        assert f"kl log accept-loss {log}" in reason


def test_without_damage_the_log_is_online(tmp_path: Path) -> None:
    path = tmp_path / "data"
    asyncio.run(_fill(path, tmp_path / "older", is_clean=False))
    (path / "recovery-points").unlink()
    assert asyncio.run(_reason(path)) is None
