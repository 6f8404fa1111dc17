"""Runs the command ``kl`` for ``python -m kafkalite``."""

from __future__ import annotations

from kafkalite.cli import main

if __name__ == "__main__":
    main()
