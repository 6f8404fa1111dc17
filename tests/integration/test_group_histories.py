"""Random lives of members on a real broker: never two owners, nothing missed, nothing lost (R38, R39)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

from kafkalite import Broker, Consumer, Producer, RebalanceListener, TopicPartition
from kafkalite.errors import KafkaliteError
from kafkalite.rng import seeded_rng
from proof.waiting import eventually

PARTITIONS = 6
EVENTS = 30


class Owners:
    """Who holds what, by the members' own words; a member that was paused may be expelled unknowingly."""

    def __init__(self) -> None:
        self.holders: dict[TopicPartition, set[str]] = {}
        self.paused: set[str] = set()

    def take(self, name: str, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            holders = self.holders.setdefault(tp, set())
            assert holders <= self.paused, f"{tp} goes to {name} while {holders} hold it"
            holders.add(name)

    def release(self, name: str, partitions: Sequence[TopicPartition]) -> None:
        for tp in partitions:
            self.holders[tp].discard(name)

    def vanish(self, name: str) -> None:
        for holders in self.holders.values():
            holders.discard(name)


class Member(RebalanceListener):
    """One consumer that processes, commits now and then, and may be paused or killed."""

    def __init__(self, name: str, world: World, seed: int) -> None:
        self.name = name
        self.world = world
        self.consumer = Consumer(
            "t",
            group_id="g",
            bootstrap_servers=world.servers,
            auto_offset_reset="earliest",
            enable_auto_commit=seed % 2 == 0,
            auto_commit_interval_ms=10,
            max_poll_records=5,
            fetch_max_wait_ms=20,
            retry_backoff_ms=1,
            listener=self,
            rng=seeded_rng(seed),
        )
        self.task: asyncio.Task[None] | None = None

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.world.owners.take(self.name, partitions)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        with contextlib.suppress(KafkaliteError):
            await self.consumer.commit()
        self.world.owners.release(self.name, partitions)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.world.owners.release(self.name, partitions)

    async def live(self) -> None:
        while True:
            for record in await self.consumer.get_many(timeout_ms=20):
                self.world.processed.add((record.partition, record.offset))
            await asyncio.sleep(0)
            if self.world.chance.random() < 0.3:
                with contextlib.suppress(KafkaliteError):
                    await self.consumer.commit()

    async def start(self) -> None:
        await self.consumer.start()
        self.task = asyncio.ensure_future(self.live())

    async def end(self) -> None:
        """Stop the loop. Raises what it failed with."""
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def close(self) -> None:
        await self.end()
        await self.consumer.close()

    async def kill(self) -> None:
        """Stop without leaving the group; the group notices when the session ends."""
        self.world.owners.paused.add(self.name)
        await self.end()
        group = self.consumer._group
        assert group is not None and group._heartbeats._task is not None
        group._heartbeats._task.cancel()
        group._is_closing = True
        for timer in (group._watch_timer, group._commit_timer):
            if timer is not None:
                timer.cancel()
        self.consumer._life = "closed"
        self.consumer._fetcher.close()
        await self.consumer._cluster.close()

    async def pause(self, seconds: float) -> None:
        """Send nothing for ``seconds``, then continue."""
        group = self.consumer._group
        assert group is not None and group._heartbeats._task is not None
        self.world.owners.paused.add(self.name)
        await self.end()
        group._heartbeats._task.cancel()
        await asyncio.wait({group._heartbeats._task})
        await asyncio.sleep(seconds)
        group._heartbeats._task = None
        group.start()
        # An expelled member finds out with the first response; until then it only seems to own partitions.
        async with asyncio.timeout(30):
            epoch = group.membership.epoch
            await group._heartbeats.wait_for_new_epoch(epoch, self.consumer._cluster.now_ms() + 100)
        self.task = asyncio.ensure_future(self.live())
        await asyncio.sleep(0.02)
        self.world.owners.paused.discard(self.name)


class World:
    """A broker, a producer, and the members."""

    def __init__(self, servers: str, seed: int) -> None:
        self.servers = servers
        self.chance = random.Random(seed)
        self.owners = Owners()
        self.processed: set[tuple[int, int]] = set()
        self.members: list[Member] = []
        self.count = 0

    async def event(self) -> None:
        chance, members = self.chance, self.members
        what = chance.choice(["join", "join", "leave", "kill", "pause", "wait", "wait"])
        if (what == "join" and len(members) < 8) or not members:
            self.count += 1
            members.append(Member(f"m{self.count}", self, self.count))
            await members[-1].start()
        elif what == "leave":
            await members.pop(chance.randrange(len(members))).close()
        elif what == "kill":
            await members.pop(chance.randrange(len(members))).kill()
        elif what == "pause":
            await chance.choice(members).pause(chance.choice([0.01, 0.15]))
        else:
            await asyncio.sleep(chance.random() * 0.05)
        for member in members:
            assert member.task is not None
            if member.task.done():
                member.task.result()


@pytest.mark.parametrize("seed", range(2))
async def test_random_lives(seed: int) -> None:
    async with Broker(
        group_consumer_session_timeout_ms=100, group_consumer_heartbeat_interval_ms=25
    ) as broker:
        servers = broker.bootstrap_servers
        world = World(servers, seed)
        async with Producer(servers, linger_ms=0) as producer:
            from kafkalite import Admin

            async with Admin(servers) as admin:
                await admin.create_topic("t", PARTITIONS)
            sent = set()
            for _ in range(EVENTS):
                partition = world.chance.randrange(PARTITIONS)
                for metadata in await producer.send_many("t", [b"x"] * 7, partition=partition):
                    first = metadata.base_offset
                    sent |= {(partition, first + i) for i in range(metadata.record_count)}
                await world.event()
            if not world.members:
                await world.event()
            async with asyncio.timeout(30):
                await eventually(lambda: sent <= world.processed)
            for member in world.members:
                await member.close()
