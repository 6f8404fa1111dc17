"""Typed structs to msgpack and back. The only module that knows the msgpack library.

Writing is one call: a ``Struct`` is the tuple it travels as. Reading trusts nothing. For each struct a
*plan* is compiled from its type hints, the first time it is met, in two forms that accept the same bytes:

``check(value)``
    Takes what msgpack unpacked as a whole and checks every type. Generated source, for the small envelopes
    that are nearly all of the traffic: of at most ``SMALL_ENVELOPE_BYTES``, so whatever the bytes claim,
    unpacking them costs a bounded amount of memory.

``read(stream)``
    Walks a larger envelope with the struct as its guide. Every count is compared with the bytes that are
    left, at the least size of one element, before anything is allocated for it; and nothing is
    unpacked that the struct has no place for. An envelope that is refused has then cost at most what its
    valid beginning is worth, never what its headers claim (CVE-2026-111108 in Kafka is that mistake).

Only RemoteProtocolError comes out of reading, and LocalProtocolError out of writing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from kafkalite.errors import LocalProtocolError, RemoteProtocolError
from kafkalite.limits import MAX_INTEGERS_PER_LIST, MAX_ITEMS_PER_REQUEST, MAX_NESTING
from kafkalite.protocol.structs import Struct

SMALL_ENVELOPE_BYTES: Final = 512
MAX_INT: Final = 2**63 - 1  # signed 64 bits; msgpack itself can't say anything below -2**63

_NIL: Final = 0xC0

Buffer: TypeAlias = bytes | bytearray | memoryview
M = TypeVar("M", bound=Struct)


class RequestHead(Struct):
    """A request envelope whose body is not decoded yet: which struct it is depends on key and version."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: Any  #: for ``decode_body``, and good for one call


class ResponseHead(Struct):
    correlation_id: int
    throttle_ms: int
    body: Any  #: for ``decode_body`` or ``decode_response_body``, and good for one call


# --- writing -----------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """A message, or a tuple of leaves and messages, as msgpack. Raises LocalProtocolError."""
    try:
        return msgpack.packb(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"can't encode {type(value).__name__}: {error}") from error


# --- reading -----------------------------------------------------------------------------------------


def decode_request_head(envelope: Buffer) -> RequestHead:
    """``[api_key, api_version, correlation_id, client_id, body]``. Raises RemoteProtocolError."""
    key, version, correlation_id, client_id, body = _open(
        envelope, 5, "request envelope", MAX_ITEMS_PER_REQUEST
    )
    if (
        type(key) is not int
        or type(version) is not int
        or type(correlation_id) is not int
        or (client_id is not None and type(client_id) is not str)
        or not 0 <= correlation_id <= 0x7FFFFFFF
    ):
        raise RemoteProtocolError(
            "a request envelope starts with three integers and a client id or nil; the correlation id "
            f"is in 0..2^31-1: found {_kinds(key, version, correlation_id, client_id)}"
        )
    return RequestHead(key, version, correlation_id, client_id, body)


def decode_response_head(envelope: Buffer) -> ResponseHead:
    """``[correlation_id, throttle_ms, body]``. Raises RemoteProtocolError."""
    correlation_id, throttle_ms, body = _open(envelope, 3, "response envelope", sys.maxsize)
    if type(correlation_id) is not int or type(throttle_ms) is not int or throttle_ms < 0:
        raise RemoteProtocolError(
            "a response envelope starts with two integers, the throttle time not negative: "
            f"found {_kinds(correlation_id, throttle_ms)}"
        )
    return ResponseHead(correlation_id, throttle_ms, body)


def decode_body(cls: type[M], body: Any) -> M:
    """The body of a head as ``cls``, every type checked. Raises RemoteProtocolError."""
    plan = _PLANS.get(cls) or plan_for(cls)
    if type(body) is not Stream:
        return plan.check(body)  # type: ignore[no-any-return]
    message: M = body.guarded(plan.read)
    return message


def decode_response_body(cls: type[M], error_cls: type[Struct], body: Any) -> M | Struct:
    """As ``decode_body``; but an array of two is an ``error_cls``: the whole request failed."""
    if type(body) is not Stream:
        failed = type(body) is list and len(body) == 2
        return decode_body(error_cls if failed else cls, body)
    return decode_body(error_cls if body.next_is_pair() else cls, body)


