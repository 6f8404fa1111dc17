"""The programmes of damage: what they draw, and that their judges notice what they should.

``make damage`` runs the cases; here are only a few.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from kafkalite.model import TopicPartition
from kafkalite.records.builder import build_batch
from kafkalite.rng import seeded_rng
from kafkalite.storage import layout
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from proof.damage.kinds import LOG_KINDS, Kind, copy_tree, damage_log, restore_tree
from proof.processes import damage, lone_damage


def test_a_case_is_its_name() -> None:
    for case in damage.draw_cases(300, seeded_rng(1)):
        assert damage.Case.parse(str(case)) == case


def test_drawn_cases_cover_every_kind_and_stop() -> None:
    cases = damage.draw_cases(300, seeded_rng(2))
    found = {(case.stop, case.kind) for case in cases}
    assert found >= {(stop, kind) for stop in damage.STOPS for kind in LOG_KINDS}
    places = Counter(case.place for case in cases)
    assert set(places) == {
        damage.LEADER,
        damage.FOLLOWER,
        damage.TWO_NODES,
        damage.TWO_COPIES,
        damage.WHOLE_NODE,
    }
    assert 20 <= places[damage.WHOLE_NODE] <= 100
    assert sorted(case for life in damage.lives_of(cases) for case in life) == sorted(cases)


def test_a_lone_node_has_the_cases_of_every_kind() -> None:
    cases = lone_damage.cases()
    assert len(cases) == len(set(cases)) >= 104
    lives = [case for life in lone_damage.lives_of(cases) for case in life]
    assert sorted(lives) == sorted(cases)


def test_no_partition_of_offsets_is_damaged_on_two_nodes() -> None:
    cases = [damage.Case.parse("clean/offsets-active.flip/follower/first/apart")] * 9
    pool = {
        (damage.OFFSETS_TOPIC, node_id): [TopicPartition(damage.OFFSETS_TOPIC, node_id - 1)]
        for node_id in (1, 2, 3)
    }
    life = damage.Life(cases, "life-1", [1, 2, 3])
    for index, (leader, victim) in enumerate(itertools.product((1, 2, 3), repeat=2)):
        life.sites[index] = [damage.offsets_site(pool, life, leader, victim)]
    damaged = {site.partition: site.node_id for (site,) in life.sites.values()}
    assert len(damaged) == 3
    assert all(damaged[site.partition] == site.node_id for (site,) in life.sites.values())


def test_difference_of_records() -> None:
    told = {0: "a", 1: "b", 5: "c"}
    assert damage.difference(told, told | {2: "not acknowledged"}) is None
    assert "LOST 1 of 3" in str(damage.difference(told, {0: "a", 1: "b"}))
    assert "CHANGED 1 of 3" in str(damage.difference(told, told | {5: "x"}))


@pytest.fixture
def copies(tmp_path: Path) -> dict[int, str]:
    """Return two equal logs of three segments, by node."""
    fs, found = RealFileSystem(), {node_id: str(tmp_path / f"copy-{node_id}") for node_id in (1, 2)}
    for path in found.values():
        _fill(fs, path)
    return found


def _fill(fs: FileSystem, path: str, text: bytes = b"x") -> None:
    log = Log.create(fs, path, LogConfig(segment_bytes=4096))
    for number in range(30):
        batch = bytearray(build_batch([b"%04d %s" % (number, text.ljust(400))], timestamps_ms=number))
        log.append(batch, leader_epoch=0, now_ms=number)
    log.close(clean=True)


@pytest.mark.parametrize("file", ["active", "closed"])
@pytest.mark.parametrize("operation", ["flip", "zero", "zero-block", "truncate", "delete", "duplicate"])
def test_replicas_with_a_damaged_one_are_unequal(copies: dict[int, str], file: str, operation: str) -> None:
    fs = RealFileSystem()
    assert damage.unequal(fs, copies) is None
    sound = copy_tree(fs, copies[2])
    for seed in range(20):
        assert damage_log(fs, copies[2], Kind(file, operation), seeded_rng(seed))
        assert copy_tree(fs, copies[2]) != sound
        assert damage.unequal(fs, copies) is not None
        restore_tree(fs, copies[2], sound)
        assert damage.unequal(fs, copies) is None


@pytest.mark.parametrize("kind", LOG_KINDS, ids=str)
def test_each_kind_of_damage_changes_the_log(tmp_path: Path, kind: Kind) -> None:
    fs = RealFileSystem()
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    for path in (own, other):
        _fill(fs, path, path.encode())
        small = (layout.PARTITION_FILE, layout.LOG_STATE_FILE, layout.LEADER_EPOCHS_FILE)
        for name in (*small, *(each for each in fs.list_dir(path) if each.endswith(layout.PRODUCERS_SUFFIX))):
            (Path(path) / name).write_text(f"{name} of {path}")
    sound, sibling = copy_tree(fs, own), copy_tree(fs, other)
    assert damage_log(fs, own, kind, seeded_rng(1), sibling=other, earlier=sibling)
    if kind != Kind("index", "swap"):  # logs of equal sizes have equal indexes
        assert copy_tree(fs, own) != sound


#: Each list is one life of a cluster.
LIVES = [
    [
        "kill/active.flip/leader/middle/apart",
        "kill/active.truncate/leader/first/apart",
        "kill/active.truncate/leader/middle/apart",
        "kill/directory.delete/leader/middle/apart",
        "kill/directory.delete/two-copies/first/apart",
        "kill/active.swap/two-nodes/last/apart",
    ],
    ["kill/node.older/node/middle/apart"],
    [
        "clean/active.truncate/leader/middle/together",
        "clean/closed.flip/leader/middle/together",
        "clean/closed.flip/follower/first/together",
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("names", LIVES, ids=["killed", "older node", "stopped"])
def test_nothing_acknowledged_is_lost(names: list[str], tmp_path: Path) -> None:
    """Copies are damaged while all nodes are down, and others are sound (R46, R53)."""
    results = damage.run_cases([damage.Case.parse(each) for each in names], tmp_path, seed=1)
    assert len(results) == len(names)
    assert not any(results.values()), results


@pytest.mark.slow
def test_the_judge_finds_a_real_loss(tmp_path: Path) -> None:
    assert damage.self_test(tmp_path)
