"""Shared by the metadata tests: making images by the road that the product uses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.metadata.controller import Command, ControllerSettings, RegisterBroker, decide
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY, ClusterImage
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    ConfigChange,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    NewTopic,
    PartitionCount,
)


class Metadata:
    """An image and the commands that change it, as the controller node would run them, one entry each."""

    def __init__(
        self, brokers: int = 1, *, seed: int = 1, settings: ControllerSettings | None = None
    ) -> None:
        self.image: ClusterImage = EMPTY
        self.settings = settings or ControllerSettings()
        self.rng = random.Random(seed)
        self.deltas: list[Delta] = []
        self.records: list[Any] = []
        for node_id in range(1, brokers + 1):
            self.submit(RegisterBroker(node_id, (f"host{node_id}:9092",)))

    def submit(self, command: Command) -> Any:
        step = decide(self.image, command, now_ms=1_000, rng=self.rng, settings=self.settings, ticket=7)
        ((ticket, reply),) = step.replies
        assert ticket == 7
        if step.records:
            delta = Delta(self.image).replay_all(step.records)
            self.image = delta.apply(self.image.metadata_offset + 1)
            self.deltas.append(delta)
            self.records += step.records
        return reply

    def create(
        self,
        *names: str,
        partitions: int = 1,
        factor: int = 1,
        configs: dict[str, str] | None = None,
        validate_only: bool = False,
    ) -> Any:
        topics = [NewTopic(name, partitions, factor, configs or {}) for name in names]
        return self.submit(CreateTopicsRequest(1_000, validate_only, topics))

    def delete(self, *names: str) -> Any:
        return self.submit(DeleteTopicsRequest(1_000, list(names)))

    def grow(self, name: str, total_count: int, *, validate_only: bool = False) -> Any:
        topics = [PartitionCount(name, total_count)]
        return self.submit(CreatePartitionsRequest(1_000, validate_only, topics))

    def alter(self, resource_type: str, name: str, changes: dict[str, str | None]) -> Any:
        wanted = [ConfigChange(resource_type, name, key, value) for key, value in changes.items()]
        return self.submit(AlterConfigsRequest(False, wanted))


@pytest.fixture(scope="session")
def new_metadata() -> Callable[..., Metadata]:
    """The class: session-wide, so that property tests may make one per example."""
    return Metadata


@pytest.fixture
def metadata() -> Metadata:
    """One broker, no topic."""
    return Metadata()
