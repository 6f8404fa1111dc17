"""CRC-32C, the checksum of a record batch.

On import, the package ``crc32c`` looks up its own version with ``importlib.metadata`` and builds its command
line, which takes 40 ms. Its extension module alone takes half a millisecond, so the extension is loaded
without the package around it. If it is not beside the package, the package is imported as usual.
"""

# Tests: tests/records/test_header.py

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, PathFinder
from typing import Final, cast

Crc32c = Callable[["bytes | bytearray | memoryview"], int]

_EXTENSION: Final = "crc32c._crc32c"


def _load() -> Crc32c:
    loaded = sys.modules.get(_EXTENSION) or _load_extension()
    if loaded is None:
        import crc32c

        loaded = crc32c
    return cast(Crc32c, loaded.crc32c)  # type: ignore[attr-defined]


def _load_extension() -> object | None:
    """Load the extension with its usual module name. Return None if it is not beside the package."""
    package = PathFinder.find_spec("crc32c")
    if package is None or package.submodule_search_locations is None:
        return None
    found = PathFinder.find_spec(_EXTENSION, package.submodule_search_locations)
    if found is None or not isinstance(found.loader, ExtensionFileLoader):
        return None
    from importlib.util import module_from_spec

    module = module_from_spec(found)
    found.loader.exec_module(module)
    sys.modules[_EXTENSION] = module
    return module


crc32c: Final[Crc32c] = _load()
