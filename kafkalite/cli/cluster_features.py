"""``kl cluster features``: finalised feature levels, and the levels that each node supports."""

from __future__ import annotations

from typing import Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.cluster_reassign import cluster as cluster
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, print_listing, rows_of
from kafkalite.client.admin.admin import Admin
from kafkalite.client.admin.descriptions import FeatureDescription
from kafkalite.metadata.features import METADATA_VERSION


def _range(levels: tuple[int, int] | None) -> str:
    return "unknown" if levels is None else f"{levels[0]}-{levels[1]}"


_COLUMNS: Final = (
    Column("feature", "FEATURE"),
    Column("finalized_level", "FINALISED"),
    Column("common_level", "SUPPORTED BY ALL"),
    Column(
        "nodes",
        "NODES",
        read=lambda each: [f"{node_id}: {_range(levels)}" for node_id, levels in each.nodes.items()],
    ),
)


@cluster.group(cls=Group)
def features() -> None:
    """Feature levels: what all nodes support, and what is finalised."""


@features.command(
    epilog="""\b
Examples:
  kl cluster features describe
  kl cluster features describe -o json"""
)
@listing_options
def describe() -> None:
    """List the features with their finalised levels, and the levels that each node supports."""

    async def ask(admin: Admin) -> list[FeatureDescription]:
        return list((await admin.describe_features()).values())

    found = connect.ask_admin(ask)
    print_listing(rows_of(found, _COLUMNS), _COLUMNS, invocation.current().output, name_key="feature")


def _levels(metadata_version: int | None, chosen: tuple[str, ...]) -> dict[str, int]:
    levels: dict[str, int] = {} if metadata_version is None else {METADATA_VERSION: metadata_version}
    for each in chosen:
        name, separator, level = each.partition("=")
        if not separator or not level.isdecimal() or len(level) > 9:
            raise UsageError(f"{each!r} is not NAME=LEVEL", hint="for example --feature metadata.version=2")
        levels[name] = int(level)
    if not levels:
        raise UsageError(
            "give the level to finalise: --metadata-version N",
            hint="'kl cluster features describe' shows the levels that all nodes support",
        )
    return levels


@features.command(
    epilog="""\b
Examples:
  kl cluster features upgrade --metadata-version 2 --dry-run   only check the nodes
  kl cluster features upgrade --metadata-version 2 --yes"""
)
@click.option("--metadata-version", type=click.IntRange(min=1), metavar="N", help="Finalise this level.")
@click.option("--feature", "chosen", multiple=True, metavar="NAME=LEVEL", help="The same for any feature.")
@click.option("--dry-run", is_flag=True, help="Check the request; change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@client_options
def upgrade(metadata_version: int | None, chosen: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Finalise feature levels. Afterwards no node can go back to a version without them."""
    levels = _levels(metadata_version, chosen)

    async def update(admin: Admin, *, validate_only: bool) -> Any:
        return await admin.update_features(levels, validate_only=validate_only)

    text = ", ".join(f"{name} {level}" for name, level in levels.items())
    connect.ask_admin(lambda admin: update(admin, validate_only=True))
    if dry_run:
        click.echo(f"{text}: may be finalised")
        return
    if not yes:
        invocation.confirm(
            f"Finalise {text}? No node can then go back to an earlier version.", "nothing was changed"
        )
    connect.ask_admin(lambda admin: update(admin, validate_only=False))
    click.echo(f"{text}: finalised")
