"""A batch that failed, or was stopped: what its tasks wrote is taken back, or it would hold readers up.

Spark gives the driver the messages of the tasks that ended, and ends the others in the middle: to one of
those its input seems to have come to its end, so that it prepares, and finds nobody to tell. So the driver
looks for the open attempts by name. Of the query it is told only the options: their mark is in the name.
"""

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

#: So long an abort is tried: what it leaves behind, the next commit or the time-out takes away.
ABORT_TIMEOUT_MS: Final = 10_000
#: An attempt may join while others are looked for.
MAX_LOOKS: Final = 3
MARK_DIGITS: Final = 16

logger = logging.getLogger("sparkbridge")


class Attempt(NamedTuple):
    """A task attempt as the brokers know it."""

    sink_id: str
    batch_id: int
    writer: str


def checkpoint_mark(options: Mapping[str, str], topic: str | None) -> str:
    """Of a stream, the same in its tasks and in the driver; empty when its options name no checkpoint.

    With the topic, for ``/checkpoint`` may be a directory of each of several machines.
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
    """Take back what the tasks wrote, as far as that goes now: the cause of it matters more.

    Besides those of ``messages``, the open attempts with ``mark`` in their names (none if it is empty), of
    ``sink_id`` or else of all sinks, of ``batch_id`` or else of any batch.
    """
    if not options.exactly_once:
        return
    written = [message for message in messages if isinstance(message, Written)]
    told = [Attempt(one.sink_id, one.batch_id, one.prepared[0]) for one in written if one.prepared]
    if written:
        sink_id = written[0].sink_id
    try:
        done = set[Attempt]()
        _abort_attempts(options, told, done)
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
        logger.warning("what was written of a batch of %s is not aborted yet: %s", sink_id or "a sink", error)


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
        except TransactionalIdNotFoundError:  # no group, or nobody has joined
            continue
        for one in writers:
            if one.state == "Ongoing":
                yield Attempt(sink_id, one.batch_id, one.writer)


def _abort_attempts(options: SinkOptions, attempts: Sequence[Attempt], done: set[Attempt]) -> None:
    """Whoever takes the name of an attempt aborts what it wrote, and it can write no more."""
    for attempt in attempts:
        done.add(attempt)
        with attempt_writer(options, *attempt, ABORT_TIMEOUT_MS):  # of a decided batch it changes nothing
            pass
