"""Advantages and clipped losses against TRL's GRPOTrainer, see the fixture `trl_trainer`."""

import pytest
import torch
from unirl.core.roles import LossTerm
from unirl.numerics.loss.advantages import advantages, combine_rewards
from unirl.numerics.loss.losses import clipped_surrogate
from unirl.numerics.loss.reduction import reduce_terms

pytestmark = [
    pytest.mark.slow,
    # Raised inside TRL, transformers and accelerate while they import or build; none is about the numbers.
    pytest.mark.filterwarnings("ignore"),
]

REWARDS = torch.tensor([[0.0, 1, 1, 0, 2, 2, 2, 2, 2, 4, 6, 8], [5.0, 5, 0, 1, 0, 3, 1, 1, 9, 9, 9, 9]])
GROUPS = ["a"] * 4 + ["b"] * 4 + ["c"] * 4


@pytest.fixture
def make_trainer(trl_trainer):
    def build(num_rewards=1, **options):
        lengths = [3 + row % 3 for row in range(12)]
        return trl_trainer(lengths=lengths, rewards=REWARDS[:num_rewards].tolist(), max_completion_length=6, **options)

    return build


# TRL computes in fp32; group b is constant and group c's spread is 2.6: rounding of 1e-7 over a std of 0.5.
ADVANTAGE = 2e-6


@pytest.mark.parametrize(
    ("scale_rewards", "options"),
    [
        ("group", {"ddof": 1}),
        ("batch", {"ddof": 1, "scope": "global"}),
        ("none", {"normalize": False}),
    ],
)
def test_advantages_are_those_of_trl(make_trainer, scale_rewards, options):
    theirs = make_trainer(scale_rewards=scale_rewards).given["advantages"]
    result = advantages(REWARDS[0], group_ids=GROUPS, **options)
    torch.testing.assert_close(result.values, theirs, rtol=0, atol=ADVANTAGE)
    assert result.num_zero_spread_groups == 1


def test_summed_rewards_are_those_of_trl(make_trainer):
    theirs = make_trainer(num_rewards=2, reward_weights=[0.25, 2.0]).given["advantages"]
    parts = {"first": REWARDS[0], "second": REWARDS[1]}
    result = combine_rewards(parts, weights={"first": 0.25, "second": 2.0}, group_ids=GROUPS, ddof=1)
    torch.testing.assert_close(result.values, theirs, rtol=0, atol=ADVANTAGE)


def test_rewards_normalised_apart_and_whitened_are_those_of_trl(make_trainer):
    """TRL whitens the weighted sum once more over the batch."""
    trainer = make_trainer(num_rewards=2, reward_weights=[0.25, 2.0], multi_objective_aggregation="normalize_then_sum")
    theirs = trainer.given["advantages"]
    parts = {"first": REWARDS[0], "second": REWARDS[1]}
    result = combine_rewards(
        parts, weights={"first": 0.25, "second": 2.0}, group_ids=GROUPS, ddof=1, mode="normalize-sum-normalize"
    )
    torch.testing.assert_close(result.values, theirs, rtol=0, atol=ADVANTAGE)


def log_ratios(mask):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(mask.shape, generator=generator) * 0.3


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({"loss_type": "bnpo"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"loss_type": "bnpo", "epsilon_high": 0.28}, {"clip_low": 0.2, "clip_high": 0.28}),
        ({"loss_type": "grpo"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"loss_type": "dr_grpo"}, {"clip_low": 0.2, "clip_high": 0.2}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.04},
            {"clip_low": 0.02, "clip_high": 0.04},
        ),
    ],
    ids=["ppo", "dapo ranges", "sequence mean", "constant length", "gspo"],
)
def test_the_clipped_loss_and_its_gradient_are_those_of_trl(make_trainer, trl_scores, options, ranges):
    trainer = make_trainer(beta=0.0, **options)
    inputs = trainer.given
    mask = inputs["completion_mask"].float()
    model = trainer.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    old = trl_scores(model, inputs)[0].detach() - log_ratios(mask)
    inputs["old_per_token_logps"] = old
    theirs = trainer.compute_loss(model, inputs)
    expected = torch.autograd.grad(theirs, parameters, allow_unused=True)

    log_ratio = trl_scores(model, inputs)[0] - old
    num_rows = mask.shape[0]
    if "importance_sampling_level" in options:
        log_ratio = (log_ratio * mask).sum(dim=1) / mask.sum(dim=1)
        weights, total = torch.ones(num_rows), num_rows
    elif options["loss_type"] == "bnpo":
        weights, total = mask, mask.sum()
    elif options["loss_type"] == "grpo":
        weights, total = mask / mask.sum(dim=1, keepdim=True), num_rows
    else:
        weights, total = mask, num_rows * trainer.max_completion_length
    surrogate = clipped_surrogate(log_ratio, inputs["advantages"], **ranges)
    assert bool(surrogate.binding.any()) and not bool(surrogate.binding.all())
    term = LossTerm(name="policy", values=surrogate.loss, weights=weights)
    ours = reduce_terms([term], totals={"policy": torch.as_tensor(float(total))})
    # fp32, the same sums in another order; losses and gradients are of order 0.1.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    result = torch.autograd.grad(ours, parameters, allow_unused=True)
    for mine, other in zip(result, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)
