"""Base class of language models that read images, on transformers' own classes and the checkpoint's processor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.media import load_picture

from .causal_lm import CausalLmModel
from .image_lm_config import ImageLmConfig
from .image_lm_files import load_processor
from .placed_images import Placement, placing, shown, stacked

__all__ = ["ImageLmModel"]

_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Outputs of processors that are about tokens; all others are about the images."""


class _Cache(NamedTuple):
    kept: Any
    """transformers' own."""
    shift: Tensor
    """[B, 1] int64, <= 0. An image may count fewer positions than it has tokens."""


class ImageLmModel(CausalLmModel):
    """A language model that reads images. Conditions of each input: what the checkpoint's processor makes of its
    images, under its names, such as `pixel_values` and `image_grid_thw`.

    The vision tower sees each image of a batch once, however many samples share it.
    """

    def __init__(
        self,
        config: ImageLmConfig,
        *,
        device: torch.device,
        spec: ModelSpec,
        cls: Any,
        siblings: Mapping[str, str] | None = None,
        lazy: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """See `CausalLmModel`.  cls: one whose trunk encodes images by `get_image_features`."""
        super().__init__(
            config,
            device=device,
            spec=spec,
            cls=cls,
            siblings=siblings,
            lazy=lazy,
            trust_remote_code=trust_remote_code,
        )
        trunk: Any = self.trunk
        for method in ("get_image_features", "get_placeholder_mask"):
            if not hasattr(trunk, method):
                raise RecipeError(
                    f"model.path: {cls.__name__!r} has no {method!r} in its trunk, with which transformers puts images "
                    "in their places. Choose a checkpoint of another architecture, or write a model plugin."
                )
        parameters = inspect.signature(trunk.forward).parameters
        if not config.train_vision:
            language = {id(parameter) for parameter in trunk.get_decoder().parameters()}
            for parameter in trunk.parameters():
                parameter.requires_grad_(id(parameter) in language and parameter.requires_grad)
        placing(trunk)
        self._trunk = trunk
        self.processor: Any = load_processor(
            self.folder, config, tokenizer=self.tokenizer, trust_remote_code=trust_remote_code
        )
        self._of_images = config.image
        self.tokenizer.chat_template = self.processor.chat_template or self.tokenizer.chat_template
        settings: Any = trunk.config
        self._image_token: int = settings.image_token_id
        self._has_grid = hasattr(trunk, "get_rope_index")
        # With positions along three dims, types are for these alone.
        types = ["token_type_ids", *(() if self._has_grid else ("mm_token_type_ids",))]
        self._types = [name for name in types if name in {*self.processor.model_input_names} & parameters.keys()]
        self._placeholder: str = self.processor.image_token
        ends = [getattr(settings, f"vision_{end}_token_id", None) for end in ("start", "end")]
        around = ["" if end is None else self.tokenizer.decode([end]) for end in ends]
        self._image = self._placeholder.join(around)

    @property
    def packs(self) -> bool:
        """As any language model, unless images attend to later tokens: transformers has no packed mask for these."""
        return super().packs and not self._types

    def tokenized(self, text: str, media: Sequence[MediaRef], sampling: TextSamplingConfig) -> list[int]:
        """The images, then the text, in the chat template if `sampling.chat` is on, as the processor expands them.

        Raises DataError for an image that cannot be read and for images that the processor does not take, and
        RecipeError for a chat template that leaves something out.
        """
        for token in (self._placeholder, self.tokenizer.decode([self._image_token])):
            if token in text:
                raise DataError(f"data: prompt {text[:40]!r} has the token {token!r}, which stands for images.")
        prompt = self._in_chat(text, len(media), sampling) if sampling.chat else self._image * len(media) + text
        start: str | None = self.tokenizer.bos_token
        has_start = bool(start) and prompt.startswith(start)
        result = self._processed(prompt, media, add_special_tokens=not (sampling.chat and has_start))
        tokens: Tensor = result["input_ids"][0]
        for name in self._types:
            if name in result and not torch.equal(result[name][0].bool(), self._is_typed(tokens)):
                raise RecipeError(
                    f"model.path: the processor gives {name!r} that do not follow from the image tokens of a prompt; "
                    "this model replays none other. Choose a checkpoint of another architecture."
                )
        return cast("Any", tokens).tolist()

    def _in_chat(self, text: str, num_images: int, sampling: TextSamplingConfig) -> str:
        content = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": text}]
        prompt = self.in_template(content, sampling)
        shown = prompt.count(self._placeholder)
        if shown != num_images:
            raise RecipeError(
                f"sampling.chat: the checkpoint's chat template shows {shown} of {num_images} images. Use "
                "sampling.chat=false, or the template of a vision-language model."
            )
        for key, part in (("system_prompt", sampling.system_prompt or ""), ("chat", text)):
            if part.strip() not in prompt:
                raise RecipeError(
                    f"sampling.{key}: the checkpoint's chat template leaves {part[:40]!r} out. Use "
                    "sampling.chat=false, or another template."
                )
        return prompt

    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """Outputs of the processor for each input's images."""
        del sampling
        each = [self._processed(self._image * len(media), media) for media in inputs.media]
        names = [name for name in each[0] if name not in _OF_TOKENS]
        return {name: tuple(one[name] for one in each) for name in names}

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """As for any language model, with the images, and the positions of each sample: those of images may count along
        time, height and width."""
        layout = super().arguments(batch)
        tokens = batch.tokens.cpu()
        if batch.cu_seqlens is None:
            assert batch.attention_mask is not None
            samples = batch.attention_mask.cpu()[:, None] & torch.eye(len(tokens), dtype=torch.bool)[..., None]
        else:
            numbers = torch.arange(len(batch.lengths)).repeat_interleave(batch.cu_seqlens.cpu().diff())
            samples = (numbers == torch.arange(len(batch.lengths))[:, None])[:, None]
        is_prompt = torch.ones_like(tokens, dtype=torch.bool)
        # Every target is one place after the one that predicts it.
        is_prompt.view(-1)[batch.target_index.cpu() + 1] = False
        images, positions, _ = self._placed(tokens, samples, batch.conditions, is_prompt=is_prompt, may_go_on=False)
        if positions is None:
            return {**layout, **images}
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
        """Logits [B, V] fp32 after the last token, and the cache, which is changed in place from call to call. Without
        conditions the tokens are text alone."""
        positions = positions.to(self.device)
        if cache is None and not conditions:
            cache = _Cache(None, torch.zeros((len(tokens), 1), dtype=torch.int64, device=self.device))
        if cache is None:
            mask = attention_mask.cpu()
            samples = mask[:, None] & torch.eye(len(tokens), dtype=torch.bool)[..., None]
            images, places, shift = self._placed(
                tokens.cpu(), samples, conditions or {}, is_prompt=mask, may_go_on=True
            )
            cache = _Cache(None, shift)
            places = positions if places is None else places
        else:
            images, places = {}, positions + cache.shift
            places = places.expand(3, -1, -1) if self._has_grid else places
        with self.precision():
            logits, kept = self.causal_lm(
                tokens.to(self.device),
                position_ids=places,
                attention_mask=attention_mask.to(self.device),
                cache=cache.kept,
                use_cache=True,
                last_logits=True,
                **images,
            )
        return logits, cache._replace(kept=kept)

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows only, selected in place: the rows that ended are not needed again."""
        index = rows.to(self.device)
        return _Cache(super().select_cache(cache.kept, index), cache.shift[index])

    def plain_arguments(self, prompt: Tensor, answer: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Arguments of transformers' own forward for one sample: prompt [P], answer [L], and the tensors of its images,
        as its processor returns them."""
        whole = torch.cat([prompt, answer])[None].to(self.device)
        result: dict[str, Any] = {"input_ids": whole, **{name: one.to(self.device) for name, one in conditions.items()}}
        types = torch.nn.functional.pad(self._is_typed(prompt), (0, len(answer)))[None].long().to(self.device)
        if self._has_grid:
            result["mm_token_type_ids"] = types
        return {**result, **dict.fromkeys(self._types, types)}

    def _is_typed(self, tokens: Tensor) -> Tensor:
        """Tokens that the processor marks as those of images, ends of images among them where it does so."""
        return torch.isin(tokens, torch.tensor(self.processor.image_token_ids))

    def _placed(
        self, tokens: Tensor, samples: Tensor, conditions: Mapping[str, Any], *, is_prompt: Tensor, may_go_on: bool
    ) -> tuple[dict[str, Any], Tensor | None, Tensor]:
        """Images as the trunk takes them, positions [3, B, L] of tokens [B, L] where they are along three dims, and the
        shift [n, 1] of what follows.

        samples: [n, B, L] bool, the tokens of each sample.  conditions: name -> n entries.  is_prompt: [B, L] bool.
        may_go_on: whether completions may follow within `is_prompt`.
        """
        is_image = (tokens == self._image_token) & is_prompt & samples.any(dim=0)
        shift = torch.zeros((len(samples), 1), dtype=torch.int64)
        positions = None
        if self._has_grid:
            positions = torch.zeros((3, *tokens.shape), dtype=torch.int64)
            for number, mine in enumerate(samples):
                grids = {name: values[number].cpu() for name, values in conditions.items() if "grid" in name}
                if (grid := grids.get("image_grid_thw")) is not None:
                    merge: int = self._trunk.config.vision_config.spatial_merge_size
                    size = int(grid.prod(dim=1).sum()) // merge**2
                    is_image = shown(is_image, mine, size, sample=number, cut=may_go_on)
                types = is_image[mine][None].int()
                places, shift[number] = self._trunk.get_rope_index(tokens[mine][None], types, **grids)
                positions[:, mine] = places[:, 0]
            positions = positions.to(self.device)
        arguments = self._images(is_image, samples, conditions, may_go_on=may_go_on)
        arguments |= dict.fromkeys(self._types, (self._is_typed(tokens) & is_prompt).long().to(self.device))
        return arguments, positions, shift.to(self.device)

    def _images(
        self, is_image: Tensor, samples: Tensor, conditions: Mapping[str, Any], *, may_go_on: bool
    ) -> dict[str, Any]:
        if not conditions:
            raise BatchError(
                f"model {self.spec.name!r}: got prompts without the conditions of their inputs, expected those of "
                "`conditions`. Every prompt has an image."
            )
        # Samples of one input share its tensors.
        keys = [id(value) for value in next(iter(conditions.values()))]
        rows = [keys.index(key) for key in dict.fromkeys(keys)]
        values = {name: [each[row] for row in rows] for name, each in conditions.items()}
        placement = Placement(
            is_image=is_image.to(self.device),
            samples=samples.to(self.device),
            inputs=[rows.index(keys.index(key)) for key in keys],
            lengths={name: [len(one) for one in each] for name, each in values.items()},
            may_go_on=may_go_on,
        )
        return {"placement": placement, **{name: stacked(each).to(self.device) for name, each in values.items()}}

    def _processed(self, prompt: str, media: Sequence[MediaRef], **settings: Any) -> Mapping[str, Tensor]:
        images = [[load_picture(ref) for ref in media]] if media else None
        try:
            result = self.processor(
                text=[prompt],
                images=images,
                return_tensors="pt",
                # With each call: some processors have defaults that override those of the image processor.
                images_kwargs=dict(self._of_images),
                **settings,
            )
        except (ValueError, IndexError, StopIteration) as error:
            raise DataError(f"media {', '.join(repr(ref.uri) for ref in media)}: {error}.") from error
        for name, value in result.items():
            if not isinstance(value, Tensor):
                raise RecipeError(
                    f"model.path: the processor gives {name!r} as {type(value).__name__}, expected a tensor. Choose a "
                    "checkpoint of another architecture."
                )
        return result
