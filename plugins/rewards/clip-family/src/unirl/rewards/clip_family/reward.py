"""The reward around every scorer: checks the images, prepares them, scores them in batches and keeps the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.model_host.model_files import dtype_of
from unirl.numerics.pixels import check_range, widened

from .config import EncoderConfig
from .preprocess import Preprocess
from .prompts import PromptReader

__all__ = ["EncoderReward", "Scorer"]


class Scorer(nn.Module):
    """Images and prompts to numbers."""

    encoders: tuple[str, ...]
    """Submodules in the precision of the config; all else stays in fp32."""
    reader: PromptReader | None = None
    """None for a scorer that does not read the prompt."""

    def encode_prompts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[P, ...] of P prompts, called without a gradient. ids, mask: [P, L]."""
        raise NotImplementedError

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Mapping[str, Tensor]:
        """[n] each: `score`, and the components by name.

        pixels: [n, 3, height, width], preprocessed.  prompts: [n, ...] as encoded; None without a reader.
        """
        raise NotImplementedError


class EncoderReward:
    """A scorer, frozen, with its preprocessing."""

    def __init__(
        self, scorer: Scorer, config: EncoderConfig, *, name: str, preprocess: Preprocess, device: Any
    ) -> None:
        self.dtype = dtype_of(config.dtype, key=f"reward.{name}.dtype", model=name)
        self.scorer = scorer.to(device).requires_grad_(False).eval()
        for child in scorer.encoders:
            scorer.get_submodule(child).to(self.dtype)
        self.preprocess = preprocess
        self._name = name
        self._batch_size = config.batch_size
        self._device = torch.device(device)

    def score(self, samples: ScoreInput) -> Scores:
        """The `score` of each image, [N] fp32, and the scorer's other numbers as components; the gradient flows into
        the images.

        Raises RewardFailed for no samples, media other than images, NaN, and pixels outside [0, 1].
        """
        images = samples.of("image", reward=self._name).stored
        if not images:
            raise RewardFailed(f"reward.{self._name}: got no samples, expected 1 or more.")
        # Autocast would resize, and take cosines, in 16 bits.
        with torch.autocast(self._device.type, enabled=False):
            prompts, parts = self._read(samples.inputs.prompts)
            results: list[Mapping[str, Tensor]] = []
            for start in range(0, len(images), self._batch_size):
                rows = slice(start, start + self._batch_size)
                pixels = self._prepared(images[rows], samples.select(range(len(images))[rows]))
                results.append(self.scorer(pixels, None if prompts is None else prompts[rows]))
        joined = {name: torch.cat([result[name] for result in results]) for name in results[0]}
        return Scores(values=joined.pop("score"), parts={**joined, **parts})

    def close(self) -> None:
        pass

    def _read(self, prompts: Sequence[str]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Each row's prompt as the scorer needs it, equal ones encoded once; and the component `truncated`."""
        if self.scorer.reader is None:
            return None, {}
        distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        ids, mask, is_cut = self.scorer.reader(list(distinct))
        with torch.no_grad():
            encoded = self.scorer.encode_prompts(ids.to(self._device), mask.to(self._device))
        index = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        return encoded[index], {"truncated": is_cut.to(self._device)[index].float()}

    def _prepared(self, images: Sequence[Tensor], samples: ScoreInput) -> Tensor:
        """[n, 3, height, width] in the encoder's dtype. Images of several sizes are prepared one by one."""
        for row, image in enumerate(images):
            check_range(image, samples, row, reward=self._name)
        is_even = len({(image.shape, image.dtype) for image in images}) == 1
        stacks = [torch.stack(list(images))] if is_even else [image[None] for image in images]
        return torch.cat([self.preprocess(widened(stack.to(self._device))) for stack in stacks]).to(self.dtype)
