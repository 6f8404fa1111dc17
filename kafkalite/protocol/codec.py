"""Converts messages, which are typed structs, to msgpack and back.

Writing is one call: a ``Struct`` is the tuple that is sent. Reading checks the type and size of everything.
At the first use of a struct, a ``Plan`` for reading it is compiled from its type hints. The plan has two
functions that accept the same messages:

``check(value)`` checks every type in a value that msgpack has unpacked. This generated function serves
envelopes of at most ``SMALL_ENVELOPE_BYTES``, which are nearly all of the traffic. Unpacking such an envelope
costs a bounded amount of memory, whatever lengths the bytes announce.

``read(stream)`` reads a larger envelope field by field. Before it allocates a list of structs, it checks that
the remaining bytes can hold as many elements as are announced. It unpacks no other array of more than
MAX_INTEGERS_PER_LIST elements. So a refused envelope costs no more memory than its valid beginning justifies
(S2, CVE-2026-111108 in Kafka).

Invalid bytes raise RemoteProtocolError. A value that cannot be written raises LocalProtocolError.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from operator import itemgetter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from kafkalite.errors import LocalProtocolError, RemoteProtocolError
from kafkalite.limits import MAX_ENTRIES_PER_MAP, MAX_INTEGERS_PER_LIST, MAX_ITEMS_PER_REQUEST, MAX_NESTING
from kafkalite.protocol.structs import DISTINCT, AtMost, Struct

SMALL_ENVELOPE_BYTES: Final = 512
LONG_ENVELOPE_BYTES: Final = 16 * 1024  # a thousand partitions
ITEMS_PER_TURN: Final = 1_000  # items decoded before other connections are served: about 3 ms
NESTED_ITEMS_PER_TURN: Final = 50  # the same for items that contain lists or maps
MAX_INT: Final = 2**63 - 1  # signed 64 bits; msgpack itself has no smaller number than -2**63

_NIL: Final = 0xC0
_new: Final = tuple.__new__  # half the time of a struct's constructor
_Packer: Final = msgpack.Packer  # ``packb`` does the same, but takes a fifth longer
_PARTITION: Final = itemgetter(0, 1)  # the name of a partition, with which each item of ``Distinct`` begins

Buffer: TypeAlias = bytes | bytearray | memoryview
M = TypeVar("M", bound=Struct)


class LongBodyError(Exception):
    """The request is longer than LONG_ENVELOPE_BYTES and has a list: use ``decode_body_in_turns``."""


class RequestHead(Struct):
    """A request envelope whose body is not decoded. Its key and version determine the struct of the body."""

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
    """Return a message, or a tuple of messages and plain values, as msgpack. Raises LocalProtocolError."""
    try:
        return _Packer().pack(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot encode {type(value).__name__}: {error}") from error


# --- reading -----------------------------------------------------------------------------------------


def decode_request_head(envelope: Buffer, max_partitions: int = sys.maxsize) -> RequestHead:
    """Read ``[api_key, api_version, correlation_id, client_id, body]``. Raises RemoteProtocolError.

    ``max_partitions`` limits the partitions that the request may name. It is not checked for small envelopes,
    which cannot name many.
    """
    fields = _open(envelope, 5, "request envelope", MAX_ITEMS_PER_REQUEST, max_partitions)
    key, version, correlation_id, client_id, _ = fields
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
    return _new(RequestHead, fields)


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
    """Return the body of a request or response head as ``cls``, with every type checked.

    Raises RemoteProtocolError. Raises LongBodyError if the request is longer than
    LONG_ENVELOPE_BYTES and has a list.
    """
    plan = _PLANS.get(cls)
    if plan is None:
        plan = plan_for(cls)
    if type(body) is not Stream:
        return plan.check(body)  # type: ignore[no-any-return]
    if body.is_long and plan.read_in_turns is not None:
        raise LongBodyError
    message: M = body.guarded(plan.read)
    body.expect_end(cls.__name__)
    return message


def decode_body_in_turns(cls: type[M], body: Stream) -> Iterator[M | None]:
    """Decode ``body`` in steps of at most ITEMS_PER_TURN items. Yield None after each, then the result.

    Raises RemoteProtocolError.
    """
    read = plan_for(cls).read_in_turns
    assert read is not None, f"{cls.__name__} has no list"
    turns = read(body)
    while True:
        try:
            body.guarded(lambda _: next(turns))
        except StopIteration as end:
            body.guarded(lambda stream: stream.expect_end(cls.__name__))
            yield end.value
            return
        yield None


def decode_response_body(cls: type[M], error_cls: type[Struct], body: Any) -> M | Struct:
    """Return the body as ``error_cls`` if it is an array of two (the request failed), else as ``cls``.

    Raises RemoteProtocolError.
    """
    if type(body) is not Stream:
        failed = type(body) is list and len(body) == 2
        return decode_body(error_cls if failed else cls, body)
    return decode_body(error_cls if body.next_is_pair() else cls, body)


def decode(cls: type[M], data: Buffer) -> M:
    """Return a single encoded message as ``cls``. Raises RemoteProtocolError."""
    return decode_body(cls, _unpack(data) if len(data) <= SMALL_ENVELOPE_BYTES else Stream(data))


def _open(
    envelope: Buffer, width: int, what: str, max_items: int, max_partitions: int = sys.maxsize
) -> list[Any]:
    """Return the ``width`` fields of the envelope. The last one is the unpacked body, or a Stream to read it.

    ``what`` names the envelope in error messages.
    """
    if len(envelope) > SMALL_ENVELOPE_BYTES:
        stream = Stream(envelope, max_items, max_partitions)
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
    """Reads one envelope element by element.

    ``count`` and ``map_count`` check the announced length of a list or map against the remaining bytes.
    """

    __slots__ = ("_data", "_end", "_items_left", "_partitions_left", "_unpacker", "is_long", "value")

    def __init__(self, data: Buffer, max_items: int = sys.maxsize, max_partitions: int = sys.maxsize) -> None:
        self._data = data
        self._end = len(data)
        #: Whether this is a request so long that other connections would wait too long for its decoding.
        self.is_long = max_partitions < sys.maxsize and self._end > LONG_ENVELOPE_BYTES
        self._items_left = max_items
        self._partitions_left = max_partitions
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=self._end, max_array_len=MAX_INTEGERS_PER_LIST, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(data)
        #: Returns the next element: a leaf or a struct of leaves. The unpacker's limits bound its size.
        self.value: Callable[[], Any] = self._unpacker.unpack

    def guarded(self, read: Callable[[Stream], Any]) -> Any:
        """Return ``read(self)``. Convert msgpack's exceptions to RemoteProtocolError."""
        try:
            return read(self)
        except (ValueError, TypeError, RecursionError, msgpack.OutOfData, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"malformed msgpack at byte {self._unpacker.tell()}: {error or type(error).__name__}"
            ) from error

    def open(self, width: int, what: str) -> list[Any]:
        """Return the ``width`` fields of the envelope. The last one, the body, is replaced by this stream."""
        self.expect_width(width, what)
        return [*(self.value() for _ in range(width - 1)), self]

    def count(self, least_bytes: int, where: str) -> int:
        """Read and return the length of an array whose elements have at least ``least_bytes`` bytes each.

        Raises RemoteProtocolError if the remaining bytes are too few for it, or the envelope has too many
        elements. ``where`` names the array in the error.
        """
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

    def spend_partitions(self, count: int, where: str) -> None:
        """Subtract ``count`` from the number of partitions that the request may still name.

        Raises RemoteProtocolError if that number was below ``count``. ``where`` names the list in the error.
        """
        self._partitions_left -= count
        if self._partitions_left < 0:
            raise RemoteProtocolError(
                f"{where}: {count} partitions; max.request.partition.size.limit of the broker allows fewer,"
                " send several requests"
            )

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
    """The functions that read a field, element or struct. The module's docstring describes them."""

    check: Callable[[Any], Any]  #: converts an unpacked value to the final value
    read: Callable[[Stream], Any]  #: reads the stream's next element and returns the final value
    least_bytes: int  #: the size of the shortest encoding
    depth: int  #: the depth of nested arrays and maps
    wrong: str  #: for a leaf: a Python expression over ``{v}`` that is true for a wrong value; else ""
    #: a generator that returns what ``read`` does; None except for lists and the structs that contain them
    read_in_turns: Callable[[Stream], Generator[None, None, Any]] | None


