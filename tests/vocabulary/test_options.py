"""Options: parsing, bounds, and error texts."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalite.errors import ConfigError
from kafkalite.options import Option, OptionRegistry

COUNT = Option("a.count", "int", 3, "How many.", minimum=1, maximum=9, aliases=("old.count",))
RATE = Option("a.rate", "float", 0.5, "How fast.", minimum=0)
LOW = Option("a.low", "int", 0, "Low.", maximum=5)
FLAG = Option("a.flag", "bool", True, "Whether.")
NAME = Option("a.name", "string", "x", "What.")
PARTS = Option("a.parts", "list", (), "Which.")
MODE = Option("a.mode", "string", "fast", "How.", choices=("fast", "safe"))
ANY = Option("a.any", "int", 0, "Anything.")


@pytest.mark.parametrize(
    ("option", "given", "parsed"),
    [
        (COUNT, "7", 7),
        (COUNT, " 1_0 ".replace("1_0", "0_7"), 7),
        (COUNT, 1, 1),
        (RATE, "2.5", 2.5),
        (RATE, 2, 2.0),
        (FLAG, "yes", True),
        (FLAG, "OFF", False),
        (FLAG, True, True),
        (NAME, "n", "n"),
        (NAME, 9092, "9092"),
        (PARTS, "a, b,,c", ("a", "b", "c")),
        (PARTS, ["a", 1], ("a", "1")),
        (MODE, "safe", "safe"),
        (COUNT, None, None),
    ],
)
def test_a_value_is_converted_to_the_options_type(option: Option, given: Any, parsed: Any) -> None:
    assert option.parse(given) == parsed


@pytest.mark.parametrize(
    ("option", "given", "allowed"),
    [
        (COUNT, "many", "a whole number from 1 to 9"),
        (COUNT, 0, "a whole number from 1 to 9"),
        (COUNT, 10, "a whole number from 1 to 9"),
        (COUNT, True, "a whole number from 1 to 9"),
        (COUNT, 1.5, "a whole number from 1 to 9"),
        (RATE, "fast", "a number, 0 or more"),
        (RATE, False, "a number, 0 or more"),
        (RATE, [], "a number, 0 or more"),
        (RATE, "nan", "a number, 0 or more"),
        (RATE, float("inf"), "a number, 0 or more"),
        (LOW, 6, "a whole number, 5 or less"),
        (FLAG, "perhaps", "true or false"),
        (NAME, 1.5, "text"),
        (PARTS, 5, "a comma-separated list"),
        (MODE, "slow", "one of fast, safe"),
        (ANY, "x", "a whole number"),
    ],
)
def test_an_error_names_key_value_allowed_values_and_source(option: Option, given: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        option.parse(given, source="broker.toml")
    error = refused.value
    assert (error.key, error.value, error.allowed) == (option.name, given, allowed)
    assert str(error) == f"{option.name} is {given!r}, but must be {allowed} (in broker.toml)"


def test_a_registry_finds_every_name_and_suggests_the_nearest() -> None:
    registry = OptionRegistry([COUNT, FLAG])
    assert [option.name for option in registry] == ["a.count", "a.flag"]
    assert len(registry) == 2
    for spelling in ("a.count", "a_count", "old.count"):
        assert spelling in registry
        assert registry.get(spelling) is COUNT
    assert "b" not in registry
    assert registry.defaults() == {"a.count": 3, "a.flag": True}
    assert registry.parse({"a_flag": "no", "old.count": "2"}) == {"a.flag": False, "a.count": 2}
    with pytest.raises(ConfigError, match=r"a\.cuont: unknown option; did you mean a\.count\?"):
        registry.get("a.cuont")
    with pytest.raises(ConfigError, match="see 'kl config explain'"):
        registry.get("zzzzzz")
    with pytest.raises(AssertionError, match="declared twice"):
        OptionRegistry([COUNT, COUNT])
