"""Losses and gradients against TRL's GRPOTrainer, see the fixture `trl_trainer`.

`compute_loss` runs on completions of unequal length, with old, reference and engine log-probs that are chosen here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from token_algorithms.tracks import one_group
from torch import Tensor
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.config import CispoConfig, DapoConfig, DrGrpoConfig, GrpoConfig, GspoConfig
from unirl.core.roles import ReplayedTokens
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import TextSegment, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

pytestmark = [
    pytest.mark.slow,
    # Raised inside TRL, transformers and accelerate while they import or build; none is about the numbers.
    pytest.mark.filterwarnings("ignore"),
]

LENGTHS = (3, 5, 2, 4, 5, 1, 4, 3)
LONGEST = 5


@pytest.fixture(scope="module")
def trainer(trl_trainer: Any) -> Any:
    rewards = [0.0, 1.0, 3.0, 0.5, 2.0, 2.5, 7.0, 1.0]
    return trl_trainer(lengths=LENGTHS, rewards=[rewards], max_completion_length=LONGEST)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, GrpoConfig()),
        (
            {"loss_type": "grpo", "beta": 0.3, "delta": 1.5},
            GrpoConfig(kl_coef=0.3, kl_weighs_by_ratio=True, dual_clip=1.5),
        ),
        (
            {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
            GrpoConfig(kl_coef=0.3),
        ),
        ({"loss_type": "dr_grpo"}, DrGrpoConfig(max_length=LONGEST)),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, DapoConfig()),
        ({"loss_type": "bnpo", "entropy_coef": 0.2}, GrpoConfig(aggregation="token-mean", entropy_coef=0.2)),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.04},
            GspoConfig(clip_range=0.02, clip_range_high=0.04),
        ),
        ({"loss_type": "cispo", "epsilon_high": 1.2}, CispoConfig(clip_range_high=0.2)),
        ({"loss_type": "grpo", "engine": True}, GrpoConfig(tis="token", tis_cap=1.1)),
    ],
    ids=[
        "grpo",
        "kl by ratio, dual clip",
        "kl",
        "dr-grpo",
        "dapo",
        "entropy",
        "gspo",
        "cispo",
        "importance of the engine",
    ],
)
def test_the_loss_and_its_gradient_are_those_of_trl(
    trainer: Any, trl_scores: Any, theirs: dict[str, Any], ours: GrpoConfig
) -> None:
    inputs = prepared(trainer, trl_scores, **theirs)
    model, mask = trainer.model, inputs["completion_mask"].bool()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = trainer.compute_loss(model, inputs)
    expected_gradient = torch.autograd.grad(expected, parameters)

    algorithm = Grpo(ours, advantage=AdvantageConfig(), reward_weights={"one": 1.0}, train=TrainConfig())
    track = as_track(inputs)
    live, entropy = trl_scores(model, inputs)

    def replay(track: Track, *, policy: str = "live") -> ReplayedTokens:
        values = live if policy == "live" else inputs["ref_per_token_logps"]
        return ReplayedTokens(log_probs=values, entropy=entropy, valid=mask)

    losses = algorithm.loss(track, replay, progress=0.0)  # type: ignore[arg-type]
    result = reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))  # type: ignore[arg-type]
    # fp32, the same sums in another order; losses are of order 1, gradients of order 0.1.
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    for mine, other in zip(torch.autograd.grad(result, parameters), expected_gradient, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    if ours.loss == "clip":
        clipped = losses.metrics["clip_fraction"]
        assert 0 < clipped.total < clipped.weight, "a clip that binds nowhere, or everywhere, shows nothing"


def prepared(trainer: Any, trl_scores: Any, **settings: Any) -> dict[str, Any]:
    """TRL's inputs of its rollout under these settings, with log-probs of other policies near those of the model."""
    plain = {"loss_type": "grpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.0}
    for name, value in {**plain, "importance_sampling_level": "token", **settings}.items():
        setattr(trainer, name, value)
    trainer.args.delta = settings.get("delta")
    trainer.args.use_bias_correction_kl = settings.get("use_bias_correction_kl", True)
    trainer._entropy_bonus_enabled = "entropy_coef" in settings
    inputs = dict(trainer.given)
    live = trl_scores(trainer.model, inputs)[0].detach()
    random = torch.Generator().manual_seed(3)
    near = [live + 0.3 * torch.randn(live.shape, generator=random) for _ in range(3)]
    inputs["old_per_token_logps"], inputs["ref_per_token_logps"], inputs["engine"] = near
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "engine" in settings
    # As TRL makes it of vLLM's log-probs in its mode token_truncate, with a cap of 1.1.
    inputs["importance_sampling_ratio"] = torch.exp(near[0] - near[2]).clamp(max=1.1)
    return inputs


def as_track(inputs: dict[str, Any]) -> Track:
    lengths = inputs["completion_mask"].sum(dim=1).tolist()
    assert tuple(lengths) == LENGTHS

    def per_sample(values: Tensor) -> tuple[Tensor, ...]:
        return tuple(row[:length] for row, length in zip(values, lengths, strict=True))

    rows = len(lengths)
    return one_group(
        TextSegment(
            prompt_tokens=(torch.tensor([3, 4]),) * rows,
            tokens=per_sample(inputs["completion_ids"]),
            log_probs=per_sample(inputs["old_per_token_logps"]),
            engine_log_probs=per_sample(inputs["engine"]),
        ),
        advantages=inputs["advantages"],
    )
