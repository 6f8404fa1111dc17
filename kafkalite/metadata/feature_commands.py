"""Decisions about feature levels: which levels nodes support, and whether a level may be finalised (KIP-584).

The controller receives the supported levels from the heartbeats of brokers and from the connections to other
voters. They are not in the log, because at level 1 of metadata.version no record has them. So a node that
does not run is one whose levels are unknown, and no level is finalised until it runs or is unregistered.
"""

# Tests: tests/metadata/test_features.py

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafkalite.errors import BrokerError, InvalidUpdateVersionError
from kafkalite.metadata.decision import Decision, outcome
from kafkalite.metadata.features import FIRST_LEVEL, SUPPORTED, level_of, range_of, range_text, supports
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.records import FeatureLevelRecord, MetadataRecord
from kafkalite.protocol.messages.admin import (
    FeatureUpdate,
    UpdatedFeature,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from kafkalite.protocol.messages.cluster import FeatureRange
from kafkalite.protocol.messages.metadata import FeatureDescription, NodeFeature

#: By node id, of all brokers and voters: the levels that the node's program supports; None: unknown.
NodeRanges = Mapping[int, Sequence[FeatureRange] | None]


def update_features(image: ClusterImage, command: UpdateFeaturesRequest, nodes: NodeRanges) -> Decision:
    """Finalise levels. A level that is finalised already is accepted again.

    Errors of an item: INVALID_UPDATE_VERSION (an unknown feature, a lower level than the finalised one, or a
    level that a broker or voter does not support, or may not support).
    """
    records: list[MetadataRecord] = []
    results: list[UpdatedFeature] = []
    for update in command.updates:
        error = _problem(image, update, nodes)
        if error is not None:
            results.append(UpdatedFeature(update.feature, *outcome(error)))
            continue
        results.append(UpdatedFeature(update.feature, 0, None))
        if update.level != level_of(image.levels, update.feature):
            records.append(FeatureLevelRecord(update.feature, update.level))
    return Decision(UpdateFeaturesResponse(0, None, results), () if command.validate_only else records)


def _problem(image: ClusterImage, update: FeatureUpdate, nodes: NodeRanges) -> BrokerError | None:
    feature, level = update
    if feature not in {each.feature for each in SUPPORTED}:
        known = ", ".join(each.feature for each in SUPPORTED)
        return InvalidUpdateVersionError(f"there is no feature {feature!r}: the controller supports {known}")
    finalized = level_of(image.levels, feature)
    if is_lower(level, finalized):
        return InvalidUpdateVersionError(
            f"{feature} {finalized} is finalised and can't be lowered to {level}: its records are in the log"
        )
    if not supports(SUPPORTED, feature, level):
        return InvalidUpdateVersionError(
            f"the controller supports {range_text(SUPPORTED, feature)}, not {level}: start newer"
            " versions first"
        )
    lacking = nodes_lacking(nodes, feature, level)
    if lacking:
        return InvalidUpdateVersionError(
            f"{feature} {level} is not supported by {'; '.join(lacking)}: start each node with a version that"
            " supports it"
        )
    return None


def is_lower(level: int, finalized: int) -> bool:
    """Whether the level to finalise is below the finalised one, whose records are in the log (R92)."""
    return level < finalized


def nodes_lacking(nodes: NodeRanges, feature: str, level: int) -> list[str]:
    """Describe each node that does not support a level, or is not known to support it (R92)."""
    found: list[str] = []
    for node_id, ranges in sorted(nodes.items()):
        if ranges is None:
            found.append(f"node {node_id} (it does not run, or runs a version without feature levels)")
        elif not supports(ranges, feature, level):
            found.append(f"node {node_id} ({range_text(ranges, feature)})")
    return found


def describe_features(image: ClusterImage, nodes: NodeRanges) -> list[FeatureDescription]:
    """Return the features that the controller supports, with the levels that each node supports."""
    return [
        FeatureDescription(
            each.feature,
            level_of(image.levels, each.feature),
            [_node_feature(node_id, ranges, each.feature) for node_id, ranges in sorted(nodes.items())],
        )
        for each in SUPPORTED
    ]


def _node_feature(node_id: int, ranges: Sequence[FeatureRange] | None, feature: str) -> NodeFeature:
    if ranges is None:
        return NodeFeature(node_id, 0, 0)
    found = range_of(ranges, feature)
    return NodeFeature(node_id, *((FIRST_LEVEL, FIRST_LEVEL) if found is None else found[1:]))
