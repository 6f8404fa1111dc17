"""Three brokers in a simulation, with methods that control them, for directed schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.model import TopicPartition
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.sim.compacted_logs import read_batches
from proof.sim.nodes import SimNode, make_nodes
from proof.sim.observer import Observer
from proof.sim.workload import CLIENT_SETTINGS

T = TypeVar("T")

SETTINGS: Final[dict[str, Any]] = {
    "broker_session_timeout_ms": 2_000,
    "offsets_topic_num_partitions": 1,
    "transaction_state_log_num_partitions": 1,
    "auto_leader_rebalance_enable": False,
}
PATIENCE_S: Final = 30.0
_STEP_S: Final = 0.02


class Stage:
    """Nodes 1 to 3 are brokers, and controllers unless there are ``controllers`` of their own.

    Other hosts run the programs of a schedule.
    """

    def __init__(self, simulation: Simulation, settings: Mapping[str, Any], *, controllers: int = 0) -> None:
        self.simulation = simulation
        self.nodes = make_nodes(simulation, 3, SETTINGS | dict(settings), controllers=controllers)
        self.observer = Observer(simulation, self.nodes)
        self.bootstrap = [node.address for node in self.nodes if node.is_broker]

    async def open(
        self,
        topic: str,
        *,
        partitions: int = 1,
        replication_factor: int = 3,
        configs: Mapping[str, str] | None = None,
    ) -> None:
        """Start all nodes, and create a topic with fsync, min.insync.replicas 2 and ``configs``."""
        for node in self.nodes:
            node.start()
        await self.until(lambda: all(node.is_running for node in self.nodes))
        settings = {"min.insync.replicas": "2", "durability": "fsync"} | dict(configs or {})
        await self.on("admin", self._create(topic, partitions, replication_factor, settings))
        await self.until(lambda: self.observer.unconverged() is None)

    async def write_segment(self, tp: TopicPartition, key: bytes, value: bytes | None) -> None:
        """Write the record as the host ``writer``, and enough records after it to close its segment."""
        clock, rng = self.simulation.host("writer").clock, self.simulation.rng("writer")
        async with Producer(self.bootstrap, clock=clock, rng=rng, **CLIENT_SETTINGS) as producer:
            await producer.send(tp.topic, value, key=key, partition=tp.partition)
            for number in range(5):
                await producer.send(tp.topic, bytes(1_000), key=b"%d" % number, partition=tp.partition)

    async def _create(self, *arguments: Any) -> None:
        *shape, configs = arguments
        async with Admin(self.bootstrap, **CLIENT_SETTINGS) as admin:
            await admin.create_topic(*shape, configs=configs)

    async def on(self, host: str, call: Coroutine[Any, Any, T]) -> T:
        """Run ``call`` as a program of ``host``, and wait for it."""
        machine = self.simulation.host(host)
        machine.kill()
        result: T = await machine.run(call)
        return result

    async def inside(self, node: SimNode, call: Coroutine[Any, Any, T]) -> T:
        """Run ``call`` within the program that runs on ``node``, and wait for it."""
        process = node.host.process
        assert process is not None
        result: T = await self.simulation.loop.spawn(process, call)
        return result

    async def until(self, holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
        """Wait until ``holds()``, and check the invariants of replication meanwhile. Raises Violation."""
        end_s = self.simulation.loop.time() + seconds
        while True:
            self.observer.check()
            if holds():
                return
            if self.simulation.loop.time() > end_s:
                raise Violation("stage", f"it did not come to pass in {seconds} s", kind="liveness")
            await asyncio.sleep(_STEP_S)

    async def whole(self) -> None:
        """Heal all links, start all nodes that are down, and wait until every replica is in sync."""
        self.simulation.network.heal()
        for node in self.nodes:
            if node.state == "down":
                node.start()
        await self.until(lambda: self.observer.unconverged_isr() is None)

    async def restart(self, node: SimNode) -> None:
        """Stop the node in order and start it again, and wait until every replica is in sync."""
        await node.stop()
        await self.until(lambda: node.state == "down")
        await self.whole()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, checking the invariants of replication. Raises Violation."""
        end_s = self.simulation.loop.time() + seconds
        while self.simulation.loop.time() < end_s:
            self.observer.check()
            await asyncio.sleep(_STEP_S)

    def leader(self, topic: str, partition: int = 0) -> SimNode | None:
        """Return the leader according to the newest metadata, or None."""
        state = self.observer.image.partition(topic, partition)
        return None if state is None else self.observer.node_of(state.leader)

    def led(self, topic: str, partition: int = 0) -> SimNode:
        """Return the leader, which must exist."""
        self.observer.check()
        leader = self.leader(topic, partition)
        assert leader is not None, f"no broker leads {topic}-{partition}"
        return leader

    def controller(self) -> SimNode | None:
        """Return the active controller, or None."""
        return next(
            (node for node in self.nodes if node.live and node.live.controller_id == node.node_id), None
        )

    def led_apart_from_controller(self, topic: str) -> tuple[SimNode, int]:
        """Return a leader that is not the controller, and the number of the partition that it leads."""
        for number in range(len(self.observer.image.topics[topic].partitions)):
            leader = self.led(topic, number)
            if leader is not self.controller():
                return leader, number
        raise AssertionError("the controller leads every partition")

    async def succeeded(self, before: SimNode, topic: str, partition: int = 0) -> SimNode:
        """Wait until a node other than ``before`` leads, and return it."""
        await self.until(lambda: self.leader(topic, partition) not in (None, before))
        return self.led(topic, partition)

    def others(self, *nodes: SimNode) -> list[SimNode]:
        return [node for node in self.nodes if node not in nodes]

    def cut(self, one: str, *others: str) -> None:
        """Cut both directions between ``one`` and each of ``others``."""
        for other in others:
            self.simulation.network.link(one, other).cut()
            self.simulation.network.link(other, one).cut()

    def isolate(self, node: SimNode) -> None:
        """Cut a node off from the other brokers, but not from clients."""
        self.cut(node.host.name, *(other.host.name for other in self.others(node)))

    def held_back(self, topic: str) -> str | None:
        """Return a partition in which read_committed readers are held back, or None (L4)."""
        for node in self.nodes:
            for hosted in node.live.partitions if node.live is not None else ():
                if hosted.key.topic != topic or not hosted.is_leader:
                    continue
                stable = hosted.partition.last_stable_offset
                if stable < hosted.log_end_offset:
                    return f"{hosted.key} at {stable} of {hosted.log_end_offset}"
        return None

    async def read_committed(self, *keys: TopicPartition) -> list[str]:
        """Return all values that read_committed readers receive."""
        found: list[str] = []
        async with Consumer(
            bootstrap_servers=self.bootstrap,
            rng=self.simulation.rng("reader"),
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            **CLIENT_SETTINGS,
        ) as consumer:
            consumer.assign(keys)
            ends = await consumer.end_offsets(keys)
            while any((consumer.position(key) or 0) < ends[key] for key in keys):
                for record in await consumer.get_many(timeout_ms=500):
                    found.append((record.value or b"").decode())
        return found


Story = Callable[[Stage], Coroutine[Any, Any, str | None]]


def play(
    story: Story, *, seed: int = 1, settings: Mapping[str, Any] | None = None, controllers: int = 0
) -> str | None:
    """Return the violation that ``story`` finds, or None. Violations of invariants are raised."""
    with Simulation(seed) as simulation:
        stage = Stage(simulation, settings or {}, controllers=controllers)
        found = simulation.run(story(stage))
        if simulation.violations:
            raise simulation.violations[0]
    return found


def values_of(node: SimNode, tp: TopicPartition, key: bytes) -> list[bytes | None] | None:
    """Return all values of the key in that node's log, or None if it has no log of the partition."""
    for hosted in node.live.partitions if node.live is not None else ():
        if hosted.key == tp:
            batches = read_batches(hosted.partition.log, hosted.log_start_offset, hosted.log_end_offset)
            records = (record for batch in batches if not batch.header.is_control for record in batch)
            return [record.value for record in records if record.key == key]
    return None
