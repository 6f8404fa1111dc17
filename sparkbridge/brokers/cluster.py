"""SparkCluster: what the driver and the tasks of a query ask of the brokers. Blocking.

``SparkCluster.shared`` keeps one per process and ClientOptions, for Spark's worker processes serve many
tasks. A process that was forked with open connections drops its copies of them and makes its own; the
parent's go on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalite.errors import broker_error
from kafkalite.model import TopicPartition
from sparkbridge.brokers import list_offsets as wire_offsets
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.brokers.fetch import Fetched as Fetched
from sparkbridge.brokers.fetch import FetchToken as FetchToken
from sparkbridge.brokers.fetch import receive_fetch, send_early
from sparkbridge.brokers.groups import GroupOffsets
from sparkbridge.brokers.long_poll import NewsWatch
from sparkbridge.brokers.offsets_for_bytes import ends_by_bytes
from sparkbridge.offsets import Positions, TopicSnapshot

if TYPE_CHECKING:
    from sparkbridge.options import ClientOptions


# A process rarely knows two ClientOptions: a query has one or two.
MAX_SHARED: Final = 16


class TopicInfo(NamedTuple):
    topic_id: str
    partition_count: int


class _Held(NamedTuple):
    """What one process has open."""

    pid: int
    lock: threading.RLock
    brokers: Brokers
    groups: GroupOffsets
    news: NewsWatch

    @classmethod
    def new(cls, options: ClientOptions) -> _Held:
        brokers = Brokers(options)
        return cls(os.getpid(), threading.RLock(), brokers, GroupOffsets(brokers), NewsWatch(brokers))

    def close(self) -> None:
        """Close this process's copies of the sockets; nothing is shut down for a parent that has them too."""
        self.news.close()
        self.brokers.close()


