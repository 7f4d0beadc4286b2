"""How claims end: alike in any order and in parallel, as gaps, not run, or failed with the process that tried them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from unirl.conformance import claims as claims_module
from unirl.conformance.claims import SubjectKind, all_claims, claim_kinds, claims_in
from unirl.conformance.collector import Collector
from unirl.conformance.results import Outcome, Report
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def source(module: str) -> str:
    return files(f"{claims_module.__package__}.suite").joinpath(f"{module}.py").read_text(encoding="utf-8")


NO_ENVIRONMENTS = "/nonexistent/environments"
SCRIPT = """
import json, sys
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection

job = json.loads(sys.argv[1])
report = run_suite(
    Selection(plugins=tuple(job["plugins"]), kinds=tuple(job["kinds"]), claims=tuple(job["claims"])),
    tier=job["tier"], catalog=job["catalog"], pytest_args=job["args"],
)
rows = [[o.kind, o.claim, o.subject, o.state, o.reason] for o in report.outcomes]
counts = [[u.state, u.kind, u.device, u.reason, u.num_claims] for u in report.untried]
print("REPORT" + json.dumps([rows, sorted(counts)]))
"""


def in_a_process(
    *args: str,
    kinds: tuple[SubjectKind, ...],
    claims: tuple[str, ...] = (),
    plugins: tuple[str, ...] = (),
    tier: str = "tiny",
    catalog: str = "",
    **environment: str,
) -> tuple[list[list[str]], list[list[object]]]:
    """Results of a separate run: its rows (kind, claim, subject, state, reason), in the report's order, and the counts
    (state, kind, device, reason, number) of claims without an outcome.

    Engines with a separate environment find none: these results hold for all engines, and those take long to start.
    """
    job = {"kinds": kinds, "claims": claims, "plugins": plugins, "tier": tier, "catalog": catalog, "args": args}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(job)],
        env={
            **os.environ,
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
            "UNIRL_ENVS": NO_ENVIRONMENTS,
            **environment,
        },
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0 and "REPORT" in done.stdout, done.stdout + done.stderr
    rows, counts = json.loads(done.stdout.rpartition("REPORT")[2])
    return rows, counts


QUICK: tuple[SubjectKind, ...] = ("plugin", "engine", "reward")
QUICK_PLUGINS = ("unirl-reward-rules", "unirl-model-sd3")


def quick_claims() -> tuple[str, ...]:
    """All claims about plugins and rewards, and those about engines that share a model, and its noise."""
    sharing = claims_in(source("test_engine_noise"))
    return (*(name for name, kind in claim_kinds().items() if kind in ("plugin", "reward")), *sharing)


def test_claims_end_alike_in_any_order_and_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIRL_ENVS", NO_ENVIRONMENTS)
    report = run_suite(Selection(plugins=QUICK_PLUGINS, kinds=QUICK, claims=quick_claims()))
    plain_order = [[o.kind, o.claim, o.subject, o.state, o.reason] for o in report.outcomes]
    assert {row[0] for row in plain_order} == set(QUICK)
    counts = [[one.state, one.kind, one.device, one.reason, one.num_claims] for one in report.untried]
    shuffled = ("-p", "randomly", "--randomly-seed=2", "-n", "2")
    in_parallel = in_a_process(*shuffled, kinds=QUICK, claims=quick_claims(), plugins=QUICK_PLUGINS)
    assert in_parallel == (plain_order, sorted(counts))


def report_of(catalog: str, claim: str, kind: SubjectKind = "plugin") -> Report:
    """A claim on all parts of a catalog."""
    selection = Selection(kinds=(kind,), claims=(claim,))
    return run_suite(selection, catalog=f"conformance_mutants.plugin_states:{catalog}")


def outcomes(catalog: str, claim: str) -> dict[str, Outcome]:
    """The results of a claim: subject -> outcome."""
    return {outcome.subject: outcome for outcome in report_of(catalog, claim).outcomes}


def test_a_declared_gap_is_a_gap_while_it_is_there_and_a_failure_when_it_is_closed() -> None:
    result = outcomes("gaps", "every-setting-is-documented")
    assert (result["open"].state, result["open"].reason, result["open"].link) == (
        "gap",
        "Nobody has found words for it.",
        "https://example.org/1",
    )
    assert result["closed"].state == "fail"
    assert result["closed"].reason == (
        "the claim passes, and closed declares it as a gap (Nobody has found words for it.). Take the gap out."
    )
    assert result["undeclared"].state == "fail"
    assert result["elsewhere"].state == "fail", "the gap holds only with a part that is not there"


def test_a_package_that_is_absent_is_not_run_and_says_so() -> None:
    result = outcomes("absent", "every-string-of-its-specs-resolves")["needy"]
    assert (result.state, result.reason) == (
        "not run",
        "tracker 'notes' needs the Python package 'a_package_that_is_not_installed', which is not installed here",
    )


def test_a_run_of_which_nothing_could_be_tried_ends_with_3() -> None:
    selection = Selection(kinds=("plugin",), claims=("every-string-of-its-specs-resolves",))
    assert run_suite(selection, catalog="conformance_mutants.plugin_states:absent").exit_code == 3


def test_claims_on_a_gpu_that_is_absent_are_counted_as_not_run() -> None:
    rows, counts = in_a_process(
        kinds=("engine",),
        claims=tuple(claims_in(source("test_engine_noise"))),
        plugins=QUICK_PLUGINS,
        tier="gpu",
        CUDA_VISIBLE_DEVICES="",
    )
    assert not any(row[2].endswith("@cuda") for row in rows)
    (absent,) = (count for count in counts if count[0] == "not run")
    assert absent[:4] == ["not run", "engine", "cuda", "no CUDA device is here"]
    # What runs on the CPU would run on the GPU as well.
    assert absent[4] == len(rows) and {row[3] for row in rows} == {"pass"}


def test_what_is_not_promised_carries_the_sentence_that_says_so() -> None:
    claim = next(claim for claim in all_claims(["engine"]) if claim.proves == (Cap.SIGMAS,))
    report = report_of("refused", claim.name, "engine")
    assert report.outcomes == () and {one.state for one in report.untried} == {"n/a"}
    silent, unfit = sorted((one.reason for one in report.untried), key=lambda reason: "unfit" in reason)
    assert unfit.startswith("engine: ") and "needs 'latent-rollout'; engine 'unfit' does not provide it" in unfit
    assert silent == "the claim is about 'sigmas'; engine 'silent' does not provide it"


def test_a_claim_whose_worker_dies_has_failed_and_the_others_are_still_tried() -> None:
    rows, _ = in_a_process(
        "-n1",
        kinds=("plugin",),
        claims=("every-string-of-its-specs-resolves",),
        catalog="conformance_mutants.plugin_states:dies",
    )
    states = {row[2]: row[3:] for row in rows}
    assert states["deadly"] == ["fail", "the process that tried it ended without a result"]
    assert states["broken"][0] == "fail" and "did_you_mean" in states["broken"][1]


def test_a_worker_that_dies_before_the_claim_begins_counts_as_a_failure_too() -> None:
    collector = Collector(
        catalog=Catalog.of({}), tier="static", selection=(), subjects=[], covers=lambda _: True, absent={}
    )
    # What pytest-xdist reports of the test that a worker died on.
    collector.pytest_runtest_logreport(
        pytest.TestReport(
            "test_plugin.py::test_the_plugin_loads[acme-rl]",
            ("test_plugin.py", None, ""),
            {},
            "failed",
            "worker 'gw0' crashed while running 'test_plugin.py::test_the_plugin_loads[acme-rl]'",
            "???",  # type: ignore[arg-type]
        )
    )
    (result,) = collector.report(created="", seconds=0.0).outcomes
    assert (result.claim, result.subject, result.kind, result.state) == (
        "the-plugin-loads",
        "acme-rl",
        "plugin",
        "fail",
    )
    assert result.reason == "the process that tried it ended without a result"
