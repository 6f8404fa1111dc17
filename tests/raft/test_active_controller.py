"""The active controller: sessions, registration, controlled shutdown, and the next controller."""

from __future__ import annotations

import asyncio
import random

import pytest

from kafkalite.errors import (
    ErrorCode,
    LogOfflineError,
    NotControllerError,
    RequestTimedOutError,
    ShuttingDownError,
)
from kafkalite.metadata import controller
from kafkalite.metadata.decision import ControllerSettings, Decision
from kafkalite.metadata.features import SUPPORTED
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    CreateTopicsRequest,
    FeatureUpdate,
    NewTopic,
    PartitionReassignment,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    BrokerHeartbeatRequest,
    BrokerHeartbeatRequestV1,
    PartitionChange,
    RegisterBrokerRequestV1,
)
from kafkalite.raft import controller_node
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.single_quorum import SingleQuorum
from kafkalite.rng import seeded_rng
from proof.waiting import settle

SETTINGS = ControllerSettings(session_timeout_ms=3_000, imbalance_check_interval_ms=10_000)


class Clock:
    def __init__(self):
        self.now_ms = 5_000_000

    def monotonic_ms(self):
        return self.now_ms

    def wall_ms(self):
        return 1_700_000_000_000 + self.now_ms

    async def sleep_ms(self, duration_ms):
        self.now_ms += duration_ms
        await asyncio.sleep(0)


class Controllers:
    """Two controllers on one log, whose leader the test chooses, and the heartbeats of brokers."""

    def __init__(self, kit, settings=SETTINGS):
        self.clock = Clock()
        log = kit.SharedLog(random.Random(1))

        class Member(kit.Member):
            """Delivers to every member at once."""

            async def commit(member, records, after_offset):
                if member.leader_id != member.node_id:
                    raise NotControllerError("deposed")
                outcome = log.append(after_offset, records)
                member._own.append(outcome)
                for each in self.members:
                    while each.is_behind:
                        each.deliver()
                return await outcome

            async def read_index(member):
                await member.gate.wait()
                if member.read_index_errors:
                    raise member.read_index_errors.pop(0)
                return member.offset

        self.members = []
        for node_id in (1, 2):
            member = Member(log, node_id)
            member.node_id = node_id
            member.leader_id = None
            member.read_index_errors = []
            member.gate = asyncio.Event()
            member.gate.set()
            self.members.append(member)
        self.nodes = [
            ControllerNode(
                member, member.node_id, self.clock, seeded_rng(1), settings, is_refused=self.is_refused
            )
            for member in self.members
        ]
        self.term = 0
        self.incarnations = 0
        self.gone = set()  # the addresses of processes that have ended

    async def is_refused(self, address):
        return address in self.gone

    async def start(self, leader=1):
        for node in self.nodes:
            await node.start()
        self.lead(leader)
        await settle()
        return self

    async def stop(self):
        for node in self.nodes:
            await node.stop()

    def lead(self, leader_id):
        self.term += 1
        for member in self.members:
            member.leader_id = leader_id
            for told in member.on_leader_change:
                told(leader_id, self.term)

    @property
    def active(self):
        (node,) = [node for node in self.nodes if node.is_active]
        return node

    @property
    def image(self):
        return self.nodes[0].image

    async def register(self, node_id, incarnation=None, synced=True):
        self.incarnations += 1
        incarnation = incarnation or f"{self.incarnations:032x}"
        return await self.active.submit(
            RegisterBrokerRequestV1(
                node_id,
                incarnation,
                f"{node_id:032x}",
                [f"a:{node_id}"],
                None,
                -1,
                synced,
                [],
                0,
                list(SUPPORTED),
            )
        )

    async def heartbeat(self, node_id, offset=None, *, epoch=None, wants_shutdown=False):
        epoch = self.image.brokers[node_id].broker_epoch if epoch is None else epoch
        offset = self.image.metadata_offset if offset is None else offset
        return await self.active.heartbeat(BrokerHeartbeatRequest(node_id, epoch, offset, wants_shutdown, []))

    async def live(self, *node_ids):
        for node_id in node_ids:
            assert (await self.register(node_id)).error_code == 0
            assert not (await self.heartbeat(node_id)).is_fenced
        return self

    async def pass_time(self, duration_ms, *heartbeats):
        """Tick as the shell does, with the heartbeats of these brokers."""
        for passed_ms in range(100, duration_ms + 1, 100):
            self.clock.now_ms += 100
            if passed_ms % 500 == 0:
                for node_id in heartbeats:
                    await self.heartbeat(node_id)
            for node in self.nodes:
                await node.tick()
            await settle()

    async def create(self, name="orders", factor=3, **configs):
        response = await self.active.submit(
            CreateTopicsRequest(1_000, False, [NewTopic(name, 1, factor, configs)])
        )
        assert response.topics[0].error_code == 0

    def state(self, name="orders"):
        return self.image.topics[name].partitions[0]

    def fenced(self):
        return {node_id for node_id, broker in self.image.brokers.items() if broker.is_fenced}


