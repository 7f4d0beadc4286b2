"""Flow-GRPO against golden vectors and against itself, on a denoiser of one parameter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import FlowDppoConfig, FlowGrpoConfig, TempFlowConfig
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Replayed
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

OLD = (-1.0, -1.0002, -0.9999, -1.00005)
NEW = (-0.99985, -1.00025, -1.0001, -1.00004)
ADVANTAGES = (1.5, -0.7, 5.0, -2.0)


def make(
    *, config: type[FlowGrpoConfig] = FlowGrpoConfig, combine: str = "sum-then-normalize", **settings: object
) -> FlowGrpo:
    return FlowGrpo(
        config(**settings),  # type: ignore[arg-type]
        advantage=AdvantageConfig(combine=combine),
        reward_weights={"one": 0.5, "two": 0.5},
        train=TrainConfig(),
    )


def make_track(*, log_probs: Tensor, advantages: Tensor, means: Tensor | None = None) -> Track:
    rows, steps = log_probs.shape
    segment = LatentSegment(
        latents=torch.zeros(rows, steps + 1, 2),
        positions=torch.arange(steps + 1).repeat(rows, 1),
        sde_steps=torch.arange(steps).repeat(rows, 1),
        log_probs=log_probs,
        means=means,
        sigmas=torch.linspace(1, 0, steps + 1),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    return Track(
        name="image",
        sample_ids=tuple(f"p/{row}" for row in range(rows)),
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts(("p",) * rows),
        metadata=({},) * rows,
        segment=segment,
        advantages=advantages,
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


class FixedReplay:
    """Log-probs and means that are given, for losses whose expected values are given too."""

    def __init__(self, log_probs: Tensor, *, means: Tensor | None = None, std: float = 0.35) -> None:
        self.asked: list[str] = []
        self.reference: FixedReplay | None = None
        rows, steps = log_probs.shape
        filled = torch.zeros(rows, steps, 2) if means is None else means
        wide = torch.full((rows, steps, 1), std)
        self._replayed = Replayed(
            log_probs=log_probs,
            means=filled,
            std=wide,
            g=wide,
            next=filled,
            valid=torch.ones(rows, steps, dtype=torch.bool),
        )

    def __call__(self, track: Track, *, policy: str = "live") -> Replayed:
        self.asked.append(policy)
        return self.reference(track) if policy == "reference" and self.reference else self._replayed


def loss_of(algorithm: FlowGrpo, track: Track, replay: object) -> tuple[Tensor, dict[str, float]]:
    losses = algorithm.loss(track, replay, progress=0.0)  # type: ignore[arg-type]
    numbers = {name: metric.total / metric.weight for name, metric in losses.metrics.items()}
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))), numbers


def test_the_loss_meets_the_golden_vector() -> None:
    track = make_track(
        log_probs=torch.tensor(OLD, dtype=torch.float64)[:, None],
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
    )
    replay = FixedReplay(torch.tensor(NEW, dtype=torch.float64)[:, None])
    loss, numbers = loss_of(make(clip_range=1e-4), track, replay)
    # fp64 throughout: the vector has 16 digits.
    assert float(loss) == pytest.approx(-0.9497912747545868, rel=1e-12)
    assert numbers["clip_fraction"] == 0.5
    assert replay.asked == ["live"], "without a KL the reference policy never runs"


def test_guard_meets_the_golden_vector() -> None:
    biases = (2e-5, 5e-6, 3e-5, 2e-5)
    std = 0.35
    # A shift d in every element has mean square d^2, so d = s * sqrt(2 b) makes the bias b.
    shifts = torch.tensor([std * math.sqrt(2 * b) for b in biases], dtype=torch.float64)
    track = make_track(
        log_probs=torch.tensor(OLD, dtype=torch.float64)[:, None],
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        means=torch.zeros(4, 1, 2, dtype=torch.float64),
    )
    replay = FixedReplay(
        torch.tensor(NEW, dtype=torch.float64)[:, None],
        means=shifts[:, None, None].expand(4, 1, 2).contiguous(),
        std=std,
    )
    replay._replayed = dataclasses.replace(replay._replayed, std=replay._replayed.std.double())
    loss, _ = loss_of(make(clip_range=2e-6, ratio_norm=True), track, replay)
    # std passes through fp32 once (0.35), which leaves 8 digits of the 16.
    assert float(loss) == pytest.approx(-0.9499214771850496, rel=1e-8)


def test_flow_dppo_meets_the_golden_vector() -> None:
    divergences = (2e-5, 5e-6, 3e-5, 2e-5)
    shifts = torch.tensor([math.sqrt(2 * d) for d in divergences], dtype=torch.float64)
    track = make_track(
        log_probs=torch.tensor(OLD, dtype=torch.float64)[:, None],
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        means=torch.zeros(4, 1, 2, dtype=torch.float64),
    )
    means = shifts[:, None, None].expand(4, 1, 2).contiguous()
    replay = FixedReplay(torch.tensor(NEW, dtype=torch.float64)[:, None], means=means, std=1.0)
    loss, numbers = loss_of(make(config=FlowDppoConfig), track, replay)
    # fp64 throughout: the vector has 16 digits.
    assert float(loss) == pytest.approx(-0.5747537747545869, rel=1e-12)
    assert numbers["dropped_fraction"] == 0.25
    assert numbers["clip_fraction"] == 0.75, "three of four are at the threshold of 1e-5 or beyond"
    assert numbers["divergence"] == pytest.approx(1.875e-5, rel=1e-6)


def test_the_first_update_of_flow_dppo_is_the_plain_policy_gradient() -> None:
    """The old means are those of the replay, so every divergence is 0 and nothing is dropped, however low the bound."""
    log_probs, means = torch.randn(4, 3), torch.randn(4, 3, 2)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0])
    algorithm = make(config=FlowDppoConfig, threshold=1e-30)
    # What the engine says is replaced: its log-probs, and it gives no means.
    track = algorithm.with_old_log_probs(
        make_track(log_probs=torch.zeros(4, 3), advantages=advantages),
        FixedReplay(log_probs, means=means),  # type: ignore[arg-type]
    )
    new = log_probs.clone().requires_grad_()
    loss, numbers = loss_of(algorithm, track, FixedReplay(new, means=means))
    loss.backward()
    assert numbers["dropped_fraction"] == 0.0 and numbers["divergence"] == 0.0
    assert new.grad is not None
    # -A times the gradient of the log-prob, averaged over 12 elements.
    torch.testing.assert_close(new.grad, -advantages[:, None].expand(4, 3) / 12, rtol=1e-6, atol=0)


def test_one_ratio_per_sample_moves_every_step_by_its_own_gradient() -> None:
    new = torch.tensor([[0.1, -0.1, 0.1]], requires_grad=True)
    track = make_track(log_probs=torch.zeros(1, 3), advantages=torch.tensor([1.0]))
    loss, numbers = loss_of(make(ratio="sequence", clip_range=0.2), track, FixedReplay(new))
    loss.backward()
    ratio = math.exp(0.1 / 3)
    assert float(loss.detach()) == pytest.approx(-ratio, rel=1e-6)  # fp32
    assert numbers["ratio_max_dev"] == pytest.approx(ratio - 1, rel=1e-4)  # fp32, a difference of numbers near 1
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.full((1, 3), -ratio / 3), rtol=1e-6, atol=0)
    # Clipped as a whole: single steps may be far outside, but all lose their gradient together.
    clipped = new.detach().clone().requires_grad_()
    loss_of(make(ratio="sequence", clip_range=0.03), track, FixedReplay(clipped))[0].backward()
    assert clipped.grad is not None and not clipped.grad.any()


def test_cispo_keeps_the_gradient_of_every_step() -> None:
    old, new = torch.zeros(2, 2), torch.tensor([[0.5, -0.5], [0.5, 0.0]], requires_grad=True)
    track = make_track(log_probs=old, advantages=torch.tensor([1.0, -2.0]))
    loss, numbers = loss_of(make(loss="cispo", clip_range=0.2, clip_range_high=0.3), track, FixedReplay(new))
    loss.backward()
    assert numbers["clip_fraction"] == 0.75
    assert new.grad is not None
    # -A times the clipped weight, over four elements.
    expected = torch.tensor([[-1.3, -0.8], [2.6, 2.0]]) / 4
    torch.testing.assert_close(new.grad, expected, rtol=1e-6, atol=0)


def test_equal_log_probs_give_ratio_one_and_the_gradient_of_reinforce() -> None:
    old = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0])
    new = old.clone().requires_grad_()
    loss, numbers = loss_of(make(), make_track(log_probs=old, advantages=advantages), FixedReplay(new))
    loss.backward()
    assert numbers["ratio_max_dev"] == 0.0
    assert new.grad is not None
    # -A times the gradient of the log-prob, averaged over 12 elements.
    torch.testing.assert_close(new.grad, -advantages[:, None].expand(4, 3) / 12, rtol=1e-6, atol=0)


def test_advantages_of_steps_take_the_place_of_those_of_samples() -> None:
    old = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 0.0], [0.25, 0.25, 0.25], [0.0, 0.0, 0.0]])
    track = make_track(log_probs=old, advantages=torch.full((4,), math.nan))
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, advantages=advantages))
    for settings, count in ({}, 12), ({"drop_zero_advantage": True}, 7):
        new = old.clone().requires_grad_()
        loss, _ = loss_of(make(**settings), track, FixedReplay(new))
        loss.backward()
        assert new.grad is not None
        # -A times the gradient of the log-prob, averaged over the elements that count.
        torch.testing.assert_close(new.grad, -advantages / count, rtol=1e-6, atol=0)


def test_zero_advantages_give_no_gradient() -> None:
    new = torch.zeros(4, 3, requires_grad=True)
    loss, _ = loss_of(make(), make_track(log_probs=torch.zeros(4, 3), advantages=torch.zeros(4)), FixedReplay(new))
    loss.backward()
    assert new.grad is not None
    assert not new.grad.any()


def test_padding_counts_nowhere_even_when_it_is_nan() -> None:
    track = make_track(log_probs=torch.zeros(2, 3), advantages=torch.tensor([1.0, 1.0]))
    padded = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 0.0]))
    poisoned = torch.tensor([[0.0] * 3, [math.nan] * 3], requires_grad=True)
    loss, numbers = loss_of(make(), padded, FixedReplay(poisoned))
    assert float(loss.detach()) == -1.0
    assert numbers["ratio_max_dev"] == 0.0


def test_the_kl_term_is_the_gaussian_divergence_of_the_means() -> None:
    track = make_track(log_probs=torch.zeros(2, 1), advantages=torch.zeros(2))
    replay = FixedReplay(torch.zeros(2, 1), std=0.5)
    replay.reference = FixedReplay(torch.zeros(2, 1), means=torch.full((2, 1, 2), 0.1), std=0.5)
    losses = make(kl_coef=0.04).loss(track, replay, progress=0.0)  # type: ignore[arg-type]
    assert [(term.name, term.scale) for term in losses.terms] == [("policy", 1.0), ("kl", 0.04)]
    assert replay.asked == ["live", "reference"]
    # 0.1^2 / (2 * 0.5^2) = 0.02, in fp32.
    torch.testing.assert_close(losses.terms[1].values, torch.full((2, 1), 0.02), rtol=1e-6, atol=0)
    # That is far above this target, and 60 samples are 3/4 of the horizon: 0.04 (1 + 0.75 x 0.2).
    adaptive = make(kl_coef=0.04, kl_target=0.001, kl_horizon=80.0)
    assert adaptive.end_step({"kl": 0.02, "samples": 60.0}) == {"kl_coef": 0.04}
    later = adaptive.loss(track, replay, progress=0.0)  # type: ignore[arg-type]
    assert [term.scale for term in later.terms] == [1.0, pytest.approx(0.046, rel=1e-12)]


def test_normalise_then_sum_keeps_a_reward_of_small_scale() -> None:
    # Two rewards of very different scale: the sum follows the wide one, the normalised sum weighs them alike.
    one, two = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 100.0, 100.0])
    track = dataclasses.replace(
        make_track(log_probs=torch.zeros(4, 1), advantages=torch.zeros(4)),
        rewards=0.5 * one + 0.5 * two,
        reward_parts={"one": one, "two": two},
    )
    result, _ = make(combine="normalize-then-sum").advantages(track)
    # eps is 1e-4 over stds of 0.5 and 50, hence 2e-4 relative at most.
    torch.testing.assert_close(result.advantages, torch.tensor([-1.0, 0.0, 0.0, 1.0]), rtol=3e-4, atol=3e-4)
    summed, numbers = make().advantages(track)
    expected = torch.tensor([-1.00995, -0.98995, 0.98995, 1.00995])
    torch.testing.assert_close(summed.advantages, expected, rtol=0, atol=1e-5)
    assert numbers["groups"] == 1


def of_one_step(steps: list[int]) -> Track:
    """A row for each of these steps of the ten with shift 3, the one that was stochastic in it; advantages of -1."""
    rows = len(steps)
    track = make_track(log_probs=torch.zeros(rows, 1), advantages=-torch.ones(rows))
    sigmas = torch.tensor([1, 27 / 28, 12 / 13, 0.875, 9 / 11, 0.75, 2 / 3, 0.5625, 3 / 7, 0.25, 0.0])
    segment = dataclasses.replace(track.latent, sde_steps=torch.tensor(steps)[:, None], sigmas=sigmas)
    return dataclasses.replace(track, segment=segment)


def test_the_weight_of_a_step_is_its_noise_over_the_mean_of_the_schedule() -> None:
    """Also with one step in each row; of mean 1 where all steps are drawn equally often; whatever the micro-batch."""
    # Flow-SDE at eta 0.7: its published stds, to five digits.
    stds = torch.tensor([0.7, 0.73837, 0.53169, 0.44146, 0.38774, 0.35, 0.3195, 0.29047, 0.25617, 0.20207])
    algorithm = make(config=TempFlowConfig)

    def values(steps: list[int]) -> Tensor:
        losses = algorithm.loss(of_one_step(steps), FixedReplay(torch.zeros(len(steps), 1)), progress=0.0)  # type: ignore[arg-type]
        return losses.terms[0].values[:, 0]

    whole = values([*range(10)])
    torch.testing.assert_close(whole, stds / stds.mean(), rtol=3e-5, atol=0)
    assert float(whole.mean()) == pytest.approx(1.0, rel=1e-6)
    for step in range(10):
        assert torch.equal(values([step, step]), whole[[step, step]])


def test_steps_without_noise_count_in_no_mean() -> None:
    """Coefficient-preserving sampling has none in the last step."""
    track = of_one_step([*range(9)])
    segment = dataclasses.replace(track.latent, sampler=Sampler(kernel="cps", eta=0.5))
    algorithm, replay = make(step_weight="noise"), FixedReplay(torch.zeros(9, 1))
    losses = algorithm.loss(dataclasses.replace(track, segment=segment), replay, progress=0.0)  # type: ignore[arg-type]
    ends = segment.sigmas[1:10]
    torch.testing.assert_close(losses.terms[0].values[:, 0], ends / ends.mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        (["algorithm.dual_clip=0.5"], "more than 1, or null"),
        (["algorithm.dual_clip=1.001"], "more than 1.001, the upper clip"),
        (["algorithm.dual_clip=1.1", "algorithm.clip_range_high=0.1"], "more than 1.1, the upper clip"),
    ],
)
def test_a_dual_clip_inside_the_clip_range_is_refused_at_compose(overrides: list[str], least: str) -> None:
    catalog = Catalog.discover()
    verdict = match(compose("quickstart", overrides, catalog=catalog), catalog=catalog)
    (reason,) = verdict.reasons
    assert reason.key == "algorithm.dual_clip"
    assert f"expected {least}" in reason.text


def test_a_dual_clip_above_the_clip_range_is_accepted() -> None:
    catalog = Catalog.discover()
    assert not match(compose("quickstart", ["algorithm.dual_clip=3"], catalog=catalog), catalog=catalog).reasons


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        ("quickstart-dppo", ["sampling.eta=0"], "sampling.eta: algorithm 'flow-dppo' takes ratios of log-probs"),
        ("quickstart-dppo", ["sampling.kernel=euler"], "sampling.kernel: algorithm 'flow-dppo' takes ratios"),
        (
            "quickstart-dppo",
            [
                "sampling.kernel=cps",
                "+sampling.kernel_options.constants=false",
                "sampling.sde={mode: fraction, last: 0.9}",
            ],
            "sampling.kernel_options.constants: got false",
        ),
        ("quickstart-dppo", ["algorithm.threshold=null"], "algorithm.threshold: got null, expected a KL for loss"),
        ("quickstart-dppo", ["algorithm.ratio_norm=true"], "algorithm.ratio_norm: got true, expected false: loss"),
        ("quickstart-dppo", ["algorithm.clip_schedule=cosine"], "algorithm.clip_schedule: got cosine, expected const"),
        ("quickstart", ["algorithm.threshold=1e-5"], "algorithm.threshold: got 1e-05, expected null: loss 'clip'"),
        (
            "quickstart",
            ["algorithm.clip_range=1.5"],
            "algorithm.clip_range: got 1.5, expected more than 0 and at most 1",
        ),
        ("quickstart", ["algorithm.loss=cispo", "algorithm.ratio=sequence"], "algorithm.ratio: got sequence, expected"),
        ("quickstart-tempflow", ["sampling.sde.window=2"], "sampling.sde: got mode 'window' of 2 steps, expected one"),
        (
            "quickstart-tempflow",
            ["sampling.sde.mode=fraction", "sampling.sde.per_group=false"],
            "sampling.sde: got mode 'fraction', expected one SDE",
        ),
        ("quickstart-tempflow", ["sampling.same_initial_noise=false"], "sampling.same_initial_noise: got false"),
    ],
)
def test_settings_that_do_not_fit_the_loss_are_refused_at_compose(recipe: str, overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    (reason,) = match(compose(recipe, overrides, catalog=catalog), catalog=catalog).reasons
    assert str(reason).startswith(says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm=flow-dppo"], "got 1, which trains on samples from older weights; algorithm 'flow-dppo' cannot"),
        (
            ["algorithm.loss=divergence", "algorithm.threshold=1e-3"],
            "got 1, expected 0: loss 'divergence' takes the KL",
        ),
    ],
)
def test_a_divergence_refuses_samples_of_older_weights_once(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart", ["run.max_staleness=1", "train.old_log_probs=engine", *overrides], catalog=catalog)
    reasons = [str(reason) for reason in match(plan, catalog=catalog).reasons]
    # The others are of the engine, which samples with the weights that train.
    assert [reason for reason in reasons if says in reason] == [r for r in reasons if "shares its weights" not in r]
    assert len([reason for reason in reasons if says in reason]) == 1


class TestRewardsOfSteps:
    """DenseGRPO: what each step gained takes the place of the sample's reward."""

    GAINS = ((1.0, -2.0), (3.0, 0.0), (0.0, 4.0), (-1.0, 1.0))
    REWARDS = (0.5, 0.0, 1.0, 0.75)

    def track(self) -> Track:
        track = make_track(log_probs=torch.zeros(4, 2), advantages=torch.zeros(4))
        gains, rewards = torch.tensor(self.GAINS), torch.tensor(self.REWARDS)
        return dataclasses.replace(
            track,
            advantages=None,
            rewards=rewards,
            reward_parts={"one": rewards, "two": torch.zeros(4)},
            segment=dataclasses.replace(track.latent, step_rewards={"one": gains, "two": torch.zeros(4, 2)}),
        )

    @staticmethod
    def normalised(values: Tensor) -> Tensor:
        return (values - values.mean()) / (values.std(correction=0) + AdvantageConfig().eps)

    def test_each_step_has_an_advantage_of_its_own(self) -> None:
        """Equation 10 of arXiv 2601.20218, of half of the gains; fp32 of order 1."""
        result, _ = make(step_rewards=True).advantages(self.track())
        expected = torch.stack([self.normalised(column / 2) for column in torch.tensor(self.GAINS).T], dim=1)
        assert result.latent.advantages is not None and not result.latent.step_rewards
        torch.testing.assert_close(result.latent.advantages, expected, rtol=0, atol=1e-6)
        assert result.advantages is not None
        own = self.normalised(torch.tensor(self.REWARDS) / 2)
        torch.testing.assert_close(result.advantages, own, rtol=0, atol=1e-6)

    def test_the_loss_weighs_each_step_by_its_own(self) -> None:
        """At a ratio of 1 the loss is minus the mean advantage of the steps, and its gradient by a log-prob the
        advantage over their number."""
        algorithm = make(step_rewards=True)
        track, _ = algorithm.advantages(self.track())
        new = torch.zeros(4, 2, requires_grad=True)
        loss, _ = loss_of(algorithm, track, FixedReplay(new))
        loss.backward()
        assert track.latent.advantages is not None and new.grad is not None
        torch.testing.assert_close(new.grad, -track.latent.advantages / 8, rtol=0, atol=1e-7)

    def test_one_step_from_a_shared_start_is_flow_grpo(self) -> None:
        """Then all samples of a group expect the same before it, and a constant changes no advantage; fp32 of order 1."""
        track, rewards = self.track(), torch.tensor(self.REWARDS)
        segment = make_track(log_probs=torch.zeros(4, 1), advantages=torch.zeros(4)).latent
        gains = {"one": (rewards - 0.375)[:, None], "two": torch.zeros(4, 1)}
        dense = dataclasses.replace(track, segment=dataclasses.replace(segment, step_rewards=gains))
        result, _ = make(step_rewards=True).advantages(dense)
        plain, _ = make().advantages(dense)
        assert result.latent.advantages is not None and plain.advantages is not None
        torch.testing.assert_close(result.latent.advantages[:, 0], plain.advantages, rtol=0, atol=1e-6)

    def test_samples_are_chosen_by_their_rewards_and_keep_the_advantages_of_their_steps(self) -> None:
        every, _ = make(step_rewards=True).advantages(self.track())
        algorithm = FlowGrpo(
            FlowGrpoConfig(step_rewards=True),
            advantage=AdvantageConfig(keep_best=1, keep_worst=1),
            reward_weights={"one": 0.5, "two": 0.5},
            train=TrainConfig(),
        )
        kept, numbers = algorithm.advantages(self.track())
        assert kept.sample_ids == ("p/1", "p/2") and numbers["samples_kept"] == 2
        assert kept.latent.advantages is not None and every.latent.advantages is not None
        assert torch.equal(kept.latent.advantages, every.latent.advantages[1:3])

    def test_clipping_is_of_the_advantages_of_steps_too(self) -> None:
        algorithm = FlowGrpo(
            FlowGrpoConfig(step_rewards=True),
            advantage=AdvantageConfig(clip=0.5),
            reward_weights={"one": 0.5, "two": 0.5},
            train=TrainConfig(),
        )
        track, _ = algorithm.advantages(self.track())
        assert track.latent.advantages is not None
        assert float(track.latent.advantages.abs().max()) == 0.5
