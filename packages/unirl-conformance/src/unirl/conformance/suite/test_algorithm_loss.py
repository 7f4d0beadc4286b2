"""Value and gradient of an algorithm's loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.loss_inputs import loss_inputs, point_inputs, replayed, reward_inputs
from unirl.conformance.doubles.loss_slope import slopes
from unirl.conformance.doubles.track_numbers import advantages_of, log_probs_of, with_advantages
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs, LogProbRecorder
from unirl.conformance.fixtures.algorithm import AlgorithmCase
from unirl.conformance.fixtures.training_setup import CLIP, TrainingSetup, policy_part
from unirl.conformance.reference import LossInNumpy
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import weight_totals
from unirl.numerics.train.actions import with_per_action

EXACT = 1e-5
"""Gap of two slopes as a share of the gradient's norm: each element goes through some ten fp32 operations."""
ROUGH = 1e-2
"""The same where differences are of fp32 numbers: along weights, and of rewards of decoded images."""


@claim("algorithm", track="any")
def test_zero_advantages_give_no_gradient(case: AlgorithmCase) -> None:
    """With all advantages 0, the policy gradient of the first update is exactly 0. A critic may still learn. A lagged
    policy that samples is still the live one then.

    Tried without the terms that the keys of `when` switch on, which may pull on their own.

    If it fails: look for a term of `loss()` that is not multiplied by the advantage (a bonus, an offset, an advantage
    that is shifted or floored), and give it a key of the config that the spec's `when` names.
    """
    case.needs_advantages()
    setup = case.setup(sampler_is_live=True)
    track = setup.with_old_log_probs()
    track = with_advantages(track, torch.zeros_like(advantages_of(track)))
    report, gradient = setup.train(track, algorithm=KeepsOldLogProbs(setup.algorithm))
    policy = policy_part(gradient)
    largest = max((float(value.abs().max()) for value in policy.values()), default=0.0)
    assert policy or report.num_updates == 0, "an update was made, and it had no gradient"
    case.record("largest gradient element", largest, bound=0.0)


@claim("algorithm", track="any")
def test_the_first_ratio_is_exactly_one(case: AlgorithmCase) -> None:
    """Before the first update the new and old policy are the same, so their log-probs agree bit for bit and no ratio is
    clipped.

    The engine's log-probs are off by 1e-3, as those of another runtime may be; the default of `train.old_log_probs` is
    to replay them. Tried with micro-batches, with the SDE steps replayed at once and one by one, and with completions
    packed and padded.

    If it fails: `anchor()` has to put the replayed log-probs into the track's segment, and `loss()` has to compare
    with those; neither may cast them to another dtype, nor replay with other rows or in another order than it is given.
    """
    for at_once in (True, False):
        setup = case.setup(is_ragged=True)
        if setup.needs.log_probs == "none":
            raise NotApplicable(f"algorithm {case.spec.name!r} needs no log-probs, so it has no ratio")
        log_probs = log_probs_of(setup.track)
        assert log_probs is not None
        noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
        track = with_per_action(setup.track, log_probs=log_probs + 1e-3 * noise.to(log_probs.device))
        recorder, replay = LogProbRecorder(setup.algorithm), setup.replay(stacked=at_once, packing=at_once)
        report, _ = setup.train(track, algorithm=recorder, replay=replay, micro_batch_size=4)
        assert recorder.log_ratios, (
            "loss() replayed nothing with the live policy, or got a track without log-probs, though the spec needs them"
        )
        how = ("packed" if at_once else "padded") if setup.is_text else ("stacked" if at_once else "serial")
        case.record(f"log-prob gap at the first update, {how}", max(recorder.log_ratios), bound=0.0)
        if "ratio_max_dev_first" in report.only:
            case.record(f"ratio_max_dev_first, {how}", report.only["ratio_max_dev_first"], bound=0.0)


@claim("algorithm", track="any")
def test_a_step_favours_samples_with_advantage(case: AlgorithmCase) -> None:
    """A small gradient step makes samples with positive advantages more likely relative to those with negative ones;
    with per-token advantages, tokens.

    If it fails: there is a sign too many or too few in `loss()`, which is minimised, or the advantages meet the rows
    of other samples.
    """
    if case.needs().reward == "none":
        case.needs_advantages()
    setup = case.setup()
    if not setup.has_log_probs:
        raise NotApplicable(f"algorithm {case.spec.name!r} samples without noise, so its samples have no log-prob")
    track, fixed = setup.with_old_log_probs(), KeepsOldLogProbs(setup.algorithm)
    before = _log_probs(setup)
    _, gradient = setup.train(track, algorithm=fixed)
    norm = sum(float(value.square().sum()) for value in policy_part(gradient).values()) ** 0.5
    assert norm > 0, "the gradient is 0 although samples differ in their advantages"
    setup.train(track, algorithm=fixed, lr=0.01 / norm)
    gained = _log_probs(setup) - before
    advantages = advantages_of(track).cpu()
    favour = float((advantages * gained).sum() / advantages.abs().sum())
    case.record("mean log-prob gained in favour of advantage", favour)
    # The step is 0.01 long: log-probs move by 1e-3 and more, of which fp32 keeps four digits.
    assert favour > 0, (
        f"after a step of length 0.01 along the gradient, log-probs weighted by the advantage changed by {favour:.3g}; "
        "they must rise"
    )


