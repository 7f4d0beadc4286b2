"""Plans of several stages: what is refused, and runs of a writer and a painter on the quickstarts' checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import ray_clusters
from small_runs import catalog
from transformers import AutoTokenizer
from unirl.core.data.run_data import read_data
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.engine_host.program import log_path
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.environment import PRODUCT
from unirl.loop.build import build_parts
from unirl.loop.generation import generate_stages
from unirl.loop.lineage import cut_texts
from unirl.loop.requests import step_requests
from unirl.loop.run_plan import with_run_folder
from unirl.quickstart import checkpoint_path
from writer_and_painter import JOINT, RECIPE, composed, numbers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def refusals(recipe: Path, *overrides: str) -> list[str]:
    return [str(reason) for reason in match(composed(recipe, *overrides), catalog=catalog()).reasons]


def test_the_stages_of_a_plan(recipe: Path) -> None:
    plan = composed(recipe, *JOINT)
    rewrite, image = plan.stages
    assert (rewrite.name, rewrite.parent, rewrite.kind, rewrite.samples) == ("rewrite", None, "text", 2)
    assert (image.name, image.parent, image.medium, image.samples) == ("image", "rewrite", "image", 2)
    assert rewrite.rewards == () and image.rewards == ("shapes",) and plan.rows_per_prompt(image) == 4
    assert list(plan.learners) == ["writer", "painter"] and match(plan).accepted


def test_a_stage_has_settings_of_its_own(recipe: Path) -> None:
    overrides = ("+stages.image.advantage={scope: global}", "+stages.rewrite.train={micro_batch_size: 2}")
    rewrite, image = composed(recipe, *JOINT, *overrides, "+eval.sampling.rewrite={temperature: 0.5}").stages
    assert (rewrite.advantage.scope, image.advantage.scope) == ("group", "global")
    assert (rewrite.train.micro_batch_size, image.train.micro_batch_size) == (2, 0)
    assert rewrite.evaluation.temperature == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "words",
    [
        ["+stages.sketch={model: painter, parent: rewrite, samples: 3}"],
        ["+stages.sketch.model=painter", "+stages.sketch.parent=rewrite", "++stages.sketch.samples=3"],
    ],
)
def test_a_stage_may_be_added_on_the_command_line(recipe: Path, words: list[str]) -> None:
    parts = ("+engine@engine.sketch=trainside", "+sampling@sampling.sketch=latent")
    plan = composed(recipe, *words, *parts, "+stages.rewrite.train={micro_batch_size: 2}")
    rewrite, image, sketch = plan.stages
    assert (sketch.name, sketch.parent, sketch.samples, sketch.learner) == ("sketch", "rewrite", 3, image.learner)
    assert rewrite.train.micro_batch_size == 2 and rewrite.samples == 2, "what the recipe says of others stays"
    origin = plan.origins["stages.sketch.samples"]
    assert origin.source == "command line" and "samples: 3" in origin.detail


def test_rewrites_longer_than_the_painter_reads_are_counted_and_reported(recipe: Path, tmp_path: Path) -> None:
    """T5's tokenizer says how many; the run reports it once."""
    plan = composed(recipe, "run.max_steps=2", "sampling.image.max_sequence_length=6", f"run.dir={tmp_path / 'run'}")
    parts = build_parts(plan, catalog=catalog())
    requests = step_requests(parts, plan, read_data(plan).prompts[:2], step=0)
    versions = {"rewrite": 0, "image": 0}
    tracks = generate_stages(parts, plan, requests, versions=versions, during=lambda stage: nullcontext())
    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(checkpoint_path() / "tokenizer_3")
    texts = tracks["image"].inputs.texts
    expected = sum(len(tokenizer(text)["input_ids"]) > 6 for text in texts) / len(texts)
    assert expected > 0 and cut_texts(tracks, plan, parts.models) == {"image/cut_texts": expected}
    assert all("image/cut_texts" in metrics for metrics in numbers(plan).values())
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["kind"] == "finding" and "max_sequence_length" in event["text"]]
    assert len(told) == 1 and told[0].startswith("sampling.image.max_sequence_length: ") and "'rewrite'" in told[0]


