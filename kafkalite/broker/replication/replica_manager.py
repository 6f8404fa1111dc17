"""The replication of all partitions of a broker.

It fetches partitions that this broker follows, owns the fetch sessions of follower brokers, proposes in-sync
sets, and sends high watermarks to the controller. A single-node cluster has none of this.
"""

# Tests: tests/broker/test_replication.py

from __future__ import annotations

import logging
from typing import Final, Protocol

from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.cluster.peers import PeerConnections
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.quotas.replication_quota import ReplicationQuota
from kafkalite.broker.replication.fetch_sessions import FetchSessions
from kafkalite.broker.replication.fetcher import Fetcher
from kafkalite.broker.replication.isr_manager import IsrManager
from kafkalite.broker.replication.replica_reporter import ReplicaReporter
from kafkalite.broker.tasks import TaskSet
from kafkalite.clock import Clock
from kafkalite.errors import KafkaliteError
from kafkalite.log_fields import Fields
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.throttles import (
    FOLLOWER_RATE,
    FOLLOWER_REPLICAS,
    LEADER_RATE,
    LEADER_REPLICAS,
    throttle_of,
)
from kafkalite.protocol.messages.cluster import CheckpointHighWatermarksRequest, PartitionHighWatermark
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.replication.partition import Partition

logger = logging.getLogger(__name__)

MAX_HIGH_WATERMARKS_PER_REQUEST: Final = 5_000
CHECKPOINT_TIMEOUT_MS: Final = 5_000


class ReplicationServices(Protocol):
    """The parts of a broker that replication uses."""

    clock: Clock
    config: BrokerConfig
    controller: ControllerNode
    node: NodeState
    partitions: Partitions

    def on_broken(self, error: BaseException, /) -> None: ...


