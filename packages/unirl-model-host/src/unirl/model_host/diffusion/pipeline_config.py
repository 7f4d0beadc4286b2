"""Settings shared by all models that are loaded from a checkpoint in the diffusers layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from unirl.core.acceleration import FP32, NARROW, Acceleration
from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

from ..attention import OF_DIFFUSERS, attention_problems
from ..checkpoint_problems import checkpoint_problems, lora_problems
from ..model_files import DTYPES, checkpoint_version, dtype_of, read_json
from .sizes import Sizes

if TYPE_CHECKING:
    import torch
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["Parts", "PipelineConfig", "parts_in", "pipeline_dtypes"]

Parts: TypeAlias = Callable[[str], Mapping[str, Any]]
"""Name of a component -> its config."""


@dataclass
class PipelineConfig(PartConfig):
    """A model plugin subclasses it to add its own settings."""

    path: str = "???"
    """Folder in the diffusers layout, or a hub id such as the one in the README of the model's package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16`; None takes the default files."""
    dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the transformer's weights and of its inputs: `float32`, `bfloat16` or `float16`."""
    autocast: str | None = one_of(*DTYPES, default=None)
    """Run the transformer under autocast to this dtype, keeping float32 master weights; None turns autocast off."""
    attention: str | None = None
    """Attention of the transformer, by diffusers' name for the backend, such as `_native_cudnn` or `_flash_3_hub`; None
    is diffusers' own choice, torch's. For rollouts in process and training alike."""
    text_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the text encoders, and therefore of the prompt embeddings."""
    vae_dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the VAE. Half precision can show as banding in the images."""
    decode_batch: int = limit(8, least=0)
    """Images or videos per VAE call; 0 decodes all at once."""
    vae_tiling: bool = False
    """Decode and encode images and videos larger than a tile in overlapping tiles, which bounds the memory and changes
    pixels slightly, as `pipeline.vae.enable_tiling()` of diffusers does. Tile sizes are those of the VAE's class."""

    rounding_only = ("decode_batch",)
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "dtype": Acceleration(scope="both", error=NARROW),
        "autocast": Acceleration(scope="both", error=NARROW),
        "attention": Acceleration(scope="both", error=FP32, tries=("_native_math",)),
        "text_dtype": Acceleration(scope="both", error=NARROW),
        "vae_dtype": Acceleration(scope="reward", error=NARROW),
        "vae_tiling": Acceleration(scope="reward", error=math.inf),
    }

    def sizes(self, part: Parts) -> Sizes | None:
        """Sizes that a checkpoint generates, by the configs of its components; None where only the model knows them."""
        return None

    def unfit(self, sampling: LatentSamplingConfig, part: Parts) -> Iterator[Reason]:
        """Settings of sampling that a checkpoint rules out. Keys are relative to their section, such as `.height`."""
        sizes = self.sizes(part)
        yield from () if sizes is None else sizes.problems(sampling)

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """What the files of a local checkpoint rule out, settings of sampling and of evaluation among them."""
        yield from super().problems(plan, stage)
        yield from attention_problems(self, self.attention, OF_DIFFUSERS, plan=plan, stage=stage)
        yield from checkpoint_problems(self.path)
        yield from lora_problems(self, plan, stage)
        folder = Path(self.path).expanduser()
        if stage is None or not isinstance(stage.sampling, LatentSamplingConfig) or not folder.is_dir():
            return
        evaluated, part = cast(LatentSamplingConfig, stage.evaluation), parts_in(folder)
        try:
            train = list(self.unfit(stage.sampling, part))
            # What evaluation inherits is refused where it is set.
            own = [one for one in self.unfit(evaluated, part) if one.key.split(".")[1] in stage.eval_sampling]
        except (RecipeError, KeyError, TypeError, AttributeError, ValueError):
            return  # another layout, which is refused when it is loaded
        yield from (reason.under("sampling") for reason in train)
        yield from (reason.under("eval.sampling") for reason in own)

    def read_versions(self) -> Mapping[str, str]:
        """Version of the checkpoint, if it is in a local folder."""
        version = checkpoint_version(self.path)
        return {".path": version} if version else {}


def parts_in(folder: Path) -> Parts:
    """The configs of the components in a folder, by name; that of the pipeline by an empty one."""

    def config(name: str) -> Mapping[str, Any]:
        return read_json(folder / name / "config.json" if name else folder / "model_index.json")

    return config


def pipeline_dtypes(
    config: PipelineConfig, *, model: str, encoders: Sequence[str], transformers: Sequence[str] = ("transformer",)
) -> dict[str, torch.dtype]:
    """Dtype of each component, as diffusers' `from_pretrained` takes them; fp32 for components without a setting.

    encoders, transformers: names of the text encoders and of the components that train.
    Raises RecipeError for an invalid dtype.
    """
    import torch

    text = dtype_of(config.text_dtype, key="model.text_dtype", model=model)
    return {
        **dict.fromkeys(transformers, dtype_of(config.dtype, key="model.dtype", model=model)),
        "vae": dtype_of(config.vae_dtype, key="model.vae_dtype", model=model),
        **dict.fromkeys(encoders, text),
        "default": torch.float32,
    }
