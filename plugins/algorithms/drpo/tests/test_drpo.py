"""DRPO and SPO against golden vectors, against their NumPy reference, and in the train stack."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from token_algorithms.tracks import one_group
from torch import Tensor
from unirl.algorithms.drpo.algorithm import Drpo
from unirl.algorithms.drpo.config import DrpoConfig, SpoConfig
from unirl.algorithms.drpo.plugin import DRPO, SPO
from unirl.algorithms.drpo.reference import loss
from unirl.conformance.reference import TokenLossInputs
from unirl.core.limits import broken_limits
from unirl.core.roles import Job, ReplayedTokens
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.tokens.log_probs import token_log_probs
from unirl.numerics.train.stack import StepReport, train_on
from unirl.numerics.train.track_replay import TrackReplay

EACH = pytest.mark.parametrize("config", [DrpoConfig(), SpoConfig()], ids=["drpo", "spo"])


def make(config: DrpoConfig, old_log_probs: str = "replay") -> Drpo:
    return Drpo(
        config,
        advantage=AdvantageConfig(normalize=False),
        reward_weights={"one": 1.0},
        train=TrainConfig(old_log_probs=old_log_probs),
    )


def test_the_golden_vector() -> None:
    """pi_old .5 and .1, pi .6 and .08, A 1 and -1: -1.1992 and .80016; SPO by hand."""
    both = TokenLossInputs(
        log_probs=np.log([[0.6], [0.08]]),
        old_log_probs=np.log([[0.5], [0.1]]),
        valid=np.ones((2, 1), dtype=bool),
        advantages=np.array([1.0, -1.0]),
        weights=np.ones(2),
        is_truncated=np.zeros(2, dtype=bool),
    )
    plain = DrpoConfig(aggregation="token-mean")
    # A few units in the last place of fp64.
    assert loss(plain, both) == pytest.approx((-1.1992 + 0.80016) / 2, rel=1e-13)
    assert of_the_algorithm(plain, both) == pytest.approx((-1.1992 + 0.80016) / 2, rel=1e-13)
    # Ratios 1.2 and .8: (r - 1)^2 is .04, over 2 x 12.5.
    spo = (-1.2 + 0.0016 + 0.8 + 0.0016) / 2
    assert loss(SpoConfig(aggregation="token-mean"), both) == pytest.approx(spo, rel=1e-13)


def test_the_algorithm_agrees_with_its_reference_under_every_setting() -> None:
    given = random_inputs()
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    for mode, weighs, truncated, delta in itertools.product(modes, (True, False), ("keep", "mask"), (0.3, 12.5)):
        config = DrpoConfig(aggregation=mode, weighs_by_old=weighs, truncated=truncated, delta=delta, horizon=50.0)
        # Losses are fp64, weights of tokens fp32: 6e-8.
        assert of_the_algorithm(config, given) == pytest.approx(loss(config, given), rel=1e-6, abs=1e-9), config


def test_the_divergence_is_added_as_its_reference_says_with_the_coefficient_of_the_step() -> None:
    given = random_inputs()
    for estimator, weighs, mode in itertools.product(
        ("k2", "k3"), (True, False), ("token-mean", "seq-mean-token-mean")
    ):
        settings: dict[str, Any] = {"kl_estimator": estimator, "kl_weighs_by_ratio": weighs, "aggregation": mode}
        algorithm = make(DrpoConfig(kl_coef=0.5, kl_target=0.01, kl_horizon=40.0, **settings))
        for coefficient in (0.5, 0.52):
            expected = loss(DrpoConfig(kl_coef=coefficient, **settings), given)
            # Losses are fp64, weights of tokens fp32: 6e-8.
            assert loss_of(algorithm, given) == pytest.approx(expected, rel=1e-6, abs=1e-9), settings
            # A fifth of a horizon, far above the target.
            algorithm.end_step({"kl": 1.0, "samples": 8.0})


def test_the_gradient_is_weighed_as_the_paper_says() -> None:
    """-A r (1 - sign(A (r - 1)) |pi - pi_old| / delta) of each token's log-prob, averaged over the tokens."""
    given = random_inputs()
    ratio = np.exp(given.log_probs - given.old_log_probs)
    advantage = given.advantages[:, None]
    change = np.abs(np.exp(given.log_probs) - np.exp(given.old_log_probs))
    expected = -advantage * ratio * (1 - np.sign(advantage * (ratio - 1)) * change / 0.3)
    counted = given.valid * given.weights[:, None]
    live = torch.tensor(given.log_probs, requires_grad=True)
    track, algorithm = as_track(given), make(DrpoConfig(delta=0.3, aggregation="token-mean"))
    replayed = ReplayedTokens(log_probs=live, entropy=None, valid=torch.tensor(given.valid))
    losses = algorithm.loss(track, lambda *_, **__: replayed, progress=0.0)  # type: ignore[arg-type]
    reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))).backward()  # type: ignore[arg-type]
    assert live.grad is not None
    # fp64 on both sides.
    np.testing.assert_allclose(live.grad.numpy(), expected * counted / counted.sum(), rtol=1e-12, atol=1e-15)


