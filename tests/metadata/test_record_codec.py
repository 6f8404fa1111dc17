"""Record bytes: exact, round trip, and one named error for everything else."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import StorageError
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import (
    AclRecord,
    BrokerChangeRecord,
    BrokerRegistrationRecord,
    ClientQuotaRecord,
    ConfigRecord,
    HighWatermarksRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    ScramCredentialRecord,
    TopicRecord,
)

EXACT = [
    (TopicRecord("ab", "orders"), [1, 0, "ab", "orders"]),
    (RemoveTopicRecord("ab"), [2, 0, "ab"]),
    (
        PartitionRecord("ab", 3, (1, 2, 3), (1,), 1, 4, 5, (2,), (3,), (2,), 4, 4),
        [3, 3, "ab", 3, [1, 2, 3], [1], 1, 4, 5, [2], [3], [2], 4, 4],
    ),
    (
        PartitionRecord("ab", 3, (1, 2, 3), (1,), 1, 4, 5, target_replicas=(3, 2), added_replicas=((3, 5),)),
        [3, 4, "ab", 3, [1, 2, 3], [1], 1, 4, 5, [], [], [], -1, -1, [3, 2], [[3, 5]]],
    ),
    (ConfigRecord("topic", "orders", "retention.ms", "-1"), [4, 0, "topic", "orders", "retention.ms", "-1"]),
    (ConfigRecord("topic", "orders", "retention.ms", None), [4, 0, "topic", "orders", "retention.ms", None]),
    (
        BrokerRegistrationRecord(1, 9, ("a:1", "b:2"), None, 77, "in", "dir", 8, True, False, 3, True),
        [5, 2, 1, 9, ["a:1", "b:2"], None, 77, "in", "dir", 8, True, False, 3, True],
    ),
    (
        BrokerRegistrationRecord(1, 9, (), "r1", 77),
        [5, 2, 1, 9, [], "r1", 77, "", "", 0, False, False, 0, False],
    ),
    (BrokerChangeRecord(1, 9, True, False), [6, 0, 1, 9, True, False]),
    (HighWatermarksRecord((("ab", 0, 5), ("ab", 1, 0))), [7, 0, [["ab", 0, 5], ["ab", 1, 0]]]),
    (ProducerIdsRecord(1_000), [8, 0, 1_000]),
    (AclRecord(2, 4, "ab", "User:a", "*", 3, 3, True), [9, 0, 2, 4, "ab", "User:a", "*", 3, 3, True]),
    (ScramCredentialRecord("a", 1, b"s", b"k", b"v", 4_096), [10, 0, "a", 1, b"s", b"k", b"v", 4_096]),
    (
        ClientQuotaRecord("alice", "", None, "request_percentage", 12.5),
        [11, 0, "alice", "", None, "request_percentage", 12.5],
    ),
    (
        ClientQuotaRecord(None, None, "::1", "connection_creation_rate", None),
        [11, 0, None, None, "::1", "connection_creation_rate", None],
    ),
]

OLD = [
    ([3, 0, "ab", 3, [1, 2], [1], 1, 4, 5], PartitionRecord("ab", 3, (1, 2), (1,), 1, 4, 5)),
    ([3, 1, "ab", 3, [1, 2], [1], 1, 4, 5, [2], []], PartitionRecord("ab", 3, (1, 2), (1,), 1, 4, 5, (2,))),
    (
        [3, 2, "ab", 3, [1, 2], [1], 1, 4, 5, [2], [], [2], 3],
        PartitionRecord("ab", 3, (1, 2), (1,), 1, 4, 5, (2,), (), (2,), 3),
    ),
    (
        [5, 1, 1, 9, ["a:1"], None, 77, "in", "dir", 8, True, False],
        BrokerRegistrationRecord(1, 9, ("a:1",), None, 77, "in", "dir", 8, True, False),
    ),
    (
        [5, 0, 1, 9, ["a:1"], None, 77],
        BrokerRegistrationRecord(1, 9, ("a:1",), None, 77, registration_offset=9),
    ),
]


@pytest.mark.parametrize(("array", "record"), OLD)
def test_a_record_of_an_older_version_keeps_its_meaning(array, record):
    """Data directories of one node, written before there were several, keep their state."""
    assert record_codec.from_bytes(msgpack.packb([array])) == [record]
    again = record_codec.from_bytes(record_codec.to_bytes([record]))
    assert again == [record]


def test_a_partition_that_is_not_reassigned_is_written_as_revisions_without_reassignments_read_it():
    record = PartitionRecord("ab", 3, (1, 2), (1,), 1, 4, 5)
    newest = [3, 4, "ab", 3, [1, 2], [1], 1, 4, 5, [], [], [], -1, -1, [], []]
    assert record_codec.to_array(record)[:2] == [3, 3]
    assert record_codec.from_array(newest) == record


@pytest.mark.parametrize(("record", "array"), EXACT)
def test_every_record_has_its_fields_in_order(record, array):
    assert msgpack.unpackb(record_codec.to_bytes([record])) == [array]
    assert record_codec.from_bytes(msgpack.packb([array])) == [record]


def test_the_bytes_of_every_type_stay_as_they_are():
    written = bytes.fromhex(
        "9f940100a26162a66f7264657273930200a261629e0303a26162039301020391010104059102910391020404"
        "dc00100304a2616203930102039101010405909090ffff92030291920305"
        "960400a5746f706963a66f7264657273ac726574656e74696f6e2e6d73a22d31960400a5746f706963a66f7264657273ac72"
        "6574656e74696f6e2e6d73c09e0502010992a3613a31a3623a32c04da2696ea364697208c3c203c39e0502010990a27231"
        "4da0a000c2c200c29606000109c3c29307009293a26162000593a261620100930800cd03e8"
        "9a09000204a26162a6557365723a61a12a0303c3980a00a16101c40173c4016bc40176cd1000"
        "970b00a5616c696365a0c0b2726571756573745f70657263656e74616765cb4029000000000000970b00c0c0a33a3a31"
        "b8636f6e6e656374696f6e5f6372656174696f6e5f72617465c0"
    )
    assert record_codec.to_bytes([record for record, _ in EXACT]) == written


text = st.text(max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
numbers = st.integers(-1, 2**63 - 1)
records = st.one_of(
    st.builds(TopicRecord, text, text),
    st.builds(RemoveTopicRecord, text),
    st.builds(
        PartitionRecord,
        text,
        numbers,
        ids,
        ids,
        numbers,
        numbers,
        numbers,
        ids,
        ids,
        ids,
        numbers,
        numbers,
        ids,
        st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
    ),
    st.builds(BrokerChangeRecord, numbers, numbers, st.booleans(), st.booleans()),
    st.builds(HighWatermarksRecord, st.lists(st.tuples(text, numbers, numbers), max_size=3).map(tuple)),
    st.builds(ProducerIdsRecord, numbers),
    st.builds(AclRecord, numbers, numbers, text, text, text, numbers, numbers, st.booleans()),
    st.builds(ScramCredentialRecord, text, numbers, *[st.binary(max_size=4)] * 3, numbers),
    st.builds(ConfigRecord, text, text, text, st.none() | text),
    st.builds(
        BrokerRegistrationRecord,
        numbers,
        numbers,
        st.lists(text, max_size=3).map(tuple),
        st.none() | text,
        numbers,
        text,
        text,
        numbers,
        st.booleans(),
        st.booleans(),
        numbers,
        st.booleans(),
    ),
)


@settings(derandomize=True, deadline=None)
@given(st.lists(records, max_size=10))
def test_records_survive_the_round_trip(some):
    assert record_codec.from_bytes(record_codec.to_bytes(some)) == some


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=60))
def test_garbage_is_a_storage_error_or_records(data):
    try:
        found = record_codec.from_bytes(data)
    except StorageError:
        return
    assert record_codec.from_bytes(record_codec.to_bytes(found)) == found


@pytest.mark.parametrize("array", [[99, 0, "x"], [1, 1, "ab", "orders"], [3, 5], [99, 3]])
def test_a_newer_type_or_version_is_refused_with_a_hint(array):
    with pytest.raises(StorageError, match=r"is unknown.*newer kafkalite"):
        record_codec.from_arrays([array])


@pytest.mark.parametrize(
    "array",
    [
        [],
        None,
        "text",
        [1],
        [1, 0, "ab"],
        [1, 0, "ab", 3],
        [3, 0, "ab", 3, [1, "x"], [1], 1, 4, 5],
        [3, 0, "ab", 3, [1], ["x"], 1, 4, 5],
        [4, 0, "topic", "orders", "retention.ms", 5],
        [3, 0, "ab", 3, [1], [1], 1, 4, 5, [], []],
        [3, 1, "ab", 3, [1], [1], 1, 4, 5],
        [3, 1, "ab", 3, [1], [1], 1, 4, 5, ["x"], []],
        [5, 0, 1, 9, [3], None, 77],
        [5, 1, 1, 9, ["a:1"], None, 77],
        [5, 1, 1, 9, ["a:1"], None, 77, "in", "dir", 8, 1, 0],
        [6, 0, 1, 9, 1, 0],
        [7, 0, [["ab", 0]]],
        [7, 0, 5],
        [3, 4, "ab", 3, [1], [1], 1, 4, 5, [], [], [], -1, -1, [1], [[1]]],
        [3, 4, "ab", 3, [1], [1], 1, 4, 5, [], [], [], -1, -1],
        [8, 0, "x"],
        ["1", 0, "ab", "orders"],
    ],
)
def test_wrong_fields_are_refused(array):
    with pytest.raises(StorageError, match="wrong shape"):
        record_codec.from_arrays([array])


def test_a_value_that_is_no_array_of_records_is_refused():
    with pytest.raises(StorageError, match="must be an array, found dict"):
        record_codec.from_bytes(msgpack.packb({}))
    with pytest.raises(StorageError, match="not valid msgpack"):
        record_codec.from_bytes(b"\xc1")
