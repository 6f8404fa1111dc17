"""One seed from start to end: warm up, strike faults, heal, wait for convergence, read everything, judge.

::

    start ─ create topics ─ clients ─ faults ─────── heal ─ converged? ─ clients end ─ final read ─ check
            └ invariants, every 100 ms of virtual time and after each fault ┘
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kafkalite.broker.coordination.internal_topics import KINDS
from kafkalite.errors import KafkaliteError
from kafkalite.model import Acks, TopicPartition
from kafkalite.testing.sim.loop import Deadlock
from kafkalite.testing.sim.network import Tuning
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.histories.history import Send, check
from proof.mutants import without
from proof.reach import counting
from proof.sim.coordination import Coordination
from proof.sim.nemesis import Nemesis
from proof.sim.nodes import make_nodes
from proof.sim.observer import Observer
from proof.sim.plan import Plan, draw
from proof.sim.workload import Client, Workload

TOPIC: Final = "t"
CHECK_INTERVAL_S: Final = 0.1
WARM_UP_S: Final = 1.0
START_DEADLINE_S: Final = 20.0
TOPICS_DEADLINE_S: Final = 20.0
WHOLE_DEADLINE_S: Final = 20.0
AFTERMATH_S: Final = 1.0
END_DEADLINE_S: Final = 20.0
PROBE_DEADLINE_S: Final = 10.0
READ_DEADLINE_S: Final = 30.0
GROUPS_DEADLINE_S: Final = 20.0  #: covers sessions, transaction timeouts and the backlog

T = TypeVar("T")


@dataclass
class Outcome:
    """The result of a seed."""

    seed: int
    plan: str
    brokers: int
    violation: str | None = None
    mutant: str | None = None
    kind: str = ""  #: safety, liveness or crash
    check: str = ""
    trace_hash: str = ""
    virtual_ms: int = 0
    wall_s: float = 0.0
    turns: int = 0
    sends: int = 0
    acknowledged: int = 0
    polls: int = 0
    healing_ms: int = 0  #: time from the end of all faults until every replica was in sync
    probes: dict[str, int] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)  #: the branches of rules, as of proof.reach
    kinds: list[str] = field(default_factory=list)  #: of faults and programs
    factors: Mapping[str, float] = field(default_factory=dict)  #: with which the plan was drawn


def run_seed(
    seed: int,
    *,
    brokers: int = 3,
    mutant: str | None = None,
    plan: Plan | None = None,
    story: int = 0,
    lines: list[str] | None = None,
    factors: Mapping[str, float] | None = None,
) -> Outcome:
    """Run one seed. Failures of the cluster are returned in the outcome, not raised.

    ``story``: the number of events to keep as text. ``lines``: collects the lines of the trace hash.
    ``factors``: those of ``plan.draw``.
    """
    gc.freeze()  # the collection at the end of the simulation then examines only the objects of this seed
    started_s = time.perf_counter()
    simulation = Simulation(seed)
    simulation.lines = lines
    if plan is None:
        plan = draw(seed, simulation.rng("plan"), brokers=brokers, factors=factors)
    outcome = Outcome(seed, plan.summary(), plan.brokers, mutant=mutant)
    outcome.kinds, outcome.factors = plan.kinds(), factors or {}
    has_rule = without(mutant) if mutant is not None else nullcontext()
    with has_rule, counting(outcome.reached), simulation:
        scenario = Scenario(simulation, plan)
        try:
            simulation.run(scenario.run())
        except Violation as violation:
            simulation.violate(violation)
        except Deadlock as error:
            simulation.violate(Violation("deadlock", str(error), kind="liveness"))
        outcome.story = simulation.story(story) if simulation.violations and story else []
        _fill(outcome, simulation, scenario)
    outcome.wall_s = time.perf_counter() - started_s
    return outcome


def _fill(outcome: Outcome, simulation: Simulation, scenario: Scenario) -> None:
    history = scenario.workload.history
    outcome.trace_hash = simulation.trace_hash
    outcome.virtual_ms = simulation.now_ms
    outcome.turns = simulation.loop.turn_count
    outcome.sends = len(history.sends)
    outcome.acknowledged = history.acknowledged
    outcome.polls = len(history.polls)
    outcome.healing_ms = scenario.healing_ms
    outcome.probes = dict(simulation.probes)
    if simulation.violations:
        first = simulation.violations[0]
        outcome.violation, outcome.kind, outcome.check = str(first), first.kind, first.check


class Scenario:
    """The phases of one run."""

    def __init__(self, simulation: Simulation, plan: Plan) -> None:
        self.healing_ms = 0
        self.simulation = simulation
        self.plan = plan
        simulation.network.tuning = Tuning(
            delay_s=plan.delay_s,
            jitter_s=plan.jitter_s,
            spike_rate=plan.spike_rate,
            split_rate=plan.split_rate,
        )
        self.nodes = make_nodes(
            simulation,
            plan.brokers,
            plan.broker_settings,
            controllers=plan.controllers,
            disks=plan.disks,
            spares=plan.spares,
        )
        keys = [TopicPartition(TOPIC, number) for number in range(plan.partitions)]
        self.workload = Workload(
            simulation, [node.address for node in self.nodes if node.is_broker], keys, plan.load
        )
        if plan.admin_pause_s:
            node_ids = [node.node_id for node in self.nodes if node.is_broker]
            self.workload.add_administrator(plan.admin_pause_s, plan.replication_factor, node_ids)
        self.coordination = Coordination(self.workload, self.nodes)
        self.workload.on_ok = self._on_ok
        self.observer = Observer(simulation, self.nodes)
        if plan.compacts:
            self.observer.compacted_topics = tuple(KINDS)
        self.nemesis = Nemesis(simulation, plan, self.nodes, self.workload)
        self.nemesis.clients = [*self.workload.clients, *self.coordination.clients]
        self.nemesis.on_fault = self._check
        self.coordination.on_decided = self.nemesis.on_decided
        self.nemesis.find_leader = lambda: self.observer.leader_of_any(self.nemesis.rng.randrange(100))
        self.nemesis.find_controller = self._controller

    def _on_ok(self, send: Send) -> None:
        if send.acks == Acks.ALL and send.offset is not None:
            self.observer.on_acknowledged(send.key, send.offset)
            self.nemesis.on_acknowledged()

    def _controller(self) -> Any:
        for node in self.nodes:
            broker = node.live
            if broker is not None and broker._services.controller.controller_id == node.node_id:
                return node
        return None

    async def run(self) -> None:
        """Run all phases. Raises Violation."""
        for node in self.nodes:
            node.start()
        await self._until(
            START_DEADLINE_S, "start", lambda: next((f"{n}" for n in self.nodes if not n.is_running), None)
        )
        admin = self.simulation.host("admin")
        create = self.workload.create_topics(self.plan.replication_factor, self.plan.topic_configs)
        await self._as_client("create-topics", TOPICS_DEADLINE_S, admin, create)
        if self.coordination.is_used:
            create = self.coordination.create_topics(self.plan.replication_factor, self.plan.topic_configs)
            await self._as_client("create-topics", TOPICS_DEADLINE_S, admin, create)
        self.workload.start()
        self.coordination.start()
        await self._watch(WARM_UP_S)
        faults = self.simulation.loop.create_task(self.nemesis.run(self.plan.fault_phase_s), name="nemesis")
        while not faults.done():
            await self._watch(CHECK_INTERVAL_S)
        faults.result()
        await self.nemesis.heal()
        healed_ms = self.simulation.now_ms
        await self._until(WHOLE_DEADLINE_S, "L1", self._broken_or_stranded)
        self.healing_ms = self.simulation.now_ms - healed_ms
        if self._is_stranded():
            return
        await self._watch(AFTERMATH_S)
        if self.coordination.is_used:
            await self._until(GROUPS_DEADLINE_S, "L3", self.coordination.unsettled)
        self.workload.is_over = True
        await self._until(END_DEADLINE_S, "L2", self._busy_client)
        await self._as_client("L2", PROBE_DEADLINE_S, admin, self.workload.probe())
        if self.coordination.is_used:
            await self._end_coordination(admin)
        await self._until(WHOLE_DEADLINE_S, "L1", self.observer.unconverged)
        await self._as_client("final-read", READ_DEADLINE_S, admin, self.workload.read_everything())
        self.observer.check()
        self.observer.check_rest()
        self.coordination.check_rest()
        self._judge()

    async def _end_coordination(self, admin: Any) -> None:
        """Wait until all records are consumed, end the programs, and check that nothing is left open.

        Raises Violation (L3, L4).
        """
        coordination = self.coordination
        await self._until(GROUPS_DEADLINE_S, "L3", coordination.uncommitted)
        coordination.is_over = True
        await self._until(END_DEADLINE_S, "L2", lambda: _busy(coordination.clients))
        await self._until(GROUPS_DEADLINE_S, "L4", coordination.open_transactions)
        await self._as_client("final-read", READ_DEADLINE_S, admin, coordination.read_everything())

    def _judge(self) -> None:
        unanswered = [send for send in self.workload.history.sends if send.ended_ms is None]
        crashed = sum(client.run_count > 1 for client in self.workload.producers)
        if unanswered and not crashed:
            raise Violation("L2", f"{len(unanswered)} sends never ended: {unanswered[0]}", kind="liveness")
        anomalies = check(self.workload.history)
        if anomalies:
            first = anomalies[0]
            raise Violation(first.kind, f"{first.message} (and {len(anomalies) - 1} more)")
        if self.coordination.is_used:
            self.coordination.judge()

    def _check(self) -> None:
        self.observer.check()
        self.coordination.check()

    def _is_stranded(self) -> bool:
        """Whether a partition has lost every replica that certainly has all records.

        With durability=page-cache a few unclean stops can cause that. Then an operator must elect a leader.
        """
        return self.plan.durability == "page-cache" and self.observer.has_no_candidate()

    def _broken_or_stranded(self) -> str | None:
        if self._is_stranded() and all(node.is_running for node in self.nodes):
            self.simulation.probe("stranded")
            return None
        return self.observer.unconverged_isr()

    def _busy_client(self) -> str | None:
        return _busy(self.workload.clients)

    async def _watch(self, duration_s: float) -> None:
        """Wait for ``duration_s``, and check the invariants meanwhile."""
        end_s = self.simulation.loop.time() + duration_s
        while (left_s := end_s - self.simulation.loop.time()) > 0:
            await asyncio.sleep(min(CHECK_INTERVAL_S, left_s))
            self._check()
            self._stop_if_violated()

    def _stop_if_violated(self) -> None:
        if self.simulation.violations:
            raise self.simulation.violations[0]

    async def _until(self, deadline_s: float, name: str, problem: Any) -> None:
        """Wait until ``problem`` returns None. After ``deadline_s``, raise a Violation of liveness."""
        end_s = self.simulation.loop.time() + deadline_s
        while True:
            self._check()
            self._stop_if_violated()
            why = problem()
            if why is None:
                return
            if self.simulation.loop.time() > end_s:
                raise Violation(name, f"after {deadline_s:.0f} s: {why}", kind="liveness")
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _as_client(self, name: str, deadline_s: float, host: Any, call: Coroutine[Any, Any, T]) -> T:
        """Run ``call`` as a program of ``host``. Raises Violation if it fails or takes too long."""
        host.kill()
        task = host.run(call)
        end_s = self.simulation.loop.time() + deadline_s
        while not task.done():
            if self.simulation.loop.time() > end_s:
                host.kill()
                raise Violation(name, f"no end after {deadline_s:.0f} s", kind="liveness")
            await self._watch(CHECK_INTERVAL_S)
        try:
            result: T = task.result()
        except KafkaliteError as error:
            raise Violation(name, repr(error), kind="liveness") from error
        return result


def _busy(clients: Sequence[Client]) -> str | None:
    busy = next((each for each in clients if not each.is_done), None)
    return None if busy is None else f"{busy.host} has not ended"
