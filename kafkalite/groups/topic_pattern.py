"""Regular expressions for topic names that match in time linear in the length of the name.

Members send patterns, and the coordinator matches them against every topic on the broker's event loop.
Python's ``re`` backtracks: matching ``(a+)+b`` against thirty letters "a" takes minutes. Patterns are
therefore compiled to states that are followed in parallel (Thompson's construction; Kafka uses RE2 for the
same reason).

The syntax is a subset of that of ``re``::

    alternation  = sequence, { "|", sequence }
    sequence     = { atom, [ ( "*" | "+" | "?" | "{m}" | "{m,}" | "{,n}" | "{m,n}" ), [ "?" ] ] }
    atom         = "(" [ "?:" ] alternation ")" | "[" class "]" | "." | escape | any other character

A leading ``^`` and a trailing ``$`` are allowed but have no effect, because a pattern must always match the
whole name. Look-around, back references, flags and named groups are refused.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import InvalidRegularExpressionError

MAX_PATTERN_LENGTH: Final = 249  # the maximum length of a topic name
MAX_STATES: Final = 1_000  # bounds the cost of a step, because counted repetitions multiply the states
_MAX_REMEMBERED: Final = 1_000  # the maximum number of state sets whose next sets are cached

ALPHABET: Final = frozenset(string.ascii_letters + string.digits + "._-")  # characters of topic names
_DIGITS: Final = frozenset(string.digits)
_WORD: Final = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES: Final = {
    "d": _DIGITS,
    "D": ALPHABET - _DIGITS,
    "w": _WORD,
    "W": ALPHABET - _WORD,
    "s": frozenset(""),
    "S": ALPHABET,
}
_SPECIAL: Final = frozenset("*+?{|)^$")


@dataclass(frozen=True, slots=True)
class _Characters:
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Alternation:
    choices: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repetition:
    part: _Node
    least: int
    most: int | None  #: None if unlimited


_Node = _Characters | _Sequence | _Alternation | _Repetition


class TopicPattern:
    """A compiled pattern. The constructor raises InvalidRegularExpressionError if the pattern is invalid."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise InvalidRegularExpressionError(
                f"a subscription pattern has at most {MAX_PATTERN_LENGTH} characters, not {len(pattern)}"
            )
        self.pattern = pattern
        # A state either consumes a character of a set and moves to the next state (``_takes``), or moves to
        # other states without consuming a character (``_goes``).
        self._takes: list[tuple[frozenset[str], int] | None] = [None]
        self._goes: list[list[int]] = [[]]
        self._start = self._build(_Parser(pattern).parse(), 0)  # state 0: the whole pattern has matched
        self._forget()

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole name."""
        if len(self._sets) > _MAX_REMEMBERED:
            self._forget()
        number = 0
        for character in name:
            after = self._moves[number].get(character)
            number = self._move(number, character) if after is None else after
        return 0 in self._sets[number]

    def _forget(self) -> None:
        self._sets = [self._closure([self._start])]
        self._numbers = {self._sets[0]: 0}
        self._moves: list[dict[str, int]] = [{}]

    def _move(self, number: int, character: str) -> int:
        reached = []
        for state in self._sets[number]:
            takes = self._takes[state]
            if takes is not None and character in takes[0]:
                reached.append(takes[1])
        states = self._closure(reached)
        after = self._numbers.get(states)
        if after is None:
            after = self._numbers[states] = len(self._sets)
            self._sets.append(states)
            self._moves.append({})
        self._moves[number][character] = after
        return after

    def _closure(self, states: list[int]) -> frozenset[int]:
        seen = set(states)
        waiting = list(states)
        while waiting:
            for state in self._goes[waiting.pop()]:
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        return frozenset(seen)

    def _state(self, takes: tuple[frozenset[str], int] | None, goes: list[int]) -> int:
        if len(self._takes) >= MAX_STATES:
            raise InvalidRegularExpressionError(
                f"the subscription pattern {self.pattern!r} repeats too much: it has over {MAX_STATES} states"
            )
        self._takes.append(takes)
        self._goes.append(goes)
        return len(self._takes) - 1

    def _build(self, node: _Node, after: int) -> int:
        """Add states that match ``node`` and then continue at state ``after``. Return the first state."""
        match node:
            case _Characters():
                return self._state((node.allowed, after), [])
            case _Sequence():
                for part in reversed(node.parts):
                    after = self._build(part, after)
                return after
            case _Alternation():
                return self._state(None, [self._build(choice, after) for choice in node.choices])
        begin = after
        if node.most is None:
            begin = self._state(None, [after])
            self._goes[begin].append(self._build(node.part, begin))
        else:
            for _ in range(node.most - node.least):
                begin = self._state(None, [self._build(node.part, begin), after])
        for _ in range(node.least):
            after, begin = begin, self._build(node.part, begin)
            if begin == after:
                break  # the part matches "", so more repetitions add no reachable state
        return begin


class _Parser:
    """Parses the text of one pattern into nodes. Raises InvalidRegularExpressionError."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._index = 0
        self._end = len(pattern)

    def parse(self) -> _Node:
        text = self._pattern
        if text.startswith("^"):
            self._index = 1
        if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1:
            self._end -= 1
        node = self._alternation()
        if self._index < self._end:
            raise self._problem("unbalanced )")
        return node

    def _problem(self, what: str) -> InvalidRegularExpressionError:
        return InvalidRegularExpressionError(
            f"the subscription pattern {self._pattern!r}: {what} at position {self._index}"
        )

    def _peek(self) -> str:
        return self._pattern[self._index] if self._index < self._end else ""

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise self._problem("the pattern ends too early")
        self._index += 1
        return character

    def _alternation(self) -> _Node:
        choices = [self._sequence()]
        while self._peek() == "|":
            self._index += 1
            choices.append(self._sequence())
        return choices[0] if len(choices) == 1 else _Alternation(tuple(choices))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            atom = self._atom()
            bounds = self._bounds()
            if bounds is not None:
                atom = _Repetition(atom, *bounds)
                if self._peek() == "?":
                    self._index += 1  # a lazy quantifier matches the same names as a greedy one
                if self._peek() in ("*", "+", "?", "{"):
                    raise self._problem("a quantifier after a quantifier")
            parts.append(atom)
        return _Sequence(tuple(parts))

    def _bounds(self) -> tuple[int, int | None] | None:
        found: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        character = self._peek()
        if character in found:
            self._index += 1
            return found[character]
        if character != "{":
            return None
        closing = self._pattern.find("}", self._index, self._end)
        least, comma, most = self._pattern[self._index + 1 : closing].partition(",")
        digits = least + most
        if closing < 0 or not digits.isdecimal() or not digits.isascii() or len(digits) > 8:
            raise self._problem("{ that begins no quantifier (write \\{)")
        bounds = (int(least or 0), int(most) if most else None if comma else int(least))
        if bounds[1] is not None and bounds[0] > bounds[1]:
            raise self._problem("a quantifier whose minimum exceeds its maximum")
        self._index = closing + 1
        return bounds

    def _atom(self) -> _Node:
        if self._peek() in _SPECIAL:
            raise self._problem(f"{self._peek()} follows nothing that it could repeat")
        match self._next():
            case "(":
                if self._peek() == "?":
                    if not self._pattern.startswith("?:", self._index):
                        raise self._problem("(? other than (?: is not supported")
                    self._index += 2
                node = self._alternation()
                if self._next() != ")":
                    raise self._problem("unbalanced (")
                return node
            case "[":
                return _Characters(self._class())
            case ".":
                return _Characters(ALPHABET)
            case "\\":
                return _Characters(self._escape())
            case character:
                return _Characters(frozenset(character))

    def _escape(self) -> frozenset[str]:
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character.isascii() and character.isalnum():
            raise self._problem(f"\\{character} is not supported")
        return frozenset(character)

    def _class(self) -> frozenset[str]:
        is_negated = self._peek() == "^"
        self._index += is_negated
        found: set[str] = set()
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            character = self._next()
            one = self._escape() if character == "\\" else frozenset(character)
            if self._peek() == "-" and self._pattern[self._index + 1 : self._index + 2] != "]":
                self._index += 1
                character = self._next()
                last = self._escape() if character == "\\" else frozenset(character)
                if len(one) != 1 or len(last) != 1 or max(one) > max(last):
                    raise self._problem("a bad range in [ ]")
                found.update(c for c in ALPHABET if max(one) <= c <= max(last))
            else:
                found.update(one)
        self._index += 1
        return frozenset(ALPHABET - found if is_negated else found)
