"""``kl config``: explains options and the sources of values; changes settings of topics and brokers."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.invocation import Invocation, client_options, listing_options, parse_settings
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, print_document, print_listing
from kafkalite.cli.registries import complete_setting, registries
from kafkalite.errors import InvalidConfigError
from kafkalite.options import Option, OptionRegistry
from kafkalite.suggestions import did_you_mean

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.admin.descriptions import ConfigValue

KINDS: Final = ("topic", "broker", "producer", "consumer", "admin")


@click.group(cls=Group)
def config() -> None:
    """Describe options; show and change settings of topics and brokers."""


@config.command("list")
@click.argument("kind", required=False, type=click.Choice(KINDS))
@listing_options
def list_options(kind: str | None) -> None:
    """List every option, or the options of one KIND."""
    rows = [
        {"name": option.name, "of": of, **_about(option)}
        for of, registry in registries().items()
        if kind in {None, of}
        for option in sorted(registry, key=lambda option: option.name)
    ]
    columns = (
        Column("name", "NAME"),
        Column("of", "OF"),
        Column("default", "DEFAULT"),
        Column("allowed", "ALLOWED"),
        Column("doc", "MEANING", wide=True),
    )
    print_listing(rows, columns, invocation.current().output)


@config.command(
    epilog="""\b
Examples:
  kl config explain retention.ms
  kl config explain retention.ms --topic events      its value for the topic, and the source
  kl config explain log.retention.ms -f server.toml  its value for that broker"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=complete_setting())
@click.option("--topic", help="Ask the broker for the value of this topic.", shell_complete=complete_topics)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A broker's TOML file to read.")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="As in kl server start.")
@listing_options
def explain(names: tuple[str, ...], topic: str | None, file: Path | None, overrides: tuple[str, ...]) -> None:
    """Explain options: meaning, allowed values, and the source of the current value."""
    current = invocation.current()
    known = registries()
    documents: list[dict[str, Any]] = []
    for name in names:
        found = [(kind, registry.get(name)) for kind, registry in known.items() if name in registry]
        if topic is not None:
            found = [(kind, option) for kind, option in found if kind == "topic"]
        if not found:
            raise _unknown(name, known)
        for kind, option in found:
            value, source = _value_of(kind, option, current, topic=topic, file=file, overrides=overrides)
            documents.append(
                {"name": option.name, "of": kind, "value": _shown(value), "from": source, **_about(option)}
            )
    if current.output not in {"table", "wide"}:
        print_listing(documents, (), current.output)
        return
    for number, document in enumerate(documents):
        if number:
            click.echo()
        print_document(
            document | {"doc": textwrap.fill(document["doc"], 88, subsequent_indent=" " * 9)}, "table"
        )


# --- show, set -------------------------------------------------------------------------------------

_RESOURCES: Final = click.Choice(("topic", "broker"))


@config.command(
    epilog="""\b
Examples:
  kl config show broker 1                 the settings that differ from the defaults
  kl config show broker 1 --all -o wide
  kl config show topic events retention.ms"""
)
@click.argument("kind", type=_RESOURCES)
@click.argument("name", metavar="NAME|NODE")
@click.argument(
    "settings", nargs=-1, metavar="[SETTING]…", shell_complete=complete_setting("topic", "broker")
)
@click.option("--all", "shows_all", is_flag=True, help="Defaults, too.")
@listing_options
def show(kind: Literal["topic", "broker"], name: str, settings: tuple[str, ...], shows_all: bool) -> None:
    """Show settings of a topic or a running broker, by default those that differ from the defaults."""

    async def main(admin: Admin) -> dict[str, ConfigValue]:
        if kind == "broker":
            await connect.check_brokers(admin, [name])
        return await admin.describe_configs(kind, name)

    entries = connect.ask_admin(main)
    missing = [each for each in settings if each not in entries]
    if missing:
        owners = [of for of, registry in registries().items() if missing[0] in registry]
        if owners:
            raise NotFoundError(
                f"{missing[0]} is no setting of a {kind}, but of: {', '.join(owners)}",
                hint=f"kl config list {kind}",
            )
        raise _unknown(missing[0], registries())
    rows = [
        {"name": entry.name, "value": entry.value, "from": entry.source, "doc": entry.documentation}
        for entry in sorted(entries.values(), key=lambda entry: entry.name)
        if (entry.name in settings if settings else shows_all or entry.source != "default")
    ]
    columns = (Column("name", "NAME"), Column("value", "VALUE"), Column("from", "FROM"))
    print_listing(
        rows,
        (*columns, Column("doc", "MEANING", wide=True)),
        invocation.current().output,
        if_empty=f"{kind} {name} has only defaults; --all shows them",
    )


