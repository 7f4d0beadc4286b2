"""Runs of several stages in the report: samples beside their parents, the graph of the stages, and the curves."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.conformance.doubles.samples import make_samples
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import RunInfo
from unirl.core.types.media import Media
from unirl.core.types.rollout import Rollout
from unirl.trackers.report.config import ReportConfig
from unirl.trackers.report.families import Branch, families
from unirl.trackers.report.graph import Graph, stage_graph
from unirl.trackers.report.history import RunHistory, read_history
from unirl.trackers.report.tracker import build

PROMPTS = ("the <moon>, crimson", "a hole, green")


def stage(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "parent": None,
        "samples": 2,
        "medium": "image",
        "learner": name,
        "model": "sd3",
        "engine": "trainside",
        "algorithm": None,
        "rewards": [],
        "credit": "none",
        **fields,
    }


REWRITE = stage("rewrite", samples=4, medium="text", learner="writer", model="qwen3", algorithm="grpo")
IMAGE = stage("image", parent="rewrite", learner="painter", rewards=["shapes"], credit="mean")


def rollout(*texts: str, rewards: Sequence[float]) -> Rollout:
    """Two rewrites of each prompt, and two images of each rewrite, of a grey that is their reward."""
    prompts = [PROMPTS[row // 2] for row in range(4)]
    rewrites = make_samples(Media(kind="text", values=texts), prompts, name="rewrite")
    levels = torch.tensor(rewards).view(8, 1, 1, 1).expand(8, 3, 4, 4)
    prompts = [PROMPTS[row // 4] for row in range(8)]
    images = make_samples(Media(kind="image", values=levels), prompts, rewards, name="image", parent=rewrites)
    return Rollout(tracks={"rewrite": rewrites, "image": images})


BEFORE = rollout("moon", "red disk", "ring", "green", rewards=[row / 8 for row in range(8)])
AFTER = rollout("a red disk", "a disk", "a ring", "ring <b>", rewards=[1 - row / 8 for row in range(8)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, evaluated before and after."""
    folder = tmp_path_factory.mktemp("run")
    resolved = {"data": {"prompts_per_step": 32}, "algorithm": {"rewrite": {"use": "grpo", "clip_range": 0.2}}}
    events = EventStream(folder / "events.jsonl")
    # Seven images have room for those of three rewrites and one of the fourth.
    trackers = Trackers({"report": build(ReportConfig(max_images=7))}, events)
    info: dict[str, Any] = {"name": "writer", "plan_hash": "0123abcd"}
    trackers.start(RunInfo(folder=folder, config={}, **info))
    started = {"recipe": "enhancer", "resolved": resolved, "steps": 1, "stages": [REWRITE, IMAGE]}
    events.emit("run_started", step=0, **started, **info)
    trackers.samples("eval", BEFORE, step=0)
    events.emit("evaluated", step=0, metrics={"image/score_mean": 0.5})
    trackers.samples("train", BEFORE, step=0)
    metrics = {"rewrite/reward_mean": 0.5, "image/reward_mean": 0.5, "rewrite/reward/image": 0.5}
    events.emit("step", step=1, metrics={**metrics, "image/reward/shapes": 0.5, "rewrite/grad_norm": 1.0})
    trackers.samples("eval", AFTER, step=1)
    events.emit("evaluated", step=1, metrics={"image/score_mean": 0.6})
    events.emit("run_finished", step=1, status="done", wall_s=2.0)
    trackers.finish("done", step=1)
    events.close()
    assert not [event for event in (folder / "events.jsonl").read_text().splitlines() if '"finding"' in event]
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    (result,) = re.findall(rf"<section><h2>{re.escape(title)}</h2>(.*?)</section>", page, re.DOTALL)
    return result


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def outline(branches: Sequence[Branch]) -> list[Any]:
    """Texts and rewards of a family."""
    return [(b.sample.text if b.is_text else b.sample.reward, *outline(b.branches)) for b in branches]


def test_the_index_names_the_parent_of_each_sample(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "media" / "index.jsonl").read_text().splitlines()]
    rewrites, images = lines[:2]
    assert (rewrites["key"], images["key"], images["num_left_out"]) == ("eval/rewrite", "eval/image", 1)
    assert all(sample["parent"] is None for sample in rewrites["samples"])
    expected = [f"step-000000/eval-rewrite-{row // 2:02d}.txt" for row in range(7)]
    assert [sample["parent"] for sample in images["samples"]] == expected


def test_families_are_prompts_with_rewrites_and_their_images(folder: Path) -> None:
    first, second = families(read_history(folder), "eval")[0]
    assert (first.prompt, second.prompt) == PROMPTS
    assert outline(first.branches) == [("moon", (0.0,), (0.125,)), ("red disk", (0.25,), (0.375,))]
    assert outline(second.branches) == [("ring", (0.5,), (0.625,)), ("green", (0.75,))]


