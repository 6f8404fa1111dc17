"""Struct: a frozen record that is a tuple, without a tuple's surprises."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest

from kafkalite.protocol.structs import Struct


class Point(Struct):
    x: int
    y: int


class Other(Struct):
    x: int
    y: int


class Space(Point):
    z: int


class Empty(Struct):
    pass


def test_fields_by_position_and_by_name() -> None:
    assert Point(1, 2) == Point(x=1, y=2) == Point(1, y=2)
    assert Point(1, 2).y == 2
    assert repr(Point(1, 2)) == "Point(x=1, y=2)"


def test_the_fields_of_the_base_come_first() -> None:
    assert Point(1, 2).x == 1
    assert tuple(Space(1, 2, z=3)) == (1, 2, 3)
    assert (Space(1, 2, 3).y, Space(1, 2, 3).z) == (2, 3)
    assert Space(1, 2, 3) != Point(1, 2)
    with pytest.raises(TypeError):
        Space(1, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("build", [lambda: Point(1), lambda: Point(1, 2, 3), lambda: Point(1, z=2)])  # type: ignore[call-arg]
def test_every_field_is_required_and_known(build: Any) -> None:
    with pytest.raises(TypeError, match="__new__"):
        build()


def test_the_first_construction_may_fail() -> None:
    class Fresh(Struct):
        x: int

    with pytest.raises(TypeError):
        Fresh()  # type: ignore[call-arg]
    assert Fresh(3).x == 3


def test_two_types_are_never_equal() -> None:
    assert Point(1, 2) != Other(1, 2)
    assert Point(1, 2) != (1, 2)
    assert Point(1, 2) != Point(1, 3)
    assert len({Point(1, 2), Other(1, 2), Point(1, 2)}) == 2


def test_it_is_immutable() -> None:
    point = Point(1, 2)
    with pytest.raises(AttributeError):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        point.z = 3  # type: ignore[attr-defined]


def test_a_struct_without_fields_is_true() -> None:
    assert Empty()
    assert Empty() == Empty()
    assert repr(Empty()) == "Empty()"


@pytest.mark.parametrize("compare", ["__lt__", "__le__", "__gt__", "__ge__"])
def test_there_is_no_order(compare: str) -> None:
    with pytest.raises(TypeError, match="Point has no order"):
        getattr(Point(1, 2), compare)(Point(2, 3))


def test_replace_and_asdict() -> None:
    assert Point(1, 2)._replace(y=5) == Point(1, 5)
    assert Point(1, 2)._asdict() == {"x": 1, "y": 2}
    with pytest.raises(TypeError):
        Point(1, 2)._replace(z=5)
    if sys.version_info >= (3, 13):
        assert copy.replace(Point(1, 2), x=0) == Point(0, 2)


def test_it_copies_and_pickles() -> None:
    assert copy.deepcopy(Point(1, 2)) == Point(1, 2)
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)  # noqa: S301 - our own bytes


def test_it_matches_by_position() -> None:
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_a_default_is_refused_at_the_declaration() -> None:
    with pytest.raises(AssertionError, match=r"Wrong\.x has a default"):

        class Wrong(Struct):
            x: int = 0
