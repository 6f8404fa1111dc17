"""``kl config``: every option, its meaning, its current value, and the source of that value."""

from __future__ import annotations

import os
import textwrap
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import NotFoundError
from kafkalite.cli.invocation import Invocation, listing_options, parse_settings
from kafkalite.cli.output import Column, print_document, print_listing
from kafkalite.options import Option, OptionRegistry

KINDS: Final = ("topic", "broker", "producer", "consumer", "admin")


def registries() -> dict[str, OptionRegistry]:
    from kafkalite.broker.config import BROKER_OPTIONS
    from kafkalite.client.config import ADMIN_OPTIONS, CONSUMER_OPTIONS, PRODUCER_OPTIONS
    from kafkalite.metadata.topic_config import TOPIC_OPTIONS

    return {
        "topic": TOPIC_OPTIONS,
        "broker": BROKER_OPTIONS,
        "producer": PRODUCER_OPTIONS,
        "consumer": CONSUMER_OPTIONS,
        "admin": ADMIN_OPTIONS,
    }


def _complete_options(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = {option.name for registry in registries().values() for option in registry}
    return sorted(name for name in names if name.startswith(incomplete))


@click.group()
def config() -> None:
    """Describe the options of topics, brokers and clients."""


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
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=_complete_options)
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


def _unknown(name: str, known: dict[str, OptionRegistry]) -> NotFoundError:
    names = {option.name for registry in known.values() for option in registry}
    near = get_close_matches(name.replace("_", "."), names, n=1)
    return NotFoundError(
        f"there is no option {name!r}",
        hint=f"did you mean {near[0]}?" if near else "kl config list shows them all",
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
    for name, text in current.properties.items():
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
    """Return the settings given by ``--set name=value``. Raises UsageError."""
    return parse_settings(texts, "--set log.retention.ms=60000")
