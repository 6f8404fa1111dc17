"""Makes the table of docs/authorization.md from the code: what each request needs.

Run ``python -m proof.authorization_document`` after a change of ``kafkalite/security/required.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kafkalite.protocol.api import ApiKey
from kafkalite.security.acls import label
from kafkalite.security.required import REQUIRED, Need, Requirement
from proof.console import tell

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "authorization.md"
_TABLE: Final = re.compile(r"(<!-- from required.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def render_page(page: str) -> str:
    """Return the page with its table made again."""
    rows = ["| request | needs | lists only |", "|---|---|---|"]
    names = {key: ApiKey(key).name.title().replace("_", "") for key in REQUIRED}
    rows += [f"| {names[key]} | {_needs(one)} | {_lists(one)} |" for key, one in REQUIRED.items()]
    return _TABLE.sub(lambda block: block[1] + "\n".join(rows) + "\n", page)


def _needs(requirement: Requirement) -> str:
    return "; ".join(map(_need, requirement.needs)) or "nothing"


def _need(need: Need) -> str:
    text = f"{label(need.operation)} {label(need.resource_type)}"
    if need.where:
        text += f" ({need.where})"
    if need.otherwise is not None:
        operation, resource_type = need.otherwise
        on_any = "" if label(resource_type) == "Cluster" else "any "
        text += f" or {label(operation)} {on_any}{label(resource_type)}"
    return text


def _lists(requirement: Requirement) -> str:
    return "; ".join(
        f"`{'.'.join(one.path)}` by Describe {label(one.resource_type)}" for one in requirement.lists
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(render_page(PAGE.read_text()))
    tell(f"wrote the table of {PAGE.name}")


if __name__ == "__main__":
    main()
