"""`unirl conformance` for the gate: subjects that a committed record proves are left out, but for a tenth of them.

    python -m proofs.conformance [--proven] [--prove] -- ARGUMENTS OF unirl conformance
    python -m proofs.conformance --prove -- --tier full --report conformance/run -- -n 2

A subject is what conformance makes claims about: an engine with a model, a cell, a launcher. It is proven when every
claim about it that applies passed, or ended as a declared gap, in one run with the same key. With both options what the
record proves is left out, all of it, and the rest is tried and written down.

The driver of a run is one for all cells. A change of it alone tries again a few in this process: of every part that cells
are made of at least one.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from unirl.conformance.results import Report, load
from unirl.conformance.subjects import Subject, subjects
from unirl.core.plugins.catalog import Catalog

from . import keys, record
from .record import Proof
from .sources import Workspace

ROOT = Path(__file__).parents[3]
GOOD = {"pass", "gap", "n/a"}


def main(arguments: list[str]) -> int:
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    theirs = arguments[len(ours) + 1 :]
    if unknown := set(ours) - {"--proven", "--prove"}:
        print(f"got {sorted(unknown)}, expected --proven, --prove or both", file=sys.stderr)
        return 2
    keyed = Keyed(subjects(Catalog.discover()))
    proven = known(keyed, with_tenth="--prove" not in ours) if "--proven" in ours else {}
    theirs = [f"--without={name.removeprefix('conformance ')}" for name in proven] + theirs
    if "--prove" in ours:
        code = prove(keyed, theirs, left_out=proven)
    else:
        code = subprocess.run(["unirl", "conformance", *theirs], cwd=ROOT, check=False).returncode
    for name, proof in proven.items():
        print(f"proven at {proof.commit[:12]}: {name} ({proof.num_tests} claims, {proof.seconds:.0f} s when tried)")
    print(f"{len(proven)} subjects proven already, not tried; {sum(p.num_tests for p in proven.values())} claims")
    return code


def name_of(kind: str, subject: str) -> str:
    return f"conformance {kind}:{subject}"


def tried_together(subject: Subject) -> str:
    """What the subjects have in common that wait for the same start of an engine, which takes longer than their claims:
    its model and its name. Other subjects are alone."""
    if not subject.programs:
        return name_of(subject.kind, subject.id)
    return "+".join([subject.found("model").spec.name, *(spec.name for spec in subject.programs)])


@dataclass
class Keyed:
    """Subjects with keys: parts of this workspace alone decide how their claims end; those about plugins read
    docstrings, too."""

    all: Sequence[Subject]
    workspace: Workspace = field(default_factory=lambda: Workspace(ROOT))

    @cached_property
    def subjects(self) -> dict[str, Subject]:
        def is_keyed(subject: Subject) -> bool:
            own = all(found.dist.startswith("unirl-") for found in subject.parts)
            return subject.plugin is None and not subject.refused and own

        return {name_of(subject.kind, subject.id): subject for subject in self.all if is_keyed(subject)}

    def key(self, name: str) -> str:
        return keys.key(self.reached(name), self.workspace)

    def reached(self, name: str) -> set[Path]:
        """The files that decide how the claims about a subject end."""
        subject, dists = self.subjects[name], {dist.name: dist for dist in self.workspace.dists}
        parts = [node for part in subject.parts for node in self.workspace.of_part(part.spec.name, dists[part.dist])]
        tries_driver = name in self.tried_with_driver
        return keys.reached_by_subject(subject.kind, parts, self.workspace, tries_driver=tries_driver)

    @cached_property
    def tried_with_driver(self) -> set[str]:
        """Subjects that a change of the driver alone tries again: those about runs without an engine in an environment
        of its own, and of cells the first with a part, in an order that a new part does not change."""
        runs = {n: s for n, s in self.subjects.items() if s.kind in keys.KINDS_ABOUT_RUNS and not s.programs}
        cells = sorted((n for n, s in runs.items() if s.kind == "cell"), key=lambda n: sha256(n.encode()).digest())
        first: dict[tuple[str, str], str] = {}
        for name in cells:
            for found in runs[name].parts:
                first.setdefault((found.spec.kind, found.spec.name), name)
        return runs.keys() - set(cells) | set(first.values())


def known(keyed: Keyed, *, with_tenth: bool) -> dict[str, Proof]:
    """Of these subjects those that are proven; with_tenth: but for the tenth that runs all the same."""
    proofs, machine = record.read(ROOT), keys.instruction_set()
    proven: dict[str, Proof] = {}
    seconds: dict[str, float] = defaultdict(float)
    for name, subject in keyed.subjects.items():
        proof = proofs.get((name, machine))
        if proof and proof.cpu == record.cpu() and proof.key == keyed.key(name):
            proven[name] = proof
            seconds[tried_together(subject)] += proof.seconds
    again = record.tenth(seconds, record.commit_of(ROOT)) if with_tenth else ()
    return {name: proof for name, proof in proven.items() if tried_together(keyed.subjects[name]) not in again}


def prove(keyed: Keyed, theirs: list[str], *, left_out: Collection[str] = ()) -> int:
    """Try all that is not left out, and write down the subjects of which nothing failed or could not be tried."""
    if changed := record.uncommitted(ROOT):
        print(f"--prove: a proof names the commit that it was made at; commit {changed} first.", file=sys.stderr)
        return 2
    with TemporaryDirectory() as own:
        is_kept = "--report" in theirs
        folder = theirs[theirs.index("--report") + 1] if is_kept else own
        report = [] if is_kept else ["--report", own]
        code = subprocess.run(["unirl", "conformance", *report, *theirs], cwd=ROOT, check=False).returncode
        place = ROOT / folder / "conformance.json"
        if not place.is_file():
            return code or 1
        # Of subjects that no run of the gate tries, a proof would only get old.
        proofs = {
            (name, machine): proof
            for (name, machine), proof in record.read(ROOT).items()
            if name in keyed.subjects or not name.startswith("conformance ")
        }
        for name, proof in _outcomes(load(place), keyed, left_out).items():
            proofs.pop((name, keys.instruction_set()), None)
            if proof is not None:
                proofs[name, proof.machine] = proof
    record.write(ROOT, proofs)
    return code


def _outcomes(report: Report, keyed: Keyed, left_out: Collection[str]) -> dict[str, Proof | None]:
    """Of each subject that was tried its proof, or None."""
    states: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for outcome in report.outcomes:
        name = name_of(outcome.kind, outcome.subject)
        states[name].append(outcome.state)
        seconds[name] += outcome.seconds
    result: dict[str, Proof | None] = {}
    for name in keyed.subjects.keys() - set(left_out):
        result[name] = None
        # The report gives whole seconds of a claim: many short ones, a cell's, are none in sum.
        if set(states[name]) <= GOOD:
            result[name] = Proof(
                key=keyed.key(name),
                commit=record.commit_of(ROOT),
                machine=keys.instruction_set(),
                cpu=record.cpu(),
                num_tests=states[name].count("pass") + states[name].count("gap"),
                seconds=round(seconds[name], 1),
            )
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
