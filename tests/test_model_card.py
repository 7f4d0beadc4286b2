"""The card of an export: texts of users and checkpoints are shown as they are, and scores with the sampler they are of."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from small_runs import catalog
from unirl.core.errors import CheckpointError
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.loop.checkpoints import Checkpoint
from unirl.tools.export.card import write_card
from unirl.tools.export.source import RunSource

EVALUATED = {"kind": "evaluated", "step": 0, "time": 1.0, "metrics": {"score_mean": 0.25}, "samples": 32}
NAME = (
    "x\n---\nlicense: mit\n---\n# <script>alert('&amp;')</script> | ![a](https://b.c) [a](javascript:b) **c** _d_ `e` "
    "$f$ ~~g~~ \\* a_b www.h.i j@k.l https://m.n \u202eo"
)
"""Front matter, HTML, tables, images, links, emphasis, code, formulas, and what readers make links of."""
SHOWN = " ".join("".join(letter if letter.isprintable() else " " for letter in NAME).split())


@cache
def planned(recipe: str, *overrides: str) -> Plan:
    return compose(recipe, list(overrides), catalog=catalog())


def source(folder: Path, plan: Plan, *events: Any, overrides: tuple[str, ...] = ()) -> RunSource:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return RunSource(
        folder=folder,
        recorded={"overrides": list(overrides), "dists": {"unirl-core": "0.1.0"}},
        plan=plan,
        learner=plan.trained[0].learner,
        checkpoint=Checkpoint(folder=folder / "step", step=2, state={}),
    )


def card(folder: Path, source: RunSource, *, base: Path | None = None, layout: str | None = "diffusers") -> str:
    base = base or folder / "base"
    base.mkdir(exist_ok=True)
    (folder / "out").mkdir()
    write_card(
        folder / "out", source, base, step=source.checkpoint.step, policy="live", layout=layout, is_pipeline=True
    )
    return (folder / "out" / "README.md").read_text(encoding="utf-8")


def rendered(text: str) -> tuple[dict[str, Any], str]:
    """Front matter, and the HTML that a reader of Markdown with HTML, tables and links makes of the rest."""
    head, rest = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return yaml.safe_load(head), markdown.render(rest)


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_a_name_is_no_markup_in_the_heading_the_front_matter_or_a_table(tmp_path: Path) -> None:
    plan = planned("quickstart", "backend.trains=lora")
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=NAME), recipe=NAME)
    metrics = {f"{NAME}/score_mean": 0.5}
    head, page = rendered(
        card(tmp_path, source(tmp_path, plan, {**EVALUATED, "metrics": metrics}, overrides=(f"run.name={NAME}",)))
    )
    assert head == {"library_name": "diffusers", "tags": ["unirl", "flow-grpo", "lora"]}
    tags = set(re.findall(r"<(\w+)", page))
    assert tags == {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "pre", "code"}
    (heading,) = re.findall("<h1>(.*?)</h1>", page, flags=re.DOTALL)
    assert words(heading) == f"{SHOWN}, step 2"
    (line,) = re.findall("<li>(.*?)</li>", page, flags=re.DOTALL)
    assert words(line) == f"{SHOWN}/score_mean: 0.5 at step 0, 0.5 at step 0"
    # One row for each fact, with two cells.
    rows = dict(re.findall(r"<td>(.*?)</td>\n<td>(.*?)</td>", page, flags=re.DOTALL))
    assert words(rows["recipe"]) == f"{SHOWN} run.name={SHOWN}" and rows["steps"].startswith("2 of ")


@pytest.mark.parametrize("raw", ["https://m.n", "www.h.i", "j@k.l"])
def test_readers_make_no_links_of_a_name(tmp_path: Path, raw: str) -> None:
    """GitHub and the hub look for addresses in the text before escapes are undone."""
    plan = planned("quickstart", "backend.trains=lora")
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=raw))
    heading = card(tmp_path, source(tmp_path, plan)).splitlines()[4]
    assert heading.startswith("# ") and raw not in heading and heading.replace("\\", "") == f"# {raw}, step 2"


def test_a_config_cannot_end_the_block_that_it_is_in(tmp_path: Path) -> None:
    plan = planned("quickstart", "backend.trains=lora")
    text = "a\n```\n<script>b</script>\n`````\n"
    page = rendered(card(tmp_path, source(tmp_path, dataclasses.replace(plan, resolved={"run": {"name": text}}))))[1]
    (block,) = re.findall(r'<pre><code class="language-yaml">(.*?)</code></pre>', page, flags=re.DOTALL)
    assert yaml.safe_load(html.unescape(block)) == {"run": {"name": text}}
    assert "<script" not in page


def test_a_license_of_a_checkpoint_is_no_markup_either(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    license_name = '<img src=x onerror="a()"> | b: c # [d](e) \\u0041 \x7f 🐕'
    # A line of spaces that takes a naive search for its end minutes.
    (base / "README.md").write_text(
        f"---\nlicense: other\nlicense_name: {license_name}\nlicense_link: a{' ' * 50_000}b\n---\n"
    )
    head, page = rendered(card(tmp_path, source(tmp_path, planned("quickstart", "backend.trains=lora")), base=base))
    assert (head["license"], head["license_name"]) == ("other", license_name)
    assert "<img" not in page and "&lt;img src=x" in page and "[d](e)" in page


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"kernel": "euler", "eta": "0", "num_inference_steps": "10", "guidance_scale": "1", "seed": "20000"}),
        (
            ("+eval.sampling.num_inference_steps=4", "+eval.sampling.guidance_scale=2.5", "eval.seed=7"),
            {"kernel": "euler", "eta": "0", "num_inference_steps": "4", "guidance_scale": "2.5", "seed": "7"},
        ),
        (
            ("+eval.sampling.kernel=cps", "+eval.sampling.eta=0.3", "eval.num_prompts=8", "eval.policy=live"),
            {"kernel": "cps", "eta": "0.3", "num_prompts": "8", "policy": "live", "height": "64", "width": "64"},
        ),
    ],
)
def test_scores_are_shown_with_the_sampler_that_they_are_of(
    tmp_path: Path, overrides: tuple[str, ...], expected: dict[str, str]
) -> None:
    """Training has flow-sde with eta 0.7 and the sizes of the recipe."""
    plan = planned("quickstart", "backend.trains=lora", *overrides)
    text = card(tmp_path, source(tmp_path, plan, EVALUATED))
    scores = text.partition("## Held-out scores")[2].partition("## Config")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", scores, flags=re.MULTILINE))
    assert rows["samples"] == "32" and rows.items() >= expected.items()
    assert "flow-sde" not in scores


def test_each_stage_has_its_own_sampler(tmp_path: Path) -> None:
    plan = planned("quickstart-enhancer-joint", "+eval.sampling.image.eta=0.5", "+eval.sampling.image.kernel=cps")
    text = card(tmp_path, source(tmp_path, plan, {**EVALUATED, "metrics": {"image/score_mean": 1.0}}), layout=None)
    assert "| image/kernel | cps |" in text and "| image/eta | 0.5 |" in text
    # Which the recipe gives; text is greedy otherwise.
    assert "| rewrite/temperature | 1 |" in text and "| temperature |" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"metrics": [1]}, "metrics: got a list, expected an object"),
        ({"metrics": {"score_mean": "high"}}, "metrics.score_mean: got 'high', expected a number"),
        ({"metrics": {"score_mean": 10**400}}, "metrics.score_mean: got 1000"),
        ({"step": "0"}, "step: got '0', expected a whole number"),
        ({"samples": []}, "samples: got a list, expected a whole number"),
    ],
)
def test_events_that_are_none_are_refused_with_file_line_and_key(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    run = source(tmp_path, planned("quickstart", "backend.trains=lora"), EVALUATED, {**EVALUATED, **change})
    with pytest.raises(CheckpointError, match=re.escape(f"events.jsonl:2: {says}")):
        card(tmp_path, run)
