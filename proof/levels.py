"""Random histories of upgrades: programs of brokers are replaced, and levels are finalised (R91, R92).

Some brokers run a program of level 1 of metadata.version, others one of levels 1 and 2. Each record that the
controller decides must be one that the programs of all registered brokers read.
"""

# Tests: tests/metadata/test_features.py

from __future__ import annotations

from typing import Any, Final

from kafkalite.metadata.controller import Command, decide
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.features import METADATA_VERSION, SUPPORTED
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.metadata.rebalance_commands import RebalanceReplicas
from kafkalite.metadata.record_codec import RecordType, to_array
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    CreateTopicsRequest,
    FeatureUpdate,
    NewTopic,
    PartitionReassignment,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.messages.cluster import RegisterBrokerRequest, RegisterBrokerRequestV1
from kafkalite.rng import Rng, seeded_rng

NODES: Final = (1, 2, 3)
STEPS: Final = 40
#: {record type: the newest version that a program of level 1 reads}
_READ_AT_LEVEL_1: Final = dict.fromkeys(range(1, 12), 0) | {
    int(RecordType.PARTITION): 3,
    int(RecordType.BROKER_REGISTRATION): 2,
}


class Levels:
    """A log and the programs of the brokers: whether the last registration of each was of the newer one."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self.image = EMPTY
        self.is_new: dict[int, bool] = {}
        self.starts = 0

    def submit(self, command: Command) -> Any:
        nodes = {node_id: SUPPORTED if self.is_new.get(node_id) else None for node_id in self.image.brokers}
        settings = ControllerSettings(is_single_node=True, internal_topics=(("t", 2),))
        step = decide(self.image, command, now_ms=1, rng=self.rng, settings=settings, nodes=nodes)
        if isinstance(command, RegisterBrokerRequest) and step.reply.error_code == 0:
            self.is_new[command.node_id] = isinstance(command, RegisterBrokerRequestV1)
        before = self.image.metadata_version
        self.image = Delta(self.image).replay_all(step.records).apply(self.image.metadata_offset + 1)
        assert self.image.metadata_version >= before, "the finalised level was lowered"
        earlier = [node_id for node_id in self.image.brokers if not self.is_new[node_id]]
        assert not earlier or self.image.metadata_version == 1, f"brokers {earlier} do not support the level"
        for record in step.records if earlier else ():
            kind, version = to_array(record)[:2]
            assert version <= _READ_AT_LEVEL_1.get(kind, -1), f"brokers {earlier} do not read {record}"
        return step.reply

    def register(self, node_id: int, *, is_new: bool) -> None:
        self.starts += 1
        incarnation, directory = f"{self.starts:032x}", f"{node_id:032x}"
        earlier = RegisterBrokerRequest(
            node_id, incarnation, directory, ["a:1"], None, -1, True, [], self.starts
        )
        newer: list[Any] = [*earlier, list(SUPPORTED)]
        self.submit(RegisterBrokerRequestV1(*newer) if is_new else earlier)

    def take_step(self) -> None:
        node_id = NODES[self.rng.randrange(len(NODES))]
        match self.rng.randrange(6):
            case 0 | 1:
                if node_id not in self.image.retired_brokers:
                    self.register(node_id, is_new=self.rng.random() < 0.7)
            case 2:
                self.submit(CreateTopicsRequest(1, False, [NewTopic("t", 1, 1, {})]))
            case 3:
                update = FeatureUpdate(METADATA_VERSION, 1 + self.rng.randrange(3))
                self.submit(UpdateFeaturesRequest(1, False, [update]))
            case 4:
                wanted = PartitionReassignment("t", 0, [node_id])
                self.submit(AlterPartitionReassignmentsRequest(1, False, [wanted]))
            case 5:
                retires = self.rng.random() < 0.1
                self.submit(UnregisterBrokerRequest(node_id) if retires else ContinueReassignments())
                self.submit(RebalanceReplicas())


def run_levels_seed(seed: int) -> str | None:
    """Return the violation of one random history, or None."""
    world = Levels(seeded_rng(seed))
    try:
        for _ in range(STEPS):
            world.take_step()
    except AssertionError as error:
        return str(error)
    return None
