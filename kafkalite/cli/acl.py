"""``kl acl``: adds, removes and lists access control rules, and explains their decisions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import CheckFailedError, UsageError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, plural, print_document, print_listing, rows_of
from kafkalite.errors import ClusterAuthorizationFailedError, ConnectionFailedError, RequestTimeoutError
from kafkalite.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    AclFilter,
    Authorizer,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    label,
    super_users_of,
)

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.admin.descriptions import ConfigValue

F = TypeVar("F", bound=Callable[..., Any])

NOT_ENFORCED: Final = (
    "note: broker {} does not enforce rules; start it with authorizer.class.name=StandardAuthorizer"
)
_AUTHORIZER: Final = "authorizer.class.name"
_ANSWER_TIMEOUT_S: Final = 1.0
_OPERATIONS: Final = {label(operation): operation for operation in Operation}
_COLUMNS: Final = (
    Column("principal", "PRINCIPAL"),
    Column("permission", "PERMISSION", read=lambda acl: label(Permission(acl.permission))),
    Column("operation", "OPERATION", read=lambda acl: label(Operation(acl.operation))),
    Column("resource_type", "RESOURCE", read=lambda acl: label(ResourceType(acl.resource_type))),
    Column("pattern_type", "PATTERN", read=lambda acl: label(PatternType(acl.pattern_type))),
    Column("name", "NAME"),
    Column("host", "HOST"),
)

_NAMES: Final = ", ".join(_OPERATIONS)
_OPERATION: Final = click.Choice(list(_OPERATIONS), case_sensitive=False)


def _resource_options(function: F) -> F:
    for option in reversed(
        (
            click.option("--topic", metavar="NAME", help="A topic; '*' stands for all."),
            click.option("--group", metavar="NAME", help="A consumer group."),
            click.option("--transactional-id", metavar="NAME", help="A transactional id."),
            click.option("--user", metavar="NAME", help="A user."),
            click.option("--cluster", is_flag=True, help="The cluster."),
        )
    ):
        function = option(function)
    return function


def _resource(
    topic: str | None, group: str | None, transactional_id: str | None, user: str | None, cluster: bool
) -> tuple[ResourceType, str] | None:
    """Return the resource that the options name, or None. Raises UsageError for more than one."""
    named = {
        ResourceType.TOPIC: topic,
        ResourceType.GROUP: group,
        ResourceType.TRANSACTIONAL_ID: transactional_id,
        ResourceType.USER: user,
        ResourceType.CLUSTER: CLUSTER_NAME if cluster else None,
    }
    found = [(kind, name) for kind, name in named.items() if name is not None]
    if len(found) > 1:
        raise UsageError("name one resource: --topic, --group, --transactional-id, --user or --cluster")
    return found[0] if found else None


def _required(resource: tuple[ResourceType, str] | None) -> tuple[ResourceType, str]:
    if resource is None:
        raise UsageError("no resource: add --topic, --group, --transactional-id, --user or --cluster")
    return resource


def _principal(text: str) -> str:
    if not text.startswith("User:"):
        raise UsageError(f"a principal is written 'User:NAME', such as 'User:{text}'")
    return text


@click.group(cls=Group)
def acl() -> None:
    """Access control rules. Only brokers with authorizer.class.name=StandardAuthorizer enforce them."""


@acl.command(
    epilog="""\b
