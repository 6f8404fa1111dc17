"""``kl dev -n 3``: several nodes as processes, configured as in docker-compose.yml, without docker.

The identity of the cluster (id, secret, ports) is stored in the data directory, so that the same command
starts the same cluster again.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli.invocation import program_name
from kafkalite.cli.output import plural
from kafkalite.cli.server import finishes_first, stop_signals
from kafkalite.errors import ConfigError, DiskFullError, KafkaliteError, RequestTimeoutError
from kafkalite.parent_pipe import PARENT_PIPE, stdin_for_children
from kafkalite.storage import layout as files
from kafkalite.storage.disk import RealFileSystem, lock_holder
from kafkalite.storage.filesystem import SHORTAGE_BYTES
from kafkalite.transport.free_ports import check_free, free_ports

if TYPE_CHECKING:
    from kafkalite.client.admin.cluster_health import ClusterView

START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
#: If the cluster has not started after this time, and the disk has no space left, that is printed. The nodes
#: may not be able to write it to their logs.
_SHORTAGE_QUIET_S: Final = 1.0
#: If nodes still run after this time of a stop, the reason is printed.
_STOP_QUIET_S: Final = 0.5
#: A node's controller port minus its client port.
CONTROLLER_PORT_DISTANCE: Final = 100

_LAST_PORT: Final = 65_535
_EVERY_INTERFACE: Final = {"0.0.0.0", "[::]"}
_CLUSTER_FILE: Final = "cluster.toml"
_POLL_S: Final = 0.05
_WATCH_S: Final = 0.5
_ANSWER_MS: Final = 2_000
_LOG_LINES: Final = 15
_FULL_HINT: Final = "free space, and the nodes start"


class NodeEndedError(KafkaliteError):
    """A node ended during the start of the cluster, or all nodes ended later and at least one failed."""


class StartTimeoutError(RequestTimeoutError):
    """The cluster has not started within START_LIMIT_S seconds."""


class ForeignClusterError(KafkaliteError):
    """Another cluster responds on a port of this cluster."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A development cluster's id, secret and ports, which stay the same at every start."""

    cluster_id: str
    cluster_secret: str
    client_ports: tuple[int, ...]
    controller_ports: tuple[int, ...]


def new_layout(count: int, port: int) -> Layout:
    """Return a new layout for ``count`` nodes. The first client port is ``port``; 0 selects free ports.

    Raises ConfigError if ports of later nodes or of controllers would be higher than any port can be.
    """
    highest = _LAST_PORT - CONTROLLER_PORT_DISTANCE - (count - 1)
    if port > highest:
        raise ConfigError(
            key="--port",
            value=port,
            allowed=f"0 to {highest}: the controller of node {count} uses the port that is "
            f"{_LAST_PORT - highest} higher",
        )
    if port:
        clients = tuple(range(port, port + count))
        controllers = tuple(each + CONTROLLER_PORT_DISTANCE for each in clients)
    else:
        ports = free_ports(2 * count)
        clients, controllers = tuple(ports[:count]), tuple(ports[count:])
    return Layout(secrets.token_hex(16), secrets.token_urlsafe(32), clients, controllers)


def read_or_make_layout(
    directory: Path, count: int, port: int | None, default_port: int, host: str = "127.0.0.1"
) -> Layout:
    """Return the layout stored in ``directory``, or store a new one.

    If ``port`` is None, the first client port of a new layout is ``default_port``, and a stored layout may
    have any port. Raises ConfigError if ``count``, or a ``port`` other than 0, differs from the stored
    layout. Raises ListenError if a port is in use, and DiskFullError; then nothing is stored.
    """
    file = directory / _CLUSTER_FILE
    if not file.exists():
        layout = new_layout(count, default_port if port is None else port)
        _check_ports(layout, host)
        settings = {name.replace("_", "."): value for name, value in asdict(layout).items()}
        _write_private(file, _toml(settings))
        return layout
    found = tomllib.loads(file.read_text())
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    layout = Layout(**{name.replace(".", "_"): value for name, value in values.items()})
    if len(layout.client_ports) != count:
        raise ConfigError(
            key="-n",
            value=count,
            allowed=f"{len(layout.client_ports)}, the number of nodes of the cluster in {directory}",
        )
    if port is not None and port != layout.client_ports[0] and port != 0:
        raise ConfigError(
            key="--port",
            value=port,
            allowed=f"{layout.client_ports[0]}, the port of the cluster in {directory}",
        )
    _check_ports(layout, host)
    return layout


