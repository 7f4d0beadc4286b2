"""Each scorer on its miniature, and samples for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.roles import ScoreInput
from unirl.core.specs.spec import RewardSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.clip_family.plugin import unirl_rewards

SPECS: Mapping[str, RewardSpec] = {spec.name: spec for spec in unirl_rewards()}
PROMPTS = ("a cat", "Two red kites, at dawn", "x")


def resolved(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Any]]:
    """Settings that load the miniature of a scorer, written once."""
    written: dict[str, Mapping[str, Any]] = {}

    def settings(name: str) -> Mapping[str, Any]:
        if name not in written:
            folder = tmp_path_factory.mktemp(name)
            written[name] = resolved(SPECS[name].tiny)(folder, seed=0)
        return written[name]

    return settings


@pytest.fixture(scope="session")
def build(tiny: Callable[[str], Mapping[str, Any]]) -> Callable[..., Any]:
    """The reward, on its miniature unless settings say otherwise."""

    def built(name: str, **settings: Any) -> Any:
        spec = SPECS[name]
        return resolved(spec.build)(resolved(spec.config)(**{**tiny(name), **settings}), device="cpu")

    return built


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str], Mapping[str, Any]]:
    """Settings of a miniature in a folder that the test may damage."""

    def written(name: str) -> Mapping[str, Any]:
        return resolved(SPECS[name].tiny)(tmp_path, seed=0)

    return written


@pytest.fixture
def samples() -> Callable[..., ScoreInput]:
    def made(images: Tensor | tuple[Tensor, ...], prompts: Sequence[str] | None = None) -> ScoreInput:
        names = tuple(f"s{row}" for row in range(len(images)))
        texts = prompts if prompts is not None else [PROMPTS[row % len(PROMPTS)] for row in range(len(images))]
        return ScoreInput(
            sample_ids=names,
            group_ids=names,
            inputs=Inputs.of_texts(texts),
            metadata=({},) * len(names),
            media=Media(kind="image", values=images),
        )

    return made


@pytest.fixture
def noise() -> Callable[..., Tensor]:
    """Images of whole 255ths, as files have them."""

    def made(count: int, height: int, width: int) -> Tensor:
        random = torch.Generator().manual_seed(count + height + width)
        return torch.randint(256, (count, 3, height, width), generator=random).float() / 255

    return made
