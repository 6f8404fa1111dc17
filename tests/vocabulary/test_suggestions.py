"""The hint for a misspelt name."""

from __future__ import annotations

from kafkalite.suggestions import did_you_mean

NAMES = ["linger.ms", "batch.size"]


def test_the_most_similar_name_is_suggested() -> None:
    assert did_you_mean("lingerms", NAMES) == "did you mean linger.ms?"
    assert did_you_mean("lingerms", NAMES, shown=repr) == "did you mean 'linger.ms'?"


def test_without_a_similar_name_there_is_another_hint() -> None:
    assert did_you_mean("acks", NAMES) == ""
    assert did_you_mean("acks", NAMES, otherwise="see the list") == "see the list"
    assert did_you_mean("lingerms", NAMES, cutoff=0.99) == ""
