"""``kl group``: lists and describes consumer groups, their members, lag and history."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import GROUP_ID
from kafkalite.cli.completion import complete_groups
from kafkalite.cli.exit_codes import CheckFailedError, PartialFailureError, UsageError
from kafkalite.cli.invocation import client_options, duration_ms, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import (
    Column,
    coloured,
    names_of,
    plural,
    print_document,
    print_listing,
    rows_of,
    write,
)
from kafkalite.cli.times import format_time
from kafkalite.durations import format_duration
from kafkalite.errors import BrokerError
from kafkalite.log_fields import escaped

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.admin.descriptions import GroupDescription, MemberDescription, PartitionLag
    from kafkalite.model import TopicPartition

STATES: Final = ("Empty", "Assigning", "Reconciling", "Stable", "Dead")

_GROUP_COLUMNS: Final = (
    Column("name", "GROUP", read="group_id"),
    Column("state", "STATE"),
    Column("members", "MEMBERS", read="member_count"),
    Column("generation", "GENERATION", read="group_epoch"),
    Column("coordinator", "COORDINATOR", read="coordinator_id"),
)
_MEMBER_COLUMNS: Final = (
    Column("name", "MEMBER", read="member_id"),
    Column("client_id", "CLIENT"),
    Column("host", "HOST"),
    Column("state", "STATE"),
    Column("epoch", "EPOCH", read="member_epoch"),
    Column("count", "PARTITIONS", read=lambda member: len(member.assignment)),
    Column("assignment", "HOLDS", read=lambda member: names_of(member.assignment)),
    Column("awaits", "TO REVOKE", read=lambda member: names_of(member.awaited_revocation)),
    Column("instance_id", "INSTANCE", wide=True),
    Column("target", "TARGET", wide=True, read=lambda member: names_of(member.target)),
    Column(
        "heartbeat_ms_ago",
        "LAST HEARTBEAT",
        wide=True,
        show=lambda ms: f"{format_duration(ms)} ago",
        read="last_heartbeat_ms_ago",
    ),
)
_LAG_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: str(each.partition)),
    Column("topic", read="partition.topic"),
    Column("partition", read="partition.partition"),
    Column("committed", "COMMITTED", read="committed.offset"),
    Column("end", "END", read="end_offset"),
    Column("lag", "LAG"),
    Column("client_id", "CLIENT", read="member.client_id"),
    Column("member", "MEMBER", read="member.member_id"),
    Column(
        "committed_at",
        "COMMITTED AT",
        wide=True,
        read=lambda each: "-" if each.commit_ms is None else format_time(each.commit_ms),
    ),
    Column("leader_epoch", "EPOCH", wide=True, read="committed.leader_epoch"),
    Column("metadata", "METADATA", wide=True, read="committed.metadata"),
)
_EVENT_COLUMNS: Final = (
    Column("generation", read="group_epoch"),
    Column("time", read=lambda event: format_time(event.time_ms)),
    *map(Column, ("time_ms", "cause", "detail")),
    Column("members", read="member_count"),
    Column("partitions", read="partition_count"),
)


@click.group(cls=Group)
def group() -> None:
    """Inspect consumer groups: members, lag, offsets, history."""


@group.command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES, False), help="List only this state."
)
@listing_options
def list_(states: tuple[str, ...]) -> None:
    """List groups: state, members, generation."""
    rows = rows_of(connect.ask_admin(lambda admin: admin.list_groups(states)), _GROUP_COLUMNS)
    print_listing(rows, _GROUP_COLUMNS, invocation.current().output, if_empty=_NO_GROUPS)


_NO_GROUPS: Final = "no groups; 'kl consume TOPIC -g GROUP' creates one"


def _names(names: tuple[str, ...], all_groups: bool) -> tuple[str, ...]:
    """Return ``names``, or all groups if ``all_groups``. Raises UsageError if neither or both are given."""
    if bool(names) == all_groups:
        raise UsageError("name a group, or give --all-groups", hint="kl group list shows them")
    if names:
        return names
    return tuple(each.group_id for each in connect.ask_admin(lambda admin: admin.list_groups()))


_all_groups_option = click.option("--all-groups", is_flag=True, help="All groups.")


@group.command()
@click.argument("names", type=GROUP_ID, metavar="GROUP…", nargs=-1, shell_complete=complete_groups)
@_all_groups_option
@listing_options
def describe(names: tuple[str, ...], all_groups: bool) -> None:
    """Describe GROUPs: state, members and lag."""
    is_table = invocation.current().output in {"table", "wide"}
    names = _names(names, all_groups)
    if is_table and not names:
        invocation.say(_NO_GROUPS)
    for number, name in enumerate(names):
        if number and is_table:
            write("\n")
        _describe(name)


def _describe(name: str) -> None:
    current = invocation.current()

    async def main(admin: Admin) -> tuple[GroupDescription, list[PartitionLag]]:
        return await admin.describe_group(name), await admin.group_lag(name)

    described, lags = connect.ask_admin(main)
    summary = _summary(described, lags)
    members, partitions = rows_of(described.members, _MEMBER_COLUMNS), rows_of(lags, _LAG_COLUMNS)
    if current.output not in {"table", "wide"}:
        print_document(summary | {"members": members, "partitions": partitions}, current.output)
        return
    print_document(summary | {"waits_for": "; ".join(summary["waits_for"]) or None}, "table")
    for rows, columns in ((members, _MEMBER_COLUMNS), (partitions, _LAG_COLUMNS)):
        if rows:
            write("\n")
            print_listing(rows, columns, current.output)


def _summary(described: GroupDescription, lags: Sequence[PartitionLag]) -> dict[str, Any]:
    return {
        "group": described.group_id,
        "state": described.state,
        "generation": described.group_epoch,
        "assigned_generation": described.assignment_epoch,
        "assignor": described.assignor,
        "member_count": len(described.members),
        "lag": total_lag(lags),
        "waits_for": waits_for(described),
    }


def waits_for(described: GroupDescription) -> list[str]:
    """Return the reasons why the group is not stable, one sentence each."""
    successors = {tp: _short(member) for member in described.members for tp in member.target}
    found: list[str] = []
    awaited: set[TopicPartition] = set()
    for member in described.members:
        if not member.awaited_revocation:
            continue
        awaited.update(member.awaited_revocation)
        what = ", ".join(map(str, member.awaited_revocation))
        waiting = sorted({successors[tp] for tp in member.awaited_revocation if tp in successors})
        who_waits = f", assigned to {' and '.join(waiting)}" if waiting else ""
        found.append(f"{_short(member)} has not revoked {what}{who_waits}")
    for member in described.members:
        missing = sorted(set(member.target) - set(member.assignment) - awaited)
        if missing:
            found.append(f"{_short(member)} has not received {', '.join(map(str, missing))}")
    return found


def _short(member: MemberDescription) -> str:
    return f"{member.client_id or 'a member'} ({member.member_id[:8]})"


@group.command()
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@listing_options
def members(name: str) -> None:
    """List the members of GROUP and their partitions."""
    found = connect.ask_admin(lambda admin: admin.describe_group(name)).members
    rows = rows_of(found, _MEMBER_COLUMNS)
    print_listing(
        rows, _MEMBER_COLUMNS, invocation.current().output, if_empty=f"group {name!r} has no members now"
    )


def total_lag(lags: Iterable[PartitionLag]) -> int | None:
    """Return the number of uncommitted records in partitions whose lag is known; None if no lag is known.

    In a partition without a committed offset, the lag is known only if no record was ever written. Otherwise
    the lag depends on the ``auto.offset.reset`` of the member.
    """
    known = [each.lag or 0 for each in lags if each.lag is not None or each.end_offset == 0]
    return sum(known) if known else None


def _behind(total: int | None) -> str:
    return "lag unknown" if total is None else f"{plural(total, 'record')} behind"


@group.command(
    epilog="""\b
