"""Training on a model's own samples: the ratio of the first update, and gradients that no batching changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.latent_model import LatentModelCase
from unirl.conformance.fixtures.model import ModelCase
from unirl.core.roles import Model
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track

STACKED_BOUND = 1e-5
"""A tenth of the smallest clip range that is in use, 1e-4 of Flow-GRPO; fp32 rounding of another batch is about
1e-7."""
GRADIENT_BOUND = 1e-4
"""Relative, in norm. fp32 sums in another order differ by about 1e-6, more where a gradient nearly cancels."""


@claim("model")
def test_own_sample_replays_at_ratio_1(case: LatentModelCase) -> None:
    """Replaying a rollout with the weights that made it gives its log-probs again, bit for bit, at the rollout's
    batch and with gradients on: the ratio of the first update is exactly 1.

    If it fails: `velocity` is not a function of its arguments. Look for dropout, random draws, a cache that an earlier
    call fills, another attention kernel where gradients are on, and for weights in half precision: where the model's
    default is bf16, set fp32 in its spec's `trial`.
    """
    _compare_log_probs(case, stacked=False, bound=0.0)


@claim("model")
def test_stacked_replay_agrees_with_the_rollout(case: LatentModelCase) -> None:
    """Replaying all steps in one forward, each row at another sigma, gives the rollout's log-probs to fp32 rounding:
    that is how training replays by default, because it is faster.

    If it fails: `velocity` must take one sigma per row. Look for `sigma[0]`, and for kernels that change precision with
    the batch.
    """
    _compare_log_probs(case, stacked=True, bound=STACKED_BOUND)


@claim("model", track="any")
def test_gradient_does_not_depend_on_batching(case: ModelCase) -> None:
    """The gradient of a replayed batch is the sum of those of its rows, to fp32 rounding: the size of a micro-batch
    is a matter of memory alone.

    If it fails: something scales with the batch in the backward pass: a custom autograd function, a hook, a mean over
    rows inside the model.
    """
    model = case.learner()
    with torch.no_grad():
        track = case.rollout(model)
    whole = _gradients(case, model, [track])
    alone = _gradients(case, model, [track.select([row]) for row in range(track.num_rows)])
    norm = sum(float(grad.double().square().sum()) for grad in whole.values()) ** 0.5
    assert norm > 0, "the log-probs have no gradient at all"
    difference = sum(float((whole[n].double() - alone[n].double()).square().sum()) for n in whole) ** 0.5
    case.record("relative gap in norm", difference / norm, bound=GRADIENT_BOUND)


@claim("model", proves=Cap.LORA, track="any")
def test_gradient_reaches_every_layer_that_lora_adapts(case: ModelCase) -> None:
    """Each layer that `lora_targets` match gets a gradient from the velocity, or from the log-probs of a text, so no
    adapter is trained for nothing.
    Layers of which the model drops the output are named in `tiny.idle_layers`, and get none.

    If it fails: look for a `detach` or `no_grad` on the way, for layers that this configuration never calls, and for a
    wrong name in `tiny.idle_layers`.
    """
    model = case.learner()
    case.answer(model).backward()
    layers = {name for names in case.lora_layers(model.trainable).values() for name in names}
    unreached = {name for name in layers if not _is_reached(model.trainable.get_submodule(name))}
    promised = set(case.tiny.idle_layers)
    case.record("layers reached", len(layers) - len(unreached))
    missed = sorted(unreached - promised)
    assert not missed, f"no gradient reaches {len(missed)} of {len(layers)} layers, the first is {missed[0]}"
    wrong = sorted(promised - unreached)
    assert not wrong, f"`tiny.idle_layers` names {wrong[0]!r}, which is no layer without a gradient"


def _compare_log_probs(case: LatentModelCase, *, stacked: bool, bound: float) -> None:
    model = case.learner()
    with torch.no_grad():
        track = case.rollout(model)
    replayed = case.replay(model, stacked=stacked)(track)
    assert track.latent.log_probs is not None
    gap = (replayed.log_probs.detach() - track.latent.log_probs).abs().max()
    case.record("log-prob gap", float(gap), bound=bound)


def _gradients(case: ModelCase, model: Model, pieces: list[Track]) -> dict[str, Tensor]:
    """Gradients of the weighted sum of all log-probs, over all pieces. A sample weighs the same in any piece."""
    params = {name: param for name, param in model.trainable.named_parameters() if param.requires_grad}
    for param in params.values():
        param.grad = None
    replay = case.replay(model, stacked=True)
    for piece in pieces:
        weights = torch.tensor([1.0 + int(sample.rpartition("/")[2]) for sample in piece.sample_ids])
        log_probs = replay(piece).log_probs
        (weights.to(log_probs.device)[:, None] * log_probs).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}


def _is_reached(layer: nn.Module) -> bool:
    grad = layer.get_parameter("weight").grad
    return grad is not None and bool((grad != 0).any())
