"""Makes docs/protocol.json and the generated parts of docs/protocol.md, from the code.

Generated in the page are the names and types of each struct, the table of errors, those of limits and
deadlines, and the paragraphs of errors at the end of an API's section. The meanings of fields are written in
the page by hand, and kept. Run ``python -m proof.protocol_document`` after a change of the protocol.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kafkalite.conformance.schema import schema
from kafkalite.protocol.api_errors import CONTROLLER, COORDINATOR
from proof.console import tell

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
PAGE: Final = DOCS / "protocol.md"
SCHEMA: Final = DOCS / "protocol.json"
_WIDTH: Final = 140
_MEANING_COLUMN: Final = 31
#: Groups of codes that many APIs share, and the words that stand for them.
_GROUPS: Final = (
    ("those of a coordinator", {code.name: when for code, when in COORDINATOR.items()}),
    ("those of the controller", {code.name: when for code, when in CONTROLLER.items()}),
)
_TABLE: Final = re.compile(r"(<!-- from protocol.json: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_STRUCTS: Final = re.compile(r"(?<=^```struct\n).*?(?=^```)", re.MULTILINE | re.DOTALL)


def render_json(document: Mapping[str, Any]) -> str:
    """Return the document as indented JSON. A value that fits in one line is not broken into lines."""

    def render(value: Any, depth: int) -> str:
        line = json.dumps(value)
        if (depth and len(line) + depth <= _WIDTH) or not isinstance(value, list | dict) or not value:
            return line
        indent = " " * (depth + 1)
        if isinstance(value, list):
            rows = [render(item, depth + 1) for item in value]
        else:
            rows = [f"{json.dumps(key)}: {render(item, depth + 1)}" for key, item in value.items()]
        begin, end = "[]" if isinstance(value, list) else "{}"
        return begin + "\n" + ",\n".join(indent + row for row in rows) + "\n" + " " * depth + end

    return render(document, 0) + "\n"


def render_page(page: str, document: Mapping[str, Any]) -> str:
    """Return the page with its generated parts made again. Raises ValueError for a struct without a place."""
    structs = dict(document["structs"])
    page = _STRUCTS.sub(lambda block: _struct_block(block[0], structs), page)
    if structs:
        raise ValueError(f"the page has no block for {', '.join(structs)}")
    tables = {"errors": _error_table, "limits": _bound_table, "deadlines": _bound_table}
    page = _replace_tables(page, lambda name: tables[name](document[name]))
    for api in document["apis"]:
        page = _replace_errors(page, api)
    return page


def _struct_block(block: str, structs: dict[str, Any]) -> str:
    """Return the structs of a block with the fields of the schema, and the meanings that the block has."""
    paragraphs = []
    for paragraph in block.strip().split("\n\n"):
        name, *lines = paragraph.splitlines()
        meanings = {}
        for line in lines:
            declared, _, meaning = line.strip().partition("  ")
            meanings[declared.split(":")[0]] = meaning.strip()
        rows = [name]
        for field in structs.pop(name):
            row = f"  {field['name']}: {field['type']}"
            meaning = meanings.get(field["name"], "")
            rows.append(f"{row:<{_MEANING_COLUMN - 2}}  {meaning}" if meaning else row)
        paragraphs.append("\n".join(rows))
    return "\n\n".join(paragraphs) + "\n"


def _replace_tables(page: str, table: Callable[[str], str]) -> str:
    return _TABLE.sub(lambda found: found[1] + table(found[2]), page)


def _error_table(errors: list[dict[str, Any]]) -> str:
    rows = ["| code | name | retry | refresh |", "|---|---|---|---|"]
    for error in errors:
        marks = ("yes " if error[mark] else "" for mark in ("retry", "refresh"))
        rows.append(f"| {error['code']} | {error['name']} " + "".join(f"| {mark}" for mark in marks) + "|")
    return "\n".join(rows) + "\n"


def _bound_table(bounds: list[dict[str, Any]]) -> str:
    rows = ["| what | limit | beyond it |", "|---|---|---|"]
    for bound in bounds:
        if "option" in bound:
            limit = f"`{bound['option']}`, by default {bound['default']:,} {bound['unit']}"
        else:
            limit = f"{bound['value']:,} {bound['unit']}"
        rows.append(f"| {bound['what']} | {limit.strip()} | {bound['beyond']} |")
    return "\n".join(rows) + "\n"


def _replace_errors(page: str, api: Mapping[str, Any]) -> str:
    """Write the paragraph of errors of one API behind its structs, or remove it if there are none."""
    head = f"### {api['name']} ({api['key']})\n"
    begin = page.index(head)
    following = re.search(r"^##", page[begin + len(head) :], re.MULTILINE)
    end = begin + len(head) + following.start() if following else len(page)
    section = re.sub(r"(?:^|\n)Errors of [^\n]+(?:\n[^\n]+)*\n", "", page[begin:end])
    parts = []
    for what, key in (("the request", "whole"), ("an item", "item")):
        if api["errors"][key]:
            parts.append(f"Errors of {what}: {_code_list(api['errors'][key])}.")
    if parts:
        text = "\n\n".join(textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in parts)
        section = section.rstrip("\n") + f"\n\n{text}\n\n"
    return page[:begin] + section + page[end:]


def _code_list(codes: Mapping[str, str]) -> str:
    left = dict(codes)
    groups = []
    for words, group in _GROUPS:
        if group.items() <= left.items():
            groups.append(words)
            left = {name: when for name, when in left.items() if name not in group}
    named = [f"{name} ({when})" if when else name for name, when in left.items()]
    return ", ".join([*groups, *named])


def main() -> None:
    """Write both files."""
    document = schema()
    SCHEMA.write_text(render_json(document))
    PAGE.write_text(render_page(PAGE.read_text(), document))
    tell(f"wrote {SCHEMA.name} and the generated parts of {PAGE.name}")


if __name__ == "__main__":
    main()
