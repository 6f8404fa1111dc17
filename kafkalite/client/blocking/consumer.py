"""The blocking twin of Consumer, which uses a Consumer in the loop thread.

Records are taken from the loop thread in bulk and buffered here until they are returned to the caller.
``position()`` and commits do not count buffered records as returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any, Final, TypeVar

from kafkalite.client.blocking.caller_thread import CallerThread
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.consumer import consumer
from kafkalite.client.consumer.consumer import Committable
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.errors import KafkaliteError
from kafkalite.model import GroupMetadata, OffsetAndMetadata, Record, TopicPartition

T = TypeVar("T")

# Iteration takes this many records at once from the loop thread, because each transfer costs about 100
# microseconds. In a group it takes max.poll.records, because auto-commit counts them as being processed.
ITERATION_RECORDS: Final = 10_000


@twin_of(consumer.Consumer)
class Consumer(Twin[consumer.Consumer]):
    """Reads records. The blocking twin of ``kafkalite.Consumer``, with the same arguments.

    Use it in one thread at a time. A listener's methods are called in that thread, and may commit and seek.

    ::

        with Consumer("orders", group_id="billing", bootstrap_servers="localhost:9092") as consumer:
            for record in consumer:
                print(record.value)
    """

    @opened_with(consumer.Consumer)
    def __init__(self, original: consumer.Consumer) -> None:
        super().__init__(original)
        self._calls = CallerThread(self._thread)
        original.wrap_listener(self._calls.listener)
        self._buffered: list[Record] = []  # the last records taken from the loop thread
        self._remaining: Iterator[Record] = iter(self._buffered)  # not returned to the caller yet
        self._last_call_from: int | None = None  # index of the first record that the last get_many() returned

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return self._calls.run(coroutine)

    def close(self) -> None:
        self._rewind()
        super().close()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._rewind(is_done=error is None)
        try:
            super().close()
        except KafkaliteError as unfinished:
            if error is None:
                raise
            error.add_note(f"kafkalite: {unfinished}")

    def subscribe(
        self,
        *topics: str,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        self._rewind()
        wrapped = None if listener is None else self._calls.listener(listener)
        self._call(lambda: self._original.subscribe(*topics, pattern=pattern, listener=wrapped))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._rewind()
        self._call(lambda: self._original.assign(partitions))

    def assignment(self) -> list[TopicPartition]:
        return self._original.assignment()

    def _call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which must not wait, in the loop thread and return its result."""

        async def call() -> T:
            return function()

        return self._run(call())

    def position(self, tp: TopicPartition) -> int | None:
        for record in self._buffered[self._next_index() :]:
            if record.partition == tp.partition and record.topic == tp.topic:
                return record.offset
        return self._original.position(tp)

    def _next_index(self) -> int:
        return len(self._buffered) - length_hint(self._remaining)

    def _rewind(self, *, is_done: bool = True) -> None:
        """Drop the buffer. Seek each partition to its first record that was not returned to the caller.

        Unless ``is_done``, seek to the first record that the last call returned, so that it is read again. An
        at-most-once consumer does not read returned records again.
        """
        first = self._next_index()
        if not is_done and not self._original.config.is_at_most_once:
            first = max(0, first - 1) if self._last_call_from is None else self._last_call_from
        firsts = _first_offsets(self._buffered[first:])
        self._buffered, self._remaining, self._last_call_from = [], iter(()), None

        async def seek() -> None:
            held = set(self._original.assignment())
            for tp, offset in firsts.items():
                if tp in held:
                    await self._original.seek(tp, offset)

        if firsts:
            self._run(seek())

    seek = blocking(consumer.Consumer.seek, after=_rewind)
    seek_to_beginning = blocking(consumer.Consumer.seek_to_beginning, after=_rewind)
    seek_to_end = blocking(consumer.Consumer.seek_to_end, after=_rewind)
    seek_to_timestamp = blocking(consumer.Consumer.seek_to_timestamp, after=_rewind)

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._rewind()
        self._call(lambda: self._original.pause(*partitions))

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        self._call(lambda: self._original.resume(*partitions))

    def paused(self) -> list[TopicPartition]:
        return self._original.paused()

    beginning_offsets = blocking(consumer.Consumer.beginning_offsets)
    end_offsets = blocking(consumer.Consumer.end_offsets)
    offsets_for_times = blocking(consumer.Consumer.offsets_for_times)

    def lag(self) -> dict[TopicPartition, int]:
        ends = self.end_offsets(self.assignment())
        behind = self._run(self._original.lag())
        for tp in behind:
            position = self.position(tp)
            if position is not None:
                behind[tp] = max(0, ends[tp] - position)
        return behind

    def commit(self, what: Committable = None) -> None:
        self._run(self._original.commit(self.positions() if what is None else what))

    def commit_nowait(self, what: Committable = None) -> None:
        offsets = self.positions() if what is None else what
        self._call(lambda: self._original.commit_nowait(offsets))

    committed = blocking(consumer.Consumer.committed)

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        positions = self._call(self._original.positions)
        left = self._buffered[self._next_index() :]
        for tp, offset in _first_offsets(left).items():
            if tp in positions:
                positions[tp] = positions[tp]._replace(offset=offset)
        return positions

    def group_metadata(self) -> GroupMetadata:
        return self._call(self._original.group_metadata)

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records without end, waiting for new ones. Leaving the loop loses no record."""
        at_once = ITERATION_RECORDS if self._original.config.group_id is None else None
        while True:
            self._last_call_from = None
            yield from self._remaining
            self._take(at_once, None)

    def _take(self, max_records: int | None, timeout_ms: int | None) -> None:
        """Let the loop thread put records into this object's buffer, so that Ctrl-C loses none of them."""

        async def take() -> None:
            records = await self._original.get_many(max_records, timeout_ms=timeout_ms)
            self._buffered, self._remaining = records, iter(records)

        self._run(take())

    def get_one(self, *, timeout_ms: int | None = None) -> Record | None:
        records = self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    def get_many(self, max_records: int | None = None, *, timeout_ms: int | None = None) -> list[Record]:
        limit = max_records if max_records is not None else self._original.config.max_poll_records
        if not length_hint(self._remaining):
            self._take(limit, timeout_ms)
        self._last_call_from = self._next_index()
        return list(islice(self._remaining, limit))

    get_batches = blocking(consumer.Consumer.get_batches, after=_rewind)
    to_arrow = blocking(consumer.Consumer.to_arrow, after=_rewind)


def _first_offsets(records: Iterable[Record]) -> dict[TopicPartition, int]:
    firsts: dict[TopicPartition, int] = {}
    for record in records:
        firsts.setdefault(TopicPartition(record.topic, record.partition), record.offset)
    return firsts
