"""The maker of base images, which is also a script of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def base_image() -> ModuleType:
    spec = importlib.util.spec_from_file_location("base_image", Path(__file__).with_name("base_image.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
