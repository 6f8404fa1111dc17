"""Table: a topic as a table of the latest value of each key, like a GlobalKTable of Kafka Streams."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, Unpack

from kafkalite.client.arguments import checked_name, takes_one
from kafkalite.client.config import CONSUMER_OPTIONS, BootstrapServers, ConfigSource, ConsumerSettings, merged
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.consumer.subscription import topic_names
from kafkalite.clock import Clock
from kafkalite.errors import ClientClosedError, ClientError, RequestTimeoutError, SerializationError
from kafkalite.log_fields import Fields
from kafkalite.model import Record, TopicPartition
from kafkalite.rng import Rng
from kafkalite.serde import AnyDeserializer, K, V

if TYPE_CHECKING:
    import pandas
    import pyarrow

logger = logging.getLogger(__name__)

# A read takes at most this many records before the event loop runs other tasks.
_RECORDS_PER_READ: Final = 10_000
# How long a read waits for records before the position is checked again: transaction markers move the
# position but return no record.
_POLL_MS: Final = 20


class Change(NamedTuple, Generic[K, V]):
    """One change of a table. ``old`` is None if the key is new, and ``new`` is None if it was removed."""

    key: K
    old: V | None
    new: V | None
    #: The record that made the change, or the lost record if the row is removed because the log lost it.
    record: Record[Any, Any]


class Table(Mapping[K, V]):
    """A topic as a table: a read-only mapping from each key to its latest value, held in memory.

    ::

        async with Table("prices", bootstrap_servers="localhost:9092") as prices:
            print(prices[b"donut"])           # all records that the topic had at the start
            await prices.refresh()            # and all that it has now
            async for change in prices.changes():
                print(change.key, change.old, change.new)

    A record with a null value removes its key. Records without a key are counted and otherwise ignored.
    Producers must always send a key to the same partition, as the default partitioner does. The topic should
    have ``cleanup.policy=compact``: then it keeps the latest record of each key. Rows stay when retention
    deletes their records.

    The settings are those of ``Consumer``, but a table has no group and always starts at the beginning.
    ``isolation.level`` is ``read_committed`` unless set. Use a table from one task at a time.

    A record that cannot be deserialized raises SerializationError until ``seek`` skips it, and a key that is
    not hashable raises ClientError. If ``start`` raises SerializationError, the table stays open, unless
    ``async with`` called it. If the topic is deleted and created again, the old rows are removed. A table
    that was never open raises ClientClosedError instead of being empty.
    """

    _opener: str = "'async with'"  # the statement that opens it, for hints

    @takes_one('Table("{topic}", bootstrap_servers="{servers}")')
    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: BootstrapServers | None = None,
        key_deserializer: AnyDeserializer[K] | None = None,
        value_deserializer: AnyDeserializer[V] | None = None,
        config: ConfigSource | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        (self.topic,) = topic_names([checked_name("topic", topic)], client="Table")
        self.keyless_count = 0  #: records without a key, which belong to no row
        self._records: dict[K, Record[Any, Any]] = {}
        self._has_opened = False  # whether ``start`` has read the topic, so that a missing row is no mistake
        self._ends: dict[TopicPartition, int] = {}  # the offset after the last applied record
        self._unreturned: deque[Change[K, V]] = deque()  # changes that are applied, but not returned yet
        given = merged(config, settings, CONSUMER_OPTIONS)
        if "auto.offset.reset" not in given:
            settings["auto_offset_reset"] = "earliest"
        if "isolation.level" not in given:
            settings["isolation_level"] = "read_committed"
        self._consumer: Consumer[K, V] = Consumer(
            topic,
            bootstrap_servers=bootstrap_servers,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            config=config,
            clock=clock,
            rng=rng,
            **settings,
        )
        self.config = self._consumer.config
        if self.config.group_id is not None:
            raise ClientError(
                f"a table reads the whole topic, so it can't be a member of group {self.config.group_id!r}",
                hint="leave out group.id",
            )
        if self.config.auto_offset_reset != "earliest":
            raise ClientError(
                f"auto.offset.reset={self.config.auto_offset_reset}: a table starts at the beginning",
                hint="leave out auto.offset.reset",
            )

    def __repr__(self) -> str:
        return f"<Table {self.topic!r}, {len(self._records)} rows>"

    # --- rows ----------------------------------------------------------------------------------

    @property
    def _rows(self) -> dict[K, Record[Any, Any]]:
        """The records of the rows. Raises ClientClosedError if the table was never open."""
        if not self._has_opened:
            raise ClientClosedError(
                f"the table of {self.topic!r} was not opened, so it has no rows yet",
                hint=f"open it with {self._opener} or start()",
            )
        return self._records

    def __getitem__(self, key: K) -> V:
        value: V = self._rows[key].value
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, key: K) -> Record[K, V]:
        """Return the record that has the value of ``key``, with its offset and headers. Raises KeyError."""
        return self._rows[key]

    def to_arrow(self, *, key_column: str = "key") -> pyarrow.Table:
        """Return the rows as an Arrow table, in the order in which their keys were added to this table.

        If all values are mappings, each of their fields is a column, null in rows that lack it. Otherwise,
        the values are the column ``value``. Raises RecordError if no Arrow type fits all values of a column,
        or if a column of the values has the name ``key_column``, and MissingExtraError without pyarrow.
        """
        from kafkalite.client.consumer.arrow import table_of_rows

        return table_of_rows(list(self), list(self.values()), key_column)

    def to_pandas(self, *, key_column: str = "key") -> pandas.DataFrame:
        """Return the columns of ``to_arrow`` as a DataFrame with the keys as its index."""
        from kafkalite.client.consumer.data_frames import data_frame, require_pandas

        require_pandas()
        return data_frame(self.to_arrow(key_column=key_column)).set_index(key_column)

    # --- reading -------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Connect, and read the records that the topic has.

        Raises the errors of ``Consumer.start`` and ``refresh``. After SerializationError, the table is open:
        ``seek`` can skip the record, and ``refresh`` continues.
        """
        await self._consumer.start()
        try:
            await self._read_to_the_end(keeps_changes=False)
        except SerializationError:
            self._has_opened = True
            raise
        except BaseException:
            await self._consumer.close()
            raise
        self._has_opened = True
        return self

    async def close(self) -> None:
        """Close the connections. The rows stay readable. May be called twice."""
        await self._consumer.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except SerializationError:
            await self.close()
            raise

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def refresh(self) -> list[Change[K, V]]:
        """Apply all readable records that the topic has at the time of the call, and return the changes.

        The readable records of a partition are those below the high watermark; with ``read_committed``, those
        below the last stable offset, except records of aborted transactions. Changes that were applied but
        not returned before come first. Raises RequestTimeoutError if nothing arrives for
        default.api.timeout.ms, the errors of ``Consumer.get_many``, and ClientError for a key that is not
        hashable.
        """
        await self._read_to_the_end(keeps_changes=True)
        changes = list(self._unreturned)
        self._unreturned.clear()
        return changes

    async def _read_to_the_end(self, *, keeps_changes: bool) -> None:
        """Apply all readable records that the topic has at the time of the call, as ``refresh`` does.

        ``keeps_changes`` is whether ``next_change`` and ``refresh`` return the changes.
        """
        consumer, limit_s = self._consumer, self.config.default_api_timeout_ms / 1000
        ends: dict[TopicPartition, int] = {}

        def behind() -> list[TopicPartition]:
            return [tp for tp, end in ends.items() if (consumer.position(tp) or 0) < end]

        try:
            async with asyncio.timeout(limit_s) as limit:
                await consumer._refresh_metadata()  # for partitions that were added
                ends = await consumer.end_offsets(consumer.assignment())
                await self._restart_replaced(ends)
                while behind():
                    records = await consumer.get_many(_RECORDS_PER_READ, timeout_ms=_POLL_MS)
                    for number, record in enumerate(records):
                        try:
                            changes = self._apply(record)
                        except ClientError:
                            await self._unread(records[number:])
                            raise
                        if keeps_changes:
                            self._unreturned += changes
                    if records:
                        limit.reschedule(asyncio.get_running_loop().time() + limit_s)
        except TimeoutError as error:
            awaited = f"record of {', '.join(map(str, behind()))}" if ends else f"metadata of {self.topic}"
            raise RequestTimeoutError(
                f"no {awaited} arrived for {limit_s:g} s", hint="is its leader alive?"
            ) from error

    async def _restart_replaced(self, ends: Mapping[TopicPartition, int]) -> None:
        """Read a partition again, without its old rows, if its log ends before records that were applied.

        Either the topic was created again or the log was truncated. ``ends`` are the logs' end offsets.
        """
        for tp, end in ends.items():
            if end < self._ends.get(tp, 0):
                del self._ends[tp]
                self._unreturned += self._remove_from(tp, 0)
                await self._consumer.seek_to_beginning(tp)

    async def next_change(self, *, timeout_ms: int | None = None) -> Change[K, V] | None:
        """Return the next change. If no applied change is left to return, wait for records and apply them.

        Returns None if there is no change within ``timeout_ms`` (None: no limit). Raises the errors of
        ``Consumer.get_many``, and ClientError for a key that is not hashable.
        """
        now_s = asyncio.get_running_loop().time
        until_s = None if timeout_ms is None else now_s() + timeout_ms / 1000
        while not self._unreturned:
            left_ms = None if until_s is None else max(0, round((until_s - now_s()) * 1000))
            record = await self._consumer.get_one(timeout_ms=left_ms)
            if record is None:
                return None
            try:
                self._unreturned += self._apply(record)
            except ClientError:
                await self._unread([record])
                raise
        return self._unreturned.popleft()

    async def changes(self) -> AsyncIterator[Change[K, V]]:
        """Apply and yield each change, and wait for more without end.

        A later call of this method continues with the next change.
        """
        while True:
            change = await self.next_change()
            if change is not None:
                yield change

    async def seek(self, tp: TopicPartition, offset: int) -> None:
        """Continue with the record at ``offset``, for example after a record that cannot be deserialized."""
        await self._consumer.seek(tp, offset)

    async def _unread(self, records: Sequence[Record[Any, Any]]) -> None:
        """Seek back to ``records``, which were not applied, so that the next call reads them again."""
        for record in reversed(records):
            await self._consumer.seek(TopicPartition(record.topic, record.partition), record.offset)

    def _apply(self, record: Record[Any, Any]) -> list[Change[K, V]]:
        """Apply ``record``, and return the changes of rows.

        A null value removes the row. If ``record`` shows that the partition continues at an earlier offset,
        because its topic was created again or its log was truncated, the rows of the records that are gone
        are removed first. Raises ClientError for a key that is not hashable, before anything is changed.
        """
        try:
            hash(record.key)
        except TypeError as error:
            raise ClientError(
                f"the key of record {record.address} is a {type(record.key).__name__}, which is not hashable",
                hint="deserialize the keys of a table to str, int or bytes, or leave out key_deserializer",
            ) from error
        tp = TopicPartition(record.topic, record.partition)
        changes = self._remove_from(tp, record.offset) if record.offset < self._ends.get(tp, 0) else []
        self._ends[tp] = record.offset + 1
        if record.key is None:
            if not self.keyless_count:
                logger.warning("a record has no key, so it is in no row %s", Fields(record=record.address))
            self.keyless_count += 1
            return changes
        before = self._records.get(record.key)
        if record.value is not None:
            self._records[record.key] = record
        elif before is None:
            return changes
        else:
            del self._records[record.key]
        changes.append(Change(record.key, None if before is None else before.value, record.value, record))
        return changes

    def _remove_from(self, tp: TopicPartition, offset: int) -> list[Change[K, V]]:
        """Remove the rows of records at and after ``offset`` of a partition, and return the changes."""
        gone = [
            key
            for key, record in self._records.items()
            if (record.topic, record.partition) == tp and record.offset >= offset
        ]
        removed = [(key, self._records.pop(key)) for key in gone]
        return [Change(key, record.value, None, record) for key, record in removed]
