"""Streaming and rollouts ahead, with the real parts on the quickstart's checkpoint: the numbers that they must not change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import ray_clusters
import torch
from own_weights import with_own_weights
from plans import changed
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.core.specs.plan import Plan
from unirl.loop.build import build_parts
from unirl.loop.parts import Parts, sync_weights
from unirl.loop.requests import step_requests
from unirl.loop.run import train
from unirl.loop.scoring import score

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SMALL = [
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "sampling.num_inference_steps=4",
    "data.eval=''",
    "run.media_every=0",
    "run.threads=1",
    "run.max_steps=3",
    "~tracker.report",
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
]
AHEAD = ["run.max_staleness=1", "train.old_log_probs=engine"]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


def planned(catalog: Catalog, *overrides: str, own: bool = False) -> Plan:
    plan = compose("quickstart", [*SMALL, *overrides], catalog=catalog)
    if not own:
        return plan
    return changed(plan, engine=with_own_weights(plan.only.engine))


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["metrics"] for event in lines if event["kind"] == "step"]


def trained(catalog: Catalog, plan: Plan, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The numbers of each step of a run, and the weights at its end."""
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, dir=str(folder)))
    train(plan, catalog=catalog)
    backend = build_parts(plan, catalog=catalog).only.backend
    backend.load(next((folder / "checkpoints").glob("step-*")) / "backend")
    return numbers(folder), dict(backend.export_weights(kind="full").tensors)


def assert_equal_bit_for_bit(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), f"{name} differs"


@pytest.mark.parametrize("groups", [1, 3])
def test_streaming_gives_the_rewards_and_weights_of_the_plain_loop(
    catalog: Catalog, tmp_path: Path, groups: int
) -> None:
    # Forwards of equal rows on both sides: the last bits of a matrix product may depend on them.
    plain = trained(catalog, planned(catalog, f"engine.forward_batch={4 * groups}"), tmp_path / "plain")
    streamed = trained(catalog, planned(catalog, f"run.reward_overlap_groups={groups}"), tmp_path / "streamed")
    assert_equal_bit_for_bit(plain[1], streamed[1])
    for before, now in zip(plain[0], streamed[0], strict=True):
        assert {key: now[key] for key in before} == before
        # What is more are the numbers that tell what was done at once.
        assert {"overlap", "reward_queue_max"} <= now.keys() - before.keys()


def test_pieces_that_store_unequal_numbers_of_latents_are_joined(catalog: Catalog, tmp_path: Path) -> None:
    words = [
        "sampling.num_inference_steps=6",
        "sampling.sde={mode: random, count: 2, first: 0.0, last: 1.0, per_group: true}",
    ]
    plain = trained(catalog, planned(catalog, "engine.forward_batch=4", *words), tmp_path / "plain")
    streamed = trained(catalog, planned(catalog, "run.reward_overlap_groups=1", *words), tmp_path / "streamed")
    assert_equal_bit_for_bit(plain[1], streamed[1])


def test_an_engine_with_weights_of_its_own_gives_the_numbers_of_the_shared_ones(
    catalog: Catalog, tmp_path: Path
) -> None:
    shared = trained(catalog, planned(catalog), tmp_path / "shared")
    own = trained(catalog, planned(catalog, "run.max_staleness=0", own=True), tmp_path / "own")
    assert shared[0] == own[0]
    assert_equal_bit_for_bit(shared[1], own[1])


def one_after_the_other(plan: Plan, parts: Parts) -> list[float]:
    """The schedule of a run ahead, on one thread; returns the mean reward of each step."""
    prompts = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)

    def generated(step: int) -> Any:
        sync_weights(parts, plan)
        chosen = [prompts[row] for row in order.step(step)]
        (request,) = step_requests(parts, plan, chosen, step=step).values()
        return parts.only.engine.generate(request)

    result: list[float] = []
    rollouts: list[Any] = []
    for step in range(plan.run.max_steps):
        while len(rollouts) < min(step + 1 + plan.run.max_staleness, plan.run.max_steps):
            rollouts.append(generated(len(rollouts)))
        track = score(rollouts[step], parts.rewards, parts.reward_weights)
        assert track.rewards is not None
        result.append(float(track.rewards.mean()))
        track, _ = parts.only.algorithm.advantages(track)
        parts.only.backend.train(
            [Job(track=track, algorithm=parts.only.algorithm)], progress=step / (plan.run.max_steps - 1)
        )
        parts.only.backend.end_rollout()
    return result


