"""docs/storage-format.md is the specification: the code writes its worked example byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.storage.index_block import BLOCK_HEADER_BYTES, OFFSET_MAGIC, TIME_MAGIC, VERSION
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import tree_of

TOPIC_ID = "0123456789abcdef0123456789abcdef"


class CountingBytes:
    """An Rng that is not random: the ids of the example are 00 01 02 …"""

    def randbytes(self, n: int, /) -> bytes:
        return bytes(range(n))

    def random(self) -> float:
        raise NotImplementedError

    def randrange(self, stop: int, /) -> int:
        raise NotImplementedError

    def shuffle(self, x: Any, /) -> None:
        raise NotImplementedError


def build_example() -> dict[str, bytes]:
    """Run the steps of the document: three batches, the first record deleted, an orderly stop."""
    fs = MemoryFileSystem()
    store = LogStore.open(fs, "/data", cluster_id="demo", node_id=1, rng=CountingBytes())
    store.load({})
    config = LogConfig(index_interval_bytes=64)
    log = store.create_log(TopicPartition("orders", 0), TOPIC_ID, config)
    log.append(build_batch([b"hello", b"world"], None, 1_700_000_000_000), now_ms=0, leader_epoch=4)
    log.append(build_batch([b"!"], None, 1_700_000_000_500), now_ms=0, leader_epoch=4)
    producer = {"producer_id": 5000, "producer_epoch": 0, "base_sequence": 0}
    log.append(build_batch([None], [b"k"], 1_700_000_000_250, **producer), now_ms=0, leader_epoch=6)
    log.delete_before(1)
    store.close(broker_epoch=9)
    return tree_of(fs)


def documented(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, bytes) of each fenced block whose language is ``hexdump`` or ``file``."""
    for language, name, body in re.findall(r"```(hexdump|file) (\S+)\n(.*?)```", text, re.DOTALL):
        if language == "file":
            yield name, body.encode()
        else:
            rows = [line[8:58].split("|")[0] for line in body.splitlines()]
            yield name, bytes.fromhex("".join(rows))


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    return (repository / "docs" / "storage-format.md").read_text()


def test_the_code_writes_the_worked_example(text: str) -> None:
    built = {path.removeprefix("/data/"): data for path, data in build_example().items()}
    shown = dict(documented(text))
    assert set(built) - set(shown) == {".lock"}
    for name, data in shown.items():
        assert data == built[name], name


def test_the_document_has_the_numbers_of_the_code(text: str) -> None:
    assert f'"{OFFSET_MAGIC.decode()}"' in text and f'"{TIME_MAGIC.decode()}"' in text
    assert f"{BLOCK_HEADER_BYTES}-byte" in text
    assert VERSION == 2
