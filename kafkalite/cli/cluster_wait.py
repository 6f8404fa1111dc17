"""``kl cluster wait``: waits until the cluster is in the requested state, for scripts and health checks."""

# Tests: tests/cli/test_cluster.py

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from kafkalite.cli import invocation
from kafkalite.cli.cluster import cluster as cluster
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.connect import secured_servers
from kafkalite.cli.exit_codes import TimedOutError
from kafkalite.cli.invocation import client_options
from kafkalite.cli.output import plural
from kafkalite.cli.this_node import own_address, own_config, own_login
from kafkalite.errors import KafkaliteError

if TYPE_CHECKING:
    from kafkalite.client.admin.cluster_health import ClusterView, RequestedState
    from kafkalite.client.cluster.login import ConnectionLogin
    from kafkalite.transport.tls_context import TlsContext

DEFAULT_PATIENCE_MS: Final = 60_000
_POLL_INTERVAL_S: Final = 0.2
_ANSWER_TIMEOUT_MS: Final = 2_000


@cluster.command(
    epilog="""\b
Examples:
  kl cluster wait                         until it has a controller and a broker
  kl cluster wait --brokers 3 --whole     three brokers, every partition fully in sync
  kl cluster wait --topic events --timeout 10s
  kl cluster wait --this-node             check the node of this environment, for health checks"""
)
@click.option("--ready", is_flag=True, help="Wait for a controller and a live broker (always required).")
@invocation.number_option("--brokers", "broker_count", help="Wait for N live brokers.")
@click.option(
    "--whole",
    is_flag=True,
    help="Wait until all registered brokers are live and all partitions led and fully in sync.",
)
@invocation.number_option("--node", "node_id", help="Wait until broker N is live.", minimum=0)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME",
    help="Wait until this topic exists and each partition has a leader.",
    shell_complete=complete_topics,
)
@click.option(
    "--this-node",
    is_flag=True,
    help="Ask only the node that this environment configures (KAFKALITE_NODE_ID, KAFKALITE_LISTENERS); "
    "it must be a live member. Logs in with KAFKALITE_CLUSTER_SECRET, if set.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print neither progress nor result.")
@client_options
def wait(
    ready: bool,
    broker_count: int | None,
    whole: bool,
    node_id: int | None,
    topics: tuple[str, ...],
    this_node: bool,
    quiet: bool,
) -> None:
    """Wait until the cluster is ready; exit code 7 after --timeout (default: one minute)."""
    from kafkalite.client.admin.cluster_health import RequestedState
    from kafkalite.transport import is_tls, needs_login
    from kafkalite.transport.tls_context import TlsContext

    current = invocation.current()
    requested = RequestedState(broker_count or 1, whole, node_id, frozenset(topics))
    addresses, tls, login = secured_servers(current)
    config = own_config() if this_node else None
    if config is not None:
        tls = TlsContext(config)
    if config is not None and config.is_broker:
        addresses, requested = [own_address(config)], requested._replace(node_id=config.node_id)
        tls = tls if is_tls(addresses[0]) else None
    patience_ms = DEFAULT_PATIENCE_MS if current.timeout_ms is None else current.timeout_ms
    progress = _Reasons(is_silent=quiet)

    def current_login() -> ConnectionLogin | None:
        return login if config is None else own_login(config) or login

    try:
        if config is not None and not config.is_broker:
            address = config.controller_addresses[0]
            invocation.run(lambda: _until_answered(address, tls, progress), timeout_ms=patience_ms)
            return
        view = invocation.run(
            lambda: _until(addresses, tls, current_login, requested, progress), timeout_ms=patience_ms
        )
    except TimedOutError:
        hint = "'kl cluster status' shows more; a longer --timeout waits longer"
        if config is not None and needs_login(addresses[0]) and current_login() is None:
            hint = "the listener requires a login: set KAFKALITE_CLUSTER_SECRET, also on a node without peers"
        raise TimedOutError(
            f"not ready after {patience_ms / 1000:g} s: {progress.last or 'no response'}", hint=hint
        ) from None
    finally:
        progress.end()
    if not quiet:
        live = plural(len(view.live), "live broker")
        click.echo(
            f"ready: {live}, controller {view.controller_id}, {plural(len(view.partitions), 'partition')}"
        )


class _Reasons:
    """Prints on stderr why the command waits, whenever the reasons change.

    On a terminal, new reasons replace the old ones in the same line. If ``is_silent``, prints nothing.
    """

    def __init__(self, *, is_silent: bool) -> None:
        self.last = ""
        self._is_silent = is_silent
        self._is_terminal = sys.stderr.isatty()

    def tell(self, reasons: Sequence[str]) -> None:
        text = "; ".join(reasons)
        if text == self.last:
            return
        self.last = text
        if self._is_silent:
            return
        if self._is_terminal:
            click.echo(f"\r\x1b[Kkl: waiting: {text}", err=True, nl=False)
        else:
            invocation.say(f"waiting: {text}")

    def end(self) -> None:
        if self.last and self._is_terminal and not self._is_silent:
            click.echo("\r\x1b[K", err=True, nl=False)


async def _until_answered(address: str, tls: TlsContext | None, progress: _Reasons) -> None:
    """Wait until the controller at ``address`` completes a handshake, the only request it accepts from kl."""
    import asyncio

    from kafkalite.client.cluster.connection import connect

    while True:
        try:
            connection = await connect(address, client_id="kl", timeout_ms=_ANSWER_TIMEOUT_MS, tls=tls)
        except KafkaliteError as error:
            progress.tell([error.message])
            await asyncio.sleep(_POLL_INTERVAL_S)
            continue
        connection.close()
        return


async def _until(
    addresses: Sequence[str],
    tls: TlsContext | None,
    login: Callable[[], ConnectionLogin | None],
    requested: RequestedState,
    progress: _Reasons,
) -> ClusterView:
    """Poll until the cluster is in the requested state, without a time limit. Return the last view.

    ``login`` returns the login of each poll: a new node may have no cluster id yet.
    """
    import asyncio

    from kafkalite.client.admin.cluster_health import look_from, unmet_conditions

    while True:
        try:
            view = await look_from(addresses, timeout_ms=_ANSWER_TIMEOUT_MS, tls=tls, login=login())
        except KafkaliteError as error:
            progress.tell([error.message])
        else:
            reasons = unmet_conditions(view, requested)
            if not reasons:
                return view
            progress.tell(reasons)
        await asyncio.sleep(_POLL_INTERVAL_S)
