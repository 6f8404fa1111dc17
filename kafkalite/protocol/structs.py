"""The base classes of messages and events: immutable tuples with named fields, written by msgpack unchanged.

A ``Struct`` is declared like a frozen dataclass and is a tuple of its fields in declaration order, beginning
with the fields of its base. msgpack writes it as an array. Declaring a Struct takes microseconds, whereas
declaring a dataclass takes a millisecond.

Unlike plain tuples, structs of different types are never equal, structs have no order, and a struct without
fields is true.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final, NamedTuple, NoReturn, Self, TypeVar, dataclass_transform

_new: Final = tuple.__new__

T = TypeVar("T")

DISTINCT: Final = "distinct"
DISTINCT_REPLICAS: Final = "distinct replicas"
#: A list of structs that begin with a topic and a partition. A request is refused if it names a partition
#: twice, or more partitions than max.request.partition.size.limit (S23).
Distinct = Annotated[list[T], DISTINCT]
#: The same in a request of a node, which may name all partitions that two brokers share.
DistinctReplicas = Annotated[list[T], DISTINCT_REPLICAS]


class AtMost(NamedTuple):
    """Marks a list: ``Annotated[list[str], AtMost(16)]``. A request with a longer list is refused (S25)."""

    max_items: int


@dataclass_transform(frozen_default=True)
class StructType(type):
    """The metaclass of Struct. Makes the annotated names of a class body the fields of a tuple."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> StructType:
        own = tuple(name for name in namespace.get("__annotations__", ()) if not name.startswith("_"))
        inherited: tuple[str, ...] = getattr(bases[0], "_fields", ())
        for index, field in enumerate(own, len(inherited)):
            assert field not in namespace, f"{name}.{field} has a default; a struct's fields have none"
            namespace[field] = property(itemgetter(index))
        if inherited:
            namespace["__new__"] = Struct.__dict__["__new__"]  # not the constructor compiled for the base
        fields = inherited + own
        namespace["__slots__"] = ()
        namespace["__match_args__"] = fields
        namespace["_fields"] = fields
        return super().__new__(mcls, name, bases, namespace)


class Struct(tuple[Any, ...], metaclass=StructType):
    """The base of every struct. Takes its fields by position or by name; all are required."""

    _fields: ClassVar[tuple[str, ...]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # The first instance compiles a constructor with the right signature, which replaces this one.
        constructor = _compile_constructor(cls)
        cls.__new__ = constructor  # type: ignore[method-assign]
        instance: Self = constructor(cls, *args, **kwargs)
        return instance

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. Raises TypeError for an unknown field."""
        cls = type(self)
        fields: dict[str, Any] = dict(zip(cls._fields, self, strict=True))
        return cls(**{**fields, **changes})

    __replace__ = _replace

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), tuple(self)))

    def __bool__(self) -> bool:
        return True

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __lt__(self, other: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__} has no order")

    __le__ = __gt__ = __ge__ = __lt__


class ApiResponse(Struct):
    """The base of every response. An error code other than 0 means that the whole request has failed."""

    error_code: int
    error_message: str | None


class PartitionItem(Struct):
    """The base of structs about one partition."""

    topic: str
    partition: int


class PartitionResult(PartitionItem):
    """The base of structs that report the result for one partition."""

    error_code: int
    error_message: str | None


def _compile_constructor(cls: type[Struct]) -> Any:
    """Generate ``__new__(cls, first, second, ...)`` for the fields of ``cls``, as dataclasses do."""
    parameters = "".join(f", {field}" for field in cls._fields)
    values = "".join(f"{field}, " for field in cls._fields)
    scope: dict[str, Any] = {"_new": _new, "__name__": cls.__module__}
    exec(f"def __new__(cls{parameters}):\n    return _new(cls, ({values}))", scope)
    constructor = scope["__new__"]
    constructor.__qualname__ = f"{cls.__name__}.__new__"
    return constructor
