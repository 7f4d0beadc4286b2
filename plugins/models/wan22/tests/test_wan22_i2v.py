"""Two experts from a first frame: against diffusers' WanImageToVideoPipeline with Euler steps in place of UniPC, what is
refused, and runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from unirl.conformance.pipeline_parity import EulerScheduler
from unirl.core.errors import DataError, RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.run import train
from unirl.models.wan22 import i2v
from unirl.models.wan22.config import Wan22Config, Wan22I2VConfig
from unirl.models.wan22.i2v import Wan22I2VModel
from unirl.models.wan22.model import build
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame
from wan_first_frames import NEGATIVE, PROMPTS, frames_of, initial, pipeline_of, run_pipeline, sample

# Four or eight forwards of fp32 arithmetic at another batch size, from sigmas that differ in their last bit, of latents
# of order 1.
LATENT_TOLERANCE = 1e-5
PLAIN = {"guidance_scale": 1.0}
GUIDED = {"guidance_scale": 3.5, "guidance_mode": "two-pass"}
SCALES = {
    "guidance_scale": 4.0,
    "guidance_mode": "two-scale",
    "guidance_options": {"scale_low": 1.5, "boundary": 0.875},
}


@pytest.fixture(scope="module")
def pipeline(i2v_model: Wan22I2VModel) -> WanImageToVideoPipeline:
    return pipeline_of(i2v_model, EulerScheduler(shift=3.0), boundary_ratio=0.875)


@pytest.mark.parametrize("size", [(5, 32, 64), (9, 48, 32)], ids=str)
@pytest.mark.parametrize("guidance", [PLAIN, GUIDED, SCALES], ids=["plain", "guided", "two-scales"])
def test_conditions_velocities_latents_and_videos_are_the_pipelines(
    i2v_model: Wan22I2VModel,
    pipeline: WanImageToVideoPipeline,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    size: tuple[int, int, int],
    guidance: dict[str, object],
) -> None:
    """Each expert's inputs and its first velocity bit for bit; two rows in one batch, where the pipeline takes one."""
    frames, height, width = size
    asked = dataclasses.replace(sampling, frames=frames, height=height, width=width, **guidance)
    inputs, x = frames_of(tmp_path, [1, 2], height=height, width=width), initial(i2v_model, asked)
    result = sample(i2v_model, x, asked, inputs)
    with torch.no_grad():
        decoded = i2v_model.decode(result)
    assert decoded.shape == (2, frames, 3, height, width)
    assert float(decoded.std()) > 0.01
    for row, text in enumerate(PROMPTS):
        given = inputs.select([row])
        arguments = (pipeline, x[row : row + 1], asked, text, inputs.media[row])
        latents, calls = run_pipeline(*arguments)
        videos, _ = run_pipeline(*arguments, output="pt")
        torch.testing.assert_close(result[row : row + 1], latents, rtol=0, atol=LATENT_TOLERANCE)
        torch.testing.assert_close(decoded[row : row + 1], videos, rtol=0, atol=LATENT_TOLERANCE)
        # The shift of 3 puts four steps at 1, 0.9, 0.75 and 0.5, so that each expert has two.
        branches = [given] if guidance is PLAIN else [given, given.negative(NEGATIVE)]
        names = [name for name, _, _ in calls]
        assert names == 2 * len(branches) * ["transformer"] + 2 * len(branches) * ["transformer_2"]
        for start in (0, 2 * len(branches)):
            for branch, (_, kwargs, output) in zip(branches, calls[start:], strict=False):
                conditions = i2v_model.encode(branch, sampling=asked)
                assert torch.equal(kwargs["hidden_states"][:, 4:], conditions["source"])
                assert torch.equal(kwargs["encoder_hidden_states"], conditions["prompt_embeds"])
                assert kwargs["encoder_hidden_states_image"] is None and "image_embeds" not in conditions
                with torch.no_grad():
                    velocity = i2v_model.velocity(kwargs["hidden_states"][:, :4], kwargs["timestep"] / 1000, conditions)
                # Not bit for bit: 1000 (t / 1000) is not t, by a spacing of fp32 numbers.
                torch.testing.assert_close(velocity, output, rtol=0, atol=LATENT_TOLERANCE)


