"""docker-compose.yml without an engine: docker-compose takes it, and it agrees with the Dockerfiles."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def services(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "docker-compose.yml").read_text())["services"]
    return found


@pytest.mark.parametrize("profile", ["tools", "spark"])
def test_docker_compose_takes_the_file(repository: Path, profile: str) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("there is no docker-compose: docker-compose.yml is read as YAML only")
    done = subprocess.run(
        ["docker-compose", "-f", "docker-compose.yml", "--profile", profile, "config", "-q"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
        env={name: text for name, text in os.environ.items() if not name.startswith("KAFKALITE_")},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_everything_of_spark_is_one_image_in_one_profile(services: dict[str, Any]) -> None:
    spark = [service for service in services.values() if service["image"] != services["node1"]["image"]]
    assert len(spark) == 4
    assert {service["image"] for service in spark} == {services["pipeline"]["image"]}
    assert all(service["profiles"] == ["spark"] for service in spark)
    assert all(service["volumes"] == services["pipeline"]["volumes"] for service in spark)


def test_the_cluster_by_itself_starts_no_spark(services: dict[str, Any]) -> None:
    started = [name for name, service in services.items() if "profiles" not in service]
    assert started == ["node1", "node2", "node3"]


def test_what_the_images_are_built_from_is_sent_to_the_engine(repository: Path) -> None:
    sent = {line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for name in ("Dockerfile", "Dockerfile.spark"):
        for line in (repository / name).read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                assert set(line.split()[1:-1]) <= sent, line
