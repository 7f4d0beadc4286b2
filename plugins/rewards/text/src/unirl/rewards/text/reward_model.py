"""The reward `reward-model`: a scalar from a sequence classifier of transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.model_host.chat_templates import render_chat
from unirl.model_host.checkpoint_problems import media_tokens, past_embedding
from unirl.model_host.model_files import check_contained, no_progress_bars

from .config import RewardModelConfig

__all__ = ["RewardModel", "build"]

_NAME = "reward.reward-model"
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
log = logging.getLogger(__name__)


def build(config: RewardModelConfig, *, device: Any) -> RewardModel:
    """Raises RecipeError for a checkpoint that is absent, of something else, or without weights of the head."""
    return RewardModel(config, device=device)


class _Row(NamedTuple):
    tokens: list[int]
    types: list[int]
    """Token types of a pair of texts; empty where the tokenizer has none."""
    num_tokens: int
    """Before truncation."""


class RewardModel:
    def __init__(self, config: RewardModelConfig, *, device: Any) -> None:
        check_config(config, key=_NAME)
        self._config, self._device = config, torch.device(device)
        folder = _folder(config)
        self._model: Any = _model(folder, config).to(self._device)
        self._tokenizer: Any = _tokenizer(folder, config)
        rows: int = self._model.get_input_embeddings().weight.shape[0]
        tokens, media = self._tokenizer.get_vocab(), media_tokens(folder)
        if problem := past_embedding(tokens, rows=rows, media=media, where=str(folder)):
            raise RecipeError(f"{_NAME}.path: {problem}")
        self._column = _column(self._model.config, config)
        self._is_truncation_said = False
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and config.max_length > positions:
            raise RecipeError(f"{_NAME}.max_length: got {config.max_length}, expected at most the model's {positions}.")
        # Decoders take the last token that is not padding, by the id in the model's config.
        pad: int | None = self._model.config.get_text_config().pad_token_id
        self._pad = self._tokenizer.pad_token_id if pad is None else pad
        if self._pad is not None:
            self._model.config.pad_token_id = self._model.config.get_text_config().pad_token_id = self._pad

    @torch.inference_mode()
    def score(self, samples: ScoreInput) -> Scores:
        """The model's output for each prompt with its completion. Parts: `truncated` [N], 0 or 1.

        Raises RewardFailed, naming the sample, for a conversation that the chat template refuses, has no tokens, or
        gets an output that is not finite.
        """
        config, texts = self._config, samples.of("text", reward="reward-model").texts
        rows = [self._row(samples, row, text) for row, text in enumerate(texts)]
        truncated = torch.tensor([float(row.num_tokens > config.max_length) for row in rows])
        if bool(truncated.any()) and not self._is_truncation_said:
            self._is_truncation_said = True
            log.warning(
                f"{_NAME}.max_length: a conversation of {max(row.num_tokens for row in rows)} tokens was truncated to "
                f"{config.max_length}; the component `truncated` counts these."
            )
        values = torch.empty(len(rows))
        # Rows of like length together: little padding. Without a padding token, one at a time.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row].tokens))
        step = config.batch_size if self._pad is not None else 1
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            values[chosen] = self._outputs([rows[row] for row in chosen])
        if not bool(values.isfinite().all()):
            row = int((~values.isfinite()).nonzero()[0])
            raise RewardFailed(
                f"{_NAME}: got {float(values[row])} for sample {samples.sample_ids[row]!r}, expected a finite number; "
                f"with dtype={config.dtype}, try float32."
            )
        return Scores(values=values, parts={"truncated": truncated})

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self._model = None

    def _outputs(self, rows: list[_Row]) -> Tensor:
        """[n] fp32 on the CPU."""
        if self._model is None:
            raise RewardFailed(f"{_NAME}: got a call of score() after close(); build the reward again.")
        longest = max(len(row.tokens) for row in rows)

        def padded(lists: list[list[int]], value: int) -> Tensor:
            return torch.tensor([[*one, *[value] * (longest - len(one))] for one in lists], device=self._device)

        arguments = {
            "input_ids": padded([row.tokens for row in rows], self._pad or 0),
            "attention_mask": padded([[1] * len(row.tokens) for row in rows], 0),
        }
        if all(row.types for row in rows):
            arguments["token_type_ids"] = padded([row.types for row in rows], 0)
        return self._model(**arguments).logits[:, self._column].float().cpu()

    def _row(self, samples: ScoreInput, row: int, text: str) -> _Row:
        config, prompt, text = self._config, _encodable(samples.inputs.prompts[row]), _encodable(text)
        if config.template == "plain":
            whole = self._tokenizer(prompt, text, verbose=False)
            cut = self._tokenizer(prompt, text, truncation=True, max_length=config.max_length)
            result = _Row(cut["input_ids"], cut.get("token_type_ids") or [], len(whole["input_ids"]))
        else:
            system = [{"role": "system", "content": config.system}] if config.system else []
            turns = [*system, {"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            try:
                chat = render_chat(self._tokenizer, turns, key=f"{_NAME}.template", sample=samples.sample_ids[row])
            except RecipeError as error:
                raise RewardFailed(str(error)) from error
            # The template writes the special tokens itself.
            tokens: list[int] = self._tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]
            kept = tokens[-config.max_length :] if config.keep == "end" else tokens[: config.max_length]
            result = _Row(kept, [], len(tokens))
        if not result.tokens:
            raise RewardFailed(f"{_NAME}: sample {samples.sample_ids[row]!r} has no tokens, expected one or more.")
        return result


def _encodable(text: str) -> str:
    """The text with pairs of surrogates joined, and U+FFFD for lone ones, which a detokenizer may leave."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _folder(config: RewardModelConfig) -> Path:
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        check_contained(folder, key=f"{_NAME}.path")
        return folder
    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{_NAME}.path: there is no folder {config.path!r}, and it cannot be fetched from the hub: {error} Check "
            "the name, log in if the model is gated, or give a folder in the transformers layout."
        ) from error


