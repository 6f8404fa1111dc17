"""``kl tls``: certificates for development."""

# Tests: tests/cli/test_dev_certs.py

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import click

from kafkalite.cli.invocation import debug_option, number_option, program_name
from kafkalite.cli.lazy_group import Group

LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")


@click.group(cls=Group)
def tls() -> None:
    """Certificates for development."""


@tls.command(
    "dev-certs",
    epilog="""\b
Examples:
  kl tls dev-certs certificates
  kl tls dev-certs certificates --server node1 --server node2 --server node3
  kl tls dev-certs certificates --host kafka.example --client alice --client bob""",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--server", "servers", multiple=True, metavar="NAME", help="Name a server.  [default: broker]")
@click.option("--client", "clients", multiple=True, metavar="NAME", help="Name a client.  [default: client]")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="A further name or address under which clients reach the servers; this machine's are included.",
)
@number_option("--days", default=365, show_default=True, help="How long the certificates are valid.")
@debug_option
def dev_certs(
    directory: Path, servers: tuple[str, ...], clients: tuple[str, ...], hosts: tuple[str, ...], days: int
) -> None:
    """Make an authority and certificates in DIR, for development only.

    NAME.pem contains the key and the certificate of NAME. ca.pem contains the certificate of the authority. A
    second run uses the same authority, and replaces only certificates of the same names.
    """
    from kafkalite.transport.dev_certificates import CA_CERTIFICATE, make_dev_certificates

    servers, clients = servers or ("broker",), clients or ("client",)
    reached = (*LOCAL_HOSTS, socket.gethostname(), *hosts)
    written = make_dev_certificates(directory, servers, clients, reached, days=days)
    directory = directory.resolve()
    trust = f"ssl.truststore.location={directory / CA_CERTIFICATE}"
    for name in written:
        click.echo(f"{directory / written[name].name}")
    click.echo(f"""{directory / CA_CERTIFICATE}

a server's settings:
  listeners=SSL://localhost:9092
  ssl.keystore.location={directory / f"{servers[0]}.pem"}
  {trust}
  ssl.client.auth=required
a client's:
  {program_name()} -X security.protocol=SSL -X {trust} \\
    -X ssl.keystore.location={directory / f"{clients[0]}.pem"} topic list""")
