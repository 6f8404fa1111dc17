"""Waiting until a partition has something beyond a position: long polls with Fetch, one to each leader.

They go on connections of their own, since the answers of one connection come in order and an outstanding
poll would hold up whatever is asked behind it. A poll that is not answered when the wait is over stays for
the next wait: a quiet topic costs one request per leader every POLL_MS.
"""

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
from sparkbridge.brokers.connection import Reply, WireConnection
from sparkbridge.offsets import Positions

# How long a broker may hold a poll, over any number of waits.
POLL_MS: Final = 5_000

# A partition of which no bytes are wanted is watched: told of, and never sent.
WATCH_BYTES: Final = 0

# A leader that is away is looked for with these pauses; the others' news come meanwhile.
_BACKOFF: Final = Backoff(10, 100)

# A wait of a few milliseconds is no reason to give up a connection that is just being made.
_LEAST_S: Final = 1.0


class _Poll(NamedTuple):
    """What one leader was asked."""

    connection: WireConnection
    positions: Positions
    reply: Reply

    def covers(self, wanted: Mapping[TopicPartition, int]) -> bool:
        """Whether its answer comes no later than that to a poll for ``wanted`` would."""
        return all(self.positions.get(tp, at + 1) <= at for tp, at in wanted.items())


class NewsWatch:
    """For one user at a time. Invariant: whom one of ``_polls`` asked has one of ``_connections``."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._connections: dict[str, WireConnection] = {}  #: by address
        self._polls: dict[str, _Poll] = {}  #: by address: not answered, or not judged yet
        self._failures = 0  #: in a row

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Give up all polls."""
        for address in list(self._connections):
            self._hang_up(address)

    def _hang_up(self, address: str) -> None:
        self._connections.pop(address).close()
        self._polls.pop(address, None)

    def wait(self, positions: Positions, max_wait_ms: int) -> bool:
        """Whether within ``max_wait_ms`` some partition has something beyond its position.

        For read_committed that is a higher last stable offset. Brokers that are away only make the wait
        long, and partitions that do not exist have no news: what is asked next will say so.
        """
        deadline_s = time.monotonic() + max_wait_ms / 1000
        mute: set[TopicPartition] = set()
        while True:
            limit_s = max(deadline_s, time.monotonic() + _LEAST_S)
            watched = {tp: at for tp, at in positions.items() if tp not in mute}
            is_sound = self._ask(watched, limit_s)
            until_s = deadline_s
            if not is_sound:
                pause_s = _BACKOFF.delay_ms(self._failures + 1, 0.5) / 1000
                until_s = min(deadline_s, time.monotonic() + pause_s)
            for address in self._select(until_s):
                answer = self._polls.pop(address).reply
                if answer.error is None and self._has_news(answer, watched):
                    return True
                is_sound = self._is_fine(answer, watched, mute) and is_sound
            if time.monotonic() >= deadline_s:
                return False
            if is_sound:
                self._failures = 0
                continue
            self._failures += 1
            with contextlib.suppress(KafkaliteError):
                self._brokers.refresh({tp.topic for tp in positions}, limit_s)

    # --- asking --------------------------------------------------------------------------------

    def _ask(self, watched: Positions, limit_s: float) -> bool:
        """Have a poll at each leader, and at nobody else. False when a partition could not be asked for."""
        by_address, is_sound = self._by_leader(watched, limit_s)
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
                    is_sound = False
        return is_sound

    def _by_leader(self, watched: Positions, limit_s: float) -> tuple[dict[str, Positions], bool]:
        """The partitions by the address of their leader, and whether each has one."""
        found: dict[str, Positions] = {}
        is_sound = True
        for tp, at in watched.items():
            try:
                address, _ = self._brokers.leader(tp, limit_s)
            except KafkaliteError:
                is_sound = False
            else:
                found.setdefault(address, {})[tp] = at
        return found, is_sound

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

    # --- answers -------------------------------------------------------------------------------

    def _select(self, until_s: float) -> Collection[str]:
        """The leaders whose answer is there, or whose connection is lost; [] when none is by ``until_s``."""
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
                    selector.unregister(poll.connection)  # one that is lost closes its socket
                    poll.connection.read_ready()
                    if not poll.reply.is_done:
                        selector.register(poll.connection, selectors.EVENT_READ, key.data)

    def _has_news(self, answer: Reply, watched: Positions) -> bool:
        for one in answer.message.partitions:
            at = watched.get(TopicPartition(one.topic, one.partition))
            if at is not None and self._end(one) > at:
                return True
        return False

    def _end(self, one: FetchedPartition) -> int:
        return one.last_stable_offset if self._brokers.options.is_read_committed else one.high_watermark

    def _is_fine(self, answer: Reply, watched: Positions, mute: set[TopicPartition]) -> bool:
        """Whether the same leader may be asked again at once. Partitions it will never tell of go mute."""
        if answer.error is not None:
            return False
        is_fine = True
        for one in answer.message.partitions:
            if one.error_code:
                error = broker_error(one.error_code)
                if isinstance(error, OffsetOutOfRangeError) or not error.retriable:
                    mute.add(TopicPartition(one.topic, one.partition))
                else:
                    is_fine = False
        return is_fine
