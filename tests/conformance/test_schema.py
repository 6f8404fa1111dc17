"""The schema is complete: each limit, deadline and API of the code is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kafkalite import limits
from kafkalite.broker.config import BROKER_OPTIONS
from kafkalite.conformance.schema import DEADLINES, LIMITS, schema
from kafkalite.errors import ErrorCode
from kafkalite.metadata.topic_config import TOPIC_OPTIONS
from kafkalite.protocol.api import APIS
from kafkalite.records.header import HEADER, HEADER_BYTES

#: Constants of kafkalite.limits that no client meets, and why.
INTERNAL = {
    "FRAME_HEADER_BYTES": "the layout of a frame",
    "RECORD_BATCH_HEADER_BYTES": "the layout of a batch",
    "KIB": "a unit",
    "MIB": "a unit",
    "MAX_NESTING": "words of section 4",
    "MAX_SEGMENT_BYTES": "files",
    "MIN_SEGMENT_BYTES": "files",
    "MAX_INTERNAL_BATCH_BYTES": "internal topics, to which only coordinators write",
    "MAX_QUEUED_COMMANDS": "inside the controller",
}


def test_it_is_json() -> None:
    assert json.loads(json.dumps(schema())) == schema()


def test_every_limit_of_the_code_is_there() -> None:
    """A new limit must be documented, or listed above."""
    code = {name for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}
    documented = {bound.name for bound in (*LIMITS, *DEADLINES)}
    assert code - documented == INTERNAL.keys()
    for bound in (*LIMITS, *DEADLINES):
        if hasattr(limits, bound.name):
            assert bound.value == getattr(limits, bound.name)


def test_every_deadline_of_the_server_is_there(repository: Path) -> None:
    """The constants of milliseconds in the modules that serve clients, by name."""
    documented = {bound.name for bound in DEADLINES}
    for module in ("server/server", "handlers/data", "handlers/metadata", "handlers/transactions"):
        source = (repository / "kafkalite" / "broker" / f"{module}.py").read_text()
        found = set(re.findall(r"^([A-Z_]+_MS): Final", source, re.MULTILINE))
        assert found - {"DESCRIBE_QUORUM_TIMEOUT_MS"} <= documented, module


def test_every_option_exists() -> None:
    for bound in (*LIMITS, *DEADLINES):
        assert (bound.value is None) == bool(bound.option)
        assert not bound.option or bound.option in BROKER_OPTIONS or bound.option in TOPIC_OPTIONS


def test_every_api_and_error_is_there() -> None:
    document = schema()
    assert {api["key"] for api in document["apis"]} == set(APIS)
    assert {error["name"] for error in document["errors"]} == set(ErrorCode.__members__)


def test_every_type_is_defined() -> None:
    document = schema()
    simple = {"int", "bool", "str", "bytes", "{str: str}"}
    for fields in document["structs"].values():
        for field in fields:
            inner = field["type"].removesuffix("?").strip("[]")
            assert inner in simple or inner in document["structs"], field


def test_the_header_is_that_of_the_code() -> None:
    letters = {1: "b", 2: "h", 4: "i", 8: "q"}
    fields = schema()["record_batch"]["header"]
    written = ">" + "".join(
        letters[field["bytes"]] if field["signed"] else letters[field["bytes"]].upper() for field in fields
    )
    assert written == HEADER.format
    assert fields[-1]["position"] + fields[-1]["bytes"] == HEADER_BYTES


@pytest.mark.parametrize(
    ("struct", "field", "bound"),
    [("ProduceRequest", "acks", {"values": [-1, 0, 1]}), ("FetchRequest", "max_wait_ms", {"max": 600_000})],
)
def test_bounds_stand_beside_the_fields(struct: str, field: str, bound: dict[str, object]) -> None:
    (found,) = [one for one in schema()["structs"][struct] if one["name"] == field]
    assert bound.items() <= found.items()
