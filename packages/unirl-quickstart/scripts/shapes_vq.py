"""The VQ model of the image-token quickstart: shapes of 64 x 64 pixels as 4 x 4 tokens of a codebook, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import minimize, shapes_loss
from transformers.models.janus.modeling_janus import JanusVQVAE
from unirl.rewards.rules.shapes_world import RADIUS_PX, Scene, draw, place_of

__all__ = ["draw_scenes", "pixels_of", "tokens_of", "train_vq"]

CHUNK = 64
"""Images of a forward without gradient."""


def draw_scenes(scenes: Sequence[Scene], *, count: int, jitter: float, generator: torch.Generator) -> Tensor:
    """[len(scenes) * count, 3, 64, 64] images in [0, 1], `count` of each scene in turn.

    jitter: share of the range of sizes and positions that `render` draws from.
    """
    images: list[Tensor] = []
    for scene in scenes:
        radius, along, across = jitter * (2 * torch.rand(3, count, generator=generator) - 1)
        x, y = place_of(scene.place, along=along, across=across)
        low, high = RADIUS_PX
        size = (low + high) / 2 + radius * (high - low) / 2
        images.append(draw(scene, center_x=x, center_y=y, radius=size[:, None, None]))
    return torch.cat(images)


def train_vq(
    vq: JanusVQVAE, images: Tensor, *, steps: int, decoder_steps: int, batch: int, noise: float, seed: int
) -> None:
    """Trains on images in [0, 1]: first as an autoencoder whose latents are directions with some noise; the codebook is
    then the k-means of these directions, and the decoder is trained on with its codes alone.

    noise: standard deviation of each of the latents' numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in vq.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, a=5**0.5, generator=generator)
            assert module.bias is not None
            nn.init.zeros_(module.bias)

    def chosen() -> Tensor:
        return torch.randint(len(images), (batch,), generator=generator)

    def as_autoencoder(step: int) -> Tensor:
        target = images[chosen()]
        latents = _directions(vq, target)
        latents = F.normalize(latents + noise * torch.randn(latents.shape, generator=generator), dim=1)
        return shapes_loss(vq.decoder(vq.post_quant_conv(latents)), 2 * target - 1)

    settings = {"weight_decay": 0.0, "print_every": 100}
    minimize(vq.parameters(), as_autoencoder, name="autoencoder", steps=steps, learning_rate=3e-3, **settings)
    with torch.no_grad():
        latents = torch.cat([_directions(vq, chunk) for chunk in images.split(CHUNK)])
        rows = latents.permute(0, 2, 3, 1).flatten(0, 2)
        vq.quantize.embedding.weight.copy_(
            spherical_k_means(rows, count=vq.quantize.num_embeddings, rounds=20, generator=generator)
        )
    tokens = tokens_of(vq, images)

    def of_codes(step: int) -> Tensor:
        rows = chosen()
        return shapes_loss(vq.decode(tokens[rows]), 2 * images[rows] - 1)

    trained = chain(vq.post_quant_conv.parameters(), vq.decoder.parameters())
    minimize(trained, of_codes, name="decoder", steps=decoder_steps, learning_rate=2e-3, **settings)


def spherical_k_means(rows: Tensor, *, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """[count, D] directions of unit length that unit rows [N, D] gather around, started as k-means++ does.

    Source: Hornik et al., Spherical k-Means Clustering, 2012.
    """
    centres = rows[:1]
    distance = 2 - 2 * rows @ centres[0]
    while len(centres) < count:
        further = rows[torch.multinomial(distance.clamp_min(1e-12), 1, generator=generator)]
        centres = torch.cat([centres, further])
        distance = torch.minimum(distance, 2 - 2 * rows @ further[0])
    for _ in range(rounds):
        nearest = (rows @ centres.T).argmax(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        is_empty = torch.bincount(nearest, minlength=count) == 0
        centres = torch.where(is_empty[:, None], centres, F.normalize(sums, dim=1))
    return centres


@torch.no_grad()
def tokens_of(vq: JanusVQVAE, images: Tensor) -> Tensor:
    """[N, 16] tokens of images in [0, 1]."""
    return torch.cat([vq.encode(2 * chunk - 1).image_tokens.view(len(chunk), -1) for chunk in images.split(CHUNK)])


@torch.no_grad()
def pixels_of(vq: JanusVQVAE, tokens: Tensor) -> Tensor:
    """[N, 3, 64, 64] images in [0, 1] of tokens [N, 16]."""
    return (torch.cat([vq.decode(chunk) for chunk in tokens.split(CHUNK)]) / 2 + 0.5).clamp(0, 1)


def _directions(vq: JanusVQVAE, images: Tensor) -> Tensor:
    """[N, D, 4, 4] latents of unit length: of codes, `decode` sees the direction alone."""
    return F.normalize(vq.quant_conv(vq.encoder(2 * images - 1)), dim=1)
