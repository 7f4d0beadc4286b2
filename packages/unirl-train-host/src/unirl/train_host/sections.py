"""Sections of a training backend's settings: adapters, averages of the weights, and what trains beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.limits import limit, one_of

__all__ = ["AuxiliaryConfig", "AverageConfig", "CriticConfig", "FakeScoreConfig", "LoraSettings"]


@dataclass
class LoraSettings:
    rank: int = limit(16, least=1)
    """Rank of the update to each adapted layer: rows of A, columns of B."""
    alpha: float = limit(32.0, above=0)
    """The adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list[str]())
    """Linear layers to adapt, by the end of their names, such as `to_q`; empty takes the model's list."""
    init: str = one_of("gaussian", "kaiming", default="gaussian")
    """Initialisation of A: `gaussian` or `kaiming`. B starts at 0, so that training starts from the base model."""


@dataclass
class AverageConfig:
    """Moving average of the trainable weights: copy = d copy + (1 - d) live at each update. t counts past updates."""

    kind: str = one_of("none", "constant", "linear", "warmup", "adaptive", default="none")
    """`none`; `constant`: d = decay; `linear`: d = min(t rate, decay); `warmup`: d = 0 for `flat_moves` updates, then
    min((t - flat_moves) rate, decay); `adaptive`: d = min((1 + t) / (10 + t), decay). d = 0 copies the live weights.

    DiffusionNFT (arXiv 2509.16117) counts updates from 1 where t counts from 0: `linear` is one update behind its
    min(0.001 i, 0.5)."""
    decay: float = limit(0.999, least=0, most=1)
    """Decay d, in [0, 1]; its maximum where `kind` lets it rise."""
    rate: float = limit(0.001, least=0)
    """Increase of d per update, for `linear` and `warmup`."""
    flat_moves: int = limit(0, least=0)
    """Number of first updates that copy the live weights, for `warmup`."""
    every: str = one_of("step", "rollout", default="step")
    """Update it after every optimizer `step`, or once per `rollout`, after that rollout's optimizer steps."""
    period: int = limit(1, least=1)
    """Steps or rollouts from one of its updates to the next."""


@dataclass
class AuxiliaryConfig:
    """A critic or a fake score, trained by its own optimizer. `betas`, `eps`, `weight_decay` and `lr_schedule` are the
    policy's."""

    lr: float | None = limit(None, above=0)
    """Its learning rate, above 0; null means that there is none."""
    max_grad_norm: float | None = limit(1.0, above=0)
    """Gradient norm that its gradient is clipped to; null turns clipping off."""
    lr_warmup_steps: int = limit(0, least=0)
    """Its optimizer steps over which its learning rate rises linearly."""
    warmup_steps: int = limit(0, least=0)
    """Until it has taken this many optimizer steps, a training step trains it alone."""
    steps_per_update: int = limit(1, least=1)
    """Its optimizer steps for each update of the policy, all on that update's samples: of a critic after it, of a fake
    score before it."""


@dataclass
class CriticConfig(AuxiliaryConfig):
    """The critic, for algorithms that need one: a copy of the model with a scalar value head, in place of the output
    projection of a text model and after that of a diffusion model. All of it is trained, even where the policy uses
    LoRA."""


@dataclass
class FakeScoreConfig(AuxiliaryConfig):
    """The fake score, for algorithms that need one: a second copy of the weights that train, adapters with LoRA, which
    starts as they do."""
