"""Rewards judged by a VLM: a template, a judge, and the scale from [0, 1]."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config

from .config import JudgeConfig, PairwiseConfig
from .question import Answerer, Question, pictures_of, sources_of
from .template import load

__all__ = ["JudgeReward", "PairwiseReward", "build", "build_pairwise"]


def build(config: JudgeConfig, *, device: Any) -> JudgeReward:
    """Raises RecipeError for a template or a judge that cannot be used."""
    return JudgeReward(config, device=device)


def build_pairwise(config: PairwiseConfig, *, device: Any) -> PairwiseReward:
    """Raises RecipeError for a template or a judge that cannot be used."""
    return PairwiseReward(config, device=device)


class _Judged:
    """A template and who answers it."""

    def __init__(self, config: JudgeConfig, *, device: Any) -> None:
        self._name = config.reward
        check_config(config, key=f"reward.{self._name}")
        self._config = config
        self._template = load(config.template, key=f"reward.{self._name}.template")
        self._judge = _judge_of(config, reward=self._name, device=device)

    @property
    def identity(self) -> str:
        """Everything that the score depends on, as one line: template, its version and hash, judge, kind of answer."""
        template = f"{self._template.name} {self._template.version} (sha256 {self._template.digest})"
        where = f" at {self._config.base_url}" if self._config.base_url else ""
        return f"{self._name}: template {template}, model {self._config.model}{where}, answer={self._config.answer}"

    def close(self) -> None:
        self._judge.close()

    def _question(self, samples: ScoreInput, row: int, *images: Sequence[Image.Image]) -> Question:
        try:
            text = self._template.filled(samples.inputs.prompts[row], samples.metadata[row])
        except KeyError as error:
            raise RewardFailed(
                f"reward.{self._name}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has "
                f"no metadata {error.args[0]!r}, which the template {self._template.name!r} shows. Add it to the "
                "prompt file."
            ) from error
        return Question(text=text, images=tuple(image for group in images for image in group))

    def _answers(self, questions: Sequence[Question]) -> list[tuple[float, ...] | None]:
        """The raw scores of each answer; None where it cannot be parsed."""
        with torch.no_grad():
            if self._config.answer == "expected":
                return [*self._judge.expected(questions, self._template)]
            return [self._template.parse(text) for text in self._judge.texts(questions)]


class JudgeReward(_Judged):
    """Each sample by itself."""

    def score(self, samples: ScoreInput) -> Scores:
        """Weighted mean of the template's scores, on [0, 1]; `scored` is False where the answer cannot be parsed.

        Components: the raw scores, `raw` where the template has only one.
        """
        pictures = pictures_of(samples, reward=self._name, num_frames=self._config.num_frames)
        nothing: tuple[Image.Image, ...] = ()
        sources = sources_of(samples, reward=self._name) if self._template.needs_source else [nothing] * len(pictures)
        raw = self._answers([self._question(samples, row, sources[row], pictures[row]) for row in range(len(pictures))])
        rules = self._template.rules
        filled = [scores or (0.0,) * len(rules) for scores in raw]
        names = ["raw"] if len(rules) == 1 else [rule.name for rule in rules]
        return Scores(
            values=torch.tensor([0.0 if one is None else self._template.value(one) for one in raw]),
            parts={name: torch.tensor([one[place] for one in filled]) for place, name in enumerate(names)},
            scored=torch.tensor([one is not None for one in raw]),
        )


class PairwiseReward(_Judged):
    """Samples of a group against each other."""

    def score(self, samples: ScoreInput) -> Scores:
        """Mean preference over the others of the group, 0 to 1; each pair is shown in both orders.

        Component `compared`: comparisons of the sample whose answer could be parsed; `scored` is False where there are
        none. Raises RewardFailed for a group of one sample.
        """
        pictures = pictures_of(samples, reward=self._name, num_frames=self._config.num_frames)
        pairs = list(self._pairs(samples, pictures))
        asked = [self._question(samples, first, pictures[first], pictures[second]) for first, second in pairs]
        totals, counts = torch.zeros(len(pictures), dtype=torch.float64), torch.zeros(len(pictures))
        for (first, second), raw in zip(pairs, self._answers(asked), strict=True):
            if raw is not None:
                for_second = self._template.value(raw)
                for row, preference in ((first, 1 - for_second), (second, for_second)):
                    totals[row] += preference
                    counts[row] += 1
        return Scores(values=(totals / counts.clamp(min=1)).float(), parts={"compared": counts}, scored=counts > 0)

    def _pairs(self, samples: ScoreInput, pictures: Sequence[tuple[Image.Image, ...]]) -> Iterator[tuple[int, int]]:
        """Rows to compare, in both orders: each with the next ones of its group, on a circle ordered by content."""
        assert isinstance(self._config, PairwiseConfig)
        groups: dict[str, list[int]] = {}
        for row, group in enumerate(samples.group_ids):
            groups.setdefault(group, []).append(row)
        for group, rows in groups.items():
            if len(rows) == 1:
                raise RewardFailed(
                    f"reward.{self._name}: group {group!r} (prompt {samples.inputs.prompts[rows[0]]!r}) has one "
                    "sample; expected two or more to compare. Set data.samples_per_prompt to 2 or more."
                )
            # The order must not depend on where rows stand, nor the score on ids, unless two images are the same.
            rows.sort(key=lambda row: (_digest(pictures[row]), samples.sample_ids[row]))
            others = min(self._config.opponents or len(rows), len(rows) - 1)
            chosen = {
                frozenset((rows[place], rows[(place + step) % len(rows)]))
                for place in range(len(rows))
                for step in range(1, others + 1)
            }
            for one, other in sorted(tuple(sorted(pair)) for pair in chosen):
                yield one, other
                yield other, one


def _judge_of(config: JudgeConfig, *, reward: str, device: Any) -> Answerer:
    if config.base_url:
        from .endpoint import Endpoint

        return Endpoint(config, reward=reward)
    from .local import LocalJudge

    return LocalJudge(config, reward=reward, device=device)


def _digest(images: Sequence[Image.Image]) -> bytes:
    return hashlib.sha256(b"".join(image.tobytes() for image in images)).digest()
