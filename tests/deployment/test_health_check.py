"""The health check of the image, as its command at a real node: listeners with logins and certificates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from kafkalite.parent_pipe import PARENT_PIPE, stdin_for_children
from kafkalite.transport.free_ports import free_ports
from proof.certificates import DevCertificates

pytestmark = pytest.mark.slow

SECRET = "a cluster secret of some length"
LIMIT_S = 60


def check_of(dockerfile: Path) -> list[str]:
    """Return the arguments of kl in the image's health check."""
    found = re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", dockerfile.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    program, *arguments = json.loads(found[1])
    assert program == "kl"
    return list(arguments)


def environment(settings: dict[str, str], directory: Path) -> dict[str, str]:
    others = {name: text for name, text in os.environ.items() if not name.startswith(("KAFKALITE_", "KL_"))}
    ours = {f"KAFKALITE_{name}": text for name, text in settings.items()}
    return {**others, **ours, "KAFKALITE_LOG_DIRS": str(directory / "data")}


@contextmanager
def running(env: dict[str, str], directory: Path) -> Iterator[None]:
    log = directory / "node.log"
    with log.open("wb") as file:
        node = subprocess.Popen(
            [sys.executable, "-m", "kafkalite", "server", "start"],
            env={**env, PARENT_PIPE: "1"},
            stdin=stdin_for_children(),
            stdout=file,
            stderr=file,
        )
    try:
        yield
    finally:
        node.send_signal(signal.SIGKILL)
        node.wait()
        print(log.read_text()[-3_000:])


def health(env: dict[str, str], check: list[str], timeout: str) -> tuple[int, str]:
    """Return the exit code of the health check, which waits for ``timeout``, and its error."""
    arguments = [*check[: check.index("--timeout")], "--timeout", timeout]
    done = subprocess.run(
        [sys.executable, "-m", "kafkalite", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("listener", ["SASL_PLAINTEXT", "SASL_SSL", "SSL"])
def test_a_closed_node_is_healthy(
    repository: Path, tmp_path: Path, dev_certificates: DevCertificates, listener: str
) -> None:
    """Without a rule that allows anything: the check logs in with the cluster's secret."""
    settings = {
        "LISTENERS": f"{listener}://0.0.0.0:{free_ports(1)[0]}",
        "CLUSTER_SECRET": SECRET,
        "AUTHORIZER_CLASS_NAME": "StandardAuthorizer",
        "SUPER_USERS": "User:admin",
    }
    if "SSL" in listener:
        settings |= {"SSL_CLIENT_AUTH": "required"}
        settings |= {name.upper(): text for name, text in dev_certificates.ssl("broker.pem").items()}
    env = environment(settings, tmp_path)
    check = check_of(repository / "Dockerfile")
    with running(env, tmp_path):
        assert health(env, check, "30s") == (0, "")
        code, error = health({**env, "KAFKALITE_CLUSTER_SECRET": "another of some length"}, check, "1s")
        assert (code, "does not know this cluster's secret" in error) == (7, True)


def test_a_login_without_a_secret_is_named(repository: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    env = environment({"LISTENERS": f"SASL_PLAINTEXT://127.0.0.1:{port}"}, tmp_path)
    check = check_of(repository / "Dockerfile")
    with running(env, tmp_path):
        code, error = health(env, check, "5s")
    assert code == 7
    assert "requires a login" in error
    assert "set KAFKALITE_CLUSTER_SECRET" in error