@pytest.fixture
async def controllers(kit):
    controllers = await Controllers(kit).start()
    await controllers.live(1, 2, 3)
    await controllers.create()
    yield controllers
    await controllers.stop()


async def test_r23_a_silent_broker_is_fenced_and_the_others_are_not(controllers):
    leader = controllers.state().leader
    others = {1, 2, 3} - {leader}
    await controllers.pass_time(2_900, *others)
    assert controllers.fenced() == set()
    await controllers.pass_time(200, *others)
    assert controllers.fenced() == {leader}
    assert controllers.state().leader in others
    # It was only slow: its next heartbeat makes it live again, as a follower.
    assert not (await controllers.heartbeat(leader)).is_fenced
    assert controllers.fenced() == set()


async def test_r23_a_broker_is_unfenced_when_it_has_replayed_who_leads_now(controllers):
    leader = controllers.state().leader
    offset = controllers.image.metadata_offset
    await controllers.pass_time(3_100, *({1, 2, 3} - {leader}))
    assert controllers.fenced() == {leader}
    assert (await controllers.heartbeat(leader, offset)).is_fenced
    assert (await controllers.heartbeat(leader, controllers.image.metadata_offset - 1)).is_fenced
    assert not (await controllers.heartbeat(leader)).is_fenced


async def test_r23_no_response_extends_a_session_while_its_fence_is_committed(controllers):
    await controllers.pass_time(2_900, 1, 2)
    member = controllers.nodes[0]._quorum
    may_commit, commit = asyncio.Event(), member.commit

    async def commit_late(records, after_offset):
        await may_commit.wait()
        return await commit(records, after_offset)

    member.commit = commit_late
    controllers.clock.now_ms += 100
    tick = asyncio.ensure_future(controllers.active.tick())
    await settle()
    assert (await controllers.heartbeat(3)).is_fenced
    may_commit.set()
    await tick
    assert controllers.fenced() == {3}
    assert not (await controllers.heartbeat(3)).is_fenced


async def test_r23_a_controller_without_a_majority_answers_no_heartbeat(controllers):
    member = controllers.nodes[0]._quorum
    member.read_index_errors = [RequestTimedOutError("no majority")]
    with pytest.raises(RequestTimedOutError):
        await controllers.heartbeat(1)


async def test_a_heartbeat_that_changes_nothing_writes_nothing(controllers):
    offset = controllers.image.metadata_offset
    await controllers.pass_time(10_000, 1, 2, 3)
    assert controllers.image.metadata_offset == offset
    assert controllers.nodes[1].image == controllers.image


async def test_r23_a_process_that_is_gone_is_fenced_at_once(controllers):
    controllers.gone.add("a:2")
    controllers.active.on_disconnect(2)
    await settle()
    assert controllers.fenced() == {2}


