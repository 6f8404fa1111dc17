"""docs/rules.md defines every rule that is cited, and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proof.mutants import effects

ROOT = Path(__file__).resolve().parent.parent
RULES = (ROOT / "docs" / "rules.md").read_text()
DEFINED = set(re.findall(r"^### ([RS]\d+):|^\| ([IL]\d+) \|", RULES, re.MULTILINE))
NUMBERS = {number for pair in DEFINED for number in pair if number}
SECTIONS = dict(re.findall(r"^### ([RS]\d+): .*\n([\s\S]*?)(?=^##|\Z)", RULES, re.MULTILINE))
NOT_A_RULE = {"R99"}  # tests of the harness ask for a mutant that does not exist

PLACES = ("kafkalite", "sparkbridge", "pyspark_kafkalite", "proof", "tests", "docs", "examples", "benchmarks")
FILES = sorted(
    [path for place in PLACES for ending in ("py", "md") for path in ROOT.glob(f"{place}/**/*.{ending}")]
    + list(ROOT.glob("*.md"))
)
_CITATION = re.compile(r"\b([RSIL])(\d{1,2})(?:\s*(?:-|to)\s*\1(\d{1,2}))?\b")


def _cited(text: str) -> set[str]:
    cited = set()
    for kind, first, last in _CITATION.findall(text):
        cited |= {f"{kind}{number}" for number in range(int(first), int(last or first) + 1)}
    return cited - NOT_A_RULE


def test_every_cited_number_is_defined() -> None:
    undefined = {
        path.relative_to(ROOT).as_posix(): sorted(missing)
        for path in FILES
        if (missing := _cited(path.read_text()) - NUMBERS)
    }
    assert not undefined


def test_the_rules_are_numbered_without_gaps() -> None:
    for kind, last in (("R", 41), ("S", 21), ("I", 11), ("L", 4)):
        assert {f"{kind}{number}" for number in range(1, last + 1)} <= NUMBERS


@pytest.mark.parametrize("rule", SECTIONS)
def test_modules_and_tests_of_a_rule_exist(rule: str) -> None:
    paths = re.findall(r"`((?:kafkalite|tests|docs)/[\w./-]+)`", SECTIONS[rule])
    assert [path for path in paths if not (ROOT / path).exists()] == []
    is_implemented = "Not implemented" not in SECTIONS[rule] and "Not applicable" not in SECTIONS[rule]
    if rule.startswith("R") and is_implemented:
        modules = [path for path in paths if path.startswith("kafkalite/")]
        assert [path for path in modules if rule not in _cited((ROOT / path).read_text())] == []
        assert "- code: " in SECTIONS[rule]
        assert "- tests: " in SECTIONS[rule]


def test_the_threats_name_every_security_rule_of_the_checklist_and_its_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (S\d+) \| .+ \| (.+) \| (.*)\|$", page, re.MULTILINE)
    assert [rule for rule, _, _ in rows] == [f"S{number}" for number in range(1, 22)]
    for rule, defence, shown_by in rows:
        is_there = not defence.startswith("not ")
        is_implemented = "Not implemented" not in SECTIONS[rule] and "Not applicable" not in SECTIONS[rule]
        assert is_there == is_implemented, rule
        assert bool(shown_by.strip()) == is_there, rule
        if is_there and rule != "S21":
            assert shown_by.strip() in SECTIONS[rule], rule


def test_every_mutant_is_named_under_its_rule_and_every_named_mutant_exists() -> None:
    named = {
        mutant: rule
        for rule, section in SECTIONS.items()
        for listed in re.findall(r"^- mutants: ([\s\S]*?)(?=\n- |\n\n|\Z)", section, re.MULTILINE)
        for mutant in re.findall(r"`([\w-]+)`", listed)
    }
    assert sorted(named) == sorted(effects())
    misplaced = {m: rule for m, rule in named.items() if not m.startswith(("RAFT-", f"{rule}-"))}
    assert not misplaced