def test_the_page_shows_prompt_rewrite_and_images_in_a_row_before_and_after(page: str) -> None:
    result = section(page, "Held-out samples, before and after")
    assert "Each prompt with its rewrite, then image, before (step 0) and after (step 1)" in words(result)
    first, second = re.findall(r"<figure>(.*?)</figure>", result, re.DOTALL)
    assert words(first) == (
        "the <moon>, crimson before rewrite moon image 0.00 image 0.12 rewrite red disk image 0.25 image 0.38 "
        "after rewrite a red disk image 1.00 image 0.88 rewrite a disk image 0.75 image 0.62"
    )
    assert words(second).endswith("after rewrite a ring image 0.50 image 0.38 rewrite ring <b> image 0.25")
    assert result.count("<img") == 14
    # The sections of runs with one stage would show the same again.
    assert "Contact sheet" not in page and "Training images" not in page and "Texts, before" not in page


def test_training_samples_are_shown_beside_their_parents(page: str) -> None:
    result = words(section(page, "Training samples over time"))
    assert "after 0 steps the <moon>, crimson rewrite moon image 0.00 image 0.12 rewrite red disk" in result


def test_training_samples_have_the_ids_that_show_takes(page: str, folder: Path) -> None:
    """Held-out samples have none there: their tokens and scores are not saved."""
    result = section(page, "Training samples over time")
    expected = ["rewrite-0", "image-0", "image-1", "rewrite-1", "image-2", "image-3"]
    assert re.findall(r' title="([^"]*)"', result)[:6] == expected
    assert f"unirl show {folder} --sample ID" in words(result)
    assert "title=" not in section(page, "Held-out samples, before and after")


def test_the_page_draws_the_stages_as_an_accessible_graph(page: str) -> None:
    result = section(page, "Stages")
    assert 'role="img" aria-labelledby="graph-title graph-words"' in result
    (description,) = re.findall(r'<desc id="graph-words">(.*?)</desc>', result)
    assert description == (
        "Stage rewrite makes 4 samples of each prompt (text), with qwen3 on trainside, trains with grpo. "
        "Stage image makes 2 samples of each rewrite (image), with sd3 on trainside, frozen, scored by shapes, giving "
        "mean credit to rewrite."
    )
    texts = [html.unescape(text) for text in re.findall(r"<text.*?>(.*?)</text>", result)]
    for expected in ("32 prompts", "× 4", "rewrite (text)", "writer: qwen3 on trainside", "trains with grpo"):
        assert expected in texts
    for expected in ("× 2", "image", "painter: sd3 on trainside", "frozen", "reward shapes", "score", "mean credit"):
        assert expected in texts


def graph(*stages: dict[str, Any]) -> Graph | None:
    return stage_graph(RunHistory(folder=Path(), stages=stages))


def test_a_run_of_one_stage_has_no_graph() -> None:
    assert graph() is None and graph(stage("image")) is None


def test_boxes_of_a_graph_do_not_overlap_and_arrows_join_neighbouring_levels() -> None:
    """Two children of one text, one with a child of its own, and a second root; three of them train two models."""
    result = graph(
        REWRITE,
        stage("image", parent="rewrite", rewards=["shapes", "aesthetics"], credit="max", algorithm="flow-grpo"),
        stage("judge", parent="rewrite", medium="text", learner="writer", algorithm="grpo", credit="sum"),
        stage("answer", parent="judge", medium="text"),
        stage("other"),
    )
    assert result is not None
    for at, one in enumerate(result.boxes):
        assert one.x >= 0 and one.x + one.width <= result.width and one.y + one.height <= result.height
        for other in result.boxes[at + 1 :]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart_x or one.y + one.height <= other.y or other.y + other.height <= one.y
    # Prompts -> rewrite, other; rewrite -> image, judge; judge -> answer; image -> its rewards.
    assert len(result.boxes) == 8 and sum(not one.is_up for one in result.arrows) == 5
    assert all(one.above.y + one.above.height < one.below.y for one in result.arrows)
    assert {(one.below.lines[0], one.above.lines[0], one.label) for one in result.arrows if one.is_up} == {
        ("image", "rewrite (text)", "max credit"),
        ("judge (text)", "rewrite (text)", "sum credit"),
        ("reward shapes", "image", "score"),
        ("reward aesthetics", "image", "score"),
    }
    colors = {box.lines[0]: box.learner for box in result.boxes if box.is_stage}
    assert colors == {"rewrite (text)": 0, "judge (text)": 0, "image": 1, "answer (text)": None, "other (image)": None}
