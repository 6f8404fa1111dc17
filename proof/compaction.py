"""Runs a compaction at once, as the cleaner runs it in turns of the event loop and in the executor."""

from __future__ import annotations

from kafkalite.storage.compaction_pass import CompactionPass
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.log import Log


def run_pass(log: Log, work: CompactionPass, now_ms: int) -> bool:
    """Run all steps of a pass that ``log.begin_compaction`` returned. Return whether it completed."""
    steps = work.steps()
    result: bytes | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration:
            break
        result = None
        if isinstance(step, SwapWork):
            begun = log.begin_swap(step)
            if begun is not None:
                begun.run()
                log.finish_swap(begun, None)
        else:
            result = step()
    save = log.finish_compaction(work, now_ms)
    if save is not None:
        save()
    return work.is_complete
