"""Settings of the detection rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["GenevalConfig", "OcrConfig"]


@dataclass
class GenevalConfig(RewardConfig):
    detector: str = ""
    """Folder of a zero-shot object detector in the transformers layout: Grounding DINO, MM Grounding DINO, OWLv2 or
    OWL-ViT, such as a copy of `IDEA-Research/grounding-dino-base`."""
    clip_path: str = ""
    """Folder of a CLIP checkpoint in the transformers layout, which names the colours of objects. GenEval's is
    `openai/clip-vit-large-patch14`."""
    score: str = one_of("soft", "strict", default="soft")
    """`strict` is GenEval's verdict, 0 or 1; `soft` is the mean degree to which the requirements are met."""
    threshold: float = limit(0.3, least=0, below=1)
    """Objects with a detector score above this count. GenEval's 0.3 is for Mask2Former."""
    counting_threshold: float = limit(0.3, least=0, below=1)
    """The same for prompts with the tag `counting`. GenEval's 0.9 is for Mask2Former; open-vocabulary detectors rarely
    score that high."""
    max_overlap: float = limit(0.5, above=0, most=1)
    """Largest intersection over union of two boxes of one class; above it, the one with the lower score is dropped. 1
    keeps all, as GenEval does with Mask2Former."""
    batch_size: int = limit(8, least=1)
    """Images per forward pass of the detector, and crops per forward pass of CLIP."""

    def __post_init__(self) -> None:
        # A worker may have another current folder.
        self.detector, self.clip_path = (
            str(Path(path).expanduser().absolute()) if path else "" for path in (self.detector, self.clip_path)
        )

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also checkpoints that are not set."""
        yield from super().problems(plan, stage)
        for name, kind in (("detector", "a zero-shot object detector"), ("clip_path", "a CLIP checkpoint")):
            if not getattr(self, name):
                yield Reason(key=f".{name}", text=f"got an empty path, expected the folder of {kind}.")

    def device_weights(self) -> Mapping[str, str]:
        return {".detector": "float32", ".clip_path": "float32"}


@dataclass
class OcrConfig(RewardConfig):
    score: str = one_of("similarity", "exact", "substring", "contained", "precision", default="similarity")
    """The component that is the score. `similarity`: 1 - min(d, n) / n, with the edit distance d between the target and
    all text in the image, and the target's length n. `exact`: 1 if both are equal. `substring`: 1 if the target is
    anywhere in the text. `contained`: 1 there too, else the similarity, as in Flow-GRPO's code. `precision`: fraction
    of the text that belongs to the target."""
    min_confidence: float = limit(0.5, least=0, below=1)
    """Lines that are read with a lower confidence are ignored."""
    min_side_px: int = limit(736, least=32, most=4096)
    """Images with a shorter side below this are enlarged to it before text is located. Less is faster and loses small
    text. 736 is PaddleOCR's."""
    processes: int = limit(0, least=0, most=256)
    """Processes that read images, each one at a time. 0 is as many as the CPU threads of the process that scores allow,
    `threads` for each; under Ray those of `launcher.reward_cpus`."""
    threads: int = limit(1, least=1, most=256)
    """CPU threads per image. More processes make better use of CPUs than more threads."""
    rounding_only: ClassVar[tuple[str, ...]] = ("processes", "threads")
