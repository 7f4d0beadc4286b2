"""The latent rollout on a velocity that is known in closed form."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from point_velocity import SHAPE, Point, a_request, conditions_of, sample, velocity
from unirl.core.errors import BatchError, EchoMismatch
from unirl.core.types.inputs import Inputs
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import LatentSegment, Sampler
from unirl.numerics.diffusion.guidance import Cfg
from unirl.numerics.diffusion.kernels import FlowSde
from unirl.numerics.diffusion.rollout import branch_inputs, latent_track
from unirl.numerics.noise import INITIAL, noise, noise_digest
from unirl.numerics.train.track_replay import TrackReplay


def test_the_ode_of_a_single_point_ends_there() -> None:
    rollout = sample(a_request(3), 2.5)
    # x + (0 - sigma) (x - x0) / sigma = x0 at the last step, whatever came before.
    torch.testing.assert_close(rollout.final, torch.full((3, *SHAPE), 2.5), rtol=0, atol=1e-6)
    start = noise(seed=1, rollout=0, ids=["s0", "s1", "s2"], step=INITIAL, shape=SHAPE)
    assert rollout.initial_noise == noise_digest(start)


@pytest.mark.parametrize("rollout", [0, 3])
def test_every_noise_is_keyed_by_the_rollout_number(rollout: int) -> None:
    request = dataclasses.replace(a_request(2, steps=[[0, 1]] * 2), rollout=rollout)
    sampled = sample(request, 2.5)
    assert sampled.positions.tolist() == [[0, 1, 2, 4]] * 2
    start = noise(seed=1, rollout=rollout, ids=["s0", "s1"], step=INITIAL, shape=SHAPE)
    assert torch.equal(sampled.latents[:, 0], start)
    for step in (0, 1):
        x, x_next = sampled.latents[:, step], sampled.latents[:, step + 1]
        sigma, sigma_next = (torch.full((2,), float(sampled.sigmas[step + after])) for after in (0, 1))
        v = velocity(x, sigma, {"point": torch.full((2, *SHAPE), 2.5)})
        transition = FlowSde(0.7).transition(x, velocity=v, sigma=sigma, sigma_next=sigma_next, sigma_max=0.75)
        drawn = noise(seed=1, rollout=rollout, ids=["s0", "s1"], step=step, shape=SHAPE)
        assert torch.equal(x_next, FlowSde(0.7).sample(transition, drawn))


def test_guidance_takes_the_negatives() -> None:
    rollout = sample(a_request(2, guidance_scale=3.0), 1.0, 0.5)
    # v = ((x - n) + 3 (n - p)) / sigma points at n + 3 (p - n) = 2.
    torch.testing.assert_close(rollout.final, torch.full((2, *SHAPE), 2.0), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="'negative' is missing"):
        sample(a_request(2, guidance_scale=3.0), 1.0)


def test_joined_pieces_are_the_whole_also_where_they_store_different_positions() -> None:
    request = a_request(4, steps=[[0, 1], [1, 2], [2, -1], [2, -1]])
    whole = sample(request, 1.0)
    joined = LatentSegment.concat([sample(piece, 1.0) for piece in request.split([1, 1, 2])])
    assert joined.initial_noise == whole.initial_noise
    assert joined.positions.tolist() == [[0, 1, 2, 4], [1, 2, 3, 4], [2, 3, 4, -1], [2, 3, 4, -1]]
    for name in ("latents", "positions", "sigmas", "sde_steps", "log_probs", "final"):
        # Elementwise arithmetic: rows do not see each other, so nothing is rounded differently.
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.means is None


def test_only_trained_steps_are_scored_and_stored_and_nothing_else_changes() -> None:
    trained = torch.tensor([[0], [1], [2], [0]])
    full = a_request(4, steps=[[0, 1, 2]] * 4)
    latent = dataclasses.replace(full.latent, train_steps=trained)
    request = dataclasses.replace(full, params=latent)
    whole, some = sample(full, 1.0), sample(request, 1.0)
    # The noise of every stochastic step is there, also of those that are not trained on.
    assert torch.equal(some.final, whole.final) and torch.equal(some.sde_steps, whole.sde_steps)
    assert some.train_steps is not None and torch.equal(some.train_steps, trained)
    assert whole.log_probs is not None and some.log_probs is not None
    assert torch.equal(some.log_probs, whole.log_probs.gather(1, trained))
    assert some.positions.tolist() == [[0, 1, 4], [1, 2, 4], [2, 3, 4], [0, 1, 4]]
    for row, positions in enumerate(some.positions.tolist()):
        assert torch.equal(some.latents[row], whole.latents[row, positions])
    # Split, joined and replayed, they are the same.
    joined = LatentSegment.concat([sample(piece, 1.0) for piece in request.split([1, 3])])
    assert torch.equal(joined.latents, some.latents)
    track = latent_track(request, segment=joined, conditions=conditions_of(4, 1.0), media=None, policy_version=(4,) * 4)
    verify_echo(request, track)
    replay = TrackReplay(Point(), stacked=True, policy_context=lambda _: nullcontext())
    assert torch.equal(replay(track).log_probs, some.log_probs)  # elementwise arithmetic
    for wrong in (None, trained.flip(0)):
        changed = dataclasses.replace(track, segment=dataclasses.replace(track.latent, train_steps=wrong))
        with pytest.raises(EchoMismatch, match=r"image\.train_steps"):
            verify_echo(request, changed)


@pytest.mark.parametrize("trained", [[[3], [0]], [[1, 0], [0, 1]], [[0]]])
def test_trained_steps_that_are_not_stochastic_are_refused(trained: list[list[int]]) -> None:
    request = a_request(2, steps=[[0, 1]] * 2)
    latent = request.latent
    object.__setattr__(latent, "train_steps", torch.tensor(trained))
    with pytest.raises(ValueError, match="train_steps: "):
        sample(request, 1.0)


def test_a_track_echoes_its_request() -> None:
    request = a_request(2, steps=[[0]] * 2, kernel="cps", eta=0.5, kernel_options={"constants": False})
    segment = sample(request, 1.0)
    conditions = conditions_of(2, 1.0)
    track = latent_track(request, segment=segment, conditions=conditions, media=None, policy_version=(4, 4))
    verify_echo(request, track)
    assert track.latent.sampler == Sampler(kernel="cps", eta=0.5, options=(("constants", False),))
    assert track.media is None


def test_media_of_rank_five_are_videos_at_the_rate_of_the_request() -> None:
    request = a_request(2, fps=12.5)
    segment, conditions = sample(request, 1.0), conditions_of(2, 1.0)
    images, videos = torch.zeros(2, 3, 8, 8), torch.zeros(2, 5, 3, 8, 8)
    one = latent_track(request, segment=segment, conditions=conditions, media=images, policy_version=(4, 4))
    two = latent_track(request, segment=segment, conditions=conditions, media=videos, policy_version=(4, 4))
    assert one.media is not None and one.media.kind == "image" and torch.equal(one.media.stacked, images)
    assert two.media is not None and two.media.kind == "video" and torch.equal(two.media.stacked, videos)
    # One byte for each of 3 x H x W, and of F such frames.
    assert [array.nbytes for array in one.media.stored] == [3 * 8 * 8] * 2
    assert [array.nbytes for array in two.media.stored] == [5 * 3 * 8 * 8] * 2
    assert (one.media.rate, two.media.rate) == (None, 12.5)
    plain = a_request(2)
    with pytest.raises(BatchError, match="rate: got none for video"):
        latent_track(plain, segment=segment, conditions=conditions, media=videos, policy_version=(4, 4))


class WithoutMedia(Cfg):
    """A guidance of three branches, the third with the inputs of another prompt."""

    @property
    def branches(self) -> tuple[str, ...]:
        return ("positive", "negative", "empty")

    def inputs(self, branch: str, inputs: Inputs, *, negative_prompt: str) -> Inputs:
        return (
            inputs.negative("")
            if branch == "empty"
            else super().inputs(branch, inputs, negative_prompt=negative_prompt)
        )


def test_the_guidance_says_what_its_branches_are_encoded_from() -> None:
    plain = branch_inputs(a_request(2))
    assert {branch: one.texts for branch, one in plain.items()} == {"positive": ("s0", "s1")}
    guided = branch_inputs(a_request(2, guidance_scale=2.0, negative_prompt="blurred"))
    assert {branch: one.texts for branch, one in guided.items()} == {
        "positive": ("s0", "s1"),
        "negative": ("blurred", "blurred"),
    }
    name = f"{__name__}:WithoutMedia"
    own = branch_inputs(a_request(2, guidance_mode=name, negative_prompt="blurred"))
    assert {branch: one.texts for branch, one in own.items()} == {
        "positive": ("s0", "s1"),
        "negative": ("blurred", "blurred"),
        "empty": ("", ""),
    }
