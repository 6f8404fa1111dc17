"""Feature levels: finalised by command only, and only if every node supports them (R91, R92)."""

from __future__ import annotations

import msgpack
import pytest

from kafkalite.errors import ErrorCode, StorageError
from kafkalite.metadata import record_codec
from kafkalite.metadata.controller import decide
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.feature_commands import describe_features
from kafkalite.metadata.features import METADATA_VERSION, RECORD_VERSIONS, SUPPORTED
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.metadata.rebalance_commands import RebalanceReplicas
from kafkalite.metadata.records import (
    FeatureLevelRecord,
    PartitionRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    FeatureUpdate,
    PartitionReassignment,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.messages.cluster import FeatureRange, RegisterBrokerRequest
from kafkalite.protocol.messages.metadata import NodeFeature
from proof.levels import run_levels_seed
from proof.mutants import effects, without

ALL_NEW = dict.fromkeys((1, 2, 3), SUPPORTED)
MOVED = PartitionRecord("ab", 0, (1, 2), (1,), 1, 0, 1, target_replicas=(2,), added_replicas=((2, 1),))


@pytest.fixture
def earlier(new_metadata):
    """Three brokers in a log that was written before there were levels."""
    metadata = new_metadata(brokers=0, settings=ControllerSettings(default_replication_factor=2))
    metadata.image = EMPTY
    for node_id in (1, 2, 3):
        metadata.register(node_id)
        metadata.unfence(node_id)
    metadata.create("orders", factor=2)
    return metadata


def update(metadata, level, *, feature=METADATA_VERSION, validate_only=False, nodes=ALL_NEW):
    request = UpdateFeaturesRequest(1_000, validate_only, [FeatureUpdate(feature, level)])
    (result,) = metadata.submit(request, nodes=nodes).results
    return result


def move(metadata):
    return metadata.submit(
        AlterPartitionReassignmentsRequest(1_000, False, [PartitionReassignment("orders", 0, [2, 3])])
    )


def test_a_level_is_finalised_by_command_when_all_nodes_support_it(earlier):
    assert earlier.image.metadata_version == 1
    assert update(earlier, 2, validate_only=True).error_code == 0
    assert earlier.image.metadata_version == 1
    assert update(earlier, 2).error_code == 0
    assert earlier.image.metadata_version == 2
    assert earlier.records[-1] == FeatureLevelRecord(METADATA_VERSION, 2)
    assert update(earlier, 2).error_code == 0  # again
    assert earlier.records.count(FeatureLevelRecord(METADATA_VERSION, 2)) == 1


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        (None, "node 3 (it does not run, or runs a version without feature levels)"),
        ([], "node 3 (metadata.version 1)"),
        ([FeatureRange(METADATA_VERSION, 1, 1)], "node 3 (metadata.version 1 to 1)"),
    ],
)
def test_a_level_that_a_node_may_lack_is_not_finalised(earlier, ranges, text):
    refused = update(earlier, 2, nodes={**ALL_NEW, 3: ranges})
    assert refused.error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert text in refused.error_message
    assert "node 2" not in refused.error_message
    assert earlier.image.metadata_version == 1


@pytest.mark.parametrize(
    ("feature", "level", "text"),
    [
        (METADATA_VERSION, 1, "metadata.version 2 is finalised and can't be lowered to 1"),
        (METADATA_VERSION, 0, "can't be lowered to 0"),
        (METADATA_VERSION, 3, "the controller supports metadata.version 1 to 2, not 3"),
        ("kraft.version", 1, "there is no feature 'kraft.version'"),
    ],
)
def test_other_levels_are_refused_by_name(metadata, feature, level, text):
    refused = update(metadata, level, feature=feature)
    assert refused.error_code == ErrorCode.INVALID_UPDATE_VERSION
    assert text in refused.error_message
    assert metadata.image.metadata_version == 2


def test_without_the_level_nothing_is_decided_that_needs_it_and_the_error_names_the_command(earlier):
    for reply in (move(earlier), earlier.submit(UnregisterBrokerRequest(3))):
        assert reply.error_code == ErrorCode.UNSUPPORTED_VERSION
        assert "'kl cluster features upgrade --feature metadata.version=2'" in reply.error_message
    earlier.register(4)
    earlier.unfence(4)
    assert earlier.submit(ContinueReassignments((("orders", 3),))) == 0
    assert earlier.submit(RebalanceReplicas()) == {}
    assert not any(type(record) is PartitionRecord and record.target_replicas for record in earlier.records)
    update(earlier, 2)
    assert move(earlier).error_code == 0
    assert earlier.state().is_reassigning
    assert earlier.submit(ContinueReassignments((("orders", 3),))) == 0


