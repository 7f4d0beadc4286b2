"""Put the published matrix together from runs of conformance that made the same claims.

    unirl conformance --report conformance/run -- -n 2
    python tools/publish_matrix.py conformance/run

Give several runs with the latest last: of a claim about a subject that more than one tried, the last outcome counts.
What none of them tried keeps the outcome that is published; what was never tried is *not run*. The files of
`conformance/` are replaced. Run it with the Python of `.venv`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unirl.conformance.claims import all_claims
from unirl.conformance.environment import suite_hash
from unirl.conformance.report.write import write_reports
from unirl.conformance.results import Outcome, Report, claim_info, load, subject_info
from unirl.conformance.subjects import not_applicable, subjects
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog

FOLDER = Path(__file__).resolve().parents[1] / "conformance"
NEVER = "this combination was not tried in the published run"
NO_GPU = "no CUDA device is here"
Key = tuple[str, str, str]


def merge(published: Report, runs: Sequence[Report], catalog: Catalog) -> Report:
    """What is known of every claim about every subject of tier full.

    published: its outcomes are older than those of `runs`, of which the last ones count. Environment and time are those
    of the run that tried most, with the engines of all.

    Raises RecipeError for reports of other claims than those that are installed.
    """
    for report in (published, *runs):
        if report.suite != suite_hash():
            raise RecipeError(
                f"a report of {report.created} made the claims {report.suite}, those that are installed are "
                f"{suite_hash()}: run conformance again."
            )
    latest: dict[Key, Outcome] = {_key(one): one for run in runs for one in run.outcomes}
    before = {_key(one): one for one in published.outcomes}
    went_together = {(one.kind, one.subject) for one in published.outcomes if one.state != "n/a"}
    claims = all_claims()
    found = subjects(catalog, tier="full")
    outcomes: list[Outcome] = []
    for claim in claims:
        for subject in found:
            if subject.kind != claim.kind:
                continue
            key: Key = (claim.name, subject.kind, subject.id)
            known = latest.get(key) or before.get(key)
            unknown = Outcome(
                claim=claim.name,
                kind=subject.kind,
                subject=subject.id,
                state="not run",
                reason=NO_GPU if subject.device == "cuda" else NEVER,
            )
            if reason := not_applicable(claim, subject):
                outcomes.append(dataclasses.replace(unknown, state="n/a", reason=reason))
            elif known is None or (key not in latest and known.state == "n/a" and key[1:] not in went_together):
                # Parts that did not go together when the matrix was published go together now.
                outcomes.append(unknown)
            else:
                outcomes.append(known)
    widest = max(runs, key=lambda run: len(run.outcomes))
    engines = {name: text for report in (published, *runs) for name, text in report.environment.engines.items()}
    return dataclasses.replace(
        widest,
        tier="full",
        environment=dataclasses.replace(widest.environment, engines=engines),
        dists={record.dist: record.version for record in catalog.records},
        claims=tuple(map(claim_info, claims)),
        subjects=tuple(map(subject_info, found)),
        outcomes=tuple(outcomes),
    )


def _key(one: Outcome) -> Key:
    return one.claim, one.kind, one.subject


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folder that `--report` wrote, or its conformance.json")
    places = [path / "conformance.json" if path.is_dir() else path for path in parser.parse_args().runs]
    try:
        report = merge(load(FOLDER / "conformance.json"), [load(path) for path in places], Catalog.discover())
    except RecipeError as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        written = write_reports(report, Path(folder))
        for path in written:
            # The page is large, and `unirl conformance --from` writes it again.
            if path.suffix != ".html":
                shutil.copyfile(path, FOLDER / path.relative_to(folder))
    print(", ".join(f"{count} {state}" for state, count in report.counts.items()))


if __name__ == "__main__":
    main()
