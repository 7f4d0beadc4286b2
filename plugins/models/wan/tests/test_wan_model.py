"""The models from text: sizes, decoding, dtypes, and the two experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_model import set_tiling
from unirl.models.wan.config import Wan21Config
from unirl.models.wan.model import Wan21Model, Wan22Model
from wan_models import FROM_TEXT, SPECS, built

Tiny = Callable[[str], Path]
ModelOf = Callable[[str], Any]


@pytest.fixture
def model(model_of: ModelOf) -> Wan21Model:
    return model_of("wan21")


def test_the_latent_of_a_video(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    """One latent frame for the first frame and for every four after it; an eighth of each side."""
    assert model.latent_shape(sampling) == (4, 3, 4, 8)
    assert model.latent_shape(dataclasses.replace(sampling, frames=1)) == (4, 1, 4, 8)
    # Patches of 2 x 2, in every latent frame.
    assert model.num_tokens((4, 3, 4, 8)) == 3 * 2 * 4


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 8}, r"sampling\.frames: got 8, expected a multiple of 4 plus 1 from 1 to 253\. Nearest: 5 or 9\."),
        ({"frames": 0}, r"sampling\.frames: got 0, expected a multiple of 4 plus 1 .* Nearest: 1\."),
        ({"frames": 1000}, r"sampling\.frames: got 1000, .* Nearest: 253\."),
        ({"height": 40}, r"sampling\.height: got 40, expected a multiple of 16 from 16 to 1024\. Nearest: 32 or 48\."),
        ({"width": 2048}, r"sampling\.width: got 2048, .* Nearest: 1024\."),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    model_of: ModelOf, sampling: LatentSamplingConfig, changes: dict[str, int], message: str, name: str
) -> None:
    with pytest.raises(RecipeError, match=f"^{message}"):
        model_of(name).latent_shape(dataclasses.replace(sampling, **changes))


def test_prompts_longer_than_the_encoder_takes_are_refused(model: Wan21Model, sampling: LatentSamplingConfig) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 513; .* 1 to 512"):
        model.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=513))


@pytest.mark.parametrize("name", SPECS)
def test_encoders_and_vae_are_frozen_and_the_transformers_are_not(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    parts = {n: p for n, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())} == {*model.experts}
    assert not any(part.training for part in parts.values())
    assert getattr(model, SPECS[name].trainable) is model.trainable


def test_videos_are_decoded_in_chunks_that_bound_the_memory(tiny: Tiny, model: Wan21Model) -> None:
    latents = torch.randn(3, 4, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    at_once = built("wan21", tiny("wan21"), decode_batch=0)
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


def test_large_videos_are_decoded_in_tiles_as_by_diffusers(tiny: Tiny, model: Wan21Model) -> None:
    tiled = built("wan21", tiny("wan21"), vae_tiling=True)
    small = torch.randn(1, 4, 2, 4, 4)
    assert torch.equal(tiled.decode(small), model.decode(small)), "one tile"
    # Two tiles of 256 pixels, which overlap by 64.
    large = torch.randn(1, 4, 2, 2, 40).requires_grad_()
    sizes: list[int] = []
    tiled.vae.decoder.register_forward_hook(lambda _module, _args, output: sizes.append(output.shape[-1]))
    result = tiled.decode(large)
    assert set(sizes) == {256, 128}
    with torch.no_grad():
        plain = AutoencoderKLWan.from_pretrained(tiny("wan21") / "vae")
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


@pytest.mark.parametrize("name", FROM_TEXT)
def test_a_wrapper_that_rounds_the_timestep_is_refused(tiny: Tiny, sampling: LatentSamplingConfig, name: str) -> None:
    model = built(name, tiny(name), dtype="bfloat16")
    conditions = model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    x = torch.zeros(1, *model.latent_shape(sampling))
    assert model.velocity(x, torch.ones(1), conditions).dtype is torch.float32

    def cast_inputs(_module: torch.nn.Module, args: tuple[()], kwargs: dict[str, torch.Tensor]) -> object:
        return args, {**kwargs, "timestep": kwargs["timestep"].bfloat16()}

    model.trainable.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    with pytest.raises(RuntimeError, match=rf"^{name}: the timestep reached the transformer as torch\.bfloat16"):
        model.velocity(x, torch.ones(1), conditions)


@pytest.mark.parametrize("name", SPECS)
def test_the_layers_that_may_be_split_exist_in_every_block(model_of: ModelOf, name: str) -> None:
    modules = model_of(name).trainable.named_modules()
    linear = {layer for layer, module in modules if isinstance(module, torch.nn.Linear)}
    for pattern in SPECS[name].tensor_parallel:
        assert {pattern.replace("*", block) for block in "01"} <= linear


def gradients(model: Wan22Model, sampling: LatentSamplingConfig, sigmas: list[float]) -> dict[str, list[str]]:
    """Names of the weights of each expert that have a gradient from rows of this noise."""
    conditions = model.encode(Inputs.of_texts(["a ring"] * len(sigmas)), sampling=sampling)
    x = torch.ones(len(sigmas), *model.latent_shape(sampling))
    model.trainable.zero_grad()
    model.velocity(x, torch.tensor(sigmas), conditions).square().sum().backward()
    return {
        expert: [n for n, p in model.trainable.get_submodule(expert).named_parameters() if p.grad is not None]
        for expert in model.experts
    }


def test_an_expert_takes_gradients_from_rows_of_its_noise_alone(
    model_of: ModelOf, sampling: LatentSamplingConfig
) -> None:
    high, low, both = (gradients(model_of("wan22"), sampling, sigmas) for sigmas in ([0.9], [0.5], [0.9, 0.5]))
    assert high["transformer"] and not high["transformer_2"]
    assert low["transformer_2"] and not low["transformer"]
    assert both == {"transformer": high["transformer"], "transformer_2": low["transformer_2"]}


@pytest.mark.parametrize(("experts", "trained", "frozen"), [("high", 0, 1), ("low", 1, 0)])
def test_a_frozen_expert_takes_no_gradient_and_rows_of_its_noise_alone_still_have_a_backward_pass(
    tiny: Tiny, sampling: LatentSamplingConfig, experts: str, trained: int, frozen: int
) -> None:
    model = built("wan22", tiny("wan22"), experts=experts)
    own, other = (0.9, 0.5)[trained], (0.9, 0.5)[frozen]
    assert gradients(model, sampling, [own])[model.experts[trained]]
    result = gradients(model, sampling, [other])
    assert not result[model.experts[frozen]]
    weights = model.trainable.get_submodule(model.experts[trained]).parameters()
    assert all(bool((p.grad == 0).all()) for p in weights if p.grad is not None)


def test_a_lone_expert_that_no_step_calls_is_refused(tiny: Tiny, sampling: LatentSamplingConfig) -> None:
    model = built("wan22", tiny("wan22"), experts="low")
    with pytest.raises(
        RecipeError, match=r"model\.experts: got 'low', but none of the 1 steps has less than sigma 0\.875"
    ):
        model.schedule(dataclasses.replace(sampling, num_inference_steps=1))


def test_a_lazy_build_has_the_values_of_both_experts(tiny: Tiny, model_of: ModelOf) -> None:
    lazy = built("wan22", tiny("wan22"), lazy=True)
    module = lazy.trainable.to_empty(device="cpu")
    lazy.fill(module.state_dict())
    expected = model_of("wan22").trainable.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
