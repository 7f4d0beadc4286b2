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

from .answerer import answerer
from .config import JudgeConfig, PairwiseConfig
from .question import Question, pictures_of, sources_of
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
        self._judge = answerer(config, device=device)

    def close(self) -> None:
        self._judge.close()

    def _question(self, samples: ScoreInput, row: int, images: Sequence[Image.Image], **texts: str) -> Question:
        """texts: the completions that the template shows."""
        try:
            text = self._template.filled(samples.inputs.prompts[row], samples.metadata[row], **texts)
        except KeyError as error:
            raise RewardFailed(
                f"reward.{self._name}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has "
                f"no metadata {error.args[0]!r}, which the template {self._template.name!r} shows. Add it to the "
                "prompt file."
            ) from error
        return Question(text=text, images=tuple(images))

    def _answers(self, questions: Sequence[Question]) -> list[tuple[float, ...] | None]:
        """The raw scores of each answer; None where it cannot be parsed."""
        with torch.no_grad():
            if self._config.answer == "expected":
                return [*self._judge.expected(questions, self._template)]
            most = self._config.max_new_tokens
            return [self._template.parse(text) for text in self._judge.texts(questions, max_new_tokens=most)]


class JudgeReward(_Judged):
    """Each sample by itself."""

    def score(self, samples: ScoreInput) -> Scores:
        """Weighted mean of the template's scores, on [0, 1]; `scored` is False where the answer cannot be parsed.

        Components: the raw scores, `raw` where the template has only one.
        """
        pictures = pictures_of(samples, reward=self._name, num_frames=self._config.num_frames)
        nothing: tuple[Image.Image, ...] = ()
        sources = sources_of(samples, reward=self._name) if self._template.needs_source else [nothing] * len(pictures)
        raw = self._answers(
            [self._question(samples, row, (*sources[row], *pictures[row])) for row in range(len(pictures))]
        )
        rules = self._template.rules
        filled = [scores or (0.0,) * len(rules) for scores in raw]
        names = ["raw"] if len(rules) == 1 else [rule.name for rule in rules]
        return Scores(
            values=torch.tensor([0.0 if one is None else self._template.value(one) for one in raw]),
            parts={name: torch.tensor([one[place] for one in filled]) for place, name in enumerate(names)},
            scored=torch.tensor([one is not None for one in raw]),
        )


class PairwiseReward(_Judged):
    """Samples of a group against each other: images, videos or texts."""

    def score(self, samples: ScoreInput) -> Scores:
        """Mean preference over the others of the group, 0 to 1, and 0.5 for a tie.

        Each pair is judged in both orders, and counts where both answers can be parsed: one of them alone would show
        which place the judge prefers. Components: `compared`, answers about the sample that count, and `unparsed`,
        those that do not; `scored` is False where none count. Raises RewardFailed for a group of one sample.
        """
        assert isinstance(self._config, PairwiseConfig)
        pictures: list[tuple[Image.Image, ...]] = []
        texts: list[str] = []
        if self._template.shows_texts:
            texts = [self._judge.plain(text) for text in samples.of("text", reward=self._name).texts]
            contents = [text.encode(errors="surrogatepass") for text in texts]
        else:
            pictures = pictures_of(samples, reward=self._name, num_frames=self._config.num_frames)
            contents = [b"".join(image.tobytes() for image in shown) for shown in pictures]
        pairs = list(self._pairs(samples, [hashlib.sha256(content).digest() for content in contents]))
        asked = [
            self._question(samples, one, (), first=texts[one], second=texts[other])
            if texts
            else self._question(samples, one, (*pictures[one], *pictures[other]))
            for pair in pairs
            for one, other in (pair, pair[::-1])
        ]
        answers = iter(self._answers(asked))
        totals, compared, unparsed = torch.zeros(3, len(contents), dtype=torch.float64).unbind()
        for (one, other), there, back in zip(pairs, answers, answers, strict=True):
            if there is None or back is None:
                unparsed[[one, other]] += 2
                continue
            for_other = self._template.value(there) + 1 - self._template.value(back)
            compared[[one, other]] += 2
            totals[one] += 2 - for_other
            totals[other] += for_other
        return Scores(
            values=(totals / compared.clamp(min=1)).float(),
            parts={"compared": compared.float(), "unparsed": unparsed.float()},
            scored=compared > 0,
        )

    def _pairs(self, samples: ScoreInput, digests: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Rows to compare: each with the next ones of its group, on a circle ordered by content."""
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
            # The order must not depend on the positions of rows, nor the score on ids, unless two samples are the same.
            rows.sort(key=lambda row: (digests[row], samples.sample_ids[row]))
            others = min(self._config.opponents or len(rows), len(rows) - 1)
            chosen = {
                frozenset((rows[place], rows[(place + step) % len(rows)]))
                for place in range(len(rows))
                for step in range(1, others + 1)
            }
            yield from sorted((min(pair), max(pair)) for pair in chosen)
