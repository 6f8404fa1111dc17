"""Joins purchases with the price table. A Python step receives DataFrames and returns one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def price(purchases: DataFrame, views: Mapping[str, DataFrame]) -> DataFrame:
    """Add ``amount`` = quantity * price to purchases. Donuts without a price are omitted."""
    priced = purchases.join(views["prices"], "donut")
    return priced.withColumn("amount", priced.quantity * priced.price)
