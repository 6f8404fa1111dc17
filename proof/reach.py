"""Counts which branches of the rules were reached: how often each rule returned true or false, or refused.

A point is a rule of the product that some mutant replaces. It is wrapped from outside, as a mutant is. A run
that never saw both outcomes of a rule proves nothing about it. ``Steering`` derives from the counts of
earlier seeds which kinds of faults and programs the next ones should have more often.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, Final

from proof.mutants import all_mutants, installable, owner_and_attribute

#: Steered seeds have factors within these bounds, so that no kind of history ends.
LEAST, MOST = 0.5, 3.0
#: After how many seeds the factors are computed again.
REVIEW_SEEDS: Final = 10


def points() -> dict[str, tuple[str, ...]]:
    """Return {rule: its branches}, such as {``module:Class.name``: ("true", "false")}."""
    rules = dict.fromkeys(rule for mutant in all_mutants().values() for rule in mutant.changes)
    return {rule: _branches(rule) for rule in rules}


def _branches(rule: str) -> tuple[str, ...]:
    owner, attribute = owner_and_attribute(rule)
    found = vars(owner)[attribute]
    function: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    if signature(function).return_annotation in ("bool", bool):
        return ("true", "false")
    return ("passed", "refused") if attribute.startswith("check") else ("called",)


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count ``<rule> <branch>`` in ``counts`` while the block runs."""
    with ExitStack() as stack:
        for rule, branches in points().items():
            owner, attribute = owner_and_attribute(rule)
            original = vars(owner)[attribute]
            function = getattr(original, "fget", None) or getattr(original, "__func__", original)
            setattr(owner, attribute, installable(original, _counter(rule, branches, counts, function)))
            stack.callback(setattr, owner, attribute, original)
        yield


def _counter(
    rule: str, branches: tuple[str, ...], counts: Counter[str], original: Callable[..., Any]
) -> Callable[..., Any]:
    first, last = f"{rule} {branches[0]}", f"{rule} {branches[-1]}"
    refused = f"{rule} refused"
    is_predicate = branches[0] == "true"

    def counted(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = original(*arguments, **keywords)
        except Exception:
            counts[refused] += 1
            raise
        counts[last if is_predicate and not result else first] += 1
        return result

    return counted


def table(columns: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield a line for each rule: its branches, and how often each was reached in each column."""
    missing = 0
    names = points()
    for rule, branches in sorted(names.items()):
        cells = []
        for branch in branches:
            reached = [columns[column][f"{rule} {branch}"] for column in columns]
            missing += not any(reached)
            cells.append(f"{branch} {'+'.join(map(str, reached))}" if any(reached) else f"{branch} NEVER")
        yield f"  {rule.removeprefix('kafkalite.'):<76} {'  '.join(cells)}"
    total = sum(map(len, names.values()))
    yield f"{total - missing} of {total} branches of rules reached (counts: {' + '.join(columns)})"


class Steering:
    """Factors for the kinds of faults and programs of the next seeds.

    A kind whose seeds reached the rarely reached branches more often than others gets a factor above 1. Every
    other seed is not steered.
    """

    def __init__(self) -> None:
        self._seeds = 0
        self._reached: Counter[str] = Counter()  # by how many seeds
        self._by_kind: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seeds_by_kind: Counter[str] = Counter()
        self.factors: dict[str, float] = {}

    def take(self, kinds: Iterable[str], reached: Iterable[str]) -> None:
        """Note the kinds of one seed, and the branches that it reached."""
        branches = list(reached)
        self._seeds += 1
        self._reached.update(branches)
        for kind in kinds:
            self._seeds_by_kind[kind] += 1
            self._by_kind[kind].update(branches)
        if self._seeds % REVIEW_SEEDS == 0:
            self._review()

    def factors_for(self, seed: int) -> dict[str, float]:
        return self.factors if seed % 2 else {}

    def _review(self) -> None:
        rarity = {branch: 1.0 / count for branch, count in self._reached.items()}
        mean = len(rarity) / self._seeds  # of the sum of rarities that a seed reaches
        self.factors = {}
        for kind, seeds in sorted(self._seeds_by_kind.items()):
            found = self._by_kind[kind]
            score = sum(count * rarity[branch] for branch, count in found.items()) / seeds
            factor = round(min(max(score / mean, LEAST), MOST), 1)
            if factor != 1.0:
                self.factors[kind] = factor


def encode_factors(factors: Mapping[str, float]) -> str:
    return ",".join(f"{kind}={factor:g}" for kind, factor in factors.items())


def decode_factors(text: str) -> dict[str, float]:
    """Return the factors of ``encode_factors``. Raises ValueError."""
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {kind: float(factor) for kind, _, factor in pairs}
