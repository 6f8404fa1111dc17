"""Brokers over TCP and topics on them, for the tests of the bridge without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from kafkalite.testing import SyncCluster

_numbers = count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    """One broker for the tests of a module, at ``cluster.bootstrap_servers``."""
    with SyncCluster(transport="tcp") as running:
        yield running
        running.kill()  # dropped requests would delay an orderly stop


@pytest.fixture
def topic(cluster: SyncCluster) -> str:
    """A new topic with three partitions."""
    name = f"topic-{next(_numbers)}"
    cluster.create_topic(name, partitions=3)
    return name


@pytest.fixture(autouse=True)
def _no_pooled_connections() -> Iterator[None]:
    """Close the pooled connections that a test left."""
    yield
    from sparkbridge.brokers.cluster import close_all

    close_all()
