"""``kl topic``: creates, lists, describes, alters and deletes topics, and deletes records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import NotFoundError, PartialFailureError, UsageError
from kafkalite.cli.invocation import F, client_options, listing_options, parse_settings, topic_names
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.offset_queries import extents, matching_topics, partitions_of, spans
from kafkalite.cli.output import Column, human_bytes, plural, print_listing
from kafkalite.cli.ranges import Anchor, Bound, OffsetRange, parse_limit
from kafkalite.cli.registries import complete_setting
from kafkalite.cli.topic_description import description, only_partitions, print_descriptions
from kafkalite.errors import KafkaliteError, TopicAlreadyExistsError, UnknownTopicOrPartitionError
from kafkalite.model import TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.cluster.client import ClusterClient

_MIN_INSYNC: Final = "min.insync.replicas"

_LIST_COLUMNS: Final = (
    Column("name", "NAME"),
    Column("partitions", "PARTITIONS"),
    Column("replication_factor", "REPLICAS"),
    Column("size_bytes", "SIZE", wide=True, show=lambda size: "-" if size is None else human_bytes(size)),
    Column("topic_id", "ID", wide=True),
)
_DELETED_COLUMNS: Final = (
    Column("name", "PARTITION"),
    Column("start", "FIRST OFFSET"),
    Column("new_start", "NEW FIRST OFFSET"),
    Column("records", "RECORDS TO DELETE"),
)


def _config_option(description: str) -> Callable[[F], F]:
    """Return a decorator that adds -c, the settings of a topic, as the argument ``configs``."""
    return click.option(
        "-c",
        "--config",
        "configs",
        multiple=True,
        metavar="NAME=VALUE",
        help=description,
        shell_complete=complete_setting("topic", suffix="="),
    )


@click.group(cls=Group)
def topic() -> None:
    """Create, list, describe, alter and delete topics."""


async def _each(names: tuple[str, ...], act: Callable[[str], Awaitable[None]]) -> None:
    """Call ``act`` for each name. If there are several names, print each failure.

    Raises the first failure if all failed, and PartialFailureError if only some failed.
    """
    failures: list[KafkaliteError] = []
    for name in names:
        try:
            await act(name)
        except KafkaliteError as error:
            failures.append(error)
            if len(names) > 1:
                invocation.say(f"{name}: {error}")
    _raise_any(failures, len(names))


def _raise_any(failures: list[KafkaliteError], count: int) -> None:
    """Raise the first failure if all ``count`` topics failed, and PartialFailureError if only some failed.

    If ``count`` is above 1, each failure was printed before. Therefore the message of the raised error is
    only the number of failures.
    """
    if failures and len(failures) == count:
        if count > 1:
            failures[0].message = f"{count} of {count} topics failed"
            failures[0].hint = ""
        raise failures[0]
    if failures:
        raise PartialFailureError(f"{len(failures)} of {count} topics failed")


def _warn_if_unreachable(name: str, min_insync: str | None, replicas: int) -> None:
    """Print a warning if ``min.insync.replicas`` is more than the number of replicas. The broker accepts
    such a value, as Kafka does."""
    if min_insync is not None and int(min_insync) > replicas:
        invocation.say(
            f"{name}: min.insync.replicas {min_insync} is more than its {plural(replicas, 'replica')}: every"
            f" produce request with acks=all will fail. Lower it: kl topic alter {name} -c"
            f" {_MIN_INSYNC}={replicas}"
        )


@topic.command(
    epilog="""\b
