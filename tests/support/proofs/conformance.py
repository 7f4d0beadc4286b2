"""`unirl conformance` for the gate: subjects that a committed record proves are left out, but for a tenth of them.

    python -m proofs.conformance [--proven | --prove] -- ARGUMENTS OF unirl conformance
    python -m proofs.conformance --prove -- --tier full --report conformance/run -- -n 2

A subject is what conformance makes claims about: an engine with a model, a cell, a launcher. It is proven when every
claim about it that applies passed, or ended as a declared gap, in one run with the same key.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from unirl.conformance.results import Report, load
from unirl.conformance.subjects import Subject, subjects
from unirl.core.plugins.catalog import Catalog

from . import keys, record
from .record import Proof
from .sources import Workspace

ROOT = Path(__file__).parents[3]
SHORTEST_S = 0.5
"""Subjects that take less are neither written down nor left out."""
GOOD = {"pass", "gap", "n/a"}


def main(arguments: list[str]) -> int:
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    theirs = arguments[len(ours) + 1 :]
    if unknown := [word for word in ours if word not in ("--proven", "--prove")] or len(ours) > 1:
        print(f"got {unknown or ours}, expected --proven or --prove", file=sys.stderr)
        return 2
    workspace = Workspace(ROOT)
    result = {name_of(subject.kind, subject.id): subject for subject in subjects(Catalog.discover()) if keyed(subject)}
    if "--prove" in ours:
        return prove(result, workspace, theirs)
    proven = known(result, workspace) if "--proven" in ours else {}
    without = [f"--without={name.removeprefix('conformance ')}" for name in proven]
    code = subprocess.run(["unirl", "conformance", *without, *theirs], cwd=ROOT, check=False).returncode
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


def keyed(subject: Subject) -> bool:
    """Whether parts of this workspace alone decide how its claims end; those about plugins read docstrings, too."""
    return subject.plugin is None and not subject.refused and all(f.dist.startswith("unirl-") for f in subject.parts)


def key_of(subject: Subject, workspace: Workspace) -> str:
    dists = {dist.name: dist for dist in workspace.dists}
    modules = [module for result in subject.parts for module in dists[result.dist].entry_points]
    files = keys.reached_by_subject(subject.kind, modules, workspace, is_hosted=bool(subject.programs))
    return keys.key(files, workspace)


def known(found: dict[str, Subject], workspace: Workspace) -> dict[str, Proof]:
    """Of these subjects those that are proven, and not of the tenth that runs all the same."""
    proofs, commit, machine = record.read(ROOT), record.commit_of(ROOT), keys.instruction_set()
    proven: dict[str, Proof] = {}
    for name, subject in found.items():
        proof = proofs.get((name, machine))
        if (
            proof
            and proof.cpu == record.cpu()
            and not record.runs_anyway(tried_together(subject), commit)
            and proof.key == key_of(subject, workspace)
        ):
            proven[name] = proof
    return proven


def prove(found: dict[str, Subject], workspace: Workspace, theirs: list[str]) -> int:
    """Try everything, and write down the subjects of which nothing failed or could not be tried."""
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
            if name in found or not name.startswith("conformance ")
        }
        proofs.update(_proofs(load(place), found, workspace, proofs))
    record.write(ROOT, proofs)
    return code


def _proofs(
    report: Report, found: dict[str, Subject], workspace: Workspace, proofs: dict[tuple[str, str], Proof]
) -> dict[tuple[str, str], Proof]:
    """Of this run; what it did not prove is taken out of `proofs`."""
    machine, commit = keys.instruction_set(), record.commit_of(ROOT)
    states: dict[str, list[str]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for outcome in report.outcomes:
        name = name_of(outcome.kind, outcome.subject)
        states[name].append(outcome.state)
        seconds[name] += outcome.seconds
    fresh: dict[tuple[str, str], Proof] = {}
    for name, subject in found.items():
        proofs.pop((name, machine), None)
        if seconds[name] >= SHORTEST_S and set(states[name]) <= GOOD:
            fresh[name, machine] = Proof(
                key=key_of(subject, workspace),
                commit=commit,
                machine=machine,
                cpu=record.cpu(),
                num_tests=states[name].count("pass") + states[name].count("gap"),
                seconds=round(seconds[name], 1),
            )
    return fresh


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
