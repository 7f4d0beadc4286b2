"""MATRIX.md, badges and the files of a report."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import pytest
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.report.write import write_reports
from unirl.conformance.results import load
from unirl.conformance.verdicts import State
from unirl.core.errors import RecipeError

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import claim_info, outcome, report_of, rich_report, small_report, subject_info


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table of a Markdown file; a bar after a backslash divides nothing."""
    result: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            result[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif result[-1]:
            result.append([])
    return [table for table in result if table]


def test_the_matrix_depends_on_the_report_alone() -> None:
    report = rich_report()
    shuffled = dict(random.Random(0).sample(sorted(report.dists.items()), len(report.dists)))
    later = dataclasses.replace(report, dists=shuffled, created="2026-02-03T23:59:59+00:00", seconds=1.0)
    assert matrix_md(later) == matrix_md(report), "neither the time of day nor the order of a mapping is in it"


def test_what_engines_run_with_is_in_the_matrix_where_there_are_any() -> None:
    report = rich_report()
    assert ["apart", "torch 2.11.0, apart 1.5"] in tables(matrix_md(report))[0]
    alone = dataclasses.replace(report, environment=dataclasses.replace(report.environment, engines={}))
    assert "environments of their own" not in matrix_md(alone)


def test_rows_have_as_many_cells_as_their_head() -> None:
    result = tables(matrix_md(rich_report()))
    assert len(result) > 10
    for table in result:
        assert {len(row) for row in table} == {len(table[0])}, table[0]


def test_each_cell_has_its_state_and_its_gap() -> None:
    text = matrix_md(rich_report())
    assert "on backend veomni, cpu\n\nState and log-prob gap between rollout and replay, at most 5e-05." in text
    row = "| sd3 | sglang | ✓ 5.2e-08 | ✓ 7.8e-08 | ✓ 1.3e-08 | [✗ 1 of 2 fail](#failures) 0.0123 |"
    assert row in text
    assert "| wan21 | vllm-omni | [○ not run](#not-run) |" in text


def test_links_lead_to_anchors_of_the_page() -> None:
    text = matrix_md(rich_report())
    heads = {
        re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }
    anchors = set(re.findall(r'<a id="([^"]+)">', text)) | heads
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_hostile_text_stays_text() -> None:
    text = matrix_md(rich_report())
    assert "<script" not in text
    assert "&lt;script&gt;alert('x')&lt;/script&gt; &amp; \\| `a\\|b` \\*star\\* second line" in text


def test_gaps_what_did_not_run_and_numbers_are_listed_with_their_reasons() -> None:
    text = matrix_md(rich_report())
    assert "on model **bagel**:\n  the reason of gap (<https://example.org/issues/7?a=1&b=2>)" in text
    assert "- ○ no CUDA device is here<br>" in text
    assert "engine trainside+sd3@cuda (3)" in text
    assert "| log-prob gap | 0.0123 | 5e-05 | sd3+sglang+flow-grpo+fsdp2 | 48 |" in text
    assert "– 1 claim and all claims about 32 of kind cell." in text
    assert "through-sampler" not in text, "what is n/a is counted"


def test_sections_without_entries_say_so() -> None:
    assert matrix_md(small_report("pass")).count("None.") == 3


@pytest.mark.parametrize(
    ("states", "message", "color"),
    [
        (["pass", "pass"], "2 pass", "brightgreen"),
        (["pass", "n/a"], "1 pass", "brightgreen"),
        (["pass", "gap"], "1 pass, 1 gap", "yellowgreen"),
        (["pass", "pass", "gap", "not run"], "2 pass, 1 gap, 1 not run", "blue"),
        (["pass", "not run", "fail"], "1 fail, 1 pass, 1 not run", "red"),
        (["not run", "n/a"], "1 not run", "lightgrey"),
        (["n/a"], "n/a", "lightgrey"),
    ],
)
def test_a_badge_is_only_bright_where_everything_ran_and_holds(
    tmp_path: Path, states: list[State], message: str, color: str
) -> None:
    write_reports(small_report(*states), tmp_path)
    result = json.loads((tmp_path / "badges" / "unirl-model-sd3.json").read_text())
    assert result == {"schemaVersion": 1, "label": "conformance", "message": message, "color": color}


def test_all_files_are_written_and_no_part_is_left(tmp_path: Path) -> None:
    report = rich_report()
    folder = tmp_path / "new" / "out"
    written = write_reports(report, folder)
    assert {path.name for path in written if path.parent == folder} == {
        "conformance.json",
        "conformance.html",
        "MATRIX.md",
    }
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(written)
    dists = {dist for subject in report.subjects if subject.kind != "backend" for dist in subject.dists}
    assert len(written) == 3 + len(dists)
    again = load(folder / "conformance.json")
    assert matrix_md(again) == matrix_md(report), "a report that was read back says the same"
    assert write_reports(report, folder) == written, "over those that are there"


def test_a_dist_cannot_write_outside_of_the_folder(tmp_path: Path) -> None:
    subject = subject_info("plugin", dist="../../evil")
    report = report_of([claim_info("one", "plugin")], [subject], [outcome("one", subject)])
    folder = tmp_path / "a" / "b"
    assert all(path.resolve().is_relative_to(folder) for path in write_reports(report, folder))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_a_file_counts_what_is_n_a_and_is_read_back_without_its_reasons(tmp_path: Path) -> None:
    report = rich_report()
    write_reports(report, tmp_path)
    lines = (tmp_path / "conformance.json").read_text().splitlines()
    tried = [one for one in report.outcomes if one.state not in ("n/a", "not run")]
    assert sum('"state": ' in line and "not run" not in line for line in lines) == len(tried)
    assert not any('"state": "n/a"' in line for line in lines)
    again = load(tmp_path / "conformance.json")
    assert again.counts == report.counts
    plain = [dataclasses.replace(o, reason="" if o.state == "n/a" else o.reason, seconds=0.0) for o in report.outcomes]
    assert repr([dataclasses.replace(o, seconds=0.0) for o in again.outcomes]) == repr(plain)


def test_claims_that_were_not_tried_are_not_taken_for_n_a(tmp_path: Path) -> None:
    report = small_report("pass", "n/a", "pass")
    partial = dataclasses.replace(report, outcomes=report.outcomes[:2])
    write_reports(partial, tmp_path)
    again = load(tmp_path / "conformance.json")
    assert [(o.claim, o.state) for o in again.outcomes] == [("claim-0", "pass"), ("claim-1", "n/a")]


def test_a_line_that_was_taken_out_by_hand_is_missed(tmp_path: Path) -> None:
    write_reports(small_report("pass", "n/a", "pass"), tmp_path)
    path = tmp_path / "conformance.json"
    kept = [line for line in path.read_text().splitlines() if '"claim": "claim-2"' not in line]
    path.write_text("\n".join(kept).replace("},\n ]", "}\n ]"))
    with pytest.raises(RecipeError, match="2 claims about model 'sd3' have no outcome, and 1 are counted as n/a"):
        load(path)
