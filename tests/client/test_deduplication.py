"""Repeated records are detected by their unique id."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite import Deduplicator, Record, TopicPartition
from kafkalite.client.consumer.deduplication import header_id, key_id
from kafkalite.errors import ClientError
from kafkalite.model import TimestampType

T0 = TopicPartition("t", 0)


def _record(offset: int, key: bytes | None = None, headers: Any = (), partition: int = 0) -> Record:
    return Record("t", partition, offset, 0, TimestampType.CREATE_TIME, key, None, headers)


def test_a_repeated_id_is_detected() -> None:
    seen = Deduplicator(key_id)
    assert not seen.is_repeated(_record(0, b"a"))
    assert seen.add(_record(0, b"a"))
    assert seen.is_repeated(_record(1, b"a")) and not seen.add(_record(1, b"a"))
    assert [r.offset for r in seen.new([_record(2, b"b"), _record(3, b"a"), _record(4, b"b")])] == [2]


def test_a_record_without_an_id_is_always_new() -> None:
    seen = Deduplicator(header_id("id"))
    assert seen.add(_record(0)) and seen.add(_record(0)) and not seen.is_repeated(_record(0))


def test_the_last_header_of_that_name_counts() -> None:
    seen = Deduplicator(header_id("id"))
    seen.add(_record(0, headers=(("id", b"1"), ("id", b"2"), ("other", b"3"))))
    assert seen.is_repeated(_record(1, headers=(("id", b"2"),)))
    assert not seen.is_repeated(_record(1, headers=(("id", b"1"),)))


def test_memory_is_bounded_by_forgetting_the_oldest() -> None:
    seen = Deduplicator(key_id, capacity=2)
    for offset, key in enumerate((b"a", b"b", b"c")):
        seen.add(_record(offset, key))
    assert [seen.is_repeated(_record(9, key)) for key in (b"a", b"b", b"c")] == [False, True, True]
    with pytest.raises(ClientError, match="at least 1"):
        Deduplicator(key_id, capacity=0)


def test_ids_are_dumped_and_loaded_by_partition() -> None:
    seen, heir = Deduplicator(key_id), Deduplicator(key_id)
    seen.add(_record(0, b"a"))
    seen.add(_record(0, b"b", partition=1))
    heir.load(T0, seen.dump(T0))
    seen.forget([T0])
    assert heir.is_repeated(_record(5, b"a")) and not seen.is_repeated(_record(5, b"a"))
    assert seen.is_repeated(_record(5, b"b", partition=1))
    assert seen.dump(T0) == b""
    with pytest.raises(ClientError, match="not a dump"):
        heir.load(T0, b"x")
