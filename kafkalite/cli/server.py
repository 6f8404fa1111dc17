"""``kl server``: runs a broker as a service, and formats its data directory."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import click

from kafkalite.cli import exit_codes, invocation
from kafkalite.cli.argument_types import DirectoryPath
from kafkalite.cli.config import parse_overrides
from kafkalite.cli.exit_codes import ExistsAlreadyError, UsageError
from kafkalite.cli.invocation import debug_option, output_option
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import pick, print_document

if TYPE_CHECKING:
    import asyncio

    from kafkalite.broker.broker import Broker
    from kafkalite.broker.config import BrokerConfig, Settings

#: The time between two attempts to start a broker when a resource is exhausted.
RESTART_INTERVAL_S: Final = 2.0

logger = logging.getLogger(__name__)


@click.group(cls=Group)
def server() -> None:
    """Run a broker; format its data directory."""


def _load(file: Path | None, overrides: tuple[str, ...], data: Path | None) -> Settings:
    from kafkalite.broker.config import load_settings

    flags: dict[str, Any] = dict(parse_overrides(overrides))
    if data is not None:
        flags["log.dirs"] = str(data)
    return load_settings(file, os.environ, flags)


@server.command(
    epilog="""\b
Settings have Kafka's names. Flags override the environment (KAFKALITE_LOG_RETENTION_MS),
which overrides the file, which overrides the defaults; 'kl config explain NAME' shows the source.

