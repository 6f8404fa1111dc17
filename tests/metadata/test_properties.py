"""Random histories of commands: images and records say the same, in whatever portions they are replayed."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.metadata import record_codec
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY
from kafkalite.protocol.messages import admin

names = st.sampled_from(["a", "b", "c", "d"])
values = st.sampled_from(["1", "2", None, "bad"])
commands = st.one_of(
    st.tuples(st.just("create"), names, st.integers(0, 4), st.integers(1, 3), values),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("grow"), names, st.integers(1, 6)),
    st.tuples(st.just("alter"), names, values),
    st.tuples(st.just("alter-broker"), st.integers(1, 3), values),
    st.tuples(st.just("quota"), names, st.sampled_from(["app", None]), values),
)


def run(metadata, command):
    match command:
        case ("create", name, partitions, factor, value):
            configs = {} if value is None else {"retention.ms": value}
            metadata.create(name, partitions=partitions, factor=factor, configs=configs)
        case ("delete", name):
            metadata.delete(name)
        case ("grow", name, count):
            metadata.grow(name, count)
        case ("alter", name, value):
            metadata.alter("topic", name, {"retention.ms": value})
        case ("alter-broker", node_id, value):
            metadata.alter("broker", str(node_id), {"log.retention.ms": value})
        case ("quota", user, client_id, value):
            parts = [admin.QuotaEntityName("user", user), admin.QuotaEntityName("client-id", client_id)]
            changes = [admin.ClientQuotaChange("request_percentage", value)]
            metadata.submit(
                admin.AlterClientQuotasRequest(False, [admin.ClientQuotaAlteration(parts, changes)])
            )


@settings(derandomize=True, deadline=None)
@given(st.lists(commands, max_size=25))
def test_an_image_equals_its_records(new_metadata, history):
    metadata = new_metadata(brokers=2)
    for command in history:
        run(metadata, command)
    image = metadata.image
    records = record_codec.from_bytes(record_codec.to_bytes(image.to_records()))
    again = Delta(EMPTY).replay_all(records).apply(image.metadata_offset)
    assert again == image
    assert list(again.to_records()) == records


@settings(derandomize=True, deadline=None)
@given(st.lists(commands, max_size=25), st.lists(st.integers(0, 40), max_size=5))
def test_the_portions_of_a_replay_do_not_matter(new_metadata, history, cuts):
    metadata = new_metadata(brokers=2)
    boundaries = [0]
    for command in history:
        run(metadata, command)
        boundaries.append(len(metadata.records))
    image = metadata.deltas[0].before
    # Whole entries only: a topic without a partition exists inside one.
    ends = sorted({boundaries[cut % len(boundaries)] for cut in cuts} | {0, len(metadata.records)})
    for start, end in itertools.pairwise(ends):
        image = Delta(image).replay_all(metadata.records[start:end]).apply(metadata.image.metadata_offset)
    if metadata.records:
        assert image == metadata.image


@settings(derandomize=True, deadline=None)
@given(st.lists(commands, max_size=25), st.integers(0, 25))
def test_a_snapshot_leads_to_the_same_image_and_work_as_the_entries(new_metadata, history, joined_at):
    metadata = new_metadata(brokers=2)
    old = None
    for number, command in enumerate(history):
        if number == joined_at:
            old = metadata.image
        run(metadata, command)
    old = old or metadata.image
    delta = Delta.to_snapshot(old, metadata.image.to_records())
    assert delta.apply(metadata.image.metadata_offset) == metadata.image
    # A broker that does what local_changes say holds exactly the replicas of the new image.
    for broker_id in (1, 2):
        held = replicas_of(old, broker_id)
        changes = delta.local_changes(broker_id)
        held -= {(item.topic_id, item.topic_partition) for item in changes.deleted}
        created = {(item.topic_id, item.topic_partition) for item in changes.created}
        assert not held & created
        assert held | created == replicas_of(metadata.image, broker_id)


def replicas_of(image, broker_id):
    return {
        (topic.topic_id, (name, number))
        for name, topic in image.topics.items()
        for number, state in enumerate(topic.partitions)
        if broker_id in state.replicas
    }


@settings(derandomize=True, deadline=None)
@given(st.lists(commands, max_size=25))
def test_every_images_invariants_hold(new_metadata, history):
    metadata = new_metadata(brokers=2)
    for command in history:
        run(metadata, command)
        image = metadata.image
        assert {topic.topic_id for topic in image.topics.values()} == image.topics_by_id.keys()
        for name, topic in image.topics.items():
            assert image.topics_by_id[topic.topic_id] is topic
            assert topic.name == name
            assert topic.partitions
            for state in topic.partitions:
                assert set(state.isr) <= set(state.replicas) <= image.brokers.keys()
                assert state.leader in state.isr
        for resource_type, name in image.configs:
            assert resource_type == "broker" or name in image.topics
