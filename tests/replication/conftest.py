"""Shared by the replication tests: partitions on real logs in a temporary directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.metadata.image import PartitionState
from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig

NOW_MS = 1_700_000_000_000


class Leader:
    """A partition led by broker 1, with shorthands for a broker's operations."""

    now_ms = NOW_MS

    def __init__(
        self,
        directory: str,
        *,
        settings: PartitionSettings | None = None,
        lead: bool = True,
        isr: tuple[int, ...] = (1,),
        log: Log | None = None,
        **config: Any,
    ) -> None:
        self.log = log or Log.create(RealFileSystem(), directory, LogConfig(**config))
        self.partition = Partition(
            TopicPartition("orders", 0), "a" * 32, self.log, broker_id=1, settings=settings
        )
        if lead:
            self.lead(isr=isr)

    def lead(self, *, epoch: int = 0, version: int = 0, isr: tuple[int, ...] = (1,)) -> bool:
        return self.partition.become_leader(PartitionState((1, 2, 3), isr, 1, epoch, version))

    def batch(self, *values: bytes, timestamp_ms: int = NOW_MS, **changes: Any) -> tuple[bytearray, Any]:
        batch = bytearray(build_batch(list(values) or [b"value"], timestamps_ms=timestamp_ms))
        return batch, check(batch)._replace(**changes)

    def append(self, *values: bytes, acks: int = -1, now_ms: int = NOW_MS, **batch: Any) -> Any:
        return self.partition.append(*self.batch(*values, **batch), now_ms, acks=acks)

    def sync(self) -> bool:
        """Run one sync round; return whether the high watermark moved."""
        work = self.log.begin_sync()
        assert work is not None
        work.run()
        self.log.finish_sync(work, None)
        return self.partition.on_synced()


@pytest.fixture
def new_leader(tmp_path: Path) -> Callable[..., Leader]:
    """Makes partitions, each in a directory of its own."""
    made: list[Leader] = []

    def make(**arguments: Any) -> Leader:
        made.append(Leader(str(tmp_path / str(len(made))), **arguments))
        return made[-1]

    return make
