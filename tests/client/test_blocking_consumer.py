"""The blocking consumer in a group: records that were not returned to the caller are never committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kafkalite import OffsetAndMetadata, RebalanceListener, TopicPartition, sync
from kafkalite.errors import CommitFailedError

T0 = TopicPartition("t", 0)


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with sync.Broker() as broker, sync.Producer(broker.bootstrap_servers) as producer:
        with sync.Admin(broker.bootstrap_servers) as admin:
            admin.create_topic("t", 1)
        producer.send_many("t", [b"%d" % i for i in range(10)])
        yield broker.bootstrap_servers


def _consumer(servers: str, group: str, **settings: Any) -> sync.Consumer:
    return sync.Consumer(
        "t", group_id=group, bootstrap_servers=servers, auto_offset_reset="earliest", **settings
    )


def _committed(servers: str, group: str) -> int:
    with sync.Admin(servers) as admin:
        return admin.committed_offsets(group)[T0].offset


def test_leaving_a_loop_commits_its_records(servers: str) -> None:
    with _consumer(servers, "break") as consumer:
        for record in consumer:
            if record.offset == 3:
                break
        assert consumer.positions()[T0].offset == 4
    assert _committed(servers, "break") == 4


@pytest.mark.parametrize(("way", "expected"), [("iterate", 3), ("many", 2)])
def test_a_failure_does_not_commit_unprocessed_records(servers: str, way: str, expected: int) -> None:
    group = f"failure-{way}"
    with pytest.raises(ZeroDivisionError), _consumer(servers, group) as consumer:
        if way == "many":
            consumer.get_many(2)
            consumer.get_many(2)
            raise ZeroDivisionError
        for record in consumer:
            if record.offset == 3:
                raise ZeroDivisionError
    assert _committed(servers, group) == expected


@pytest.mark.parametrize("way", ["partition", "batches", "arrow"])
def test_a_failure_does_not_commit_records_that_pass_the_buffer(servers: str, way: str) -> None:
    group = f"failure-{way}"

    def read(consumer: sync.Consumer) -> None:
        if way == "partition":
            assert consumer.getmany(T0, timeout_ms=60_000)
        elif way == "batches":
            assert consumer.get_batches(timeout_ms=60_000)
        else:
            assert consumer.to_arrow(timeout_ms=60_000).num_rows

    with pytest.raises(ZeroDivisionError), _consumer(servers, group) as consumer:
        consumer.get_many(2)
        read(consumer)
        raise ZeroDivisionError
    assert _committed(servers, group) == 2
    with pytest.raises(ZeroDivisionError), _consumer(servers, group) as consumer:
        read(consumer)
        consumer.get_one(timeout_ms=0)
        raise ZeroDivisionError
    assert _committed(servers, group) == 10


def test_commits_by_hand(servers: str) -> None:
    with _consumer(servers, "hand", enable_auto_commit=False) as consumer:
        (first, _) = consumer.get_many(2)
        consumer.commit(first)
        assert _committed(servers, "hand") == 1
        consumer.commit_nowait()
        consumer.commit({})
        assert _committed(servers, "hand") == 2
        consumer.commit({T0: OffsetAndMetadata(5, metadata="words")})
        assert consumer.committed() == {T0: OffsetAndMetadata(5, metadata="words")}
        assert consumer.group_metadata().group_id == "hand"
        with pytest.raises(CommitFailedError, match="not assigned"):
            consumer.commit({TopicPartition("t", 9): 1})


@pytest.mark.parametrize("is_async", [False, True])
def test_a_listener_is_called_in_the_users_thread_and_may_commit(servers: str, is_async: bool) -> None:
    calls: list[tuple[str, Sequence[TopicPartition], int]] = []
    group = f"listener-{is_async}"

    class Listener(RebalanceListener):
        def on_assigned(self, partitions: Sequence[TopicPartition]) -> Any:
            consumer.seek(T0, 4)
            return self._note("assigned", partitions)

        def on_revoked(self, partitions: Sequence[TopicPartition]) -> Any:
            consumer.commit()
            return self._note("revoked", partitions)

        def _note(self, name: str, partitions: Sequence[TopicPartition]) -> Any:
            async def note() -> None:
                calls.append((name, partitions, threading.get_ident()))

            if is_async:
                return note()
            calls.append((name, partitions, threading.get_ident()))
            return None

    consumer = _consumer(servers, group, listener=Listener(), enable_auto_commit=False)
    with consumer:
        assert [record.offset for record in consumer.get_many(3)] == [4, 5, 6]
    assert [call[:2] for call in calls] == [("assigned", [T0]), ("revoked", [T0])]
    if not is_async:
        assert {call[2] for call in calls} == {threading.get_ident()}
    assert _committed(servers, group) == 7


def test_exceptions_of_a_listener_are_raised_in_the_users_thread(servers: str) -> None:
    class Broken(RebalanceListener):
        def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _consumer(servers, "broken", listener=Broken()).start()
