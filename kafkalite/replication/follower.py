"""The follower's account of one partition: what to ask its leader for, and what to make of the answer.

R3  only the answer to the latest question counts, of the epoch followed: a question carries a version, and
    whatever changes the log or the role makes a new one
R4  a log is cut where the leader's answer and the own epochs meet, and nowhere else
R10 high watermark := min(the leader's, the own log end)

Pure: it knows offsets and epochs, not the log; ``partition`` does what it says.
"""

from __future__ import annotations

from typing import NamedTuple

from kafkalite import mutants
from kafkalite.storage.leader_epochs import EpochEnd


class FetchPosition(NamedTuple):
    """What a follower tells its leader of itself. Two are of the same ``version`` as long as neither the
    log's batches nor the role have changed: then an answer to the one is an answer to the other."""

    leader_epoch: int
    fetch_offset: int  #: the log end
    last_epoch: int  #: of the last batch; NO_EPOCH in an empty log
    synced_end_offset: int
    log_start_offset: int
    version: int


class FollowerStep(NamedTuple):
    """What an answer did. With ``is_ignored`` it was not for this replica as it is now: nothing."""

    appended_bytes: int = 0
    truncated_to: int | None = None
    high_watermark_moved: bool = False
    log_start_moved: bool = False
    is_ignored: bool = False


IGNORED = FollowerStep(is_ignored=True)


class PartitionFollower:
    """One spell of following ``leader_id`` (-1: nobody leads) in ``leader_epoch``."""

    __slots__ = ("high_watermark", "leader_epoch", "leader_id", "version")

    def __init__(self, *, leader_id: int, leader_epoch: int, high_watermark: int, version: int) -> None:
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.version = version

    def believes(self, answer_epoch: int, asked: FetchPosition | None) -> bool:
        """Whether an answer is for this replica as it is now (R3). Without ``asked`` the caller vouches
        that nothing has changed here since it asked."""
        if answer_epoch != self.leader_epoch:
            return False
        if asked is None or asked.version == self.version:
            return True
        return "R3-any-answer" in mutants.ACTIVE

    @property
    def youngest_epoch(self) -> int | None:
        """No batch from this leader may be younger (R3)."""
        return None if "R3-epoch-unchecked" in mutants.ACTIVE else self.leader_epoch

    def advance(self, leader_high_watermark: int, log_end_offset: int) -> bool:
        """Take the leader's high watermark as far as the log reaches. Returns whether the own one moved.

        A new leader's may lie behind for a while; what was committed stays so, hence never back.
        """
        known = min(leader_high_watermark, log_end_offset)
        if known <= self.high_watermark:
            return False
        self.high_watermark = known
        return True


def diverging_at(last_epoch: int, fetch_offset: int, leaders: EpochEnd) -> EpochEnd | None:
    """The leader's side of R4: ``leaders`` is its lookup of the follower's last epoch.

    What to answer instead of records, or None when the follower's log is a prefix of the leader's.
    """
    if leaders.leader_epoch < last_epoch or leaders.end_offset < fetch_offset:
        return leaders
    return None


def truncation_target(leaders_end_offset: int, own: EpochEnd, log_end_offset: int) -> int:
    """The follower's side of R4: ``own`` is its lookup of the epoch that the leader answered."""
    return min(leaders_end_offset, own.end_offset, log_end_offset)
