"""``python -m proof.damage [TEXT ...]``: runs the cases of damage whose names contain a TEXT, or all."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Sequence

from proof.damage.cases import all_cases
from proof.damage.single_node import prepare, run_case


def main(arguments: Sequence[str]) -> int:
    logging.disable(logging.CRITICAL)
    nodes = {is_clean: asyncio.run(prepare(is_clean=is_clean)) for is_clean in (False, True)}
    counts: Counter[str] = Counter()
    for case in all_cases():
        if arguments and not any(text in str(case) for text in arguments):
            continue
        outcome = asyncio.run(run_case(case, nodes[case.is_clean]))
        verdict = "nothing changed" if outcome is None else outcome.verdict
        counts[verdict] += 1
        detail = "" if outcome is None else outcome.detail[:180]
        sys.stdout.write(f"{case!s:<45} {verdict:<16} {detail}\n")
    sys.stdout.write(", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common()) + "\n")
    return 1 if counts["lost"] or counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