class SparkCluster:
    """Connections and metadata. Connects when it is first asked something; one call at a time.

    Each call retries what may pass until kafka.request.timeout.ms, then raises ConnectionFailedError or
    RequestTimeoutError, which say what was tried; an unknown topic or a refusal is raised at once.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self._held = _Held.new(options)

    def __repr__(self) -> str:
        return f"<SparkCluster {self._held.brokers!r}>"

    @classmethod
    def shared(cls, options: ClientOptions) -> SparkCluster:
        """The one of this process with these options; made if need be.

        Of those for more than MAX_SHARED different options, the one not asked for the longest is closed.
        """
        pid = os.getpid()
        for key in [key for key in _shared if key[0] != pid]:
            _shared.pop(key).close()  # the parent's: this process was forked
        found = _shared.pop((pid, options), None) or cls(options)
        _shared[pid, options] = found  # the last
        if len(_shared) > MAX_SHARED:
            _shared.pop(next(iter(_shared))).close()
        return found

    @property
    def connection_count(self) -> int:
        """Open connections, those of long polls included."""
        return self._held.brokers.connection_count + self._held.news.connection_count

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._held.close()

    @contextmanager
    def _mine(self) -> Iterator[_Held]:
        held = self._held
        if held.pid != os.getpid():
            self._held = _Held.new(self.options)
            held.close()
            held = self._held
        with held.lock:
            yield held

    # --- topics and offsets --------------------------------------------------------------------

    def topics(
        self, *, names: Sequence[str] | None = None, pattern: str | None = None
    ) -> dict[str, TopicInfo]:
        """The topics there are among ``names``, or those whose whole name ``pattern`` matches; else all.

        Asked of a broker each time. Internal topics are told only when they are named. Raises the
        BrokerError of a topic that can't be used.
        """
        with self._mine() as held:
            brokers = held.brokers
            brokers.until_answered("metadata", (), lambda deadline_s: brokers.refresh(names, deadline_s))
            for name in names or ():
                fatal = brokers.metadata.fatal_error(name)
                if fatal is not None:
                    raise broker_error(*fatal, about=f"topic {name!r}")
            known = brokers.metadata.topics
            if names is None:
                chosen = [name for name in sorted(known) if not known[name].is_internal]
            else:
                chosen = [name for name in dict.fromkeys(names) if name in known]
            if pattern is not None:
                matches = re.compile(pattern).fullmatch
                chosen = [name for name in chosen if matches(name)]
            return {name: TopicInfo(known[name].topic_id, known[name].partition_count) for name in chosen}

    def snapshot(self, topics: Mapping[str, Sequence[int] | None]) -> dict[str, TopicSnapshot]:
        """Starts and ends of all partitions (None) or of those named, now; without topics that don't exist.

        With read_committed the end is the last stable offset. Both are -1 of a partition not asked for.
        """
        with self._mine() as held:
            return wire_offsets.snapshot(held.brokers, topics)

    def high_watermarks(self, tps: Collection[TopicPartition]) -> Positions:
        """Where the logs end, whatever transactions are open there."""
        with self._mine() as held:
            return wire_offsets.high_watermarks(held.brokers, tps)

    def doubt(self) -> None:
        """Have the next look at topics told by another broker, if there is one: the last may lag behind."""
        with self._mine() as held:
            held.brokers.doubt()

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first record whose timestamp (milliseconds) is not less; None when there is no such record."""
        with self._mine() as held:
            return wire_offsets.offsets_for_times(held.brokers, times)

    def ends_by_bytes(
        self, starts: Positions, ends: Positions, max_bytes: int, first: TopicPartition | None = None
    ) -> Positions:
        """For each partition of ``ends`` how far ``max_bytes`` in all reach, shared in proportion to bytes.

        Never beyond ``ends``; at least one batch in all. ``first`` has its bytes before the others.
        """
        with self._mine() as held:
            return ends_by_bytes(held.brokers, starts, ends, max_bytes, first)

    def wait_for_news(self, positions: Positions, max_wait_ms: int) -> bool:
        """Whether some partition has something beyond its position, waiting up to ``max_wait_ms`` for it."""
        with self._mine() as held:
            return held.news.wait(positions, max_wait_ms)

    # --- groups --------------------------------------------------------------------------------

    def committed_offsets(self, group: str) -> Positions:
        """What ``group`` has committed, of all partitions."""
        with self._mine() as held:
            return held.groups.fetch(group)

    def commit_offsets(self, group: str, positions: Positions, metadata: str = "") -> None:
        """Commit for a group without members. Raises BrokerError when it has some."""
        with self._mine() as held:
            held.groups.commit(group, positions, metadata)

    # --- records -------------------------------------------------------------------------------

    def fetch(self, tp: TopicPartition, offset: int, *, max_bytes: int, max_wait_ms: int = 0) -> Fetched:
        """Whole batches from ``offset`` on: about ``max_bytes``, at least one batch if there is one.

        Waits up to ``max_wait_ms`` for a first one. Raises OffsetOutOfRangeError, which tells the offsets
        there are, and UnknownTopicOrPartitionError.
        """
        return self.receive_fetch(self.send_fetch(tp, offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms))

    def send_fetch(
        self, tp: TopicPartition, offset: int, *, max_bytes: int, max_wait_ms: int = 0
    ) -> FetchToken:
        """The first half of ``fetch``: ask, and let the answer come in while something else is done.

        Answers of one broker come in the order of requests, so what is asked of the same broker waits for
        ``max_wait_ms`` too. A token may be dropped.
        """
        token = FetchToken(TopicPartition(*tp), offset, max_bytes, max_wait_ms)
        with self._mine() as held:
            send_early(held.brokers, token)
        return token

    def receive_fetch(self, token: FetchToken) -> Fetched:
        """The second half: wait for the answer, asking again as long as what went wrong may pass."""
        with self._mine() as held:
            return receive_fetch(held.brokers, token)


_shared: dict[tuple[int, ClientOptions], SparkCluster] = {}  #: by (process id, options)


def close_all() -> None:
    """Close and forget what ``SparkCluster.shared`` gave out."""
    clusters = list(_shared.values())
    _shared.clear()
    for cluster in clusters:
        cluster.close()
