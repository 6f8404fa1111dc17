"""Real brokers on simulated hosts: start, stop, kill, and the state of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from kafkalite.broker.broker import Broker
from kafkalite.errors import KafkaliteError, StorageExhaustedError
from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.loop import Process
from kafkalite.testing.sim.simulation import Simulation, Violation
from kafkalite.testing.sim.streams import SCHEME

BROKER_PORT: Final = 9092
CONTROLLER_PORT: Final = 9093
FIRST_CONTROLLER_ID: Final = 101
DATA_PATH: Final = "/data"
SECOND_PATH: Final = "/second"  #: the second data directory of nodes with two
CLUSTER_ID: Final = "simulated-cluster-0000"
CLUSTER_SECRET: Final = "a secret of the simulation"


class SimNode:
    """One node of the cluster: a host with its disk, and the running broker, if any.

    ``is_excused`` means that its disk was made to fail. It may then refuse to start, or stop by itself, which
    is a violation otherwise, and must be started again.
    """

    def __init__(
        self,
        simulation: Simulation,
        node_id: int,
        settings: Mapping[str, Any],
        *,
        is_broker: bool = True,
        disks: int = 1,
    ) -> None:
        self.simulation = simulation
        self.log_dirs = ",".join((DATA_PATH, SECOND_PATH)[:disks])
        self.node_id = node_id
        self.is_broker = is_broker
        self.host: Host = simulation.host(f"{'b' if is_broker else 'k'}{node_id}")
        self.settings = dict(settings)
        self.broker: Broker | None = None
        self.state = "down"  #: or starting, running, stopping
        self.is_excused = False
        self.start_count = 0
        self.is_rejoining = False  #: whether its disk is empty and the other nodes must fill it again
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<SimNode {self.node_id} {self.state}>"

    @property
    def address(self) -> str:
        return f"{SCHEME}{self.host.name}:{BROKER_PORT}"

    @property
    def controller_address(self) -> str:
        return f"{SCHEME}{self.host.name}:{CONTROLLER_PORT}"

    @property
    def is_running(self) -> bool:
        """Whether its broker has started; it may be paused."""
        return self.state == "running" and self.host.is_running

    @property
    def live(self) -> Broker | None:
        """The broker once its parts exist, or None."""
        return self.broker if self.is_running else None

    # --- start and stop ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process. ``state`` shows when it serves."""
        self.host.kill()
        self.start_count += 1
        self.state = "starting"
        self.failure = None
        self.simulation.note(f"start {self.host}")
        self.host.run(self._main(self.start_count))

    async def _main(self, run: int) -> None:
        simulation = self.simulation
        broker = Broker(
            clock=self.host.clock,
            rng=simulation.rng(f"{self.host}/{run}"),
            filesystem=self.host.filesystem,
            executor=self.host.executor(),
            node_id=self.node_id,
            listeners=self.address,
            log_dirs=self.log_dirs,
            **(self.settings | ({"controller_quorum_rejoin": True} if self.is_rejoining else {})),
        )
        self.broker = broker
        try:
            await broker.start()
            if self.state == "starting":
                self.state = "running"
            self.is_rejoining = False
            simulation.note(f"up {self.host}")
            await broker.wait_stopped()
        except Exception as error:
            self.failure = error
            # ``kl server start`` repeats a start that lacked a resource (R54, R55).
            is_repeated = self.state == "starting" and isinstance(error, StorageExhaustedError)
            if not (self.is_excused or is_repeated):
                violation = Violation("broker-failed", f"{self.host} {self.state}: {error!r}", kind="crash")
                violation.__cause__ = error
                simulation.violate(violation)
        self._on_exit(run)

    def _on_exit(self, run: int) -> None:
        """Clean up after a program that has ended by itself, as after a kill."""
        if run == self.start_count:
            self.state = "down"
            self.broker = None
            self.simulation.note(f"exit {self.host}")
            process = self.host.process
            self.simulation.loop.call_soon(self._bury, process, context=self.simulation.network.context)

    def _bury(self, process: Process | None) -> None:
        if self.host.process is process:  # the next process may have started meanwhile
            self.host.kill()

    async def stop(self) -> None:
        """Shut down in an orderly way. Await it outside of all hosts."""
        broker, process = self.broker, self.host.process
        if broker is None or process is None or not self.is_running:
            return
        self.simulation.note(f"stop {self.host}")
        self.state = "stopping"
        self.simulation.loop.spawn(process, broker.stop(), "stop")

    def kill(self) -> None:
        self.simulation.note(f"kill {self.host}")
        self.simulation.probe("kill")
        self._gone()
        self.host.kill()

    def lose_power(self) -> None:
        self.simulation.note(f"power loss {self.host}")
        self.simulation.probe("power-loss")
        self._gone()
        self.host.lose_power()

    def replace_disk(self) -> None:
        """Cut the power and replace the disk. The next start sets controller.quorum.rejoin."""
        self.lose_power()
        self.simulation.note(f"new disk for {self.host}")
        self.host.replace_disk()
        self.is_rejoining = True

    def replace_second_disk(self) -> None:
        """Cut the power and replace the second disk of a node with two."""
        self.lose_power()
        self.simulation.note(f"new second disk for {self.host}")
        self.host.filesystem.replace_disk(SECOND_PATH)

    async def move_log(self, choose: Callable[[int], int]) -> None:
        """Begin to move one of the broker's logs to its other disk. ``choose`` returns a number below its
        argument."""
        broker = self.live
        homes = [] if broker is None else broker.partitions.directories()
        logs = [(tp, home.path) for home in homes for tp in home.logs]
        if broker is not None and logs:
            tp, path = logs[choose(len(logs))]
            with suppress(KafkaliteError):  # the log is offline, or was removed
                broker.mover.move(tp, SECOND_PATH if path == DATA_PATH else DATA_PATH)
                self.simulation.probe("log-moves")

    def _gone(self) -> None:
        self.state = "down"
        self.broker = None
        self.start_count += 1  # so that later calls of its last run are ignored


def rack_of(node_id: int) -> str:
    return f"rack-{node_id}"


def make_nodes(
    simulation: Simulation,
    count: int,
    settings: Mapping[str, Any],
    *,
    controllers: int = 0,
    disks: int = 1,
    spares: int = 0,
) -> list[SimNode]:
    """Return ``count`` brokers that are also controllers, or ``count`` brokers and separate controllers.

    One broker without separate controllers is a single-node cluster and needs no quorum. ``disks``: the
    number of data directories of each broker, 1 or 2. ``spares``: the number of further brokers that are no
    controllers.
    """
    brokers = [
        SimNode(simulation, node_id, {"broker_rack": rack_of(node_id), **settings}, disks=disks)
        for node_id in range(1, count + spares + 1)
    ]
    if count == 1 and not controllers:
        return brokers
    others = [
        SimNode(simulation, FIRST_CONTROLLER_ID + number, settings, is_broker=False)
        for number in range(controllers)
    ]
    voters = ",".join(f"{node.node_id}@{node.controller_address}" for node in others or brokers[:count])
    for node in (*brokers, *others):
        common = {
            "controller_quorum_voters": voters,
            "cluster_id": CLUSTER_ID,
            "cluster_secret": CLUSTER_SECRET,
        }
        if others or node in brokers[count:]:
            common["process_roles"] = "broker" if node.is_broker else "controller"
        node.settings = common | node.settings
    return [*brokers, *others]
