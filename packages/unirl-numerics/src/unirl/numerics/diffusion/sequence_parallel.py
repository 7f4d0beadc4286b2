"""Sequence parallelism of diffusers' transformers, by the plans that diffusers has for them.

Calls diffusers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError

__all__ = ["split_transformer"]


def split_transformer(
    transformer: torch.nn.Module, mesh: Any, *, plan: Mapping[str, Any], num_tokens: Callable[[Tensor], int]
) -> None:
    """Split the tokens of every forward over the ranks of a mesh, in place: each rank computes its share of the tokens
    in the blocks, and attention exchanges them for a share of the heads (Ulysses). The output is whole on every rank.

    Every rank's gradient is that of its own tokens, for all parameters: they lie before the output is gathered.

    mesh: a `DeviceMesh` of one dim.  plan: diffusers' `_cp_plan`, name of a module -> which of its inputs or outputs
    are split or gathered, along which dim.  num_tokens: tokens of a `hidden_states` that the transformer is given.
    Raises RecipeError for attention that cannot be split, before anything changes, and at a forward whose tokens cannot
    be shared evenly.
    Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1.
    """
    ranks, key = mesh.size(), "backend.mesh.sequence"
    settings: Any = transformer.config
    heads: int = settings.num_attention_heads
    if heads % ranks:
        raise RecipeError(
            f"{key}: got {ranks}, but the {heads} attention heads of the checkpoint's {type(transformer).__name__} "
            f"cannot be shared evenly by {ranks} ranks. Use a divisor of {heads}."
        )
    attention = import_module("diffusers.models.attention")
    kinds = (import_module("diffusers.models.attention_processor").Attention, attention.AttentionModuleMixin)
    processors: list[Any] = [part.processor for part in transformer.modules() if isinstance(part, kinds)]
    for processor in processors:
        # Attention of other processors would see a rank's own tokens alone, without an error.
        if not hasattr(processor, "_parallel_config"):
            raise RecipeError(
                f"{key}: got {ranks}, but attention by {type(processor).__name__} cannot be split in diffusers. Use 1."
            )
    parallel = import_module("diffusers.models._modeling_parallel")
    # Not `enable_parallelism`: it makes a mesh of its own, of accelerators alone.
    sequence = parallel.ContextParallelConfig(
        ulysses_degree=ranks,
        _rank=mesh.get_local_rank(),
        _world_size=ranks,
        _flattened_mesh=mesh,
        _ulysses_mesh=mesh,
    )
    config = parallel.ParallelConfig(context_parallel_config=sequence)
    for processor in processors:
        processor._parallel_config = config
    import_module("diffusers.hooks.context_parallel").apply_context_parallel(transformer, sequence, dict(plan))

    def check(_module: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = tuple(kwargs["hidden_states"].shape)
        count = num_tokens(kwargs["hidden_states"])
        if count % ranks:
            raise RecipeError(
                f"{key}: got {ranks}, but latents of shape {shape[1:]} have {count} tokens, which {ranks} ranks cannot "
                "share evenly. Choose another size in sampling, or fewer ranks."
            )

    transformer.register_forward_pre_hook(check, with_kwargs=True)
