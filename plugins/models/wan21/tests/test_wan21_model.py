from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import as_hub_id, cut
from diffusers import AutoencoderKLWan
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_model import set_tiling
from unirl.models.wan21.config import Wan21Config
from unirl.models.wan21.model import Wan21Model, build
from unirl.models.wan21.plugin import SPEC


def test_a_hub_id_has_the_schedule_and_the_weights_of_the_local_path(
    tiny_folder: Path,
    model: Wan21Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: LatentSamplingConfig,
) -> None:
    fetched = build(Wan21Config(path=as_hub_id(tiny_folder, tmp_path, monkeypatch)), device="cpu")
    assert torch.equal(fetched.schedule(sampling), model.schedule(sampling))
    state = fetched.trainable.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.trainable.state_dict().items())


def test_the_latent_of_a_video(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    """One latent frame for the first frame and for every four after it; an eighth of each side."""
    assert model.latent_shape(sampling) == (4, 3, 4, 8)
    assert model.latent_shape(dataclasses.replace(sampling, frames=1)) == (4, 1, 4, 8)
    # Patches of 2 x 2, in every latent frame.
    assert model.num_tokens((4, 3, 4, 8)) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 8}, r"sampling\.frames: got 8, expected a multiple of 4 plus 1 from 1 to 253\. Nearest: 5 or 9\."),
        ({"frames": 0}, r"sampling\.frames: got 0, .* Nearest: 1\."),
        ({"frames": 1000}, r"sampling\.frames: got 1000, .* Nearest: 253\."),
        ({"height": 40}, r"sampling\.height: got 40, expected a multiple of 16 from 16 to 1024\. Nearest: 32 or 48\."),
        ({"width": 2048}, r"sampling\.width: got 2048, .* Nearest: 1024\."),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    model: Wan21Model, sampling: LatentSamplingConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.latent_shape(dataclasses.replace(sampling, **changes))


def test_prompts_longer_than_the_encoder_takes_are_refused(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 513; .* 1 to 512"):
        model.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=513))


def test_encoder_and_vae_are_frozen_and_the_transformer_is_not(model: Wan21Model) -> None:
    parts = {n: p for n, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())} == {"transformer"}
    assert not any(part.training for part in parts.values())
    assert getattr(model, SPEC.trainable) is model.trainable


