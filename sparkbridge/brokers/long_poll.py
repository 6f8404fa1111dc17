"""Waits until a partition has data at or after a position: sends a long poll (a Fetch) to each leader.

Long polls have their own connections: responses on one connection arrive in order, so a long poll would
delay the responses to later requests. A poll that has no response at the end of a wait is kept for the next
wait. So an idle topic costs about one request per leader every POLL_MS.
"""

# Tests: tests/sparkbridge/test_cluster.py

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import KafkaliteError, OffsetOutOfRangeError, broker_error
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import FetchedPartition, FetchPartition, FetchRequest
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.brokers.connection import BrokerConnection, Reply
from sparkbridge.offsets import Positions

# The longest time that a broker may hold a poll.
POLL_MS: Final = 5_000

# The broker responds to a fetch of 0 bytes when there is data, but does not send the data.
WATCH_BYTES: Final = 0

# Pauses, in milliseconds, between attempts to reach a leader. Polls at other leaders continue meanwhile.
_BACKOFF: Final = Backoff(10, 100)

# The minimum time for opening a connection, in seconds, even if the wait is only a few milliseconds.
_LEAST_S: Final = 1.0


class _Poll(NamedTuple):
    """A fetch in flight to one leader, which responds when there is data at or after ``positions``."""

    connection: BrokerConnection
    positions: Positions
    reply: Reply

    def covers(self, wanted: Mapping[TopicPartition, int]) -> bool:
        """Whether the broker responds to this poll no later than it would to a new poll for ``wanted``."""
        return all(self.positions.get(tp, at + 1) <= at for tp, at in wanted.items())


class LongPolls:
    """Owns one caller's long polls. Invariant: each address in ``_polls`` is also in ``_connections``."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._connections: dict[str, BrokerConnection] = {}  #: by address
        self._polls: dict[str, _Poll] = {}  #: by address; removed when the response is examined
        self._failures = 0  #: the number of failures in a row

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Cancel all polls and close their connections."""
        for address in list(self._connections):
            self._hang_up(address)

    def _hang_up(self, address: str) -> None:
        self._connections.pop(address).close()
        self._polls.pop(address, None)

    def wait(self, positions: Positions, max_wait_ms: int) -> bool:
        """Return True if there is data at or after any of ``positions``, or False after ``max_wait_ms``.

        With read_committed, only data below the last stable offset counts. Raises no errors: partitions that
        cannot be polled count as having no data. A wait in which a broker does not respond at once to a new
        connection or a metadata request may take longer.
        """
        deadline_s = time.monotonic() + max_wait_ms / 1000
        refused: set[TopicPartition] = set()
        while True:
            limit_s = max(deadline_s, time.monotonic() + _LEAST_S)
            watched = {tp: at for tp, at in positions.items() if tp not in refused}
            is_complete = self._ask(watched, limit_s)
            until_s = deadline_s
            if not is_complete:
                pause_s = _BACKOFF.delay_ms(self._failures + 1, 0.5) / 1000
                until_s = min(deadline_s, time.monotonic() + pause_s)
            for address in self._select(until_s):
                response = self._polls.pop(address).reply
                if response.error is None and self._has_data(response, watched):
                    return True
                is_complete = self._may_poll_again(response, watched, refused) and is_complete
            if time.monotonic() >= deadline_s:
                return False
            if is_complete:
                self._failures = 0
                continue
            self._failures += 1
            with contextlib.suppress(KafkaliteError):
                self._brokers.refresh({tp.topic for tp in positions}, limit_s)

    def _ask(self, watched: Positions, limit_s: float) -> bool:
        """Cancel the polls that are of no use for ``watched``. Send a new poll to each leader without one.

        Returns False if a partition of ``watched`` could not be polled.
        """
        by_address, is_complete = self._by_leader(watched, limit_s)
        for address, connection in list(self._connections.items()):
            wanted, poll = by_address.get(address), self._polls.get(address)
            if poll is None:
                is_of_use = wanted is not None and connection.is_open and not connection.is_stale
            else:
                is_of_use = wanted is not None and poll.covers(wanted)
            if not is_of_use:
                self._hang_up(address)
        for address, wanted in by_address.items():
            if address not in self._polls:
                try:
                    self._send(address, wanted, limit_s)
                except KafkaliteError:
                    is_complete = False
        return is_complete

    def _by_leader(self, watched: Positions, limit_s: float) -> tuple[dict[str, Positions], bool]:
        """Return {address of a leader: positions of its partitions}, and whether every leader was found."""
        found: dict[str, Positions] = {}
        is_complete = True
        for tp, at in watched.items():
            try:
                address, _ = self._brokers.leader(tp, limit_s)
            except KafkaliteError:
                is_complete = False
            else:
                found.setdefault(address, {})[tp] = at
        return found, is_complete

    def _send(self, address: str, wanted: Positions, limit_s: float) -> None:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = self._brokers.dial(address, limit_s)
        partitions = [
            FetchPartition(tp.topic, tp.partition, self._brokers.leader(tp, limit_s)[1], at, WATCH_BYTES)
            for tp, at in wanted.items()
        ]
        request = FetchRequest(POLL_MS, 1, WATCH_BYTES, self._brokers.isolation_level, partitions)
        self._polls[address] = _Poll(connection, wanted, connection.send(request, limit_s))

    def _select(self, until_s: float) -> Collection[str]:
        """Wait until a poll has a response or an error. Return the addresses of such polls.

        Returns an empty list at ``until_s``.
        """
        with selectors.DefaultSelector() as selector:
            for address, poll in self._polls.items():
                if not poll.reply.is_done:
                    selector.register(poll.connection, selectors.EVENT_READ, address)
            while True:
                done = [address for address, poll in self._polls.items() if poll.reply.is_done]
                left_s = until_s - time.monotonic()
                if done or left_s <= 0:
                    return done
                for key, _ in selector.select(left_s):
                    poll = self._polls[key.data]
                    selector.unregister(poll.connection)  # a lost connection closes its socket
                    poll.connection.read_ready()
                    if not poll.reply.is_done:
                        selector.register(poll.connection, selectors.EVENT_READ, key.data)

    def _has_data(self, response: Reply, watched: Positions) -> bool:
        for one in response.message.partitions:
            at = watched.get(TopicPartition(one.topic, one.partition))
            if at is not None and self._end(one) > at:
                return True
        return False

    def _end(self, one: FetchedPartition) -> int:
        return one.last_stable_offset if self._brokers.options.is_read_committed else one.high_watermark

    def _may_poll_again(self, response: Reply, watched: Positions, refused: set[TopicPartition]) -> bool:
        """Return whether another poll may be sent at once: not after a lost connection or a retriable error.

        Adds partitions with a permanent error, or with an offset that is out of range, to ``refused``.
        """
        if response.error is not None:
            return False
        may_poll = True
        for one in response.message.partitions:
            if one.error_code:
                error = broker_error(one.error_code)
                if isinstance(error, OffsetOutOfRangeError) or not error.retriable:
                    refused.add(TopicPartition(one.topic, one.partition))
                else:
                    may_poll = False
        return may_poll