def test_rows_without_weight_count_nowhere_even_when_they_are_nan() -> None:
    given = random_inputs()
    bad = {
        name: np.where(given.weights[:, None] == 0, math.nan, getattr(given, name))
        for name in ("log_probs", "old_log_probs")
    }
    poisoned = dataclasses.replace(given, **bad)
    assert loss(DrpoConfig(), poisoned) == loss(DrpoConfig(), given)
    assert of_the_algorithm(DrpoConfig(), poisoned) == of_the_algorithm(DrpoConfig(), given)


@EACH
def test_the_first_ratio_is_one_and_no_split_order_or_padding_changes_the_gradient(config: DrpoConfig) -> None:
    model = Unigram()
    track = as_track(random_inputs())
    numbers = train(model, make(config), track)
    assert numbers["ratio_max_dev_first"] == 0.0 and numbers["pull"] == 0.0
    anchored = make(config).with_old_log_probs(track, model.replay())
    with torch.no_grad():
        model.logits.add_(torch.linspace(0.4, -0.4, 5)[:, None])
    # The anchor is behind: what the track brings counts as old.
    later = make(config, old_log_probs="engine")
    whole = train(model, later, anchored)
    expected = model.gradient.clone()
    assert whole["pull"] > 0 and expected.abs().max() > 1e-6
    order = [6, 2, 0, 5, 1, 3, 4]
    for changed, micro_batch_size in (
        (anchored, 1),
        (anchored, 3),
        (anchored.select(order), 2),
        (anchored.padded(9), 4),
    ):
        result = train(model, later, changed, micro_batch_size=micro_batch_size)
        # fp64 sums in another order; weights of tokens are fp32, the same ones.
        torch.testing.assert_close(model.gradient, expected, rtol=1e-9, atol=1e-15)
        assert {name: result[name] for name in whole} == pytest.approx(whole, rel=1e-5, abs=1e-12)


@EACH
def test_a_step_favours_texts_with_advantage_and_zero_advantages_give_none(config: DrpoConfig) -> None:
    model = Unigram()
    track = as_track(random_inputs())
    before = model.replay()(track).log_probs.detach()
    train(model, make(config), track)
    assert track.advantages is not None
    with torch.no_grad():
        model.logits.sub_(0.01 * model.gradient / model.gradient.norm())
    gained = (model.replay()(track).log_probs.detach() - before).sum(dim=1)
    assert float((track.advantages * track.sample_weights * gained).sum()) > 0
    train(model, make(config), dataclasses.replace(track, advantages=torch.zeros(7)))
    assert not model.gradient.any()


