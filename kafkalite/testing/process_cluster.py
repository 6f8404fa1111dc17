"""ProcessCluster: real server processes on this machine that can be killed, paused and isolated.

::

    async with ProcessCluster(directory, brokers=3) as cluster:
        producer = Producer(cluster.bootstrap_servers)
        await cluster.kill(2)                 # SIGKILL
        await cluster.start_node(2)
        await cluster.wait(is_whole=True)

With ``proxied=True`` every connection between two nodes passes through a FaultyProxy, so that ``cut``,
``isolate`` and ``heal`` work. Clients connect to the nodes directly, as if from another network. Closing the
cluster kills every process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kafkalite.client.admin.cluster_health import ClusterView, RequestedState, look_from, unmet_conditions
from kafkalite.errors import ClientError, KafkaliteError
from kafkalite.parent_pipe import PARENT_PIPE, stdin_for_children
from kafkalite.testing.proxy import FaultyProxy, Link, client_id_of
from kafkalite.testing.reserved_ports import ReservedPorts

#: The node id of the first separate controller.
FIRST_CONTROLLER: Final = 101
CLUSTER_ID: Final = "processes"
#: The ``cluster.secret`` of the nodes. It protects nothing, because tests print it.
SECRET: Final = "a-secret-for-tests-only"

START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
WAIT_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05
_ANSWER_MS: Final = 2_000


class NodeFailedError(KafkaliteError):
    """A node's process ended during ``ProcessCluster.wait``. The message contains the end of the node's
    log."""


@dataclass(slots=True)
class ServerProcess:
    """One node: its settings, its process while it runs, and its log."""

    node_id: int
    settings: dict[str, str]
    directory: Path
    address: str  #: the address for clients; of a separate controller, the address for its peers
    is_broker: bool
    is_controller: bool
    process: asyncio.subprocess.Process | None = None
    is_paused: bool = False
    program: Path | None = None  #: the directory with the package kafkalite to run; None: this one

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def log_path(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def log(self) -> str:
        """Return everything that the node has logged since its first start."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    async def start(self, *flags: str) -> None:
        """Start the process with further flags of ``kl server start``. Does not wait until it is ready."""
        assert not self.is_running, f"node {self.node_id} is running already"
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        file = self.directory.with_suffix(".toml")
        file.write_text("".join(f'"{name}" = {json.dumps(value)}\n' for name, value in self.settings.items()))
        words = [sys.executable, "-m", "kafkalite", "server", "start", "--file", str(file), *flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KAFKALITE_")}
        if self.program is not None:
            environment["PYTHONPATH"] = str(self.program)
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *words,
                env=environment | {"NO_COLOR": "1", PARENT_PIPE: "1"},
                cwd=self.program,
                stdin=stdin_for_children(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches only the process that runs the cluster
            )
        self.is_paused = False

    def send_signal(self, number: int) -> None:
        if self.is_running:
            assert self.process is not None
            # The process object's own method would reap a child that has just died and lose its status.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def end(self, number: int) -> int:
        """Send signal ``number`` and return the exit status. Kill the process if it does not end within
        STOP_LIMIT_S.

        Resumes a paused process. Returns 0 if the process was never started.
        """
        if self.process is None:
            return 0
        if self.is_paused:
            self.send_signal(signal.SIGCONT)
        self.send_signal(number)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                return await self.process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.process.wait()


class ProcessCluster:
    """Brokers with node ids 1 to ``brokers``, each in its own process.

    If ``controllers`` is 0, each broker is also a controller. Otherwise, there are ``controllers`` separate
    controllers with node ids from FIRST_CONTROLLER. ``settings``, by dotted name, apply to every node.
    ``node_settings[node id]``, also by dotted name, apply to one node.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        brokers: int = 3,
        controllers: int = 0,
        proxied: bool = False,
        settings: Mapping[str, Any] | None = None,
        node_settings: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._proxied = proxied
        self._proxies: dict[tuple[str, int], FaultyProxy] = {}
        self._settings = {name: str(value) for name, value in (settings or {}).items()}
        self._node_settings = node_settings or {}
        self._broker_ids = range(1, brokers + 1)
        controller_ids = range(FIRST_CONTROLLER, FIRST_CONTROLLER + controllers)
        self._voter_ids = controller_ids if controllers else self._broker_ids
        self._voters = ""
        self._last_added = 0  # the node id of the broker that was added last
        self.nodes: dict[int, ServerProcess] = {}
        self._ports = ReservedPorts(0)
        self._added_ports: dict[int, ReservedPorts] = {}  # of the brokers that ``add_broker`` has started

    def __repr__(self) -> str:
        running = [node_id for node_id, node in self.nodes.items() if node.is_running]
        return f"<ProcessCluster in {self.directory}, running: {running}>"

    async def start(self, *, wait: bool = True, program: Path | None = None) -> None:
        """Start every node. If ``wait``, return when all brokers are live and all replicas are in sync.

        ``program`` is that of the nodes (``ServerProcess.program``).
        """
        if not self.nodes:
            await self._lay_out()
        for node in self.nodes.values():
            node.program = program
        await asyncio.gather(*(node.start() for node in self.nodes.values() if not node.is_running))
        if wait:
            await self.wait(is_whole=True, brokers=len(self._broker_ids), limit_s=START_LIMIT_S)

    async def close(self) -> None:
        """Kill every running node, and close the proxies. Use ``stop`` for an orderly shutdown."""
        await asyncio.gather(*(node.end(signal.SIGKILL) for node in self.nodes.values()))
        for proxy in self._proxies.values():
            await proxy.close()
        self._proxies.clear()
        for ports in (self._ports, *self._added_ports.values()):
            ports.close()
        self._added_ports.clear()

    async def stop(self) -> dict[int, int]:
        """Send SIGTERM to all running nodes at the same time. Return {node id: exit code}."""
        running = {node_id: node for node_id, node in self.nodes.items() if node.is_running}
        codes = await asyncio.gather(*(node.end(signal.SIGTERM) for node in running.values()))
        return dict(zip(running, codes, strict=True))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _lay_out(self) -> None:
        """Choose ports, start proxies if ``proxied``, and create the ServerProcess of each node."""
        ids = sorted({*self._broker_ids, *self._voter_ids})
        self._ports = ReservedPorts(3 * len(ids))
        ports = iter(self._ports.ports)
        raft, peers, clients = ({node_id: f"127.0.0.1:{next(ports)}" for node_id in ids} for _ in range(3))
        raft_seen = {node_id: await self._proxied_at("raft", node_id, raft[node_id]) for node_id in ids}
        self._voters = ",".join(f"{node_id}@{raft_seen[node_id]}" for node_id in self._voter_ids)
        for node_id in ids:
            await self._add(node_id, raft[node_id], peers[node_id], clients[node_id])

    async def _add(self, node_id: int, raft: str, peers: str, client: str) -> None:
        """Create the ServerProcess of a node. Only a controller listens at ``raft``."""
        peers_seen = await self._proxied_at("broker", node_id, peers)
        is_controller = node_id in self._voter_ids
        is_broker = node_id in self._broker_ids or not is_controller
        roles = [role for role, has in (("broker", is_broker), ("controller", is_controller)) if has]
        settings = {
            "node.id": str(node_id),
            "process.roles": ",".join(roles),
            "cluster.id": CLUSTER_ID,
            "cluster.secret": SECRET,
            "controller.quorum.voters": self._voters,
            "log.dirs": str(self.directory / f"node-{node_id}"),
        }
        if is_controller:
            settings["controller.listeners"] = raft
        if is_broker:
            settings["listeners"] = f"{peers},{client}"
            settings["advertised.listeners"] = f"{peers_seen},{client}"
        settings |= self._settings
        settings |= {name: str(value) for name, value in self._node_settings.get(node_id, {}).items()}
        self.nodes[node_id] = ServerProcess(
            node_id,
            settings,
            self.directory / f"node-{node_id}",
            client if is_broker else raft,
            is_broker,
            is_controller,
        )

    async def add_broker(self) -> int:
        """Start a further broker, which is no controller. Return its node id, which no node had before.

        Does not wait until it is live. ``start`` must have been called.
        """
        self._last_added = max(self._last_added, *self._broker_ids) + 1
        assert self._last_added not in self._voter_ids, "too many brokers"
        ports = self._added_ports[self._last_added] = ReservedPorts(2)
        peers, client = (f"127.0.0.1:{port}" for port in ports.ports)
        await self._add(self._last_added, "", peers, client)
        await self.nodes[self._last_added].start()
        return self._last_added

    async def remove(self, node_id: int) -> None:
        """Kill a broker that ``add_broker`` has started, if it still runs, and forget it."""
        await self.nodes.pop(node_id).end(signal.SIGKILL)
        proxy = self._proxies.pop(("broker", node_id), None)
        if proxy is not None:
            await proxy.close()
        self._added_ports.pop(node_id).close()

    async def _proxied_at(self, kind: str, node_id: int, target: str) -> str:
        """Return the address at which other nodes reach ``target``. If ``proxied``, start a proxy for it."""
        if not self._proxied:
            return target
        proxy = await FaultyProxy(target, source_of=_node_behind).start()
        self._proxies[kind, node_id] = proxy
        return proxy.address

    def _node(self, node_id: int) -> ServerProcess:
        """Return a node. Raises ClientError for an unknown id."""
        if node_id not in self.nodes:
            known = ", ".join(map(str, self.nodes))
            raise ClientError(f"there is no node {node_id!r}", hint=f"the nodes of the cluster: {known}")
        return self.nodes[node_id]

    async def start_node(self, node_id: int, *flags: str) -> None:
        """Start the process of a node. Raises ClientError for an unknown id, as all methods do that take
        one."""
        await self._node(node_id).start(*flags)

    async def kill(self, *node_ids: int) -> None:
        """Kill the nodes at the same time by SIGKILL."""
        nodes = [self._node(node_id) for node_id in node_ids]
        for node in nodes:
            node.send_signal(signal.SIGKILL)
        await asyncio.gather(*(node.end(signal.SIGKILL) for node in nodes))

    async def terminate(self, node_id: int) -> int:
        """Shut the node down by SIGTERM and return its exit code."""
        return await self._node(node_id).end(signal.SIGTERM)

    async def restart(self, node_id: int) -> None:
        """Call ``terminate`` and ``start_node``."""
        await self.terminate(node_id)
        await self.start_node(node_id)

    def pause(self, node_id: int) -> None:
        """Pause the process by SIGSTOP. Its connections stay open."""
        self._node(node_id).send_signal(signal.SIGSTOP)
        self.nodes[node_id].is_paused = True

    def resume(self, node_id: int) -> None:
        self._node(node_id).send_signal(signal.SIGCONT)
        self.nodes[node_id].is_paused = False

    def links(self, source: int, target: int) -> list[Link]:
        """Return the links through proxies from node ``source`` to the controller and the broker of node
        ``target``."""
        assert self._proxied, "only ProcessCluster(proxied=True) has links"
        return [proxy.link(str(source)) for (_, node_id), proxy in self._proxies.items() if node_id == target]

    def cut(self, source: int, target: int) -> None:
        """Drop all data from node ``source`` to node ``target``. The other direction still works."""
        for link in self.links(source, target):
            link.there.black_hole()
        for link in self.links(target, source):
            link.back.black_hole()

    def isolate(self, *node_ids: int) -> None:
        """Cut these nodes off from all others, in both directions. They can still reach each other."""
        for inside in node_ids:
            for outside in self.nodes:
                if outside not in node_ids:
                    self.cut(inside, outside)
                    self.cut(outside, inside)

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.heal()

    @property
    def bootstrap_servers(self) -> str:
        """The addresses at which clients reach the brokers, running or not."""
        return ",".join(node.address for node in self.nodes.values() if node.is_broker)

    @property
    def running_addresses(self) -> list[str]:
        return [
            node.address
            for node in self.nodes.values()
            if node.is_broker and node.is_running and not node.is_paused
        ]

    async def view(self, node_id: int | None = None) -> ClusterView:
        """Return the cluster's state according to ``node_id`` (None: any running broker). Raises
        KafkaliteError."""
        addresses = self.running_addresses if node_id is None else [self._node(node_id).address]
        return await look_from(addresses, timeout_ms=_ANSWER_MS)

    async def _looked_at(self, requested: RequestedState) -> tuple[ClusterView, list[str]]:
        """Return (the view of one broker, the unmet conditions). If ``requested.is_fully_in_sync``, the
        conditions are checked in the view of every running broker."""
        views = [await self.view()]
        if requested.is_fully_in_sync:
            ids = [node_id for node_id, node in self.nodes.items() if node.address in self.running_addresses]
            views = list(await asyncio.gather(*map(self.view, ids))) or views
        reasons = [reason for view in views for reason in unmet_conditions(view, requested)]
        return views[0], list(dict.fromkeys(reasons))

    async def wait(
        self,
        *,
        brokers: int = 1,
        is_whole: bool = False,
        node_id: int | None = None,
        topics: Iterable[str] = (),
        limit_s: float = WAIT_LIMIT_S,
    ) -> ClusterView:
        """Wait until the cluster has a controller, at least ``brokers`` live brokers, and a leader for every
        partition of ``topics``. Return the state of the cluster.

        If ``node_id`` is given, also wait until that broker is live. If ``is_whole``, also wait until, in
        every running broker's view, all registered brokers are live and all replicas are in sync. Raises
        NodeFailedError if the process of a node ends, and TimeoutError with the unmet conditions after
        ``limit_s`` seconds.
        """
        requested = RequestedState(brokers, is_whole, node_id, frozenset(topics))
        watched = [node for node in self.nodes.values() if node.is_running]
        reasons = ["no node was asked"]
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        view, reasons = await self._looked_at(requested)
                        if not reasons:
                            return view
                    except KafkaliteError as error:
                        reasons = [error.message]
                    for node in watched:
                        if not node.is_running:
                            assert node.process is not None
                            raise NodeFailedError(
                                f"node {node.node_id} ended, status {node.process.returncode}:\n{node.tail()}"
                            )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            tails = "\n".join(f"--- node {node.node_id}\n{node.tail(8)}" for node in watched)
            raise TimeoutError(f"after {limit_s:g} s still: {'; '.join(reasons)}\n{tails}") from None


def _node_behind(first_bytes: bytes) -> str:
    """Return the node id in a peer's client id (``raft-2``, ``broker-2``, ``metadata-2``), or ""."""
    found = re.fullmatch(r"\D+-(\d+)", client_id_of(first_bytes))
    return found[1] if found else ""
