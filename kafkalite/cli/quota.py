"""``kl quota``: sets, removes, lists and describes the quotas of clients (KIP-546)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.invocation import client_options, listing_options, parse_settings
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, print_listing
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLE: Final = "producer_byte_rate=1000000"
_COLUMNS: Final = (
    Column("user", "USER"),
    Column("client_id", "CLIENT ID"),
    Column("ip", "ADDRESS"),
    Column("key", "QUOTA"),
    Column("value", "VALUE"),
    Column("meaning", "UNIT", wide=True),
)


@click.group(cls=Group)
def quota() -> None:
    """Limit what clients produce, fetch and change."""


def _entity_options(command: F) -> F:
    for name, what in (("ip", "address"), ("client-id", "client id"), ("user", "user")):
        command = click.option(
            f"--default-{name}", is_flag=True, help=f"Each {what} without a quota of its own."
        )(command)
        command = click.option(f"--{name}", metavar="NAME", help=f"This {what}.")(command)
    return command


def _entity(options: dict[str, Any]) -> QuotaEntity:
    """Return the entity that the options name. Raises UsageError if they name none or are invalid."""
    names: dict[str, str] = {}
    for field in QuotaEntity._fields:
        name, is_default = options[field], options[f"default_{field}"]
        if name is not None and is_default:
            flag = field.replace("_", "-")
            raise UsageError(f"--{flag} and --default-{flag} exclude each other")
        if name == "":
            raise UsageError(f"--{field.replace('_', '-')} is empty; --default-… names the default")
        if name is not None or is_default:
            names[field] = DEFAULT_ENTITY if is_default else name
    if not names:
        raise UsageError("whose quota? give --user, --client-id, both, or --ip, or their --default-…")
    return QuotaEntity(**names)


@quota.command(
    "set",
    epilog="""\b
Examples:
  kl quota set --user alice producer_byte_rate=1000000 consumer_byte_rate=2000000
  kl quota set --default-client-id request_percentage=20
  kl quota set --user alice --client-id report consumer_byte_rate=500000
  kl quota set --default-ip connection_creation_rate=10""",
)
@_entity_options
@click.argument("changes", nargs=-1, required=True, metavar="QUOTA=VALUE…")
@click.option("--dry-run", is_flag=True, help="Let the broker check the request, change nothing.")
@client_options
def set_(changes: tuple[str, ...], dry_run: bool, **options: Any) -> None:
    """Set quotas: producer_byte_rate, consumer_byte_rate, request_percentage, controller_mutation_rate or,
    for an address, connection_creation_rate."""
    entity = _entity(options)
    wanted: dict[str, float | None] = {}
    for key, text in parse_settings(changes, _EXAMPLE).items():
        try:
            wanted[key] = float(text)
        except ValueError:
            raise UsageError(f"{key}={text}: {text!r} is no number", hint=f"for example {_EXAMPLE}") from None
    connect.ask_admin(lambda admin: admin.alter_client_quotas(entity, wanted, validate_only=dry_run))
    click.echo(f"{entity}: {', '.join(wanted)} {'would be set' if dry_run else 'set'}")


@quota.command(
    epilog="""\b
Examples:
  kl quota unset --user alice producer_byte_rate
  kl quota unset --user alice                     all quotas of the user"""
)
@_entity_options
@click.argument("keys", nargs=-1, metavar="[QUOTA]…")
@client_options
def unset(keys: tuple[str, ...], **options: Any) -> None:
    """Remove quotas."""
    entity = _entity(options)

    async def main(admin: Admin) -> list[str]:
        present = (await admin.describe_client_quotas(entity)).get(entity, {})
        missing = [key for key in keys if key not in present]
        if missing or not present:
            raise NotFoundError(
                f"{entity} has no quota" + (f" {', '.join(missing)}" if missing else ""), hint="kl quota list"
            )
        removed = list(keys or present)
        await admin.alter_client_quotas(entity, dict.fromkeys(removed))
        return removed

    removed = connect.ask_admin(main)
    click.echo(f"{entity}: {', '.join(removed)} removed")


@quota.command("list")
@listing_options
def list_() -> None:
    """List the quotas that are set."""
    quotas = connect.ask_admin(lambda admin: admin.describe_client_quotas())
    rows = [_row(entity, key, value) for entity, values in quotas.items() for key, value in values.items()]
    print_listing(rows, _COLUMNS, invocation.current().output, if_empty="no quotas are set")


@quota.command(
    epilog="""\b
Examples:
  kl quota describe --user alice --client-id report
  kl quota describe --client-id report              a client that has not authenticated"""
)
@click.option("--user", default="ANONYMOUS", show_default=True, metavar="NAME", help="The client's user.")
@click.option("--client-id", default="", metavar="NAME", help="The client's client.id.")
@listing_options
def describe(user: str, client_id: str) -> None:
    """Describe the quotas that apply to a client, and the users or client ids that they are set for."""
    from kafkalite.metadata.client_quotas import CLIENT_KEYS, applied_quota

    quotas = connect.ask_admin(lambda admin: admin.describe_client_quotas())
    applied = [(key, applied_quota(quotas, key, user, client_id)) for key in CLIENT_KEYS]
    rows = [_row(one.entity, key, one.bound) for key, one in applied if one is not None]
    print_listing(
        rows, _COLUMNS, invocation.current().output, if_empty=f"user {user} has no quota as that client"
    )


def _row(entity: QuotaEntity, key: str, value: float) -> dict[str, Any]:
    from kafkalite.metadata.client_quotas import CLIENT_KEYS, IP_KEYS

    names = {field: None if name is None else name or "(default)" for field, name in entity._asdict().items()}
    shown = int(value) if value.is_integer() else value
    return {**names, "key": key, "value": shown, "meaning": {**CLIENT_KEYS, **IP_KEYS}.get(key)}
