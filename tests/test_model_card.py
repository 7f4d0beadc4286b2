"""The card of an export: texts of users and checkpoints are shown as they are, and scores with the sampler they are of."""

from __future__ import annotations

import ast
import dataclasses
import html
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from small_runs import catalog
from unirl.core.errors import CheckpointError, RunFolderError
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


def card(
    folder: Path,
    source: RunSource,
    *,
    base: Path | None = None,
    layout: str | None = "diffusers",
    is_pipeline: bool = True,
) -> str:
    base = base or folder / "base"
    base.mkdir(exist_ok=True)
    if is_pipeline:
        pipeline = {"sd3": "StableDiffusion3Pipeline", "wan21": "WanPipeline"}.get(source.learner.model.name, "Unknown")
        (base / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (folder / "out").mkdir()
    write_card(
        folder / "out",
        source,
        base,
        name="out",
        step=source.checkpoint.step,
        policy="live",
        layout=layout,
        is_pipeline=is_pipeline,
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
    assert head == {
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["unirl", "reinforcement-learning", "flow-grpo", "lora"],
    }
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
    (heading,) = re.findall("^# .*", card(tmp_path, source(tmp_path, plan)).partition("\n## ")[0], flags=re.MULTILINE)
    assert raw not in heading and heading.replace("\\", "") == f"# {raw}, step 2"


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


KEPT = {"kind": "images", "step": 0, "time": 1.0, "key": "eval"}


def keep(folder: Path, *samples: tuple[int, str, str, str]) -> None:
    """Samples of a run as the tracker `report` leaves them: step, key, file and prompt."""
    media = folder / "media"
    media.mkdir()
    with (media / "index.jsonl").open("w", encoding="utf-8") as index:
        for step, key, file, prompt in samples:
            if not file.startswith(".."):
                (media / file).write_bytes(f"{file} of {step}".encode())
            line = {**KEPT, "step": step, "key": key, "samples": [{"file": file, "prompt": prompt}]}
            index.write(f"{json.dumps(line)}\n")


def test_the_card_shows_held_out_samples_of_the_last_evaluation_up_to_its_step(tmp_path: Path) -> None:
    keep(
        tmp_path,
        (0, "eval", "early.png", "a dog"),
        (2, "train", "train.png", "a dog"),
        (2, "eval", "one.png", "a dog"),
        (2, "eval", "two.png", "a dog"),
        (2, "eval", "three.png", NAME),
        (2, "eval", "../events.jsonl", "a file elsewhere"),
        (3, "eval", "late.png", "a dog"),
    )
    head, page = rendered(card(tmp_path, source(tmp_path, planned("quickstart", "backend.trains=lora"))))
    files = {path.name: path.read_text() for path in (tmp_path / "out" / "samples").iterdir()}
    assert files == {"0.png": "one.png of 2", "1.png": "three.png of 2"}
    assert head["widget"] == [
        {"text": "a dog", "output": {"url": "samples/0.png"}},
        {"text": NAME, "output": {"url": "samples/1.png"}},
    ]
    assert re.findall(r'<img src="(.*?)"', page) == ["samples/0.png", "samples/1.png"]


@pytest.mark.parametrize("line", ["[]", '{"kind": "images", "step": 1, "time": 1, "samples": 5}'])
def test_an_index_of_samples_that_is_none_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "index.jsonl").write_text(f"{line}\n")
    with pytest.raises(RunFolderError, match=r"index\.jsonl:1: "):
        card(tmp_path, source(tmp_path, planned("quickstart", "backend.trains=lora")))


def program(text: str) -> str:
    """The snippet of a card; "" for a card without one."""
    return "".join(re.findall(r"^`{3,}python\n(.*?)^`{3,}$", text, flags=re.DOTALL | re.MULTILINE))


def arguments(text: str, function: str) -> dict[str, Any]:
    """The constant arguments of the call of a name in a program, those without a keyword by their place."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    (call,) = [one for one in calls if ast.unparse(one.func) == function]
    named = {str(key.arg): key.value.value for key in call.keywords if isinstance(key.value, ast.Constant)}
    return {**{str(place): ast.literal_eval(value) for place, value in enumerate(call.args)}, **named}


@pytest.mark.parametrize("prompt", ["a dog", NAME, "```", "\n\"'\\", "\U0001f415"])
def test_the_snippet_samples_as_evaluation_does(tmp_path: Path, prompt: str) -> None:
    keep(tmp_path, (2, "eval", "one.png", prompt))
    words = ("+eval.sampling.num_inference_steps=4", "+eval.sampling.guidance_scale=2", "sampling.negative_prompt=cat")
    text = program(card(tmp_path, source(tmp_path, planned("quickstart", "backend.trains=lora", *words))))
    sizes = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 2.0}
    assert arguments(text, "pipeline") == {"0": prompt, "negative_prompt": "cat", **sizes}
    assert arguments(text, "pipeline.load_lora_weights") == {"0": "out"}
    assert arguments(text, "torch.Generator().manual_seed") == {"0": 20000}


def test_a_snippet_for_text_has_the_chat_and_the_length_of_evaluation(tmp_path: Path) -> None:
    plan = planned("quickstart-text", "backend.trains=lora")
    text = program(card(tmp_path, source(tmp_path, plan), layout="peft", is_pipeline=False))
    wanted: Any = plan.trained[0].evaluation
    how = {"max_new_tokens": wanted.max_new_tokens, "do_sample": True, "temperature": 1, "top_p": 1, "top_k": 0}
    assert wanted.temperature == 1 and arguments(text, "model.generate") == how
    assert arguments(text, "AutoPeftModelForCausalLM.from_pretrained") == {"0": "out"}


@pytest.mark.parametrize(
    ("recipe", "layout", "tag"),
    [
        ("quickstart", "comfy", "text-to-image"),
        ("quickstart-video", None, "text-to-video"),
        ("quickstart-i2v", None, "image-to-video"),
        ("quickstart-text", None, "text-generation"),
        ("quickstart-vl", None, "image-text-to-text"),
        ("quickstart-unified", None, "any-to-any"),
    ],
)
def test_the_card_names_the_task_and_what_needs_a_program_of_its_own_has_no_snippet(
    tmp_path: Path, recipe: str, layout: str | None, tag: str
) -> None:
    lora = ["backend.trains=lora"] if layout else []
    text = card(tmp_path, source(tmp_path, planned(recipe, *lora)), layout=layout, is_pipeline="text" not in recipe)
    head = rendered(text)[0]
    assert (head["pipeline_tag"], head["base_model_relation"]) == (tag, "adapter" if layout else "finetune")
    assert bool(program(text)) == (tag in ("text-to-video", "text-generation"))


def test_a_model_that_may_be_given_images_was_given_some_if_its_samples_were(tmp_path: Path) -> None:
    plan = planned("quickstart-edit")
    assert rendered(card(tmp_path, source(tmp_path, plan)))[0]["pipeline_tag"] == "text-to-image"
    keep(tmp_path, (2, "eval", "one.png", "make it red"))
    index = tmp_path / "media" / "index.jsonl"
    index.write_text(index.read_text().replace('"prompt"', '"inputs": ["inputs/a.png"], "prompt"'))
    shutil.rmtree(tmp_path / "out")
    text = card(tmp_path, source(tmp_path, plan))
    assert rendered(text)[0]["pipeline_tag"] == "image-to-image" and program(text) == ""


def test_a_card_shows_the_samples_of_its_own_model_alone(tmp_path: Path) -> None:
    keep(tmp_path, (2, "eval/image", "one.png", "a dog"), (2, "eval/other", "two.png", "a cat"))
    plan = planned("quickstart-enhancer-joint")
    (writer, painter) = plan.trained
    assert (writer.name, painter.name) == ("rewrite", "image")
    run = source(tmp_path, plan)
    shown = {}
    for stage in (writer, painter):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        text = card(tmp_path, dataclasses.replace(run, learner=stage.learner), layout=None)
        shown[stage.name] = [each["text"] for each in rendered(text)[0].get("widget", [])]
    assert shown == {"rewrite": [], "image": ["a dog"]}


def test_a_snippet_loads_the_revision_that_was_trained(tmp_path: Path) -> None:
    plan = planned("quickstart", "backend.trains=lora")
    learner = plan.trained[0].learner
    config = dataclasses.replace(learner.model.config, revision="abc")
    pinned = dataclasses.replace(learner, model=dataclasses.replace(learner.model, config=config))
    text = program(card(tmp_path, dataclasses.replace(source(tmp_path, plan), learner=pinned)))
    assert arguments(text, "StableDiffusion3Pipeline.from_pretrained")["revision"] == "abc"
