"""Invariances of the gradient: micro-batch split, row order, padding, and undeclared fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.track_numbers import advantages_of, changed_per_token, with_advantages
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs
from unirl.conformance.fixtures.algorithm import ROUNDING, AlgorithmCase
from unirl.conformance.fixtures.training_setup import TrainingSetup, gradient_gap
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import Metric, Policy, Replayed, ReplayedTokens
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.loss.reduction import weight_totals
from unirl.numerics.train.forwards import ForwardWrapper

PROGRESS = 0.5
TOKENS = 70
"""Tokens of a micro-batch: two or three of the completions of a setup with their prompts."""


@claim("algorithm", track="any")
def test_micro_batches_do_not_change_the_gradient(case: AlgorithmCase) -> None:
    """The micro-batch size does not change the gradient of an update: one forward for all samples or one per sample, or
    per unit where the algorithm sets units. For completions also with micro-batches by tokens, packed and padded.

    If it fails: `loss()` takes a mean, a spread or a maximum over the rows that it is given. Return values per element
    with their weights instead, and leave every average to the stack.
    """
    for on in case.variants():
        setup = case.setup(on, is_ragged=True)
        track, fixed = setup.with_old_log_probs(), KeepsOldLogProbs(setup.algorithm)
        setup.move()
        _, whole = setup.train(track, algorithm=fixed, progress=PROGRESS)
        largest = max(map(len, track.units()))
        for rows in (largest, 2 * largest, 4 * largest):
            _, result = setup.train(track, algorithm=fixed, micro_batch_size=rows, progress=PROGRESS)
            case.record(f"{_name(on)}, micro-batches of {rows}", gradient_gap(result, whole), bound=ROUNDING)
        for packing in (True, False) if setup.is_text else ():
            tokens = max(TOKENS, largest * max(track.text.total_lengths)) if largest > 1 else TOKENS
            _, result = setup.train(
                track, algorithm=fixed, micro_batch_tokens=tokens, packing=packing, progress=PROGRESS
            )
            how = "packed" if packing else "padded"
            case.record(
                f"{_name(on)}, micro-batches of {tokens} tokens, {how}", gradient_gap(result, whole), bound=ROUNDING
            )


@claim("algorithm", track="latent")
def test_one_step_at_a_time_does_not_change_the_gradient(case: AlgorithmCase) -> None:
    """`train.replay=serial` replays, differentiates and frees one SDE step, or drawn point, of a micro-batch after the
    other. The gradient is that of all of them together, with every choice of the algorithm's settings, and so are the
    metrics.

    If it fails: the loss of a step depends on the other steps of its sample, as a ratio of whole sequences does. Set
    `separates_steps` to False for these settings, or let `pieces()` cut every field that has an entry per step.
    """
    settings: list[tuple[tuple[str, ...], dict[str, Any]]] = [(on, {}) for on in case.variants()]
    settings += [((key,) if value and key in case.spec.when else (), {key: value}) for key, value, _ in case.accepted()]
    if not any(case.algorithm(case.config(on, **chosen)).separates_steps for on, chosen in settings):
        raise NotApplicable(f"algorithm {case.spec.name!r} keeps the steps of a sample together")
    for on, chosen in settings:
        setup = case.setup(on, is_ragged=True, **chosen)
        if not setup.algorithm.separates_steps:
            continue
        name = ", ".join([_name(on), *(f"{key}={value}" for key, value in chosen.items())])
        track, fixed = setup.with_old_log_probs(), KeepsOldLogProbs(setup.algorithm)
        setup.move()
        report, whole = setup.train(track, algorithm=fixed, micro_batch_size=4, progress=PROGRESS)
        by_step, result = setup.train(track, algorithm=fixed, micro_batch_size=4, progress=PROGRESS, is_serial=True)
        case.record(name, gradient_gap(result, whole), bound=ROUNDING)
        (expected,), (metrics,) = report.metrics.values(), by_step.metrics.values()
        for metric, value in expected.items():
            # Sums of some fifty fp32 numbers in another order.
            assert math.isclose(metrics[metric], value, rel_tol=1e-5, abs_tol=1e-6), (
                f"{name}: metric {metric!r} is {metrics[metric]:g} step by step, {value:g} for all steps at once"
            )


@claim("algorithm", track="any")
def test_the_order_of_the_rows_does_not_change_the_gradient(case: AlgorithmCase) -> None:
    """Samples may come in any order, with groups interleaved, as parallel or resumed engines return them.

    If it fails: something depends on the place of a row in its batch: neighbours that are taken for a group, a counter,
    a random number that is drawn per row.
    """
    for on in case.variants():
        setup = case.setup(on, is_ragged=True)
        rows = [(7 * row + 3) % setup.track.num_rows for row in range(setup.track.num_rows)]
        plain, mixed = setup.with_old_log_probs(), setup.with_old_log_probs(setup.track.select(rows))
        setup.move()
        expected = setup.gradient(plain, progress=PROGRESS)
        case.record(_name(on), gradient_gap(setup.gradient(mixed, progress=PROGRESS), expected), bound=ROUNDING)


@claim("algorithm", track="any")
def test_padding_changes_nothing(case: AlgorithmCase) -> None:
    """Rows of weight 0 are padding and count nowhere: not in the gradient, the weights or the metrics.

    The padding is NaN in every tensor, those of the replay included, so that anything that reads it shows.

    If it fails: mask by weight before values meet (`torch.where(weights > 0, values, 0)`): 0 x NaN is NaN, and a mean
    over all rows counts the padding even where it is finite.
    """
    for on in case.variants():
        setup = case.setup(on, is_ragged=True)
        plain, padded = (
            setup.with_old_log_probs(),
            setup.with_old_log_probs(_poisoned_padding(setup.track), replay=_PaddedReplay(setup)),
        )
        # An algorithm need not keep what the anchor made of padding.
        padded = _poisoned_padding(padded.select(range(setup.track.num_rows)))
        setup.move()
        for name, weights in weight_totals(setup.loss_weights(padded.to(setup.model.device))).items():
            expected = weight_totals(setup.loss_weights(plain.to(setup.model.device)))[name]
            assert float(weights) == float(expected), (
                f"{_name(on)}: term {name!r} weighs {float(weights):g} with padding, {float(expected):g} without"
            )
        expected = setup.gradient(plain, progress=PROGRESS)
        result = setup.gradient(padded, progress=PROGRESS, replay=_PaddedReplay(setup))
        case.record(f"{_name(on)}, gradient", gradient_gap(result, expected), bound=ROUNDING)
        _, losses = setup.loss(padded, progress=PROGRESS, replay=_PaddedReplay(setup))
        _, without = setup.loss(plain, progress=PROGRESS)
        for name, metric in losses.metrics.items():
            one, other = _value(metric), _value(without.metrics[name])
            # Sums of some fifty fp32 numbers in another order.
            assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6), (
                f"{_name(on)}: metric {name!r} is {one:g} with padding, {other:g} without"
            )


@claim("algorithm", track="any")
def test_only_declared_needs_are_read(case: AlgorithmCase) -> None:
    """Data that the spec does not need may be absent: latents outside the stored window, means, media, rewards once
    advantages exist, log-probs and policies that it does not name; for completions also their text, per-token fields
    not yet filled in, and all values of untrained tokens.

    These are NaN here, or raise, and the gradient is the same; otherwise `match()` accepts plans that cannot train.

    If it fails: add the need to the spec (`needs`, or `when` for the key that switches it on), or stop reading it.
    """
    for on in case.variants():
        full = case.setup(on, keeps_all=True, is_ragged=case.kind == "text")
        plain = full.with_old_log_probs()
        full.move()
        expected, loss = full.gradient(plain, progress=PROGRESS), full.loss(plain, progress=PROGRESS)[0]
        setup = case.setup(on, keeps_all=True, is_ragged=case.kind == "text", is_strict=True)
        track = _without_rewards(setup.with_old_log_probs(_without_what_is_not_needed(setup)))
        if setup.is_text:
            track = _without_masked_tokens(track)
        setup.move()
        result, value = setup.gradient(track, progress=PROGRESS), setup.loss(track, progress=PROGRESS)[0]
        case.record(f"{_name(on)}, gradient", gradient_gap(result, expected), bound=ROUNDING)
        case.record(f"{_name(on)}, loss", float(value.detach() - loss.detach()), bound=ROUNDING)


@claim("algorithm", track="any")
def test_weights_announce_what_the_loss_weighs(case: AlgorithmCase) -> None:
    """`weights()` returns, before any forward, the denominator of every term of `loss()`, so gradients are right from
    the first micro-batch on.

    Tried with samples of weight 0 and 1/2, of advantage 0, and with fewer SDE steps than others.

    If it fails: make `loss()` take its weights from `weights()`. A term that `weights()` does not name, or weighs
    otherwise, stops every run with a BatchError.
    """
    for on in case.variants():
        setup = case.setup(on, is_ragged=True)
        weights = setup.track.sample_weights.clone()
        weights[0], weights[1] = 0.0, 0.5
        replay = _ClosingReplay(setup)
        track = setup.with_old_log_probs(dataclasses.replace(setup.track, sample_weights=weights), replay=replay)
        if setup.needs.reward not in ("differentiable", "none"):
            advantages = advantages_of(track).clone()
            advantages[[4, 5]] = 0.0
            track = with_advantages(track, advantages)
        replay.is_closed = True
        reply = setup.loss_weights(track)
        replay.is_closed = False
        there = {name: tuple(value.shape[:1]) for name, value in reply.items()}
        wrong = {name: rows for name, rows in there.items() if rows != (track.num_rows,)}
        assert not wrong, f"{_name(on)}: weights have one row for each of {track.num_rows} samples; got {wrong}"
        announced = weight_totals(reply)
        losses = setup.losses(track, replay=replay, progress=PROGRESS)
        result = weight_totals(losses.terms)  # type: ignore[arg-type]
        assert announced.keys() == result.keys(), (
            f"{_name(on)}: weights() names the terms {sorted(announced)}, loss() has {sorted(result)}"
        )
        for name in result:
            one, other = float(announced[name]), float(result[name])
            assert math.isfinite(one) and one >= 0, f"{_name(on)}: weights() gives {one} for term {name!r}"
            # Both are fp64 sums of the same fp32 numbers.
            assert math.isclose(one, other, rel_tol=1e-9), (
                f"{_name(on)}: weights() announces {one:g} for term {name!r}, the term weighs {other:g}"
            )


class _ClosingReplay(ForwardWrapper):
    """Raises while it is closed."""

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup.replay())
        self.is_closed = False

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        self._check_open()
        return super().__call__(track, policy=policy)

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        self._check_open()
        return super().velocity(track, x, sigma, policy=policy, guided=guided)

    def divergence(self, track: Track, **settings: Any) -> ReplayedTokens:
        self._check_open()
        return super().divergence(track, **settings)

    def _check_open(self) -> None:
        assert not self.is_closed, "weights() runs a forward; it must not, for the stack calls it before any"


class _PaddedReplay(ForwardWrapper):
    """Asks for the rows that are not padding; the others are NaN throughout."""

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup.replay())

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        real = _real_rows(track)
        return _padded_answer(super().__call__(track.select(real), policy=policy), rows=track.num_rows)

    def divergence(self, track: Track, **settings: Any) -> ReplayedTokens:
        return _padded_answer(super().divergence(track.select(_real_rows(track)), **settings), rows=track.num_rows)

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        real = _real_rows(track)
        result = super().velocity(track.select(real), x[real], sigma[real], policy=policy, guided=guided)
        return _with_nan(result, rows=track.num_rows)


def _real_rows(track: Track) -> list[int]:
    real = [row for row, status in enumerate(track.status) if status is not Status.PADDING]
    assert real == list(range(len(real)))
    return real


def _padded_answer(result: Any, *, rows: int) -> Any:
    """The result of a forward for the rows that are not padding, with NaN for those that are."""
    given = {item.name: getattr(result, item.name) for item in dataclasses.fields(result)}
    return type(result)(
        **{name: None if value is None else _with_nan(value, rows=rows) for name, value in given.items()}
    )


def _with_nan(value: Tensor, *, rows: int) -> Tensor:
    """Filled up to this many rows, with NaN, or with True."""
    fill = True if value.dtype == torch.bool else math.nan
    return torch.cat([value, value.new_full((rows - value.shape[0], *value.shape[1:]), fill)])


def _poisoned_padding(track: Track) -> Track:
    """The track with three more units: of weight 0, and NaN in every tensor that holds numbers of a sample."""
    padded = track.padded(track.num_rows + 3 * len(track.units()[-1]))
    is_padding = torch.tensor([status is Status.PADDING for status in padded.status])

    def poisoned(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            mask = is_padding.to(value.device).view(-1, *(1,) * (value.ndim - 1))
            return value.masked_fill(mask, math.nan)
        return value

    if isinstance(padded.segment, TextSegment):
        padded = changed_per_token(padded, lambda row, values: values * math.nan if is_padding[row] else values)
    else:
        segment = padded.latent
        names = ("latents", "log_probs", "means", "values", "returns", "advantages")
        numbers = {name: poisoned(getattr(segment, name)) for name in names}
        padded = dataclasses.replace(padded, segment=dataclasses.replace(segment, **numbers))
    media = padded.media
    if media is not None and media.kind != "text":
        media = dataclasses.replace(media, values=poisoned(media.stacked))
    return dataclasses.replace(
        padded,
        media=media,
        rewards=poisoned(padded.rewards),
        reward_parts={name: poisoned(value) for name, value in padded.reward_parts.items()},
        advantages=poisoned(padded.advantages),
    )


def _without_what_is_not_needed(setup: TrainingSetup) -> Track:
    """The setup's track, stored in full, with NaN where the needs promise nothing."""
    track = _text_without(setup) if setup.is_text else _latents_without(setup)
    return track if setup.critic is not None else _without_rewards(track)


