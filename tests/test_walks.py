"""A request passes few files, and no call comes back to a file that it has left (``proof.walks``)."""

from __future__ import annotations

import pytest

from proof.walks import Walk, all_walks

#: Name: how many files may be on the call stacks.
BOUNDS = {
    "produce": 12,
    "produce, acknowledged": 12,
    "fetch": 12,
    "heartbeat, idle": 8,
    "replicate": 12,
    "commit of a transaction": 16,
}
#: How many files may be entered, helpers included. Lower it when a walk becomes shorter.
ENTERED = {
    "produce": 8,
    "produce, acknowledged": 21,
    "fetch": 11,  # with the place of each batch checked against the log's epochs (R43)
    "heartbeat, idle": 13,
    "replicate": 8,
    "commit of a transaction": 34,
}


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return all_walks()


def test_every_walk_has_a_bound(walks: dict[str, Walk]) -> None:
    assert walks.keys() == BOUNDS.keys() == ENTERED.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_few_files_are_on_the_call_stacks(name: str, walks: dict[str, Walk]) -> None:
    assert len(walks[name].files) <= BOUNDS[name], walks[name].files


@pytest.mark.parametrize("name", BOUNDS)
def test_few_files_are_entered(name: str, walks: dict[str, Walk]) -> None:
    assert len(walks[name].entered) <= ENTERED[name], walks[name].entered


@pytest.mark.parametrize("name", BOUNDS)
def test_no_call_comes_back_to_a_file_that_it_has_left(name: str, walks: dict[str, Walk]) -> None:
    assert not walks[name].returns