Examples:
  kl topic create events
  kl topic create events -p 3 -c retention.ms=7d
  kl topic create events --if-not-exists"""
)
@click.argument("names", nargs=-1, metavar="NAME…")
@invocation.number_option("-p", "--partitions", help="Number of partitions.  [default: the broker's]")
@invocation.number_option("-r", "--replication-factor", help="Number of replicas.  [default: the broker's]")
@_config_option("A setting of the topic.")
@click.option("--if-not-exists", is_flag=True, help="Accept a topic that already exists.")
@click.option("--dry-run", is_flag=True, help="Let the broker check the request, create nothing.")
@client_options
def create(
    names: tuple[str, ...],
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    dry_run: bool,
) -> None:
    """Create topics."""
    wanted = topic_names(names)
    settings = parse_settings(configs, "-c retention.ms=7d")

    async def main(admin: Admin) -> None:

        async def act(name: str) -> None:
            try:
                created = await admin.create_topic(
                    name,
                    partitions if partitions is not None else -1,
                    replication_factor if replication_factor is not None else -1,
                    configs=settings,
                    validate_only=dry_run,
                )
            except TopicAlreadyExistsError:
                if not if_not_exists:
                    raise
                invocation.say(f"topic {name} already exists")
                return
            verb = "would be created" if dry_run else "created"
            click.echo(f"{name}: {verb}, {plural(created.num_partitions, 'partition')}")
            minimum = settings.get(_MIN_INSYNC)
            if minimum is None and not dry_run:
                with suppress(UnknownTopicOrPartitionError):  # this broker has not replayed the creation yet
                    minimum = (await admin.describe_configs("topic", name))[_MIN_INSYNC].value
            _warn_if_unreachable(name, minimum, created.replication_factor)

        await _each(wanted, act)

    connect.ask_admin(main)


@topic.command("list")
@click.argument("names", nargs=-1, metavar="[NAME|PATTERN]…", shell_complete=complete_topics)
@click.option("--internal", is_flag=True, help="Include internal topics such as __consumer_offsets.")
@listing_options
def list_topics(names: tuple[str, ...], internal: bool) -> None:
    """List topics, by default all except internal topics. A PATTERN is a regular expression."""

    async def main(admin: Admin) -> list[dict[str, Any]]:
        wanted = await matching_topics(admin, names) if names else None
        listed = await admin.list_topics(internal=internal or bool(names))
        missing = sorted({*(wanted or ())} - {each.name for each in listed})
        if missing:
            raise NotFoundError(f"there is no topic {missing[0]!r}", hint="see 'kl topic list'")
        sizes = {} if invocation.current().output in {"table", "name"} else await _sizes(admin)
        return [
            {
                "name": each.name,
                "partitions": len(each.partitions),
                "replication_factor": len(each.partitions[0].replicas) if each.partitions else 0,
                "size_bytes": None if sizes is None else sizes.get(each.name, 0),
                "topic_id": each.topic_id,
            }
            for each in sorted(listed, key=lambda each: each.name)
            if wanted is None or each.name in wanted
        ]

    rows = connect.ask_admin(main)
    print_listing(
        rows,
        _LIST_COLUMNS,
        invocation.current().output,
        if_empty="no topics yet; try: kl topic create events",
    )


async def _sizes(admin: Admin) -> dict[str, int] | None:
    """Return {topic: bytes of all its replicas}, or None if the request to a broker fails."""
    try:
        logs = await admin.describe_log_dirs()
    except KafkaliteError:
        return None
    sizes: dict[str, int] = {}
    for log in logs:
        sizes[log.topic] = sizes.get(log.topic, 0) + log.size_bytes
    return sizes


@topic.command(
    epilog="""\b
Examples:
  kl topic describe events
  kl topic describe events -o wide       with epochs and segments
  kl topic describe 'orders-.*'          of a pattern, a regular expression
  kl topic describe --under-replicated   of all topics, the partitions that lack in-sync replicas
  kl topic describe --leaderless         those without a leader"""
)
@click.argument("names", nargs=-1, metavar="NAME…", shell_complete=complete_topics)
@click.option("--all-configs", is_flag=True, help="Every effective setting, not only the topic's own.")
@click.option(
    "--under-replicated",
    "--under-replicated-partitions",
    is_flag=True,
    help="Only partitions that lack in-sync replicas; of all topics unless topics are named.",
)
@click.option(
    "--leaderless",
    "--unavailable-partitions",
    is_flag=True,
    help="Only partitions without a leader; of all topics unless topics are named.",
)
@listing_options
def describe(names: tuple[str, ...], all_configs: bool, under_replicated: bool, leaderless: bool) -> None:
    """Describe topics: settings, partitions, replicas, offsets, sizes."""
    problems = [
        name
        for name, wanted in (("under_replicated", under_replicated), ("leaderless", leaderless))
        if wanted
    ]
    wanted = names if problems else topic_names(names)
    current = invocation.current()
    documents: list[dict[str, Any]] = []

    async def main() -> None:
        async with connect.admin(current) as admin, connect.cluster(current) as client:

            async def act(name: str) -> None:
                documents.append(await description(admin, client, name, all_configs=all_configs))

            listed = await admin.list_topics(internal=True) if problems and not wanted else []
            named = tuple(await matching_topics(admin, wanted))
            await _each(tuple(sorted(each.name for each in listed)) or named, act)

    try:
        invocation.run_command(main)
    finally:
        print_descriptions(only_partitions(documents, problems), current.output, is_filtered=bool(problems))


@topic.command(
    epilog="""\b
