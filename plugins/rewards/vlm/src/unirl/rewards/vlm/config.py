"""Settings of the judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.model_host.model_files import DTYPES

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = [
    "REWARD_TOKEN",
    "AnswererConfig",
    "EditJudgeConfig",
    "EditRewardConfig",
    "Geneval2Config",
    "HeadConfig",
    "Hpsv3Config",
    "JudgeConfig",
    "PairJudgeConfig",
    "PairwiseConfig",
    "UnifiedRewardConfig",
    "WiseConfig",
    "instruction_of",
]

REWARD_TOKEN = "<|Reward|>"
"""Token of HPSv3 and EditReward whose last hidden state a reward head reads."""


@dataclass
class AnswererConfig(RewardConfig):
    """Settings of a model that answers questions."""

    reward: ClassVar[str]
    """Name of the reward, for errors."""
    judges_texts: ClassVar[bool] = False
    """Whether it is shown texts, for which a language model will do."""

    model: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Without `base_url` a hub id or a folder in the transformers layout; with it the endpoint's name of the model."""
    base_url: str = ""
    """Root of an OpenAI-compatible endpoint, such as http://localhost:8000/v1. Empty loads the model in the process
    that scores."""
    dtype: str = one_of(*DTYPES, default="bfloat16")
    """Dtype of the model in the process."""
    batch_size: int = limit(4, least=1)
    """Questions that the model in the process answers at a time."""
    api_key_env: str = ""
    """Environment variable with the endpoint's API key; empty sends none."""
    concurrency: int = limit(8, least=1, most=1024)
    """Questions that the endpoint is asked at a time, by each process that scores."""
    timeout_s: float = limit(120.0, above=0)
    """Longest silence of the endpoint."""
    max_retries: int = limit(5, least=0, most=100)
    """Further tries after a connection error, 429 or 5xx; they wait as long as `retry-after` says, else 0.5 s and twice
    as long each time."""
    max_calls: int | None = limit(None, least=0)
    """Requests that each process that scores may send, retries among them; null is any number."""
    cache: str = ""
    """SQLite file of answers, which later runs read; empty keeps them in memory."""
    seed: int = limit(0, least=0)
    """Sent to the endpoint, with temperature 0."""
    extra_body: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further fields of the request to the endpoint; null takes a field out."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="reward", error=NARROW)}

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also settings of an endpoint without one."""
        yield from super().problems(plan, stage)
        if not self.model:
            yield Reason(key=".model", text="got nothing, expected a checkpoint, or the endpoint's name of a model.")
        if not self.base_url:
            for name in ("api_key_env", "cache", "extra_body", "max_calls"):
                if getattr(self, name) not in ("", None, {}):
                    yield Reason(key=f".{name}", text="got one without base_url, but it is for an endpoint.")
            return
        if not self.base_url.startswith(("http://", "https://")):
            yield Reason(key=".base_url", text=f"got {self.base_url!r}, expected http://... or https://...")
        folder = Path(self.cache).expanduser().absolute().parent
        if self.cache and not folder.is_dir():
            yield Reason(key=".cache", text=f"there is no folder {str(folder)!r} for the file; make it first.")

    def device_weights(self) -> Mapping[str, str]:
        return {} if self.base_url else {".model": self.dtype}


@dataclass
class JudgeConfig(AnswererConfig):
    reward: ClassVar[str] = "vlm-judge"
    compares: ClassVar[bool] = False
    """Whether it is shown two samples at a time."""

    template: str = "general"
    """Prompt template: the name of one of this plugin's, or the path of a `.toml` file."""
    answer: str = one_of("text", "expected", default="text")
    """`text`: the judge writes an answer, which is parsed. `expected`: the mean score under the probabilities of its
    next token, for a model in the process and ranges of single digits."""
    max_new_tokens: int = limit(512, least=1)
    """Longest answer. One that is cut off counts as not parsed."""
    num_frames: int = limit(8, least=1)
    """Frames of a video that the judge is shown, at equal distances."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a template that cannot be used."""
        from .template import load

        yield from super().problems(plan, stage)
        try:
            template = load(self.template, key=".template")
        except RecipeError as error:
            yield Reason(key=".template", text=str(error).removeprefix(".template: "))
            return
        if not self.judges_texts and stage is not None and stage.medium not in ("image", "video"):
            yield Reason(key=".template", text=f"judges are shown images or videos; stage makes {stage.medium}.")
        if template.shows_texts != self.judges_texts:
            result, expected = ("a text with", "none") if template.shows_texts else ("a text without", "both")
            yield Reason(key=".template", text=f"got {result} {{first}} and {{second}}, expected {expected} of them.")
        if self.compares and (count := len(template.rules)) > 1:
            yield Reason(key=".template", text=f"got {count} scores, expected one: its low end for the first to win.")
        if self.answer == "expected":
            if self.base_url:
                text = "got expected with base_url, but only a model in the process gives it."
                yield Reason(key=".answer", text=text)
            for rule in template.rules:
                if rule.pattern or not (rule.low.is_integer() and rule.high.is_integer() and rule.low >= 0):
                    yield Reason(
                        key=".answer",
                        text=f"got expected, but score {rule.name!r} of template {template.name!r} has a pattern, or a "
                        "range of other than whole numbers; use answer=text.",
                    )

    def required_metadata(self) -> Sequence[str]:
        """Keys that the template shows."""
        from .template import load

        return load(self.template, key=f"reward.{self.reward}.template").metadata_keys

    def read_files(self) -> Mapping[str, Path]:
        """The template: a resume under another wording is refused."""
        from .template import path_of

        return {".template": path_of(self.template)}


