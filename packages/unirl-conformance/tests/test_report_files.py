"""MATRIX.md, and the file that a report is read back from."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import pytest
from unirl.conformance.report.file import load, to_json
from unirl.conformance.report.matrix import matrix_md
from unirl.conformance.report.words import short_number
from unirl.conformance.report.write import write_reports
from unirl.conformance.results import Report, Untried
from unirl.conformance.verdicts import Number, State
from unirl.core.errors import RecipeError

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import claim_info, outcome, report_of, rich_report, small_report, subject_info

TRIED: tuple[State, ...] = ("pass", "fail", "gap")


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every table of a Markdown file; a bar after a backslash divides nothing."""
    result: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            result[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif result[-1]:
            result.append([])
    return [table for table in result if table]


def grid(text: str) -> list[str]:
    """Lines of the one grid."""
    (block,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    return block.splitlines()


def test_the_matrix_depends_on_the_report_alone() -> None:
    report = rich_report()
    shuffled = dict(random.Random(0).sample(sorted(report.dists.items()), len(report.dists)))
    later = dataclasses.replace(report, dists=shuffled, created="2026-02-03T23:59:59+00:00", seconds=1.0)
    assert matrix_md(later) == matrix_md(report), "neither the time of day nor the order of a mapping is in it"


def test_what_engines_run_with_is_in_the_matrix_where_there_are_any() -> None:
    report = rich_report()
    assert ["engine apart", "torch 2.11.0, apart 1.5"] in tables(matrix_md(report))[-1]
    alone = dataclasses.replace(report, environment=dataclasses.replace(report.environment, engines={}))
    assert "engine apart" not in matrix_md(alone)


def test_columns_of_tables_are_aligned_as_text() -> None:
    text = matrix_md(rich_report())
    assert len(tables(text)) == 3
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(line) for line in table.splitlines()}) == 1
    for cells in tables(text):
        assert {len(row) for row in cells} == {len(cells[0])}, cells[0]


def test_a_grid_has_models_alone_with_engines_and_with_algorithms() -> None:
    lines = grid(matrix_md(rich_report()))
    assert [line.split() for line in lines[:2]] == [["qwen"], ["bagel", "-image", "sd3", "wan21"]]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if len(line.split()) > 1}
    # Alone: "gradient norm" is not a mismatch. bagel's LoRA layers are a gap.
    assert rows["model"] == ["alone", "△", "✓", "✓", "✓"]
    assert rows["sglang"] == ["✓", "✓", "✗", "✓"] and rows["vllm-omni"] == ["○", "○", "○", "○"]
    # Two engines passed, and vllm-omni is absent. Of both and two backends the largest of (n % 7) * 1.3e-08 for the
    # n-th cell, such as 36, 37, 46 and 47 of qwen-image: 6.5e-08. sd3 has the one that fails, with 0.0123.
    assert rows["flow-grpo"] == ["○", "◐6e-8", "✗0.01", "◐8e-8"]
    assert max(map(len, lines)) <= 120


def test_a_name_of_many_words_is_broken_before_dashes() -> None:
    long = subject_info("model", model="hunyuan-video15-i2v")
    text = matrix_md(report_of([claim_info("one", "model")], [long], [outcome("one", long)]))
    assert grid(text) == ["            hunyuan", "            -video15", "            -i2v", "model alone ✓"]


def test_grids_wider_than_the_page_have_several_blocks() -> None:
    models = [subject_info("model", model=f"model{place:03d}") for place in range(20)]
    text = matrix_md(report_of([claim_info("one", "model")], models, [outcome("one", one) for one in models]))
    lines = grid(text)
    assert max(map(len, lines)) <= 120 and sum("model alone" in line for line in lines) == 2
    assert all(f"model{place:03d}" in text for place in range(20))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.19e-7, "1e-7"), (-4.8e-7, "-5e-7"), (0.0123, "0.01"), (31.4, "31"), (2e5, "2e5"), (9.6e-8, "1e-7")],
)
def test_numbers_of_a_grid_have_one_digit(value: float, text: str) -> None:
    assert short_number(value) == text


def test_hostile_text_stays_text() -> None:
    text = matrix_md(rich_report())
    assert "<script" not in text
    assert "&lt;script&gt;alert('x')&lt;/script&gt; &amp; \\| `a\\|b` \\*star\\* second line" in text


def test_failures_gaps_and_what_did_not_run_are_listed_with_their_reasons() -> None:
    text = matrix_md(rich_report())
    assert "on model **bagel**: the reason of gap (<https://example.org/issues/7?a=1&b=2>)" in text
    assert "✗ steps-are-stochastic-where-asked on engine **sglang+sd3**: the request says steps \\[0, 2\\]" in text
    assert "- ○ 92 claims: engine 'vllm-omni' needs the Python package 'vllm', which is not installed here" in text
    assert ["0.0123", "5e-05", "log-prob gap", "first-update-has-ratio-1", "sd3+sglang+flow-grpo+fsdp2"] in tables(
        text
    )[1]
    assert "through-sampler" not in text, "what is n/a is counted"


