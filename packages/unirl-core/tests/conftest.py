"""A toy plugin with one part of each kind, light enough to compose in milliseconds, and a folder of recipes for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.part_config import BackendConfig, PartConfig, RewardConfig
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec, TrackerSpec

# What the tests of this folder share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

CONFIGS = "toy_part_configs"


@dataclass
class ToyModelConfig(PartConfig):
    path: str = "???"
    dtype: str = "float32"


@dataclass
class NearEngineConfig(PartConfig):
    batch: int = 0
    rounding_only = ("batch",)


@dataclass
class FarEngineConfig(PartConfig):
    url: str = "http://localhost"


@dataclass
class OptimizerConfig:
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])


@dataclass
class ToyBackendConfig(BackendConfig):
    trains: str = "full"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ToyAlgorithmConfig(PartConfig):
    clip_range: float = 1e-3
    kl_coef: float = 0.0


@dataclass
class ToyRewardConfig(RewardConfig):
    quality: int = 95


@dataclass
class ToyTrackerConfig(PartConfig):
    folder: str = ""


CLASSES = (
    ToyModelConfig,
    NearEngineConfig,
    FarEngineConfig,
    ToyBackendConfig,
    ToyAlgorithmConfig,
    ToyRewardConfig,
    ToyTrackerConfig,
)


def _part(cls: type[Any]) -> dict[str, str]:
    return {"summary": "A toy.", "build": f"{CONFIGS}:build", "config": f"{CONFIGS}:{cls.__name__}"}


ENGINE_CAPS = {
    Cap.LATENT_ROLLOUT,
    Cap.SIGMAS,
    Cap.INITIAL_NOISE,
    Cap.STEP_NOISE,
    Cap.SDE_STEPS,
    Cap.TRAJECTORY_WINDOW,
    Cap.WEIGHTS_SHARED,
}
MODEL = ModelSpec(
    name="toy",
    tracks={"image": "latent"},
    trainable="net",
    capabilities={Cap.LATENT_STAGE},
    **_part(ToyModelConfig),
)
PAIR = ModelSpec(name="pair", tracks={"draft": "latent", "final": "latent"}, trainable="net", **_part(ToyModelConfig))
NEAR = EngineSpec(name="near", kernels=("flow-sde", "euler"), capabilities=ENGINE_CAPS, **_part(NearEngineConfig))
FAR = EngineSpec(name="far", kernels=("flow-sde", "euler"), capabilities=ENGINE_CAPS, **_part(FarEngineConfig))
BACKEND = BackendSpec(name="plain", capabilities={Cap.TRAIN_FULL}, **_part(ToyBackendConfig))
ALGORITHM = AlgorithmSpec(
    name="grpo-like",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True),
    clip_key="clip_range",
    **_part(ToyAlgorithmConfig),
)
REWARDS = [RewardSpec(name=name, scale="0 to 1", media="image", **_part(ToyRewardConfig)) for name in ("size", "tone")]
TRACKER = TrackerSpec(name="notes", **_part(ToyTrackerConfig))

PLUGIN = SimpleNamespace(
    unirl_models=hookimpl(lambda: [MODEL, PAIR]),
    unirl_engines=hookimpl(lambda: [NEAR, FAR]),
    unirl_backends=hookimpl(lambda: [BACKEND]),
    unirl_algorithms=hookimpl(lambda: [ALGORITHM]),
    unirl_rewards=hookimpl(lambda: REWARDS),
    unirl_trackers=hookimpl(lambda: [TRACKER]),
)

BASE = """\
# unirl train toy/base data.train=prompts.txt
defaults:
  - /unirl
  - /model: toy
  - /engine: near
  - /backend: plain
  - /algorithm: grpo-like
  - /sampling: latent
  - /reward@reward.size: size
  - _self_

model: {path: some/folder}
backend: {optimizer: {lr: 5e-5}}
sampling: {num_inference_steps: 8, sde: {mode: fraction, last: 0.5}}
"""
CHILD = """\
# unirl train toy/child data.train=prompts.txt
defaults:
  - base
  - /reward@reward.second: tone
  - _self_
  - override /engine: far

sampling: {num_inference_steps: 6}
reward: {second: {weight: 0.5}}
run: {max_steps: "${data.samples_per_prompt}"}
"""


@pytest.fixture
def toy_catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog of the toy plugin alone."""
    module = ModuleType(CONFIGS)
    for cls in CLASSES:
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, CONFIGS, module)
    return Catalog.of({"unirl-toy": PLUGIN}, version="1.2")


@pytest.fixture
def toy_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with `recipes/toy/base.yaml` and `recipes/toy/child.yaml`, which builds on it."""
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "child.yaml").write_text(CHILD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