def _check_ports(layout: Layout, host: str) -> None:
    for port in layout.client_ports:
        check_free(f"{host}:{port}")
    for port in layout.controller_ports:
        check_free(f"127.0.0.1:{port}")


def node_settings(
    layout: Layout, node_id: int, host: str, directory: Path, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of node ``node_id`` (from 1). A test compares them with docker-compose.yml."""
    count = len(layout.client_ports)
    voters = [f"{number}@127.0.0.1:{port}" for number, port in enumerate(layout.controller_ports, 1)]
    port = layout.client_ports[node_id - 1]
    settings = {
        "node.id": node_id,
        "process.roles": "broker,controller",
        "controller.quorum.voters": ",".join(voters),
        "cluster.id": layout.cluster_id,
        "cluster.secret": layout.cluster_secret,
        "listeners": f"{host}:{port}",
        "log.dirs": str(directory / f"node-{node_id}"),
        "default.replication.factor": min(3, count),
        "min.insync.replicas": 2 if count >= 3 else 1,
    }
    if host in _EVERY_INTERFACE:
        settings["advertised.listeners"] = f"127.0.0.1:{port}"
    return settings | dict(overrides)


def _toml(settings: Mapping[str, Any]) -> str:
    """Return the settings as TOML with quoted dotted names. The values are encoded as JSON."""
    return "".join(f'"{name}" = {json.dumps(value)}\n' for name, value in settings.items())


def _write_private(file: Path, text: str) -> None:
    """Create or replace a file that only its owner may read, because it contains the secret.

    Raises DiskFullError, and then leaves the file unchanged.
    """
    RealFileSystem().write_atomically(str(file), text.encode())


class DevCluster:
    """Starts and stops node processes together, in one event loop.

    A node that ends on its own or is killed is reported and not restarted.
    """

    def __init__(
        self, directory: Path, layout: Layout, host: str, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self.layout = layout
        self._host = host
        self.overrides = overrides or {}
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._is_stopping = False

    @property
    def addresses(self) -> list[str]:
        host = "127.0.0.1" if self._host in _EVERY_INTERFACE else self._host
        return [f"{host}:{port}" for port in self.layout.client_ports]

    @property
    def secret_path(self) -> Path:
        """The file with the cluster's secret."""
        return self.directory / _CLUSTER_FILE

    def log_path(self, node_id: int) -> Path:
        return self.directory / f"node-{node_id}.log"

    def settings_path(self, node_id: int) -> Path:
        return self.directory / f"node-{node_id}.toml"

    async def start(self) -> ClusterView:
        """Start every node and wait until all brokers are live and all partitions are in sync.

        Prints after _SHORTAGE_QUIET_S seconds if the disk has no space left. Raises NodeEndedError,
        ForeignClusterError, DiskFullError, and StartTimeoutError after START_LIMIT_S seconds.
        """
        warning = asyncio.get_running_loop().call_later(_SHORTAGE_QUIET_S, self._explain_shortage)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                return await self._start()
        except TimeoutError:
            if shortage := self._shortage():
                raise DiskFullError(shortage, hint="free space; nothing was lost") from None
            raise StartTimeoutError(
                f"the cluster has not started within {START_LIMIT_S:g} s",
                hint=f"the log files of its nodes are in {self.directory}",
            ) from None
        finally:
            warning.cancel()

    async def _start(self) -> ClusterView:
        from kafkalite.client.admin.cluster_health import RequestedState, look_from, unmet_conditions

        for node_id in range(1, len(self.layout.client_ports) + 1):
            settings = node_settings(self.layout, node_id, self._host, self.directory, self.overrides)
            _write_private(self.settings_path(node_id), _toml(settings))
            self.processes[node_id] = await self._spawn(node_id)
        requested = RequestedState(broker_count=len(self.processes), is_fully_in_sync=True)
        while True:
            for node_id, process in self.processes.items():
                if process.returncode is not None:
                    raise self._ended(node_id)
            with suppress(KafkaliteError):
                view = await look_from(self.addresses, timeout_ms=_ANSWER_MS)
                if view.cluster_id != self.layout.cluster_id:
                    foreign = view.cluster_id
                    break
                if not unmet_conditions(view, requested):
                    return view
            await asyncio.sleep(_POLL_S)
        raise ForeignClusterError(
            f"another cluster, {foreign}, responds on {self.addresses[0]} or a port after it; nothing was"
            " changed there",
            hint="choose other ports: --port N, or --port 0 for free ones",
        )

    def _shortage(self) -> str:
        """Return that the disk has no space left for the first node's data, or ""."""
        filesystem, path = RealFileSystem(), str(self.directory)
        shortage = filesystem.shortage_of(os.statvfs(path), SHORTAGE_BYTES)
        return "" if shortage is None else f"no space left for {self.directory / 'node-1'}: {shortage}"

    def _explain_shortage(self) -> None:
        if shortage := self._shortage():
            click.echo(f"{shortage}; {_FULL_HINT}; Ctrl-C stops the start", err=True)

    async def _spawn(self, node_id: int) -> asyncio.subprocess.Process:
        words = ["server", "start", "--file", str(self.settings_path(node_id)), "--log-format", "console"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KAFKALITE_")}
        with self.log_path(node_id).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kafkalite",
                *words,
                env=environment | {"NO_COLOR": "1", PARENT_PIPE: "1"},
                stdin=stdin_for_children(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the nodes cleanly
            )

    def _ended(self, node_id: int) -> NodeEndedError:
        lines = self.log_path(node_id).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return NodeEndedError(
            f"node {node_id} ended during the start of the cluster:\n" + "\n".join(lines),
            hint=f"its full log is {self.log_path(node_id)}",
        )

    async def watch(self) -> None:
        """Report each node that ends, and wait until no node runs, including nodes that a user restarted.

        Then raise NodeEndedError if a process of ``start`` was killed or had an exit code other than 0.
        """

        async def one(node_id: int, process: asyncio.subprocess.Process) -> None:
            status = await process.wait()
            if self._is_stopping:
                return
            how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
            again = f"{program_name()} server start -f {self.settings_path(node_id)}"
            click.echo(f"node {node_id} ended {how}; restart it with: {again}", err=True)

        await asyncio.gather(*(one(node_id, process) for node_id, process in self.processes.items()))
        # Nodes that were restarted by hand are no children, so only their locks show their end.
        while self._running():  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_S)
        if any(process.returncode for process in self.processes.values()):
            raise NodeEndedError("every node has ended", hint=f"their log files are in {self.directory}")

    async def stop(self) -> None:
        """Shut every node down cleanly, including nodes that a user restarted.

        If that takes longer than _STOP_QUIET_S seconds, prints why. Kills the nodes that still run after
        STOP_LIMIT_S seconds.
        """
        self._is_stopping = True
        asked: set[int] = set()  # a second signal would end a process at once
        loop = asyncio.get_running_loop()
        running_count = len(self._running())
        explanation = loop.call_later(_STOP_QUIET_S, self._explain_stop, running_count)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                while running := self._running():
                    _signal(running - asked, signal.SIGTERM)
                    asked |= running
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            click.echo(f"nodes that did not stop within {STOP_LIMIT_S:g} s are killed", err=True)
        finally:
            explanation.cancel()
            self.kill()
            for process in self.processes.values():
                await process.wait()

    def _explain_stop(self, running_count: int) -> None:
        """Print why the stop of ``running_count`` nodes takes time."""
        count = len(self.layout.client_ports)
        work = "handing over partitions and syncing logs"
        if 2 * running_count <= count:
            why = f"only {running_count} of {count} nodes ran"
            work = f"looking for a controller to hand over partitions, but {why}"
        click.echo(f"stopping {plural(running_count, 'node')}: {work}; Ctrl-C again ends at once", err=True)

    def kill(self) -> None:
        _signal(self._running(), signal.SIGKILL)

    def _running(self) -> set[int]:
        """Return the ids of the processes that run nodes now, including nodes that a user restarted."""
        own = {process.pid for process in self.processes.values() if process.returncode is None}
        locks = [self.directory / f"node-{number}" / files.LOCK_FILE for number in self.processes]
        return own | {pid for pid in (lock_holder(str(lock)) for lock in locks) if pid is not None}


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def run(cluster: DevCluster, when_up: Any) -> None:
    """Run the cluster until a signal arrives or all nodes have ended.

    ``when_up()`` is awaited when the cluster has started. After the first signal, SIGINT or SIGTERM kills the
    nodes and ends this process. Raises the errors of ``start``, ``when_up`` and ``watch``.
    """

    with stop_signals(cluster.kill) as stopped:
        try:
            if await finishes_first(_up(cluster, when_up), stopped):
                await finishes_first(cluster.watch(), stopped)
        finally:
            await cluster.stop()


async def _up(cluster: DevCluster, when_up: Any) -> None:
    await cluster.start()
    await when_up()


class Home:
    """The directory of the cluster's files: ``data``, or a temporary directory that ``close`` removes."""

    def __init__(self, data: Path | None) -> None:
        self.is_temporary = data is None
        self.path = Path(tempfile.mkdtemp(prefix="kl-dev-")) if data is None else data.absolute()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def close(self) -> None:
        if self.is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
