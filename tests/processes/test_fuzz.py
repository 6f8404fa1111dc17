"""The generator of mutated requests; ``make fuzz`` sends them to a real broker."""

from __future__ import annotations

import random

import pytest

from kafkalite.protocol.api import APIS
from proof.processes.fuzz import Generator


def test_a_frame_that_a_mutation_has_emptied_can_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "_mutate_bytes", lambda self, frame: b"")
    last = [Generator(random.Random(number), list(APIS)).script()[-1] for number in range(300)]
    assert b"" in last
