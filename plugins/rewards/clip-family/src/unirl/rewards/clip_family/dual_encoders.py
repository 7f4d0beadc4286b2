"""Scorers that compare an image with its prompt, each encoded by itself: CLIP and SigLIP, and CLIP with a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPModel, SiglipModel
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config
from unirl.model_host.lazy_weights import empty_parameters
from unirl.model_host.model_files import no_progress_bars, read_json
from unirl.model_host.state_dicts import fill, read_tensors
from unirl.numerics.pixels import widened

from .config import AestheticConfig, ClipScoreConfig, EncoderConfig, HpsV2Config, PickScoreConfig, SiglipConfig
from .files import find_file, find_folder
from .head import build_head
from .open_clip_names import to_transformers
from .preprocess import Preprocess
from .prompts import PromptReader, processor_folder, prompt_reader
from .reward import EncoderReward, Scorer

__all__ = [
    "build_aesthetic",
    "build_clipscore",
    "build_hpsv2",
    "build_pickscore",
    "build_siglip",
    "load_encoders",
    "pickscore_of",
]

CLIP_SCALE = 100.0
"""Scale of `raw`: the logit scale of the published CLIP models, and of CLIPScore as it is usually reported."""
PICKSCORE_SCALE = 26.0
"""Divisor of the field (Flow-GRPO): brings PickScore near 1."""
_EXAMPLE = "openai/clip-vit-large-patch14"

Numbers = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Maps cosines [n] and the model's logits of them [n] to `score` and the components."""


class DualEncoder(Scorer):
    """Cosine of image and prompt, and the numbers made of it."""

    encoders = ("model",)

    def __init__(self, model: Any, reader: PromptReader, numbers: Numbers) -> None:
        super().__init__()
        self.model = model
        self.reader = reader
        self._numbers = numbers
        # Copies, because bf16 would round a scale of 100 to 98.
        self.scale = nn.Buffer(model.logit_scale.detach().clone().exp())
        self.bias = nn.Buffer(model.logit_bias.detach().clone() if isinstance(model, SiglipModel) else torch.zeros(()))

    def encode_prompts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[P, width] of length 1. The mask is not read: CLIP looks at nothing behind its end token, SigLIP at padding
        as well, as it was trained."""
        return normalize(widened(self.model.get_text_features(input_ids=ids).pooler_output), dim=1)

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Mapping[str, Tensor]:
        images = normalize(widened(self.model.get_image_features(pixel_values=pixels).pooler_output), dim=1)
        assert prompts is not None
        cosine = (images * prompts).sum(dim=1)
        return self._numbers(cosine, self.scale * cosine + self.bias)


class ImageRating(Scorer):
    """A head on the image's features of length 1; the prompt is not read."""

    encoders = ("model",)

    def __init__(self, model: Any, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, pixels: Tensor, prompts: Tensor | None) -> Mapping[str, Tensor]:
        features = widened(self.model.get_image_features(pixel_values=pixels).pooler_output)
        rating = self.head(normalize(features, dim=1))[:, 0]
        return {"score": rating, "raw": rating}


def build_clipscore(config: ClipScoreConfig, *, device: Any) -> EncoderReward:
    return _dual(
        config,
        CLIPModel,
        lambda cosine, logit: {"score": cosine, "raw": CLIP_SCALE * cosine},
        name="clipscore",
        device=device,
    )


def build_pickscore(config: PickScoreConfig, *, device: Any) -> EncoderReward:
    return pickscore_of(config, name="pickscore", device=device)


def pickscore_of(config: PickScoreConfig, *, name: str, device: Any) -> EncoderReward:
    """name: of the reward that uses it, for messages."""
    return _dual(
        config,
        CLIPModel,
        lambda cosine, logit: {"score": logit / PICKSCORE_SCALE, "raw": logit},
        name=name,
        device=device,
    )


def build_siglip(config: SiglipConfig, *, device: Any) -> EncoderReward:
    return _dual(
        config,
        SiglipModel,
        lambda cosine, logit: {"score": cosine, "raw": logit, "probability": logit.sigmoid()},
        name="siglip",
        device=device,
    )


