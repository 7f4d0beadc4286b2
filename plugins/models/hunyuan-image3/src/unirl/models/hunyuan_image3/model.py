"""HunyuanImage-3.0 as a text stage and as a diffusion stage of one transformer.

Source: HunyuanImage 3.0 Technical Report, arXiv 2509.23951.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.unified.model import UnifiedModel

from .checkpoint import WEIGHTS, find, sizes_of
from .config import HunyuanImageConfig
from .encoder import Encoder
from .module import TIMESTEPS, HunyuanImage, expert_pieces
from .plugin import SPEC
from .sequence import layout, moves

__all__ = ["HunyuanImageModel", "build"]


def build(config: HunyuanImageConfig, *, device: Any, lazy: bool = False) -> HunyuanImageModel:
    """The model, its ViT and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanImageModel(config, device=torch.device(device), lazy=lazy)


class HunyuanImageModel(UnifiedModel[Encoder]):
    """Both tracks read one sequence: the system prompt, source images, the prompt's text, the turns. The numbers of
    `Stand` in its tokens stand for timesteps, VAE latents and ViT features.

    Latents: [C, H / 16, W / 16], the VAE's, normalised.
    Conditions: `latents` n times [S, C] and `latent_sizes` n times [K, 2], `features` n times [M, V] and
    `feature_sizes` n times [K, 2], of the K source images; those of an image also have `tokens`, n times [P], the
    sequence. None depends on weights that train.
    """

    spec = SPEC

    def __init__(self, config: HunyuanImageConfig, *, device: torch.device, lazy: bool) -> None:
        folder = find(config.path, revision=config.revision)
        self.sizes = sizes_of(folder)
        super().__init__(
            config,
            folder=folder,
            files=weight_files(folder, WEIGHTS),
            make=lambda: HunyuanImage(self.sizes),
            encoder=partial(Encoder, sizes=self.sizes),
            rows=self.sizes.vocab,
            pieces=expert_pieces,
            device=device,
            lazy=lazy,
        )
        self.marks, self.stand = self.encoder.marks, self.encoder.stand

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end of a text, of a recaption and of an answer: what follows the last two is an image."""
        return self.marks.end, self.marks.recaption_end, self.marks.answer_end

    @property
    def hidden_size(self) -> int:
        return self.sizes.width

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0 of latents [B, C, h, w], each row behind its own sequence."""
        height, width = x.shape[2:]
        count = height * width
        # The mark after an image sees it, and is seen by nothing.
        tokens, keep = self._behind(conditions["tokens"], [self.stand.time, *[self.stand.noisy] * count])
        positions, blocks = self._layout(tokens, keep)
        latents, moved = self.encoder.sources(conditions)
        own = moves(height, width, count)
        images = {
            "latents": latents,
            "features": torch.cat([*conditions["features"]]),
            "noisy": x,
            "timesteps": TIMESTEPS * sigma.float(),
            "moves": torch.cat([part for row in moved for part in (*row, own)]).to(self.device),
        }
        with self._precision():
            output: Tensor = self.transformer(
                "velocity", tokens=tokens, keep=keep, positions=positions, blocks=blocks, images=images
            )
        return output.float()

    def _layout(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return layout(tokens, keep, marks=self.marks, stand=self.stand)

    def _sources(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        latents, moved = self.encoder.sources(conditions) if conditions else ((), [])
        if not latents:
            return {}
        return {
            "latents": latents,
            "features": torch.cat([*conditions["features"]]),
            "moves": torch.cat([part for row in moved for part in row]).to(self.device),
        }
