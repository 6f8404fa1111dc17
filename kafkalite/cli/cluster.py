"""``kl cluster``: status, description, brokers, controller, elections and shutdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import CheckFailedError, NotFoundError, PartialFailureError, UsageError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, coloured, pick, plural, print_document, print_listing, rows_of, write
from kafkalite.cli.times import format_time
from kafkalite.client.admin.cluster_health import (
    LIVE,
    ClusterView,
    directories_of,
    load_of,
    look,
    look_again,
    look_at_disks,
    look_at_features,
    look_at_quorum,
    look_at_recovery,
    problems,
)
from kafkalite.client.admin.descriptions import FeatureDescription
from kafkalite.client.cluster.routing import NO_NODE
from kafkalite.errors import ErrorCode, KafkaliteError, broker_error
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import (
    ControlledShutdownRequest,
    ElectedPartition,
    ElectionPartition,
    ElectLeadersRequest,
)
from kafkalite.protocol.messages.metadata import DescribeQuorumResponse, RecoveringPartition

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

ELECTION_TIMEOUT_MS: Final = 30_000

secret_option = click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The settings of a node, or a file with cluster.secret alone. Default: KAFKALITE_CLUSTER_SECRET.",
)

_BROKER_COLUMNS: Final = (
    Column("node_id", "NODE"),
    Column("state", "STATE"),
    Column("address", "ADDRESS"),
    Column("controller", "CONTROLLER"),
    Column("leads", "LEADS"),
    Column("replicas", "REPLICAS"),
    Column("in_sync", "IN SYNC"),
    Column("rack", "RACK", wide=True),
    Column("broker_epoch", "EPOCH", wide=True),
    Column("registered", "REGISTERED", wide=True),
)
_PROBLEM_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: str(each.name)),
    Column("topic", read="name.topic"),
    Column("partition", read="name.partition"),
    Column("leader", "LEADER", read=lambda each: _leader(each.state.leader_id)),
    Column("replicas", "REPLICAS", read=lambda each: list(each.state.replicas)),
    Column("isr", "ISR", read=lambda each: list(each.state.isr)),
    Column("elr", "ELR", read=lambda each: list(each.state.elr)),
    Column("leader_epoch", "EPOCH", wide=True, read="state.leader_epoch"),
)
_ELECTION_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: f"{each.topic}-{each.partition}"),
    Column("leader", "LEADER", read=lambda each: _leader(each.leader_id)),
    Column("result", "RESULT", read=lambda each: _election_result(each)),
)


@click.group(cls=Group)
def cluster() -> None:
    """Inspect the cluster, elect leaders, move partitions, stop nodes."""


async def _view_of_all(
    client: ClusterClient,
) -> tuple[
    ClusterView, DescribeQuorumResponse | None, list[RecoveringPartition], list[str], list[FeatureDescription]
]:
    """Return (cluster view, controller quorum, partitions in recovery, reasons why logs refuse records,
    features).

    If no controller is active, the quorum is None and the lists of partitions in recovery and of features are
    empty. The same applies to each of the three if the request for it fails.
    """
    view = await look(client)
    refusals, silent = await look_at_disks(client, view)
    if silent:
        view = await look_again(client, silent)
    if view.controller_id < 0:
        return view, None, [], refusals, []
    try:
        recovering = await look_at_recovery(client)
    except KafkaliteError:
        recovering = []
    try:
        features = await look_at_features(client)
    except KafkaliteError:
        features = []
    try:
        return view, await look_at_quorum(client), recovering, refusals, features
    except KafkaliteError:
        return view, None, recovering, refusals, features


def _leader(node_id: int) -> int | None:
    return None if node_id < 0 else node_id


def _broker_rows(view: ClusterView) -> list[dict[str, Any]]:
    return [
        {
            "node_id": broker.node_id,
            "state": view.state_of(broker),
            "address": broker.address,
            "controller": broker.node_id == view.controller_id,
            "rack": broker.rack,
            "broker_epoch": broker.broker_epoch,
            "registered": format_time(broker.registered_ms),
            **load_of(broker.node_id, view.partitions)._asdict(),
        }
        for broker in view.brokers
    ]


@cluster.command(
    epilog="""\b
