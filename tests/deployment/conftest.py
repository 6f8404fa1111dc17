"""The maker of base images, which is also a script of its own; and what tests of compose have in common."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def base_image() -> ModuleType:
    return _load("base_image")


@pytest.fixture(scope="session")
def engine() -> ModuleType:
    """Whether there is a docker engine, ``Compose`` to ask it, and ``kl`` on the host."""
    return _load("engine")
