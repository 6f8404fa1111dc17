"""``kl``: kafkalite on the command line. Importing this package imports no other module of it."""

from __future__ import annotations


def main() -> None:
    """Run the command line. This is the entry point of ``kl`` and ``kafkalite``."""
    import sys

    from kafkalite.cli.app import run

    sys.exit(run(sys.argv[1:]))
