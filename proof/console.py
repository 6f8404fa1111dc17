"""The output of the proof's programmes."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
