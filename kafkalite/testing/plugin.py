"""The pytest plugin: a broker for each test that asks, in sync tests and async ones alike.

``kafkalite`` is a running SyncCluster, fresh for each test, reached at ``kafkalite.bootstrap_servers`` from
any event loop and thread of the process. It uses no port and no file, so xdist workers do not meet.
``kafkalite_cluster`` makes as many as a test wants. ``@pytest.mark.kafkalite(brokers=3, num_partitions=3)``
gives the fixture's cluster its size and its brokers their settings.

Nothing of kafkalite but this module is imported until a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """A running broker of this test's own."""
    from kafkalite.testing.sync_cluster import SyncCluster

    marker = request.node.get_closest_marker("kafkalite")
    with SyncCluster(**(marker.kwargs if marker is not None else {})) as cluster:
        yield cluster


@pytest.fixture
def kafkalite_cluster() -> Iterator[Callable[..., SyncCluster]]:
    """Makes running clusters: ``kafkalite_cluster(storage="disk", num_partitions=3)``."""
    from contextlib import ExitStack

    from kafkalite.testing.sync_cluster import SyncCluster

    with ExitStack() as opened:

        def make(**settings: Any) -> SyncCluster:
            return opened.enter_context(SyncCluster(**settings))

        yield make