def test_advantages_are_centred_and_the_lengths_are_told() -> None:
    track = dataclasses.replace(as_track(random_inputs()), advantages=None, sample_weights=torch.ones(7))
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.5])
    scored = dataclasses.replace(track, rewards=rewards, reward_parts={"one": rewards})
    result, numbers = make(DrpoConfig()).advantages(scored)
    # The mean is a half; all numbers are exact in fp32.
    assert result.advantages is not None and result.advantages.tolist() == [-0.5, 0.5, -0.5, -0.5, -0.5, -0.5, 2.0]
    assert numbers["response_length_mean"] == 5.0 and numbers["truncated_share"] == pytest.approx(2 / 7)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"delta": 0.0}, "algorithm.delta: got 0.0, expected more than 0."),
        ({"horizon": -1.0}, "algorithm.horizon: got -1.0"),
        ({"aggregation": "mean"}, "algorithm.aggregation: got 'mean', expected one of"),
        ({"truncated": "drop"}, "algorithm.truncated: got 'drop'"),
        ({"kl_coef": -1.0}, "algorithm.kl_coef: got -1.0, expected 0 or more."),
        ({"kl_coef": 1.0, "kl_estimator": "k1"}, "the gradient of 'k1' is 0 on average"),
        ({"normalize": True}, "Set advantage.normalize=false."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(settings: dict[str, Any], says: str) -> None:
    normalize = settings.pop("normalize", False)
    for spec, kind in ((DRPO, DrpoConfig), (SPO, SpoConfig)):
        config = kind(**settings)
        stage: Any = SimpleNamespace(
            algorithm=SimpleNamespace(name=spec.name, config=config), advantage=AdvantageConfig(normalize=normalize)
        )
        (reason,) = list(broken_limits(config, key="algorithm")) or config.problems(None, stage)
        assert says in str(reason.under("algorithm"))
    stage.advantage = AdvantageConfig(normalize=False)
    assert list(SpoConfig().problems(None, stage)) == []


def random_inputs() -> TokenLossInputs:
    """Seven texts of up to nine tokens: one empty, two cut off, one of weight 0, one of weight 1/2."""
    rng = np.random.default_rng(3)
    lengths = np.array([9, 4, 0, 7, 1, 9, 5])
    valid = np.arange(9)[None] < lengths[:, None]
    live = rng.normal(-1.5, 0.6, valid.shape)
    return TokenLossInputs(
        log_probs=live,
        old_log_probs=live + rng.normal(0, 0.3, valid.shape),
        reference_log_probs=live + rng.normal(0, 0.3, valid.shape),
        valid=valid,
        # Multiples of 1/8, so that fp32 holds them.
        advantages=np.array([1.25, -0.5, 0.75, -1.5, 0.25, 2.0, -0.875]),
        kl_weights=np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5]),
        weights=np.array([1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0]),
        is_truncated=lengths == 9,
    )


def of_the_algorithm(config: DrpoConfig, given: TokenLossInputs) -> float:
    return loss_of(make(config), given)


def loss_of(algorithm: Drpo, given: TokenLossInputs) -> float:
    def replay(track: Track, *, policy: str = "live") -> ReplayedTokens:
        values = given.log_probs if policy == "live" else given.reference_log_probs
        return ReplayedTokens(log_probs=torch.tensor(values), entropy=None, valid=torch.tensor(given.valid))

    track = as_track(given)
    losses = algorithm.loss(track, replay, progress=0.0)  # type: ignore[arg-type]
    return float(reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))))  # type: ignore[arg-type]


def as_track(given: TokenLossInputs) -> Track:
    rows = len(given.weights)
    lengths = given.valid.sum(axis=1).tolist()
    old = tuple(torch.tensor(row[:length]) for row, length in zip(given.old_log_probs, lengths, strict=True))
    return one_group(
        TextSegment(
            prompt_tokens=(torch.zeros(1, dtype=torch.int64),) * rows,
            tokens=tuple((torch.arange(length) * (row + 1)) % 5 for row, length in enumerate(lengths)),
            log_probs=old,
        ),
        advantages=torch.tensor(given.advantages, dtype=torch.float32),
        kl_weights=None if given.kl_weights is None else torch.tensor(given.kl_weights, dtype=torch.float32),
        sample_weights=torch.tensor(given.weights, dtype=torch.float32),
        status=tuple(Status.TRUNCATED if cut else Status.COMPLETED for cut in given.is_truncated),
    )


class Unigram:
    """A language model of five numbers, and an updater that keeps its gradient."""

    packs, pad_token = True, 0
    spec = ModelSpec(name="unigram", summary="", build="", config="", tracks={"text": "text"}, trainable="")
    device, num_ranks, gradient_reduction = torch.device("cpu"), 1, "sum"

    def __init__(self) -> None:
        self.logits = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None].clone().requires_grad_()
        self.gradient = torch.zeros(())

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        ones = torch.ones(len(batch.targets), 1, dtype=torch.float64)
        return token_log_probs(ones, self.logits, batch.targets, temperature=temperature, with_entropy=with_entropy)

    def replay(self) -> TrackReplay:
        return TrackReplay(self, stacked=True, policy_context=lambda which: nullcontext())  # type: ignore[arg-type]

    def zero_grad(self) -> None:
        self.logits.grad = torch.zeros_like(self.logits)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> StepReport:
        assert self.logits.grad is not None
        self.gradient = self.logits.grad
        return StepReport(grad_norm=float(self.gradient.norm()), grad_rms=0.0)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values


def train(model: Unigram, algorithm: Drpo, track: Track, *, micro_batch_size: int = 0) -> dict[str, float]:
    report = train_on(
        [Job(track=track, algorithm=algorithm)],
        forward=model.replay(),
        updater=model,
        train=TrainConfig(micro_batch_size=micro_batch_size),
        progress=0.0,
    )
    return dict(report.only)
