"""The reward `math`: extracts the answer of each completion, compares it, and reports the outcome."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.core.types.track import Status

from . import plain
from .config import MathConfig
from .length import overlong_penalty
from .symbolic import SymbolicGrader
from .thinking import Thinking, answer_part, is_well_formed
from .verdict import Grader, Verdict
from .worker_pool import WorkerPool

__all__ = ["MathReward", "build"]

_NAME = "reward.math"


def build(config: MathConfig, *, device: Any) -> MathReward:
    return MathReward(config)


class MathReward:
    def __init__(self, config: MathConfig) -> None:
        check_config(config, key=_NAME)
        self._config = config
        self._thinking: Thinking = cast(Thinking, config.thinking)
        self._grader = _grader(config)

    def score(self, samples: ScoreInput) -> Scores:
        """1 for a correct answer and 0 for a wrong one, adjusted for format and length by the config.

        Parts, each [N]: `correct` 0 or 1; `unparsed` 1 where there is no answer; `failed` 1 where grading timed out or
        crashed; `format` 0 or 1; `overlong` the length penalty, 0 unless truncated=soft.
        Raises RewardFailed, naming the sample, for a reference answer that is missing or unreadable for the method, and
        for outcomes that the config turns into errors.
        """
        config, texts = self._config, samples.of("text", reward="math").texts
        keys = [_key(samples, row) for row in range(len(texts))]
        answers = [answer_part(text, thinking=self._thinking) for text in texts]
        verdicts = self._grader.grade(list(zip(keys, answers, strict=True)))
        for row, verdict in enumerate(verdicts):
            self._refuse(samples, row, verdict)
        correct = torch.tensor([float(verdict.outcome == "right") for verdict in verdicts])
        formed = torch.tensor([float(is_well_formed(text, thinking=self._thinking)) for text in texts])
        overlong = torch.tensor(self._penalties(samples))
        values = (1 - config.format_weight) * correct + config.format_weight * formed + overlong
        if config.truncated == "zero":
            values = torch.where(torch.tensor(_truncated(samples)), torch.zeros(()), values)
        return Scores(
            values=values,
            parts={
                "correct": correct,
                "unparsed": torch.tensor([float(verdict.outcome == "unparsed") for verdict in verdicts]),
                "failed": torch.tensor([float(verdict.outcome == "failed") for verdict in verdicts]),
                "format": formed,
                "overlong": overlong,
            },
        )

    def close(self) -> None:
        self._grader.close()

    def _refuse(self, samples: ScoreInput, row: int, verdict: Verdict) -> None:
        """Raise for an unreadable reference answer, and for outcomes that the config turns into errors."""
        config, where = self._config, f"sample {samples.sample_ids[row]!r}"
        if verdict.outcome == "bad-key":
            raise RewardFailed(
                f"{_NAME}: metadata 'answer' of {where} is {samples.metadata[row]['answer']!r}, which "
                f"{verdict.reason} (method={config.method}). Fix the prompt file, or choose another method."
            )
        if verdict.outcome == "unparsed" and config.unparsed == "error":
            raise RewardFailed(
                f"{_NAME}: there is no answer in {where}, whose completion ends in {_end(samples, row)!r}. "
                "`unparsed=wrong` scores such completions as wrong and counts them."
            )
        if verdict.outcome == "failed" and config.on_failure == "error":
            raise RewardFailed(
                f"{_NAME}: grading {where} {verdict.reason}; the completion ends in {_end(samples, row)!r}. "
                "`on_failure=wrong` scores such completions as wrong and counts them."
            )

    def _penalties(self, samples: ScoreInput) -> list[float]:
        config = self._config
        if config.truncated != "soft":
            return [0.0] * len(samples.sample_ids)
        if samples.lengths is None:
            raise RewardFailed(
                f"{_NAME}.truncated: 'soft' needs the number of generated tokens, and this track has none; "
                "use it with a text track that the engine generated, or choose `keep`."
            )
        assert config.max_tokens is not None
        return [
            config.overlong_factor
            * overlong_penalty(length, max_tokens=config.max_tokens, buffer=config.overlong_buffer)
            for length in samples.lengths
        ]


def _truncated(samples: ScoreInput) -> list[bool]:
    if samples.status is None:
        raise RewardFailed(
            f"{_NAME}.truncated: 'zero' needs the status of the samples, and this track has none; choose `keep`."
        )
    return [status is Status.TRUNCATED for status in samples.status]


def _key(samples: ScoreInput, row: int) -> str:
    """The prompt's answer as text. JSON may hold it as a number."""
    metadata = samples.metadata[row]
    value = metadata.get("answer")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    result = f"is {value!r}, neither text nor a number" if "answer" in metadata else "is missing"
    raise RewardFailed(
        f"{_NAME}: metadata 'answer' of sample {samples.sample_ids[row]!r} (prompt "
        f"{samples.inputs.prompts[row][:80]!r}) {result}; add it to the prompt file."
    )


def _end(samples: ScoreInput, row: int) -> str:
    return samples.of("text", reward="math").texts[row][-80:]


def _grader(config: MathConfig) -> Grader:
    if config.method == "math-verify":
        pool = WorkerPool(workers=config.workers, timeout_s=config.timeout_s)
        return SymbolicGrader(pool, needs_box=config.needs_box)
    grades = {
        "boxed": plain.boxed,
        "gsm8k": plain.gsm8k,
        "choice": plain.choice(config.choices),
        "exact": plain.exact,
    }
    return plain.PlainGrader(grades[config.method])
