"""Commits a written batch from the driver.

The commit is one call, ``TransactionGroup.finish``, which may be repeated. If a driver crashes after this
call but before Spark logs the commit, the call is repeated after the restart and returns the first result.
"""

# Tests: tests/sparkbridge/test_stream_writer.py

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

from pyspark.sql.datasource import WriterCommitMessage

from kafkalite.client.blocking.transaction_group import TransactionGroup, TransactionGroupWriter
from kafkalite.client.producer.transaction_group import GroupResult, PreparedWriter
from kafkalite.errors import (
    AuthenticationError,
    ConnectionFailedError,
    FinishedBatchError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    KafkaliteError,
)
from sparkbridge.errors import SinkCommitError
from sparkbridge.local.worker_garbage import spare_collections
from sparkbridge.options import SinkOptions

#: How long a commit, once decided, waits until its transaction markers make it visible in every partition.
COMPLETE_WAIT_MS: Final = 10_000
#: The timeout of a commit in milliseconds, including failovers of the coordinator.
COMMIT_TIMEOUT_MS: Final = 120_000

#: The pause between two attempts to reach a broker.
REACH_PAUSE_S: Final = 0.2

logger = logging.getLogger("sparkbridge")


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """A task attempt's message to the driver.

    ``prepared`` has the fields of a PreparedWriter, or is None if there is no transaction to commit.
    """

    sink_id: str
    batch_id: int
    query_id: str  #: the stream's query id, to detect two queries with one sink name; "" in a batch job
    rows: int
    prepared: tuple[str, int, int] | None


def commit_batch(
    options: SinkOptions, messages: Sequence[WriterCommitMessage | None], *, is_last: bool = False
) -> GroupResult | None:
    """Make the batch visible to readers. Return None if there is nothing to commit. Raises SinkCommitError.

    If ``is_last``, no batch of this sink follows. The brokers then need not store the sink's name for ever.
    """
    spare_collections("commit")
    written = [message for message in messages if isinstance(message, Written)]
    if not written or not options.exactly_once:
        return None
    sink_id, query_id, batch_id = written[0].sink_id, written[0].query_id, written[0].batch_id
    winners = [PreparedWriter(*one.prepared) for one in written if one.prepared is not None]
    try:
        if not winners:
            winners = _witness(options, written[0])
        with closing(started(lambda: _group(options, sink_id), COMMIT_TIMEOUT_MS)) as group:
            result = group.finish(batch_id, winners, wait_ms=COMPLETE_WAIT_MS)
            if is_last:
                _retire(group)
    except InvalidTxnStateError as error:
        raise SinkCommitError(
            f"batch {batch_id} of {sink_id!r} was not committed: a task's transaction was aborted before "
            f"({error.message})",
            hint="it was open for longer than kafka.transaction.timeout.ms, now "
            f"{options.transaction_timeout_ms}, or the batch was run by a second driver; start the query "
            "again, with a longer time-out or smaller batches",
        ) from error
    except FinishedBatchError as error:
        raise older_batch_error(sink_id, batch_id, error.message) from error
    except KafkaliteError as error:
        raise SinkCommitError(
            f"it is unknown whether batch {batch_id} of {sink_id!r} is committed: {error}",
            hint="start the query again: it repeats the batch, which is still written only once",
        ) from error
    _check_same_query(sink_id, query_id, batch_id, result)
    if not result.is_complete:
        logger.warning(
            "batch %d of %s is committed; some partitions make it visible when they have a leader",
            batch_id,
            sink_id,
        )
    return result


def _retire(group: TransactionGroup) -> None:
    try:
        group.retire()
    except KafkaliteError as error:  # ignored, because the batch is committed
        logger.info("%r is kept by the brokers: %s", group, error)


