"""Suggests an existing name that is similar to an unknown one."""

# Tests: tests/vocabulary/test_suggestions.py

from __future__ import annotations

from collections.abc import Callable, Iterable


def did_you_mean(
    name: str,
    names: Iterable[str],
    *,
    shown: Callable[[str], str] = str,
    otherwise: str = "",
    cutoff: float = 0.6,
) -> str:
    """Return ``did you mean NAME?`` for the most similar of ``names``; ``shown(name)`` is the text for NAME.

    Return ``otherwise`` if no name has a similarity of at least ``cutoff`` (from 0 to 1).
    """
    from difflib import get_close_matches  # only after a mistake

    near = get_close_matches(name, names, 1, cutoff)
    return f"did you mean {shown(near[0])}?" if near else otherwise
