from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.storage import checkpoints as c
from kafkalite.storage.leader_epochs import EpochEntry

STATE = c.LogState(100, 2, 340)
EPOCHS = [EpochEntry(1, 0), EpochEntry(4, 120)]
END = c.Fingerprint(5, 17, 300, 2**32 - 1)
POINTS = {"a-0": c.RecoveryPoint(7, 0), "b-1": c.RecoveryPoint(9, 2, 5, END)}
SHUTDOWN = c.CleanShutdown(5, {"a-0": c.CleanEnd(1, 7, 3, 2, 400, END), "b-1": c.CleanEnd(0, 0)})

FILES: list[tuple[bytes, Callable[[bytes, str], Any], Any]] = [
    (c.encode_log_state(STATE, "a-0"), c.decode_log_state, STATE),
    (c.encode_leader_epochs(EPOCHS, 3, "x-0"), c.decode_leader_epochs, (EPOCHS, 3, True)),
    (c.encode_leader_epochs([], 0, "x-0"), c.decode_leader_epochs, ([], 0, True)),
    (c.encode_clean_shutdown(SHUTDOWN), c.decode_clean_shutdown, SHUTDOWN),
]


@pytest.mark.parametrize(("data", "decode", "value"), FILES)
def test_every_file_is_read_back(data: bytes, decode: Callable[[bytes, str], Any], value: Any) -> None:
    assert decode(data, "p") == value


@pytest.mark.parametrize(("data", "decode", "value"), FILES)
def test_r25_any_changed_or_missing_byte_is_damage(
    data: bytes, decode: Callable[[bytes, str], Any], value: Any
) -> None:
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        for bad in (bytes(damaged), data[:position]):
            with pytest.raises(CorruptLogError):
                decode(bad, "p")


def test_a_file_of_another_kind_or_version_is_damage() -> None:
    with pytest.raises(CorruptLogError, match="log-state"):
        c.decode_log_state(c.encode_leader_epochs([], 0, "x-0"), "p")
    with pytest.raises(CorruptLogError, match="expected truncations"):
        c.decode_log_state(c.encode_lines("log-state", ["log_start_offset 1", "x 1", "truncated_to 1"]), "p")


def test_r42_the_state_of_another_log_is_damage() -> None:
    data = c.encode_log_state(STATE, "a-0")
    assert c.decode_log_state(data, "/data/a-0/log-state") == STATE
    with pytest.raises(CorruptLogError, match="expected a file of b-1, found log a-0"):
        c.decode_log_state(data, "/data/b-1/log-state")


def test_recovery_points_are_read_back_with_the_changes_appended_to_them() -> None:
    data = c.encode_recovery_points(POINTS)
    assert c.decode_recovery_points(data) == (POINTS, len(data), None)
    moved = c.RecoveryPoint(11, 2, 6)
    data += c.encode_recovery_points({"b-1": moved, "a-0": None}) + c.encode_recovery_points({"c-2": moved})
    assert c.decode_recovery_points(data) == ({"b-1": moved, "c-2": moved}, len(data), None)


def test_r24_a_torn_change_of_recovery_points_states_nothing() -> None:
    first, second = c.encode_recovery_points(POINTS), c.encode_recovery_points({"c-2": c.RecoveryPoint(1)})
    for length in range(len(second)):
        for torn in (second[:length], second[:length] + bytes(10)):
            found = c.decode_recovery_points(first + torn)
            assert found == (POINTS, len(first), None)


def test_r25_an_unreadable_block_of_recovery_points_is_reported_and_the_others_count() -> None:
    first, second = c.encode_recovery_points(POINTS), c.encode_recovery_points({"c-2": c.RecoveryPoint(1)})
    third = c.encode_recovery_points({"d-3": c.RecoveryPoint(2)})
    for data, points in (
        (bytes(5) + first[5:] + second, {"c-2": c.RecoveryPoint(1)}),
        (first + bytes(5) + second[5:] + third, POINTS | {"d-3": c.RecoveryPoint(2)}),
        (b"", {}),
        (bytes(100), {}),
    ):
        found = c.decode_recovery_points(data)
        assert found.points == points
        assert found.problem is not None


def test_the_log_state_is_readable_text() -> None:
    assert c.encode_log_state(STATE, "a-0").decode().splitlines()[:5] == [
        "kafkalite log-state 1",
        "log a-0",
        "log_start_offset 100",
        "truncations 2",
        "truncated_to 340",
    ]


def test_statements_from_before_the_last_truncation_hold_only_below_it() -> None:
    assert STATE.cap(1000, truncations=2) == 1000
    assert STATE.cap(1000, truncations=1) == 340
    assert STATE.cap(200, truncations=1) == 200
    assert c.LogState().cap(1000, truncations=0) == 1000


def test_a_node_file_is_read_back() -> None:
    identity = c.NodeIdentity("cluster", 3, "directory")
    assert c.decode_node(c.encode_node(identity), "p") == identity


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is empty"),
        (b"[]", "it is [], not a JSON object"),
        (b'{"format_version": 1}', "it has no cluster_id, node_id, directory_id"),
        (b"\xff" * 1_000, "which is not JSON"),
        (
            b'{"format_version": 1, "cluster_id": "c", "node_id": "x", "directory_id": "d"}',
            "its node_id is 'x'",
        ),
    ],
)
def test_a_node_file_that_cannot_be_read_is_named_with_cause_and_remedy(data: bytes, problem: str) -> None:
    with pytest.raises(DataDirectoryError, match=r"node\.json is damaged") as caught:
        c.decode_node(data, "node.json")
    text = str(caught.value)
    assert (problem in text, "restore" in text, "Error" in text, len(text) < 400) == (True, True, False, True)


def test_a_changed_bit_of_a_node_file_changes_no_id() -> None:
    """A node with another directory id would lead nothing, and give no reason."""
    identity = c.NodeIdentity("cluster", 3, "00ff" * 8)
    data = c.encode_node(identity)
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with suppress(DataDirectoryError):
            assert c.decode_node(bytes(changed), "node.json") == identity
    with pytest.raises(DataDirectoryError, match=r"node\.json is damaged: its ids do not match its crc32c"):
        c.decode_node(data.replace(b"00ff", b"01ff", 1), "node.json")


def test_a_node_file_of_an_earlier_version_has_no_crc() -> None:
    data = b'{"format_version": 1, "cluster_id": "c", "node_id": 1, "directory_id": "d"}'
    assert c.decode_node(data, "node.json") == c.NodeIdentity("c", 1, "d")


def test_another_format_version_is_refused() -> None:
    data = c.encode_node(c.NodeIdentity("c", 1, "d")).replace(b'"format_version": 1', b'"format_version": 2')
    with pytest.raises(DataDirectoryError, match="format version 2"):
        c.decode_node(data, "node.json")


def test_a_partition_file_names_its_topic_or_nothing() -> None:
    assert c.decode_partition(c.encode_partition("orders", "0" * 32, 1)) == ("orders", "0" * 32, 1)
    for data in (
        b"",
        b"\0\0",
        b"[]",
        b"{}",
        b'{"topic": 1}',
        b'{"topic": 1, "topic_id": "", "partition": 0}',
    ):
        assert c.decode_partition(data) is None


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=100))
def test_noise_is_damage(noise: bytes) -> None:
    for decode in (c.decode_log_state, c.decode_leader_epochs, c.decode_clean_shutdown):
        with pytest.raises(CorruptLogError):
            decode(noise, "p")
