"""Encodes and decodes the messages between voters: msgpack arrays of ``[kind, field, …]``, never a pickle.

Every message has a schema. ``decode`` refuses a message that violates its schema. A valid message becomes a
dict with the names and types that pysyncobj and ``voter`` rely on.

::

    append            the entries after (prevLogIdx, prevLogTerm), and the commit index
    chunk             a part of the leader's snapshot
    next_node_idx     responds to an append or a chunk; ``stamp`` is the sender's term, ``seq`` the number of
                      that append or chunk, and ``counts`` is False if the sender abstains
    request_vote, response_vote, timeout_now
    prevote           asks whether the receiver would vote for the sender in a new term, so that a returning
                      node deposes no leader; prevote_ok: it would
    probe             asks whether the named node leads the term; probe_ok: it does
    stale_term        notifies the receiver of a newer term
    inquire           asks for the eligibility of the receiver
    eligibility       whether the sender may vote or has a new directory (see ``eligibility``), and where its
                      log ends (see ``restart``)
    join              asks the receiver to send its log to the sender, an observer (see ``voter_set``)

``directory`` is the sender's in next_node_idx, eligibility and join, and empty if the sender makes no promise
at present (``restart``). In request_vote and prevote it is the one that the candidate's voter set lists for
the receiver (R97).

A version of RaftMessages has one schema of each message, and a later version appends fields. A message is
encoded in the version that the receiver supports (R90). A field that an earlier version lacks has the value
of ``_ABSENT`` after decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from kafkalite.errors import RemoteProtocolError
from kafkalite.limits import MIB
from kafkalite.raft.entries import MAX_COMMAND_BYTES, NO_OP, REGULAR, VOTERS
from kafkalite.raft.voter_set import voters_in

Message = dict[str, Any]

MAX_CHUNK_BYTES: Final = 4 * MIB

VERSION: Final = 1  #: the newest version of RaftMessages that this module encodes and decodes


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_node(value: Any) -> bool:
    return type(value) is int and -1 <= value < 2**31


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_directory(value: Any) -> bool:
    return type(value) is bytes and len(value) <= 64


def _is_address(value: Any) -> bool:
    return type(value) is str and len(value) <= 1_000


def _is_chunk(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not tuple or len(value) != 3:
        return False
    data, first, last = value
    return type(data) is bytes and len(data) <= MAX_CHUNK_BYTES and _is_flag(first) and _is_flag(last)


def _is_entries(value: Any) -> bool:
    return type(value) is tuple and all(_is_entry(entry) for entry in value)


def _is_entry(entry: Any) -> bool:
    if type(entry) is not tuple or len(entry) != 3:
        return False
    command, index, term = entry
    if type(command) is not bytes or not 1 <= len(command) <= MAX_COMMAND_BYTES + 1:
        return False
    if command[0] == VOTERS:
        voters_in(command)
    return command[0] in {REGULAR, NO_OP, VOTERS} and _is_count(index) and _is_count(term)


def _is_bootstrap_voters(value: Any) -> bool:
    return type(value) is tuple and all(
        type(pair) is tuple and len(pair) == 2 and _is_node(pair[0]) and _is_directory(pair[1])
        for pair in value
    )


#: Checks of the fields that are not counts. A field name has the same type in all kinds of messages.
_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "entries": _is_entries,
    "serialized": _is_chunk,
    "reset": _is_flag,
    "success": _is_flag,
    "counts": _is_flag,
    "leader": _is_node,
    "directory": _is_directory,
    "address": _is_address,
    "is_new": _is_flag,
    "is_voter": _is_flag,
    "bootstrap_voters": _is_bootstrap_voters,
}

#: The first field of a message is its kind. Never reuse a number for another kind.
_SCHEMA: Final[dict[int, tuple[str, tuple[str, ...]]]] = {
    1: ("append", ("term", "commit_index", "seq", "prevLogIdx", "prevLogTerm", "entries")),
    2: ("chunk", ("term", "commit_index", "seq", "serialized")),
    3: ("next_node_idx", ("next_node_idx", "reset", "success", "stamp", "seq", "counts", "directory")),
    4: ("request_vote", ("term", "last_log_index", "last_log_term", "directory")),
    5: ("response_vote", ("term",)),
    6: ("timeout_now", ("term",)),
    7: ("prevote", ("term", "seq", "last_log_index", "last_log_term", "directory")),
    8: ("prevote_ok", ("seq",)),
    9: ("probe", ("term", "seq", "leader")),
    10: ("probe_ok", ("seq",)),
    11: ("stale_term", ("term",)),
    12: ("inquire", ("seq",)),
    13: (
        "eligibility",
        (
            "seq",
            "directory",
            "is_new",
            "bootstrap_voters",
            "is_voter",
            "term",
            "last_log_index",
            "last_log_term",
        ),
    ),
    14: ("join", ("directory", "address")),
}
#: {kind number: field count in version 0}, of the messages to which version 1 has appended fields.
_COUNTS_IN_V0: Final[dict[int, int]] = {3: 6, 4: 3, 7: 4, 13: 4}
#: What a message that lacks the field means: the sender's log is not compared with others (R59, R90).
_ABSENT: Final[Message] = {
    "is_voter": False,
    "term": 0,
    "last_log_index": 0,
    "last_log_term": 0,
    "directory": b"",  # the voters were never changed (R97)
}
_NUMBER: Final = {kind: number for number, (kind, _) in _SCHEMA.items()}
_APPEND: Final = "append_entries"  # the library's name for both append and chunk


def encode(message: Message, version: int = VERSION) -> bytes:
    """Encode a message that conforms to its schema, in a version that the receiver supports."""
    kind = message["type"]
    if kind == _APPEND:
        kind = "append" if "prevLogIdx" in message else "chunk"
    number = _NUMBER[kind]
    packed: bytes = msgpack.packb([number, *(message[name] for name in field_names(number, version))])
    return packed


def field_names(number: int, version: int) -> tuple[str, ...]:
    """Return the fields of a message of this kind in a version of RaftMessages (R90)."""
    names = _SCHEMA[number][1]
    return names[: _COUNTS_IN_V0.get(number)] if version == 0 else names


def decode(data: bytes | memoryview) -> Message:
    """Decode a message of any version. Raises RemoteProtocolError if the message violates its schema."""
    try:
        values = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a Raft message is not valid msgpack: {error}") from error
    match values:
        case (int(number), *fields) if number in _SCHEMA:
            kind, schema = _SCHEMA[number]
        case _:
            raise RemoteProtocolError(f"not a Raft message: {str(values)[:80]}")
    if len(fields) == _COUNTS_IN_V0.get(number):
        fields += [_ABSENT[name] for name in schema[len(fields) :]]
    if len(fields) != len(schema):
        raise RemoteProtocolError(f"a Raft message {kind} with {len(fields)} fields instead of {len(schema)}")
    message: Message = {"type": _APPEND if kind in {"append", "chunk"} else kind}
    for name, value in zip(schema, fields, strict=True):
        if not _CHECKS.get(name, _is_count)(value):
            raise RemoteProtocolError(f"a Raft message {kind} with a bad {name}: {str(value)[:80]}")
        message[name] = value
    if kind == "append":
        _check_order(message)
    return message


def _check_order(message: Message) -> None:
    """Raise RemoteProtocolError if the indexes of the entries do not continue ``prevLogIdx`` without a gap,
    or if their terms decrease or exceed the leader's term."""
    index, term = message["prevLogIdx"], message["prevLogTerm"]
    for _, entry_index, entry_term in message["entries"]:
        index += 1
        if entry_index != index or not term <= entry_term <= message["term"]:
            raise RemoteProtocolError(
                f"a Raft message with entry {entry_index} of term {entry_term} out of order"
            )
        term = entry_term