def test_videos_are_decoded_in_chunks_that_bound_the_memory(tiny_folder: Path, model: Wan21Model) -> None:
    latents = torch.randn(3, 4, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    at_once = build(Wan21Config(path=str(tiny_folder), decode_batch=0), device="cpu")
    rows: list[int] = []
    handle = model.vae.post_quant_conv.register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    with torch.no_grad():
        videos = model.decode(latents)
        # Another batch, another order of sums in the convolutions.
        torch.testing.assert_close(at_once.decode(latents), videos, rtol=0, atol=1e-5)
    handle.remove()
    assert rows == [1, 1, 1]
    assert videos.shape == (3, 9, 3, 32, 64)
    assert videos.dtype is torch.float32
    assert 0 <= float(videos.min()) <= float(videos.max()) <= 1


def test_large_videos_are_decoded_in_tiles_as_by_diffusers(tiny_folder: Path, model: Wan21Model) -> None:
    tiled = build(Wan21Config(path=str(tiny_folder), vae_tiling=True), device="cpu")
    small = torch.randn(1, 4, 2, 4, 4)
    assert torch.equal(tiled.decode(small), model.decode(small)), "one tile"
    # Two tiles of 256 pixels, which overlap by 64.
    large = torch.randn(1, 4, 2, 2, 40).requires_grad_()
    sizes: list[int] = []
    tiled.vae.decoder.register_forward_hook(lambda _module, _args, output: sizes.append(output.shape[-1]))
    result = tiled.decode(large)
    assert set(sizes) == {256, 128}
    with torch.no_grad():
        plain = AutoencoderKLWan.from_pretrained(tiny_folder / "vae")
        plain.enable_tiling()
        expected = plain.decode(tiled.vae_latents(large)).sample / 2 + 0.5
    assert torch.equal(result, expected.clamp(0, 1).transpose(1, 2))
    assert not torch.equal(result, model.decode(large))
    result.sum().backward()
    assert large.grad is not None and bool((large.grad != 0).any())


def test_tiles_of_a_vae_that_has_none_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.vae_tiling: Identity of the checkpoint has no tiles"):
        set_tiling(torch.nn.Identity(), Wan21Config(vae_tiling=True))


def test_frames_are_in_the_order_of_time(model: Wan21Model) -> None:
    """The VAE is causal: the first frame does not depend on later latent frames, and every later one does."""
    latents = torch.randn(1, 4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    changed = latents.clone()
    changed[:, :, 1] += 1
    with torch.no_grad():
        one, other = model.decode(latents)[0], model.decode(changed)[0]
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True, False, False, False, False]


def test_a_video_of_one_frame_is_an_image(model: Wan21Model) -> None:
    latents = torch.randn(2, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    later = torch.cat([latents, latents], dim=2)
    with torch.no_grad():
        images, videos = model.decode(latents), model.decode(later)
    assert images.shape == (2, 3, 32, 32)
    assert torch.equal(images, videos[:, 0])


def test_a_video_has_a_gradient_to_its_latent(model: Wan21Model) -> None:
    latents = torch.zeros(1, 4, 2, 4, 4, requires_grad=True)
    model.decode(latents).sum().backward()
    assert latents.grad is not None
    assert bool((latents.grad.abs().sum(dim=(0, 1, 3, 4)) > 0).all())


def test_a_wrapper_that_rounds_the_timestep_is_refused(tiny_folder: Path, sampling: LatentSamplingConfig) -> None:
    model = build(Wan21Config(path=str(tiny_folder), dtype="bfloat16"), device="cpu")
    conditions = model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    x = torch.zeros(1, *model.latent_shape(sampling))
    assert model.velocity(x, torch.ones(1), conditions).dtype is torch.float32

    def cast_inputs(_module: torch.nn.Module, args: tuple[()], kwargs: dict[str, torch.Tensor]) -> object:
        return args, {**kwargs, "timestep": kwargs["timestep"].bfloat16()}

    model.trainable.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"^wan21: the timestep reached the transformer as torch\.bfloat16"):
        model.velocity(x, torch.ones(1), conditions)


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint."""

    def done(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return done


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"there is no folder .* and it is not a hub id either"),
        (lambda folder: (folder / "model_index.json").unlink(), r"has no model_index\.json"),
        (
            change("model_index.json", _class_name="WanImageToVideoPipeline"),
            r"'WanImageToVideoPipeline'; wan21 .*Choose model=wan21-i2v",
        ),
        (change("model_index.json", boundary_ratio=0.875), r"for Wan 2\.2, by its boundary_ratio; expected Wan 2\.1"),
        (change("model_index.json", expand_timesteps=True), r"a Wan 2\.2 of one expert, by its expand_timesteps"),
        (change("transformer/config.json", image_dim=1280), r"for image to video, by its image_dim"),
        (change("transformer/config.json", in_channels=36), r"for image to video, by its in_channels = 36"),
        (lambda folder: shutil.rmtree(folder / "vae"), r"lacks vae/"),
        (lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text("{"), r"cannot be read as JSON"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=[
        "absent",
        "no-index",
        "image-to-video",
        "two-experts",
        "ti2v",
        "image-input",
        "frame-input",
        "no-vae",
        "bad-scheduler",
        "no-tokens",
        "cut",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        build(Wan21Config(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_the_layers_that_may_be_split_exist_in_every_block(model: Wan21Model) -> None:
    linear = {name for name, module in model.trainable.named_modules() if isinstance(module, torch.nn.Linear)}
    for pattern in SPEC.tensor_parallel:
        assert {pattern.replace("*", block) for block in "01"} <= linear
