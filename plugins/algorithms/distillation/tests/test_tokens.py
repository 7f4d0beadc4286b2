"""Distillation at tokens: its NumPy reference under every setting, its identities, its gradient, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from token_algorithms.bigrams import Bench, BigramModel
from unirl.algorithms.distillation.config import DistillationConfig
from unirl.algorithms.distillation.reference import divergence, token_loss
from unirl.algorithms.distillation.tokens import Distillation, build
from unirl.conformance.reference import TokenLossInputs
from unirl.core.errors import BatchError, RecipeError
from unirl.core.roles import TextModel
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.replay import token_mask

SETTINGS: list[dict[str, Any]] = [
    {"divergence": kind, "top_k": top_k, "aggregation": aggregation, **({"beta": 0.1} if kind == "jensen" else {})}
    for kind, top_k, aggregation in itertools.product(
        ("reverse", "forward", "jensen"),
        (None, 2),
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    )
]


def make(**settings: Any) -> Distillation:
    return build(
        DistillationConfig(**settings),
        advantage=AdvantageConfig(),
        reward_weights={},
        train=TrainConfig(),
        seed=0,
    )


def loss_of(bench: Bench, algorithm: Distillation, track: Track | None = None) -> torch.Tensor:
    track = track or bench.track
    losses = algorithm.loss(track, bench.replay(), progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


def dense(model: BigramModel, track: Track) -> Any:
    """[n, S, V] log-probs, without chunks."""
    text = track.text
    batch = pad_batch(text.prompt_tokens, text.tokens, pad_token=0)
    with torch.no_grad():
        flat = (model.hidden(batch) @ model.head.T / text.temperature).log_softmax(dim=1)
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(list(text.lengths))), batch_first=True).numpy()


def masked(track: Track) -> Track:
    """Some tokens and some samples do not count."""
    masks = tuple(torch.arange(length) % 3 != 1 for length in track.text.lengths)
    weights = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    return dataclasses.replace(
        track, segment=dataclasses.replace(track.text, mask=masks, temperature=0.8), sample_weights=weights
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_loss_is_that_of_the_numpy_reference(settings: dict[str, Any]) -> None:
    bench = Bench()
    track = masked(bench.track)
    valid = token_mask(track.text).numpy()
    given = TokenLossInputs(
        log_probs=np.zeros(valid.shape),
        old_log_probs=np.zeros(valid.shape),
        distributions={"live": dense(bench.model, track), "reference": dense(bench.reference, track)},
        valid=valid,
        weights=track.sample_weights.numpy(),
        is_truncated=np.zeros(len(valid), dtype=bool),
    )
    expected = token_loss(DistillationConfig(**settings), given)
    # fp64 models; weights of tokens such as 1/3 are fp32.
    assert float(loss_of(bench, make(**settings), track).detach()) == pytest.approx(expected, rel=1e-6)


def test_golden_divergences() -> None:
    """By hand: p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4) have KL 1/4 ln 2 both ways; with the likeliest token of the
    teacher alone, p = (1/4, 3/4) and q = (1/2, 1/2)."""
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    quarter = math.log(2) / 4
    for kind in ("forward", "reverse"):
        assert divergence(DistillationConfig(divergence=kind), p, q) == pytest.approx(quarter, rel=1e-12)
    # m = (3/8, 3/8, 1/4): 1/2 ln(4/3) + 1/4 ln(2/3) each way.
    jensen = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert divergence(DistillationConfig(divergence="jensen"), p, q) == pytest.approx(jensen, rel=1e-12)
    lumped = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert divergence(DistillationConfig(top_k=1), p, q) == pytest.approx(lumped, rel=1e-12)


@pytest.mark.parametrize("settings", SETTINGS[::3], ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient(settings: dict[str, Any]) -> None:
    bench = Bench()
    bench.reference.load_state_dict(bench.model.state_dict())
    loss = loss_of(bench, make(**settings))
    # fp64: the mixture of jensen is a logarithm of a sum, one rounding away.
    assert abs(float(loss.detach())) < 1e-14
    gradients = torch.autograd.grad(loss, list(bench.model.parameters()))
    assert max(float(value.abs().max()) for value in gradients) < 1e-14


@pytest.mark.parametrize("settings", SETTINGS[::3], ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_gradient_is_that_of_finite_differences(settings: dict[str, Any]) -> None:
    bench, algorithm = Bench(), make(**settings)
    track = masked(bench.track)
    gradients = torch.autograd.grad(loss_of(bench, algorithm, track), list(bench.model.parameters()))
    random, step = torch.Generator().manual_seed(3), 1e-5
    for value, gradient in zip(bench.model.parameters(), gradients, strict=True):
        way = torch.randn(value.shape, generator=random, dtype=value.dtype)
        losses: list[float] = []
        for sign in (1, -1):
            value.data += sign * step * way
            losses.append(float(loss_of(bench, algorithm, track).detach()))
            value.data -= sign * step * way
        # Central differences in fp64: step^2 times a third derivative of order 10, and 1e-16 / step.
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float((gradient * way).sum()), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("settings", SETTINGS[1::3], ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_student_comes_closer_to_its_teacher_with_every_step(settings: dict[str, Any]) -> None:
    """Through the train stack, in micro-batches, packed."""
    bench = Bench(lr=1.0)
    results = [bench.train(make(**settings), micro_batch_size=2) for _ in range(8)]
    assert "divergence" in results[0] and results[0]["grad_norm"] > 0
    values = [result["divergence"] for result in results]
    assert all(after < before for before, after in itertools.pairwise(values)), values
    assert values[-1] < 0.9 * values[0]


def test_the_log_probs_of_the_engine_are_watched() -> None:
    """The engine of the bench is off by 0.05 on average: the first update measures it, as it does for a policy loss."""
    result = Bench().train(make())
    # Normal: the mean of |x| is 0.8 times 0.05, over 21 tokens.
    assert 0.02 < result["logp_mismatch_mean"] < 0.08


def test_rewards_are_not_read() -> None:
    bench = Bench()
    track, numbers = make().advantages(dataclasses.replace(bench.track, advantages=None))
    assert track.advantages is None and numbers["response_length_max"] == 6
    assert float(loss_of(bench, make(), track).detach()) > 0


def test_log_probs_of_other_workers_are_not_enough() -> None:
    bench = Bench()
    segment = dataclasses.replace(bench.track.text, reference_log_probs=bench.track.text.log_probs)
    with pytest.raises(BatchError, match="of the sampled tokens alone; a divergence needs whole distributions"):
        loss_of(bench, make(), dataclasses.replace(bench.track, segment=segment))


def test_a_model_that_hides_its_distributions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BigramModel, "output_head", TextModel.output_head)
    with pytest.raises(RecipeError, match="got a BigramModel, which does not implement output_head"):
        loss_of(Bench(), make())
