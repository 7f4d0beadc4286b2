"""How far a policy is from the one that its run began with: in its weights, and as KL on its own samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.loop.parts import Parts, generate, sampled_policy, shares_weights
from unirl.loop.requests import build_request
from unirl.numerics.loss.kl import kl_estimate
from unirl.numerics.loss.losses import gaussian_kl
from unirl.numerics.train.track_replay import TrackReplay

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan
    from unirl.core.types.data import Prompt
    from unirl.core.types.sampling import SamplingConfig

__all__ = ["StartPolicy", "kl_of"]

SAMPLES_PER_PROMPT = 2


class StartPolicy:
    """The weights of the trained module as they are now, to compare later ones with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = {name: value.detach().clone() for name, value in module.named_parameters()}

    def distance(self) -> float:
        """Distance of the weights from those of the start, relative to their norm."""
        now = dict(self._module.named_parameters())
        moved = sum(
            float((now[name].detach() - value).double().square().sum()) for name, value in self._weights.items()
        )
        norm = sum(float(value.double().square().sum()) for value in self._weights.values())
        return math.sqrt(moved / norm)

    def kl(self, parts: Parts, plan: Plan, prompts: Sequence[Prompt]) -> float | None:
        """KL of the live policy to that of the start on samples of the live one, see `kl_of`.

        Images are sampled for it with Flow-SDE, whatever sampler the algorithm trains with, so that
        algorithms compare. None for an engine that holds a separate copy of the weights.
        """
        (stage,) = plan.stages
        if not shares_weights(stage):
            return None
        model = parts.models[stage.learner.name]
        request = build_request(
            prompts[: plan.eval.num_prompts or len(prompts)],
            track=stage.name,
            sampling=_sampling(stage.evaluation, text=stage.sampling),
            samples_per_prompt=SAMPLES_PER_PROMPT,
            model=model,
            trajectory="window",
            seed=plan.eval.seed,
            rollout=0,
            policy_version=parts.version(stage, "live"),
        )
        with sampled_policy(parts, stage, "live"):
            track = generate(parts.engines[stage.name], request)
        forward = TrackReplay(model, stacked=False, policy_context=lambda _: self._in_place())
        with torch.no_grad():
            return kl_of(forward(track), forward(track, policy="reference"))

    @contextmanager
    def _in_place(self) -> Generator[None]:
        """Within the block the module has the weights of the start."""
        now = {name: value.detach().clone() for name, value in self._module.named_parameters()}
        try:
            _set(self._module, self._weights)
            yield
        finally:
            _set(self._module, now)


def kl_of(now: Replayed | ReplayedTokens, start: Replayed | ReplayedTokens) -> float:
    """KL in nats of `now` to `start`, two replays of samples of `now`.

    Images: of the path through its stochastic steps, whose KLs add up; per latent element, mean over samples.
    Text: the estimator k3, mean over tokens.
    """
    if isinstance(now, Replayed) and isinstance(start, Replayed):
        steps = torch.where(now.valid, gaussian_kl(now.means, start.means, now.std), 0.0)
        return float(steps.sum(dim=1).mean())
    assert now.log_probs.shape == start.log_probs.shape
    return float(kl_estimate(now.log_probs, start.log_probs)[now.valid].mean())


def _sampling(evaluation: SamplingConfig, *, text: SamplingConfig) -> SamplingConfig:
    """Noise of Flow-SDE at every step but the last, whose noise is only seen in the sample; text as it is trained."""
    if not isinstance(evaluation, LatentSamplingConfig):
        return text
    last = 1 - 1 / evaluation.num_inference_steps
    return dataclasses.replace(
        evaluation,
        kernel="flow-sde",
        eta=0.7,
        kernel_options={},
        sde=SdeStepsConfig(mode="fraction", last=last) if last else SdeStepsConfig(mode="all"),
        decode=False,
    )


@torch.no_grad()
def _set(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, value in module.named_parameters():
        value.copy_(weights[name])