Examples:
  kl topic alter events -c retention.ms=7d
  kl topic alter events --unset retention.ms
  kl topic alter events -p 6                  more partitions; never fewer"""
)
@click.argument("name", required=False, shell_complete=complete_topics)
@invocation.number_option("-p", "--partitions", help="The new number, above the current one.")
@invocation.number_option(
    "-r",
    "--replication-factor",
    help="The new number of replicas: some are added, or removed, those in sync last.",
)
@click.option(
    "--allow-replication-factor-change", is_flag=True, help="Accept fewer replicas than now: copies are lost."
)
@_config_option("Change a setting.")
@click.option(
    "--unset",
    multiple=True,
    metavar="NAME",
    help="Restore the broker's value.",
    shell_complete=complete_setting("topic"),
)
@click.option("--dry-run", is_flag=True, help="Let the broker check the request, change nothing.")
@client_options
def alter(
    name: str | None,
    partitions: int | None,
    replication_factor: int | None,
    allow_replication_factor_change: bool,
    configs: tuple[str, ...],
    unset: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Change a topic's settings, its number of partitions or of replicas."""
    (wanted,) = topic_names((name,) if name else ())
    changes = invocation.parse_changes(configs, unset, "-c retention.ms=7d")
    if partitions is None and replication_factor is None and not changes:
        raise UsageError("nothing to change: give -c NAME=VALUE, --unset NAME, -p COUNT or -r COUNT")
    if replication_factor is not None:
        may_lower = allow_replication_factor_change
        connect.ask_cluster(
            lambda client: _replicate(client, wanted, replication_factor, may_lower, dry_run=dry_run)
        )
    connect.ask_admin(lambda admin: _alter(admin, wanted, partitions, changes, dry_run=dry_run))


async def _replicate(
    client: ClusterClient, name: str, factor: int, may_lower: bool, *, dry_run: bool
) -> None:
    """Begin to give each partition of the topic ``factor`` replicas."""
    from kafkalite.cli.cluster_moves import alter
    from kafkalite.cli.cluster_reassign import planned
    from kafkalite.client.admin.cluster_health import look

    view = await look(client)
    if all(each.name.topic != name for each in view.partitions):  # ``planned`` also takes partitions
        raise NotFoundError(f"there is no topic {name!r}", hint="kl topic list shows topics")
    targets = await planned(client, [name], None, factor)
    counts = [len(each.state.replicas) for each in view.partitions if each.name.topic == name]
    if any(count > factor for count in counts) and not may_lower:
        raise UsageError(
            f"{name} has {max(counts)} replicas, and {factor} are fewer: copies of acknowledged records would"
            " be deleted",
            hint="add --allow-replication-factor-change if that is what you want",
        )
    if dry_run:
        click.echo(f"{name}: {plural(len(targets), 'partition')} would get {factor} replicas (dry run)")
    elif targets:
        await alter(client, targets, may_change_factor=True)


async def _alter(
    admin: Admin, name: str, partitions: int | None, changes: dict[str, str | None], *, dry_run: bool
) -> None:
    would = " (dry run)" if dry_run else ""
    (before,) = await admin.describe_topics([name])
    current_factor = len(before.partitions[0].replicas)
    if changes:
        old = await admin.describe_configs("topic", name)
        await admin.alter_configs("topic", name, changes, validate_only=dry_run)
        new = await admin.describe_configs("topic", name)
        for key, value in changes.items():
            was = old[key].value if key in old else "-"
            now = value if dry_run and value is not None else new[key].value if key in new else "-"
            click.echo(f"{name}: {key} {was} -> {now}{would}")
            if key == _MIN_INSYNC:
                _warn_if_unreachable(name, now, current_factor)
    if partitions is not None:
        await admin.create_partitions(name, partitions, validate_only=dry_run)
        click.echo(f"{name}: partitions {len(before.partitions)} -> {partitions}{would}")
        invocation.say(
            "records with a key may now go to another partition than earlier records with that key"
        )


