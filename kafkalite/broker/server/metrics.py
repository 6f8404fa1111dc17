"""The counters of one broker, and the result of ``Broker.statistics()``."""

# Tests: tests/broker/test_server.py

from __future__ import annotations

from dataclasses import dataclass, field

from kafkalite.protocol.api import APIS


@dataclass(slots=True)
class Metrics:
    """Counters that are incremented on the broker's loop."""

    requests: dict[int, int] = field(default_factory=lambda: dict.fromkeys(APIS, 0))  #: by api key
    failed_requests: int = 0
    appended_batches: int = 0
    appended_bytes: int = 0
    fetched_bytes: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    connections_reaped: int = 0
    protocol_errors: int = 0


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """The statistics of a broker. Events are counted from its start; the numbers of objects are current."""

    node_id: int
    cluster_id: str
    state: str
    uptime_ms: int
    connection_count: int  #: currently open
    connections_accepted: int
    connections_refused: int  #: because of max.connections or the limit of descriptors
    connections_reaped: int  #: idle or half-open
    protocol_errors: int  #: connections closed because of invalid bytes
    requests: dict[str, int]  #: by api name
    failed_requests: int  #: requests that failed as a whole
    topic_count: int
    partition_count: int
    offline_partition_count: int
    lost_records: int  #: committed records that followers here truncated after unclean elections (R49)
    damaged_partition_count: int
    torn_tail_records: int  #: cut off by recoveries at the start; acknowledged only if synced data was lost
    scrubbed_bytes: int  #: read and checked in the background (R53)
    scrubs_completed: int  #: of all logs
    appended_batches: int
    appended_bytes: int
    fetched_bytes: int
    sync_rounds: int
    synced_logs: int
    group_count: int  #: consumer groups that this broker coordinates
    transaction_count: int  #: transactional ids and writers of transaction groups that it coordinates
    waiting_requests: int  #: held long polls and waiting produce requests
    task_count: int
