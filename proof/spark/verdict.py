"""Checks of a copy, as pure functions of the input, the plans and the output."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from proof.spark.copying import expected_value
from proof.spark.points import Planned

_COPY: Final = re.compile(rb"(\d+)/(\d+):")
_SHOWN: Final = 5


class Seen(NamedTuple):
    """A record as a reader received it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


def check_copy(inputs: Iterable[Seen], outputs: Sequence[Seen], *, at_least_once: bool = False) -> list[str]:
    """Return the lost records and, unless allowed, the duplicates in the output, as messages."""
    wanted: Counter[tuple[bytes | None, bytes | None]] = Counter(
        (each.key, expected_value(each.partition, each.offset, each.value or b"")) for each in inputs
    )
    got = Counter((each.key, each.value) for each in outputs)
    problems = _named("lost", (wanted - got).elements()) + _named("foreign", got.keys() - wanted.keys())
    if not at_least_once:
        problems += _named("doubled", [one for one, count in got.items() if one in wanted and count > 1])
    return problems


def duplicates(outputs: Iterable[Seen]) -> int:
    """Count the records beyond the first of each."""
    return sum(count - 1 for count in Counter((each.key, each.value) for each in outputs).values())


def check_replays(planned: Sequence[Planned], logged: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return problems of the batches in Spark's offset log: a batch that was planned in two ways, or a gap
    between two batches. ``logged`` is {batch id: the source's end offsets}.
    """
    problems: list[str] = []
    reached: dict[tuple[str, int], int] = {}
    for batch_id, end in sorted(logged.items()):
        attempts = [each for each in planned if each.end == end]
        meanings = {frozenset(_coverage(each).items()) for each in attempts if each.ranges}
        if not attempts:
            problems.append(f"batch {batch_id} was logged and never planned")
        if len(meanings) > 1:
            problems.append(f"batch {batch_id} was read differently when it was run again: {meanings}")
        for meaning in list(meanings)[:1]:
            for tp, (first, last) in sorted(meaning):
                if reached.get(tp, first) != first:
                    problems.append(
                        f"batch {batch_id} begins at {first} of {tp}, the one before ended at {reached[tp]}"
                    )
                reached[tp] = last
    return problems


def check_order(
    outputs: Iterable[Seen], planned: Sequence[Planned], logged: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """Return where the records of an input partition are out of order in a partition of the output.

    Order must hold between batches, and within a batch among the records of one task (minPartitions
    splits a partition).
    """
    problems: list[str] = []
    came: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in sorted(outputs, key=lambda seen: (seen.partition, seen.offset)):
        if found := _COPY.match(each.value or b""):
            came[each.partition, int(found[1])].append(int(found[2]))
    attempts = {
        batch_id: [each for each in planned if each.end == end and each.ranges]
        for batch_id, end in logged.items()
    }
    for (target, source), offsets in came.items():
        rest = list(offsets)
        for batch_id in sorted(attempts):
            covered = [_coverage(each) for each in attempts[batch_id]]
            bounds = next((each[tp] for each in covered for tp in each if tp[1] == source), (0, 0))
            count = next(
                (index for index, offset in enumerate(rest) if not bounds[0] <= offset < bounds[1]), len(rest)
            )
            share, rest = rest[:count], rest[count:]
            if share and not any(_in_order(share, each, source) for each in attempts[batch_id]):
                problems.append(f"out of order in {target}, from {source} in batch {batch_id}: {share[:20]}")
        if rest:
            problems.append(f"out of order in {target}, from {source}, between batches: {rest[:20]}")
    return problems


def _in_order(share: Sequence[int], attempt: Planned, source: int) -> bool:
    for _, partition, first, end in attempt.ranges:
        mine = [offset for offset in share if first <= offset < end]
        if partition == source and mine != sorted(mine):
            return False
    return True


def _coverage(planned: Planned) -> dict[tuple[str, int], tuple[int, int]]:
    """Return (first offset, end offset) of each partition, regardless of how it was split."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for topic, partition, first, end in planned.ranges:
        low, high = found.get((topic, partition), (first, end))
        found[topic, partition] = min(low, first), max(high, end)
    return found


def _named(what: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> list[str]:
    found = sorted(records, key=repr)
    if not found:
        return []
    shown = ", ".join(f"{value!r}" for _, value in found[:_SHOWN])
    return [f"{len(found)} {what}: {shown}{' ...' if len(found) > _SHOWN else ''}"]
