"""A topic as a table, against a broker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite import Admin, Broker, Consumer, Producer, Table, serde, sync
from kafkalite.errors import (
    ClientClosedError,
    ClientError,
    ConnectionFailedError,
    MissingExtraError,
    RecordError,
    RequestTimeoutError,
    SerializationError,
)
from kafkalite.model import IsolationLevel, TopicPartition
from kafkalite.testing import Cluster, drop_next


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker() as broker, Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("t", partitions=3, configs={"cleanup.policy": "compact"})
        yield broker


async def _send(broker: Broker, *pairs: tuple[Any, Any], **settings: Any) -> None:
    async with Producer(broker.bootstrap_servers, **settings) as producer:
        for key, value in pairs:
            producer.send_nowait("t", value, key=key)


def _table(broker: Broker, **settings: Any) -> Table[Any, Any]:
    return Table("t", bootstrap_servers=broker.bootstrap_servers, **settings)


async def test_it_has_the_latest_value_of_each_key_and_the_record(broker: Broker) -> None:
    await _send(broker, *((b"%d" % (i % 5), b"%d" % i) for i in range(50)))
    async with _table(broker) as table:
        assert table == {b"%d" % i: b"%d" % (45 + i) for i in range(5)}
        assert len(table) == 5
        assert table.get(b"9") is None
        record = table.record(b"3")
        assert (record.topic, record.value) == ("t", b"48")
    assert table[b"3"] == b"48", "the rows outlive the connections"


async def test_a_null_value_removes_its_row_and_a_record_without_key_is_in_none(broker: Broker) -> None:
    await _send(broker, (b"a", b"1"), (b"b", b"2"), (None, b"x"), (b"a", None), (b"unknown", None))
    async with _table(broker) as table:
        assert table == {b"b": b"2"}
        assert table.keyless_count == 1


async def test_refresh_reads_what_was_acknowledged_and_returns_the_changes(broker: Broker) -> None:
    await _send(broker, (b"a", b"1"))
    async with _table(broker) as table:
        await _send(broker, (b"a", b"2"), (b"a", None), (b"b", b"3"))
        assert table == {b"a": b"1"}, "it changes only when asked"
        changes = await table.refresh()
        of_a = [(old, new) for key, old, new, _ in changes if key == b"a"]
        assert of_a == [(b"1", b"2"), (b"2", None)]
        assert table == {b"b": b"3"}
        assert await table.refresh() == []


async def test_changes_can_be_followed_and_left_without_a_loss(broker: Broker) -> None:
    async with _table(broker) as table:
        await _send(broker, *((b"k", b"%d" % i) for i in range(6)))
        seen: list[bytes | None] = []
        for _ in range(2):
            async for change in table.changes():
                seen.append(change.new)
                assert table[b"k"] == change.new
                if len(seen) % 3 == 0:
                    break
        assert seen == [b"%d" % i for i in range(6)]
        assert await table.next_change(timeout_ms=20) is None
        waiting = asyncio.create_task(table.next_change())
        await _send(broker, (None, b"no row"), (b"new", b"7"))
        change = await waiting
        assert change is not None
        assert (change.key, change.old, change.new, change.record.value) == (b"new", None, b"7", b"7")


async def test_aborted_records_are_never_rows_and_markers_at_the_end_are_passed(broker: Broker) -> None:
    async with Producer(broker.bootstrap_servers, transactional_id="x") as producer:
        async with producer.transaction():
            await producer.send("t", b"committed", key=b"a")
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction():
                await producer.send("t", b"aborted", key=b"a")
                raise ZeroDivisionError
        async with _table(broker) as table:
            assert table == {b"a": b"committed"}
            async with producer.transaction():
                await producer.send("t", b"again", key=b"a")
            await table.refresh()
            assert table == {b"a": b"again"}


async def test_a_topic_that_is_created_again_is_another_table(broker: Broker) -> None:
    async with Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("short", partitions=1)
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send_many("short", [b"1", b"2"], keys=[b"a", b"b"])
        settings: Any = {"metadata_max_age_ms": 10, "allow_auto_create_topics": False}
        async with Table("short", bootstrap_servers=broker.bootstrap_servers, **settings) as table:
            assert set(table) == {b"a", b"b"}
            await admin.delete_topics(["short"])
            await admin.create_topic("short", partitions=1)
            async with Producer(broker.bootstrap_servers) as producer:
                await producer.send("short", b"3", key=b"c")
            async with asyncio.timeout(20):
                await table.next_change()
            assert table == {b"c": b"3"}


async def test_deserialized_rows_and_a_record_that_cannot_be_read(broker: Broker) -> None:
    await _send(broker, (b"k", b'{"n": 1}'), (b"k", b"not json"), (b"k", b'{"n": 2}'))
    table = _table(broker, key_deserializer=serde.string, value_deserializer=serde.json)
    try:
        with pytest.raises(SerializationError) as failure:
            await table.start()
        assert table == {"k": {"n": 1}}
        assert failure.value.topic_partition is not None
        assert failure.value.next_offset is not None
        await table.seek(failure.value.topic_partition, failure.value.next_offset)
        await table.refresh()
        assert table == {"k": {"n": 2}}
    finally:
        await table.close()
    again = _table(broker, key_deserializer=serde.string, value_deserializer=serde.json)
    with pytest.raises(SerializationError):
        async with again:
            pass
    with pytest.raises(ClientClosedError):  # a table that ``async with`` could not open holds no connection
        await again.refresh()


class _Counted:
    """A value that counts the values of its kind in memory."""

    alive = most = 0

    def __init__(self, _data: bytes) -> None:
        _Counted.alive += 1
        _Counted.most = max(_Counted.most, _Counted.alive)

    def __del__(self) -> None:
        _Counted.alive -= 1


async def test_the_start_keeps_the_latest_records_alone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalite.client.consumer.table._RECORDS_PER_READ", 100)
    async with Producer(broker.bootstrap_servers) as producer:
        for _ in range(30):
            await producer.send_many("t", [b"v"] * 100, keys=[b"k"] * 100)
    _Counted.alive = _Counted.most = 0
    async with _table(broker, value_deserializer=_Counted, max_partition_fetch_bytes=2_000) as table:
        assert len(table) == 1
        assert _Counted.most < 1_000


async def test_refresh_reads_acknowledged_records_of_partitions_that_were_added(broker: Broker) -> None:
    async with Admin(broker.bootstrap_servers) as admin, _table(broker) as table:
        await admin.create_partitions("t", 5)
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send("t", b"1", key=b"a", partition=4)
        await table.refresh()
        assert table == {b"a": b"1"}


@pytest.mark.parametrize("count", [0, 2, 7])
async def test_refresh_returns_the_rows_that_a_deleted_topic_had(broker: Broker, count: int) -> None:
    async with Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("short", partitions=1)
        async with Producer(broker.bootstrap_servers) as producer:
            await producer.send_many("short", [b"old"] * 5, keys=[b"%d" % i for i in range(5)])
        async with Table(  # which, like an open producer, could create the topic before the test does
            "short", bootstrap_servers=broker.bootstrap_servers, allow_auto_create_topics=False
        ) as table:
            await admin.delete_topics(["short"])
            await admin.create_topic("short", partitions=1)
            async with Producer(broker.bootstrap_servers) as other:
                for i in range(count):
                    await other.send("short", b"new", key=b"new%d" % i)
            changes = await table.refresh()
            assert table == {b"new%d" % i: b"new" for i in range(count)}
            assert {c.key: (c.old, c.new) for c in changes if c.new is None} == {
                b"%d" % i: (b"old", None) for i in range(5)
            }
            assert len(changes) == 5 + count
            assert await table.refresh() == []


async def test_keys_must_be_hashable(broker: Broker) -> None:
    await _send(broker, (b'{"id": 1}', b"x"))
    with pytest.raises(ClientError, match="not hashable"):
        await _table(broker, key_deserializer=serde.json).start()


@pytest.mark.parametrize("way", ["refresh", "changes"])
async def test_a_key_that_is_not_hashable_hides_no_other_record(broker: Broker, way: str) -> None:
    async with _table(broker, key_deserializer=serde.json) as table:
        async with Producer(broker.bootstrap_servers) as producer:
            keys = [b"1", b"[2]", b"3", b"4"]
            await producer.send_many("t", [b"x"] * 4, keys, partition=0)
            await producer.send_many("t", [b"y"] * 2, [b"5", b"6"], partition=1)
        tp = TopicPartition("t", 0)

        async def read() -> None:
            if way == "refresh":
                await table.refresh()
            else:
                while await table.next_change(timeout_ms=1_000):
                    pass

        for _ in range(2):
            with pytest.raises(ClientError, match="t-0-1 is a list, which is not hashable"):
                await read()
        await table.seek(tp, 2)
        await read()
        assert set(table) == {1, 3, 4, 5, 6}


async def test_settings_that_would_make_half_a_table_are_refused() -> None:
    with pytest.raises(ClientError, match="group 'g'"):
        Table("t", group_id="g")
    with pytest.raises(ClientError, match="starts at the beginning"):
        Table("t", auto_offset_reset="latest")
    with pytest.raises(ClientError, match="starts at the beginning"):
        Table("t", config={"auto.offset.reset": "latest"})


def test_settings_of_the_config_and_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Table("t").config.isolation_level == IsolationLevel.READ_COMMITTED
    uncommitted = {"isolation.level": "read_uncommitted"}
    assert Table("t", config=uncommitted).config.isolation_level == IsolationLevel.READ_UNCOMMITTED
    monkeypatch.setenv("KAFKALITE_CLIENT_ISOLATION_LEVEL", "read_uncommitted")
    assert Table("t", config="environment").config.isolation_level == IsolationLevel.READ_UNCOMMITTED


async def test_records_that_do_not_arrive_end_refresh() -> None:
    async with Cluster() as cluster:
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send("t", b"1", key=b"a")
        cluster.intercept("Fetch", drop_next(None))
        settings: Any = {"default_api_timeout_ms": 2_000, "request_timeout_ms": 1_000}
        with pytest.raises(RequestTimeoutError, match="no record of t-0"):
            await Table("t", bootstrap_servers=cluster.bootstrap_servers, **settings).start()


async def test_rows_become_columns(broker: Broker) -> None:
    pytest.importorskip("pyarrow")
    rows = {b"a": b'{"country": "CA", "n": 1}', b"b": b'{"country": "US", "n": 2, "sold": true}'}
    async with Admin(broker.bootstrap_servers) as admin:
        await admin.create_topic("one", partitions=1)
    async with Producer(broker.bootstrap_servers) as producer:
        await producer.send_many("one", list(rows.values()), keys=list(rows))
    servers = broker.bootstrap_servers
    async with Table("one", bootstrap_servers=servers, value_deserializer=serde.json) as table:
        assert table.to_arrow().to_pydict() == {
            "key": [b"a", b"b"],
            "country": ["CA", "US"],
            "n": [1, 2],
            "sold": [None, True],
        }
        assert table.to_arrow(key_column="id").column_names == ["id", "country", "n", "sold"]
        with pytest.raises(RecordError, match="column 'n'"):
            table.to_arrow(key_column="n")
        assert table.to_arrow(key_column="value").column_names == ["value", "country", "n", "sold"]
    async with Table("one", bootstrap_servers=servers) as plain:
        assert plain.to_arrow().to_pydict() == {"key": list(rows), "value": list(rows.values())}
        with pytest.raises(RecordError, match="column 'value'"):
            plain.to_arrow(key_column="value")
    async with Table("t", bootstrap_servers=servers) as empty:
        assert empty.to_arrow().to_pydict() == {"key": [], "value": []}
        assert empty.to_arrow(key_column="value").to_pydict() == {"value": []}


async def test_frames_of_pandas(broker: Broker) -> None:
    pytest.importorskip("pandas", reason="make pandas runs it: pandas is in no environment of other tests")
    await _send(broker, (b"a", b"5"), (b"a", b"6"))
    async with _table(broker, key_deserializer=serde.string, value_deserializer=int) as table:
        frame = table.to_pandas()
        assert frame.index.name == "key"
        assert frame["value"].to_dict() == {"a": 6}
    async with Consumer(
        "t", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        records = await consumer.to_pandas(timeout_ms=5000)
        assert list(records["value"]) == [b"5", b"6"]
        assert list(records["offset"]) == [0, 1]


async def test_without_pandas_the_message_names_the_extra(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setitem(sys.modules, "pandas", None)
    async with _table(broker) as table:
        with pytest.raises(MissingExtraError, match=r"pandas.*not installed") as failure:
            table.to_pandas()
        assert failure.value.hint == "pip install 'kafkalite[pandas]'"
        async with Consumer("t", bootstrap_servers=broker.bootstrap_servers) as consumer:
            async with Producer(broker.bootstrap_servers) as producer:
                await producer.send("t", b"1")
            await consumer.seek_to_beginning()
            with pytest.raises(MissingExtraError):
                await consumer.to_pandas(timeout_ms=5000)
            assert (await consumer.get_one(timeout_ms=5000)).offset == 0, "no record was taken"
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.delitem(sys.modules, "kafkalite.client.consumer.arrow", raising=False)
        with pytest.raises(MissingExtraError, match=r"pyarrow.*not installed"):
            table.to_arrow()


def test_the_blocking_table() -> None:
    with sync.Broker() as broker, sync.Producer(broker.bootstrap_servers) as producer:
        producer.send_many("t", [b"1", b"2", b"3"], keys=[b"a", b"b", b"a"], partition=0)
        with sync.Table("t", bootstrap_servers=broker.bootstrap_servers) as table:
            assert table == {b"a": b"3", b"b": b"2"}
            assert table.record(b"a").offset == 2
            producer.send_many("t", [b"4", b"5"], keys=[b"b", b"c"], partition=0)
            for change in table.changes():
                if change.key == b"b":
                    break
            assert table == {b"a": b"3", b"b": b"4"}
            assert [change.key for change in table.refresh()] == [b"c"]
            assert table.keyless_count == 0
            assert repr(table) == "<sync Table 't', 3 rows>"


@pytest.mark.parametrize("make", [Table, sync.Table])
def test_a_table_that_was_not_opened_is_not_empty_but_an_error(make: Any) -> None:
    table = make("prices", bootstrap_servers="127.0.0.1:9")
    for access in (
        lambda: table[b"a"],
        lambda: table.get(b"a"),
        lambda: b"a" in table,
        lambda: len(table),
        lambda: dict(table),
        lambda: table.record(b"a"),
        lambda: table.to_arrow(),
    ):
        with pytest.raises(ClientClosedError, match=r"table of 'prices' was not opened.*with' or start"):
            access()
    assert "'prices'" in repr(table)


async def test_a_table_whose_start_failed_has_no_rows() -> None:
    table = Table("t", bootstrap_servers="127.0.0.1:9", socket_connection_setup_timeout_ms=200)
    with pytest.raises(ConnectionFailedError):
        await table.start()
    with pytest.raises(ClientClosedError):
        len(table)
