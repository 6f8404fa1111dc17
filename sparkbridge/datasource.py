"""KafkaliteDataSource: the object that Spark creates for ``format("kafkalite")``.

Spark creates it in a worker and pickles it for the processes that plan, read and write. So it holds only the
options. The modules of readers and writers are imported on demand.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from sparkbridge.options import SourceOptions


class KafkaliteDataSource(DataSource):
    """The source and sink for batches and streams. ``options.py`` declares their options."""

    @classmethod
    def name(cls) -> str:
        return "kafkalite"

    def schema(self) -> StructType:
        """Return all columns of the source. Spark calls this only if the user has given no schema.

        Raises SparkOptionError for ``CREATE TABLE``, and for invalid options, so that ``load()`` fails
        instead of the first action.
        """
        from sparkbridge.source.schema import source_schema

        self._refuse_table()
        options = self._parsed_for_either()
        return source_schema(include_headers=options.include_headers, headers_as_map=options.headers_as_map)

    def reader(self, schema: StructType) -> Any:
        from sparkbridge.source.batch_reader import KafkaliteReader

        return KafkaliteReader(self.options, schema)

    def streamReader(self, schema: StructType) -> Any:
        from sparkbridge.source.stream_reader import KafkaliteStreamReader

        return KafkaliteStreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from sparkbridge.sink.batch_writer import KafkaliteWriter
        from sparkbridge.sink.servers import check_servers

        writer = KafkaliteWriter(self.options, schema, overwrite)
        check_servers(writer.options, is_stream=False)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from sparkbridge.sink.servers import check_servers
        from sparkbridge.sink.stream_writer import KafkaliteStreamWriter

        writer = KafkaliteStreamWriter(self.options, schema, overwrite)
        check_servers(writer.options, is_stream=True)
        return writer

    def _refuse_table(self) -> None:
        """Raise SparkOptionError if a catalog asks for the columns of a new table.

        Spark stores the options of a table and passes none of them to a Python source that reads it. The
        catalog, and only the catalog, adds ``provider`` and ``owner`` to the options.
        """
        from sparkbridge.errors import SparkOptionError

        if self.options.get("provider", "").lower() == self.name() and "owner" in self.options:
            raise SparkOptionError(
                "CREATE TABLE can't define a topic: Spark does not pass the options of a table to its reader",
                hint="use CREATE TEMPORARY VIEW name USING kafkalite OPTIONS (…)",
            )

    def _parsed_for_either(self) -> SourceOptions:
        """Parse the options as those of a batch or, if that fails, as those of a stream."""
        from sparkbridge.errors import SparkOptionError
        from sparkbridge.options import SourceOptions

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reader issues the warnings
            try:
                return SourceOptions.parse(self.options, is_stream=False)
            except SparkOptionError:
                return SourceOptions.parse(self.options, is_stream=True)
