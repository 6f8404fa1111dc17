"""Interceptors of producers and consumers (KIP-42).

Interceptors receive records and may replace them, for tracing, auditing and masking. Several interceptors are
called in the given order, and each receives the result of the previous one. If ``on_send`` or ``on_consume``
raises an exception or returns None, this is logged, and its argument takes the place of its result.
Exceptions of the other methods are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafkalite.log_fields import Fields, text_of
from kafkalite.model import OffsetAndMetadata, ProducerRecord, Record, RecordMetadata, TopicPartition

logger = logging.getLogger(__name__)


class ProducerInterceptor:
    """Base class of a producer's interceptors. Its methods change nothing."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return ``record``, or another one to send in its place. Called before serialization.

        For ``send_many``, changes of topic and partition have no effect. Not called for prebuilt batches.
        """
        return record

    def on_acknowledgement(self, metadata: RecordMetadata, error: Exception | None) -> None:
        """Called when a record is acknowledged, or has failed with ``error``.

        Called on the event loop, except that a blocking ``send`` reports a SerializationError in the thread
        of its caller. The offset is NO_OFFSET (-1) after a failure and with ``acks=0``.
        """


class ConsumerInterceptor:
    """Base class of a consumer's interceptors. Its methods change nothing."""

    def on_consume(self, records: Sequence[Record[Any, Any]]) -> Sequence[Record[Any, Any]]:
        """Return the records to return to the user: ``records``, fewer, or others.

        Called just before the records are returned. If there are more than the call may return, the next call
        returns the others. Not called by ``get_batches``, ``to_arrow``,
        ``to_pandas``.
        """
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Called after the group has stored these offsets for this consumer."""


def passed_through(methods: Sequence[Callable[[Any], Any]], item: Any) -> Any:
    """Pass ``item`` to the first method, and each result to the next method. Return the last result.

    If a method raises an exception or returns None, this is logged, and its argument counts as its result.
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
