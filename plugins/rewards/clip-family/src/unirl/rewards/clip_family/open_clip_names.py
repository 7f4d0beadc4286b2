"""Names of open_clip's CLIP weights in transformers' CLIPModel.

open_clip itself needs torchvision and timm, and the published HPSv2 package pins versions that no other part can live
with; the two CLIPs are the same module under other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

__all__ = ["to_transformers"]

_NAMES = (
    (r"visual\.class_embedding", "vision_model.embeddings.class_embedding"),
    (r"visual\.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    (r"visual\.conv1\.(.*)", r"vision_model.embeddings.patch_embedding.\1"),
    # Spelled so in transformers.
    (r"visual\.ln_pre\.(.*)", r"vision_model.pre_layrnorm.\1"),
    (r"visual\.ln_post\.(.*)", r"vision_model.post_layernorm.\1"),
    (r"visual\.proj", "visual_projection.weight"),
    (r"visual\.transformer\.resblocks\.(.*)", r"vision_model.encoder.layers.\1"),
    (r"positional_embedding", "text_model.embeddings.position_embedding.weight"),
    (r"token_embedding\.(.*)", r"text_model.embeddings.token_embedding.\1"),
    (r"ln_final\.(.*)", r"text_model.final_layer_norm.\1"),
    (r"text_projection", "text_projection.weight"),
    (r"transformer\.resblocks\.(.*)", r"text_model.encoder.layers.\1"),
)
_IN_LAYER = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
_TRANSPOSED = ("visual.proj", "text_projection")
"""open_clip multiplies from the right."""


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by transformers' names; those that are not CLIP weights keep theirs."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        if name == "attn_mask":
            continue
        renamed = name
        for pattern, new in _NAMES:
            if match := re.fullmatch(pattern, name):
                renamed = match.expand(new)
                break
        for old, new in _IN_LAYER.items():
            renamed = renamed.replace(old, new)
        if match := re.fullmatch(r"(.*self_attn\.)in_proj_(weight|bias)", renamed):
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                result[f"{match[1]}{letter}_proj.{match[2]}"] = third
        else:
            result[renamed] = value.T if name in _TRANSPOSED else value
    return result