def decode(cls: type[M], data: Buffer) -> M:
    """One message standing alone as ``cls``. Raises RemoteProtocolError."""
    return decode_body(cls, _unpack(data) if len(data) <= SMALL_ENVELOPE_BYTES else Stream(data))


def _open(envelope: Buffer, width: int, what: str, max_items: int) -> list[Any]:
    """The envelope's fields; the last one, the body, unpacked or as a Stream that stands before it."""
    if len(envelope) > SMALL_ENVELOPE_BYTES:
        stream = Stream(envelope, max_items)
        opened: list[Any] = stream.guarded(lambda stream: stream.open(width, what))
        return opened
    fields = _unpack(envelope)
    if type(fields) is not list or len(fields) != width:
        raise RemoteProtocolError(f"{what}: expected an array of {width}, found {_kind(fields)}")
    return fields


def _unpack(data: Buffer) -> Any:
    try:
        return msgpack.unpackb(data, max_ext_len=0, object_pairs_hook=_dict_of_unique)
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed msgpack: {error or type(error).__name__}") from error


def _dict_of_unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a map holds a key twice")
    return unique


class Stream:
    """Reads one envelope front to back, an element at a time, each count checked against what is left."""

    __slots__ = ("_data", "_end", "_items_left", "_unpacker", "value")

    def __init__(self, data: Buffer, max_items: int = sys.maxsize) -> None:
        self._data = data
        self._end = len(data)
        self._items_left = max_items
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=self._end,
            max_array_len=MAX_INTEGERS_PER_LIST,
            max_map_len=0,
            max_ext_len=0,
        )
        self._unpacker.feed(data)
        #: The next element, whole: a leaf or a struct of leaves; it can't claim more than those hold.
        self.value: Callable[[], Any] = self._unpacker.unpack

    def guarded(self, read: Callable[[Stream], Any]) -> Any:
        """``read(self)`` with msgpack's own exceptions made ours."""
        try:
            return read(self)
        except (ValueError, TypeError, RecursionError, msgpack.OutOfData, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"malformed msgpack at byte {self._unpacker.tell()}: {error or type(error).__name__}"
            ) from error

    def open(self, width: int, what: str) -> list[Any]:
        """The leaves of an envelope of ``width`` fields, and this stream, standing before the last."""
        self.expect_width(width, what)
        return [*(self.value() for _ in range(width - 1)), self]

    def count(self, least_bytes: int, where: str) -> int:
        """The length of the array that comes next, whose elements have at least ``least_bytes`` each."""
        return self._plausible(self._unpacker.read_array_header(), least_bytes, where)

    def map_count(self, where: str) -> int:
        return self._plausible(self._unpacker.read_map_header(), 2, where)

    def _plausible(self, count: int, least_bytes: int, where: str) -> int:
        left = self._end - self._unpacker.tell()
        if count * least_bytes > left:
            raise RemoteProtocolError(f"{where}: {count} elements announced, {left} bytes left")
        self._items_left -= count
        if self._items_left < 0:
            raise RemoteProtocolError(f"{where}: more elements in one envelope than limits allow")
        return count

    def expect_width(self, width: int, what: str) -> None:
        found = self._unpacker.read_array_header()
        if found != width:
            raise RemoteProtocolError(f"{what}: expected an array of {width}, found an array of {found}")

    def next_is_nil(self) -> bool:
        position = self._unpacker.tell()
        return bool(position < self._end and self._data[position] == _NIL)

    def next_is_pair(self) -> bool:
        """Whether an array of two elements comes next, in any of msgpack's three spellings of its header."""
        at = self._unpacker.tell()
        head = bytes(self._data[at : at + 5])
        return head.startswith((b"\x92", b"\xdc\0\2", b"\xdd\0\0\0\2"))

    def expect_end(self, where: str) -> None:
        left = self._end - self._unpacker.tell()
        if left:
            raise RemoteProtocolError(f"{left} bytes follow the end of {where}")


# --- plans: what a field may hold ---------------------------------------------------------------------


class Plan(Struct):
    """Two readers of one struct that accept the same bytes; see the module's docstring."""

    check: Callable[[Any], Any]
    read: Callable[[Stream], Any]


