"""Makes an example of every message, for tests that send or check all of them."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from kafkalite.protocol.structs import Struct


def example(hint: Any, path: str = "") -> Any:
    """Return a value in which texts are the paths of their fields, flags are set, and lists have an item."""
    origin = get_origin(hint)
    if hint is bool:
        return True
    if hint is int:
        return 0
    if hint is str:
        return "topic" if path.endswith("resource_type") else path
    if hint is bytes:
        return b""
    if origin is list:
        return [example(get_args(hint)[0], path)]
    if origin is dict:
        return {}
    if origin in (Union, types.UnionType):
        return example(next(one for one in get_args(hint) if one is not type(None)), path)
    assert issubclass(hint, Struct), hint
    hints = get_type_hints(hint)
    return hint(*(example(hints[name], f"{path}.{name}".lstrip(".")) for name in hint._fields))