@pytest.mark.parametrize(("ahead", "staleness"), [(1, [0, 2, 2, 2]), (2, [0, 2, 4, 4])])
def test_a_run_ahead_gives_the_numbers_of_its_schedule_on_one_thread(
    catalog: Catalog, tmp_path: Path, ahead: int, staleness: list[int]
) -> None:
    plan = planned(catalog, *AHEAD, f"run.max_staleness={ahead}", "run.max_steps=4", own=True)
    steps, weights = trained(catalog, plan, tmp_path / "ahead")
    parts = build_parts(plan, catalog=catalog)
    assert [step["reward_mean"] for step in steps] == one_after_the_other(plan, parts)
    assert_equal_bit_for_bit(weights, dict(parts.only.backend.export_weights(kind="full").tensors))
    # Two updates a step; step s has samples of the weights after s - ahead steps, and the first ones those of the start.
    assert [step["staleness_max"] for step in steps] == staleness
    # Of stale samples the gap would be that of training, so it is measured on the others alone.
    assert [key in step for step in steps for key in ("logp_mismatch_max",)] == [True, False, False, False]


def test_the_ratio_corrects_for_the_age_of_samples(catalog: Catalog, tmp_path: Path) -> None:
    fresh, *stale = trained(catalog, planned(catalog, *AHEAD, own=True), tmp_path / "ahead")[0]
    # Against the policy that sampled, not against the one that trains: 1 while both are the same, to the rounding of
    # forwards at another batch size (log-probs of order 1 in fp32), and not 1 later. A step of training moves it by more.
    assert fresh["ratio_max_dev_first"] < 5e-6
    assert all(step["ratio_max_dev_first"] > 1e-4 for step in stale)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run.max_staleness=1"], "train.old_log_probs: .* Set train.old_log_probs=engine"),
        (AHEAD, "engine 'trainside' shares its weights with training"),
        ([*AHEAD, "launcher=ray"], "launcher.placement: .* Set launcher.placement=separate"),
        ([*AHEAD, "algorithm.ratio_norm=true"], "algorithm 'flow-grpo' cannot with these settings"),
        (["run.max_staleness=-1"], "run.max_staleness: got -1, expected 0 or more"),
        (
            ["run.reward_overlap_groups=4"],
            "run.reward_overlap_groups: got chunks of 4 groups; a rollout has 4",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_anything_starts(
    catalog: Catalog, tmp_path: Path, words: list[str], says: str
) -> None:
    with pytest.raises(PlanRejected, match=says):
        train(planned(catalog, *words, f"run.dir={tmp_path / 'run'}"), catalog=catalog)
    assert not (tmp_path / "run").exists()


def test_workers_of_their_own_give_the_numbers_of_one_process(catalog: Catalog, tmp_path: Path) -> None:
    words = [*AHEAD, "run.reward_overlap_groups=2"]
    here = trained(catalog, planned(catalog, *words, own=True), tmp_path / "here")
    plan = planned(catalog, *words, "launcher=ray", "launcher.placement=separate", f"run.dir={tmp_path / 'there'}")
    with ray_clusters.joined():
        train(plan, catalog=catalog)
    backend = build_parts(plan, catalog=catalog).only.backend
    backend.load(next((tmp_path / "there" / "checkpoints").glob("step-*")) / "backend")
    weights = backend.export_weights(kind="full").tensors
    for name, tensor in here[1].items():
        # The same arithmetic in fp32, in processes whose libraries may choose other kernels.
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    for one, other in zip(here[0], numbers(tmp_path / "there"), strict=True):
        assert other["reward_mean"] == pytest.approx(one["reward_mean"], abs=1e-6)
        assert other["staleness_max"] == one["staleness_max"]
