"""What a person sees on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from unirl.conformance.report import terminal
from unirl.conformance.report.terminal import print_report
from unirl.conformance.results import Report

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import TRACEBACK, rich_report, small_report


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


def test_the_matrix_has_a_cell_for_each_algorithm_with_its_gap(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rich_report(), capsys).splitlines()
    start = next(i for i, line in enumerate(lines) if "model x engine x algorithm on backend fsdp2" in line)
    assert "at most 5e-05" in lines[start]
    assert lines[start + 1].split() == ["model", "engine", "diffusion-nft", "drpo", "flow-dppo", "flow-grpo", "refl"]
    rows = [line.split() for line in lines[start + 3 : start + 15]]
    assert ["sd3", "trainside", "✓", "0", "✓", "2.6e-08", "✓", "5.2e-08", "✓", "7.8e-08"] in rows
    assert any(row[:2] == ["sd3", "sglang"] and "✗ 1 of 2 fail 0.0123" in " ".join(row) for row in rows)


def test_numbers_are_shown_nearest_to_their_bounds_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(rich_report(), capsys).splitlines()
    start = lines.index("nearest to their bounds, of 60 numbers that were measured")
    assert [line.split()[:2] for line in lines[start + 3 : start + 7]] == [
        ["nan", "1"],
        ["0.31", "1e-06"],
        ["0.0123", "5e-05"],
        ["1.24e-07", "1e-06"],
    ]


def test_gaps_have_reason_and_link_and_what_did_not_run_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(rich_report(), capsys)
    assert "the reason of gap  https://example.org/issues/7?a=1&b=2" in text
    assert "no CUDA device is here\n  engine trainside+sd3@cuda (3 claims)" in "\n".join(
        line.rstrip().removeprefix("○ ") for line in text.splitlines()
    )
    assert "No claim of this run is about these: 2 backend." in text


def test_the_last_line_has_counts_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    last = shown(rich_report(), capsys).splitlines()[-1]
    assert last == "3 claims fail. 132 pass, 3 fail, 2 gap, 96 not run, 65 n/a in 1 min 23 s"


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
    assert all(line.startswith(("\x1b[35m○", "\x1b[1;31m✗")) for line in rows), "one part that did not run decides"


def test_a_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in shown(rich_report(), capsys)


def test_hostile_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "<script>alert('x')</script> & | `a|b` *star*\nsecond line" in shown(rich_report(), capsys)


def test_a_run_in_which_nothing_could_be_tried_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(small_report("not run"), capsys).splitlines()[-1].startswith("Nothing could be tried here.")
    assert shown(small_report("n/a"), capsys).splitlines()[-1].startswith("No claim applies to what was tried.")
    assert (
        shown(small_report("pass", "not run", "gap"), capsys)
        .splitlines()[-1]
        .startswith("Nothing fails: 1 not run and 1 declared gap.")
    )
