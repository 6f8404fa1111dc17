"""Shared by the metadata tests: images made by commands, as in the product."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kafkalite.metadata.broker_commands import BeginShutdown, FenceBroker, LoseReplicas, UnfenceBroker
from kafkalite.metadata.controller import Command, decide
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.features import SUPPORTED, newest_levels
from kafkalite.metadata.image import EMPTY, ClusterImage, PartitionState
from kafkalite.metadata.record_codec import check_level
from kafkalite.metadata.records import NO_LEADER
from kafkalite.metadata.recovery import RecoveredPartition, ReplicaReports
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    ConfigChange,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    ElectionPartition,
    ElectLeadersRequest,
    NewTopic,
    PartitionCount,
)
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    CheckpointHighWatermarksRequest,
    DamagedReplica,
    PartitionChange,
    PartitionHighWatermark,
    RegisterBrokerRequestV1,
    ReplicaReport,
    ReportReplicasRequest,
)


class Metadata:
    """An image and commands that change it, as the controller node runs them, one entry each."""

    def __init__(
        self, brokers: int = 1, *, seed: int = 1, settings: ControllerSettings | None = None
    ) -> None:
        self.image: ClusterImage = Delta(EMPTY).replay_all(newest_levels()).apply(0)
        self.settings = settings or ControllerSettings()
        self.rng = random.Random(seed)
        self.deltas: list[Delta] = []
        self.records: list[Any] = []
        self.incarnations = 0
        self.leaders_confirm = True  #: leaders propose an ISR that the controller has set (R57)
        for node_id in range(1, brokers + 1):
            self.join(node_id)

    def submit(self, command: Command, **context: Any) -> Any:
        step = decide(self.image, command, now_ms=1_000, rng=self.rng, settings=self.settings, **context)
        reply = step.reply
        check_level(step.records, self.image.metadata_version)  # R91
        if step.records:
            delta = Delta(self.image).replay_all(step.records)
            self.image = delta.apply(self.image.metadata_offset + 1)
            self.deltas.append(delta)
            self.records += step.records
            if self.leaders_confirm and not isinstance(command, AlterPartitionRequest):
                self._confirm()
        return reply

    def _confirm(self) -> None:
        for name, topic in self.image.topics.items():
            minimum = int(self.image.topic_configs(name).get("min.insync.replicas", "1"))
            for number, state in enumerate(topic.partitions):
                if state.leader != NO_LEADER and state.elr and len(state.isr) >= minimum:
                    self.propose(state.isr, name, number)

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

    # --- a cluster of several nodes

    def epoch(self, node_id: int) -> int:
        return self.image.brokers[node_id].broker_epoch

    def state(self, name: str = "orders", number: int = 0) -> PartitionState:
        return self.image.topics[name].partitions[number]

    def damaged(self, *names: tuple[str, int]) -> list[DamagedReplica]:
        return [DamagedReplica(self.image.topics[name].topic_id, number) for name, number in names]

    def register(
        self,
        node_id: int,
        *,
        incarnation: str | None = None,
        directory: str | None = None,
        clean: bool = False,
        synced: bool = False,
        damaged: list[DamagedReplica] | None = None,
        rack: str | None = None,
        starts: int = 0,
    ) -> Any:
        """Register a new process of the broker; a clean one has the marker of the last epoch."""
        self.incarnations += 1
        return self.submit(
            RegisterBrokerRequestV1(
                node_id,
                incarnation or f"{self.incarnations:032x}",
                directory or f"{node_id:032x}",
                [f"host{node_id}:9092"],
                rack,
                self.epoch(node_id) if clean else -1,
                synced,
                damaged or [],
                starts,
                list(SUPPORTED),
            )
        )

    def join(self, node_id: int, **how: Any) -> Any:
        """Register a new process that is live at once, as that of a single node."""
        settings = self.settings
        self.settings = replace(settings, is_single_node=True)
        try:
            return self.register(node_id, synced=True, **how)
        finally:
            self.settings = settings

    def unfence(self, node_id: int) -> Any:
        return self.submit(UnfenceBroker(node_id, self.epoch(node_id)))

    def fence(self, node_id: int) -> Any:
        return self.submit(FenceBroker(node_id, self.epoch(node_id)))

    def begin_shutdown(self, node_id: int) -> Any:
        return self.submit(BeginShutdown(node_id, self.epoch(node_id)))

    def lose(self, node_id: int, *names: tuple[str, int]) -> Any:
        return self.submit(LoseReplicas(node_id, self.epoch(node_id), tuple(self.damaged(*names))))

    def proposal(
        self, isr: Iterable[int], name: str = "orders", number: int = 0, **changes: Any
    ) -> AlterPartitionRequest:
        """Return the request of the partition's leader to have ``isr`` in sync."""
        state = self.state(name, number)
        isr = list(isr)
        epochs = [
            -1 if node_id == state.leader or node_id not in self.image.brokers else self.epoch(node_id)
            for node_id in isr
        ]
        change = PartitionChange(
            self.image.topics[name].topic_id, number, state.leader_epoch, state.partition_epoch, isr, epochs
        )
        sender = changes.pop("sender", state.leader)
        broker_epoch = changes.pop("broker_epoch", None)
        if broker_epoch is None:
            broker_epoch = self.epoch(sender) if sender in self.image.brokers else -1
        return AlterPartitionRequest(sender, broker_epoch, [change._replace(**changes)])

    def report(
        self,
        reports: ReplicaReports,
        node_id: int,
        last_epoch: int,
        end: int,
        *,
        now_ms: int = 0,
        name: str = "orders",
        number: int = 0,
        **changes: Any,
    ) -> None:
        """Store what the broker reports of its replica, in the present leader epoch."""
        report = ReplicaReport(
            self.image.topics[name].topic_id,
            number,
            self.state(name, number).leader_epoch,
            last_epoch,
            end,
            False,
            0,
            -1,
        )._replace(**changes)
        request = ReportReplicasRequest(node_id, self.epoch(node_id), [report])
        reports.take(self.image, request, now_ms)

    def recover(self, reports: ReplicaReports, now_ms: int = 0) -> list[RecoveredPartition]:
        """Carry out the elections that are due."""
        command = reports.due(self.image, now_ms)
        return [] if command is None else self.submit(command)

    def propose(self, isr: Iterable[int], name: str = "orders", number: int = 0, **changes: Any) -> Any:
        response = self.submit(self.proposal(isr, name, number, **changes))
        return response.partitions[0] if response.error_code == 0 else response

    def elect(self, *names: tuple[str, int], unclean: bool = False, **context: Any) -> Any:
        wanted = [ElectionPartition(*name) for name in names] or None
        return self.submit(ElectLeadersRequest(1_000, unclean, wanted), **context)

    def checkpoint(self, end: int, name: str = "orders", number: int = 0, **changes: Any) -> Any:
        state = self.state(name, number)
        sender = changes.pop("sender", state.leader)
        reported = PartitionHighWatermark(
            self.image.topics[name].topic_id, number, changes.pop("leader_epoch", state.leader_epoch), end
        )
        return self.submit(CheckpointHighWatermarksRequest(sender, self.epoch(sender), [reported]))


@pytest.fixture(scope="session")
def new_metadata() -> Callable[..., Metadata]:
    """The class: session-wide, so that property tests may make one per example."""
    return Metadata


@pytest.fixture
def metadata() -> Metadata:
    """One broker, no topic."""
    return Metadata()


@pytest.fixture
def cluster(new_metadata: Callable[..., Metadata]) -> Metadata:
    """Three live brokers, and the topic orders: one partition on all three, min.insync.replicas=2."""
    metadata = new_metadata(brokers=0)
    for node_id in (1, 2, 3):
        metadata.register(node_id)
        metadata.unfence(node_id)
    created = metadata.create("orders", factor=3, configs={"min.insync.replicas": "2"})
    assert created.topics[0].error_code == 0
    return metadata
