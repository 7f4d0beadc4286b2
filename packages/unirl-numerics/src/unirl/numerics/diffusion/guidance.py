"""Guidance: velocities under several conditions, combined to the one to step along.

A guidance names its branches, each with its own conditions, and combines their velocities. Plugins bring further
ones: frozen dataclasses that inherit `Guidance` or `Cfg`, named `module:Class` in recipes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from unirl.core.limits import limit, one_of
from unirl.core.types.array import Ragged
from unirl.core.types.batch import join
from unirl.core.types.inputs import Inputs

from .named import check_limits, class_of, made, name_of, options_of

__all__ = [
    "GUIDANCES",
    "NO_GUIDANCE",
    "BatchedCfg",
    "Branches",
    "Cfg",
    "Conditions",
    "Guidance",
    "IntervalCfg",
    "NormCorrectedCfg",
    "TextImageCfg",
    "TwoScaleCfg",
    "Velocity",
    "guided_velocity",
    "make_guidance",
]

Conditions = Mapping[str, Ragged]
"""One entry per row: tensors [B, ...], or B tensors of any shape."""
Branches = Mapping[str, Conditions]
"""Branch of a guidance -> its conditions."""
Velocity = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]
"""velocity(x [B, ...], sigma [B], conditions) -> [B, ...]."""


@dataclass(frozen=True, kw_only=True)
class Guidance(ABC):
    """Combines the velocities of several branches. Subclasses are frozen dataclasses; their fields besides `scale` are
    its options, with limits as configs have them. Two equal guidances combine equally.
    """

    is_batched: ClassVar[bool] = False
    """One forward for the rows of all branches, whose conditions then need equal names and shapes, instead of one
    forward for each branch."""

    scale: float = limit(1.0, least=0)
    """Strength, `sampling.guidance_scale`."""

    def __post_init__(self) -> None:
        check_limits(self, what=f"guidance '{self.name}'")

    @property
    def name(self) -> str:
        """Name in recipes: a short one, or `module:Class`."""
        return name_of(type(self), GUIDANCES)

    @property
    @abstractmethod
    def branches(self) -> tuple[str, ...]:
        """Names of the conditions that it needs with these settings, `positive` among them."""

    @property
    def computed_branches(self) -> tuple[str, ...]:
        """Branches whose velocities `combine` takes. The conditions of the others only come with the samples."""
        return self.branches

    @abstractmethod
    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        """The velocity to step along.  Returns [B, ...] fp32.

        velocities: branch -> [B, ...] fp32, of `computed_branches`.  sigma: [B] fp32.
        """

    def inputs(self, branch: str, inputs: Inputs, *, negative_prompt: str) -> Inputs:
        """Inputs that a branch's conditions are encoded from: those of the samples for `positive`, with
        `negative_prompt` in place of their texts for `negative`. A guidance with other branches overrides it.

        Raises ValueError for a branch that it does not know.
        """
        if branch == "positive":
            return inputs
        if branch == "negative":
            return inputs.negative(negative_prompt)
        raise ValueError(f"guidance '{self.name}': it does not say what branch '{branch}' is encoded from.")

    @property
    def num_forwards(self) -> int:
        """Calls of the velocity per evaluation."""
        return 1 if self.is_batched else len(self.computed_branches)


@dataclass(frozen=True, kw_only=True)
class Cfg(Guidance):
    """Classifier-free guidance, v_neg + scale (v_pos - v_neg); one forward for each branch.

    A scale of 1 turns it off: one forward, no negatives. Subclasses may make the scale depend on sigma.
    Source: arXiv 2207.12598.
    """

    @property
    def is_on(self) -> bool:
        """Whether it ever differs from the positive velocity."""
        return self.scale != 1.0

    @property
    def branches(self) -> tuple[str, ...]:
        return ("positive", "negative") if self.is_on else ("positive",)

    def scale_at(self, sigma: Tensor) -> Tensor:
        """The scale of each row.  sigma: [B].  Returns [B] fp32."""
        return torch.full_like(sigma, self.scale)

    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        positive = velocities["positive"]
        if not self.is_on:
            return positive
        negative = velocities["negative"]
        scale = self.scale_at(sigma).view(-1, *(1,) * (positive.ndim - 1))
        # A scale of 1 gives the positive velocity bit for bit.
        return torch.where(scale == 1.0, positive, negative + scale * (positive - negative))


@dataclass(frozen=True, kw_only=True)
class BatchedCfg(Cfg):
    """Classifier-free guidance in one forward of 2 B rows, which needs positive and negative conditions of equal
    shapes."""

    is_batched: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class NormCorrectedCfg(Cfg):
    """Classifier-free guidance with the norm of the positive velocity at each place of each row.

    The norm is taken over the channels: the last dim of packed latents [B, tokens, C], dim 1 of [B, C, ...].
    Source: the Qwen-Image pipeline of diffusers.
    """

    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        combined = super().combine(velocities, sigma)
        if not self.is_on:
            return combined
        dim = -1 if combined.ndim == 3 else 1
        return combined * _norm_ratio(velocities["positive"], combined, (dim,))


@dataclass(frozen=True, kw_only=True)
class IntervalCfg(Cfg):
    """Classifier-free guidance where low < sigma <= high; the positive velocity elsewhere.

    Both branches are computed at every step. Source: arXiv 2404.07724, equation 3.
    """

    low: float = limit(0.0, least=0, below=1)
    """Lower end of the interval of sigma, exclusive."""
    high: float = limit(1.0, above=0, most=1)
    """Upper end of the interval of sigma."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ValueError(f"guidance '{self.name}': got low {self.low} and high {self.high}, expected low < high.")

    def scale_at(self, sigma: Tensor) -> Tensor:
        return torch.where((sigma > self.low) & (sigma <= self.high), self.scale, torch.ones_like(sigma))


