"""How far an engine's log-probs may be off: what fits the tracks and the precision, unless a recipe says otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from loop_toy import ToyBackend, parts, plan, run
from plans import changed
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.roles import Job, TrainReport
from unirl.core.specs.capability import Needs
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Plan, Stage
from unirl.core.specs.spec import AlgorithmSpec
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

PARTS = {"summary": "toy", "build": "toy:build", "config": "toy:Config"}


@dataclass
class Precise(PartConfig):
    dtype: str = "float32"
    other: int = 16


@dataclass
class Clipped(PartConfig):
    clip: float = 3e-4


def a_plan(sampling: Any, *, dtypes: tuple[str, str] = ("float32", "auto"), clip: bool = True, **train: Any) -> Plan:
    """With these dtypes of the model and the engine."""
    toy = plan()
    spec = AlgorithmSpec(name="toy", needs=Needs(), clip_key="clip" if clip else "", **PARTS)
    stage = toy.only
    return changed(
        toy,
        sampling=sampling,
        model=dataclasses.replace(stage.model, config=Precise(dtype=dtypes[0])),
        engine=dataclasses.replace(stage.engine, config=Precise(dtype=dtypes[1])),
        algorithm=dataclasses.replace(stage.algorithm, spec=spec, config=Clipped()),
        train=TrainConfig(**train),
    )


def bounds_of(stage: Stage) -> tuple[float | None, float | None]:
    train = train_settings(stage)
    return train.logp_mismatch_max, train.logp_mismatch_mean


def bounds(largest: float | None = None, mean: float | None = None) -> tuple[float | None, float | None]:
    return largest, mean


def test_latents_may_be_off_by_the_clip_range() -> None:
    assert bounds_of(a_plan(LatentSamplingConfig()).only) == bounds(largest=3e-4)
    assert bounds_of(a_plan(LatentSamplingConfig(), dtypes=("float16", "auto")).only) == bounds(largest=3e-4)
    assert bounds_of(a_plan(LatentSamplingConfig(), clip=False).only) == bounds()


@pytest.mark.parametrize("clip", [True, False], ids=["with a clip range", "without one"])
def test_texts_may_be_off_by_what_their_precision_makes(clip: bool) -> None:
    for dtypes in (("float32", "auto"), ("float32", "float32")):
        assert bounds_of(a_plan(TextSamplingConfig(), dtypes=dtypes, clip=clip).only) == bounds(
            largest=0.01, mean=0.001
        )
    for dtypes in (("bfloat16", "auto"), ("float32", "bfloat16"), ("float32", "half")):
        assert bounds_of(a_plan(TextSamplingConfig(), dtypes=dtypes, clip=clip).only) == bounds(largest=1.0, mean=0.05)


def test_a_recipe_may_say_otherwise_of_each() -> None:
    assert bounds_of(a_plan(TextSamplingConfig(), logp_mismatch_max=0.3).only) == bounds(largest=0.3, mean=0.001)
    assert bounds_of(a_plan(TextSamplingConfig(), logp_mismatch_mean=0.3).only) == bounds(largest=0.01, mean=0.3)
    assert bounds_of(a_plan(LatentSamplingConfig(), logp_mismatch_mean=1e-5).only) == bounds(largest=3e-4, mean=1e-5)


def test_half_of_a_bound_is_said_once() -> None:
    class Off(ToyBackend):
        def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
            report = super().train(jobs, progress=progress)
            return dataclasses.replace(
                report, metrics={job.name: {"logp_mismatch_max": 0.4, "logp_mismatch_mean": 0.06} for job in jobs}
            )

    toy = changed(plan(), train=TrainConfig(logp_mismatch_max=1.0, logp_mismatch_mean=0.1))
    result = [event.data["text"] for event in run(parts(backend=Off()), toy).events if event.kind == "finding"]
    assert result == [
        "logp_mismatch_mean: log-probs of engine 'own' differ by 6.00e-02; the run stops at 1.00e-01 (train.logp_mismatch_mean)."
    ]