def _witness(options: SinkOptions, one: Written) -> list[PreparedWriter]:
    """Return a prepared writer without records. Its name, with the query id, is stored with an empty batch.

    So another query with the same sink name is detected. Returns [] if no other query can use this name, if
    the batch is already committed, or if the brokers refuse the transaction timeout.
    """
    if not one.query_id or one.sink_id == f"{options.transactional_id_prefix}-{one.query_id}":
        return []  # no query, or a name that belongs to this query alone
    writer = writer_name(one.query_id, f"nothing-{uuid.uuid4().hex}")
    timeout_ms = min(options.transaction_timeout_ms, COMMIT_TIMEOUT_MS)
    try:
        with closing(
            started(
                lambda: attempt_writer(options, one.sink_id, one.batch_id, writer, timeout_ms),
                COMMIT_TIMEOUT_MS,
            )
        ) as joined:
            prepared = joined.prepare()
    except InvalidTransactionTimeoutError:  # above the brokers' maximum: commit without this writer
        prepared = None
    return [] if prepared is None else [prepared]


def _group(options: SinkOptions, sink_id: str) -> TransactionGroup:
    return TransactionGroup(sink_id, config=driver_config(options, COMMIT_TIMEOUT_MS))


def attempt_writer(
    options: SinkOptions, sink_id: str, batch_id: int, writer: str, timeout_ms: int
) -> TransactionGroupWriter:
    """Return a writer named ``writer``, not started. ``timeout_ms`` limits its calls and its transaction."""
    transaction_timeout_ms = min(timeout_ms, options.transaction_timeout_ms)
    config = {**driver_config(options, timeout_ms), "transaction.timeout.ms": str(transaction_timeout_ms)}
    return TransactionGroupWriter(sink_id, batch_id, writer, config=config)


class _Client(Protocol):
    def start(self) -> Self: ...


C = TypeVar("C", bound=_Client)


def started(make: Callable[[], C], timeout_ms: int) -> C:
    """Create and start a client. Retry until a broker can be reached, because brokers may be restarting.

    Raises ConnectionFailedError after ``timeout_ms``, and AuthenticationError at once.
    """
    deadline_s = time.monotonic() + timeout_ms / 1000
    while True:
        try:
            return make().start()
        except ConnectionFailedError as error:
            if isinstance(error, AuthenticationError) or time.monotonic() >= deadline_s:
                raise
        time.sleep(REACH_PAUSE_S)


def older_batch_error(sink_id: str, batch_id: int, why: str) -> SinkCommitError:
    return SinkCommitError(
        f"batch {batch_id} of {sink_id!r} is older than the last committed one ({why}): nothing was written",
        hint="the checkpoint is new, or older than the sink, or two queries use one name, or this driver was "
        "replaced: to continue, give it a sinkName (txnAppId) of its own",
    )


def writer_name(query_id: str, attempt: str) -> str:
    """Return the writer name of a task attempt. It begins with the query id and a slash."""
    return f"{query_id}/{attempt}"


def _check_same_query(sink_id: str, query_id: str, batch_id: int, result: GroupResult) -> None:
    """Raise SinkCommitError if, according to ``result``, another query has committed the batch before."""
    if not result.is_repeated:
        return
    strangers = [name for name in result.winners if not name.startswith(f"{query_id}/")]
    if strangers and query_id:
        raise SinkCommitError(
            f"batch {batch_id} of {sink_id!r} was committed by another query ({strangers[0]!r}): the rows of "
            "this one were not written",
            hint="a sinkName belongs to one checkpoint; give this query another one",
        )


def driver_config(options: SinkOptions, timeout_ms: int) -> dict[str, str]:
    """Return the settings of a client in the driver. Its calls take at most ``timeout_ms``."""
    client = options.client
    common = {name: text for name, text in client.producer.items() if name in _COMMON}
    return {
        **common,
        **client.security,
        "bootstrap.servers": client.bootstrap_servers,
        "client.id": client.client_id,
        "request.timeout.ms": str(client.request_timeout_ms),
        "default.api.timeout.ms": str(timeout_ms),
    }


_COMMON: Final = frozenset(
    {
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
        "socket.connection.setup.timeout.ms",
        "metadata.max.age.ms",
    }
)