@topic.command()
@click.argument("names", nargs=-1, metavar="NAME…", shell_complete=complete_topics)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--if-exists", is_flag=True, help="Accept a topic that does not exist.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@client_options
def delete(names: tuple[str, ...], yes: bool, if_exists: bool, dry_run: bool) -> None:
    """Delete topics and all their records."""
    wanted = topic_names(names)
    found, missing = connect.ask_admin(lambda admin: _weigh(admin, wanted))
    for name, weight in found.items():
        click.echo(f"{name}: {weight}", err=not dry_run)
    if not dry_run and found:
        if not yes:
            invocation.confirm(f"Delete {plural(len(found), 'topic')}, for ever?", "nothing was deleted")
        connect.ask_admin(lambda admin: _delete(admin, tuple(found)))
    if missing and not if_exists:
        for name, error in missing.items():
            if len(wanted) > 1:
                invocation.say(f"{name}: {error}")
        _raise_any(list(missing.values()), len(wanted))


async def _weigh(admin: Admin, names: tuple[str, ...]) -> tuple[dict[str, str], dict[str, KafkaliteError]]:
    """Return ({topic: a text such as ``2 partitions, 10 records``}, {missing topic: error}).

    ``names`` may contain patterns.
    """
    found: dict[str, str] = {}
    missing: dict[str, KafkaliteError] = {}
    for name in await matching_topics(admin, names):
        try:
            partitions = await partitions_of(admin, [name])
        except UnknownTopicOrPartitionError as error:
            missing[name] = error
            continue
        known = await extents(admin, partitions)
        records = sum(end - start for start, end in known.values())
        found[name] = f"{plural(len(partitions), 'partition')}, {plural(records, 'record')}"
    return found, missing


async def _delete(admin: Admin, names: tuple[str, ...]) -> None:
    async def act(name: str) -> None:
        await admin.delete_topics([name])
        click.echo(f"{name}: deleted")

    await _each(names, act)


@topic.command(
    "delete-records",
    epilog="""\b
Examples:
  kl topic delete-records events --before end      all records there are
  kl topic delete-records events -p 0 --before 42  those below offset 42
  kl topic delete-records events --before -7d      those older than a week""",
)
@click.argument("name", metavar="TOPIC", shell_complete=complete_topics)
@click.option("--before", "before_text", required=True, metavar="OFFSET|TIME|end", help="The first to keep.")
@invocation.number_option("-p", "--partition", "wanted", multiple=True, help="Only here.", minimum=0)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@listing_options
def delete_records(name: str, before_text: str, wanted: tuple[int, ...], yes: bool, dry_run: bool) -> None:
    """Delete the records of TOPIC's partitions before an offset or a time."""
    kept = _first_kept(before_text)

    async def plan(admin: Admin) -> list[dict[str, Any]]:
        partitions = await partitions_of(admin, [name], wanted)
        starts = {tp: extent.log_start_offset for tp, extent in (await extents(admin, partitions)).items()}
        found = await spans(admin, partitions, OffsetRange(kept))
        for tp in partitions:
            if kept.anchor is Anchor.OFFSET and found[tp].first_offset < kept.number:
                raise UsageError(
                    f"--before: {tp} ends at {found[tp].first_offset}, below {kept.number};"
                    " a time is written as 2026-01-31T12:00, and 'end' deletes all records"
                )
        return [
            {
                "name": str(tp),
                "partition": tp.partition,
                "start": starts[tp],
                "new_start": found[tp].first_offset,
                "records": found[tp].first_offset - starts[tp],
            }
            for tp in partitions
        ]

    async def delete_them(admin: Admin) -> None:
        await admin.delete_records({TopicPartition(name, row["partition"]): row["new_start"] for row in rows})

    rows = connect.ask_admin(plan)
    print_listing(rows, _DELETED_COLUMNS, invocation.current().output)
    total = sum(row["records"] for row in rows)
    if dry_run or not total:
        invocation.say("nothing was deleted" + (" (dry run)" if dry_run else ": there is no earlier record"))
        return
    if not yes:
        invocation.confirm(f"Delete {plural(total, 'record')} of {name}, for ever?", "nothing was deleted")
    connect.ask_admin(delete_them)
    invocation.say(f"{plural(total, 'record')} of {name} deleted")


def _first_kept(text: str) -> Bound:
    """Return the bound of ``--before``: ``end``, an offset, or a time such as ``-7d``. Raises UsageError."""
    if text.isascii() and text.isdigit():
        return Bound(Anchor.OFFSET, int(text))
    try:
        return parse_limit(text, now_ms=invocation.now_ms())
    except ValueError as problem:
        raise UsageError(f"--before: {problem}") from None
