"""A docker engine, the project's docker-compose.yml on it, and kl on the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

ADDRESSES = ("127.0.0.1:19091", "127.0.0.1:19092", "127.0.0.1:19093")
BUILD_LIMIT_S = 600
LIMIT_S = 100


def why_not(base_image: ModuleType) -> str:
    """Why this can't be tested here; empty when it can."""
    for tool in ("docker", "docker-compose"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode != 0:
        return "no docker engine answers"
    missing: list[str] = base_image.missing_tools()
    if missing:
        return f"without {', '.join(missing)} no base image can be made (apt-get install debootstrap)"
    return ""


def skip_unless_there(base_image: ModuleType) -> None:
    """Skip what needs an engine where there is none, and say so loudly."""
    if reason := why_not(base_image):
        print(f"\n{'#' * 80}\n# docker-compose.yml IS NOT TESTED: {reason}\n{'#' * 80}", file=sys.stderr)
        pytest.skip(f"docker-compose.yml is not tested: {reason}")


class Compose:
    """The project under a unique name, so that no other cluster is touched."""

    def __init__(
        self, repository: Path, base: str, environment: Mapping[str, str] | None = None, profile: str = ""
    ) -> None:
        self.name = f"kafkalite-test-{os.getpid()}"
        profiles = ["--profile", profile] if profile else []
        self._command = ["docker-compose", "-p", self.name, "-f", str(repository / "docker-compose.yml")]
        self._command += profiles
        self._environment = {
            **os.environ,
            "KAFKALITE_BASE_IMAGE": base,
            "KAFKALITE_IMAGE": "kafkalite:test",
            "DOCKER_BUILDKIT": "0",  # the base image exists nowhere but in this engine
            **(environment or {}),
        }

    def __call__(self, *arguments: str, limit_s: float = LIMIT_S, check: bool = True) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=self._environment,
        )
        if check:
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def inspect(self, service: str) -> dict[str, object]:
        container = self("ps", "-q", service).strip()
        shown = subprocess.run(
            ["docker", "inspect", "--format", "{{json .State}}", container],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        state: dict[str, object] = json.loads(shown.stdout)
        return state


def kl(*arguments: str, stdin: bytes = b"", servers: str = ",".join(ADDRESSES)) -> str:
    """kl on the host."""
    done = subprocess.run(
        [sys.executable, "-m", "kafkalite", *arguments],
        input=stdin,
        capture_output=True,
        timeout=LIMIT_S,
        env=os.environ | {"KL_BOOTSTRAP_SERVERS": servers},
    )
    assert done.returncode == 0, (arguments, done.stdout.decode()[-2000:], done.stderr.decode()[-2000:])
    return done.stdout.decode()
