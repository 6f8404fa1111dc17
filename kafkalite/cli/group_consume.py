"""``kl consume -g``: reads as a member of a group, and commits the records that were printed."""

# Tests: tests/cli/test_group.py

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import TimedOutError
from kafkalite.cli.invocation import Invocation
from kafkalite.cli.output import plural
from kafkalite.cli.printers import Printer
from kafkalite.cli.stdio import printing

if TYPE_CHECKING:
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.model import TopicPartition

_POLL_RECORDS: Final = 10_000
_POLL_MS: Final = 500
#: A member without partitions for this many seconds is idle: other members own all of them.
_IDLE_S: Final = 3.0


def patience_ms(deadline: float | None) -> int:
    """Return the time limit of the next poll (ms): at most 0 after ``deadline``, in monotonic seconds."""
    if deadline is None:
        return _POLL_MS
    return min(_POLL_MS, int((deadline - time.monotonic()) * 1000))


def timed_out(printed_count: int, wanted_count: int | None, settings: Mapping[str, Any]) -> TimedOutError:
    """Return the error to raise when --timeout passes. ``wanted_count`` is the value of -n, if given."""
    of = f" of {wanted_count:,}" if wanted_count is not None else ""
    hint = "a longer --timeout waits longer"
    if settings.get("isolation.level") == "read_committed":
        hint += "; records of an open transaction are held back until it ends: 'kl txn list' shows it"
    return TimedOutError(f"timed out after {plural(printed_count, 'record')}{of}", hint=hint)


@dataclass(slots=True)
class GroupJob:
    """Prints records as a group member, from the committed offsets or else from the beginning.

    Offsets are committed after their records were printed and flushed. After a crash, a record may be printed
    again, but none is skipped.
    """

    topics: tuple[str, ...]
    group_id: str
    exit_at_end: bool
    count: int | None
    timeout_ms: int | None
    settings: dict[str, Any]
    printer: Printer
    printed_count: int = 0
    #: The end offsets of the assigned partitions when they were assigned.
    _ends: dict[TopicPartition, int] = field(default_factory=dict)
    _held_at: float = field(default_factory=time.monotonic)  #: the last time with an assigned partition
    _was_idle: bool = False

    async def run(self, current: Invocation) -> None:
        """Print the records. Raises TimedOutError if --timeout passes before the count or end is reached."""
        settings = {
            "group.id": self.group_id,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "max.poll.records": _POLL_RECORDS,
            **self.settings,
        }
        consumer = connect.consumer(current, **settings)
        consumer.subscribe(*self.topics)
        async with consumer:
            await self._read(consumer)

    async def _read(self, consumer: Consumer) -> None:
        deadline = None if self.timeout_ms is None else time.monotonic() + self.timeout_ms / 1000
        with printing(self.printer) as show:
            while self.count != self.printed_count:
                left_ms = patience_ms(deadline)
                if left_ms <= 0:
                    if self.count is None and not self.exit_at_end:
                        return
                    raise timed_out(self.printed_count, self.count, self.settings)
                most = _POLL_RECORDS if self.count is None else self.count - self.printed_count
                records = await consumer.get_many(min(most, _POLL_RECORDS), timeout_ms=left_ms)
                if records:
                    show(records)
                    self.printed_count += len(records)
                    await consumer.commit()
                is_idle = self._is_idle(consumer)
                if self.exit_at_end and (is_idle or await self._is_at_end(consumer)):
                    return

    async def _is_at_end(self, consumer: Consumer) -> bool:
        held = consumer.assignment()
        new = [tp for tp in held if tp not in self._ends]
        if new:
            self._ends.update(await consumer.end_offsets(new))
        return bool(held) and all((consumer.position(tp) or 0) >= self._ends[tp] for tp in held)

    def _is_idle(self, consumer: Consumer) -> bool:
        """Whether this member has had no partition for _IDLE_S seconds. Warns when it begins to be idle."""
        now = time.monotonic()
        if consumer.assignment():
            self._held_at = now
        is_idle = now - self._held_at > _IDLE_S
        if is_idle and not self._was_idle:
            invocation.say(
                f"group {self.group_id!r} has no partition for this member: others have all of them"
            )
        self._was_idle = is_idle
        return is_idle
