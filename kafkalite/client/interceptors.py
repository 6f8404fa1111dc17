"""Interceptors of producers and consumers (KIP-42).

Interceptors receive all records and may replace them, for tracing, auditing and masking. Several interceptors
are called in the given order. If an interceptor raises an exception or returns None, this is logged, and the
client continues with the record that this interceptor received. An ``on_consume`` that returns fewer records
leaves the others out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafkalite.log_fields import Fields, text_of
from kafkalite.model import OffsetAndMetadata, ProducerRecord, Record, RecordMetadata, TopicPartition

logger = logging.getLogger(__name__)


class ProducerInterceptor:
    """Base class of a producer's interceptors. Methods that are not overridden do nothing."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return ``record``, or another one to send in its place. Called before serialization.

        For ``send_many``, changes of topic and partition have no effect. Not called for prebuilt batches.
        """
        return record

    def on_acknowledgement(self, metadata: RecordMetadata, error: Exception | None) -> None:
        """Called on the event loop when a record is acknowledged, or has failed with ``error``.

        The offset is NO_OFFSET (-1) after a failure and with ``acks=0``.
        """


class ConsumerInterceptor:
    """Base class of a consumer's interceptors. Methods that are not overridden do nothing."""

    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        """Return ``records``, or others to return in their place. Called just before the user gets them."""
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Called when the group has stored these offsets."""


def passed_through(methods: Sequence[Callable[[Any], Any]], item: Any) -> Any:
    """Return ``item`` after each method has replaced it.

    A method that raises, or that returns None, is logged and skipped.
    """
    for method in methods:
        try:
            passed = method(item)
            if passed is None:
                raise TypeError("it returned None instead of what the client continues with")
            item = passed
        except Exception as error:
            _log(method, error)
    return item


def notify(methods: Sequence[Callable[..., None]], *arguments: Any) -> None:
    """Call each method with ``arguments``. Exceptions of a method are logged."""
    for method in methods:
        try:
            method(*arguments)
        except Exception as error:
            _log(method, error)


def _log(method: Callable[..., Any], error: Exception) -> None:
    logger.warning(
        "an interceptor failed %s",
        Fields(
            method=getattr(method, "__qualname__", repr(method)),
            error=f"{type(error).__name__}: {text_of(error)}",
        ),
        exc_info=logger.isEnabledFor(logging.DEBUG),
    )