class ReplicaManager:
    """Replicates the partitions of one broker. It is created when the broker's services are complete."""

    def __init__(
        self, services: ReplicationServices, peers: PeerConnections, channel: ControllerChannel
    ) -> None:
        config = services.config
        self._services = services
        self._peers = peers
        self._channel = channel
        self._tasks = TaskSet(services.on_broken)
        self._fetchers: dict[int, Fetcher] = {}
        self._leaders: dict[HostedPartition, int] = {}  # {partition: id of the broker it is fetched from}
        self._isr = IsrManager(
            services.clock,
            services.partitions,
            channel,
            node_id=config.node_id,
            lag_ms=config.replica_lag_time_max_ms,
            on_awaited=self._end_throttling_of,
        )
        self._reporter = ReplicaReporter(
            services.clock, services.partitions, channel, services.node, node_id=config.node_id
        )
        self._checkpointed: dict[Partition, int] = {}  # the high watermarks that were sent last
        self.sessions = FetchSessions()
        self.leader_quota = ReplicationQuota()
        self.follower_quota = ReplicationQuota()
        self.is_stopping = False
        self._isr.image = services.controller.image
        self._update_throttles(services.controller.image)
        services.partitions.fetching = self
        services.controller.publishers.append(self._publish)

    def __repr__(self) -> str:
        return f"<ReplicaManager {list(self._fetchers.values())}>"

    async def start(self) -> None:
        """Fetch the partitions that this broker already follows, and start the periodic tasks."""
        self._isr.broker_epoch = self._services.node.broker_epoch
        for hosted in list(self._services.partitions):
            if not hosted.is_leader:
                self.follow(hosted, hosted.leader_id)
        self._tasks.start(self._isr.send_forever(), name="change in-sync replicas")
        self._tasks.start(self._isr.look_forever(), name="look after in-sync replicas")
        self._tasks.start(self._isr.end_waits_forever(), name="end waits for joining replicas")
        self._tasks.start(self._checkpoint_forever(), name="checkpoint high watermarks")
        self._tasks.start(self._reporter.report_forever(), name="report replicas")
        self._isr.look_around()
        self._reporter.report_soon()

    async def stop(self) -> None:
        """Stop fetching, and respond to every held fetch."""
        self.is_stopping = True
        self._services.partitions.fetching = None
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers.clear()
        for hosted in self._leaders:
            hosted.complete_work()
        self._leaders.clear()
        for session in list(self.sessions):
            if session.poll is not None:
                session.poll.finish()
        await self._tasks.cancel()

    def follow(self, hosted: HostedPartition, leader_id: int) -> None:
        """Fetch for ``hosted`` from broker ``leader_id``; stop fetching if ``leader_id`` is -1 or the log is
        offline."""
        if self.is_stopping:
            return
        before = self._leaders.get(hosted)
        is_offline = hosted.offline_reason is not None
        if before is not None and (before != leader_id or is_offline):
            self.unfollow(hosted)
        if leader_id < 0 or is_offline:
            return
        fetcher = self._fetchers.get(leader_id)
        if fetcher is None:
            fetcher = self._fetchers[leader_id] = Fetcher(
                leader_id,
                self._services.config,
                self._services.clock,
                self._peers.connection,
                lambda: self._services.node.broker_epoch,
                self._services.on_broken,
                self._reporter.on_short_leader,
                self.follower_quota,
                self._is_in_sync,
            )
        self._leaders[hosted] = leader_id
        fetcher.add(hosted)

    def unfollow(self, hosted: HostedPartition) -> None:
        leader_id = self._leaders.pop(hosted, None)
        if leader_id is not None:
            self._fetchers[leader_id].remove(hosted)

    def on_caught_up(self, partition: Partition) -> None:
        """Propose an ISR with the followers that may join it (R12).

        Called when a follower has caught up or is close to it.
        """
        self._isr.consider(partition)

    def _end_throttling_of(self, partition: Partition) -> None:
        for session in self.sessions:
            session.end_throttling_of((partition.topic_id, partition.key.partition))

    def _is_in_sync(self, hosted: HostedPartition) -> bool:
        """Whether this broker is in the ISR of a partition that it follows, as far as it has replayed."""
        state = self._services.controller.image.partition_of(hosted.topic_id, hosted.key.partition)
        return state is not None and self._services.config.node_id in state.isr

    def _update_throttles(self, image: ClusterImage) -> None:
        """Apply the throttles of replication (R70). Replicas that wait for a changed one are tried again."""
        config, now_ms = self._services.config, self._services.clock.monotonic_ms()
        as_leader = throttle_of(
            image, config.node_id, LEADER_RATE, LEADER_REPLICAS, config.leader_replication_throttled_rate
        )
        as_follower = throttle_of(
            image,
            config.node_id,
            FOLLOWER_RATE,
            FOLLOWER_REPLICAS,
            config.follower_replication_throttled_rate,
        )
        if self.leader_quota.update(as_leader, now_ms):
            for session in self.sessions:
                session.end_throttling()
                if session.ready:
                    session.on_new_data(0)
        if self.follower_quota.update(as_follower, now_ms):
            for fetcher in self._fetchers.values():
                fetcher.end_throttling()

    def _publish(self, _delta: Delta, image: ClusterImage) -> None:
        changed = image.brokers is not self._isr.image.brokers
        if image.configs is not self._isr.image.configs:
            self._update_throttles(image)
        self._isr.image = image
        self._isr.broker_epoch = self._services.node.broker_epoch
        if changed:
            self._isr.look_around()
        self._reporter.report_soon()

    async def _checkpoint_forever(self) -> None:
        interval_ms = self._services.config.replica_high_watermark_checkpoint_interval_ms
        while True:
            await self._services.clock.sleep_ms(interval_ms)
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Send the controller the high watermarks that have moved since they were last sent."""
        known = self._checkpointed
        led = list(self._services.partitions.led())
        moved = [one for one in led if one.high_watermark != known.get(one, 0)]
        self._checkpointed = {one: known[one] for one in led if one in known}
        for first in range(0, len(moved), MAX_HIGH_WATERMARKS_PER_REQUEST):
            await self._send(moved[first : first + MAX_HIGH_WATERMARKS_PER_REQUEST])

    async def _send(self, moved: list[Partition]) -> None:
        sent = {one: one.high_watermark for one in moved if one.is_leader}
        request = CheckpointHighWatermarksRequest(
            self._services.config.node_id,
            self._services.node.broker_epoch,
            [
                PartitionHighWatermark(one.topic_id, one.key.partition, one.leader_epoch, high_watermark)
                for one, high_watermark in sent.items()
            ],
        )
        try:
            await self._channel.send(request, CHECKPOINT_TIMEOUT_MS)
        except KafkaliteError as error:
            logger.warning("high watermarks not checkpointed %s", Fields(reason=error.message))
        else:
            self._checkpointed.update(sent)
