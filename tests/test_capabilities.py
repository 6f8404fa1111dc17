"""``docs/capabilities.md`` names a test for each capability it claims; the tests must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| ([A-K]\d+) \| (.+?) \| (.+?) \|$")


def _rows() -> dict[str, tuple[str, str]]:
    rows: dict[str, tuple[str, str]] = {}
    for line in (ROOT / "docs/capabilities.md").read_text().splitlines():
        found = ROW.match(line)
        if found:
            assert found[1] not in rows, f"{found[1]} stands twice"
            rows[found[1]] = (found[2], found[3])
    return rows


EXPECTED = {
    **{f"A{i}": "" for i in range(1, 18)},
    **{f"B{i}": "" for i in range(1, 22)},
    **{f"C{i}": "" for i in range(1, 16)},
    **{f"D{i}": "" for i in range(1, 10)},
    **{f"E{i}": "" for i in range(1, 5)},
    **{f"F{i}": "" for i in range(1, 11)},
    **{f"G{i}": "" for i in range(1, 13)},
    **{f"H{i}": "" for i in range(1, 13)},
    **{f"I{i}": "" for i in range(1, 5)},
    **{f"J{i}": "" for i in range(1, 12)},
    **{f"K{i}": "" for i in range(1, 13)},
}


def test_every_capability_has_its_row() -> None:
    assert set(_rows()) == set(EXPECTED)


@pytest.mark.parametrize("capability", sorted(EXPECTED))
def test_the_named_test_exists(capability: str) -> None:
    _, shown_by = _rows()[capability]
    if shown_by == "not yet":
        return
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown_by)
    assert named, f"{capability} names no test: {shown_by}"
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert test in functions, f"{capability}: {file} has no {test}"
