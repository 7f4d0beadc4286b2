"""BranchGRPO against its formulas, the policy gradient in closed form, and Flow-GRPO."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from unirl.algorithms.branch_grpo.algorithm import BranchGrpo
from unirl.algorithms.branch_grpo.config import BranchGrpoConfig
from unirl.algorithms.branch_grpo.plugin import BRANCH_GRPO
from unirl.algorithms.branch_grpo.reference import advantages_of_depth, loss
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import FlowGrpoConfig
from unirl.conformance.reference import LossInputs
from unirl.core.errors import BatchError
from unirl.core.match.match import match
from unirl.core.match.parts import match_parts
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Replayed
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.models.sd3.plugin import SPEC as SD3
from unirl.numerics.diffusion.branching import branch_noise_ids
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

OLD = (-1.0, -1.0002, -0.9999, -1.00005)
NEW = (-0.99985, -1.00025, -1.0001, -1.00004)
ADVANTAGES = (1.5, -0.7, 5.0, -2.0)


def make(*, advantage: AdvantageConfig | None = None, **settings: object) -> BranchGrpo:
    return BranchGrpo(
        BranchGrpoConfig(**settings),  # type: ignore[arg-type]
        advantage=advantage or AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
    )


def a_track(
    rewards: Sequence[float],
    *,
    branch_steps: Sequence[int] | None = (0, 2),
    factor: int = 2,
    steps: int = 3,
    groups: int = 1,
    log_probs: Tensor | None = None,
) -> Track:
    """Groups of equal size with noise at every step. branch_steps: None is a rollout without a tree."""
    rows = len(rewards)
    group_ids = tuple(f"g{row * groups // rows}" for row in range(rows))
    sample_ids = tuple(f"{group}/{row}" for row, group in enumerate(group_ids))
    keys = None
    if branch_steps is not None:
        keys = branch_noise_ids(sample_ids, group_ids, branch_steps=branch_steps, factor=factor, num_steps=steps)
    segment = LatentSegment(
        latents=torch.zeros(rows, steps + 1, 2),
        positions=torch.arange(steps + 1).repeat(rows, 1),
        sde_steps=torch.arange(steps).repeat(rows, 1),
        log_probs=torch.zeros(rows, steps) if log_probs is None else log_probs,
        sigmas=torch.linspace(1, 0, steps + 1),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
        step_noise_ids=keys,
    )
    values = torch.tensor(rewards, dtype=torch.float32)
    return Track(
        name="image",
        sample_ids=sample_ids,
        group_ids=group_ids,
        inputs=Inputs.of_texts(group_ids),
        metadata=({},) * rows,
        segment=segment,
        rewards=values,
        reward_parts={"one": values},
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


class Given:
    """A replay with log-probs that are given."""

    def __init__(self, log_probs: Tensor) -> None:
        self._log_probs = log_probs

    def __call__(self, track: Track, *, policy: str = "live") -> Replayed:
        rows, steps = self._log_probs.shape
        nothing = torch.zeros(rows, steps, 1)
        return Replayed(
            log_probs=self._log_probs,
            means=nothing,
            std=nothing + 1,
            g=nothing + 1,
            next=nothing,
            valid=track.latent.scored_steps >= 0,
        )


def loss_of(algorithm: BranchGrpo | FlowGrpo, track: Track, log_probs: Tensor) -> Tensor:
    losses = algorithm.loss(track, Given(log_probs), progress=0.0)  # type: ignore[arg-type]
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


def by_step(track: Track) -> Tensor:
    assert track.latent.advantages is not None
    return track.latent.advantages


def test_each_depth_is_normalised_over_its_distinct_paths() -> None:
    rewards = (1.0, 3.0, 6.0, 10.0)
    result, _ = make(advantage=AdvantageConfig(eps=0.0, clip=None)).advantages(a_track(rewards))
    # By hand: paths of 2 and 8 at steps 0 and 1, so one std from their mean each; at step 2 the leaves, mean 5 and
    # variance (16 + 4 + 1 + 25) / 4.
    std = math.sqrt(46 / 4)
    leaves = [(reward - 5) / std for reward in rewards]
    expected = torch.tensor([[-1, -1, leaves[0]], [-1, -1, leaves[1]], [1, 1, leaves[2]], [1, 1, leaves[3]]])
    # fp32 numbers of order 1, computed in fp64.
    torch.testing.assert_close(by_step(result), expected, rtol=1e-6, atol=0)
    assert result.advantages is not None
    torch.testing.assert_close(result.advantages, expected[:, 2], rtol=1e-6, atol=0)


def test_advantages_agree_with_the_reference() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, log_probs = torch.rand(27, generator=generator), torch.randn(27, 4, generator=generator)
    track = a_track(rewards.tolist(), branch_steps=(0, 1, 3), factor=3, steps=4, log_probs=log_probs)
    keys = track.latent.step_noise_ids
    assert keys is not None
    for path_weight in (0.0, 0.5):
        result, _ = make(path_weight=path_weight).advantages(track)
        for step in range(4):
            expected = advantages_of_depth(
                rewards.double().tolist(),
                [own[step] for own in keys],
                log_probs_below=log_probs[:, step + 1 :].double().sum(dim=1).tolist(),
                path_weight=path_weight,
                eps=AdvantageConfig().eps,
            )
            # fp64 on both sides, stored as fp32 numbers of order 1.
            torch.testing.assert_close(by_step(result)[:, step], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scope", ["group", "global"])
def test_the_mean_over_the_paths_of_a_depth_is_zero(scope: str) -> None:
    rewards = torch.rand(32, generator=torch.Generator().manual_seed(1)).tolist()
    track = a_track(rewards, branch_steps=(0, 1, 2, 3), steps=4, groups=2)
    result, _ = make(advantage=AdvantageConfig(scope=scope)).advantages(track)
    keys = track.latent.step_noise_ids
    assert keys is not None
    for step, paths in enumerate((2, 4, 8, 16)):
        for rows in range(16), range(16, 32):
            distinct = {keys[row][step]: float(by_step(result)[row, step]) for row in rows}
            assert len(distinct) == paths
            # fp32 numbers of order 1.
            assert sum(distinct.values()) / paths == pytest.approx(0, abs=1e-6)
            assert max(map(abs, distinct.values())) > 0.1


def test_a_step_that_a_whole_group_shares_has_no_advantage() -> None:
    result, _ = make().advantages(a_track((1.0, 0.0, 3.0, 2.0), branch_steps=(1, 2)))
    assert not by_step(result)[:, 0].any() and by_step(result)[:, 1:].all()


def test_samples_without_weight_count_in_no_path() -> None:
    track = a_track((1.0, math.nan, 6.0, 10.0, math.nan, math.nan, 4.0, 4.0), branch_steps=(0, 1, 2))
    track = dataclasses.replace(track, sample_weights=torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1]))
    config = AdvantageConfig(normalize=False, clip=None)
    result, _ = make(advantage=config, path_weight=1.0).advantages(track)
    # Paths by hand. Step 0: the means of (1, 6, 10) and (4, 4), about their mean; step 1: 1, 8, none and 4.
    first, second = 17 / 3, 4.0
    middle = (first + second) / 2
    assert by_step(result)[:4, 0].tolist() == pytest.approx([first - middle, 0, first - middle, first - middle])
    assert by_step(result)[4:, 0].tolist() == pytest.approx([0, 0, second - middle, second - middle])
    mean = (1 + 8 + 4) / 3
    expected = [1 - mean, 0, 8 - mean, 8 - mean, 0, 0, 4 - mean, 4 - mean]
    # A fp32 sum of numbers of order 10.
    assert by_step(result)[:, 1].tolist() == pytest.approx(expected, rel=1e-6)


def test_paths_weigh_their_leaves_by_probability() -> None:
    below = math.log(3.0)
    log_probs = torch.tensor([[0.0, below], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    track = a_track((1.0, 5.0, 0.0, 0.0), branch_steps=(0, 1), steps=2, log_probs=log_probs)
    result, _ = make(advantage=AdvantageConfig(normalize=False), path_weight=1.0).advantages(track)
    # (3 x 1 + 1 x 5) / 4 = 2 against 0; log(3) is rounded to fp32.
    assert by_step(result)[:, 0].tolist() == pytest.approx([1, 1, -1, -1], rel=1e-6)
    bare = dataclasses.replace(track, segment=dataclasses.replace(track.latent, log_probs=None))
    with pytest.raises(BatchError, match="the engine gave no log-probs"):
        make(path_weight=1.0).advantages(bare)


def test_the_expected_gradient_is_the_policy_gradient() -> None:
    """A reward linear in the noise of the steps, R = sum c_k eps_k: with mean theta_k + eps_k its gradient in theta_k is
    c_k, and that of the log-prob of a step is its noise.

    The estimate is a sum of products of two noises, whose expectation over standard normals is the same as over signs.
    All of these are tried: 2 + 4 of them, so the expectation is exact.
    """
    slopes = (1.0, -0.5)
    # Without the own path in the baseline nothing is lost of the gradient; Flow-GRPO loses 1 / N with it.
    algorithm = make(advantage=AdvantageConfig(normalize=False, leave_one_out=True, clip=None), clip_range=0.5)
    total = torch.zeros(2, dtype=torch.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=6):
        noise = torch.tensor([[signs[row // 2], signs[2 + row]] for row in range(4)], dtype=torch.float64)
        rewards = (noise @ torch.tensor(slopes, dtype=torch.float64)).tolist()
        track, _ = algorithm.advantages(a_track(rewards, branch_steps=(0, 1), steps=2))
        theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        loss_of(algorithm, track, theta * noise).backward()
        assert theta.grad is not None
        total += theta.grad / 2**6
    # The mean over S = 2 steps of -grad. Each path counted once would give (-2/6, 4/6 x 0.5): late steps weigh double.
    torch.testing.assert_close(total, -torch.tensor(slopes, dtype=torch.float64) / 2, rtol=1e-6, atol=0)


def test_one_branch_at_the_first_step_is_flow_grpo() -> None:
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(5)).tolist()
    old = torch.randn(16, 3, generator=torch.Generator().manual_seed(6))
    moved = old + 0.1 * torch.randn(16, 3, generator=torch.Generator().manual_seed(7))
    config = AdvantageConfig(scope="global")
    flow = FlowGrpo(FlowGrpoConfig(clip_range=0.05), advantage=config, reward_weights={"one": 1.0}, train=TrainConfig())
    results: list[tuple[Tensor, Tensor | None]] = []
    for algorithm, branch_steps in (make(advantage=config, clip_range=0.05), (0,)), (flow, None):
        track = a_track(rewards, branch_steps=branch_steps, factor=8, groups=2, log_probs=old)
        new = moved.clone().requires_grad_()
        value = loss_of(algorithm, algorithm.advantages(track)[0], new)
        value.backward()
        results.append((value.detach(), new.grad))
    # The same numbers in the same order.
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] is not None and results[1][1] is not None
    assert torch.equal(results[0][1], results[1][1])


def test_depth_pruning_leaves_steps_out_of_the_update() -> None:
    old = torch.arange(12.0).reshape(4, 3)
    whole, _ = make().advantages(a_track((1.0, 3.0, 6.0, 10.0), log_probs=old))
    some, _ = make(skip_steps=[1]).advantages(a_track((1.0, 3.0, 6.0, 10.0), log_probs=old))
    segment = some.latent
    assert segment.train_steps is not None and segment.train_steps.tolist() == [[0, 2]] * 4
    assert segment.log_probs is not None and segment.log_probs.tolist() == old[:, [0, 2]].tolist()
    assert torch.equal(by_step(some), by_step(whole)[:, [0, 2]])


def test_depth_pruning_keeps_slots_at_the_front_where_groups_have_other_steps() -> None:
    track = a_track((1.0, 3.0, 6.0, 10.0), branch_steps=None, groups=2)
    segment = dataclasses.replace(track.latent, sde_steps=torch.tensor([[0, 1, 2]] * 2 + [[1, 2, -1]] * 2))
    result, _ = make(skip_steps=[1]).advantages(dataclasses.replace(track, segment=segment))
    assert result.latent.train_steps is not None
    assert result.latent.train_steps.tolist() == [[0, 2]] * 2 + [[2, -1]] * 2
    assert by_step(result)[2:, 1].tolist() == [0, 0]


def test_width_pruning_keeps_the_best_and_the_worst_with_the_advantages_of_all() -> None:
    rewards = (1.0, 3.0, 6.0, 10.0, 2.0, 4.0, 0.0, 9.0)
    whole, _ = make().advantages(a_track(rewards, groups=2))
    for count, kept in (2, [0, 3, 6, 7]), (3, [0, 2, 3, 5, 6, 7]):
        some, numbers = make(keep_leaves=count).advantages(a_track(rewards, groups=2))
        assert some.sample_ids == tuple(whole.sample_ids[row] for row in kept)
        assert torch.equal(by_step(some), by_step(whole)[kept])
        assert numbers["groups"] == 2
    lost = dataclasses.replace(a_track(rewards, groups=2), sample_weights=torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1]))
    some, _ = make(keep_leaves=2).advantages(lost)
    assert some.sample_ids == tuple(whole.sample_ids[row] for row in (0, 2, 6, 7))


def test_samples_are_dropped_after_paths_have_their_rewards() -> None:
    """Leaves 0 1 | 5 2: paths of the first depth have the rewards 0.5 and 3.5, and the best leaf the advantage
    (5 - 2) / std(0, 1, 5, 2) = 3 / sqrt(3.5) at its own step, however many samples are kept."""
    rewards = (0.0, 1.0, 5.0, 2.0)
    advantage = AdvantageConfig(eps=0.0, clip=None)
    whole, _ = make(advantage=advantage).advantages(a_track(rewards))
    for setting in ({"keep_best": 1}, {"keep_best": 1, "keep_worst": 1}):
        chosen = dataclasses.replace(advantage, **setting)
        some, numbers = make(advantage=chosen).advantages(a_track(rewards))
        rows = [whole.sample_ids.index(name) for name in some.sample_ids]
        assert rows == ([2] if len(setting) == 1 else [0, 2]) and numbers["samples_kept"] == len(rows)
        assert torch.equal(by_step(some), by_step(whole)[rows])
        # Three fp32 operations.
        assert float(by_step(some)[-1].max()) == pytest.approx(3 / math.sqrt(3.5), rel=1e-6)


def test_pruned_ties_are_broken_by_id() -> None:
    track = a_track((1.0, 1.0, 1.0, 1.0))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        some, _ = make(keep_leaves=2).advantages(track.select(order))
        assert sorted(some.sample_ids) == sorted((track.sample_ids[0], track.sample_ids[3]))


def golden(**changed: object) -> LossInputs:
    column = np.zeros((4, 1))
    given: dict[str, object] = {
        "log_probs": np.array(NEW)[:, None],
        "old_log_probs": np.array(OLD)[:, None],
        "means": column,
        "old_means": column,
        "reference_means": column,
        "std": column + 1,
        "g": column + 1,
        "sigmas": np.array([1.0, 0.5, 0.0]),
        "sde_steps": np.ones((4, 1), dtype=np.int64),
        "advantages": np.array(ADVANTAGES),
        "weights": np.ones(4),
        "progress": 0.0,
    }
    return LossInputs(**{**given, **changed})  # type: ignore[arg-type]


def test_loss_and_reference_meet_the_golden_vector_of_flow_grpo() -> None:
    expected = -0.9497912747545868
    config = BranchGrpoConfig(clip_range=1e-4)
    # All 16 digits of an fp64 mean of four terms, less one for the order of its sum.
    assert loss(config, golden()) == pytest.approx(expected, rel=1e-14)
    track = a_track((0.0,) * 4, branch_steps=None, steps=1, log_probs=torch.tensor(OLD, dtype=torch.float64)[:, None])
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None]
    track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, advantages=advantages))
    result = loss_of(make(clip_range=1e-4), track, torch.tensor(NEW, dtype=torch.float64)[:, None])
    assert float(result) == pytest.approx(expected, rel=1e-12)


def test_the_algorithm_agrees_with_its_reference_with_an_advantage_for_each_step() -> None:
    rng = np.random.default_rng(3)
    steps = np.array([[0, 1, 2], [0, 1, 2], [1, 2, -1], [0, 1, 2], [0, 1, 2]])
    old = rng.normal(-1, 0.5, (5, 3))
    inputs = golden(
        log_probs=old + rng.normal(0, 0.1, (5, 3)),
        old_log_probs=old,
        sde_steps=steps,
        advantages=rng.normal(0, 1, (5, 3)),
        weights=np.array([1.0, 1, 1, 1, 0]),
    )
    track = a_track((0.0,) * 5, branch_steps=None, log_probs=torch.tensor(old))
    segment = dataclasses.replace(
        track.latent, sde_steps=torch.tensor(steps), advantages=torch.tensor(inputs.advantages)
    )
    track = dataclasses.replace(track, segment=segment, sample_weights=torch.tensor(inputs.weights))
    for high in (None, 0.02):
        settings = {"clip_range": 0.05, "clip_range_high": high}
        result = loss_of(make(**settings), track, torch.tensor(inputs.log_probs))
        # fp64 on both sides: rounding of a sum of 11 terms of order 1.
        expected = loss(BranchGrpoConfig(**settings), inputs)  # type: ignore[arg-type]
        assert float(result) == pytest.approx(expected, rel=1e-12)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["data.samples_per_prompt=12"], "data.samples_per_prompt", "got groups of 12 samples, expected 16"),
        (["sampling.sde.branch_factor=3"], "data.samples_per_prompt", "got groups of 16 samples, expected 81"),
        (["sampling.sde.branch_steps=[0,2,3,7]"], "sampling.sde.branch_steps", "some of [0, 1, 2, 3, 4]"),
        (["sampling.num_inference_steps=3"], "sampling.sde.branch_steps", "some of [0]"),
        (["sampling.same_initial_noise=false"], "sampling.same_initial_noise", "start from one noise"),
        (["sampling.eta=0"], "sampling.eta", "use eta above 0"),
        (["sampling.sde.train_fraction=0.5"], "sampling.sde.train_fraction", "use algorithm.skip_steps"),
        (["algorithm.keep_leaves=1"], "algorithm.keep_leaves", "expected 2 or more"),
        (["algorithm.keep_leaves=16"], "algorithm.keep_leaves", "expected less than the 16 samples"),
        (["algorithm.skip_steps=[0,1,2,3,4]"], "algorithm.skip_steps", "some but not all"),
        (["algorithm.skip_steps=[9]"], "algorithm.skip_steps", "some but not all of the stochastic steps [0, 1, 2"),
    ],
)
def test_bad_settings_are_refused_at_compose(overrides: list[str], key: str, text: str, catalog: Catalog) -> None:
    verdict = match(compose("quickstart-branch-grpo", overrides, catalog=catalog), catalog=catalog)
    (reason,) = verdict.reasons
    assert reason.key == key
    assert text in reason.text


def test_an_engine_without_step_noise_is_refused() -> None:
    engine = dataclasses.replace(TRAINSIDE, capabilities=TRAINSIDE.capabilities - {Cap.STEP_NOISE})
    (reason,) = match_parts(model=SD3, engine=engine, algorithm=BRANCH_GRPO).reasons
    assert "algorithm 'branch-grpo', which trains on trajectories" in reason.text and "step-noise" in reason.text
    assert match_parts(model=SD3, engine=TRAINSIDE, algorithm=BRANCH_GRPO).accepted


def test_pruning_is_accepted(catalog: Catalog) -> None:
    overrides = ["algorithm.keep_leaves=8", "algorithm.skip_steps=[0]", "algorithm.path_weight=1"]
    assert match(compose("quickstart-branch-grpo", overrides, catalog=catalog), catalog=catalog).accepted
