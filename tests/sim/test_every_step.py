"""At least once, at most once, exactly once: the client dies, or is paused, at every single step.

A step is every write to the network and every effect of the program. Each run is a whole simulation in
virtual time: a broker that is its own coordinator, the job, and its successor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from kafkalite import (
    Admin,
    Consumer,
    Producer,
    Record,
    TopicPartition,
    TransactionGroup,
    TransactionGroupWriter,
    retrying,
)
from kafkalite.errors import CommitFailedError, KafkaliteError, ProducerFencedError, UnknownMemberIdError
from kafkalite.testing.sim import Simulation
from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.steps import Steps, at_every_step
from proof.histories.transaction_history import TransformHistory, check_transform
from proof.sim.nodes import SimNode, make_nodes
from proof.sim.workload import CLIENT_SETTINGS

pytestmark = pytest.mark.slow

T = TypeVar("T")

PARTITIONS = 2
RECORDS = 3  # in each partition
LINES = [b"%d" % number for number in range(6)]
IN = [TopicPartition("in", number) for number in range(PARTITIONS)]
GOOD = {(tp.partition, offset) for tp in IN for offset in range(RECORDS) if offset != 1}
DEAD = "in.g.dead"
EVERYTHING = {(tp.partition, offset) for tp in IN for offset in range(RECORDS)}
SESSION_MS = 600
BROKER = {
    "group_consumer_session_timeout_ms": SESSION_MS,
    "group_consumer_heartbeat_interval_ms": 200,
    "offsets_topic_num_partitions": 1,
    "transaction_state_log_num_partitions": 1,
    "transaction_abort_timed_out_transaction_cleanup_interval_ms": 200,
}
OF_SEVERAL = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "broker_session_timeout_ms": 800,
    "broker_heartbeat_interval_ms": 150,
    "controller_quorum_election_timeout_ms": 150,
    "controller_quorum_fetch_timeout_ms": 600,
    "replica_fetch_backoff_ms": 20,
}
GROUP: dict[str, Any] = {
    **CLIENT_SETTINGS,
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "max_poll_records": 2,
    "fetch_max_wait_ms": 100,
}


@dataclass
class World:
    """One simulation, and what its programs did in it."""

    simulation: Simulation
    steps: Steps
    address: str = ""
    nodes: list[SimNode] = field(default_factory=list)
    processed: list[tuple[int, int]] = field(default_factory=list)  #: (partition, offset), in order
    refusals: list[KafkaliteError] = field(default_factory=list)  #: the errors that ended programs
    #: what a read_committed reader received of ``out`` meanwhile, by partition, in each of its runs
    followed: list[dict[int, list[bytes]]] = field(default_factory=list)

    async def start(self, brokers: int = 1) -> list[SimNode]:
        nodes = make_nodes(self.simulation, brokers, BROKER if brokers == 1 else BROKER | OF_SEVERAL)
        self.nodes = nodes
        for node in nodes:
            node.start()
        while not all(node.is_running for node in nodes):
            await asyncio.sleep(0.01)
        self.address = ",".join(node.address for node in nodes)
        await self.on("admin", self._fill())
        return nodes

    async def _fill(self) -> None:
        async with Admin(self.address, rng=self.simulation.rng("admin")) as admin:
            for topic in ("in", "out"):
                await admin.create_topic(topic, PARTITIONS)
            await admin.create_topic("lines", 1)
        async with self.producer() as producer:
            for tp in IN:
                values = [b"%d" % number for number in range(RECORDS)]
                await producer.send_many("in", values, partition=tp.partition)

    def producer(self, **settings: Any) -> Producer:
        name = f"producer {self.simulation.now_ms}"
        clock = self.simulation.host("admin").clock
        return Producer(
            self.address, clock=clock, rng=self.simulation.rng(name), **CLIENT_SETTINGS, **settings
        )

    def consumer(self, *topics: str, **settings: Any) -> Consumer:
        name = f"consumer {self.simulation.now_ms}"
        rng = self.simulation.rng(name)
        return Consumer(*topics, bootstrap_servers=self.address, rng=rng, **{**GROUP, **settings})

    def follow(self) -> None:
        """Start a program that reads ``out``."""
        self.simulation.host("follower").run(self._follow())

    async def _follow(self) -> None:
        while True:
            given: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
            self.followed.append(given)
            with suppress(KafkaliteError):
                async with self.consumer(isolation_level="read_committed", group_id=None) as reader:
                    reader.assign([TopicPartition("out", number) for number in range(PARTITIONS)])
                    while True:
                        for record in await reader.get_many():
                            given[record.partition].append(record.value or b"")
            await asyncio.sleep(0.05)

    async def read(self, topic: str, isolation: str = "read_committed") -> dict[int, list[bytes]]:
        """Return all records of ``topic``, by partition."""
        return await self.on("reader", self._read(topic, isolation))

    async def on(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        """Run ``call`` as a program of its own, and return its result."""
        host = self.simulation.host(name)
        host.kill()
        task = host.run(call)
        await asyncio.wait({task})
        result: T = task.result()
        return result

    async def _read(self, topic: str, isolation: str) -> dict[int, list[bytes]]:
        keys = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        found: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        async with self.consumer(isolation_level=isolation, group_id=None) as reader:
            reader.assign(keys)
            ends = await reader.end_offsets(keys)
            while any((reader.position(key) or 0) < ends[key] for key in keys):
                for record in await reader.get_many(100, timeout_ms=500):
                    found[record.partition].append(record.value or b"")
        return found


Program = Callable[[World, str], Awaitable[None]]
"""Works until nothing is left to do. Its name is that of its host."""


async def _run(
    world: World, program: Program, name: str, strike: Callable[[Host], None] | None = None
) -> None:
    """Run a program until it ends normally; restart it after every death and every error.

    ``strike`` may hit its first process.
    """
    host = world.simulation.host(name)
    while True:
        process = host.new_process()
        task = world.simulation.loop.spawn(process, program(world, name))  # type: ignore[arg-type]
        if strike is not None:
            world.steps.watch(host, partial(strike, host))
            strike = None
        while not task.done() and not process.is_dead:
            await asyncio.sleep(0.02)
        if not process.is_dead:
            error = task.exception()
            host.kill()
            if error is None:
                return
            assert isinstance(error, KafkaliteError), repr(error)
            world.refusals.append(error)
        assert world.simulation.now_ms < 60_000, "it never ends"


def _killed(program: Program, check: Callable[[World], Awaitable[None]]) -> Callable[[Steps], None]:
    """Return a life that is struck by SIGKILL, restarted, and checked."""

    def life(steps: Steps) -> None:
        with Simulation(1) as simulation:
            world = World(simulation, steps)

            async def story() -> None:
                await world.start()
                if program not in CONSUMERS:
                    world.follow()
                await _run(world, program, "job", Host.kill)
                await check(world)

            simulation.run(story())
            assert not simulation.violations

    return life


def _paused(
    program: Program, check: Callable[[World], Awaitable[None]], *, wakes_early: bool = False
) -> Callable[[Steps], None]:
    """Return a life that is struck by SIGSTOP. Another one does all the work; then the first one is
    resumed.

    ``wakes_early``: while the other one is working; they share the rest.
    """

    def life(steps: Steps) -> None:
        with Simulation(1) as simulation:
            world = World(simulation, steps)
            link = simulation.network.link("job", "b1")
            stopped = asyncio.Event()

            def strike(host: Host) -> None:
                host.pause()
                link.cut()  # its pending write leaves when it is resumed
                stopped.set()

            async def story() -> None:
                await world.start()
                if program not in CONSUMERS:
                    world.follow()
                first = asyncio.ensure_future(_run(world, program, "job", strike))
                waiting = asyncio.ensure_future(stopped.wait())
                await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if stopped.is_set():
                    heir = asyncio.ensure_future(_run(world, program, "heir"))
                    await asyncio.wait({heir}, timeout=SESSION_MS * 1.05 / 1000 if wakes_early else None)
                    link.heal()
                    simulation.host("job").resume()
                    await heir
                await first
                await check(world)

            simulation.run(story())
            assert not simulation.violations

    return life


async def _raise_again(fallen: asyncio.Future[SimNode], down_s: float) -> None:
    node = await fallen
    await asyncio.sleep(down_s)
    node.start()
    while not node.is_running:
        await asyncio.sleep(0.01)


def _broken(
    program: Program, check: Callable[[World], Awaitable[None]], hit: Callable[[SimNode], None]
) -> Callable[[Steps], None]:
    """Return a life whose broker, which leads and coordinates everything, is ``hit`` at one of its own
    steps.
    """

    def life(steps: Steps) -> None:
        with Simulation(1) as simulation:
            world = World(simulation, steps)
            fallen: asyncio.Future[SimNode] = simulation.loop.create_future()

            def strike(node: SimNode) -> None:
                hit(node)
                fallen.set_result(node)

            async def story() -> None:
                (node,) = await world.start()
                node.host.disk.sync_s = 0.005  # long enough to die before written data is synced
                if program not in CONSUMERS:
                    world.follow()
                raising = asyncio.ensure_future(_raise_again(fallen, 0.05))
                steps.watch(node.host, partial(strike, node))
                await _run(world, program, "job")
                simulation.network.before_write = lambda process: None  # the end of the steps
                if fallen.done():
                    await raising
                raising.cancel()
                await check(world)

            simulation.run(story())
            assert not simulation.violations

    return life


def _led_by_the_fallen(
    program: Program, check: Callable[[World], Awaitable[None]], topic: str
) -> Callable[[Steps], None]:
    """Return a life among three brokers: the leader of ``topic`` is killed at one of the program's steps."""

    def life(steps: Steps) -> None:
        with Simulation(1) as simulation:
            world = World(simulation, steps)
            fallen: asyncio.Future[SimNode] = simulation.loop.create_future()

            async def story() -> None:
                nodes = await world.start(brokers=3)

                def strike(_: Host) -> None:
                    node = next((each for each in nodes if _leads(each, topic)), nodes[0])
                    node.kill()
                    fallen.set_result(node)

                world.follow()
                raising = asyncio.ensure_future(_raise_again(fallen, 1.5))
                await _run(world, program, "job", strike)
                if fallen.done():
                    await raising
                raising.cancel()
                await check(world)

            simulation.run(story())
            assert not simulation.violations

    return life


