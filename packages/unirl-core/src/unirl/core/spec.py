"""Specs: what a plugin says of each part that it provides, before anything heavy is imported.

A spec names its implementation and its config by string (`"package.module:attribute"`), so that listing, matching and
composing import no torch. Specs are plain data; everything here can be printed, hashed and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .capability import Cap, Needs, Support

__all__ = [
    "KINDS",
    "AlgorithmSpec",
    "BackendSpec",
    "EngineSpec",
    "Gap",
    "Kind",
    "LauncherSpec",
    "ModelSpec",
    "RewardSpec",
    "Spec",
    "TrackerSpec",
    "TransportSpec",
]

Kind = Literal["model", "engine", "backend", "algorithm", "reward", "tracker", "launcher", "transport"]
KINDS: tuple[Kind, ...] = (
    "model",
    "engine",
    "backend",
    "algorithm",
    "reward",
    "tracker",
    "launcher",
    "transport",
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A claim that a part is known not to meet, with the reason and where it is followed up."""

    claim: str
    reason: str
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What every part says of itself."""

    kind: ClassVar[Kind]

    name: str
    """Short name in recipes, lower case with dashes."""
    summary: str
    """One sentence for lists and docs."""
    build: str
    """`"module:function"` that makes the part from its config. See `unirl.core.roles` for each kind's signature."""
    config: str
    """`"module:Class"` of its config dataclass, a subclass of `unirl.core.config.PartConfig`."""
    capabilities: Mapping[Cap, Support] = field(default_factory=lambda: dict[Cap, Support]())
    gaps: tuple[Gap, ...] = ()

    def support(self, cap: Cap) -> Support:
        """How this part provides `cap`; `UNKNOWN` when it does not say."""
        return self.capabilities.get(cap, Support.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    kind: ClassVar[Kind] = "model"

    tracks: Mapping[str, Literal["latent", "text"]]
    """Name of each track that the model generates, with its kind."""
    trainable: str
    """Attribute of the model that holds the trained module, such as `transformer`."""
    lora_targets: tuple[str, ...] = ()
    """Endings of the module names that LoRA adapts by default."""
    wrap_blocks: tuple[str, ...] = ()
    """Class names of the blocks that are sharded and checkpointed one by one."""
    latent_channels: int | None = None
    tiny: str | None = None
    """`"module:function"` that writes a miniature checkpoint: `tiny(folder, *, seed) -> None`."""
    reference: str = ""
    """The pipeline that this model is verified against."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    kind: ClassVar[Kind] = "engine"

    kernels: tuple[str, ...] = ()
    """SDE kernels that it runs, by their names in `unirl.numerics.kernels`."""
    environment: str = ""
    """Name of the Python environment that it runs in; empty is this one."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec(Spec):
    kind: ClassVar[Kind] = "backend"

    trains_key: str = "trains"
    """Config key that says what trains: `lora` or `full`."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(Spec):
    kind: ClassVar[Kind] = "algorithm"

    needs: Needs
    when: Mapping[str, Needs] = field(default_factory=lambda: dict[str, Needs]())
    """Further needs while a config key is set to something true, such as `{"kl_coef": Needs(reference="policy")}`."""
    clip_key: str = ""
    """Config key of the clip range, which bounds the log-prob gap that a run tolerates."""
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class RewardSpec(Spec):
    kind: ClassVar[Kind] = "reward"

    scale: str
    """What the number means and its range, the same wherever it is computed."""
    media: Literal["image", "video", "text", "audio"]
    metadata: tuple[str, ...] = ()
    """Metadata keys that every prompt must have."""
    parts: tuple[str, ...] = ()
    """Names of the components it reports besides the score."""


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(Spec):
    kind: ClassVar[Kind] = "tracker"


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Spec):
    kind: ClassVar[Kind] = "launcher"


@dataclass(frozen=True, kw_only=True)
class TransportSpec(Spec):
    kind: ClassVar[Kind] = "transport"
