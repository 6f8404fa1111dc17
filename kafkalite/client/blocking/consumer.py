"""The blocking twin of Consumer, which uses a Consumer in the loop thread.

Records are taken from the loop thread in bulk and buffered here until they are returned to the caller.
``position()`` and ``commit()`` do not count buffered records as returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, Unpack

from kafkalite.client.arguments import checked_count
from kafkalite.client.blocking.caller_thread import CallerThread
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.config import BootstrapServers, ConfigSource, ConsumerSettings
from kafkalite.client.consumer import consumer
from kafkalite.client.consumer.consumer import Committable
from kafkalite.client.group.rebalance_listener import RebalanceListener
from kafkalite.client.interceptors import ConsumerInterceptor
from kafkalite.clock import Clock
from kafkalite.errors import KafkaliteError
from kafkalite.model import GroupMetadata, OffsetAndMetadata, Record, TopicPartition
from kafkalite.rng import Rng
from kafkalite.serde import AnyDeserializer, K, V

T = TypeVar("T")

# Iteration takes this many records at once from the loop thread, because each transfer costs about 100
# microseconds. In a group it takes max.poll.records, because auto-commit counts them as being processed.
ITERATION_RECORDS: Final = 10_000


@twin_of(consumer.Consumer)
class Consumer(Twin[consumer.Consumer[K, V]], Generic[K, V]):
    """Reads records. The blocking twin of ``kafkalite.Consumer``, with the same arguments.

    Use it in one thread at a time. A listener's methods are called in that thread, and may commit and seek.

    ::

        with Consumer("orders", group_id="billing", bootstrap_servers="localhost:9092") as consumer:
            for record in consumer:
                print(record.value)
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            *topics: str | Iterable[str],
            bootstrap_servers: BootstrapServers | None = None,
            pattern: str | re.Pattern[str] | None = None,
            listener: RebalanceListener | None = None,
            key_deserializer: AnyDeserializer[K] | None = None,
            value_deserializer: AnyDeserializer[V] | None = None,
            interceptors: Sequence[ConsumerInterceptor] = (),
            config: ConfigSource | None = None,
            clock: Clock | None = None,
            rng: Rng | None = None,
            **settings: Unpack[ConsumerSettings],
        ) -> None: ...
    else:

        @opened_with(consumer.Consumer)
        def __init__(self, original):
            self._set_up(original)

    def _set_up(self, original: consumer.Consumer[K, V]) -> None:
        super().__init__(original)
        self._calls = CallerThread(self._thread)
        original.wrap_listener(self._calls.listener)
        self._buffered: list[Record[K | None, V | None]] = []  # the last records taken from the loop thread
        self._remaining: Iterator[Record[K | None, V | None]] = iter(
            self._buffered
        )  # not returned to the caller yet
        # index in ``_buffered`` of the first record that the last get_many() returned
        self._last_call_from: int | None = None
        self._is_direct = False  # whether the last call that read records returned them without this buffer

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return self._calls.run(coroutine)

    def close(self) -> None:
        self._rewind()
        super().close()

    def stop(self) -> None:
        self.close()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._rewind(is_done=error is None)
        try:
            self._run(self._original._close(is_done=error is None or not self._is_direct))
        except KafkaliteError as unfinished:
            if error is None:
                raise
            error.add_note(f"kafkalite: {unfinished}")

    def subscribe(
        self,
        *topics: str | Iterable[str],
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        self._rewind()
        wrapped = None if listener is None else self._calls.listener(listener)
        self._call(lambda: self._original.subscribe(*topics, pattern=pattern, listener=wrapped))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._rewind()
        self._call(lambda: self._original.assign(partitions))

    def unsubscribe(self) -> None:
        self._rewind()
        self._run(self._original.unsubscribe())

    def subscription(self) -> list[str]:
        return self._original.subscription()

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
        """Drop the buffer. Seek each partition to its first buffered record that was not returned yet.

        Unless ``is_done``, the records that the last ``get_many`` returned, or the last record of an
        iteration, count as not returned. This does not apply to an at-most-once consumer.
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

    def _read_directly(self) -> None:
        """Prepare a call that reads records without using the buffer."""
        self._rewind()
        self._is_direct = True

    seek = blocking(consumer.Consumer.seek, after=_rewind)
    seek_to_beginning = blocking(consumer.Consumer.seek_to_beginning, after=_rewind)
    seek_to_end = blocking(consumer.Consumer.seek_to_end, after=_rewind)
    seek_to_committed = blocking(consumer.Consumer.seek_to_committed, after=_rewind)
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

    @contextmanager
    def processing(self, record: Record[Any, Any]) -> Iterator[None]:
        """Process ``record`` for longer than max.poll.interval.ms without leaving the group.

        ::

            with consumer.processing(record):
                an_hour_of_work(record)

        Heartbeats continue, and a warning is logged whenever max.poll.interval.ms has passed. Partitions that
        the coordinator revokes meanwhile are released at the next call for records. The coordinator waits for
        them at most max.poll.interval.ms. Without a group, does nothing.
        """
        processing = self._original.processing(record)
        self._run(processing.__aenter__())
        try:
            yield
        finally:
            self._run(processing.__aexit__(None, None, None))

    def group_metadata(self) -> GroupMetadata:
        return self._call(self._original.group_metadata)

    def __iter__(self) -> Iterator[Record[K | None, V | None]]:
        """Iterate over records without end, waiting for new ones. Leaving the loop loses no record."""
        at_once = ITERATION_RECORDS if self._original.config.group_id is None else None
        while True:
            self._last_call_from = None
            yield from self._remaining
            self._take(at_once, None)

    def _take(self, max_records: int | None, timeout_ms: int | None) -> None:
        """Let the loop thread put records into this object's buffer, so that Ctrl-C loses none of them."""

        self._is_direct = False

        async def take() -> None:
            records = await self._original.get_many(max_records, timeout_ms=timeout_ms)
            self._buffered, self._remaining = records, iter(records)

        self._run(take())

    def get_one(self, *, timeout_ms: int | None = None) -> Record[K | None, V | None] | None:
        records = self.get_many(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    def getone(self) -> Record[K | None, V | None]:
        record = self.get_one()
        assert record is not None, "without a time limit, there is a record"
        return record

    def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record[K | None, V | None]]]:
        if not partitions:
            return consumer.by_partition(self.get_many(max_records, timeout_ms=timeout_ms))
        self._read_directly()
        return self._run(self._original.getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records))

    def get_many(
        self, max_records: int | None = None, *, timeout_ms: int | None = None
    ) -> list[Record[K | None, V | None]]:
        given = None if max_records is None else checked_count("max_records", max_records)
        limit: int = self._original.config.max_poll_records if given is None else given
        if not length_hint(self._remaining):
            self._take(limit, timeout_ms)
        self._last_call_from = self._next_index()
        return list(islice(self._remaining, limit))

    get_batches = blocking(consumer.Consumer.get_batches, after=_read_directly)
    to_arrow = blocking(consumer.Consumer.to_arrow, after=_read_directly)
    to_pandas = blocking(consumer.Consumer.to_pandas, after=_read_directly)


def _first_offsets(records: Iterable[Record[Any, Any]]) -> dict[TopicPartition, int]:
    firsts: dict[TopicPartition, int] = {}
    for record in records:
        firsts.setdefault(TopicPartition(record.topic, record.partition), record.offset)
    return firsts