@dataclass(frozen=True, kw_only=True)
class TwoScaleCfg(Cfg):
    """Classifier-free guidance with another scale below a boundary of sigma: that of Wan 2.2, whose experts for high
    and for low noise each have a scale.

    Source: diffusers' `WanPipeline`, `guidance_scale_2` and `boundary_ratio`.
    """

    scale_low: float = limit(3.0, least=0)
    """Scale where sigma < boundary."""
    boundary: float = limit(0.875, least=0, most=1)
    """Sigma from which on `scale` applies."""

    @property
    def is_on(self) -> bool:
        return self.scale != 1.0 or self.scale_low != 1.0

    def scale_at(self, sigma: Tensor) -> Tensor:
        return torch.where(sigma >= self.boundary, torch.full_like(sigma, self.scale), self.scale_low)


@dataclass(frozen=True, kw_only=True)
class TextImageCfg(IntervalCfg):
    """Classifier-free guidance by the text and then by the source images, each with a scale, where low < sigma <= high;
    the positive velocity elsewhere: w = v_neg + scale (v - v_neg), then w = v_img + image_scale (w - v_img).

    The branch `negative` has `negative_prompt` in place of all texts and keeps the images; `no-image` keeps the text
    and an instruction, see `Inputs`. Neither has the model's own texts. A scale of 1 leaves its branch out. Source:
    inference code of BAGEL, arXiv 2505.14683.
    """

    image_scale: float = limit(1.0, least=0)
    """Strength of the source images."""
    renorm: str = one_of("none", "global", "channel", "text-channel", default="global")
    """Norm of the positive velocity that the result is scaled down to: over a whole row, over the channels at each
    place, or over these before the images are guided by."""
    renorm_least: float = limit(0.0, least=0, most=1)
    """Smallest factor of that scaling."""

    @property
    def is_on(self) -> bool:
        return self.scale != 1.0 or self.image_scale != 1.0

    @property
    def branches(self) -> tuple[str, ...]:
        scales = {"negative": self.scale, "no-image": self.image_scale}
        return ("positive", *(branch for branch, scale in scales.items() if scale != 1.0))

    def inputs(self, branch: str, inputs: Inputs, *, negative_prompt: str) -> Inputs:
        if branch == "no-image":
            return inputs.without_media()
        return super().inputs(branch, inputs, negative_prompt=negative_prompt)

    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        positive = guided = velocities["positive"]
        channels = (-1 if positive.ndim == 3 else 1,)
        if "negative" in velocities:
            guided = velocities["negative"] + self.scale * (guided - velocities["negative"])
        if self.renorm == "text-channel":
            guided = guided * self._factor(positive, guided, channels)
        if "no-image" in velocities:
            guided = velocities["no-image"] + self.image_scale * (guided - velocities["no-image"])
        if self.renorm in ("global", "channel"):
            dims = channels if self.renorm == "channel" else tuple(range(1, positive.ndim))
            guided = guided * self._factor(positive, guided, dims)
        is_inside = ((sigma > self.low) & (sigma <= self.high)).view(-1, *(1,) * (positive.ndim - 1))
        return torch.where(is_inside, guided, positive)

    def _factor(self, positive: Tensor, guided: Tensor, dims: tuple[int, ...]) -> Tensor:
        return _norm_ratio(positive, guided, dims).clamp(self.renorm_least, 1.0)


