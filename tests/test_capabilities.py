"""``docs/capabilities.md`` names a test for each capability it claims; the tests must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from proof import capabilities

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
    **{f"B{i}": "" for i in range(1, 24)},
    **{f"C{i}": "" for i in range(1, 16)},
    **{f"D{i}": "" for i in range(1, 11)},
    **{f"E{i}": "" for i in range(1, 5)},
    **{f"F{i}": "" for i in range(1, 12)},
    **{f"G{i}": "" for i in range(1, 13)},
    **{f"H{i}": "" for i in range(1, 14)},
    **{f"I{i}": "" for i in range(1, 6)},
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


def test_every_row_that_claims_to_work_has_a_mutation() -> None:
    """``make capabilities`` shows that the tests find the mutations."""
    claimed = {row.name for row in capabilities.rows() if row.shown_by != capabilities.NOT_YET}
    assert {mutation.row for mutation in capabilities.mutations()} == claimed


@pytest.mark.parametrize("mutation", capabilities.mutations(), ids=lambda one: f"{one.row}-{one.file}")
def test_a_mutation_changes_one_place_and_names_tests_of_its_row(mutation: capabilities.Mutation) -> None:
    named = {row.name: row.tests for row in capabilities.rows()}[mutation.row]
    assert set(mutation.tests) <= set(named)
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


@pytest.mark.parametrize(
    ("old", "new", "verdict", "detail"),
    [
        ("True", "False", capabilities.Verdict.FOUND, "test_it - assert False"),
        ("True", "1", capabilities.Verdict.WEAK, ""),
        ("return", "__import__('time').sleep(60); return", capabilities.Verdict.TIMED_OUT, ""),
        ("works", "missing", capabilities.Verdict.NOT_RUN, "exit code"),
        ("nowhere", "", capabilities.Verdict.NOT_RUN, "0 times, not once"),
    ],
)
def test_only_a_failed_test_finds_a_mutation(
    old: str, new: str, verdict: capabilities.Verdict, detail: str, tmp_path: Path
) -> None:
    """A test that passes, hangs or can't be run finds nothing."""
    test = "from product import works\n\ndef test_it():\n    assert works()\n"
    (tmp_path / "product.py").write_text("def works():\n    return True\n")
    (tmp_path / "test_it.py").write_text(test)
    mutation = capabilities.Mutation("A1", "product.py", old, new, ("test_it.py::test_it",), False)
    limit_s = 2.0 if verdict is capabilities.Verdict.TIMED_OUT else 30.0
    outcome = capabilities.prove(mutation, tmp_path, limit_s)
    assert outcome.verdict is verdict
    assert detail in outcome.detail
    assert "return True" in (tmp_path / "product.py").read_text(), "the mutation was taken back"
