"""Changes from one report to another."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import pytest
from unirl.conformance.report.diff import FACTOR, compare, print_diff
from unirl.conformance.results import Report, Untried
from unirl.conformance.verdicts import STATES, Number, State

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import claim_info, outcome, report_of, rich_report, small_report, subject_info

WORSE: set[tuple[State, State]] = {
    ("pass", "fail"),
    ("pass", "not run"),
    ("pass", "gap"),
    ("gap", "fail"),
    ("not run", "fail"),
    ("n/a", "fail"),
}
BETTER: set[tuple[State, State]] = {("fail", "pass"), ("gap", "pass"), ("not run", "pass"), ("n/a", "pass")}
TRIED: list[State] = [state for state in STATES if state != "n/a"]


def with_number(value: float, bound: float | None = None) -> Report:
    subject = subject_info("model", model="sd3")
    result = outcome("one", subject, numbers=(Number(name="gap", value=value, bound=bound),))
    return report_of([claim_info("one", "model")], [subject], [result])


def test_two_equal_reports_differ_in_nothing() -> None:
    diff = compare(rich_report(), rich_report())
    assert (diff.notes, diff.changes, diff.numbers, diff.num_not_covered) == ((), (), (), 0)
    assert not diff.got_worse


@pytest.mark.parametrize(("was", "now"), list(itertools.permutations(STATES, 2)))
def test_each_change_of_a_state_has_its_direction(was: State, now: State) -> None:
    # The claim before it is there in both, so that its subject is.
    diff = compare(small_report("gap", was), small_report("gap", now))
    (change,) = diff.changes
    expected = "worse" if (was, now) in WORSE else "better" if (was, now) in BETTER else "other"
    assert change.direction == expected
    assert diff.got_worse is (expected == "worse")


@pytest.mark.parametrize("was", TRIED)
def test_a_claim_that_is_no_longer_made_is_worse_when_it_passed(was: State) -> None:
    old, new = small_report("pass", was), small_report("pass")
    diff = compare(old, new)
    assert [(c.direction, c.new) for c in diff.changes] == [("worse" if was == "pass" else "other", None)]
    assert diff.got_worse is (was == "pass")


@pytest.mark.parametrize("now", TRIED)
def test_what_is_new_is_worse_when_it_fails(now: State) -> None:
    diff = compare(small_report("pass"), small_report("pass", now))
    assert [change.old for change in diff.changes] == [None]
    assert diff.got_worse is (now == "fail")


def test_claims_of_one_name_about_other_kinds_are_told_apart() -> None:
    model, reward = subject_info("model", model="one"), subject_info("reward", reward="one")
    old = report_of([claim_info("same", "model")], [model], [outcome("same", model)])
    new = report_of([claim_info("same", "reward")], [reward], [outcome("same", reward)])
    assert sorted(change.new is None for change in compare(old, new).changes) == [False, True]


def test_a_lower_tier_does_not_make_things_gone() -> None:
    old = rich_report()
    static = [claim for claim in old.claims if claim.tier == "static"]
    kept = tuple(one for one in old.outcomes if one.claim in {claim.name for claim in static})
    new = dataclasses.replace(old, tier="static", outcomes=kept, claims=tuple(static))
    diff = compare(old, new)
    assert not diff.got_worse and diff.changes == ()
    assert len(kept) == 3 and diff.num_not_covered == len(old.outcomes) - 3
    assert diff.notes == ("tier: tiny before, static now",)


def test_a_device_that_the_tier_leaves_out_is_not_gone() -> None:
    gpu = subject_info("model", "cuda", model="sd3")
    claims = [claim_info("one", "model")]
    old = report_of(claims, [gpu], [outcome("one", gpu)], tier="gpu")
    assert not compare(old, report_of(claims, [], [])).got_worse
    assert compare(old, report_of(claims, [], [], tier="gpu")).got_worse


def test_a_device_that_is_absent_now_is_worse() -> None:
    cpu, gpu = subject_info("model", model="sd3"), subject_info("model", "cuda", model="sd3")
    claims = [claim_info("one", "model")]
    old = report_of(claims, [cpu, gpu], [outcome("one", cpu), outcome("one", gpu)], tier="gpu")
    absent = Untried(state="not run", kind="model", device="cuda", num_claims=1, reason="no CUDA device is here")
    new = report_of(claims, [cpu], [outcome("one", cpu)], tier="gpu", untried=(absent,))
    assert compare(old, new).got_worse


def test_combinations_that_a_lower_tier_leaves_out_are_not_gone_and_engines_are() -> None:
    cell = subject_info("cell", model="sd3", engine="sglang", algorithm="awm", backend="fsdp2")
    pair = subject_info("engine", engine="sglang", model="sd3")
    claims = [claim_info("one", "cell"), claim_info("two", "engine")]
    old = report_of(claims, [cell, pair], [outcome("one", cell), outcome("two", pair)], tier="full")
    assert compare(old, report_of(claims, [pair], [outcome("two", pair)])).changes == ()
    assert [str(change).split()[-1] for change in compare(old, report_of(claims, [], [])).changes] == ["sglang+sd3"]
    assert compare(old, report_of(claims, [pair], [outcome("two", pair)], tier="full")).got_worse


def test_a_combination_is_withdrawn_while_its_parts_are_there_and_gone_when_one_is_not() -> None:
    names = {"model": "sd3", "engine": "sglang", "algorithm": "awm", "backend": "fsdp2"}
    cell, other = subject_info("cell", **names), subject_info("cell", **{**names, "model": "wan21"})
    alone = [subject_info("model", model="sd3"), subject_info("algorithm", algorithm="awm")]
    claims = [claim_info("one", "cell"), claim_info("two", "model"), claim_info("three", "algorithm")]
    outcomes = [outcome("one", cell), outcome("one", other), outcome("two", alone[0]), outcome("three", alone[1])]
    old = report_of(claims, [cell, other, *alone], outcomes)
    (change,) = compare(old, report_of(claims, [other, *alone], outcomes[1:])).changes
    assert change.direction == "other" and str(change).startswith("✓ pass -> – n/a")
    lost = compare(old, report_of(claims, [other, alone[1]], [outcomes[1], outcomes[3]])).changes
    assert [change.direction for change in lost] == ["worse", "worse"]
    assert all(str(change).startswith("✓ pass -> no longer tested") for change in lost)


def test_what_was_not_selected_is_not_gone_and_what_was_selected_is() -> None:
    claims = [claim_info("one", "model"), claim_info("two", "model")]
    sd3, wan = subject_info("model", model="sd3"), subject_info("model", model="wan21")
    every = [outcome(claim.name, subject) for claim in claims for subject in (sd3, wan)]
    old = report_of(claims, [sd3, wan], every)
    new = report_of(claims[:1], [sd3], [outcome("one", sd3)], selection=("--model=sd3",))
    diff = compare(old, new)
    assert [str(change).split("  ")[1] for change in diff.changes] == ["two on model sd3"]
    assert diff.got_worse and diff.num_not_covered == 2
    narrow = compare(old, dataclasses.replace(new, selection=("--model=sd3", "--claim=one")))
    assert not narrow.got_worse and narrow.num_not_covered == 3
    without = compare(old, dataclasses.replace(new, selection=("--model=sd3", "--without=two")))
    assert not without.got_worse and without.num_not_covered == 3
    assert compare(old, dataclasses.replace(new, selection=("--model=sd3", "--without=one"))).got_worse
    assert len(compare(old, dataclasses.replace(new, selection=())).changes) == 3


@pytest.mark.parametrize(
    ("was", "now", "is_named"),
    [
        (1e-7, 5e-7, False),
        (1e-7, 2e-6, True),
        (2e-6, -1e-7, True),
        (1.0, -1.0, False),
        (1.0, FACTOR, False),
        (1.0, 1.1 * FACTOR, True),
        (0.0, 0.0, False),
        (0.0, 1e-12, True),
        (1.0, math.nan, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.inf, 1.0, True),
    ],
)
def test_numbers_are_named_beyond_the_factor(was: float, now: float, is_named: bool) -> None:
    diff = compare(with_number(was), with_number(now))
    assert bool(diff.numbers) is is_named
    assert not diff.got_worse


def test_another_bound_is_named() -> None:
    diff = compare(with_number(1.0, 2.0), with_number(1.0, 20.0))
    assert diff.numbers == ("one on model sd3: gap 1 -> 1, at most 2 -> at most 20",)


def test_another_environment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    old = small_report("pass", "fail")
    here = dataclasses.replace(
        old.environment, devices=("H100",), packages={"torch": "2.14.0"}, engines={"apart": "torch 2.11.0, apart 1.6"}
    )
    new = dataclasses.replace(small_report("fail", "pass", "gap"), environment=here, dists={"unirl-model-sd3": "0.2.0"})
    diff = compare(old, new)
    assert diff.notes == (
        "GPU: none before, H100 now",
        "package torch: 2.13.0 before, 2.14.0 now",
        "engine apart: torch 2.11.0, apart 1.5 before, torch 2.11.0, apart 1.6 now",
        "dist unirl-model-sd3: 0.1.0 before, 0.2.0 now",
        "package diffusers: 0.42.1 before, absent now",
    )
    print_diff(diff)
    text = capsys.readouterr().out
    assert "✓ pass -> ✗ fail  claim-0 on model sd3: the reason of fail" in text
    assert "✗ fail -> ✓ pass  claim-1 on model sd3" in text
    assert "new -> △ gap  claim-2 on model sd3" in text
    assert text.index("\nbetter\n") < text.index("\nworse\n"), "of a long list people see the end"
    assert text.splitlines()[-1] == "1 worse, 1 better, 1 other."


def test_no_change_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_diff(compare(with_number(1e-8, 1.0), with_number(1e-3, 1.0)), stderr=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "one on model sd3: gap 1e-08 -> 0.001, at most 1" in err
    assert err.splitlines()[-1] == "No state changed."
