"""A history of the values that transactional producers wrote and read_committed readers read.

Simulations and tests with real processes use it. A transaction is a set of values. Each value occurs once in
the whole history. The checker finds these anomalies:

==============  ==================================================================================
torn            some values of a transaction exist and others do not
aborted-read    a read_committed reader read a value of a transaction that was certainly aborted
undecided-read  a value was read before the commit of its transaction was requested
vanished        a value that a read_committed reader received at an offset is missing at the end
lost            a transaction whose commit was acknowledged is missing
duplicate       a value occurs twice
zombie          a fenced producer has nevertheless committed
==============  ==================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proof.histories.history import MAX_REPORTED, Anomaly

OPEN: Final = "open"  #: no commit was requested; at the end this is equivalent to aborted
UNKNOWN: Final = "unknown"  #: a commit was requested, and its response is unknown
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"

Place = tuple[str, int, int]
"""(topic, partition, offset)"""


@dataclass
class Written:
    """One transaction. ``outcome`` is the result that its producer received."""

    client: str
    name: str
    values: list[str] = field(default_factory=list)
    outcome: str = UNKNOWN
    is_zombie: bool = False  #: whether another producer was initialized with its transactional id before


@dataclass
class TransactionHistory:
    """All transactions, in the order in which they began.

    ``final`` has everything that a read_committed reader reads at the end, when no transaction is open.
    ``reads`` has the values that such readers read earlier. ``read_at`` also records the offset, if it is
    known.
    """

    transactions: list[Written] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    final: list[str] | None = None
    places: dict[Place, str] = field(default_factory=dict)  #: the values in ``reads`` with known offsets
    final_places: Mapping[Place, str] | None = None
    early: list[Anomaly] = field(default_factory=list)  #: anomalies found at the time of a read
    _writers: dict[str, Written] = field(default_factory=dict)

    def begin(self, client: str, name: str, outcome: str = UNKNOWN) -> Written:
        """Record a new transaction. Use OPEN if the producer will set UNKNOWN before it requests the
        commit.
        """
        transaction = Written(client, name, outcome=outcome)
        self.transactions.append(transaction)
        return transaction

    def write(self, transaction: Written, value: str) -> None:
        """Record that ``value`` will be sent next."""
        transaction.values.append(value)
        self._writers[value] = transaction

    def read(self, values: Iterable[str]) -> None:
        """Record that a read_committed reader received these values."""
        self.reads.update(values)

    def read_at(self, place: Place, value: str) -> None:
        """Record that a read_committed reader received ``value`` at ``place``."""
        self.reads.add(value)
        known = self.places.setdefault(place, value)
        if known != value:
            self.early.append(Anomaly("vanished", f"{known!r} was read at {place}, and later {value!r}"))
        transaction = self._writers.get(value)
        if transaction is not None and transaction.outcome == OPEN:
            what = f"{value!r} was read at {place}, and no commit was requested of transaction"
            self.early.append(Anomaly("undecided-read", f"{what} {transaction.name}"))

    def read_finally(self, values: Sequence[str]) -> None:
        self.final = list(values)

    def read_finally_at(self, values: Mapping[Place, str]) -> None:
        """Do the same as ``read_finally``, with the place of each value."""
        self.final_places = values
        self.final = list(values.values())

    @property
    def committed(self) -> int:
        return sum(each.outcome == COMMITTED for each in self.transactions)


def check_transactions(history: TransactionHistory) -> list[Anomaly]:
    """Return the anomalies, at most MAX_REPORTED of each kind."""
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
    """The inputs and outputs of an exactly-once job, which writes one output for each input record, in the
    order of the input by partition.
    """

    #: {(topic, partition): offsets of the input, ascending}
    inputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    #: The outputs of one output partition in order, each as (topic, partition, offset) of its input.
    outputs: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)


def check_transform(history: TransformHistory) -> list[Anomaly]:
    """Return the anomalies ``missing``, ``duplicate``, ``unexpected`` and ``order``; none if the output is
    exactly f(input).
    """
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
