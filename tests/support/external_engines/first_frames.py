"""Wan from a first frame in external engines: the fixtures of `image_models` and `edits`, for the test modules of
models whose conftest has `i2v_model`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.numerics.diffusion.wan_first_frame import WanFirstFrame
from unirl.numerics.diffusion.wan_miniature import first_frame

from .edits import check_edit_run
from .image_models import ENGINES, started
from .latents import Ask, asking_from_frames

__all__ = ["FRAME_PROMPTS", "ask", "check_frame_run", "edit", "engine", "model"]

FRAME_PROMPTS = ("a red ring  rolls &amp; stops", "a blue square on the left of two green discs", "")
"""The first is cleaned."""


@pytest.fixture
def model(i2v_model: WanFirstFrame) -> WanFirstFrame:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return copy.deepcopy(i2v_model)


@pytest.fixture
def ask(model: WanFirstFrame, tmp_path: Path) -> Ask:
    """First frames of three sizes, most of another ratio than the video by a few per cent. Five steps reach both experts,
    where there are two."""
    # Behind features of images the transformer takes no other length.
    length = 512 if model.transformer.config.image_dim else 32
    usual = {"height": 32, "width": 48, "frames": 9, "max_sequence_length": length}
    return asking_from_frames(model, partial(first_frame, tmp_path), prompts=FRAME_PROMPTS, **usual)


@pytest.fixture
def edit(ask: Ask) -> Ask:
    return ask


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, i2v_model: WanFirstFrame) -> Iterator[ExternalLatentEngine]:
    with started(request.param, i2v_model) as result:
        yield result


def check_frame_run(
    name: str,
    words: Sequence[str],
    *,
    engine: ExternalLatentEngine,
    model: WanFirstFrame,
    checkpoint: Path,
    folder: Path,
) -> None:
    """Two steps of `name`'s recipe from two first frames, see `check_edit_run`."""
    every = [f"model.path={checkpoint}", "model.dtype=float32", "sampling.frames=5", "train.micro_batch_size=2"]
    media = [first_frame(folder, number=number, height=32, width=48) for number in range(2)]
    check_edit_run(f"{name}/flow-grpo", [*every, *words], engine=engine, model=model, media=media, folder=folder)
