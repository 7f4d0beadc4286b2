"""Trees of samples on a real model: how often the network runs, and that sharing changes nothing."""

from __future__ import annotations

import pytest
import torch
from unirl.conformance.doubles.requests import make_request
from unirl.core.errors import RunFailed
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.track import Track
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import build
from unirl.models.sd3.model import Sd3Model

ROUNDING = 1e-5
"""A forward at another batch size adds up in another order: rounding of fp32 over four forwards, of latents of order 1."""


def a_request(model: Sd3Model, *, guidance_scale: float = 1.0) -> Request:
    """Two groups of four samples, which branch at steps 0 and 2 of four."""
    sampling = LatentSamplingConfig(
        num_inference_steps=4,
        height=32,
        width=32,
        max_sequence_length=16,
        guidance_scale=guidance_scale,
        same_initial_noise=True,
        sde=SdeStepsConfig(mode="fraction", last=0.75, branch_steps=[0, 2], branch_factor=2),
    )
    return make_request(model, sampling, track="image", samples_per_prompt=4, keeps_all=True)


def generate(model: Sd3Model, request: Request, *, forward_batch: int = 0) -> tuple[Track, list[int]]:
    """The track, and the rows of each forward of the network."""
    rows: list[int] = []
    handle = model.trainable.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[0]),
        with_kwargs=True,
    )
    try:
        track = build(TrainsideConfig(forward_batch=forward_batch), model=model, device="cpu").generate(request)
    finally:
        handle.remove()
    verify_echo(request, track)
    return track, rows


@pytest.mark.parametrize("branches", [1, 2])
def test_the_network_runs_once_for_each_path(model: Sd3Model, branches: int) -> None:
    request = a_request(model, guidance_scale=1.0 if branches == 1 else 3.0)
    _, shared = generate(model, request)
    # Paths of two groups at the four steps; guidance doubles the rows.
    assert shared == [2 * branches * paths for paths in (1, 2, 2, 4)]
    _, pieces = generate(model, request, forward_batch=2)
    # Halves of a group: paths that the halves share are computed for each.
    assert pieces == [branches * paths for paths in (1, 1, 1, 2)] * 4


def test_shared_paths_agree_with_samples_on_their_own_to_rounding(model: Sd3Model) -> None:
    request = a_request(model)
    (whole, _), (alone, rows) = generate(model, request), generate(model, request, forward_batch=1)
    assert rows == [1] * 32
    torch.testing.assert_close(whole.latent.latents, alone.latent.latents, rtol=0, atol=ROUNDING)
    # Paths are shared bit for bit: of a group's four samples two start step 1, and again step 2.
    for group in whole.latent.latents[:4], whole.latent.latents[4:]:
        assert [len(group[:, position].unique(dim=0)) for position in range(5)] == [1, 2, 2, 4, 4]


@pytest.mark.batch_invariant
def test_shared_paths_are_samples_on_their_own_bit_for_bit_with_batch_invariant_numerics(model: Sd3Model) -> None:
    request = a_request(model)
    whole, alone = (generate(model, request, forward_batch=size)[0] for size in (0, 1))
    assert torch.equal(whole.latent.latents, alone.latent.latents)
    assert whole.latent.log_probs is not None and alone.latent.log_probs is not None
    assert torch.equal(whole.latent.log_probs, alone.latent.log_probs)


@pytest.mark.parametrize("part", ["transformer_blocks.1.attn.to_q", "vae"])
def test_what_is_not_finite_is_named_by_its_layer_or_as_the_vae(model: Sd3Model, part: str) -> None:
    module = model.vae.decoder.conv_in if part == "vae" else model.trainable.get_submodule(part)
    weight, request = module.get_parameter("weight"), a_request(model)
    kept = weight.detach().clone()
    says = (
        r"model 'sd3': latents are finite, and what its VAE decodes them to is not\. Use model\.vae_dtype=float32"
        if part == "vae"
        else rf"model 'sd3': latents are not finite, first at layer '{part}' \(Linear\): the weight '{part}\.weight' is"
    )
    weight.data.view(-1)[0] = torch.nan
    try:
        with pytest.raises(RunFailed, match=says):
            generate(model, request)
    finally:
        weight.data.copy_(kept)
