"""Slopes of a loss and of its reference with respect to the results of the live policy, at which the graph is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.reference import PointLossInputs, RewardLossInputs
from unirl.core.roles import DivergenceKind, Forward, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Track
from unirl.numerics.train.forwards import ForwardWrapper

from ..fixtures.training_setup import TrainingSetup
from .loss_inputs import reward_inputs

__all__ = ["Slope", "slopes"]

STEP = 1e-6
"""Half-width of central differences in fp64: truncation is some 1e-12 of the slope, rounding 1e-10."""
REWARD_STEP = 1e-2
"""The same for rewards, whose images are fp32."""
WEIGHT_STEP = 1e-2
"""The same for a step of all weights, in fp32."""
FAKE = "velocity of the fake score"

InputsOf = Callable[[float], Any]
Reference = Callable[[Any], float]


@dataclass(frozen=True, kw_only=True)
class Slope:
    own: float
    """Slope of the loss along one random direction, by autograd."""
    expected: float
    """Slope of its reference along the same direction, by central differences."""
    norm: float
    """Norm of the loss's gradient."""
    is_exact: bool = True
    """False where differences are of fp32 numbers, over a step in which they curve: along weights, and of rewards."""

    @property
    def gap(self) -> float:
        """Difference of the slopes as a share of the gradient's norm."""
        scale = max(self.norm, abs(self.expected))
        return (self.own - self.expected) / scale if scale else 0.0


def slopes(
    setup: TrainingSetup, track: Track, inputs_of: InputsOf, reference: Reference, *, progress: float
) -> dict[str, Slope]:
    """Slopes by the result of the live policy that is varied, such as `log_probs`; for a loss over whole distributions,
    the weights are.

    track: with old log-probs.  inputs_of: progress -> inputs of the reference at the setup's weights. They are moved
    with `fixed` inputs, which stand for what a loss detaches.
    """
    inputs = inputs_of(progress)
    leaves = _Leaves(setup.replay())
    cut = setup if setup.critic is None else dataclasses.replace(setup, critic=_CutCritic(setup.critic, leaves))
    loss, _ = cut.loss(track, progress=progress, replay=leaves)
    if leaves.compares_distributions:
        return {"weights": _slope_in_weights(setup, track, inputs_of, reference, progress=progress)}
    assert leaves.values and loss.requires_grad, "the loss does not depend on what the live policy computes"
    gradients = torch.autograd.grad(loss, list(leaves.values.values()), allow_unused=True)
    result: dict[str, Slope] = {}
    random, decodes = torch.Generator().manual_seed(3), isinstance(inputs, RewardLossInputs)
    for (name, value), gradient in zip(leaves.values.items(), gradients, strict=True):
        if gradient is None and decodes:
            continue  # a velocity that the sampler's truncated gradient leaves out
        direction = torch.randn(value.shape, generator=random, dtype=torch.float64)
        own = torch.zeros_like(direction) if gradient is None else gradient.detach().cpu().double()
        step, ends = REWARD_STEP if decodes else STEP, list[float]()
        for sign in (1, -1):
            change = sign * step * direction
            if decodes:
                forward = _Repeats(leaves, name, change)
                ends.append(reference(reward_inputs(setup, track, progress=progress, forward=forward)))
            else:
                ends.append(reference(_moved(inputs, name, change)))
        result[name] = Slope(
            own=float((own * direction).sum()),
            expected=(ends[0] - ends[1]) / (2 * step),
            norm=float(own.norm()),
            is_exact=not decodes,
        )
    return result


