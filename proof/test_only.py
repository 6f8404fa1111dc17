"""Finds code of the product that only tests use: ``python -m proof.test_only``.

The search is by name. A function, method, class or constant counts as used by the product if its name occurs
anywhere in the product except where it is defined. Names of the documented public API are omitted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("kafkalite", "sparkbridge", "pyspark_kafkalite")
#: Part of the product that is made for the tests of users.
FOR_USERS_TESTS: Final = "kafkalite/testing/"
CODE_THAT_TESTS: Final = ("tests", "proof", "benchmarks")
#: Code as users write it.
EXAMPLES: Final = ("examples",)
DOCUMENTS: Final = ("README.md", "ARCHITECTURE.md", "docs")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_CODE: Final = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)


class Definition(NamedTuple):
    """The place where a name of the product is defined."""

    path: str  #: relative to the root of the checkout
    line: int
    name: str  #: including the names of the enclosing classes

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


def _files(directories: Iterable[str]) -> list[Path]:
    return sorted(path for directory in directories for path in (ROOT / directory).rglob("*.py"))


def _definitions(tree: ast.Module, path: str) -> Iterator[Definition]:
    def visit(body: Iterable[ast.stmt], prefix: str) -> Iterator[Definition]:
        for node in body:
            match node:
                case ast.ClassDef(name=name):
                    yield Definition(path, node.lineno, prefix + name)
                    yield from visit(node.body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if not name.startswith("__") and not _is_registered(node):
                        yield Definition(path, node.lineno, prefix + name)
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield Definition(path, node.lineno, prefix + name)

    return visit(tree.body, "")


def _is_registered(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator passes it to a library, as ``@atexit.register`` and those of click do."""
    return any(isinstance(one, ast.Call | ast.Attribute) for one in function.decorator_list)


def _used(tree: ast.AST) -> Counter[str]:
    """Count the names that ``tree`` reads, calls, imports, assigns to or mentions in a string."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found[name] += 1
            case ast.alias(name=name):
                found.update(name.split("."))
            case ast.MatchClass():
                found.update(node.kwd_attrs)
            case ast.Constant(value=str(text)) if text.isidentifier() or ":" in text:
                found.update(_WORD.findall(text))
    return found


def _documented() -> set[str]:
    words: set[str] = set()
    for name in DOCUMENTS:
        path = ROOT / name
        for file in sorted(path.rglob("*.md")) if path.is_dir() else [path]:
            for code in _CODE.findall(file.read_text()):
                words.update(_WORD.findall(code))
    return words


def only_tests_use() -> list[Definition]:
    """Return the definitions that the product never uses, but tests, proof or benchmarks do."""
    definitions: list[Definition] = []
    in_product: Counter[str] = Counter()
    for path in _files(PRODUCT):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        if not name.startswith(FOR_USERS_TESTS):
            definitions += _definitions(tree, name)
            in_product += _used(tree)
    for path in _files(EXAMPLES):
        in_product += _used(ast.parse(path.read_text()))
    # A constant counts as a use of itself where it is assigned.
    assigned = Counter(one.name.rpartition(".")[2] for one in definitions if _is_assigned(one))
    in_tests: set[str] = set()
    for path in _files(CODE_THAT_TESTS):
        in_tests |= _used(ast.parse(path.read_text())).keys()
    documented = _documented()
    found: list[Definition] = []
    for definition in definitions:
        name = definition.name.rpartition(".")[2]
        if in_product[name] <= assigned[name] and name in in_tests and name not in documented:
            found.append(definition)
    return found


def _is_assigned(definition: Definition) -> bool:
    line = (ROOT / definition.path).read_text().splitlines()[definition.line - 1].lstrip()
    return not line.startswith(("def ", "async def ", "class ", "@"))


if __name__ == "__main__":
    sys.stdout.writelines(f"{definition}\n" for definition in only_tests_use())
