"""Output on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from unirl.conformance.report import terminal
from unirl.conformance.report.terminal import MAX_SUBJECTS, print_report
from unirl.conformance.results import Report

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import TRACEBACK, claim_info, outcome, report_of, rich_report, small_report, subject_info


def shown(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    print_report(report)
    return capsys.readouterr().out


def test_every_failure_is_shown_in_full_with_the_command_that_tries_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(rich_report(), capsys)
    assert "FAIL  steps-are-stochastic-where-asked  on engine sglang+sd3" in text
    assert "the request says steps [0, 2], the engine was stochastic at [0, 1, 2, 3]" in text
    assert "largest difference: 0.31 (over 1e-06)" in text
    assert "What steps-are-stochastic-where-asked gives to a user" in text
    assert "look for a scheduler in the engine" in text
    assert "unirl conformance --claim steps-are-stochastic-where-asked --engine sglang --model sd3\n" in text
    for line in TRACEBACK.splitlines():
        assert line in text


def test_claims_that_fail_with_one_error_are_named_below_the_first_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    sd3, wan = subject_info("model", model="sd3"), subject_info("model", model="wan22")
    claims = [claim_info("schedule-falls", "model"), claim_info("velocity-has-a-gradient", "model")]
    failed = [outcome(claim.name, part, "fail", "sigmas must fall") for part in (sd3, wan) for claim in claims]
    text = shown(report_of(claims, [sd3, wan], failed), capsys)
    assert text.count("FAIL") == 1 and "FAIL  schedule-falls  on model sd3" in text
    assert "the same error in 3 more claims: model wan22 (2 claims), model sd3 (1 claim)" in text
    assert "4 fail" in text


def test_numbers_about_parts_come_before_packaging(capsys: pytest.CaptureFixture[str]) -> None:
    sd3 = subject_info("model", model="sd3")
    plugin = subject_info("plugin", dist="unirl-model-sd3")
    claims = [claim_info("its-package-is-typed", "plugin"), claim_info("velocity-has-a-gradient", "model")]
    failed = [
        outcome(claims[0].name, plugin, "fail", "no py.typed"),
        outcome(claims[1].name, sd3, "fail", "no gradient"),
    ]
    text = shown(report_of(claims, [plugin, sd3], failed), capsys)
    order = ["model alone", "model  ", "plugin  ", "no gradient", "no py.typed"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


def test_a_grid_has_each_engine_and_algorithm_with_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rich_report(), capsys).splitlines()
    start = lines.index("Diffusion models on cpu: state, largest log-prob mismatch")
    rows = {line.split()[0]: line.split()[1:] for line in lines[start + 3 : start + 15] if line.split()}
    assert rows["trainside"] == ["✓", "✓", "✓", "✓"]
    assert rows["sglang"] == ["✓", "✓", "✗", "✓"]
    assert rows["flow-grpo"][2] == "✗0.01"


def test_numbers_are_shown_nearest_to_their_bounds_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rich_report(), capsys).splitlines()
    start = lines.index("nearest to their bounds, of 60 numbers that were measured")
    assert [line.split()[:2] for line in lines[start + 3 : start + 7]] == [
        ["nan", "1"],
        ["0.31", "1e-06"],
        ["0.0123", "5e-05"],
        ["1.24e-07", "1e-06"],
    ]


def test_kinds_with_many_subjects_have_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(rich_report(), capsys)
    # 4 models x 3 engines x 5 algorithms x 2 backends, less those of bagel and refl that are n/a: 3 models and 4
    # algorithms with two engines, and all 40 of vllm-omni, which is absent.
    assert f"cell        {3 * 2 * 4 * 2 + 4 * 5 * 2} subjects" in text
    num_engines = 4 * 3
    assert "engine      sglang+sd3" in text and num_engines <= MAX_SUBJECTS


def test_gaps_have_reason_and_link_and_what_did_not_run_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(line.rstrip().removeprefix("○ ") for line in shown(rich_report(), capsys).splitlines())
    assert "the reason of gap\n  https://example.org/issues/7?a=1&b=2" in text
    assert "no file system of its own is here\n  tracker wandb (1 claim)" in text
    assert "no CUDA device is here\n  3 claims" in text


def test_the_last_lines_have_counts_for_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(rich_report(), capsys).splitlines()[-2:] == [
        "cpu: 3 claims fail. 132 pass, 3 fail, 2 gap, 93 not run, 65 n/a in 1 min 23 s",
        "cuda: Nothing could be tested here. 0 pass, 0 fail, 0 gap, 3 not run, 0 n/a in 1 min 23 s",
    ]
    assert shown(small_report("pass"), capsys).splitlines()[-1].startswith("Nothing fails. 1 pass, 0 fail")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_a_table_is_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), width=width, color_system=None)
    monkeypatch.setattr(terminal, "console", lambda: out)
    print_report(rich_report())
    assert isinstance(out.file, io.StringIO)
    tables = out.file.getvalue().split("FAIL")[0]
    assert max(len(line) for line in tables.splitlines()) <= width
    for name in ("diffusion-nft", "flow-grpo", "wan21", "vllm-omni"):
        assert name in tables


def test_what_did_not_run_is_never_green(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    monkeypatch.setattr(terminal, "console", lambda: out)
    print_report(small_report("not run", "n/a", "fail"))
    assert isinstance(out.file, io.StringIO)
    green = "\x1b[32m"
    assert green not in out.file.getvalue()
    print_report(small_report("pass", "not run"))
    rows = [line for line in out.file.getvalue().splitlines() if "   model   sd3" in line]
    assert len(rows) == 2
    assert all(line.startswith(("\x1b[35m◐", "\x1b[1;31m✗")) for line in rows), "one part that did not run decides"


def test_a_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in shown(rich_report(), capsys)


def test_hostile_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "<script>alert('x')</script> & | `a|b` *star*\nsecond line" in shown(rich_report(), capsys)


def test_a_run_in_which_nothing_could_be_tried_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(small_report("not run"), capsys).splitlines()[-1].startswith("Nothing could be tested here.")
    text = shown(small_report("n/a"), capsys)
    assert text.splitlines()[-1].startswith("No claim applies to the selection.")
    assert "the reason of n/a" in text, "the reasons say why"
    assert (
        shown(small_report("pass", "not run", "gap"), capsys)
        .splitlines()[-1]
        .startswith("Nothing fails: 1 not run and 1 declared gap.")
    )