async def test_r23_a_closed_connection_alone_does_not_end_a_session(controllers):
    controllers.active.on_disconnect(2)
    await controllers.pass_time(2_900, 1, 3)
    assert controllers.fenced() == set()
    await controllers.pass_time(200, 1, 3)
    assert controllers.fenced() == {2}


async def test_a_process_that_is_still_connected_is_not_taken_for_gone(controllers):
    controllers.gone.add("a:2")  # its listener is closed, or unreachable from here
    await controllers.pass_time(5_000, 1, 2, 3)
    assert controllers.fenced() == set()


async def test_r22_a_broker_is_unfenced_when_it_has_replayed_its_registration(controllers):
    reply = await controllers.register(1, synced=True)
    assert reply.error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    controllers.active.on_disconnect(1)
    reply = await controllers.register(1)
    assert (await controllers.heartbeat(1, reply.metadata_offset - 1)).is_fenced
    assert not (await controllers.heartbeat(1, reply.metadata_offset)).is_fenced


async def test_r20_a_second_process_is_refused_only_while_the_first_is_alive(controllers):
    epoch = controllers.image.brokers[2].broker_epoch
    refused = await controllers.register(2)
    assert refused.error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    assert "another live process is broker 2" in refused.error_message
    # Killed and restarted at once: the connection has closed.
    controllers.active.on_disconnect(2)
    reply = await controllers.register(2)
    assert reply.broker_epoch > epoch
    # Power cut: the connection stays open, but the session expires.
    await controllers.heartbeat(2)
    await controllers.pass_time(2_900, 1, 3)
    assert (await controllers.register(2)).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    await controllers.pass_time(200, 1, 3)
    assert (await controllers.register(2)).error_code == 0


async def test_r20_the_first_process_receives_a_stale_broker_epoch(controllers):
    epoch = controllers.image.brokers[2].broker_epoch
    controllers.active.on_disconnect(2)
    await controllers.register(2)
    answer = await controllers.heartbeat(2, epoch=epoch)
    assert (answer.error_code, answer.is_fenced) == (ErrorCode.STALE_BROKER_EPOCH, True)
    assert (await controllers.heartbeat(9, epoch=1)).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED


async def test_a_broker_may_stop_when_all_others_have_the_new_leaders(controllers):
    leader = controllers.state().leader
    others = sorted({1, 2, 3} - {leader})
    offset = controllers.image.metadata_offset
    answer = await controllers.heartbeat(leader, wants_shutdown=True)
    assert (answer.is_fenced, answer.may_shut_down) == (False, False)
    assert controllers.image.brokers[leader].is_shutting_down
    assert controllers.state().leader in others
    assert leader not in controllers.state().isr
    await controllers.heartbeat(others[0])
    await controllers.heartbeat(others[1], offset)
    assert not (await controllers.heartbeat(leader, wants_shutdown=True)).may_shut_down
    await controllers.heartbeat(others[1])
    answer = await controllers.heartbeat(leader, wants_shutdown=True)
    assert (answer.is_fenced, answer.may_shut_down) == (True, True)
    assert controllers.fenced() == {leader}
    # The next process does not wait for the session of the one that has stopped.
    assert (await controllers.register(leader)).error_code == 0


async def test_a_shutdown_waits_no_longer_for_a_broker_that_is_fenced_meanwhile(controllers):
    assert not (await controllers.heartbeat(1, wants_shutdown=True)).may_shut_down
    await controllers.heartbeat(2)
    await controllers.pass_time(2_900, 1)
    await controllers.heartbeat(2)
    await controllers.pass_time(200, 1)
    assert controllers.fenced() == {3}
    assert (await controllers.heartbeat(1, wants_shutdown=True)).may_shut_down


async def test_a_fenced_broker_may_go_at_once(controllers):
    controllers.active.on_disconnect(1)
    await controllers.register(1)
    answer = await controllers.heartbeat(1, wants_shutdown=True)
    assert (answer.is_fenced, answer.may_shut_down) == (True, True)