\b
Examples:
  kl server start --data /var/lib/kafkalite
  kl server start -f kafkalite.toml --set listeners=0.0.0.0:9092 --log-format json
  kl server start -f kafkalite.toml --rejoin      once, after a disk was replaced"""
)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Settings in TOML.")
@click.option("--data", type=DirectoryPath(path_type=Path), help="The data directory: log.dirs.")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="One setting.")
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    envvar="KL_LOG_FORMAT",
    show_envvar=True,
    help="Format of the log lines on stderr.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="KL_LOG_LEVEL",
    show_envvar=True,
)
@click.option(
    "--rejoin",
    is_flag=True,
    help="This node's disk was replaced: copy the data from the other nodes and rejoin. "
    "Same as --set controller.quorum.rejoin=true, for one start.",
)
@debug_option
def start(
    file: Path | None,
    data: Path | None,
    overrides: tuple[str, ...],
    log_format: str,
    log_level: str,
    rejoin: bool,
) -> None:
    """Run a node in the foreground. SIGTERM, SIGHUP and Ctrl-C shut it down cleanly."""
    if rejoin:
        overrides = (*overrides, "controller.quorum.rejoin=true")
    settings = _load(file, overrides, data)
    if settings.config.log_dirs is None:
        raise UsageError(
            "no data directory: give --data DIRECTORY, or log.dirs in the file",
            hint="'kl dev' starts a broker in memory",
        )
    from kafkalite.cli.server_logging import configure
    from kafkalite.cli.stdio import silence_stdout
    from kafkalite.log_fields import Fields
    from kafkalite.parent_pipe import stop_with_parent

    stop_with_parent()
    configure(log_level, cast('Literal["console", "json"]', log_format))

    async def when_up(broker: Broker) -> None:
        from kafkalite import __version__

        addresses = ", ".join(broker.addresses)
        try:
            click.echo(f"kafkalite {__version__}, node {settings.config.node_id}, is up on {addresses}")
        except OSError as error:  # the log has the line "broker started", and nothing else is printed
            logger.warning("stdout not written %s", Fields(error=error))
            silence_stdout()

    invocation.run(lambda: serve(settings.config, when_up))


@server.command("format")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Settings in TOML.")
@click.option("--data", type=DirectoryPath(path_type=Path), help="The data directory: log.dirs.")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="One setting.")
@click.option("--cluster-id", help="The cluster to join.  [default: cluster.id, or a new one]")
@invocation.number_option("--node-id", help="This node's number.  [default: node.id]", minimum=0)
@click.option("--restore", is_flag=True, help="Write a lost or damaged node.json again; keep all data.")
@click.option("--if-not-formatted", is_flag=True, help="Accept a directory that is already formatted.")
@click.option("--dry-run", is_flag=True, help="Show the result, change nothing.")
@debug_option
@output_option
def format_directory(
    file: Path | None,
    data: Path | None,
    overrides: tuple[str, ...],
    cluster_id: str | None,
    node_id: int | None,
    restore: bool,
    if_not_formatted: bool,
    dry_run: bool,
) -> None:
    """Create a data directory with cluster id, node id and directory id.

    --restore is for a node without peers whose node.json is lost or damaged. It needs --cluster-id and
    --node-id.
    """
    from kafkalite.raft.intact_metadata import check_alone, read_intact_metadata
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.log_store import METADATA_POINT, format_data_dir, read_identity, restore_identity

    config = _load(file, overrides, data).config
    if config.log_dirs is None:
        raise UsageError("no data directory: give --data DIRECTORY, or log.dirs in the file")
    path = config.log_directories[0]  # a start formats the further ones
    filesystem = RealFileSystem()
    if restore:
        if cluster_id is None or node_id is None or if_not_formatted or dry_run:
            raise UsageError(
                "--restore takes --cluster-id and --node-id",
                hint="if the cluster id is lost, choose a new one",
            )
        state = read_intact_metadata(filesystem, f"{path}/{METADATA_POINT}", node_id)
        check_alone(filesystem, path, node_id, state)
        restore_identity(filesystem, path, cluster_id=cluster_id, node_id=node_id)
        if_not_formatted = True
    identity = read_identity(filesystem, path)
    if identity is not None and not if_not_formatted:
        raise ExistsAlreadyError(
            f"{path} is already formatted, for node {identity.node_id}",
            hint="use it as it is (--if-not-formatted), or choose another directory",
        )
    document: dict[str, Any] = {"path": path}
    if dry_run:
        print_document(
            document | {"formatted_already": identity is not None, "dry_run": True},
            invocation.current().output,
        )
        return
    if identity is None:
        identity = format_data_dir(
            filesystem,
            path,
            cluster_id=cluster_id or config.cluster_id,
            node_id=config.node_id if node_id is None else node_id,
        )
    document |= pick(identity, "cluster_id", "node_id", "directory_id")
    print_document(document, invocation.current().output)


async def serve(config: BrokerConfig, when_up: Callable[[Broker], Awaitable[None]]) -> None:
    """Run a broker until SIGTERM, SIGINT, SIGHUP or its own failure, then stop it cleanly.

    ``when_up(broker)`` is awaited after each start. If the broker cannot start (R55) or fails (R54) because a
    resource is exhausted, it is started again after RESTART_INTERVAL_S seconds. Any other error is raised.
    After the first signal, SIGTERM or SIGINT ends the process at once.
    """
    import asyncio

    from kafkalite.broker.server.descriptors import raise_limit
    from kafkalite.errors import StorageError, StorageExhaustedError
    from kafkalite.log_fields import Fields

    raise_limit()
    with stop_signals() as stopped:
        while not stopped.done():
            try:
                await _serve_once(config, when_up, stopped)
                return
            except StorageError as error:
                causes = (error, error.__cause__)
                if not any(isinstance(cause, StorageExhaustedError) for cause in causes):
                    raise
                fields = Fields(error=error, retry_s=RESTART_INTERVAL_S)
                logger.error("broker cannot run now, it is started again %s", fields)
            await asyncio.wait({stopped}, timeout=RESTART_INTERVAL_S)


async def _serve_once(
    config: BrokerConfig, when_up: Callable[[Broker], Awaitable[None]], stopped: asyncio.Future[Any]
) -> None:
    """Run a broker until ``stopped`` completes, or the broker fails. Raises the broker's error."""
    import asyncio

    from kafkalite.broker.broker import Broker

    broker = Broker(config)
    if not await finishes_first(broker.start(), stopped):  # stopped while it waited for its cluster
        return
    failed = asyncio.ensure_future(broker.wait_stopped())
    try:
        await when_up(broker)
        await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await broker.stop()
        await failed


@contextmanager
def stop_signals(before_exit: Callable[[], None] = lambda: None) -> Iterator[asyncio.Future[Any]]:
    """Yield a future that the first SIGTERM, SIGINT or SIGHUP completes.

    If SIGTERM or SIGINT arrives after that signal, ``before_exit`` is called and the process exits. SIGHUP is
    ignored then, because a closed terminal often sends it twice.
    """
    import asyncio

    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() and number != signal.SIGHUP:
            before_exit()
            os._exit(exit_codes.INTERRUPTED)
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, *invocation.ending_signals()]
    for number in numbers:
        with suppress(NotImplementedError):  # no signals on this event loop; Ctrl-C still cancels the task
            loop.add_signal_handler(number, on_signal, number)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        yield stopped
    finally:
        stopped.cancel()
        for number in numbers:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)


async def finishes_first(work: Coroutine[Any, Any, object], stopped: asyncio.Future[Any]) -> bool:
    """Run ``work`` until it finishes or ``stopped`` completes. Return True if it finished.

    Otherwise cancel ``work`` and return False. Raises the exception of ``work``.
    """
    import asyncio

    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        return False
    task.result()
    return True
