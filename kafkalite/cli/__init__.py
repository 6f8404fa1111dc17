"""``kl``: kafkalite on the command line. This package imports nothing until a command needs it."""

from __future__ import annotations


def main() -> None:
    """The entry point of ``kl`` and ``kafkalite``."""
    import sys

    from kafkalite.cli.app import run

    sys.exit(run(sys.argv[1:]))
