"""Aborts the open transactions of a failed or stopped batch, because they block read_committed consumers.

Spark passes the messages of finished tasks to the driver and stops the other tasks. For a stopped task, the
input seems to end. So the task prepares its transaction, but its message is never delivered. Therefore the
driver also looks for open transactions by a mark in their writers' names: a hash of the checkpoint location
of a stream, or the id of a batch job.
"""

# Tests: tests/sparkbridge/test_stream_writer.py, tests/spark/test_sink.py

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import KafkaliteError, TransactionalIdNotFoundError
from sparkbridge.options import SinkOptions
from sparkbridge.sink.commit import Written, attempt_writer, driver_config

#: The timeout of an abort, in milliseconds. The next commit or the transaction timeout aborts the remaining
#: transactions.
ABORT_TIMEOUT_MS: Final = 10_000
#: The maximum number of times that open attempts are listed. An attempt may join after a listing.
MAX_LOOKS: Final = 3
MARK_DIGITS: Final = 16

logger = logging.getLogger("sparkbridge")


class Attempt(NamedTuple):
    """The names by which the brokers identify a task attempt."""

    sink_id: str
    batch_id: int
    writer: str


def checkpoint_mark(options: Mapping[str, str], topic: str | None) -> str:
    """Return a hash of checkpoint location and topic that is equal in a stream's tasks and driver.

    Return "" without the option checkpointLocation. The topic is included, because a path such as
    ``/checkpoint`` may belong to different queries on different machines.
    """
    named = [str(value) for name, value in options.items() if str(name).lower() == "checkpointlocation"]
    return hashlib.sha256(f"{topic}\n{named[0]}".encode()).hexdigest()[:MARK_DIGITS] if named else ""


def abort_batch(
    options: SinkOptions,
    messages: Sequence[WriterCommitMessage | None],
    mark: str,
    *,
    sink_id: str | None = None,
    batch_id: int | None = None,
) -> None:
    """Abort the transactions of a batch as far as possible. Errors are only logged.

    Aborts the writers of ``messages``. Unless ``mark`` is empty, also aborts the open writers that have it in
    their names and belong to ``batch_id`` (None: any batch) of the sink. The sink is that of ``messages`` or,
    if there are none, ``sink_id`` (None: every sink with the option's transactionalIdPrefix). Does nothing
    unless exactlyOnce is true.
    """
    if not options.exactly_once:
        return
    written = [message for message in messages if isinstance(message, Written)]
    finished = [Attempt(one.sink_id, one.batch_id, one.prepared[0]) for one in written if one.prepared]
    if written:
        sink_id = written[0].sink_id
    try:
        done = set[Attempt]()
        _abort_attempts(options, finished, done)
        for _ in range(MAX_LOOKS if mark else 0):
            with Admin(config=driver_config(options, ABORT_TIMEOUT_MS)) as admin:
                found = {
                    one
                    for one in _open_attempts(admin, options, sink_id)
                    if mark in one.writer and batch_id in {one.batch_id, None}
                }
            if found <= done:
                return
            _abort_attempts(options, sorted(found - done), done)
    except KafkaliteError as error:
        logger.warning(
            "the transactions of a batch of %s are not aborted yet: %s", sink_id or "a sink", error
        )


def _open_attempts(admin: Admin, options: SinkOptions, sink_id: str | None) -> Iterator[Attempt]:
    if sink_id is None:
        prefix = f"{options.transactional_id_prefix}-"
        open_ids = {one.transactional_id for one in admin.list_transactions(["Ongoing"])}
        sink_ids = sorted(one for one in open_ids if one.startswith(prefix))
    else:
        sink_ids = [sink_id]
    for sink_id in sink_ids:
        try:
            writers = admin.describe_transaction_group(sink_id).writers
        except TransactionalIdNotFoundError:  # there is no such group, or no writer has joined
            continue
        for one in writers:
            if one.state == "Ongoing":
                yield Attempt(sink_id, one.batch_id, one.writer)


def _abort_attempts(options: SinkOptions, attempts: Sequence[Attempt], done: set[Attempt]) -> None:
    """Abort attempts: a new writer with the same name fences each attempt. Adds the attempts to ``done``."""
    for attempt in attempts:
        done.add(attempt)
        with attempt_writer(options, *attempt, ABORT_TIMEOUT_MS):  # no effect if the batch is already decided
            pass
