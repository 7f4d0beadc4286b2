# vLLM and vLLM-Omni are in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false
"""The pipeline of the bridge: vLLM-Omni's transformer of BAGEL, and the half of the model that does not train.

Runs in the engine's environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.engine_bridge import check_engine, encoder_in_engine
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.transformers_utils.configs.bagel import BagelConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.bagel import bagel_transformer as stock

from ..checkpoint import CONFIG, LANGUAGE, WEIGHTS, Sizes, sizes_of
from ..encoder import Encoder
from .fused_layers import EXPERTS, FUSED, held_as

__all__ = ["BagelPipeline"]


class BagelPipeline(nn.Module):
    """Mixed with `unirl.engines.vllm_omni.pipeline.RolloutPipeline`, which sets the first two attributes."""

    unirl_settings: Mapping[str, Any]
    unirl_folder: str
    _lora_components = ("bagel",)
    stacked_params_mapping = tuple(
        (f".{end}", f".{part}") for end, parts in FUSED.items() if len(parts) > 1 for part in parts
    )
    """Read by vLLM-Omni where it looks for the parts of an adapter."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        """Raises RuntimeError for a release and for ranks that the bridge does not support."""
        super().__init__()
        ranks = od_config.parallel_config.tensor_parallel_size
        check_engine("BAGEL", engine="vLLM-Omni", release=version("vllm-omni"), least=(0, 32), ranks=ranks)
        self.od_config, self.device = od_config, get_local_device()
        folder = Path(self.unirl_folder)
        self.unirl_sizes = sizes = sizes_of(folder)
        self._files = weight_files(folder, WEIGHTS)
        self.unirl_encoder = encoder_in_engine(
            partial(Encoder, sizes=sizes), folder, self._files, settings=self.unirl_settings, device=self.device
        )
        stock.torch = _TorchIn(od_config.dtype)
        config = stock.Qwen2MoTConfig(**{**read_json(folder / LANGUAGE), "tie_word_embeddings": False})
        language = stock.Qwen2MoTForCausalLM(config)
        # vLLM's has more rows than the checkpoint.
        language.model.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
        for number, layer in enumerate(language.model.layers):
            _route(layer.self_attn, sizes, prefix=f"bagel.layers.{number}.self_attn")
        given = read_json(folder / CONFIG)
        self.bagel = stock.Bagel(
            language_model=language,
            vit_model=None,
            config=BagelConfig(
                llm_config=config,
                vae_config=SimpleNamespace(**given["vae_config"]),
                vit_config=SimpleNamespace(patch_size=1, hidden_size=sizes.vision),
                vit_max_num_patch_per_side=sizes.vision_side,
                latent_patch_size=given.get("latent_patch_size", 2),
                max_latent_size=sizes.latent_side,
                connector_act=sizes.connector_act,
            ),
        ).eval()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the checkpoint's files; vLLM-Omni knows of none. Returns the names of the parameters loaded."""
        held = dict(self.bagel.named_parameters())
        result: set[str] = set()
        for name, value in _stored(self._files):
            own, shard = held_as(name)
            # Those of the ViT are the encoder's.
            if own not in held:
                continue
            load = getattr(held[own], "weight_loader", None)
            if load is None:
                held[own].data.copy_(value)
            else:
                load(held[own], value, *(() if shard is None else (shard,)))
            result.add(f"bagel.{own}")
        return result


class _TorchIn(ModuleType):
    """torch, with the engine's dtype for bf16: vLLM-Omni's attention and layers cast to that whatever the dtype of the
    weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("torch")
        self.bfloat16 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Routed(nn.Module):
    """The projection of both experts, in place of vLLM-Omni's. Its layers are the attention's own, `name` and
    `name_moe_gen`, where vLLM-Omni finds them to put adapters around them."""

    def __init__(self, attention: nn.Module, name: str) -> None:
        super().__init__()
        # In a tuple, as no child: the attention holds this module.
        self._owner, self._name = (attention,), name

    def forward(self, x: Tensor, text: Tensor | None = None, latents: Tensor | None = None) -> tuple[Tensor, None]:
        if text is None or latents is None:
            return self._projected(x, ""), None
        first, second = self._projected(x[text], ""), self._projected(x[latents], "_moe_gen")
        result = first.new_empty(len(x), first.shape[-1])
        result[text], result[latents] = first, second
        return result, None

    def _projected(self, x: Tensor, expert: str) -> Tensor:
        return getattr(self._owner[0], self._name + expert)(x)[0]


def _route(attention: Any, sizes: Sizes, *, prefix: str) -> None:
    head = sizes.width // sizes.heads
    for expert in EXPERTS:
        qkv = QKVParallelLinear(
            sizes.width, head, sizes.heads, sizes.kv_heads, bias=True, prefix=f"{prefix}.qkv{expert}"
        )
        attention.add_module(f"qkv{expert}", qkv)
        output = RowParallelLinear(sizes.width, sizes.width, bias=False, prefix=f"{prefix}.o{expert}")
        attention.add_module(f"o{expert}", output)
    attention.qkv_proj, attention.o_proj = _Routed(attention, "qkv"), _Routed(attention, "o")


def _stored(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    opened: Any
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in set(opened.keys()):
                yield name, opened.get_tensor(name)
