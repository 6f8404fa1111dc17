"""The cases of damage that find each mutant of the rules about damage.

``DIRECTED`` is {mutant: schedule}; a schedule returns None, or the violation. The node is prepared with the
mutant as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from proof.damage.cases import Case, damage
from proof.damage.single_node import broker_on, disk_of, intact_batches, prepare, run_case


def _schedule(*cases: Case) -> Callable[[], str | None]:
    def run() -> str | None:
        for case in cases:
            outcome = asyncio.run(run_case(case, asyncio.run(prepare(is_clean=case.is_clean))))
            if outcome is None:
                return f"{case} changes nothing"
            if outcome.verdict in {"lost", "wrong"}:
                return f"{case}: {outcome.verdict}: {outcome.detail}"
        return None

    return run


def _keeps_torn_batches() -> str | None:
    """After a restart of the system, batches behind a bad place are cut off, but kept beside the log."""
    node = asyncio.run(prepare(is_clean=False))
    tree = dict(node.tree)
    damage(Case("unproven segment", "flip", is_clean=False), tree, node.older, node.names)
    active = max(path for path in tree if path.startswith(f"{node.names.orders}/") and path.endswith(".log"))
    tree[active] = tree[active][:100] + b"\xff" + tree[active][101:]
    fs = disk_of(tree)
    fs.boot_count += 1
    before = intact_batches(fs)

    async def start() -> None:
        async with broker_on(fs):
            pass

    asyncio.run(start())
    gone = before - intact_batches(fs)
    return f"{len(gone)} intact batches were deleted" if gone else None


def _scrub_finds_damage() -> str | None:
    """A bit of a closed segment that no client reads has changed."""
    node = asyncio.run(prepare(is_clean=True))
    tree = dict(node.tree)
    damage(Case("middle segment", "flip", is_clean=True), tree, node.older, node.names)

    async def start() -> int:
        async with broker_on(disk_of(tree)) as broker:
            await broker.housekeeping.scrubber.scrub()
            return broker.statistics().damaged_partition_count

    return None if asyncio.run(start()) == 1 else "the changed bit was not found"


DIRECTED: Final = {
    "R24-no-scan": _schedule(Case("unproven segment", "flip", is_clean=False)),
    "R24-late-points": _schedule(Case("active segment", "third", is_clean=False)),
    "R24-torn-deleted": _keeps_torn_batches,
    "R25-missing-is-new": _schedule(Case("partition directory", "delete", is_clean=False)),
    "R42-no-fingerprint": _schedule(Case("middle segment", "swap", is_clean=False)),
    "R42-head-unnamed": _schedule(Case("young segment", "swap", is_clean=False)),
    "R43-unchecked-read": _schedule(Case("middle segment", "flip", is_clean=False)),
    "R53-scrub-ignored": _scrub_finds_damage,
    "R44-damaged-served": _schedule(Case("group directory", "delete", is_clean=False)),
}
