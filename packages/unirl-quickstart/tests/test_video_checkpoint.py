"""The shipped video model: an ordinary Wan, captions of clips, and a VAE that keeps what the reward reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan.config import Wan21Config
from unirl.models.wan.model import build
from unirl.quickstart import video_checkpoint_path, video_prompts_path
from unirl.rewards.rules.clips_reading import read_clip
from unirl.rewards.rules.clips_world import ALL_CLIPS, MOTIONS, NUM_FRAMES, SIZE_PX, Clip, render_clips
from unirl.rewards.rules.shapes_world import COLORS, SHAPES

RunScript = Callable[..., dict[str, bytes]]
SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
PARTS = ("color", "shape", "motion", "perfect", "reward")
SAMPLING = LatentSamplingConfig(
    num_inference_steps=10, height=SIZE_PX, width=SIZE_PX, frames=NUM_FRAMES, max_sequence_length=8
)


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_video_checkpoint")


@pytest.fixture(scope="module")
def wan(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("tiny_wan")


@pytest.fixture(scope="module")
def pipeline():  # importing its type costs seconds where no test needs it
    from diffusers import WanPipeline

    result = WanPipeline.from_pretrained(video_checkpoint_path(), local_files_only=True)
    result.set_progress_bar_config(disable=True)
    return result


@pytest.fixture(scope="module")
def model():
    return build(Wan21Config(path=str(video_checkpoint_path()), decode_batch=0), device="cpu")


def clips(split: Literal["train", "heldout"]) -> list[Clip]:
    rows = [json.loads(line) for line in video_prompts_path(split).read_text().splitlines()]
    return [Clip(**row["metadata"]) for row in rows]


def fresh(*, count: int) -> tuple[Tensor, list[Clip]]:
    generator = torch.Generator().manual_seed(5)
    videos = torch.cat([render_clips(clip, count=count, generator=generator) for clip in ALL_CLIPS])
    return videos, [clip for clip in ALL_CLIPS for _ in range(count)]


def test_it_is_an_ordinary_wan_of_at_most_two_and_a_half_megabytes(
    check_ordinary: Callable[[Any, Path], None],
) -> None:
    from diffusers import WanPipeline

    check_ordinary(WanPipeline, video_checkpoint_path())


def test_prompts_are_the_captions_of_all_clips_and_the_held_out_ones_are_not_in_training() -> None:
    for split in SPLITS:
        rows = [json.loads(line) for line in video_prompts_path(split).read_text().splitlines()]
        assert [row["prompt"] for row in rows] == [clip.caption for clip in clips(split)]
        assert len({row["prompt_id"] for row in rows}) == len(rows)
    assert set(clips("heldout")) == {clip for clip in ALL_CLIPS if clip.is_held_out}
    assert set(clips("train")) == set(ALL_CLIPS) - set(clips("heldout"))


def test_captions_are_whole_words_that_fit_into_eight_tokens(pipeline) -> None:
    tokens = {clip: tuple(pipeline.tokenizer(clip.caption).input_ids) for clip in ALL_CLIPS}
    for clip, ids in tokens.items():
        assert len(ids) == len(clip.caption.split()) + 1 <= 8
        assert pipeline.tokenizer.decode(ids, skip_special_tokens=True) == clip.caption
    assert len(set(tokens.values())) == len(ALL_CLIPS)


def test_the_vae_projects_each_patch_to_orthonormal_directions(pipeline, wan: ModuleType) -> None:
    """A latent moves by what its direction has in common with a patch: no block, norm or SiLU in between is seen."""
    vae = pipeline.vae
    generator = torch.Generator().manual_seed(0)
    videos = torch.rand(3, NUM_FRAMES, 3, SIZE_PX, SIZE_PX, generator=generator)
    half = (wan.encode_clips(vae, each) for each in (videos, torch.zeros_like(videos), videos / 2))
    whole, black, halved = (each * vae.config.latents_std[0] for each in half)
    # Up to 14 in size behind offsets of 64: fp32 rounds there by 4e-6, and norms differ by up to 2e-4 of 64 + 14.
    torch.testing.assert_close(halved, (whole + black) / 2, rtol=0, atol=0.02)
    weight = vae.encoder.conv_in.weight[:-1, :, -1, 1, 1]
    # Directions are stored in half precision, entries below 1 with an error of 2.5e-4.
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), rtol=0, atol=5e-3)
    moved = videos.clone()
    moved[:, 2:, :, :8, :8] = 0
    change = (wan.encode_clips(vae, moved) - wan.encode_clips(vae, videos)).abs().amax(dim=1)
    # fp32 rounds at 64 by 4e-6, divided by the deviation of 0.3.
    is_same = change < 1e-3
    # Only the patch that was changed, in its frames: nothing leaks over time or to neighbours.
    expected = torch.ones(3, NUM_FRAMES, 4, 4, dtype=torch.bool)
    expected[:, 2:, 0, 0] = False
    assert torch.equal(is_same, expected)


def test_the_reward_reads_from_the_vae_what_the_world_draws(pipeline, wan: ModuleType) -> None:
    videos, asked = fresh(count=4)
    again = wan.decode_latents(pipeline.vae, wan.encode_clips(pipeline.vae, videos))
    seen = wan.score(again, asked)
    assert seen == pytest.approx(_card()["round trip"], abs=0.08)  # of 256 clips: 3 standard errors of a share near 0.8
    assert wan.score(videos, asked)["perfect"] == 1


def test_the_plugin_computes_what_pre_training_did(pipeline, model, wan: ModuleType) -> None:
    some = clips("heldout")[:6]
    # Sigmas by the shift of the checkpoint's scheduler, in fp32.
    torch.testing.assert_close(model.schedule(SAMPLING), wan.sigmas(), rtol=0, atol=2e-7)
    assert tuple(model.latent_shape(SAMPLING)) == wan.LATENT_SHAPE
    conditions = model.encode(Inputs.of_texts([clip.caption for clip in some]), sampling=SAMPLING)
    embeds = wan.embed(pipeline, [clip.caption for clip in some])
    # A batch of other size and order: fp32 rounding of one layer with states of size 1.
    torch.testing.assert_close(conditions["prompt_embeds"], embeds, rtol=0, atol=1e-4)
    x, sigma = torch.randn(6, *wan.LATENT_SHAPE, generator=torch.Generator().manual_seed(0)), torch.full((6,), 0.7)
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
        expected = wan.velocity(pipeline.transformer, x, sigma, embeds=conditions["prompt_embeds"])
    assert torch.equal(result, expected)
    # Latents reach 30: fp32 rounding through offsets of 64.
    torch.testing.assert_close(model.decode(x), wan.decode_latents(pipeline.vae, x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("frames", [1, 4, 6])
def test_a_number_of_frames_that_is_not_whole_patches_is_refused(model, frames: int) -> None:
    settings = LatentSamplingConfig(
        num_inference_steps=10, height=SIZE_PX, width=SIZE_PX, frames=frames, max_sequence_length=8
    )
    with pytest.raises(RecipeError, match=rf"sampling\.frames: got {frames}, expected a multiple of 5 from 5 to 160"):
        model.latent_shape(settings)


def _card() -> dict[str, dict[str, float]]:
    card = (video_checkpoint_path() / "README.md").read_text()
    pattern = r"^\| (heldout|train|round trip) \|" + r" ([\d.]+) \|" * len(PARTS) + "$"
    return {
        split: dict(zip(PARTS, map(float, shares), strict=True))
        for split, *shares in re.findall(pattern, card, re.MULTILINE)
    }


def test_it_is_as_good_as_its_card_says(pipeline, script: ModuleType) -> None:
    stated = _card()
    result = script.measure(pipeline, clips("heldout"), seed=77, rounds=36)
    # Other noise than the card's: three standard errors of the difference of two shares of 576, near a half.
    assert result == pytest.approx(stated["heldout"], abs=3 * (2 * 0.25 / 576) ** 0.5)
    # Room to learn, and something to learn from.
    for split in SPLITS:
        assert 0.3 < stated[split]["perfect"] < 0.7


def test_clips_are_a_function_of_the_seed(pipeline, wan: ModuleType) -> None:
    embeds = wan.embed(pipeline, [clip.caption for clip in clips("heldout")[:4]])
    first, again, other = (wan.sample(pipeline, embeds, seed=seed) for seed in (3, 3, 4))
    assert first.equal(again)
    assert not first.equal(other)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_script_writes_the_same_bytes_twice(tmp_path: Path, run_script: RunScript) -> None:
    settings = ["--steps=2", "--clips-per-caption=4", "--batch=8", "--rounds=1"]
    written = [run_script("make_video_checkpoint", tmp_path / name, *settings) for name in ("first", "second")]
    assert written[0] == written[1]
    line = re.search(r"make_video_checkpoint\.py (.*)$", written[0]["checkpoint/README.md"].decode(), re.MULTILINE)
    assert line is not None and sorted(line[1].split()) == sorted(settings)
    for split in SPLITS:
        assert written[0][f"prompts/{split}.jsonl"] == video_prompts_path(split).read_bytes()


def test_the_example_of_its_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/tutorials/quickstart-video.md").read_text(encoding="utf-8")
    look, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(look, names := dict[str, Any]())
    assert capsys.readouterr().out.endswith("(5, 32, 32, 3)\n")
    seen = read_clip(torch.from_numpy(np.asarray(names["video"])).permute(0, 3, 1, 2))
    # Colour and direction are nearly always right; the shape is what it learns.
    assert {list(COLORS)[index] for index in seen.color} == {"blue"}
    assert {list(MOTIONS)[index] for index in seen.motion} == {"left"}
    assert {index for index in seen.shape.tolist()} <= set(range(-1, len(SHAPES)))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_learns_to_draw_held_out_clips(rewards_of: Callable[..., list[float]]) -> None:
    before, after = rewards_of("quickstart-video", "clips", "eval.samples_per_prompt=72")
    # Each is the mean of 1152 rewards, of standard deviation 0.21 before training and less after it: three standard
    # errors of the difference.
    assert after - before > 3 * 0.21 * (2 / 1152) ** 0.5, (before, after)
