"""Settings of models that generate text and images in one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

from ..checkpoint_problems import checkpoint_problems, lora_problems
from ..model_files import DTYPES, checkpoint_version

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["UnifiedConfig"]


@dataclass
class UnifiedConfig(PartConfig):
    path: str = "???"
    """Folder in the published layout, or a hub id."""
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
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "dtype": Acceleration(scope="both", error=NARROW),
        "autocast": Acceleration(scope="both", error=NARROW),
        "vision_dtype": Acceleration(scope="both", error=NARROW),
        "vae_dtype": Acceleration(scope="reward", error=NARROW),
    }

    def check_layout(self, folder: Path) -> None:
        """Raise RecipeError, key `model.path`, for a folder in another layout than the published one, or by whose
        settings it is of another architecture."""
        raise NotImplementedError

    def size_problems(self, folder: Path, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        """A reason for each size that the checkpoint in a folder does not generate; keys such as `.height`."""
        raise NotImplementedError

    def start(self, stage: Stage) -> tuple[tuple[str, Any], ...]:
        """Keys and values of the settings that the beginning of a stage's sequence depends on, in one order for stages
        of text and of images."""
        raise NotImplementedError

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Checkpoints of another kind, sizes that one does not generate, engines that cannot run it, and stages that
        would not continue from each other."""
        yield from super().problems(plan, stage)
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            try:
                self.check_layout(folder)
            except RecipeError as error:
                yield Reason(key=".path", text=str(error).removeprefix("model.path: "))
                return
        yield from checkpoint_problems(self.path)
        yield from lora_problems(self, plan, stage, projection="lm_head")
        if plan is None or stage is None:
            return
        yield from self._other_starts(plan, stage)
        spec = stage.learner.model.spec
        name = spec.name
        if not stage.engine.spec.reads_weights and stage.engine.spec.name not in spec.bridges:
            text = f"got {stage.engine.name!r}, which loads checkpoints itself, and none in the layout of {name!r}. "
            yield Reason(key=stage.engine.key, text=f"{text}Use trainside.")
        if not isinstance(stage.sampling, LatentSamplingConfig) or not folder.is_dir():
            return
        try:
            problems = [*self.size_problems(folder, stage.sampling)]
            evaluated = [*self.size_problems(folder, cast(LatentSamplingConfig, stage.evaluation))]
        except (RecipeError, KeyError, TypeError):
            return  # another layout, which is refused when it is loaded
        yield from (reason.under("sampling") for reason in problems)
        for reason in evaluated:
            # What evaluation inherits is refused where it is set.
            if reason.key.split(".")[1] in stage.eval_sampling:
                yield reason.under("eval.sampling")

    def read_versions(self) -> Mapping[str, str]:
        """Version of the checkpoint, if it is in a local folder."""
        version = checkpoint_version(self.path)
        return {".path": version} if version else {}

    def _other_starts(self, plan: Plan, stage: Stage) -> Iterator[Reason]:
        """Settings by which a stage's sequence begins otherwise than that of a text of the model which it continues."""
        for other in plan.ancestors(stage):
            if other.kind != "text" or other.learner.name != stage.learner.name or not stage.continues:
                continue
            for (key, own), (_, theirs) in zip(self.start(stage), self.start(other), strict=True):
                if own != theirs:
                    text = f"got {own!r}, expected {theirs!r}, that of stage {other.name!r}, which it continues from."
                    yield Reason(key=f"sampling.{key}", text=text)
