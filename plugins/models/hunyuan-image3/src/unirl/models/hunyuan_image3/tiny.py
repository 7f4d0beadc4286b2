"""A random miniature checkpoint in the published layout, and source images, for tests and the conformance matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from unirl.core.types.data import MediaRef
from unirl.model_host.lazy_weights import Piece, stored_tensor
from unirl.model_host.tokens.miniature import byte_tokenizer

from .checkpoint import CONFIG, GENERATION, sizes_of
from .images import Vision
from .module import HunyuanImage, expert_pieces
from .resolutions import NUM_RATIOS
from .sequence import NAMES
from .vae import HunyuanVae, vae_sizes

__all__ = ["media", "write"]

_BASE = 64
_SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<pad>", *NAMES.values(), f"<img_size_{_BASE}>",
    *(f"<img_ratio_{number}>" for number in range(NUM_RATIOS)),
)  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "model_type": "hunyuan_image_3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {"type": "custom", "alpha": 1000.0, "factor": 1.0},
    "max_position_embeddings": 4096,
    "num_experts": 4,
    # Some settings are lists of one a layer.
    "moe_topk": [2, 2],
    "num_shared_expert": [1, 1],
    "moe_intermediate_size": [32, 32],
    "intermediate_size": 32,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "patch_size": 1,
    "patch_embed_hidden_dim": 32,
    "image_base_size": _BASE,
    "vae": {
        "latent_channels": 4,
        "block_out_channels": [32, 32, 32, 64, 64],
        "layers_per_block": 1,
        "ffactor_spatial": 16,
        "ffactor_temporal": 4,
        "scaling_factor": 0.56,
        "shift_factor": None,
    },
    "vit": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_patches": 16,
        "patch_size": 8,
    },
    "vit_processor": {"patch_size": 8, "max_num_patches": 12},
    "vit_aligner": {"projector_type": "mlp_gelu", "input_dim": 32, "n_embed": 64, "depth": 2},
}


def write(folder: Path, *, seed: int, has_roles: bool = True) -> None:
    """Write a HunyuanImage-3.0 of about 5 M random parameters, most of them of its VAE; same seed, same
    bytes.

    4 experts, of which a token takes 2; 4 heads share 2 keys; 16x VAE with 4 channels.
    has_roles: whether it is an instructed checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(_SPECIAL, begin="<|startoftext|>", end="<|endoftext|>", pad="<pad>")
    # The published embedding is larger than its vocabulary, too.
    settings = {**_SETTINGS, "vocab_size": len(tokenizer) + 3}
    template = {"sequence_template": "instruct" if has_roles else "pretrain"}
    for name, values in ((CONFIG, settings), (GENERATION, template)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = (HunyuanImage(sizes_of(folder)), Vision(settings["vit"]), HunyuanVae(vae_sizes(settings["vae"])))
        for part in modules:
            for name, tensor in part.named_parameters():
                # torch leaves tensors of experts as they are.
                if ".experts." in name:
                    nn.init.normal_(tensor, std=0.1)
        tensors = {name: tensor for part in modules for name, tensor in _random(part).items()}
    stored = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    parts: dict[str, list[tuple[Piece, Tensor]]] = {}
    for name in tensors.keys() - stored.keys():
        for piece in expert_pieces(name, tuple(tensors[name].shape)):
            parts.setdefault(piece.name, []).append((piece, tensors[name]))
    stored |= {name: stored_tensor(parts[name], dims=2) for name in sorted(parts)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    """Write the source images of sample `number`, random pixels: one or two, in sizes that depend on it."""
    result: list[MediaRef] = []
    for place, (height, width) in enumerate((((64, 80),), ((96, 64),), ((64, 64), (40, 60)))[number % 3]):
        generator = np.random.Generator(np.random.Philox(key=10 * number + place))
        file = folder / f"source-{number}-{place}.png"
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file)
        result.append(MediaRef(modality="image", role="source", uri=str(file)))
    return tuple(result)


def _random(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor moved, so that no zero or one of the initialisation hides a term."""
    return {name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in module.state_dict().items()}
