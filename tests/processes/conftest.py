"""Clusters of real processes; the tests share two cores, so each cluster is small and gone quickly."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet_clients() -> Iterator[None]:
    """Brokers die here on purpose: that clients can't reach them is no news."""
    logger = logging.getLogger("kafkalite")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
