"""The pytest plugin: a broker for each test that requests one, in synchronous and asynchronous tests.

The fixture ``kafkalite`` is a running SyncCluster, a new one for each test. Clients in any event loop and
thread of the process connect to ``kafkalite.bootstrap_servers``. By default, the cluster uses no port and no
file, so xdist workers do not conflict. ``kafkalite_cluster`` creates any number of clusters for a test.
``@pytest.mark.kafkalite(brokers=3, num_partitions=3)`` sets the number of brokers and their settings.

Until a test requests a fixture, the plugin imports neither the broker nor the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kafkalite.testing.sync_cluster import SyncCluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kafkalite(brokers=1, **settings): the cluster behind the kafkalite fixture"
    )


@pytest.fixture
def kafkalite(request: pytest.FixtureRequest) -> Iterator[SyncCluster]:
    """A running cluster for this test only, with one broker by default."""
    from kafkalite.errors import ConfigError
    from kafkalite.testing.sync_cluster import SyncCluster

    marker = request.node.get_closest_marker("kafkalite")
    if marker is not None and marker.args:
        shown = ", ".join(map(repr, marker.args))
        raise _failed(f"@pytest.mark.kafkalite({shown}): it takes keywords only, such as brokers=3")
    with ExitStack() as opened:
        try:
            cluster = _open(opened, SyncCluster(**(marker.kwargs if marker is not None else {})))
        except ConfigError as wrong:
            raise _failed(f"@pytest.mark.kafkalite: {wrong}") from None
        yield cluster


@pytest.fixture
def kafkalite_cluster() -> Iterator[Callable[..., SyncCluster]]:
    """Returns a factory of running clusters: ``kafkalite_cluster(storage="disk", num_partitions=3)``."""
    from kafkalite.testing.sync_cluster import SyncCluster

    with ExitStack() as opened:

        def make(**settings: Any) -> SyncCluster:
            return _open(opened, SyncCluster(**settings))

        yield make


def _open(opened: ExitStack, cluster: SyncCluster) -> SyncCluster:
    """Start ``cluster``. A missing extra fails the test with one sentence instead of a traceback."""
    from kafkalite.errors import MissingExtraError

    try:
        return opened.enter_context(cluster)
    except MissingExtraError as missing:
        raise _failed(str(missing)) from None


def _failed(text: str) -> BaseException:
    """Return the exception that fails the test with ``text`` and no traceback."""
    return pytest.fail.Exception(text, pytrace=False)
