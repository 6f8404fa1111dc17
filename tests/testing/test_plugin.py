"""The pytest plugin in a user's project: synchronous tests, asynchronous tests, markers, xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
def pytest_configure(config):
    if not config.pluginmanager.has_plugin("kafkalite"):  # not installed: what pytest11 would do
        from kafkalite.testing import plugin
        config.pluginmanager.register(plugin, "kafkalite")
"""

TESTS = """
import asyncio
import pytest
from kafkalite import Consumer, Producer

def test_sync(kafkalite):
    kafkalite.create_topic("t", partitions=2)
    kafkalite.produce("t", [b"1", b"2"])
    assert sorted(r.value for r in kafkalite.records("t")) == [b"1", b"2"]

def test_each_test_has_a_fresh_broker(kafkalite):
    assert kafkalite.statistics().topic_count == 0

async def test_async(kafkalite):
    async with Producer(kafkalite.bootstrap_servers) as producer:
        assert (await producer.send("t", b"1")).offset == 0
    async with Consumer(
        "t", bootstrap_servers=kafkalite.bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        assert (await consumer.get_many(timeout_ms=5000))[0].value == b"1"

def test_a_loop_of_its_own(kafkalite):
    async def main():
        async with Producer(kafkalite.bootstrap_servers) as producer:
            return (await producer.send("t", b"1")).offset
    assert asyncio.run(main()) == 0

@pytest.mark.kafkalite(num_partitions=3)
def test_settings(kafkalite):
    kafkalite.produce("auto", [b"x"])
    assert kafkalite.statistics().partition_count == 3

def test_many(kafkalite_cluster):
    one, other = kafkalite_cluster(), kafkalite_cluster(storage="disk", transport="tcp")
    one.produce("t", [b"1"])
    assert (one.statistics().topic_count, other.statistics().topic_count) == (1, 0)
    assert one.bootstrap_servers != other.bootstrap_servers
"""


def _run(project: Path, *options: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *options],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_with_kafkalite.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\n"
        "asyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
    )
    return tmp_path


def test_the_fixture_serves_sync_and_async_tests(project: Path) -> None:
    assert "6 passed" in _run(project)


def test_workers_of_xdist_do_not_meet(project: Path) -> None:
    assert "6 passed" in _run(project, "-n", "2")


def test_the_fixtures_are_listed_with_their_docstrings(project: Path) -> None:
    shown = _run(project, "--fixtures")
    assert "A running cluster for this test only" in shown
    assert "Returns a factory of running clusters" in shown
    assert "kafkalite(brokers=1, **settings)" in _run(project, "--markers")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("3", "@pytest.mark.kafkalite(3): it takes keywords only, such as brokers=3"),
        ("num_partition=3", "num.partition"),
        ("brokers=0", "brokers is 0"),
        ("num_partitions='x'", "num.partitions"),
    ],
)
def test_a_wrong_marker_fails_its_test_with_one_line(project: Path, arguments: str, told: str) -> None:
    (project / "test_with_kafkalite.py").write_text(
        f"import pytest\n@pytest.mark.kafkalite({arguments})\ndef test_it(kafkalite): pass\n"
    )
    shown = _run(project, code=1)
    assert "1 error" in shown
    assert told in shown
    assert "@pytest.mark.kafkalite" in shown
    assert "SyncCluster" not in shown, "no frame of kafkalite"