@dataclass
class UnifiedRewardConfig(JudgeConfig):
    reward: ClassVar[str] = "unified-reward"

    template: str = "unified-reward"
    model: str = "CodeGoat24/UnifiedReward-qwen-7b"


@dataclass
class PairwiseConfig(JudgeConfig):
    reward: ClassVar[str] = "unified-reward-pairwise"
    compares: ClassVar[bool] = True

    template: str = "unified-reward-pairwise"
    model: str = "CodeGoat24/UnifiedReward-qwen-7b"
    opponents: int | None = limit(None, least=1)
    """Each sample is compared with this many others of its group, and these with it, in both orders: n x opponents x 2
    questions for a group of n. null is each pair of the group, n (n - 1) questions."""


@dataclass
class WiseConfig(JudgeConfig):
    reward: ClassVar[str] = "wise"

    template: str = "wise"


@dataclass
class EditJudgeConfig(JudgeConfig):
    reward: ClassVar[str] = "edit-judge"

    template: str = "edit-judge"


@dataclass
class PairJudgeConfig(PairwiseConfig):
    reward: ClassVar[str] = "pair-judge"
    judges_texts: ClassVar[bool] = True

    template: str = "pair-judge"
    model: str = "Qwen/Qwen2.5-7B-Instruct"


@dataclass
class Geneval2Config(AnswererConfig):
    reward: ClassVar[str] = "geneval2"

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    score: str = one_of("geometric", "arithmetic", "strict", default="geometric")
    """The component that is the score. `geometric` and `arithmetic`: mean of the atoms' probabilities, Soft-TIFA GM and
    AM. `strict`: 1 if the most probable answer to every question is the expected one, else 0."""


@dataclass
class HeadConfig(RewardConfig):
    """Settings of reward heads on a Qwen-VL."""

    reward: ClassVar[str]
    """Name of the reward, for errors."""
    weights: ClassVar[str]
    """Name of the published file."""
    heads: ClassVar[Mapping[str, str]]
    """Name of each head in the file -> setting with the file of its instruction."""
    wording: ClassVar[str]
    """Where the text of the instructions is published."""

    model: str = ""
    """Hub id or folder of the weights."""
    base: str = ""
    """Hub id or folder of the model that it was trained from: configuration, tokenizer and image processor."""
    num_pixels: int = limit(256 * 28 * 28, least=28 * 28)
    """Pixels that each image is scaled to, its sides rounded to multiples of 28."""
    dtype: str = one_of(*DTYPES, default="bfloat16")
    """Dtype of the trunk; the head is fp32."""
    batch_size: int = limit(4, least=1)
    """Samples in one forward."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="reward", error=NARROW)}

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also an instruction that cannot be used."""
        yield from super().problems(plan, stage)
        for name in self.heads.values():
            try:
                instruction_of(self, name)
            except ValueError as error:
                yield Reason(key=f".{name}", text=str(error))

    def read_files(self) -> Mapping[str, Path]:
        """The instructions: a resume under another wording is refused."""
        return {f".{name}": Path(file).expanduser() for name in self.heads.values() if (file := getattr(self, name))}

    def device_weights(self) -> Mapping[str, str]:
        return {".model": self.dtype}


@dataclass
class Hpsv3Config(HeadConfig):
    reward: ClassVar[str] = "hpsv3"
    weights: ClassVar[str] = "HPSv3.safetensors"
    heads: ClassVar[Mapping[str, str]] = {"rm_head": "instruction"}
    wording: ClassVar[str] = "INSTRUCTION and prompt_with_special_token of the package hpsv3"

    model: str = "MizzenAI/HPSv3"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    instruction: str = ""
    """Text file of the instruction that the weights were trained with, `{prompt}` or `{text_prompt}` and one <|Reward|>
    in it: INSTRUCTION and prompt_with_special_token, one after the other, of the package hpsv3."""


@dataclass
class EditRewardConfig(HeadConfig):
    reward: ClassVar[str] = "edit-reward"
    weights: ClassVar[str] = "model.safetensors"
    heads: ClassVar[Mapping[str, str]] = {
        "rm_heads.head_0": "following_instruction",
        "rm_heads.head_1": "quality_instruction",
    }
    wording: ClassVar[str] = (
        "INSTRUCTION_EDIT_FOLLOWING or INSTRUCTION_EDIT_QUALITY, and prompt_with_special_token, of EditReward's code"
    )

    model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    following_instruction: str = ""
    """Text file of the first head's instruction, `{text_prompt}` or `{prompt}` and one <|Reward|> in it:
    INSTRUCTION_EDIT_FOLLOWING and prompt_with_special_token, one after the other, of EditReward's code."""
    quality_instruction: str = ""
    """The same of the second head: INSTRUCTION_EDIT_QUALITY and prompt_with_special_token."""


def instruction_of(config: HeadConfig, name: str) -> str:
    """The text of an instruction. name: of its setting.

    Raises ValueError for a file that is missing or has not one prompt and one <|Reward|>.
    """
    file = Path(getattr(config, name)).expanduser()
    if not file.is_file():
        raise ValueError(
            f"got no file {str(file)!r}, expected the text that the weights were trained with; save {config.wording} "
            "to it, one after the other."
        )
    text = file.read_text(encoding="utf-8")
    counts = (text.count("{prompt}") + text.count("{text_prompt}"), text.count(REWARD_TOKEN))
    if counts != (1, 1):
        raise ValueError(
            f"{str(file)!r} has {counts[0]} places for the prompt and {counts[1]} {REWARD_TOKEN}, expected one of each."
        )
    return text
