"""Applies metadata to a subscription: determines the partitions to read and the invalid positions. Pure.

A position belongs to a topic id. A single response that omits the topic does not invalidate the position,
because a broker that lags behind or is partitioned does not know all topics. A topic that has been found

- keeps its partitions until all responses have omitted it for ``FORGET_AFTER_MS``; responses of brokers
  that know no controller do not count, because they may be out of date;
- keeps its partitions when it reappears with the same id, even if the response lists fewer partitions;
- loses its positions when it appears with another id, because it was deleted and created again. It is then
  read from its start, unless auto.offset.reset is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kafkalite.client.arguments import checked_name, flat, split_addresses
from kafkalite.client.cluster.routing import MetadataCache
from kafkalite.errors import ClientError
from kafkalite.model import TopicPartition

# Brokers that are connected to a controller lag behind by seconds, not minutes.
FORGET_AFTER_MS: Final = 60_000


def topic_names(topics: Iterable[str | Iterable[str]], *, client: str = "Consumer") -> list[str]:
    """Return the names of ``topics``, which are names or collections of names.

    Raises ClientError for a name that is not a str. Also raises it for an address, as in ``Consumer("orders",
    servers)``, and for a dict of settings; then the hint shows the right call of ``client``.
    """
    settings = next((each for each in topics if isinstance(each, Mapping)), None)
    if settings is not None:
        raise ClientError(
            f"a dict of {len(settings)} settings is not a topic",
            hint=f'the settings are a keyword argument: {client}("orders", config={{...}})',
        )
    found, addresses = split_addresses([checked_name("topic", name) for name in flat(topics)])
    if addresses:
        arguments = ", ".join(f'"{name}"' for name in found) or '"orders"'
        call = f'{client}({arguments}, bootstrap_servers="{",".join(addresses)}")'
        raise ClientError(
            f"{addresses[0]!r} is an address, not a topic", hint=f"the servers are a keyword argument: {call}"
        )
    return found


class Selection(NamedTuple):
    """The partitions to read, and the invalid positions, according to the latest metadata."""

    partitions: dict[TopicPartition, str]  #: partitions to read, and the reset policy of each new one
    replaced: dict[TopicPartition, str]  #: partitions of topics created again; their positions are invalid
    is_missing_some: bool  #: whether a topic is kept although the metadata omits it


@dataclass(slots=True)
class _Found:
    """A subscribed topic that has appeared in the metadata."""

    topic_id: str
    partition_count: int = 0
    missing_since_ms: int | None = None  #: when a response first omitted the topic; None if it is there


class Subscription:
    """Selects the partitions of ``topics`` or, with ``pattern``, of all topics whose whole name matches.

    A pattern matches no internal topics. ``auto_offset_reset`` is the reset policy of the partitions, but new
    partitions have "earliest" in place of "latest".
    """

    def __init__(
        self, topics: Iterable[str], pattern: str | re.Pattern[str] | None, auto_offset_reset: str
    ) -> None:
        self.topics = list(dict.fromkeys(topics))
        self.pattern = re.compile(pattern) if pattern is not None else None
        self.is_late = False  #: whether partitions found later are new and read from the beginning
        self._reset = auto_offset_reset
        self._found: dict[str, _Found] = {}
        self._response_count = 0

    def select(self, metadata: MetadataCache, now_ms: int) -> Selection:
        """Return the partitions to read. Changes are reported by the first call that sees them.

        A repeated call for the same metadata does not count as another response.
        """
        is_new_response = metadata.response_count != self._response_count
        self._response_count = metadata.response_count
        selection = Selection({}, {}, False)
        reset_of_new = "earliest" if self._reset == "latest" else self._reset
        for name in self._names(metadata):
            topic = metadata.topics.get(name)
            before = found = self._found.get(name)
            if topic is None or not topic.leaders:
                if found is None or (is_new_response and self._is_gone(found, now_ms)):
                    self._found.pop(name, None)
                    continue
                selection = selection._replace(is_missing_some=True)
            else:
                if found is None or found.topic_id != topic.topic_id:
                    found = self._found[name] = _Found(topic.topic_id)
                found.partition_count = max(found.partition_count, topic.partition_count)
                found.missing_since_ms = None
            is_new = self.is_late or before is not None
            reset = reset_of_new if is_new else self._reset
            partitions = {TopicPartition(name, number): reset for number in range(found.partition_count)}
            selection.partitions.update(partitions)
            if before is not None and before is not found:
                selection.replaced.update(partitions)
        return selection

    def _names(self, metadata: MetadataCache) -> list[str]:
        if self.pattern is None:
            return self.topics
        translate = (
            name
            for name, topic in metadata.topics.items()
            if not topic.is_internal and self.pattern.fullmatch(name)
        )
        return sorted({*translate, *self._found})

    def _is_gone(self, found: _Found, now_ms: int) -> bool:
        """Record a response without this topic. Return whether it has been missing for FORGET_AFTER_MS."""
        if found.missing_since_ms is None:
            found.missing_since_ms = now_ms
        return now_ms - found.missing_since_ms >= FORGET_AFTER_MS
