"""Three voters as their brokers see them: on one loop, or each on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kafkalite.errors import (
    CorruptLogError,
    DataDirectoryError,
    InvalidRequestError,
    LogOfflineError,
    NotControllerError,
    RequestTimedOutError,
    ShuttingDownError,
)
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import ConfigRecord
from kafkalite.protocol.messages.cluster import FetchMetadataResponse, MetadataEntry
from kafkalite.raft.adapter import RaftSettings
from kafkalite.raft.observer_quorum import ObserverQuorum
from kafkalite.raft.quorum import StaleImageError
from kafkalite.raft.raft_quorum import RaftQuorum
from kafkalite.raft.runner import InlineRunner, ThreadRunner
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import seeded_rng
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.disk_trees import disk_with_files, tree_of
from proof.waiting import eventually

FAST = RaftSettings(election_timeout_ms=200, fetch_timeout_ms=600, heartbeat_ms=40, commit_timeout_ms=5_000)


class Wire:
    def __init__(self, sender: int, receiver: RaftQuorum, runner) -> None:
        self.sender, self.receiver, self.runner, self.is_cut = sender, receiver, runner, False

    def send(self, message: bytes) -> None:
        self.runner.call(self.arrive, message)

    def arrive(self, message: bytes) -> None:
        if not self.is_cut:
            self.receiver.node.transport.receive(self.sender, message)


class Cluster:
    """Voters connected by wires in memory. Their disks outlive them."""

    def __init__(self, kit, *, count=3, settings=FAST, runner: Callable = InlineRunner) -> None:
        self.kit, self.settings, self.make_runner = kit, settings, runner
        self.ids = range(1, count + 1)
        self.disks = {i: MemoryFileSystem(crashable=True) for i in self.ids}
        self.quorums: dict[int, RaftQuorum] = {}
        self.machines = {}
        self.runners = {}
        self.wires: dict[tuple[int, int], Wire] = {}
        self.leaders: dict[int, list] = {i: [] for i in self.ids}

    async def start(self, i: int, **options) -> None:
        runner = self.runners[i] = self.make_runner()
        runner.start()
        quorum = RaftQuorum(
            self.disks[i],
            "meta",
            node_id=i,
            voters=list(self.ids),
            runner=runner,
            rng=seeded_rng(i),
            settings=self.settings,
            **options,
        )
        machine = self.machines[i] = self.kit.Machine()
        quorum.attach(machine)
        quorum.on_leader_change.append(lambda leader, term: self.leaders[i].append((leader, term)))
        await quorum.start()
        self.quorums[i] = quorum
        for j in self.quorums:
            if j != i:
                self.join(i, j)

    def join(self, a: int, b: int) -> None:
        for x, y in ((a, b), (b, a)):
            wire = self.wires[x, y] = Wire(x, self.quorums[y], self.runners[y])
            self.runners[x].call(self.quorums[x].node.transport.attach, y, wire)

    def part(self, a: int, b: int) -> None:
        for x, y in ((a, b), (b, a)):
            wire = self.wires.pop((x, y), None)
            if wire is not None:
                wire.is_cut = True
                self.runners[x].call(self.quorums[x].node.transport.detach, y, wire)

    async def stop(self, i: int) -> None:
        quorum = self.quorums.pop(i)
        await quorum.stop()
        for j in self.ids:
            for ends in ((i, j), (j, i)):
                wire = self.wires.pop(ends, None)
                if wire is not None and ends[0] != i:
                    wire.is_cut = True
                    self.runners[ends[0]].call(self.quorums[ends[0]].node.transport.detach, ends[1], wire)
        self.runners[i].stop()

    async def leader(self, among=None) -> RaftQuorum:
        async with asyncio.timeout(30):
            while True:
                for i in among or list(self.quorums):
                    if self.quorums[i].is_leader:
                        return self.quorums[i]
                await asyncio.sleep(0.002)

    async def all_at(self, offset: int) -> None:
        async with asyncio.timeout(30):
            await eventually(lambda: all(quorum.offset == offset for quorum in self.quorums.values()))

    async def __aenter__(self):
        for i in self.ids:
            await self.start(i)
        return self

    async def __aexit__(self, *_):
        for i in list(self.quorums):
            await self.stop(i)


@pytest.fixture(params=[InlineRunner, ThreadRunner], ids=["inline", "thread"])
def make(request, kit):
    return lambda **options: Cluster(kit, runner=request.param, **options)


async def test_a_commit_is_applied_everywhere_and_answered_behind_it(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        offset = 0
        for number in range(20):
            offset = await leader.commit(kit.topic(number), leader.offset)
            assert leader.offset == offset
            assert leader._machine.names[-1] == f"t{number}"
        await cluster.all_at(offset)
        assert [machine.names for machine in cluster.machines.values()] == [leader._machine.names] * 3
        assert all(machine.failure is None for machine in cluster.machines.values())


async def commit(cluster, kit, number):
    """Commit an entry with whichever node leads, and return its offset."""
    while True:
        leader = await cluster.leader()
        try:
            return await leader.commit(kit.topic(number), leader.offset)
        except (NotControllerError, RequestTimedOutError, StaleImageError):
            await asyncio.sleep(0.01)


def fill(disk):
    disk.capacity_bytes = disk.used_bytes()


async def test_r54_a_leader_without_room_pauses_and_another_one_leads(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(1), leader.offset))
        full = leader._node_id
        fill(cluster.disks[full])
        with pytest.raises((NotControllerError, RequestTimedOutError)):
            await leader.commit(kit.topic(2), leader.offset)
        others = [i for i in cluster.ids if i != full]
        await cluster.leader(others)
        await commit(cluster, kit, 3)
        cluster.disks[full].capacity_bytes = None
        await cluster.all_at(await commit(cluster, kit, 4))
        names = cluster.machines[others[0]].names
        assert [name for name in names if name != "t2"] == ["t1", "t3", "t4"]
        assert all(machine.names == names for machine in cluster.machines.values())
        assert all(machine.failure is None for machine in cluster.machines.values())


async def test_r54_voters_without_room_keep_their_log_and_commit_when_there_is_room(make, kit):
    """Each applies every entry once, although it reads its files again."""
    async with make(settings=replace(FAST, snapshot_min_bytes=400, retained_entries=2)) as cluster:
        for number in range(30):  # with snapshots
            await commit(cluster, kit, number)
        leader = await cluster.leader()
        await cluster.all_at(leader.offset)
        for disk in cluster.disks.values():
            fill(disk)
        with pytest.raises((NotControllerError, RequestTimedOutError)):
            await leader.commit(kit.topic(100), leader.offset)
        async with asyncio.timeout(30):
            await eventually(lambda: all(not quorum.is_leader for quorum in cluster.quorums.values()))
        for disk in cluster.disks.values():
            disk.capacity_bytes = None
        await cluster.all_at(await commit(cluster, kit, 30))
        names = [name for name in cluster.machines[1].names if name != "t100"]
        assert names == [f"t{number}" for number in range(31)]
        assert all(machine.names == cluster.machines[1].names for machine in cluster.machines.values())
        assert all(machine.failure is None for machine in cluster.machines.values())


async def test_machines_are_called_on_the_brokers_loop(kit):
    threads = set()

    class Listening(kit.Machine):
        def apply(self, offset, records):
            threads.add(threading.get_ident())
            super().apply(offset, records)

    kit_with = type("Kit", (kit,), {"Machine": Listening})
    async with Cluster(kit_with, runner=ThreadRunner) as cluster:
        leader = await cluster.leader()
        cluster.quorums[1].on_leader_change.append(lambda *_: threads.add(threading.get_ident()))
        await cluster.all_at(await leader.commit(kit.topic(1), leader.offset))
        await cluster.stop(leader._node_id)
        await cluster.leader()
    assert threads == {threading.get_ident()}


async def test_a_follower_refuses_and_names_the_leader(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        follower = next(quorum for quorum in cluster.quorums.values() if quorum is not leader)
        async with asyncio.timeout(30):
            await eventually(lambda: follower.leader_id is not None)
        with pytest.raises(NotControllerError, match=f"node {leader._node_id}"):
            await follower.commit(kit.topic(1), follower.offset)
        with pytest.raises(NotControllerError):
            await follower.read_index()


async def test_of_two_decisions_on_one_state_one_takes_effect(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        results = await asyncio.gather(
            *(leader.commit(kit.topic(number), 0) for number in range(3)), return_exceptions=True
        )
        offsets = [result for result in results if isinstance(result, int)]
        stale = [result for result in results if isinstance(result, StaleImageError)]
        assert (len(offsets), len(stale)) == (1, 2)
        assert all(error.offset == offsets[0] for error in stale)
        with pytest.raises(StaleImageError):
            await leader.commit(kit.topic(5), 0)
        assert leader._machine.names == ["t0"]


async def test_a_leader_that_stops_hands_over(kit):
    async with Cluster(kit, settings=RaftSettings(commit_timeout_ms=3_000)) as cluster:
        leader = await cluster.leader()
        offset = await leader.commit(kit.topic(1), leader.offset)
        await cluster.all_at(offset)
        begun = asyncio.get_running_loop().time()
        await cluster.stop(leader._node_id)
        successor = await cluster.leader()
        assert asyncio.get_running_loop().time() - begun < 0.4  # an election timeout is 0.5 s and more
        assert successor.status().term == 2
        assert await successor.commit(kit.topic(2), successor.offset) > offset


async def test_a_leader_that_is_killed_hands_nothing_over(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(1), leader.offset))
        doomed = asyncio.create_task(leader.commit(kit.topic(2), leader.offset))
        await kit.turn(1)
        leader.halt()
        begun = asyncio.get_running_loop().time()
        await cluster.stop(leader._node_id)
        with pytest.raises((ShuttingDownError, NotControllerError)):
            await doomed
        await cluster.leader()
        assert asyncio.get_running_loop().time() - begun > FAST.election_timeout_ms / 1000 / 2


async def test_a_leader_without_a_majority_steps_down_and_another_leads(make, kit):
    async with make() as cluster:
        first = await cluster.leader()
        a = first._node_id
        await first.commit(kit.topic(0), first.offset)
        others = [i for i in cluster.ids if i != a]
        for i in others:
            cluster.part(a, i)
        doomed = asyncio.create_task(first.commit(kit.topic(1), first.offset))
        second = await cluster.leader(others)
        await second.commit(kit.topic(2), second.offset)
        with pytest.raises((RequestTimedOutError, NotControllerError)):
            await doomed
        assert not first.is_leader
        for i in others:
            cluster.join(a, i)
        await cluster.all_at(second.offset)
        assert first._machine.names == ["t0", "t2"]
        assert [leader for leader, _ in cluster.leaders[a]][-1] == second._node_id


async def test_a_commit_without_a_majority_ends_with_an_unknown_outcome(kit):
    settings = RaftSettings(
        election_timeout_ms=200, fetch_timeout_ms=5_000, heartbeat_ms=40, commit_timeout_ms=100
    )
    async with Cluster(kit, settings=settings) as cluster:
        leader = await cluster.leader()
        for i in cluster.ids:
            if i != leader._node_id:
                cluster.part(leader._node_id, i)
        with pytest.raises(RequestTimedOutError, match="no majority"):
            await leader.commit(kit.topic(1), leader.offset)
        with pytest.raises(RequestTimedOutError):
            await leader.read_index()


async def test_a_read_sees_acknowledged_commits(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        assert await leader.read_index() == 0
        offset = await leader.commit(kit.topic(1), 0)
        assert await leader.read_index() == offset


async def test_restarts_keep_everything(make, kit):
    cluster = make()
    async with cluster:
        leader = await cluster.leader()
        for number in range(5):
            await leader.commit(kit.topic(number), leader.offset)
        await cluster.all_at(leader.offset)
        names = leader._machine.names
    async with cluster:
        leader = await cluster.leader()
        assert leader._machine.names == names
        await cluster.all_at(await leader.commit(kit.topic(9), leader.offset))
        assert [machine.names for machine in cluster.machines.values()] == [[*names, "t9"]] * 3


async def test_the_log_stays_bounded_and_a_late_follower_gets_the_snapshot(make, kit):
    settings = RaftSettings(
        election_timeout_ms=200,
        fetch_timeout_ms=600,
        heartbeat_ms=40,
        snapshot_min_bytes=2_000,
        retained_entries=10,
        chunk_bytes=500,
    )
    cluster = make(settings=settings)
    async with cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(0), 0))
        late = next(i for i in cluster.ids if i != leader._node_id)
        await cluster.stop(late)
        for number in range(1, 150):
            await leader.commit(kit.topic(number), leader.offset)
        disk = cluster.disks[leader._node_id]
        snapshot_bytes = disk.file_size("meta/raft.snapshot")
        assert disk.file_size("meta/raft.log") < 2 * snapshot_bytes + 6_000
        await cluster.start(late)
        await cluster.all_at(leader.offset)
        assert cluster.machines[late].loaded is not None
        assert cluster.machines[late].names == leader._machine.names
    async with cluster:
        leader = await cluster.leader()
        assert leader._machine.loaded is not None
        assert len(leader._machine.names) == 150


async def test_a_replaced_disk_takes_part_again(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(0), 0))
        lost = next(i for i in cluster.ids if i != leader._node_id)
        await cluster.stop(lost)
        cluster.disks[lost] = MemoryFileSystem(crashable=True)
        await cluster.start(lost)
        assert not cluster.quorums[lost].status().is_voter
        async with asyncio.timeout(30):
            await eventually(lambda: cluster.quorums[lost].status().is_voter)
            # The loop replays the entries after the Raft thread has them.
            await eventually(lambda: cluster.machines[lost].names)
        assert cluster.machines[lost].names == ["t0"]


async def test_other_voters_than_at_the_bootstrap_are_refused(kit):
    cluster = Cluster(kit)
    async with cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(0), 0))
    cluster.ids = range(1, 4 + 1)
    cluster.leaders[4] = []
    with pytest.raises(DataDirectoryError, match=r"nodes \[1, 2, 3\], and not \[1, 2, 3, 4\]"):
        await cluster.start(1)


async def test_a_known_voter_without_its_log_is_refused(kit):
    cluster = Cluster(kit)
    with pytest.raises(DataDirectoryError, match="--rejoin"):
        await cluster.start(1, allow_new=False)
    await cluster.start(1)
    await cluster.stop(1)
    await cluster.start(1, allow_new=False)
    await cluster.stop(1)
    cluster.disks[1].unlink("meta/raft.log")
    cluster.disks[1].write_atomically("meta/raft.snapshot", b"x")
    with pytest.raises(DataDirectoryError, match="--rejoin"):
        await cluster.start(1)


async def test_a_log_without_the_snapshot_before_it_is_refused(kit):
    cluster = Cluster(kit, count=1)
    async with cluster:
        leader = await cluster.leader()
        for number in range(10):
            await leader.commit(kit.topic(number), leader.offset)
        leader.node._settings = RaftSettings(retained_entries=0)
        leader.on_snapshot_wanted()
        async with asyncio.timeout(30):
            while not leader.node._snapshots.exists:
                await asyncio.sleep(0.002)
    tree = tree_of(cluster.disks[1])
    cluster.disks[1].unlink("meta/raft.snapshot")
    with pytest.raises(DataDirectoryError, match="no snapshot"):
        await cluster.start(1)
    cluster.disks[1] = disk_with_files({**tree, "/meta/raft.snapshot": b"rotten"})
    with pytest.raises(CorruptLogError):
        await cluster.start(1)


async def test_a_node_that_was_alone_becomes_one_of_three_and_keeps_its_metadata(make, kit):
    cluster = make()
    single = SingleQuorum(cluster.disks[1], "meta", executor=kit.InlineExecutor(), snapshot_min_bytes=500)
    single.attach(kit.Machine())
    await single.start()
    for number in range(20):
        await single.commit(kit.topic(number), single.offset)
    await single.stop()
    async with cluster:
        leader = await cluster.leader()
        offset = await leader.commit(kit.topic(20), leader.offset)
        assert offset > single.offset
        await cluster.all_at(offset)
        for machine in cluster.machines.values():
            assert machine.names == [f"t{number}" for number in range(21)]
        async with asyncio.timeout(30):
            await eventually(lambda: all(quorum.status().is_voter for quorum in cluster.quorums.values()))
    single = SingleQuorum(cluster.disks[1], "meta", executor=kit.InlineExecutor())
    single.attach(kit.Machine())
    with pytest.raises(DataDirectoryError, match="of a node of a cluster"):
        await single.start()


async def test_two_nodes_that_were_alone_do_not_become_one_cluster(kit):
    cluster = Cluster(kit)
    for node_id in (1, 2):
        single = SingleQuorum(cluster.disks[node_id], "meta", node_id=node_id, executor=kit.InlineExecutor())
        single.attach(kit.Machine())
        await single.start()
        await single.commit(kit.topic(node_id), 0)
        await single.stop()
    async with cluster:
        async with asyncio.timeout(30):
            await eventually(lambda: all(cluster.machines[i].failure for i in (1, 2)))
    for i in (1, 2):
        assert "was the only voter of its metadata" in str(cluster.machines[i].failure)


async def test_one_voter_is_a_quorum(make, kit):
    async with make(count=1) as cluster:
        leader = await cluster.leader()
        offset = 0
        for number in range(5):
            offset = await leader.commit(kit.topic(number), offset)
        assert await leader.read_index() == offset


async def test_a_disk_that_fails_ends_the_node_and_the_others_go_on(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        await leader.commit(kit.topic(0), leader.offset)
        broken = leader._node_id
        cluster.disks[broken].fail_next_sync()
        with pytest.raises((LogOfflineError, RequestTimedOutError)):
            await leader.commit(kit.topic(1), leader.offset)
        async with asyncio.timeout(30):
            await eventually(lambda: cluster.machines[broken].failure is not None)
        assert isinstance(cluster.machines[broken].failure, LogOfflineError)
        assert leader.leader_id is None
        for call in (leader.commit(kit.topic(2), 0), leader.read_index(), leader.wait_beyond(0, 10)):
            with pytest.raises(LogOfflineError):
                await call
        successor = await cluster.leader([i for i in cluster.ids if i != broken])
        await successor.commit(kit.topic(3), successor.offset)


async def test_an_entry_that_cannot_be_replayed_ends_the_quorum(make, kit):
    async with make() as cluster:
        leader = await cluster.leader()
        machine = leader._machine
        machine.raising = AssertionError("broken invariant")
        with pytest.raises(LogOfflineError, match="broken invariant"):
            await leader.commit(kit.topic(1), leader.offset)
        assert machine.failure is machine.raising
        successor = await cluster.leader([i for i in cluster.ids if i != leader._node_id])
        assert successor._machine.names == ["t1"]


async def test_stopping_fails_waiting_commits(kit):
    async with Cluster(kit) as cluster:
        leader = await cluster.leader()
        waiting = asyncio.create_task(leader.wait_beyond(leader.offset, 60_000))
        await kit.turn()
        await cluster.stop(leader._node_id)
        with pytest.raises(ShuttingDownError):
            await waiting
        with pytest.raises(ShuttingDownError):
            await leader.commit(kit.topic(1), 0)
        with pytest.raises(ShuttingDownError):
            leader.entries_after(0, 10)


async def test_a_change_that_is_too_large_is_refused(kit):
    async with Cluster(kit, count=1) as cluster:
        leader = await cluster.leader()
        with pytest.raises(InvalidRequestError, match="exceeds 4194304 bytes"):
            await leader.commit([ConfigRecord("topic", "t", "k", "x" * 5_000_000)], 0)
        assert await leader.commit([ConfigRecord("topic", "t", "k", "x" * 4_000_000)], 0) > 0


async def test_entries_for_observers(kit):
    settings = RaftSettings(election_timeout_ms=200, heartbeat_ms=40, recent_bytes=400)
    async with Cluster(kit, count=1, settings=settings) as cluster:
        leader = await cluster.leader()
        assert leader.entries_after(0, 1_000) == (False, [], 0, 1)
        waiting = asyncio.create_task(leader.wait_beyond(0, 5_000))
        offsets = [await leader.commit(kit.topic(0), 0)]
        assert await waiting
        assert not await leader.wait_beyond(offsets[0], 10)
        for number in range(1, 10):
            offsets.append(await leader.commit(kit.topic(number), offsets[-1]))
        chunk = leader.entries_after(offsets[7], 10_000)
        assert [offset for offset, _ in chunk.entries] == offsets[8:]
        assert record_codec.from_bytes(chunk.entries[0][1]) == kit.topic(8)
        assert len(leader.entries_after(offsets[7], 1).entries) == 1
        state = leader.entries_after(offsets[0], 1)
        assert (state.is_snapshot, state.entries[0][0], state.committed_offset) == (
            True,
            offsets[-1],
            offsets[-1],
        )
        assert len(record_codec.from_bytes(state.entries[0][1])) == 20


async def test_the_status_shows_leader_and_voters(kit):
    async with Cluster(kit) as cluster:
        leader = await cluster.leader()
        await cluster.all_at(await leader.commit(kit.topic(0), 0))
        async with asyncio.timeout(30):
            while {node.match_offset for node in leader.status().nodes} != {3}:
                await asyncio.sleep(0.002)
        status = leader.status()
        assert (status.node_id, status.leader_id, status.term) == (leader._node_id,) * 2 + (1,)
        assert (status.commit_offset, status.applied_offset, status.log_end_offset) == (3, 3, 4)
        assert (status.snapshot_offset, status.is_voter) == (0, True)
        assert [(node.node_id, node.match_offset) for node in status.nodes] == [(i, 3) for i in cluster.ids]
        assert all(0 <= node.last_contact_ms < 1_000 for node in status.nodes)
        follower = next(quorum for quorum in cluster.quorums.values() if quorum is not leader).status()
        others = [node for node in follower.nodes if node.node_id != follower.node_id]
        assert [(node.match_offset, node.last_contact_ms) for node in others] == [(-1, -1)] * 2


# --- a node without a vote ------------------------------------------------------------------------------


def source(quorum):
    """Return a FetchMetadata function that a voter serves."""

    async def fetch(request):
        await quorum.wait_beyond(request.after_offset, request.max_wait_ms)
        chunk = quorum.entries_after(request.after_offset, request.max_bytes)
        entries = [MetadataEntry(offset, len(data)) for offset, data in chunk.entries]
        leader_id = -1 if chunk.leader_id is None else chunk.leader_id
        answer = FetchMetadataResponse(0, None, leader_id, chunk.committed_offset, chunk.is_snapshot, entries)
        return answer, memoryview(b"".join(data for _, data in chunk.entries))

    return fetch


@contextlib.asynccontextmanager
async def observing(fetch, machine):
    observer = ObserverQuorum(fetch, node_id=9)
    observer.attach(machine)
    await observer.start()
    try:
        yield observer
    finally:
        await observer.stop()


async def test_an_observer_applies_committed_entries(kit):
    settings = RaftSettings(election_timeout_ms=200, heartbeat_ms=40, recent_bytes=300)
    async with Cluster(kit, count=1, settings=settings) as cluster:
        leader = await cluster.leader()
        for number in range(8):
            await leader.commit(kit.topic(number), leader.offset)
        machine = kit.Machine()
        async with observing(source(leader), machine) as observer:
            changes = []
            observer.on_leader_change.append(lambda *change: changes.append(change))
            await eventually(lambda: observer.offset == leader.offset)
            assert machine.loaded is not None
            await leader.commit(kit.topic(8), leader.offset)
            await eventually(lambda: observer.offset == leader.offset)
            assert machine.names == leader._machine.names
            assert (observer.leader_id, observer.is_leader, changes) == (1, False, [(1, 0)])
            with pytest.raises(NotControllerError):
                await observer.commit(kit.topic(9), observer.offset)
