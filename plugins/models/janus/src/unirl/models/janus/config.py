"""Settings of the janus model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, limit
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.model_files import read_json
from unirl.model_host.tokens.causal_lm_config import CausalLmConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["ImageOptions", "JanusConfig"]


@dataclass
class JanusConfig(CausalLmConfig):
    decode_batch: int = limit(8, least=0)
    """Images per call of the VQ decoder; 0 decodes all at once."""

    rounding_only = ("decode_batch", "logits_chunk")

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Grids that are not filled, engines that load checkpoints themselves, and images that would not continue their
        text."""
        yield from super().problems(plan, stage)
        if plan is None or stage is None:
            return
        if not stage.engine.spec.reads_weights:
            text = f"got {stage.engine.name!r}, which loads checkpoints itself, and none of Janus. Use trainside."
            yield Reason(key=stage.engine.key, text=text)
        if stage.track == "image":
            yield from _grid(self.path, cast("TextSamplingConfig", stage.sampling))
            yield from _starts(plan, stage)


@dataclass
class ImageOptions:
    """`sampling.options` of its images."""

    guidance_scale: float = limit(5.0, least=1)
    """Scale w of classifier-free guidance on logits, u + w (c - u); 1 is without, at half the cost."""


def _grid(path: str, sampling: TextSamplingConfig) -> Iterator[Reason]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    try:
        size = int(read_json(folder / "config.json")["vq_config"]["num_patches"]) ** 2
    except (RecipeError, KeyError, TypeError):
        return  # another layout, which is refused when it is loaded
    if sampling.max_new_tokens < size:
        text = f"got {sampling.max_new_tokens}, expected {size} or more, the tokens of an image."
        yield Reason(key="sampling.max_new_tokens", text=text)


def _starts(plan: Plan, stage: Stage) -> Iterator[Reason]:
    """Settings by which an image's sequence begins otherwise than that of the text that it continues."""
    if drawn := [other.name for other in plan.ancestors(stage) if other.medium != "text"]:
        text = (
            f"got {stage.parent!r}; expected stages of text alone above it, or none: {drawn[-1]!r} makes images, which "
        )
        yield Reason(
            key=f"stages.{stage.name}.parent", text=f"{text}are no part of the sequence that image tokens continue."
        )
    for other in plan.ancestors(stage):
        if other.learner.name != stage.learner.name or not isinstance(other.sampling, TextSamplingConfig):
            continue
        for key in ("chat", "system_prompt", "thinking"):
            own, theirs = getattr(stage.sampling, key), getattr(other.sampling, key)
            if own != theirs:
                text = f"got {own!r}, expected {theirs!r}, that of stage {other.name!r}, which it continues from."
                yield Reason(key=f"sampling.{key}", text=text)
