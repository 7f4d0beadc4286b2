"""The velocity: its inputs and output, and independence of rows in a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import PROMPTS
from unirl.conformance.fixtures.latent_model import LatentModelCase
from unirl.conformance.fixtures.model import relative_gap

ROW_BOUND = 1e-5
"""fp32 matrix products sum in another order at another batch size: about 1e-6 through a few layers."""
SMALL = 1e-3
"""A twentieth of the distance of two sigmas of a 50-step schedule. In bf16 a timestep of 500 moves in steps of 2."""


@claim("model")
def test_velocity_is_fp32_of_the_shape_of_x(case: LatentModelCase) -> None:
    """The velocity has the shape of x, in fp32 whatever the weights are in, and is finite: sampler and log-prob are
    fp32.

    If it fails: end `velocity` with `.float()`, and undo any patching or packing of x that it does.
    """
    with case.model() as model:
        x, sigma, conditions = case.inputs(model)
        result = model.velocity(x, sigma, conditions)
    assert result.shape == x.shape, f"x is {list(x.shape)}, the velocity {list(result.shape)}"
    assert result.dtype == torch.float32, f"the velocity is {result.dtype}"
    assert bool(torch.isfinite(result).all()), "the velocity holds numbers that are not finite"


@claim("model")
def test_velocity_depends_on_every_element_of_x(case: LatentModelCase) -> None:
    """The velocity changes when x does, wherever in x: in each channel, and in the last corner as in the first.

    If it fails: look for a crop, a cached x, or channels that never reach the network.
    """
    with case.model() as model:
        x, sigma, conditions = case.inputs(model)
        plain = model.velocity(x, sigma, conditions)
        places = [(channel, *(0 for _ in x.shape[2:])) for channel in range(x.shape[1])]
        places += [tuple(size - 1 for size in x.shape[1:])]
        for place in places:
            moved = x.clone()
            moved[(slice(None), *place)] += 1.0
            changed = _changed(model.velocity(moved, sigma, conditions), plain)
            assert changed, f"x changed by 1 at {place}, and the velocity did not"


@claim("model")
def test_velocity_follows_sigma_without_rounding(case: LatentModelCase) -> None:
    """The velocity changes with the noise level, also by as little as 0.001. A timestep that passes through bf16
    moves in steps of 2 of 1000: the sampler then asks at one sigma and the model answers for another.

    If it fails: keep sigma in fp32 up to the embedding of the timestep; look for a cast of all inputs to the dtype of
    the weights, and for wrappers that cast (`MixedPrecisionPolicy(cast_forward_inputs=False)`).
    """
    with case.model() as model:
        x, _, conditions = case.inputs(model)
        # Where bf16 and whole timesteps round: at 300, 500 and 900 of 1000, and between.
        for sigma in (0.3, 0.5007, 0.5, 0.9):
            here, there = (torch.full((len(x),), value, device=x.device) for value in (sigma, sigma + SMALL))
            changed = _changed(model.velocity(x, here, conditions), model.velocity(x, there, conditions))
            assert changed, f"the velocity at sigma {sigma} and at {sigma + SMALL:g} is the same"


@claim("model")
def test_velocity_follows_every_condition(case: LatentModelCase) -> None:
    """Each of the conditions that `encode` gives matters to the velocity: one that is dropped on the way makes a
    model that hears half the prompt.

    A condition is replaced by that of another prompt; one that is the same for all prompts is moved by 1.

    If it fails: look where `velocity` hands the condition on; a name that the network does not know is often swallowed.
    """
    with case.model() as model:
        x, sigma, conditions = case.inputs(model)
        plain = model.velocity(x, sigma, conditions)
        tried = 0
        for name, value in conditions.items():
            # Rows of any shape are a tuple.
            rows = list(value)
            # What media give is empty for prompts without any.
            if not any(row.numel() for row in rows):
                continue
            others = [*rows[-1:], *rows[:-1]]
            if all(map(torch.equal, others, rows)):
                if not rows[0].is_floating_point():
                    continue
                others = [row + 1.0 for row in rows]
            tried += 1
            other = tuple(others) if isinstance(value, tuple) else torch.stack(others)
            differs = _changed(model.velocity(x, sigma, {**conditions, name: other}), plain)
            assert differs, f"condition {name!r} changed, and the velocity did not"
        assert tried, f"none of {sorted(conditions)} differs from prompt to prompt"


@claim("model")
def test_batch_rows_are_independent(case: LatentModelCase) -> None:
    """The velocity of a row is the same alone and in a batch, to fp32 rounding, so a micro-batch changes no gradient
    and a forward batch no sample.

    If it fails: look for statistics over the batch (BatchNorm), attention over flattened rows, and masks or sigmas that
    are taken from the first row.
    """
    with case.model() as model:
        x, sigma, conditions = case.inputs(model)
        whole = model.velocity(x, sigma, conditions)
        alone = [
            model.velocity(x[n : n + 1], sigma[n : n + 1], {k: v[n : n + 1] for k, v in conditions.items()})
            for n in range(len(PROMPTS))
        ]
    case.record("largest relative gap", relative_gap(torch.cat(alone), whole), bound=ROW_BOUND)


def _changed(one: Tensor, other: Tensor) -> bool:
    """Whether every row of the two differs."""
    return bool((one != other).flatten(1).any(dim=1).all())
