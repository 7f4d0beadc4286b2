"""Settings of the bagel model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.checkpoint_problems import checkpoint_problems, lora_problems
from unirl.model_host.diffusion.sizes import Sizes
from unirl.model_host.model_files import DTYPES, checkpoint_version, read_json

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["EXAMPLE", "BagelConfig", "ImageOptions", "TextOptions", "image_sizes"]

EXAMPLE = "ByteDance-Seed/BAGEL-7B-MoT"


@dataclass
class BagelConfig(PartConfig):
    path: str = "???"
    """Folder in the published layout, or a hub id such as `ByteDance-Seed/BAGEL-7B-MoT`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the transformer's weights: `float32`, `bfloat16` or `float16`. Log-probs and sampled logits are fp32."""
    autocast: str | None = one_of(*DTYPES, default=None)
    """Run the transformer under autocast to this dtype, keeping float32 master weights; None turns autocast off."""
    vision_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the ViT."""
    vae_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the VAE. Half precision can show as banding in the images."""
    decode_batch: int = limit(8, least=0)
    """Images per VAE call; 0 decodes all at once."""
    logits_chunk: int = limit(0, least=0)
    """Tokens per chunk of logits when computing log-probs; 0 takes as many as fit in 256 MiB. Affects memory, not
    results."""

    rounding_only = ("decode_batch", "logits_chunk")

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Sizes that the checkpoint does not generate, engines and critics that cannot run it, and stages that would
        not continue from each other."""
        yield from super().problems(plan, stage)
        yield from checkpoint_problems(self.path)
        yield from lora_problems(self, plan, stage, projection="lm_head")
        if plan is None or stage is None:
            return
        yield from _other_starts(plan, stage)
        if not stage.engine.spec.reads_weights:
            text = f"got {stage.engine.name!r}, which loads checkpoints itself, and none in BAGEL's layout. "
            yield Reason(key=stage.engine.key, text=f"{text}Use trainside.")
        if stage.algorithm is not None and stage.kind == "latent" and stage.needs.critic:
            text = (
                f"got {stage.algorithm.name!r}, which trains a critic of denoise steps; backends build one of tokens "
            )
            text += "for model 'bagel', which also writes. Use an algorithm without a critic, such as flow-grpo."
            yield Reason(key=stage.algorithm.key, text=text)
        folder = Path(self.path).expanduser()
        if not isinstance(stage.sampling, LatentSamplingConfig) or not folder.is_dir():
            return
        try:
            sizes = image_sizes(read_json(folder / "config.json"))
        except (RecipeError, KeyError, TypeError):
            return  # another layout, which is refused when it is loaded
        yield from (reason.under("sampling") for reason in sizes.problems(stage.sampling))
        evaluated = cast(LatentSamplingConfig, stage.evaluation)
        for reason in sizes.problems(evaluated):
            # What evaluation inherits is refused where it is set.
            if reason.key.split(".")[1] in stage.eval_sampling:
                yield reason.under("eval.sampling")

    def read_versions(self) -> Mapping[str, str]:
        """Version of the checkpoint, if it is in a local folder."""
        version = checkpoint_version(self.path)
        return {".path": version} if version else {}


@dataclass
class TextOptions:
    """`sampling.options` of its texts."""

    sources: str = one_of("all", "features", default="all")
    """Source images as VAE latents and ViT features, as images are generated from them, or as ViT features alone, as
    the published pipeline answers questions about them."""


@dataclass
class ImageOptions:
    """`sampling.options` of its images."""

    system_prompt: str = ""
    """Text before all others, that of the text stage that an image continues from; empty for none."""


def image_sizes(settings: Mapping[str, Any]) -> Sizes:
    """Sizes of images, by config.json."""
    factor = settings["vae_config"]["downsample"] * settings.get("latent_patch_size", 2)
    return Sizes(factor=factor, unit=factor, largest=factor * settings.get("max_latent_size", 64))


def _other_starts(plan: Plan, stage: Stage) -> Iterator[Reason]:
    """Settings by which a stage's sequence begins otherwise than that of a text of the model which it continues."""
    for other in plan.ancestors(stage):
        if other.kind != "text" or other.learner.name != stage.learner.name or not stage.continues:
            continue
        for (key, own), (_, theirs) in zip(_start(stage), _start(other), strict=True):
            if own != theirs:
                text = f"got {own!r}, expected {theirs!r}, that of stage {other.name!r}, which it continues from."
                yield Reason(key=f"sampling.{key}", text=text)


def _start(stage: Stage) -> tuple[tuple[str, Any], ...]:
    """Keys and values of the settings that the beginning of a sequence depends on."""
    sampling = stage.sampling
    if isinstance(sampling, TextSamplingConfig):
        sources = sampling.options.get("sources", "all")
        return ("chat", sampling.chat), ("system_prompt", sampling.system_prompt), ("options.sources", sources)
    prompt = sampling.options.get("system_prompt", "")
    return ("chat", True), ("options.system_prompt", prompt), ("options.sources", "all")
