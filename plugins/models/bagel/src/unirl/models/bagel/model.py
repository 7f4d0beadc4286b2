"""BAGEL as a text stage and as a diffusion stage of one transformer.

Source: BAGEL, arXiv 2505.14683, and its published inference code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.unified.model import UnifiedModel

from .checkpoint import WEIGHTS, find, sizes_of
from .config import BagelConfig
from .encoder import Encoder
from .images import NAMES
from .module import Bagel
from .plugin import SPEC
from .sequence import layout
from .vision import grid_places

__all__ = ["BagelModel", "build"]


def build(config: BagelConfig, *, device: Any, lazy: bool = False) -> BagelModel:
    """The model, its ViT and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return BagelModel(config, device=torch.device(device), lazy=lazy)


class BagelModel(UnifiedModel[Encoder]):
    """Both tracks read one sequence: the system prompt, source images, the prompt's text, the turns. Numbers of the
    vocabulary's size and above in its tokens stand for VAE latents and ViT features.

    Latents: [p p C, H / 16, W / 16], patches of the VAE's normalised latents.
    Conditions: `latents` n times [S, p p C] and `latent_places` n times [S], `features` n times [M, V] and
    `feature_places` n times [M], of the source images, S = M = 0 without any; those of an image also have `tokens`,
    n times [P], the sequence. None depends on weights that train.
    """

    spec = SPEC

    def __init__(self, config: BagelConfig, *, device: torch.device, lazy: bool) -> None:
        folder = find(config.path, revision=config.revision)
        self.sizes = sizes_of(folder)
        super().__init__(
            config,
            folder=folder,
            files=weight_files(folder, WEIGHTS),
            make=lambda: Bagel(self.sizes),
            encoder=partial(Encoder, sizes=self.sizes),
            rows=self.sizes.vocab,
            device=device,
            lazy=lazy,
        )
        self.marks = self.encoder.marks

    # Text.

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self.marks.end,)

    @property
    def hidden_size(self) -> int:
        return self.sizes.width

    # Images.

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0 of latents [B, p p C, h, w], each row behind its own sequence."""
        rows, _, height, width = x.shape
        count = height * width
        marks = self.marks
        tokens, keep = self._behind(conditions["tokens"], [marks.image_start, *[marks.latent] * count, marks.image_end])
        positions, blocks = self._layout(tokens, keep)
        places = grid_places(height, width, side=self.sizes.latent_side).to(self.device)
        noisy = x.flatten(2).transpose(1, 2)
        sources: Sequence[Tensor] = conditions["latents"]
        lengths = [(len(source), count) for source in sources]
        # Sources are at noise level 0, the first of `timesteps`.
        levels = [level for row in range(rows) for level in (0, row + 1)]
        sizes = torch.tensor(lengths).flatten()
        is_target = torch.tensor([False, True] * rows).repeat_interleave(sizes)
        images = {
            "latents": torch.cat([part for row in range(rows) for part in (sources[row].to(noisy), noisy[row])]),
            "latent_places": torch.cat([part for own in conditions["latent_places"] for part in (own, places)]),
            "timesteps": torch.cat([sigma.new_zeros(1), sigma]).float(),
            "levels": torch.tensor(levels).repeat_interleave(sizes).to(self.device),
            **{name: torch.cat([*conditions[name]]) for name in ("features", "feature_places")},
        }
        with self._precision():
            output: Tensor = self.transformer(
                "velocity",
                tokens=tokens,
                keep=keep,
                positions=positions,
                blocks=blocks,
                images=images,
                index=is_target.nonzero()[:, 0].to(self.device),
            )
        return output.float().view(rows, count, -1).transpose(1, 2).reshape(x.shape)

    # Sequences.

    def _layout(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return layout(tokens, keep, marks=self.marks)

    def _sources(self, conditions: Mapping[str, Any]) -> dict[str, Tensor]:
        images = {name: torch.cat([*conditions[name]]) for name in NAMES} if conditions else {}
        if not any(map(len, images.values())):
            return {}
        return {
            **images,
            "timesteps": torch.zeros(1, device=self.device),
            "levels": torch.zeros(len(images["latents"]), dtype=torch.int64, device=self.device),
        }