def _leads(node: SimNode, topic: str) -> bool:
    broker = node.live
    return broker is not None and any(
        hosted.is_leader and hosted.key.topic == topic for hosted in broker.partitions
    )


# --- the programs


async def _more(consumer: Consumer) -> list[Record]:
    """Return the next records; none if the group has committed everything."""
    while True:
        if records := await consumer.get_many(timeout_ms=SESSION_MS // 2):
            return records
        committed = await consumer.committed(IN)
        if all(at is not None and at.offset == RECORDS for at in committed.values()):
            return []


async def _process(world: World, record: Record) -> None:
    await world.steps("process")
    world.processed.append((record.partition, record.offset))
    await world.steps("processed")


async def by_hand(world: World, name: str) -> None:
    """Process, then commit."""
    async with world.consumer("in", enable_auto_commit=False) as consumer:
        while records := await _more(consumer):
            for record in records:
                await _process(world, record)
            await consumer.commit()


async def record_by_record(world: World, name: str) -> None:
    async with world.consumer("in", enable_auto_commit=False) as consumer:
        while records := await _more(consumer):
            for record in records:
                await _process(world, record)
                await consumer.commit(record)


async def by_itself(world: World, name: str) -> None:
    """Auto-commit: records are committed after the next poll. Each takes longer than the interval."""
    async with world.consumer("in", auto_commit_interval_ms=10) as consumer:
        while records := await _more(consumer):
            for record in records:
                await asyncio.sleep(0.05)
                await _process(world, record)


async def static_member(world: World, name: str) -> None:
    """A static member: its successor has the partitions at once."""
    settings = {"enable_auto_commit": False, "group_instance_id": name}
    async with world.consumer("in", **settings) as consumer:
        while records := await _more(consumer):
            for record in records:
                await _process(world, record)
            await consumer.commit()


async def committed_first(world: World, name: str) -> None:
    async with world.consumer("in", processing_guarantee="at_most_once") as consumer:
        while records := await _more(consumer):
            for record in records:
                await _process(world, record)


async def committed_first_by_hand(world: World, name: str) -> None:
    async with world.consumer("in", enable_auto_commit=False) as consumer:
        while records := await _more(consumer):
            await consumer.commit()
            for record in records:
                await _process(world, record)


async def transform(world: World, name: str) -> None:
    """Consume, produce, and commit the offsets, in one transaction; all instances have the same id."""
    await _transform(world, "job")


async def transform_under_its_own_id(world: World, name: str) -> None:
    """The same with an id for each instance: only the group's coordinator can fence."""
    await _transform(world, name)


async def _transform(world: World, transactional_id: str) -> None:
    settings = {"enable_auto_commit": False, "isolation_level": "read_committed"}
    async with (
        world.producer(
            transactional_id=transactional_id, linger_ms=0, transaction_timeout_ms=3_000
        ) as producer,
        world.consumer("in", **settings) as consumer,
    ):
        while records := await _more(consumer):
            async with producer.transaction() as transaction:
                for record in records:
                    await world.steps("produce")
                    value = b"%d/%d" % (record.partition, record.offset)
                    producer.send_nowait("out", value, partition=record.partition)
                await world.steps("send offsets")
                await transaction.send_offsets(consumer)
                await world.steps("commit")
            await world.steps("committed")


async def copy_lines(world: World, name: str) -> None:
    """Copy a file to records, two lines in a transaction; the progress is committed with them, as a
    group's offset.
    """
    place = TopicPartition("lines", 0)
    async with (
        world.producer(transactional_id="lines", linger_ms=0) as producer,
        world.consumer(group_id="file", isolation_level="read_committed") as offsets,
    ):
        at = (await offsets.committed([place]))[place]
        done = 0 if at is None else at.offset
        while done < len(LINES):
            async with producer.transaction() as transaction:
                for number in (done, done + 1):
                    await world.steps("produce")
                    producer.send_nowait("out", LINES[number], partition=number % PARTITIONS)
                done += 2
                await transaction.send_offsets({place: done}, "file")
                await world.steps("commit")


async def write_batches(world: World, name: str) -> None:
    """A driver and its tasks: each batch is written by two tasks, and decided once."""
    settings: dict[str, Any] = CLIENT_SETTINGS
    attempt = world.simulation.now_ms
    async with TransactionGroup(
        "app", world.address, rng=world.simulation.rng(f"driver {attempt}"), **settings
    ) as group:
        for batch in range(await group.last_batch_id() + 1, 3):
            prepared = []
            for task in range(2):
                async with TransactionGroupWriter(
                    "app",
                    batch,
                    f"task-{task}-{attempt}",
                    world.address,
                    clock=world.simulation.host("admin").clock,
                    rng=world.simulation.rng(f"writer {world.simulation.now_ms}"),
                    linger_ms=0,
                    transaction_timeout_ms=3_000,
                    **settings,
                ) as writer:
                    if not writer.is_finished:
                        await world.steps("write")
                        writer.send_nowait("out", LINES[2 * batch + task], partition=task)
                    prepared.append(await writer.prepare())
            await world.steps("finish")
            await group.finish(batch, prepared)


def _count(world: World, topic: str) -> int:
    """Return the number of records of ``topic``."""
    live = world.nodes[0].live
    hosted = [] if live is None else [each for each in live.partitions if each.key.topic == topic]
    return sum(each.log_end_offset for each in hosted)


async def retried(world: World, name: str, *, delay_topics: bool) -> None:
    """``retrying.run``: record 0 of each partition fails once in each life, record 1 always."""
    failed: set[int] = set()

    async def handle(record: Record) -> None:
        await world.steps("process")
        if record.offset == 1 or (record.offset == 0 and record.partition not in failed):
            failed.add(record.partition)
            raise ValueError(f"no {record.offset}")
        world.processed.append((record.partition, record.offset))
        await world.steps("processed")

    running = asyncio.ensure_future(
        retrying.run(
            handle,
            "in",
            bootstrap_servers=world.address,
            policy=retrying.Policy(attempts=3, first_delay_ms=20, delay_topics=delay_topics),
            clock=world.simulation.host(name).clock,
            rng=world.simulation.rng(f"retrying {world.simulation.now_ms}"),
            auto_commit_interval_ms=10,
            **GROUP,
        )
    )
    try:
        while set(world.processed) != GOOD or _count(world, DEAD) < PARTITIONS:
            if running.done():
                running.result()
            assert world.simulation.now_ms < 20_000, "a record is lost"
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.wait({running})


in_place = partial(retried, delay_topics=False)
through_delay_topics = partial(retried, delay_topics=True)

CONSUMERS = (
    by_hand,
    record_by_record,
    by_itself,
    static_member,
    committed_first,
    committed_first_by_hand,
    in_place,
    through_delay_topics,
)


# --- promises


async def _all_processed(world: World) -> None:
    assert set(world.processed) == EVERYTHING
    for partition in range(PARTITIONS):
        firsts = list(dict.fromkeys(offset for number, offset in world.processed if number == partition))
        assert firsts == sorted(firsts), "first processed in the log's order"


async def _none_twice(world: World) -> None:
    assert set(Counter(world.processed).values()) <= {1}
    assert set(world.processed) <= EVERYTHING


async def _transformed_once(world: World) -> None:
    history = TransformHistory({(tp.topic, tp.partition): list(range(RECORDS)) for tp in IN})
    for partition, values in (await world.read("out")).items():
        history.outputs[partition] = [
            ("in", *map(int, value.decode().split("/")))
            for value in values  # type: ignore[misc]
        ]
    assert not check_transform(history)


async def _lines_once(world: World) -> None:
    found = await world.read("out")
    assert found == {number: LINES[number::PARTITIONS] for number in range(PARTITIONS)}


class Tally:
    """Adds up the results of a sweep: a sweep without any fault proves nothing."""

    def __init__(self, check: Callable[[World], Awaitable[None]]) -> None:
        self._check = check
        self.lost = self.again = self.aborted = 0
        self.refused: Counter[str] = Counter()

    async def __call__(self, world: World) -> None:
        await self._check(world)
        self.lost += len(EVERYTHING - set(world.processed))
        self.again += sum(Counter(world.processed).values()) - len(set(world.processed))
        self.refused.update(type(error).__name__ for error in world.refusals)
        if world.followed:
            stands = await world.read("out")
            for life in world.followed:
                for number, values in life.items():
                    assert values == stands[number][: len(values)], "nothing that was read is taken back"
            written = await world.read("out", "read_uncommitted")
            self.aborted += sum(map(len, written.values())) - len(EVERYTHING)


@pytest.mark.parametrize("program", [by_hand, record_by_record, by_itself, static_member])
def test_at_least_once(program: Program) -> None:
    """E1: no record is missed, some are processed again."""
    tally = Tally(_all_processed)
    labels = at_every_step(_killed(program, tally))
    assert labels.count("process") == len(EVERYTHING)
    assert tally.again > 0


async def _all_processed_or_buried(world: World) -> None:
    assert set(world.processed) == GOOD
    dead = await world.read(DEAD)
    assert sorted({value for values in dead.values() for value in values}) == [b"1"]
    assert sum(map(len, dead.values())) >= PARTITIONS


@pytest.mark.parametrize("program", [in_place, through_delay_topics], ids=["in_place", "delay_topics"])
def test_retries_lose_nothing(program: Program) -> None:
    """Killed at any step, it processes or buries every record at least once."""
    labels = at_every_step(_killed(program, _all_processed_or_buried))
    assert labels.count("process") >= len(EVERYTHING) + PARTITIONS


@pytest.mark.parametrize("program", [committed_first, committed_first_by_hand])
def test_at_most_once(program: Program) -> None:
    """E2: no record is processed twice, some are missed."""
    tally = Tally(_none_twice)
    labels = at_every_step(_killed(program, tally))
    assert labels.count("process") == len(EVERYTHING)
    assert tally.lost > 0


@pytest.mark.parametrize("program", [transform, transform_under_its_own_id])
def test_exactly_once(program: Program) -> None:
    """E3: output = f(input), in order, for read_committed readers; there are aborted records too."""
    tally = Tally(_transformed_once)
    labels = at_every_step(_killed(program, tally))
    assert labels.count("produce") == len(EVERYTHING)
    assert tally.aborted > 0


def test_transactions_of_a_producer_alone() -> None:
    """B21: a file is copied exactly once; the progress is in the same transactions."""
    tally = Tally(_lines_once)
    at_every_step(_killed(copy_lines, tally))
    assert tally.aborted > 0


def test_batches_of_a_transaction_group() -> None:
    tally = Tally(_lines_once)
    at_every_step(_killed(write_batches, tally))
    assert tally.aborted > 0


@pytest.mark.parametrize(
    "program, check, hit",
    [
        (by_hand, _all_processed, SimNode.lose_power),
        (committed_first, _none_twice, SimNode.lose_power),
        (transform, _transformed_once, SimNode.kill),
        (transform, _transformed_once, SimNode.lose_power),
        (copy_lines, _lines_once, SimNode.lose_power),
        (write_batches, _lines_once, SimNode.lose_power),
    ],
)
def test_the_broker_dies_at_every_step(
    program: Program, check: Callable[[World], Awaitable[None]], hit: Callable[[SimNode], None]
) -> None:
    """The broker leads and coordinates everything, and dies before each of its responses."""
    assert len(at_every_step(_broken(program, Tally(check), hit))) > 15


@pytest.mark.parametrize("topic", ["__transaction_state", "__consumer_offsets", "out", "in"])
def test_a_leader_of_three_dies_at_a_sample_of_steps(topic: str) -> None:
    """The coordinator of transactions or of groups, or the leader of the output or of the input."""
    tally = Tally(_transformed_once)
    at_every_step(_led_by_the_fallen(transform_under_its_own_id, tally, topic), stride=10)


# --- paused programs


def test_a_paused_member_changes_nothing() -> None:
    """R39: its late commit is refused, and its successor's offsets stay."""

    async def check(world: World) -> None:
        await _all_processed(world)
        assert await _committed(world) == dict.fromkeys(IN, RECORDS)

    tally = Tally(check)
    at_every_step(_paused(by_hand, tally))
    assert tally.refused[CommitFailedError.__name__] > 0
    assert set(tally.refused) <= {CommitFailedError.__name__, UnknownMemberIdError.__name__}


async def _committed(world: World) -> dict[TopicPartition, int]:
    async def ask() -> dict[TopicPartition, int]:
        async with Admin(world.address, rng=world.simulation.rng("asks")) as admin:
            return {tp: at.offset for tp, at in (await admin.committed_offsets("g")).items()}

    return await world.on("asker", ask())


@pytest.mark.parametrize(
    "program, error", [(transform, ProducerFencedError), (transform_under_its_own_id, CommitFailedError)]
)
def test_a_paused_transform_changes_nothing(program: Program, error: type[KafkaliteError]) -> None:
    """R31, R35: fenced by its transactional id if its successor has the same one, else by its group."""
    tally = Tally(_transformed_once)
    at_every_step(_paused(program, tally))
    assert tally.refused[error.__name__] > 0


def test_a_transform_resumed_beside_its_successor_changes_nothing() -> None:
    """It rejoins, and they share the rest."""
    tally = Tally(_transformed_once)
    at_every_step(_paused(transform_under_its_own_id, tally, wakes_early=True))
    assert tally.refused[CommitFailedError.__name__] > 0


def test_a_paused_transactional_producer_changes_nothing() -> None:
    """R31: each of its late requests is refused."""
    tally = Tally(_lines_once)
    at_every_step(_paused(copy_lines, tally))
    assert set(tally.refused) == {ProducerFencedError.__name__}
