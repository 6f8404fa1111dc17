"""Faults: kills, cuts, power losses and others, at times and places drawn from the seed.

Each fault is a coroutine that breaks something, waits, and repairs it. Several may run at the same
time. ``heal`` repairs everything that is still broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from kafkalite.errors import StorageError, StorageExhaustedError, TooManyOpenFilesError
from kafkalite.raft.raft_quorum import RaftQuorum
from kafkalite.storage.filesystem import File
from kafkalite.testing.sim.loop import current_process
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.disk_trees import tree_of
from proof.sim.atlas import DAMAGES, Atlas, Damage, older_copy
from proof.sim.nodes import DATA_PATH, SimNode
from proof.sim.plan import Plan
from proof.sim.workload import Client, Workload

MAX_CONCURRENT: Final = 3
MOMENT_S: Final = 0.5
STOP_PATIENCE_S: Final = 15.0
#: How long a voter with an older copy waits for the end of other faults, and how long they wait for it.
CATCH_UP_S: Final = 5.0
MAX_CLOCK_ERROR_MS: Final = 1_000_000


class Nemesis:
    """Causes the faults. Runs in the context of the simulation."""

    def __init__(
        self, simulation: Simulation, plan: Plan, nodes: Sequence[SimNode], workload: Workload
    ) -> None:
        self.simulation = simulation
        self.network = simulation.network
        self.plan = plan
        self.nodes = list(nodes)
        self.workload = workload
        self.clients: Sequence[Client] = workload.clients
        self.rng = simulation.rng("nemesis")
        self.on_fault: Callable[[], None] = lambda: None
        #: Returns the leader of a partition, and the active controller, or None.
        self.find_leader: Callable[[], SimNode | None] = lambda: None
        self.find_controller: Callable[[], SimNode | None] = lambda: None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._acknowledged: asyncio.Future[None] | None = None
        self._decided: asyncio.Future[None] | None = None
        self._atlas = Atlas()
        self._power_losses = 0
        self._disk_losses = 0
        self._restored: SimNode | None = None  #: a voter with an older copy, while it catches up

    async def run(self, duration_s: float) -> None:
        """Cause faults for ``duration_s``."""
        loop, plan, rng = self.simulation.loop, self.plan, self.rng
        end_s = loop.time() + duration_s
        names = [name for name, weight in plan.faults.items() for _ in range(weight)]
        while loop.time() < end_s and not self.simulation.violations:
            await asyncio.sleep(min(plan.mean_gap_s * 2 * rng.random(), max(end_s - loop.time(), 0.01)))
            has_room = self._restored is None and len(self._tasks) < MAX_CONCURRENT
            if names and has_room and loop.time() < end_s:
                self._begin(names[rng.randrange(len(names))])

    def _begin(self, name: str) -> None:
        self.simulation.note(f"fault {name}")
        self.simulation.probe(f"fault {name}")
        fault: Callable[[], Coroutine[Any, Any, None]] = (
            partial(self._damage, DAMAGES[name]) if name in DAMAGES else getattr(self, f"_{name}")
        )
        task = self.simulation.loop.create_task(self._at_a_moment(fault), name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        self.on_fault()

    async def _at_a_moment(self, fault: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Delay half of all faults until the moment at which a client receives an acknowledgement."""
        if self.rng.random() < 0.5:
            told = self.simulation.loop.create_future()
            if self.plan.load.committed_readers and self.rng.random() < 0.5:
                self._decided = told
            else:
                self._acknowledged = told
            try:
                async with asyncio.timeout(MOMENT_S):
                    await told
            except TimeoutError:
                pass
            self.on_fault()
        await fault()

    def on_acknowledged(self) -> None:
        """Called when a client has just received the acknowledgement of a record."""
        if self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_result(None)

    def on_decided(self) -> None:
        """Called when a client has just received the acknowledgement of a transaction or of offsets."""
        if self._decided is not None and not self._decided.done():
            self._decided.set_result(None)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc] # the loop reports it as a violation

    async def heal(self) -> None:
        """Repair everything, and start every node that is down."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(list(self._tasks))
        self.simulation.note("heal")
        self.network.heal()
        for link in self.network.links():
            link.tuning = self.network.tuning
        for node in self.nodes:
            node.host.resume()
            node.host.free_disk()
            node.host.filesystem.fail_next_sync(0)
            node.host.disk.stall_rate = 0.0
        for node in self.nodes:
            if node.is_excused and node.is_running:
                await node.stop()
        for node in self.nodes:
            await self._stopped(node)
            node.is_excused = node is self._atlas.struck
            if node.state == "down":
                node.start()
        if self._atlas.struck is not None:
            await self._repair(self._atlas.struck)

    async def _repair(self, node: SimNode) -> None:
        """Replace the disk of a node that refuses to start with its damaged files, as an operator does."""
        for _ in range(int(STOP_PATIENCE_S / 0.05)):
            if node.state != "starting":
                break
            await asyncio.sleep(0.05)
        if node.state == "down":
            if not isinstance(node.failure, StorageError):
                self.simulation.violate(
                    Violation(
                        "broken-start",
                        f"{node.host} does not name its damage: {node.failure!r}",
                        kind="crash",
                    )
                )
            self.simulation.probe("damage-refused")
            node.replace_disk()
            node.start()
        node.is_excused = False

    async def _stopped(self, node: SimNode) -> None:
        """Return when a stop in progress has ended. Kill the node if it hangs."""
        for _ in range(int(STOP_PATIENCE_S / 0.05)):
            if node.state != "stopping":
                return
            await asyncio.sleep(0.05)
        node.kill()

    # --- choices ----------------------------------------------------------------------------------------

    def _duration_s(self) -> float:
        return self.plan.mean_fault_s * 2 * self.rng.random()

    def _target(self) -> SimNode:
        """Return one of the nodes, often a leader."""
        choice = self.rng.random()
        found = None
        if choice < 0.3:
            found = self.find_leader()
        elif choice < 0.5:
            found = self.find_controller()
        return found if found is not None else self.nodes[self.rng.randrange(len(self.nodes))]

    def _running_target(self) -> SimNode | None:
        node = self._target()
        return node if node.is_running and not node.host.is_paused else None

    def _start_again(self, node: SimNode) -> None:
        if node.state == "down":
            node.start()

    # --- processes --------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        node = self._target()
        if node.state == "down":
            return
        node.kill()
        await asyncio.sleep(self._duration_s())
        self._start_again(node)

    async def _kill_all(self) -> None:
        for node in self.nodes:
            node.kill()
        await asyncio.sleep(self._duration_s())
        for node in self.nodes:
            self._start_again(node)
            await asyncio.sleep(0.3 * self.rng.random())

    async def _power_loss(self) -> None:
        if self._power_losses >= self.plan.power_losses:
            return
        self._power_losses += 1
        node = self._target()
        node.lose_power()
        await asyncio.sleep(self._duration_s())
        self._start_again(node)

    async def _replace_disk(self) -> None:
        if self._disk_losses >= self.plan.disk_losses:
            return
        self._disk_losses += 1
        node = self._target()
        node.replace_disk()
        self.simulation.probe("disk-replaced")
        await asyncio.sleep(self._duration_s())
        self._start_again(node)

    async def _replace_second_disk(self) -> None:
        node = self._target()
        if self._disk_losses >= self.plan.disk_losses or not node.is_broker:
            return
        self._disk_losses += 1
        node.replace_second_disk()
        self.simulation.probe("second-disk-replaced")
        await asyncio.sleep(self._duration_s())
        self._start_again(node)

    async def _move_log(self) -> None:
        node = self._running_target()
        if node is not None and node.is_broker and node.host.process is not None:
            self.simulation.loop.spawn(node.host.process, node.move_log(self.rng.randrange), "move")

    async def _power_loss_all(self) -> None:
        for node in self.nodes:
            node.lose_power()
        await asyncio.sleep(self._duration_s())
        for node in self.nodes:
            self._start_again(node)
            await asyncio.sleep(0.3 * self.rng.random())

    async def _pause(self) -> None:
        node = self._running_target()
        if node is None:
            return
        process = node.host.process
        node.host.pause()
        await asyncio.sleep(self._duration_s() * 1.5)
        if node.host.process is process:
            node.host.resume()

    async def _restart(self) -> None:
        node = self._running_target()
        if node is None:
            return
        await node.stop()
        await self._stopped(node)
        await asyncio.sleep(self._duration_s() * 0.5)
        self._start_again(node)

    async def _crash_client(self) -> None:
        client = self.clients[self.rng.randrange(len(self.clients))]
        if not client.is_done:
            client.crash()

    async def _pause_client(self) -> None:
        """Pause a client, perhaps for longer than its session."""
        client = self.clients[self.rng.randrange(len(self.clients))]
        host = client.host
        if client.is_done or not host.is_running or host.is_paused:
            return
        host.pause()
        try:
            await asyncio.sleep(self._duration_s())
        finally:
            host.resume()

    # --- network ----------------------------------------------------------------------------------------

    async def _cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        links = [self.network.link(source, target) for source, target in pairs]
        for link in links:
            link.cut()
        await asyncio.sleep(self._duration_s())
        for link in links:
            link.heal()

    def _two_names(self) -> tuple[str, str]:
        first = self.rng.randrange(len(self.nodes))
        second = (first + 1 + self.rng.randrange(len(self.nodes) - 1)) % len(self.nodes)
        return self.nodes[first].host.name, self.nodes[second].host.name

    async def _cut_one_way(self) -> None:
        await self._cut([self._two_names()])

    async def _cut_pair(self) -> None:
        first, second = self._two_names()
        await self._cut([(first, second), (second, first)])

    async def _isolate(self) -> None:
        """Cut one node off from the others. Its clients may still reach it."""
        node = self._target().host.name
        others = [other.host.name for other in self.nodes if other.host.name != node]
        await self._cut([(node, other) for other in others] + [(other, node) for other in others])

    async def _isolate_from_clients(self) -> None:
        node = self._target().host.name
        clients = [client.host.name for client in self.clients]
        await self._cut([(node, each) for each in clients] + [(each, node) for each in clients])

    async def _reset(self) -> None:
        for end in self.network.ends():
            if end.is_dialler and self.rng.random() < 0.4:
                end.reset_both()

    async def _slow_links(self) -> None:
        node = self._target().host.name
        links = [link for link in self.network.links() if node in (link.source, link.target)]
        tuning, delay_s, spike_rate = self.network.tuning, 0.05 * self.rng.random(), 0.3 * self.rng.random()
        slow = replace(
            tuning,
            delay_s=tuning.delay_s + delay_s,
            jitter_s=tuning.jitter_s + delay_s,
            spike_rate=max(tuning.spike_rate, spike_rate),
            spike_s=max(tuning.spike_s, 0.3),
        )
        for link in links:
            link.tuning = slow
        await asyncio.sleep(self._duration_s())
        for link in links:
            link.tuning = self.network.tuning

    # --- disks and clocks -------------------------------------------------------------------------------

    async def _slow_disk(self) -> None:
        disk = self._target().host.disk
        disk.stall_rate, disk.stall_s = 0.1 + 0.5 * self.rng.random(), 0.05 + self.rng.random()
        await asyncio.sleep(self._duration_s())
        disk.stall_rate = 0.0

    async def _full_disk(self) -> None:
        node = self._target()
        node.is_excused = True
        node.host.fill_disk(self.rng.randrange(4_096))
        await asyncio.sleep(self._duration_s())
        node.host.free_disk()
        self._start_again(node)

    async def _broken_disk(self) -> None:
        """Make syncs fail, so that the broker takes some of its logs offline until it is restarted."""
        node = self._target()
        if not node.is_running:
            return
        node.is_excused = True
        node.host.filesystem.fail_next_sync(1 + self.rng.randrange(3))
        await asyncio.sleep(self._duration_s())
        node.host.filesystem.fail_next_sync(0)
        if node.state != "down":
            node.kill()
        await asyncio.sleep(0.2)
        self._start_again(node)

    async def _damage(self, damage: Damage) -> None:
        """Damage files of the node that this run may damage, while it is down."""
        node = self._atlas.victim(self._target())
        node.is_excused = True
        node.kill()
        with suppress(StorageExhaustedError):  # a full disk takes no damage, or half of it
            self.simulation.note(f"{node.host}: {damage(node.host.filesystem, self.rng)}")
        await asyncio.sleep(self._duration_s())
        self._start_again(node)

    async def _older_copy(self) -> None:
        """Restore a copy of a node's directory that is some seconds old."""
        node = self._atlas.victim(self._target())
        copy = tree_of(node.host.filesystem, DATA_PATH)
        await asyncio.sleep(self._duration_s())
        node.is_excused = True
        node.kill()
        older_copy(copy, node)
        await asyncio.sleep(self._duration_s() * 0.5)
        # A voter that has forgotten promises is the one fault that a quorum of three bears (R59).
        self._restored = node
        try:
            await self._wait(lambda: len(self._tasks) == 1 or node.state != "down")
            self._start_again(node)
            await self._wait(lambda: self._has_caught_up(node))
        finally:
            self._restored = None

    async def _wait(self, is_true: Callable[[], bool]) -> None:
        for _ in range(int(CATCH_UP_S / 0.05)):
            if is_true():
                return
            await asyncio.sleep(0.05)

    @staticmethod
    def _has_caught_up(node: SimNode) -> bool:
        """Whether a node that was started is no voter, or a voter that relies on its own log again."""
        if not node.is_running or node.broker is None:
            return node.state == "down"
        quorum = node.broker._quorum
        return not isinstance(quorum, RaftQuorum) or quorum.node.voter._restart.is_over

    async def _no_descriptors(self) -> None:
        """Let a node open no file for a while. The observer can still open the node's files."""
        host = self._target().host
        filesystem, root = host.filesystem, self.simulation.loop.root
        open_file = filesystem.open

        def refuse(path: str, *, create: bool = False) -> File:
            if current_process.get(root) is host.process:
                raise TooManyOpenFilesError(f"no file descriptor left for {path}: simulated")
            return open_file(path, create=create)

        vars(filesystem)["open"] = refuse
        try:
            await asyncio.sleep(self._duration_s())
        finally:
            vars(filesystem).pop("open", None)

    async def _clock_drift(self) -> None:
        """Let a wall clock run up to a tenth too fast or too slow."""
        host, rate = self._target().host, 0.2 * self.rng.random() - 0.1
        loop = self.simulation.loop
        start_s = loop.time()
        end_s = start_s + 4 * self._duration_s()
        while loop.time() < end_s:
            await asyncio.sleep(0.1)
            host.set_clock_ahead(int((loop.time() - start_s) * rate * 1000))

    async def _clock_jump(self) -> None:
        node = self._target()
        node.host.set_clock_ahead(self.rng.randrange(2 * MAX_CLOCK_ERROR_MS) - MAX_CLOCK_ERROR_MS)
