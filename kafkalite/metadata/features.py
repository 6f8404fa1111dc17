"""Feature levels: what a cluster may use while nodes of two neighbouring versions form it (KIP-584, KIP-778).

A feature has levels, and a program supports a range of them. The metadata log has the finalised level of each
feature. The controller decides and writes only what the finalised levels allow, so that every program that
supports these levels reads the log. A level is finalised by command only, when all nodes support it, and is
never lowered: before that, each program can be replaced by the earlier one.

The levels of ``metadata.version``::

    1    all records before there were levels; also the level of a log without a FeatureLevelRecord
    2    reassignments, unregistered brokers, changes of the voters, and the FeatureLevelRecord itself

A new log begins with the newest levels that the first controller supports. A log that was written before
there were levels may have records of level 2. It has that level from the first one of them on.
"""

# Tests: tests/metadata/test_features.py

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import UnsupportedVersionError
from kafkalite.metadata.records import (
    AclRecord,
    BrokerChangeRecord,
    BrokerRegistrationRecord,
    ClientQuotaRecord,
    ConfigRecord,
    FeatureLevelRecord,
    HighWatermarksRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from kafkalite.protocol.messages.cluster import FeatureRange

METADATA_VERSION: Final = "metadata.version"

FIRST_LEVEL: Final = 1  #: of a feature without a FeatureLevelRecord
LEVEL_OF_REASSIGNMENTS: Final = 2

#: The levels that this program supports.
SUPPORTED: Final = (FeatureRange(METADATA_VERSION, FIRST_LEVEL, 2),)

_LEVEL_1: Final[Mapping[type, int]] = {
    TopicRecord: 0,
    RemoveTopicRecord: 0,
    PartitionRecord: 3,
    ConfigRecord: 0,
    BrokerRegistrationRecord: 2,
    BrokerChangeRecord: 0,
    HighWatermarksRecord: 0,
    ProducerIdsRecord: 0,
    AclRecord: 0,
    ScramCredentialRecord: 0,
    ClientQuotaRecord: 0,
}
_LEVEL_2: Final[Mapping[type, int]] = {
    **_LEVEL_1,
    PartitionRecord: 4,
    UnregisterBrokerRecord: 0,
    FeatureLevelRecord: 0,
}
#: By level of metadata.version: the newest version of each record type that is written at this level.
RECORD_VERSIONS: Final[Mapping[int, Mapping[type, int]]] = {FIRST_LEVEL: _LEVEL_1, 2: _LEVEL_2}


class Capability(NamedTuple):
    """What the controller does only at a level of a feature and above."""

    name: str
    feature: str
    level: int


REASSIGNMENTS: Final = Capability("reassignments of partitions", METADATA_VERSION, LEVEL_OF_REASSIGNMENTS)
UNREGISTERING: Final = Capability("the removal of brokers", METADATA_VERSION, LEVEL_OF_REASSIGNMENTS)
VOTER_CHANGES: Final = Capability("changes of the voters", METADATA_VERSION, LEVEL_OF_REASSIGNMENTS)


def level_of(levels: Mapping[str, int], feature: str) -> int:
    """Return the finalised level of ``feature``."""
    return levels.get(feature, FIRST_LEVEL)


def newest_levels() -> list[FeatureLevelRecord]:
    """Return the records with which a new log begins."""
    return [FeatureLevelRecord(each.feature, each.max_level) for each in SUPPORTED]


def allows(levels: Mapping[str, int], capability: Capability) -> bool:
    """Whether the finalised levels include the capability (R91)."""
    return level_of(levels, capability.feature) >= capability.level


def refusal(levels: Mapping[str, int], capability: Capability) -> UnsupportedVersionError | None:
    """Return the error of a command that needs ``capability``, or None if the levels allow it."""
    if allows(levels, capability):
        return None
    name, feature, level = capability
    command = f"kl cluster features upgrade --feature {feature}={level}"
    return UnsupportedVersionError(
        f"{name} need {feature} {level}, and {feature} {level_of(levels, feature)} is finalised: when no"
        f" node has to go back to an earlier version, run '{command}'"
    )


def range_of(ranges: Sequence[FeatureRange], feature: str) -> FeatureRange | None:
    """Return the range of ``feature``. A program without one was written before there were levels."""
    return next((each for each in ranges if each.feature == feature), None)


def supports(ranges: Sequence[FeatureRange], feature: str, level: int) -> bool:
    """Whether a program with these ranges supports a level."""
    found = range_of(ranges, feature)
    return level == FIRST_LEVEL if found is None else found.min_level <= level <= found.max_level


def range_text(ranges: Sequence[FeatureRange], feature: str) -> str:
    """Return the supported levels as in "supports metadata.version 1 to 2"."""
    found = range_of(ranges, feature)
    return f"{feature} {FIRST_LEVEL if found is None else f'{found.min_level} to {found.max_level}'}"
