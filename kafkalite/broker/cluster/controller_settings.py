"""The settings of the controller, taken from the broker's configuration."""

from __future__ import annotations

from kafkalite.broker.config import BrokerConfig
from kafkalite.metadata.decision import ControllerSettings


def controller_settings(config: BrokerConfig) -> ControllerSettings:
    """Return the settings that the controller's decisions depend on."""
    return ControllerSettings(
        config.num_partitions,
        config.default_replication_factor,
        topic_defaults=config.topic_defaults(),
        node_id=config.node_id,
        is_single_node=not config.has_peers,
        session_timeout_ms=config.broker_session_timeout_ms,
        auto_leader_rebalance=config.auto_leader_rebalance_enable,
        imbalance_check_interval_ms=config.leader_imbalance_check_interval_seconds * 1_000,
        imbalance_per_broker_percentage=config.leader_imbalance_per_broker_percentage,
    )
