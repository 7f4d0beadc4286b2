"""A denoiser of 5,000 weights in plain torch: what algorithms and backends are tried on, and a whole model part.

It has what real ones have, at a size where a step takes a millisecond: blocks that are wrapped one by one, projections
that LoRA adapts, dropout that has to be off, text that matters to every element, any image size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import DiffusionModel
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.spec import Miniature, ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["SPEC", "TinyDenoiser", "TinyDenoiserConfig", "build", "load", "write"]

CHANNELS, TEXT, WIDTH, FACTOR = 4, 6, 16, 8
WEIGHTS_FILE = "tiny-denoiser.safetensors"


@dataclass
class TinyDenoiserConfig(PartConfig):
    path: str = "???"
    """Folder that `write` filled."""


SPEC = ModelSpec(
    name="tiny-denoiser",
    summary="A denoiser of a few thousand weights, for trying algorithms and backends",
    build=f"{__name__}:build",
    config=f"{__name__}:TinyDenoiserConfig",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.LAZY_BUILD},
    tracks={"image": "latent"},
    inputs={"image": {"source": "takes"}},
    continues=frozenset({"image"}),
    trainable="net",
    lora_targets=("up", "down"),
    wrap_blocks=("Block",),
    tiny=Miniature(
        write=f"{__name__}:write",
        sampling={"height": 24, "width": 16, "num_inference_steps": 4},
        lora_layers=4,
        wrap_blocks=2,
    ),
    reference="the formulas of its docstrings",
)


class Block(nn.Module):
    """Each element's features, then a mean over the elements of the sample mixed in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = hidden + hidden.mean(dim=1, keepdim=True)
        return hidden + self.down(torch.tanh(self.up(mixed)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(CHANNELS + TEXT + 1, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Linear(WIDTH, CHANNELS)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, text: Tensor, sigma: Tensor) -> Tensor:
        """x: [B, C, h, w].  text: [B, TEXT].  sigma: [B].  Returns [B, C, h, w]."""
        tokens = x.flatten(2).transpose(1, 2)
        shared = torch.cat([text, sigma[:, None]], dim=1)[:, None].expand(-1, tokens.shape[1], -1)
        hidden = self.enter(torch.cat([tokens, shared.to(tokens.dtype)], dim=2))
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(self.dropout(hidden)).transpose(1, 2).view_as(x)


class TinyDenoiser(DiffusionModel):
    """A `unirl.core.roles.DiffusionModel`. Condition: `text` [n, 6], a fixed random vector of each input:
    of its text, the names of its images and the tokens of its turns."""

    spec: ModelSpec = SPEC

    def __init__(self, *, seed: int = 0, device: Any = "cpu", lazy: bool = False) -> None:
        """lazy: the net is without values until `fill`, see `unirl.core.roles.Model`."""
        with torch.random.fork_rng(devices=[]):
            # Not `torch.manual_seed`, which notes a stack trace for each kind of device: milliseconds, of thousands.
            torch.default_generator.manual_seed(seed)
            self.net = Net().eval()
        self.device = torch.device(device)
        self.values = {name: value.clone() for name, value in self.net.state_dict().items()} if lazy else {}
        """Values of the net, where it was built lazily."""
        self.net.to("meta" if lazy else self.device)

    @property
    def trainable(self) -> nn.Module:
        return self.net

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            value = self.values[name].to(tensor)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)

    def encode(self, inputs: Inputs, *, sampling: LatentSamplingConfig) -> dict[str, Tensor]:
        given = zip(inputs.texts, inputs.media, inputs.turns or ((),) * len(inputs), strict=True)
        rows = [
            _vector("".join([text, *(ref.uri for ref in media), *(f" {turn.tokens}" for turn in turns)]))
            for text, media, turns in given
        ]
        return {"text": torch.stack(rows).to(self.device)}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return self.net(x, conditions["text"], sigma).float()

    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        """Evenly spaced sigmas under a static shift s: s t / (1 + (s - 1) t)."""
        shift = sampling.schedule.shift or 1.0
        even = torch.linspace(1, 0, sampling.num_inference_steps + 1, dtype=torch.float64)
        return (shift * even / (1 + (shift - 1) * even)).float()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        if sampling.frames != 1:
            raise RecipeError(
                f"sampling.frames: got {sampling.frames}, expected 1; tiny-denoiser generates single images."
            )
        for name, size in (("height", sampling.height), ("width", sampling.width)):
            if size < FACTOR or size % FACTOR:
                raise RecipeError(f"sampling.{name}: got {size}, expected a multiple of {FACTOR}.")
        return CHANNELS, sampling.height // FACTOR, sampling.width // FACTOR

    def decode(self, latents: Tensor) -> Tensor:
        """The first three channels, squeezed into [0, 1] and enlarged. [N, 3, 8 h, 8 w]."""
        return latents[:, :3].float().sigmoid().repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3)


def build(config: TinyDenoiserConfig, *, device: Any, lazy: bool = False) -> TinyDenoiser:
    return load(TinyDenoiser(device=device, lazy=lazy), config)


def load(model: TinyDenoiser, config: TinyDenoiserConfig) -> TinyDenoiser:
    """The model with the weights of its checkpoint, or ready to be filled with them."""
    stored = load_file(Path(config.path) / WEIGHTS_FILE)
    if model.values:
        model.values = stored
    else:
        model.net.load_state_dict(stored)
    return model


def write(folder: Path, *, seed: int) -> None:
    """Write random weights; same seed, same bytes."""
    save_file(TinyDenoiser(seed=seed).net.state_dict(), Path(folder) / WEIGHTS_FILE)


def _vector(prompt: str) -> Tensor:
    """[TEXT] numbers in [-1, 1] that depend on the prompt alone."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=2 * TEXT).digest()
    numbers = [int.from_bytes(digest[2 * i : 2 * i + 2], "little") / 32767.5 - 1 for i in range(TEXT)]
    return torch.tensor(numbers)
