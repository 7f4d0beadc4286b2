"""Counts what backpropagation through the sampler keeps, against the number of gradient steps K and their depth.

Bytes that autograd saves in the forward pass of the loss, by saved-tensor hooks, and the peak of all tensors alive in
forward and backward, in MB beyond those alive before; 8 samples of the quickstart, whose latents take 8 KB.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unirl.core.data.prompts import read_prompts
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.track import Track
from unirl.loop.build import build_parts
from unirl.loop.requests import step_requests
from unirl.loop.scoring import score
from unirl.numerics.diffusion.through_sampler import through_sampler, through_stored_inputs
from unirl.numerics.train.track_replay import TrackReplay

STEPS = 40
ROWS = 8


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    catalog = Catalog.discover()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"sampling.num_inference_steps={STEPS}", f"data.prompts_per_step={ROWS}", f"run.dir={folder}/run"]
        plan = compose("quickstart-draft", words, catalog=catalog)
        parts = build_parts(plan, catalog=catalog)
        prompts = read_prompts(Path(plan.data.train))[:ROWS]
        (request,) = step_requests(parts, plan, prompts, step=0).values()
        track = score(parts.only.engine.generate(request), parts.rewards, parts.reward_weights)
        forward = TrackReplay(parts.only.model, stacked=False, policy_context=parts.only.backend.policy)
        print(f"{'steps with gradient':44} {'saved':>8} {'peak':>8}   saved and peak with checkpointing, MB")
        for name, steps, is_stored in CASES:
            cells = [measure(track, forward, parts.only.model, steps, is_stored, on) for on in (False, True)]
            print(f"{name:44} {cells[0][0]:8.1f} {cells[0][1]:8.1f} {cells[1][0]:8.1f} {cells[1][1]:8.1f}")
        for part in (parts.only.engine, *parts.rewards.values(), parts.only.backend):
            part.close()


CASES: Sequence[tuple[str, Sequence[int], bool]] = (
    *((f"draft, last {k}", range(STEPS - k, STEPS), False) for k in (1, 2, 4, 8)),
    *((f"drtune, {k} spread over {STEPS}", range(0, STEPS, STEPS // k), True) for k in (1, 2, 4, 8)),
    *((f"drtune, 4, the first {depth} before the end", tuple(range(STEPS - depth, STEPS, depth // 4)), True)
      for depth in (4, 20, 40)),
)  # fmt: skip


def measure(
    track: Track, forward: Any, model: Any, steps: Sequence[int], is_stored: bool, checkpointed: bool
) -> tuple[float, float]:
    """MB saved by the forward pass, and the peak of forward and backward."""
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return forward.velocity(track, x, sigma, guided=True)

    gc.collect()
    weights = [weight for weight in model.trainable.parameters() if weight.requires_grad]
    with Alive() as alive:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if is_stored:
                result = through_stored_inputs(
                    velocity, track.latent, gradient_steps=steps, stacked=False, checkpointed=checkpointed
                )
            else:
                result = through_sampler(velocity, track.latent, first=steps[0], checkpointed=checkpointed)
        torch.autograd.grad(result.square().sum(), weights, allow_unused=True)
    return saved / 1e6, alive.peak / 1e6


if __name__ == "__main__":
    main()
