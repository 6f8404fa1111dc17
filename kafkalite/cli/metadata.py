"""``kl metadata``: the cluster's metadata as a tree of paths, its changes, and its quorum."""

# Tests: tests/cli/test_cluster.py

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.cluster import QUORUM_COLUMNS, quorum_document
from kafkalite.cli.exit_codes import CheckFailedError, NotFoundError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, coloured, json_text, print_document, print_listing, write
from kafkalite.cli.stdio import until_pipe_closes
from kafkalite.client.admin.cluster_health import look_at_quorum, silent_voters
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.messages.admin import AddRaftVoterRequest, RemoveRaftVoterRequest
from kafkalite.protocol.messages.metadata import (
    DescribeMetadataRequest,
    DescribeMetadataResponse,
    DescribeQuorumResponse,
    MetadataNode,
)

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

ROOT: Final = "/"
_NOW: Final = -1
_POLL_MS: Final = 5_000
_CHANGE_TIMEOUT_MS: Final = 30_000

_COLUMNS: Final = (Column("path", "PATH"), Column("value", "VALUE"))


@click.group(cls=Group)
def metadata() -> None:
    """Inspect the cluster's metadata."""


def _path(text: str) -> str:
    """Convert ``topics/events/`` to ``/topics/events``."""
    return ROOT + text.strip("/")


async def _at(
    client: ClusterClient, path: str, *, after_offset: int = _NOW, max_wait_ms: int = 0
) -> DescribeMetadataResponse:
    """Return a response whose nodes are ``path`` and then its children in the metadata tree.

    If ``after_offset`` is given, first wait up to ``max_wait_ms`` until the metadata log has passed that
    offset. Raises NotFoundError if the tree has no such path.
    """
    request = DescribeMetadataRequest(path, after_offset, max_wait_ms)
    try:
        response: DescribeMetadataResponse = (await client.call(request)).message
    except InvalidRequestError as error:
        raise NotFoundError(f"there is nothing at {path}", hint="'kl metadata ls /' lists the top") from error
    return response


def _value(node: MetadataNode) -> Any:
    """Return the decoded JSON value of a path in the metadata tree, or None for a directory."""
    return json.loads(node.value) if node.value else None


@metadata.command(
    epilog="""\b
Examples:
  kl metadata ls                       the top: brokers, topics, configs, …
  kl metadata ls /topics/events        its partitions
  kl metadata ls /brokers -o json"""
)
@click.argument("path", default=ROOT, metavar="[PATH]")
@listing_options
def ls(path: str) -> None:
    """List the children of a path, or the path itself if it has none."""
    current = invocation.current()
    wanted = _path(path)

    async def main(client: ClusterClient) -> list[MetadataNode]:
        return (await _at(client, wanted)).nodes

    first, *below = connect.ask_cluster(main)
    shown = below or [first]
    if current.output in {"table", "name"}:
        write("".join(f"{node.path}\n" for node in shown))
        return
    rows = [{"path": node.path, "value": _value(node)} for node in shown]
    print_listing(rows, _COLUMNS, current.output, name_key="path")


