"""Janus as two text stages of one decoder: texts, and images made of tokens.

Source: Janus-Pro, arXiv 2501.17811; Janus, arXiv 2410.13848. Verified against transformers'
`JanusForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.chat_templates import render_chat
from unirl.model_host.tokens.causal_lm import CausalLmModel
from unirl.numerics.media import load_picture
from unirl.numerics.pixels import levels

from .config import JanusConfig
from .module import JanusForConditionalGeneration, Mode
from .plugin import SPEC

__all__ = ["JanusModel", "build"]

_SCALE = "guidance_scale"
"""The option that every image has, and no text: by it the two tracks are told apart."""


class _Marks(NamedTuple):
    bos: int
    pad: int
    boi: int
    eoi: int
    image: int


class _Cache(NamedTuple):
    kept: Any
    """transformers' own, of the rows, and under guidance then of their unconditional ones."""
    rows: int
    is_guided: bool


class JanusModel(CausalLmModel):
    """A `unirl.core.roles.TextModel`. Conditions of each input: `pixel_values` [n, 3, H, W] fp32, its images, n >= 0.

    Image tokens are numbers of the codebook. Under guidance each row of them is computed twice, the second time with
    the padding token in place of every prompt token but those that begin a sequence and an image; that padding is seen.
    """

    example = "deepseek-community/Janus-Pro-1B"

    def __init__(self, config: JanusConfig, *, device: torch.device) -> None:
        super().__init__(config, device=device, spec=SPEC, cls=JanusForConditionalGeneration)
        lm: Any = self.causal_lm
        for part in (lm.model.vision_model, lm.model.aligner, lm.model.vqmodel):
            part.requires_grad_(False)
        self._marks = self._read_marks()
        vision = lm.config.vision_config
        self._seen_tokens: int = vision.num_image_tokens
        self._pixels: int = vision.image_size
        self._grid: int = lm.config.vq_config.num_patches
        self._decode_batch = config.decode_batch
        untyped: Any = transformers.AutoImageProcessor
        self._processor: Any = untyped.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    @property
    def packs(self) -> bool:
        """False: a row of image tokens is computed twice."""
        return False

    @property
    def trunk(self) -> torch.nn.Module:
        """All of `trainable`: images enter at its root."""
        return self.causal_lm

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        """As of any language model; of an image, the prompt without its media, the turns, and `<begin_of_image>`."""
        if _SCALE not in sampling.options:
            return super().prompt_tokens(inputs, sampling=sampling)
        bare = replace(inputs, media=((),) * inputs.num_rows)
        result: list[Tensor] = []
        for row, start in enumerate(super().prompt_tokens(bare, sampling=sampling)):
            further: list[int] = []
            for turn in () if inputs.turns is None else inputs.turns[row]:
                if turn.media:
                    raise RecipeError(
                        f"stages.{turn.stage}: got an image to continue from, expected texts: image tokens continue "
                        "none. Generate the image from a stage of text, or from the prompt."
                    )
                further += turn.tokens or self.tokenizer(turn.text, add_special_tokens=False)["input_ids"]
            tokens = torch.cat([start, torch.tensor([*further, self._marks.boi])])
            length = len(tokens) + self._grid**2
            if self._positions and length > self._positions:
                raise RecipeError(
                    f"data: prompt {inputs.texts[row][:40]!r}... takes {length} tokens with its turns and its image; "
                    f"the checkpoint has {self._positions} positions (max_position_embeddings). Leave it out of the "
                    "prompt file, or let the stages above it write less."
                )
            result.append(tokens)
        return result

    def tokenized(self, text: str, media: Sequence[MediaRef], sampling: TextSamplingConfig) -> list[int]:
        """The images, then the text, in the chat template if `sampling.chat` is on. The system prompt comes before it,
        as transformers' processor puts its own."""
        placeholder = self.tokenizer.decode([self._marks.image])
        if placeholder in text:
            raise DataError(f"data: prompt {text[:40]!r} has the token {placeholder!r}, which stands for images.")
        prompt = placeholder * len(media) + text
        if sampling.chat:
            prompt = self._in_chat(text, len(media), sampling)
        if (shown := prompt.count(placeholder)) != len(media):
            raise RecipeError(
                f"sampling.chat: the checkpoint's chat template shows {shown} of {len(media)} images. Use "
                "sampling.chat=false, or Janus's own template."
            )
        start: str | None = self.tokenizer.bos_token
        marked = bool(start) and sampling.chat and prompt.startswith(start)
        tokens: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        image = [self._marks.boi, *[self._marks.image] * self._seen_tokens, self._marks.eoi]
        expanded = [each for token in tokens for each in (image if token == self._marks.image else [token])]
        return expanded if marked else [self._marks.bos, *expanded]

    def _in_chat(self, text: str, num_images: int, sampling: TextSamplingConfig) -> str:
        if self.tokenizer.chat_template is None:
            raise RecipeError(
                "sampling.chat: got true, but the checkpoint's tokenizer has no chat template. Use "
                "sampling.chat=false, or put chat_template.jinja in its folder."
            )
        if sampling.thinking is not None:
            raise RecipeError(
                f"sampling.thinking: got {sampling.thinking}, but the checkpoint's chat template has no such switch. "
                "Leave it unset."
            )
        content = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": text}]
        system = f"{sampling.system_prompt}\n\n" if sampling.system_prompt else ""
        messages = [{"role": "user", "content": content}]
        prompt = render_chat(self.tokenizer, messages, key="sampling.chat", add_generation_prompt=True)
        if text.strip() not in prompt:
            raise RecipeError(
                f"sampling.chat: the checkpoint's chat template leaves {text[:40]!r} out. Use sampling.chat=false, or "
                "Janus's own template."
            )
        return system + prompt

    def conditions(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> Mapping[str, Ragged]:
        """Pixels of each input's images, as the checkpoint's image processor makes them; none of a prompt of images."""
        is_text = _SCALE not in sampling.options
        return {"pixel_values": tuple(self._seen(media if is_text else ()) for media in inputs.media)}

    def _seen(self, media: Sequence[MediaRef]) -> Tensor:
        if not media:
            return torch.zeros(0, 3, self._pixels, self._pixels)
        pictures = [load_picture(ref) for ref in media]
        return self._processor(images=pictures, return_tensors="pt")["pixel_values"]

    def completion_length(self, *, sampling: TextSamplingConfig) -> int | None:
        return self._grid**2 if _SCALE in sampling.options else None

    @torch.no_grad()
    def media_of(self, tokens: Sequence[Tensor], *, sampling: TextSamplingConfig) -> Media:
        """Images [N, 3, H, W] of image tokens, in 8 bits, by the VQ decoder."""
        size = self._grid**2
        if other := [len(row) for row in tokens if len(row) != size]:
            raise BatchError(f"model 'janus': got an image of {other[0]} tokens, expected {size}.")
        step = self._decode_batch or max(1, len(tokens))
        pieces = [torch.stack([*tokens[at : at + step]]).to(self.device) for at in range(0, len(tokens), step)]
        with self.precision():
            decoded = [self.causal_lm(piece, mode="pixels").float() for piece in pieces]
        return Media(kind="image", values=levels((torch.cat(decoded) / 2 + 0.5).clamp(0, 1)))

    def score(
        self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob [T] fp32 of each target, and the entropy [T]."""
        return self._of_targets(
            "log_probs",
            batch,
            targets=batch.targets.to(self.device),
            temperature=temperature,
            with_entropy=with_entropy,
            chunk=self._chunk,
            allowed=batch.allowed,
        )

    def hidden(self, batch: TokenBatch, *, trunk: torch.nn.Module | None = None) -> Tensor:
        """Last hidden state [T, D] at each target's position, of an image without guidance."""
        plain = replace(batch, options={_SCALE: 1.0} if batch.options else {})
        return self._of_targets("hidden", plain, trunk=trunk)

    def _ended(self, batch: TokenBatch, end: Callable[[Tensor, Tensor], Any]) -> Any:
        return self._of_targets("end", batch, end=end)

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: _Cache | None,
        conditions: Mapping[str, Ragged] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, _Cache]:
        """Logits [B, V] fp32 after the last token, and the cache, which is changed in place from call to call. V is
        that of the codebook for an image, and without conditions the tokens are text alone."""
        tokens, mask = tokens.to(self.device), attention_mask.to(self.device)
        is_made = torch.full_like(tokens, cache is not None, dtype=torch.bool)
        is_seen = (tokens == self._marks.image) & mask[:, -tokens.shape[1] :] if cache is None else None
        layout = {"position_ids": positions.to(self.device), "attention_mask": mask}
        with self.precision():
            logits, kept = self._run(
                "logits",
                tokens,
                layout=layout,
                is_made=is_made,
                is_seen=is_seen,
                conditions=conditions or {},
                options=options or {},
                cache=None if cache is None else cache.kept,
            )
        return logits, _Cache(kept, len(tokens), _is_guided(options or {}))

    def select_cache(self, cache: _Cache, rows: Tensor) -> _Cache:
        """The cache of these rows alone, selected in place."""
        index = rows.to(self.device)
        both = torch.cat([index, index + cache.rows]) if cache.is_guided else index
        return cache._replace(kept=super().select_cache(cache.kept, both), rows=len(index))

    def _of_targets(self, mode: Mode, batch: TokenBatch, *, trunk: torch.nn.Module | None = None, **ends: Any) -> Any:
        if batch.attention_mask is None:
            raise BatchError("model 'janus': got packed rows, expected padded ones, as `packs` is false.")
        tokens = batch.tokens.to(self.device)
        index = batch.target_index.to(self.device)
        is_made = torch.zeros_like(tokens, dtype=torch.bool)
        # Every target is one place after the one that predicts it.
        is_made.view(-1)[index + 1] = True
        is_seen = (tokens == self._marks.image) & ~is_made & batch.attention_mask.to(self.device)
        with self.precision():
            return self._run(
                mode,
                tokens,
                layout=self.arguments(batch),
                is_made=is_made,
                is_seen=is_seen,
                conditions=batch.conditions,
                options=batch.options,
                trunk=trunk,
                index=index,
                **ends,
            )

    def _run(
        self,
        mode: Mode,
        tokens: Tensor,
        *,
        layout: dict[str, Any],
        is_made: Tensor,
        is_seen: Tensor | None,
        conditions: Mapping[str, Ragged],
        options: Mapping[str, Any],
        trunk: torch.nn.Module | None = None,
        **settings: Any,
    ) -> Any:
        """The forward of the root, of texts by `options` without a scale. is_made: [B, L] bool, generated tokens."""
        root = self.causal_lm if trunk is None else trunk
        if _SCALE in options:
            if _is_guided(options):
                settings["guidance"] = options[_SCALE]
                tokens = torch.cat([tokens, self._unconditional(tokens, is_made)])
                is_made = is_made.repeat(2, 1)
                layout = {name: value.repeat(2, 1) for name, value in layout.items()}
            return root(tokens, mode=mode, layout=layout, is_made=is_made, **settings)
        pixels = [one for one in conditions.get("pixel_values", ()) if len(one)]
        if pixels and is_seen is not None:
            settings |= {"pixels": torch.cat(pixels).to(self.device), "is_seen": is_seen}
        return root(tokens, mode=mode, layout=layout, **settings)

    def _unconditional(self, tokens: Tensor, is_made: Tensor) -> Tensor:
        """Padding in place of every token of a prompt that begins neither a sequence nor an image."""
        is_kept = is_made | (tokens == self._marks.bos) | (tokens == self._marks.boi)
        return tokens.masked_fill(~is_kept, self._marks.pad)

    def _read_marks(self) -> _Marks:
        """Raises RecipeError, key `model.path`, for a tokenizer that lacks one."""
        names = {"boi": "boi_token", "eoi": "eoi_token", "image": "image_token"}
        texts = {key: getattr(self.tokenizer, name, None) for key, name in names.items()}
        known = self.tokenizer.get_vocab()
        ids = {key: None if text is None else known.get(text) for key, text in texts.items()}
        ids |= {"bos": self.tokenizer.bos_token_id, "pad": self.tokenizer.pad_token_id}
        if missing := sorted(key for key, token in ids.items() if token is None):
            raise RecipeError(
                f"model.path: the tokenizer in {str(self.folder)!r} lacks its tokens {', '.join(missing)}, which mark "
                "images and sequences. Use the checkpoint's own tokenizer, in the transformers layout."
            )
        return _Marks(**cast("dict[str, int]", ids))


def build(config: JanusConfig, *, device: Any) -> JanusModel:
    """The model, its vision tower and VQ model frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return JanusModel(config, device=torch.device(device))


def _is_guided(options: Mapping[str, Any]) -> bool:
    return options.get(_SCALE, 1.0) != 1.0
