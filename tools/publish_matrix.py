"""Update the published results from runs of conformance that made the same claims.

    unirl conformance --report conformance/run -- -n 2
    python tools/publish_matrix.py conformance/run

Give several runs with the latest last: the last result of a claim on a subject counts. What no run tried keeps its
published result; what was never tried is *not run*. `conformance/conformance.json` and `MATRIX.md` are replaced. Run it
with the Python of `.venv`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unirl.conformance.claims import all_claims
from unirl.conformance.report.file import load, to_json
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.results import Outcome, Report, Untried, subject_info
from unirl.conformance.subjects import not_applicable, subjects
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog

FOLDER = Path(__file__).resolve().parents[1] / "conformance"
NEVER = "never tried"
NO_GPU = "no CUDA device is here"


def merge(published: Report, runs: Sequence[Report], catalog: Catalog) -> Report:
    """The latest result of every claim on every subject of tier full.

    published: older than all of `runs`. Environment and time stay as published, unless a run has most of the outcomes;
    the engines of all are listed. While nothing was tried on a GPU, claims on one are counted.

    Raises RecipeError for a run of a claim that is not installed: it is of another version of the tests.
    """
    reports = (published, *runs)
    latest = [_Results(report) for report in reversed(reports)]
    has_gpu = any("cuda" in {subject.device for subject in report.subjects} for report in reports)
    claims, found = all_claims(), subjects(catalog, tier="full")
    known = {claim.name for claim in claims}
    for run in runs:
        if others := sorted({claim.name for claim in run.claims} - known):
            raise RecipeError(
                f"the run of {run.created} has the claim {others[0]!r}, which is not installed: run conformance again."
            )
    outcomes: list[Outcome] = []
    untried: Counter[tuple[str, str, str, str]] = Counter()
    for claim in claims:
        for subject in found:
            if subject.kind != claim.kind:
                continue
            result = next((results for results in latest if results.has(claim.name, subject.kind, subject.id)), None)
            outcome = result.outcomes.get((claim.name, subject.kind, subject.id)) if result else None
            if not_applicable(claim, subject) or (result and not outcome):
                untried["n/a", subject.kind, subject.device, ""] += 1
            elif outcome:
                outcomes.append(outcome)
            elif subject.device == "cuda" and not has_gpu:
                untried["not run", subject.kind, subject.device, NO_GPU] += 1
            else:
                names = {"claim": claim.name, "kind": subject.kind, "subject": subject.id}
                outcomes.append(Outcome(**names, state="not run", reason=NEVER))
    widest = max(runs, key=lambda run: len(run.outcomes))
    main = widest if 2 * len(widest.outcomes) > len(published.outcomes) else published
    engines = {name: text for report in reports for name, text in report.environment.engines.items()}
    tried = {(one.kind, one.subject) for one in outcomes} | {
        (subject.kind, subject.id) for report in reports for subject in report.subjects
    }
    return dataclasses.replace(
        main,
        tier="full",
        selection=(),
        environment=dataclasses.replace(main.environment, engines=engines),
        dists={record.dist: record.version for record in catalog.records},
        claims=tuple(claims),
        subjects=tuple(subject_info(one) for one in found if (one.kind, one.id) in tried),
        outcomes=tuple(outcomes),
        untried=tuple(
            Untried(state=state, kind=kind, device=device, num_claims=count, reason=reason)
            for (state, kind, device, reason), count in sorted(untried.items())
        ),
    )


class _Results:
    """The outcomes of a report, and which claims on which subjects it is about: those without an outcome are n/a."""

    def __init__(self, report: Report) -> None:
        self.outcomes = {(one.claim, one.kind, one.subject): one for one in report.outcomes}
        self._claims = {claim.name for claim in report.claims}
        self._subjects = {(subject.kind, subject.id) for subject in report.subjects}

    def has(self, claim: str, kind: str, subject: str) -> bool:
        return claim in self._claims and (kind, subject) in self._subjects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folder that `--report` wrote, or its conformance.json")
    places = [path / "conformance.json" if path.is_dir() else path for path in parser.parse_args().runs]
    try:
        report = merge(load(FOLDER / "conformance.json"), [load(path) for path in places], Catalog.discover())
    except RecipeError as error:
        sys.exit(f"error: {error}")
    (file := FOLDER / "conformance.json").write_text(to_json(report), encoding="utf-8")
    # From the file, whose numbers are rounded.
    (FOLDER / "MATRIX.md").write_text(matrix_md(load(file)), encoding="utf-8")
    print(", ".join(f"{count} {state}" for state, count in report.counts.items()))


if __name__ == "__main__":
    main()
