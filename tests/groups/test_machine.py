"""Random histories of groups, as a state machine: never two owners (R38), and the log determines the
state.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kafkalite.coordinator_types import Caller
from kafkalite.errors import (
    BrokerError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from proof.durable_state import durable_state
from proof.groups.world import Consumer, Coordinator, flatten, settle

NAMES = ["a", "b", "c", "d"]
SUBSCRIPTIONS = [("t",), ("t", "u"), ("u", "v")]
EXPELLED = (UnknownMemberIdError, FencedMemberEpochError, FencedInstanceIdError)


def machine():
    class Groups(RuleBasedStateMachine):
        """Consumers that follow the protocol, on a network that repeats, delays and loses messages."""

        @initialize(assignor=st.sampled_from([None, "range"]))
        def begin(self, assignor):
            self.world = Coordinator(t=4, u=3)
            self.assignor = assignor
            self.consumers = {}
            self.lives = Counter()
            self.sent = []  # requests that the network may deliver again

        def request(self, consumer, epoch=None):
            request = consumer.request(epoch)
            self.sent = [*self.sent[-30:], request]
            return request

        # --- consumers

        @rule(name=st.sampled_from(NAMES), topics=st.sampled_from(SUBSCRIPTIONS), same_id=st.booleans())
        def start(self, name, topics, same_id):
            if name in self.consumers:
                return
            self.lives[name] += not same_id
            self.consumers[name] = Consumer(
                self.world,
                f"{name}-{self.lives[name]}",
                *topics,
                instance_id=f"i{name}" if name in "cd" else None,
                assignor=self.assignor,
            )

        def one(self, data):
            return self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]

        @precondition(lambda self: self.consumers)
        @rule(data=st.data(), fate=st.sampled_from(["arrives"] * 4 + ["answer lost", "not written"]))
        def beat(self, data, fate):
            consumer = self.one(data)
            request = self.request(consumer)
            group = self.group()
            member = group and group.members.get(consumer.member_id)
            is_known = bool(member and consumer.epoch >= member.current.previous_epoch)
            has_update = self.world.machine.has_update(request)
            try:
                decision = self.decide(request)
            except EXPELLED:
                assert consumer.epoch > 0 or consumer.instance_id is not None
                assert has_update
                consumer.on_expelled()
                return
            except UnreleasedInstanceIdError:
                assert consumer.epoch == 0
                return
            assert is_known or request.member_epoch == 0
            answer = decision.reply
            if not has_update:
                # The heartbeat may be held: deciding it only lets the member's epoch follow.
                assert answer.member_epoch == consumer.epoch or len(decision.records) == 1
                assert not decision.records or answer.member_epoch != consumer.epoch
                if answer.assignment is not None:
                    assert flatten(answer.assignment) == member.current.assigned
            if fate != "not written":
                self.world.take(decision)
            if fate == "arrives":
                consumer.on_answer(request, answer)
                assert not self.world.machine.has_update(quiet(consumer))
            else:
                consumer.is_behind = True

        def decide(self, request):
            """Decide twice: deciding changes nothing, so both decisions are equal."""
            world = self.world
            before = copy.deepcopy(durable_state(world.machine))
            decision = world.machine.decide(request, Caller("app", "host"), world.now, world.topics)
            assert durable_state(world.machine) == before
            assert world.machine.decide(request, Caller("app", "host"), world.now, world.topics) == decision
            return decision

        @precondition(lambda self: self.consumers)
        @rule(data=st.data(), takes=st.booleans())
        def react(self, data, takes):
            consumer = self.one(data)
            if takes:
                consumer.settle()
            else:
                consumer.give_back()

        @precondition(lambda self: self.consumers)
        @rule(data=st.data(), how=st.sampled_from(["leave", "leave", "pause", "die"]), is_lost=st.booleans())
        def end(self, data, how, is_lost):
            name = data.draw(st.sampled_from(sorted(self.consumers)))
            consumer = self.consumers.pop(name)
            if how == "die" or consumer.epoch == 0:
                return
            epoch = -2 if how == "pause" and consumer.instance_id is not None else -1
            request = self.request(consumer, epoch)
            if is_lost:
                return
            with contextlib.suppress(EXPELLED):
                self.world.ask(request)

        # --- the network and the coordinator

        @precondition(lambda self: self.sent)
        @rule(data=st.data())
        def deliver_again(self, data):
            """Any request may be delivered again, however late."""
            request = data.draw(st.sampled_from(self.sent))
            owner = next((c for c in self.consumers.values() if c.member_id == request.member_id), None)
            if request.member_epoch < 0 and owner is not None:
                return  # a consumer does not continue under the member id that it left with
            with contextlib.suppress(BrokerError):
                self.world.ask(request)

        @rule(ms=st.sampled_from([1_000, 10_000, 30_000, 61_000]))
        def wait(self, ms):
            self.world.advance(ms)

        @rule()
        def reload(self):
            self.world.reload()

        @rule()
        def compact(self):
            self.world.compact()
            self.world.reload()

        @rule(
            t=st.integers(0, 5),
            u=st.integers(0, 3),
            v=st.sampled_from([0, 0, 4]),
            incarnation=st.sampled_from([0, 0, 0, 1]),
        )
        def change_topics(self, t, u, v, incarnation):
            counts = {"t": t, "u": (u, incarnation) if u else 0, "v": v}
            self.world.set_topics(**{name: count for name, count in counts.items() if count})

        @precondition(lambda self: self.consumers)
        @rule(data=st.data(), behind=st.integers(-1, 3))
        def commit(self, data, behind):
            consumer = self.one(data)
            if consumer.epoch == 0 or "t" not in self.world.topics:
                return
            group = self.world.machine.groups.get("g")
            member = group and group.members.get(consumer.member_id)
            epoch = max(0, consumer.epoch - behind)
            try:
                self.world.commit({("t", 0): 5}, member_id=consumer.member_id, epoch=epoch)
            except UnknownMemberIdError:
                assert not member
            except StaleMemberEpochError:
                assert member and member.current.member_epoch != epoch
            else:
                assert member and member.current.member_epoch == epoch

        # --- what holds

        def group(self):
            return self.world.machine.groups.get("g")

        @invariant()
        def a_partition_has_one_owner(self):
            group = self.group()
            held = Counter()
            for member_id, member in (group.members if group else {}).items():
                assert not member.current.assigned & member.current.revoking
                for partition in member.current.assigned | member.current.revoking:
                    held[partition] += 1
                    assert group.owners[partition] == member_id
            assert all(count == 1 for count in held.values())
            assert not group or group.owners.keys() == held.keys()

        @invariant()
        def what_a_member_reads_is_its_own(self):
            group = self.group()
            reading = Counter()
            for consumer in self.consumers.values():
                member = group and group.members.get(consumer.member_id)
                if not member or consumer.epoch < max(1, member.current.previous_epoch):
                    continue  # expelled: all its requests are refused
                assert consumer.owned <= member.current.assigned | member.current.revoking
                reading.update(consumer.owned)
            assert all(count == 1 for count in reading.values())

        @invariant()
        def targets_share_out_what_is_subscribed(self):
            group = self.group()
            if not group or not group.members:
                return
            targets = Counter(p for member in group.members.values() for p in member.target)
            wanted = {
                (shape.topic_id, number)
                for name, shape in self.world.topics.items()
                if any(name in member.subscription.topics for member in group.members.values())
                for number in range(shape.partition_count)
            }
            assert targets == Counter(wanted)

        def teardown(self):
            """The network heals, and all consumers continue: the group becomes stable, and each partition
            has one owner.
            """
            if not hasattr(self, "world"):
                return
            for _ in range(2):  # dead consumers are expelled
                self.world.advance(30_000)
                self.everybody_joins()
            self.everybody_joins()
            consumers = list(self.consumers.values())
            beats = settle(*consumers)
            assert beats <= 20 * len(consumers) + 20
            for consumer in consumers:
                consumer.beat()
            if not consumers:
                return
            assert self.world.state == "Stable"
            owned = Counter(partition for consumer in consumers for partition in consumer.owned)
            assert owned == Counter(
                (shape.topic_id, number)
                for name, shape in self.world.topics.items()
                if any(name in consumer.topics for consumer in consumers)
                for number in range(shape.partition_count)
            )

        def everybody_joins(self):
            for consumer in self.consumers.values():
                for _ in range(2):
                    try:
                        consumer.beat()
                        break
                    except UnreleasedInstanceIdError:
                        break
                    except EXPELLED:
                        consumer.on_expelled()
                consumer.settle()

    return Groups


def quiet(consumer):
    """Return the heartbeat of a member without changes."""
    return consumer.request()._replace(owned=None, subscribed_topics=None, subscribed_pattern=None)


def run(max_examples=60, steps=40, phases=tuple(Phase)):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(),
        settings=settings(
            derandomize=True,
            deadline=None,
            max_examples=max_examples,
            stateful_step_count=steps,
            phases=phases,
            report_multiple_bugs=False,
        ),
    )


def test_r38_holds_after_any_history():
    run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["R38-hand-over-early", "R38-expelled-stays", "R39-any-epoch", "R39-any-member"]
)
def test_a_history_is_found_that_needs_the_rule(mutant, rule):
    mutant(rule)
    with pytest.raises(AssertionError):
        run(500, 40, [Phase.generate])  # to shrink what is found would take minutes
