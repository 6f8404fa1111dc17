"""The choice of the data directory for a new log, and of one of several logs of a partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafkalite.storage.directory_choice import (
    DirectoryUse,
    LogVersion,
    choose_directory,
    choose_log,
    missing_end,
)

GIB = 1 << 30


def place(uses: list[DirectoryUse], count: int) -> list[int]:
    """Place ``count`` new logs, and return the number of logs in each directory."""
    uses = list(uses)
    for _ in range(count):
        chosen = choose_directory(uses)
        uses[chosen] = uses[chosen]._replace(log_count=uses[chosen].log_count + 1)
    return [use.log_count for use in uses]


def test_equal_disks_get_equally_many_logs() -> None:
    assert place([DirectoryUse(GIB, 0)] * 3, 9) == [3, 3, 3]


def test_logs_are_placed_by_free_space() -> None:
    assert place([DirectoryUse(3 * GIB, 0), DirectoryUse(GIB, 0)], 8) == [6, 2]


def test_a_disk_that_has_filled_gets_no_more_logs() -> None:
    assert place([DirectoryUse(0, 0), DirectoryUse(GIB, 50)], 10) == [0, 60]


def test_without_free_space_the_directory_with_the_fewest_logs_is_chosen() -> None:
    assert choose_directory([DirectoryUse(0, 2), DirectoryUse(-1, 1), DirectoryUse(0, 1)]) == 1


versions = st.builds(
    LogVersion, st.integers(0, 2), st.booleans(), st.integers(-1, 2), st.integers(0, 5), st.integers(0, 2)
)


@given(st.lists(versions, min_size=1, max_size=4))
def test_no_other_log_is_further_than_the_chosen_one(found: list[LogVersion]) -> None:
    """R84: of sound logs of the same replica epoch, the longest one of the last leader epoch is chosen."""
    chosen = found[choose_log(found)]
    for other in found:
        assert other.replica_epoch <= chosen.replica_epoch
        if other.replica_epoch == chosen.replica_epoch and other.is_sound:
            assert chosen.is_sound
            assert (other.last_epoch, other.log_end_offset) <= (chosen.last_epoch, chosen.log_end_offset)


def test_of_equal_logs_the_first_is_chosen() -> None:
    assert choose_log([LogVersion(0, True, 1, 10, 0)] * 2) == 0


def test_a_sound_log_lacks_what_a_damaged_one_had() -> None:
    used = LogVersion(0, True, 1, 10, 0)
    for other, end in (
        (LogVersion(0, False, 1, 12, 0), 12),
        (LogVersion(0, False, 1, 4, 0, known_end_offset=15), 15),
        (LogVersion(0, False, 2, 4, 0), 11),
        (LogVersion(0, False, 1, 10, 0, known_end_offset=10), None),
        (LogVersion(0, True, 1, 9, 0), None),
        (LogVersion(-1, False, 1, 12, 0), None),
    ):
        assert missing_end([other, used], choose_log([other, used])) == end
