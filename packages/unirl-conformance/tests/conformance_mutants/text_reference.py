"""The text model of `doubles` again in fp64 NumPy, from its docstrings: one prompt at a time, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.reference import TextReferenceRun
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig

__all__ = ["run"]


def run(folder: Path, *, inputs: Inputs, sampling: TextSamplingConfig) -> TextReferenceRun:
    """Fits `unirl.conformance.reference.RunTextReference`."""
    file = load_file(folder / text_model.WEIGHTS_FILE)
    net = {name: value.astype(np.float64) for name, value in file.items()}
    asked = [_prompt(prompt, sampling) for prompt in inputs.texts]
    texts: list[list[int]] = []
    scores: list[list[float]] = []
    for tokens in asked:
        text: list[int] = []
        result: list[float] = []
        while len(text) < sampling.max_new_tokens and (not text or text[-1] not in _stops(sampling)):
            logits = _logits(net, [*tokens, *text])
            text.append(int(logits.argmax()))
            result.append(float(logits[text[-1]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
        texts.append(text)
        scores.append(result)
    return TextReferenceRun(
        prompt_tokens=[torch.tensor(row) for row in asked],
        tokens=[torch.tensor(row) for row in texts],
        log_probs=[torch.tensor(row) for row in scores],
    )


def _stops(sampling: TextSamplingConfig) -> list[int]:
    return [text_model.END, *sampling.stop_token_ids]


def _prompt(prompt: str, sampling: TextSamplingConfig) -> list[int]:
    if not sampling.chat:
        return [*prompt.encode()]
    system = [text_model.SYSTEM, *sampling.system_prompt.encode()] if sampling.system_prompt else []
    thought = [text_model.NO_THOUGHT] if sampling.thinking is False else []
    return [*system, text_model.USER, *prompt.encode(), text_model.ASSISTANT, *thought]


def _logits(net: Mapping[str, Any], tokens: Sequence[int]) -> Any:
    """[VOCABULARY] after the last token."""
    rates = 10.0 ** -np.linspace(0, 3, text_model.WIDTH // 2)
    angles = np.arange(len(tokens))[:, None] * rates
    hidden = net["enter.weight"][list(tokens)] + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    later = np.triu(np.ones((len(tokens), len(tokens)), dtype=bool), k=1)
    size = text_model.WIDTH // text_model.HEADS

    def linear(name: str, value: Any) -> Any:
        return value @ net[f"{name}.weight"].T + net[f"{name}.bias"]

    for block in ("blocks.0", "blocks.1"):
        query, key, value = np.split(linear(f"{block}.mixed", hidden), 3, axis=1)
        heads: list[Any] = []
        for head in range(text_model.HEADS):
            part = slice(head * size, (head + 1) * size)
            likeness = np.where(later, -np.inf, query[:, part] @ key[:, part].T / size**0.5)
            weights = np.exp(likeness - likeness.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, part])
        hidden = hidden + linear(f"{block}.out", np.concatenate(heads, axis=1))
        hidden = hidden + linear(f"{block}.down", np.tanh(linear(f"{block}.up", hidden)))
    return linear("leave", hidden[-1])
