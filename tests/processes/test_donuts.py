"""The donut shop's story comes true, every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_story_runs_to_its_end(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", repository / "examples" / "donuts" / "run.py"],
        capture_output=True,
        text=True,
        timeout=110,
        env={"PYTHONPATH": str(repository), "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout
    for sentence in (
        "broker 3 is killed",
        "broker 1 leads everything",
        "min.insync.replicas=2, refuses: NOT_ENOUGH_REPLICAS",
        "all of its 30 purchases",
        "every partition is on three brokers again",
        "0 lost, 0 twice",
        "can be fetched again",
    ):
        assert sentence in told, told
    took = re.search(r"a new leader after (\d+\.\d+) s", told)
    assert took is not None
    assert float(took[1]) <= 3.0
    assert re.search(r"^ +leaders +sold +longest wait", told, re.MULTILINE), told