_PLANS: dict[type[Struct], Plan] = {}


def _not_integers(value: Any) -> bool:
    if type(value) is not list or len(value) > MAX_INTEGERS_PER_LIST:
        return True
    for element in value:  # noqa: SIM110 - any() with a generator takes twice as long
        if type(element) is not int or element > MAX_INT:
            return True
    return False


# Types that are checked inline: an expression over ``{v}`` that is true for a wrong value, and a name.
_LEAVES: Final[dict[Any, tuple[str, str]]] = {
    int: (f"(type({{v}}) is not int or {{v}} > {MAX_INT})", "a signed 64-bit integer"),
    bool: ("type({v}) is not bool", "a boolean"),
    str: ("type({v}) is not str", "a string"),
    bytes: ("type({v}) is not bytes", "a byte string"),
    list[int]: ("not_integers({v})", f"an array of at most {MAX_INTEGERS_PER_LIST} integers"),
}


def _field_plan(hint: Any, where: str) -> Plan:
    """Return the plan for a type hint. ``where`` is ``Struct.field``, for error messages."""
    if hint in _LEAVES:
        return _leaf(*_LEAVES[hint], where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(arguments) == 2 and arguments[1] is NoneType:
        return _optional(arguments[0], where)
    if origin is Annotated:
        (item,) = get_args(arguments[0])
        if isinstance(arguments[1], AtMost):
            return _list(_field_plan(item, f"{where}[]"), where, arguments[1].max_items)
        assert item._fields[1] == "partition", f"{where}: the wire has no {hint!r}"
        return _distinct(_field_plan(item, f"{where}[]"), where, arguments[1] == DISTINCT)
    if origin is list:
        return _list(_field_plan(arguments[0], f"{where}[]"), where)
    if origin is dict and arguments == (str, str):
        return _string_map(where)
    assert isinstance(hint, type) and issubclass(hint, Struct), f"{where}: the wire has no {hint!r}"
    return plan_for(hint)


def _leaf(wrong: str, words: str, where: str) -> Plan:
    is_wrong: Callable[[Any], bool] = eval(  # noqa: S307 - the text is generated here
        "lambda v: " + wrong.format(v="v"), {"not_integers": _not_integers}
    )

    def check(value: Any) -> Any:
        if is_wrong(value):
            raise RemoteProtocolError(f"{where}: expected {words}, found {_kind(value)}")
        return value

    return Plan(check, lambda stream: check(stream.value()), 1, 0, wrong, None)


def _optional(hint: Any, where: str) -> Plan:
    if hint in _LEAVES:
        wrong, words = _LEAVES[hint]
        return _leaf(f"({{v}} is not None and {wrong})", f"{words} or nil", where)
    inner = _field_plan(hint, where)

    def check(value: Any) -> Any:
        return None if value is None else inner.check(value)

    def read(stream: Stream) -> Any:
        return stream.value() if stream.next_is_nil() else inner.read(stream)

    turns = inner.read_in_turns
    if turns is None:
        return Plan(check, read, 1, inner.depth, "", None)

    def read_in_turns(stream: Stream) -> Generator[None, None, Any]:
        if stream.next_is_nil():
            return stream.value()
        return (yield from turns(stream))

    return Plan(check, read, 1, inner.depth, "", read_in_turns)


def _list(item: Plan, where: str, max_items: int = sys.maxsize, is_limited: bool = False) -> Plan:
    """Return the plan for a list. If ``is_limited``, its elements count toward the request's partitions."""
    check_item, read_item, least_bytes = item.check, item.read, item.least_bytes
    items_per_turn = ITEMS_PER_TURN if item.depth <= 1 else NESTED_ITEMS_PER_TURN

    def check(value: Any) -> list[Any]:
        if type(value) is not list:
            raise RemoteProtocolError(f"{where}: expected an array, found {_kind(value)}")
        _check_count(len(value), max_items, where)
        return [check_item(element) for element in value]

    def count_of(stream: Stream) -> int:
        count = stream.count(least_bytes, where)
        _check_count(count, max_items, where)
        if is_limited:
            stream.spend_partitions(count, where)
        return count

    def read(stream: Stream) -> list[Any]:
        return [read_item(stream) for _ in range(count_of(stream))]

    def read_in_turns(stream: Stream) -> Generator[None, None, list[Any]]:
        count = count_of(stream)
        found: list[Any] = []
        while len(found) < count:
            found += [read_item(stream) for _ in range(min(items_per_turn, count - len(found)))]
            yield
        return found

    return Plan(check, read, 1, item.depth + 1, "", read_in_turns)


def _check_count(count: int, max_items: int, where: str) -> None:
    """Raise RemoteProtocolError if a list or map has more than ``max_items`` elements (S25)."""
    if count > max_items:
        raise RemoteProtocolError(f"{where}: at most {max_items} elements in one request, found {count}")


def _distinct(item: Plan, where: str, is_limited: bool) -> Plan:
    """Return the plan for a list in which a repeated partition is an error (S23). ``item`` reads an element.

    If ``is_limited``, the elements count toward the request's partition limit.
    """
    items = _list(item, where, is_limited=is_limited)
    check_items, check_item, read_items, turns = items.check, item.check, items.read, items.read_in_turns
    assert turns is not None

    def check(value: Any) -> list[Any]:
        if type(value) is list and len(value) == 1:  # most requests name one partition
            return [check_item(value[0])]
        checked: list[Any] = check_items(value)
        _refuse_repeated(checked, where)
        return checked

    def read(stream: Stream) -> list[Any]:
        found: list[Any] = read_items(stream)
        _refuse_repeated(found, where)
        return found

    def read_in_turns(stream: Stream) -> Generator[None, None, list[Any]]:
        found: list[Any] = yield from turns(stream)
        _refuse_repeated(found, where)
        yield
        return found

    return items._replace(check=check, read=read, read_in_turns=read_in_turns)


def _refuse_repeated(items: list[Any], where: str) -> None:
    if len(set(map(_PARTITION, items))) == len(items):
        return
    (((topic, partition), _),) = Counter(map(_PARTITION, items)).most_common(1)
    raise RemoteProtocolError(f"{where} names partition {topic}-{partition} twice")


def _string_map(where: str) -> Plan:
    text = _field_plan(str, f"{where}{{}}")

    def check(value: Any) -> dict[str, str]:
        if type(value) is not dict:
            raise RemoteProtocolError(f"{where}: expected a map, found {_kind(value)}")
        _check_count(len(value), MAX_ENTRIES_PER_MAP, where)
        for key, item in value.items():
            text.check(key)
            text.check(item)
        return value

    def read(stream: Stream) -> dict[str, str]:
        count = stream.map_count(where)
        _check_count(count, MAX_ENTRIES_PER_MAP, where)
        # A dict evaluates each key before its value, which is their order in the stream.
        entries = {text.read(stream): text.read(stream) for _ in range(count)}
        if len(entries) != count:
            raise RemoteProtocolError(f"{where}: a duplicate key")
        return entries

    return Plan(check, read, 1, 1, "", None)


def plan_for(cls: type[Struct]) -> Plan:
    """Return the plan of ``cls``, which is compiled at the first call."""
    plan = _PLANS.get(cls)
    if plan is None:
        hints = get_type_hints(cls, include_extras=True)
        fields = {name: _field_plan(hints[name], f"{cls.__name__}.{name}") for name in cls._fields}
        check = _compile_check(cls, fields)
        read = _reader(cls, fields, check)
        least_bytes = 1 + sum(field.least_bytes for field in fields.values())
        depth = 1 + max((field.depth for field in fields.values()), default=0)
        assert depth + 1 <= MAX_NESTING, f"{cls.__name__} nests deeper than limits.MAX_NESTING"
        in_turns = None
        if any(field.read_in_turns for field in fields.values()):
            in_turns = _reader_in_turns(cls, list(fields.values()))
        _PLANS[cls] = plan = Plan(check, read, least_bytes, depth, "", in_turns)
    return plan


def _reader_in_turns(cls: type[Struct], fields: list[Plan]) -> Callable[[Stream], Generator[None, None, Any]]:
    def read(stream: Stream) -> Generator[None, None, Any]:
        stream.expect_width(len(fields), cls.__name__)
        values = []
        for field in fields:
            turns = field.read_in_turns
            values.append(field.read(stream) if turns is None else (yield from turns(stream)))
        return _new(cls, values)

    return read


def _reader(
    cls: type[Struct], fields: dict[str, Plan], check: Callable[[Any], Any]
) -> Callable[[Stream], Any]:
    if all(field.wrong for field in fields.values()):
        assert len(fields) <= MAX_INTEGERS_PER_LIST, f"{cls.__name__} is wider than a stream unpacks at once"
        return lambda stream: check(stream.value())
    readers = [field.read for field in fields.values()]

    def read(stream: Stream) -> Any:
        stream.expect_width(len(readers), cls.__name__)
        return _new(cls, [read_field(stream) for read_field in readers])

    return read


def _compile_check(cls: type[Struct], fields: dict[str, Plan]) -> Callable[[Any], Any]:
    """Generate a function that checks an unpacked row and returns it as an instance of ``cls``."""
    # For a struct of an integer and a list of structs, the source is:
    #     def check(row):
    #         if type(row) is not list or len(row) != 2:
    #             refuse(row)
    #         v0, v1, = row
    #         if (type(v0) is not int or v0 > 9223372036854775807):
    #             refuse(row)
    #         return new(cls, (v0, check_v1(v1),))
    names = [f"v{index}" for index in range(len(fields))]
    plans = list(fields.values())
    tests = [plan.wrong.format(v=name) for name, plan in zip(names, plans, strict=True) if plan.wrong]
    flat = len(tests) == len(plans)
    made = [name if plan.wrong else f"check_{name}({name})" for name, plan in zip(names, plans, strict=True)]
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
        for plan, value in zip(plans, row, strict=True):
            if plan.wrong:
                plan.check(value)
        raise AssertionError(f"{cls.__name__} refused a row without a wrong field: {row!r}")

    scope: dict[str, Any] = {"new": _new, "cls": cls, "refuse": refuse, "not_integers": _not_integers}
    scope.update({f"check_{name}": plan.check for name, plan in zip(names, plans, strict=True)})
    exec("\n".join(lines), scope)
    check: Callable[[Any], Any] = scope["check"]
    return check


def _kind(value: Any) -> str:
    """Return a short description of a value, for error messages."""
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
