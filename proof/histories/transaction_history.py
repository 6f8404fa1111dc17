"""What transactional producers did, and what read_committed readers saw; and whether the two agree.

A history for anybody: the simulator, tests of real processes. A transaction is a set of values, each
occurring once in the whole history. What the checker finds:

torn            some of a transaction's values are there and some are not
aborted-read    a value of a transaction that was aborted, for certain, was read with read_committed
undecided-read  one was read before anybody had asked to commit its transaction
vanished        what a read_committed reader was given at some offset is not there at the end
lost            a transaction that was acknowledged as committed is not there
duplicate       a value stands twice
zombie          a producer that was shut out has committed all the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proof.histories.history import MAX_REPORTED, Anomaly

OPEN: Final = "open"  #: nobody has asked to commit it; at the end that is as good as aborted
UNKNOWN: Final = "unknown"  #: somebody has asked, and was not told
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"

Place = tuple[str, int, int]
"""Topic, partition, offset."""


@dataclass
class Written:
    """One transaction. ``outcome`` is what its producer knows of it."""

    client: str
    name: str
    values: list[str] = field(default_factory=list)
    outcome: str = UNKNOWN
    is_zombie: bool = False  #: another producer of its transactional id had been told that it is in charge


@dataclass
class TransactionHistory:
    """What happened, in the order of its beginnings.

    ``final`` is all that a read_committed reader sees at the end, when nothing is open any more; ``reads``
    what any such reader saw meanwhile. Who knows at which offset, tells that too (``read_at``).
    """

    transactions: list[Written] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    final: list[str] | None = None
    places: dict[Place, str] = field(default_factory=dict)  #: of ``reads``, as far as they were told
    final_places: Mapping[Place, str] | None = None
    early: list[Anomaly] = field(default_factory=list)  #: what was wrong when it was read
    _writers: dict[str, Written] = field(default_factory=dict)

    def begin(self, client: str, name: str, outcome: str = UNKNOWN) -> Written:
        """OPEN is for who will set UNKNOWN before he asks to commit."""
        transaction = Written(client, name, outcome=outcome)
        self.transactions.append(transaction)
        return transaction

    def write(self, transaction: Written, value: str) -> None:
        """It is about to be sent."""
        transaction.values.append(value)
        self._writers[value] = transaction

    def read(self, values: Iterable[str]) -> None:
        """Somebody was given these with read_committed."""
        self.reads.update(values)

    def read_at(self, place: Place, value: str) -> None:
        """Somebody was given this with read_committed, there."""
        self.reads.add(value)
        known = self.places.setdefault(place, value)
        if known != value:
            self.early.append(Anomaly("vanished", f"{known!r} was read at {place}, and later {value!r}"))
        transaction = self._writers.get(value)
        if transaction is not None and transaction.outcome == OPEN:
            what = f"{value!r} was read at {place}, and nobody has asked to commit transaction"
            self.early.append(Anomaly("undecided-read", f"{what} {transaction.name}"))

    def read_finally(self, values: Sequence[str]) -> None:
        self.final = list(values)

    def read_finally_at(self, values: Mapping[Place, str]) -> None:
        """``read_finally``, with the places."""
        self.final_places = values
        self.final = list(values.values())

    @property
    def committed(self) -> int:
        return sum(each.outcome == COMMITTED for each in self.transactions)


def check_transactions(history: TransactionHistory) -> list[Anomaly]:
    """Every anomaly, at most MAX_REPORTED of a kind; empty when all is well."""
    told: Counter[str] = Counter()
    anomalies: list[Anomaly] = []
    for anomaly in _all(history):
        told[anomaly.kind] += 1
        if told[anomaly.kind] <= MAX_REPORTED:
            anomalies.append(anomaly)
    return anomalies


def _all(history: TransactionHistory) -> Iterator[Anomaly]:
    yield from history.early
    final = Counter(history.final or ())
    for value, count in final.items():
        if count > 1:
            yield Anomaly("duplicate", f"{value!r} stands {count} times")
    for each in history.transactions:
        seen = [value for value in each.values if value in history.reads or value in final]
        name = f"transaction {each.name} of {each.client}"
        if each.outcome in (ABORTED, OPEN) and seen:
            yield Anomaly("aborted-read", f"{name} was aborted, and {seen[0]!r} was read")
        if each.is_zombie and each.outcome == COMMITTED:
            yield Anomaly("zombie", f"{name} was committed after its producer had been replaced")
        if history.final is None:
            continue
        there = sum(value in final for value in each.values)
        if 0 < there < len(each.values):
            missing = next(value for value in each.values if value not in final)
            yield Anomaly("torn", f"{name}: {there} of {len(each.values)} are there, {missing!r} is not")
        if each.outcome == COMMITTED and there < len(each.values):
            yield Anomaly("lost", f"{name} was committed, and {there} of {len(each.values)} are there")
        if seen and not there:
            yield Anomaly("lost", f"{name}: {seen[0]!r} was read, and is not there at the end")
    if history.final_places is not None:
        for place, value in history.places.items():
            found = history.final_places.get(place)
            if found != value:
                yield Anomaly("vanished", f"{value!r} was read at {place}, and at the end there is {found!r}")


@dataclass
class TransformHistory:
    """What an exactly-once job made: for each input record one output, in the input's order by partition."""

    #: {(topic, partition): offsets of the input, ascending}
    inputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    #: all outputs of one output partition, in order: (topic, partition, offset) of the input of each
    outputs: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)


def check_transform(history: TransformHistory) -> list[Anomaly]:
    """Anomalies: ``missing``, ``duplicate``, ``unexpected``, ``order``; empty when output = f(input)."""
    anomalies: list[Anomaly] = []
    made: Counter[tuple[str, int, int]] = Counter()
    for partition, outputs in history.outputs.items():
        last: dict[tuple[str, int], int] = {}
        for topic, number, offset in outputs:
            made[topic, number, offset] += 1
            before = last.get((topic, number), -1)
            if offset < before:
                anomalies.append(
                    Anomaly(
                        "order",
                        f"output {partition}: that of {topic}-{number}@{offset} comes after that of {before}",
                    )
                )
            last[topic, number] = offset
    wanted = {(*key, offset): None for key, offsets in history.inputs.items() for offset in offsets}
    for source in wanted:
        if made[source] != 1:
            kind = "missing" if not made[source] else "duplicate"
            topic, number, offset = source
            anomalies.append(Anomaly(kind, f"{topic}-{number}@{offset} came out {made[source]} times"))
    for source in made:
        if source not in wanted:
            anomalies.append(Anomaly("unexpected", f"the output of {source} has no input"))
    return anomalies[: 4 * MAX_REPORTED]
