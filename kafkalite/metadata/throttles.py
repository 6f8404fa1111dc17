"""The throttles of replication: which replicas they limit, and the rates of one broker (KIP-73).

A topic option lists replicas, a broker option is the rate that its listed replicas share. Replicas in sync
are never limited (R70).
"""

# Tests: tests/metadata/test_throttles.py

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.records import BROKER, TOPIC

LEADER_RATE: Final = "leader.replication.throttled.rate"
FOLLOWER_RATE: Final = "follower.replication.throttled.rate"
LEADER_REPLICAS: Final = "leader.replication.throttled.replicas"
FOLLOWER_REPLICAS: Final = "follower.replication.throttled.replicas"

#: The rate that stands for no limit, as in Kafka.
UNLIMITED: Final = 2**63 - 1
EVERY_REPLICA: Final = "*"
#: The regular expression of an item of a list of replicas, and the items in words.
REPLICA_ITEMS: Final = (
    r"\*|[0-9]{1,9}:[0-9]{1,10}",
    "* for every replica, or a comma-separated list of partition:broker, such as 0:1,0:2",
)

#: How many parsed lists are remembered: every change of a configuration reads all of them.
_MAX_PARSED_LISTS: Final = 16_384

Listed = Mapping[str, frozenset[int] | None]
"""{topic: its partitions of which the broker's replica is listed; None: all of them}"""


class Throttle(NamedTuple):
    """What limits a broker in one direction: bytes per second, for all ``listed`` replicas together."""

    rate: int = UNLIMITED
    listed: Listed = {}  # noqa: RUF012

    def covers(self, topic: str, partition: int) -> bool:
        """Whether the broker's replica of the partition is limited while it is not in sync."""
        if self.rate == UNLIMITED or topic not in self.listed:
            return False
        partitions = self.listed[topic]
        return partitions is None or partition in partitions


def throttle_of(
    image: ClusterImage, node_id: int, rate_option: str, replicas_option: str, default_rate: int
) -> Throttle:
    """Return the throttle of the broker ``node_id``, as leader or as follower: that of the named options.

    ``default_rate`` is the rate of the broker's own configuration.
    """
    text = image.configs_of(BROKER, str(node_id)).get(rate_option)
    listed = {
        name: _partitions_of(node_id, configs[replicas_option])
        for (resource_type, name), configs in image.configs.items()
        if resource_type == TOPIC and configs.get(replicas_option)
    }
    return Throttle(default_rate if text is None else int(text), listed)


@lru_cache(_MAX_PARSED_LISTS)
def _partitions_of(node_id: int, text: str) -> frozenset[int] | None:
    pairs = [item.partition(":") for item in text.split(",")]
    if any(partition == EVERY_REPLICA for partition, _, _ in pairs):
        return None
    return frozenset(int(partition) for partition, _, broker in pairs if int(broker) == node_id)


def replica_items(text: str | None) -> set[str]:
    """Return the items of the value of an option that lists replicas."""
    return {item for item in (text or "").split(",") if item}


def items_text(items: Iterable[str]) -> str | None:
    """Return the value that lists ``items`` in the order of their partitions; None, no override, for none."""
    return ",".join(sorted(items, key=_order)) or None


def _order(item: str) -> tuple[int, ...]:
    return () if item == EVERY_REPLICA else tuple(map(int, item.split(":")))
