"""Typed structs to msgpack and back. The only module that uses the msgpack library.

Writing is one call: a ``Struct`` is the tuple that is sent. Reading trusts nothing. For each struct a
*plan* is compiled from its type hints at the first use, in two forms that accept the same bytes:

``check(value)``
    Takes the value that msgpack unpacked and checks every type. Generated source, for envelopes of at most
    ``SMALL_ENVELOPE_BYTES``, nearly all of the traffic: unpacking them costs a bounded amount of memory,
    whatever the bytes claim.

``read(stream)``
    Reads a larger envelope field by field. Every count is compared with the remaining bytes, divided by the
    smallest size of an element, before anything is allocated, and nothing is unpacked that the struct has no
    field for. A refused envelope has then cost at most what its valid beginning is worth, never what its
    headers claim (S2, CVE-2026-111108 in Kafka).

Reading raises only RemoteProtocolError, writing only LocalProtocolError.
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
MAX_INT: Final = 2**63 - 1  # signed 64 bits; msgpack itself has no smaller number than -2**63

_NIL: Final = 0xC0

Buffer: TypeAlias = bytes | bytearray | memoryview
M = TypeVar("M", bound=Struct)


class RequestHead(Struct):
    """A request envelope with an undecoded body, whose struct depends on key and version."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: Any  #: valid for one call of ``decode_body``


class ResponseHead(Struct):
    correlation_id: int
    throttle_ms: int
    body: Any  #: valid for one call of ``decode_body`` or ``decode_response_body``


# --- writing -----------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Return a message, or a tuple of leaves and messages, as msgpack. Raises LocalProtocolError."""
    try:
        return msgpack.packb(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot encode {type(value).__name__}: {error}") from error


# --- reading -----------------------------------------------------------------------------------------


def decode_request_head(envelope: Buffer) -> RequestHead:
    """Read ``[api_key, api_version, correlation_id, client_id, body]``. Raises RemoteProtocolError."""
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
    """Read ``[correlation_id, throttle_ms, body]``. Raises RemoteProtocolError."""
    correlation_id, throttle_ms, body = _open(envelope, 3, "response envelope", sys.maxsize)
    if type(correlation_id) is not int or type(throttle_ms) is not int or throttle_ms < 0:
        raise RemoteProtocolError(
            "a response envelope starts with two integers, the throttle time not negative: "
            f"found {_kinds(correlation_id, throttle_ms)}"
        )
    return ResponseHead(correlation_id, throttle_ms, body)


def decode_body(cls: type[M], body: Any) -> M:
    """Return the body of a head as ``cls``, with every type checked. Raises RemoteProtocolError."""
    plan = _PLANS.get(cls) or plan_for(cls)
    if type(body) is not Stream:
        return plan.check(body)  # type: ignore[no-any-return]
    message: M = body.guarded(plan.read)
    return message


def decode_response_body(cls: type[M], error_cls: type[Struct], body: Any) -> M | Struct:
    """Return the body as ``cls``, or an array of two as ``error_cls``: the request failed as a whole."""
    if type(body) is not Stream:
        failed = type(body) is list and len(body) == 2
        return decode_body(error_cls if failed else cls, body)
    return decode_body(error_cls if body.next_is_pair() else cls, body)


def decode(cls: type[M], data: Buffer) -> M:
    """Return a single message as ``cls``. Raises RemoteProtocolError."""
    return decode_body(cls, _unpack(data) if len(data) <= SMALL_ENVELOPE_BYTES else Stream(data))


def _open(envelope: Buffer, width: int, what: str, max_items: int) -> list[Any]:
    """Return the envelope's fields; the last one, the body, is unpacked or a Stream at its start."""
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
        raise ValueError("a map contains a key twice")
    return unique


class Stream:
    """Reads one envelope element by element, and checks each count against the remaining bytes."""

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
        #: Returns the next element, a leaf or a struct of leaves, which cannot claim more than those hold.
        self.value: Callable[[], Any] = self._unpacker.unpack

    def guarded(self, read: Callable[[Stream], Any]) -> Any:
        """Return ``read(self)``, with msgpack's exceptions turned into RemoteProtocolError."""
        try:
            return read(self)
        except (ValueError, TypeError, RecursionError, msgpack.OutOfData, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"malformed msgpack at byte {self._unpacker.tell()}: {error or type(error).__name__}"
            ) from error

    def open(self, width: int, what: str) -> list[Any]:
        """Return the leaves of an envelope of ``width`` fields, and this stream at the last one."""
        self.expect_width(width, what)
        return [*(self.value() for _ in range(width - 1)), self]

    def count(self, least_bytes: int, where: str) -> int:
        """Return the length of the next array, whose elements have at least ``least_bytes`` bytes each."""
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
        """Whether the next element is an array of two, in any of msgpack's three encodings of its header."""
        at = self._unpacker.tell()
        head = bytes(self._data[at : at + 5])
        return head.startswith((b"\x92", b"\xdc\0\2", b"\xdd\0\0\0\2"))

    def expect_end(self, where: str) -> None:
        left = self._end - self._unpacker.tell()
        if left:
            raise RemoteProtocolError(f"{left} bytes follow the end of {where}")


# --- plans --------------------------------------------------------------------------------------------


class Plan(Struct):
    """Two readers of one struct that accept the same bytes; see the module's docstring."""

    check: Callable[[Any], Any]
    read: Callable[[Stream], Any]


class _Shape(Struct):
    """The allowed values of one field, element or struct."""

    check: Callable[[Any], Any]  #: unpacked value -> final value
    read: Callable[[Stream], Any]  #: the stream's next element -> final value
    least_bytes: int  #: size of its shortest encoding
    depth: int  #: of nested arrays and maps
    wrong: str  #: for a leaf: a Python expression over ``{v}`` that is true for a wrong value; else empty


_PLANS: dict[type[Struct], Plan] = {}
_STRUCTS: dict[type[Struct], _Shape] = {}


def _not_integers(value: Any) -> bool:
    if type(value) is not list or len(value) > MAX_INTEGERS_PER_LIST:
        return True
    for element in value:  # noqa: SIM110 - any() with a generator takes twice as long
        if type(element) is not int or element > MAX_INT:
            return True
    return False


# Types that are checked inline: an expression over ``{v}`` that is true for a wrong value, and its
# description.
_LEAVES: Final[dict[Any, tuple[str, str]]] = {
    int: (f"(type({{v}}) is not int or {{v}} > {MAX_INT})", "a signed 64-bit integer"),
    bool: ("type({v}) is not bool", "a boolean"),
    str: ("type({v}) is not str", "a string"),
    bytes: ("type({v}) is not bytes", "a byte string"),
    list[int]: ("not_integers({v})", f"an array of at most {MAX_INTEGERS_PER_LIST} integers"),
}


def plan_for(cls: type[Struct]) -> Plan:
    """Return the plan of ``cls``, which is compiled at the first call."""
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
    """Return the shape of a type hint. ``where`` is ``Struct.field``, for error messages."""
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
    is_wrong: Callable[[Any], bool] = eval(  # noqa: S307 - the text is generated here
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
        # A dict evaluates each key before its value, which is their order in the stream.
        entries = {text.read(stream): text.read(stream) for _ in range(count)}
        if len(entries) != count:
            raise RemoteProtocolError(f"{where}: a duplicate key")
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
    """Return the generated function that turns an unpacked row into an instance."""
    # For a struct of an integer and a list of structs, the source is:
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
    """Describe a wrong value in a few words, whatever its size."""
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
