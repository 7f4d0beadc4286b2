"""Training on samples of older weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.track_numbers import advantages_of, with_advantages, with_log_probs
from unirl.conformance.fixtures.algorithm import ROUNDING, AlgorithmBench
from unirl.conformance.fixtures.trial import CLIP, apart, of_policy
from unirl.core.match.match import match
from unirl.core.recipe.stages import stages_of
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import (
    BackendConfig,
    PartConfig,
    RecipeConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
)
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import BackendSpec, EngineSpec

ENGINE = TrainConfig(old_log_probs="engine")
REPLAY = TrainConfig(old_log_probs="replay")
OLDEST = 0.4 * CLIP
"""Largest log-ratio that age has made here: a clip binds nowhere, not even one that a schedule or a setting halves."""


@claim("algorithm", track="any")
def test_stale_samples_are_weighted_as_declared(bench: AlgorithmBench) -> None:
    """With `run.max_staleness` samples are from older weights than the trained ones; `staleness` in the needs declares
    how the algorithm handles that. `ratio`: a sample counts by the ratio of the current policy to the one that sampled
    it, as importance sampling asks: the gradient is that of fresh samples whose advantages are multiplied by this
    ratio. `any`: the gradient does not depend on who sampled. `none` and `unstated`: `match()` rejects such runs.

    Tried with and without every key of `when`; the samples' ages differ, and clips bind nowhere.

    If it fails: with `train.old_log_probs=engine`, `anchor()` must leave the log-probs that came with the samples as
    they are, for replayed ones are those of the trained weights, and `loss()` must take its ratio to them. Where
    settings make that impossible, state `staleness="none"` for their keys in `when`.
    """
    for on in bench.variants():
        name, staleness = "+".join(on) or "plain", bench.needs(on).staleness
        for train, ahead_is_possible in (
            (ENGINE, staleness in ("ratio", "any")),
            # Replayed log-probs are those of the trained weights, whatever the age of the samples.
            (REPLAY, staleness == "any"),
        ):
            refused = _refusals(bench, on, train)
            assert bool(refused) != ahead_is_possible, (
                f"{name}: the spec states staleness {staleness!r}; a run ahead with train.old_log_probs="
                f"{train.old_log_probs} is {'refused: ' + refused[0] if refused else 'accepted'}"
            )
        if staleness == "ratio":
            _check_that_age_is_corrected(bench, on, name)
        elif staleness == "any":
            for train in (ENGINE, REPLAY):
                _check_that_age_does_not_matter(bench, on, name, train)


def _check_that_age_is_corrected(bench: AlgorithmBench, on: Collection[str], name: str) -> None:
    trial = bench.trial(on, is_ragged=True, train=ENGINE)
    assert trial.needs.log_probs != "none", (
        f"{name}: the spec states staleness 'ratio' and needs no log-probs of the policy that sampled"
    )
    trial.move()
    live = trial.log_probs()
    # The same for all steps of a sample, so that a ratio of its steps and one of the whole sample are the same number.
    log_ratios = torch.linspace(-OLDEST, OLDEST, trial.track.num_rows)[_mixed(trial.track.num_rows)]
    fresh = with_log_probs(trial.track, live)
    old = trial.anchored(with_log_probs(trial.track, live - log_ratios[:, None].to(live.device)))
    # Those that the algorithm gives to the samples as they are: a divergence in the reward is that of who sampled.
    advantages = advantages_of(old)
    plain = with_advantages(trial.anchored(fresh), advantages)
    weighted = with_advantages(plain, advantages * log_ratios.exp()[:, None].to(advantages.device))
    expected = of_policy(trial.gradient(weighted))
    # Without it a correction could not be told from none.
    told = apart(of_policy(trial.gradient(plain)), expected)
    assert told > 100 * ROUNDING, f"{name}: age changes the gradient by {told:.2g}; this is a defect of the kit"
    result = of_policy(trial.gradient(old))
    bench.record(f"{name}, difference from the importance-weighted gradient", apart(result, expected), bound=ROUNDING)


def _check_that_age_does_not_matter(bench: AlgorithmBench, on: Collection[str], name: str, train: TrainConfig) -> None:
    trial = bench.trial(on, is_ragged=True, train=train)
    trial.move()
    if trial.has_log_probs:
        other = with_log_probs(trial.track, trial.log_probs())
    else:
        # Nothing of who sampled is in the track but a number.
        other = dataclasses.replace(trial.track, policy_version=tuple(range(trial.track.num_rows)))
    expected = trial.gradient(trial.anchored(other))
    result = trial.gradient(trial.anchored())
    how = f"{name}, difference by the log-probs of the engine, old_log_probs {train.old_log_probs}"
    bench.record(how, apart(result, expected), bound=ROUNDING)


def _mixed(rows: int) -> Tensor:
    """An order in which neighbours, and with them the samples of a group, are far apart."""
    return torch.tensor([(7 * row + 3) % rows for row in range(rows)])


def _refusals(bench: AlgorithmBench, on: Collection[str], train: TrainConfig) -> list[str]:
    """Why a run with a rollout ahead is rejected whose other parts can all do it."""
    result, dist = bench.subject.found("algorithm"), "unirl-conformance"
    parts: dict[str, Any] = {
        "summary": "of the kit",
        "build": "unirl:none",
        "config": "unirl.core.specs.config:PartConfig",
    }
    own = {Cap.WEIGHTS_FULL}

    def choice(spec: Any, config: PartConfig) -> Any:
        return Choice(key=spec.kind, spec=spec, config=config, dist=dist, version=version(dist))

    chosen = {
        "model": choice(bench.model_spec, PartConfig()),
        "backend": choice(BackendSpec(name="any", **parts), BackendConfig(trains="full")),
        "engine": choice(EngineSpec(name="weights-of-its-own", capabilities=own, **parts), PartConfig()),
        "algorithm": Choice(
            key="algorithm", spec=bench.spec, config=bench.config(on), dist=result.dist, version=result.version
        ),
    }
    recipe = RecipeConfig(
        run=RunConfig(max_staleness=1),
        stages={bench.track: StageConfig(track=bench.track)},
        sampling=bench.text_sampling() if bench.kind == "text" else bench.sampling(bench.needs(on)),
        train=train,
    )
    plan = Plan(
        recipe="conformance",
        stages=stages_of(recipe, {kind: {"": choice} for kind, choice in chosen.items()}, {}),
        rewards={},
        trackers={},
        run=recipe.run,
        data=recipe.data,
        eval=recipe.eval,
        resolved={},
        origins={},
        hash="",
    )
    about = ("run.max_staleness", "train.old_log_probs")
    return [str(reason) for reason in match(plan).reasons if reason.key in about and "max_staleness" in str(reason)]
