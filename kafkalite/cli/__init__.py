"""``kl``: kafkalite on the command line. Importing this package imports none of its modules."""

from __future__ import annotations


def main() -> None:
    """Run the command line. This is the entry point of ``kl`` and ``kafkalite``."""
    import sys

    try:
        _open_closed_streams()
        from kafkalite.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        from kafkalite.errors import MissingExtraError

        missing = MissingExtraError("the command line", error.name or "click", "cli")
        sys.exit(f"kl: {missing.message}\n    hint: {missing.hint}")
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open /dev/null in place of stdin, stdout and stderr if the caller has closed them.

    Otherwise the event loop, or the next file to be opened, gets their descriptors: uvloop then ends the
    process by an assertion, and messages could be written into that file.
    """
    import os
    import sys

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # its descriptor is the lowest free one, which os.open returns
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
