"""SimulatedCluster: a real broker, the test and its programs on simulated hosts, in virtual time.

``@simulate`` creates a new one for each run of a test; see docs/testing.md.
"""

# Tests: tests/testing/test_simulate.py

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.client import Client
from kafkalite.errors import KafkaliteError
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.testing.clients import Clients
from kafkalite.testing.requests import name_of, names_in
from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.loop import Process
from kafkalite.testing.sim.network import Link, Tuning
from kafkalite.testing.sim.simulation import Simulation
from kafkalite.testing.sim.streams import SCHEME
from kafkalite.testing.strikes import Strike

BROKER: Final = "broker"
TEST: Final = "test"
SETTINGS: Final[dict[str, Any]] = {
    "offsets_topic_num_partitions": 1,
    "transaction_state_log_num_partitions": 1,
}
#: How long after an error a program starts again.
RESTART_S: Final = 1.0
#: Requests that are left out of the story, because they change nothing.
_QUIET: Final = frozenset(
    {
        ApiKey.API_VERSIONS,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.FIND_COORDINATOR,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSETS_FOR_LEADER_EPOCH,
    }
)
#: The tuning of slow links.
_SLOW: Final = Tuning(delay_s=0.1)


class SimulatedCluster(Clients):
    """The cluster of one run. Programs connect to ``bootstrap_servers`` with any client of kafkalite."""

    def __init__(self, simulation: Simulation, strikes: Sequence[Strike], settings: dict[str, Any]) -> None:
        self.simulation = simulation
        self.seed = simulation.seed
        self.write_count = 0  #: writes to connections since the first start of the broker
        self.struck: list[tuple[int, Strike, str]] = []  #: (virtual ms, strike, its description)
        self.failure: BaseException | None = None  #: the error that a program or the broker has raised
        self.has_failed = asyncio.Event()
        self._settings = {**SETTINGS, **settings}
        self._waiting = list(strikes)
        self._host = simulation.host(BROKER)
        self._test = simulation.host(TEST)
        self._programs: dict[str, Host] = {}
        self._restarts: dict[str, Callable[[], None]] = {}
        self._is_up = asyncio.Event()
        self._active_count = 0
        self._is_calm = asyncio.Event()
        self._is_calm.set()
        self._is_counting = False
        self._fetched: dict[tuple[str, str, int], int] = {}
        # The number of faults that cut or slow each link. Faults of one link may overlap.
        self._cuts: Counter[Link] = Counter()
        self._slowed: Counter[Link] = Counter()
        simulation.network.before_write = self._on_write

    @property
    def bootstrap_servers(self) -> str:
        return f"{SCHEME}{BROKER}:9092"

    # --- for tests

    def program(self, name: str, main: Callable[[], Awaitable[Any]]) -> None:
        """Run ``main`` as a process of its own, which faults may kill, pause or cut off from the broker.

        As under a supervisor, ``main`` is called again after a kill, and RESTART_S after it has raised a
        KafkaliteError. Other errors, and a KafkaliteError before the first fault, fail the run. If ``main``
        returns, the program has ended. When the test ends, programs that still run are dropped.
        """
        assert name not in (BROKER, TEST, *self._programs), f"there is a program {name!r} already"
        host = self._programs[name] = self.simulation.host(name)

        async def run() -> None:
            try:
                await main()
            except KafkaliteError as error:
                if not self.struck:
                    self._fail(name, f"raises {error!r}", error)
                self.note(f"ends with {error!r}", name)
                network = self.simulation.network
                self.simulation.loop.call_later(RESTART_S, restart, host.process, context=network.context)
            except Exception as error:
                self._fail(name, f"raises {error!r}", error)
            else:
                self.note("ends", name)
                del self._programs[name]

        def restart(ended: Process | None) -> None:
            if host.process is ended and host.is_running:
                host.kill()
                start()

        def start() -> None:
            self.note("starts", name)
            host.run(run())

        self._restarts[name] = start
        start()

    def note(self, text: str, who: str = TEST) -> None:
        """Add ``text``, as an event of the program ``who``, to the events that a failure prints."""
        self.simulation.events.append((self.simulation.now_ms, who, text))

    async def calm(self) -> None:
        """Cancel the faults that have not begun. Return when those that have begun are over and the broker
        accepts requests."""
        self._waiting.clear()
        await self._is_calm.wait()
        await self._is_up.wait()

    # --- the broker

    async def start(self) -> None:
        """Start the broker. Return when it accepts requests; from then on, writes are counted."""
        self._start_broker()
        await self._is_up.wait()
        self._is_counting = True

    def _start_broker(self) -> None:
        self._host.run(self._serve(self._host.run_count))
        # Without power, the host does not respond to dials: a client that starts before the broker accepts
        # requests waits, instead of being refused.
        self.simulation.network.is_powered[BROKER] = False

    async def _serve(self, run: int) -> None:
        host = self._host
        broker = Broker(
            listeners=self.bootstrap_servers,
            log_dirs="/data",
            clock=host.clock,
            rng=self.simulation.rng(f"{BROKER}/{run}"),
            filesystem=host.filesystem,
            executor=host.executor(),
            **self._settings,
        )
        try:
            await broker.start()
            broker.intercept(self._on_request)
            self.simulation.network.on_power(BROKER)
            self._is_up.set()
            await broker.wait_stopped()
        except Exception as error:
            self._fail(BROKER, f"fails with {error!r}", error)

    def _fail(self, who: str, text: str, error: BaseException) -> None:
        self.note(text, who)
        if self.failure is None:
            self.failure = error
            error.add_note(f"{who} {text}")
            self.has_failed.set()

    def _on_request(self, request: Request, client: Client) -> None:
        key = ApiKey(request.api_key)
        if key not in _QUIET:
            who = client.peer.removeprefix("[").removeprefix(SCHEME).partition("]")[0].partition(":")[0]
            details = self._details(key, request.message, who)
            if details is not None:
                self.note(f"{name_of(key)} {details}".rstrip(), who)

    def _details(self, key: ApiKey, message: Any, who: str) -> str | None:
        """Return the topics, partitions or offsets of a request for the story; None for a repeated fetch."""
        if key == ApiKey.FETCH:
            moved = [
                part
                for part in message.partitions
                if self._fetched.get((who, part.topic, part.partition)) != part.fetch_offset
            ]
            for part in moved:
                self._fetched[who, part.topic, part.partition] = part.fetch_offset
            texts = [f"{part.topic}-{part.partition} from {part.fetch_offset}" for part in moved]
            return ", ".join(texts) or None
        if key in (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT):
            return ", ".join(f"{one.topic}-{one.partition} at {one.offset}" for one in message.offsets)
        if key == ApiKey.END_TXN:
            return "commit" if message.is_commit else "abort"
        topics, partitions = names_in(message)
        return ", ".join(map(str, partitions or topics))

    # --- faults

    def _on_write(self, process: Process) -> None:
        if not self._is_counting:
            return
        self.write_count += 1
        while self._waiting and self._waiting[0].at_write <= self.write_count:
            self._strike(self._waiting.pop(0))

    def _strike(self, strike: Strike) -> None:
        programs = [self._test, *self._programs.values()]
        is_of_program = strike.kind in ("kill_program", "pause_program")
        if is_of_program:
            programs = [host for host in self._programs.values() if host.is_running and not host.is_paused]
        elif strike.kind in ("kill", "power_loss", "pause") and (
            not self._is_up.is_set() or not self._host.is_running or self._host.is_paused
        ):
            return  # the broker is down or paused already
        if not programs:
            return
        target = programs[int(strike.pick * len(programs))]
        text = strike.describe(target.name)
        self.struck.append((self.simulation.now_ms, strike, text))
        self.note(f"FAULT: {text}", "")
        self._begin()
        end = getattr(self, f"_{strike.kind}")(target)
        network = self.simulation.network
        self.simulation.loop.call_later(
            strike.duration_ms / 1000, self._end, strike, end, context=network.context
        )

    def _begin(self) -> None:
        self._active_count += 1
        self._is_calm.clear()

    def _end(self, strike: Strike, end: Callable[[], None]) -> None:
        end()
        if strike.kind in ("cut", "lost_responses", "slow"):
            self.note("that fault is over", "")
        self._active_count -= 1
        if not self._active_count:
            self._is_calm.set()

    def _kill(self, _target: Host) -> Callable[[], None]:
        self._is_up.clear()
        self._host.kill()
        self.simulation.network.is_powered[BROKER] = False
        return self._start_broker

    def _power_loss(self, _target: Host) -> Callable[[], None]:
        self._is_up.clear()
        self._host.lose_power()
        return self._start_broker

    def _pause(self, _target: Host) -> Callable[[], None]:
        self._host.pause()
        return self._host.resume

    def _links(self, target: Host) -> list[Link]:
        network = self.simulation.network
        return [network.link(target.name, BROKER), network.link(BROKER, target.name)]

    def _cut(self, target: Host) -> Callable[[], None]:
        return self._disturb(self._links(target), self._cuts, Link.cut, Link.heal)

    def _lost_responses(self, target: Host) -> Callable[[], None]:
        return self._disturb(self._links(target)[1:], self._cuts, Link.cut, Link.heal)

    def _reset(self, target: Host) -> Callable[[], None]:
        self.simulation.network.reset_connections(target.name, BROKER)
        return lambda: None

    def _slow(self, target: Host) -> Callable[[], None]:
        network = self.simulation.network
        return self._disturb(
            self._links(target),
            self._slowed,
            lambda link: setattr(link, "tuning", _SLOW),
            lambda link: setattr(link, "tuning", network.tuning),
        )

    def _disturb(
        self,
        links: list[Link],
        counts: Counter[Link],
        begin: Callable[[Link], None],
        end: Callable[[Link], None],
    ) -> Callable[[], None]:
        """Begin a fault of ``links``, and return the function that ends it.

        ``counts`` has the number of current faults of this kind for each link. A link recovers when the last
        of these faults ends.
        """
        counts.update(links)
        for link in links:
            begin(link)

        def end_one() -> None:
            counts.subtract(links)
            for link in links:
                if not counts[link]:
                    end(link)

        return end_one

    def _kill_program(self, target: Host) -> Callable[[], None]:
        target.kill()
        return self._restarts[target.name]

    def _pause_program(self, target: Host) -> Callable[[], None]:
        target.pause()
        return target.resume
