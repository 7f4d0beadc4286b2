"""Bytes of the tensors that a step of a run holds, counted one by one."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensor_meter import Meter, references, stored
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop
from unirl.core.data.prompts import read_prompts
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.core.specs.plan import Plan
from unirl.core.types.track import TextSegment, Track
from unirl.loop.build import build_parts
from unirl.loop.requests import step_requests
from unirl.loop.scoring import score

__all__ = ["held_in_a_step", "held_on_a_rank", "kept_for_backward"]


def held_on_a_rank(number: int, words: Sequence[str], store: str) -> None:
    """Write the memory of one of two ranks of a recipe to `<store>-<number>.json`. Each rank is a
    process: `python held_memory.py NUMBER STORE WORDS...`."""
    torch.set_num_threads(1)
    stored = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=stored, rank=number, world_size=2, timeout=timedelta(seconds=60))
    catalog = Catalog.discover()
    held = held_in_a_step(compose(words[0], words[1:], catalog=catalog), catalog=catalog, part=(number, 2))
    Path(f"{store}-{number}.json").write_text(json.dumps(held), encoding="utf-8")
    dist.destroy_process_group()


def held_in_a_step(plan: Plan, *, catalog: Catalog, part: tuple[int, int] = (0, 1)) -> dict[str, int]:
    """Item -> bytes, in one process, over its first step: weights, gradients and state when the optimizer steps, the
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
    backend: Any = only.backend
    auxiliaries = {"critic": backend._critic, "fake score": backend._fake_score}
    moments: dict[str, int] = {}

    def owner(optimizer: torch.optim.Optimizer) -> str:
        own = (name for name, one in auxiliaries.items() if one is not None and optimizer in one.optimizer.adams)
        return next(own, "")

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = (p.grad for group in optimizer.param_groups for p in group["params"])
        # A fake score has those of the parameters in whose place it is.
        name = "critic gradients" if owner(optimizer) == "critic" else "gradients"
        held[name] = size_of(grad for grad in grads if grad is not None)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        state = size_of(v for state in optimizer.state.values() for v in state.values() if v.ndim)
        moments[owner(optimizer) or "optimizer"] = state

    # The rollout has allocated them.
    hosts, buffers = (backend._offloaded._hosts, backend._offloaded._buffers) if backend._offloaded else ([], [])
    params = [p for p in module.parameters() if p.requires_grad]
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        judging = [*backend._critic.net.parameters()] if backend._critic else []
        with kept_for_backward(module, *buffers, *judging) as kept:
            only.backend.train([Job(track=track, algorithm=only.algorithm)], progress=0.0)
    finally:
        for hook in hooks:
            hook.remove()
    held.update(moments)
    held["critic"] += size_of(judging)
    held["activations"] = kept.peak
    held["trained weights"] = size_of(params)
    held["frozen weights"] = size_of([*module.parameters(), *module.buffers()]) - held["trained weights"]
    held["frozen weights"] -= size_of(hosts)
    held["blocks on the device"] = size_of(buffers)
    for name, copy in backend._policies.copies.items():
        held["fake score" if name == "fake" else name] += size_of(copy.values.values())
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
def kept_for_backward(module: torch.nn.Module, *others: Tensor) -> Generator[Meter]:
    """Within the block, `peak` is the most that was kept for a backward pass at one time, without the weights, others among them: what
    autograd saves, and, of blocks with activation checkpointing, what they are called with and what a backward pass
    computes again."""
    own = {
        part.untyped_storage()._cdata
        for tensor in (*module.parameters(), *module.buffers(), *others)
        if not isinstance(tensor, DTensor)
        for part in stored(tensor)
    }
    meter = Meter(without=own)
    blocks = [block for block in module.modules() if isinstance(vars(block).get("forward"), functools.partial)]

    def pack(tensor: Tensor) -> Tensor:
        meter.note([tensor])
        return tensor

    def called(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            meter.note(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(setattr, block, "forward", block.forward)
            block.forward = functools.partial(block.forward, context_fn=lambda: (nullcontext(), _Again(meter)))
            undo.callback(block.register_forward_pre_hook(called, with_kwargs=True).remove)
        # Stopped at its last saved tensor, by an error, a block would still hold its temporaries.
        undo.enter_context(set_checkpoint_early_stop(False))
        undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        yield meter


class _Again(TorchDispatchMode):
    """A block that is computed again: tensors of it that are alive at its end are those that were saved."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._made |= references(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._meter.count(self._made)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; of sharded ones, this rank's part."""
    return sum(part.nbytes for tensor in tensors for part in stored(tensor))


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


if __name__ == "__main__":
    held_on_a_rank(int(sys.argv[1]), sys.argv[3:], sys.argv[2])
