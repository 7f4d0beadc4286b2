"""An engine of texts about images that shows the first image of a text to all of its rows, and a model to try it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles.tiny_decoder import TinyDecoder, TinyDecoderConfig
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import Miniature, ModelSpec
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.media import load_image

from conformance_mutants.engine_changes import TEXT_ONLY, texts, with_first_media
from conformance_mutants.mutant import builder, catalog_of, plugin, specs

MODEL = replace(
    text_model.SPEC,
    name="looking-text",
    build=f"{__name__}:build_model",
    inputs={"text": {"condition": "needs"}},
    tiny=Miniature(
        write=f"{text_model.__name__}:write",
        media=f"{__name__}:media",
        sampling={"max_new_tokens": 8},
        lora_layers=8,
        wrap_blocks=2,
    ),
)


class LooksAtImages(TinyDecoder):
    """Positions begin later, the brighter the images of a row are, of which there may be any number."""

    spec: ModelSpec = MODEL
    packs: bool = False

    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Any]:
        return {"brightness": tuple(torch.stack([load_image(r).mean() for r in refs]) for refs in inputs.media)}

    def layout(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, positions, visible = super().layout(batch)
        return tokens, positions + _shift(batch.conditions, tokens), visible

    @torch.no_grad()
    def next_logits(
        self, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any, conditions: Any = None
    ) -> tuple[Tensor, Any]:
        kept, shift = (None, _shift(conditions or {}, tokens)) if cache is None else cache
        logits, kept = super().next_logits(
            tokens, positions=positions + shift, attention_mask=attention_mask, cache=kept
        )
        return logits, (kept, shift)

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        kept, shift = cache
        return super().select_cache(kept, rows), shift[rows]


def _shift(conditions: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """[B, 1]."""
    if not conditions:
        return tokens.new_zeros(len(tokens), 1)
    return torch.stack([50 * levels.sum() for levels in conditions["brightness"]])[:, None].to(tokens.device)


MUTANTS = [
    texts(
        "looks-up-texts",
        "texts-are-about-their-own-media",
        "shows the first image of a text to all rows of that text",
        request=with_first_media,
        track=lambda _, request, track: {"inputs": request.inputs},
    )
]
build = builder(MUTANTS)


def media(folder: Path, *, number: int) -> tuple[MediaRef, ...]:
    file = folder / f"{number}.png"
    Image.new("L", (4 + number, 8), 20 + 40 * number).save(file)
    return (MediaRef(modality="image", role="condition", uri=str(file)),) * (1 + number % 2)


def build_model(config: TinyDecoderConfig, *, device: Any) -> LooksAtImages:
    model = LooksAtImages(device=device)
    model.net.load_state_dict(load_file(Path(config.path) / text_model.WEIGHTS_FILE))
    return model


def catalog() -> Catalog:
    healthy = plugin(models=[MODEL], engines=[replace(TEXT_ONLY, name="healthy-looking")])
    return catalog_of(healthy, engines=specs(MUTANTS, module=__name__))
