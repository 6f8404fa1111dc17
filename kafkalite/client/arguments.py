"""Checks the arguments of the clients' methods. Pure.

Type checkers find wrong arguments, but notebooks and scripts run without one. Each ``checked_…`` function
returns its argument, possibly converted, or raises ClientError with the wrong value.
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
    """Return ``tp``, a TopicPartition or a pair (topic, partition), as a TopicPartition.

    Raises ClientError if it is neither.
    """
    if (
        isinstance(tp, tuple | list)
        and len(tp) == 2
        and isinstance(tp[0], str)
        and hasattr(tp[1], "__index__")
    ):
        return TopicPartition(*tp)
    raise ClientError(f"{tp!r} is not a partition", hint=f"for example {_A_PARTITION}")


def checked_partitions(tps: object) -> list[TopicPartition]:
    """Return ``tps``, an iterable of TopicPartitions or pairs, as a list of TopicPartitions.

    Raises ClientError for anything else, such as a single TopicPartition.
    """
    example = f"[{_A_PARTITION}]"
    if isinstance(tps, TopicPartition):
        raise ClientError(f"{tps!r} is not a list of partitions", hint=f"for example {example}")
    return [checked_partition(tp) for tp in checked_list("partitions", tps, example)]


def checked_names(names: object) -> list[str]:
    """Return ``names``, an iterable of str, as a list. Raises ClientError for a str and for other types."""
    example = f"[{names!r}]" if isinstance(names, str) else '["orders"]'
    return [checked_name("name", name) for name in checked_list("names", names, example)]


def checked_list(what: str, items: object, example: str) -> list[Any]:
    """Return ``items`` as a list. Raises ClientError if ``items`` is a str, bytes, or not iterable.

    In the error, ``what`` is the noun for the items, such as ``partitions``, and ``example`` is a valid list.
    """
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ClientError(f"{items!r} is not a list of {what}", hint=f"for example {example}")
    return list(items)


def checked_name(what: str, name: object) -> str:
    """Return ``name``. Raises ClientError, whose message begins with ``what``, unless it is a str.

    A str with surrogates, which UTF-8 can't encode, is refused too.
    """
    if isinstance(name, str):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ClientError(f"{what} {name!r} is not UTF-8") from None
        return name
    hint = "only keys and values are bytes" if isinstance(name, bytes) else ""
    raise ClientError(f"{what} {name!r} is not a str", hint=hint)


def checked_mapping(what: str, value: object, example: str) -> Mapping[Any, Any]:
    """Return ``value``. Raises ClientError, whose hint shows ``example``, unless it is a mapping."""
    if isinstance(value, Mapping):
        return value
    raise ClientError(f"{what} {value!r} is not a dict", hint=f"for example {example}")


def checked_offsets(offsets: object) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return {TopicPartition: OffsetAndMetadata} for a mapping whose values may also be int offsets.

    Raises ClientError for other types.
    """
    return {
        checked_partition(tp): at
        if isinstance(at, OffsetAndMetadata)
        else OffsetAndMetadata(checked_int("offset", at))
        for tp, at in checked_mapping("offsets", offsets, f"{{{_A_PARTITION}: 10}}").items()
    }


def checked_ints(what: str, numbers: object) -> dict[TopicPartition, int]:
    """Return the mapping ``numbers`` as {TopicPartition: int}. Raises ClientError for wrong types.

    ``what`` is the noun for one number in the error.
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
    """Return ``interceptors`` as a list.

    Raises ClientError if one of them is a class, or lacks a public method of the class ``base``.
    """
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
    """Return ``value``. Raises ClientError unless it is a real number other than NaN."""
    if hasattr(value, "__float__") and value == value:  # only NaN differs from itself
        return value
    raise ClientError(f"{what} {value!r} is not a number")


def takes_one(example: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor: raise ClientError if it is called with more than one positional argument.

    The error's hint is the call ``example``. In it, ``{topic}`` is replaced by the first topic among the
    arguments, and ``{servers}`` by the addresses among them. If the arguments contain no topic or no address,
    an example takes its place.
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
    """Return ``arguments`` as a list, in which the items of an iterable argument take its place.

    A str and bytes are not taken apart.
    """
    names: list[object] = []
    for each in arguments:
        if isinstance(each, Iterable) and not isinstance(each, str | bytes):
            names += each
        else:
            names.append(each)
    return names


def split_addresses(names: Iterable[object]) -> tuple[list[str], list[str]]:
    """Return (topics, addresses of brokers) among ``names``. A str with a colon is an address."""
    found = [name for name in names if isinstance(name, str)]
    return [name for name in found if ":" not in name], [name for name in found if ":" in name]
