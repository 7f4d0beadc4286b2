"""Stored images, videos and pairs as samples: their latents are the VAE's, and training runs on them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL  # pyright: ignore[reportPrivateImportUsage]
from PIL import Image
from unirl.core.data.prompts import read_prompts
from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError, RecipeError, RewardFailed
from unirl.core.match.match import match
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import DiffusionModel, ScoreInput
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import Track
from unirl.engines.dataset.config import DatasetConfig
from unirl.engines.dataset.engine import build
from unirl.engines.dataset.preference import build as build_preference
from unirl.loop.build import build_parts
from unirl.loop.requests import build_request
from unirl.loop.scoring import score_input
from unirl.loop.step import run_step
from unirl.model_host.diffusion.pipeline_model import PipelineModel
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_sd3
from unirl.quickstart import checkpoint_path

SIZE = 64
TEXTS = ("a red ring", "a blue disc", "a green square", "a red disc", "a blue ring")


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.fixture(scope="module")
def model() -> Sd3Model:
    return build_sd3(Sd3Config(path=str(checkpoint_path())), device="cpu")


def picture(folder: Path, number: int, *, size: int = SIZE) -> str:
    """A file of smooth random colours."""
    coarse = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((size, size), Image.Resampling.BILINEAR).save(folder / f"{number}.png")
    return f"{number}.png"


def prompt_file(folder: Path, rows: Sequence[Sequence[tuple[str, str]]], *, modality: str = "image") -> Path:
    """rows: the (role, file) of each prompt's media."""
    file = folder / "stored.jsonl"
    lines = [
        {"prompt": TEXTS[n], "media": [{"modality": modality, "role": role, "uri": uri} for role, uri in media]}
        for n, media in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def targets(folder: Path, count: int) -> Path:
    return prompt_file(folder, [[("target", picture(folder, n))] for n in range(count)])


def pairs(folder: Path, count: int) -> Path:
    sides = lambda n: [("rejected", picture(folder, 2 * n)), ("preferred", picture(folder, 2 * n + 1))]  # noqa: E731
    return prompt_file(folder, [sides(n) for n in range(count)])


def planned(catalog: Catalog, recipe: str, overrides: Sequence[str], folder: Path) -> Plan:
    common = ("~tracker@tracker.report", "run.media_every=0", "run.device=cpu", "train.updates_per_step=1")
    plan = compose(recipe, [*common, *overrides], catalog=catalog, directory=folder)
    verdict = match(plan, catalog=catalog)
    assert verdict.accepted, [str(reason) for reason in verdict.reasons]
    return plan


def steps_of(plan: Plan, catalog: Catalog, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of each step."""
    prompts, parts = read_data(plan).prompts[: plan.data.prompts_per_step], build_parts(plan, catalog=catalog)
    result: list[Event] = []
    events = EventStream(folder / "events.jsonl")
    events.listen(lambda event: result.append(event) if event.kind == "step" else None)
    try:
        for step in range(plan.run.max_steps):
            run_step(parts, plan, prompts, step=step, events=events, trackers=Trackers({}, events))
    finally:
        events.close()
        for part in (*parts.engines.values(), *parts.rewards.values(), *parts.backends.values()):
            part.close()
    return [event.data["metrics"] for event in result]


def read(model: Sd3Model, plan: Plan, *, config: DatasetConfig | None = None) -> Track:
    """The track of the first two prompts, its echo verified."""
    request = build_request(
        read_prompts(Path(plan.data.train))[:2],
        track="image",
        sampling=plan.only.sampling,
        samples_per_prompt=plan.only.samples,
        model=model,
        trajectory="none",
        seed=0,
        rollout=0,
        policy_version=0,
    )
    track = build(config or DatasetConfig(), model=model, device="cpu").generate(request)
    verify_echo(request, track)
    return track


def test_latents_are_those_of_the_vae_of_diffusers(model: Sd3Model, catalog: Catalog, tmp_path: Path) -> None:
    """The mode of its posterior, less the shift, times the scale; and media are the pixels of the files."""
    file = targets(tmp_path, 2)
    track = read(model, planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path))
    vae: Any = AutoencoderKL.from_pretrained(checkpoint_path(), subfolder="vae", torch_dtype=torch.float32)
    pixels = [np.asarray(Image.open(tmp_path / f"{n}.png"), dtype=np.float32) for n in range(2)]
    images = torch.stack([torch.as_tensor(image / 255).permute(2, 0, 1) for image in pixels])
    with torch.no_grad():
        mode = vae.encode(images * 2 - 1).latent_dist.mode()
    expected = (mode - vae.config.shift_factor) * vae.config.scaling_factor
    # The same convolutions on the same numbers, whose rounding may differ with the memory layout.
    torch.testing.assert_close(track.latent.final, expected, rtol=1e-4, atol=1e-5)
    assert track.media is not None and torch.equal(track.media.stacked, images)


def test_sides_of_a_pair_are_the_samples_of_their_prompt(model: Sd3Model, catalog: Catalog, tmp_path: Path) -> None:
    file = pairs(tmp_path, 2)
    track = read(
        model, planned(catalog, "quickstart-dpo-pairs", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path)
    )
    scores = build_preference(RewardConfig(), device="cpu").score(score_input(track))
    assert scores.values.tolist() == [1.0, 0.0, 1.0, 0.0]
    # The prompt file names the rejected side first; roles decide, not their order.
    assert track.media is not None
    pixels = torch.as_tensor(np.asarray(Image.open(tmp_path / "1.png"), dtype=np.float32) / 255).permute(2, 0, 1)
    assert torch.equal(track.media.stacked[0], pixels)


def test_supervised_fine_tuning_learns_what_is_stored(catalog: Catalog, tmp_path: Path) -> None:
    """Two images over and over: the error of flow matching falls to well below that of the start."""
    overrides = [f"data.train={targets(tmp_path, 2)}", "data.prompts_per_step=2", "run.max_steps=12"]
    overrides += ["backend.lr=1e-3", "algorithm.num_points=8", "data.samples_per_prompt=2"]
    errors = [
        step["matching_error"]
        for step in steps_of(planned(catalog, "quickstart-sft", overrides, tmp_path), catalog, tmp_path)
    ]
    # Of 32 points each step; their mean scatters by a tenth.
    assert sum(errors[-3:]) < 0.7 * sum(errors[:3]), errors


def test_offline_pairs_start_at_the_logarithm_of_two_and_are_learned(catalog: Catalog, tmp_path: Path) -> None:
    overrides = [f"data.train={pairs(tmp_path, 2)}", "data.prompts_per_step=2", "run.max_steps=8"]
    overrides += ["backend.lr=1e-3", "algorithm.num_points=8"]
    steps = steps_of(planned(catalog, "quickstart-dpo-pairs", overrides, tmp_path), catalog, tmp_path)
    assert (steps[0]["pairs"], steps[0]["groups_without_pair"]) == (2.0, 0.0)
    # The policy is its reference: both errors come from the same numbers in the same order.
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    # Two pairs over and over, at 16 points of each step.
    losses = [step["loss"] for step in steps]
    assert sum(losses[-3:]) / 3 < 0.9 * math.log(2), losses
    assert steps[-1]["winner_gain"] > steps[-1]["loser_gain"]


def test_stored_images_regularise_another_algorithm(catalog: Catalog, tmp_path: Path) -> None:
    """A separate stage on the same weights, from its own file, with a weight."""
    overrides = [f"engine.stored.path={targets(tmp_path, 3)}", "data.eval=''"]
    overrides += ["data.prompts_per_step=2", "data.samples_per_prompt=4", "run.max_steps=1"]
    plan = planned(catalog, "quickstart-regularised", overrides, tmp_path)
    (metrics,) = steps_of(plan, catalog, tmp_path)
    assert metrics["stored/matching_error"] > 0 and metrics["image/ratio_max_dev_first"] == 0.0
    # One optimizer step over both.
    assert metrics["image/updates"] == metrics["stored/updates"] == 1
    assert metrics["image/grad_norm"] == metrics["stored/grad_norm"] > 0


def test_refl_trains_with_its_pretraining_loss(catalog: Catalog, tmp_path: Path) -> None:
    """One optimizer step over both losses, whose gradient is g_reward + w g_stored: its squared norm is quadratic in the
    weight of the stage, so the third difference of four equidistant weights is 0."""
    overrides = [f"engine.stored.path={targets(tmp_path, 3)}", "data.eval=''"]
    overrides += ["data.prompts_per_step=2", "run.max_steps=1", "backend.max_grad_norm=null"]
    # On random pictures the gradient of flow matching is some 70 times that of the reward.
    overrides += ["algorithm.image.loss_scale=100"]
    squares: list[float] = []
    for weight in (1, 2, 3, 4):
        words = [*overrides, f"stages.stored.weight={weight}"]
        plan = planned(catalog, "quickstart-refl-regularised", words, tmp_path)
        (metrics,) = steps_of(plan, catalog, tmp_path)
        assert 0 < metrics["image/reward_recomputed"] < 1 and metrics["stored/matching_error"] > 0
        assert metrics["image/updates"] == metrics["stored/updates"] == 1
        assert metrics["image/grad_norm"] == metrics["stored/grad_norm"]
        squares.append(metrics["image/grad_norm"] ** 2)
    one, two, three, four = squares
    # Sums of some ten thousand fp32 products, of which a few digits cancel.
    assert four - 3 * three + 3 * two - one == pytest.approx(0, abs=1e-4 * four)
    # What it is at weight 0 and at a large one: both losses have a gradient.
    assert 3 * one - 3 * two + three > 1e-2 * one and three - 2 * two + one > 1e-2 * one


BAD: list[tuple[str, list[tuple[str, str]], list[str], str]] = [
    ("a side is missing", [("preferred", "0.png")], [], "got stored samples of the roles 'preferred', expected"),
    (
        "three sides",
        [("preferred", "0.png"), ("rejected", "1.png"), ("rejected", "2.png")],
        [],
        "got stored samples of the roles 'preferred', 'rejected', 'rejected'",
    ),
    (
        "more samples than sides",
        [("preferred", "0.png"), ("rejected", "1.png")],
        ["data.samples_per_prompt=3"],
        "got 2 stored samples, but stage 'image' takes 3 of each prompt",
    ),
    ("another role", [("source", "0.png")], [], "got media of role 'source', expected preferred or rejected or target"),
]


@pytest.mark.parametrize(("name", "media", "settings", "says"), BAD, ids=[name for name, *_ in BAD])
def test_bad_rows_are_refused_before_anything_starts(
    name: str, media: list[tuple[str, str]], settings: list[str], says: str, catalog: Catalog, tmp_path: Path
) -> None:
    for number in range(3):
        picture(tmp_path, number)
    file = prompt_file(tmp_path, [media])
    overrides = [f"data.train={file}", "data.prompts_per_step=1", *settings]
    with pytest.raises(DataError, match=r"stored\.jsonl:1") as caught:
        read_data(planned(catalog, "quickstart-dpo-pairs", overrides, tmp_path))
    assert says in str(caught.value)


def test_prompts_without_any_samples_ask_for_a_file_of_them_under_the_engines_key(
    catalog: Catalog, tmp_path: Path
) -> None:
    for recipe, key in (("quickstart-dpo-pairs", "engine.path"), ("quickstart-regularised", "engine.stored.path")):
        file = prompt_file(tmp_path, [[]])
        plan = planned(catalog, recipe, [f"data.train={file}", "data.eval=null", "data.prompts_per_step=1"], tmp_path)
        with pytest.raises(DataError, match=rf"^{key}: got no stored samples .* no row of .*stored\.jsonl has any"):
            read_data(plan)


def test_a_video_for_an_image_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, [[("target", picture(tmp_path, 0))]], modality="video")
    with pytest.raises(DataError, match=r"got video .* expected image, which stage 'image' makes"):
        read_data(planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=1"], tmp_path))


def test_images_of_another_size_are_refused(model: Sd3Model, catalog: Catalog, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, [[("target", picture(tmp_path, 0, size=48))]] * 2)
    plan = planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path)
    with pytest.raises(DataError, match=r"0.png' \(target\): got height 48, width 48, expected height 64, width 64"):
        read(model, plan)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_other_modes_are_read_as_rgb(model: Sd3Model, catalog: Catalog, tmp_path: Path, mode: str) -> None:
    grey = np.full((SIZE, SIZE), 51, dtype=np.uint8)
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    image.save(tmp_path / "grey.tiff")
    file = prompt_file(tmp_path, [[("target", "grey.tiff")]] * 2)
    track = read(model, planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path))
    assert track.media is not None
    # 51 of 255 is 1/5, in fp32 whatever the mode.
    assert torch.equal(track.media.stacked, torch.full((2, 3, SIZE, SIZE), 0.2))


def test_images_without_a_range_of_values_are_refused(model: Sd3Model, catalog: Catalog, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((SIZE, SIZE), dtype=np.float32)).save(tmp_path / "float.tiff")
    file = prompt_file(tmp_path, [[("target", "float.tiff")]] * 2)
    plan = planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path)
    with pytest.raises(DataError, match=r"float.tiff.*: the image is broken: its pixels are floating-point numbers"):
        read(model, plan)


@pytest.mark.parametrize("is_heir", [True, False])
def test_a_model_that_encodes_nothing_is_refused_before_a_rollout(
    model: Sd3Model, monkeypatch: pytest.MonkeyPatch, is_heir: bool
) -> None:
    if is_heir:
        monkeypatch.setattr(PipelineModel, "latents_of", DiffusionModel.latents_of)
    other: Any = model if is_heir else SimpleNamespace(spec=model.spec)
    with pytest.raises(
        RecipeError, match="got model 'sd3', which does not implement latents_of; expected one that enc"
    ):
        build(DatasetConfig(), model=other, device="cpu")


def test_a_preference_needs_a_stored_pair() -> None:
    samples = ScoreInput(
        sample_ids=("g/0",),
        group_ids=("g",),
        inputs=Inputs.of_texts(("p",)),
        metadata=({},),
        media=Media(kind="image", values=torch.zeros(1, 3, 2, 2)),
    )
    with pytest.raises(
        RewardFailed, match="prompt of 'g/0' has stored samples of the roles none, expected one 'preferred'"
    ):
        build_preference(RewardConfig(), device="cpu").score(samples)


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        ("quickstart-sft", ["sampling.sde.mode=all"], "sampling.sde.mode: got 'all', expected 'none'"),
        ("quickstart-sft", ["data.eval=stored.jsonl"], "data.eval: got 'stored.jsonl', expected none"),
        ("quickstart-awm", ["engine=dataset", "data.eval=''"], "engine: algorithm 'awm' trains on samples of its own"),
    ],
)
def test_plans_that_cannot_be_are_refused(
    recipe: str, overrides: list[str], says: str, catalog: Catalog, tmp_path: Path
) -> None:
    settings = [*overrides, "data.train=stored.jsonl"]
    if recipe == "quickstart-awm":
        settings += ["sampling.kernel=euler"]
    reasons = match(compose(recipe, settings, catalog=catalog, directory=tmp_path), catalog=catalog).reasons
    assert any(str(reason).startswith(says) for reason in reasons), [str(reason) for reason in reasons]


def test_an_example_of_the_own_file_belongs_to_its_group(model: Sd3Model, catalog: Catalog, tmp_path: Path) -> None:
    """Whatever else is in the request: ranks and pieces read the same."""
    file = targets(tmp_path, 5)
    plan = planned(catalog, "quickstart-sft", [f"data.train={file}", "data.prompts_per_step=2"], tmp_path)
    engine = build(DatasetConfig(path=str(file)), model=model, device="cpu")
    request = build_request(
        [dataclasses.replace(prompt, media=()) for prompt in read_prompts(file)],
        track="image",
        sampling=plan.only.sampling,
        samples_per_prompt=1,
        model=model,
        trajectory="none",
        seed=0,
        rollout=0,
        policy_version=0,
    )
    whole, piece = engine.generate(request), engine.generate(request.select([3]))
    assert piece.inputs.texts == whole.inputs.texts[3:4]
    # Five draws of five examples are all equal in one of 625 cases; this seed's are not.
    assert len(set(whole.inputs.texts)) > 1
