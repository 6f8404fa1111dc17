"""Decide, commit, replay, publish, reply - also when another node's entry comes first."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.clock import SystemClock
from kafkalite.errors import (
    DiskFullError,
    ErrorCode,
    LogOfflineError,
    NotControllerError,
    ShuttingDownError,
    ThrottlingQuotaExceededError,
)
from kafkalite.metadata.features import SUPPORTED
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.records import BrokerRegistrationRecord
from kafkalite.protocol.messages.admin import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    NewTopic,
)
from kafkalite.protocol.messages.cluster import RegisterBrokerRequestV1
from kafkalite.raft import controller_node
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import seeded_rng


def create(*names, partitions=1, validate_only=False):
    return CreateTopicsRequest(0, validate_only, [NewTopic(name, partitions, 1, {}) for name in names])


def register(incarnation=1):
    """A process of broker 1."""
    return RegisterBrokerRequestV1(
        1, f"{incarnation:032x}", "d" * 32, ["a:1"], None, -1, True, [], 0, list(SUPPORTED)
    )


def codes(response):
    return [topic.error_code for topic in response.topics]


def node_on(quorum, node_id=1, **settings):
    return ControllerNode(quorum, node_id, SystemClock(), seeded_rng(node_id), **settings)


async def single(quorum=None, **settings):
    node = node_on(quorum or SingleQuorum(), **settings)
    await node.start()
    await node.submit(register())
    return node


async def test_a_reply_comes_when_the_image_shows_it():
    node = await single()
    response = await node.submit(create("orders", partitions=3))
    assert isinstance(response, CreateTopicsResponse)
    assert codes(response) == [0]
    assert len(node.image.topics["orders"].partitions) == 3
    assert node.controller_id == 1
    await node.stop()


async def test_publishers_receive_every_image_in_order():
    node = node_on(SingleQuorum())
    seen = []
    node.publishers.append(lambda delta, image: seen.append(("first", delta.before, image)))
    node.publishers.append(lambda delta, image: seen.append(("second", delta.before, image)))
    await node.start()
    await node.submit(register())
    await node.submit(create("a"))
    assert [name for name, _, _ in seen] == ["first", "second"] * 3
    images = [image for name, _, image in seen if name == "first"]
    assert [before for name, before, _ in seen if name == "first"] == [EMPTY, *images[:-1]]
    assert [image.metadata_offset for image in images] == [0, 2, 3]
    assert images[-1] is node.image
    await node.stop()


async def test_a_start_publishes_the_stored_state_once(disk, kit):
    inline = kit.InlineExecutor()
    node = await single(SingleQuorum(disk, "meta", executor=inline, snapshot_min_bytes=600))
    for number in range(10):
        await node.submit(create(f"t{number}"))
    await node.submit(DeleteTopicsRequest(0, ["t3"]))
    await node.stop()
    again = node_on(SingleQuorum(disk, "meta", executor=inline))
    deltas = []
    again.publishers.append(lambda delta, image: deltas.append((delta, image)))
    await again.start()
    assert again.image == node.image
    ((delta, image),) = deltas
    assert image is again.image
    assert len(delta.local_changes(1).created) == 9
    await again.stop()


async def test_errors_and_validation_write_nothing():
    node = await single()
    image = node.image
    assert codes(await node.submit(create("a!"))) == [ErrorCode.INVALID_TOPIC_EXCEPTION]
    assert codes(await node.submit(create("a", validate_only=True))) == [0]
    assert node.image is image
    await node.stop()


async def test_commands_that_arrive_together_share_one_entry_and_see_each_other():
    node = await single()
    offset = node.image.metadata_offset
    responses = await asyncio.gather(
        node.submit(create("a")),
        node.submit(create("a")),
        node.submit(DeleteTopicsRequest(0, ["a"])),
        node.submit(create("a")),
    )
    assert [codes(response) for response in responses] == [[0], [ErrorCode.TOPIC_ALREADY_EXISTS], [0], [0]]
    assert node.image.metadata_offset == offset + 1
    assert node.image.topics["a"].topic_id == responses[3].topics[0].topic_id
    await node.stop()


async def test_a_group_is_bounded_and_the_rest_goes_into_the_next_entry():
    node = await single()
    offset = node.image.metadata_offset
    commands = [create(f"t{number}", partitions=5_000) for number in range(3)]
    responses = await asyncio.gather(*(node.submit(command) for command in commands))
    assert [codes(response) for response in responses] == [[0]] * 3
    assert node.image.metadata_offset == offset + 2
    await node.stop()


async def test_two_registrations_in_one_group_have_different_epochs():
    node = await single()
    replies = await asyncio.gather(*(node.submit(register(number)) for number in range(3)))
    epochs = [reply.broker_epoch for reply in replies]
    assert epochs == sorted(set(epochs))
    assert node.image.brokers[1].broker_epoch == epochs[-1]
    await node.stop()


async def test_a_fault_in_one_decision_is_that_commands_alone(monkeypatch):
    node = await single()
    decide = controller_node.decide

    def faulty(image, command, **arguments):
        if command == create("bad"):
            raise ZeroDivisionError
        return decide(image, command, **arguments)

    monkeypatch.setattr(controller_node, "decide", faulty)
    results = await asyncio.gather(
        node.submit(create("a")), node.submit(create("bad")), node.submit(create("b")), return_exceptions=True
    )
    assert isinstance(results[1], ZeroDivisionError)
    assert node.image.topics.keys() == {"a", "b"}
    await node.stop()


async def test_a_record_that_cannot_be_replayed_is_never_committed(monkeypatch):
    node = await single()
    image = node.image
    decide = controller_node.decide

    def without_topic_record(image, command, **arguments):
        step = decide(image, command, **arguments)
        return step._replace(records=step.records[1:])

    monkeypatch.setattr(controller_node, "decide", without_topic_record)
    with pytest.raises(AssertionError, match="no topic with the id"):
        await node.submit(create("a"))
    monkeypatch.undo()
    assert node.image is image
    assert codes(await node.submit(create("a"))) == [0]
    await node.stop()


async def test_a_command_cancelled_before_its_turn_is_not_done():
    node = await single()
    first = asyncio.create_task(node.submit(create("a")))
    second = asyncio.create_task(node.submit(create("b")))
    third = asyncio.create_task(node.submit(create("c")))
    await asyncio.sleep(0)
    second.cancel()
    assert codes(await first) == codes(await third) == [0]
    assert node.image.topics.keys() == {"a", "c"}
    await node.stop()


async def test_a_full_disk_fails_the_commands_and_the_node_continues(disk, kit):
    node = await single(SingleQuorum(disk, "meta", executor=kit.InlineExecutor()))
    disk.full = True
    with pytest.raises(DiskFullError):
        await node.submit(create("a"))
    assert codes(await node.submit(create("a", validate_only=True))) == [0]
    disk.full = False
    assert codes(await node.submit(create("a"))) == [0]
    await node.stop()


async def test_a_failed_disk_stops_the_node_with_its_error(disk, kit):
    node = await single(SingleQuorum(disk, "meta", executor=kit.InlineExecutor()))
    waiting = asyncio.create_task(node.wait_for_offset(99))
    await kit.turn()
    disk.failing = {"sync"}
    with pytest.raises(LogOfflineError):
        await node.submit(create("a"))
    with pytest.raises(LogOfflineError, match="the controller has stopped"):
        await waiting
    with pytest.raises(LogOfflineError, match="the controller has stopped"):
        await node.submit(create("a"))
    with pytest.raises(LogOfflineError):
        await node.wait_for_offset(99)
    await node.stop()


async def test_a_publisher_that_raises_ends_the_node():
    failures = []
    node = await single(on_failed=failures.append)

    def broken(delta, image):
        raise ZeroDivisionError("publisher")

    node.publishers.append(broken)
    with pytest.raises(LogOfflineError, match="publisher"):
        await node.submit(create("a"))
    (failure,) = failures
    assert isinstance(failure, LogOfflineError)
    assert isinstance(failure.__cause__, ZeroDivisionError)
    await node.stop()


async def test_a_node_answers_only_while_it_is_up():
    node = node_on(SingleQuorum())
    with pytest.raises(ShuttingDownError):
        await node.submit(create("a"))
    await node.start()
    await node.stop()
    with pytest.raises(ShuttingDownError):
        await node.submit(create("a"))


async def test_stopping_completes_submitted_commands(disk, kit):
    node = await single(SingleQuorum(disk, "meta"))
    submitted = [asyncio.create_task(node.submit(create(f"t{number}"))) for number in range(5)]
    await asyncio.sleep(0)
    await node.stop()
    assert [codes(await task) for task in submitted] == [[0]] * 5


async def test_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(controller_node, "MAX_QUEUED_COMMANDS", 2)
    node = await single()
    results = await asyncio.gather(
        *(node.submit(create(f"t{number}")) for number in range(4)), return_exceptions=True
    )
    assert [isinstance(result, ThrottlingQuotaExceededError) for result in results] == [
        False,
        False,
        True,
        True,
    ]
    await node.stop()


async def test_a_node_that_does_not_lead_names_the_leader(kit):
    member = kit.Member(kit.SharedLog(random.Random(1)), 1)
    member.leader_id = 2
    node = node_on(member)
    await node.start()
    with pytest.raises(NotControllerError, match="the controller is node 2"):
        await node.submit(create("a"))
    await node.stop()


async def test_a_stale_decision_is_made_again_on_the_newer_image(kit):
    log = kit.SharedLog(random.Random(1))
    members = [kit.Member(log, node_id) for node_id in (1, 2)]
    nodes = [node_on(member, member.leader_id) for member in members]
    for node in nodes:
        await node.start()
    replies = [asyncio.create_task(node.submit(register(number))) for number, node in enumerate(nodes)]
    await kit.turn()
    while any(member.is_behind for member in members):
        for member in members:
            member.deliver()
        await kit.turn()
    first, second = [await reply for reply in replies]
    assert first.broker_epoch < second.broker_epoch
    assert nodes[0].image == nodes[1].image
    assert nodes[0].image.brokers[1].broker_epoch == second.broker_epoch
    for node in nodes:
        await node.stop()


async def test_r18_a_reply_waits_for_this_nodes_image_and_not_only_for_the_commit(kit):
    class CommittedElsewhere(kit.Member):
        """Commits at once; the entry reaches this node when it is delivered."""

        async def commit(self, records, after_offset):
            outcome = self._log.append(after_offset, records)
            outcome.cancel()
            return self._log.entries[-1][0]

    member = CommittedElsewhere(kit.SharedLog(random.Random(1)), 1)
    node = node_on(member)
    await node.start()
    submitted = asyncio.create_task(node.submit(register()))
    await kit.turn()
    assert not submitted.done()
    member.deliver()
    await submitted
    assert node.image.brokers.keys() == {1}
    await node.stop()


async def test_a_snapshot_that_arrives_later_replaces_the_image(kit):
    member = kit.Member(kit.SharedLog(random.Random(1)), 1)
    node = node_on(member)
    await node.start()
    node.apply(3, kit.topic(1))
    deltas = []
    node.publishers.append(lambda delta, image: deltas.append(delta))
    waiting = asyncio.create_task(node.wait_for_offset(8))
    further = asyncio.create_task(node.wait_for_offset(10))
    await kit.turn()
    node.load(9, kit.topic(2))
    await waiting
    assert not further.done()
    assert node.image.topics.keys() == {"t2"}
    assert node.snapshot()[0] == 9
    assert list(node.snapshot()[1]) == kit.topic(2)
    changes = deltas[0].local_changes(1)
    assert ([item.topic_partition.topic for item in changes.deleted], len(changes.created)) == (["t1"], 1)
    node.apply(10, kit.topic(3))
    await further
    await node.stop()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 2), st.sampled_from("abc")),
        st.tuples(st.just("delete"), st.integers(0, 2), st.sampled_from("abc")),
        st.tuples(st.just("deliver"), st.integers(0, 2), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(steps, st.integers(0, 1_000))
def test_no_decision_takes_effect_on_a_state_it_was_not_made_for(kit, history, seed):
    """Three nodes that all believe to lead, any interleaving of commands and deliveries."""

    async def run():
        log = kit.SharedLog(random.Random(seed))
        members = [kit.Member(log, node_id) for node_id in (1, 2, 3)]
        nodes = [node_on(member, member.leader_id) for member in members]
        images = {}  # by offset: equal on all nodes
        for node in nodes:
            node.publishers.append(
                lambda delta, image: images.setdefault(image.metadata_offset, []).append(image)
            )
            await node.start()
            node.apply(1, [BrokerRegistrationRecord(1, 1, ("a:1",), None, 0)])
        for member in members:
            member.offset = 1
        log.next_offset = 2
        submitted = []
        done = []
        for kind, index, what in history:
            if kind == "deliver":
                for _ in range(what):
                    members[index].deliver()
            else:
                command = create(what) if kind == "create" else DeleteTopicsRequest(0, [what])
                task = asyncio.create_task(nodes[index].submit(command))
                done.append((kind, what, task))
                submitted.append(task)
            await kit.turn(2)
        for _ in range(10_000):
            if all(task.done() for task in submitted) and not any(member.is_behind for member in members):
                break
            for member in members:
                member.deliver()
            await kit.turn(3)
        for task in submitted:
            task.result()
        check(members, images, done)
        for node in nodes:
            await node.stop()

    def check(members, images, done):
        # Every entry that took effect was decided on the entry before it, on every node.
        for member in members:
            assert member.applied == members[0].applied
            previous = 1
            for offset, decided_on in member.applied:
                assert decided_on == previous
                previous = offset
        for same in images.values():
            assert all(image == same[0] for image in same)
        # Replies match effects: as many creates as deletes, or one more.
        for name in "abc":
            results = [
                (kind, task.result().topics[0].error_code) for kind, what, task in done if what == name
            ]
            created = results.count(("create", 0))
            deleted = results.count(("delete", 0))
            final = images[max(images)][0]
            assert created - deleted == (name in final.topics)

    asyncio.run(run())
