"""Patterns match the same names as Python's own expressions, in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import InvalidRegularExpressionError
from kafkalite.groups.topic_pattern import TopicPattern

NAMES = st.text(st.sampled_from("ab1._-"), max_size=8)
PLAIN = ["a", "b", "1", ".", r"\.", r"\d", r"\w", r"\W", r"\-"]
CLASSES = ["[ab]", "[^a]", "[a-c1]", "[]a]", "[a-]", r"[\d_]", r"[^\w]"]
ATOMS = st.sampled_from([*PLAIN, *CLASSES])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "*?", "{2}", "{1,}", "{,2}", "{0,3}"])
PATTERNS = st.recursive(
    st.tuples(ATOMS, REPEATS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(st.lists(inner, min_size=1, max_size=3).map("|".join), REPEATS).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
    ),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=8))
def test_a_pattern_matches_the_same_names_as_re(pattern, names):
    compiled, expected = TopicPattern(pattern), re.compile(pattern)
    for name in names:
        assert compiled.matches(name) == (expected.fullmatch(name) is not None)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.text(st.sampled_from("ab|()[]{}*+?^$\\.-1,d:"), max_size=10), NAMES)
def test_an_accepted_pattern_means_the_same_to_re(pattern, name):
    try:
        compiled = TopicPattern(pattern)
    except InvalidRegularExpressionError:
        return
    try:
        expected = re.compile(pattern)
    except re.error:
        raise AssertionError(f"{pattern!r} is none to re") from None
    assert compiled.matches(name) == (expected.fullmatch(name) is not None)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(", "too early"),
        ("a)", r"unbalanced \)"),
        ("[a", "too early"),
        ("*a", "follows nothing"),
        ("a**", "a quantifier after a quantifier"),
        ("a{", "begins no quantifier"),
        ("a{3,2}", "minimum exceeds its maximum"),
        ("a{1001}", "repeats too much"),
        ("((a{20}){20}){20}", "repeats too much"),
        ("(?=a)", "not supported"),
        (r"(a)\1", "not supported"),
        (r"a\b", "not supported"),
        ("[b-a]", "bad range"),
        ("a^", "follows nothing"),
        ("x" * 250, "at most 249"),
    ],
)
def test_a_refusal_names_its_reason(pattern, what):
    with pytest.raises(InvalidRegularExpressionError, match=what):
        TopicPattern(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)*b", "(a*)*b", ".*.*.*.*.*.*.*.*b", "(.?){120}b"])
def test_no_pattern_takes_long(pattern):
    compiled = TopicPattern(pattern)
    started = time.process_time()
    assert not compiled.matches("a" * 249)
    assert compiled.matches("a" * 100 + "b")
    assert time.process_time() - started < 1


@pytest.mark.parametrize("pattern", ["a(){99999999}b", "a((){99999999}){99999999}b", "a(()*){0,9}b"])
def test_nothing_is_repeated_at_no_cost(pattern):
    started = time.process_time()
    compiled = TopicPattern(pattern)
    assert compiled.matches("ab") and not compiled.matches("aab")
    assert time.process_time() - started < 0.5


def test_many_names_do_not_fill_the_memory():
    compiled = TopicPattern(".*a.{9}")
    names = [f"{number:020b}".replace("1", "a") for number in range(0, 2**20, 1_009)]
    expected = re.compile(compiled.pattern)
    assert [name for name in names if compiled.matches(name)] == [n for n in names if expected.fullmatch(n)]
    assert len(compiled._sets) < 1_100