def test_a_typo_in_an_added_stage_is_named(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"stages\.sketch\.sample: StageConfig has no such key; did you mean"):
        composed(recipe, "+stages.sketch={model: painter, sample: 3}")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stages.rewrite.parent=image"], "the stages form a cycle: rewrite <- image <- rewrite"),
        (["stages.image.parent=writer"], r"stages.image.parent: got 'writer'; the stages are 'rewrite', 'image'"),
        (["stages.image.model=artist"], r"stages.image.model: got 'artist'; the recipe has models 'writer', 'painter'"),
        (["stages.image.model=''"], r"stages.image.model: got none, expected one of 'writer', 'painter'"),
        (
            ["stages.image.model=writer"],
            "model.painter: no stage uses this model",
        ),
        (["stages.image.track=video"], "stages.image.track: got 'video'; model 'sd3' has 'image'"),
        (["+algorithm@algorithm.sketch=grpo"], "algorithm.sketch: no such stage; the stages are"),
        (["+engine@engine.sketch=trainside"], "engine.sketch: no such stage; the stages are"),
        (["+backend@backend.artist=fsdp2"], "backend.artist: the recipe has no model of that name"),
        (["~sampling.image"], "sampling: got sections for 'rewrite', expected one for each of 'rewrite', 'image'"),
        (["~engine.image"], "engine: stage 'image' has none"),
        (["reward.shapes.stage=sketch"], "reward.shapes.stage: got 'sketch'; the stages are"),
        (["+eval.sampling.temperature=1"], "eval.sampling.temperature: with several stages"),
        (["+stages.image.advantage={scopes: global}"], "stages.image.advantage"),
    ],
)
def test_stages_that_cannot_be_composed(recipe: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        composed(recipe, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["+algorithm@algorithm.image=flow-grpo"], "algorithm.image: got 'flow-grpo', but model 'sd3' is frozen"),
        (["stages.image.credit=none"], "algorithm.rewrite: stage 'rewrite' trains, and neither a reward nor credit"),
        (["stages.rewrite.credit=mean"], "stages.rewrite.credit: got 'mean', but there is no parent stage"),
        (["stages.image.samples=-1"], "stages.image.samples: got -1, expected 0"),
        (["stages.image.credit=median"], "stages.image.credit: got 'median', expected one of"),
        (["stages.rewrite.samples=1"], "stages.rewrite.samples: got 1, so every group has zero variance"),
        (
            ["data.dynamic_sampling_rounds=1", "stages.rewrite.samples=1", "advantage.center=global"],
            "data.dynamic_sampling_rounds: got 1, which drops zero-variance groups; a group of 1 always is one",
        ),
        (["~algorithm.rewrite", *JOINT], "backend.writer: got 'fsdp2', but no stage of this model has an algorithm"),
        (["run.max_staleness=1"], "engine 'trainside' shares its weights with training"),
    ],
)
def test_stages_that_do_not_fit_together(recipe: Path, overrides: list[str], says: str) -> None:
    reasons = refusals(recipe, *overrides)
    assert any(says in reason for reason in reasons), reasons


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, float]]]:
    """A recipe that trains both, and the numbers of its run."""
    folder = tmp_path_factory.mktemp("joint")
    file = folder / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file, numbers(composed(file, *JOINT, f"run.dir={folder / 'run'}"))


def test_both_models_train_on_one_rollout(joint: tuple[Path, dict[int, dict[str, float]]]) -> None:
    for step in joint[1].values():
        assert step["rewrite/reward_mean"] == pytest.approx(step["image/reward_mean"], abs=1e-6), "mean credit"
        assert step["rewrite/reward/image"] == step["rewrite/reward_mean"]
        for name in ("rewrite", "image"):
            assert step.get(f"{name}/steps_skipped") or step[f"{name}/updates"] == 1


def test_two_steps_and_two_more_are_four(joint: tuple[Path, dict[int, dict[str, float]]], tmp_path: Path) -> None:
    recipe, straight = joint
    overrides = (*JOINT, f"run.dir={tmp_path / 'run'}")
    numbers(composed(recipe, *overrides, "run.stop_at=2"))
    resumed = numbers(composed(recipe, *overrides), resume=tmp_path / "run")
    assert resumed == {step: straight[step] for step in (3, 4)}


