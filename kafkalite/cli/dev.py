"""``kl dev``: starts a broker or a small cluster for development, with topics."""

# Tests: tests/cli/test_dev_cluster.py, tests/cli/test_processes.py

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.core import ParameterSource

from kafkalite.cli import invocation
from kafkalite.cli.argument_types import DirectoryPath
from kafkalite.cli.config import parse_overrides
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.invocation import BOOTSTRAP_VARIABLE, DEFAULT_BOOTSTRAP_SERVERS, debug_option, program_name
from kafkalite.cli.output import plural
from kafkalite.cli.server import serve
from kafkalite.model import topic_name_problem

if TYPE_CHECKING:
    from kafkalite.broker.broker import Broker

_DEFAULT_PORT: Final = 9092
#: The settings that ``kl dev -n`` makes for each node.
_OF_NODES: Final = {
    "node.id",
    "process.roles",
    "controller.quorum.voters",
    "controller.listeners",
    "cluster.id",
    "cluster.secret",
    "listeners",
    "advertised.listeners",
    "log.dirs",
}
_IN_MEMORY: Final = "in memory: all data is lost when it stops"
MAX_NODES: Final = 9


class TopicSpec(NamedTuple):
    """A topic to create: ``NAME[:PARTITIONS[:REPLICAS]]``. -1 selects the broker's default."""

    name: str
    partition_count: int
    replication_factor: int


def parse_topic_spec(text: str) -> TopicSpec:
    """Parse a topic given on the command line. Raises UsageError."""
    name, *numbers = text.split(":")
    problem = topic_name_problem(name)
    if (
        problem is None
        and len(numbers) <= 2
        and all(number.isascii() and number.isdigit() for number in numbers)
    ):
        counts = [int(number) for number in numbers] + [-1, -1]
        if 0 not in counts[: len(numbers)]:
            return TopicSpec(name, counts[0], counts[1])
    raise UsageError(
        f"--topic {text!r} is not NAME:PARTITIONS:REPLICAS, for example events:3:1", hint=problem or ""
    )


def parse_topic_specs(texts: Iterable[str]) -> list[TopicSpec]:
    """Parse topics, and omit duplicates.

    Raises UsageError for an invalid text, and if a topic is given again with other partitions or replicas.
    """
    specs: dict[str, TopicSpec] = {}
    for text in texts:
        spec = parse_topic_spec(text)
        if specs.setdefault(spec.name, spec) != spec:
            raise UsageError(
                f"--topic {text}: topic {spec.name!r} is given before, with other partitions or replicas",
                hint="give each topic once",
            )
    return list(specs.values())


@click.command(
    epilog="""Settings are read from the environment, too (KAFKALITE_NUM_PARTITIONS); flags override them.

\b
Examples:
  kl dev                                  in memory, on localhost:9092
  kl dev --topic events:3 --topic users   with topics
  kl dev --data ./data                    on disk, kept for the next start
  kl dev --port 0 --print-env             any free port; prints export lines
  kl dev -n 3 --data ./cluster            three nodes as processes: kill one and watch"""
)
@click.option(
    "-n",
    "--nodes",
    type=click.IntRange(1, MAX_NODES),
    default=1,
    show_default=True,
    help="Start N processes, each a broker and a controller. Their log files are beside their data.",
)
@click.option(
    "--topic", "topics", multiple=True, metavar="NAME:P:R", help="Create a topic: P partitions, R replicas."
)
@click.option(
    "--data",
    type=DirectoryPath(path_type=Path),
    metavar="DIRECTORY",
    help="Keep data here.  [default: in memory; for several nodes a directory that is removed at the end]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port of the first node; the others follow. The controllers of several nodes use ports that are 100 "
    f"higher. 0: any free port.  [default: {_DEFAULT_PORT}]",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every interface."
)
@click.option(
    "--print-env", is_flag=True, help="Print only 'export NAME=value' lines on stdout, the rest on stderr."
)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Change a broker setting.")
@debug_option
def dev(
    topics: tuple[str, ...],
    nodes: int,
    data: Path | None,
    port: int | None,
    host: str,
    print_env: bool,
    overrides: tuple[str, ...],
) -> None:
    """Start a broker or a cluster in the foreground; Ctrl-C stops it."""
    from kafkalite.broker.config import broker_variables, load_settings

    specs = parse_topic_specs(topics)
    for spec in specs:
        if spec.replication_factor > nodes:
            raise UsageError(
                f"--topic {spec.name}: {spec.replication_factor} replicas need as many nodes, and there "
                f"{'is' if nodes == 1 else 'are'} {nodes}",
                hint=f"use fewer replicas, or start more nodes with -n, at most {MAX_NODES}",
            )
    for part in (data, *data.parents) if data is not None else ():
        if part.exists() and not part.is_dir():
            raise UsageError(
                f"--data {data}: {part} is not a directory",
                hint="name a directory; it is created if it does not exist",
            )
    flags: dict[str, Any] = dict(parse_overrides(overrides))
    variables = broker_variables(os.environ)
    if nodes > 1:
        ignored = [each for each, name in variables.items() if name in _OF_NODES]
        environment = {each: os.environ[each] for each in variables if each not in ignored}
        load_settings(None, environment, flags)  # reports invalid settings here instead of in each node
        for variable in ignored:
            invocation.say(f"{variable} has no effect: kl dev -n sets {variables[variable]} of each node")
        settings = {variables[each]: text for each, text in environment.items()}
        _dev_cluster(nodes, specs, data, port, _bracketed(host), settings | flags, print_env)
        return
    is_host_given = click.get_current_context().get_parameter_source("host") is not ParameterSource.DEFAULT
    if port is not None or is_host_given or "listeners" not in variables.values():
        flags.setdefault("listeners", f"{_bracketed(host)}:{_DEFAULT_PORT if port is None else port}")
    if data is not None:
        flags.setdefault("log.dirs", str(data))
    config = load_settings(None, os.environ, flags).config

    async def when_up(broker: Broker) -> None:
        home = f"data in {config.log_dirs}" if config.log_dirs else _IN_MEMORY
        await _create(broker.bootstrap_servers, specs)
        _greet(broker.bootstrap_servers, [f"({home})"], specs, print_env=print_env)

    invocation.run(lambda: serve(config, when_up))
    click.echo("stopped.", err=True)


