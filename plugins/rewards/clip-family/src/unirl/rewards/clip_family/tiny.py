"""Random miniature checkpoints in the published layouts, for tests and conformance."""

from __future__ import annotations

import io
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    PreTrainedModel,
    SiglipConfig,
    SiglipModel,
    SiglipTokenizer,
)
from transformers.utils import logging as transformers_logging
from unirl.model_host.model_files import no_progress_bars

from .preprocess import CLIP_MEAN, CLIP_STD

__all__ = ["write_aesthetic", "write_clip", "write_hpsv2", "write_image_reward", "write_siglip"]

_IMAGE_PX, _PATCH_PX, _TOKENS, _PROJECTION = 32, 8, 24, 24
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_clip(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """A CLIPModel with its tokenizer and preprocessor, as on the hub; returns the settings that load it."""
    tokenizer = _clip_processor(folder)
    _save(folder, CLIPModel(_clip_config(tokenizer)), seed=seed)
    return {"path": str(folder), "processor": ""}


def write_hpsv2(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """A CLIP folder without weights, and those of an open_clip CLIP in `HPS_v2.1_compressed.pt`."""
    tokenizer = _clip_processor(folder)
    config = _clip_config(tokenizer)
    config.architectures = ["CLIPModel"]
    config.save_pretrained(folder)
    file = folder / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": _random(_open_clip_shapes(len(tokenizer)), seed=seed)}, file)
    return {"path": str(folder), "weights": str(file)}


def write_aesthetic(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """A CLIP folder, and a head of the published layers in `sac+logos+ava1-l14-linearMSE.pth`."""
    settings = write_clip(folder, seed=seed)
    file = folder / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(_random(_head_shapes(_PROJECTION, prefix=""), seed=seed), file)
    return {**settings, "head": str(file)}


def write_image_reward(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """`ImageReward.pt` and `med_config.json` as on the hub, and a BERT tokenizer beside them."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    # BLIP's vocabulary has two tokens more than the tokenizer.
    med = {**_TOWER, "vocab_size": len(words) + 2, "max_position_embeddings": 40, "hidden_act": "gelu"}
    med |= {"layer_norm_eps": 1e-12, "pad_token_id": 0, "model_type": "bert", "encoder_width": 64}
    (folder / "med_config.json").write_text(json.dumps(med))
    torch.save(_random(_image_reward_shapes(med), seed=seed), folder / "ImageReward.pt")
    return {"path": str(folder), "processor": str(folder)}


def write_siglip(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """A SiglipModel with its SentencePiece model and preprocessor, as on the hub."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([string.ascii_lowercase, string.digits]),
        model_writer=file,
        model_type="char",
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=-1,
        bos_id=-1,
        eos_id=1,
        unk_id=2,
        minloglevel=2,
    )
    model = folder / "spiece.model"
    model.write_bytes(file.getvalue())
    tokenizer = SiglipTokenizer(str(model), model_max_length=_TOKENS)
    tokenizer.save_pretrained(folder)
    size = {"height": _IMAGE_PX, "width": _IMAGE_PX}
    grey = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    _write_preprocessor(folder, {"image_processor_type": "SiglipImageProcessor", "size": size, **grey})
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**_TOWER, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": _TOKENS, "projection_size": 32}
    config = SiglipConfig(text_config=text, vision_config={**_TOWER, "image_size": _IMAGE_PX, "patch_size": _PATCH_PX})
    _save(folder, SiglipModel(config), seed=seed)
    return {"path": str(folder)}


def _clip_processor(folder: Path) -> CLIPTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=_TOKENS)
    tokenizer.save_pretrained(folder)
    size = {"size": {"shortest_edge": _IMAGE_PX}, "crop_size": {"height": _IMAGE_PX, "width": _IMAGE_PX}}
    colors = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    _write_preprocessor(
        folder, {"image_processor_type": "CLIPImageProcessor", "do_center_crop": True, **size, **colors}
    )
    return tokenizer


def _write_preprocessor(folder: Path, config: Mapping[str, Any]) -> None:
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps({**steps, **config}))


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPConfig:
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return CLIPConfig(
        text_config={**_TOWER, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": _TOKENS}
        | {"hidden_act": "gelu", "pad_token_id": tokenizer.pad_token_id},
        vision_config={**_TOWER, "hidden_act": "gelu", "image_size": _IMAGE_PX, "patch_size": _PATCH_PX},
        projection_dim=_PROJECTION,
    )


def _save(folder: Path, model: PreTrainedModel, *, seed: int) -> None:
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(_random(shapes, seed=seed))
    with no_progress_bars(transformers_logging):
        model.save_pretrained(folder)


def _random(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> dict[str, Tensor]:
    """Normal weights, a row's sum of squares about 1; one-dimensional ones near 1 or 0. No zeros that hide a term."""
    random = torch.Generator().manual_seed(seed)
    result: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        if len(shape) >= 2:
            result[name] = noise / noise[0].numel() ** 0.5
        else:
            # Of one-dimensional tensors, weights are those of layer norms.
            result[name] = 0.1 * noise + float(name.endswith("weight"))
    return result


def _head_shapes(width: int, *, prefix: str) -> dict[str, tuple[int, ...]]:
    sizes = (width, 1024, 128, 64, 16, 1)
    result: dict[str, tuple[int, ...]] = {}
    for number, columns, rows in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        result |= _pairs(f"{prefix}layers.{number}", rows, columns)
    return result


def _open_clip_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of open_clip's `CLIP` of the same architecture."""
    width = _TOWER["hidden_size"]
    places = (_IMAGE_PX // _PATCH_PX) ** 2 + 1
    return {
        "positional_embedding": (_TOKENS, width),
        "text_projection": (width, _PROJECTION),
        "logit_scale": (),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (places, width),
        "visual.proj": (width, _PROJECTION),
        "visual.conv1.weight": (width, 3, _PATCH_PX, _PATCH_PX),
        **_pairs("visual.ln_pre", width),
        **_open_clip_layers("visual.transformer"),
        **_pairs("visual.ln_post", width),
        **_open_clip_layers("transformer"),
        "token_embedding.weight": (vocab_size, width),
        **_pairs("ln_final", width),
    }


def _open_clip_layers(prefix: str) -> dict[str, tuple[int, ...]]:
    width, inner = _TOWER["hidden_size"], _TOWER["intermediate_size"]
    result: dict[str, tuple[int, ...]] = {}
    for number in range(_TOWER["num_hidden_layers"]):
        layer = f"{prefix}.resblocks.{number}"
        result |= {
            **_pairs(f"{layer}.ln_1", width),
            f"{layer}.attn.in_proj_weight": (3 * width, width),
            f"{layer}.attn.in_proj_bias": (3 * width,),
            **_pairs(f"{layer}.attn.out_proj", width, width),
            **_pairs(f"{layer}.ln_2", width),
            **_pairs(f"{layer}.mlp.c_fc", inner, width),
            **_pairs(f"{layer}.mlp.c_proj", width, inner),
        }
    return result


def _image_reward_shapes(med: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the published `ImageReward`: timm's ViT, BLIP's BERT, the projections of its training and the head."""
    wide, width, inner = med["encoder_width"], med["hidden_size"], med["intermediate_size"]
    vision, text = "blip.visual_encoder", "blip.text_encoder"
    result = {
        f"{vision}.cls_token": (1, 1, wide),
        f"{vision}.pos_embed": (1, (_IMAGE_PX // _PATCH_PX) ** 2 + 1, wide),
        **_pairs(f"{vision}.patch_embed.proj", wide, 3, _PATCH_PX, _PATCH_PX),
        **_pairs(f"{vision}.norm", wide),
        f"{text}.embeddings.position_ids": (1, med["max_position_embeddings"]),
        f"{text}.embeddings.word_embeddings.weight": (med["vocab_size"], width),
        f"{text}.embeddings.position_embeddings.weight": (med["max_position_embeddings"], width),
        **_pairs(f"{text}.embeddings.LayerNorm", width),
        **_pairs("blip.vision_proj", 8, wide),
        **_pairs("blip.text_proj", 8, width),
        **_head_shapes(width, prefix="mlp."),
    }
    for number in range(med["num_hidden_layers"]):
        block, layer = f"{vision}.blocks.{number}", f"{text}.encoder.layer.{number}"
        result |= {
            **_pairs(f"{block}.norm1", wide),
            **_pairs(f"{block}.attn.qkv", 3 * wide, wide),
            **_pairs(f"{block}.attn.proj", wide, wide),
            **_pairs(f"{block}.norm2", wide),
            **_pairs(f"{block}.mlp.fc1", 4 * wide, wide),
            **_pairs(f"{block}.mlp.fc2", wide, 4 * wide),
            **_pairs(f"{layer}.intermediate.dense", inner, width),
            **_pairs(f"{layer}.output.dense", width, inner),
            **_pairs(f"{layer}.output.LayerNorm", width),
        }
        for attention, read in (("attention", width), ("crossattention", wide)):
            inside = f"{layer}.{attention}"
            result |= {
                **_pairs(f"{inside}.self.query", width, width),
                **_pairs(f"{inside}.self.key", width, read),
                **_pairs(f"{inside}.self.value", width, read),
                **_pairs(f"{inside}.output.dense", width, width),
                **_pairs(f"{inside}.output.LayerNorm", width),
            }
    return result


def _pairs(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    """Weight and bias of a layer."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
