"""Bytes of the tensors that a step of a run holds, counted one by one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from unirl.core.loop.build import build_parts
from unirl.core.loop.prompts import read_prompts
from unirl.core.loop.requests import step_requests
from unirl.core.loop.scoring import score
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.core.specs.plan import Plan
from unirl.core.types.track import TextSegment, Track

__all__ = ["held_in_a_step", "held_on_a_rank"]


def held_on_a_rank(number: int, words: Sequence[str], store: str) -> None:
    """What one of two ranks of a recipe holds, written to `<store>-<number>.json`. To be spawned."""
    torch.set_num_threads(1)
    stored = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=stored, rank=number, world_size=2, timeout=timedelta(seconds=60))
    catalog = Catalog.discover()
    held = held_in_a_step(compose(words[0], words[1:], catalog=catalog), catalog=catalog, part=(number, 2))
    Path(f"{store}-{number}.json").write_text(json.dumps(held), encoding="utf-8")
    dist.destroy_process_group()


def held_in_a_step(plan: Plan, *, catalog: Catalog, part: tuple[int, int] = (0, 1)) -> dict[str, int]:
    """What -> bytes, in one process, over its first step: weights, gradients and state when the optimizer steps, the
    most that autograd keeps at one time, and the samples. Names are those of `unirl plan`.

    part: number of this process, and of all: it has its share of the samples.
    """
    parts = build_parts(plan, catalog=catalog)
    only, module = parts.only, parts.only.model.trainable
    prompts = read_prompts(Path(plan.data.train))[: plan.data.prompts_per_step]
    ((_, request),) = step_requests(parts, plan, prompts, step=0).items()
    share = request.num_rows // part[1]
    request = request.select(range(part[0] * share, (part[0] + 1) * share))
    track = score(only.engine.generate(request), parts.rewards, parts.reward_weights)
    track = _full_length(track, plan)
    track, _ = only.algorithm.advantages(track)
    held: Counter[str] = Counter()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = (p.grad for group in optimizer.param_groups for p in group["params"])
        held["gradients"] = size_of(grad for grad in grads if grad is not None)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held["optimizer"] = size_of(v for state in optimizer.state.values() for v in state.values() if v.ndim)

    params = [p for p in module.parameters() if p.requires_grad]
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        with kept_for_backward([*module.parameters(), *module.buffers()]) as peak:
            only.backend.train([Job(track=track, algorithm=only.algorithm)], progress=0.0)
    finally:
        for hook in hooks:
            hook.remove()
    held["activations"] = peak["bytes"]
    held["trained weights"] = size_of(params)
    held["frozen weights"] = size_of([*module.parameters(), *module.buffers()]) - held["trained weights"]
    backend: Any = only.backend
    for name, copy in backend._copies.items():
        held[name] = size_of(copy.values.values())
    components = getattr(getattr(only.model, "pipeline", None), "components", {})
    for name, part in components.items():
        if isinstance(part, torch.nn.Module) and not name.startswith("transformer"):
            held["encoders and decoder"] += size_of([*part.parameters(), *part.buffers()])
    segment = track.segment
    if isinstance(segment, TextSegment):
        fields = (segment.prompt_tokens, segment.tokens, segment.log_probs or (), segment.engine_log_probs or ())
        held["trajectories"] = sum(size_of(rows) for rows in fields)
    else:
        held["trajectories"] = track.latent.latents.nbytes
        values = [value for branch in track.conditions.values() for value in branch.values.values()]
        held["conditions"] = sum(size_of(value if isinstance(value, tuple) else [value]) for value in values)
        held["media"] = 0 if track.media is None else track.media.values.nbytes
    for part in (only.engine, *parts.rewards.values(), only.backend):
        part.close()
    return {name: size for name, size in held.items() if size}


@contextmanager
def kept_for_backward(weights: Iterable[Tensor]) -> Generator[dict[str, int]]:
    """Within the block, `bytes` is the most that was kept for a backward pass at one time, without the weights."""
    own = {weight.untyped_storage()._cdata for weight in weights if not isinstance(weight, DTensor)}
    peak = {"bytes": 0}
    users: Counter[int] = Counter()
    sizes: dict[int, int] = {}

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.key = tensor, tensor.untyped_storage()._cdata
            users[self.key] += 1
            sizes[self.key] = tensor.untyped_storage().nbytes()
            peak["bytes"] = max(peak["bytes"], sum(sizes.values()))

        def __del__(self) -> None:
            users[self.key] -= 1
            if not users[self.key]:
                sizes.pop(self.key, None)

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage()._cdata in own else Kept(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor if isinstance(one, Kept) else one):
        yield peak


def size_of(tensors: Iterable[Tensor]) -> int:
    """Of sharded ones, this rank's part."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def _full_length(track: Track, plan: Plan) -> Track:
    """Texts with as many tokens as the recipe allows."""
    segment = track.segment
    if not isinstance(segment, TextSegment):
        return track
    length = plan.only.sampling.max_new_tokens  # type: ignore[union-attr]
    tokens = tuple((torch.arange(length) % 7) + 3 for _ in segment.tokens)
    log_probs = tuple(torch.zeros(length) for _ in tokens)
    changes = {name: log_probs for name in ("log_probs", "engine_log_probs") if getattr(segment, name) is not None}
    return dataclasses.replace(track, segment=dataclasses.replace(segment, tokens=tokens, mask=None, **changes))