GUIDANCES: Mapping[str, type[Guidance]] = {
    "batched": BatchedCfg,
    "two-pass": Cfg,
    "norm-corrected": NormCorrectedCfg,
    "interval": IntervalCfg,
    "two-scale": TwoScaleCfg,
    "text-image": TextImageCfg,
}
"""Short name -> guidance."""
NO_GUIDANCE = BatchedCfg()


def make_guidance(name: str, *, scale: float = 1.0, **options: Any) -> Guidance:
    """The guidance with this name, a short one or `module:Class`. options: its further fields.

    Raises ValueError for a name that leads to no guidance, for an unknown option, and for one out of its limits.
    """
    cls = class_of(name, known=GUIDANCES, base=Guidance, what="guidance")
    known = options_of(cls, main="scale")
    guidance = made(cls, main={"scale": float(scale)}, known=known, options=options, what=f"guidance '{name}'")
    branches = guidance.branches
    if "positive" not in branches or len(set(branches)) != len(branches):
        raise ValueError(
            f"guidance '{name}': got branches {list(branches)}, expected different ones with 'positive' among them."
        )
    return guidance


def guided_velocity(
    velocity: Velocity,
    x: Tensor,
    sigma: Tensor,
    *,
    conditions: Branches,
    guidance: Guidance = NO_GUIDANCE,
    only_positive: bool = False,
) -> Tensor:
    """The velocity to step along: those of the guidance's branches, combined.  Returns [B, ...] fp32.

    x: [B, ...].  sigma: [B].  conditions: of each branch of the guidance; others are left alone.
    only_positive: gradients go through the positive branch alone, and each branch has a forward of its own.
    Calls `velocity` exactly `guidance.num_forwards` times, or once for each computed branch with `only_positive`.

    Raises ValueError if a branch has no conditions, or if they cannot be batched.
    """
    branches = guidance.branches
    missing = [branch for branch in branches if branch not in conditions]
    if missing:
        raise ValueError(
            f"guidance '{guidance.name}': needs conditions {', '.join(map(repr, branches))}; "
            f"{', '.join(map(repr, missing))} is missing. Encode it, or turn guidance off."
        )
    computed = guidance.computed_branches
    if guidance.is_batched and len(computed) > 1 and not only_positive:
        # In the order of diffusers' pipelines, the negative first.
        order = computed[::-1]
        together = _batched({branch: conditions[branch] for branch in order})
        rows = velocity(torch.cat([x] * len(order)), torch.cat([sigma] * len(order)), together)
        velocities = dict(zip(order, rows.float().chunk(len(order)), strict=True))
    else:
        velocities: dict[str, Tensor] = {}
        for branch in computed:
            with torch.set_grad_enabled(torch.is_grad_enabled() and (branch == "positive" or not only_positive)):
                velocities[branch] = velocity(x, sigma, conditions[branch]).float()
    return guidance.combine(velocities, sigma.float())


def _batched(conditions: Branches) -> dict[str, Ragged]:
    """Conditions of all branches, one below the other."""
    (first, own), *others = conditions.items()
    for branch, other in others:
        if other.keys() != own.keys():
            raise ValueError(
                f"guidance: conditions '{branch}' have {sorted(other)}, '{first}' have {sorted(own)}. Give both the "
                "same keys, or use guidance 'two-pass'."
            )
        for key, value in own.items():
            if _shape(other[key]) != _shape(value):
                raise ValueError(
                    f"guidance: condition '{key}' has shape {_shape(other[key])} in '{branch}' and {_shape(value)} in "
                    f"'{first}'. Pad them to one shape, or use guidance 'two-pass'."
                )
    return {key: join(f"conditions[{key!r}]", [one[key] for one in conditions.values()]) for key in own}


def _shape(value: Ragged) -> list[Any]:
    """Its shape; of B tensors of any shape just their number, for those are never stacked."""
    return [len(value), "ragged"] if isinstance(value, tuple) else list(value.shape)


def _norm_ratio(target: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Norms of target / norms of x over `dims`, which are kept. For norm 0 of x it is 0, with gradient 0, not NaN."""
    norm = _norm(x, dims)
    is_zero = norm == 0
    return torch.where(is_zero, 0.0, _norm(target, dims) / torch.where(is_zero, 1.0, norm))


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The Euclidean norm over `dims`, which are kept.  At 0, where it has no derivative, its gradient is 0, not NaN."""
    squares = x.square().sum(dim=dims, keepdim=True)
    is_zero = squares == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squares).sqrt())
