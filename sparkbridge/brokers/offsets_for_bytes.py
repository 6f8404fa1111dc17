"""How far a number of bytes reaches from some positions: the look-up behind maxBytesPerTrigger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.data import OffsetForBytes, OffsetsForBytesPartition, OffsetsForBytesRequest
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.offsets import Positions


def ends_by_bytes(
    brokers: Brokers,
    starts: Positions,
    ends: Positions,
    max_bytes: int,
    first: TopicPartition | None = None,
) -> Positions:
    """Positions between ``starts`` and ``ends`` with about ``max_bytes`` of batches in all between them.

    Each partition has a share in proportion to its bytes, and gets whole batches. One whose first batch is
    larger than its share gets that batch if the shares of others leave room for it. ``first``, if there is
    something of it, goes before the others, with all the bytes it can use. At least one batch in all, if
    there is one. Raises OffsetOutOfRangeError, and as Brokers.until_answered.
    """
    reached = dict(ends)
    open_ = {tp: end for tp, end in ends.items() if starts.get(tp, end) < end}
    totals = {tp: answer.total_bytes for tp, answer in _look_up(brokers, starts, open_, {}).items()}
    if sum(totals.values()) <= max_bytes:
        return reached
    shares = _shares({tp: size for tp, size in totals.items() if size}, max_bytes, first)
    answers = _look_up(brokers, starts, {tp: open_[tp] for tp in shares}, shares)
    left_bytes = max_bytes
    too_large: list[TopicPartition] = []
    for tp, answer in answers.items():
        if tp == first or answer.size_bytes <= shares[tp]:
            reached[tp] = answer.end_offset
            left_bytes -= answer.size_bytes
        else:
            too_large.append(tp)
    is_nothing = len(too_large) == len(answers)
    for tp in sorted(too_large, key=totals.__getitem__, reverse=True):
        answer = answers[tp]
        if is_nothing or answer.size_bytes <= left_bytes:
            reached[tp] = answer.end_offset
            left_bytes -= answer.size_bytes
            is_nothing = False
        else:
            reached[tp] = starts[tp]
    return reached


def _shares(
    totals: Mapping[TopicPartition, int], max_bytes: int, first: TopicPartition | None
) -> dict[TopicPartition, int]:
    """``max_bytes`` in proportion to ``totals``, which are above 0, after ``first`` had all it can use."""
    of_first = min(totals.get(first, 0), max_bytes) if first is not None else 0
    left_bytes = max_bytes - of_first
    left_total = sum(size for tp, size in totals.items() if tp != first)
    return {tp: of_first if tp == first else left_bytes * size // left_total for tp, size in totals.items()}


def _look_up(
    brokers: Brokers, starts: Positions, ends: Positions, shares: Mapping[TopicPartition, int]
) -> dict[TopicPartition, OffsetForBytes]:
    def request_of(asked: Sequence[tuple[TopicPartition, int]]) -> OffsetsForBytesRequest:
        partitions = [
            OffsetsForBytesPartition(
                tp.topic, tp.partition, leader_epoch, starts[tp], ends[tp], shares.get(tp, 0)
            )
            for tp, leader_epoch in asked
        ]
        return OffsetsForBytesRequest(brokers.isolation_level, partitions)

    found: dict[TopicPartition, list[Any]] = brokers.ask_leaders("the look-up of sizes", ends, request_of)
    return {tp: answers[0] for tp, answers in found.items()}
