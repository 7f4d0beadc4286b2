"""The ends of the forward under FSDP2, which holds the output projection only during the forward of its root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from unirl.models.qwen3.model import Qwen3Model
from unirl.numerics.tokens.batches import pack_batch


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["dense", "untied"])
def test_sharded_scores_gradients_and_logits_are_those_of_the_whole_module(
    kind: str, load: Callable[..., Qwen3Model], texts: tuple[list[Tensor], list[Tensor]], one_rank: None
) -> None:
    whole, sharded = load(kind), load(kind)
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False)
    for part in sharded.trainable.modules():
        if type(part).__name__ == "Qwen3DecoderLayer":
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(sharded.trainable, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    batch = pack_batch(*texts)
    result = {}
    for name, model in (("whole", whole), ("sharded", sharded)):
        log_probs, _ = model.score(batch, temperature=1.0)
        log_probs.sum().backward()
        prompt = texts[0][0][None]
        logits, _ = model.next_logits(
            prompt,
            positions=torch.arange(prompt.shape[1])[None],
            attention_mask=torch.ones_like(prompt, dtype=torch.bool),
            cache=None,
        )
        gradients = {n: p.grad for n, p in model.trainable.named_parameters()}
        result[name] = (log_probs.detach(), logits, gradients)
    # One rank: the same numbers, whose gathered copies lie elsewhere in memory; the order of a product's sums may follow
    # the alignment, some 1e-7 of numbers up to 10.
    torch.testing.assert_close(result["whole"][0], result["sharded"][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(result["whole"][1], result["sharded"][1], rtol=0, atol=1e-5)
    assert list(result["whole"][2]) == list(result["sharded"][2])
    for name, gradient in result["whole"][2].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            result["sharded"][2][name].full_tensor(), gradient, rtol=0, atol=1e-5 * scale, msg=name
        )
