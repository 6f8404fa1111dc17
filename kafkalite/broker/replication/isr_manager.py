"""Proposes changes of in-sync sets to the controller, for all partitions that this broker leads.

Each partition decides which change to propose (R12-R15). This module collects the proposals, sends one
AlterPartition request at a time, and sends a proposal again if it was not decided. A proposal stays pending
until the metadata shows its result, however long that takes (R14).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.tasks import first_of
from kafkalite.clock import Clock
from kafkalite.errors import KafkaliteError
from kafkalite.log_fields import Fields
from kafkalite.metadata.image import ClusterImage
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    ChangedPartition,
    PartitionChange,
)
from kafkalite.replication.partition import Partition

logger = logging.getLogger(__name__)

MAX_CHANGES_PER_REQUEST: Final = 1_000
RESPONSE_TIMEOUT_MS: Final = 5_000
RETRY_MS: Final = 100
PARTITIONS_PER_TURN: Final = 500

_Proposals = dict[Partition, PartitionChange]


class IsrManager:
    """Collects, sends and repeats proposals of changed ISRs."""

    def __init__(
        self,
        clock: Clock,
        partitions: Partitions,
        channel: ControllerChannel,
        *,
        node_id: int,
        lag_ms: int,
        on_awaited: Callable[[Partition], None],
    ) -> None:
        """``on_awaited`` is called when the high watermark of a partition may wait for another replica."""
        self._clock = clock
        self._partitions = partitions
        self._channel = channel
        self._node_id = node_id
        self._lag_ms = lag_ms
        self._on_awaited = on_awaited
        self._gathered: _Proposals = {}
        self._retried: dict[Partition, None] = {}  # partitions to consider again after RETRY_MS
        self._joined: dict[Partition, None] = {}  # partitions whose high watermark waits for a replica
        #: {partition: partition epoch} of proposals that are decided but not yet in the image.
        self._awaited: dict[Partition, int] = {}
        self._has_some = asyncio.Event()
        self._is_due = asyncio.Event()
        self._has_joined = asyncio.Event()
        self.image = ClusterImage()  #: the newest published image
        self.broker_epoch = -1

    def consider(self, partition: Partition) -> None:
        """Propose a change of the partition's ISR, if the partition requires one."""
        now_ms = self._clock.monotonic_ms()
        change = partition.propose_isr(now_ms, lag_time_max_ms=self._lag_ms, live=self._live)
        if change is not None:
            self._gathered[partition] = change
            self._has_some.set()
        if partition.is_awaiting_replica:
            self._joined[partition] = None
            self._has_joined.set()
        if change is not None or partition.is_awaiting_replica:
            self._on_awaited(partition)

    def look_around(self) -> None:
        """Let ``look_forever`` check all partitions now. Called when brokers have joined or left."""
        self._is_due.set()

    def _live(self, node_id: int) -> int | None:
        broker = self.image.brokers.get(node_id)
        return broker.broker_epoch if broker is not None and broker.is_live else None

    async def look_forever(self) -> None:
        """Call ``consider`` for all partitions of ``Partitions.led`` every quarter of
        ``replica.lag.time.max.ms``.

        ``look_around`` ends the wait. Runs until cancelled.
        """
        while True:
            await first_of(self._clock.sleep_ms(max(self._lag_ms // 4, 1)), self._is_due.wait())
            if not self._is_due.is_set():
                self._give_up_waiting()
            self._is_due.clear()
            for number, partition in enumerate(list(self._partitions.led()), 1):
                self.consider(partition)
                if number % PARTITIONS_PER_TURN == 0:
                    await asyncio.sleep(0)

    async def end_waits_forever(self) -> None:
        """Every RETRY_MS, call ``consider`` for partitions whose high watermark waits for a replica."""
        while True:
            await self._has_joined.wait()
            await asyncio.sleep(RETRY_MS / 1000)
            self._has_joined.clear()
            joined, self._joined = self._joined, {}
            for partition in joined:
                self.consider(partition)

    async def send_forever(self) -> None:
        while True:
            await self._has_some.wait()
            await asyncio.sleep(0)  # collects other proposals of this iteration of the loop
            batch = dict(list(self._gathered.items())[:MAX_CHANGES_PER_REQUEST])
            for partition in batch:
                del self._gathered[partition]
            if not self._gathered:
                self._has_some.clear()
            if batch:
                await self._send(batch)
            if self._retried:
                await asyncio.sleep(RETRY_MS / 1000)
                retried, self._retried = self._retried, {}
                for partition in retried:
                    self.consider(partition)

    async def _send(self, batch: _Proposals) -> None:
        request = AlterPartitionRequest(self._node_id, self.broker_epoch, list(batch.values()))
        results: dict[tuple[str, int], ChangedPartition] = {}
        try:
            response: AlterPartitionResponse = await self._channel.send(request, RESPONSE_TIMEOUT_MS)
        except KafkaliteError as error:
            logger.warning(
                "in-sync replicas not changed %s", Fields(partitions=len(batch), reason=error.message)
            )
        else:
            results = {(result.topic_id, result.partition): result for result in response.partitions}
        for partition, change in batch.items():
            self._on_result(partition, change, results.get((change.topic_id, change.partition)))

    def _on_result(
        self, partition: Partition, change: PartitionChange, result: ChangedPartition | None
    ) -> None:
        """Record ``result``, which is None if the response was lost or omits the partition.

        The new ISR itself is taken from the metadata, in the order of the log. A response may arrive before
        metadata records that were written earlier. Applying its ISR together with an old min.insync.replicas
        could let the high watermark move too far.
        """
        if result is not None and result.error_code == 0:
            logger.info(
                "in-sync replicas changed %s",
                Fields(partition=partition.key, isr=result.isr, epoch=result.partition_epoch),
            )
        elif result is not None:
            logger.warning(
                "change of in-sync replicas refused %s",
                Fields(partition=partition.key, isr=change.isr, reason=result.error_message),
            )
        if partition.partition_epoch > change.partition_epoch:
            return  # the image has arrived before the response
        if result is not None and result.partition_epoch > change.partition_epoch:
            self._awaited[partition] = change.partition_epoch
        elif partition.is_leader:
            partition.on_undecided()
            self._retried[partition] = None

    def _give_up_waiting(self) -> None:
        """Let partitions repeat their decided proposals if the image has not shown the results in time."""
        awaited, self._awaited = self._awaited, {}
        for partition, partition_epoch in awaited.items():
            if partition.is_leader and partition.partition_epoch == partition_epoch:
                partition.on_undecided()
