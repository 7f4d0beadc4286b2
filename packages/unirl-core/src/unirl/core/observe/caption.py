"""Captions of samples: what trackers are told of each image or text, in one line that people and programs read."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Caption"]

FORM = re.compile(r"(?P<prompt>.*) \| reward (?P<reward>\S+)(?P<truncated> \| truncated)?", re.DOTALL)
"""The prompt takes all that it can: one that has the words itself is read whole."""


@dataclass(frozen=True, kw_only=True)
class Caption:
    """`<prompt> | reward <number>`, and ` | truncated` after it where a length limit ended the sample."""

    prompt: str
    reward: float | None
    """None where the caption names none."""
    is_truncated: bool = False

    def __str__(self) -> str:
        reward = "" if self.reward is None else f" | reward {self.reward:.2f}"
        return f"{self.prompt}{reward}{' | truncated' if self.is_truncated else ''}"

    @classmethod
    def parse(cls, text: str) -> Caption:
        """The parts of a caption. Text of another form is all prompt, without a reward."""
        result = FORM.fullmatch(text)
        if result is not None:
            try:
                reward = float(result["reward"])
            except ValueError:
                pass  # A prompt that has the words.
            else:
                return cls(prompt=result["prompt"], reward=reward, is_truncated=result["truncated"] is not None)
        return cls(prompt=text, reward=None)
