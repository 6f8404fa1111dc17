"""Reports the logs of this broker's replicas to the controller when it needs the reports to choose leaders.

A report is needed if a partition has no leader, so that the logs of its replicas are compared (R46), or if a
replica here refuses to truncate because its leader lacks committed records (R49, R50). Reports are sent when
the metadata changes or a replica refuses, and again every REPORT_INTERVAL_MS, because a new controller has
no reports.
"""

# Tests: tests/broker/test_replication.py

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.partitions.hosted_partition import HostedPartition
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.tasks import first_of
from kafkalite.clock import Clock
from kafkalite.errors import KafkaliteError, ShortLeaderError
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.cluster import ReplicaReport, ReportReplicasRequest

logger = logging.getLogger(__name__)

MAX_REPORTS_PER_REQUEST: Final = 2_000
REPORT_INTERVAL_MS: Final = 1_000
RESPONSE_TIMEOUT_MS: Final = 5_000


class ReplicaReporter:
    """Reports the logs of partitions without a leader, and refused truncations, to the controller.

    A refusal is no longer reported once its partition has a later leader epoch or is not fetched any more.
    """

    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        channel: ControllerChannel,
        node: NodeState,
        *,
        node_id: int,
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._channel = channel
        self._node = node
        self._node_id = node_id
        self._refusals: dict[HostedPartition, tuple[int, ShortLeaderError]] = {}
        self._is_due = asyncio.Event()

    def report_soon(self) -> None:
        """Send the reports now if a partition with a replica here has no leader."""
        if self._partitions.has_leaderless:
            self._is_due.set()

    def on_short_leader(self, hosted: HostedPartition, error: ShortLeaderError) -> None:
        """Report that the leader of ``hosted`` lacks committed records."""
        known = self._refusals.get(hosted)
        if known is not None and known[0] == hosted.leader_epoch:
            return
        logger.error(
            "truncation refused %s",
            Fields(
                partition=hosted.key,
                leader=hosted.leader_id,
                leader_epoch=hosted.leader_epoch,
                offset=error.offset,
                committed_records=error.committed_end - error.offset,
            ),
        )
        self._refusals[hosted] = hosted.leader_epoch, error
        self._is_due.set()

    async def report_forever(self) -> None:
        while True:
            await first_of(self._clock.sleep_ms(REPORT_INTERVAL_MS), self._is_due.wait())
            self._is_due.clear()
            reports = [*self._partitions.leaderless(), *self._refused()]
            for first in range(0, len(reports), MAX_REPORTS_PER_REQUEST):
                await self._send(reports[first : first + MAX_REPORTS_PER_REQUEST])

    def _refused(self) -> list[ReplicaReport]:
        """Return the reports of replicas that still refuse to truncate."""
        self._refusals = {
            hosted: (epoch, error)
            for hosted, (epoch, error) in self._refusals.items()
            if hosted.leader_epoch == epoch and hosted.listener is not None
        }
        return [hosted.report(error.offset) for hosted, (_, error) in self._refusals.items()]

    async def _send(self, reports: list[ReplicaReport]) -> None:
        request = ReportReplicasRequest(self._node_id, self._node.broker_epoch, reports)
        try:
            await self._channel.send(request, RESPONSE_TIMEOUT_MS)
        except KafkaliteError as error:
            logger.warning("replicas not reported %s", Fields(partitions=len(reports), reason=error.message))