def build_hpsv2(config: HpsV2Config, *, device: Any) -> EncoderReward:
    """HPSv2's own preprocessing shows the whole image, on black, where CLIP's crops it."""
    key = "reward.hpsv2"
    check_config(config, key=key)
    folder = find_folder(config.path, key=f"{key}.path", example=HpsV2Config.path, files=("*.json", "*.txt"))
    file = find_file(config.weights, key=f"{key}.weights", example="HPS_v2.1_compressed.pt of xswu/HPSv2")
    check_kind(folder, CLIPModel, key=f"{key}.path")
    with empty_parameters(torch.float32):
        model = CLIPModel(CLIPConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    fill(model, to_transformers(read_tensors(file, key=f"{key}.weights")), key=f"{key}.weights", file=file)
    processor = processor_folder(config, folder, reward="hpsv2")
    reader = prompt_reader(processor, max_tokens=_length_of(model), reward="hpsv2")
    scorer = DualEncoder(model, reader, lambda cosine, logit: {"score": cosine, "raw": cosine})
    preprocess = Preprocess.of_folder(processor, key=f"{key}.path").padded()
    return EncoderReward(scorer, config, name="hpsv2", preprocess=preprocess, device=device)


def build_aesthetic(config: AestheticConfig, *, device: Any) -> EncoderReward:
    key = "reward.aesthetic"
    check_config(config, key=key)
    folder = find_folder(config.path, key=f"{key}.path", example=_EXAMPLE)
    example = "sac+logos+ava1-l14-linearMSE.pth of github.com/christophschuhmann/improved-aesthetic-predictor"
    file = find_file(config.head, key=f"{key}.head", example=example)
    state = read_tensors(file, key=f"{key}.head")
    model = load_encoders(folder, CLIPModel, key=f"{key}.path")
    head = build_head(state, width=model.config.projection_dim, key=f"{key}.head", file=file)
    # The text encoder is not needed.
    del model.text_model
    preprocess = Preprocess.of_folder(processor_folder(config, folder, reward="aesthetic"), key=f"{key}.path")
    return EncoderReward(ImageRating(model, head), config, name="aesthetic", preprocess=preprocess, device=device)


def _dual(config: EncoderConfig, cls: Any, numbers: Numbers, *, name: str, device: Any) -> EncoderReward:
    key = f"reward.{name}"
    check_config(config, key=key)
    folder = find_folder(config.path, key=f"{key}.path", example=type(config).path)
    model = load_encoders(folder, cls, key=f"{key}.path")
    processor = processor_folder(config, folder, reward=name)
    reader = prompt_reader(processor, max_tokens=_length_of(model), reward=name)
    preprocess = Preprocess.of_folder(processor, key=f"{key}.path")
    scorer = DualEncoder(model, reader, numbers)
    return EncoderReward(scorer, config, name=name, preprocess=preprocess, device=device)


def _length_of(model: Any) -> int:
    return model.config.text_config.max_position_embeddings


def load_encoders(folder: Path, cls: Any, *, key: str) -> Any:
    """The whole model in fp32 on the CPU. Raises RecipeError when it is of another kind, incomplete or damaged."""
    check_kind(folder, cls, key=key)
    try:
        with no_progress_bars(transformers_logging):
            model, report = cls.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"{key}: {str(folder)!r} does not load as {cls.__name__}: {error} Fetch it again; convert "
            "weights that are not in safetensors."
        ) from error
    # transformers makes weights up for those that it does not find.
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{key}: the weights in {str(folder)!r} lack {missing[0]!r} and {len(missing) - 1} more. Fetch the whole "
            "checkpoint."
        )
    return model


def check_kind(folder: Path, cls: Any, *, key: str) -> None:
    """Raise RecipeError unless the folder's `config.json` is one of the class."""
    result = read_json(folder / "config.json", key=key).get("model_type")
    expected = cls.config_class.model_type
    if result != expected:
        raise RecipeError(
            f"{key}: {str(folder)!r} is a checkpoint of model_type {result!r}, expected {expected!r} ({cls.__name__}). "
            "Give a checkpoint of this scorer."
        )
