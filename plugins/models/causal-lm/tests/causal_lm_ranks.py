"""One rank of a group that shares the tokens of every row: `python causal_lm_ranks.py RANK RANKS FOLDER`.

FOLDER has a miniature of every family; each rank leaves what it finds there.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from causal_lm_families import SETTINGS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from unirl.core.errors import RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import AutoCausalLm, build
from unirl.numerics.tokens.batches import pack_batch, pad_batch
from unirl.numerics.tokens.rollout import generate_text

# 34 tokens, prompt included, so that four ranks have unequal parts, and the others end before.
LENGTHS = ((21, 13), (2, 5), (9, 1))
LAYOUTS = ("packed", "left", "short", "divergence")
CASES = [(name, "right") for name in SETTINGS] + [("Qwen3", layout) for layout in LAYOUTS]


def rows(lengths: tuple[tuple[int, int], ...] = LENGTHS) -> tuple[list[Tensor], list[Tensor]]:
    random = torch.Generator().manual_seed(1)
    return tuple([torch.randint(200, (row[i],), generator=random) for row in lengths] for i in (0, 1))  # pyright: ignore


def batch_of(layout: str, model: AutoCausalLm) -> TokenBatch:
    if layout == "packed":
        return pack_batch(*rows())
    if layout == "short":
        # Of three tokens, so that the last of four ranks has none.
        return pad_batch(*rows(((2, 1), (1, 1))), pad_token=model.pad_token)
    batch = pad_batch(*rows(), pad_token=model.pad_token)
    return moved(batch) if layout == "left" else batch


def moved(batch: TokenBatch) -> TokenBatch:
    """The same rows with their padding on the left, where the mask is needed."""
    mask = batch.attention_mask
    order = mask.long().argsort(dim=1, stable=True)
    length = mask.shape[1]
    row, place = batch.target_index // length, batch.target_index % length
    index = row * length + place + (length - mask.sum(dim=1))[row]
    return TokenBatch(
        tokens=batch.tokens.gather(1, order),
        positions=batch.positions.gather(1, order),
        attention_mask=mask.gather(1, order),
        cu_seqlens=None,
        max_length=batch.max_length,
        target_index=index,
        targets=batch.targets,
        rows=batch.rows,
        lengths=batch.lengths,
    )


def run(case: tuple[str, str], folder: Path, mesh: Any = None) -> dict[str, Any]:
    """Scores of the targets, their loss's gradients (with a mesh, this rank's share), and sampled tokens."""
    name, layout = case
    model = build(AutoCausalLmConfig(path=str(folder / name), logits_chunk=5), device="cpu")
    teacher = build(AutoCausalLmConfig(path=str(folder / "Qwen3")), device="cpu") if layout == "divergence" else None
    if mesh is not None:
        model.split_sequence(mesh)
    batch = batch_of(layout, model)
    if teacher is not None:
        with torch.no_grad():
            teacher.causal_lm.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(1.5)
        head = teacher.output_head(batch)
        scores = model.divergence(batch, teacher=head, kind="reverse", beta=0.5, top_k=None, temperature=0.7)
        assert torch.equal(model.output_head(batch).weight, head.weight)
        loss = scores[0].sum()
    else:
        scores = model.score(batch, temperature=0.7, with_entropy=True)
        loss = scores[0].sum() + 0.5 * scores[1].sum()  # pyright: ignore[reportOptionalMemberAccess]
    loss.backward()
    gradients = {key: param.grad for key, param in model.trainable.named_parameters() if param.grad is not None}
    return {
        "scores": [one.detach() for one in scores if one is not None],
        "gradients": gradients,
        "texts": sampled(model),
    }


def sampled(model: AutoCausalLm) -> list[Tensor]:
    sampling = TextSamplingConfig(max_new_tokens=6, temperature=0.0)
    prompts = model.prompt_tokens(Inputs.of_texts(("What is 47 + 85?", "a")), sampling=sampling)
    request = TextRequest(sampling=sampling, prompt_tokens=tuple(prompts), stop_tokens=model.stop_tokens, seeds=(0, 1))
    return list(generate_text(model, request).tokens)


def refusals(folder: Path, mesh: Any) -> dict[str, str]:
    said: dict[str, str] = {}
    for case, (name, settings) in {"eager": ("Qwen3", {"attention": "eager"}), "heads": ("three", {})}.items():
        model = build(AutoCausalLmConfig(path=str(folder / name), **settings), device="cpu")
        try:
            model.split_sequence(mesh)
        except RecipeError as error:
            said[case] = str(error)
    return said


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (ranks,))
    results = {case: run(case, folder, mesh) for case in CASES}
    torch.save((results, refusals(folder, mesh)), folder / f"{rank}-of-{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