@claim("algorithm", track="any")
def test_the_loss_agrees_with_its_numpy_reference(case: AlgorithmCase) -> None:
    """The loss is the formula of the paper: it equals the spec's `reference`, an independent implementation, and so
    does its gradient. In each result of the live policy that the loss takes (log-probs, means, entropies, velocities, a
    critic's values), autograd has the slope of the reference's central differences in fp64, along a random direction;
    losses over whole distributions are compared along a direction of the weights.

    The weights have moved away from the anchor, so that clips bind on some samples and not on others; tried at
    several points of the run, and with every key of `when` on. With a critic it is the sum of both losses, and the
    reference starts from the rewards and the critic's values.

    If it fails: compare both with the paper, term by term, on the golden vectors of its published code. Of the two,
    the one with the fewer tests is usually wrong. Where only the slope differs, look for a `detach` that is missing, or
    that the formula does not have; a reference states a stop-gradient by reading `inputs.detached`. An algorithm
    without `reference` fails here; write one, or declare a gap that says why there is none.
    """
    assert case.spec.reference, (
        f"algorithm {case.spec.name!r} names no `reference` in its spec, so nothing shows that its loss is the "
        "paper's. Write `reference(config, inputs) -> float` in NumPy, see unirl.conformance.reference.LossInNumpy."
    )
    expected_of: LossInNumpy = case.factory.resolved(case.found, case.spec.reference)
    for on in case.variants():
        setup = case.setup(on, is_ragged=True)
        track = setup.with_old_log_probs(_some_without_weight(setup.track))
        inputs_of = _inputs_of(setup, track)
        for progress in (0.0, 0.7):
            with torch.no_grad():
                result, losses = setup.loss(track, progress=progress)
            expected = expected_of(setup.config, inputs_of(progress))
            scale = sum(_size(term) for term in losses.terms)
            name = "+".join(on) or "plain"
            # Each element goes through some ten fp32 operations of 6e-8 relative rounding, and a ratio near 1 that is
            # clipped keeps that absolute error.
            case.record(
                f"difference from the reference, {name}, progress {progress}",
                (float(result) - expected) / scale,
                bound=2e-6,
            )
        for result, slope in slopes(setup, track, inputs_of, partial(expected_of, setup.config), progress=0.7).items():
            bound = EXACT if slope.is_exact else ROUGH
            case.record(f"slope against the reference in {result}, {'+'.join(on) or 'plain'}", slope.gap, bound=bound)


@claim("algorithm", track="any")
def test_accepted_settings_give_a_finite_loss(case: AlgorithmCase) -> None:
    """The loss works with every value that the config accepts: loss and gradient are finite with each setting at the
    ends of its limit and at each of its choices, before the first update and after the weights have moved.

    If it fails: the limit of the setting, or `problems` of the config, has to refuse what the loss cannot take.
    """
    for name, value, config in case.accepted():
        on = (name,) if value and name in case.spec.when else ()
        setup = case.setup(on, is_ragged=True, **{name: value})
        assert setup.config == config
        track = setup.with_old_log_probs(_some_without_weight(setup.track))
        for when in ("before the first update", "after a move"):
            loss, gradient = float(setup.loss(track)[0].detach()), setup.gradient(track)
            bad = [weight for weight, part in gradient.items() if not bool(torch.isfinite(part).all())]
            assert math.isfinite(loss) and not bad, (
                f"{name}={value}, {when}: the loss is {loss}, and the gradients of {len(bad)} weights are not finite"
            )
            setup.move()


def _inputs_of(setup: TrainingSetup, track: Track) -> Callable[[float], Any]:
    """Moves the weights away from the anchor; what it returns gives the inputs of the reference there."""
    if setup.needs.reward == "differentiable":
        setup.move()
        return lambda progress: reward_inputs(setup, track, progress=progress)
    # A loss over stochastic steps replays them; any other asks for velocities at points that it chooses.
    if not setup.is_text and not setup.needs.stochastic:
        setup.move()
        return lambda progress: point_inputs(setup, track, progress=progress)
    old = replayed(setup, "live")
    setup.move()
    new = replayed(setup, "live")
    if setup.needs.log_probs != "none":
        _check_that_clips_matter(track, new)
    return lambda progress: loss_inputs(setup, track, new=new, old=old, progress=progress)


def _log_probs(setup: TrainingSetup) -> torch.Tensor:
    """[n, S] or [n, 1] on the CPU: one for each advantage."""
    return setup.mean_log_probs()[:, None] if setup.critic is None else setup.log_probs().cpu()


def _some_without_weight(track: Track) -> Track:
    weights = track.sample_weights.clone()
    weights[[1, 6]] = 0
    return dataclasses.replace(track, sample_weights=weights)


def _check_that_clips_matter(track: Track, new: Replayed | ReplayedTokens) -> None:
    """Check that the setup can tell a clipped loss from another one; this does not test the algorithm."""
    old = log_probs_of(track)
    assert old is not None
    far = (new.log_probs - old).abs()[new.valid] > CLIP
    assert 0.1 < float(far.float().mean()) < 0.9, "log-ratios lie on one side of the clip; this is a defect of the kit"


def _size(term: Any) -> float:
    """Size of a term if all its elements had one sign."""
    weights = term.weights.double()
    values = torch.where(weights > 0, term.values.double().abs(), torch.zeros_like(weights))
    return abs(term.scale) * float((values * weights).sum() / weight_totals([term])[term.name])
