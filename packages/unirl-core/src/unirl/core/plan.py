"""Plans: a recipe with every part chosen, every value set, and where each came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from .config import (
    AdvantageConfig,
    DataConfig,
    EvalConfig,
    PartConfig,
    RunConfig,
    SamplingConfig,
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
    from .exchanged import LeftOut

__all__ = ["Choice", "Origin", "Plan", "leaves", "numeric_leaves", "plan_hash"]

S = TypeVar("S", bound=Spec, covariant=True)

NOT_HASHED = (
    "run.name",
    "run.dir",
    "run.steps",
    "run.stop_at",
    "run.save_every",
    "run.keep",
    "run.media_every",
    "run.threads",
    "tracker",
    "launcher",
    "transport",
)
"""Keys that do not change the numbers of a step; a resumed run may differ in them."""


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[S]):
    """One part of a plan."""

    key: str
    """Where it stands in the recipe: `model`, `reward.shapes`."""
    spec: S
    config: PartConfig
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
class Plan:
    recipe: str
    """Name of the recipe."""
    model: Choice[ModelSpec]
    engine: Choice[EngineSpec]
    backend: Choice[BackendSpec]
    algorithm: Choice[AlgorithmSpec]
    rewards: Mapping[str, Choice[RewardSpec]]
    trackers: Mapping[str, Choice[TrackerSpec]]
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
    launcher: Choice[LauncherSpec] | None = None
    """Where the parts run; None is this process."""
    transport: Choice[TransportSpec] | None = None
    """How tensors go from worker to worker; None is the launcher's own way."""
    left_out: tuple[LeftOut, ...] = ()
    """Values of the recipe for a part that another one took the place of."""

    @property
    def has_reference_workers(self) -> bool:
        """Workers of their own answer for the reference policy; the backend keeps none."""
        launcher = self.launcher
        if launcher is None or launcher.spec.holds_reference is None:
            return False
        return all(getattr(launcher.config, key) == value for key, value in launcher.spec.holds_reference.items())

    @property
    def choices(self) -> list[Choice[Spec]]:
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
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{under}.{key}" if under else str(key)
        if isinstance(value, Mapping) and value:
            found |= leaves(cast(Mapping[str, Any], value), under=path)
        else:
            found[path] = value
    return found


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
