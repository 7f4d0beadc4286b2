"""HunyuanImage-3.0 as a text stage and as a diffusion stage of one transformer.

Source: HunyuanImage 3.0 Technical Report, arXiv 2509.23951.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.model_files import dtype_of
from unirl.model_host.unified.model import UnifiedModel
from unirl.model_host.unified.sequence import Sampling

from .checkpoint import WEIGHTS, find, sizes_of
from .config import HunyuanImageConfig
from .encoder import Encoder
from .images import Images
from .module import TIMESTEPS, HunyuanImage, expert_pieces
from .plugin import SPEC
from .sequence import Context, layout, moves

__all__ = ["HunyuanImageModel", "build"]


def build(config: HunyuanImageConfig, *, device: Any, lazy: bool = False) -> HunyuanImageModel:
    """The model, its ViT and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanImageModel(config, device=torch.device(device), lazy=lazy)


class HunyuanImageModel(UnifiedModel[Images]):
    """Both tracks read one sequence: the system prompt, source images, the prompt's text, the turns. The numbers of
    `Stand` in its tokens stand for timesteps, VAE latents and ViT features.

    Latents: [C, H / 16, W / 16], the VAE's, normalised.
    Conditions: `latents` n times [S, C] and `latent_sizes` n times [K, 2], `features` n times [M, V] and
    `feature_sizes` n times [K, 2], of the K source images; those of an image also have `tokens`, n times [P], the
    sequence. None depends on weights that train.
    """

    spec = SPEC
    images: Images

    def __init__(self, config: HunyuanImageConfig, *, device: torch.device, lazy: bool) -> None:
        folder = find(config.path, revision=config.revision)
        self.sizes = sizes_of(folder)
        files = weight_files(folder, WEIGHTS)
        super().__init__(
            config,
            folder=folder,
            files=files,
            make=lambda: HunyuanImage(self.sizes),
            rows=self.sizes.vocab,
            pieces=expert_pieces,
            device=device,
            lazy=lazy,
        )
        vision, vae = (
            dtype_of(getattr(config, key), key=f"model.{key}", model=self.spec.name)
            for key in ("vision_dtype", "vae_dtype")
        )
        self._encoder = Encoder(
            folder,
            files=files,
            sizes=self.sizes,
            tokenizer=self.tokenizer,
            batch=config.decode_batch,
            dtypes=(vision, vae),
            device=device,
        )
        self.images, self.marks, self.stand = self._encoder.images, self._encoder.marks, self._encoder.stand
        self._longest = self._encoder.longest

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end of a text, of a recaption and of an answer: what follows the last two is an image."""
        return self.marks.end, self.marks.recaption_end, self.marks.answer_end

    @property
    def hidden_size(self) -> int:
        return self.sizes.width

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """Where a text begins with a tag, a recaption follows the end of a thought."""
        if not options["begin"]:
            return {}
        ends: list[int] = (tokens == self.marks.think_end).nonzero()[:, 0].tolist()
        return {end + 1: torch.tensor([self.marks.recaption]) for end in ends}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0 of latents [B, C, h, w], each row behind its own sequence."""
        height, width = x.shape[2:]
        count = height * width
        # The mark after an image sees it, and is seen by nothing.
        tokens, keep = self._behind(conditions["tokens"], [self.stand.time, *[self.stand.noisy] * count])
        positions, blocks = self._layout(tokens, keep)
        latents, moved = self._encoder.sources(conditions)
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

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H / 16, W / 16]. Raises RecipeError for a size without a token of its ratio."""
        return self._encoder.latent_shape(sampling)

    def _sequence(self, inputs: Inputs, row: int, sampling: Sampling) -> Context:
        return self._encoder.sequence(inputs, row, sampling)

    def _layout(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return layout(tokens, keep, marks=self.marks, stand=self.stand)

    def _sources(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        latents, moved = self._encoder.sources(conditions) if conditions else ((), [])
        if not latents:
            return {}
        return {
            "latents": latents,
            "features": torch.cat([*conditions["features"]]),
            "moves": torch.cat([part for row in moved for part in row]).to(self.device),
        }
