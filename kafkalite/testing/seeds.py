"""``simulate``: runs a test in virtual time, once per seed. The seed determines the faults and the order of
events.

A failure is reported with the seed, the fewest faults found with which the test still fails, and the *story*:
the events of the run, in order.
"""

# Tests: tests/testing/test_simulate.py

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import count
from typing import Any, Final, overload

from kafkalite import rng as kafkalite_rng
from kafkalite.errors import ConfigError
from kafkalite.testing.sim.simulation import Simulation
from kafkalite.testing.simulated_cluster import TEST, SimulatedCluster
from kafkalite.testing.strikes import KINDS, Strike, check_kinds, draw_strikes

#: A failure prints at most this many events of the story: the last ones.
STORY_EVENTS: Final = 60
#: The approximate number of runs in which a failure is minimised by moving one fault to another write.
_MOST_MOVES: Final = 100

Test = Callable[..., Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The result of one run of a test."""

    error: BaseException | None
    write_count: int
    struck: list[tuple[int, Strike, str]]
    story: list[str]
    now_ms: int

    def fails_like(self, other: _Run) -> bool:
        return type(self.error) is type(other.error)


@overload
def simulate(test: Test, /) -> Callable[..., None]: ...


@overload
def simulate(
    *,
    seeds: int = ...,
    seed: int | None = ...,
    faults: Sequence[str] = ...,
    limit_s: int = ...,
    **settings: Any,
) -> Callable[[Test], Callable[..., None]]: ...


def simulate(
    test: Test | None = None,
    /,
    *,
    seeds: int = 100,
    seed: int | None = None,
    faults: Sequence[str] = tuple(KINDS),
    limit_s: int = 600,
    **settings: Any,
) -> Callable[..., Any]:
    """Decorate an asynchronous test to run it once for each of the seeds 1 to ``seeds`` with a
    SimulatedCluster.

    The cluster is the first argument of the test. Each seed determines the order of events, and up to five
    faults of the kinds ``faults``. Time is virtual: waits take no real time. The decorated function is
    synchronous; its caller, such as pytest, passes the other arguments. ``@simulate`` without arguments uses
    the defaults.

    The test is first run without faults; if it fails then, the error says so. If ``seed`` is given, only that
    seed is run afterwards, to replay a failure. A test that has not ended after ``limit_s`` of virtual time
    fails. ``settings`` are those of the broker, by Python name. Raises ConfigError for an invalid argument.
    Raises TypeError for a positional argument other than the test, and if the test is not asynchronous or has
    no argument.
    """
    if test is not None:
        if not callable(test):
            raise TypeError(f"simulate({test!r}): name the argument, for example @simulate(seeds=200)")
        return simulate(seeds=seeds, seed=seed, faults=faults, limit_s=limit_s, **settings)(test)
    for key, value in (("seeds", seeds), ("limit_s", limit_s)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(key=key, value=value, allowed="1 or more")
    kinds = check_kinds(faults)

    def decorate(test: Test) -> Callable[..., None]:
        parameters = list(inspect.signature(test).parameters.values())
        is_method = bool(parameters) and parameters[0].name == "self"
        position = int(is_method)
        if not inspect.iscoroutinefunction(test) or len(parameters) <= position:
            raise TypeError(f"{test.__qualname__} must be 'async def' with the cluster as its first argument")

        @wraps(test)
        def run_seeds(*args: Any, **kwargs: Any) -> None:
            def body(cluster: SimulatedCluster) -> Coroutine[Any, Any, None]:
                return test(*args[:position], cluster, *args[position:], **kwargs)

            _run_seeds(body, range(1, seeds + 1) if seed is None else (seed,), kinds, limit_s, settings)

        del parameters[position]
        run_seeds.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del run_seeds.__wrapped__  # otherwise pytest would find the coroutine function
        return run_seeds

    return decorate


Body = Callable[[SimulatedCluster], Coroutine[Any, Any, None]]


def _run_seeds(
    body: Body, seeds: Sequence[int], kinds: Sequence[str], limit_s: int, settings: dict[str, Any]
) -> None:
    def run(seed: int, strikes: Sequence[Strike]) -> _Run:
        return _run(body, seed, strikes, limit_s, settings)

    gc.collect()
    gc.freeze()  # garbage collection at the end of a simulation then skips older objects
    try:
        calm = run(0, ())
        if calm.error is not None:
            _tell(calm, "the test fails without any fault", "")
            raise calm.error
        for seed in seeds:
            strikes = draw_strikes(seed, kinds, calm.write_count)
            failed = run(seed, strikes)
            if failed.error is None:
                continue
            least = _minimised(strikes, failed, calm.write_count, partial(run, seed))
            replay = f"replay it with @simulate(seed={seed})"
            headline = f"seed {seed} fails with {_counted(len(least.struck), 'fault')}"
            if len(least.struck) < len(failed.struck):
                headline += f" of {len(failed.struck)}"
            _tell(least, headline, replay)
            assert least.error is not None
            raise least.error
    finally:
        gc.unfreeze()


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _minimised(
    strikes: list[Strike], failed: _Run, write_count: int, run: Callable[[Sequence[Strike]], _Run]
) -> _Run:
    """Return a run with fewer strikes that fails with the same type of error as ``failed``, or ``failed`` if
    none is found.

    Tries the lists of strikes that ``_fewer`` yields. ``run`` runs the test with given strikes;
    ``write_count`` is the number of writes of a run without strikes.
    """
    strikes = [strike for strike in strikes if any(strike is struck for _, struck, _ in failed.struck)]
    for candidate in _fewer(strikes, write_count):
        again = run(candidate)
        if again.fails_like(failed):
            return _minimised(candidate, again, write_count, run)
    return failed


def _fewer(strikes: list[Strike], write_count: int) -> Iterator[list[Strike]]:
    """Yield shorter lists of strikes to try instead of ``strikes``.

    Each of the first lists lacks one of ``strikes``. If there are several strikes, each of the further lists
    contains one strike alone, at one of several regularly spaced writes.
    """
    for number in range(len(strikes)):
        yield strikes[:number] + strikes[number + 1 :]
    if len(strikes) > 1:
        stride = max(1, write_count * len(strikes) // _MOST_MOVES)
        for strike in strikes:
            for at_write in range(1, write_count + 1, stride):
                yield [replace(strike, at_write=at_write)]


def _tell(run: _Run, headline: str, replay: str) -> None:
    """Add the report of a failed run to its error as a note, which pytest and Python print below it."""
    assert run.error is not None
    lines = [f"{headline}, after {run.now_ms} ms of virtual time" + (f"; {replay}" if replay else "")]
    lines += [f"  fault at {now_ms} ms: {text}" for now_ms, _, text in run.struck]
    lines.append("what happened:")
    left_out = len(run.story) - STORY_EVENTS
    if left_out > 0:
        lines.append(f"  ({left_out} earlier events)")
    lines += [f"  {line}" for line in run.story[-STORY_EVENTS:]]
    run.error.add_note("\n".join(lines))


def _run(body: Body, seed: int, strikes: Sequence[Strike], limit_s: int, settings: dict[str, Any]) -> _Run:
    error: BaseException | None = None
    with Simulation(seed) as simulation, _virtual(simulation):
        cluster = SimulatedCluster(simulation, strikes, settings)

        async def main() -> None:
            await cluster.start()
            ended = asyncio.ensure_future(body(cluster))
            failed = asyncio.ensure_future(cluster.has_failed.wait())
            await asyncio.wait((ended, failed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if cluster.failure is not None:
                raise cluster.failure
            if not ended.done():
                raise AssertionError(f"the test did not end within {limit_s} s of virtual time")
            await ended

        try:
            simulation.run(main(), on=simulation.host(TEST))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # pytest.fail() and others do not raise subclasses of Exception
            error = raised
        if error is None and simulation.violations:  # a callback, or a task that no code awaits, has raised
            violation = simulation.violations[0]
            error = violation.__cause__ or violation
            error.add_note(violation.message)
        story = [
            f"{now_ms:>7} ms  {who.partition('#')[0]:<10} {text}"
            for now_ms, who, event in simulation.events
            if (text := _text_of(event)) is not None
        ]
        return _Run(error, cluster.write_count, cluster.struck, story, simulation.now_ms)


def _text_of(event: Any) -> str | None:
    """Return the text of an event (a str or a LogRecord), or None for a log record below WARNING."""
    if isinstance(event, str):
        return event
    return f"{event.levelname.lower()}: {event.getMessage()}" if event.levelno >= 30 else None


@contextmanager
def _virtual(simulation: Simulation) -> Iterator[None]:
    """Make ``time``, ``random`` and ``system_rng`` use the simulation's time and seed inside the block.

    Clients use them unless they get a clock and an Rng as arguments. Other threads read the real time.
    """
    clock = simulation.host(TEST).clock
    loop = simulation.loop
    numbers = count()
    clocks: dict[str, Callable[[], float]] = {
        "time": lambda: clock.wall_ms() / 1000,
        "time_ns": lambda: clock.wall_ms() * 1_000_000,
        "monotonic": loop.time,
        "monotonic_ns": lambda: int(loop.time() * 1_000_000_000),
    }
    before = {name: getattr(time, name) for name in clocks}
    thread_id = threading.get_ident()

    def of_thread(virtual: Callable[[], float], real: Callable[[], float]) -> Callable[[], float]:
        return lambda: virtual() if threading.get_ident() == thread_id else real()

    state, new = random.getstate(), kafkalite_rng._new
    kafkalite_rng._new = lambda: simulation.rng(f"client/{next(numbers)}")
    random.seed(simulation.seed)
    for name, read in clocks.items():
        setattr(time, name, of_thread(read, before[name]))
    try:
        yield
    finally:
        for name, read in before.items():
            setattr(time, name, read)
        kafkalite_rng._new = new
        random.setstate(state)
