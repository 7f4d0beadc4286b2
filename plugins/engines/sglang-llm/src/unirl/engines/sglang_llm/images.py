"""Images for SGLang as training has them, processed, each under a hash of all its tensors. Runs in the engine's
environment.

SGLang would hash the patches alone: images of other shapes can have the same ones.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from sglang.srt.managers import mm_utils
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from unirl.core.types.weights import checksum
from unirl.engine_host.received import Row

__all__ = ["identify_images", "image_data", "key_of"]


def identify_images() -> None:
    """From now on, the images of a row have the hash of the tensors that SGLang has for them, plus their number. Raises
    RuntimeError when SGLang does not apply the hook."""
    HookRegistry.register("sglang.srt.managers.mm_utils.get_new_expanded_mm_items", _numbered, HookType.AFTER)
    load_plugins()
    if not hasattr(mm_utils.get_new_expanded_mm_items, "__wrapped__"):
        raise RuntimeError("SGLang did not apply the hook on get_new_expanded_mm_items.")


def image_data(row: Row, *, token: int | None) -> list[dict[str, Any]] | None:
    """The images of a row as SGLang takes them; None without. token: the placeholder of images.

    Raises RuntimeError when the prompt does not show as many images as there are.
    """
    if not row.media:
        return None
    shown = sum(is_image for is_image, _ in groupby(row.prompt, key=lambda other: other == token))
    if shown != len(row.media["image_grid_thw"]):
        raise RuntimeError(f"a prompt shows {shown} images; its media are {len(row.media['image_grid_thw'])}.")
    # Any hash, so that SGLang does not compute its own.
    return [{"format": "processor_output", "hash": 1, **row.media}]


def key_of(hashes: Sequence[int], keys: Iterable[str]) -> str:
    """The key whose images have these hashes; empty without images. Raises RuntimeError when there is none."""
    for key in keys if hashes else [""]:
        if list(hashes) == [_hash(key) + number for number in range(len(hashes))]:
            return key
    raise RuntimeError("SGLang generated from images that were not sent.")


def _hash(key: str) -> int:
    """62 bits of it, as many as SGLang puts in place of a token, with room for the numbers of images."""
    return int(key[:15], 16) if key else 0


def _numbered(items: list[Any], originals: Sequence[Any]) -> None:
    (whole,) = originals
    grids = {name: value for name, value in whole.model_specific_data.items() if isinstance(value, torch.Tensor)}
    first = _hash(checksum({"pixel_values": whole.feature, **grids}))
    for number, item in enumerate(items):
        item.set_hash(first + number)
