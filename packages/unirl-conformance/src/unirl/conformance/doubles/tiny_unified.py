"""The tiny decoder with a second head: completions and latents of one trunk, as models that write and draw have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

from .tiny_decoder import SPEC as DECODER
from .tiny_decoder import WIDTH, TextNet, TinyDecoder, TinyDecoderConfig
from .tiny_denoiser import CHANNELS, TEXT, TinyDenoiser

__all__ = ["SPEC", "TinyUnified", "build", "write"]

WEIGHTS_FILE = "tiny-unified.safetensors"
SPEC = replace(
    DECODER,
    name="tiny-unified",
    summary="A decoder of some ten thousand weights that also draws, for trying engines and backends",
    build=f"{__name__}:build",
    capabilities=DECODER.capabilities | {Cap.LATENT_STAGE},
    tracks={"text": "text", "image": "latent"},
    tiny=Miniature(
        write=f"{__name__}:write",
        sampling={"height": 24, "width": 16, "max_new_tokens": 8},
        lora_layers=8,
        wrap_blocks=2,
    ),
)


class UnifiedNet(TextNet):
    def __init__(self) -> None:
        super().__init__()
        self.enter_latents = nn.Linear(CHANNELS + TEXT + 1, WIDTH)
        self.leave_latents = nn.Linear(WIDTH, CHANNELS)

    def forward(self, *args: Any, latents: tuple[Tensor, Tensor, Tensor] | None = None, **settings: Any) -> Any:
        """As `TextNet`, or the velocity [B, C, h, w].  latents: x [B, C, h, w], text [B, TEXT] and sigma [B]."""
        if latents is None:
            return super().forward(*args, **settings)
        x, text, sigma = latents
        elements = x.flatten(2).transpose(1, 2)
        length = elements.shape[1]
        shared = torch.cat([text, sigma[:, None]], dim=1)[:, None].expand(-1, length, -1)
        hidden = self.enter_latents(torch.cat([elements, shared], dim=2))
        # Full attention within a sample.
        visible = torch.ones(len(x), length, length, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            hidden, _ = block(hidden, visible, None)
        return self.leave_latents(hidden).transpose(1, 2).view_as(x)


class TinyUnified(TinyDecoder, TinyDenoiser):
    """A `unirl.core.roles.TextModel` and `DiffusionModel`. Its texts and its latents share the blocks."""

    spec: ModelSpec = SPEC
    net_class = UnifiedNet

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return self.net(latents=(x, conditions["text"], sigma)).float()


def build(config: TinyDecoderConfig, *, device: Any) -> TinyUnified:
    model = TinyUnified(device=device)
    model.net.load_state_dict(load_file(Path(config.path) / WEIGHTS_FILE))
    return model


def write(folder: Path, *, seed: int) -> None:
    """Write random weights; same seed, same bytes."""
    save_file(TinyUnified(seed=seed).net.state_dict(), Path(folder) / WEIGHTS_FILE)
