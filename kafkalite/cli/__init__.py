"""``kl``, the command line of kafkalite. Importing this package does not import its modules."""

from __future__ import annotations


def main() -> None:
    """Run the command line. This is the entry point of ``kl`` and ``kafkalite``."""
    import sys

    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> int | str:
    """Run the command line. Return its exit code, or the text to exit with if a package is missing."""
    import sys

    _open_closed_streams()
    _escape_what_has_no_encoding()
    try:
        from kafkalite.cli.app import run
    except ModuleNotFoundError as error:
        from kafkalite.errors import MissingExtraError

        missing = MissingExtraError("the command line", error.name or "click", "cli")
        return f"kl: {missing.message}\n    hint: {missing.hint}"
    return run(sys.argv[1:])


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed.

    Otherwise the next file or socket that is opened gets the descriptor of the stream. Then messages could be
    written into a file, and uvloop could end the process with a failed assertion. A closed stdout is opened
    for reading only, so that a command that prints fails with EBADF instead of losing its output.
    """
    import os
    import sys

    for name, mode, access in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:  # its descriptor is the lowest free one, which os.open returns
            setattr(sys, name, os.fdopen(os.open(os.devnull, access), mode, encoding="utf-8"))


def _escape_what_has_no_encoding() -> None:
    """Let stdout escape characters without an encoding, such as half of a surrogate pair, as stderr does."""
    import io
    import sys

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