class _Shape(Struct):
    """What one field, element or struct may hold."""

    check: Callable[[Any], Any]  #: unpacked value -> final value
    read: Callable[[Stream], Any]  #: the stream's next element -> final value
    least_bytes: int  #: of its shortest encoding
    depth: int  #: arrays and maps inside one another
    wrong: str  #: of a leaf: the Python expression over ``{v}`` that is true of a wrong value; else empty


_PLANS: dict[type[Struct], Plan] = {}
_STRUCTS: dict[type[Struct], _Shape] = {}


def _not_integers(value: Any) -> bool:
    if type(value) is not list or len(value) > MAX_INTEGERS_PER_LIST:
        return True
    for element in value:  # noqa: SIM110 - any() with a generator takes twice as long
        if type(element) is not int or element > MAX_INT:
            return True
    return False


# The types that are tested in place: an expression over ``{v}`` that is true of a wrong value, and its words.
_LEAVES: Final[dict[Any, tuple[str, str]]] = {
    int: (f"(type({{v}}) is not int or {{v}} > {MAX_INT})", "a signed 64-bit integer"),
    bool: ("type({v}) is not bool", "a boolean"),
    str: ("type({v}) is not str", "a string"),
    bytes: ("type({v}) is not bytes", "a byte string"),
    list[int]: ("not_integers({v})", f"an array of at most {MAX_INTEGERS_PER_LIST} integers"),
}


def plan_for(cls: type[Struct]) -> Plan:
    """The plan of ``cls``, compiled at the first call."""
    plan = _PLANS.get(cls)
    if plan is None:
        shape = _struct(cls)
        assert shape.depth + 1 <= MAX_NESTING, f"{cls.__name__} nests deeper than limits.MAX_NESTING"

        def read(stream: Stream) -> Any:
            message = shape.read(stream)
            stream.expect_end(cls.__name__)
            return message

        _PLANS[cls] = plan = Plan(shape.check, read)
    return plan


