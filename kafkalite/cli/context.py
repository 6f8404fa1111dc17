"""``kl context``: gives clusters names, so that commands need no addresses."""

# Tests: tests/cli/test_context.py

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kafkalite.cli import connect, contexts, invocation
from kafkalite.cli.argument_types import NotEmpty
from kafkalite.cli.exit_codes import ExistsAlreadyError
from kafkalite.cli.invocation import (
    client_options,
    complete_contexts,
    debug_option,
    output_option,
    program_name,
)
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, print_listing

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin


@click.group(cls=Group)
def context() -> None:
    """Give names to clusters. By default, commands use the brokers of the context in use."""


@context.command(
    epilog="""\b
Examples:
  kl context add dev                          the cluster that -b or the environment names
  kl context add prod -b kafka-1:9092 -X client.id=me
  kl context use prod
  kl --context dev topic list                 another one for one command"""
)
@click.argument("name", type=NotEmpty("the name of a context"))
@click.option("--replace", is_flag=True, help="Replace a context with this name.")
@click.option("--offline", is_flag=True, help="Do not ask the cluster for its other brokers.")
@client_options
def add(name: str, replace: bool, offline: bool) -> None:
    """Add the context NAME with all brokers of the cluster and the -X properties, and use it.

    A relative path in a property such as ssl.keystore.location is stored as an absolute path.
    """
    current = invocation.current()
    known = contexts.read()
    if name in known.known and not replace:
        raise ExistsAlreadyError(f"there is a context {name!r}", hint="--replace replaces it")
    servers = current.bootstrap_servers if offline else ",".join(connect.ask_admin(_addresses))
    properties = {
        key: str(Path(value).absolute()) if key.endswith(".location") and value else value
        for key, value in current.properties.items()
    }
    known.known[name] = contexts.Context(servers, properties)
    known.used = name
    contexts.write(known)
    invocation.say(f"context {name!r}: {servers}")


async def _addresses(admin: Admin) -> list[str]:
    """Return the addresses of all brokers, live brokers first."""
    brokers = (await admin.describe_cluster()).brokers
    return [each.address for each in sorted(brokers, key=lambda each: (each.is_fenced, each.node_id))]


@context.command("list")
@debug_option
@output_option
def list_() -> None:
    """List the contexts."""
    known = contexts.read()
    rows = [
        {"name": name, "servers": each.servers, "used": name == known.used, "properties": each.properties}
        for name, each in known.known.items()
    ]
    columns = (
        Column("name", "NAME"),
        Column("servers", "BROKERS"),
        Column("used", "IN USE"),
        Column("properties", "PROPERTIES", wide=True),
    )
    empty = f"no contexts; try: {program_name()} context add dev"
    print_listing(rows, columns, invocation.current().output, if_empty=empty)


@context.command()
@click.argument("name", shell_complete=complete_contexts)
@debug_option
def use(name: str) -> None:
    """Use the context NAME from now on, unless -b, --context or the environment selects brokers."""
    known = contexts.read()
    known.get(name)
    known.used = name
    contexts.write(known)


@context.command()
@click.argument("name", shell_complete=complete_contexts)
@debug_option
def delete(name: str) -> None:
    """Delete the context NAME. The cluster is not changed."""
    known = contexts.read()
    known.get(name)
    del known.known[name]
    if known.used == name:
        known.used = ""
    contexts.write(known)
