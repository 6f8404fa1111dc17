"""Checks of coordinators: groups and their offsets, transactions, and the limits of their requests."""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kafkalite.conformance.declared import Checks
from kafkalite.conformance.peer import SHORT_MS, Answer, Cluster, Peer, expect, expect_one_of, name_of, retry
from kafkalite.conformance.record_checks import appended, batch_of, end_of, fetch, first_batch, produce
from kafkalite.errors import ErrorCode
from kafkalite.groups.heartbeat import MAX_NAME_LENGTH
from kafkalite.groups.member import LEAVE_EPOCH
from kafkalite.limits import MAX_GROUPS_PER_REQUEST, MAX_TRANSACTIONAL_ID_LENGTH
from kafkalite.protocol.messages.data import InitProducerIdRequest
from kafkalite.protocol.messages.groups import (
    AssignedTopic,
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    GroupPartition,
    OffsetCommitRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.protocol.messages.transactions import EndTxnRequest
from kafkalite.records.header import CONTROL_BIT, TRANSACTIONAL_BIT
from kafkalite.records.partitioners import partition_for_key

COORDINATOR_CHECKS: Final = Checks()
check = COORDINATOR_CHECKS.check
_GROUP: Final = 0
_TRANSACTION: Final = 1
_INTERNAL: Final = {_GROUP: "__consumer_offsets", _TRANSACTION: "__transaction_state"}
_READ_COMMITTED: Final = 1


@check("coordinators.partition", "6")
def _partition(cluster: Cluster) -> None:
    for kind, topic in _INTERNAL.items():
        for key in ("a", cluster.name("key"), "\u00e9\u00e8"):
            cluster.coordinator(kind, key)
            found = cluster.peer().ask(FindCoordinatorRequest(kind, [key])).message.coordinators[0]
            shape = cluster.peer().ask(MetadataRequest([topic], False)).message.topics[0]
            count = len(shape.partitions)
            expect(
                found.partition, partition_for_key(key.encode(), count), f"partition of {key!r} in {topic}"
            )


@check("coordinators.limits", "4")
def _limits(cluster: Cluster) -> None:
    peer = cluster.peer()
    too_many = ["g"] * (MAX_GROUPS_PER_REQUEST + 1)
    expect(peer.ask(FindCoordinatorRequest(0, too_many)).error, "INVALID_REQUEST", "too many keys")
    expect(peer.ask(FindCoordinatorRequest(9, ["g"])).error, "INVALID_REQUEST", "key type 9")
    expect(peer.ask(DescribeGroupsRequest(too_many, False)).error, "INVALID_REQUEST", "too many groups")
    name = "g" * (MAX_NAME_LENGTH + 1)
    answer = cluster.coordinator(_GROUP, name).ask(_heartbeat(name, "m", 0, ["t"]))
    expect(answer.error, "INVALID_GROUP_ID", "a group id over its limit")
    name = "t" * (MAX_TRANSACTIONAL_ID_LENGTH + 1)
    answer = cluster.coordinator(_TRANSACTION, name).ask(InitProducerIdRequest(name, SHORT_MS, -1, -1))
    expect(answer.error, "INVALID_REQUEST", "a transactional id over its limit")


# --- groups ------------------------------------------------------------------------------------------


def _heartbeat(
    group: str, member: str, epoch: int, topics: list[str] | None, owned: list[AssignedTopic] | None = None
) -> ConsumerGroupHeartbeatRequest:
    timeout_ms = -1 if topics is None else 60_000
    return ConsumerGroupHeartbeatRequest(group, member, epoch, None, timeout_ms, topics, None, None, owned, 0)


class _Member:
    """A member of a group. By default, its heartbeats confirm the assignment, and thereby all revocations."""

    def __init__(self, cluster: Cluster, group: str, name: str, topic: str) -> None:
        self.cluster, self.group, self.name = cluster, group, name
        self.peer = cluster.coordinator(_GROUP, group)
        self.assignment: list[AssignedTopic] = []
        self.epoch = 0
        self.take(self.peer.ask(_heartbeat(group, name, 0, [topic])))

    def take(self, answer: Answer) -> None:
        expect(answer.error, "NONE", f"a heartbeat of {self.name}")
        self.epoch = answer.message.member_epoch
        if answer.message.assignment is not None:
            self.assignment = answer.message.assignment

    def beat(self, *, owned: list[AssignedTopic] | None = None) -> list[int]:
        """Send a heartbeat with the partitions ``owned`` (None: all assigned ones).

        Return the partitions that are assigned after the response.
        """
        owned = self.assignment if owned is None else owned
        self.take(self.peer.ask(_heartbeat(self.group, self.name, self.epoch, None, owned)))
        return self.partitions

    @property
    def partitions(self) -> list[int]:
        return sorted(number for topic in self.assignment for number in topic.partitions)

    def leave(self) -> None:
        self.peer.ask(_heartbeat(self.group, self.name, LEAVE_EPOCH, None))


@check("groups.membership", "6")
def _membership(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic(4)
    member = _Member(cluster, group, "one", topic)
    retry(member.beat, lambda found: found == [0, 1, 2, 3], 50)
    expect(member.epoch > 0, True, "a member's epoch is above 0")
    member.leave()
    answer = member.peer.ask(_heartbeat(group, "one", member.epoch, None))
    expect(answer.error, "UNKNOWN_MEMBER_ID", "a heartbeat after leaving")


@check("groups.revocation", "6")
def _revocation(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic(4)
    first = _Member(cluster, group, "one", topic)
    retry(first.beat, lambda found: found == [0, 1, 2, 3], 50)
    before = first.assignment
    second = _Member(cluster, group, "two", topic)
    first.beat(owned=before)
    expect(len(first.partitions), 2, "partitions of the first of two members")
    expect(second.beat(), [], "partitions of the second, before the first confirms the revocation")
    first.beat()
    retry(second.beat, lambda found: len(found) == 2, 50)
    expect(sorted(first.partitions + second.partitions), [0, 1, 2, 3], "all partitions, each once")
    first.leave()
    retry(second.beat, lambda found: found == [0, 1, 2, 3], 50)
    second.leave()


@check("groups.fencing", "6")
def _fencing(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic()
    member = _Member(cluster, group, "one", topic)
    member.beat()
    answer = member.peer.ask(_heartbeat(group, "one", member.epoch + 5, None))
    expect(answer.error, "FENCED_MEMBER_EPOCH", "an epoch that the member never had")
    answer = member.peer.ask(_heartbeat(group, "other", 3, None))
    expect(answer.error, "UNKNOWN_MEMBER_ID", "a member that never joined")
    request = ConsumerGroupHeartbeatRequest(group, "new", 0, None, 60_000, [topic], None, "none", None, 0)
    expect(member.peer.ask(request).error, "UNSUPPORTED_ASSIGNOR", "an unknown assignor")
    member.leave()


def _offset(topic: str, offset: int, partition: int = 0) -> CommittedOffset:
    return CommittedOffset(topic, partition, offset, -1, "note", -1, "", 0, None)


def _committed(cluster: Cluster, group: str, topic: str, *, is_stable: bool = False) -> Any:
    asked = [GroupPartition(topic, 0)]
    answer = cluster.coordinator(_GROUP, group).ask(OffsetFetchRequest(group, "", -1, is_stable, asked))
    expect(answer.error, "NONE", "OffsetFetch")
    return answer.message.offsets[0]


@check("groups.offsets", "6")
def _offsets(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic()
    peer = cluster.coordinator(_GROUP, group)
    expect(_committed(cluster, group, topic).offset, -1, "an offset that was never committed")
    answer = peer.ask(OffsetCommitRequest(group, "", -1, None, [_offset(topic, 3), _offset(topic, 1, 9)]))
    expect(answer.error, "NONE", "OffsetCommit")
    codes = [name_of(one.error_code) for one in answer.message.offsets]
    expect(codes, ["NONE", "UNKNOWN_TOPIC_OR_PARTITION"], "commits, each by itself")
    found = _committed(cluster, group, topic)
    expect((found.offset, found.metadata), (3, "note"), "the committed offset and its metadata")


@check("groups.commits-of-members", "6")
def _commits(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic()
    member = _Member(cluster, group, "one", topic)
    member.beat()

    def commit(name: str, epoch: int, offset: int) -> str:
        request = OffsetCommitRequest(group, name, epoch, None, [_offset(topic, offset)])
        return member.peer.ask(request).error

    expect(commit("one", member.epoch, 1), "NONE", "a commit with the current epoch")
    expect(commit("one", member.epoch + 1, 2), "STALE_MEMBER_EPOCH", "a commit with another epoch")
    expect(commit("", -1, 3), "UNKNOWN_MEMBER_ID", "a commit without membership in a group with members")
    expect(_committed(cluster, group, topic).offset, 1, "the committed offset")
    member.leave()
    expect(commit("one", member.epoch, 4), "UNKNOWN_MEMBER_ID", "a commit after leaving")


# --- transactions ------------------------------------------------------------------------------------


class _Producer:
    """A producer with a transactional id."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.peer: Peer = cluster.coordinator(_TRANSACTION, name)
        request = InitProducerIdRequest(name, 60_000, -1, -1)
        answer = retry(lambda: self.peer.ask(request), lambda one: one.error != "CONCURRENT_TRANSACTIONS")
        expect(answer.error, "NONE", "InitProducerId")
        self.identity = (answer.message.producer_id, answer.message.producer_epoch)
        self.sequence = 0

    def batch(self, value: bytes) -> bytearray:
        identity = {"producer_id": self.identity[0], "producer_epoch": self.identity[1]}
        return batch_of(value, base_sequence=self.sequence, transactional=True, **identity)

    def write(self, leader: Peer, topic: str, value: bytes) -> int:
        """Append one transactional record and return its offset."""
        batch = self.batch(value)
        result = retry(
            lambda: produce(leader, topic, batch, transactional_id=self.name),
            lambda one: one.error_code != ErrorCode.CONCURRENT_TRANSACTIONS,
        )
        expect(name_of(result.error_code), "NONE", "a transactional batch")
        self.sequence += 1
        return int(result.base_offset)

    def end(self, *, commit: bool) -> None:
        """End the transaction. Use the producer id and epoch in the response for the next transaction."""
        answer = self.ask_end(self.identity, commit=commit)
        expect(answer.error, "NONE", "EndTxn")
        following = (answer.message.producer_id, answer.message.producer_epoch)
        expect(following > self.identity, True, "EndTxn returns the next epoch")
        self.identity, self.sequence = following, 0

    def ask_end(self, identity: tuple[int, int], *, commit: bool) -> Answer:
        request = EndTxnRequest(self.name, *identity, commit)
        answer: Answer = retry(
            lambda: self.peer.ask(request), lambda one: one.error != "CONCURRENT_TRANSACTIONS"
        )
        return answer


def _stable(leader: Peer, topic: str, offset: int) -> None:
    """Wait until partition 0 has the last stable offset ``offset``. Raises Violation after about 2 s."""
    retry(lambda: end_of(leader, topic, _READ_COMMITTED), lambda found: found == offset, 100)


@check("transactions.commit", "6")
def _commit(cluster: Cluster) -> None:
    topic = cluster.topic()
    leader, producer = cluster.leader(topic), _Producer(cluster, cluster.name("txn"))
    appended(leader, topic, batch_of(b"before"), "a batch")
    expect(producer.write(leader, topic, b"in"), 1, "the offset of a transactional batch")
    expect(end_of(leader, topic), 2, "the high watermark")
    expect(end_of(leader, topic, _READ_COMMITTED), 1, "the last stable offset while the transaction is open")
    result, payload = fetch(leader, topic, 1, isolation=_READ_COMMITTED)
    expect(payload, b"", "data above the last stable offset with read committed")
    expect(result.last_stable_offset, 1, "last_stable_offset of a fetch")
    producer.end(commit=True)
    _stable(leader, topic, 3)
    result, payload = fetch(leader, topic, 1, isolation=_READ_COMMITTED)
    expect(result.aborted, [], "aborted transactions after a commit")
    batch = first_batch(payload)
    expect(batch.records(topic, 0)[0].value, b"in", "the committed record")
    marker = first_batch(payload[batch.header.length_bytes :])
    expect(marker.header.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT), 0x30, "the bits of the marker")
    expect(bytes(marker.records(topic, 0)[0].key or b""), b"\0\0\0\1", "the key of a commit marker")


@check("transactions.abort", "6")
def _abort(cluster: Cluster) -> None:
    topic = cluster.topic()
    leader, producer = cluster.leader(topic), _Producer(cluster, cluster.name("txn"))
    identity = producer.identity
    appended(leader, topic, batch_of(b"before"), "a batch")
    producer.write(leader, topic, b"gone")
    producer.end(commit=False)
    _stable(leader, topic, 3)
    result, _ = fetch(leader, topic, 0, isolation=_READ_COMMITTED)
    expect([tuple(one) for one in result.aborted], [(identity[0], 1)], "aborted transactions")
    result, _ = fetch(leader, topic, 0)
    expect(result.aborted, [], "aborted transactions with read uncommitted")


@check("transactions.fencing", "6")
def _fenced(cluster: Cluster) -> None:
    topic = cluster.topic()
    leader, name = cluster.leader(topic), cluster.name("txn")
    former = _Producer(cluster, name)
    former.write(leader, topic, b"open")
    later = _Producer(cluster, name)
    expect(later.identity > former.identity, True, "a later producer has a later epoch")
    result = produce(leader, topic, former.batch(b"late"), transactional_id=name)
    fenced = ("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")
    expect_one_of(name_of(result.error_code), fenced, "a batch of a fenced producer")
    expect(
        former.ask_end(former.identity, commit=True).error, "PRODUCER_FENCED", "EndTxn of a fenced producer"
    )
    fetched, _ = fetch(leader, topic, 0, isolation=_READ_COMMITTED)
    expect([one.first_offset for one in fetched.aborted], [0], "the fenced producer's transaction is aborted")


@check("transactions.repeated-end", "6")
def _repeated_end(cluster: Cluster) -> None:
    topic = cluster.topic()
    leader, producer = cluster.leader(topic), _Producer(cluster, cluster.name("txn"))
    former = producer.identity
    producer.write(leader, topic, b"v")
    producer.end(commit=True)
    again = producer.ask_end(former, commit=True)
    expect(again.error, "NONE", "EndTxn again")
    expect(tuple(again.message[2:]), producer.identity, "the identity in its response")
    expect(producer.ask_end(former, commit=False).error, "INVALID_TXN_STATE", "the opposite decision")
    wrong = (former[0] + 1_000_000, 0)
    expect(producer.ask_end(wrong, commit=True).error, "INVALID_PRODUCER_ID_MAPPING", "another producer id")
    request = InitProducerIdRequest(producer.name, 2**31, -1, -1)
    expect(producer.peer.ask(request).error, "INVALID_TRANSACTION_TIMEOUT", "a time-out of 24 days")


@check("transactions.acks", "6")
def _acks(cluster: Cluster) -> None:
    topic = cluster.topic()
    producer = _Producer(cluster, cluster.name("txn"))
    result = produce(
        cluster.leader(topic), topic, producer.batch(b"v"), acks=1, transactional_id=producer.name
    )
    expect(name_of(result.error_code), "INVALID_REQUIRED_ACKS", "acks 1 in a transaction")


@check("transactions.offsets", "6")
def _txn_offsets(cluster: Cluster) -> None:
    group, topic = cluster.group(), cluster.topic()
    producer = _Producer(cluster, cluster.name("txn"))
    for is_commit, offset, expected in ((False, 5, -1), (True, 7, 7)):
        request = TxnOffsetCommitRequest(
            producer.name, *producer.identity, group, "", -1, None, [_offset(topic, offset)]
        )
        peer = cluster.coordinator(_GROUP, group)
        answer = retry(partial(peer.ask, request), lambda one: one.error == "NONE", 100)
        expect(name_of(answer.message.offsets[0].error_code), "NONE", "TxnOffsetCommit")
        found = _committed(cluster, group, topic, is_stable=True)
        expect(name_of(found.error_code), "UNSTABLE_OFFSET_COMMIT", "the offset of an open transaction")
        expect(_committed(cluster, group, topic).offset, -1, "the committed offset before the end")
        producer.end(commit=is_commit)
        found = retry(
            lambda: _committed(cluster, group, topic, is_stable=True), lambda one: not one.error_code, 100
        )
        expect(found.offset, expected, "the committed offset after the end")
