"""A model of text: what claims about tokens, log-probs and caches need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.config import TextSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.reference import RunTextReference, TextReferenceRun
from unirl.core.roles import Model, TextModel
from unirl.core.track import Track
from unirl.numerics.token_batches import pad_batch

from ..workbench.requests import PROMPTS, make_text_request
from ..workbench.rollouts import sample_text
from .model import ModelBench

__all__ = ["SCORE", "TextModelBench"]

SCORE = 2e-5
"""Bound of a difference of log-probs, in nats. They are fp32 numbers of up to some ten, of 1e-6 rounding each; forwards
in another batch, layout or with a cache add up in another order: 1e-6 to 1e-5. A wrong mask, position or temperature
moves them by 1e-2 and more."""


@dataclass(frozen=True, kw_only=True)
class TextModelBench(ModelBench):
    @property
    def track(self) -> str:
        return self.workshop.track(self.subject.found("model"), "text")

    def fresh_model(self) -> TextModel:
        return cast(TextModel, super().fresh_model())

    @contextmanager
    def model(self) -> Iterator[TextModel]:
        with super().model() as model:
            yield cast(TextModel, model)

    def learner(self) -> TextModel:
        return cast(TextModel, super().learner())

    def sampling(self, **settings: Any) -> TextSamplingConfig:
        """Sampling settings that the miniature takes, with `settings` by dotted key laid over them."""
        return self.workshop.text_sampling(self.subject.found("model"), **settings)

    def read(self, model: Model, prompts: Sequence[str], media: Sequence[Sequence[MediaRef]]) -> None:
        cast(TextModel, model).prompt_tokens(list(prompts), sampling=self.sampling(), media=media)

    def prompts(self, model: TextModel, prompts: Sequence[str] = PROMPTS, **settings: Any) -> list[Tensor]:
        """Tokens of prompts."""
        return list(model.prompt_tokens(list(prompts), sampling=self.sampling(**settings)))

    def pieces(self, model: TextModel) -> tuple[list[Tensor], list[Tensor]]:
        """Prompts and tokens that may follow them, five rows of different lengths; one of the texts is a single token.

        The tokens are those of prompts, so the model has them all.
        """
        chat, plain = self.prompts(model), self.prompts(model, chat=False)
        return [chat[0], plain[2], chat[2], chat[1], plain[1]], [plain[2], plain[0], plain[1][:1], chat[0], chat[2]]

    def rollout(self, model: Model) -> Track:
        """Texts of the model as it is now, made by the shared loop over tokens."""
        text = cast(TextModel, model)
        return sample_text(text, make_text_request(text, {self.track: self.sampling(temperature=0.8)}), self.track)

    def reference(self, sampling: TextSamplingConfig, prompts: Sequence[str] = PROMPTS) -> TextReferenceRun:
        """What the reference implementation makes of prompts, once a run. Fails when the spec names none."""
        assert self.spec.text_parity, (
            f"model {self.spec.name!r} names no `text_parity`, so nothing says that it is the model that it is called "
            "after; write the function that runs its reference implementation"
        )

        def ran() -> TextReferenceRun:
            run: RunTextReference = self.workshop.resolved(self.subject.found("model"), self.spec.text_parity)
            with torch.no_grad():
                return run(self.checkpoint(), prompts=list(prompts), sampling=sampling)

        return self.workshop.shared(f"reference of {self.subject.id} {prompts} {sampling}", ran)

    def answer(self, model: Model) -> Tensor:
        """Log-probs of the texts of `pieces`, each token with another weight."""
        text = cast(TextModel, model)
        batch = pad_batch(*self.pieces(text), pad_token=text.pad_token)
        log_probs = text.score(batch, temperature=1.0)[0]
        return (log_probs * torch.linspace(-1, 2, len(log_probs), device=log_probs.device)).sum()

    def next_logits(self, model: TextModel, prefixes: Sequence[Tensor]) -> Tensor:
        """[len(prefixes), V] after each prefix, each alone, without padding and without a cache that came before."""
        found: list[Tensor] = []
        for prefix in prefixes:
            tokens = prefix[None].to(self.device)
            places = torch.arange(len(prefix), device=self.device)[None]
            mask = torch.ones_like(tokens, dtype=torch.bool)
            found.append(model.next_logits(tokens, positions=places, attention_mask=mask, cache=None)[0])
        return torch.cat(found)
