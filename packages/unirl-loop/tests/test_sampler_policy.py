"""Rollouts come from the policy whose samples the algorithm trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from loop_toy import ToyAlgorithm, ToyBackend, ToyEngine, parts, plan, prompts, run
from plans import changed
from unirl.core.roles import Job, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import EvalConfig
from unirl.core.specs.plan import Plan
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.core.types.weights import checksum
from unirl.loop.parts import sync_weights


class LaggingBackend(ToyBackend):
    """The lagged policy is the live one of a rollout before, and moves at the end of each."""

    lagged, live, moves = -1.0, 0.0, 0
    using = "live"

    def version_of(self, policy: str = "live") -> int:
        return self.moves if policy == "lagged" else self.version

    def export_weights(self, *, policy: str = "live", kind: str, dtypes: Any = None) -> WeightUpdate:
        tensors = {"weight": torch.tensor(self.lagged if policy == "lagged" else self.weight)}
        return WeightUpdate(version=self.version_of(policy), tensors=tensors, kind="full", checksum=checksum(tensors))

    @contextmanager
    def policy(self, which: str = "live") -> Iterator[None]:  # type: ignore[override]
        kept, self.using = self.using, which
        try:
            yield
        finally:
            self.using = kept

    def end_rollout(self) -> None:
        self.lagged, self.live = self.live, self.weight
        self.moves += 1


class SharingEngine(ToyEngine):
    """Notes the policy in use at each rollout, and the version that it has then."""

    backend: LaggingBackend
    noted: list[tuple[str, str, int]]

    def generate(self, request: Request) -> Track:
        kind = "evaluation" if request.latent.sampling.kernel == "euler" else "rollout"
        self.noted = [*getattr(self, "noted", []), (kind, self.backend.using, self.version)]
        return super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        raise AssertionError("it shares the weights")


class HoldingEngine(ToyEngine):
    """Notes the checksum of the weights that it samples with."""

    noted: list[tuple[str, str]]
    held = ""

    def generate(self, request: Request) -> Track:
        kind = "evaluation" if request.latent.sampling.kernel == "euler" else "rollout"
        self.noted = [*getattr(self, "noted", []), (kind, self.held)]
        return super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().load_weights(update)
        self.held = receipt.checksum
        return receipt


def lagged_plan(*, shares: bool = False) -> Plan:
    toy = plan()
    stage = toy.only
    algorithm = dataclasses.replace(stage.algorithm.spec, needs=Needs(sampler="lagged"))
    shared = {Cap.WEIGHTS_SHARED} if shares else set[Cap]()
    engine = dataclasses.replace(stage.engine.spec, capabilities=stage.engine.spec.capabilities | shared)
    return changed(
        toy,
        algorithm=dataclasses.replace(stage.algorithm, spec=algorithm),
        engine=dataclasses.replace(stage.engine, spec=engine),
        eval=EvalConfig(every=1),
    )


def checksum_of(weight: float) -> str:
    return checksum({"weight": torch.tensor(weight)})


def test_an_engine_that_shares_the_weights_samples_inside_the_policy() -> None:
    backend, engine = LaggingBackend(), SharingEngine(weight=0.0)
    engine.backend = backend
    run(parts(engine=engine, backend=backend), lagged_plan(shares=True), held_out=prompts(1))
    rollouts = [noted[1:] for noted in engine.noted if noted[0] == "rollout"]
    assert rollouts == [("lagged", 0), ("lagged", 1), ("lagged", 2)], "its version is that of the lagged policy"
    evaluations = [noted[1:] for noted in engine.noted if noted[0] == "evaluation"]
    assert evaluations == [("live", 0), ("live", 1), ("live", 2), ("live", 3)]
    assert backend.using == "live"


def test_an_engine_with_weights_of_its_own_is_sent_those_of_the_policy() -> None:
    backend, engine = LaggingBackend(), HoldingEngine()
    lagged: list[float] = []
    backend.during = lambda _: lagged.append(backend.lagged)
    run(parts(engine=engine, backend=backend), lagged_plan(), held_out=prompts(1))
    rollouts = [held for kind, held in engine.noted if kind == "rollout"]
    assert rollouts == [checksum_of(weight) for weight in lagged]
    assert len(set(lagged)) == 3, "the lagged policy moved between rollouts"
    # Evaluation samples with the live weights in between.
    live = [held for kind, held in engine.noted if kind == "evaluation"]
    assert live[-1] == checksum_of(backend.weight) != checksum_of(backend.lagged)


def test_samples_carry_the_version_of_the_policy_that_made_them() -> None:
    backend = LaggingBackend(jump=2)
    run(parts(engine=HoldingEngine(), backend=backend), lagged_plan())
    assert [track.policy_version[0] for track in backend.trained] == [0, 1, 2]


def test_a_policy_that_moves_without_an_optimizer_step_is_sent_again() -> None:
    backend, engine = LaggingBackend(), HoldingEngine()
    made_of: Any = parts(engine=engine, backend=backend)
    sync_weights(made_of, lagged_plan())
    backend.end_rollout()
    assert backend.version == 0
    sync_weights(made_of, lagged_plan())
    assert (engine.version, engine.held) == (1, checksum_of(backend.lagged))


@pytest.mark.parametrize("shares", [True, False])
def test_without_rewards_a_run_trains_on_what_was_made(shares: bool) -> None:
    toy = lagged_plan(shares=shares)
    needs = Needs(reward="none")
    chosen = toy.only.algorithm
    toy = changed(
        toy,
        algorithm=dataclasses.replace(chosen, spec=dataclasses.replace(chosen.spec, needs=needs)),
        rewards={},
    )
    trained: list[Track] = []

    class Backend(ToyBackend):
        def train(self, jobs: Sequence[Job], *, progress: float) -> Any:
            track = jobs[0].track
            trained.append(track)
            rewarded = dataclasses.replace(track, rewards=torch.ones(track.num_rows))
            return super().train([dataclasses.replace(jobs[0], track=rewarded)], progress=progress)

    algorithm: Any = ToyAlgorithm()
    algorithm.advantages = lambda track: (track, {})
    made_of = parts(engine=ToyEngine(), backend=Backend(), algorithm=algorithm, rewards={})
    run(made_of, toy, held_out=prompts(1))
    assert len(trained) == 3 and all(track.rewards is None for track in trained)