async def test_r23_the_next_controller_gives_each_broker_a_whole_session(controllers):
    """The former controller may have answered a heartbeat just before."""
    controllers.lead(2)
    await settle()
    assert controllers.active is controllers.nodes[1]
    await controllers.pass_time(2_900, 1)
    assert controllers.fenced() == set()
    await controllers.pass_time(200, 1)
    assert controllers.fenced() == {2, 3}
    assert controllers.state().leader == 1


async def test_the_next_controller_fences_a_process_that_is_gone_at_once(controllers):
    controllers.gone.add("a:1")
    controllers.lead(None)
    controllers.lead(2)
    await settle()
    assert controllers.fenced() == {1}


async def test_only_the_active_controller_takes_heartbeats(controllers):
    passive = controllers.nodes[1]
    request = BrokerHeartbeatRequest(1, controllers.image.brokers[1].broker_epoch, 0, False, [])
    with pytest.raises(NotControllerError, match="the controller is node 1"):
        await passive.heartbeat(request)
    assert not passive.is_active
    controllers.lead(None)
    with pytest.raises(NotControllerError):
        await controllers.nodes[0].heartbeat(request)
    await controllers.pass_time(9_000)
    assert controllers.fenced() == set()


async def test_r19_a_new_leader_decides_only_when_it_has_caught_up(controllers):
    controllers.members[1].gate.clear()
    controllers.lead(2)
    node = controllers.nodes[1]
    create = CreateTopicsRequest(0, False, [NewTopic("late", 1, 1, {})])
    submitted = asyncio.create_task(node.submit(create))
    heard = asyncio.create_task(
        node.heartbeat(BrokerHeartbeatRequest(1, controllers.image.brokers[1].broker_epoch, 0, False, []))
    )
    await settle()
    assert not node.is_active and not submitted.done() and not heard.done()
    await node.tick()
    controllers.members[1].read_index_errors.append(RequestTimedOutError("no majority"))
    controllers.members[1].gate.set()
    assert (await submitted).topics[0].error_code == 0
    assert (await heard).error_code == 0
    assert node.is_active


async def test_a_leader_deposed_before_it_has_caught_up_refuses_waiting_commands(controllers):
    controllers.members[1].gate.clear()
    controllers.lead(2)
    node = controllers.nodes[1]
    create = CreateTopicsRequest(0, False, [NewTopic("late", 1, 1, {})])
    submitted = [asyncio.create_task(node.submit(create)) for _ in range(3)]
    await settle()
    controllers.lead(1)
    for task in submitted:
        with pytest.raises(NotControllerError):
            await task
    controllers.members[1].gate.set()
    await settle()
    assert controllers.active is controllers.nodes[0]


async def test_a_leader_that_cannot_go_on_stops_trying(controllers):
    for error in (NotControllerError("not any more"), LogOfflineError("the disk is gone")):
        controllers.members[1].gate.clear()
        controllers.members[1].read_index_errors.append(error)
        controllers.lead(2)
        controllers.members[1].leader_id = 1  # it does not know the new leader yet
        controllers.members[1].gate.set()
        await settle()
        assert not controllers.nodes[1].is_active
        with pytest.raises(NotControllerError, match="the controller is node 1"):
            await controllers.nodes[1].submit(CreateTopicsRequest(0, False, []))
    controllers.members[1].leader_id = 2
    with pytest.raises(NotControllerError, match="not the active controller yet"):
        await controllers.nodes[1].submit(CreateTopicsRequest(0, False, []))


async def test_r19_a_deposed_leader_does_not_send_a_broker_away(controllers):
    old = controllers.members[0]
    epoch = controllers.image.brokers[1].broker_epoch
    old.gate.clear()  # no majority responds to it
    request = BrokerHeartbeatRequest(1, epoch + 50, 0, False, [])  # registered with the new leader meanwhile
    heard = asyncio.create_task(controllers.nodes[0].heartbeat(request))
    await settle()
    assert not heard.done()
    old.read_index_errors.append(NotControllerError("the controller is node 2"))
    old.gate.set()
    with pytest.raises(NotControllerError):
        await heard