def test_a_frame_before_its_mask_is_far_from_the_pipeline_and_so_is_another_frame(
    i2v_model: Wan22I2VModel,
    pipeline: WanImageToVideoPipeline,
    sampling: LatentSamplingConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, x = frames_of(tmp_path, [1, 2]), initial(i2v_model, sampling)
    rows = [run_pipeline(pipeline, x[[row]], sampling, PROMPTS[row], inputs.media[row])[0] for row in range(2)]
    expected = torch.cat(rows)
    other = (sample(i2v_model, x, sampling, frames_of(tmp_path, [1, 3])) - expected).flatten(1).abs().amax(dim=1)
    assert other[0] <= LATENT_TOLERANCE and other[1] > 1e-2
    right = WanFirstFrame.arguments

    def swapped(self: WanFirstFrame, x: torch.Tensor, conditions: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = right(self, x, conditions)
        noise, mask, frame = given["hidden_states"].split([4, 4, 4], dim=1)
        return {**given, "hidden_states": torch.cat([noise, frame, mask], dim=1)}

    monkeypatch.setattr(WanFirstFrame, "arguments", swapped)
    result = sample(i2v_model, x, sampling, inputs)
    assert bool(((result - expected).flatten(1).abs().amax(dim=1) > 100 * LATENT_TOLERANCE).all())


def test_a_frame_that_would_be_stretched_is_refused(
    i2v_model: Wan22I2VModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    inputs = frames_of(tmp_path, [0, 0], height=48, width=64)
    with pytest.raises(DataError, match=r"got 64 x 48 pixels for a video of 64 x 32, .* by 50%, expected at most 5%"):
        i2v_model.encode(inputs, sampling=sampling)


def refusals(name: str, folder: Path, *words: str) -> list[str]:
    """Why match() refuses the recipe on a checkpoint."""
    catalog = Catalog.discover()
    plan = compose(f"{name}/flow-grpo", ["data.train=frames.jsonl", f"model.path={folder}", *words], catalog=catalog)
    return [str(reason) for reason in match(plan, catalog=catalog).reasons]


def test_each_model_takes_the_checkpoints_of_its_own_task(tiny_folder: Path, i2v_folder: Path) -> None:
    assert refusals("wan22", tiny_folder) == refusals("wan22-i2v", i2v_folder) == []
    (reason,) = refusals("wan22-i2v", tiny_folder)
    assert reason.startswith("model.path: got a checkpoint of 'WanPipeline'") and "Choose model=wan22, or" in reason
    with pytest.raises(RecipeError, match=r"'WanImageToVideoPipeline'; wan22 .* Choose model=wan22-i2v"):
        build(Wan22Config(path=str(i2v_folder)), device="cpu")
    with pytest.raises(RecipeError, match=r"'WanPipeline'; wan22-i2v .* Choose model=wan22,"):
        i2v.build(Wan22I2VConfig(path=str(tiny_folder)), device="cpu")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (
            "model_index.json",
            {"expand_timesteps": True},
            r"a Wan 2\.2 of one expert, by its expand_timesteps, whose first frame is a part of the latents",
        ),
        ("model_index.json", {"boundary_ratio": None}, r"boundary_ratio None in its model_index\.json"),
        ("model_index.json", {"transformer_2": [None, None]}, r"no transformer_2 by its model_index\.json"),
        ("transformer_2/config.json", {"in_channels": 4}, r"for text to video, by its in_channels = 4"),
        ("transformer/config.json", {"image_dim": 1280}, r"for Wan 2\.1, by its image_dim"),
    ],
    ids=["ti2v", "no-boundary", "one-expert", "no-frame-input", "wan21"],
)
def test_another_wan_is_refused_when_a_recipe_is_composed_and_when_it_is_loaded(
    tmp_path: Path, i2v_folder: Path, file: str, values: dict[str, object], message: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(i2v_folder, folder)
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **values}))
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        i2v.build(Wan22I2VConfig(path=str(folder)), device="cpu")
    (reason,) = refusals("wan22-i2v", folder)
    assert re.search(rf"^model\.path: .*{message}", reason)


@pytest.mark.parametrize("engine", ["sglang", "vllm-omni"])
def test_a_recipe_is_composed_for_engines_with_a_bridge(engine: str, i2v_folder: Path) -> None:
    assert not refusals("wan22-i2v", i2v_folder, f"engine={engine}")


@pytest.mark.parametrize(
    ("overrides", "lora_layers"),
    [([], 32), (["model.experts=high"], 16), (["backend.trains=full", "backend.reference_copy=true"], 0)],
    ids=["lora", "high", "full"],
)
def test_the_recipe_trains_both_experts_or_one_from_ratio_one(
    overrides: list[str], lora_layers: int, i2v_folder: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "it rolls", "media": [{"modality": "image", "role": "source", "uri": Path(own[0].uri).name}]}
        for own in frames_of(tmp_path, range(3), ["it rolls"] * 3, height=32, width=48).media
    ]
    (tmp_path / "frames.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "run.max_steps=2", "run.threads=1", "data.prompts_per_step=2", "data.samples_per_prompt=2",
        "sampling.num_inference_steps=4", "sampling.height=32", "sampling.width=48", "sampling.frames=5",
        "sampling.max_sequence_length=16", "sampling.sde.last=0.75", "train.micro_batch_size=2", "eval=null",
        "model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none", *overrides,
        f"data.train={tmp_path / 'frames.jsonl'}", f"model.path={i2v_folder}", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    catalog = Catalog.discover()
    result = train(compose("wan22-i2v/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    assert all(step["ratio_max_dev_first"] == 0.0 and step["grad_norm"] > 0 for step in steps)
    assert not lora_layers or f'"lora_layers": {float(lora_layers)}' in json.dumps(events)
