"""Training on samples of older weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plans import choice_of_the_kit, plan_of
from unirl.conformance.doubles.track_numbers import advantages_of, with_advantages
from unirl.conformance.fixtures.algorithm import ROUNDING, AlgorithmCase
from unirl.conformance.fixtures.training_setup import CLIP, gradient_gap, policy_part
from unirl.core.match.match import match
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import RunConfig, TrainConfig
from unirl.core.specs.part_config import BackendConfig, PartConfig
from unirl.core.specs.spec import BackendSpec, EngineSpec
from unirl.numerics.train.actions import with_per_action

ENGINE = TrainConfig(old_log_probs="engine")
REPLAY = TrainConfig(old_log_probs="replay")
OLDEST = 0.4 * CLIP
"""Largest log-ratio that age has made here: a clip binds nowhere, not even one that a schedule or a setting halves."""


@claim("algorithm", track="any")
def test_stale_samples_are_weighted_as_declared(case: AlgorithmCase) -> None:
    """With `run.max_staleness` samples are from older weights than the trained ones; `staleness` in the needs declares
    how the algorithm handles that. `ratio`: a sample counts by the ratio of the current policy to the one that sampled
    it, as importance sampling asks: the gradient is that of fresh samples whose advantages are multiplied by this
    ratio. `any`: the gradient does not depend on who sampled. `none` and `unstated`: `match()` rejects such runs.

    Tried with and without every key of `when`; the samples' ages differ, and clips bind nowhere.

    If it fails: with `train.old_log_probs=engine`, `anchor()` must leave the log-probs that came with the samples as
    they are, for replayed ones are those of the trained weights, and `loss()` must take its ratio to them. Where
    settings make that impossible, state `staleness="none"` for their keys in `when`.
    """
    for on in case.variants():
        name, staleness = "+".join(on) or "plain", case.needs(on).staleness
        for train, ahead_is_possible in (
            (ENGINE, staleness in ("ratio", "any")),
            # Replayed log-probs are those of the trained weights, whatever the age of the samples.
            (REPLAY, staleness == "any"),
        ):
            refused = _refusals(case, on, train)
            assert bool(refused) != ahead_is_possible, (
                f"{name}: the spec states staleness {staleness!r}; a run ahead with train.old_log_probs="
                f"{train.old_log_probs} is {'refused: ' + refused[0] if refused else 'accepted'}"
            )
        if staleness == "ratio":
            _check_that_age_is_corrected(case, on, name)
        elif staleness == "any":
            for train in (ENGINE, REPLAY):
                _check_that_age_does_not_matter(case, on, name, train)


def _check_that_age_is_corrected(case: AlgorithmCase, on: Collection[str], name: str) -> None:
    setup = case.setup(on, is_ragged=True, train=ENGINE)
    assert setup.needs.log_probs != "none", (
        f"{name}: the spec states staleness 'ratio' and needs no log-probs of the policy that sampled"
    )
    setup.move()
    live = setup.log_probs()
    # The same for all steps of a sample, so that a ratio of its steps and one of the whole sample are the same number.
    log_ratios = torch.linspace(-OLDEST, OLDEST, setup.track.num_rows)[_mixed(setup.track.num_rows)]
    fresh = with_per_action(setup.track, log_probs=live)
    old = setup.with_old_log_probs(with_per_action(setup.track, log_probs=live - log_ratios[:, None].to(live.device)))
    # Those that the algorithm gives to the samples as they are: a divergence in the reward is that of who sampled.
    advantages = advantages_of(old)
    plain = with_advantages(setup.with_old_log_probs(fresh), advantages)
    weighted = with_advantages(plain, advantages * log_ratios.exp()[:, None].to(advantages.device))
    expected = policy_part(setup.gradient(weighted))
    # Without it a correction could not be told from none.
    told = gradient_gap(policy_part(setup.gradient(plain)), expected)
    assert told > 100 * ROUNDING, f"{name}: age changes the gradient by {told:.2g}; this is a defect of the kit"
    result = policy_part(setup.gradient(old))
    case.record(
        f"{name}, difference from the importance-weighted gradient", gradient_gap(result, expected), bound=ROUNDING
    )


def _check_that_age_does_not_matter(case: AlgorithmCase, on: Collection[str], name: str, train: TrainConfig) -> None:
    setup = case.setup(on, is_ragged=True, train=train)
    setup.move()
    if setup.has_log_probs:
        other = with_per_action(setup.track, log_probs=setup.log_probs())
    else:
        # Nothing of who sampled is in the track but a number.
        other = dataclasses.replace(setup.track, policy_version=tuple(range(setup.track.num_rows)))
    expected = setup.gradient(setup.with_old_log_probs(other))
    result = setup.gradient(setup.with_old_log_probs())
    how = f"{name}, difference by the log-probs of the engine, old_log_probs {train.old_log_probs}"
    case.record(how, gradient_gap(result, expected), bound=ROUNDING)


def _mixed(rows: int) -> Tensor:
    """An order in which neighbours, and with them the samples of a group, are far apart."""
    return torch.tensor([(7 * row + 3) % rows for row in range(rows)])


def _refusals(case: AlgorithmCase, on: Collection[str], train: TrainConfig) -> list[str]:
    """Why a run with a rollout ahead is rejected whose other parts can all do it."""
    parts: dict[str, Any] = {
        "summary": "of the kit",
        "build": "unirl:none",
        "config": "unirl.core.specs.part_config:PartConfig",
    }
    own = {Cap.WEIGHTS_FULL}
    engine = EngineSpec(name="weights-of-its-own", capabilities=own, **parts)
    plan = plan_of(
        {
            "model": choice_of_the_kit(case.model_spec, PartConfig()),
            "backend": choice_of_the_kit(BackendSpec(name="any", **parts), BackendConfig(trains="full")),
            "engine": choice_of_the_kit(engine, PartConfig()),
            "algorithm": case.factory.choice(case.found, case.config(on)),
        },
        track=case.track,
        sampling=case.text_sampling() if case.kind == "text" else case.sampling(case.needs(on)),
        run=RunConfig(max_staleness=1),
        train=train,
    )
    about = ("run.max_staleness", "train.old_log_probs")
    return [str(reason) for reason in match(plan).reasons if reason.key in about and "max_staleness" in str(reason)]
