"""Makes data frames of pandas. Needs neither pandas nor pyarrow to be imported."""

# Tests: tests/client/test_table.py, tests/cli/test_missing_extras.py

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalite.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas
    import pyarrow


def require_pandas() -> None:
    """Raise MissingExtraError if pandas is not installed.

    Call this before pyarrow is needed: the extra ``pandas`` contains both packages.
    """
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError as missing:
        raise MissingExtraError("a DataFrame", "pandas", "pandas") from missing


def data_frame(table: pyarrow.Table) -> pandas.DataFrame:
    """Return ``table`` as a DataFrame. Raises MissingExtraError without pandas."""
    require_pandas()
    return table.to_pandas()