def test_a_broker_that_does_not_support_a_finalised_level_is_not_registered(metadata):
    fields = (2, "f" * 32, "e" * 32, ["a:1"], None, -1, True, [], 1)
    refused = metadata.submit(RegisterBrokerRequest(*fields))
    assert refused.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert (
        "broker 2 supports metadata.version 1, and metadata.version 2 is finalised" in refused.error_message
    )
    assert metadata.register(2).error_code == 0


def test_an_earlier_program_registers_before_the_level_is_finalised(earlier):
    fields = (2, "f" * 32, f"{2:032x}", ["a:1"], None, -1, True, [], 1)
    assert earlier.submit(RegisterBrokerRequest(*fields)).error_code == 0


def test_every_level_has_a_version_of_each_record_that_it_writes():
    (supported,) = SUPPORTED
    assert sorted(RECORD_VERSIONS) == list(range(supported.min_level, supported.max_level + 1))
    for level, versions in RECORD_VERSIONS.items():
        following = RECORD_VERSIONS.get(level + 1)
        assert following is None or all(following[kind] >= version for kind, version in versions.items())


@pytest.mark.parametrize("record", [MOVED, UnregisterBrokerRecord(3), FeatureLevelRecord("other", 1)])
def test_no_record_is_written_above_the_level(record):
    """R91: the last check before a commit."""
    record_codec.check_level([TopicRecord("ab", "t"), record], 2)
    record_codec.check_level([FeatureLevelRecord(METADATA_VERSION, 2), record], 1)
    with pytest.raises(AssertionError, match=r"above metadata\.version 1"):
        record_codec.check_level([TopicRecord("ab", "t"), record], 1)


def test_a_log_with_a_level_that_this_program_does_not_support_is_refused():
    """R92: as a program of level 1 refuses the record itself."""
    with pytest.raises(
        StorageError, match=r"metadata\.version 3 is finalised, and this program supports"
    ) as got:
        record_codec.from_bytes(msgpack.packb([[13, 0, METADATA_VERSION, 3]]))
    assert "start that version again" in str(got.value.hint)


@pytest.mark.parametrize(
    "records", [[TopicRecord("ab", "t"), MOVED], [UnregisterBrokerRecord(3)]], ids=["moved", "unregistered"]
)
def test_a_log_of_level_2_without_the_record_has_the_level(records):
    """Logs of unreleased revisions, which had reassignments and no levels."""
    image = Delta(EMPTY).replay_all(records).apply(1)
    assert image.metadata_version == 2
    assert Delta(EMPTY).replay_all(image.to_records()).apply(1) == image


def test_a_level_never_goes_back(metadata):
    with pytest.raises(AssertionError, match="lowered"):
        Delta(metadata.image).replay(FeatureLevelRecord(METADATA_VERSION, 1))


def test_the_description_has_what_each_node_supports(earlier):
    nodes = {1: SUPPORTED, 2: None, 3: []}
    (described,) = describe_features(earlier.image, nodes)
    assert (described.feature, described.finalized_level) == (METADATA_VERSION, 1)
    assert described.nodes == [NodeFeature(1, 1, 2), NodeFeature(2, 0, 0), NodeFeature(3, 1, 1)]


def test_what_nobody_has_told_the_controller_is_unknown(earlier):
    request = UpdateFeaturesRequest(1_000, False, [FeatureUpdate(METADATA_VERSION, 2)])
    step = decide(earlier.image, request, now_ms=1, rng=earlier.rng, settings=earlier.settings)
    assert "node 1 (it does not run" in step.reply.results[0].error_message


def test_random_upgrades_leave_every_broker_a_log_that_it_reads():
    assert [run_levels_seed(seed) for seed in range(60)] == [None] * 60


@pytest.mark.parametrize("mutant", sorted(name for name in effects() if name.startswith(("R91-", "R92-"))))
def test_random_upgrades_find_the_missing_rule(mutant):
    with without(mutant):
        assert any(run_levels_seed(seed) is not None for seed in range(60))
