"""Caches compiled subscription patterns and the topics that each pattern matches."""

# Tests: tests/groups/test_heartbeat.py

from __future__ import annotations

from typing import Final

from kafkalite.coordinator_types import Topics
from kafkalite.groups.topic_pattern import TopicPattern
from kafkalite.model import INTERNAL_PREFIX

_MAX_REMEMBERED: Final = 1_000  # the maximum of cached patterns in a coordinator


class PatternCache:
    """Compiles patterns, and caches which of the current topics each one matches."""

    def __init__(self) -> None:
        self._topics: Topics = {}
        self._names: frozenset[str] = frozenset()
        self._matches: dict[str, frozenset[str]] = {}  # {pattern: its matches in ``_names``}
        self._compiled: dict[str, TopicPattern] = {}

    def check(self, pattern: str) -> None:
        """Raise InvalidRegularExpressionError if the pattern is invalid."""
        self._compile(pattern)

    def matches(self, pattern: str | None, topics: Topics) -> frozenset[str]:
        """Return the names in ``topics`` that match the pattern as a whole, except those of internal topics.

        Returns an empty set if ``pattern`` is None or empty.
        """
        if not pattern:
            return frozenset()
        if topics is not self._topics:
            self._topics = topics
            names = frozenset(topics)
            if names != self._names:
                self._names = names
                self._matches.clear()
        if len(self._matches) >= _MAX_REMEMBERED:
            self._matches.clear()
        found = self._matches.get(pattern)
        if found is None:
            is_match = self._compile(pattern).matches
            found = frozenset(  # a pattern never matches internal topics
                [name for name in self._names if not name.startswith(INTERNAL_PREFIX) and is_match(name)]
            )
            self._matches[pattern] = found
        return found

    def _compile(self, pattern: str) -> TopicPattern:
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = TopicPattern(pattern)
            if len(self._compiled) >= _MAX_REMEMBERED:
                self._compiled.clear()
            self._compiled[pattern] = compiled
        return compiled
