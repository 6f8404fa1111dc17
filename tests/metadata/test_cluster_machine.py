"""Random histories of a cluster, as a state machine, with its invariants after every step (I10)."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kafkalite.metadata import record_codec
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.features import METADATA_VERSION, SUPPORTED
from kafkalite.metadata.image import EMPTY, BrokerLoad
from kafkalite.metadata.partition_commands import BalanceLeaders
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.metadata.recovery import ReplicaReports
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    FeatureUpdate,
    PartitionReassignment,
    UpdateFeaturesRequest,
)

NODES = st.integers(1, 4)
NAMES = st.sampled_from(["a", "b"])
ISRS = st.sets(NODES, max_size=4).map(sorted)


def machine(new_metadata):
    class Cluster(RuleBasedStateMachine):
        @initialize(is_new=st.integers(0, 3))
        def begin(self, is_new):
            self.metadata = new_metadata(brokers=0, settings=ControllerSettings(default_replication_factor=3))
            if not is_new:  # a log of level 1: ``submit`` checks the level of each record (R91)
                self.metadata.image = EMPTY
            self.reports = ReplicaReports(self.metadata.settings)
            self.excused = set()  # topics whose remembered replicas may be fewer than the minimum
            self.before = {}
            for node_id in (1, 2, 3):
                self.metadata.register(node_id)
                self.metadata.unfence(node_id)
            self.metadata.create("a", partitions=2, factor=3, configs={"min.insync.replicas": "2"})

        def known(self, node_id):
            return node_id in self.metadata.image.brokers

        @rule(
            node_id=NODES,
            clean=st.booleans(),
            synced=st.booleans(),
            other_disk=st.integers(0, 9),
            damaged=st.booleans(),
        )
        def register(self, node_id, clean, synced, other_disk, damaged):
            metadata = self.metadata
            lost = metadata.damaged(("a", 0)) if damaged and "a" in metadata.image.topics else []
            if lost or other_disk == 0:
                self.excused |= metadata.image.topics.keys()
            metadata.register(
                node_id,
                clean=clean and self.known(node_id),
                synced=synced,
                directory="f" * 32 if other_disk == 0 else None,
                damaged=lost,
            )

        @precondition(lambda self: self.metadata.image.brokers)
        @rule(data=st.data(), how=st.sampled_from(["fence", "unfence", "unfence", "begin_shutdown"]))
        def live_and_die(self, data, how):
            node_id = data.draw(st.sampled_from(sorted(self.metadata.image.brokers)))
            assert getattr(self.metadata, how)(node_id) is None

        @rule(name=NAMES, partitions=st.integers(1, 3), factor=st.integers(1, 4), minimum=st.integers(1, 3))
        def create(self, name, partitions, factor, minimum):
            configs = {"min.insync.replicas": str(minimum)}
            self.metadata.create(name, partitions=partitions, factor=factor, configs=configs)

        @rule(name=NAMES)
        def delete(self, name):
            self.metadata.delete(name)
            self.excused.discard(name)

        @rule(name=NAMES, count=st.integers(1, 4))
        def grow(self, name, count):
            self.metadata.grow(name, count)

        @rule(data=st.data(), isr=ISRS, stale=st.integers(0, 4))
        def propose(self, data, isr, stale):
            metadata = self.metadata
            led = [
                (name, number)
                for name, topic in sorted(metadata.image.topics.items())
                for number, state in enumerate(topic.partitions)
                if state.leader != -1
            ]
            if not led:
                return
            name, number = data.draw(st.sampled_from(led))
            state = metadata.state(name, number)
            changes = {}
            if stale == 1:
                changes["partition_epoch"] = state.partition_epoch - 1
            if stale == 2:
                changes["leader_epoch"] = state.leader_epoch - 1
            if stale == 3:
                changes["isr_broker_epochs"] = [-2] * len(isr)
            answer = metadata.propose(isr, name, number, **changes)
            after = metadata.state(name, number)
            assert answer.partition_epoch == after.partition_epoch
            if answer.error_code == 0:
                assert sorted(after.isr) == [each for each in isr if each in after.replicas]
            is_current = stale not in {1, 2}
            assert (after.partition_epoch == state.partition_epoch + 1) == is_current  # R14

        @rule(unclean=st.booleans())
        def elect(self, unclean):
            self.metadata.elect(unclean=unclean)

        @rule(node_id=NODES, name=NAMES, end=st.integers(0, 99), is_damaged=st.booleans(), late=st.booleans())
        def report(self, node_id, name, end, is_damaged, late):
            metadata = self.metadata
            if not self.known(node_id) or name not in metadata.image.topics:
                return
            metadata.report(self.reports, node_id, 0, end, name=name, is_damaged=is_damaged)
            before = metadata.state(name)
            short = metadata.recover(self.reports, now_ms=10**9 if late else 0)
            self.excused |= {topic for topic, _, verdict in short if verdict.short}
            state = metadata.state(name)
            if state.leader != before.leader:  # R46: a leader was compared with a member
                assert before.leader == -1
                assert state.leader in metadata.image.live_brokers()
                assert before.isr + before.elr

        @rule(
            name=NAMES,
            wanted=st.one_of(st.none(), st.lists(NODES, min_size=1, max_size=4, unique=True)),
            grows=st.booleans(),
        )
        def reassign(self, name, wanted, grows):
            metadata = self.metadata
            before = {} if name not in metadata.image.topics else metadata.state(name)
            item = PartitionReassignment(name, 0, wanted)
            metadata.submit(AlterPartitionReassignmentsRequest(1_000, grows, [item]))
            if before and wanted is None:  # a cancellation returns to the original replicas
                assert metadata.state(name).final_replicas == before.original_replicas
            if metadata.image.metadata_version == 1 and before:
                assert metadata.state(name) == before

        @rule()
        def finalize(self):
            request = UpdateFeaturesRequest(1, False, [FeatureUpdate(METADATA_VERSION, 2)])
            nodes = dict.fromkeys(self.metadata.image.brokers, SUPPORTED)
            assert self.metadata.submit(request, nodes=nodes).results[0].error_code == 0

        @rule()
        def go_on(self):
            self.metadata.submit(ContinueReassignments())

        @rule()
        def balance(self):
            self.metadata.submit(BalanceLeaders())

        @rule(name=NAMES, minimum=st.integers(1, 3))
        def change_minimum(self, name, minimum):
            before = self.metadata.image.topic_configs(name).get("min.insync.replicas")
            self.metadata.alter("topic", name, {"min.insync.replicas": str(minimum)})
            if before is not None and minimum > int(before):
                self.excused.add(name)

        @rule(name=NAMES, enable=st.sampled_from(["true", None]))
        def allow_unclean(self, name, enable):
            self.metadata.alter("topic", name, {"unclean.leader.election.enable": enable})

        @rule(node_id=NODES, name=NAMES)
        def lose(self, node_id, name):
            if self.known(node_id) and name in self.metadata.image.topics:
                self.metadata.lose(node_id, (name, 0))
                self.excused.add(name)

        @rule(name=NAMES, end=st.integers(0, 50))
        def checkpoint(self, name, end):
            if name in self.metadata.image.topics and self.metadata.state(name).leader != -1:
                self.metadata.checkpoint(end, name)

        @invariant()
        def i10_partitions_are_as_the_rules_want_them(self):
            image = self.metadata.image
            live = image.live_brokers()
            fenced = {broker.node_id for broker in image.brokers.values() if broker.is_fenced}
            for name, topic in image.topics.items():
                text = image.topic_configs(name)["min.insync.replicas"]
                for state in topic.partitions:
                    isr, elr, last = set(state.isr), set(state.elr), set(state.last_known_elr)
                    minimum = min(int(text), len(state.replicas))
                    needed = min(int(text), len(state.original_replicas), len(state.final_replicas))
                    assert set(state.target_replicas) <= set(state.replicas)
                    assert set(state.original_replicas) | set(state.final_replicas) <= set(state.replicas)
                    assert isr | elr | last <= set(state.replicas)
                    assert not isr & elr and not (isr | elr) & last
                    assert not isr & fenced
                    assert state.leader == -1 or state.leader in isr
                    assert len(isr) < minimum or elr or not last
                    if name not in self.excused:
                        assert len(isr | elr | last) >= needed
                    # No partition lacks a leader while a replica could lead it.
                    if state.leader == -1:
                        assert not isr & live
                        assert isr or not (elr - set(state.unverified)) & live
                    assert set(state.unverified) <= elr

        @invariant()
        def epochs_only_grow_and_grow_with_every_change(self):
            seen = {}
            for topic in self.metadata.image.topics.values():
                for number, state in enumerate(topic.partitions):
                    seen[topic.topic_id, number] = state
                    before = self.before.get((topic.topic_id, number))
                    if before is None or before == state:
                        continue
                    assert state.partition_epoch > before.partition_epoch
                    assert state.leader_epoch >= before.leader_epoch
                    is_removal = not set(before.replicas) <= set(state.replicas)
                    if state.leader != before.leader or is_removal:  # R61
                        assert state.leader_epoch > before.leader_epoch
            self.before = seen

        @invariant()
        def the_image_is_what_its_records_say(self):
            image = self.metadata.image
            records = record_codec.from_bytes(record_codec.to_bytes(image.to_records()))
            assert Delta(EMPTY).replay_all(records).apply(image.metadata_offset) == image

        @invariant()
        def the_loads_are_counted_right(self):
            leaders, replicas = Counter(), Counter()
            for topic in self.metadata.image.topics.values():
                for state in topic.partitions:
                    leaders[state.replicas[0]] += 1
                    replicas.update(state.replicas)
            assert self.metadata.image.loads == {
                node_id: BrokerLoad(leaders[node_id], count) for node_id, count in replicas.items()
            }

    return Cluster


def test_i10_holds_after_any_history(new_metadata):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(new_metadata),
        settings=settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40),
    )
