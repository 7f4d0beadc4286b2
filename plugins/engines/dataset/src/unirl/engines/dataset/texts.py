"""Stored completions as the samples of a text track."""

from __future__ import annotations

import dataclasses

import torch
from unirl.core.errors import BatchError, DataError
from unirl.core.roles import TextModel
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.numerics.tokens.restricted import trained_tokens
from unirl.numerics.tokens.rollout import GeneratedText, text_conditions, text_track

from .plugin import SPEC

__all__ = ["StoredTexts"]

TARGET, SIDES = "target", SPEC.samples[1]


class StoredTexts:
    """Completions of a prompt file, under the keys `target`, or `preferred` and `rejected`, of its rows."""

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def track(self, request: Request, *, version: int) -> Track:
        """The stored completions as if they had been sampled, with a stop token at the end, and without log-probs.

        Raises DataError for a completion of more tokens than `sampling.max_new_tokens`, and for one that its tokens do
        not give again; RecipeError for a model that gives no tokens of completions.
        """
        texts = [_completion(request, row) for row in range(request.num_rows)]
        # Samples of one target are one text.
        distinct = list(dict.fromkeys(texts))
        tokens = dict(zip(distinct, self._model.completion_tokens(distinct), strict=True))
        longest = request.text.sampling.max_new_tokens
        for row, text in enumerate(texts):
            if len(tokens[text]) > longest:
                raise DataError(
                    f"sample {request.sample_ids[row]!r}: got a completion of {len(tokens[text])} tokens with its "
                    f"end, {text[:60]!r}, expected at most sampling.max_new_tokens, {longest}. Raise that, or leave "
                    "the prompt out."
                )
        try:
            mask = trained_tokens(self._model, [tokens[text] for text in texts], options=dict(request.text.options))
        except BatchError as error:
            raise DataError(f"stored completions: {error}") from error
        generated = GeneratedText(
            prompt_tokens=request.text.prompt_tokens,
            temperature=request.text.sampling.temperature,
            tokens=tuple(tokens[text].clone() for text in texts),
            log_probs=tuple(torch.zeros(len(tokens[text])) for text in texts),
            truncated=(False,) * len(texts),
            options=request.text.options,
            mask=mask,
        )
        conditions = text_conditions(self._model, request.inputs, sampling=request.text.sampling)
        # As they are stored: `sampling.stop` cuts nothing off.
        media = Media(kind="text", values=tuple(texts))
        result = text_track(request, generated=generated, media=media, version=version, conditions=conditions)
        # They were not sampled: zeros would be taken for the log-probs of an engine.
        return dataclasses.replace(result, segment=dataclasses.replace(result.text, log_probs=None))


def _completion(request: Request, row: int) -> str:
    """The text that is this sample: row n of a group is the n-th of its sides."""
    stored = request.metadata[row]
    number = request.sample_ids[row].rpartition("/")[2]
    role = TARGET if TARGET in stored else SIDES[int(number)] if number in ("0", "1") else ""
    text = stored.get(role)
    if not isinstance(text, str) or not text:
        raise DataError(
            f"sample {request.sample_ids[row]!r}: got {text!r} as its stored completion, expected a text that is not "
            f"empty: one {TARGET!r}, or one {SIDES[0]!r} and one {SIDES[1]!r} with data.samples_per_prompt=2."
        )
    return text
