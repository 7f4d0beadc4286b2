"""Videos from a first frame: what is refused, what trains, and runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.run import train
from unirl.models.wan21 import i2v, tiny
from unirl.models.wan21.config import Wan21Config, Wan21I2VConfig
from unirl.models.wan21.i2v import Wan21I2VModel
from unirl.models.wan21.model import build
from wan_first_frames import frames_of, initial


@pytest.fixture
def sampling(sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    return dataclasses.replace(sampling, max_sequence_length=512)


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint."""

    def done(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return done


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("model_index.json", _class_name="WanPipeline"), r"'WanPipeline'.*Choose model=wan21, or"),
        (change("model_index.json", boundary_ratio=0.9), r"for Wan 2\.2, by its boundary_ratio; expected Wan 2\.1 for"),
        (
            change("model_index.json", expand_timesteps=True),
            r"one expert, by its expand_timesteps, whose first frame is a part of the latents at timestep 0; expected",
        ),
        (change("transformer/config.json", in_channels=4), r"for text to video, by its in_channels = 4; expected"),
        (change("transformer/config.json", in_channels=8), r"another condition .* in_channels = 8 of 4 out_channels"),
        # A mask of two channels where the VAE makes one latent frame of two.
        (
            change("vae/config.json", scale_factor_temporal=2),
            r"another condition .* in_channels = 12 of 4 out_channels",
        ),
        (change("transformer/config.json", pos_embed_seq_len=10), r"a first and a last frame, by its pos_embed_seq_le"),
    ],
    ids=["text", "two-experts", "ti2v", "no-frame-input", "other-input", "other-mask", "last-frame"],
)
def test_a_checkpoint_for_something_else_is_refused_when_a_recipe_is_composed_and_when_it_is_loaded(
    tmp_path: Path, i2v_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(i2v_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*{message}"):
        i2v.build(Wan21I2VConfig(path=str(folder)), device="cpu")
    (reason,) = refusals("wan21-i2v", folder)
    assert re.search(rf"^model\.path: .*{message}", reason)


def refusals(name: str, folder: Path, *words: str) -> list[str]:
    """Why match() refuses the recipe on a checkpoint."""
    catalog = Catalog.discover()
    plan = compose(f"{name}/flow-grpo", ["data.train=frames.jsonl", f"model.path={folder}", *words], catalog=catalog)
    return [str(reason) for reason in match(plan, catalog=catalog).reasons]


def test_each_model_takes_the_checkpoints_of_its_own_task(tiny_folder: Path, i2v_folder: Path) -> None:
    assert refusals("wan21", tiny_folder) == refusals("wan21-i2v", i2v_folder) == []
    (reason,) = refusals("wan21", i2v_folder)
    assert reason.startswith("model.path: got a checkpoint of 'WanImageToVideoPipeline'")
    assert "Choose model=wan21-i2v" in reason
    with pytest.raises(RecipeError, match=r"'WanImageToVideoPipeline'; wan21 .* Choose model=wan21-i2v"):
        build(Wan21Config(path=str(i2v_folder)), device="cpu")
    with pytest.raises(RecipeError, match=r"'WanPipeline'; wan21-i2v .* Choose model=wan21,"):
        i2v.build(Wan21I2VConfig(path=str(tiny_folder)), device="cpu")


@pytest.mark.parametrize("part", ["image_encoder", "image_processor"])
def test_a_checkpoint_without_the_encoder_that_it_needs_is_refused(tmp_path: Path, i2v_folder: Path, part: str) -> None:
    folder = tmp_path / "other"
    shutil.copytree(i2v_folder, folder)
    shutil.rmtree(folder / part)
    change("model_index.json", **{part: [None, None]})(folder)
    with pytest.raises(RecipeError, match=rf"^model\.path: .*lacks {part}/"):
        i2v.build(Wan21I2VConfig(path=str(folder)), device="cpu")


def test_a_checkpoint_whose_image_processor_is_incomplete_is_refused(tmp_path: Path, i2v_folder: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(i2v_folder, folder)
    (folder / "image_processor" / "preprocessor_config.json").unlink()
    with pytest.raises(RecipeError, match=r"^model\.path: .*(a component|the image_processor in .*) does not load"):
        i2v.build(Wan21I2VConfig(path=str(folder)), device="cpu")


@pytest.mark.parametrize("engine", ["sglang", "vllm-omni"])
def test_a_recipe_is_composed_for_engines_with_a_bridge(engine: str, i2v_folder: Path) -> None:
    assert not refusals("wan21-i2v", i2v_folder, f"engine={engine}")


def test_another_length_of_prompts_is_refused_beside_image_features(
    i2v_folder: Path, i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    message = r"^sampling\.max_sequence_length: got 48; .*before the last 512 tokens\. Set it to 512\.$"
    (reason,) = refusals("wan21-i2v", i2v_folder, "sampling.max_sequence_length=48")
    assert re.search(message, reason)
    asked = dataclasses.replace(sampling, max_sequence_length=48)
    with pytest.raises(RecipeError, match=message):
        i2v_model.encode(frames_of(tmp_path, [0, 1]), sampling=asked)
    tiny.write_i2v(tmp_path / "plain", seed=0, image_encoder=False)
    assert refusals("wan21-i2v", tmp_path / "plain", "sampling.max_sequence_length=48") == []


def test_no_frame_and_two_are_refused(i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path) -> None:
    inputs = frames_of(tmp_path, [0, 1])
    two = dataclasses.replace(inputs, media=((*inputs.media[0], *inputs.media[1]), inputs.media[1]))
    with pytest.raises(DataError, match=r"^prompt 'a ring' \('a ring'\): got no source image, expected one, the first"):
        i2v_model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    with pytest.raises(DataError, match=r"^prompt '0' .*: got 2 source images, expected one.*takes no last frame\.$"):
        i2v_model.encode(two, sampling=sampling)


def test_a_frame_that_would_be_stretched_by_more_than_5_per_cent_is_refused(
    i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    """By either side. Of 64 x 32 pixels, 66 x 32 are off by 3 %, and 68 x 32 by 6 %."""
    for number, (height, width) in enumerate([(32, 66), (33, 64)]):
        i2v_model.encode(frames_of(tmp_path, [3 * number], ["it rolls"], height=height, width=width), sampling=sampling)
    for (height, width), percentage in {(32, 68): 6, (34, 64): 6, (32, 32): 100}.items():
        inputs = frames_of(tmp_path, [0], ["it rolls"], height=height, width=width)
        message = (
            rf"^prompt '0' \('it rolls'\), media '{inputs.media[0][0].uri}': got {width} x {height} pixels for a video of "
            rf"64 x 32, which would stretch it by {percentage}%, expected at most 5%\. Crop it beforehand, or change"
        )
        with pytest.raises(DataError, match=message):
            i2v_model.encode(inputs, sampling=sampling)


def test_a_frame_count_off_the_grid_is_refused_with_the_nearest(
    i2v_model: Wan21I2VModel, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    asked = dataclasses.replace(sampling, frames=8)
    message = r"^sampling\.frames: got 8, expected a multiple of 4 plus 1 .*Nearest: 5 or 9\."
    with pytest.raises(RecipeError, match=message):
        i2v_model.latent_shape(asked)
    with pytest.raises(RecipeError, match=message):
        i2v_model.encode(frames_of(tmp_path, [0, 1]), sampling=asked)


def test_every_parameter_of_the_transformer_trains_and_nothing_else(
    i2v_folder: Path, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    fresh = i2v.build(Wan21I2VConfig(path=str(i2v_folder)), device="cpu")
    conditions = fresh.encode(frames_of(tmp_path, [0, 1]), sampling=sampling)
    x = initial(fresh, sampling)
    fresh.velocity(x, torch.tensor([0.7, 0.2]), conditions).square().mean().backward()
    assert not [name for name, p in fresh.trainable.named_parameters() if p.grad is None or not p.grad.any()]
    others = (fresh.pipeline.text_encoder, fresh.pipeline.image_encoder, fresh.vae)
    assert not any(p.requires_grad for part in others for p in part.parameters())


def test_a_process_without_the_vae_says_who_must_ask_for_it(
    i2v_folder: Path, sampling: LatentSamplingConfig, tmp_path: Path
) -> None:
    model = i2v.build(Wan21I2VConfig(path=str(i2v_folder)), device="cpu", serves=frozenset({"encode"}))
    with pytest.raises(RunFailed, match=r"got a call of `decode`, .* without the VAE"):
        model.encode(frames_of(tmp_path, [0, 1]), sampling=sampling)


def test_a_process_that_encodes_nothing_holds_no_encoder(i2v_folder: Path) -> None:
    model = i2v.build(Wan21I2VConfig(path=str(i2v_folder)), device="cpu", serves=frozenset())
    for part in ("text_encoder", "image_encoder", "vae"):
        assert {p.device.type for p in model.pipeline.components[part].parameters()} == {"meta"}


SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.height=32",
    "sampling.width=48",
    "sampling.frames=5",
    "sampling.sde.last=0.75",
    "train.micro_batch_size=2",
    "eval=null",
    "model.dtype=float32",
    "model.text_dtype=float32",
    "backend.mixed_precision=none",
]


def words_of(folder: Path, checkpoint: Path, *words: str, frames: bool = True) -> list[str]:
    """Settings of a small run over prompts of one text, each with another first frame or none."""
    texts = ["a red ring rolls"] * 3
    media = frames_of(folder, range(3), texts, height=32, width=48).media
    rows = [
        {"prompt": text, "media": [{"modality": "image", "role": "source", "uri": Path(own[0].uri).name}]}
        if frames
        else {"prompt": text}
        for text, own in zip(texts, media, strict=True)
    ]
    (folder / "frames.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        *SMALL,
        f"data.train={folder / 'frames.jsonl'}",
        f"model.path={checkpoint}",
        f"run.dir={folder / 'run'}",
        *words,
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.guidance_scale=4"],
        ["backend.trains=full", "backend.reference_copy=true"],
        ["train.replay=stacked"],
    ],
    ids=["lora", "full", "stacked"],
)
def test_the_recipe_trains_from_ratio_one(overrides: list[str], i2v_folder: Path, tmp_path: Path) -> None:
    catalog = Catalog.discover()
    words = words_of(tmp_path, i2v_folder, *overrides)
    result = train(compose("wan21-i2v/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        # Stacked rows are other forwards: spacings of fp32 log-probs of order 1, times ten.
        assert step["ratio_max_dev_first"] <= (2e-6 if "train.replay=stacked" in overrides else 0.0)
        assert step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        ("wan21-i2v", False, r"got no media of role 'source', of which model 'wan21-i2v' needs one"),
        ("wan21", True, r"got media of role 'source', expected none, which model 'wan21' takes"),
    ],
)
def test_prompts_without_a_frame_and_with_one_too_many_are_refused_before_anything_is_built(
    tiny_folder: Path, i2v_folder: Path, tmp_path: Path, name: str, frames: bool, message: str
) -> None:
    catalog = Catalog.discover()
    checkpoint = i2v_folder if name == "wan21-i2v" else tiny_folder
    words = words_of(tmp_path, checkpoint, frames=frames)
    plan = compose(f"{name}/flow-grpo", words, catalog=catalog)
    with pytest.raises(DataError, match=message):
        train(plan, catalog=catalog, overrides=words)