async def test_a_stop_does_not_wait_for_a_majority_that_never_comes(controllers):
    controllers.members[1].gate.clear()
    controllers.lead(2)
    node = controllers.nodes[1]
    submitted = asyncio.create_task(node.submit(CreateTopicsRequest(0, False, [])))
    await settle()
    await node.stop()
    with pytest.raises(NotControllerError):
        await submitted


async def test_leaders_come_back_by_themselves(controllers):
    preferred = controllers.state().replicas[0]
    others = sorted({1, 2, 3} - {preferred})
    await controllers.pass_time(3_100, *others)
    await controllers.heartbeat(preferred)
    state = controllers.state()
    assert state.leader != preferred
    epochs = [controllers.image.brokers[node_id].broker_epoch for node_id in (1, 2, 3)]
    topic_id = controllers.image.topics["orders"].topic_id
    change = PartitionChange(topic_id, 0, state.leader_epoch, state.partition_epoch, [1, 2, 3], epochs)
    epoch = controllers.image.brokers[state.leader].broker_epoch
    answer = await controllers.active.submit(AlterPartitionRequest(state.leader, epoch, [change]))
    assert answer.partitions[0].error_code == 0
    await controllers.pass_time(SETTINGS.imbalance_check_interval_ms, 1, 2, 3)
    assert controllers.state().leader == preferred


async def test_balancing_can_be_left_to_people(kit):
    settings = ControllerSettings(auto_leader_rebalance=False, imbalance_check_interval_ms=1)
    controllers = await Controllers(kit, settings).start()
    await controllers.live(1)
    offset = controllers.image.metadata_offset
    await controllers.pass_time(1_000, 1)
    assert controllers.image.metadata_offset == offset
    await controllers.stop()


async def rebalancing(kit) -> Controllers:
    """Two brokers, of which the second joined after the topics "a" to "d"."""
    settings = ControllerSettings(session_timeout_ms=3_000, auto_rebalance=True)
    controllers = await Controllers(kit, settings).start()
    await controllers.live(1)
    for name in "abcd":
        await controllers.create(name, factor=1)
    await controllers.live(2)
    return controllers


def moving(controllers) -> set[str]:
    return {name for name in "abcd" if controllers.state(name).is_reassigning}


@pytest.mark.parametrize("replicas", [None, [2, 1]], ids=["cancelled", "another target"])
async def test_an_operator_overrules_moves_of_the_controller(kit, replicas):
    controllers = await rebalancing(kit)
    await controllers.pass_time(controller_node.REBALANCE_DELAY_MS + 1_000, 1, 2)
    began = moving(controllers)
    assert len(began) == 2
    move = [PartitionReassignment(name, 0, replicas) for name in began]
    await controllers.active.submit(AlterPartitionReassignmentsRequest(1_000, True, move))
    if replicas is not None:
        await controllers.pass_time(1_000, 1, 2)
        assert {controllers.state(name).target_replicas for name in began} == {(2, 1)}
        undo = [PartitionReassignment(name, 0, None) for name in began]
        await controllers.active.submit(AlterPartitionReassignmentsRequest(1_000, True, undo))
    await controllers.pass_time(5 * controller_node.REBALANCE_DELAY_MS, 1, 2)
    assert moving(controllers) == set()
    controllers.clock.now_ms += controller_node.REBALANCE_PAUSE_MS
    for node_id in (1, 2):
        await controllers.heartbeat(node_id)
    await controllers.pass_time(1_000, 1, 2)
    assert len(moving(controllers)) == 2
    await controllers.stop()


async def test_the_controller_looks_for_moves_again_only_after_changes_and_a_pause(kit, monkeypatch):
    controllers = await rebalancing(kit)
    looks = []

    def decide(image, _command):
        looks.append(image.metadata_offset)
        return Decision({})

    monkeypatch.setattr(controller, "rebalance_replicas", decide)
    await controllers.pass_time(3 * controller_node.REBALANCE_DELAY_MS, 1, 2)
    assert len(looks) == 1
    for number in range(20):
        await controllers.create(f"new-{number}", factor=1)
        await controllers.pass_time(1_000, 1, 2)
    assert len(looks) == 3
    await controllers.stop()


