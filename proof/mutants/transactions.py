"""Mutants of the rules in this part of the product; ``proof.mutants`` explains them."""

from __future__ import annotations

from typing import Final

from proof.mutants import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
