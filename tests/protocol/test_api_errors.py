"""The declared error codes against the handlers, and against the classes that the broker's code raises.

``tests/conftest.py`` also compares each response that a broker sends in the tests of brokers and clients.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kafkalite import errors
from kafkalite.broker.handlers import HANDLERS
from kafkalite.errors import BrokerError, ErrorCode
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.api_errors import ANY_REQUEST, API_ERRORS, allowed_codes

ROOMS = (
    "broker",
    "client/cluster",  # the authentication of nodes
    "groups",
    "metadata",
    "protocol",
    "raft",
    "records",
    "replication",
    "security",
    "storage",
    "transactions",
)
#: Codes that no response of this version has: Kafka's, which old clients or later versions may use.
UNUSED = {ErrorCode.DUPLICATE_SEQUENCE_NUMBER, ErrorCode.TRANSACTION_ABORTABLE}


def _handler(key: ApiKey) -> Any:
    return inspect.unwrap(HANDLERS[key])


@pytest.mark.parametrize("key", sorted(APIS), ids=lambda key: ApiKey(key).name)
def test_the_codes_of_a_handler_are_declared(key: ApiKey) -> None:
    """Each code that the docstring of a handler names is declared for its API."""
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", inspect.getdoc(_handler(key)) or ""))
    codes = {ErrorCode[name] for name in named & set(ErrorCode.__members__)}
    whole, item = allowed_codes(key)
    if _handler(key).__name__ == "decide":  # one handler of several apis
        codes &= {ErrorCode.NOT_CONTROLLER, ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    assert codes <= whole | item


def _raised(repository: Path) -> set[ErrorCode]:
    """Return the codes that the broker's code names, by class or by code."""
    classes = {
        name: cls.code
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, BrokerError) and cls is not BrokerError
    }
    found: set[ErrorCode] = set()
    for room in ROOMS:
        for path in (repository / "kafkalite" / room).rglob("*.py"):
            if path.name in {"api_errors.py", "scram.py"}:  # no api offers logins yet
                continue
            text = path.read_text()
            found |= {ErrorCode[name] for name in re.findall(r"ErrorCode\.([A-Z_]+)", text)}
            found |= {
                classes[name] for name in re.findall(r"\b(\w+Error)\b(?! as|,\n)", text) if name in classes
            }
    return found


def _declared() -> set[ErrorCode]:
    declared = set(ANY_REQUEST) | {ErrorCode.NONE}
    for one in API_ERRORS.values():
        declared |= {*one.whole, *one.item}
    return declared


def test_each_raised_code_is_declared_for_an_api(repository: Path) -> None:
    assert _raised(repository) - _declared() == set()


def test_each_declared_code_is_raised_somewhere(repository: Path) -> None:
    assert _declared() - _raised(repository) == set()


def test_each_code_is_declared_or_known_to_be_unused() -> None:
    assert set(ErrorCode) - _declared() == UNUSED
