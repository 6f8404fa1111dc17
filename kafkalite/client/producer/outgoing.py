"""Applies a producer's interceptors, and then its serializers, to each record."""

# Tests: tests/client/test_interceptors.py, tests/client/test_serde.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from kafkalite.client.arguments import checked_interceptors
from kafkalite.client.interceptors import ProducerInterceptor, notify, passed_through
from kafkalite.client.producer.columns import RecordColumns
from kafkalite.client.producer.delivery import record_metadata
from kafkalite.client.producer.pending_batch import PendingBatch
from kafkalite.errors import SerializationError
from kafkalite.log_fields import text_of
from kafkalite.model import NO_OFFSET, NO_TIMESTAMP, ProducerRecord, RecordMetadata, TopicPartition
from kafkalite.serde import AnySerializer, function_of, name_of


class Outgoing:
    """Turns the records of a user into records of bytes, and reports their results to interceptors."""

    def __init__(
        self,
        key_serializer: AnySerializer[Any] | None,
        value_serializer: AnySerializer[Any] | None,
        interceptors: Sequence[ProducerInterceptor],
    ) -> None:
        self._serializers = [
            (what, given, function_of(given, "serialize"))
            for what, given in (("value", value_serializer), ("key", key_serializer))
            if given is not None
        ]
        chain = checked_interceptors(interceptors, ProducerInterceptor)
        self._on_send = [interceptor.on_send for interceptor in chain]
        self._on_acknowledgement = [interceptor.on_acknowledgement for interceptor in chain]

    def prepare(self, record: ProducerRecord) -> ProducerRecord:
        """Return ``record`` after the interceptors and serializers. Raises SerializationError.

        The interceptors are notified of this error.
        """
        record = passed_through(self._on_send, record)
        for what, given, serialize in self._serializers:
            value = getattr(record, what)
            if value is not None:
                try:
                    record = record._replace(**{what: serialize(record.topic, value)})
                except Exception as error:
                    failed = _unserializable(record, what, given, error)
                    self.on_refused(record, failed)
                    raise failed from error
        return record

    def prepare_columns(self, topic: str, columns: RecordColumns, partition: int | None) -> RecordColumns:
        """Return ``columns`` after the interceptors and serializers. Raises SerializationError.

        Changes of topic and partition by interceptors are ignored.
        """
        count = len(columns)
        stamps = columns.timestamps_ms
        stamps = [stamps] * count if isinstance(stamps, int) else stamps
        records: list[ProducerRecord] = []
        try:
            for value, key, timestamp_ms, headers in zip(
                columns.values,
                columns.keys or repeat(None, count),
                stamps,
                columns.headers or repeat((), count),
                strict=True,
            ):
                records.append(
                    self.prepare(ProducerRecord(topic, value, key, partition, timestamp_ms, headers))
                )
        except SerializationError as error:
            for record in records:
                self.on_refused(record, error)
            raise
        keys = [record.key for record in records]
        all_headers = [record.headers for record in records]
        return RecordColumns(
            [record.value for record in records],
            keys if any(key is not None for key in keys) else None,
            [
                own_ms if record.timestamp_ms is None else record.timestamp_ms
                for record, own_ms in zip(records, stamps, strict=True)
            ],
            all_headers if any(all_headers) else None,
        )

    @property
    def on_done(self) -> Callable[[PendingBatch], None] | None:
        """The function to call with each batch that is acknowledged or has failed; None without
        interceptors."""
        return self._report if self._on_acknowledgement else None

    def _report(self, batch: PendingBatch) -> None:
        for index in range(batch.record_count):
            notify(self._on_acknowledgement, record_metadata(batch, index), batch.error)

    def on_refused(self, record: ProducerRecord, error: Exception) -> None:
        """Report to the interceptors that a record has failed before it was added to a batch."""
        partition = -1 if record.partition is None else record.partition
        metadata = RecordMetadata(record.topic, partition, NO_OFFSET, record.timestamp_ms or NO_TIMESTAMP)
        notify(self._on_acknowledgement, metadata, error)


def _unserializable(record: ProducerRecord, what: str, given: Any, error: Exception) -> SerializationError:
    failed = SerializationError(
        f"the {what} of a record for topic {record.topic!r} can't be serialized by {name_of(given)}: "
        f"{type(error).__name__}: {text_of(error)}",
        hint=f"the {what} is {type(getattr(record, what)).__name__}",
    )
    if record.partition is not None:
        failed.topic_partition = TopicPartition(record.topic, record.partition)
    return failed
