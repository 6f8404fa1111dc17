"""kafkalite: a distributed commit log in pure Python.

The public classes and functions, and modules such as ``kafkalite.sync``, are imported when they are first
used. Therefore ``import kafkalite`` alone loads no event loop, no server and no compression library.
"""

from __future__ import annotations

from kafkalite.version import VERSION

TYPE_CHECKING = False  # as in typing, whose import would delay the point from which kl handles Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from kafkalite import errors as errors
    from kafkalite import retrying as retrying
    from kafkalite import serde as serde
    from kafkalite import sync as sync
    from kafkalite import testing as testing
    from kafkalite.broker.broker import Broker as Broker
    from kafkalite.broker.config import BrokerConfig as BrokerConfig
    from kafkalite.client.admin.admin import Admin as Admin
    from kafkalite.client.consumer.consumer import Consumer as Consumer
    from kafkalite.client.consumer.deduplication import Deduplicator as Deduplicator
    from kafkalite.client.consumer.table import Table as Table
    from kafkalite.client.group.rebalance_listener import RebalanceListener as RebalanceListener
    from kafkalite.client.interceptors import ConsumerInterceptor as ConsumerInterceptor
    from kafkalite.client.interceptors import ProducerInterceptor as ProducerInterceptor
    from kafkalite.client.producer.producer import Producer as Producer
    from kafkalite.client.producer.transaction_group import TransactionGroup as TransactionGroup
    from kafkalite.client.producer.transaction_group import TransactionGroupWriter as TransactionGroupWriter
    from kafkalite.errors import KafkaliteError as KafkaliteError
    from kafkalite.model import GroupMetadata as GroupMetadata
    from kafkalite.model import OffsetAndMetadata as OffsetAndMetadata
    from kafkalite.model import OffsetAndTimestamp as OffsetAndTimestamp
    from kafkalite.model import ProducerRecord as ProducerRecord
    from kafkalite.model import QuotaEntity as QuotaEntity
    from kafkalite.model import Record as Record
    from kafkalite.model import RecordAddress as RecordAddress
    from kafkalite.model import RecordMetadata as RecordMetadata
    from kafkalite.model import TopicPartition as TopicPartition
    from kafkalite.records.batch import RecordBatch as RecordBatch
    from kafkalite.records.builder import RecordBatchBuilder as RecordBatchBuilder
    from kafkalite.testing.seeds import simulate as simulate

__version__ = VERSION

_HOME = {
    "Admin": "kafkalite.client.admin.admin",
    "Broker": "kafkalite.broker.broker",
    "BrokerConfig": "kafkalite.broker.config",
    "Consumer": "kafkalite.client.consumer.consumer",
    "ConsumerInterceptor": "kafkalite.client.interceptors",
    "Deduplicator": "kafkalite.client.consumer.deduplication",
    "GroupMetadata": "kafkalite.model",
    "KafkaliteError": "kafkalite.errors",
    "OffsetAndMetadata": "kafkalite.model",
    "OffsetAndTimestamp": "kafkalite.model",
    "Producer": "kafkalite.client.producer.producer",
    "ProducerInterceptor": "kafkalite.client.interceptors",
    "ProducerRecord": "kafkalite.model",
    "RebalanceListener": "kafkalite.client.group.rebalance_listener",
    "QuotaEntity": "kafkalite.model",
    "Record": "kafkalite.model",
    "RecordAddress": "kafkalite.model",
    "RecordBatch": "kafkalite.records.batch",
    "RecordBatchBuilder": "kafkalite.records.builder",
    "RecordMetadata": "kafkalite.model",
    "Table": "kafkalite.client.consumer.table",
    "TopicPartition": "kafkalite.model",
    "TransactionGroup": "kafkalite.client.producer.transaction_group",
    "TransactionGroupWriter": "kafkalite.client.producer.transaction_group",
    "simulate": "kafkalite.testing.seeds",
}

_MODULES = {"errors", "retrying", "serde", "sync", "testing"}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"kafkalite.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kafkalite' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
