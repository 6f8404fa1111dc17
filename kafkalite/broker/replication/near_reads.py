"""Directs consumers that state their rack to a follower in it (KIP-392, replica.selector.class)."""

# Tests: tests/broker/test_near_reads.py

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.clock import Clock
from kafkalite.metadata.image import BrokerState, ClusterImage
from kafkalite.replication.partition import Partition

LEADER_SELECTOR: Final = "LeaderSelector"
RACK_AWARE_SELECTOR: Final = "RackAwareReplicaSelector"


class NearReads:
    """Selects the replica from which a consumer in a rack should read. ``image`` returns the metadata."""

    def __init__(
        self, config: BrokerConfig, partitions: Partitions, image: Callable[[], ClusterImage], clock: Clock
    ) -> None:
        self._is_rack_aware = config.replica_selector_class == RACK_AWARE_SELECTOR
        self._own_rack = config.broker_rack
        self._partitions = partitions
        self._image = image
        self._clock = clock

    def preferred(self, partition: Partition, rack: str, offset: int) -> int | None:
        """Return the node from which a consumer in ``rack`` should read ``offset``, or None for this one.

        Consumers are never sent from a follower to another one, and never away from a leader in their rack.
        """
        if not self._is_rack_aware or rack == self._own_rack or not partition.is_leader:
            return None
        hosted = self._partitions.find(partition.key)
        if hosted is None:
            return None
        brokers = self._image().brokers
        now_ms = self._clock.monotonic_ms()
        return hosted.near_replica(offset, lambda node_id: is_near(brokers.get(node_id), rack), now_ms)


def is_near(broker: BrokerState | None, rack: str) -> bool:
    """Whether a broker is live, neither fenced nor shutting down, and in ``rack`` (R66)."""
    return broker is not None and broker.is_live and broker.rack == rack
