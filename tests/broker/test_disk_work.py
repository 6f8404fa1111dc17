"""DiskWork: which jobs of one partition may run at the same time, and in which order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kafkalite.broker.partitions.disk_work import DiskWork, State


def test_exclusive_work_waits_for_a_sync_round() -> None:
    work: DiskWork[str, str] = DiskWork()
    work.begin_sync()
    assert work.add_exclusive("truncate") is None
    assert work.state is State.WAITING
    assert work.end_sync() == "truncate"
    assert work.end_exclusive() is None
    assert work.state is State.IDLE


def test_deletions_run_one_after_the_other_beside_sync_rounds() -> None:
    work: DiskWork[str, str] = DiskWork()
    assert work.add_deletion("first") == "first"
    assert work.add_deletion("second") is None
    work.begin_sync()
    assert not work.may_add_exclusive
    assert work.end_deletion() == "second"
    assert work.end_sync() is None
    assert work.end_deletion() is None


def test_a_deletion_waits_for_exclusive_work() -> None:
    work: DiskWork[str, str] = DiskWork()
    assert work.add_exclusive("truncate") == "truncate"
    assert work.add_deletion("delete") is None
    assert work.is_deleting
    assert work.end_exclusive() == "delete"


def test_work_that_is_given_up_does_not_start() -> None:
    work: DiskWork[str, str] = DiskWork()
    work.begin_sync()
    work.add_exclusive("truncate")
    work.add_deletion("delete")
    assert work.give_up() == ("truncate", None, ["delete"])
    assert (work.state, work.end_sync()) == (State.SYNCING, None)


class Jobs(RuleBasedStateMachine):
    """Any order of events, against the rules themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.work: DiskWork[int, int] = DiskWork()
        self.count = 0
        self.is_syncing = False
        self.exclusive: int | None = None  # under way
        self.deletion: int | None = None
        self.waiting: list[int] = []
        self.waiting_exclusive: int | None = None

    def new(self) -> int:
        self.count += 1
        return self.count

    def started(self, job: int | None) -> None:
        if job is not None:
            assert self.waiting.pop(0) == job
            self.deletion = job

    @precondition(lambda self: not self.is_syncing and self.work.exclusive is None)
    @rule()
    def begin_sync(self) -> None:
        self.work.begin_sync()
        self.is_syncing = True

    @precondition(lambda self: self.is_syncing)
    @rule()
    def end_sync(self) -> None:
        self.is_syncing = False
        assert self.work.end_sync() == self.waiting_exclusive
        self.exclusive, self.waiting_exclusive = self.waiting_exclusive, None

    @precondition(lambda self: self.work.may_add_exclusive)
    @rule()
    def add_exclusive(self) -> None:
        job = self.new()
        if self.work.add_exclusive(job) is None:
            self.waiting_exclusive = job
        else:
            self.exclusive = job

    @precondition(lambda self: self.exclusive is not None)
    @rule()
    def end_exclusive(self) -> None:
        self.exclusive = None
        self.started(self.work.end_exclusive())

    @rule()
    def add_deletion(self) -> None:
        job = self.new()
        self.waiting.append(job)
        self.started(self.work.add_deletion(job))

    @precondition(lambda self: self.deletion is not None)
    @rule()
    def end_deletion(self) -> None:
        self.deletion = None
        self.started(self.work.end_deletion())

    @rule()
    def give_up(self) -> None:
        exclusive, deletion, waiting = self.work.give_up()
        assert exclusive == (self.exclusive or self.waiting_exclusive)
        assert (deletion, waiting) == (self.deletion, self.waiting)
        self.exclusive = self.waiting_exclusive = self.deletion = None
        self.waiting = []

    @invariant()
    def exclusive_work_is_alone(self) -> None:
        assert self.exclusive is None or not (self.is_syncing or self.deletion is not None)
        assert (self.work.exclusive is not None) == (
            self.exclusive is not None or self.waiting_exclusive is not None
        )

    @invariant()
    def nothing_waits_in_vain(self) -> None:
        assert not self.waiting or self.deletion is not None or (self.work.exclusive is not None)
        assert self.waiting_exclusive is None or self.is_syncing


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
