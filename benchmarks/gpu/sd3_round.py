# diffusers exports its classes lazily.
# pyright: reportPrivateImportUsage=false
"""One Flow-GRPO round on SD3.5, as the loops beside UniRL run it: the same numbers as the runs `sd3-*` in `runs.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from measure import DEVICE, FORWARD_FLOP, now, peaks_gib, throughput, write_measures
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

__all__ = [
    "DTYPE",
    "ROUND",
    "TINY",
    "Sd3Round",
    "adapted_transformer",
    "adapters",
    "conditions",
    "timed_rounds",
    "update",
]

DTYPE = torch.bfloat16
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Linear layers of attention that flow_grpo adapts, `config/grpo.py`."""


@dataclass(frozen=True, kw_only=True)
class Sd3Round:
    """Samples get noise at `trained_steps` and none at the other steps, and are then trained on in two updates."""

    samples: int = 32
    num_steps: int = 10
    trained_steps: tuple[int, ...] = (1, 2, 4)
    pixels: int = 512
    tokens: int = 333
    """77 of CLIP and 256 of T5."""
    forward_batch: int = 16
    micro_batch: int = 8
    updates: int = 2
    num_rounds: int = 3
    noise_level: float = 0.7
    clip_range: float = 1e-4
    learning_rate: float = 3e-4


ROUND = Sd3Round()
TINY = Sd3Round(samples=8, pixels=64, tokens=93, forward_batch=4, micro_batch=2)


def adapted_transformer(folder: Path) -> Any:
    """The frozen transformer in bf16 with LoRA of rank 32 in fp32."""
    net: Any = SD3Transformer2DModel.from_pretrained(
        folder, subfolder="transformer", torch_dtype=DTYPE, trust_remote_code=False
    )
    net = net.to(DEVICE).eval().requires_grad_(False)
    targets = [f"attn.{name}" for name in TARGETS]
    inject_adapter_in_model(LoraConfig(r=32, lora_alpha=64, target_modules=targets, init_lora_weights="gaussian"), net)
    for param in adapters(net):
        param.data = param.data.float()
    return net


def adapters(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def conditions(net: Any, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random prompt embeddings [rows, tokens, width] and pooled ones [rows, width]: their values cost the same."""
    return (
        torch.randn(rows, tokens, net.config.joint_attention_dim, device=DEVICE, dtype=DTYPE),
        torch.randn(rows, net.config.pooled_projection_dim, device=DEVICE, dtype=DTYPE),
    )


def update(
    log_prob: Callable[[slice, int], Tensor],
    old: Mapping[int, Tensor],
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    *,
    shape: Sd3Round,
    number: int,
) -> float:
    """One clipped policy-gradient step on a share of the samples, a backward for each scored step of a micro-batch.

    log_prob: of these rows at this step, with a gradient.  old: [samples] by step.  number: counted from 0.
    Returns the largest |log_prob - old|.
    """
    share = shape.samples // shape.updates
    advantages = torch.randn(shape.samples, device=DEVICE)
    num_losses = share // shape.micro_batch * len(shape.trained_steps)
    mismatch = torch.zeros((), device=DEVICE)
    optimizer.zero_grad(set_to_none=True)
    for first in range(number * share, (number + 1) * share, shape.micro_batch):
        rows = slice(first, first + shape.micro_batch)
        for step in shape.trained_steps:
            new = log_prob(rows, step)
            mismatch = torch.maximum(mismatch, (new.detach() - old[step][rows]).abs().max())
            ratio = (new - old[step][rows]).exp()
            clipped = ratio.clamp(1 - shape.clip_range, 1 + shape.clip_range)
            loss = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * clipped).mean()
            (loss / num_losses).backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    return float(mismatch)


def timed_rounds(
    generate: Callable[[], Mapping[int, Tensor]],
    train: Callable[[Mapping[int, Tensor]], float],
    *,
    shape: Sd3Round,
    out: Path,
    note: str,
) -> None:
    """Run the rounds and leave their numbers.

    generate: returns the log-probs [samples] of each scored step.  train: takes them, and returns the mismatch of the
    first update, whose weights are those that sampled.
    """
    rounds: list[dict[str, float]] = []
    mismatch = 0.0
    for _ in range(shape.num_rounds):
        began = now()
        old = generate()
        sampled = now()
        mismatch = max(mismatch, train(old))
        ended = now()
        rounds.append({"generate_s": sampled - began, "train_s": ended - sampled, "round_s": ended - began})
    measures = throughput(
        rounds,
        rows=shape.samples,
        flop=FORWARD_FLOP["sd35-medium"] if shape == ROUND else 0,
        generated=shape.num_steps,
        # With LoRA a backward costs one forward. The old log-probs are those of sampling.
        trained=2 * len(shape.trained_steps),
    )
    write_measures(out, {**measures, **peaks_gib(), "logp_mismatch_max": mismatch}, rounds=rounds, note=note)
