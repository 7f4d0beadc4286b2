"""The reward `format`: tags in order, or a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import regex
import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import FormatConfig

__all__ = ["FormatReward", "build", "is_strict", "right_tags"]

_NAME = "reward.format"


def build(config: FormatConfig, *, device: Any) -> FormatReward:
    return FormatReward(config)


def right_tags(text: str, tags: Sequence[str]) -> list[bool]:
    """For each tag, whether it is opened once, closed once after that, and not empty."""
    return [_is_right(text, f"<{tag}>", f"</{tag}>") for tag in tags]


def _is_right(text: str, opens: str, closes: str) -> bool:
    if not text.count(opens) == text.count(closes) == 1:
        return False
    inside, closed, _ = text.partition(opens)[2].partition(closes)
    return bool(closed and inside.strip())


def is_strict(text: str, tags: Sequence[str]) -> bool:
    """Whether the text is these tags in this order, none of them empty or twice, and white space around them."""
    if not all(right_tags(text, tags)):
        return False
    # Each tag occurs once, so that no alternative is tried twice: linear in the text.
    body = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return re.fullmatch(rf"\s*{body}\s*", text, flags=re.DOTALL) is not None


class FormatReward:
    """Parts, each [N]: `strict` 0 or 1; `tags` the share of tags that are right, for a pattern the same as `strict`."""

    def __init__(self, config: FormatConfig) -> None:
        check_config(config, key=_NAME)
        self._config = config
        self._pattern = regex.compile(config.pattern, regex.DOTALL) if config.pattern else None

    def score(self, samples: ScoreInput) -> Scores:
        """Raises RewardFailed, naming the sample, where the pattern takes longer than its time."""
        config, texts = self._config, samples.of("text", reward="format").texts
        if self._pattern is not None:
            matched = torch.tensor([self._matches(samples, row, text) for row, text in enumerate(texts)]).float()
            return Scores(values=matched, parts={"strict": matched, "tags": matched.clone()})
        whole = [f"<{config.tags[0]}>{text}" if self._lacks_first(text) else text for text in texts]
        strict = torch.tensor([is_strict(text, config.tags) for text in whole]).float()
        share = torch.tensor([sum(right_tags(text, config.tags)) / len(config.tags) for text in whole])
        values = strict if config.score == "strict" else share
        return Scores(values=values.clone(), parts={"strict": strict, "tags": share})

    def close(self) -> None:
        """Nothing to release."""

    def _lacks_first(self, text: str) -> bool:
        return self._config.opened and not text.lstrip().startswith(f"<{self._config.tags[0]}>")

    def _matches(self, samples: ScoreInput, row: int, text: str) -> bool:
        assert self._pattern is not None
        try:
            return self._pattern.fullmatch(text, timeout=self._config.timeout_s) is not None
        except TimeoutError as error:
            raise RewardFailed(
                f"{_NAME}.pattern: it took more than timeout_s = {self._config.timeout_s:g} s on sample "
                f"{samples.sample_ids[row]!r}, {len(text)} characters; expected a pattern without nested repeats, such "
                "as (a+)+."
            ) from error
