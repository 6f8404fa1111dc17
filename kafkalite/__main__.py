"""Runs the command ``kl`` when started as ``python -m kafkalite``."""

from __future__ import annotations

from kafkalite.cli import main

if __name__ == "__main__":
    main()
