"""The latent rollout on a velocity that is known in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.request import LatentRequest, Request
from unirl.core.rollout import Rollout, verify_echo
from unirl.core.track import Conditions, KernelChoice
from unirl.numerics.latent_rollout import LatentRollout, guidance_of, latent_track, sample_latents
from unirl.numerics.noise import INITIAL, noise, noise_digest

SHAPE = (2, 3)


def velocity(x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """Of data that is one point, `conditions["point"]`: v = (x - x0) / sigma."""
    return (x - conditions["point"]) / sigma.view(-1, 1, 1)


def a_request(num_rows: int, *, steps: Sequence[Sequence[int]] | None = None, **changes: object) -> Request:
    ids = tuple(f"s{row}" for row in range(num_rows))
    chosen = torch.tensor([[]] * num_rows if steps is None else steps, dtype=torch.int64).reshape(num_rows, -1)
    settings = {"steps": 4, "kernel": "flow-sde", "eta": 0.7, **changes}
    latent = LatentRequest(
        sampling=LatentSamplingConfig(**settings),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        sde_steps=chosen,
        noise_ids=ids,
        initial_noise=("",) * num_rows,
    )
    return Request(
        sample_ids=ids,
        group_ids=ids,
        prompt_ids=ids,
        prompts=ids,
        metadata=({},) * num_rows,
        media=((),) * num_rows,
        tracks={"image": latent},
        seed=1,
        rollout=0,
        policy_version=4,
    )


def conditions_of(num_rows: int, *points: float) -> dict[str, Conditions]:
    """One shared row for `positive`, and for `negative` where a second point is given."""
    index = torch.zeros(num_rows, dtype=torch.int64)
    return {
        name: Conditions(values={"point": torch.full((1, *SHAPE), point)}, index=index)
        for name, point in zip(("positive", "negative"), points, strict=False)
    }


def sample(request: Request, *points: float) -> LatentRollout:
    conditions = conditions_of(request.num_rows, *points)
    return sample_latents(velocity, request, "image", latent_shape=SHAPE, conditions=conditions)


def test_the_ode_of_a_single_point_ends_there() -> None:
    rollout = sample(a_request(3), 2.5)
    # x + (0 - sigma) (x - x0) / sigma = x0 at the last step, whatever came before.
    torch.testing.assert_close(rollout.trajectory.final, torch.full((3, *SHAPE), 2.5), rtol=0, atol=1e-6)
    start = noise(seed=1, rollout=0, ids=["s0", "s1", "s2"], step=INITIAL, shape=SHAPE)
    assert rollout.initial_noise == noise_digest(start)


def test_guidance_takes_the_negatives() -> None:
    rollout = sample(a_request(2, guidance_scale=3.0), 1.0, 0.5)
    # v = ((x - n) + 3 (n - p)) / sigma points at n + 3 (p - n) = 2.
    torch.testing.assert_close(rollout.trajectory.final, torch.full((2, *SHAPE), 2.0), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="needs negatives, found none"):
        sample(a_request(2, guidance_scale=3.0), 1.0)


def test_joined_pieces_are_the_whole_also_where_they_store_different_positions() -> None:
    request = a_request(4, steps=[[0, 1], [1, 2], [2, -1], [2, -1]])
    whole = sample(request, 1.0)
    joined = LatentRollout.concat([sample(piece, 1.0) for piece in request.split([1, 1, 2])])
    assert joined.initial_noise == whole.initial_noise
    assert joined.trajectory.positions.tolist() == [[0, 1, 2, 4], [1, 2, 3, 4], [2, 3, 4, -1], [2, 3, 4, -1]]
    for name in ("latents", "positions", "sigmas", "sde_steps", "log_probs", "final"):
        # Elementwise arithmetic: rows do not see each other, so nothing is rounded differently.
        assert torch.equal(getattr(joined.trajectory, name), getattr(whole.trajectory, name)), name
    assert joined.trajectory.means is None


def test_a_track_echoes_its_request() -> None:
    request = a_request(2, steps=[[0]] * 2, kernel="cps", eta=0.5, kernel_options={"constants": False})
    sampled = sample(request, 1.0)
    conditions = conditions_of(2, 1.0)
    track = latent_track(request, "image", sampled=sampled, conditions=conditions, media=None, version=4)
    verify_echo(request, Rollout(tracks={"image": track}))
    assert track.latent.kernel == KernelChoice(name="cps", eta=0.5, options=(("constants", False),))
    assert track.images is None
    assert track.videos is None


def test_media_of_rank_five_are_videos() -> None:
    request = a_request(2)
    sampled, conditions = sample(request, 1.0), conditions_of(2, 1.0)
    images, videos = torch.zeros(2, 3, 8, 8), torch.zeros(2, 5, 3, 8, 8)
    one = latent_track(request, "image", sampled=sampled, conditions=conditions, media=images, version=4)
    two = latent_track(request, "image", sampled=sampled, conditions=conditions, media=videos, version=4)
    assert one.images is images
    assert one.videos is None
    assert two.images is None
    assert two.videos is not None
    assert [tuple(video.shape) for video in two.videos] == [(5, 3, 8, 8)] * 2


@pytest.mark.parametrize(("rank", "dims"), [(3, (-1,)), (4, (1,)), (5, (1,))])
def test_norms_are_taken_over_the_channels(rank: int, dims: tuple[int, ...]) -> None:
    guidance = guidance_of(scale=2.0, mode="norm-corrected", latent_rank=rank)
    assert guidance.norm_dims == dims
    with pytest.raises(ValueError, match="'bached' is not known"):
        guidance_of(scale=2.0, mode="bached", latent_rank=rank)
