from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import cut
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.hunyuan_video.config import HunyuanVideoConfig
from unirl.models.hunyuan_video.model import HunyuanVideoModel, build
from unirl.models.hunyuan_video.plugin import SPEC


def test_the_latent_of_a_video(model: HunyuanVideoModel, sampling: LatentSamplingConfig) -> None:
    """One latent frame for the first frame and for every four after it; an eighth of each side."""
    assert model.latent_shape(sampling) == (4, 3, 4, 8)
    assert model.latent_shape(dataclasses.replace(sampling, frames=1)) == (4, 1, 4, 8)
    # Patches of 2 x 2, in every latent frame.
    assert model.num_tokens((4, 3, 4, 8)) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 8}, r"sampling\.frames: got 8, expected a multiple of 4 plus 1\. Nearest: 5 or 9\."),
        ({"height": 40}, r"sampling\.height: got 40, expected a multiple of 16\. Nearest: 32 or 48\."),
        ({"guidance_scale": 4.0}, r"sampling\.guidance_scale: got 4; .* distilled into its weights\. Set it to 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: HunyuanVideoModel, sampling: LatentSamplingConfig, changes: dict[str, float], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.latent_shape(dataclasses.replace(sampling, **changes))


def test_guidance_by_two_forwards_is_refused_before_anything_is_loaded() -> None:
    catalog = Catalog.discover()

    def reasons(word: str) -> str:
        recipe = compose("hunyuan-video/dance-grpo", ["data.train=prompts.txt", word], catalog=catalog)
        return "\n".join(str(reason) for reason in match(recipe, catalog=catalog).reasons)

    assert reasons("+sampling.options.embedded_guidance=4") == ""
    assert reasons("sampling.guidance_scale=4").endswith("needs 'guidance'; model 'hunyuan-video' does not provide it.")
    assert "sampling.options.embedded_guidance: got -1" in reasons("+sampling.options.embedded_guidance=-1")


def test_prompts_longer_than_the_model_was_trained_with_are_refused(
    model: HunyuanVideoModel, sampling: LatentSamplingConfig
) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 257; .* 1 to 256"):
        model.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=257))


def test_encoders_and_vae_are_frozen_and_the_transformer_is_not(model: HunyuanVideoModel) -> None:
    parts = {n: p for n, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())} == {"transformer"}
    assert not any(part.training for part in parts.values())
    assert getattr(model, SPEC.trainable) is model.trainable


def test_both_text_encoders_have_the_dtype_for_texts(tiny_folder: Path) -> None:
    parts = build(HunyuanVideoConfig(path=str(tiny_folder), text_dtype="bfloat16"), device="cpu").pipeline.components
    names = ("text_encoder", "text_encoder_2", "vae", "transformer")
    dtypes = [next(parts[name].parameters()).dtype for name in names]
    assert dtypes == 2 * [torch.bfloat16] + 2 * [torch.float32]


def test_videos_are_decoded_in_chunks_that_bound_the_memory(tiny_folder: Path, model: HunyuanVideoModel) -> None:
    latents = torch.randn(3, 4, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    at_once = build(HunyuanVideoConfig(path=str(tiny_folder), decode_batch=0), device="cpu")
    with torch.no_grad():
        videos = model.decode(latents)
        # Another batch, another order of sums in the convolutions.
        torch.testing.assert_close(at_once.decode(latents), videos, rtol=0, atol=1e-5)
    assert videos.shape == (3, 5, 3, 32, 64)


def test_large_videos_are_decoded_in_tiles_if_asked(tiny_folder: Path) -> None:
    """Sides of 272 pixels, one tile more than 256."""
    latents = torch.randn(1, 4, 1, 34, 4, generator=torch.Generator().manual_seed(0))
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for tiled, heights in sizes.items():
        model = build(HunyuanVideoConfig(path=str(tiny_folder), vae_tiling=tiled), device="cpu")
        model.vae.decoder.register_forward_pre_hook(lambda _m, args, kept=heights: kept.append(args[0].shape[3]))
        with torch.no_grad():
            assert model.decode(latents).shape == (1, 3, 272, 32)
    # Of 32 latents, each 24 further on.
    assert sizes == {False: [34], True: [32, 10]}


def test_a_video_has_a_gradient_to_its_latent(model: HunyuanVideoModel) -> None:
    latents = torch.zeros(1, 4, 2, 4, 4, requires_grad=True)
    model.decode(latents).sum().backward()
    assert latents.grad is not None
    assert bool((latents.grad.abs().sum(dim=(0, 1, 3, 4)) > 0).all())


def test_a_wrapper_that_rounds_the_timestep_is_refused(tiny_folder: Path, sampling: LatentSamplingConfig) -> None:
    model = build(HunyuanVideoConfig(path=str(tiny_folder), dtype="bfloat16"), device="cpu")
    conditions = model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    x = torch.zeros(1, *model.latent_shape(sampling))

    def cast_inputs(_module: torch.nn.Module, args: tuple[()], kwargs: dict[str, torch.Tensor]) -> object:
        return args, {**kwargs, "timestep": kwargs["timestep"].bfloat16()}

    model.trainable.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"^hunyuan-video: the timestep reached the transformer as torch\.bfloat16"):
        model.velocity(x, torch.ones(1), conditions)


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint."""

    def done(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return done


def without_begin(folder: Path) -> None:
    """A tokenizer that does not begin texts with a token."""
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            change("model_index.json", _class_name="HunyuanVideo15Pipeline"),
            r"'HunyuanVideo15Pipeline'; .* Choose model=hunyuan-video15, or",
        ),
        (change("transformer/config.json", guidance_embeds=False), r"has no guidance_embeds, so it is not told"),
        (change("transformer/config.json", image_condition_type="token_replace"), r"for image to video; expected"),
        (lambda folder: shutil.rmtree(folder / "text_encoder_2"), r"lacks text_encoder_2/"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (lambda folder: (folder / "tokenizer_2" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer_2/"),
        (without_begin, r"makes 94 tokens of the text before the prompt, and HunyuanVideoPipeline drops 95"),
        (change("tokenizer/tokenizer_config.json", padding_side="left"), r"pads on the left, where .* drops tokens"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=["1.5", "not-distilled", "image-to-video", "no-clip", "no-tokens", "no-clip-tokens", "begin", "left", "cut"],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        build(HunyuanVideoConfig(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_the_layers_that_may_be_split_exist_in_every_block_of_two_streams(model: HunyuanVideoModel) -> None:
    linear = {name for name, module in model.trainable.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {pattern.replace("*", "0") for pattern in SPEC.tensor_parallel} <= linear