Examples:
  kl cluster status
  kl cluster status --check && deploy                exit code 9 unless all is well
  kl cluster status --under-replicated               partitions with too few in-sync replicas
  kl cluster status --leaderless -o name"""
)
@click.option("--check", is_flag=True, help="Exit with code 9 unless the cluster is healthy.")
@click.option("--under-replicated", is_flag=True, help="List partitions that lack in-sync replicas.")
@click.option("--leaderless", is_flag=True, help="List partitions without a leader.")
@listing_options
def status(check: bool, under_replicated: bool, leaderless: bool) -> None:
    """Report whether the cluster is healthy, and each problem."""
    current = invocation.current()
    view, quorum, recovering, refusals, features = connect.ask_cluster(_view_of_all)
    found = problems(view, quorum, recovering, refusals)
    if under_replicated or leaderless:
        found_here = [
            each
            for each in view.partitions
            if (under_replicated and each.is_under_replicated) or (leaderless and each.is_leaderless)
        ]
        rows = rows_of(found_here, _PROBLEM_COLUMNS)
        none = f"none of {plural(len(view.partitions), 'partition')}"
        print_listing(rows, _PROBLEM_COLUMNS, current.output, if_empty=none)
    elif current.output in {"table", "wide", "name"}:
        _print_status(view, found, features)
    else:
        print_document(_status_document(view, found, recovering, features), current.output)
    if check and found:
        raise CheckFailedError(
            "the cluster is not whole: " + "; ".join(found),
            hint="'kl cluster wait --whole' waits until it is",
        )


def _status_document(
    view: ClusterView,
    found: list[str],
    recovering: list[RecoveringPartition],
    features: list[FeatureDescription],
) -> dict[str, Any]:
    return {
        "cluster_id": view.cluster_id,
        "is_whole": not found,
        "problems": found,
        "controller_id": _leader(view.controller_id),
        "metadata_offset": view.metadata_offset,
        "brokers": len(view.brokers),
        "live_brokers": [broker.node_id for broker in view.live],
        "topics": view.topic_count,
        "partitions": len(view.partitions),
        "leaderless": [str(each.name) for each in view.leaderless],
        "under_replicated": [str(each.name) for each in view.under_replicated],
        "led_by_others": [str(each.name) for each in view.led_by_others],
        "recovering": [
            {
                "name": f"{each.topic}-{each.partition}",
                "leader": _leader(each.leader_id),
                "waits_for": each.waits_for,
                "replicas": [replica._asdict() for replica in each.replicas],
            }
            for each in recovering
        ],
        "features": {
            each.feature: {"finalized_level": each.finalized_level, "common_level": each.common_level}
            for each in features
        },
    }


def _print_status(view: ClusterView, found: list[str], features: list[FeatureDescription]) -> None:
    controller = "none" if view.controller_id < 0 else f"node {view.controller_id}"
    internal = sum(each.name.topic in view.internal_topics for each in view.partitions)
    as_of = "; before the controller was lost: " if view.controller_id < 0 else ", "
    lines = [
        f"cluster     {view.cluster_id}",
        f"controller  {controller}, metadata offset {view.metadata_offset:,}",
        f"brokers     {len(view.live)} of {len(view.brokers)} live",
        f"partitions  {plural(len(view.partitions) - internal, 'partition')} of "
        f"{plural(view.topic_count - len(view.internal_topics), 'topic')} and {internal:,} internal{as_of}"
        f"{len(view.leaderless):,} without a leader, {len(view.under_replicated):,} under-replicated, "
        f"{len(view.led_by_others):,} not led by the preferred replica",
    ]
    verdict = "whole" if not found else "not whole"
    if coloured(sys.stdout):
        verdict = f"\x1b[{'31' if found else '32'}m{verdict}\x1b[0m"
    lines.append(f"state       {verdict}")
    lines += [f"            - {each}" for each in found]
    lines += [
        f"upgrade     {each.feature} {each.finalized_level} is finalised, and all nodes support"
        f" {each.common_level}: 'kl cluster features upgrade --feature {each.feature}={each.common_level}'"
        for each in features
        if each.common_level > each.finalized_level
    ]
    write("\n".join(lines) + "\n")


# --- describe, brokers, controller -----------------------------------------------------------------


@cluster.command()
@listing_options
def describe() -> None:
    """Describe the cluster: status, brokers, quorum."""
    current = invocation.current()
    view, seen, recovering, refusals, features = connect.ask_cluster(_view_of_all)
    found = problems(view, seen, recovering, refusals)
    quorum = quorum_document(seen) if seen is not None else None
    if current.output not in {"table", "wide"}:
        document = _status_document(view, found, recovering, features) | {
            "brokers": _broker_rows(view),
            "quorum": quorum,
        }
        print_document(document, current.output)
        return
    _print_status(view, found, features)
    write("\n")
    print_listing(_broker_rows(view), _BROKER_COLUMNS, current.output)
    if quorum is not None:
        write(f"\nquorum      term {quorum['term']}, committed up to {quorum['commit_offset']:,}\n")
        print_listing(quorum["nodes"], QUORUM_COLUMNS, current.output)


@cluster.command()
@listing_options
def brokers() -> None:
    """List all registered brokers with their state and load."""
    print_listing(
        _broker_rows(connect.ask_cluster(look)),
        _BROKER_COLUMNS,
        invocation.current().output,
        name_key="node_id",
    )


@cluster.command()
@listing_options
def controller() -> None:
    """Print the active controller; exit code 4 if there is none."""
    current = invocation.current()
    view = connect.ask_cluster(look)
    if view.controller_id < 0:
        raise NotFoundError(
            "there is no controller now: fewer than half of the controllers can reach each other",
            hint="'kl cluster wait' waits for one; 'kl metadata quorum' shows which node is missing",
        )
    addresses = {broker.node_id: broker.address for broker in view.brokers}
    document = {"node_id": view.controller_id, "address": addresses.get(view.controller_id)}
    if current.output == "name":
        write(f"{view.controller_id}\n")
    else:
        print_document(document, current.output)


QUORUM_COLUMNS: Final = (
    Column("node_id", "NODE"),
    Column("role", "ROLE"),
    Column("address", "ADDRESS"),
    Column("match_offset", "OFFSET"),
    Column("lag", "LAG"),
    Column("last_contact_ms", "LAST CONTACT, MS AGO"),
    Column("directory_id", "DIRECTORY"),
)


def quorum_document(quorum: Any) -> dict[str, Any]:
    """Convert a DescribeQuorum response to the document to print."""
    nodes, directories = [], directories_of(quorum)
    for node in sorted(quorum.nodes, key=lambda node: node.node_id):
        role = "leader" if node.node_id == quorum.leader_id else "voter" if node.is_voter else "observer"
        is_known = node.match_offset >= 0
        nodes.append(
            {
                "node_id": node.node_id,
                "role": role,
                "address": node.address,
                "match_offset": node.match_offset if is_known else None,
                "lag": max(0, quorum.commit_offset - node.match_offset) if is_known else None,
                "last_contact_ms": node.last_contact_ms if node.last_contact_ms >= 0 else None,
                "directory_id": directories.get(node.node_id) or None,
            }
        )
    return {
        "node_id": quorum.node_id,
        "leader_id": None if quorum.leader_id == NO_NODE else quorum.leader_id,
        **pick(quorum, "term", "commit_offset", "applied_offset", "log_end_offset", "snapshot_offset"),
        "nodes": nodes,
    }


# --- elect -----------------------------------------------------------------------------------------


@cluster.command(
    epilog="""\b
