"""Base class of language models on transformers' own classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from unirl.core.errors import DataError, RecipeError
from unirl.core.roles import DivergenceKind, OutputHead, TextModel, TokenBatch
from unirl.core.specs.check import check_config
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.tokens.divergence import token_divergence
from unirl.numerics.tokens.shared_tokens import SharedTokens

from ..attention import is_flash
from ..chat_templates import render_chat
from ..checkpoint_problems import media_tokens, past_embedding
from ..lazy_weights import CheckpointValues
from ..model_files import dtype_of
from .cache_rows import select_rows
from .causal_lm_config import CausalLmConfig
from .causal_lm_files import attention_of, check_architecture, empty_causal_lm, find, load_causal_lm, load_tokenizer
from .output_scale import measured_output_scale
from .token_scores import trunk_of

__all__ = ["CausalLmModel", "packed_offsets"]


_ANSWER = "unirl-completion"
"""Stands for a completion in the chat template."""


def _positions(config: Any) -> int:
    """Most tokens of a text; 0 where the checkpoint scales its positions or has none, and so sets no bound."""
    scaling: Any = getattr(config, "rope_parameters", None) or {}
    # Models with layers of several kinds have the settings of each.
    each = [scaling] if "rope_type" in scaling or not scaling else [one for one in scaling.values() if one]
    is_scaled = any(one.get("rope_type", "default") != "default" for one in each)
    return 0 if is_scaled else int(getattr(config, "max_position_embeddings", None) or 0)


class CausalLmModel(TextModel):
    """A language model of transformers. A subclass names an `example` of a hub id."""

    example: ClassVar[str]
    renames: ClassVar[Mapping[str, str]] = {}
    """Where the checkpoint names weights otherwise than the module, see `unirl.model_host.lazy_weights`."""

    def __init__(
        self,
        config: CausalLmConfig,
        *,
        device: torch.device,
        spec: ModelSpec,
        cls: Any,
        siblings: Mapping[str, str] | None = None,
        lazy: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """cls: a class of transformers with `TokenScores` mixed in.  siblings: see `check_architecture`.

        lazy: see `unirl.core.roles.Model`.

        Raises RecipeError when the checkpoint or a setting is wrong.
        """
        check_config(config, key="model")
        self.spec = spec
        self.device = device
        self.autocast = (
            None if config.autocast is None else dtype_of(config.autocast, key="model.autocast", model=spec.name)
        )
        self.attention = attention_of(config, device=device, cls=cls)
        self.folder = find(config, example=self.example)
        # Again, for the files of a hub id.
        check_config(dataclasses.replace(config, path=str(self.folder)), key="model")
        check_architecture(self.folder, name=cls.__name__, siblings=siblings or {})
        self._values: CheckpointValues | None = None
        if lazy:
            loaded, self._values = empty_causal_lm(
                self.folder, config, cls=cls, attention=self.attention, renames=self.renames
            )
        else:
            loaded = load_causal_lm(self.folder, config, cls=cls, attention=self.attention).to(device)
        loaded.output_scale = measured_output_scale(loaded)
        self.causal_lm: torch.nn.Module = loaded
        self.tokenizer: Any = load_tokenizer(self.folder, trust_remote_code=trust_remote_code)
        self._rows: int = loaded.get_input_embeddings().weight.shape[0]
        tokens, media = self.tokenizer.get_vocab(), media_tokens(self.folder)
        if problem := past_embedding(tokens, rows=self._rows, media=media, where=str(self.folder)):
            raise RecipeError(f"model.path: {problem}")
        self._chunk = config.logits_chunk or None
        self._stop_tokens = _stop_tokens(loaded, self.tokenizer)
        self._positions = _positions(loaded.config.get_text_config())

    @property
    def trainable(self) -> torch.nn.Module:
        return self.causal_lm

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """See `unirl.core.roles.Model`."""
        assert self._values is not None, "the model was not built lazily"
        self._values.fill(tensors)

    def split_sequence(self, mesh: Any) -> None:
        """See `unirl.core.roles.Model`; for those whose spec says `splits_sequence`. Generation with a cache
        stays whole on every rank."""
        model: Any = self.causal_lm
        model.shared_tokens = SharedTokens(self.trunk, mesh, attention=self.attention)

    @property
    def trunk(self) -> torch.nn.Module:
        return trunk_of(self.causal_lm)

    @property
    def hidden_size(self) -> int:
        settings: Any = self.causal_lm.config
        return settings.get_text_config().hidden_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Stop tokens of generation_config.json; else the end-of-text token of config.json; else the tokenizer's."""
        return self._stop_tokens

    @property
    def vocabulary(self) -> dict[str, int]:
        """Vocabulary of the tokenizer, added tokens included."""
        return dict(self.tokenizer.get_vocab())

    @property
    def pad_token(self) -> int:
        """The tokenizer's padding token, else the first stop token."""
        result: int | None = self.tokenizer.pad_token_id
        return result if result is not None else next(iter(self._stop_tokens), 0)

    @property
    def packs(self) -> bool:
        """True with flash attention. sdpa and eager also take packed rows and give the same numbers, but their cost is
        quadratic in all tokens of the row, while that of a padded row is quadratic in the longest sample."""
        return is_flash(self.attention)

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        """Tokens [P] int64 of each input on the CPU, in the checkpoint's chat template unless `sampling.chat` is off.

        Raises RecipeError for a chat template that is missing or lacks a requested switch, and for a prompt without
        tokens or with more than the checkpoint has positions.
        """
        if not sampling.chat and (sampling.system_prompt or sampling.thinking is not None):
            key = "system_prompt" if sampling.system_prompt else "thinking"
            raise RecipeError(
                f"sampling.{key}: it is part of the chat template, which sampling.chat=false leaves out; unset one."
            )
        rows = [self.tokenized(*one, sampling) for one in zip(inputs.texts, inputs.media, strict=True)]
        for prompt, row in zip(inputs.texts, rows, strict=True):
            if not row:
                raise RecipeError(f"data: prompt {prompt!r} has no tokens; write something.")
            self._check_rows(row, f"data: prompt {prompt[:40]!r}")
            if self._positions and len(row) >= self._positions:
                raise RecipeError(
                    f"data: prompt {prompt[:40]!r}... has {len(row)} tokens; the checkpoint has {self._positions} "
                    "positions (max_position_embeddings), for prompt and completion. Leave it out of the prompt file."
                )
        return [torch.tensor(row, dtype=torch.int64) for row in rows]

    def _check_rows(self, row: Sequence[int], what: str) -> None:
        """Raise DataError for a token of media that a model of texts alone has no embedding for."""
        if past := [token for token in row if token >= self._rows]:
            raise DataError(
                f"{what} has the token {self.tokenizer.decode(past[:1])!r} with id {past[0]}, expected ids below "
                f"{self._rows}, the rows of the model's embedding. Leave it out."
            )

    def tokenized(self, text: str, media: Sequence[MediaRef], sampling: TextSamplingConfig) -> list[int]:
        """The tokens of one prompt: in the chat template, if `sampling.chat` is on."""
        del media
        prompt = self.in_template(text, sampling) if sampling.chat else text
        # The template writes the special tokens itself.
        return self.tokenizer(prompt, add_special_tokens=not sampling.chat)["input_ids"]

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        """Each sample's text, without special tokens; `<think>` is not special in tokenizers of Qwen and is kept."""
        return [
            self.tokenizer.decode(
                cast("Any", row).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for row in tokens
        ]

    def observation_tokens(
        self, texts: Sequence[str], *, after: Sequence[Tensor], role: str, sampling: TextSamplingConfig
    ) -> list[Tensor]:
        """See `unirl.core.roles.TextModel`: what the chat template writes behind a message of the assistant when one of
        this role follows. Its first token is left out where the completion ends with it.

        Raises RecipeError for a template that has no such role, or leaves the text out.
        """
        result: list[Tensor] = []
        for text, completion in zip(texts, after, strict=True):
            written = self._observed(text, role, sampling) if sampling.chat else text
            row: list[int] = self.tokenizer(written, add_special_tokens=False)["input_ids"]
            self._check_rows(row, f"observation {text[:40]!r}")
            last = cast("list[int]", cast("Any", completion[-1:]).tolist())
            row = row[1:] if sampling.chat and last == row[:1] and last[0] in self._stop_tokens else row
            result.append(torch.tensor(row, dtype=torch.int64))
        return result

    def _observed(self, text: str, role: str, sampling: TextSamplingConfig) -> str:
        messages = [("user", "-"), ("assistant", _ANSWER), (role, text)]
        whole = self._rendered([{"role": by, "content": content} for by, content in messages], sampling)
        _, answer, behind = whole.partition(_ANSWER)
        if not answer or text.strip() not in behind:
            raise RecipeError(
                f"environment.role: got {role!r}, but the checkpoint's chat template leaves messages of this role or "
                "of the assistant out. Use another role, or sampling.chat=false."
            )
        return behind

    def completion_tokens(self, texts: Sequence[str]) -> list[Tensor]:
        """See `unirl.core.roles.TextModel`. The stop token is the tokenizer's end of text, if it is one of the
        checkpoint's stop tokens, as in its chat template; else the first of these."""
        own: int | None = self.tokenizer.eos_token_id
        end = own if own in self._stop_tokens else next(iter(self._stop_tokens), None)
        if end is None:
            raise RecipeError("model: the checkpoint has no stop token, which ends a stored completion.")
        result: list[Tensor] = []
        for text in texts:
            row: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            self._check_rows(row, f"stored completion {text[:60]!r}")
            tokens = torch.tensor([*row, end], dtype=torch.int64)
            (again,) = self.texts([tokens])
            stop = next((token for token in row if token in self._stop_tokens), None)
            if again != text or stop is not None:
                why = f"a stop token, {self.tokenizer.decode([stop])!r}" if stop is not None else f"{again[:60]!r}"
                raise DataError(
                    f"stored completion {text[:60]!r}: got {why} from its tokens, expected the same text again. Remove "
                    "special tokens and unusual characters from it."
                )
            result.append(tokens)
        return result

    def score(
        self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob [T] fp32 of each target, and the entropy [T]; the same for padded and packed batches."""
        with self.precision():
            return self.causal_lm(
                batch.tokens.to(self.device),
                **self.arguments(batch),
                # A cache would make transformers read a packed row as one text.
                use_cache=False,
                target_index=batch.target_index.to(self.device),
                targets=batch.targets.to(self.device),
                temperature=temperature,
                with_entropy=with_entropy,
                chunk=self._chunk,
                allowed=batch.allowed,
            )

    @torch.no_grad()
    def output_head(self, batch: TokenBatch) -> OutputHead:
        """See `unirl.core.roles.TextModel`."""
        # A copy of the weight: a backend may free or swap it after the forward. It is as large as one chunk of logits.
        hidden, weight = self._ended(batch, lambda hidden, weight: (hidden, weight.clone()))
        return OutputHead(hidden=hidden, weight=weight)

    def divergence(
        self,
        batch: TokenBatch,
        *,
        teacher: OutputHead,
        kind: DivergenceKind,
        beta: float,
        top_k: int | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """See `unirl.core.roles.TextModel`; the same for padded and packed batches."""
        settings: dict[str, Any] = {"kind": kind, "beta": beta, "top_k": top_k, "temperature": temperature}
        targets = batch.targets.to(self.device)

        def compared(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return token_divergence(
                hidden, weight, targets, teacher=teacher, chunk=self._chunk, allowed=batch.allowed, **settings
            )

        return self._ended(batch, compared)

    def _ended(self, batch: TokenBatch, end: Callable[[Tensor, Tensor], Any]) -> Any:
        with self.precision():
            return self.causal_lm(
                batch.tokens.to(self.device),
                **self.arguments(batch),
                use_cache=False,
                target_index=batch.target_index.to(self.device),
                end=end,
            )

    def hidden(self, batch: TokenBatch, *, trunk: torch.nn.Module | None = None) -> Tensor:
        """Last hidden state [T, D] at each target's position; the same for padded and packed batches."""
        with self.precision():
            outputs = (self.trunk if trunk is None else trunk)(
                batch.tokens.to(self.device),
                **self.arguments(batch),
                use_cache=False,
            )
        states: Tensor = outputs.last_hidden_state
        return states.flatten(0, 1)[batch.target_index.to(self.device)]

    @torch.no_grad()
    def next_logits(
        self, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Logits [B, V] fp32 after the last token, and the cache, which is changed in place from call to call."""
        with self.precision():
            return self.causal_lm(
                tokens.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=attention_mask.to(self.device),
                cache=cache,
                use_cache=True,
                last_logits=True,
            )

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows only, selected in place: the rows that ended are not needed again."""
        return select_rows(cache, rows.to(self.device))

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """Arguments of the forward that tell which tokens belong to one sample.

        Padded: the mask [B, L], of which transformers makes a causal one; none where all padding is on the right, for
        no token sees what comes after it, and sdpa has its fast kernels without a mask alone. Flash attention keeps the
        mask: it leaves the padding out. Packed: no mask. transformers (5.12 to 5.22) then reads the samples from
        positions that restart, and makes a block-diagonal causal mask [1, 1, L, L] of them for sdpa and eager; it would
        do so for flash attention in every layer again, so that one is given the offsets.
        """
        positions = batch.positions.to(self.device)
        layout: dict[str, Any] = {"position_ids": positions}
        leaves_padding = is_flash(self.attention)
        if batch.attention_mask is None:
            return {**layout, **packed_offsets(positions)} if leaves_padding else layout
        mask = batch.attention_mask.to(self.device)
        is_causal_enough = not leaves_padding and bool((mask[:, 1:] <= mask[:, :-1]).all())
        return layout if is_causal_enough else {**layout, "attention_mask": mask}

    def plain_arguments(self, prompt: Tensor, answer: Tensor, conditions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Arguments of transformers' own forward for one sample alone: prompt [P], answer [L]."""
        del conditions
        return {"input_ids": torch.cat([prompt, answer])[None].to(self.device)}

    def precision(self) -> AbstractContextManager[Any]:
        """Context of a forward: autocast, if set."""
        return torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()

    def in_template(self, content: str | Sequence[Mapping[str, str]], sampling: TextSamplingConfig) -> str:
        """The chat template around what the user says. Raises RecipeError, key `sampling`, when it cannot be."""
        template: str | None = self.tokenizer.chat_template
        if template is None:
            raise RecipeError(
                "sampling.chat: got true, but the checkpoint's tokenizer has no chat template. Use "
                "sampling.chat=false, or put chat_template.jinja in its folder."
            )
        if sampling.thinking is not None and "enable_thinking" not in template:
            raise RecipeError(
                f"sampling.thinking: got {sampling.thinking}, but the checkpoint's chat template has no such "
                "switch (enable_thinking). Leave it unset."
            )
        return self._rendered([{"role": "user", "content": content}], sampling)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], sampling: TextSamplingConfig) -> str:
        switch: dict[str, Any] = {} if sampling.thinking is None else {"enable_thinking": sampling.thinking}
        system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
        conversation = [*system, *messages]
        return render_chat(self.tokenizer, conversation, key="sampling.chat", add_generation_prompt=True, **switch)


def packed_offsets(positions: Tensor) -> dict[str, Any]:
    """Offsets of the samples of a packed row, as flash attention takes them through transformers.

    positions: [1, L], from 0 at the first token of each sample.
    """
    flat = positions.flatten()
    end = torch.tensor([len(flat)], device=flat.device)
    offsets = torch.cat([(flat == 0).nonzero().flatten(), end]).to(torch.int32)
    longest = int(offsets.diff().max())
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def _stop_tokens(causal_lm: Any, tokenizer: Any) -> tuple[int, ...]:
    text = causal_lm.config.get_text_config()
    for result in (causal_lm.generation_config.eos_token_id, text.eos_token_id, tokenizer.eos_token_id):
        if result is not None:
            several = cast("list[int]", result if isinstance(result, (list, tuple)) else [result])
            return tuple(several)
    return ()
