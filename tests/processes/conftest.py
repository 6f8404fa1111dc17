"""Clusters of real processes. The tests share two cores, so each cluster is small and short-lived."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet_clients() -> Iterator[None]:
    """Silence the clients' log: brokers are killed here on purpose."""
    logger = logging.getLogger("kafkalite")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
