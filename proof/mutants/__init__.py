"""Mutants: known bugs of this design, put back one at a time to prove that the tests find them.

A rule of the product is a small function or method with a name, for example
``PartitionLeader.may_move_high_watermark``. A mutant names that rule and gives a replacement for it;
``without`` installs the replacement while a test or a simulation runs. The product knows no mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from typing import Any, Final, NamedTuple

# One module per room of the product. Each has a constant MUTANTS.
ROOMS: Final = ("storage", "replication", "broker", "metadata", "raft", "groups", "transactions")


# Names of the mutants that are active in this process.
ACTIVE: set[str] = set()


class Mutant(NamedTuple):
    """A bug that can be put back: what stands in place of which rules while it is active.

    A key of ``changes`` is ``module:name`` or ``module:Class.name``. Its value takes the same arguments as
    that rule, ``self`` included. If it has a parameter ``original``, it receives the rule that it replaces.
    """

    name: str
    effect: str
    changes: Mapping[str, Callable[..., Any]]


def all_mutants() -> dict[str, Mutant]:
    """Return every mutant by its name. Raises ValueError for a name that is used twice."""
    found: dict[str, Mutant] = {}
    for room in ROOMS:
        for mutant in import_module(f"proof.mutants.{room}").MUTANTS:
            if mutant.name in found:
                raise ValueError(f"two mutants are called {mutant.name}")
            found[mutant.name] = mutant
    return found


def effects() -> dict[str, str]:
    """Return what is wrong while each mutant is active, by its name."""
    return {name: mutant.effect for name, mutant in all_mutants().items()}


def owner_and_attribute(rule: str) -> tuple[Any, str]:
    """Return the module or class that ``rule`` belongs to, and its name there.

    Raises AttributeError if the product has no such rule.
    """
    module_name, _, path = rule.partition(":")
    owner: Any = import_module(module_name)
    *classes, attribute = path.split(".")
    for name in classes:
        owner = getattr(owner, name)
    if attribute not in vars(owner):
        raise AttributeError(f"{rule}: there is no such rule")
    return owner, attribute


@contextmanager
def without(name: str) -> Iterator[None]:
    """Activate the mutant ``name`` while the block runs. Raises KeyError for an unknown name."""
    with ExitStack() as stack:
        for rule, replacement in all_mutants()[name].changes.items():
            owner, attribute = owner_and_attribute(rule)
            original = vars(owner)[attribute]
            setattr(owner, attribute, _installable(original, replacement))
            stack.callback(setattr, owner, attribute, original)
        ACTIVE.add(name)
        stack.callback(ACTIVE.discard, name)
        yield


def _installable(original: Any, replacement: Callable[..., Any]) -> Any:
    """Return ``replacement`` in the form of ``original``: function, property, static or class method."""
    is_property = isinstance(original, property)
    function = original.fget if is_property else getattr(original, "__func__", original)
    if "original" in signature(replacement).parameters:
        replacement = _with_original(replacement, function)
    if is_property:
        return property(replacement)
    return type(original)(replacement) if isinstance(original, staticmethod | classmethod) else replacement


def _with_original(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which binds as a method does, that passes ``original`` on."""

    def installed(*arguments: Any, **keywords: Any) -> Any:
        return replacement(*arguments, original=original, **keywords)

    return installed
