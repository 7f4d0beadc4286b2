"""Schedule, supported sizes and decoded media of a model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.latent_model import LatentModelCase
from unirl.core.errors import RecipeError
from unirl.core.roles import DiffusionModel
from unirl.core.types.sampling import LatentSamplingConfig


@claim("model")
def test_schedule_falls_to_0_in_the_requested_steps(case: LatentModelCase) -> None:
    """The sigmas are fp32, one more than steps, fall strictly from at most 1 and end in 0, for any number of steps.

    If it fails: append the final 0 in `schedule`, compute in fp64 and round once, and read
    `sampling.num_inference_steps`.
    """
    with case.model() as model:
        for steps in (2, 5, 50):
            sigmas = model.schedule(case.sampling(num_inference_steps=steps))
            assert sigmas.shape == (steps + 1,), f"steps={steps} gives sigmas of shape {list(sigmas.shape)}"
            assert sigmas.dtype == torch.float32, f"the sigmas are {sigmas.dtype}"
            falls = bool((sigmas[1:] < sigmas[:-1]).all())
            assert falls, f"steps={steps}: the sigmas do not fall strictly: {sigmas.tolist()}"
            assert float(sigmas[-1]) == 0, f"steps={steps}: the last sigma is {float(sigmas[-1]):g}, not 0"
            assert float(sigmas[0]) <= 1, f"steps={steps}: the first sigma is {float(sigmas[0]):g}, above 1"


@claim("model")
def test_media_has_the_requested_size(case: LatentModelCase) -> None:
    """Decoded media have the requested height, width and frames, also if not square, in fp32.

    If it fails: `latent_shape` and `decode` disagree: look for height and width swapped, and for the decoder's factor.
    """
    plain = case.sampling()
    sizes = [(plain.height, plain.width), (plain.height, 2 * plain.width), (2 * plain.height, plain.width)]
    tried = 0
    with case.model() as model:
        for height, width in sizes:
            asked = case.sampling(height=height, width=width)
            media = _media(model, asked)
            if media is None:
                continue
            tried += 1
            assert media.dtype == torch.float32, f"the media are {media.dtype}"
            _check_size(media, asked)
    assert tried, f"the miniature's own size, {plain.height} x {plain.width}, is refused"


@claim("model")
def test_media_lies_between_0_and_1(case: LatentModelCase) -> None:
    """Pixels lie in [0, 1], even for latents far from the training distribution: rewards and trackers rely on it.

    If it fails: clamp at the end of `decode`, after going from [-1, 1] to [0, 1].
    """
    with case.model() as model:
        media = model.decode(20.0 * case.latents(model, 2))
    assert bool(torch.isfinite(media).all()), "the media hold numbers that are not finite"
    low, high = float(media.min()), float(media.max())
    assert low >= 0 and high <= 1, f"the media lie in [{low:g}, {high:g}]"
    assert high > low, f"every pixel is {low:g}"


@claim("model")
def test_sizes_that_do_not_fit_are_refused(case: LatentModelCase) -> None:
    """An unsupported size is rejected with an error that names the key, before anything is sampled, and never rounded
    to another. Supported sizes are generated exactly.

    If it fails: check height, width and frames in `latent_shape`, and raise `RecipeError("sampling.<key>: ...")`.
    """
    plain = case.sampling()
    odd = {"height": (plain.height + 1, 0, -plain.height), "width": (plain.width + 1, 0, -plain.width)}
    with case.model() as model:
        for key, values in {**odd, "frames": (plain.frames + 1, 0)}.items():
            for value in values:
                asked = case.sampling(**{key: value})
                media = _media(model, asked, key=key)
                assert media is None or value > 0, f"sampling.{key}={value} was taken"
                if media is not None:
                    _check_size(media, asked)


@claim("model")
def test_decoder_keeps_the_gradient(case: LatentModelCase) -> None:
    """Gradients flow from the media to the latents, so that a differentiable reward can train the sampler.

    If it fails: take `no_grad`, `.detach()`, `.data` and uint8 images out of `decode`; freezing the decoder's weights
    is right, and keeps the gradient of its input.
    """
    model = case.fresh_model()
    latents = (0.5 * case.latents(model, 1)).requires_grad_()
    media = model.decode(latents)
    assert media.requires_grad, "the media carry no gradient"
    (gradient,) = torch.autograd.grad(media.sum(), latents)
    assert bool(torch.isfinite(gradient).all()), "the gradient of the latents is not finite"
    assert bool((gradient != 0).any()), "the gradient of the latents is 0 everywhere"


def _media(model: DiffusionModel, sampling: LatentSamplingConfig, *, key: str = "") -> Tensor | None:
    """Media of this size, or None where it is rejected; with `key`, the message must begin with it."""
    try:
        shape = model.latent_shape(sampling)
    except RecipeError as error:
        named = re.match(r"sampling\.(\w+)", str(error))
        assert named and named[1] in (key or "height width frames"), f"the refusal does not name its key: {error}"
        return None
    generator = torch.Generator().manual_seed(3)
    return model.decode(torch.randn((1, *shape), generator=generator).to(model.device))


def _check_size(media: Any, asked: LatentSamplingConfig) -> None:
    size: tuple[int, ...] = (3, asked.height, asked.width)
    expected = (1, *size) if asked.frames == 1 and media.ndim == 4 else (1, asked.frames, *size)
    assert tuple(media.shape) == expected, f"sampling asks for {list(expected)}, decoded was {list(media.shape)}"