Examples:
  kl cluster elect                     the preferred replica of every partition
  kl cluster elect events events-eu-2  one topic and one partition
  kl cluster elect --unclean -y events-0"""
)
@click.argument("names", nargs=-1, metavar="[TOPIC|TOPIC-PARTITION]…", shell_complete=complete_topics)
@click.option(
    "--unclean",
    is_flag=True,
    help="Elect any live replica if a partition has no leader, even if committed records are lost.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@secret_option
@listing_options
def elect(names: tuple[str, ...], unclean: bool, yes: bool, secret_file: Path | None) -> None:
    """Elect leaders: the preferred replicas, unless --unclean is given."""
    if unclean and not names:
        raise UsageError(
            "an unclean election needs the names of its partitions: kl cluster elect --unclean TOPIC-P"
        )
    if unclean and not yes:
        invocation.confirm(
            "Acknowledged records may be lost for ever. Elect an unclean leader?", "nothing was changed"
        )

    async def main(client: ClusterClient) -> list[ElectedPartition]:
        partitions = await named_partitions(client, names) if names else None
        request = ElectLeadersRequest(ELECTION_TIMEOUT_MS, unclean, partitions)
        if unclean:
            message = await connect.call_with_secret(client, secret_file, request)
        else:
            message = (await client.call(request)).message
        elected: list[ElectedPartition] = message.partitions
        return elected

    elected = connect.ask_cluster(main)
    fine = {ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED}
    shown = [each for each in elected if names or each.error_code != ErrorCode.ELECTION_NOT_NEEDED]
    rows = rows_of(shown, _ELECTION_COLUMNS)
    nothing = "nothing to do: the preferred replica leads every partition"
    print_listing(rows, _ELECTION_COLUMNS, invocation.current().output, if_empty=nothing)
    failed = [each for each in elected if each.error_code not in fine]
    if failed and len(failed) == len(elected):
        raise broker_error(failed[0].error_code, failed[0].error_message or "")
    if failed:
        raise PartialFailureError(f"{len(failed)} of {len(elected)} partitions have no new leader")


def _election_result(each: ElectedPartition) -> str:
    if each.error_code == ErrorCode.NONE:
        return "elected"
    if each.error_code == ErrorCode.ELECTION_NOT_NEEDED:
        return "leads already"
    return each.error_message or broker_error(each.error_code).code.name


async def named_partitions(client: ClusterClient, names: Iterable[str]) -> list[ElectionPartition]:
    """Return the partitions of ``names``, which are topics or partitions such as ``events-0``.

    Raises NotFoundError for an unknown name.
    """
    view = await look(client)
    known = [each.name for each in view.partitions]
    topics = {tp.topic for tp in known}
    wanted: dict[TopicPartition, None] = {}
    for name in names:
        topic, _, number = name.rpartition("-")
        if name in topics:
            wanted |= dict.fromkeys(tp for tp in known if tp.topic == name)
        elif topic in topics and number.isascii() and number.isdigit():
            tp = TopicPartition(topic, int(number))
            if tp not in known:
                count = sum(each.topic == topic for each in known)
                raise connect.no_such_partition(topic, tp.partition, count)
            wanted[tp] = None
        else:
            raise NotFoundError(f"there is no topic or partition {name!r}", hint="kl topic list shows topics")
    return [ElectionPartition(*tp) for tp in wanted]


# --- shutdown --------------------------------------------------------------------------------------


@cluster.command(
    epilog="""\b
