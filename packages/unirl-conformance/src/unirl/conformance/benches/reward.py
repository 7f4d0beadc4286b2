"""A reward with samples that it can score, made of what its spec's examples say."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.roles import Reward, ScoreInput, Scores
from unirl.core.spec import RewardExample, RewardSpec
from unirl.core.track import Status

from ..verdicts import NotApplicable
from .base import Bench

__all__ = ["RewardBench", "pick", "pictures", "pixels_of", "with_media"]

SAMPLES_PER_GROUP = 3
ROUNDING = {"cpu": 1e-5, "cuda": 2e-3}
"""How far scores of the same samples may lie apart, as a share of the largest one. Another batch shape takes sums in
another order: 1e-7 for each in fp32, a hundred times that through a network. On a GPU convolutions may run in TF32,
which keeps 10 bits."""


@dataclass(frozen=True, kw_only=True)
class RewardBench(Bench):
    @property
    def spec(self) -> RewardSpec:
        return cast(RewardSpec, self.subject.found("reward").spec)

    @property
    def has_pixels(self) -> bool:
        return self.spec.media in ("image", "video")

    @contextmanager
    def reward(self, **settings: Any) -> Iterator[Reward]:
        """The reward, closed at the end. settings: of its config."""
        found = self.subject.found("reward")
        reward: Reward = self.workshop.build(found, self.workshop.config(found, settings), device=self.device)
        try:
            yield reward
        finally:
            reward.close()

    def batches(self, seed: int = 0) -> list[ScoreInput]:
        """Samples of every example: two groups or more of three, their rows interleaved; a batch for each size.

        Made anew at every call: the same seed gives the same samples, another one other samples of the same ids.
        Raises NotApplicable for media that no track has yet.
        """
        if self.spec.media == "audio":
            raise NotApplicable("the reward scores audio, and no track has audio yet")
        sizes: dict[tuple[int, ...], list[RewardExample]] = {}
        for example in self.spec.examples:
            size = (example.frames, example.height, example.width) if self.has_pixels else ()
            sizes.setdefault(size, []).append(example)
        return [self._batch(examples, seed) for examples in sizes.values()]

    def score(self, reward: Reward, samples: ScoreInput) -> Scores:
        """Values and parts on the CPU, detached. The reward is given a copy, so that it cannot change the samples."""
        scores = reward.score(copy.deepcopy(samples))
        return Scores(
            values=scores.values.detach().cpu(),
            parts={name: values.detach().cpu() for name, values in scores.parts.items()},
        )

    def same(self, what: str, found: Scores, expected: Scores) -> None:
        """Fails the claim unless both are the same scores and parts, to rounding. Keeps the largest difference."""
        names = sorted(expected.parts)
        assert sorted(found.parts) == names, f"the parts are {names} at one time and {sorted(found.parts)} at another"
        apart = [_apart(found.values, expected.values), *(_apart(found.parts[n], expected.parts[n]) for n in names)]
        # Of torch, because Python's max may lose what is not a number.
        self.record(what, float(torch.tensor(apart).max()), bound=ROUNDING[self.device])

    def _batch(self, examples: Sequence[RewardExample], seed: int) -> ScoreInput:
        groups = list(range(max(2, len(examples))))
        rows = [(group, number) for number in range(SAMPLES_PER_GROUP) for group in groups]
        chosen = [examples[group % len(examples)] for group, _ in rows]
        first, media = chosen[0], self.spec.media
        samples = ScoreInput(
            sample_ids=tuple(f"r0/p{group}/{number}" for group, number in rows),
            group_ids=tuple(f"r0/p{group}" for group, _ in rows),
            prompts=tuple(example.prompt for example in chosen),
            metadata=tuple(dict(example.metadata) for example in chosen),
        )
        if media == "text":
            assert all(example.text for example in examples), "the reward scores text, and an example has no `text`"
            texts = [_texts(example, examples) for example in chosen]
            picked = [found[(number + seed) % len(found)] for found, (_, number) in zip(texts, rows, strict=True)]
            # What is cut off in the middle stands last, and was stopped by the length limit.
            cut = [text == found[-1] for text, found in zip(picked, texts, strict=True)]
            return dataclasses.replace(
                samples,
                texts=tuple(picked),
                status=tuple(Status.TRUNCATED if is_cut else Status.COMPLETED for is_cut in cut),
                lengths=tuple(len(text) + 1 for text in picked),
            )
        frames = (first.frames,) if media == "video" else ()
        pixels = pictures(len(rows), (*frames, 3, first.height, first.width), seed=seed).to(self.device)
        return with_media(samples, pixels, media=media)


def pictures(count: int, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """[count, ...] random pixels in [0, 1] that differ in what rewards look at: detail, colour, light and place.

    In turn: noise over the whole range; a smooth field of two random colours; one square of a pure colour somewhere on
    black. shape: [3, H, W], or [F, 3, H, W] with frames that differ.
    """
    random = torch.Generator().manual_seed(9176 + seed)
    height, width = shape[-2:]
    out = torch.empty(count, *shape)
    for row in range(count):
        # Also where every third row belongs to one group, it has all three.
        kind = (row + row // 3) % 3
        for frame in out[row].reshape(-1, 3, height, width):
            if kind == 0:
                frame.copy_(torch.rand(3, height, width, generator=random))
            elif kind == 1:
                one, other = torch.rand(2, 3, 1, 1, generator=random)
                frame.copy_(one + (other - one) * torch.linspace(0, 1, width))
            else:
                frame.zero_()
                edge = max(1, min(height, width) // 3)
                top, left = (int(torch.randint(size - edge + 1, (), generator=random)) for size in (height, width))
                color = torch.randint(1, 8, (), generator=random)
                for channel in range(3):
                    frame[channel, top : top + edge, left : left + edge] = float(color >> channel & 1)
    return out


def pick(samples: ScoreInput, rows: Sequence[int]) -> ScoreInput:
    """These rows alone, in this order."""

    def of(values: Sequence[Any] | None) -> Any:
        return None if values is None else tuple(values[row] for row in rows)

    return ScoreInput(
        sample_ids=of(samples.sample_ids),
        group_ids=of(samples.group_ids),
        prompts=of(samples.prompts),
        metadata=of(samples.metadata),
        images=None if samples.images is None else samples.images[list(rows)],
        videos=of(samples.videos),
        texts=of(samples.texts),
        media_refs=of(samples.media_refs),
        status=of(samples.status),
        lengths=of(samples.lengths),
    )


def with_media(samples: ScoreInput, pixels: Tensor, *, media: str) -> ScoreInput:
    """The same samples with these pixels: images [N, 3, H, W] or videos [N, F, 3, H, W]."""
    if media == "video":
        return dataclasses.replace(samples, videos=list(pixels))
    return dataclasses.replace(samples, images=pixels)


def pixels_of(samples: ScoreInput) -> Tensor:
    """[N, ...] images or videos of a batch, which all have one size here; a copy."""
    if samples.videos is not None:
        return torch.stack(list(samples.videos))
    assert samples.images is not None
    return samples.images.clone()


def _texts(example: RewardExample, examples: Sequence[RewardExample]) -> list[str]:
    """What a model may have answered: the example's text, those of the others, and last the text cut off in the
    middle."""
    others = [other.text for other in examples if other.text != example.text]
    return [example.text, *others, example.text[: len(example.text) // 2]]


def _apart(one: Tensor, other: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    assert one.shape == other.shape, f"{list(one.shape)} scores came for {list(other.shape)} samples"
    one, other = one.double(), other.double()
    scale = float(torch.maximum(one.abs(), other.abs()).max())
    return float((one - other).abs().max()) / (scale or 1.0)
