"""Shared by the group tests: one machine with its log, and members that behave as consumers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proof.groups.world import Consumer, Coordinator


@pytest.fixture
def coordinator() -> Coordinator:
    """With one topic of three partitions, t."""
    return Coordinator(t=3)


@pytest.fixture
def consumer(coordinator: Coordinator) -> Callable[..., Consumer]:
    """A new consumer of the topic t, that has joined the group g."""

    def join(member_id: str, *topics: str, **options: Any) -> Consumer:
        new = Consumer(coordinator, member_id, *(topics or ("t",)), **options)
        new.join()
        return new

    return join
