"""Purchases and the price table side by side. A step in Python gets DataFrames and returns one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def price(purchases: DataFrame, views: Mapping[str, DataFrame]) -> DataFrame:
    """``amount`` = quantity * price. A donut that is not in the table has no amount, and is left out."""
    priced = purchases.join(views["prices"], "donut")
    return priced.withColumn("amount", priced.quantity * priced.price)
