"""Fetches in two halves, so that one can be under way while another's records are read."""

from __future__ import annotations

from typing import NamedTuple

from kafkalite.client.cluster.retry import is_retriable
from kafkalite.errors import (
    BrokerError,
    KafkaliteError,
    LeaderNotAvailableError,
    OffsetOutOfRangeError,
    broker_error,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
)
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.brokers.connection import Reply, WireConnection


class Fetched(NamedTuple):
    """The answer for one partition. ``payload`` is whole batches; the first may begin before the offset."""

    payload: memoryview
    aborted: list[AbortedTransaction]
    high_watermark: int  #: exclusive
    last_stable_offset: int  #: exclusive
    log_start_offset: int  #: inclusive


class FetchToken:
    """A fetch under way. It may be dropped: its answer is then read and forgotten."""

    __slots__ = ("connection", "max_bytes", "max_wait_ms", "offset", "reply", "tp")

    def __init__(self, tp: TopicPartition, offset: int, max_bytes: int, max_wait_ms: int) -> None:
        self.tp = tp
        self.offset = offset
        self.max_bytes = max_bytes
        self.max_wait_ms = max_wait_ms
        self.connection: WireConnection | None = None  #: None: not sent, for receive_fetch to do
        self.reply: Reply | None = None

    def __repr__(self) -> str:
        state = "not sent" if self.reply is None else "answered" if self.reply.is_done else "sent"
        return f"<FetchToken {self.tp} from {self.offset}, {state}>"


def send_fetch(brokers: Brokers, token: FetchToken, deadline_s: float) -> None:
    """Ask the leader. Raises KafkaliteError."""
    address, leader_epoch = brokers.leader(token.tp, deadline_s)
    connection = brokers.connection(address, deadline_s)
    topic, partition = token.tp
    asked = FetchPartition(topic, partition, leader_epoch, token.offset, token.max_bytes)
    request = FetchRequest(token.max_wait_ms, 1, token.max_bytes, brokers.isolation_level, [asked])
    try:
        token.reply = connection.send(request, deadline_s)
    except KafkaliteError as error:
        brokers.blame(address, error)
        raise
    token.connection = connection


def send_early(brokers: Brokers, token: FetchToken) -> None:
    """Send ``token`` if that can be done now; what can pass is left to ``receive_fetch``."""
    try:
        send_fetch(brokers, token, brokers.deadline_s())
    except KafkaliteError as error:
        if not is_retriable(error):
            raise


def receive_fetch(brokers: Brokers, token: FetchToken) -> Fetched:
    """The answer; the fetch is sent again as long as what went wrong may pass.

    Raises OffsetOutOfRangeError, which tells the offsets there are, UnknownTopicOrPartitionError, and as
    Brokers.until_answered.
    """

    def attempt(deadline_s: float) -> Fetched:
        if token.reply is None or token.connection is None:
            send_fetch(brokers, token, deadline_s)
        reply, connection = token.reply, token.connection
        assert reply is not None and connection is not None, "just sent"
        token.reply = token.connection = None  # whatever happens, the next attempt sends anew
        brokers.receive(connection, reply, token.tp, deadline_s, extra_ms=token.max_wait_ms)
        if not reply.message.partitions:
            raise LeaderNotAvailableError(f"{connection.address} left {token.tp} out of its answer")
        partition: FetchedPartition = reply.message.partitions[0]
        if partition.error_code:
            raise _refused(partition, token)
        return Fetched(
            reply.payload,
            partition.aborted,
            partition.high_watermark,
            partition.last_stable_offset,
            partition.log_start_offset,
        )

    what = f"the fetch of {token.tp} from {token.offset}"
    return brokers.until_answered(what, [token.tp], attempt, extra_ms=token.max_wait_ms)


def _refused(partition: FetchedPartition, token: FetchToken) -> BrokerError:
    error = broker_error(partition.error_code, partition.error_message or "", about=str(token.tp))
    if isinstance(error, OffsetOutOfRangeError):
        return OffsetOutOfRangeError(
            f"{token.tp} has offsets from {partition.log_start_offset} to before {partition.high_watermark}, "
            f"not {token.offset}",
            hint="the records are gone, or the topic was made anew",
        )
    return error
