"""Settings of the text rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.model_host.checkpoint_problems import checkpoint_problems

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["FormatConfig", "LengthConfig", "RewardModelConfig"]


@dataclass
class FormatConfig(RewardConfig):
    tags: list[str] = field(default_factory=lambda: ["think", "answer"])
    """Names of the tags, in order: <think>...</think> and <answer>...</answer>. Used unless `pattern` is set."""
    opened: bool = False
    """The prompt ends in the first opening tag, so that a completion may begin without it."""
    score: str = one_of("strict", "share", default="strict")
    """`strict`: all tags, in order, none of them empty, and nothing but white space around them. `share`: the share of
    tags that occur exactly once, closed and not empty; wherever they are."""
    pattern: str = ""
    """A regular expression for the whole completion instead of tags; `.` matches line breaks."""
    timeout_s: float = limit(1.0, above=0)
    """Most seconds per completion for `pattern`. A pattern that takes longer is an error."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also an invalid pattern, and tags that are not names."""
        import regex

        if self.pattern:
            try:
                regex.compile(self.pattern)
            except regex.error as error:
                yield Reason(key=".pattern", text=f"got {self.pattern!r}, which is not a regular expression: {error}.")
            if self.score == "share":
                yield Reason(key=".score", text="got share, which needs tags; a pattern matches or does not.")
        elif not self.tags or len(set(self.tags)) < len(self.tags) or not all(_is_name(tag) for tag in self.tags):
            yield Reason(
                key=".tags",
                text=f"got {self.tags}, expected one name or more without brackets, such as think; no two alike.",
            )


@dataclass
class LengthConfig(RewardConfig):
    unit: str = one_of("tokens", "words", "characters", default="tokens")
    """`tokens` as generated, `words` between white space, or `characters`."""
    least: int = limit(0, least=0)
    """Shortest length with the full score."""
    most: int = limit(1024, least=0)
    """Longest length with the full score."""
    falloff: int = limit(256, least=1)
    """The score falls linearly to 0 over this many units below `least` and above `most`."""
    penalty: bool = False
    """Score 0 within the range and down to -1 outside, instead of 1 and down to 0. With `most` = max_new_tokens minus
    `falloff` this is DAPO's soft overlong penalty (arXiv 2503.14476, equation 13)."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        if self.least > self.most:
            yield Reason(key=".least", text=f"got {self.least}, expected at most `most` = {self.most}.")


@dataclass
class RewardModelConfig(RewardConfig):
    path: str = ""
    """Folder or hub id of the checkpoint: config.json with an architecture `...ForSequenceClassification`, weights as
    .safetensors, and the tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null takes the newest."""
    dtype: str = one_of("float32", "bfloat16", "float16", default="float32")
    """In which the model computes."""
    template: str = one_of("chat", "plain", default="chat")
    """`chat`: the prompt as user and the completion as assistant in the tokenizer's chat template. `plain`: both as a
    pair of texts, as encoders such as DeBERTa take them."""
    system: str = ""
    """System message, with `template: chat`; empty for none."""
    label: int | None = limit(None, least=0)
    """Index of the output that is the score. Null for a model with one output."""
    max_length: int = limit(4096, least=8)
    """Most tokens of the conversation; longer ones are truncated, which is counted in the part `truncated`."""
    keep: str = one_of("end", "start", default="end")
    """The side of a conversation that is kept where it is too long."""
    batch_size: int = limit(16, least=1)
    """Conversations per forward; they are padded to the longest. Does not change scores."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="reward", error=NARROW)}

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        if not self.path:
            yield Reason(key=".path", text="got nothing, expected a folder or hub id of a reward model's checkpoint.")
        if self.system and self.template != "chat":
            yield Reason(key=".system", text="it is part of the chat template, which template=plain leaves out.")
        yield from checkpoint_problems(self.path, trains=False) if self.path else ()

    def device_weights(self) -> Mapping[str, str]:
        return {".path": self.dtype}


def _is_name(tag: str) -> bool:
    return bool(tag) and tag.replace("_", "").replace("-", "").isalnum()
