"""Toy parts that go together, and what `match` says of a plan of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from plans import changed, one_stage
from unirl.core.match.match import match
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import DataConfig
from unirl.core.specs.part_config import BackendConfig, PartConfig, RewardConfig
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec
from unirl.core.types.sampling import LatentSamplingConfig

PARTS = {"summary": "toy", "build": "toy:build", "config": "toy:Config"}

MODEL = ModelSpec(
    name="toy",
    tracks={"image": "latent"},
    trainable="net",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE},
    **PARTS,
)
ENGINE = EngineSpec(
    name="inside",
    kernels=("flow-sde", "cps", "euler"),
    capabilities={
        Cap.LATENT_ROLLOUT,
        Cap.SIGMAS,
        Cap.INITIAL_NOISE,
        Cap.STEP_NOISE,
        Cap.SDE_STEPS,
        Cap.TRAJECTORY_WINDOW,
        Cap.GUIDANCE,
        Cap.WEIGHTS_SHARED,
    },
    **PARTS,
)
BACKEND = BackendSpec(
    name="plain",
    capabilities={Cap.TRAIN_LORA, Cap.TRAIN_FULL, Cap.REFERENCE_ADAPTER_OFF},
    **PARTS,
)
ALGORITHM = AlgorithmSpec(
    name="grpo-like",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True),
    when={"kl_coef": Needs(reference="policy")},
    **PARTS,
)
REWARD = RewardSpec(name="score", scale="0 to 1", media="image", capabilities={Cap.REWARD_SAMPLE}, **PARTS)


@dataclass
class Backend(BackendConfig):
    trains: str = "lora"


@dataclass
class Algorithm(PartConfig):
    kl_coef: float = 0.0


def make_plan(**changes: Any) -> Plan:
    def choice(key: str, spec: Any, config: PartConfig) -> Any:
        return Choice(
            key=key, spec=changes.pop(key, spec), config=changes.pop(f"{key}_config", config), dist="toy", version="1"
        )

    plan = one_stage(
        model=choice("model", MODEL, PartConfig()),
        engine=choice("engine", ENGINE, PartConfig()),
        backend=choice("backend", BACKEND, Backend()),
        algorithm=choice("algorithm", ALGORITHM, Algorithm()),
        rewards={"score": choice("reward.score", REWARD, RewardConfig())},
        track="image",
        sampling=changes.pop("sampling", LatentSamplingConfig()),
        data=DataConfig(train="prompts.txt"),
    )
    return changed(plan, **changes)


def refusals(plan: Plan) -> list[str]:
    return [str(reason) for reason in match(plan).reasons]


def without(spec: Any, *caps: Cap) -> Any:
    return dataclasses.replace(spec, capabilities=spec.capabilities - {*caps})


def having(spec: Any, *caps: Cap) -> Any:
    return dataclasses.replace(spec, capabilities=spec.capabilities | {*caps})
