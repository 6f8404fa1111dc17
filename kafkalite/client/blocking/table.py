"""The blocking twin of Table.

The twin reads the rows in the caller's thread. This is safe because rows change only while a call of the twin
waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self, Unpack

from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.config import BootstrapServers, ConfigSource, ConsumerSettings
from kafkalite.client.consumer import table
from kafkalite.client.consumer.table import Change
from kafkalite.clock import Clock
from kafkalite.model import Record
from kafkalite.rng import Rng
from kafkalite.serde import AnyDeserializer, K, V

if TYPE_CHECKING:
    import pandas
    import pyarrow


@twin_of(table.Table)
class Table(Twin[table.Table[K, V]], Mapping[K, V]):
    """A topic as a table. The blocking twin of ``kafkalite.Table``, with the same arguments.

    ::

        with Table("prices", bootstrap_servers="localhost:9092") as prices:
            print(prices[b"donut"])
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            topic: str,
            *,
            bootstrap_servers: BootstrapServers | None = None,
            key_deserializer: AnyDeserializer[K] | None = None,
            value_deserializer: AnyDeserializer[V] | None = None,
            config: ConfigSource | None = None,
            clock: Clock | None = None,
            rng: Rng | None = None,
            **settings: Unpack[ConsumerSettings],
        ) -> None: ...
    else:

        @opened_with(table.Table)
        def __init__(self, original):
            super().__init__(original)

    def __enter__(self) -> Self:
        self._run(self._original.__aenter__())  # closes the table if start() raises
        return self

    def __getitem__(self, key: K) -> V:
        return self._original[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._original)

    def __len__(self) -> int:
        return len(self._original)

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._original.topic

    @property
    def keyless_count(self) -> int:
        """The number of records without a key, which belong to no row."""
        return self._original.keyless_count

    def record(self, key: K) -> Record[K, V]:
        return self._original.record(key)

    def to_arrow(self, *, key_column: str = "key") -> pyarrow.Table:
        return self._original.to_arrow(key_column=key_column)

    def to_pandas(self, *, key_column: str = "key") -> pandas.DataFrame:
        return self._original.to_pandas(key_column=key_column)

    refresh = blocking(table.Table.refresh)
    next_change = blocking(table.Table.next_change)
    seek = blocking(table.Table.seek)

    def changes(self) -> Iterator[Change[K, V]]:
        """Apply and yield each change, and wait for more without end.

        A later call of this method continues with the next change.
        """
        while True:
            change = self.next_change()
            if change is not None:
                yield change
