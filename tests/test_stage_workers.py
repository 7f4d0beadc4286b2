"""Stages with dedicated rollout workers, which hold only the models of their stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_clusters
from fault_runs import strike
from unirl.core.errors import RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.launchers.ray.actors import Actor
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.launcher import RayLauncher
from unirl.launchers.ray.placement import places
from writer_and_painter import JOINT, RECIPE, composed, numbers

STEPS = ("run.max_steps=2", "run.save_every=1", "+reward@reward.light=brightness", "reward.light.weight=0.1")
RAY = ("launcher=ray", "launcher.placement=separate", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")
OWN = "+launcher.stage_workers.image=2"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_clusters.joined():
        yield


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ({}, [(), ()]),
        ({"image": 1}, [("rewrite",), ("rewrite",), ("image",)]),
        ({"image": 1, "rewrite": 2}, [("image",), ("rewrite",), ("rewrite",)]),
    ],
)
def test_stages_without_workers_of_their_own_share_the_others(
    workers: dict[str, int], expected: list[tuple[str, ...]]
) -> None:
    config = RayConfig(placement="separate", rollout_workers=2, stage_workers=workers)
    stages = {"rewrite": 1, "image": 1}
    result = [place for place in places(config, on_cuda=False, stages=stages) if place.role == "rollout"]
    assert [place.serves for place in result] == expected
    assert [place.name for place in result] == [f"rollout-{number}" for number in range(len(expected))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["+launcher.stage_workers.sketch=1"],
            "launcher.stage_workers.sketch: no such stage; the stages are 'rewrite'",
        ),
        (["+launcher.stage_workers.image=0"], "launcher.stage_workers.image: got 0, expected 1 or more"),
        ([OWN, "launcher.placement=trainside"], "launcher.placement=trainside has no rollout workers to divide"),
    ],
)
def test_workers_that_cannot_be_are_refused(recipe: Path, words: list[str], says: str) -> None:
    reasons = [str(reason) for reason in match(composed(recipe, *RAY, *words)).reasons]
    assert [reason for reason in reasons if says in reason] and len(reasons) == len(set(reasons)), reasons


@pytest.mark.slow
@pytest.mark.nightly
def test_a_worker_holds_the_model_of_its_stage_alone(recipe: Path, ray_here: None) -> None:
    plan = composed(recipe, *RAY, OWN)
    launcher = RayLauncher(plan.launcher.config)  # type: ignore[arg-type,union-attr]
    try:
        launcher.launch(plan, catalog=Catalog.discover())
        cluster = launcher._cluster
        assert cluster is not None
        pools: dict[tuple[str, ...], list[Actor]] = {}
        for actor in cluster._actors:
            if actor.place.role == "rollout":
                pools.setdefault(actor.place.serves, []).append(actor)
        writer, (first, second) = pools["rewrite",], pools["image",]
        assert len({actor.facts.pid for actor in (*writer, first, second)}) == 3
        # The frozen painter is on the workers of its stage, and the writer on the other one.
        cluster.call(writer, "ask_model", "writer", "stop_tokens", phase="test")
        cluster.call(
            [first, second], "ask_model", "painter", "latent_shape", plan.stage("image").sampling, phase="test"
        )
        assert cluster.call([*writer, first, second], "versions", phase="test") == [{"writer": 0}, {}, {}]
        with pytest.raises(RunFailed, match="KeyError: 'painter'"):
            cluster.call(writer, "ask_model", "painter", "latent_shape", plan.stage("image").sampling, phase="test")
        with pytest.raises(RunFailed, match="KeyError: 'writer'"):
            cluster.call([first], "ask_model", "writer", "stop_tokens", phase="test")
    finally:
        launcher.close()


@pytest.mark.slow
@pytest.mark.nightly
def test_workers_of_a_stage_give_the_numbers_of_one_process_and_are_replaced(
    recipe: Path, tmp_path: Path, ray_here: None
) -> None:
    expected = numbers(composed(recipe, *JOINT, *STEPS, f"run.dir={tmp_path / 'here'}"))
    plan = composed(recipe, *JOINT, *STEPS, *RAY, OWN, f"run.dir={tmp_path / 'there'}")
    with strike("rollout", "generate", index=2, stage="image") as struck:
        steps = numbers(plan)
    assert struck.worker == "rollout-2"
    for step, one in expected.items():
        for key in ("rewrite/reward_mean", "image/reward_mean", "rewrite/grad_norm", "image/grad_norm"):
            # Forwards of other batches: fp32 sums in another order, relative to the size of the number.
            assert steps[step].get(key) == pytest.approx(one.get(key), rel=1e-4, abs=1e-6), key