def _model(folder: Path, config: RewardModelConfig) -> Any:
    try:
        architectures: list[str] = (
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).architectures or []
        )
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise RecipeError(
                f"{_NAME}.path: {str(folder)!r} is a checkpoint of {', '.join(architectures) or 'nothing named'}, "
                "expected an architecture ...ForSequenceClassification."
            )
        with no_progress_bars(transformers_logging):
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=getattr(torch, config.dtype),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except ImportError as error:
        raise RecipeError(
            f"{_NAME}.path: the checkpoint in {str(folder)!r} needs a package: {error}. Install it, or use one whose "
            "config.json has no quantization_config."
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RecipeError(f"{_NAME}.path: the checkpoint in {str(folder)!r} does not load: {error}") from error
    # transformers makes weights up for those that it does not find, the head among them.
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{_NAME}.path: the weights in {str(folder)!r} lack {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}; expected those of a trained reward model."
        )
    return model.eval().requires_grad_(False)


def _tokenizer(folder: Path, config: RewardModelConfig) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"{_NAME}.path: the tokenizer in {str(folder)!r} does not load: {error}") from error
    if config.template == "chat" and tokenizer.chat_template is None:
        raise RecipeError(
            f"{_NAME}.template: got chat, but the tokenizer in {str(folder)!r} has no chat template. Use "
            "template=plain, or put chat_template.jinja in the folder."
        )
    tokenizer.truncation_side = "left" if config.keep == "end" else "right"
    return tokenizer


def _column(model: Any, config: RewardModelConfig) -> int:
    names = ", ".join(f"{index}: {name}" for index, name in model.id2label.items())
    if config.label is None and model.num_labels != 1:
        raise RecipeError(f"{_NAME}.label: got null, expected one of the model's {model.num_labels} outputs ({names}).")
    if (config.label or 0) >= model.num_labels:
        raise RecipeError(f"{_NAME}.label: got {config.label}, expected one of the model's outputs ({names}).")
    return config.label or 0
