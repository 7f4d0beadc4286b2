"""Plans: a recipe with every part chosen, every value set, and where each came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ..types.sampling import SamplingConfig
from .config import (
    AdvantageConfig,
    BackendConfig,
    DataConfig,
    EvalConfig,
    PartConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from .spec import (
    AlgorithmSpec,
    BackendSpec,
    EngineSpec,
    LauncherSpec,
    ModelSpec,
    RewardSpec,
    Spec,
    TrackerSpec,
    TransportSpec,
)

if TYPE_CHECKING:
    from .capability import Needs
    from .plan import LeftOut

__all__ = ["Choice", "LeftOut", "Origin", "Plan", "leaves", "numeric_leaves", "plan_hash"]

S = TypeVar("S", bound=Spec, covariant=True)
C = TypeVar("C", bound=PartConfig, covariant=True)

NOT_HASHED = (
    "run.name",
    "run.dir",
    "run.max_steps",
    "run.stop_at",
    "run.save_every",
    "run.keep",
    "run.media_every",
    "run.threads",
    "run.batch_invariant",
    "tracker",
    "launcher",
    "transport",
)
"""Keys that do not change the numbers of a step but for rounding; a resumed run may differ in them."""


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[S, C]):
    """One part of a plan."""

    key: str
    """Where it stands in the recipe: `model`, `reward.shapes`."""
    spec: S
    config: C
    """An instance of the spec's config dataclass, filled in."""
    dist: str
    version: str

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from."""

    source: str
    """`default`, `recipe` or `command line`."""
    detail: str
    """The dataclass, file or override it stands in."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A value of a recipe that its part has no key for."""

    path: str
    value: Any
    file: str
    """Config path of the recipe file that gives it."""
    part: str
    """`engine 'sglang'`."""

    def __str__(self) -> str:
        return f"{self.path}={self.value} of {self.file}.yaml is left out: {self.part} has no such key."


@dataclass(frozen=True, kw_only=True)
class Plan:
    recipe: str
    """Name of the recipe."""
    model: Choice[ModelSpec, PartConfig]
    engine: Choice[EngineSpec, PartConfig]
    backend: Choice[BackendSpec, BackendConfig]
    algorithm: Choice[AlgorithmSpec, PartConfig]
    rewards: Mapping[str, Choice[RewardSpec, RewardConfig]]
    trackers: Mapping[str, Choice[TrackerSpec, PartConfig]]
    sampling: Mapping[str, SamplingConfig]
    """Track name -> how it is sampled."""
    run: RunConfig
    data: DataConfig
    advantage: AdvantageConfig
    train: TrainConfig
    eval: EvalConfig
    resolved: Mapping[str, Any]
    """The whole recipe as plain data, every interpolation resolved."""
    origins: Mapping[str, Origin]
    """Key path of every leaf -> where it came from."""
    hash: str
    """Of everything in `resolved` that changes the numbers, see `plan_hash`."""
    launcher: Choice[LauncherSpec, PartConfig] | None = None
    """Where the parts run; None is this process."""
    transport: Choice[TransportSpec, PartConfig] | None = None
    """How tensors go from worker to worker; None is the launcher's own way."""
    left_out: tuple[LeftOut, ...] = ()
    """Values of the recipe for a part that another one took the place of."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs with its settings."""
        needs = self.algorithm.spec.needs
        for key, further in self.algorithm.spec.when.items():
            if getattr(self.algorithm.config, key):
                needs = needs.merged(further)
        return needs

    @property
    def has_reference_workers(self) -> bool:
        """Workers of their own answer for the reference policy; the backend keeps none."""
        launcher = self.launcher
        if launcher is None or launcher.spec.holds_reference is None:
            return False
        return all(getattr(launcher.config, key) == value for key, value in launcher.spec.holds_reference.items())

    @property
    def plugin_files(self) -> list[Path]:
        """Plugins of its parts that are single files, see `unirl.core.plugins.files`."""
        return sorted({Path(choice.dist) for choice in self.choices if choice.dist.endswith(".py")})

    @property
    def choices(self) -> list[Choice[Spec, PartConfig]]:
        """Every part, in the order in which it is built."""
        return [
            self.model,
            self.backend,
            self.engine,
            self.algorithm,
            *self.rewards.values(),
            *self.trackers.values(),
            *([self.launcher] if self.launcher else []),
            *([self.transport] if self.transport else []),
        ]


def leaves(values: Mapping[str, Any], *, under: str = "") -> dict[str, Any]:
    """Key path -> value of every leaf; an empty mapping or list is a leaf of its own."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{under}.{key}" if under else str(key)
        if isinstance(value, Mapping) and value:
            result |= leaves(cast(Mapping[str, Any], value), under=path)
        else:
            result[path] = value
    return result


def numeric_leaves(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that change the numbers of a run."""
    return {
        path: value
        for path, value in leaves(resolved).items()
        if not any(path == skipped or path.startswith(f"{skipped}.") for skipped in NOT_HASHED)
    }


def plan_hash(resolved: Mapping[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the values that change the numbers of a run."""
    text = json.dumps(numeric_leaves(resolved), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
