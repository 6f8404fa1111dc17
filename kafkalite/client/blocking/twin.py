"""The base of the blocking twins: runs the original client in the loop thread and copies its docstrings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper, wraps
from inspect import cleandoc, getattr_static, signature
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from kafkalite.loop_thread import shared_loop_thread


class Openable(Protocol):
    """The methods that every asynchronous client has."""

    async def start(self) -> Any: ...
    async def close(self) -> None: ...


A = TypeVar("A", bound=Openable)
C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


def twin_of(original: type) -> Callable[[C], C]:
    """Decorate a class: public methods without docstrings get those of the same methods of ``original``.

    If the twin's method has a parameter ``timeout``, a sentence about it is appended.
    """

    def decorate(twin: C) -> C:
        for name in dir(original):
            member = getattr_static(twin, name, None)
            doc = getattr(original, name).__doc__
            if name.startswith("_") or member is None or not doc:
                continue
            if name in vars(twin):
                if member.__doc__ not in {None, doc}:
                    continue
            elif name in vars(original) and isinstance(member, FunctionType):  # inherited only by the twin
                member = FunctionType(
                    member.__code__, member.__globals__, name, member.__defaults__, member.__closure__
                )
                member.__kwdefaults__ = getattr(twin, name).__kwdefaults__
                member = update_wrapper(member, getattr(twin, name))
                setattr(twin, name, member)
            else:
                continue
            member.__doc__ = _adapted(doc, member)
        return twin

    return decorate


def _adapted(doc: str, member: Any) -> str:
    doc = cleandoc(doc).replace("``async with``", "``with``")
    if isinstance(member, FunctionType) and "timeout" in signature(member).parameters:
        doc += "\n\nRaises TimeoutError after ``timeout`` seconds."
    return doc


class Twin(Generic[A]):
    """Runs the coroutines of ``original`` in the loop thread that all twins of the process share."""

    def __init__(self, original: A) -> None:
        if hasattr(original, "_opener"):
            original._opener = "'with'"
        self._original = original
        self._thread = shared_loop_thread()

    def __repr__(self) -> str:
        return f"<sync {repr(self._original)[1:]}"

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return self._thread.run(coroutine, timeout_s)

    def start(self) -> Self:
        """Connect to the cluster. ``with`` calls this. Raises ConnectionFailedError."""
        self._run(self._original.start())
        return self

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._run(self._original.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()


def opened_with(
    original: Callable[P, A],
) -> Callable[[Callable[[Any, A], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate ``__init__(self, client)`` so that callers pass the arguments of ``original`` instead."""

    def decorate(init: Callable[[Any, A], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(original.__init__)
        def construct(twin: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(twin, original(*args, **kwargs))

        return construct

    return decorate


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
    *,
    after: Callable[[Any], object] | None = None,
) -> Callable[Concatenate[Twin[A], P], T]:
    """Return a blocking method for a twin that runs the asynchronous ``method``, with its docstring.

    ``after`` is a method of the twin that each call runs before ``method``.
    """

    name = method.__name__

    @wraps(method)
    def call(twin: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if after is not None:
            after(twin)
        overridden: Callable[P, Coroutine[Any, Any, T]] = getattr(twin._original, name)
        return twin._run(overridden(*args, **kwargs))

    return call