def _without_rewards(track: Track) -> Track:
    """NaN for them: whatever is made of rewards has been made."""
    nan = torch.full((track.num_rows,), math.nan)
    return dataclasses.replace(track, rewards=nan, reward_parts=dict.fromkeys(track.reward_parts, nan))


def _without_masked_tokens(track: Track) -> Track:
    """NaN for every number of tokens that are not trained on."""
    masks = track.text.mask
    assert masks is not None
    return changed_per_token(track, lambda row, values: values.masked_fill(~masks[row].to(values.device), math.nan))


def _text_without(setup: TrainingSetup) -> Track:
    track = setup.track
    log_probs = track.text.log_probs
    nothing = changed_per_token(track, lambda row, values: values * 0 + math.nan, is_filled=False)
    if setup.needs.reference == "policy":
        # Where the reference runs elsewhere, a replay takes its log-probs from here.
        nothing = dataclasses.replace(nothing, segment=dataclasses.replace(nothing.text, reference_log_probs=None))
    if setup.needs.log_probs != "none":
        nothing = dataclasses.replace(nothing, segment=dataclasses.replace(nothing.text, log_probs=log_probs))
        nothing = _without_masked_tokens(nothing)
    media = Media(kind="text", values=("",) * track.num_rows)
    return dataclasses.replace(nothing, media=media, inputs=Inputs.of_texts(("",) * track.num_rows))