Examples:
  kl cluster shutdown 2              node 2 hands over its leaderships, then stops
  kl cluster shutdown 2 --no-wait    do not wait until it has stopped"""
)
@click.argument("node_id", type=click.IntRange(min=0), metavar="NODE")
@click.option("--no-wait", is_flag=True, help="Return as soon as the shutdown has begun.")
@secret_option
@client_options
def shutdown(node_id: int, no_wait: bool, secret_file: Path | None) -> None:
    """Stop one broker cleanly: it first hands over its leaderships where possible. SIGTERM does the same."""

    async def main(client: ClusterClient) -> None:
        view = await look(client)
        known = {broker.node_id: broker for broker in view.brokers}
        if node_id not in known:
            raise connect.no_such_broker(node_id, known)
        if view.state_of(known[node_id]) != LIVE:
            invocation.say(f"node {node_id} is {view.state_of(known[node_id])} already")
            return
        request = ControlledShutdownRequest(node_id)
        await connect.call_with_secret(client, secret_file, request, node_id=node_id)
        if no_wait:
            click.echo(f"node {node_id}: shutting down")
            return
        await _until_gone(client, node_id, is_alone=len(view.live) == 1)
        click.echo(f"node {node_id}: stopped")

    connect.ask_cluster(main)


async def _until_gone(client: ClusterClient, node_id: int, *, is_alone: bool) -> None:
    """Wait until the metadata lists ``node_id`` as fenced, or does not list it.

    If no broker responds, return if ``is_alone``, otherwise raise ClientError.
    """
    import asyncio

    from kafkalite.errors import ClientError

    while True:
        try:
            view = await look(client)
        except ClientError:
            if is_alone:
                return
            raise
        if all(broker.is_fenced for broker in view.brokers if broker.node_id == node_id):
            return
        await asyncio.sleep(0.2)