Examples:
  kl group lag billing
  kl group lag billing --max 1000 && deploy         exit code 9 when it is further behind
  kl group lag billing -o json | jq 'map(.lag) | add'"""
)
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@click.option(
    "--max", "most", type=int, metavar="N", help="Exit with code 9 if the total lag is above N, or unknown."
)
@listing_options
def lag(name: str, most: int | None) -> None:
    """Show how far GROUP is behind, by partition."""
    current = invocation.current()
    lags = connect.ask_admin(lambda admin: admin.group_lag(name))
    empty = f"group {name!r} has no partitions: neither assigned ones nor committed offsets"
    print_listing(rows_of(lags, _LAG_COLUMNS), _LAG_COLUMNS, current.output, if_empty=empty)
    total = total_lag(lags)
    if lags and current.output in {"table", "wide"}:
        never = sum(each.committed is None for each in lags)
        more = f"; nothing committed in {plural(never, 'partition')}" if never else ""
        deleted = sum(each.end_offset is None for each in lags)
        more += f"; {plural(deleted, 'partition')} deleted" if deleted else ""
        write(f"{_behind(total)} in {plural(len(lags), 'partition')}{more}\n")
    if most is None:
        return
    if total is not None and total > most:
        raise CheckFailedError(f"group {name!r} is {plural(total, 'record')} behind, more than {most:,}")
    unknown = sum(each.committed is None and bool(each.end_offset) for each in lags)
    if unknown or total is None:
        cause = (
            f"nothing is committed in {plural(unknown, 'partition')}" if unknown else "it has no partition"
        )
        raise CheckFailedError(f"the lag of group {name!r} is unknown: {cause}")


@group.command(
    epilog="""\b
