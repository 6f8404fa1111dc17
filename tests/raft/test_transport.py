"""Messages between voters: only those of voters, over the newest link."""

from __future__ import annotations

import pickle

import msgpack
import pytest

from kafkalite.raft.messages import encode
from kafkalite.raft.transport import RaftTransport

MESSAGE = {"type": "response_vote", "term": 4}


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


class Receiver:
    def __init__(self):
        self.calls = []

    def transport(self):
        return RaftTransport(
            [2, 3],
            on_attached=lambda peer: self.calls.append(("attached", peer)),
            on_detached=lambda peer: self.calls.append(("detached", peer)),
            on_message=lambda peer, message: self.calls.append((peer, message)),
        )


class Wire:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def test_messages_of_other_nodes_and_malformed_ones_are_dropped(caplog):
    receiver = Receiver()
    transport = receiver.transport()
    for data in (b"", b"\xc1", pickle.dumps(Bomb()), msgpack.packb({"type": "status"}), msgpack.packb([99])):
        transport.receive(2, data)
    transport.receive(4, encode(MESSAGE))
    transport.attach(4, Wire())
    assert receiver.calls == []
    assert transport.refused_count == 7
    assert 1 <= caplog.text.count("raft refused") <= 4
    transport.receive(2, encode(MESSAGE))
    assert receiver.calls == [(2, MESSAGE)]


def test_a_new_link_replaces_the_old_one_and_a_late_detach_is_ignored():
    receiver, old, new = Receiver(), Wire(), Wire()
    transport = receiver.transport()
    assert not transport.send(2, MESSAGE)
    transport.attach(2, old)
    transport.attach(2, new)
    transport.detach(2, old)
    assert transport.send(2, MESSAGE)
    assert (len(old.sent), len(new.sent)) == (0, 1)
    assert transport.attached() == [2]
    transport.detach(2, new)
    assert receiver.calls == [("attached", 2), ("detached", 2), ("attached", 2), ("detached", 2)]
