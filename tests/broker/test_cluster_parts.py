"""The parts that join a node to its cluster, one by one.

Covers ``raft_links.py``, ``controller_channel.py``, ``peers.py``, ``node.py`` and ``metadata_tree.py``
of the cluster room, and ``coordination/producer_ids.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.cluster import raft_links
from kafkalite.broker.cluster.controller_channel import readable
from kafkalite.broker.cluster.controller_listener import run_on
from kafkalite.broker.cluster.metadata_tree import describe
from kafkalite.broker.cluster.node import VotersFile
from kafkalite.broker.cluster.raft_links import RaftLink
from kafkalite.broker.cluster.start_counter import count_start
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.errors import (
    BrokerError,
    ConnectionFailedError,
    DataDirectoryError,
    ErrorCode,
    RequestTimedOutError,
)
from kafkalite.loop_thread import LoopThread
from kafkalite.metadata.image import BrokerState, ClusterImage, PartitionState, TopicImage
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages import admin
from kafkalite.protocol.messages.cluster import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatRequestV1,
    FeatureRange,
    FetchMetadataRequest,
)
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster, disconnect_next, fail_next


class FakeConnection:
    """Takes requests, and responds when the test says so."""

    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[list[bytes]] = []
        self.callbacks: list[Any] = []

    @property
    def in_flight(self) -> int:
        return len(self.callbacks)

    def request(self, message: Any, on_answer: Any, timeout_ms: int, parts: list[bytes]) -> None:
        assert message.lengths_bytes == [len(part) for part in parts]
        self.sent.append(list(parts))
        self.callbacks.append(on_answer)

    def response(self, error: Exception | None = None) -> None:
        self.callbacks.pop(0)(None, memoryview(b""), error)

    def close(self) -> None:
        self.is_open = False

    def supports(self, _request: object) -> bool:
        return True


class TestRaftLink:
    async def test_messages_of_one_turn_are_sent_together_and_in_order(self) -> None:
        connection = FakeConnection()
        link = RaftLink(connection, asyncio.get_running_loop())  # type: ignore[arg-type]
        messages = [b"%d" % n for n in range(300)]
        for message in messages:
            link.send(message)
        assert not connection.sent
        await asyncio.sleep(0)
        assert [len(parts) for parts in connection.sent] == [128, 128, 44]
        assert [part for parts in connection.sent for part in parts] == messages
        assert link.is_busy
        while connection.callbacks:
            connection.response()
        assert not link.is_busy

    async def test_a_peer_that_does_not_respond_is_sent_no_more_than_the_bounds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(raft_links, "MAX_REQUESTS_IN_FLIGHT", 2)
        monkeypatch.setattr(raft_links, "MAX_WAITING_BYTES", 10)
        connection = FakeConnection()
        link = RaftLink(connection, asyncio.get_running_loop())  # type: ignore[arg-type]
        for number in range(20):
            link.send(b"%04d" % number)
            await asyncio.sleep(0)
        assert len(connection.sent) == 2
        assert link.dropped_count == 16
        connection.response()
        assert [part for parts in connection.sent for part in parts] == [b"0000", b"0001", b"0002", b"0003"]

    async def test_a_refusal_closes_and_a_closed_link_drops(self) -> None:
        connection = FakeConnection()
        link = RaftLink(connection, asyncio.get_running_loop())  # type: ignore[arg-type]
        link.send(b"x")
        await asyncio.sleep(0)
        connection.response(BrokerError("not you"))
        assert not connection.is_open
        link.send(b"y")
        await asyncio.sleep(0)
        assert connection.sent == [[b"x"]]
        assert link.dropped_count == 1


@pytest.mark.parametrize("knows_it", [True, False])
def test_a_controller_of_an_earlier_version_gets_the_request_that_it_reads(knows_it: bool) -> None:
    """R90."""
    features = [FeatureRange("metadata.version", 1, 2)]
    request = BrokerHeartbeatRequestV1(1, 7, 40, False, [], features)
    connection = FakeConnection()
    connection.supports = lambda _request: knows_it  # type: ignore[method-assign]
    sent = readable(request, connection)  # type: ignore[arg-type]
    assert sent == (request if knows_it else BrokerHeartbeatRequest(1, 7, 40, False, []))
    unchanged = AllocateProducerIdsRequest(1, 7)
    assert readable(unchanged, connection) is unchanged  # type: ignore[arg-type]


async def test_producer_ids_come_from_blocks_allocated_once() -> None:
    blocks = iter([(0, 2), (10, 3)])
    asked = 0

    async def allocate() -> AllocateProducerIdsResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return AllocateProducerIdsResponse(0, None, *next(blocks))

    ids = ProducerIds(allocate)
    assert ids.take() is None
    assert sorted(await asyncio.gather(*(ids.next() for _ in range(5)))) == [0, 1, 10, 11, 12]
    assert asked == 2
    assert ids.take() is None


def test_a_directory_remembers_its_voters() -> None:
    disk = MemoryFileSystem()
    disk.make_dirs("/data")
    voters_file = VotersFile(disk, "/data", [3, 1, 2])
    assert not voters_file.is_known
    voters_file.remember()
    assert VotersFile(disk, "/data", [1, 2, 3]).is_known
    with pytest.raises(DataDirectoryError, match=r"has the voters 1,2,3, and controller\.quorum\.voters 1,2"):
        VotersFile(disk, "/data", [1, 2])


def test_r51_starts_are_counted_in_the_directory(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryFileSystem(crashable=True)
    disk.make_dirs("/data")
    disk.sync_dir("/")
    assert [count_start(disk, "/data").number for _ in range(3)] == [1, 2, 3]
    disk.crash(random.Random(1))
    assert count_start(disk, "/data")[:2] == (4, False)
    disk.write_atomically("/data/start-count", b"garbage")
    assert count_start(disk, "/data").number == 1
    assert "count of starts is unreadable" in caplog.text


@pytest.mark.parametrize("is_real", [False, True])
def test_r59_a_copied_directory_is_a_copy_until_it_is_accepted(
    is_real: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = RealFileSystem() if is_real else MemoryFileSystem()
    directory = str(tmp_path / "data") if is_real else "/data"
    disk.make_dirs(directory)
    assert not count_start(disk, directory).is_copy
    assert not count_start(disk, directory).is_copy
    if is_real:
        (tmp_path / "data" / "start-count").chmod(0o640)
        assert count_start(disk, directory)[:2] == (3, False), "another change of the directory"
        shutil.copytree(directory, tmp_path / "copy", copy_function=shutil.copy2)
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "copy", directory, copy_function=shutil.copy2)
    else:
        assert count_start(disk, directory)[:2] == (3, False)
        disk.write_atomically(f"{directory}/start-count", disk.read_bytes(f"{directory}/start-count"))
    assert count_start(disk, directory)[:2] == (4, True)
    assert "data directory was copied" in caplog.text
    start = count_start(disk, directory)
    assert start.is_copy, "the node has not caught up before"
    start.accept_copy()
    assert count_start(disk, directory)[:2] == (6, False)
    older = disk.read_bytes(f"{directory}/start-count"), disk.read_bytes(f"{directory}/start-file")
    count_start(disk, directory)
    for name, content in zip(("start-count", "start-file"), older, strict=True):
        disk.write_atomically(f"{directory}/{name}", content)
    assert count_start(disk, directory)[:2] == (7, True), "only what has changed was restored"


def test_the_metadata_as_a_tree() -> None:
    topic = TopicImage("ab" * 16, "t", (PartitionState((1,), (1,), 1, 0, 0),))
    broker = BrokerState(1, 5, ("a:1",), None, 0)
    image = ClusterImage(
        7, {"t": topic}, {topic.topic_id: topic}, {("topic", "t"): {"retention.ms": "1"}}, {1: broker}
    )

    def paths(path: str) -> list[str]:
        return [node.path for node in describe(image, path)]

    assert paths("") == paths("/") == ["/", "/brokers", "/configs", "/features", "/topics"]
    assert paths("/brokers/") == ["/brokers", "/brokers/1"]
    assert paths("topics/t") == ["/topics/t", "/topics/t/0"]
    assert paths("/configs") == ["/configs", "/configs/topic"]
    assert paths("/configs/topic") == ["/configs/topic", "/configs/topic/t"]
    assert json.loads(describe(image, "/configs/topic/t")[0].value) == {"retention.ms": "1"}
    assert json.loads(describe(image, "/topics/t/0")[0].value)["leader"] == 1
    assert json.loads(describe(image, "/features")[0].value)["metadata_offset"] == 7
    for missing in (
        "/x",
        "/topics/u",
        "/topics/t/1",
        "/topics/t/x",
        "/brokers/2",
        "/brokers/x",
        "/configs/y",
    ):
        assert describe(image, missing) == []


class TestChannel:
    @staticmethod
    def _create(name: str) -> admin.CreateTopicsRequest:
        return admin.CreateTopicsRequest(5_000, False, [admin.NewTopic(name, 1, 1, {})])

    async def test_a_refusal_by_a_former_controller_is_retried(self) -> None:
        async with Cluster(brokers=1, controllers=1) as cluster:
            channel = cluster.brokers[1]._services.channel
            refuse = fail_next(3, ErrorCode.NOT_CONTROLLER)
            cluster.intercept(ApiKey.ENVELOPE, refuse, node_id=101)
            answer = await channel.decide(self._create("t"), timeout_ms=5_000)
            assert answer.topics[0].error_code == 0
            cluster.intercept(ApiKey.ENVELOPE, fail_next(1_000, ErrorCode.NOT_CONTROLLER), node_id=101)
            with pytest.raises(RequestTimedOutError, match="no controller responded in 100 ms"):
                await channel.decide(self._create("u"), timeout_ms=100)

    @pytest.mark.parametrize("after", [False, True])
    async def test_a_command_whose_response_is_lost_is_not_sent_again(self, after: bool) -> None:
        async with Cluster(brokers=1, controllers=1) as cluster:
            broker = cluster.brokers[1]
            cluster.intercept(ApiKey.ENVELOPE, disconnect_next(after=after), node_id=101)
            with pytest.raises(RequestTimedOutError, match="the outcome is not known"):
                await broker._services.channel.decide(self._create("t"), timeout_ms=5_000)
            answer = await broker._services.channel.decide(self._create("t"), timeout_ms=5_000)
            assert answer.topics[0].error_code == (ErrorCode.TOPIC_ALREADY_EXISTS if after else 0)

    async def test_unknown_peers_are_named(self) -> None:
        async with Cluster(brokers=2) as cluster:
            peers = cluster.brokers[1]._services.peers
            assert peers is not None
            with pytest.raises(ConnectionFailedError, match="broker 9 has no registered address"):
                await peers.connection(9)
            await cluster.wait_until(lambda: 2 in cluster.brokers[1].image.brokers)
            one, other = await asyncio.gather(peers.connection(2), peers.connection(2))
            assert one is other
            one.close()
            assert await peers.connection(2) is not one

    async def test_a_node_that_does_not_vote_asks_the_next_voter(self) -> None:
        async with Cluster(brokers=1, controllers=3) as cluster:
            node = cluster.brokers[1]._cluster
            assert node is not None
            assert node._source is not None
            offset = cluster.brokers[1].image.metadata_offset
            for _ in range(3):
                node._source.close()
                answer, payload = await node._source.fetch(FetchMetadataRequest(0, -1, 0, 1 << 20))
                assert answer.committed_offset <= offset
                assert sum(entry.length_bytes for entry in answer.entries) == len(payload)


async def test_work_runs_on_the_loop_of_another_thread() -> None:
    async def work() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    async def divide() -> float:
        return 1 / 0

    here = asyncio.get_running_loop()
    assert await run_on(here, work) is here
    thread = LoopThread()
    assert await run_on(thread.loop, work) is thread.loop
    with pytest.raises(ZeroDivisionError):
        await run_on(thread.loop, divide)
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        await run_on(thread.loop, work)


async def work_that_never_begins() -> None:
    raise AssertionError("a coroutine was created, and nothing would await it")


async def test_no_coroutine_is_left_to_a_loop_that_never_comes_to_it() -> None:
    loop = asyncio.new_event_loop()
    waiting = asyncio.create_task(run_on(loop, work_that_never_begins))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    loop.close()


def test_no_coroutine_is_left_where_no_loop_runs() -> None:
    # A simulation closes the coroutines of the hosts that it drops, after its loop has ended.
    loop = asyncio.new_event_loop()
    stopping = run_on(loop, work_that_never_begins)
    with pytest.raises(RuntimeError, match="no running event loop"):
        stopping.send(None)
    loop.close()
