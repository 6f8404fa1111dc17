"""The records of __consumer_offsets: their bytes are frozen, and unknown ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.coordinator_types import Instant, StateRecord
from kafkalite.errors import StorageError
from kafkalite.groups import record_codec as codec
from kafkalite.groups.machine import GroupMachine
from kafkalite.groups.member import CurrentAssignment, Subscription, TopicIdPartition
from kafkalite.protocol.messages.groups import GroupEvent

P = frozenset({TopicIdPartition("ti", 1), TopicIdPartition("ti", 300)})
NAMES = {"ti": "t"}
CURRENT = CurrentAssignment(5, 4, P, frozenset())
SUBSCRIPTION = Subscription("i", "app", "h", 60_000, ("t", "u"), None, "range")
STATE = codec.GroupState(5, "uniform", -1, {"t": ("ti", 3)})
EVENT = GroupEvent(65, 1_000, "MemberLeft", "gone", 2, 3)
VALUE = codec.OffsetValue(42, 7, None, 1_000, "ti")

EXAMPLES = {
    "group": (
        codec.record(codec.GROUP, STATE, "g"),
        (STATE, {}),
        "9201a167",
        "950005a7756e69666f726dff9193a174a2746903",
    ),
    "subscription": (
        codec.record(codec.SUBSCRIPTION, SUBSCRIPTION, "g", "m"),
        (SUBSCRIPTION, {}),
        "9302a167a16d",
        "9800a169a3617070a168cdea6092a174a175c0a572616e6765",
    ),
    "target": (
        codec.record(codec.TARGET, codec.Target(P), "g", "m", names=NAMES),
        (codec.Target(P), NAMES),
        "9303a167a16d",
        "92009193a27469a1749201cd012c",
    ),
    "current": (
        codec.record(codec.CURRENT, CURRENT, "g", "m", names=NAMES),
        (CURRENT, NAMES),
        "9304a167a16d",
        "950005049193a27469a1749201cd012c90",
    ),
    "event": (
        codec.record(codec.EVENT, EVENT, "g", 1),
        (EVENT, {}),
        "9305a16701",
        "970041cd03e8aa4d656d6265724c656674a4676f6e650203",
    ),
    "offset": (
        codec.record(codec.OFFSET, VALUE, "g", "t", 3),
        (VALUE, {}),
        "9406a167a17403",
        "96002a07c0cd03e8a27469",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bytes_of_a_record(name):
    record, parsed, key_hex, value_hex = EXAMPLES[name]
    assert (record.key.hex(), record.value.hex()) == (key_hex, value_hex)
    kind, group_id, *_ = codec.parse_key(record.key)
    assert group_id == "g"
    assert codec.parse(kind, record.value) == parsed
    assert type(codec.parse(kind, record.value)[0]) is type(parsed[0])


@pytest.mark.parametrize(
    "key",
    [b"", b"\xc1", b"\x00", b"\x90", b"\x92\x09\xa1g", b"\x91\x01", b"\x81\x01\x02", b"\x93\x01\xa1g\x01"],
)
def test_a_key_of_no_known_kind_is_refused(key):
    with pytest.raises(StorageError, match="__consumer_offsets"):
        GroupMachine().replay(StateRecord(key, b""), Instant(0, 0))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_value_of_no_known_version_is_refused(name):
    record = EXAMPLES[name][0]
    kind = codec.parse_key(record.key)[0]
    for damaged in (b"", b"\x01", record.value[:-1], b"\x92\x01\x00", b"\x90", b"\x91\x00"):
        with pytest.raises(StorageError, match="later version"):
            codec.parse(kind, damaged)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_garbage_gives_the_one_error_or_none(key, value):
    with contextlib.suppress(StorageError):
        GroupMachine().replay(StateRecord(key, value), Instant(0, 0))


def test_tombstones_of_unknown_keys_are_skipped():
    machine = GroupMachine()
    for record, *_ in EXAMPLES.values():
        machine.replay(StateRecord(record.key, None), Instant(0, 0))
    assert not machine.groups


def test_a_member_is_gone_when_nothing_of_it_is_left():
    """A compacted log may begin within the records of a member."""
    machine = GroupMachine()
    records = [EXAMPLES[name][0] for name in ("target", "current", "subscription")]
    machine.replay(records[0], Instant(0, 0))
    for record in records:
        machine.replay(StateRecord(record.key, None), Instant(0, 0))
    assert not machine.groups
