"""A history of the records that clients wrote and read, and its checker, in the style of Jepsen.

Producers write values that occur once in a run. Each send ends ``ok`` (acknowledged), ``fail`` (certainly not
written) or ``info`` (unknown: it may have been written, or still be written). Consumers record the records
that they read. At the end every partition is read from its beginning. ``check`` then reports these anomalies:

===================  ===================================================================================
lost-write           an acknowledged record is missing although later ones were read
unseen               an acknowledged record is missing, and no later record was read
inconsistent-offset  two values have one offset, or an acknowledgement has another offset
duplicate            one value has two offsets
unexpected           a value was never sent, or its send certainly failed
vanished             a consumer read a record that is missing at the end
nonmonotonic-poll    a consumer read an offset again, or an earlier offset
poll-skip            a consumer skipped a record between two that it read
nonmonotonic-send    records of one producer and partition are in another order than they were sent
===================  ===================================================================================

Simulations and tests with real processes use the same checker. Histories are exchanged as JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Final, Literal, NamedTuple

from kafkalite.model import Acks, TopicPartition

Outcome = Literal["ok", "fail", "info"]

MAX_REPORTED: Final = 20  #: reported anomalies of each kind; further ones are counted


@dataclass(slots=True)
class Send:
    """One record that was sent. Its outcome is ``info`` until the send ends."""

    client: str  #: identifies a producer object, within which order and idempotence are guaranteed
    topic: str
    partition: int
    value: str
    number: int  #: in the order of the client's sends
    began_ms: int
    acks: int = int(Acks.ALL)
    is_idempotent: bool = True
    outcome: Outcome = "info"
    ended_ms: int | None = None
    offset: int | None = None
    error: str = ""

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(slots=True)
class Poll:
    """The records of one partition that a consumer received together."""

    session: str  #: identifies a consumer between two seeks; within it offsets only increase
    topic: str
    partition: int
    at_ms: int
    records: list[tuple[int, str]] = field(default_factory=list)  #: (offset, value)

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Anomaly(NamedTuple):
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class History:
    """All actions and reads of clients, in the order in which they began."""

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.polls: list[Poll] = []
        self.finals: dict[TopicPartition, list[tuple[int, str]]] = {}
        #: The first offset of each partition at the final read. Lower records may have been deleted by then.
        self.starts: dict[TopicPartition, int] = {}

    def __repr__(self) -> str:
        return (
            f"<History {len(self.sends)} sends, {len(self.polls)} polls, {len(self.finals)} partitions read>"
        )

    def send(self, send: Send) -> Send:
        """Record that ``send`` has begun. Call ``ok``, ``fail`` or ``info`` when it ends."""
        self.sends.append(send)
        return send

    @staticmethod
    def ok(send: Send, offset: int | None, now_ms: int) -> None:
        send.outcome, send.offset, send.ended_ms = "ok", offset, now_ms

    @staticmethod
    def fail(send: Send, error: str, now_ms: int) -> None:
        """Record that the send was certainly not written and never will be."""
        send.outcome, send.error, send.ended_ms = "fail", error, now_ms

    @staticmethod
    def info(send: Send, error: str, now_ms: int) -> None:
        """Record that the send may have been written, or may still be written."""
        send.outcome, send.error, send.ended_ms = "info", error, now_ms

    def poll(self, poll: Poll) -> None:
        self.polls.append(poll)

    def read_finally(
        self, key: TopicPartition, records: Iterable[tuple[int, str]], *, start: int = 0
    ) -> None:
        """Record all records of a partition at the end of the run, from its log start on."""
        self.finals[key] = list(records)
        self.starts[key] = start

    @property
    def acknowledged(self) -> int:
        return sum(send.outcome == "ok" for send in self.sends)

    # --- JSON lines

    def dump(self, file: IO[str]) -> None:
        for send in self.sends:
            file.write(json.dumps({"send": asdict(send)}) + "\n")
        for poll in self.polls:
            file.write(json.dumps({"poll": asdict(poll)}) + "\n")
        for (topic, partition), records in self.finals.items():
            start = self.starts.get(TopicPartition(topic, partition), 0)
            final = {"topic": topic, "partition": partition, "records": records, "start": start}
            file.write(json.dumps({"final": final}) + "\n")

    @classmethod
    def load(cls, lines: Iterable[str]) -> History:
        """Load one or more dumps, in any order."""
        history = cls()
        for line in lines:
            entry = json.loads(line)
            if "send" in entry:
                history.sends.append(Send(**entry["send"]))
            elif "poll" in entry:
                poll = Poll(**entry["poll"])
                poll.records = [(offset, value) for offset, value in poll.records]
                history.polls.append(poll)
            else:
                final = entry["final"]
                key = TopicPartition(final["topic"], final["partition"])
                records = [(offset, value) for offset, value in final["records"]]
                history.read_finally(key, records, start=final["start"])
        return history


def check(history: History) -> list[Anomaly]:
    """Return the anomalies of ``history``, at most MAX_REPORTED of each kind."""
    found: dict[str, int] = {}
    anomalies: list[Anomaly] = []
    for anomaly in _all(history):
        found[anomaly.kind] = found.get(anomaly.kind, 0) + 1
        if found[anomaly.kind] <= MAX_REPORTED:
            anomalies.append(anomaly)
    return anomalies


def _all(history: History) -> Iterator[Anomaly]:
    index = _Index(history)
    yield from index.problems
    yield from _writes(history, index)
    yield from _values(history, index)
    yield from _polls(history, index)
    yield from _order(history, index)


class _Index:
    """The values by offset, collected from all reports of clients."""

    def __init__(self, history: History) -> None:
        self.problems: list[Anomaly] = []
        self.sends: dict[str, Send] = {}
        for send in history.sends:
            assert send.value not in self.sends, f"{send.value!r} was sent twice: the workload is broken"
            self.sends[send.value] = send
        self.final: dict[TopicPartition, dict[int, str]] = {}
        #: The highest offset of each partition that was read.
        self.highest: dict[TopicPartition, int] = {}
        self.seen: dict[TopicPartition, dict[int, str]] = {}
        self.read_values: dict[TopicPartition, set[str]] = {}
        for key, records in history.finals.items():
            self.final[key] = {}
            previous = -1
            for offset, value in records:
                if offset <= previous:
                    self._tell("nonmonotonic-poll", f"{key}: the final read gave {offset} after {previous}")
                previous = offset
                self.final[key][offset] = value
                self._see(key, offset, value, "the final read")
        for poll in history.polls:
            for offset, value in poll.records:
                self._see(poll.key, offset, value, poll.session)

    def _tell(self, kind: str, message: str) -> None:
        self.problems.append(Anomaly(kind, message))

    def _see(self, key: TopicPartition, offset: int, value: str, who: str) -> None:
        self.highest[key] = max(self.highest.get(key, -1), offset)
        self.read_values.setdefault(key, set()).add(value)
        before = self.seen.setdefault(key, {}).setdefault(offset, value)
        if before != value:
            self._tell(
                "inconsistent-offset", f"{key}@{offset} was {before!r}, and {value!r} as {who} read it"
            )


def _writes(history: History, index: _Index) -> Iterator[Anomaly]:
    """Check that acknowledged records exist, at their acknowledged offsets."""
    for send in history.sends:
        key = send.key
        if send.outcome != "ok" or send.acks != Acks.ALL:
            continue
        final = index.final.get(key)
        if final is None or (send.offset is not None and send.offset < history.starts.get(key, 0)):
            continue
        where = f"{key}{'' if send.offset is None else f'@{send.offset}'}"
        told = f"{send.value!r} by {send.client}, acknowledged at {send.ended_ms} ms as {where}"
        if send.offset is not None and final.get(send.offset) == send.value:
            continue
        if send.value in final.values():
            at = next(offset for offset, value in final.items() if value == send.value)
            if send.offset is not None:
                yield Anomaly("inconsistent-offset", f"{told}, is at {at}")
        elif send.offset is not None and send.offset > index.highest.get(key, -1):
            yield Anomaly("unseen", told)
        else:
            instead = final.get(send.offset) if send.offset is not None else None
            yield Anomaly("lost-write", f"{told}; that offset has {instead!r}")


def _values(history: History, index: _Index) -> Iterator[Anomaly]:
    """Check that every value that was read had been sent, occurs only once, and does not vanish."""
    for key, seen in index.seen.items():
        first: dict[str, int] = {}
        for offset in sorted(seen):
            value = seen[offset]
            send = index.sends.get(value)
            if send is None or send.key != key:
                yield Anomaly("unexpected", f"{key}@{offset} is {value!r}, which was never sent there")
                continue
            if send.outcome == "fail":
                yield Anomaly("unexpected", f"{key}@{offset} is {value!r}, whose send failed: {send.error}")
            if value in first and send.is_idempotent:
                yield Anomaly("duplicate", f"{key}: {value!r} stands at {first[value]} and at {offset}")
            first.setdefault(value, offset)
    for poll in history.polls:
        final = index.final.get(poll.key)
        start = history.starts.get(poll.key, 0)
        for offset, value in poll.records if final is not None else ():
            assert final is not None
            if offset >= start and final.get(offset) != value:
                yield Anomaly(
                    "vanished",
                    f"{poll.key}@{offset} was {value!r} to {poll.session} at {poll.at_ms} ms,"
                    f" and is {final.get(offset)!r} at the end",
                )


def _polls(history: History, index: _Index) -> Iterator[Anomaly]:
    """Check that each consumer reads forward without gaps."""
    last: dict[tuple[str, TopicPartition], int] = {}
    for poll in history.polls:
        where = (poll.session, poll.key)
        for offset, value in poll.records:
            before = last.get(where)
            if before is not None and offset <= before:
                yield Anomaly(
                    "nonmonotonic-poll",
                    f"{poll.session} was given {poll.key}@{offset} ({value!r}) after {before}",
                )
            elif before is not None and offset > before + 1:
                known = index.final.get(poll.key) or index.seen.get(poll.key, {})
                skipped = [each for each in range(before + 1, offset) if each in known]
                if skipped:
                    yield Anomaly(
                        "poll-skip",
                        f"{poll.session} was given {poll.key}@{offset} after {before} at {poll.at_ms} ms,"
                        f" without {len(skipped)} between, from {known[skipped[0]]!r} on",
                    )
            last[where] = offset


def _order(history: History, index: _Index) -> Iterator[Anomaly]:
    """Check that records of one idempotent producer are in the order in which they were sent."""
    for key, final in index.final.items():
        last: dict[str, tuple[int, int]] = {}
        for offset, value in final.items():
            send = index.sends.get(value)
            if send is None or not send.is_idempotent:
                continue
            before = last.get(send.client)
            if before is not None and send.number < before[0]:
                yield Anomaly(
                    "nonmonotonic-send",
                    f"{key}: number {send.number} of {send.client} at {offset} stands after its number"
                    f" {before[0]} at {before[1]}",
                )
            if before is None or send.number > before[0]:
                last[send.client] = (send.number, offset)
