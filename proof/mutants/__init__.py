"""Mutants: known bugs of this design, activated one at a time to prove that the tests find them.

A rule of the product is a small function or method with a name, for example
``PartitionLeader.may_move_high_watermark``. A mutant names a rule and gives a replacement for it. ``without``
installs the replacement during a test or a simulation. The product does not know about mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from typing import Any, Final, NamedTuple

# One module per room of the product. Each has a constant MUTANTS.
ROOMS: Final = ("storage", "replication", "broker", "metadata", "raft", "groups", "transactions")


# The names of the mutants that are active in this process.
ACTIVE: set[str] = set()


class Mutant(NamedTuple):
    """A bug that can be activated: the rules that it replaces, and their replacements.

    A key of ``changes`` is ``module:name`` or ``module:Class.name``. Its value takes the arguments of that
    rule, including ``self``. If it has a parameter ``original``, it receives the replaced rule.
    """

    name: str
    effect: str
    changes: Mapping[str, Callable[..., Any]]


def all_mutants() -> dict[str, Mutant]:
    """Return {name: mutant} of all mutants. Raises ValueError if two have the same name."""
    found: dict[str, Mutant] = {}
    for room in ROOMS:
        for mutant in import_module(f"proof.mutants.{room}").MUTANTS:
            if mutant.name in found:
                raise ValueError(f"two mutants are called {mutant.name}")
            found[mutant.name] = mutant
    return found


def effects() -> dict[str, str]:
    """Return {name: description of the fault while the mutant is active}."""
    return {name: mutant.effect for name, mutant in all_mutants().items()}


def owner_and_attribute(rule: str) -> tuple[Any, str]:
    """Return the module or class that contains ``rule``, and the name of the rule in it.

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
            setattr(owner, attribute, installable(original, replacement))
            stack.callback(setattr, owner, attribute, original)
        ACTIVE.add(name)
        stack.callback(ACTIVE.discard, name)
        yield


def violation_without(name: str, run: Callable[[], str | None]) -> str | None:
    """Return the violation that ``run`` finds while the mutant is active. Any exception counts as one."""
    with without(name):
        try:
            return run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def installable(original: Any, replacement: Callable[..., Any]) -> Any:
    """Return ``replacement`` in the form of ``original``: a function, property, static or class method."""
    is_property = isinstance(original, property)
    function = original.fget if is_property else getattr(original, "__func__", original)
    if "original" in signature(replacement).parameters:
        replacement = _with_original(replacement, function)
    if is_property:
        return property(replacement)
    return type(original)(replacement) if isinstance(original, staticmethod | classmethod) else replacement


def _with_original(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which can be bound as a method, that passes ``original`` on."""

    def installed(*arguments: Any, **keywords: Any) -> Any:
        return replacement(*arguments, original=original, **keywords)

    return installed
