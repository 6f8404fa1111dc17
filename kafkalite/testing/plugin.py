"""The pytest plugin: a broker for each test that requests one, in synchronous and asynchronous tests.

The fixture ``kafkalite`` is a running SyncCluster, a new one for each test. Clients in any event loop and
thread of the process connect to ``kafkalite.bootstrap_servers``. The cluster uses no port and no file, so
xdist workers do not conflict. ``kafkalite_cluster`` creates any number of clusters for a test.
``@pytest.mark.kafkalite(brokers=3, num_partitions=3)`` sets the number of brokers and their settings.

Until a test requests a fixture, no other module of kafkalite is imported.
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
    """A running broker for this test only."""
    from kafkalite.testing.sync_cluster import SyncCluster

    marker = request.node.get_closest_marker("kafkalite")
    with ExitStack() as opened:
        yield _open(opened, SyncCluster(**(marker.kwargs if marker is not None else {})))


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
        pytest.fail(str(missing), pytrace=False)
