"""kl cluster features, and what kl cluster status says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafkalite.client.admin.descriptions import FeatureDescription
from kafkalite.raft import controller_node
from kafkalite.testing import SyncCluster

Kl = Callable[..., Any]


@pytest.fixture
def at(kl: Kl, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A node whose log was begun by a version without levels."""
    monkeypatch.setattr(controller_node, "newest_levels", list)
    with SyncCluster(transport="tcp") as cluster:
        yield lambda *words: kl("cluster", *words, "-b", cluster.bootstrap_servers)


def test_a_level_is_shown_checked_and_finalised(at: Callable[..., Any]) -> None:
    (found,) = json.loads(at("features", "describe", "-o", "json").out)
    assert found == {
        "feature": "metadata.version",
        "finalized_level": 1,
        "common_level": 2,
        "nodes": ["1: 1-2"],
    }
    assert (
        "all nodes support 2: 'kl cluster features upgrade --feature metadata.version=2'" in at("status").text
    )
    checked = at("features", "upgrade", "--metadata-version", "2", "--dry-run")
    assert (checked.code, checked.text) == (0, "metadata.version 2: may be finalised\n")
    finalised = at("features", "upgrade", "--feature", "metadata.version=2", "--yes")
    assert (finalised.code, finalised.text) == (0, "metadata.version 2: finalised\n")
    assert "SUPPORTED BY ALL" in at("features", "describe").text
    assert "upgrade" not in at("status").text
    assert json.loads(at("status", "-o", "json").out)["features"] == {
        "metadata.version": {"finalized_level": 2, "common_level": 2}
    }
    refused = at("features", "upgrade", "--metadata-version", "1", "--yes")
    assert refused.code == 1
    assert "can't be lowered to 1" in refused.told


@pytest.mark.parametrize(
    "words", [(), ("--feature", "metadata.version"), ("--feature", "x=y"), ("--metadata-version", "0")]
)
def test_no_level_is_finalised_by_accident(kl: Kl, words: tuple[str, ...]) -> None:
    assert kl("cluster", "features", "upgrade", *words, "--yes", "-b", "localhost:1").code == 2


@pytest.mark.parametrize(
    ("nodes", "common"),
    [({}, 1), ({1: (1, 2), 2: (1, 3)}, 2), ({1: (1, 2), 2: (1, 1)}, 1), ({1: (1, 2), 2: None}, 1)],
)
def test_the_common_level_is_one_that_all_nodes_are_known_to_support(
    nodes: dict[int, tuple[int, int] | None], common: int
) -> None:
    assert FeatureDescription("metadata.version", 1, nodes).common_level == common
