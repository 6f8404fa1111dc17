"""The offsets of a stream as Python values and as the JSON in Spark's offset log. Pure.

The JSON is that of Spark's Kafka connector, ``{"topic": {"0": 23}}``, with additional keys that begin with
``@``, which no topic name contains. ``@ids`` holds the topic ids. ``@from`` holds the starts of partitions
that the start offset of the batch lacks, for example new ones. ``@initial`` marks the result of
``initialOffset``. So Spark can replay a batch from its start and end offsets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kafkalite.model import TopicPartition, topic_name_problem
from sparkbridge.errors import SparkBridgeError

Positions = dict[TopicPartition, int]
"""The next offset to read, by partition."""

IDS: Final = "@ids"
FROM: Final = "@from"
INITIAL: Final = "@initial"

_MAX_OFFSET: Final = 2**63 - 1
_MAX_PARTITION: Final = 2**31 - 1


class OffsetFormatError(SparkBridgeError):
    """A JSON document is not an offset that this version of the source can read."""


class OffsetRange(NamedTuple):
    """The offsets that one task reads: ``start`` inclusive, ``end`` exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str = ""

    @property
    def size(self) -> int:
        return self.end - self.start


class TopicSnapshot(NamedTuple):
    """The log starts (inclusive) and ends (exclusive) of a topic's partitions at one time.

    The index is the partition number. The start and the end of a partition that was not requested are -1.
    """

    topic_id: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]


Snapshot = Mapping[str, TopicSnapshot]
"""Topic snapshots by name. Topics that do not exist are absent."""


class Loss(NamedTuple):
    """Offsets ``from_`` (inclusive) to ``to`` (exclusive) that cannot be read, usually because of a deletion.

    If ``from_`` and ``to`` are equal, an unknown number of records from that offset on was lost.
    """

    topic: str
    partition: int
    from_: int
    to: int
    why: str

    def __str__(self) -> str:
        gone = (
            f"offsets {self.from_} to {self.to}" if self.to > self.from_ else f"from offset {self.from_} on"
        )
        return f"{self.topic}-{self.partition} {gone}: {self.why}"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The start offset of a query (``is_initial``), or the end of a batch, where the next batch starts.

    ``ids`` maps topics to topic ids. In an end offset, ``from_`` has the starts of partitions that the start
    offset of the same batch lacks or, in the first batch of a query, of all partitions.
    """

    positions: Positions
    ids: dict[str, str] = field(default_factory=dict)
    from_: Positions = field(default_factory=dict)
    is_initial: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object. Equal offsets give equal text, because Spark compares the text."""
        document: dict[str, Any] = positions_to_json(self.positions)
        if self.ids:
            document[IDS] = dict(sorted(self.ids.items()))
        if self.from_:
            document[FROM] = positions_to_json(self.from_)
        if self.is_initial:
            document[INITIAL] = True
        return document

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> StreamOffset:
        """Parse an offset. Raises OffsetFormatError, also for an unknown key that begins with ``@``."""
        if not isinstance(document, Mapping):
            raise _refused(document, "an object of topics")
        topics = {name: value for name, value in document.items() if not name.startswith("@")}
        unknown = sorted(
            name for name in document if name.startswith("@") and name not in {IDS, FROM, INITIAL}
        )
        if unknown:
            raise OffsetFormatError(
                f"the offset {_excerpt(document)} has the key {unknown[0]}, which this version does not know",
                hint="the checkpoint was written by a newer version: use that one, or another checkpoint",
            )
        is_initial = document.get(INITIAL, False)
        if not isinstance(is_initial, bool):
            raise _refused(document, f"true or false as {INITIAL}")
        ids = document.get(IDS, {})
        if not isinstance(ids, Mapping) or not all(isinstance(id_, str) for id_ in ids.values()):
            raise _refused(document, f"an object of strings as {IDS}")
        return cls(
            positions=positions_from_json(topics, document),
            ids=dict(ids),
            from_=positions_from_json(document.get(FROM, {}), document),
            is_initial=is_initial,
        )


def positions_to_json(positions: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Return ``{"t": {"0": 23}}``, with topics sorted by name and partitions by number."""
    document: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(positions.items()):
        document.setdefault(topic, {})[str(partition)] = offset
    return document


def positions_from_json(document: Any, whole: Any = None) -> Positions:
    """Parse the result of ``positions_to_json``.

    Raises OffsetFormatError, also for an offset below 0, with an excerpt of ``whole``. ``whole`` is the JSON
    that contains ``document`` (None: ``document`` itself).
    """
    whole = document if whole is None else whole
    if not isinstance(document, Mapping):
        raise _refused(whole, "an object of topics")
    positions: Positions = {}
    for topic, partitions in document.items():
        problem = topic_name_problem(topic)
        if problem is not None:
            raise _refused(whole, f"topics: {problem}")
        if not isinstance(partitions, Mapping):
            raise _refused(whole, f"an object of partitions for topic {topic}")
        for partition, offset in partitions.items():
            number = partition_number(partition)
            if number is None:
                raise _refused(whole, f"partitions of topic {topic} as numbers, not {partition!r}")
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= _MAX_OFFSET:
                raise _refused(whole, f"an offset, 0 or more, for {topic}-{partition}, not {offset!r}")
            positions[TopicPartition(topic, number)] = offset
    return positions


def partition_number(text: Any) -> int | None:
    """Return the number, such as 7 for ``"7"``. None if the text is not a partition number."""
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 10:
        return None
    number = int(text)
    return number if number <= _MAX_PARTITION and text == str(number) else None


def _refused(document: Any, wanted: str) -> OffsetFormatError:
    return OffsetFormatError(
        f"the offset {_excerpt(document)} can't be used: it must have {wanted}",
        hint='the form is {"topic":{"0":23}}; is the checkpoint one of another source?',
    )


def _excerpt(document: Any) -> str:
    try:
        text = json.dumps(document)
    except (TypeError, ValueError):
        text = repr(document)
    return text if len(text) <= 200 else text[:197] + "..."