Examples:
  kl acl add User:alice --operation read --topic orders
  kl acl add User:alice --operation read --group readers
  kl acl add User:app --operation write --topic app. --prefixed
  kl acl add 'User:*' --deny --operation all --topic secret --host 10.0.0.7"""
)
@click.argument("principal", metavar="PRINCIPAL")
@click.option(
    "--operation",
    "operations",
    type=_OPERATION,
    metavar="OPERATION",
    multiple=True,
    required=True,
    help=f"{_NAMES}. May be repeated.",
)
@_resource_options
@click.option("--prefixed", is_flag=True, help="All resources whose names begin with NAME.")
@click.option("--host", default=WILDCARD, metavar="ADDRESS", help="Only from this IP address.")
@click.option("--deny", is_flag=True, help="Deny instead of allow. Denying rules win.")
@client_options
def add(
    principal: str, operations: Sequence[str], prefixed: bool, host: str, deny: bool, **resource: Any
) -> None:
    """Add rules that allow (with --deny: deny) operations of PRINCIPAL on a resource."""
    kind, name = _required(_resource(**resource))
    pattern = PatternType.PREFIXED if prefixed else PatternType.LITERAL
    permission = Permission.DENY if deny else Permission.ALLOW
    acls = [
        AclBinding(kind, pattern, name, _principal(principal), host, _operation(operation), permission)
        for operation in operations
    ]

    async def main(admin: Admin) -> list[int]:
        await admin.create_acls(acls)
        return await _without_authorizer(admin)

    lax = connect.ask_admin(main)
    for each in acls:
        invocation.say(str(each))
    for node_id in lax:
        invocation.say(NOT_ENFORCED.format(node_id))


async def _without_authorizer(admin: Admin) -> list[int]:
    """Return the node ids of brokers that do not enforce rules.

    Omit brokers that are fenced or do not respond. Return [] if the client may not describe the settings.
    """
    try:
        return [node_id async for node_id, configs in _live_settings(admin) if not configs[_AUTHORIZER].value]
    except ClusterAuthorizationFailedError:
        return []


async def _authorizer_settings(admin: Admin) -> dict[str, Any]:
    """Return the arguments of ``Authorizer`` from the settings of the first live broker that responds.

    Return {} if no broker responds, or if the client may not describe the settings.
    """
    try:
        _, configs = await anext(_live_settings(admin))
    except (ClusterAuthorizationFailedError, StopAsyncIteration):
        return {}
    return {
        "super_users": super_users_of(configs["super.users"].value or ""),
        "allows_without_rules": configs["allow.everyone.if.no.acl.found"].value == "true",
    }


async def _live_settings(admin: Admin) -> AsyncIterator[tuple[int, dict[str, ConfigValue]]]:
    """Yield (node id, settings) of each live broker that responds within _ANSWER_TIMEOUT_S."""
    import asyncio

    for broker in (await admin.describe_cluster()).brokers:
        if broker.is_fenced:
            continue
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                configs = await admin.describe_configs("broker", str(broker.node_id))
        except (TimeoutError, ConnectionFailedError, RequestTimeoutError):
            continue
        yield broker.node_id, configs


def _operation(text: str) -> Operation:
    return next(operation for name, operation in _OPERATIONS.items() if name.lower() == text.lower())


def _selection(
    principal: str | None, operation: str | None, prefixed: bool, host: str | None, **resource: Any
) -> AclFilter:
    kind, name = _resource(**resource) or (None, None)
    return AclFilter(
        kind,
        PatternType.PREFIXED if prefixed else None,
        name,
        None if principal is None else _principal(principal),
        host,
        None if operation is None else _operation(operation),
    )


def _selection_options(function: F) -> F:
    for option in reversed(
        (
            click.option("--principal", metavar="PRINCIPAL", help="Only rules of User:NAME."),
            click.option(
                "--operation", type=_OPERATION, metavar="OPERATION", help="Only rules about this operation."
            ),
            click.option("--host", metavar="ADDRESS", help="Only rules for this IP address, or '*'."),
            click.option("--prefixed", is_flag=True, help="Only rules with a prefix."),
        )
    ):
        function = option(function)
    return _resource_options(function)


@acl.command("list")
@_selection_options
@listing_options
def list_(**selected: Any) -> None:
    """List rules."""
    found = connect.ask_admin(lambda admin: admin.describe_acls(_selection(**selected)))
    print_listing(rows_of(found, _COLUMNS), _COLUMNS, invocation.current().output, if_empty="no such rules")


@acl.command(
    epilog="""\b
Examples:
  kl acl remove --principal User:alice --topic orders
  kl acl remove --principal User:alice -y             all her rules"""
)
@_selection_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@listing_options
def remove(yes: bool, **selected: Any) -> None:
    """Remove the rules that the options select, and list the removed rules."""
    selection = _selection(**selected)
    if not any(field is not None for field in selection):
        raise UsageError("select the rules to remove, such as by --principal or --topic")
    if not yes:
        found = connect.ask_admin(lambda admin: admin.describe_acls(selection))
        if found:
            invocation.confirm(f"Remove {plural(len(found), 'rule')}?", "nothing was removed")
    removed = connect.ask_admin(lambda admin: admin.delete_acls([selection]))
    print_listing(rows_of(removed, _COLUMNS), _COLUMNS, invocation.current().output, if_empty="no such rules")


@acl.command(
    epilog="""\b
Examples:
  kl acl check User:alice read --topic orders
  kl acl check User:alice read --topic orders --host 10.0.0.7"""
)
@click.argument("principal", metavar="PRINCIPAL")
@click.argument("operation", type=_OPERATION, metavar="OPERATION")
@_resource_options
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="The client's IP address.")
@listing_options
def check(principal: str, operation: str, host: str, **resource: Any) -> None:
    """Explain which rule allows or denies an operation. Exit code 9 if it is denied.

    The settings super.users and allow.everyone.if.no.acl.found of a broker count, too, if the client may
    describe them.
    """
    kind, name = _required(_resource(**resource))
    wanted = _operation(operation)

    async def main(admin: Admin) -> Authorizer:
        rules = await admin.describe_acls(AclFilter(resource_type=kind))
        return Authorizer(rules, **await _authorizer_settings(admin))

    verdict = connect.ask_admin(main).explain(_principal(principal), host, wanted, kind, name)
    document = {"allowed": verdict.is_allowed, "reason": verdict.reason}
    print_document(document, invocation.current().output)
    if not verdict.is_allowed:
        raise CheckFailedError(f"{principal} may not {label(wanted)} {label(kind)} {name!r}")
