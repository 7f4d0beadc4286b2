"""Qwen2.5-VL and Qwen3-VL as decoders of tokens that see images, on transformers' own classes.

Source: Qwen2.5-VL, arXiv 2502.13923; Qwen3-VL, arXiv 2511.21631. Verified against transformers'
`Qwen2_5_VLForConditionalGeneration` and `Qwen3VLForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.media import load_image
from unirl.numerics.tokens.causal_lm import CausalLmModel

from .config import QwenVlConfig
from .plugin import QWEN3, SPEC
from .vision_lm import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

__all__ = ["QwenVlModel", "build", "build_qwen3"]

_ARCHITECTURES = {
    Qwen2_5_VLForConditionalGeneration.__name__: SPEC.name,
    Qwen3VLForConditionalGeneration.__name__: QWEN3.name,
}


def build(config: QwenVlConfig, *, device: Any, lazy: bool = False) -> QwenVlModel:
    """A Qwen2.5-VL. Raises RecipeError when the checkpoint or a setting is wrong."""
    return QwenVlModel(
        config, device=torch.device(device), lazy=lazy, spec=SPEC, cls=Qwen2_5_VLForConditionalGeneration
    )


def build_qwen3(config: QwenVlConfig, *, device: Any, lazy: bool = False) -> QwenVlModel:
    """A dense Qwen3-VL. Raises RecipeError when the checkpoint or a setting is wrong."""
    return QwenVlModel(config, device=torch.device(device), lazy=lazy, spec=QWEN3, cls=Qwen3VLForConditionalGeneration)


class _Cache(NamedTuple):
    kept: Any
    """transformers' own."""
    shift: Tensor
    """[B, 1] int64, <= 0. An image counts fewer positions than it has tokens."""


