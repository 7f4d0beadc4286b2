"""A judge in this process: any image-text-to-text checkpoint of transformers, decoded greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file
from unirl.core.errors import RecipeError, RewardFailed
from unirl.numerics.model_files import dtype_of, no_progress_bars, read_json

from .config import JudgeConfig
from .question import Question
from .template import ScoreRule, Template

__all__ = ["LocalJudge", "load_processor"]


class LocalJudge:
    def __init__(self, config: JudgeConfig, *, reward: str, device: Any) -> None:
        """Raises RecipeError for a checkpoint that does not load whole."""
        self._config, self._key, self._device = config, f"reward.{reward}", device
        self._dtype = dtype_of(config.dtype, key=f"{self._key}.dtype", model=f"reward {reward!r}")
        self._model, self._processor = _load(config.model, dtype=self._dtype, key=f"{self._key}.model")
        self._model.eval().requires_grad_(False).to(device)
        self._tokenizer: Any = self._processor.tokenizer

    def texts(self, questions: Sequence[Question]) -> list[str]:
        # Not the checkpoint's own settings: Qwen's come with a repetition penalty, which changes JSON.
        own = self._model.generation_config
        ends: list[int] = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self._config.max_new_tokens,
            eos_token_id=ends,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        result: list[str] = []
        for inputs in self._batches(questions, opening=""):
            out: Tensor = self._model.generate(**inputs, generation_config=greedy)
            for tokens in out[:, inputs["input_ids"].shape[1] :]:
                has_ended = bool(torch.isin(tokens, torch.tensor(ends, device=tokens.device)).any())
                result.append(self._tokenizer.decode(tokens, skip_special_tokens=True) if has_ended else "")
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
            column: list[float] = []
            for inputs in self._batches(questions, opening=template.opening(rule)):
                logits: Tensor = self._model(**inputs, logits_to_keep=1).logits[:, -1]
                shares = logits[:, tokens].double().softmax(-1)
                column += (shares * torch.tensor(values, device=shares.device)).sum(-1).tolist()
            columns.append(column)
        return list(zip(*columns, strict=True))

    def close(self) -> None:
        """Nothing to release."""

    def _choices(self, rule: ScoreRule) -> tuple[list[float], list[int]]:
        """The whole numbers of a range, and the token of each."""
        values = range(int(rule.low), int(rule.high) + 1)
        tokens = [self._tokenizer.encode(str(value), add_special_tokens=False) for value in values]
        longer = [value for value, ids in zip(values, tokens, strict=True) if len(ids) != 1]
        if longer:
            raise RewardFailed(
                f"{self._key}.answer: got expected, but {longer[0]} of the score {rule.name!r} is more than one token "
                f"of {self._config.model!r}. Choose a template with a range of single digits, or answer=text."
            )
        return [float(value) for value in values], [ids[0] for ids in tokens]

    def _batches(self, questions: Sequence[Question], *, opening: str) -> Any:
        size = self._config.batch_size
        for start in range(0, len(questions), size):
            yield self._inputs(questions[start : start + size], opening=opening)

    def _inputs(self, questions: Sequence[Question], *, opening: str) -> Any:
        """What the model reads, padded on the left: every row ends where its answer begins."""
        chats: list[Any] = []
        for question in questions:
            special = next((word for word in self._tokenizer.all_special_tokens if word in question.text), None)
            if special is not None:
                raise RewardFailed(
                    f"{self._key}: the question {question.text[:200]!r} holds {special!r}, a control token of "
                    f"{self._config.model!r}. Take it out of the prompt."
                )
            images = [{"type": "image"} for _ in question.images]
            chats.append([{"role": "user", "content": [*images, {"type": "text", "text": question.text}]}])
        texts = self._processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return self._processor(
            text=[text + opening for text in texts],
            images=[list(question.images) for question in questions],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(device=self._device, dtype=self._dtype)


def _load(path: str, *, dtype: torch.dtype, key: str) -> tuple[Any, Any]:
    path = str(Path(path).expanduser())
    try:
        with no_progress_bars(transformers_logging):
            processor = load_processor(path)
            loaded: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RecipeError(
            f"{key}: {path!r} does not load as an image-text-to-text checkpoint: {error} Give a folder in the "
            "transformers layout, or a hub id such as 'Qwen/Qwen2.5-VL-7B-Instruct'."
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{key}: {path!r} lacks {missing[0]!r}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which "
            f"{type(model).__name__} has. Fetch the whole checkpoint, or choose another."
        )
    return model, processor


def load_processor(path: str) -> Any:
    """The checkpoint's processor, for images alone, which are resized by Pillow.

    A processor of videos needs torchvision, and no judge is given one: videos are sent as frames.
    """
    cls: Any = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(path)), None)
    if cls is None or "video_processor" not in cls.get_attributes():
        return AutoProcessor.from_pretrained(path)

    class WithoutVideos(cls):
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    # Older checkpoints have a template of the processor beside the tokenizer's, which may know no images.
    file = cached_file(path, "chat_template.json", _raise_exceptions_for_missing_entries=False)
    chat_template = read_json(Path(file))["chat_template"] if file else tokenizer.chat_template
    return WithoutVideos(
        image_processor=AutoImageProcessor.from_pretrained(path, backend="pil"),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=chat_template,
    )
