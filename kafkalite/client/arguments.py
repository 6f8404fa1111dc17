"""Checks the arguments of the clients' methods. Pure.

Type checkers find wrong arguments, but notebooks and scripts run without one. Each check returns the argument
or raises ClientError, which names the argument and shows a valid one.
"""

# Tests: tests/client/test_wrong_arguments.py

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec

from kafkalite.errors import ClientError
from kafkalite.model import OffsetAndMetadata, TopicPartition

P = ParamSpec("P")

_A_PARTITION: Final = 'TopicPartition("orders", 0)'


def checked_partition(tp: object) -> TopicPartition:
    """Return ``tp``, a TopicPartition or a (topic, partition) pair. Raises ClientError if it is neither."""
    if (
        isinstance(tp, tuple | list)
        and len(tp) == 2
        and isinstance(tp[0], str)
        and hasattr(tp[1], "__index__")
    ):
        return TopicPartition(*tp)
    raise ClientError(f"{tp!r} is not a partition", hint=f"for example {_A_PARTITION}")


def checked_partitions(tps: object) -> list[TopicPartition]:
    """Return ``tps``, a collection of partitions or of pairs, as a list. Raises ClientError."""
    example = f"[{_A_PARTITION}]"
    if isinstance(tps, TopicPartition):
        raise ClientError(f"{tps!r} is not a list of partitions", hint=f"for example {example}")
    return [checked_partition(tp) for tp in checked_list("partitions", tps, example)]


def checked_names(names: object) -> list[str]:
    """Return ``names`` as a list. Raises ClientError for a str, whose characters would be taken as names."""
    example = f"[{names!r}]" if isinstance(names, str) else '["orders"]'
    return [checked_name("name", name) for name in checked_list("names", names, example)]


def checked_list(what: str, items: object, example: str) -> list[Any]:
    """Return ``items`` as a list. Raises ClientError if ``items`` is a str or not iterable.

    The error names the items ``what`` (such as ``partitions``), and its hint shows ``example``.
    """
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ClientError(f"{items!r} is not a list of {what}", hint=f"for example {example}")
    return list(items)


def checked_name(what: str, name: object) -> str:
    """Return ``name``. Raises ClientError unless it is a str. ``what`` is, for example, ``topic``."""
    if isinstance(name, str):
        return name
    hint = "only keys and values are bytes" if isinstance(name, bytes) else ""
    raise ClientError(f"{what} {name!r} is not a str", hint=hint)


def checked_mapping(what: str, value: object, example: str) -> Mapping[Any, Any]:
    """Return ``value``. Raises ClientError, which shows ``example``, unless it is a mapping."""
    if isinstance(value, Mapping):
        return value
    raise ClientError(f"{what} {value!r} is not a dict", hint=f"for example {example}")


def checked_offsets(offsets: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the mapping ``offsets`` as {partition: offset to commit}. Raises ClientError for wrong types."""
    return {
        checked_partition(tp): at
        if isinstance(at, OffsetAndMetadata)
        else OffsetAndMetadata(checked_int("offset", at))
        for tp, at in checked_mapping("offsets", offsets, f"{{{_A_PARTITION}: 10}}").items()
    }


def checked_ints(what: str, numbers: object) -> dict[TopicPartition, int]:
    """Return the mapping ``numbers`` as {partition: int}. Raises ClientError for wrong types.

    ``what`` is the name of a number in the error.
    """
    return {
        checked_partition(tp): checked_int(what, number)
        for tp, number in checked_mapping(f"{what}s", numbers, f"{{{_A_PARTITION}: 10}}").items()
    }


def checked_int(what: str, value: Any) -> Any:
    """Return ``value``. Raises ClientError unless it is an int."""
    if hasattr(value, "__index__"):
        return value
    raise ClientError(f"{what} {value!r} is not an int")


def checked_count(what: str, value: Any) -> Any:
    """Return ``value``. Raises ClientError unless it is an int of 0 or more."""
    if checked_int(what, value) < 0:
        raise ClientError(f"{what} {value!r} is below 0")
    return value


def checked_interceptors(interceptors: object, base: type) -> list[Any]:
    """Return ``interceptors`` as a list. Raises ClientError unless each has the methods of ``base``."""
    found = checked_list("interceptors", interceptors, "[MyInterceptor()]")
    for each in found:
        if isinstance(each, type):
            raise ClientError(
                f"the interceptor {each!r} is a class", hint=f"pass an instance: {each.__name__}()"
            )
        for name in vars(base):
            if not name.startswith("_") and not callable(getattr(each, name, None)):
                raise ClientError(
                    f"the interceptor {each!r} has no method {name}",
                    hint=f"derive its class from {base.__name__}",
                )
    return found


def checked_number(what: str, value: Any) -> Any:
    """Return ``value``. Raises ClientError unless it is an int or a float other than NaN."""
    if hasattr(value, "__float__") and value == value:  # only NaN differs from itself
        return value
    raise ClientError(f"{what} {value!r} is not a number")


def takes_one(example: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor that takes one positional argument: if there are more, it raises ClientError.

    A caller may pass both topics and servers, as to the clients of other libraries. The error's hint is
    ``example`` with these in place of ``{topic}`` and ``{servers}``.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        @wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            client, *given = args
            if len(given) > 1:
                topics, servers = split_addresses(flat(given))
                call = example.format(
                    topic=(topics or ["orders"])[0], servers=",".join(servers or ["localhost:9092"])
                )
                raise ClientError(
                    f"{type(client).__name__} takes one positional argument, not {len(given)}",
                    hint=f"call {call}",
                )
            init(*args, **kwargs)

        return checked

    return decorate


def flat(arguments: Iterable[object]) -> list[object]:
    """Return names, and the names in collections of names, as one list."""
    names: list[object] = []
    for each in arguments:
        if isinstance(each, Iterable) and not isinstance(each, str | bytes):
            names += each
        else:
            names.append(each)
    return names


def split_addresses(names: Iterable[object]) -> tuple[list[str], list[str]]:
    """Return the topics and the addresses of brokers among ``names``. No topic has a colon in its name."""
    found = [name for name in names if isinstance(name, str)]
    return [name for name in found if ":" not in name], [name for name in found if ":" in name]
