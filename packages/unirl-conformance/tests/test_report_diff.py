"""What changed from one report to another."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import pytest
from unirl.conformance.report.diff import compare, print_diff
from unirl.conformance.results import Report
from unirl.conformance.subjects import Selection
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
    diff = compare(small_report(was), small_report(now))
    (change,) = diff.changes
    expected = "worse" if (was, now) in WORSE else "better" if (was, now) in BETTER else "other"
    assert change.direction == expected
    assert diff.got_worse is (expected == "worse")


@pytest.mark.parametrize("was", STATES)
def test_what_is_gone_is_worse_when_it_passed(was: State) -> None:
    old, new = small_report("pass", was), small_report("pass")
    diff = compare(old, new)
    assert [(c.direction, c.new) for c in diff.changes] == [("worse" if was == "pass" else "other", None)]
    assert diff.got_worse is (was == "pass")


@pytest.mark.parametrize("now", STATES)
def test_what_is_new_is_worse_when_it_fails(now: State) -> None:
    diff = compare(small_report("pass"), small_report("pass", now))
    assert [change.old for change in diff.changes] == [None]
    assert diff.got_worse is (now == "fail")


def test_claims_of_one_name_about_other_kinds_are_told_apart() -> None:
    model, reward = subject_info("model", model="one"), subject_info("reward", reward="one")
    old = report_of([claim_info("same", "model")], [model], [outcome("same", model)])
    new = report_of([claim_info("same", "reward")], [reward], [outcome("same", reward)])
    assert [change.new is None for change in compare(old, new).changes] == [True, False]


def test_a_lower_tier_does_not_make_things_gone() -> None:
    old = rich_report()
    new = dataclasses.replace(old, tier="static", outcomes=old.outcomes[:3], claims=old.claims[:1])
    diff = compare(old, new)
    assert not diff.got_worse and diff.changes == ()
    assert diff.num_not_covered == len(old.outcomes) - 3
    assert diff.notes == ("tier: tiny before, static now",)


def test_a_device_that_the_tier_leaves_out_is_not_gone() -> None:
    gpu = subject_info("model", "cuda", model="sd3")
    claims = [claim_info("one", "model")]
    old = report_of(claims, [gpu], [outcome("one", gpu)], tier="gpu")
    assert not compare(old, report_of(claims, [], [])).got_worse
    assert compare(old, report_of(claims, [], [], tier="gpu")).got_worse


def test_cells_that_a_lower_tier_leaves_out_are_not_gone_and_engines_are() -> None:
    cell = subject_info("cell", model="sd3", engine="sglang", algorithm="awm", backend="fsdp2")
    pair = subject_info("engine", engine="sglang", model="sd3")
    claims = [claim_info("one", "cell"), claim_info("two", "engine")]
    old = report_of(claims, [cell, pair], [outcome("one", cell), outcome("two", pair)], tier="full")
    assert compare(old, report_of(claims, [pair], [outcome("two", pair)])).changes == ()
    assert [change.outcome.kind for change in compare(old, report_of(claims, [], [])).changes] == ["engine"]
    assert compare(old, report_of(claims, [pair], [outcome("two", pair)], tier="full")).got_worse


def test_what_was_not_selected_is_not_gone_and_what_was_selected_is() -> None:
    claims = [claim_info("one", "model"), claim_info("two", "model")]
    sd3, wan = subject_info("model", model="sd3"), subject_info("model", model="wan21")
    every = [outcome(claim.name, subject) for claim in claims for subject in (sd3, wan)]
    old = report_of(claims, [sd3, wan], every)
    new = report_of(claims, [sd3], [outcome("one", sd3)])
    selected = Selection(names={"model": ("sd3",)})
    diff = compare(old, new, selected=selected)
    assert [(c.outcome.claim, c.outcome.subject) for c in diff.changes] == [("two", "sd3")]
    assert diff.got_worse and diff.num_not_covered == 2
    narrow = compare(old, new, selected=dataclasses.replace(selected, claims=("one",)))
    assert not narrow.got_worse and narrow.num_not_covered == 3
    assert len(compare(old, new).changes) == 3


@pytest.mark.parametrize(
    ("was", "now", "is_named"),
    [
        (1e-7, 5e-7, False),
        (1e-7, 2e-6, True),
        (2e-6, -1e-7, True),
        (1.0, -1.0, False),
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


def test_the_factor_can_be_chosen() -> None:
    assert compare(with_number(1.0), with_number(3.0), factor=2).numbers
    assert not compare(with_number(1.0), with_number(3.0), factor=4).numbers


def test_another_bound_is_named() -> None:
    (moved,) = compare(with_number(1.0, 2.0), with_number(1.0, 20.0)).numbers
    assert (moved.old.bound, moved.new.bound) == (2.0, 20.0)


def test_another_suite_and_environment_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    old = small_report("pass", "fail")
    here = dataclasses.replace(
        old.environment, devices=("H100",), packages={"torch": "2.14.0"}, engines={"apart": "torch 2.11.0, apart 1.6"}
    )
    new = dataclasses.replace(
        small_report("fail", "pass", "n/a"), suite="f" * 16, environment=here, dists={"unirl-model-sd3": "0.2.0"}
    )
    diff = compare(old, new)
    assert diff.notes == (
        f"suite: 0123456789abcdef before, {'f' * 16} now; claims may have changed under the same name",
        "GPU: none before, H100 now",
        "package diffusers: 0.42.1 before, absent now",
        "package torch: 2.13.0 before, 2.14.0 now",
        "engine apart: torch 2.11.0, apart 1.5 before, torch 2.11.0, apart 1.6 now",
        "dist unirl-model-sd3: 0.1.0 before, 0.2.0 now",
    )
    print_diff(diff)
    text = capsys.readouterr().out
    assert "✓ pass -> ✗ fail  claim-0 on model sd3: the reason of fail" in text
    assert "✗ fail -> ✓ pass  claim-1 on model sd3" in text
    assert "new -> – n/a  claim-2 on model sd3" in text
    assert text.index("\nbetter: 1") < text.index("\nworse: 1"), "of a long list people see the end"
    assert text.splitlines()[-1] == "1 worse, 1 better, 1 other."


def test_no_change_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_diff(compare(with_number(1e-8, 1.0), with_number(1e-3, 1.0)), stderr=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "one on model sd3: gap 1e-08 -> 0.001, at most 1" in err
    assert err.splitlines()[-1] == "No state changed."
