# diffusers exports its classes lazily, and annotates arguments with less than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""BAGEL's VAE, that of FLUX.1, through diffusers: `ae.safetensors` names tensors as its authors do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.model_host.state_dicts import read_tensors

__all__ = ["load_vae", "new_vae", "pack", "published_name", "unpack"]

_NAMES = (
    (r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block."),
    (r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample."),
    (r"up_blocks\.(\d+)\.resnets\.", r"up.\1.block."),
    (r"up_blocks\.(\d+)\.upsamplers\.0\.", r"up.\1.upsample."),
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"mid_block\.attentions\.0\.group_norm\.", "mid.attn_1.norm."),
    (r"mid_block\.attentions\.0\.to_out\.0\.", "mid.attn_1.proj_out."),
    (r"mid_block\.attentions\.0\.to_([qkv])\.", r"mid.attn_1.\1."),
    (r"conv_norm_out\.", "norm_out."),
    (r"conv_shortcut\.", "nin_shortcut."),
)
"""diffusers' names -> the published ones."""


def published_name(name: str, *, levels: int) -> str:
    """Name in `ae.safetensors` of a tensor of diffusers' `AutoencoderKL`. levels: resolutions, which the decoder counts
    from its output."""
    for pattern, published in _NAMES:
        name = re.sub(pattern, published, name)
    return re.sub(r"\.up\.(\d+)\.", lambda match: f".up.{levels - 1 - int(match[1])}.", name)


def new_vae(widths: Sequence[int], *, layers: int, channels: int) -> AutoencoderKL:
    """An autoencoder with the settings of FLUX.1's, for which the checkpoint has no file, in these widths."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        latent_channels=channels,
        # 32 there; one group for each channel where a level has fewer.
        norm_num_groups=min(32, *widths),
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def load_vae(file: Path, *, dtype: torch.dtype) -> AutoencoderKL:
    """The frozen VAE on the CPU. Raises RecipeError, key `model.path`, for tensors that are missing or unknown."""
    tensors = read_tensors(file, key="model.path")
    try:
        with torch.device("meta"):
            vae = _shaped(tensors)
    except (KeyError, ValueError) as error:
        raise RecipeError(
            f"model.path: {str(file)!r} is not an autoencoder in FLUX.1's names: {error}. Fetch it again."
        ) from error
    levels = len(cast(Any, vae.config).block_out_channels)
    names = {published_name(name, levels=levels): name for name in vae.state_dict()}
    if names.keys() != tensors.keys():
        lacks, unknown = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
        faults = (f"{what} {each[0]!r}" for what, each in (("lacks", lacks), ("has the unknown", unknown)) if each)
        raise RecipeError(
            f"model.path: {str(file)!r} {' and '.join(faults)}, expected the {len(names)} tensors of an autoencoder of "
            f"{levels} levels. Fetch it again."
        )
    expected = vae.state_dict()
    state: dict[str, Tensor] = {}
    for published, name in names.items():
        # Layers of attention are stored as convolutions over one pixel.
        value, shape = tensors[published], expected[name].shape
        if value.numel() != shape.numel() or value.shape[: len(shape)] != shape:
            raise RecipeError(
                f"model.path: {str(file)!r} has {published!r} as {list(value.shape)}, expected {list(shape)}. Fetch it "
                "again."
            )
        state[name] = value.view(shape).to(dtype)
    vae.load_state_dict(state, assign=True)
    return vae.requires_grad_(False).eval()


def _shaped(tensors: Mapping[str, Tensor]) -> AutoencoderKL:
    """An autoencoder whose widths, levels and layers are those of tensors in the published names."""
    blocks = [
        match for name in tensors if (match := re.fullmatch(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.weight", name))
    ]
    levels, layers = (1 + max(int(match[place]) for match in blocks) for place in (1, 2))
    widths = [len(tensors[f"encoder.down.{level}.block.0.conv1.weight"]) for level in range(levels)]
    return new_vae(widths, layers=layers, channels=len(tensors["encoder.conv_out.weight"]) // 2)


def pack(latents: Tensor, *, patch: int) -> Tensor:
    """[B, p p C, h, w] of latents [B, C, p h, p w]: the numbers of a patch in the order row, column, channel."""
    batch, channels, height, width = latents.shape
    split = latents.view(batch, channels, height // patch, patch, width // patch, patch)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // patch, width // patch)


def unpack(packed: Tensor, *, patch: int) -> Tensor:
    """The inverse of `pack`."""
    batch, _, height, width = packed.shape
    split = packed.view(batch, patch, patch, -1, height, width)
    return split.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * patch, width * patch)