class QwenVlModel(CausalLmModel):
    """A `unirl.core.roles.MediaTextModel`. Conditions, of each input: `pixel_values` [P, D] fp32, the patches of its
    images as the checkpoint's processor makes them, and `image_grid_thw` [images, 3] int64, patches per dim.

    The vision tower is frozen. It sees each image of a batch once, however many samples share it.
    """

    example = "Qwen/Qwen2.5-VL-3B-Instruct"
    # Of Qwen2.5-VL, as it is published.
    renames: ClassVar[Mapping[str, str]] = {
        r"visual\.": "model.visual.",
        r"model\.(?!language_model\.|visual\.)": "model.language_model.",
    }

    def __init__(self, config: QwenVlConfig, *, device: torch.device, lazy: bool, spec: ModelSpec, cls: Any) -> None:
        super().__init__(config, device=device, spec=spec, cls=cls, siblings=_ARCHITECTURES, lazy=lazy)
        self._trunk: Any = self.trunk
        self._trunk.visual.requires_grad_(False)
        try:
            # Not torchvision's, where that is installed: its pixels differ in the last bits.
            self.processor: Any = AutoImageProcessor.from_pretrained(self.folder, backend="pil", local_files_only=True)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"model.path: the image processor in {str(self.folder)!r} does not load: {error} Fetch the checkpoint "
                "again, with preprocessor_config.json."
            ) from error
        settings: Any = self._trunk.config
        self._image_token: int = settings.image_token_id
        self._placeholder: str = self.tokenizer.decode([self._image_token])
        self._image: str = self.tokenizer.decode(
            [settings.vision_start_token_id, self._image_token, settings.vision_end_token_id]
        )

    def whole_prompt(self, text: str, media: Sequence[MediaRef], sampling: TextSamplingConfig) -> str:
        """The images, then the text, in the chat template if `sampling.chat` is on. An image stands as one placeholder
        for every `merge_size` x `merge_size` patches.

        Raises DataError for an image that cannot be read, and RecipeError for a chat template without images.
        """
        if self._placeholder in text:
            raise DataError(f"data: prompt {text[:40]!r} has the token {self._placeholder!r}, which stands for images.")
        content = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
        prompt = self.in_template(content, sampling) if sampling.chat else self._image * len(media) + text
        first, *others = prompt.split(self._placeholder)
        if len(others) != len(media):
            raise RecipeError(
                f"sampling.chat: the checkpoint's chat template shows {len(others)} of {len(media)} images. Use "
                "sampling.chat=false, or the template of a vision-language model."
            )
        counts = [int(self._pixels([ref])["image_grid_thw"].prod()) // self._patches_per_token for ref in media]
        return first + "".join(self._placeholder * n + other for n, other in zip(counts, others, strict=True))

    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """Pixel patches and grids of each input's images."""
        each = [self._pixels(media) for media in inputs.media]
        return {name: tuple(one[name] for one in each) for name in ("pixel_values", "image_grid_thw")}

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """As for any language model, with the images, and the positions of each sample: those of images count along
        time, height and width."""
        layout = super().arguments(batch)
        if batch.cu_seqlens is None:
            assert batch.attention_mask is not None
            samples = batch.attention_mask.cpu()[:, None] & torch.eye(len(batch.tokens), dtype=torch.bool)[..., None]
        else:
            numbers = torch.arange(len(batch.lengths)).repeat_interleave(batch.cu_seqlens.cpu().diff())
            samples = (numbers == torch.arange(len(batch.lengths))[:, None])[:, None]
        images, positions, _ = self._placed(batch.tokens, samples, batch.conditions)
        # Where no mask is given, transformers tells packed samples apart by plain positions before the three others.
        packed = [layout["position_ids"][None]] if batch.cu_seqlens is not None else []
        return {**layout, **images, "position_ids": torch.cat([*packed, positions])}

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: Any,
        conditions: Mapping[str, Ragged] | None = None,
    ) -> tuple[Tensor, Any]:
        """Logits [B, V] fp32 after the last token, and the cache, which is changed in place from call to call."""
        if cache is None:
            samples = attention_mask.cpu()[:, None] & torch.eye(len(tokens), dtype=torch.bool)[..., None]
            images, places, shift = self._placed(tokens, samples, conditions or {})
            cache = _Cache(None, shift)
        else:
            images, places = {}, (positions.to(self.device) + cache.shift).expand(3, -1, -1)
        with self.precision():
            logits, kept = self.causal_lm(
                tokens.to(self.device),
                position_ids=places,
                attention_mask=attention_mask.to(self.device),
                past_key_values=cache.kept,
                use_cache=True,
                last_logits=True,
                **images,
            )
        return logits, cache._replace(kept=kept)

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows alone, selected in place: the rows that ended are not needed again."""
        index = rows.to(self.device)
        return _Cache(super().select_cache(cache.kept, index), cache.shift[index])

    def _placed(
        self, tokens: Tensor, samples: Tensor, conditions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Images as the trunk takes them, positions [3, B, L] of tokens [B, L], and the shift [n, 1] of what follows.

        samples: [n, B, L] bool, the tokens of each sample.  conditions: name -> n entries.
        """
        ids = tokens.cpu()
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        positions = torch.zeros((3, *ids.shape), dtype=torch.int64)
        pixels = conditions.get("pixel_values", ())
        grids = [grid.cpu() for grid in conditions.get("image_grid_thw", ())]
        shifts: list[Tensor] = []
        for number, mine in enumerate(samples):
            own, grid = ids[mine], grids[number] if grids else None
            expected = 0 if grid is None else int(grid.prod(dim=1).sum()) // self._patches_per_token
            shows = own == self._image_token
            # The prompt's come first; a completion may go on with the same token.
            shows &= shows.cumsum(dim=0) <= expected
            if int(shows.sum()) != expected:
                raise BatchError(
                    f"model {self.spec.name!r}: sample {number} has {int(shows.sum())} image tokens, expected "
                    f"{expected} for its images. Its prompt and its conditions are of different inputs."
                )
            is_image[mine] = shows
            places, shift = self._trunk.get_rope_index(own[None], shows[None].int(), image_grid_thw=grid)
            positions[:, mine] = places[:, 0]
            shifts.append(shift[0])
        arguments: dict[str, Any] = {"is_image": is_image.to(self.device)}
        if grids:
            # Samples of one input share its tensors.
            first = {id(patches): number for number, patches in reversed(list(enumerate(pixels)))}
            start, of = 0, dict[int, range]()
            for number in sorted(first.values()):
                of[number] = range(start, start := start + len(grids[number]))
            arguments |= {
                "images": [image for patches in pixels for image in of[first[id(patches)]]],
                "pixel_values": torch.cat([pixels[number] for number in of]).to(self.device),
                "image_grid_thw": torch.cat([grids[number] for number in of]).to(self.device),
            }
        return arguments, positions.to(self.device), torch.stack(shifts).to(self.device)

    @property
    def _patches_per_token(self) -> int:
        return self._trunk.visual.spatial_merge_size**2

    def _pixels(self, media: Sequence[MediaRef]) -> Mapping[str, Tensor]:
        images = [load_image(ref) for ref in media]
        # Files of 8 bits come back exactly.
        levels = [(image * 255).round().byte().permute(1, 2, 0).numpy() for image in images]
        try:
            return self.processor([Image.fromarray(level) for level in levels], return_tensors="pt")
        except ValueError as error:
            raise DataError(f"media {', '.join(repr(ref.uri) for ref in media)}: {error}.") from error
