"""The examples run, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROMISES = {
    "quick.py": ["sent     greetings-0-0", "received greetings-0-2: b'hello 2'"],
    "exactly_once.py": ["a worker was killed: 20 receipts", "100 purchases, 100 receipts, in order"],
    "columns.py": ["100,000 records read; columns: offset, timestamp, key, value, headers"],
}


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, repository: Path) -> None:
    if name == "columns.py":
        pytest.importorskip("pyarrow")
    done = subprocess.run(
        [sys.executable, "-W", "error", repository / "examples" / name],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    for promise in PROMISES[name]:
        assert promise in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("foreign_client.py", []),
        ("foreign_client.py", ["nosuch"]),
        ("foreign_client.py", ["127.0.0.1:1"]),
        ("generate_structs.py", []),
        ("generate_structs.py", ["nosuch"]),
        ("exactly_once.py", ["nosuch"]),
    ],
)
def test_an_example_with_wrong_arguments_prints_its_usage(
    name: str, arguments: list[str], repository: Path
) -> None:
    done = subprocess.run(
        [sys.executable, repository / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode != 0
    (usage,) = done.stderr.splitlines()
    assert usage.startswith("usage: ") and name in usage
