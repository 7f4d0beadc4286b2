"""HunyuanImage-3.0's VAE in the names of its published checkpoint: 3-D convolutions that also encode single images.

Its architecture is that of the autoencoders of HunyuanVideo 1.5 and HunyuanImage 2.1, of which diffusers has others of
other names: sides are halved by moving elements into channels, beside a mean over groups of them. Source: vLLM-Omni's
implementation (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HunyuanVae", "VaeSizes", "vae_sizes"]

_GROUPS, _EPS = 32, 1e-6


@dataclass(frozen=True, kw_only=True)
class VaeSizes:
    channels: int
    """Of latents."""
    widths: tuple[int, ...]
    """Of each resolution, from the largest."""
    blocks: int
    """Of each resolution of the encoder; the decoder has one more."""
    factor: int
    """Pixels of a latent along a side."""
    frames: int
    """Frames of a latent. An image is as many equal ones."""
    scale: float
    shift: float


def vae_sizes(settings: Mapping[str, Any]) -> VaeSizes:
    """Sizes by `vae` of config.json. Raises KeyError, or ValueError for an autoencoder of another kind."""
    for side in ("downsample", "upsample"):
        if not settings.get(f"{side}_match_channel", True):
            raise ValueError(f"vae.{side}_match_channel is false, expected true")
    factor, frames, widths = settings["ffactor_spatial"], settings["ffactor_temporal"], settings["block_out_channels"]
    if log2(factor) % 1 or log2(frames) % 1 or not 1 <= frames <= factor or len(widths) != log2(factor) + 1:
        raise ValueError(
            f"vae has {len(widths)} widths (block_out_channels) for ffactor_spatial {factor} and ffactor_temporal "
            f"{frames}, expected powers of 2 and one width more than halvings"
        )
    return VaeSizes(
        channels=settings["latent_channels"],
        widths=tuple(widths),
        blocks=settings["layers_per_block"],
        factor=factor,
        frames=frames,
        scale=settings.get("scaling_factor") or 1.0,
        shift=settings.get("shift_factor") or 0.0,
    )


class HunyuanVae(nn.Module):
    """The frozen autoencoder."""

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^(?!vae\.)",)
    """Tensors of the checkpoint that others load."""

    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vae = _Halves(sizes)

    def encode(self, pixels: Tensor) -> Tensor:
        """Normalised latents [N, C, h, w] fp32, the mean of the posterior, of images [N, 3, H, W] in [-1, 1]."""
        frames = pixels.to(self._dtype)[:, :, None].expand(-1, -1, self.sizes.frames, -1, -1)
        mean = self.vae.encoder(frames)[:, : self.sizes.channels, 0]
        return (mean.float() - self.sizes.shift) * self.sizes.scale

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32, about in [-1, 1], of normalised latents: the last frame of those decoded."""
        plain = latents.float() / self.sizes.scale + self.sizes.shift
        return self.vae.decoder(plain.to(self._dtype)[:, :, None])[:, :, -1].float()

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class _Halves(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        self.encoder, self.decoder = _Encoder(sizes), _Decoder(sizes)


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, width, eps=_EPS)


def _conv(inside: int, outside: int) -> nn.Conv3d:
    return nn.Conv3d(inside, outside, 3, padding=1)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(width), _conv(width, width)
        self.norm2, self.conv2 = _norm(width), _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv3d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        return x + self.proj_out(seen.reshape(x.shape))


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = _Block(width), _Attention(width), _Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


def _folded(x: Tensor, frames: int) -> Tensor:
    """[B, f 2 2 C, F / f, H / 2, W / 2]: elements of each cell become channels. frames: f of a cell."""
    split = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, frames))
    return split.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


def _unfolded(x: Tensor, frames: int) -> Tensor:
    """The inverse of `_folded`."""
    split = x.unflatten(1, (frames, 2, 2, -1))
    return split.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class _Down(nn.Module):
    def __init__(self, inside: int, outside: int, *, frames: int) -> None:
        super().__init__()
        self.frames, self.outside = frames, outside
        self.conv = _conv(inside, outside // (4 * frames))

    def forward(self, x: Tensor) -> Tensor:
        means = _folded(x, self.frames).unflatten(1, (self.outside, -1)).mean(dim=2)
        return _folded(self.conv(x), self.frames) + means


class _Up(nn.Module):
    def __init__(self, inside: int, outside: int, *, frames: int) -> None:
        super().__init__()
        self.frames, self.repeats = frames, 4 * frames * outside // inside
        self.conv = _conv(inside, outside * 4 * frames)

    def forward(self, x: Tensor) -> Tensor:
        return _unfolded(self.conv(x) + x.repeat_interleave(self.repeats, dim=1), self.frames)


class _Level(nn.Module):
    """Blocks of one resolution, and the way to the next."""

    def __init__(self, width: int, *, count: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(_Block(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.block:
            x = part(x)
        for name in ("downsample", "upsample"):
            if name in self._modules:
                x = self.get_submodule(name)(x)
        return x


class _Encoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        widths, halvings = sizes.widths, round(log2(sizes.factor))
        self.conv_in = _conv(3, widths[0])
        # Frames are halved in the last halvings of the sides.
        first_frames = halvings - round(log2(sizes.frames))
        self.down = nn.ModuleList(_Level(width, count=sizes.blocks) for width in widths)
        for level, part in enumerate(self.down[:-1]):
            frames = 2 if level >= first_frames else 1
            part.add_module("downsample", _Down(widths[level], widths[level + 1], frames=frames))
        self.mid = _Middle(widths[-1])
        self.norm_out, self.conv_out = _norm(widths[-1]), _conv(widths[-1], 2 * sizes.channels)

    def forward(self, x: Tensor) -> Tensor:
        """Mean and log-variance [B, 2 C, F, h, w]."""
        x = self.conv_in(x)
        for part in (*self.down, self.mid):
            x = part(x)
        output = self.conv_out(F.silu(self.norm_out(x)))
        return output + x.unflatten(1, (output.shape[1], -1)).mean(dim=2)


class _Decoder(nn.Module):
    def __init__(self, sizes: VaeSizes) -> None:
        super().__init__()
        widths: Sequence[int] = sizes.widths[::-1]
        self.repeats = widths[0] // sizes.channels
        self.conv_in, self.mid = _conv(sizes.channels, widths[0]), _Middle(widths[0])
        self.up = nn.ModuleList(_Level(width, count=sizes.blocks + 1) for width in widths)
        for level, part in enumerate(self.up[:-1]):
            frames = 2 if level < round(log2(sizes.frames)) else 1
            part.add_module("upsample", _Up(widths[level], widths[level + 1], frames=frames))
        self.norm_out, self.conv_out = _norm(widths[-1]), _conv(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x) + x.repeat_interleave(self.repeats, dim=1)
        for part in (self.mid, *self.up):
            x = part(x)
        return self.conv_out(F.silu(self.norm_out(x)))
