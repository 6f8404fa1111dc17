"""Where a consumer stands, and where it is to go on: positions, seeks, pauses, the ends of partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kafkalite.client.cluster import list_offsets as offsets
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.consumer.fetch_state import FetchState, PartitionState
from kafkalite.client.consumer.fetcher import FOREVER_MS, Fetcher
from kafkalite.client.consumer.progress import Progress
from kafkalite.client.consumer.subscription import Subscription
from kafkalite.errors import ClientClosedError, ClientError
from kafkalite.model import (
    EARLIEST,
    LATEST,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)

if TYPE_CHECKING:
    from kafkalite.client.group.session import GroupSession


class PositionCalls:
    """Mixed into Consumer."""

    config: ConsumerConfig
    _cluster: ClusterClient
    _fetcher: Fetcher
    _state: FetchState
    _progress: Progress
    _group: GroupSession | None
    _subscription: Subscription | None
    _finding: tuple[dict[TopicPartition, int], asyncio.Task[None]] | None

    def _check_open(self) -> None:
        raise NotImplementedError

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to be given, or None before it is known."""
        return self._assigned(tp).position

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Behind everything given so far: what ``commit`` commits, and a transaction's ``send_offsets``."""
        return self._progress.positions()

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        """Give the record at ``offset`` next, or the first after it; out of range the reset policy rules."""
        if offset < 0:
            raise ClientError(
                f"{tp}: offset {offset} is below 0", hint="seek_to_beginning() and seek_to_end()"
            )
        self._assigned(tp).seek(offset)

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give the oldest record next; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.beginning_offsets(tps)).items():
            self._assigned(tp).seek(offset)

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give only records produced from now on; of all assigned partitions when none is named."""
        tps = self._named(partitions)
        for tp, offset in (await self.end_offsets(tps)).items():
            self._assigned(tp).seek(offset)

    async def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        """Give the first record that is not older next; only new records when all are."""
        self._assigned(tp)
        found = (await self.offsets_for_times({tp: timestamp_ms}))[tp]
        offset = found.offset if found is not None else (await self.end_offsets([tp]))[tp]
        self._assigned(tp).seek(offset)

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Give no records of these until ``resume``; what was fetched of them is kept."""
        self._state.pause(self._named(partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Fetch records of paused partitions again."""
        hidden = self._group.hidden if self._group is not None else {}
        for tp in self._named(partitions):
            if tp in hidden:
                hidden[tp] = False
            else:
                self._assigned(tp).paused = False
        self._fetcher.wake()

    def paused(self) -> list[TopicPartition]:
        """The partitions that ``pause`` holds, in order."""
        hidden = self._group.hidden if self._group is not None else {}
        return sorted(tp for tp, state in self._state.partitions.items() if hidden.get(tp, state.paused))

    def _named(self, partitions: Iterable[TopicPartition | Iterable[TopicPartition]]) -> list[TopicPartition]:
        """Partitions given one by one or as iterables; all that are assigned when none is given."""
        named: list[TopicPartition] = []
        for each in partitions:
            named += [each] if isinstance(each, TopicPartition) else [TopicPartition(*tp) for tp in each]
        if not partitions:
            return list(self._state.partitions)
        for tp in named:
            self._assigned(tp)
        return named

    def _assigned(self, tp: TopicPartition) -> PartitionState:
        state = self._state.partitions.get(tp)
        if state is None:
            raise ClientError(
                f"{TopicPartition(*tp)} is not assigned to this consumer",
                hint="assign() it first" if self._group is None else "assignment() names those that are",
            )
        return state

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition that can be read."""
        return await self._list_offsets(dict.fromkeys(partitions, EARLIEST))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record of each partition that can be read."""
        return await self._list_offsets(dict.fromkeys(partitions, LATEST))

    async def _list_offsets(self, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        self._check_open()
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        return {tp: entry.offset for tp, entry in listed.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record of each partition whose timestamp is not less; None where all are older."""
        self._check_open()
        return await offsets.offsets_for_times(
            self._cluster, timestamps_ms, isolation_level=self.config.isolation_level
        )

    async def lag(self) -> dict[TopicPartition, int]:
        """How many offsets lie between each assigned partition's position and its end."""
        ends = await self.end_offsets(self._state.partitions)
        await self._find_positions(None)
        return {tp: max(0, end - (self._assigned(tp).position or 0)) for tp, end in ends.items()}

    async def _find_positions(self, deadline_ms: int | None) -> bool:
        """Ask where partitions without a position start.

        False when ``deadline_ms`` passed first; then the answer is still on its way.
        """
        wanted = self._state.without_offset()
        if self._subscription is not None or (self._group is not None and self._group.is_subscribed):
            known = {tp: at for tp, at in wanted.items() if self._cluster.metadata.knows(tp)}
            if len(known) < len(wanted):  # what is missing now is being looked for
                self._cluster.request_refresh()
            wanted = known
        if not wanted:
            return True
        if self._finding is None or self._finding[0] != wanted:
            self._finding = (wanted, self._cluster.spawn(self._find_positions_of(wanted)))
        finding = self._finding[1]
        if not (await asyncio.wait({finding}, timeout=self._seconds_until(deadline_ms)))[0]:
            return False
        self._finding = None
        if finding.cancelled():
            raise ClientClosedError("the consumer was closed")
        finding.result()
        return True

    async def _find_positions_of(self, wanted: Mapping[TopicPartition, int]) -> None:
        seeks = {tp: self._state.partitions[tp].seek_count for tp in wanted}
        epochs = {tp: self._cluster.metadata.leader(tp).leader_epoch for tp in wanted}
        listed = await offsets.list_offsets(
            self._cluster, wanted, isolation_level=self.config.isolation_level
        )
        for tp, entry in listed.items():
            state = self._state.partitions.get(tp)
            if state is not None and state.needs_offset and state.seek_count == seeks[tp]:
                state.seek(entry.offset, entry.leader_epoch)
                state.checked_epoch = max(epochs[tp], entry.leader_epoch)  # that leader has just told

    def _seconds_until(self, deadline_ms: int | None) -> float | None:
        if deadline_ms is None or deadline_ms >= FOREVER_MS:
            return None
        return max(0, deadline_ms - self._cluster.now_ms()) / 1000
