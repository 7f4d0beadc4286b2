"""Samples of videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.roles import ScoreInput
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media


@pytest.fixture
def samples() -> Callable[..., ScoreInput]:
    """motion: the metadata of all.  refs: what each was made from."""

    def made(
        videos: Tensor | Sequence[Tensor],
        *,
        prompts: Sequence[str] | None = None,
        motion: Any = None,
        refs: Sequence[MediaRef] = (),
        rate: float = 8.0,
    ) -> ScoreInput:
        names = tuple(f"s{row}" for row in range(len(videos)))
        texts = tuple(prompts or ("a cat",) * len(names))
        return ScoreInput(
            sample_ids=names,
            group_ids=names,
            inputs=Inputs(ids=names, prompts=texts, texts=texts, media=(tuple(refs),) * len(names)),
            metadata=({} if motion is None else {"motion": motion},) * len(names),
            media=Media(kind="video", values=videos if isinstance(videos, Tensor) else tuple(videos), rate=rate),
        )

    return made


@pytest.fixture
def noise() -> Callable[..., Tensor]:
    """[F, 3, H, W] of whole 255ths, as files have them."""

    def made(*shape: int, seed: int = 0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(256, shape, generator=random).float() / 255

    return made


@pytest.fixture
def square() -> Callable[..., Tensor]:
    """[F, 3, H, W]: a white square on black that moves by whole pixels a frame."""

    def made(*, step: tuple[int, int], frames: int = 5, edge: int = 12, size: tuple[int, int] = (48, 64)) -> Tensor:
        video = torch.zeros(frames, 3, *size)
        start = [(length - edge - move * (frames - 1)) // 2 for length, move in zip(size, step[::-1], strict=True)]
        for time in range(frames):
            top, left = start[0] + time * step[1], start[1] + time * step[0]
            video[time, :, top : top + edge, left : left + edge] = 1
        return video

    return made
