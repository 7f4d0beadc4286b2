"""The model against diffusers' WanPipeline with both transformers, with Euler steps in place of UniPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from beside_diffusers import initial_latents
from diffusers import WanPipeline
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan22.model import Wan22Model
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel

Pipelines = Callable[[Wan22Model], WanPipeline]


PROMPTS = ["a red ring rolls to the left", "a dog"]
NEGATIVES = ["blurry", ""]
# Four or eight forwards of fp32 arithmetic, from sigmas that differ in their last bit, of latents of order 1.
LATENT_TOLERANCE = 1e-5
PLAIN = {"guidance_scale": 1.0}
GUIDED = {"guidance_scale": 4.0, "guidance_mode": "two-pass"}
SCALES = {
    "guidance_scale": 4.0,
    "guidance_mode": "two-scale",
    "guidance_options": {"scale_low": 1.5, "boundary": 0.875},
}

initial = partial(initial_latents, rows=len(PROMPTS))


@pytest.mark.parametrize("size", [(5, 32, 64), (9, 48, 32)], ids=str)
@pytest.mark.parametrize("guidance", [PLAIN, GUIDED, SCALES], ids=["plain", "guided", "two-scales"])
def test_conditions_velocities_latents_and_videos_are_the_pipelines(
    model: Wan22Model,
    on_the_same_weights: Pipelines,
    sampling: LatentSamplingConfig,
    size: tuple[int, int, int],
    guidance: dict[str, object],
) -> None:
    frames, height, width = size
    asked = dataclasses.replace(sampling, frames=frames, height=height, width=width, **guidance)
    pipeline, x = on_the_same_weights(model), initial(model, asked)
    calls: dict[str, list[tuple[dict[str, Tensor], Tensor]]] = {"transformer": [], "transformer_2": []}
    hooks = [
        pipeline.components[name].register_forward_hook(
            lambda _module, _args, kwargs, out, own=own: own.append((kwargs, out[0])), with_kwargs=True
        )
        for name, own in calls.items()
    ]
    options = asked.guidance_options
    try:
        expected, videos = (
            pipeline(
                PROMPTS,
                negative_prompt=NEGATIVES,
                guidance_scale=asked.guidance_scale,
                guidance_scale_2=options.get("scale_low"),
                num_frames=frames,
                height=height,
                width=width,
                num_inference_steps=asked.num_inference_steps,
                latents=x,
                max_sequence_length=asked.max_sequence_length,
                output_type=output,
            ).frames
            for output in ("latent", "pt")
        )
    finally:
        for hook in hooks:
            hook.remove()
    # The shift of 3 puts four steps at 1, 0.9, 0.75 and 0.5, so that each expert has two.
    per_step = 1 if guidance is PLAIN else 2
    assert [len(own) for own in calls.values()] == [2 * 2 * per_step] * 2

    positive, negative = (model.encode(Inputs.of_texts(texts), sampling=asked) for texts in (PROMPTS, NEGATIVES))
    for own in calls.values():
        given, velocity = own[0]
        assert torch.equal(given["encoder_hidden_states"], positive["prompt_embeds"])
        with torch.no_grad():
            result = model.velocity(given["hidden_states"], given["timestep"] / 1000, positive)
        # Not bit for bit: 1000 (t / 1000) is not t, by a spacing of fp32 numbers.
        torch.testing.assert_close(result, velocity, rtol=0, atol=LATENT_TOLERANCE)

    with torch.no_grad():
        final = denoise(
            model.velocity,
            x,
            sigmas=model.schedule(asked),
            kernel=make_kernel("euler", eta=0.0),
            sde_steps=torch.zeros((len(x), 0), dtype=torch.int64),
            conditions={"positive": positive, "negative": negative},
            guidance=make_guidance(asked.guidance_mode, scale=asked.guidance_scale, **options),
        ).x
        decoded = model.decode(final)
    torch.testing.assert_close(final, expected, rtol=0, atol=LATENT_TOLERANCE)
    torch.testing.assert_close(decoded, videos, rtol=0, atol=LATENT_TOLERANCE)
    assert float(decoded.std()) > 0.01


def test_each_row_of_a_batch_goes_to_the_expert_of_its_noise(model: Wan22Model, sampling: LatentSamplingConfig) -> None:
    conditions = model.encode(Inputs.of_texts([*PROMPTS, *PROMPTS]), sampling=sampling)
    x = torch.randn(4, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.3, 0.95, 0.875, 0.8749])
    embeds = conditions["prompt_embeds"]
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
        expected = torch.cat(
            [
                model.pipeline.components[name](
                    hidden_states=x[[row]],
                    timestep=1000 * sigma[[row]],
                    encoder_hidden_states=embeds[[row]],
                    return_dict=False,
                )[0]
                for row, name in enumerate(("transformer_2", "transformer", "transformer", "transformer_2"))
            ]
        )
    # Forwards of another batch size, of order 1.
    torch.testing.assert_close(result, expected, rtol=0, atol=LATENT_TOLERANCE)
