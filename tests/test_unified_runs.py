"""One model's texts and images in one run: the joint step, a resume, and several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray_clusters
import torch
from small_runs import copy_up_to, run, steps, tensors

pytestmark = pytest.mark.slow

UNIFIED = (
    "data.prompts_per_step=2",
    "data.eval=''",
    "stages.plan.samples=2",
    "stages.image.samples=2",
    "sampling.image.num_inference_steps=4",
    "run.media_every=0",
    "run.keep=0",
    "~tracker.report",
    # A second reward that no two images share: the shapes of eight images may all score the same.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)

REVISED = (
    *(word.replace("stages.plan", "stages.critique") for word in UNIFIED if "stages.image" not in word),
    "stages.draft.samples=2",
    "sampling.draft.num_inference_steps=4",
)


def after_a_step(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """Weights after one gradient step of size 1: AdamW divides by `eps` alone where it is large."""
    plain = ("backend.lr=1e5", "backend.eps=1e5", "backend.weight_decay=0", "backend.max_grad_norm=null")
    once = ("run.max_steps=1", "train.updates_per_step=1", "run.save_every=1")
    run(folder, *plain, *once, *words, recipe="quickstart-unified", small=UNIFIED)
    return weights(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors(folder, 1).items() if name.startswith("/weights/")}


def numbers(folder: Path) -> dict[str, float]:
    """Metrics of a step that are not of its traffic."""
    apart = ("perf/", "driver/", "sync/")
    return {name: value for name, value in steps(folder)[1].items() if not name.startswith(apart)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return after_a_step(tmp_path_factory.mktemp("start") / "run", "backend.lr=1e-30")


@pytest.fixture(scope="module")
def both_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of plan and image on one rank, in this process."""
    folder = tmp_path_factory.mktemp("both") / "run"
    after_a_step(folder)
    return folder


@pytest.fixture(scope="module")
def both(both_run: Path) -> dict[str, torch.Tensor]:
    return weights(both_run)


def test_a_joint_step_moves_by_the_sum_of_the_gradients(
    both: dict[str, torch.Tensor], start: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    plan = after_a_step(tmp_path / "plan", "~algorithm.image")
    image = after_a_step(tmp_path / "image", "~algorithm.plan", "stages.image.credit=none")
    moved = {"plan": 0, "image": 0}
    for name, value in start.items():
        of_plan, of_image = plan[name].double() - value, image[name].double() - value
        # Weights of order 1 in fp32.
        torch.testing.assert_close(both[name].double() - value, of_plan + of_image, rtol=0, atol=1e-6)
        moved["plan"] += float(of_plan.abs().max()) > 1e-4
        moved["image"] += float(of_image.abs().max()) > 1e-4
    assert min(moved.values()) > 20, moved


def test_a_rank_whose_weights_are_sharded_moves_as_a_plain_one(
    both_run: Path, both: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """FSDP gathers the weights of the root in its forward alone; the operations and their order are the same."""
    sharded = after_a_step(tmp_path / "sharded", "backend.shard=always")
    assert all(torch.equal(value, sharded[name]) for name, value in both.items()) and sharded.keys() == both.keys()
    assert numbers(tmp_path / "sharded") == numbers(both_run)


@pytest.mark.nightly
def test_two_ranks_move_as_one(
    both_run: Path, both: dict[str, torch.Tensor], start: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Each rank generates and trains half of the samples. Forwards of other batches round differently, in the seventh
    digit; the brightness that rewards read is that of pixels of 8 bits, and advantages divide it by the standard
    deviation of a group, some thousandths of it: 1e-4 of the largest gradient.
    """
    with ray_clusters.joined():
        two = after_a_step(tmp_path / "two", "launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1")
    assert two.keys() == both.keys()
    moved = max(float((value - start[name]).abs().max()) for name, value in both.items())
    apart = max(float((value - two[name]).abs().max()) for name, value in both.items())
    assert moved > 1e-3 and apart < 1e-4 * moved
    one, other = numbers(both_run), numbers(tmp_path / "two")
    for name in ("plan/reward_mean", "image/reward_mean", "plan/grad_norm", "image/loss", "plan/loss"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_two_steps_and_two_after_a_resume_equal_four(tmp_path: Path) -> None:
    words = ("run.max_steps=4", "run.save_every=2")
    whole = run(tmp_path / "whole", *words, recipe="quickstart-unified", small=UNIFIED)
    resumed = run(
        tmp_path,
        "run.max_steps=4",
        resume=copy_up_to(whole.folder, 2, tmp_path / "parts"),
        recipe="quickstart-unified",
        small=(*UNIFIED, *words),
    )
    assert (resumed.status, resumed.step) == ("done", 4)
    assert steps(whole.folder) == steps(resumed.folder)
    expected, result = tensors(whole.folder, 4), tensors(resumed.folder, 4)
    assert expected.keys() == result.keys()
    assert all(
        torch.equal(value, result[name]) if isinstance(value, torch.Tensor) else value == result[name]
        for name, value in expected.items()
    )
    for metrics in steps(whole.folder).values():
        assert metrics["plan/ratio_max_dev_first"] == metrics["image/ratio_max_dev_first"] == 0


@pytest.mark.parametrize("trains_draft", [False, True])
def test_a_draft_is_scored_by_itself_and_a_critique_by_the_drawing_behind_it(
    tmp_path: Path, trains_draft: bool
) -> None:
    words = ["run.max_steps=1", "run.media_every=1"]
    if trains_draft:
        words += ["+algorithm@algorithm.draft=flow-grpo", "+stages.draft.advantage.scope=global"]
    run(tmp_path, *words, recipe="quickstart-revise", small=REVISED)
    (metrics,) = steps(tmp_path).values()
    trained = ("draft",) * trains_draft + ("critique", "image")
    groups = {"draft": 2, "critique": 4, "image": 2}
    assert {name: metrics[f"{name}/groups"] for name in trained} == {name: groups[name] for name in trained}
    assert {metrics[f"{stage}/ratio_max_dev_first"] for stage in trained} == {0}
    assert ("draft/loss" in metrics) == trains_draft and 0 <= metrics["draft/reward/shapes"] <= 1
    # One drawing behind each critique: the same mean, in another order of fp32.
    assert metrics["critique/reward/image"] == pytest.approx(metrics["image/reward_mean"], abs=1e-6)
    assert metrics["critique/reward_mean"] == metrics["critique/reward/image"]
    assert "draft/reward/critique" not in metrics
