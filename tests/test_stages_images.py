"""A stage that reads the images of another one: what is refused, what it is given, and runs of a painter and a reader."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_clusters
import torch
from external_engines.environments import make
from painter_and_reader import RECIPE
from PIL import Image
from small_runs import catalog
from unirl.core.data.run_data import read_data
from unirl.core.match.match import match
from unirl.core.roles import text_model
from unirl.core.specs.capability import Cap
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef
from unirl.core.types.event import Event
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track
from unirl.loop.build import build_parts
from unirl.loop.generation import generate_stages
from unirl.loop.parts import Parts
from unirl.loop.requests import step_requests
from unirl.loop.run import train
from unirl.loop.run_plan import with_run_folder
from writer_and_painter import composed, numbers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path) -> Path:
    file = folder / "reader.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


CHAIN = (
    "+model@model.writer=qwen3",
    "model.writer.path=${asset:quickstart,enhancer/checkpoint}",
    "+engine@engine.rewrite=trainside",
    "+sampling@sampling.rewrite=text",
    "+stages.rewrite={model: writer, parent: image}",
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            CHAIN,
            "stages.rewrite.parent: got 'image', which generates image; model 'qwen3' takes text alone. Expected a "
            "parent of text, or of images for a model that takes them in one role.",
        ),
        (
            ["sampling.image.frames=2"],
            "stages.answer.parent: got 'image', which generates video; model 'qwen3-vl' takes image as condition. "
            "Expected",
        ),
        (
            ["sampling.image.decode=false"],
            "stages.answer.parent: got 'image', which generates image, but is not decoded. Set sampling.image.decode=true",
        ),
        (
            ["+eval.sampling.image={decode: false}"],
            "stages.answer.parent: got 'image', which generates image, but is not decoded",
        ),
        (
            ["+stages.image.instruction='Draw {prompt}.'"],
            "stages.image.instruction: got 'Draw {prompt}.'; expected none, as no image comes from a parent",
        ),
    ],
)
def test_stages_that_cannot_take_what_their_parent_generates(recipe: Path, overrides: list[str], says: str) -> None:
    reasons = [str(reason) for reason in match(composed(recipe, *overrides)).reasons]
    assert any(says in reason for reason in reasons), reasons


def test_an_engine_that_takes_no_images_cannot_answer_about_those_of_a_parent(recipe: Path) -> None:
    plan = composed(recipe)
    (answer,) = (stage for stage in plan.stages if stage.name == "answer")
    blind = dataclasses.replace(answer.engine.spec, capabilities=answer.engine.spec.capabilities - {Cap.MEDIA_REFS})
    stages = tuple(
        dataclasses.replace(stage, engine=dataclasses.replace(stage.engine, spec=blind)) if stage is answer else stage
        for stage in plan.stages
    )
    reasons = [str(reason) for reason in match(dataclasses.replace(plan, stages=stages)).reasons]
    assert (
        "engine.answer: stages.answer.parent=image needs 'media-refs'; engine 'trainside' does not provide it."
        in reasons
    )


def made(plan: Plan) -> tuple[Parts, Mapping[str, Track]]:
    """The parts of a plan, and the tracks of its first rollout."""
    parts = build_parts(plan, catalog=catalog())
    requests = step_requests(parts, plan, read_data(plan).prompts[:2], step=0)
    versions = {stage.name: 0 for stage in plan.stages}
    tracks = generate_stages(parts, plan, requests, versions=versions, during=lambda stage: nullcontext())
    return parts, tracks


def test_the_reader_gets_what_files_of_the_images_would_give_it(recipe: Path, tmp_path: Path) -> None:
    """Tokens, patches and grids, bit for bit. The images are saved here by Pillow alone, in 8 bits."""
    parts, tracks = made(with_run_folder(composed(recipe), tmp_path / "run"))
    image, answer = tracks["image"], tracks["answer"]
    assert image.media is not None and answer.parent_track == "image"
    files = {}
    for name, pixels in zip(image.sample_ids, image.media.stacked, strict=True):
        files[name] = tmp_path / f"{name.replace('/', '-')}.png"
        levels = np.rint(pixels.permute(1, 2, 0).double().numpy() * 255)
        Image.fromarray(levels.astype(np.uint8)).save(files[name])
    assert answer.parent_ids == tuple(name for name in image.sample_ids for _ in range(2))
    expected = Inputs(
        ids=answer.inputs.ids,
        prompts=answer.inputs.prompts,
        texts=("What is it?",) * 8,
        media=tuple(
            (MediaRef(modality="image", role="condition", uri=str(files[name])),) for name in answer.parent_ids
        ),
    )
    model, sampling = text_model(parts.models["reader"]), TextSamplingConfig(max_new_tokens=4)
    tokens = model.prompt_tokens(expected, sampling=sampling)
    assert all(torch.equal(*pair) for pair in zip(answer.text.prompt_tokens, tokens, strict=True))
    given = answer.conditions["positive"]
    assert len(given.values["pixel_values"]) == 4, "each image once, for two answers"
    for name, values in model.conditions(expected, sampling=sampling).items():
        assert all(torch.equal(*pair) for pair in zip(given.expanded()[name], values, strict=True))
    # Images of two prompts differ, and so do their patches.
    assert len({values.numpy().tobytes() for values in given.values["pixel_values"]}) == 4
    assert answer.inputs.texts == expected.texts and answer.inputs.prompts[0] == image.inputs.prompts[0]


@pytest.mark.parametrize(
    ("instruction", "expected"), [("''", "{0}"), ("'Is it {prompt}? Or not {prompt}?'", "Is it {0}? Or not {0}?")]
)
def test_an_instruction_may_quote_the_prompt(recipe: Path, tmp_path: Path, instruction: str, expected: str) -> None:
    plan = with_run_folder(composed(recipe, f"stages.answer.instruction={instruction}"), tmp_path / "run")
    answer = made(plan)[1]["answer"]
    assert answer.inputs.texts == tuple(expected.format(prompt) for prompt in answer.inputs.prompts)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, float]]]:
    """A recipe, and the numbers of its run."""
    folder = tmp_path_factory.mktemp("straight")
    file = written(folder)
    return file, numbers(composed(file, f"run.dir={folder / 'run'}"))


def test_the_painter_trains_on_the_score_of_the_answers(straight: tuple[Path, dict[int, dict[str, float]]]) -> None:
    for step in straight[1].values():
        # Means of the same fp32 numbers of at most 1, in two orders.
        assert step["image/reward_mean"] == pytest.approx(step["answer/reward_mean"], abs=1e-6)
        assert step["image/reward/answer"] == step["image/reward_mean"]
        assert step["image/updates"] == 1 and step["image/grad_norm"] > 0
        assert "answer/updates" not in step


def test_with_max_credit_an_image_gets_its_best_answer(recipe: Path, tmp_path: Path) -> None:
    plan = composed(recipe, "stages.answer={credit: max, samples: 6}", "run.stop_at=1", f"run.dir={tmp_path / 'run'}")
    (step,) = numbers(plan).values()
    assert step["image/reward_max"] == step["answer/reward_max"]
    assert step["image/reward_mean"] > step["answer/reward_mean"], "an image has answers of different scores"


def test_images_are_in_the_run_folder_for_as_long_as_their_step(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "parent_images"
    there: dict[tuple[str, int], list[str]] = {}

    def note(event: Event) -> None:
        if event.kind in ("step", "checkpoint_saved"):
            there[event.kind, event.step] = sorted(path.name for path in folder.iterdir())

    plan = composed(recipe, "eval.every=1", f"run.dir={tmp_path / 'run'}")
    train(plan, catalog=catalog(), listeners=[note])
    assert there == {
        ("step", 1): ["0"],
        ("checkpoint_saved", 1): [],
        ("step", 2): ["1"],
        ("checkpoint_saved", 2): [],
    }
    assert not folder.exists()


def test_one_step_and_one_more_are_two(straight: tuple[Path, dict[int, dict[str, float]]], tmp_path: Path) -> None:
    recipe, expected = straight
    numbers(composed(recipe, f"run.dir={tmp_path / 'run'}", "run.stop_at=1"))
    resumed = numbers(composed(recipe, f"run.dir={tmp_path / 'run'}"), resume=tmp_path / "run")
    assert resumed == {2: expected[2]}


def test_scoring_while_generating_gives_the_same_numbers(recipe: Path, tmp_path: Path) -> None:
    # Two images of a prompt, and two answers about each: the batches of a piece of one prompt, so that all is equal.
    words = ("run.stop_at=1", "engine.image.forward_batch=2", "engine.answer.forward_batch=4")
    plain = numbers(composed(recipe, *words, f"run.dir={tmp_path / 'plain'}"))
    streamed = numbers(composed(recipe, *words, "run.reward_overlap_groups=1", f"run.dir={tmp_path / 'streamed'}"))
    assert {key: streamed[1][key] for key in plain[1]} == plain[1]


def test_the_report_shows_answers_beside_the_images_that_they_are_about(recipe: Path, tmp_path: Path) -> None:
    words = ("+tracker@tracker.report=report", "run.media_every=1", "run.stop_at=1", f"run.dir={tmp_path / 'run'}")
    numbers(composed(recipe, *words))
    media = tmp_path / "run" / "media"
    lines = [json.loads(line) for line in (media / "index.jsonl").read_text().splitlines()]
    images, texts = ({one["file"]: one for one in line["samples"]} for line in lines if line["key"].startswith("train"))
    for file, image in images.items():
        children = [one for one in texts.values() if one["parent"] == file]
        assert len(children) == 2 and {one["prompt"] for one in children} == {image["prompt"]}
        # Mean credit; the mean of two fp32 numbers of at most 1.
        assert image["reward"] == pytest.approx(sum(one["reward"] for one in children) / 2, abs=1e-6)
    assert not (media / "inputs").exists(), "the parents are there already"


def test_two_ranks_under_ray_give_the_numbers_of_one_process(
    straight: tuple[Path, dict[int, dict[str, float]]], tmp_path: Path
) -> None:
    recipe, expected = straight
    ray: list[Any] = ["launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1"]
    with ray_clusters.joined():
        result = numbers(composed(recipe, *ray, f"run.dir={tmp_path / 'run'}", "run.stop_at=1"))
    for key in ("image/reward_mean", "answer/reward_mean", "image/grad_norm"):
        # Each rank has half of the rows: fp32 sums in another order, relative to the size of the number.
        assert result[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-6), key
    assert not (tmp_path / "run" / "parent_images").exists()


def test_a_reader_on_vllm_reads_the_same_images(recipe: Path, tmp_path: Path) -> None:
    """Greedy answers and what they were read from; the engine's process says which images those were."""
    make("vllm")
    greedy = "sampling.answer.temperature=0"
    expected = made(with_run_folder(composed(recipe, greedy), tmp_path / "here"))[1]["answer"]
    vllm = ("engine@engine.answer=vllm", "engine.answer.kv_cache_mb=64", "engine.answer.max_num_seqs=16")
    parts, tracks = made(with_run_folder(composed(recipe, greedy, *vllm), tmp_path / "there"))
    parts.engines["answer"].close()
    answer = tracks["answer"]
    assert answer.media is not None and expected.media is not None
    assert answer.media.texts == expected.media.texts and any(answer.media.texts)
    assert same(answer.conditions["positive"].expanded(), expected.conditions["positive"].expanded())


def test_a_model_that_takes_media_in_two_roles_needs_one_of_them(recipe: Path) -> None:
    """No model of this repository has several; their specs are changed."""
    plan = composed(recipe)

    def taking(**roles: str) -> str:
        def changed(stage: Stage) -> Stage:
            if stage.name != "answer":
                return stage
            spec = dataclasses.replace(stage.model.spec, inputs={"text": roles})
            model = dataclasses.replace(stage.model, spec=spec)
            return dataclasses.replace(stage, learner=dataclasses.replace(stage.learner, model=model))

        changed_plan = plan.with_stages(changed)
        reasons = [str(reason) for reason in match(changed_plan).reasons]
        return reasons[0] if reasons else changed_plan.stage("answer").parent_role

    assert taking(source="takes") == "source"
    assert taking(source="needs", condition="takes") == "source"
    for use in ("takes", "needs"):
        assert "takes image as condition, source. Expected" in taking(source=use, condition=use)
