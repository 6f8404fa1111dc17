"""The harness of mutants: each names rules that exist and replaces them by functions of the same shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

from proof.mutants import ACTIVE, Mutant, all_mutants, effects, owner_and_attribute, without

ROOT = Path(__file__).resolve().parents[2]
CHANGES = [
    pytest.param(rule, replacement, id=f"{mutant.name} {rule.rpartition(':')[2]}")
    for mutant in all_mutants().values()
    for rule, replacement in mutant.changes.items()
]
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _function(rule: str) -> Callable[..., Any]:
    owner, attribute = owner_and_attribute(rule)
    found = vars(owner)[attribute]
    function: Callable[..., Any] = (
        found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    )
    return function


@pytest.mark.parametrize(("rule", "replacement"), CHANGES)
def test_a_replacement_takes_the_arguments_of_its_rule(rule: str, replacement: Callable[..., Any]) -> None:
    """Otherwise the mutant would be found by its TypeError."""
    parameters = [one for one in signature(replacement).parameters.values() if one.name != "original"]
    wanted = list(signature(_function(rule)).parameters.values())
    if not any(one.kind in _VARIABLE for one in parameters):
        is_method = bool(wanted) and wanted[0].name == "self"  # the replacement may name it otherwise
        assert [one.name for one in parameters[is_method:]] == [one.name for one in wanted[is_method:]]
        assert [one.kind for one in parameters] == [one.kind for one in wanted]


@pytest.mark.parametrize("name", all_mutants())
def test_a_mutant_is_gone_when_its_block_ends(name: str) -> None:
    rules = {rule: _function(rule) for rule in all_mutants()[name].changes}
    assert rules
    with without(name):
        assert {name} == ACTIVE
        assert all(_function(rule) is not function for rule, function in rules.items())
    assert not ACTIVE
    assert {rule: _function(rule) for rule in rules} == rules


def test_every_mutant_cites_a_rule_that_is_defined() -> None:
    defined = set(re.findall(r"^### ([RS]\d+):", (ROOT / "docs" / "rules.md").read_text(), re.MULTILINE))
    cited = {name.partition("-")[0] for name in effects()} - {"RAFT"}
    assert cited <= defined


def test_the_product_mentions_no_mutants() -> None:
    mentioning = [
        path.relative_to(ROOT).as_posix()
        for package in ("kafkalite", "sparkbridge", "pyspark_kafkalite")
        for path in ROOT.glob(f"{package}/**/*.py")
        if "mutant" in path.read_text().lower()
    ]
    assert mentioning == []


class Rules:
    """A room with one rule of each kind."""

    @property
    def is_open(self) -> bool:
        return True

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def may(self, number: int) -> bool:
        return number > 0


def test_a_rule_of_every_kind_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubted(self: Rules, number: int, original: Callable[..., bool]) -> bool:
        return not original(self, number)

    rules = f"{__name__}:Rules"
    mutant = Mutant(
        "R1-all",
        "everything is wrong",
        {
            f"{rules}.is_open": lambda self: False,
            f"{rules}.twice": lambda number: number,
            f"{rules}.name": lambda cls: "another",
            f"{rules}.may": doubted,
        },
    )
    monkeypatch.setattr("proof.mutants.all_mutants", lambda: {"R1-all": mutant})
    found = Rules()
    with without("R1-all"):
        assert (found.is_open, Rules.twice(3), Rules.name(), found.may(1)) == (False, 3, "another", False)
    assert (found.is_open, Rules.twice(3), Rules.name(), found.may(1)) == (True, 6, "Rules", True)


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="there is no such rule"):
        owner_and_attribute("kafkalite.model:TopicPartition.no_such_rule")
    with pytest.raises(KeyError):
        without("R99-nothing").__enter__()
