"""Counters of one broker, and the result of ``Broker.statistics()``."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalite.protocol.api import APIS


class Metrics:
    """Plain integers, counted on the loop that owns the broker."""

    __slots__ = (
        "appended_batches",
        "appended_bytes",
        "connections_accepted",
        "connections_reaped",
        "connections_refused",
        "failed_requests",
        "fetched_bytes",
        "protocol_errors",
        "requests",
    )

    def __init__(self) -> None:
        self.requests: dict[int, int] = dict.fromkeys(APIS, 0)  #: by api key
        self.failed_requests = 0
        self.appended_batches = 0
        self.appended_bytes = 0
        self.fetched_bytes = 0
        self.connections_accepted = 0
        self.connections_refused = 0
        self.connections_reaped = 0
        self.protocol_errors = 0


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """A broker at one moment. Counts are since its start unless stated otherwise."""

    node_id: int
    cluster_id: str
    state: str
    uptime_ms: int
    connection_count: int  #: open now
    connections_accepted: int
    connections_refused: int  #: over max.connections
    connections_reaped: int  #: idle or half-open
    protocol_errors: int  #: connections closed because of invalid bytes
    requests: dict[str, int]  #: by api name
    failed_requests: int  #: requests that failed as a whole
    topic_count: int
    partition_count: int
    offline_partition_count: int
    appended_batches: int
    appended_bytes: int
    fetched_bytes: int
    sync_rounds: int
    synced_logs: int
    group_count: int  #: consumer groups that this broker coordinates
    transaction_count: int  #: transactional ids and writers of transaction groups that it coordinates
    waiting_requests: int  #: held long polls and produce requests now
    task_count: int
