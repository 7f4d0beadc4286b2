"""Evaluation with other weights than those that train, by an engine with its own weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loop_toy import ToyBackend, ToyEngine, parts, plan, prompts, run
from plans import changed
from unirl.core.roles import WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import EvalConfig
from unirl.core.specs.part_config import BackendConfig
from unirl.core.specs.plan import Plan
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.core.types.weights import checksum

AVERAGE = -100.0


class AveragingBackend(ToyBackend):
    asked: list[tuple[str, str]]

    def export_weights(self, *, policy: str = "live", kind: str, dtypes: Any = None) -> WeightUpdate:
        self.asked = [*getattr(self, "asked", []), (policy, kind)]
        tensors = {"weight": torch.tensor(self.weight if policy == "live" else AVERAGE)}
        return WeightUpdate(version=self.version, tensors=tensors, kind="full", checksum=checksum(tensors))


class NotingEngine(ToyEngine):
    """Notes of each rollout whether it is an evaluation, and the weight that it was made with."""

    noted: list[tuple[bool, float]]

    def generate(self, request: Request) -> Track:
        is_evaluation = request.latent.sampling.kernel == "euler"
        self.noted = [*getattr(self, "noted", []), (is_evaluation, self.weight)]
        return super().generate(request)


def wanted(**evaluation: Any) -> Plan:
    return changed(plan(), eval=EvalConfig(every=1, **evaluation))


@pytest.mark.parametrize("ahead", [0, 1])
def test_evaluation_samples_with_the_policy_that_is_asked_for_and_training_with_the_live_one(ahead: int) -> None:
    toy = dataclasses.replace(wanted(policy="ema"), run=plan(run={"max_staleness": ahead}).run)
    engine, backend = NotingEngine(), AveragingBackend()
    run(parts(engine=engine, backend=backend), toy, held_out=prompts(1))
    evaluated = [weight for is_evaluation, weight in engine.noted if is_evaluation]
    trained = [weight for is_evaluation, weight in engine.noted if not is_evaluation]
    assert evaluated == [AVERAGE] * 4, "before the first step and after each of three"
    assert len(trained) == 3 and AVERAGE not in trained
    assert engine.overlaps == 0
    # Sent in fp32.
    assert engine.weight == float(torch.tensor(backend.weight)), "behind an evaluation it has the live weights"


@pytest.mark.parametrize(
    ("trains", "takes_lora", "policy", "kind"),
    [
        ("full", True, "ema", "full"),
        ("lora", True, "ema", "lora"),
        ("lora", False, "ema", "merged"),
        # It is what adapters are added to: there is none to send.
        ("lora", True, "reference", "merged"),
    ],
)
def test_the_weights_go_in_the_form_that_the_engine_takes(
    trains: str, takes_lora: bool, policy: str, kind: str
) -> None:
    toy = wanted(policy=policy)
    lora = {Cap.WEIGHTS_LORA} if takes_lora else set[Cap]()
    stage = toy.only
    spec = dataclasses.replace(stage.engine.spec, capabilities=stage.engine.spec.capabilities | lora)
    toy = changed(
        toy,
        engine=dataclasses.replace(stage.engine, spec=spec),
        backend=dataclasses.replace(stage.backend, config=BackendConfig(trains=trains)),
    )
    backend = AveragingBackend()
    run(parts(engine=NotingEngine(), backend=backend), toy, held_out=prompts(1))
    assert {asked for asked in backend.asked if asked[0] != "live"} == {(policy, kind)}