def _shape(hint: Any, where: str) -> _Shape:
    """The shape of a type hint. ``where`` is ``Struct.field``, for error messages."""
    if hint in _LEAVES:
        return _leaf(*_LEAVES[hint], where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(arguments) == 2 and arguments[1] is NoneType:
        return _optional(arguments[0], where)
    if origin is list:
        return _list(_shape(arguments[0], f"{where}[]"), where)
    if origin is dict and arguments == (str, str):
        return _string_map(where)
    assert isinstance(hint, type) and issubclass(hint, Struct), f"{where}: the wire has no {hint!r}"
    return _struct(hint)


def _leaf(wrong: str, words: str, where: str) -> _Shape:
    is_wrong: Callable[[Any], bool] = eval(  # noqa: S307 - the text is ours
        "lambda v: " + wrong.format(v="v"), {"not_integers": _not_integers}
    )

    def check(value: Any) -> Any:
        if is_wrong(value):
            raise RemoteProtocolError(f"{where}: expected {words}, found {_kind(value)}")
        return value

    return _Shape(check, lambda stream: check(stream.value()), 1, 0, wrong)


def _optional(hint: Any, where: str) -> _Shape:
    if hint in _LEAVES:
        wrong, words = _LEAVES[hint]
        return _leaf(f"({{v}} is not None and {wrong})", f"{words} or nil", where)
    inner = _shape(hint, where)

    def check(value: Any) -> Any:
        return None if value is None else inner.check(value)

    def read(stream: Stream) -> Any:
        return stream.value() if stream.next_is_nil() else inner.read(stream)

    return _Shape(check, read, 1, inner.depth, "")


def _list(item: _Shape, where: str) -> _Shape:
    check_item, read_item, least_bytes = item.check, item.read, item.least_bytes

    def check(value: Any) -> list[Any]:
        if type(value) is not list:
            raise RemoteProtocolError(f"{where}: expected an array, found {_kind(value)}")
        return [check_item(element) for element in value]

    def read(stream: Stream) -> list[Any]:
        return [read_item(stream) for _ in range(stream.count(least_bytes, where))]

    return _Shape(check, read, 1, item.depth + 1, "")


def _string_map(where: str) -> _Shape:
    text = _shape(str, f"{where}{{}}")

    def check(value: Any) -> dict[str, str]:
        if type(value) is not dict:
            raise RemoteProtocolError(f"{where}: expected a map, found {_kind(value)}")
        for key, item in value.items():
            text.check(key)
            text.check(item)
        return value

    def read(stream: Stream) -> dict[str, str]:
        count = stream.map_count(where)
        # A dict evaluates each key before its value, the order in which they stand in the stream.
        entries = {text.read(stream): text.read(stream) for _ in range(count)}
        if len(entries) != count:
            raise RemoteProtocolError(f"{where}: a key stands twice")
        return entries

    return _Shape(check, read, 1, 1, "")


def _struct(cls: type[Struct]) -> _Shape:
    shape = _STRUCTS.get(cls)
    if shape is None:
        hints = get_type_hints(cls)
        fields = {name: _shape(hints[name], f"{cls.__name__}.{name}") for name in cls._fields}
        check = _compile_check(cls, fields)
        read = _reader(cls, fields, check)
        least_bytes = 1 + sum(field.least_bytes for field in fields.values())
        depth = 1 + max((field.depth for field in fields.values()), default=0)
        _STRUCTS[cls] = shape = _Shape(check, read, least_bytes, depth, "")
    return shape


def _reader(
    cls: type[Struct], fields: dict[str, _Shape], check: Callable[[Any], Any]
) -> Callable[[Stream], Any]:
    if all(field.wrong for field in fields.values()):
        assert len(fields) <= MAX_INTEGERS_PER_LIST, f"{cls.__name__} is wider than a stream unpacks at once"
        return lambda stream: check(stream.value())
    new, readers = tuple.__new__, [field.read for field in fields.values()]

    def read(stream: Stream) -> Any:
        stream.expect_width(len(readers), cls.__name__)
        return new(cls, [read_field(stream) for read_field in readers])

    return read


def _compile_check(cls: type[Struct], fields: dict[str, _Shape]) -> Callable[[Any], Any]:
    """The generated function from an unpacked row to an instance."""
    # Of a struct of an integer and a list of structs, the source is:
    #
    #     def check(row):
    #         if type(row) is not list or len(row) != 2:
    #             refuse(row)
    #         v0, v1, = row
    #         if (type(v0) is not int or v0 > 9223372036854775807):
    #             refuse(row)
    #         return new(cls, (v0, check_v1(v1),))
    names = [f"v{index}" for index in range(len(fields))]
    shapes = list(fields.values())
    tests = [shape.wrong.format(v=name) for name, shape in zip(names, shapes, strict=True) if shape.wrong]
    flat = len(tests) == len(shapes)
    made = [
        name if shape.wrong else f"check_{name}({name})" for name, shape in zip(names, shapes, strict=True)
    ]
    lines = [
        "def check(row):",
        f"    if type(row) is not list or len(row) != {len(names)}:",
        "        refuse(row)",
        *([f"    {', '.join(names)}, = row"] if names else []),
        *([f"    if {' or '.join(tests)}:", "        refuse(row)"] if tests else []),
        "    return new(cls, row)" if flat else f"    return new(cls, ({', '.join(made)},))",
    ]

    def refuse(row: Any) -> NoReturn:
        if type(row) is not list or len(row) != len(fields):
            raise RemoteProtocolError(
                f"{cls.__name__}: expected an array of {len(fields)}, found {_kind(row)}"
            )
        for shape, value in zip(shapes, row, strict=True):
            if shape.wrong:
                shape.check(value)
        raise AssertionError(f"{cls.__name__} refused a row without a wrong field: {row!r}")

    scope: dict[str, Any] = {
        "new": tuple.__new__,
        "cls": cls,
        "refuse": refuse,
        "not_integers": _not_integers,
    }
    scope.update({f"check_{name}": shape.check for name, shape in zip(names, shapes, strict=True)})
    exec("\n".join(lines), scope)
    check: Callable[[Any], Any] = scope["check"]
    return check


def _kind(value: Any) -> str:
    """What a wrong value is, in few words whatever its size."""
    match value:
        case None:
            return "nil"
        case bool():
            return "a boolean"
        case int():
            return f"the integer {value}"
        case list():
            return f"an array of {len(value)}"
        case dict():
            return f"a map of {len(value)}"
        case str():
            return f"a string of {len(value)} characters"
        case bytes():
            return f"{len(value)} bytes"
    return f"a {type(value).__name__}"


def _kinds(*values: Any) -> str:
    return ", ".join(map(_kind, values))