def _latents_without(setup: TrainingSetup) -> Track:
    track, needs = setup.track, setup.needs
    segment = track.latent
    latents = segment.latents.clone()
    for row in range(track.num_rows):
        steps = [int(step) for step in segment.sde_steps[row] if step >= 0]
        kept = {segment.num_steps}
        if needs.trajectory == "window":
            kept |= {place for step in steps for place in (step, step + 1)}
        elif needs.trajectory == "full":
            kept |= set(range(segment.num_steps + 1))
        for slot, place in enumerate(segment.positions[row].tolist()):
            if place not in kept:
                latents[row, slot] = math.nan
    log_probs = segment.log_probs
    if needs.log_probs == "none" and log_probs is not None:
        log_probs = torch.full_like(log_probs, math.nan)
    means = latents.new_full((*segment.sde_steps.shape, *latents.shape[2:]), math.nan)
    assert track.media is not None
    return dataclasses.replace(
        track,
        segment=dataclasses.replace(segment, latents=latents, log_probs=log_probs, means=means),
        media=dataclasses.replace(track.media, values=torch.full_like(track.media.stacked, math.nan)),
    )


def _value(metric: Metric) -> float:
    if metric.reduce == "mean":
        return float(metric.total / metric.weight) if metric.weight else 0.0
    return float(metric.total)


def _name(on: tuple[str, ...]) -> str:
    return "+".join(on) or "plain"