async def test_a_single_node_needs_no_heartbeats_but_responds_to_them():
    clock = Clock()
    node = ControllerNode(SingleQuorum(), 1, clock, seeded_rng(1), SETTINGS)
    await node.start()
    assert node.is_active
    request = RegisterBrokerRequestV1(1, "a" * 32, "b" * 32, ["a:1"], None, -1, True, [], 0, list(SUPPORTED))
    reply = await node.submit(request)
    assert node.image.live_brokers() == {1}
    clock.now_ms += 60_000
    await node.tick()
    assert node.image.live_brokers() == {1}
    beat = BrokerHeartbeatRequest(1, reply.broker_epoch, 0, False, [])
    answer = await node.heartbeat(beat)
    assert (answer.error_code, answer.is_fenced, answer.may_shut_down) == (0, False, False)
    # Restarted at once: there is no session to wait for.
    again = await node.submit(request._replace(incarnation_id="c" * 32))
    assert again.error_code == 0 and again.broker_epoch > reply.broker_epoch
    leaving = BrokerHeartbeatRequest(1, again.broker_epoch, 0, True, [])
    assert (await node.heartbeat(leaving)).may_shut_down
    await node.stop()
    with pytest.raises(ShuttingDownError):
        await node.heartbeat(beat)


class TestFeatures:
    """R92: which levels nodes support is known from their heartbeats and connections, and not kept."""

    async def heartbeat(self, cluster, node_id, *, ranges=SUPPORTED):
        epoch = cluster.image.brokers[node_id].broker_epoch
        offset = cluster.image.metadata_offset
        await cluster.active.heartbeat(
            BrokerHeartbeatRequestV1(node_id, epoch, offset, False, [], list(ranges))
        )

    def known(self, cluster):
        (feature,) = cluster.active.describe_features().features
        return {node.node_id: node.max_level for node in feature.nodes}

    async def test_brokers_say_them_with_each_heartbeat_of_their_present_process(self, controllers):
        cluster = controllers
        assert self.known(cluster) == {1: 2, 2: 0, 3: 0}  # node 1 is the controller itself
        await self.heartbeat(cluster, 2)
        await self.heartbeat(cluster, 3, ranges=[])
        assert self.known(cluster) == {1: 2, 2: 2, 3: 1}
        await cluster.pass_time(4_000, 1, 3)
        assert self.known(cluster) == {1: 2, 2: 0, 3: 1}

    async def test_a_new_controller_waits_for_the_next_heartbeats(self, controllers):
        await self.heartbeat(controllers, 3)
        controllers.lead(2)
        await settle()
        assert self.known(controllers) == {1: 0, 2: 2, 3: 0}
        with pytest.raises(NotControllerError):
            controllers.nodes[0].describe_features()

    async def test_a_level_is_finalised_only_with_all_of_them(self, kit, monkeypatch):
        cluster = await Controllers(kit).start()
        monkeypatch.setattr(controller_node, "newest_levels", list)
        await cluster.live(1, 2)
        request = UpdateFeaturesRequest(1_000, False, [FeatureUpdate("metadata.version", 2)])
        (refused,) = (await cluster.active.submit(request)).results
        assert refused.error_code == ErrorCode.INVALID_UPDATE_VERSION
        assert "node 2" in refused.error_message
        await self.heartbeat(cluster, 2)
        (accepted,) = (await cluster.active.submit(request)).results
        assert (accepted.error_code, cluster.image.metadata_version) == (0, 2)
        await cluster.stop()

    async def test_a_new_log_begins_with_the_newest_levels(self, kit):
        cluster = await Controllers(kit).start()
        assert cluster.image.metadata_version == 1
        await cluster.live(1)
        assert cluster.image.metadata_version == 2
        await cluster.stop()
