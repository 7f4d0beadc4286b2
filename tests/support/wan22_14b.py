"""Wan 2.2 T2V A14B without its weights: configs of the published sizes, and the tokenizer of a miniature.

Sizes: `wan/configs/wan_t2v_A14B.py` of the repository Wan-Video/Wan2.2 (dim 5120 of 40 heads, ffn_dim 13824, freq_dim 256,
40 layers, boundary 0.875), and the config of google/umt5-xxl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unirl.models.wan.tiny import write_wan22

__all__ = ["write_wan22_14b"]

TRANSFORMER = {
    "attention_head_dim": 128,
    "num_attention_heads": 40,
    "num_layers": 40,
    "ffn_dim": 13824,
    "freq_dim": 256,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "rope_max_seq_len": 1024,
}
TEXT_ENCODER = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
VAE = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
}


def write_wan22_14b(folder: Path) -> None:
    """Write the folder: no weights, 28 billion parameters."""
    write_wan22(folder, seed=0)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    for name, values in {
        "transformer": TRANSFORMER,
        "transformer_2": TRANSFORMER,
        "text_encoder": TEXT_ENCODER,
        "vae": VAE,
    }.items():
        path = folder / name / "config.json"
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(settings | values), encoding="utf-8")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": 0.875}), encoding="utf-8")
