"""Random miniature checkpoints in the ordinary layouts, for tests and conformance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessorPil,
)

__all__ = ["write", "write_clip", "write_grounding_dino", "write_owlv2"]


def write(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Write an OWLv2 and a CLIP checkpoint; same seed, same bytes. Returns the settings of `geneval` that load them."""
    write_owlv2(folder / "detector", seed=seed)
    write_clip(folder / "clip", seed=seed)
    return {
        "detector": str(folder / "detector"),
        "clip_path": str(folder / "clip"),
        # In the middle of the scores of random weights, so that images have different numbers of objects.
        "threshold": 0.5,
        "counting_threshold": 0.5,
    }


def write_owlv2(folder: Path, *, seed: int) -> None:
    """An `Owlv2ForObjectDetection` of 16 patches."""
    tokenizer, tower = _clip_tokenizer(length=32), {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = {**tower, "num_attention_heads": 2, "max_position_embeddings": 32, **_ids(tokenizer)}
    config = Owlv2Config(
        text_config=text,
        vision_config={**tower, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    _save(folder, Owlv2ForObjectDetection, config, seed=seed)
    tokenizer.save_pretrained(folder)
    Owlv2ImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def write_grounding_dino(folder: Path, *, seed: int) -> None:
    """A `GroundingDinoForObjectDetection` of 12 queries, with a Swin backbone and a BERT."""
    tokenizer = _bert_tokenizer()
    config = GroundingDinoConfig(
        backbone_config={
            "model_type": "swin",
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [2, 2, 2, 2],
            "window_size": 4,
            "image_size": 64,
            "out_features": ["stage2", "stage3", "stage4"],
        },
        text_config={
            "model_type": "bert",
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        d_model=32,
        num_queries=12,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    _save(folder, GroundingDinoForObjectDetection, config, seed=seed)
    tokenizer.save_pretrained(folder)
    GroundingDinoImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(folder)


def write_clip(folder: Path, *, seed: int) -> None:
    """A `CLIPModel` of images of 32 pixels."""
    tokenizer, tower = _clip_tokenizer(length=77), {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={**tower, "num_attention_heads": 2, "max_position_embeddings": 77, **_ids(tokenizer)},
        vision_config={**tower, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    _save(folder, CLIPModel, config, seed=seed)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)


def _save(folder: Path, cls: Any, config: Any, *, seed: int) -> None:
    """Every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = cls(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        model.save_pretrained(folder)


def _ids(tokenizer: CLIPTokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _clip_tokenizer(*, length: int) -> CLIPTokenizer:
    """CLIP's byte-level BPE without merges: one token a character."""
    letters = [chr(code) for code in range(33, 127)]
    vocab = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(vocab)}, merges=[], model_max_length=length)


def _bert_tokenizer() -> BertTokenizer:
    """BERT's WordPiece, one token a character."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    return BertTokenizer(vocab={token: index for index, token in enumerate(vocab)}, model_max_length=256)
