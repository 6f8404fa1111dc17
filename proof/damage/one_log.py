"""A data directory with one log in small segments, whose files tests and schedules damage."""

from __future__ import annotations

from typing import Final

from kafkalite.model import TopicPartition
from kafkalite.storage.accept_loss import AcceptedLoss, accept_loss, expected_loss
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import tree_of

PATH: Final = "/data"
TOPIC_ID: Final = "0" * 32
DIRECTORY: Final = f"{PATH}/{TOPIC_ID}-0"
ORDERS: Final = TopicPartition("orders", 0)
CONFIG: Final = LogConfig(segment_bytes=4096, index_interval_bytes=512, preallocate_min_bytes=1024)


def open_store(fs: MemoryFileSystem) -> LogStore:
    """Open the data directory and its log, as a start of a node does."""
    store = LogStore.open(fs, PATH, cluster_id="c", node_id=1)
    store.load({ORDERS: (TOPIC_ID, CONFIG)})
    return store


def log_of(store: LogStore) -> Log:
    log = store.get(ORDERS)
    assert log is not None
    return log


def accept_as_expected(fs: MemoryFileSystem, directory: str, leader_epoch: int | None = None) -> AcceptedLoss:
    """Accept the loss, after a check that ``expected_loss`` returns the same result and changes nothing."""
    before = tree_of(fs)
    expected = expected_loss(fs, directory, leader_epoch) if fs.exists(directory) else None
    assert tree_of(fs) == before
    done = accept_loss(fs, directory, leader_epoch)
    if expected is not None:
        assert expected._replace(kept=[]) == done._replace(kept=[], damage=None)
    return done
