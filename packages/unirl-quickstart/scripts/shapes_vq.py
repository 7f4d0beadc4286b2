"""The VQ model of the image-token quickstart: shapes of 64 x 64 pixels as 4 x 4 tokens of a codebook, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import minimize
from transformers.models.janus.modeling_janus import (
    JanusVQVAE,
    JanusVQVAEAttnBlock,
    JanusVQVAEConvUpsample,
    JanusVQVAEResnetBlock,
)
from unirl.rewards.rules.shapes_world import RADIUS_PX, Scene, draw, place_of
from video_vae import principal_components

__all__ = ["draw_scenes", "k_means", "pixels_of", "tokens_of", "train_vq"]

CHUNK = 64
"""Images of a forward without gradient."""
PATCH_PX = 16
"""Pixels per side of what a token stands for."""
ALONG = 0.75
"""How far out shapes are: in the middle of four patches, whatever their place."""
MARGIN_PX = 7
"""From any pixel inside a ring or beside a cross, one of the shape is as near as this."""
TEMPERATURE = 0.1
"""Of the softmax of cosines by which the encoder is trained."""


def draw_scenes(scenes: Sequence[Scene], *, count: int, jitter: float, generator: torch.Generator) -> Tensor:
    """[len(scenes) * count, 3, 64, 64] images in [0, 1], `count` of each scene in turn, near corners of patches.

    jitter: share of the range of sizes and positions that `render` draws from, at most 0.25.
    """
    images: list[Tensor] = []
    for scene in scenes:
        radius, along, across = jitter * (2 * torch.rand(3, count, generator=generator) - 1)
        x, y = place_of(scene.place, along=ALONG + along, across=across)
        low, high = RADIUS_PX
        size = (low + high) / 2 + radius * (high - low) / 2
        images.append(draw(scene, center_x=x, center_y=y, radius=size[:, None, None]))
    return torch.cat(images)


def train_vq(vq: JanusVQVAE, images: Tensor, *, steps: int, batch: int, seed: int) -> None:
    """Trains on images [N, 3, 64, 64] in [0, 1], whose tokens are the clusters of their patches: the decoder and the
    codes to draw them, and the encoder to tell the codes."""
    generator = torch.Generator().manual_seed(seed)
    _start_weights(vq, generator)
    codes = vq.quantize.embedding.weight
    patches = images.unfold(2, PATCH_PX, PATCH_PX).unfold(3, PATCH_PX, PATCH_PX).permute(0, 2, 3, 1, 4, 5).flatten(3)
    # Of black patches one is enough.
    rows = torch.cat([torch.zeros(1, patches.shape[-1]), patches[patches.amax(dim=-1) > 0]])
    centres = k_means(rows, count=len(codes), rounds=10, generator=generator)
    tokens = torch.cat([torch.cdist(chunk.flatten(1, 2), centres).argmin(dim=-1) for chunk in patches.split(CHUNK)])
    _start_codes(codes, centres)

    def loss_of(step: int) -> Tensor:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        target, expected = 2 * images[chosen] - 1, tokens[chosen]
        latents = F.normalize(vq.quant_conv(vq.encoder(target)), dim=1).flatten(2)
        cosines = F.normalize(codes.detach(), dim=1) @ latents
        return shapes_loss(vq.decode(expected), target) + F.cross_entropy(cosines / TEMPERATURE, expected)

    minimize(
        vq.parameters(), loss_of, name="vq model", steps=steps, learning_rate=3e-3, weight_decay=0.0, print_every=50
    )
    # `decode` takes the directions of codes, and `encode` the nearest code.
    codes.data.copy_(F.normalize(codes.data, dim=1))


def _start_weights(vq: JanusVQVAE, generator: torch.Generator) -> None:
    """Random convolutions that keep the variance of their inputs. Residual blocks and attention add nothing yet, and
    the decoder's layers between resolutions smooth."""
    smooth = torch.tensor([0.25, 0.5, 0.25])
    for module in vq.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear", generator=generator)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    for module in vq.modules():
        if isinstance(module, JanusVQVAEResnetBlock):
            nn.init.zeros_(module.conv2.weight)
        elif isinstance(module, JanusVQVAEAttnBlock):
            nn.init.zeros_(module.proj_out.weight)
        elif isinstance(module, JanusVQVAEConvUpsample):
            same = torch.eye(len(module.conv.weight))
            module.conv.weight.data.copy_(same[:, :, None, None] * smooth[:, None] * smooth)


def _start_codes(codes: Tensor, centres: Tensor) -> None:
    """Directions by the principal components of centres: like patches have like codes."""
    mean, directions = principal_components(centres, count=codes.shape[1] - 1)
    at = (centres - mean) @ directions.T
    codes.data.copy_(F.normalize(torch.cat([at / at.std(), torch.ones(len(at), 1)], dim=1), dim=1))


def k_means(rows: Tensor, *, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """[count, D] centres of rows [N, D].

    Source: Arthur and Vassilvitskii, k-means++, 2007. The first row is the first centre.
    """
    centres = rows[:1]
    distance = (rows - centres[0]).square().sum(dim=1)
    while len(centres) < count:
        further = rows[torch.multinomial(distance + 1e-12, 1, generator=generator)]
        centres = torch.cat([centres, further])
        distance = torch.minimum(distance, (rows - further).square().sum(dim=1))
    for _ in range(rounds):
        nearest = torch.cdist(rows, centres).argmin(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def shapes_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 and L2 of images [N, 3, 64, 64] in [-1, 1], those of the shape's pixels and of all around them times five."""
    # A shape covers a tenth of the canvas; without the weight, black is a good answer for long. With the shape's own
    # pixels alone, a disk is a good answer for a ring.
    near = F.max_pool2d(target.amax(dim=1, keepdim=True), kernel_size=2 * MARGIN_PX + 1, stride=1, padding=MARGIN_PX)
    return ((1 + 4 * (near > 0)) * ((output - target).abs() + 0.5 * (output - target) ** 2)).mean()


@torch.no_grad()
def tokens_of(vq: JanusVQVAE, images: Tensor) -> Tensor:
    """[N, 16] tokens of images in [0, 1]."""
    return torch.cat([vq.encode(2 * chunk - 1).image_tokens.view(len(chunk), -1) for chunk in images.split(CHUNK)])


@torch.no_grad()
def pixels_of(vq: JanusVQVAE, tokens: Tensor) -> Tensor:
    """[N, 3, 64, 64] images in [0, 1] of tokens [N, 16]."""
    return (torch.cat([vq.decode(chunk) for chunk in tokens.split(CHUNK)]) / 2 + 0.5).clamp(0, 1)
