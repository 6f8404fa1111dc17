"""The blocking twin of Consumer: a thin face over the same object in the loop thread.

Records cross between the threads in bulk; what crossed and was not given yet is kept here, and counted as
not given in every position that is told or committed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import islice
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from kafkalite.client.blocking.caller_thread import CallerThread
from kafkalite.client.config import BootstrapServers, ConsumerSettings
from kafkalite.client.consumer import consumer
from kafkalite.client.consumer.consumer import Committable
from kafkalite.client.consumer.fetch_state import FetchedBatch
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import KafkaliteError
from kafkalite.loop_thread import shared_loop_thread
from kafkalite.model import (
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Record,
    TopicPartition,
)
from kafkalite.rng import Rng

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

# Records that iteration takes across at once: the crossing costs about 100 microseconds. In a group it is
# max.poll.records, for what crossed is in hand.
ITERATION_RECORDS: Final = 10_000


class Consumer:
    """Reads records; the blocking twin of ``kafkalite.Consumer``, with the same arguments.

    For one thread at a time. A listener's methods are called in that thread, and may commit and seek.

    ::

        with Consumer("orders", group_id="billing", bootstrap_servers="localhost:9092") as consumer:
            for record in consumer:
                print(record.value)
    """

    def __init__(
        self,
        *topics: str,
        bootstrap_servers: BootstrapServers | None = None,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self._calls = CallerThread(shared_loop_thread())
        self._consumer = consumer.Consumer(
            *topics,
            bootstrap_servers=bootstrap_servers,
            pattern=pattern,
            listener=self._calls.listener(listener),
            config=config,
            rng=rng,
            **settings,
        )
        # Records that crossed and were not given yet: those left in the iterator over the list.
        self._crossed: list[Record] = []
        self._left: Iterator[Record] = iter(self._crossed)
        self._given_from: int | None = None  # of those, where the last get_many() began

    def __repr__(self) -> str:
        return f"<sync {repr(self._consumer)[1:]}"

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._calls.run(coroutine)

    def start(self) -> Self:
        self._run(self._consumer.start())
        return self

    def close(self) -> None:
        self._give_back()
        self._run(self._consumer.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(is_done=error is None)
        try:
            self._run(self._consumer.close())
        except KafkaliteError as unfinished:
            if error is None:
                raise
            error.add_note(f"kafkalite: {unfinished}")

    # --- what to read --------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        self._give_back()
        heard = self._calls.listener(listener)
        self._call(lambda: self._consumer.subscribe(*topics, pattern=pattern, listener=heard))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._give_back()
        self._call(lambda: self._consumer.assign(partitions))

    def assignment(self) -> list[TopicPartition]:
        return self._consumer.assignment()

    def _call(self, function: Callable[[], T]) -> T:
        """Call something that does not wait, in the loop's thread."""

        async def call() -> T:
            return function()

        return self._run(call())

    # --- where to read -------------------------------------------------------------------------

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to be given, or None before it is known."""
        for record in self._crossed[len(self._crossed) - length_hint(self._left) :]:
            if record.partition == tp.partition and record.topic == tp.topic:
                return record.offset
        return self._consumer.position(tp)

    def _give_back(self, *, is_done: bool = True) -> None:
        """Records that crossed and were not given: stand before them again.

        Before what was given last too, unless that ``is_done``; at most once, it is given only once.
        """
        first = len(self._crossed) - length_hint(self._left)
        if not is_done and not self._consumer.config.is_at_most_once:
            first = max(0, first - 1) if self._given_from is None else self._given_from
        firsts = _first_offsets(self._crossed[first:])
        self._crossed, self._left, self._given_from = [], iter(()), None

        async def seek() -> None:
            held = set(self._consumer.assignment())
            for tp, offset in firsts.items():
                if tp in held:
                    await self._consumer.seek(tp, offset)

        if firsts:
            self._run(seek())

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._give_back()
        self._run(self._consumer.seek(tp, offset))

    def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_beginning(*partitions))

    def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_end(*partitions))

    def seek_to_timestamp(self, tp: TopicPartition, timestamp_ms: int) -> None:
        self._give_back()
        self._run(self._consumer.seek_to_timestamp(tp, timestamp_ms))

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._give_back()
        self._call(lambda: self._consumer.pause(*partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._call(lambda: self._consumer.resume(*partitions))

    def paused(self) -> list[TopicPartition]:
        return self._consumer.paused()

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(self._consumer.beginning_offsets(partitions))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._run(self._consumer.end_offsets(partitions))

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return self._run(self._consumer.offsets_for_times(timestamps_ms))

    def lag(self) -> dict[TopicPartition, int]:
        ends = self.end_offsets(self.assignment())
        behind = self._run(self._consumer.lag())
        for tp in behind:
            position = self.position(tp)
            if position is not None:
                behind[tp] = max(0, ends[tp] - position)
        return behind

    # --- the group -----------------------------------------------------------------------------

    def commit(self, what: Committable = None) -> None:
        """As ``kafkalite.Consumer.commit``: everything given so far, a record, records, or offsets."""
        self._run(self._consumer.commit(self.positions() if what is None else what))

    def commit_nowait(self, what: Committable = None) -> None:
        offsets = self.positions() if what is None else what
        self._call(lambda: self._consumer.commit_nowait(offsets))

    def committed(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        return self._run(self._consumer.committed(partitions))

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Behind everything given so far: what ``commit`` commits, and a transaction's ``send_offsets``."""
        positions = self._call(self._consumer.positions)
        left = self._crossed[len(self._crossed) - length_hint(self._left) :]
        for tp, offset in _first_offsets(left).items():
            if tp in positions:
                positions[tp] = positions[tp]._replace(offset=offset)
        return positions

    def group_metadata(self) -> GroupMetadata:
        return self._call(self._consumer.group_metadata)

    # --- reading -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Record]:
        """Records without end, as they come. A loop may be left and another begun; none is lost by that."""
        at_once = ITERATION_RECORDS if self._consumer.config.group_id is None else None
        while True:
            self._given_from = None
            yield from self._left
            self._cross(at_once, None)

    def _cross(self, max_records: int | None, timeout_ms: int | None) -> None:
        """Take records across. They are kept on this object by the loop's thread, so Ctrl-C loses none."""

        async def take() -> None:
            records = await self._consumer.get_many(max_records, timeout_ms=timeout_ms)
            self._crossed, self._left = records, iter(records)

        self._run(take())

    def get_one(self, *, timeout_ms: int | None = None) -> Record | None:
        records = self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    def get_many(self, max_records: int | None = None, *, timeout_ms: int | None = None) -> list[Record]:
        """Up to ``max_records`` records, as ``kafkalite.Consumer.get_many``."""
        limit = max_records if max_records is not None else self._consumer.config.max_poll_records
        if not length_hint(self._left):
            self._cross(limit, timeout_ms)
        self._given_from = len(self._crossed) - length_hint(self._left)
        return list(islice(self._left, limit))

    def get_batches(self, *, timeout_ms: int | None = None) -> list[FetchedBatch]:
        self._give_back()
        return self._run(self._consumer.get_batches(timeout_ms=timeout_ms))

    def to_arrow(self, *, timeout_ms: int | None = None) -> pyarrow.Table:
        self._give_back()
        return self._run(self._consumer.to_arrow(timeout_ms=timeout_ms))


def _first_offsets(records: Iterable[Record]) -> dict[TopicPartition, int]:
    firsts: dict[TopicPartition, int] = {}
    for record in records:
        firsts.setdefault(TopicPartition(record.topic, record.partition), record.offset)
    return firsts