Examples:
  kl group explain billing            the cause of each rebalance, and what it is waiting for
  kl group explain billing -o jsonl   one event per line"""
)
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@listing_options
def explain(name: str) -> None:
    """Explain the causes of the last generations of GROUP, and what the group is waiting for."""
    current = invocation.current()
    described = connect.ask_admin(lambda admin: admin.describe_group(name, journal=True))
    if current.output not in {"table", "wide"}:
        rows = rows_of(described.journal, _EVENT_COLUMNS)
        print_listing(rows, (), current.output, name_key="cause")
        return
    write(_story(described))


def _story(described: GroupDescription) -> str:
    bold, rest = ("\x1b[1m", "\x1b[0m") if coloured(sys.stdout) else ("", "")
    lines = [
        f"{bold}{escaped(described.group_id)}{rest}  {described.state}, generation {described.group_epoch}, "
        f"{plural(len(described.members), 'member')}, assignor {described.assignor}"
    ]
    for each in described.journal:
        detail = escaped(each.detail)
        lines.append(
            f"  {each.group_epoch:>5}  {format_time(each.time_ms)}  {each.cause:<20}  {detail}  "
            f"[{plural(each.member_count, 'member')}, {plural(each.partition_count, 'partition')}]"
        )
    causes = Counter(each.cause for each in described.journal)
    if len(described.journal) > 1:
        counted = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common())
        lines.append(f"causes: {counted}")
    waiting = waits_for(described)
    if waiting:
        lines.append("waits for:")
        lines += [f"  - {escaped(sentence)}" for sentence in waiting]
    else:
        idle = sum(not member.assignment for member in described.members)
        text = f"{plural(idle, 'member')} without a partition: there are fewer partitions than members"
        lines.append("waits for nothing" + (f"; {text}" if idle else ""))
    return "\n".join(lines) + "\n"


@group.command(
    epilog="""\b
Examples:
  kl group watch billing                 every 2 s, until Ctrl-C
  kl group watch billing --every 500ms -n 10 -o jsonl"""
)
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@click.option("--every", type=duration_ms, default="2s", show_default=True, help="Time between reports.")
@click.option("-n", "--count", type=click.IntRange(min=1), help="Exit after this many reports.")
@listing_options
def watch(name: str, every: int, count: int | None) -> None:
    """Show GROUP's state, lag and committed records per second repeatedly."""
    current = invocation.current()

    async def main() -> None:
        import asyncio

        before: tuple[float, int] | None = None
        looked = 0
        async with connect.admin(current) as admin:
            while True:
                described, lags = await admin.describe_group(name), await admin.group_lag(name)
                now = time.monotonic()
                done = sum(each.committed.offset for each in lags if each.committed is not None)
                rate = None if before is None else (done - before[1]) / max(now - before[0], 1e-9)
                before = (now, done)
                _show_look(described, lags, rate, current.output)
                looked += 1
                if looked == count:
                    return
                await asyncio.sleep(every / 1000)

    invocation.run_command(main)


def _show_look(
    described: GroupDescription, lags: Sequence[PartitionLag], rate: float | None, output: str
) -> None:
    document = _summary(described, lags) | {"committed_per_s": None if rate is None else round(rate, 1)}
    if output not in {"table", "wide"}:
        print_document(document, "jsonl" if output == "json" else output)
        return
    if coloured(sys.stdout):
        write("\x1b[H\x1b[2J")
    speed = "" if rate is None else f", {rate:,.0f} records/s committed"
    write(
        f"{escaped(described.group_id)}  {described.state}, generation {described.group_epoch}, "
        f"{plural(len(described.members), 'member')}, {_behind(total_lag(lags))}{speed}\n"
    )
    for sentence in waits_for(described):
        write(f"  - {escaped(sentence)}\n")
    print_listing(rows_of(lags, _LAG_COLUMNS), _LAG_COLUMNS, output)


@group.command()
@click.argument(
    "names", type=GROUP_ID, metavar="GROUP…", nargs=-1, required=True, shell_complete=complete_groups
)
@client_options
def delete(names: tuple[str, ...]) -> None:
    """Delete groups without members, and their offsets."""
    results: dict[str, BrokerError | None] = connect.ask_admin(
        lambda admin: admin.delete_groups(dict.fromkeys(names), return_exceptions=True)
    )
    failed = {name: error for name, error in results.items() if error is not None}
    for name in results.keys() - failed.keys():
        invocation.say(f"group {name!r} deleted")
    if len(failed) == 1 and len(results) == 1:
        raise next(iter(failed.values()))
    for error in failed.values():
        invocation.say(error.message)
    if failed:
        raise PartialFailureError(f"{len(failed)} of {len(results)} groups were not deleted")
