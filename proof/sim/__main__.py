"""Runs ``python -m proof.sim``."""

from __future__ import annotations

import sys

from proof.sim.runner import main

if __name__ == "__main__":
    sys.exit(main())
