"""A Wan VAE with weights in closed form: patches of frames in principal components, and back."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

__all__ = ["CHANNELS", "PATCH_PX", "build_vae", "decode_latents", "encode_clips", "principal_components"]

CHANNELS = 20
"""Principal components of a patch, of 192 numbers."""
PATCH_PX = 8
CONTRAST = 1.5
"""The decoder draws brighter and darker by this, up to white and black: edges are as sharp as in the clips."""
OFFSET = 64.0
"""Far beyond a component's largest value: SiLU leaves x + 64 as it is, to 2e-26."""
CONSTANT = 16384.0
"""Value of one more channel. It dominates the norm of all channels, which is then the same everywhere, to 2e-4."""
LOG_VARIANCE = -30.0
"""Log-variance of the posterior: the least that diffusers takes."""


def principal_components(rows: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """The mean [D] of rows [N, D], and their `count` first principal directions [count, D], in fp32.

    The sign of each direction is that of its largest entry.
    """
    mean = rows.mean(dim=0)
    centred = (rows - mean).double()
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    result = vectors.flip(1)[:, :count].T
    signs = result.gather(1, result.abs().argmax(dim=1, keepdim=True)).sign()
    return mean, (result * signs).float().contiguous()


@torch.no_grad()
def build_vae(clips: Tensor) -> AutoencoderKLWan:
    """The VAE of clips [N, F, 3, H, W] in [0, 1]: latents [20, F, H / 8, W / 8], each a projection of one patch.

    Residual blocks and attention add nothing. The last norm and SiLU of encoder and decoder do not either: all channels
    are shifted to where SiLU is linear, and a constant channel makes the norm constant.
    """
    vae = AutoencoderKLWan(
        base_dim=CHANNELS + 1,
        z_dim=CHANNELS,
        dim_mult=[1],
        num_res_blocks=0,
        temperal_downsample=[],
        in_channels=3 * PATCH_PX**2,
        out_channels=3 * PATCH_PX**2,
        patch_size=PATCH_PX,
        scale_factor_temporal=1,
        scale_factor_spatial=PATCH_PX,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )
    for name, parameter in vae.named_parameters():
        nn.init.constant_(parameter, 1.0 if name.endswith("gamma") else 0.0)
    mean, directions = principal_components(_patches(clips), count=CHANNELS)
    same = torch.eye(CHANNELS)
    for half, first, first_bias, last, last_bias in (
        (vae.encoder, directions, -directions @ mean, same, torch.zeros(CHANNELS)),
        (vae.decoder, same, torch.zeros(CHANNELS), CONTRAST * directions.T, CONTRAST * mean),
    ):
        _tap(half.conv_in)[:CHANNELS] = first
        half.conv_in.bias[:CHANNELS] = first_bias + OFFSET
        half.conv_in.bias[CHANNELS] = CONSTANT
        half.norm_out.gamma.fill_(CONSTANT / (CHANNELS + 1) ** 0.5)
        rows = len(last)
        _tap(half.conv_out)[:rows, :CHANNELS] = last
        half.conv_out.bias[:rows] = last_bias - OFFSET * last.sum(dim=1)
    vae.encoder.conv_out.bias[CHANNELS:] = LOG_VARIANCE
    _tap(vae.quant_conv).copy_(torch.eye(2 * CHANNELS))
    _tap(vae.post_quant_conv).copy_(same)
    return vae.requires_grad_(False).eval()


def _tap(conv: nn.Conv3d) -> Tensor:
    """[out, in] weights of the present frame and the pixel itself: a causal kernel has the present last."""
    _, height, width = conv.kernel_size
    return conv.weight[:, :, -1, height // 2, width // 2]


def _patches(clips: Tensor) -> Tensor:
    """[n, 192] patches of clips in [0, 1], with pixels in [-1, 1] in the VAE's order."""
    patches = (2 * clips - 1).unflatten(-2, (-1, PATCH_PX)).unflatten(-1, (-1, PATCH_PX))
    # [N, F, 3, rows, y, columns, x]; a patch is channels, then x, then y.
    return patches.permute(0, 1, 3, 5, 2, 6, 4).flatten(-3).flatten(0, -2)


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """[N, 20, F, h, w] normalised latents of clips [N, F, 3, H, W] in [0, 1]."""
    chunks = [vae.encode(2 * chunk.transpose(1, 2) - 1).latent_dist.mode() for chunk in clips.split(64)]
    return (torch.cat(chunks) - _of_channels(vae, "latents_mean")) / _of_channels(vae, "latents_std")


@torch.no_grad()
def decode_latents(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """[N, F, 3, H, W] clips in [0, 1] of normalised latents."""
    chunks = (latents * _of_channels(vae, "latents_std") + _of_channels(vae, "latents_mean")).split(64)
    return torch.cat([(vae.decode(chunk).sample / 2 + 0.5).clamp(0, 1).transpose(1, 2) for chunk in chunks])


def _of_channels(vae: AutoencoderKLWan, name: str) -> Tensor:
    return torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1)
