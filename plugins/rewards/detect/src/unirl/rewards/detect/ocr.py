"""The reward `ocr`: reads the text in each image and compares it with the prompt's target."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import OcrConfig
from .image_input import pictures_of
from .text_reader import Readers, ReaderSettings
from .text_target import Agreement, agreement, target_of

__all__ = ["OcrReward", "build"]

_NAME = "reward.ocr"


def build(config: OcrConfig, *, device: Any) -> OcrReward:
    return OcrReward(config)


class OcrReward:
    """Runs on the CPU, whatever the device."""

    def __init__(self, config: OcrConfig) -> None:
        check_config(config, key=_NAME)
        self._score = config.score
        settings = ReaderSettings(
            min_confidence=config.min_confidence, min_side_px=config.min_side_px, threads=config.threads
        )
        # The threads of torch are those that this process may use: by `run.threads`, or Ray's variable for a worker.
        processes = config.processes or max(1, torch.get_num_threads() // config.threads)
        self._readers = Readers(settings, processes=processes, key=_NAME)

    def score(self, samples: ScoreInput) -> Scores:
        """The component `config.score`; parts, each [N]: those of `Agreement`.

        Raises RewardFailed, naming the sample, for a prompt without a target, and where a process that reads ends.
        """
        targets = [_target(samples, row) for row in range(samples.num_rows)]
        texts = self._readers.read(pictures_of(samples, reward="ocr"))
        results = [agreement(text, target) for text, target in zip(texts, targets, strict=True)]
        parts = {
            item.name: torch.tensor([float(getattr(one, item.name)) for one in results])
            for item in dataclasses.fields(Agreement)
        }
        return Scores(values=parts[self._score].clone(), parts=parts)

    def close(self) -> None:
        self._readers.close()


def _target(samples: ScoreInput, row: int) -> str:
    prompt = samples.inputs.prompts[row]
    try:
        return target_of(prompt, samples.metadata[row])
    except ValueError as error:
        raise RewardFailed(f"{_NAME}: sample {samples.sample_ids[row]!r} (prompt {prompt[:80]!r}): {error}") from error
