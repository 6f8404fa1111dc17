"""Spreads items over bins so that the load of each bin is within its limits, with little cost of moving.

Items are replicas or leaderships, bins are brokers. This is the load rebalancing problem (Aggarwal, Motwani,
Zhu 2003), which is NP-hard. The heuristic has three steps, which are repeated until none finds a change:

1. *Transfer* items directly from bins above their limit to the least loaded bins, then from loaded bins to
   bins below their limit. The items with the least cost per weight go first, and among these the heaviest, so
   that light items remain for the last gaps.
2. *Improve* the bins that are still out of limits: by single moves, by exchanging a heavy item for a lighter
   one, and by chains of moves through other bins, which the constraints may require.
3. *Return* moved items whose move turned out to be unnecessary.

Each step only accepts changes that reduce the violation of limits, or the cost. Nothing moves if all bins are
within their limits. Ties are resolved by number, so that equal arguments give equal results.
"""

# Tests: tests/metadata/test_balance.py

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

#: An improvement must reduce the violation of some bin by this share of the bin's upper limit.
LEAST_GAIN: Final = 0.002


class Bin(NamedTuple):
    """A bin's capacity relative to others, and its limits. Invariant: 0 <= low <= high, capacity > 0."""

    capacity: float
    low: float
    high: float
    fixed: float  #: load that cannot be moved

    def penalty(self, load: float) -> float:
        """Return 0 if ``load`` is within the limits, else the square of the distance to them."""
        if load > self.high:
            return (load - self.high) ** 2 / self.capacity
        return (self.low - load) ** 2 / self.capacity if load < self.low else 0.0


class Item(NamedTuple):
    weight: float
    cost: float  #: of being anywhere but in ``home``
    home: int  #: the bin where the item was at first


class Constraints(Protocol):
    """Decides where an item may be. The answer may depend on the other items, whose moves it follows."""

    def allows(self, item: int, target: int) -> bool: ...

    def on_moved(self, item: int, source: int, target: int) -> None: ...


Step = tuple[int, int]
"""(item, target bin)"""