def test_scoring_while_generating_gives_the_same_numbers(recipe: Path, tmp_path: Path) -> None:
    # Two rewrites of a prompt, and two images of each: the batches of a piece of one prompt, so that all is equal.
    words = (*JOINT, "run.stop_at=2", "engine.rewrite.forward_batch=2", "engine.image.forward_batch=4")
    plain = numbers(composed(recipe, *words, f"run.dir={tmp_path / 'plain'}"))
    streamed = numbers(composed(recipe, *words, "run.reward_overlap_groups=1", f"run.dir={tmp_path / 'streamed'}"))
    for step, expected in plain.items():
        assert {key: streamed[step][key] for key in expected} == expected


def test_engines_of_one_kind_write_logs_of_their_own(recipe: Path, tmp_path: Path) -> None:
    """Both stages on vLLM; none is started."""
    words = ("engine@engine.rewrite=vllm", "engine@engine.image=vllm")
    stages = with_run_folder(composed(recipe, *words), tmp_path).stages
    files = [str(log_path(cast(VllmConfig, stage.engine.config), PRODUCT)) for stage in stages]
    assert files == [f"{tmp_path}/logs/{name}/vllm-{os.getpid()}.log" for name in ("rewrite", "image")]


DYNAMIC = ("data.dynamic_sampling_rounds=3", "run.stop_at=2")
"""The shapes reward has few values, so that prompts with equal samples are frequent."""


def test_prompts_that_teach_no_stage_are_replaced_with_all_of_their_samples(recipe: Path, tmp_path: Path) -> None:
    words = (*JOINT, *DYNAMIC, "engine.rewrite.forward_batch=2", "engine.image.forward_batch=4")
    plain = numbers(composed(recipe, *words, f"run.dir={tmp_path / 'plain'}"))
    streamed = numbers(composed(recipe, *words, "run.reward_overlap_groups=1", f"run.dir={tmp_path / 'streamed'}"))
    assert any(step["groups_without_spread"] for step in plain.values())
    for number, step in plain.items():
        assert step["groups_drawn"] - step["groups_without_spread"] >= 2, "two prompts a step"
        assert step["rewrite/groups"] == 2 and step["image/groups"] == 4
        assert step["rewrite/zero_spread_groups"] < 2 or step["image/zero_spread_groups"] < 4
        assert step["rewrite/reward_mean"] == pytest.approx(step["image/reward_mean"], abs=1e-6), "mean credit"
        assert {key: streamed[number][key] for key in step} == step


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.joined():
        yield


def test_two_ranks_under_ray_give_the_numbers_of_one_process(
    joint: tuple[Path, dict[int, dict[str, float]]], tmp_path: Path, ray_here: None
) -> None:
    recipe, straight = joint
    ray: list[Any] = ["launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1"]
    result = numbers(composed(recipe, *JOINT, *ray, f"run.dir={tmp_path / 'run'}", "run.stop_at=1"))
    for key in ("rewrite/reward_mean", "image/reward_mean", "rewrite/grad_norm", "image/grad_norm"):
        # Each rank has half of the rows: fp32 sums in another order, relative to the size of the number.
        assert result[1].get(key) == pytest.approx(straight[1].get(key), rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.reward_overlap_groups=1"],
        ["launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1"],
    ],
    ids=["plain", "overlap", "ray"],
)
def test_the_report_shows_images_beside_the_rewrites_that_they_are_of(
    recipe: Path, tmp_path: Path, ray_here: None, overrides: list[str]
) -> None:
    words = ("+tracker@tracker.report=report", "run.media_every=1", "run.stop_at=1", f"run.dir={tmp_path / 'run'}")
    numbers(composed(recipe, *words, *overrides))
    lines = [json.loads(line) for line in (tmp_path / "run" / "media" / "index.jsonl").read_text().splitlines()]
    rewrites, images = ({one["file"]: one for one in line["samples"]} for line in lines)
    assert [line["key"] for line in lines] == ["train/rewrite", "train/image"] and len(images) == 8
    for file, rewrite in rewrites.items():
        children = [one for one in images.values() if one["parent"] == file]
        assert [one["prompt"] for one in children] == [rewrite["prompt"]] * 2
        # Mean credit; the mean of two fp32 numbers of at most 1.
        assert rewrite["reward"] == pytest.approx(sum(one["reward"] for one in children) / 2, abs=1e-6)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<h2>Stages</h2>" in page and "<h2>Training samples over time</h2>" in page
