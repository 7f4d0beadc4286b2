"""Golden vectors of open_clip and of the published ImageReward package, on weights and inputs of closed form.

Both packages need torchvision, and ImageReward a transformers release of 2024, so each runs once in an environment of
its own and writes its numbers into `golden.json`:

    pip install torch torchvision open_clip_torch && python golden.py open-clip
    pip install torch torchvision timm==0.6.13 fairscale transformers==4.40.2 && \
        pip install --no-deps image-reward && python golden.py image-reward
"""

from __future__ import annotations

import json
import sys
import types
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GOLDEN = Path(__file__).with_name("golden.json")
CLIP_END, CLIP_WORDS, BERT_WORDS = 513, 514, 143
"""Ids of the miniatures' vocabularies; CLIP's end token is its largest."""


def weights(name: str, shape: tuple[int, ...]) -> Tensor:
    """Irregular numbers, a row's sum of squares about 1; one-dimensional weights near 1 and biases near 0."""
    count = torch.Size(shape).numel()
    at = torch.arange(count, dtype=torch.float64) + zlib.crc32(name.encode()) % 1000
    values = (2**0.5 * torch.sin(0.6180339887 * at * at)).reshape(shape)
    if len(shape) >= 2:
        return (values / values[0].numel() ** 0.5).float()
    return (0.1 * values + float(name.endswith("weight"))).float()


def pixels() -> Tensor:
    """[3, 3, 32, 32], as preprocessing leaves them."""
    return 2 * weights("pixels", (3, 3 * 32 * 32)).reshape(3, 3, 32, 32) * (3 * 32 * 32) ** 0.5 / 2


def clip_ids() -> Tensor:
    """[3, 24]: start, letters, end, and the end token again as padding."""
    ids = torch.full((3, 24), CLIP_END)
    for row, length in enumerate((2, 9, 23)):
        ids[row, 1:length] = (torch.arange(1, length) * 37 + row) % 512
    ids[:, 0] = CLIP_END - 1
    return ids


def bert_ids() -> tuple[Tensor, Tensor]:
    """[3, 35] ids and mask: a class token, letters, a separator, padding."""
    ids, mask = torch.zeros(3, 35, dtype=torch.long), torch.zeros(3, 35, dtype=torch.long)
    for row, length in enumerate((3, 12, 35)):
        ids[row, :length] = 5 + (torch.arange(length) * 17 + row) % 100
        ids[row, 0], ids[row, length - 1], mask[row, :length] = 2, 3, 1
    return ids, mask


def filled(module: nn.Module) -> nn.Module:
    """The module in evaluation mode with weights of closed form by its own names."""
    state = module.state_dict()
    values = {name: weights(name, tuple(value.shape)) for name, value in state.items() if value.is_floating_point()}
    module.load_state_dict({**state, **values})
    return module.eval()


def of_open_clip() -> list[float]:
    clip = import_module("open_clip.model").CLIP
    tower = {"width": 32, "layers": 2, "mlp_ratio": 1.5}
    vision = {**tower, "image_size": 32, "patch_size": 8, "head_width": 16}
    text = {**tower, "context_length": 24, "vocab_size": CLIP_WORDS, "heads": 2}
    model: Any = filled(clip(24, vision, text))
    with torch.no_grad():
        image, prompt = model.encode_image(pixels(), normalize=True), model.encode_text(clip_ids(), normalize=True)
    return (image * prompt).sum(dim=1).tolist()


def of_image_reward() -> list[float]:
    # Its __init__ imports training code with dependencies that scoring does not need.
    root = Path(find_spec("ImageReward").submodule_search_locations[0])  # type: ignore[union-attr,index]
    for name in ("ImageReward", "ImageReward.models"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    package = import_module("ImageReward.ImageReward")
    vit, med = import_module("ImageReward.models.BLIP.vit"), import_module("ImageReward.models.BLIP.med")
    config = med.BertConfig(
        vocab_size=BERT_WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        layer_norm_eps=1e-12,
        pad_token_id=0,
    )
    config.add_cross_attention, config.add_type_embeddings, config.encoder_width = True, False, 64
    model = nn.Module()
    model.blip = nn.Module()
    model.blip.visual_encoder = vit.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1)
    model.blip.text_encoder = med.BertModel(config, add_pooling_layer=False)
    model.mlp = package.MLP(32)
    scorer: Any = filled(model)
    scorer.device, scorer.mean, scorer.std = "cpu", 0.16717362830052426, 1.0333394966054072
    with torch.no_grad():
        return package.ImageReward.score_gard(scorer, *bert_ids(), pixels())[:, 0].tolist()


def main() -> None:
    # torchvision imports with any build of torch once its two operators have a signature; neither is used here.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    makers: dict[str, Callable[[], list[float]]] = {"open-clip": of_open_clip, "image-reward": of_image_reward}
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    known |= {name: makers[name]() for name in sys.argv[1:]}
    GOLDEN.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
