"""The optimizer step: AdamW, its learning rate, gradient clipping, and skipping steps with non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from unirl.core.errors import RunFailed
from unirl.numerics.train.stack import StepReport

from .config import ShardedConfig
from .sharding import full, local

__all__ = ["ADAM", "FUSED_ON", "Optimizer", "View", "learning_rate"]

View = Callable[[Tensor], Tensor]
"""Maps a tensor laid out as a parameter is to one of the same memory that has all its ranks in its mesh."""
ADAM: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
"""Moments of torch's AdamW."""
FUSED_ON = ("cpu", "cuda")
"""Devices with a fused AdamW. It has to be asked for: of DTensors torch takes the loop over parameters."""

_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
"""Steps without overflow after which the loss scale of fp16 doubles."""


def learning_rate(config: ShardedConfig, step: int, total: int) -> float:
    """The rate of optimizer step `step` of `total`, counted from 0.

    Warm-up: lr (step + 1) / lr_warmup_steps. After it: `lr`, or from `lr` at its first step towards lr lr_min_ratio at
    `total`, linearly or along half a cosine.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.lr_warmup_steps) / max(1, total - config.lr_warmup_steps))
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.lr_min_ratio + (1.0 - config.lr_min_ratio) * left)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class Optimizer:
    """AdamW over named fp32 weights. Its schedule moves with the steps taken; a skipped step moves nothing."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        config: ShardedConfig,
        *,
        total_steps: int,
        adams: Sequence[torch.optim.Optimizer] = (),
        moments: Mapping[str, torch.dtype] = ADAM,
        view: View = _itself,
        zeros: Callable[[Tensor], dict[str, Tensor]] | None = None,
    ) -> None:
        """adams: what steps them, each its own share; torch's AdamW if empty.  moments: names and dtypes of its state
        for each parameter, besides `step`.  view: of parameters, gradients and moments, for norms and checkpoints.
        zeros: its state for a parameter, `step` included, where that is not in tensors of the parameter's class.
        """
        self.params = params
        self.num_steps = 0
        self.num_skipped = 0
        self._is_scaled = config.mixed_precision == "fp16"
        self.loss_scale = _FIRST_SCALE if self._is_scaled else 1.0
        self.steps_since_overflow = 0
        self._config = config
        self._total_steps = total_steps
        self._moments = moments
        self._view = view
        self._zeros = zeros or self._plain_zeros
        self._created: dict[str, Tensor] = {}
        self.adams = adams or [
            torch.optim.AdamW(
                # A fused step takes tensors of one mesh; split layers and whole ones are on two.
                [{"params": group} for group in _by_mesh(params.values())],
                lr=config.lr,
                betas=(config.betas[0], config.betas[1]),
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=all(param.device.type in FUSED_ON for param in params.values()) or None,
            )
        ]
        self._adam_of = {param: adam for adam in self.adams for group in adam.param_groups for param in group["params"]}

    def scale_rates(self, scales: Mapping[str, float]) -> None:
        """Scale the learning rate of each parameter by its factor, in groups of their own. scales: by name."""
        scale_of = {param: scales[name] for name, param in self.params.items()}
        for adam in self.adams:
            groups: list[dict[str, Any]] = []
            for group in adam.param_groups:
                for scale in dict.fromkeys(scale_of[param] for param in group["params"]):
                    params = [param for param in group["params"] if scale_of[param] == scale]
                    # A tensor is filled in place, by each group with its own rate.
                    lr = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
                    groups.append({**group, "params": params, "lr": lr, "lr_scale": scale})
            adam.param_groups[:] = groups

    def zero_grad(self) -> None:
        for adam in self.adams:
            adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self) -> StepReport:
        """Clip and step, or skip the step when a gradient is not finite. Clears the gradients. Collective.

        Raises RunFailed when no weight has a gradient: the loss does not depend on the trainable weights.
        """
        grads = [self._view(param.grad) for param in self.params.values() if param.grad is not None]
        if not grads:
            raise RunFailed(
                f"backend: none of the {len(self.params)} weights to train got a gradient. The loss does not depend on "
                "them; check that the model runs its `trainable` module."
            )
        shards = [local(grad) for grad in grads]
        if self._is_scaled:
            for shard in shards:
                shard.mul_(1.0 / self.loss_scale)
        norm = _total_norm(grads)
        rate = learning_rate(self._config, self.num_steps, self._total_steps)
        bound = self._config.max_grad_norm
        # As torch.nn.utils.clip_grad_norm_: the 1e-6 and the multiplication by 1 are its own.
        factor = torch.ones_like(norm) if bound is None else torch.clamp(bound / (norm + 1e-6), max=1.0)
        # Both in one transfer from the device.
        grad_norm, clipping = cast("list[float]", torch.stack([norm, factor]).tolist())
        if not math.isfinite(grad_norm):
            self._skip()
            return StepReport(grad_norm=grad_norm, grad_rms=grad_norm, skipped=True)
        if bound is not None:
            for shard in shards:
                shard.mul_(factor)
        seen_norm = grad_norm * clipping
        for adam in self.adams:
            for group in adam.param_groups:
                own = rate * group.get("lr_scale", 1.0)
                # torchao keeps a tensor, for which its compiled step is not compiled again.
                group["lr"] = group["lr"].fill_(own) if isinstance(group["lr"], Tensor) else own
            adam.step()
        # Not with the next update: rollouts and exports come first, which can use the memory.
        self.zero_grad()
        self.num_steps += 1
        self._grow_scale()
        rms = seen_norm / math.sqrt(sum(grad.numel() for grad in grads))
        # Below 10 eps Adam divides by eps rather than by the gradient's own size, and barely moves.
        small = {"grad_rms_near_eps": float(rms < 10 * self._config.eps)}
        return StepReport(grad_norm=grad_norm, grad_rms=rms, metrics={"lr": rate, **small})

    def to(self, device: torch.device) -> None:
        """Move the moments, and the step counts where a fused step reads them on the device."""
        for adam in self.adams:
            keys = (*self._moments, "step") if _is_fused(adam) else self._moments
            for state in adam.state.values():
                for key in keys:
                    state[key] = state[key].to(device)

    def moments(self, *, create: bool = False) -> dict[str, Tensor]:
        """Adam's state by name, as checkpoints have it. `create` allocates missing state, to be filled."""
        tensors: dict[str, Tensor] = {}
        for name, param in self.params.items():
            state = self._adam_of[param].state.get(param, {})
            if create:
                state = self._zeros(param)
            tensors.update({f"adam/{name}/{key}": value for key, value in state.items()})
        if create:
            self._created = tensors
        return {name: self._view(tensor) for name, tensor in tensors.items()}

    def facts(self) -> dict[str, Any]:
        """Its counters, for a checkpoint."""
        return {
            "version": self.num_steps,
            "num_skipped": self.num_skipped,
            "loss_scale": self.loss_scale,
            "steps_since_overflow": self.steps_since_overflow,
        }

    def resume(self, facts: Mapping[str, Any], moments: Mapping[str, Tensor]) -> None:
        """Replace its state with this one. moments: those of `moments(create=True)` that were filled."""
        created, self._created = self._created, {}
        for adam in self.adams:
            adam.state.clear()
        for name, param in self.params.items():
            prefix = f"adam/{name}/"
            state = {key.removeprefix(prefix): created[key] for key in moments if key.startswith(prefix)}
            if state:
                self._adam_of[param].state[param] = state
        self.num_steps = int(facts["version"])
        self.num_skipped = int(facts["num_skipped"])
        self.loss_scale = float(facts["loss_scale"])
        self.steps_since_overflow = int(facts["steps_since_overflow"])

    def _plain_zeros(self, param: Tensor) -> dict[str, Tensor]:
        made = {key: torch.zeros_like(param.detach(), dtype=dtype) for key, dtype in self._moments.items()}
        counts_on = param.device if _is_fused(self._adam_of[param]) else None
        return {"step": torch.zeros((), dtype=torch.float32, device=counts_on), **made}

    def _skip(self) -> None:
        self.num_skipped += 1
        self.zero_grad()
        if self._is_scaled:
            self.loss_scale = max(self.loss_scale / 2.0, 2.0**-14)
            self.steps_since_overflow = 0

    def _grow_scale(self) -> None:
        if self._is_scaled:
            self.steps_since_overflow += 1
            if self.steps_since_overflow >= _GROWTH_STEPS:
                self.loss_scale, self.steps_since_overflow = self.loss_scale * 2.0, 0


def _is_fused(adam: torch.optim.Optimizer) -> bool:
    return bool(adam.defaults.get("fused"))


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one mesh together; those without one are a group, too."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients and ranks. Collective. Gradients on different meshes are summed mesh by mesh."""
    norms = [full(get_total_norm(group)) for group in _by_mesh(grads)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
