"""Writes conformance/MUTANTS.md: `python packages/unirl-conformance/tests/mutants_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from unirl.conformance.report.words import KIND_TITLES

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants.mutant import KINDS, mutants_of

__all__ = ["AGAIN", "PAGE", "table"]

PAGE = Path(__file__).parents[3] / "conformance" / "MUTANTS.md"
AGAIN = "Run `python packages/unirl-conformance/tests/mutants_table.py`."
HEAD = """\
# Mutants

A claim that cannot fail proves nothing. So each has at least one *mutant*: a part that is broken on purpose, in the one way
that the claim is about. `packages/unirl-conformance/tests/test_mutants.py` tries all claims on all of them, and asks of each
line below that the claim fails, that the claims named behind it fail with it because they cannot but do so, and that every
other claim still holds.

Written from the mutants in `packages/unirl-conformance/tests/conformance_mutants`; a test says when this page is stale.
"""


def table() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for kind in KINDS:
        mutants = mutants_of(kind)
        claims = {mutant.claim for mutant in mutants}
        title = KIND_TITLES[kind].partition(":")[0]
        lines += [f"## {title}", "", f"{len(claims)} claims, {len(mutants)} mutants.", ""]
        lines += ["| claim | mutant: a part that ... | fails with it |", "| --- | --- | --- |"]
        for mutant in sorted(mutants, key=lambda one: (one.claim, one.name)):
            link = f"[{mutant.claim}](../docs/reference/claims.md#{mutant.claim})"
            lines.append(f"| {link} | {mutant.breaks.replace('|', chr(92) + '|')} | {', '.join(mutant.also)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
