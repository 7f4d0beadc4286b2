"""A judge in this process: any image-text-to-text checkpoint of transformers, and any causal LM for texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError, RewardFailed
from unirl.model_host.model_files import check_contained, dtype_of, no_progress_bars

from .chat import Chat, missing_weights
from .config import AnswererConfig
from .question import Question
from .template import ScoreRule, Template

__all__ = ["LocalJudge"]


class LocalJudge:
    def __init__(self, config: AnswererConfig, *, device: Any) -> None:
        """Raises RecipeError for a checkpoint that does not load whole."""
        self._config, self._key = config, f"reward.{config.reward}"
        dtype = dtype_of(config.dtype, key=f"{self._key}.dtype", model=f"reward {config.reward!r}")
        path = str(Path(config.model).expanduser())
        # Of a hub id, transformers reads its own cache.
        check_contained(Path(path), key=f"{self._key}.model")
        try:
            is_text_only = (
                config.judges_texts
                and type(AutoConfig.from_pretrained(path, trust_remote_code=False)) not in _IMAGE_MODELS
            )
            kind = AutoModelForCausalLM if is_text_only else AutoModelForImageTextToText
            with no_progress_bars(transformers_logging):
                self._chat = Chat(path, key=self._key, device=device, dtype=dtype)
                loaded: Any = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RecipeError(
                f"{self._key}.model: {path!r} does not load as an image-text-to-text checkpoint"
                f"{' or a causal language model' if config.judges_texts else ''}: {error} Give a folder in the "
                "transformers layout, or a hub id such as 'Qwen/Qwen2.5-VL-7B-Instruct'."
            ) from error
        self._model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise RecipeError(
                f"{self._key}.model: {path!r} lacks {missing_weights(missing)}, which {type(self._model).__name__} "
                "has. Fetch the whole checkpoint, or choose another."
            )
        self._model.eval().requires_grad_(False).to(device)
        self._positions: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def texts(self, questions: Sequence[Question], *, max_new_tokens: int) -> list[str]:
        # Not the checkpoint's own settings: Qwen's come with a repetition penalty, which changes JSON.
        own = self._model.generation_config
        ends: list[int] = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=self._chat.tokenizer.pad_token_id,
        )
        result: list[str] = []
        for inputs in self._batches(questions):
            out: Tensor = self._model.generate(**inputs, generation_config=greedy)
            for tokens in out[:, inputs["input_ids"].shape[1] :]:
                has_ended = bool(torch.isin(tokens, torch.tensor(ends, device=tokens.device)).any())
                result.append(self._chat.tokenizer.decode(tokens, skip_special_tokens=True) if has_ended else "")
        return result

    def expected(self, questions: Sequence[Question], template: Template) -> list[tuple[float, ...]]:
        """The mean of each score under the probabilities of the tokens that can state it.

        The answer is begun as the template has it (`Final Score: `, `{"score": `), and the next token's distribution is
        taken over the whole numbers of the range, renormalised. Source: VQAScore, arXiv 2404.01291, for yes and no;
        DeQA-Score, arXiv 2501.11561, for levels.
        """
        columns: list[list[float]] = []
        for rule in template.rules:
            values, tokens = self._choices(rule)
            shares = torch.stack([one[tokens] for one in self._next(questions, opening=template.opening(rule))])
            shares /= shares.sum(-1, keepdim=True)
            columns.append((shares * torch.tensor(values, device=shares.device)).sum(-1).tolist())
        return list(zip(*columns, strict=True))

    def stated(self, questions: Sequence[Question], answers: Sequence[frozenset[str]]) -> list[tuple[float, str]]:
        result: list[tuple[float, str]] = []
        for shares, words in zip(self._next(questions), answers, strict=True):
            # A set: two spellings may begin with the same token.
            tokens = sorted({self._chat.tokenizer.encode(word, add_special_tokens=False)[0] for word in words})
            result.append((float(shares[tokens].sum()), self._chat.tokenizer.decode(int(shares.argmax()))))
        return result

    def plain(self, text: str) -> str:
        for word in self._chat.control_tokens:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        return text

    def close(self) -> None:
        """Nothing to release."""

    def _choices(self, rule: ScoreRule) -> tuple[list[float], list[int]]:
        """The whole numbers of a range, and the token of each."""
        values = range(int(rule.low), int(rule.high) + 1)
        tokens = [self._chat.tokenizer.encode(str(value), add_special_tokens=False) for value in values]
        longer = [value for value, ids in zip(values, tokens, strict=True) if len(ids) != 1]
        if longer:
            raise RewardFailed(
                f"{self._key}.answer: got expected, but {longer[0]} of the score {rule.name!r} is more than one token "
                f"of {self._config.model!r}. Choose a template with a range of single digits, or answer=text."
            )
        return [float(value) for value in values], [ids[0] for ids in tokens]

    def _next(self, questions: Sequence[Question], *, opening: str = "") -> Iterator[Tensor]:
        """The probability of each token after the opening, [vocabulary] in fp64, for each question."""
        for inputs in self._batches(questions, opening=opening):
            logits: Tensor = self._model(**inputs, logits_to_keep=1).logits[:, -1]
            yield from logits.double().softmax(-1)

    def _batches(self, questions: Sequence[Question], *, opening: str = "") -> Iterator[Any]:
        size = self._config.batch_size
        for question in questions:
            self._chat.check(question.text)
        for start in range(0, len(questions), size):
            inputs = self._chat.inputs(questions[start : start + size], opening=opening)
            length = inputs["input_ids"].shape[1]
            if self._positions is not None and length > self._positions:
                raise RewardFailed(
                    f"{self._key}: a question has {length} tokens, more than the {self._positions} positions of "
                    f"{self._config.model!r}. Show it less, or choose a judge with a longer context."
                )
            yield inputs


_IMAGE_MODELS: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
