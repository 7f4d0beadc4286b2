# diffusers exports its classes lazily.
# pyright: reportPrivateImportUsage=false
"""The round of `sd3_round.py` in plain PyTorch: diffusers' transformer, peft's adapters and nothing else.

    python benchmarks/gpu/train_bare_sd3.py FOLDER --out FILE [--compile] [--tiny]

No scores, no seeds for each sample, no checks: the least that a framework can be compared with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from measure import DEVICE
from sd3_round import DTYPE, ROUND, TINY, Sd3Round, adapted_transformer, adapters, conditions, timed_rounds, update
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape = TINY if options.tiny else ROUND
    loop = BareLoop(options.folder, shape, compiles=options.compile)
    note = f"plain PyTorch{', blocks compiled' if options.compile else ''}; old log-probs are those of sampling"
    timed_rounds(loop.generate, loop.train, shape=shape, out=options.out, note=note)


class BareLoop:
    """The SDE sampling step of Flow-GRPO (arXiv 2505.05470) on SD3's schedule with a shift of 3."""

    def __init__(self, folder: Path, shape: Sd3Round, *, compiles: bool) -> None:
        self.shape = shape
        self.net = adapted_transformer(folder)
        vae: Any = AutoencoderKL.from_pretrained(
            folder, subfolder="vae", torch_dtype=torch.float32, trust_remote_code=False
        )
        self.vae = vae.to(DEVICE)
        if compiles:
            for block in self.net.transformer_blocks:
                block.compile()
        self.params = adapters(self.net)
        fused = DEVICE == "cuda"
        self.adam = torch.optim.AdamW(self.params, lr=shape.learning_rate, weight_decay=1e-4, fused=fused)
        self.prompts, self.pooled = conditions(self.net, shape.samples, shape.tokens)
        line = torch.linspace(1, 1 / shape.num_steps, shape.num_steps)
        self.sigmas = [*(3 * line / (1 + 2 * line)).tolist(), 0.0]
        self.points: dict[int, tuple[Tensor, Tensor]] = {}
        """Step -> latents before it and after it, [samples, 16, H, W]."""

    @torch.no_grad()
    def generate(self) -> Mapping[int, Tensor]:
        side = self.shape.pixels // 8
        points: dict[int, list[tuple[Tensor, Tensor]]] = {step: [] for step in self.shape.trained_steps}
        log_probs: dict[int, list[Tensor]] = {step: [] for step in self.shape.trained_steps}
        for first in range(0, self.shape.samples, self.shape.forward_batch):
            rows = slice(first, first + self.shape.forward_batch)
            latents = torch.randn(self.shape.forward_batch, 16, side, side, device=DEVICE)
            for step in range(self.shape.num_steps):
                velocity = self.velocity(latents, rows, step)
                if step not in points:
                    latents = latents + (self.sigmas[step + 1] - self.sigmas[step]) * velocity
                    continue
                mean, std = self.transition(latents, velocity, step)
                after = mean + std * torch.randn_like(mean)
                points[step].append((latents, after))
                log_probs[step].append(log_density(after, mean, std))
                latents = after
            for part in latents.split(8):
                decoded = self.vae.decode(part / 1.5305 + 0.0609, return_dict=False)[0]
                (decoded / 2 + 0.5).clamp(0, 1).cpu()
        self.points = {
            step: (torch.cat([before for before, _ in pairs]), torch.cat([after for _, after in pairs]))
            for step, pairs in points.items()
        }
        return {step: torch.cat(parts) for step, parts in log_probs.items()}

    def train(self, old: Mapping[int, Tensor]) -> float:
        """Returns the mismatch of the first update; the second one's weights are no longer those that sampled."""
        mismatches = [
            update(self.log_prob, old, self.adam, self.params, shape=self.shape, number=number)
            for number in range(self.shape.updates)
        ]
        return mismatches[0]

    def log_prob(self, rows: slice, step: int) -> Tensor:
        before, after = (points[rows] for points in self.points[step])
        mean, std = self.transition(before, self.velocity(before, rows, step), step)
        return log_density(after, mean, std)

    def velocity(self, latents: Tensor, rows: slice, step: int) -> Tensor:
        """fp32, like latents."""
        with torch.autocast(DEVICE, dtype=DTYPE):
            return self.net(
                hidden_states=latents.to(DTYPE),
                timestep=torch.full((len(latents),), 1000 * self.sigmas[step], device=DEVICE),
                encoder_hidden_states=self.prompts[rows],
                pooled_projections=self.pooled[rows],
                return_dict=False,
            )[0].float()

    def transition(self, latents: Tensor, velocity: Tensor, step: int) -> tuple[Tensor, float]:
        """Mean and standard deviation of the next latents. At sigma 1 the noise is that of the next sigma."""
        sigma, dt = self.sigmas[step], self.sigmas[step + 1] - self.sigmas[step]
        variance = self.shape.noise_level**2 * sigma / (1 - (self.sigmas[1] if sigma >= 1 else sigma))
        mean = latents * (1 + variance / (2 * sigma) * dt) + velocity * (1 + variance * (1 - sigma) / (2 * sigma)) * dt
        return mean, (variance * -dt) ** 0.5


def log_density(value: Tensor, mean: Tensor, std: float) -> Tensor:
    """[rows], the mean over elements, without the constants, which cancel in the ratio."""
    return -((value.detach() - mean) ** 2).mean(dim=(1, 2, 3)) / (2 * std**2)


if __name__ == "__main__":
    main()
