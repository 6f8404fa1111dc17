"""Serializers and deserializers for keys and values: ``json``, ``msgpack``, ``string`` and ``integer``.

::

    Producer("localhost:9092", value_serializer=serde.json)
    Consumer("orders", value_deserializer=serde.json)

Each of them is both a serializer and a deserializer. Clients also accept any function of one argument, and
any object with a method ``serialize`` or ``deserialize``. They call no serializer or deserializer for None,
which is sent and returned as None.
"""

from __future__ import annotations

import json as _json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from kafkalite.errors import ConfigError

if TYPE_CHECKING:
    import typing_extensions

    #: The types of keys and values in the arguments of producers and the records of consumers.
    K = typing_extensions.TypeVar("K", default=bytes)
    V = typing_extensions.TypeVar("V", default=bytes)
else:
    from kafkalite.model import K as K
    from kafkalite.model import V as V

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Serializer(Protocol[T_contra]):
    def serialize(self, topic: str, value: T_contra) -> bytes:
        """Return the bytes of ``value`` for a record of ``topic``."""
        ...


class Deserializer(Protocol[T_co]):
    def deserialize(self, topic: str, data: bytes) -> T_co:
        """Return the value of ``data`` from a record of ``topic``."""
        ...


AnySerializer = Serializer[T] | Callable[[T], bytes]
AnyDeserializer = Deserializer[T] | Callable[[bytes], T]


@dataclass(frozen=True, slots=True)
class Serde(Generic[T]):
    """A serializer and deserializer, made of one function for each direction."""

    name: str
    to_bytes: Callable[[T], bytes]
    from_bytes: Callable[[bytes], T]

    def serialize(self, topic: str, value: T) -> bytes:
        return self.to_bytes(value)

    def deserialize(self, topic: str, data: bytes) -> T:
        return self.from_bytes(data)


def _to_json(value: Any) -> bytes:
    try:
        text = _json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        if "JSON compliant" not in str(error):
            raise
        raise ValueError("JSON has no NaN and no infinity: send None instead, or use serde.msgpack") from None
    return text.encode()


def _to_msgpack(value: Any) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb(value)
    return packed


def _from_msgpack(data: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(data)


#: Compact JSON in UTF-8. NaN and infinite numbers are refused, because other languages cannot read them.
json: Final[Serde[Any]] = Serde("json", _to_json, _json.loads)
msgpack: Final[Serde[Any]] = Serde("msgpack", _to_msgpack, _from_msgpack)
#: Text in UTF-8.
string: Final[Serde[str]] = Serde("string", str.encode, bytes.decode)
#: A signed number of 8 bytes, big-endian, as Kafka's LongSerializer writes it. Reads any other length, too.
integer: Final[Serde[int]] = Serde(
    "integer",
    lambda value: value.to_bytes(8, "big", signed=True),
    lambda data: int.from_bytes(data, "big", signed=True),
)


def function_of(given: Any, method: str) -> Callable[[str, Any], Any]:
    """Return ``given``, a function or an object with ``method``, as a function of a topic and a value.

    Raises ConfigError if ``given`` is neither a function nor such an object. ``method`` is "serialize" or
    "deserialize".
    """
    bound: Callable[[str, Any], Any] | None = getattr(given, method, None)
    if bound is not None:
        return bound
    if not callable(given):
        allowed = f"a function of one argument, or an object with {method}(topic, value)"
        raise ConfigError(key=f"a {method}r", value=given, allowed=allowed)
    return lambda topic, value: given(value)


def name_of(given: Any) -> str:
    """Return the name of a serializer or deserializer for error messages."""
    return str(getattr(given, "name", None) or getattr(given, "__qualname__", None) or type(given).__name__)
