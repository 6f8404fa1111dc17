"""Deserializes the keys and values of fetched records. Pure."""

# Tests: tests/client/test_serde.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafkalite.errors import SerializationError
from kafkalite.log_fields import text_of
from kafkalite.model import Record, TopicPartition
from kafkalite.serde import AnyDeserializer, function_of, name_of

Decode = Callable[[Record], Record[Any, Any]]


def decoder(
    key_deserializer: AnyDeserializer[Any] | None, value_deserializer: AnyDeserializer[Any] | None
) -> Decode | None:
    """Return a function that deserializes a record, or None if both arguments are None.

    The function raises SerializationError, whose ``record`` is the record that failed.
    """
    given = {
        what: (deserializer, function_of(deserializer, "deserialize"))
        for what, deserializer in (("key", key_deserializer), ("value", value_deserializer))
        if deserializer is not None
    }
    if not given:
        return None

    def decode(record: Record) -> Record[Any, Any]:
        new: dict[str, Any] = {}
        for what, (deserializer, deserialize) in given.items():
            data = getattr(record, what)
            if data is not None:
                try:
                    new[what] = deserialize(record.topic, data)
                except Exception as error:
                    raise _undeserializable(record, what, deserializer, error) from error
        return record._replace(**new)

    return decode


def _undeserializable(record: Record, what: str, given: Any, error: Exception) -> SerializationError:
    failed = SerializationError(
        f"the {what} of record {record.address} can't be deserialized by {name_of(given)}: "
        f"{type(error).__name__}: {text_of(error)}",
        hint=f"seek() to offset {record.offset + 1} skips the record",
    )
    failed.topic_partition = TopicPartition(record.topic, record.partition)
    failed.offset, failed.next_offset, failed.record = record.offset, record.offset + 1, record
    return failed