class Spreader:
    """Owns the places of items. ``places[n]`` is the bin of item n, one of ``bins``."""

    def __init__(
        self, items: Sequence[Item], places: Iterable[int], bins: Mapping[int, Bin], constraints: Constraints
    ) -> None:
        self.items = items
        self.places = list(places)
        self._has_changed = False
        self._bins = dict(sorted(bins.items()))
        self._constraints = constraints
        self.loads = {number: each.fixed for number, each in self._bins.items()}
        self._inside: dict[int, set[int]] = {number: set() for number in self._bins}
        for item, place in enumerate(self.places):
            self.loads[place] += items[item].weight
            if items[item].weight > 0:
                self._inside[place].add(item)
        self._by_cost: dict[int, list[int]] = {}
        self._by_weight: dict[int, tuple[list[float], list[int]]] = {}
        #: What an item with little cost counts as, so that changes without a cost are compared by their gain.
        self._free = 1e-3 * max((item.cost for item in items), default=0.0) + 1e-9
        # Sums of floats differ by their order: distances below this are none.
        self._margin = 1e-9 * max([1e-9, *(each.high for each in self._bins.values())])

    def spread(self) -> None:
        """Move items until no step finds a change."""
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            self._transfer()
            self._improve()
            self._return_items()

    # --- bins ----------------------------------------------------------------------------------------

    def _excess(self, number: int) -> float:
        return self._positive(self.loads[number] - self._bins[number].high)

    def _lack(self, number: int) -> float:
        return self._positive(self._bins[number].low - self.loads[number])

    def _room(self, number: int) -> float:
        return self._bins[number].high - self.loads[number] + self._margin

    def _spare(self, number: int) -> float:
        return self.loads[number] - self._bins[number].low + self._margin

    def _positive(self, distance: float) -> float:
        return distance if distance > self._margin else 0.0

    def _relative(self, number: int) -> float:
        return self.loads[number] / self._bins[number].capacity

    # --- items ---------------------------------------------------------------------------------------

    def _move_cost(self, item: int, target: int) -> float:
        """Return what moving ``item`` adds to the cost: 0 if it has moved already, unless it returns."""
        _, cost, home = self.items[item]
        return cost * ((target != home) - (self.places[item] != home))

    def _cheapest(self, number: int) -> list[int]:
        """Return the items of a bin, by cost per weight. Among equals, the heaviest is first."""
        found = self._by_cost.get(number)
        if found is None:

            def order(item: int) -> tuple[float, float, int]:
                weight, cost, home = self.items[item]
                return (cost / weight if home == number else 0.0, -weight, item)

            found = self._by_cost[number] = sorted(self._inside[number], key=order)
        return found

    def _by_weight_in(self, number: int) -> tuple[list[float], list[int]]:
        """Return (weights, items) of a bin, the lightest first, and among equals the cheapest."""
        found = self._by_weight.get(number)
        if found is None:
            order = sorted((self.items[item][:2], item) for item in self._inside[number])
            found = self._by_weight[number] = ([key[0] for key, _ in order], [item for _, item in order])
        return found

    def _move(self, item: int, target: int) -> None:
        source, weight = self.places[item], self.items[item].weight
        self.places[item] = target
        self.loads[source] -= weight
        self.loads[target] += weight
        self._inside[source].remove(item)
        self._inside[target].add(item)
        for number in (source, target):
            self._by_cost.pop(number, None)
            self._by_weight.pop(number, None)
        self._constraints.on_moved(item, source, target)
        self._has_changed = True

    # --- transfer ------------------------------------------------------------------------------------

    def _transfer(self) -> None:
        stuck: set[int] = set()
        while True:
            over = {number: self._excess(number) for number in self._bins if number not in stuck}
            under = {number: self._lack(number) for number in self._bins if number not in stuck}
            worst_over = max(over, key=lambda number: over[number] / self._bins[number].capacity, default=-1)
            worst_under = max(
                under, key=lambda number: under[number] / self._bins[number].capacity, default=-1
            )
            if over.get(worst_over):
                if not self._shed(worst_over):
                    stuck.add(worst_over)
            elif under.get(worst_under):
                if not self._draw(worst_under):
                    stuck.add(worst_under)
            else:
                return

    def _shed(self, source: int) -> bool:
        """Move one item out of ``source``. Return False if none fits."""
        need, spare = self._excess(source) + self._margin, self._spare(source)
        targets = sorted((n for n in self._bins if n != source and self._room(n) > 0), key=self._relative)
        items = self._cheapest(source)
        fitting = (item for item in items if self.items[item].weight <= need)
        larger = (item for item in items if need < self.items[item].weight <= spare)
        for item in (*fitting, *sorted(larger, key=lambda item: (*self.items[item][:2], item))):
            for target in targets:
                if self.items[item].weight <= self._room(target) and self._constraints.allows(item, target):
                    self._move(item, target)
                    return True
        return False

    def _draw(self, target: int) -> bool:
        """Move one item into ``target``. Return False if none fits."""
        need, room = self._lack(target) + self._margin, self._room(target)

        def fits(item: int, source: int) -> bool:
            weight = self.items[item].weight
            return weight <= self._spare(source) and self._constraints.allows(item, target)

        best: tuple[tuple[float, ...], int] | None = None
        sources = sorted((n for n in self._bins if n != target), key=self._relative, reverse=True)
        for number, source in enumerate(sources):
            for item in self._cheapest(source):
                weight, cost, home = self.items[item]
                key = (cost / weight if home == source else 0.0, -weight, number)
                if best is not None and key >= best[0]:
                    break
                if weight <= need and fits(item, source):
                    best = (key, item)
                    break
        if best is None:
            larger = sorted(
                (self.items[item].weight, item, source)
                for source in sources
                for item in self._inside[source]
                if need < self.items[item].weight <= room
            )
            best = next((((weight,), item) for weight, item, source in larger if fits(item, source)), None)
        if best is None:
            return False
        self._move(best[1], target)
        return True

    # --- improvement ---------------------------------------------------------------------------------

    def _improve(self) -> None:
        """Make changes that reduce penalties until no bin has any. Chains are tried if nothing else helps."""
        ways = (self._changes, self._chains)
        at = 0
        while at < len(ways):
            has_improved = False
            for number in sorted(self._bins, key=lambda number: (-self._own_penalty(number), number)):
                while self._own_penalty(number) > 0 and self._improve_by(ways[at], number):
                    has_improved = True
            at = 0 if has_improved and at else at + (not has_improved)

    def _own_penalty(self, number: int) -> float:
        is_outside = self._excess(number) > 0 or self._lack(number) > 0
        return self._bins[number].penalty(self.loads[number]) if is_outside else 0.0

    def _improve_by(
        self, ways: Callable[[int, float], Iterator[tuple[float, list[Step]]]], number: int
    ) -> bool:
        """Make the change that reduces penalties most for its cost. Return False if there is none."""
        best: tuple[float, list[Step]] | None = None
        least = (LEAST_GAIN * self._bins[number].high) ** 2 / self._bins[number].capacity
        # A smaller difference of penalties may be an error of rounding.
        least = max(least, 1e-9 * max(map(self._own_penalty, self._bins)))
        for gain, steps in ways(number, least):
            score = gain / (max(0.0, sum(self._move_cost(*step) for step in steps)) + self._free)
            if (best is None or score > best[0]) and self._is_allowed(steps):
                best = (score, steps)
        if best is None:
            return False
        for step in best[1]:
            self._move(*step)
        return True

    def _is_allowed(self, steps: Sequence[Step]) -> bool:
        if len(steps) == 1:
            return self._constraints.allows(*steps[0])
        done: list[Step] = []
        for item, target in steps:
            if not self._constraints.allows(item, target):
                break
            done.append((item, target))
            self._constraints.on_moved(item, self.places[item], target)
        for item, target in reversed(done):
            self._constraints.on_moved(item, target, self.places[item])
        return len(done) == len(steps)

    def _changes(self, number: int, least: float) -> Iterator[tuple[float, list[Step]]]:
        """Yield (gain, steps) of single moves, and of exchanges of two items, between this bin and others."""
        is_over = self._excess(number) > 0
        wanted = self._excess(number) or self._lack(number)
        allows = self._constraints.allows
        for other in self._bins:
            if other == number:
                continue
            source, target = (number, other) if is_over else (other, number)
            gain_of = self._gain_of_shift(source, target)
            weights, items = self._by_weight_in(target)
            for weight, item in zip(*self._by_weight_in(source), strict=True):
                if not allows(item, target):
                    continue
                gain = gain_of(weight)
                if gain > least:
                    yield gain, [(item, target)]
                at = bisect_left(weights, weight - wanted)
                for index in range(max(0, at - 1), min(len(items), at + 1)):
                    gain = gain_of(weight - weights[index])
                    if gain > least:
                        yield gain, [(item, target), (items[index], source)]

    def _gain_of_shift(self, source: int, target: int) -> Callable[[float], float]:
        """Return a function: the penalty that is saved if a weight is moved from ``source`` to ``target``."""
        losing, gaining = self._bins[source].penalty, self._bins[target].penalty
        source_load, target_load = self.loads[source], self.loads[target]
        now = losing(source_load) + gaining(target_load)
        return lambda weight: now - losing(source_load - weight) - gaining(target_load + weight)

    def _chains(self, number: int, least: float) -> Iterator[tuple[float, list[Step]]]:
        """Yield (gain, steps) of the shortest chains of moves from this bin, if it is above its limit, to
        each other bin, or from each other bin to this bin.
        """
        is_over = self._excess(number) > 0
        wanted = self._excess(number) or self._lack(number)
        links: dict[int, list[Step]] = {number: []}  # bin -> the moves between it and ``number``
        queue = [number]
        for near in queue:
            for far in self._bins:
                if far in links:
                    continue
                source, target = (near, far) if is_over else (far, near)
                item = self._nearest(source, target, wanted)
                if item is not None:
                    # The moves closest to the bin with room come first, so that loads never exceed both ends.
                    links[far] = [(item, target), *links[near]] if is_over else [*links[near], (item, target)]
                    queue.append(far)
                    gain = self._gain(links[far])
                    if gain > least:
                        yield gain, links[far]

    def _nearest(self, source: int, target: int, wanted: float) -> int | None:
        """Return the item that ``target`` may get from ``source`` with the weight nearest to ``wanted``."""
        weights, items = self._by_weight_in(source)
        right = bisect_left(weights, wanted)
        left = right - 1
        while left >= 0 or right < len(items):
            is_right = left < 0 or (right < len(items) and weights[right] - wanted <= wanted - weights[left])
            item = items[right] if is_right else items[left]
            if self._constraints.allows(item, target):
                return item
            left, right = (left, right + 1) if is_right else (left - 1, right)
        return None

    def _gain(self, steps: Iterable[Step]) -> float:
        """Return the penalty that ``steps`` save."""
        changes: dict[int, float] = {}
        for item, target in steps:
            source, weight = self.places[item], self.items[item].weight
            changes[source] = changes.get(source, 0.0) - weight
            changes[target] = changes.get(target, 0.0) + weight
        return sum(
            self._bins[number].penalty(self.loads[number])
            - self._bins[number].penalty(self.loads[number] + change)
            for number, change in changes.items()
        )

    # --- return --------------------------------------------------------------------------------------

    def _return_items(self) -> None:
        """Move items home, the most expensive first, if that makes no penalty greater."""
        moved = [item for item, place in enumerate(self.places) if place != self.items[item].home]
        for item in sorted(moved, key=lambda item: (-self.items[item].cost, item)):
            home = self.items[item].home
            if (
                home in self._bins
                and self._gain([(item, home)]) >= -(self._margin**2)
                and self._constraints.allows(item, home)
            ):
                self._move(item, home)
