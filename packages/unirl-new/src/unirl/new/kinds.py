"""The files and requirements of a new plugin of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "NewKind", "Shape"]

NewKind = Literal["model", "engine", "backend", "algorithm", "reward", "environment", "tracker"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The project of one kind of part."""

    prefix: str
    """Prefix of the dist's name, after `unirl-`."""
    description: str
    """One line for package indexes; `{name}` is the part's name."""
    modules: tuple[str, ...]
    """Modules of the package besides `plugin.py` and `config.py`; the one to change comes first."""
    requires: tuple[str, ...] = ("unirl-core", "unirl-numerics", "torch>=2.8,<3")
    """UniRL dists by name alone; rendering bounds them by the installed release."""
    proves_with: tuple[str, ...] = ()
    """Dists of the parts that it is tested with."""


_PARTS = ("unirl-model-sd3", "unirl-engine-trainside", "unirl-backend-fsdp2", "unirl-algo-flow-grpo")

KINDS: Mapping[NewKind, Shape] = {
    "model": Shape(
        prefix="model",
        description="The model {name} for UniRL: a small denoiser of images, from text",
        modules=("layers", "model", "tiny"),
        requires=("unirl-core", "unirl-numerics", "safetensors>=0.5", "torch>=2.8,<3"),
        proves_with=_PARTS[1:],
    ),
    "engine": Shape(
        prefix="engine",
        description="The rollout engine {name} for UniRL: samples in process, in pieces",
        modules=("engine",),
        proves_with=(_PARTS[0], *_PARTS[2:]),
    ),
    "backend": Shape(
        prefix="backend",
        description="The training backend {name} for UniRL: AdamW over all weights, on one device",
        modules=("backend",),
        proves_with=(*_PARTS[:2], _PARTS[3]),
    ),
    "algorithm": Shape(
        prefix="algo",
        description="The algorithm {name} for UniRL: REINFORCE over SDE steps, with group advantages",
        modules=("algorithm", "reference"),
        requires=("unirl-core", "unirl-numerics", "numpy>=1.26,<3", "torch>=2.8,<3"),
        proves_with=_PARTS[:3],
    ),
    "reward": Shape(
        prefix="reward",
        description="The reward {name} for UniRL: how much contrast an image has",
        modules=("reward",),
        requires=("unirl-core", "torch>=2.8,<3"),
    ),
    "environment": Shape(
        prefix="environment",
        description="The environment {name} for UniRL: a number to find in several turns",
        modules=("environment",),
        requires=("unirl-core",),
    ),
    "tracker": Shape(
        prefix="tracker",
        description="The tracker {name} for UniRL: a run as JSON lines and image files",
        modules=("tracker",),
        requires=("unirl-core", "pillow>=10"),
    ),
}

assert tuple(KINDS) == get_args(NewKind)