@metadata.command(
    epilog="""\b
Examples:
  kl metadata cat /topics/events/0     leader, replicas, ISR, epochs
  kl metadata cat /brokers/1"""
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH…")
@listing_options
def cat(paths: tuple[str, ...]) -> None:
    """Print the value at each PATH as JSON or, with -o yaml, as YAML."""
    current = invocation.current()

    async def main(client: ClusterClient) -> list[tuple[str, MetadataNode]]:
        return [(path, (await _at(client, _path(path))).nodes[0]) for path in paths]

    for path, node in connect.ask_cluster(main):
        value = _value(node)
        if value is None:
            raise NotFoundError(f"{_path(path)} has no value", hint=f"kl metadata ls {_path(path)}")
        is_kept = current.output == "jsonl" or (current.output == "yaml" and isinstance(value, dict))
        print_document(value, current.output if is_kept else "json")


@metadata.command(
    epilog="""\b
Examples:
  kl metadata tail                     every change from now on, until Ctrl-C
  kl metadata tail /topics/events -n 3"""
)
@click.argument("path", default=ROOT, metavar="[PATH]")
@invocation.number_option("-n", "count", help="Stop after N changes.")
@listing_options
def tail(path: str, count: int | None) -> None:
    """Print changes at and below a path as they are committed: + new, ~ changed, - removed."""
    wanted = _path(path)
    is_json = invocation.current().output in {"json", "jsonl"}

    async def main(client: ClusterClient) -> None:
        offset, before = await _tree(client, wanted)
        told = 0
        while count is None or told < count:
            offset, now = await _tree(client, wanted, after_offset=offset)
            for sign, changed, value in changes(before, now):
                write(_change_line(offset, sign, changed, value, is_json=is_json))
                told += 1
                if told == count:
                    return
            before = now

    connect.ask_cluster(lambda client: until_pipe_closes(main(client)), long_poll_ms=_POLL_MS)


async def _tree(client: ClusterClient, path: str, *, after_offset: int = _NOW) -> tuple[int, dict[str, str]]:
    """Return (metadata offset, {path: value}) of ``path`` and all paths below it.

    If ``after_offset`` is given, first wait up to _POLL_MS until the metadata log has passed that offset.
    """
    response = await _at(
        client, path, after_offset=after_offset, max_wait_ms=_POLL_MS if after_offset >= 0 else 0
    )
    found = {node.path: node.value for node in response.nodes}
    waiting = [node.path for node in response.nodes[1:]]
    while waiting:
        below = waiting.pop()
        request = DescribeMetadataRequest(below, _NOW, 0)
        for node in (await client.call(request)).message.nodes:
            if node.path not in found:
                waiting.append(node.path)
            found[node.path] = node.value
    return response.metadata_offset, found


def changes(before: dict[str, str], now: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (sign, path, value) of each difference: ``+`` new, ``~`` changed, ``-`` removed. Pure."""
    found = []
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            found.append(("-", path, before[path]))
        elif path not in before:
            found.append(("+", path, now[path]))
        elif before[path] != now[path]:
            found.append(("~", path, now[path]))
    return found


_COLOURS: Final = {"+": "32", "~": "33", "-": "31"}


def _change_line(offset: int, sign: str, path: str, value: str, *, is_json: bool) -> str:
    if is_json:
        decoded = json.loads(value) if value else None
        document = {"offset": offset, "change": sign, "path": path, "value": decoded}
        return json_text(document) + "\n"
    import sys

    shown = f"\x1b[{_COLOURS[sign]}m{sign}\x1b[0m" if coloured(sys.stdout) else sign
    return f"{offset:>8} {shown} {path}" + (f" {value}" if value and sign != "-" else "") + "\n"


@metadata.group(
    cls=Group,
    invoke_without_command=True,
    epilog="""\b
Examples:
  kl metadata quorum                   leader, voters and observers
  kl metadata quorum add-voter 4       make observer 4 a voter
  kl metadata quorum remove-voter 2    remove voter 2, which may be dead""",
)
@click.option("--check", is_flag=True, help="Exit code 9 if there is no leader, or a voter is silent.")
@listing_options
@click.pass_context
def quorum(context: click.Context, check: bool) -> None:
    """Show the metadata quorum: its leader, and the role and offset of each node. Or change its voters."""
    if context.invoked_subcommand is not None:
        return
    current = invocation.current()
    seen = connect.ask_cluster(look_at_quorum)
    document = quorum_document(seen)
    if current.output in {"table", "wide", "name"}:
        leader = document["leader_id"]
        write(
            f"leader     {'none' if leader is None else f'node {leader}'}\n"
            f"term       {document['term']}\n"
            f"committed  {document['commit_offset']:,}\n"
            f"snapshot   {document['snapshot_offset']:,}\n"
            f"seen by    node {document['node_id']}\n\n"
        )
        print_listing(document["nodes"], QUORUM_COLUMNS, current.output, name_key="node_id")
    else:
        print_document(document, current.output)
    if check:
        _check(seen)


_directory_option = click.option(
    "--directory-id",
    default="",
    metavar="HEX",
    help="Refuse unless this is the node's metadata directory, as 'kl metadata quorum' shows it.",
)


@quorum.command(
    epilog="""\b
Examples:
  kl metadata quorum add-voter 4"""
)
@click.argument("node_id", type=click.IntRange(min=0), metavar="NODE")
@_directory_option
@client_options
def add_voter(node_id: int, directory_id: str) -> None:
    """Make an observer a voter of the metadata quorum. Waits until the observer has caught up.

    Start the node with controller.quorum.bootstrap.servers first. Add voters one after the other.
    """
    request = AddRaftVoterRequest(node_id, directory_id, _CHANGE_TIMEOUT_MS)
    voters = connect.ask_cluster(lambda client: _changed(client, request))
    click.echo(f"node {node_id}: now a voter; the voters are {', '.join(map(str, voters))}")


@quorum.command(
    epilog="""\b
Examples:
  kl metadata quorum remove-voter 2    asks first
  kl metadata quorum remove-voter 2 -y"""
)
@click.argument("node_id", type=click.IntRange(min=0), metavar="NODE")
@_directory_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@client_options
def remove_voter(node_id: int, directory_id: str, yes: bool) -> None:
    """Remove a voter, which may be dead, from the metadata quorum. The node goes on as an observer."""
    if not yes:
        seen = connect.ask_cluster(look_at_quorum)
        left = [node.node_id for node in seen.nodes if node.is_voter and node.node_id != node_id]
        what = f"Remove voter {node_id}, so that the voters are {', '.join(map(str, left)) or 'none'}?"
        invocation.confirm(what, "nothing was changed")
    request = RemoveRaftVoterRequest(node_id, directory_id, _CHANGE_TIMEOUT_MS)
    voters = connect.ask_cluster(lambda client: _changed(client, request))
    click.echo(f"node {node_id}: no voter any more; the voters are {', '.join(map(str, voters))}")


async def _changed(client: ClusterClient, request: AddRaftVoterRequest | RemoveRaftVoterRequest) -> list[int]:
    """Change the voters, and return the ids of those that the leader then has."""
    await client.call(request)
    seen = await look_at_quorum(client)
    return [node.node_id for node in seen.nodes if node.is_voter]


def _check(seen: DescribeQuorumResponse) -> None:
    """Raise CheckFailedError if the quorum has no leader or a voter has sent no message for too long."""
    if seen.leader_id < 0:
        raise CheckFailedError("the quorum has no leader")
    silent = silent_voters(seen)
    if silent:
        raise CheckFailedError(f"no recent message from node {', '.join(map(str, silent))}")
