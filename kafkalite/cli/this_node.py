"""The node on this machine: its settings, and how commands reach it without a user."""

# Tests: tests/cli/test_first_user.py, tests/cli/test_cluster.py

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalite.cli.exit_codes import UsageError

if TYPE_CHECKING:
    from kafkalite.broker.config import BrokerConfig
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.cluster.authentication import OperatorLogin


def own_config(file: Path | None = None) -> BrokerConfig:
    """Return the settings of this node, without verification of host names. Raises ConfigError.

    They come from the environment and, if given, from ``file`` in TOML.
    """
    from kafkalite.broker.config import load_settings

    # This node is trusted whatever address its certificate names.
    config = load_settings(file, os.environ, {}).config
    return replace(config, ssl_endpoint_identification_algorithm="")


def own_address(config: BrokerConfig) -> str:
    """Return the address at which processes on this machine reach the node of ``config``."""
    from kafkalite.broker.addresses import is_wildcard
    from kafkalite.transport import security_scheme

    address = config.listeners[0]
    if not is_wildcard(address):
        return address
    return f"{security_scheme(address)}127.0.0.1:{address.rpartition(':')[2]}"


def own_login(config: BrokerConfig) -> OperatorLogin | None:
    """Return a login with ``cluster.secret`` at the node of ``config``.

    If ``config`` has no ``cluster.id``, the id is read from the data directory. Return None if there is no id
    in either place, or no secret.
    """
    from kafkalite.client.cluster.authentication import OperatorLogin
    from kafkalite.storage.disk import RealFileSystem
    from kafkalite.storage.log_store import read_identity

    cluster_id = config.cluster_id
    if cluster_id is None and config.log_dirs is not None:
        identity = read_identity(RealFileSystem(), config.log_directories[0])
        cluster_id = None if identity is None else identity.cluster_id
    if cluster_id is None or not config.cluster_secret:
        return None
    return OperatorLogin(config.cluster_secret, cluster_id)


def own_admin(config: BrokerConfig, timeout_ms: int) -> Admin:
    """Return an Admin of this node that logs in as ``own_login``.

    Raises UsageError if the node is not a broker, or there is no login.
    """
    from kafkalite.client.admin.admin import Admin
    from kafkalite.tls_options import PLAINTEXT, SSL, TLS_OPTIONS
    from kafkalite.transport import is_tls, without_security

    if not config.is_broker or not config.cluster_secret:
        raise UsageError(
            "this node is no broker with a cluster.secret",
            hint="name its settings with --file, and set cluster.secret, also on a node without peers",
        )
    login = own_login(config)
    if login is None:
        raise UsageError("this node has neither a cluster.id nor a data directory", hint="start it once")
    address = own_address(config)
    tls = {option.python_name: getattr(config, option.python_name) for option in TLS_OPTIONS}
    return Admin(
        without_security(address),
        config={"client.id": "kl", "default.api.timeout.ms": timeout_ms} | tls,
        operator=login,
        security_protocol=SSL if is_tls(address) else PLAINTEXT,
    )
