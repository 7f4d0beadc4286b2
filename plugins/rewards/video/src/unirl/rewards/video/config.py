"""Settings of the video rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.model_host.model_files import DTYPES

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = [
    "DIMENSIONS",
    "FirstFrameConfig",
    "MotionConfig",
    "SoftMotionConfig",
    "TemporalConfig",
    "VideoAlignConfig",
    "instruction_of",
]

DIMENSIONS: Mapping[str, str] = {"vq": "<|VQ_reward|>", "mq": "<|MQ_reward|>", "ta": "<|TA_reward|>"}
"""Visual quality, motion quality, text alignment: the token whose last hidden state the reward head reads. In the order
in which the checkpoint's vocabulary has them."""
_PROMPT = "{text_prompt}"


@dataclass
class VideoAlignConfig(RewardConfig):
    model: str = "KwaiVGI/VideoReward"
    """Hub id or folder with model_config.json and checkpoint-*/model.pth."""
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    """Hub id or folder of the Qwen2-VL that it was trained from: configuration, tokenizer and chat template."""
    instruction: str = ""
    """Text file of the instruction that the weights were trained with: DETAILED_PROMPT_WITH_SPECIAL_TOKEN of
    prompt_template.py in the repository VideoAlign, with its first and last line breaks."""
    score: str = one_of("overall", *DIMENSIONS, default="overall")
    """`overall` is the sum of visual quality, motion quality and text alignment; or one of them."""
    min_frame_pixels: int = limit(128 * 28 * 28, least=28 * 28)
    """Smaller frames are enlarged to this many pixels. The largest size is that of model_config.json."""
    dtype: str = one_of(*DTYPES, default="bfloat16")
    """Dtype of the trunk; the head is fp32."""
    batch_size: int = limit(2, least=1)
    """Videos in one forward. Never changes the scores."""

    rounding_only = ("batch_size",)
    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="reward", error=NARROW)}

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also an instruction that cannot be used."""
        yield from super().problems(plan, stage)
        try:
            instruction_of(Path(self.instruction).expanduser())
        except ValueError as error:
            yield Reason(key=".instruction", text=str(error))

    def read_files(self) -> Mapping[str, Path]:
        """The instruction: a resume under another wording is refused."""
        return {".instruction": Path(self.instruction).expanduser()} if self.instruction else {}

    def device_weights(self) -> Mapping[str, str]:
        return {".model": self.dtype}


@dataclass
class MotionConfig(RewardConfig):
    speed: float = limit(0.1, above=0)
    """Shorter edges per second: a motion this fast in the right direction scores 0.71, one this far from the target
    0.5."""


@dataclass
class SoftMotionConfig(MotionConfig):
    edge_px: int = limit(32, least=8)
    """Frames are reduced to this shorter edge. Fewer pixels see faster motion, and less of it."""


@dataclass
class TemporalConfig(RewardConfig):
    pass


@dataclass
class FirstFrameConfig(RewardConfig):
    def frames_read(self, num_frames: int) -> Sequence[int]:
        return [0]


def instruction_of(file: Path) -> str:
    """VideoAlign's instruction. Raises ValueError for a file that is missing, or that lacks the prompt or a token."""
    if not file.is_file():
        raise ValueError(
            f"got no file {str(file)!r}, expected the text that the weights were trained with; save "
            "DETAILED_PROMPT_WITH_SPECIAL_TOKEN of prompt_template.py in the repository VideoAlign to it."
        )
    text = file.read_text(encoding="utf-8")
    counts = {mark: text.count(mark) for mark in (_PROMPT, *DIMENSIONS.values())}
    if set(counts.values()) != {1}:
        listed = ", ".join(f"{count} {mark}" for mark, count in counts.items())
        raise ValueError(f"{str(file)!r} has {listed}, expected one of each.")
    return text
