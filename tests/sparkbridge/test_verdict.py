"""The verdict on copies finds lost, duplicate, foreign, misordered and differently repeated records."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from proof.spark.copying import expected_value
from proof.spark.points import FaultPlan, Planned, plan_text
from proof.spark.verdict import Seen, check_copy, check_order, check_replays, duplicates

INPUTS = [Seen(partition, offset, b"k", b"v") for partition in range(2) for offset in range(6)]


def copied(*places: tuple[int, int], target: int = 0) -> list[Seen]:
    values = [expected_value(partition, offset, b"v") for partition, offset in places]
    return [Seen(target, offset, b"k", value) for offset, value in enumerate(values)]


WHOLE = copied(*((each.partition, each.offset) for each in INPUTS))


def end(offset: int) -> dict[str, Any]:
    return {"t": {"0": offset, "1": offset}}


def planned(first: int, last: int, *cuts: int) -> Planned:
    bounds = [first, *cuts, last]
    ranges = [("t", partition, a, b) for partition in range(2) for a, b in pairwise(bounds)]
    return Planned(end(last), tuple(ranges))


LOGGED = {0: end(3), 1: end(6)}
PLANNED = [planned(0, 3), planned(3, 6)]


def test_a_complete_copy_passes() -> None:
    assert check_copy(INPUTS, WHOLE) == []
    assert check_order(WHOLE, PLANNED, LOGGED) == []
    assert check_replays(PLANNED, LOGGED) == []
    assert duplicates(WHOLE) == 0


def test_a_lost_record_is_reported_in_both_modes() -> None:
    for at_least_once in (False, True):
        (problem,) = check_copy(INPUTS, WHOLE[1:], at_least_once=at_least_once)
        assert problem.startswith("1 lost: ")


def test_a_duplicate_record_is_reported_unless_allowed() -> None:
    (problem,) = check_copy(INPUTS, [*WHOLE, WHOLE[3]])
    assert problem.startswith("1 doubled: ")
    assert check_copy(INPUTS, [*WHOLE, WHOLE[3]], at_least_once=True) == []
    assert duplicates([*WHOLE, WHOLE[3]]) == 1


@pytest.mark.parametrize("stranger", [Seen(0, 99, b"k", b"0/9:V"), Seen(0, 99, b"other", WHOLE[0].value)])
def test_a_foreign_record_is_reported(stranger: Seen) -> None:
    (problem,) = check_copy(INPUTS, [*WHOLE, stranger])
    assert problem.startswith("1 foreign: ")


def test_batches_in_the_wrong_order_are_reported() -> None:
    (problem,) = check_order(copied((0, 3), (0, 0), (0, 1)), PLANNED, LOGGED)
    assert "out of order" in problem


def test_records_of_one_task_in_the_wrong_order_are_reported() -> None:
    (problem,) = check_order(copied((0, 1), (0, 0)), PLANNED, LOGGED)
    assert "in batch 0" in problem


def test_tasks_of_one_batch_may_be_interleaved_and_partitions_too() -> None:
    outputs = copied((0, 2), (1, 0), (0, 0), (0, 3), (1, 1))
    assert check_order(outputs, [planned(0, 3, 2), planned(3, 6)], LOGGED) == []


def test_a_repeated_batch_that_reads_differently_is_reported() -> None:
    (problem,) = check_replays([planned(0, 3), Planned(end(3), (("t", 0, 1, 3),)), planned(3, 6)], LOGGED)
    assert "batch 0 was read differently" in problem


def test_a_repeated_batch_may_be_split_differently() -> None:
    assert check_replays([planned(0, 3), planned(0, 3, 1), planned(3, 6)], LOGGED) == []


def test_a_gap_between_batches_is_reported() -> None:
    problems = check_replays([planned(0, 3), planned(4, 6)], LOGGED)
    assert len(problems) == 2 and "the one before ended at 3" in problems[0]


def test_an_unplanned_batch_is_reported() -> None:
    assert check_replays(PLANNED[:1], LOGGED) == ["batch 1 was logged and never planned"]


def test_a_plan_strikes_once_at_the_first_opportunity(tmp_path: Any) -> None:
    plan = FaultPlan(tmp_path, plan_text({"task-fails": 3}))
    assert not plan.strikes("task-fails", 2)
    assert not plan.strikes("before-commit", 9)
    assert FaultPlan(tmp_path, plan_text({"task-fails": 3})).strikes("task-fails", 4)
    assert not plan.strikes("task-fails", 5)
    assert plan.struck() == {"task-fails": 4}


def test_another_process_is_asked_to_kill(tmp_path: Any) -> None:
    plan = FaultPlan(tmp_path)
    plan.done("more-input")
    plan.ask("more-input")
    assert plan.asked() == []
    assert plan.current_batch_id == 0
    plan.on_committed(7)
    assert plan.current_batch_id == 8
