"""``python -m kafkalite`` is ``kl``."""

from __future__ import annotations

from kafkalite.cli import main

if __name__ == "__main__":
    main()