def _slope_in_weights(
    setup: TrainingSetup, track: Track, inputs_of: InputsOf, reference: Reference, *, progress: float
) -> Slope:
    gradient = setup.gradient(track, progress=progress)
    random = torch.Generator().manual_seed(3)
    named = dict(setup.model.net.named_parameters())
    direction = {name: torch.randn(value.shape, generator=random).to(value.device) for name, value in named.items()}
    length = sum(float(value.square().sum()) for value in direction.values()) ** 0.5
    values: list[float] = []
    for sign in (1, -2, 1):
        with torch.no_grad():
            for name, value in named.items():
                value.add_(sign * WEIGHT_STEP / length * direction[name])
        values.append(reference(inputs_of(progress)))
    own = sum(float((gradient[name] * value).sum()) for name, value in direction.items()) / length
    norm = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
    return Slope(own=own, expected=(values[0] - values[1]) / (2 * WEIGHT_STEP), norm=norm, is_exact=False)


class _Leaves(ForwardWrapper):
    """Returns the results of the live policy as leaves of the graph."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.values: dict[str, Tensor] = {}
        """Leaves by their field in the reference's inputs; velocities by the number of the call."""
        self.velocities: list[Tensor] = []
        """Every velocity of the live policy, computed with or without gradient."""
        self.compares_distributions = False

    def leaf(self, name: str, value: Tensor) -> Tensor:
        leaf = self.values.setdefault(name, value.detach().clone().requires_grad_())
        # Values of padding rows may be NaN.
        assert torch.equal(leaf.nan_to_num(), value.nan_to_num()), (
            f"loss() asks the live policy twice, and gets other {name}"
        )
        return leaf

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        result = super().__call__(track, policy=policy)
        if policy != "live":
            return result
        names = ("log_probs", "means") if isinstance(result, Replayed) else ("log_probs", "entropy")
        return dataclasses.replace(result, **{name: self.leaf(name, getattr(result, name)) for name in names})

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        result = super().velocity(track, x, sigma, policy=policy, guided=guided)
        if policy == "fake" and result.requires_grad:
            return self.leaf(FAKE, result)
        if policy != "live":
            return result
        self.velocities.append(result.detach())
        return self.leaf(f"velocity {len(self.velocities)}", result) if torch.is_grad_enabled() else result

    def divergence(
        self,
        track: Track,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        top_k: int | None = None,
        policy: Policy = "reference",
    ) -> ReplayedTokens:
        self.compares_distributions = True
        return super().divergence(track, kind=kind, beta=beta, top_k=top_k, policy=policy)


class _Repeats(ForwardWrapper):
    """Returns recorded velocities, whatever the points, with one of them moved."""

    def __init__(self, leaves: _Leaves, name: str, change: Tensor) -> None:
        super().__init__(leaves)
        self._given, self._number = list(leaves.velocities), 0
        place = int(name.split()[1]) - 1
        self._given[place] = self._given[place] + change.to(self._given[place])

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        assert policy == "live", "a loss of decoded rewards asks the live policy alone"
        self._number += 1
        return self._given[self._number - 1]


class _CutCritic:
    """The critic's values as a leaf."""

    def __init__(self, critic: Any, leaves: _Leaves) -> None:
        self._critic, self._leaves = critic, leaves

    def values(self, track: Track) -> Tensor:
        return self._leaves.leaf("values", self._critic.values(track))


def _moved(inputs: Any, name: str, change: Tensor) -> Any:
    """The inputs with one result of the live policy moved."""
    if isinstance(inputs, PointLossInputs) and name == FAKE:
        *before, last = inputs.further
        velocities = {**last.velocities, "fake": last.velocities["fake"] + change.numpy()}
        return dataclasses.replace(
            inputs, further=[*before, dataclasses.replace(last, velocities=velocities)], fixed=inputs
        )
    if isinstance(inputs, PointLossInputs):
        assert name == "velocity 1", "loss() asks the live policy more than once"
        velocities = {**inputs.velocities, "live": inputs.velocities["live"] + change.numpy()}
        return dataclasses.replace(inputs, velocities=velocities, fixed=inputs)
    return dataclasses.replace(inputs, **{name: getattr(inputs, name) + change.numpy()}, fixed=inputs)
