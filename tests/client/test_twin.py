"""The blocking twins have the methods, the signatures and the docstrings of their originals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import kafkalite
from kafkalite import sync
from kafkalite.broker.broker import Broker
from kafkalite.client.blocking import producer as producer_module
from kafkalite.client.producer import delivery, transaction_manager

TWINS: dict[type, type] = {
    sync.Admin: kafkalite.Admin,
    sync.Broker: Broker,
    sync.Consumer: kafkalite.Consumer,
    sync.PendingBatchDelivery: delivery.BatchDelivery,
    sync.PendingDelivery: delivery.Delivery,
    sync.Producer: kafkalite.Producer,
    sync.Table: kafkalite.Table,
    sync.TransactionGroup: kafkalite.TransactionGroup,
    sync.TransactionGroupWriter: kafkalite.TransactionGroupWriter,
    producer_module.Transaction: transaction_manager.Transaction,
}

# Methods that make sense only in an event loop, and those that take other arguments.
ASYNC_ONLY = {
    "send_nowait",
    "wait_for_room",
    "refuse",
    "check_may_send",
    "wrap_listener",
    "prepare_record",
    "put_prepared",
}
OTHER_ARGUMENTS = {("Producer", "close"), ("TransactionGroupWriter", "close"), ("Broker", "stop")}


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


CASES = [pytest.param(twin, original, id=twin.__name__) for twin, original in TWINS.items()]


@pytest.mark.parametrize(("twin", "original"), CASES)
def test_every_public_method_has_a_docstring_that_is_not_about_coroutines(twin: type, original: type) -> None:
    for name, member in _public(twin):
        assert member.__doc__, f"{twin.__name__}.{name} has no docstring"
        asynchronous = re.search(r"\bawait|\basync|loop\b", member.__doc__)
        assert asynchronous is None, f"{twin.__name__}.{name}: {asynchronous}"


@pytest.mark.parametrize(("twin", "original"), CASES)
def test_signatures_are_those_of_the_original(twin: type, original: type) -> None:
    twins = dict(_public(twin))
    for name, member in _public(original):
        if name in ASYNC_ONLY or (original is Broker and name not in twins):
            continue
        assert name in twins, f"{twin.__name__} has no {name}"
        if isinstance(member, property) or (twin.__name__, name) in OTHER_ARGUMENTS:
            continue
        expected = list(inspect.signature(member).parameters.values())
        found = list(inspect.signature(twins[name]).parameters.values())
        found = [each for each in found if each.name != "timeout"]
        assert [(each.name, each.kind, each.default) for each in found] == [
            (each.name, each.kind, each.default) for each in expected
        ], f"{twin.__name__}.{name}"


def test_docstrings_come_from_the_original_and_mention_the_timeout() -> None:
    original = inspect.getdoc(kafkalite.Producer.send_many) or ""
    doc = sync.Producer.send_many.__doc__ or ""
    assert doc.startswith(original)
    assert doc.endswith("Raises TimeoutError after ``timeout`` seconds.")
    assert sync.Consumer.get_many.__doc__ == inspect.getdoc(kafkalite.Consumer.get_many)
    assert sync.TransactionGroupWriter.start.__doc__ == inspect.getdoc(kafkalite.TransactionGroupWriter.start)
    assert sync.Producer.start.__doc__ != sync.TransactionGroupWriter.start.__doc__
