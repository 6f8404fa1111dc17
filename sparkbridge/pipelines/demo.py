"""Demo input of a pipeline: records from the ``load`` function of its file, sent to its topics.

``load(demo)`` generates DemoRecords or equivalent tuples. It must generate the same records each time,
because checks may call it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import frames
from sparkbridge.pipelines.files import PipelineFile

if TYPE_CHECKING:
    from kafkalite.client.blocking.producer import Producer

_RECORDS_PER_SEND: Final = 2_000


class DemoRecord(NamedTuple):
    """A record of the demo. If ``timestamp_ms`` is None, the producer sets the time of sending."""

    topic: str
    key: bytes | None
    value: bytes | None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class DemoInput:
    """The argument of ``load``: the directory of the pipeline's file, and ``[demo.settings]``."""

    directory: Path
    settings: Mapping[str, str]

    def path(self, name: str) -> Path | None:
        """Return the file whose path is the setting ``name``, or None if setting or file does not exist."""
        text = self.settings.get(name, "")
        path = (self.directory / Path(text).expanduser()).resolve()
        return path if text and path.is_file() else None


def records(file: PipelineFile) -> Iterator[DemoRecord]:
    """Return an iterator over the records of the demo input. Raises PipelineError without a [demo]."""
    if file.pipeline is None or file.pipeline.demo is None:
        raise PipelineError(f"{file.path} has no [demo]", hint='[demo] load = "load.py:load" makes its input')
    demo = file.pipeline.demo
    made = frames.function(file, demo.load)(DemoInput(file.directory, demo.settings))
    return starmap(DemoRecord, made)


def fill(file: PipelineFile, settings: Mapping[str, str]) -> dict[str, int]:
    """Create the demo's topics and the sinks' topics. Send the demo's records, with a client of ``settings``.

    Returns the number of records sent to each topic. If one of the topics exists, creates none and raises
    TopicAlreadyExistsError.
    """
    from kafkalite.client.blocking.producer import Producer

    made = records(file)
    assert file.pipeline is not None and file.pipeline.demo is not None
    outputs = {sink.topic: 1 for sink in file.pipeline.sinks if sink.topic}
    _make_topics({**outputs, **file.pipeline.demo.topics}, settings)
    counts: dict[str, int] = {}
    with Producer(config={**settings, "linger.ms": 0}) as producer:
        while part := list(islice(made, _RECORDS_PER_SEND)):
            for topic in dict.fromkeys(each.topic for each in part):
                _send(producer, topic, [each for each in part if each.topic == topic])
            for each in part:
                counts[each.topic] = counts.get(each.topic, 0) + 1
    return counts


def _make_topics(topics: Mapping[str, int], settings: Mapping[str, str]) -> None:
    from kafkalite.client.blocking.admin import Admin
    from kafkalite.errors import TopicAlreadyExistsError

    with Admin(config=settings) as admin:
        there = [topic.name for topic in admin.list_topics() if topic.name in topics]
        if there:  # checked first, so that a failed attempt leaves no topics behind
            raise TopicAlreadyExistsError(
                f"{', '.join(there)} exist{'s' * (len(there) == 1)}; a demo creates its topics itself",
                hint=f"kl topic delete {' '.join(there)}, or leave -b out: then it starts"
                " a broker of its own",
            )
        for name, partition_count in topics.items():
            # Retention would delete records with old timestamps.
            admin.create_topic(name, partition_count, configs={"retention.ms": "-1"})


def _send(producer: Producer, topic: str, part: list[DemoRecord]) -> None:
    values, keys = [each.value for each in part], [each.key for each in part]
    times = [each.timestamp_ms for each in part if each.timestamp_ms is not None]
    if times and len(times) != len(part):
        raise PipelineError(f"{topic}: give all records of a demo a timestamp, or none")
    producer.send_many(topic, values, keys, timestamps_ms=times or None)
