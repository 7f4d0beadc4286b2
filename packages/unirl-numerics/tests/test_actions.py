"""Numbers of tokens and of scored steps in one shape, a critic's values at stored steps, and what is made of both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, TextSegment, Track
from unirl.numerics.train.actions import action_mask, per_action, with_per_action
from unirl.numerics.train.steps import old_log_prob_steps
from unirl.numerics.train.track_replay import replay_step_values
from unirl.numerics.train.values import value_losses, with_advantages_from_values

SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])


def track_of(segment: LatentSegment | TextSegment, **fields: Any) -> Track:
    rows = segment.num_rows
    return Track(
        name="sample",
        sample_ids=tuple(f"p/{row}" for row in range(rows)),
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts(("p",) * rows),
        metadata=({},) * rows,
        segment=segment,
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
        **fields,
    )


def trajectories() -> Track:
    """Two samples; the second stores its positions in other slots, and has a step less that is scored."""
    latents = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    segment = LatentSegment(
        latents=latents,
        positions=torch.tensor([[0, 1, 2, 4], [1, 2, 4, -1]]),
        sde_steps=torch.tensor([[0, 1], [1, -1]]),
        sigmas=SIGMAS,
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    conditions = Conditions(values={"text": torch.tensor([[2.0], [3.0]])}, index=torch.tensor([0, 1]))
    return track_of(segment, conditions={"positive": conditions})


def texts() -> Track:
    """Completions of three tokens, of which the second is not trained on, and of one."""
    segment = TextSegment(
        prompt_tokens=(torch.tensor([1]),) * 2,
        tokens=(torch.tensor([1, 2, 3]), torch.tensor([4])),
        mask=(torch.tensor([True, False, True]), torch.tensor([True])),
    )
    return track_of(segment)


@pytest.mark.parametrize("make", [trajectories, texts])
def test_fields_are_kept_in_one_shape_for_both_kinds_of_track(make: Any) -> None:
    track = make()
    mask = action_mask(track)
    expected = [[True, True], [True, False]] if make is trajectories else [[True, False, True], [True, False, False]]
    assert mask.tolist() == expected
    numbers = torch.arange(1.0, 1 + mask.numel()).view(mask.shape)
    result = with_per_action(track, values=numbers, returns=-numbers)
    assert torch.equal(per_action(result, "values")[mask], numbers[mask])
    assert torch.equal(per_action(result, "returns")[mask], -numbers[mask])
    with pytest.raises(BatchError, match=r"Segment\.advantages: it is needed, but no earlier phase"):
        per_action(result, "advantages")


@pytest.mark.parametrize("make", [trajectories, texts])
def test_advantages_and_value_losses_take_one_path_for_both_kinds_of_track(make: Any) -> None:
    """Both have a row of two actions and a row of one, whatever lies between them."""
    mask = action_mask(make())
    values = torch.zeros(mask.shape)
    values[mask] = torch.tensor([0.25, 0.5, 1.0])
    rewards = torch.zeros(mask.shape)
    rewards[mask] = torch.tensor([0.0, 1.0, 0.5])
    track = with_per_action(make(), values=values)
    result, metrics = with_advantages_from_values(
        track, rewards, mask.float(), gamma=1.0, lam=0.5, whitens=False, sum_over_ranks=lambda sums: sums
    )
    # delta is 0.25 and 0.5 in the first row, and A_0 = 0.25 + 0.5 x 0.5; numbers that fp32 holds.
    assert per_action(result, "advantages")[mask].tolist() == [0.5, 0.5, -0.5]
    assert per_action(result, "returns")[mask].tolist() == [0.75, 1.0, 0.5]
    assert metrics["returns_mean"].total / metrics["returns_mean"].weight == 0.75
    losses, numbers = value_losses(result, values + 1.0, mask.float(), clip=0.5)
    # The errors are 0.5, 0.5 and 1.5 without the clip, 0, 0 and 1 with it: the larger counts.
    assert losses[mask].tolist() == [0.125, 0.125, 1.125] and numbers["value_clip_fraction"].total == 0.0


@pytest.mark.parametrize("stacked", [True, False])
def test_a_critic_sees_the_stored_latent_before_each_scored_step(stacked: bool) -> None:
    asked: list[int] = []

    def critic(x: Tensor, sigma: Tensor, conditions: Any) -> Tensor:
        asked.append(len(x))
        return x.sum(dim=1) + 10 * sigma + 100 * conditions["text"][:, 0]

    track = trajectories()
    result = replay_step_values(critic, track, stacked=stacked)
    latents = track.latent.latents
    first = [latents[0, 0].sum() + 10 * 1.0 + 200, latents[0, 1].sum() + 10 * 0.75 + 200]
    # Sums of a few fp32 numbers of order 100.
    torch.testing.assert_close(result[0], torch.stack(first), rtol=1e-6, atol=0)
    torch.testing.assert_close(result[1, 0], latents[1, 0].sum() + 10 * 0.75 + 300, rtol=1e-6, atol=0)
    assert float(result[1, 1]) == 0.0
    assert asked == ([4] if stacked else [2, 2])


def test_old_log_probs_of_the_engine_that_are_missing_are_named() -> None:
    track = trajectories()
    with pytest.raises(BatchError, match=r"LatentSegment\.log_probs: .* track 'sample' came without them\."):
        old_log_prob_steps(track, None, replays=False)  # type: ignore[arg-type]
    given = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=torch.zeros(2, 2)))
    assert old_log_prob_steps(given, None, replays=False) is given  # type: ignore[arg-type]