@config.command(
    "set",
    epilog="""\b
Examples:
  kl config set topic events retention.ms=7d
  kl config set broker 1 log.retention.ms=7d    at once, until it is unset; also after a restart
  kl config set broker 1 --unset log.retention.ms""",
)
@click.argument("kind", type=_RESOURCES)
@click.argument("name", metavar="NAME|NODE")
@click.argument(
    "changes",
    nargs=-1,
    metavar="[SETTING=VALUE]…",
    shell_complete=complete_setting("topic", "broker", suffix="="),
)
@click.option("--unset", multiple=True, metavar="SETTING", shell_complete=complete_setting("topic", "broker"))
@click.option("--dry-run", is_flag=True, help="Let the broker check the request, change nothing.")
@client_options
def set_(
    kind: Literal["topic", "broker"],
    name: str,
    changes: tuple[str, ...],
    unset: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Change settings of a topic or a running broker."""
    wanted = invocation.parse_changes(changes, unset, "retention.ms=7d")
    if not wanted:
        raise UsageError("nothing to change: give SETTING=VALUE or --unset SETTING")

    async def main(admin: Admin) -> None:
        if kind == "broker":
            await connect.check_brokers(admin, [name])
        try:
            await admin.alter_configs(kind, name, wanted, validate_only=dry_run)
        except InvalidConfigError:
            for setting in wanted:
                registries()[kind].get(setting)  # raises ConfigError, which says that there is no such option
            raise

    connect.ask_admin(main)
    verb = "would be changed" if dry_run else "changed"
    click.echo(f"{kind} {name}: {', '.join(wanted)} {verb}")


def _unknown(name: str, known: dict[str, OptionRegistry]) -> NotFoundError:
    from kafkalite.client.config import elsewhere

    names = {option.name for registry in known.values() for option in registry}
    everything = "kl config list shows them all"
    return NotFoundError(
        f"there is no option {name!r}",
        hint=elsewhere(name) or did_you_mean(name.replace("_", "."), names, otherwise=everything),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)


def _about(option: Option) -> dict[str, str]:
    return {"default": _shown(option.default), "allowed": option.allowed, "doc": option.doc}


def _value_of(
    kind: str,
    option: Option,
    current: Invocation,
    *,
    topic: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
) -> tuple[Any, str]:
    match kind:
        case "broker":
            from kafkalite.broker.config import SECRET_OPTIONS, load_settings

            settings = load_settings(file, os.environ, parse_overrides(overrides))
            if option.name in SECRET_OPTIONS and settings.sources[option.name] != "default":
                return "(a secret, not shown)", settings.sources[option.name]
            return getattr(settings.config, option.python_name), settings.sources[option.name]
        case "topic":
            return (option.default, "default") if topic is None else _topic_value(topic, option)
        case _:
            return _client_value(option, current)


def _client_value(option: Option, current: Invocation) -> tuple[Any, str]:
    for name, text in current.all_properties.items():
        if name in {option.name, option.python_name, *option.aliases}:
            return option.parse(text, source="-X"), "flag -X"
    if option.name == "bootstrap.servers":
        return current.bootstrap_servers, current.bootstrap_source
    if option.name in connect.IMPATIENT:
        return connect.IMPATIENT[option.name], "kl (shorter for interactive use)"
    return option.default, "default"


def _topic_value(topic: str, option: Option) -> tuple[Any, str]:
    entry = connect.ask_admin(lambda admin: admin.describe_configs("topic", topic)).get(option.name)
    if entry is None:
        raise NotFoundError(f"the broker returned no value of {option.name} for topic {topic!r}")
    return entry.value, f"topic ({topic})" if entry.source == "topic" else entry.source


def parse_overrides(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the settings given by ``--set name=value``. Raises UsageError for any other text."""
    return parse_settings(texts, "--set log.retention.ms=60000")