def _dev_cluster(
    count: int,
    specs: list[TopicSpec],
    data: Path | None,
    port: int | None,
    host: str,
    overrides: dict[str, Any],
    print_env: bool,
) -> None:
    from kafkalite.cli.dev_cluster import (
        DevCluster,
        Home,
        NodeEndedError,
        StartTimeoutError,
        read_or_make_layout,
        run,
    )

    home = Home(data)
    try:
        layout = read_or_make_layout(home.path, count, port, _DEFAULT_PORT, host)
        cluster = DevCluster(home.path, layout, host, overrides)
        servers = ",".join(cluster.addresses)

        async def when_up() -> None:
            await _create(servers, specs)
            lines = [f"({count} nodes, data in {home.path}{', removed at the end' * home.is_temporary})"]
            for node_id, process in cluster.processes.items():
                address = cluster.addresses[node_id - 1]
                lines.append(
                    f"  node {node_id}  {address}  pid {process.pid}  log {cluster.log_path(node_id)}"
                )
            lines.append(
                f"  the secret, for kl cluster shutdown and elect: --secret-file {cluster.secret_path}"
            )
            _greet(servers, lines, specs, print_env=print_env)

        invocation.run(lambda: run(cluster, when_up))
    except (NodeEndedError, StartTimeoutError):
        home.is_temporary = False  # its log files show why
        raise
    finally:
        home.close()
    click.echo("stopped.", err=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def _create(servers: str, specs: list[TopicSpec]) -> None:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.errors import TopicAlreadyExistsError

    if not specs:
        return
    async with Admin(servers) as admin:
        for spec in specs:
            try:
                await admin.create_topic(spec.name, spec.partition_count, spec.replication_factor)
            except TopicAlreadyExistsError:  # created by an earlier run with --data
                continue


def _greet(servers: str, about: list[str], specs: list[TopicSpec], *, print_env: bool) -> None:
    from kafkalite import __version__

    if print_env:
        click.echo(f"export {BOOTSTRAP_VARIABLE}={servers}")
    topic = specs[0].name if specs else "greetings"
    is_default = servers.replace("127.0.0.1", "localhost") == DEFAULT_BOOTSTRAP_SERVERS
    lines = [f"kafkalite {__version__} is up on {servers} {about[0]}", *about[1:]]
    if specs:
        names = ", ".join(
            f"{spec.name} ({plural(max(1, spec.partition_count), 'partition')})" for spec in specs
        )
        lines.append(f"topics: {names}")
    lines += [
        "",
        "In another terminal:",
        *([] if is_default else [f"  export {BOOTSTRAP_VARIABLE}={servers}"]),
        f"  echo hello | {program_name()} produce {topic}",
        f"  {program_name()} consume {topic}",
        f"  {program_name()} topic list",
        f'In Python: kafkalite.Producer("{servers}")',
        "Ctrl-C stops it.",
    ]
    click.echo("\n".join(lines), err=print_env)
