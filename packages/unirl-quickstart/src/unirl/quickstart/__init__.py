"""Checkpoints, prompts and recipes of the quickstarts, as files of this package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

__all__ = [
    "checkpoint_path",
    "edit_checkpoint_path",
    "edit_prompts_path",
    "enhancer_checkpoint_path",
    "enhancer_prompts_path",
    "i2v_checkpoint_path",
    "i2v_prompts_path",
    "image_tokens_checkpoint_path",
    "prompts_path",
    "revise_checkpoint_path",
    "text_checkpoint_path",
    "text_prompts_path",
    "tools_checkpoint_path",
    "tools_prompts_path",
    "unified_checkpoint_path",
    "video_checkpoint_path",
    "video_prompts_path",
    "vl_checkpoint_path",
    "vl_prompts_path",
]


def checkpoint_path() -> Path:
    """Folder of the tiny Stable Diffusion 3 checkpoint, in the layout of diffusers."""
    return _path("checkpoint")


def prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of captions, one JSON row each. No caption of `heldout` is in `train`."""
    return _path(f"prompts/{split}.jsonl")


def text_checkpoint_path() -> Path:
    """Folder of the tiny Qwen3 checkpoint, in the layout of transformers."""
    return _path("text/checkpoint")


def text_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of sums and differences, one JSON row each. No problem of `heldout` is in `train`."""
    return _path(f"text/prompts/{split}.jsonl")


def tools_checkpoint_path() -> Path:
    """Folder of the tiny Qwen3 that calls a calculator, in the layout of transformers."""
    return _path("tools/checkpoint")


def tools_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of products, one JSON row each. No problem of `heldout` is in `train`."""
    return _path(f"tools/prompts/{split}.jsonl")


def enhancer_checkpoint_path() -> Path:
    """Folder of the tiny Qwen3 that rewrites captions, in the layout of transformers."""
    return _path("enhancer/checkpoint")


def enhancer_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of clumsy captions, one JSON row each. No scene of `heldout` is in `train`."""
    return _path(f"enhancer/prompts/{split}.jsonl")


def unified_checkpoint_path() -> Path:
    """Folder of the tiny BAGEL that plans and draws shapes, in its published layout. Its prompts are the enhancer's."""
    return _path("unified/checkpoint")


def revise_checkpoint_path() -> Path:
    """Folder of the tiny BAGEL that draws, criticises and draws again. Its prompts are those of `prompts_path`."""
    return _path("revise/checkpoint")


def image_tokens_checkpoint_path() -> Path:
    """Folder of the tiny Janus that draws shapes with tokens, in the layout of transformers. Its prompts are those of
    `prompts_path`."""
    return _path("image_tokens/checkpoint")


def vl_checkpoint_path() -> Path:
    """Folder of the tiny Qwen3-VL that names shapes, in the layout of transformers."""
    return _path("vl/checkpoint")


def vl_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of questions about images, one JSON row each. No scene of `heldout` is in `train`."""
    return _path(f"vl/prompts/{split}.jsonl")


def edit_checkpoint_path() -> Path:
    """Folder of the tiny FLUX.2 [klein] that edits shapes, in the layout of diffusers."""
    return _path("edit/checkpoint")


def edit_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of instructions about images, one JSON row each. No scene of `heldout` occurs in `train`, neither before an
    edit nor after it."""
    return _path(f"edit/prompts/{split}.jsonl")


def video_checkpoint_path() -> Path:
    """Folder of the tiny Wan that draws clips of moving shapes, in the layout of diffusers."""
    return _path("video/checkpoint")


def video_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of captions of clips, one JSON row each. No caption of `heldout` is in `train`."""
    return _path(f"video/prompts/{split}.jsonl")


def i2v_checkpoint_path() -> Path:
    """Folder of the tiny Wan that moves the shape of a first frame, in the layout of diffusers."""
    return _path("i2v/checkpoint")


def i2v_prompts_path(split: Literal["train", "heldout"]) -> Path:
    """File of directions for first frames, one JSON row each. No frame of `heldout` is in `train`, and no shape of one
    colour goes the same way in both."""
    return _path(f"i2v/prompts/{split}.jsonl")


def _path(name: str) -> Path:
    path = Path(str(files("unirl.quickstart").joinpath(name)))
    if not path.exists():
        raise FileNotFoundError(f"unirl-quickstart: {path} is not there; install the package again, unzipped.")
    return path
