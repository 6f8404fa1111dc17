"""The simulated network between hosts, and the effects of a host's or process's death on connections.

As with TCP, written data arrives complete and in order, or the connection breaks. A cut link holds back all
data in one direction. The data arrives when the link heals, unless its connection was reset meanwhile. A host
without power does not respond. When it is powered again, it resets its former connections.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kafkalite.testing.sim.loop import Process, SimLoop

if TYPE_CHECKING:
    from kafkalite.rng import Rng

#: The maximum delay of held data after its link has healed, as by a retransmission.
RETRANSMIT_S: Final = 0.4

_FIRST_FREE_PORT: Final = 40_000


class Listener(Protocol):
    """An address on which a process listens."""

    @property
    def process(self) -> Process: ...


class End(Protocol):
    """The methods of one end of a connection that the network uses."""

    is_dialler: bool
    peer_host: str

    @property
    def process(self) -> Process: ...

    @property
    def peer(self) -> End: ...

    def reset_both(self) -> None:
        """Break the connection between the two ends. Each end notices it separately."""
        ...

    def on_reset_by_peer(self) -> None: ...

    def on_own_death(self, *, is_polite: bool) -> None:
        """Handle the death of the process of this end: send a reset, or EOF if ``is_polite`` and no data is
        unread."""
        ...

    def vanish(self) -> None:
        """Handle a power loss of this end's host: send nothing more, and lose the data in transit."""
        ...


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The delays of the data on a link, and how often a write is split."""

    delay_s: float = 0.0003  #: minimum delay
    jitter_s: float = 0.0003  #: mean addition to the minimum
    spike_rate: float = 0.0  #: fraction of the segments that take up to ``spike_s`` longer
    spike_s: float = 0.05
    split_rate: float = 0.0  #: fraction of the writes that arrive in two pieces


class Item(NamedTuple):
    """A segment: data, or a signal without data (a dial and its acceptance, the end of the stream, a
    reset)."""

    kind: str  # data, eof, reset, call
    data: bytes
    call: Callable[[], None] | None = None


class Link:
    """One direction between two hosts. A cut holds back all of its data."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.tuning = network.tuning
        self.is_cut = False
        self._held: dict[Pipe, None] = {}

    def __repr__(self) -> str:
        return f"<Link {self.source}>{self.target}{' cut' if self.is_cut else ''}>"

    def delay_s(self) -> float:
        tuning = self.tuning
        rng = self.network.rng
        delay_s = tuning.delay_s + tuning.jitter_s * 2 * rng.random()
        if tuning.spike_rate and rng.random() < tuning.spike_rate:
            delay_s += tuning.spike_s * rng.random()
        return delay_s

    def cut(self) -> None:
        self.is_cut = True

    def heal(self) -> None:
        """Deliver the held data after the delay of a retransmission."""
        self.is_cut = False
        held, self._held = self._held, {}
        for pipe in held:
            pipe.release(RETRANSMIT_S * self.network.rng.random())

    def hold(self, pipe: Pipe) -> None:
        self._held[pipe] = None


class Pipe:
    """One direction of one connection. It preserves the order of data."""

    __slots__ = ("_last_s", "_waiting", "deliver", "is_broken", "link")

    def __init__(self, link: Link, deliver: Callable[[Item], None]) -> None:
        self.link = link
        self.deliver = deliver
        self.is_broken = False
        self._last_s = 0.0
        self._waiting: deque[Item] = deque()  # the data held back by a cut link

    def send(self, item: Item, after_s: float = 0.0) -> None:
        if self.is_broken:
            return
        if self.link.is_cut or self._waiting:
            self._waiting.append(item)
            self.link.hold(self)
            return
        network = self.link.network
        when_s = max(self._last_s, network.loop.time() + self.link.delay_s() + after_s)
        self._last_s = when_s
        network.loop.call_at(when_s, self._arrive, item, context=network.context)

    def _arrive(self, item: Item) -> None:
        if not self.is_broken:
            link = self.link
            link.network.on_arrival(link, item.kind, len(item.data))
            self.deliver(item)

    def release(self, after_s: float) -> None:
        waiting, self._waiting = self._waiting, deque()
        for item in waiting:
            self.send(item, after_s)

    def break_off(self) -> None:
        """Break the pipe and lose all data in transit."""
        self.is_broken = True
        self._waiting.clear()


class Network:
    """The links, listeners and connections of all hosts. Each simulation has one."""

    def __init__(self, loop: SimLoop, rng: Rng) -> None:
        self.loop = loop
        self.rng = rng
        self.tuning = Tuning()
        self.context = contextvars.copy_context()
        self.listeners: dict[str, Listener] = {}
        self.is_powered: dict[str, bool] = {}
        self.on_arrival: Callable[[Link, str, int], None] = lambda link, kind, length: None
        #: Called before the process writes to a connection. It may kill the process or cut the link.
        self.before_write: Callable[[Process], None] = lambda process: None
        self._links: dict[tuple[str, str], Link] = {}
        self._ends: dict[End, None] = {}
        # {host without power: the peers' ends of its former connections}
        self._orphans: dict[str, list[End]] = {}
        self._ports = _FIRST_FREE_PORT
        loop.network = self

    def link(self, source: str, target: str) -> Link:
        """Return the link from the host ``source`` to the host ``target``. It is created on first use."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link(self, source, target)
        return link

    def links(self) -> list[Link]:
        """Return the links in the order of their first use."""
        return list(self._links.values())

    def ends(self) -> list[End]:
        """Return the open ends of all connections."""
        return list(self._ends)

    def next_port(self) -> int:
        self._ports += 1
        return self._ports

    def heal(self) -> None:
        """Heal every link."""
        for link in self.links():
            if link.is_cut:
                link.heal()

    def reset_connections(self, source: str, target: str, *, count: int | None = None) -> int:
        """Break the connections that ``source`` opened to ``target``, at most ``count`` (None: all).

        Return the number of broken connections.
        """
        chosen = [
            end
            for end in self._ends
            if end.process.host_name == source and end.peer_host == target and end.is_dialler
        ]
        for end in chosen[:count]:
            end.reset_both()
        return len(chosen[:count])

    def on_process_death(self, process: Process) -> None:
        """Remove the process's listeners, and close its connections as a kernel does. Peers receive its data,
        then EOF or a reset."""
        for address in [address for address, each in self.listeners.items() if each.process is process]:
            del self.listeners[address]
        for end in [end for end in self._ends if end.process is process]:
            del self._ends[end]
            end.on_own_death(is_polite=self.rng.random() < 0.5)

    def on_power_loss(self, host: str) -> None:
        """Drop all connections and listeners of the host. Its peers are not notified."""
        self.is_powered[host] = False
        for address in [
            address for address, each in self.listeners.items() if each.process.host_name == host
        ]:
            del self.listeners[address]
        orphans = self._orphans.setdefault(host, [])
        for end in [end for end in self._ends if end.process.host_name == host]:
            del self._ends[end]
            end.vanish()
            orphans.append(end.peer)

    def on_power(self, host: str) -> None:
        """Mark the host as powered. Within 2 s, it resets the connections that it had before the power
        loss."""
        self.is_powered[host] = True
        for end in self._orphans.pop(host, []):
            if end in self._ends:
                self.loop.call_later(2.0 * self.rng.random(), end.on_reset_by_peer, context=self.context)

    def has_power(self, host: str) -> bool:
        return self.is_powered.get(host, True)

    def add(self, end: End) -> None:
        self._ends[end] = None

    def discard(self, end: End) -> None:
        self._ends.pop(end, None)
