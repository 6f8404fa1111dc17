"""Creates clients of a test cluster, and has the shortcuts that tests need most."""

# Tests: tests/testing/test_cluster.py

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalite.model import Record, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.client.producer.producer import Producer

READ_TIMEOUT_MS: Final = 30_000
READ_SLICE_MS: Final = 50


class Clients:
    """Creates clients of the cluster at ``bootstrap_servers``."""

    @property
    def bootstrap_servers(self) -> str:
        raise NotImplementedError

    @property
    def client_settings(self) -> dict[str, Any]:
        """The settings, by Python name, that every client of this cluster needs."""
        return {}

    def producer(self, **settings: Any) -> Producer:
        """Return a Producer of this cluster, for use with ``async with``."""
        from kafkalite.client.producer.producer import Producer

        return Producer(self.bootstrap_servers, **{**self.client_settings, **settings})

    def consumer(self, *topics: str, **settings: Any) -> Consumer:
        """Return a Consumer of this cluster, for use with ``async with``."""
        from kafkalite.client.consumer.consumer import Consumer

        servers = {"bootstrap_servers": self.bootstrap_servers}
        return Consumer(*topics, **{**servers, **self.client_settings, **settings})

    def admin(self, **settings: Any) -> Admin:
        """Return an Admin of this cluster, for use with ``async with``."""
        from kafkalite.client.admin.admin import Admin

        return Admin(self.bootstrap_servers, **{**self.client_settings, **settings})

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int = -1,
    ) -> None:
        async with self.admin() as admin:
            await admin.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor,
                configs=dict(configs or {}),
            )

    async def produce(self, topic: str, values: Iterable[bytes], *, partition: int | None = None) -> None:
        """Send ``values`` to ``partition`` (None: the partitioner chooses), and wait for acknowledgements.

        Raises RecordError if ``values`` is one bytes or str object instead of several.
        """
        column: Any = values
        if not isinstance(column, bytes | str):
            column = list(values)
        async with self.producer() as producer:
            await producer.send_many(topic, column, partition=partition)
            await producer.flush()

    async def records(self, topic: str) -> list[Record]:
        """Return every record of the topic that can be read now, ordered by partition and offset.

        Raises AssertionError if the consumer receives no further record for READ_TIMEOUT_MS although some are
        left.
        """
        async with self.admin() as admin:
            described = await admin.describe_topics([topic])
        partitions = [TopicPartition(topic, number) for number in range(len(described[0].partitions))]
        records: list[Record] = []
        async with self.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            starts = await consumer.beginning_offsets(partitions)
            open_ends = {key for key in partitions if starts[key] < ends[key]}
            waited_ms = 0
            while open_ends:
                batch = await consumer.get_many(timeout_ms=READ_SLICE_MS)
                records += [r for r in batch if r.offset < ends[TopicPartition(r.topic, r.partition)]]
                # The last offsets of a partition may be those of markers, which are not returned, but the
                # position advances past them.
                open_ends = {key for key in open_ends if (consumer.position(key) or 0) < ends[key]}
                waited_ms = 0 if batch else waited_ms + READ_SLICE_MS
                assert waited_ms < READ_TIMEOUT_MS, (
                    f"nothing could be read from {open_ends} for {READ_TIMEOUT_MS} ms"
                )
        return sorted(records, key=lambda record: (record.partition, record.offset))
