"""Exact-match reward: the whole completion equals the answer, both normalised."""

from __future__ import annotations

import unicodedata
from typing import Any

import torch
from unirl.core.roles import ScoreInput, Scores

from .config import ExactMatchConfig
from .metadata_input import words_of

__all__ = ["ExactMatchReward", "build", "normalize"]

_NAME = "exact-match"


def build(config: ExactMatchConfig, *, device: Any) -> ExactMatchReward:
    return ExactMatchReward(config)


def normalize(text: str, *, ignore_case: bool) -> str:
    """The text in Unicode form NFKC, trimmed, each run of white space one space; case-folded if asked."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text.casefold() if ignore_case else text


class ExactMatchReward:
    def __init__(self, config: ExactMatchConfig) -> None:
        self._ignore_case = config.ignore_case

    def score(self, samples: ScoreInput) -> Scores:
        """1 where the completion equals the answer, else 0; an empty completion is wrong."""
        answers = words_of(samples, "answer", reward=_NAME)
        pairs = zip(samples.of("text", reward=_NAME).texts, answers, strict=True)
        hits = [self._normalized(text) == self._normalized(answer) for text, answer in pairs]
        return Scores(values=torch.tensor(hits, dtype=torch.float32))

    def close(self) -> None:
        pass

    def _normalized(self, text: str) -> str:
        return normalize(text, ignore_case=self._ignore_case)