def test_cpu_and_gpu_are_apart() -> None:
    text = matrix_md(rich_report())
    # 12 pairs of a model and an engine with three claims each: one n/a, two fail, and 12 of vllm-omni not run.
    assert "- **On the CPU.** 3 claims fail. ✓ 132 pass, ✗ 3 fail, △ 2 gap, ○ 93 not run, – 65 n/a." in text
    assert "- **On a GPU.** Nothing was tested: no CUDA device is here. ○ 3 not run." in text
    assert "## On a GPU" not in text
    gpu = subject_info("model", "cuda", model="sd3")
    both = report_of([claim_info("one", "model")], [gpu], [outcome("one", gpu)])
    assert "## On a GPU\n\n### Diffusion models" in matrix_md(both) and "On the CPU" not in matrix_md(both)


def test_sections_without_entries_are_left_out() -> None:
    text = matrix_md(small_report("pass"))
    assert not any(f"### {title}" in text for title in ("Failures", "Gaps", "Not run", "Nearest"))


def test_all_files_are_written_over_those_that_are_there(tmp_path: Path) -> None:
    report = rich_report()
    folder = tmp_path / "a" / "b"
    written = write_reports(report, folder)
    assert [path.name for path in written] == ["conformance.json", "conformance.html", "MATRIX.md"]
    assert sorted(folder.rglob("*")) == sorted(written)
    assert write_reports(report, folder) == written


def plain(report: Report) -> Report:
    """Without what a file does not hold: texts of claims, and reasons of what is n/a."""
    untried: dict[tuple[str, str, str, str], int] = {}
    for one in report.untried:
        key = (one.state, one.kind, one.device, one.reason if one.state == "not run" else "")
        untried[key] = untried.get(key, 0) + one.num_claims
    return dataclasses.replace(
        report,
        claims=tuple(dataclasses.replace(one, proves=(), meaning="", if_it_fails="") for one in report.claims),
        outcomes=tuple(
            dataclasses.replace(
                one, numbers=tuple(dataclasses.replace(each, value=float(f"{each.value:.4g}")) for each in one.numbers)
            )
            for one in sorted(report.outcomes, key=lambda one: (one.kind, one.subject, one.claim))
        ),
        untried=tuple(
            Untried(state=state, kind=kind, device=device, reason=reason, num_claims=count)  # type: ignore[arg-type]
            for (state, kind, device, reason), count in sorted(untried.items())
        ),
    )


def test_a_report_that_is_read_back_is_the_same(tmp_path: Path) -> None:
    subject = subject_info("model", "cuda", model="sd3")
    twice = (Number(name="gap", value=1e-300, bound=1.0), Number(name="gap", value=-0.1, bound=0.0))
    on_gpu = report_of([claim_info("one", "model")], [subject], [outcome("one", subject, numbers=twice)])
    for report in (rich_report(), on_gpu, small_report("not run", "n/a"), report_of([], [], [])):
        path = tmp_path / "conformance.json"
        path.write_text(to_json(report), encoding="utf-8")
        again = load(path)
        # Not a number is not equal to itself.
        assert repr(plain(again)) == repr(plain(report))
        assert again.counts == report.counts
        assert matrix_md(again) == matrix_md(report) and to_json(again) == to_json(report)


def test_a_file_has_a_line_for_each_outcome_and_no_times() -> None:
    report = rich_report()
    lines = [line.strip().rstrip(",") for line in to_json(report).splitlines()]
    assert '"closes-twice": "pass"' in lines
    assert '"first-update-has-ratio-1": ["fail",["log-prob gap",0.0123,5e-05],"the gap is too large"]' in lines
    link = "https://example.org/issues/7?a=1&b=2"
    assert f'"lora-matches-the-stated-layers": ["gap","the reason of gap","{link}"]' in lines
    counts = {state: sum(f': "{state}"' in line or f': ["{state}",' in line for line in lines) for state in TRIED}
    assert counts == {state: report.count(state) for state in TRIED}
    (absent,) = (line for line in lines if line.startswith('"not run": {"no file system of its own'))
    assert absent == '"not run": {"no file system of its own is here":["survives-a-full-disk"]}'
    (no_gpu,) = (line for line in lines if "no CUDA device is here" in line)
    assert json.loads(no_gpu)["num_claims"] == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("schema"), "not a conformance.json"),
        (lambda data: data.update(schema=2), "got schema 2, expected 3"),
        (lambda data: data.pop("claims"), "does not follow schema 3"),
        (lambda data: data["results"]["cpu"]["model"].update(wan21={}), "does not follow schema 3"),
        (lambda data: data["results"]["cpu"]["model"]["sd3"].update({"claim-0": "passed"}), "got state 'passed'"),
        (lambda data: data["results"]["cpu"]["model"]["sd3"].update({"claim-7": "pass"}), "does not follow schema 3"),
    ],
)
def test_a_file_that_was_changed_by_hand_is_refused(tmp_path: Path, change: object, says: str) -> None:
    data = json.loads(to_json(small_report("pass", "gap")))
    change(data)  # type: ignore[operator]
    path = tmp_path / "conformance.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RecipeError, match=says):
        load(path)
