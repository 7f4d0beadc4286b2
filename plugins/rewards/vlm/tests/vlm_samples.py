"""Samples for the tests of judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.roles import ScoreInput
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media


def images(count: int, *, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """[N, 3, H, W] random pixels of 8 bits."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), generator=random) / 255


def samples(
    prompts: Sequence[str],
    pixels: Tensor | None = None,
    *,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    groups: Sequence[str] | None = None,
    sources: Sequence[Path] = (),
    rate: float | None = None,
) -> ScoreInput:
    """One sample per prompt. sources: the source image of each.  rate: frames per second; makes `pixels` videos."""
    names = tuple(f"s{row}" for row in range(len(prompts)))
    inputs = Inputs(
        ids=names,
        prompts=tuple(prompts),
        texts=tuple(prompts),
        media=((),) * len(names),
    )
    if sources:
        refs = [(MediaRef(modality="image", role="source", uri=str(file)),) for file in sources]
        inputs = replace(inputs, media=tuple(refs))
    return ScoreInput(
        sample_ids=names,
        group_ids=tuple(groups or names),
        inputs=inputs,
        metadata=tuple(metadata or [{}] * len(names)),
        media=Media(
            kind="image" if rate is None else "video",
            values=images(len(names)) if pixels is None else pixels,
            rate=rate,
        ),
    )
