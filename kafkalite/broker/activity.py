"""Lets the periodic tasks of an idle single-node broker sleep for longer than their interval.

A pass is one run of a periodic task, such as retention. After each pass, the task computes for how long
another pass would find nothing to do if no request, append or new metadata arrives. It sleeps for that time,
rounded down to whole intervals, but for at least one interval. Requests, appends and new metadata call
``Activity.touch``, which shortens the sleep.
"""

# Tests: tests/broker/test_activity.py

from __future__ import annotations

import asyncio
from typing import Final

from kafkalite.broker.tasks import first_of
from kafkalite.clock import Clock

#: The longest sleep between two passes, in case the wall clock jumps.
MAX_REST_MS: Final = 24 * 60 * 60 * 1000


class Activity:
    """Wakes the sleeping tasks of a broker. If ``may_rest`` is False, each task runs at every interval."""

    def __init__(self, clock: Clock, *, may_rest: bool = True) -> None:
        self.clock = clock
        self.may_rest = may_rest
        self.may_be_resting = False  #: False if no pass has begun since the last ``touch``
        self.events: list[asyncio.Event] = []

    def touch(self) -> None:
        """Wake the sleeping tasks, because a request, an append or new metadata has arrived.

        After the first call, further calls have no effect until a pass has begun.
        """
        if self.may_be_resting:
            self.may_be_resting = False
            for event in self.events:
                event.set()

    def every(self, interval_ms: int) -> Pace:
        """Return the Pace of a task that runs every ``interval_ms`` while the broker is active."""
        return Pace(self, interval_ms)


class Pace:
    """Paces one periodic task, which calls ``begin``, runs a pass, calls ``rest``, and repeats."""

    def __init__(self, activity: Activity, interval_ms: int) -> None:
        self._activity = activity
        self._interval_ms = interval_ms
        self._has_changed = asyncio.Event()
        activity.events.append(self._has_changed)

    def begin(self) -> None:
        """Begin a pass. If ``touch`` is called during the pass, ``rest`` lasts only one interval."""
        self._has_changed.clear()
        self._activity.may_be_resting = True

    async def rest(self, idle_ms: float) -> None:
        """Sleep until the next pass: for the whole intervals in ``idle_ms`` (at most MAX_REST_MS), but for at
        least one interval. ``touch`` shortens the sleep to the end of the present interval."""
        clock, interval_ms = self._activity.clock, self._interval_ms
        intervals = int(min(idle_ms, MAX_REST_MS) // interval_ms)
        if intervals <= 1 or not self._activity.may_rest or self._has_changed.is_set():
            await clock.sleep_ms(interval_ms)
            return
        begun_ms = clock.monotonic_ms()
        await first_of(clock.sleep_ms(intervals * interval_ms), self._has_changed.wait())
        passed_ms = clock.monotonic_ms() - begun_ms
        rest_ms = -passed_ms % interval_ms
        if rest_ms or not passed_ms:
            await clock.sleep_ms(rest_ms or interval_ms)
