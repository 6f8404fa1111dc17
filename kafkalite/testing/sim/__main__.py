"""``python -m kafkalite.testing.sim``."""

from __future__ import annotations

import sys

from kafkalite.testing.sim.runner import main

if __name__ == "__main__":
    sys.exit(main())
