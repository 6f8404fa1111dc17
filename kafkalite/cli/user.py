"""``kl user``: users and their SCRAM credentials. A password is never part of a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import ExistsAlreadyError, UsageError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, print_listing
from kafkalite.cli.this_node import own_config
from kafkalite.client.admin.credentials import MECHANISMS
from kafkalite.security.scram import DEFAULT_ITERATIONS, MAX_ITERATIONS, MIN_ITERATIONS

if TYPE_CHECKING:
    from kafkalite.broker.config import BrokerConfig
    from kafkalite.client.admin.admin import Admin

_COLUMNS: Final = (Column("name", "USER"), Column("mechanisms", "MECHANISMS"))
_STDIN: Final = "-"


@click.group(cls=Group)
def user() -> None:
    """Users and their passwords, for listeners that require logins (SASL_SSL, SASL_PLAINTEXT)."""


def _password_options(function: Any) -> Any:
    for option in reversed(
        (
            click.option(
                "--password-file",
                metavar="FILE",
                help="A file with the password in its first line; '-' is standard input. Default: a prompt.",
            ),
            click.option(
                "--mechanism",
                "mechanisms",
                type=click.Choice(MECHANISMS, case_sensitive=False),
                multiple=True,
                help="May be repeated. Default: both.",
            ),
            click.option(
                "--iterations",
                type=click.IntRange(MIN_ITERATIONS, MAX_ITERATIONS),
                default=DEFAULT_ITERATIONS,
                show_default=True,
                help="The cost of guessing a password from a stolen credential.",
            ),
            click.option(
                "--this-node",
                is_flag=True,
                help="Log in to the node that --file and this environment configure with its cluster.secret, "
                "not as a user: for the first user.",
            ),
            click.option(
                "-f", "--file", type=click.Path(path_type=Path), help="This node's settings in TOML."
            ),
        )
    ):
        function = option(function)
    return function


def _node(is_used: bool, file: Path | None) -> BrokerConfig | None:
    """Return the settings of this node if ``is_used``, otherwise None.

    Raises UsageError if ``file`` is given although ``is_used`` is False. Raises ConfigError for invalid
    settings.
    """
    if file is not None and not is_used:
        raise UsageError("--file has the settings of this node: add --this-node")
    return own_config(file) if is_used else None


def _password(file: str | None) -> str:
    """Return the password from a file, standard input, or a prompt. Raises UsageError if there is none."""
    if file is None and not sys.stdin.isatty():
        raise UsageError("no password: add --password-file FILE, or '-' to read it from standard input")
    if file is None:
        prompted: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return prompted
    text = sys.stdin.readline() if file == _STDIN else Path(file).read_text()
    password = text.split("\n", 1)[0].removesuffix("\r")
    if not password:
        raise UsageError("the password is empty: its first line counts")
    return password


@user.command(
    epilog="""\b
Examples:
  kl user add alice                              asks for the password
  kl user add alice --password-file alice.txt
  pass show kafka/alice | kl user add alice --password-file -
  kl user add admin --this-node -f node.toml     the first user, on a node's machine"""
)
@click.argument("name", metavar="USER")
@_password_options
@client_options
def add(
    name: str,
    password_file: str | None,
    mechanisms: Sequence[str],
    iterations: int,
    this_node: bool,
    file: Path | None,
) -> None:
    """Add a user."""
    node = _node(this_node, file)
    password = _password(password_file)

    async def main(admin: Admin) -> None:
        if name in await admin.describe_users():
            raise ExistsAlreadyError(
                f"there is a user {name!r} already", hint=f"'kl user rotate {name}' sets another password"
            )
        await admin.set_user_password(
            name, password, mechanisms=mechanisms or MECHANISMS, iterations=iterations
        )

    connect.ask_admin(main, this_node=node)
    invocation.say(f"user {name!r} added")


@user.command()
@click.argument("name", metavar="USER")
@_password_options
@client_options
def rotate(
    name: str,
    password_file: str | None,
    mechanisms: Sequence[str],
    iterations: int,
    this_node: bool,
    file: Path | None,
) -> None:
    """Set another password of a user, by default for the mechanisms that the user has."""
    node = _node(this_node, file)
    password = _password(password_file)

    async def main(admin: Admin) -> None:
        present = (await admin.describe_users([name]))[name]
        chosen = mechanisms or tuple(present)
        await admin.set_user_password(name, password, mechanisms=chosen, iterations=iterations)

    connect.ask_admin(main, this_node=node)
    invocation.say(f"user {name!r} has another password")


@user.command("list")
@listing_options
def list_() -> None:
    """List users and their mechanisms."""
    users = connect.ask_admin(lambda admin: admin.describe_users())
    rows = [{"name": name, "mechanisms": list(found)} for name, found in users.items()]
    print_listing(rows, _COLUMNS, invocation.current().output, if_empty="no users")


@user.command()
@click.argument("name", metavar="USER")
@client_options
def delete(name: str) -> None:
    """Delete a user. Its access control rules stay."""
    connect.ask_admin(lambda admin: admin.delete_user(name))
    invocation.say(f"user {name!r} deleted")
