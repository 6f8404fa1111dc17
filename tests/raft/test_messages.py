"""Raft's messages as bytes: a message that conforms to its schema is read back, all others are refused."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.errors import RemoteProtocolError
from kafkalite.raft.messages import MAX_CHUNK_BYTES, decode, encode

ENTRIES = ((b"\x00abc", 8, 3), (b"\x01", 9, 4))
MESSAGES = [
    {
        "type": "append_entries",
        "term": 4,
        "commit_index": 6,
        "seq": 2,
        "prevLogIdx": 7,
        "prevLogTerm": 3,
        "entries": ENTRIES,
    },
    {"type": "append_entries", "term": 4, "commit_index": 6, "seq": 2, "serialized": (b"part", True, False)},
    {"type": "append_entries", "term": 4, "commit_index": 6, "seq": 2, "serialized": None},
    {
        "type": "next_node_idx",
        "next_node_idx": 9,
        "reset": False,
        "success": True,
        "stamp": 4,
        "seq": 2,
        "counts": True,
        "directory": b"d" * 16,
    },
    {"type": "request_vote", "term": 5, "last_log_index": 9, "last_log_term": 4, "directory": b""},
    {"type": "response_vote", "term": 5},
    {"type": "timeout_now", "term": 5},
    {"type": "prevote", "term": 6, "seq": 1, "last_log_index": 9, "last_log_term": 4, "directory": b"d"},
    {"type": "prevote_ok", "seq": 1},
    {"type": "probe", "term": 5, "seq": 3, "leader": 1},
    {"type": "probe_ok", "seq": 3},
    {"type": "stale_term", "term": 8},
    {"type": "inquire", "seq": 7},
    {"type": "join", "directory": b"d" * 16, "address": "10.0.0.4:9093"},
    {
        "type": "eligibility",
        "seq": 7,
        "directory": b"d" * 16,
        "is_new": True,
        "bootstrap_voters": ((1, b"a"), (2, b"b")),
        "is_voter": False,
        "term": 8,
        "last_log_index": 9,
        "last_log_term": 7,
    },
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["type"])
def test_a_message_is_read_back(message):
    assert decode(encode(message)) == message


#: As voters of version 0 of RaftMessages write and read them, which say nothing of their logs.
EARLIER = [13, 7, b"d" * 16, True, [[1, b"a"], [2, b"b"]]]


def test_an_earlier_voter_gets_messages_that_it_reads_and_its_own_are_read():
    """R90, R59: the log of a voter that says nothing of its log is not compared."""
    eligibility = MESSAGES[-1]
    assert msgpack.unpackb(encode(eligibility, 0)) == EARLIER
    unknown = {"is_voter": False, "term": 0, "last_log_index": 0, "last_log_term": 0}
    assert decode(msgpack.packb(EARLIER)) == {**eligibility, **unknown}
    for message in MESSAGES[:-1]:
        names_directory = message["type"] in {"next_node_idx", "request_vote", "prevote"}
        assert decode(encode(message, 0)) == (message | {"directory": b""} if names_directory else message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["type"])
def test_a_field_of_another_type_is_refused(message):
    values = msgpack.unpackb(encode(message))
    for at in range(1, len(values)):
        for wrong in (1.5, "text", -7, [1], {"a": 1}):
            if isinstance(wrong, str) and isinstance(values[at], str):
                continue
            with pytest.raises(RemoteProtocolError):
                decode(msgpack.packb([*values[:at], wrong, *values[at + 1 :]]))
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([*values, 1]))
    if message["type"] not in {
        "next_node_idx",
        "request_vote",
        "prevote",
    }:  # in version 0 without a directory
        with pytest.raises(RemoteProtocolError):
            decode(msgpack.packb(values[:-1]))


@pytest.mark.parametrize(
    "entries",
    [
        [[b"\x00a", 9, 3]],  # a gap
        [[b"\x00a", 8, 5]],  # of a term that the leader has not reached
        [[b"\x00a", 8, 3], [b"\x00b", 9, 2]],  # back to an older term
        [[b"\x02membership", 8, 3]],
        [[b"\x03version", 8, 3]],
        [[b"", 8, 3]],
        [["text", 8, 3]],
        [[b"\x00a", 8]],
        [[b"\x00a", 8, True]],
    ],
)
def test_entries_that_make_no_log_are_refused(entries):
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([1, 4, 6, 2, 7, 3, entries]))


def test_a_piece_is_bounded():
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([2, 4, 6, 2, [bytes(MAX_CHUNK_BYTES + 1), True, True]]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data):
    with contextlib.suppress(RemoteProtocolError):
        decode(data)
