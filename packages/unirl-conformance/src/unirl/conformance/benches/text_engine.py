"""An engine with a model of text: what claims about tokens and their log-probs need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.capability import Cap
from unirl.core.request import Request, TextRequest
from unirl.core.roles import Model, TextModel
from unirl.core.track import Track

from ..workbench.requests import make_text_request
from .engine import EngineBench

__all__ = ["TextEngineBench"]

GAP = 5e-5
"""Bound of a difference of log-probs or logits, for engines that share the module that trains. A cache adds up in
another order than a forward over a whole text: 1e-6 to 1e-5 in fp32. Other weights move them by 0.1."""
GAP_ELSEWHERE = 0.05
"""The same of the mean for engines with kernels of their own, which may compute in 16 bit: a quarter of 0.2, the clip
range in common use."""


@dataclass(frozen=True, kw_only=True)
class TextEngineBench(EngineBench):
    @property
    def track(self) -> str:
        return self.workshop.track(self.subject.found("model"), "text")

    def model(self) -> TextModel:
        return cast(TextModel, super().model())

    def fresh_model(self) -> TextModel:
        return cast(TextModel, super().fresh_model())

    def request(self, model: TextModel, *, sampling: dict[str, Any] | None = None, **settings: Any) -> Request:
        """A request of 2 groups of 3 samples. sampling: dotted keys; settings: of make_text_request."""
        found = self.workshop.text_sampling(self.subject.found("model"), **(sampling or {}))
        return make_text_request(model, {self.track: found}, **settings)

    def generate(self, *, sampling: dict[str, Any] | None = None, **settings: Any) -> tuple[Request, Track]:
        """One rollout of an engine as new over the shared model; the same settings are sampled once a run."""

        def rollout() -> tuple[Request, Track]:
            model = self.model()
            # Many claims look at it: whichever comes first has no say in where it is made.
            with dataclasses.replace(self, own_engine=False).engine(model) as engine:
                request = self.request(model, sampling=sampling, policy_version=engine.version, **settings)
                return request, engine.generate(request).tracks[self.track]

        return self.workshop.shared(f"text of {self.subject.id} {sampling} {settings}", rollout)

    def with_text(self, request: Request, **changes: Any) -> Request:
        """The same request with another one of its text track."""
        wanted: TextRequest = dataclasses.replace(request.text(self.track), **changes)
        return dataclasses.replace(request, tracks={self.track: wanted})

    def plain_request(self, model: Model) -> Request:
        return self.request(cast(TextModel, model))

    def decided_request(self, model: Model) -> Request:
        """The likeliest tokens: whatever an engine draws from, these are decided by the weights."""
        return self.request(cast(TextModel, model), sampling={"temperature": 0.0})

    def moved(self, track: Track, other: Track) -> float:
        """The share of samples that have other tokens."""
        pairs = zip(track.text.tokens, other.text.tokens, strict=True)
        return sum(not torch.equal(one.cpu(), two.cpu()) for one, two in pairs) / track.num_rows

    def check_made_by(self, model: Model, request: Request, track: Track, *, name: str) -> None:
        """Every token is the likeliest of this model, but for ties, and its log-prob is the model's."""
        logits = self.logits(cast(TextModel, model), request.text(self.track).prompt_tokens, track.text.tokens)
        chosen = torch.cat(list(track.text.tokens)).to(logits.device)[:, None]
        missed = logits.max(dim=1).values - logits.gather(1, chosen).squeeze(1)
        self.record_gap(name, missed)
        if self.native(Cap.LOG_PROBS_TOKEN):
            expected = torch.log_softmax(logits.double(), dim=1).gather(1, chosen).squeeze(1)
            found = torch.cat(list(self.log_probs(track))).to(expected)
            self.record_gap(f"{name}, log-probs", (found - expected).abs())

    def record_gap(self, name: str, gaps: Tensor) -> None:
        """Keep the largest of these, or the mean where the engine computes elsewhere, and hold it against its bound."""
        if self.native(Cap.WEIGHTS_SHARED):
            self.record(name, float(gaps.max()), bound=GAP)
        else:
            self.record(f"{name}, mean", float(gaps.mean()), bound=GAP_ELSEWHERE)

    def warm_up(self, model: Model, request: Request) -> None:
        text = cast(TextModel, model)
        wanted = request.text(self.track)
        text.texts(wanted.prompt_tokens)
        self.logits(text, wanted.prompt_tokens[:1], wanted.prompt_tokens[:1])

    def log_probs(self, track: Track) -> tuple[Tensor, ...]:
        """Those that came with a track. Fails when none came."""
        assert track.text.log_probs is not None, (
            f"engine {self.spec.name!r} states {Cap.LOG_PROBS_TOKEN.value!r}, and its texts came without log-probs"
        )
        return track.text.log_probs

    def logits(self, model: TextModel, prompts: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
        """[T, V] fp32 before each token of each text: what the model says after each prefix as a whole, without a
        cache that came before."""
        pairs = [(prompt, text) for prompt, text in zip(prompts, tokens, strict=True) if len(text)]
        assert pairs, "not a single token was generated"
        with torch.no_grad():
            return torch.cat([_logits(model, prompt, text) for prompt, text in pairs])


def _logits(model: TextModel, prompt: Tensor, text: Tensor) -> Tensor:
    """[L, V], from one prefill of each prefix in a batch that is padded on the left."""
    prefixes = [torch.cat([prompt.cpu(), text[:end].cpu()]) for end in range(len(text))]
    longest = max(len(prefix) for prefix in prefixes)
    tokens = torch.full((len(prefixes), longest), model.pad_token)
    mask = torch.zeros(len(prefixes), longest, dtype=torch.bool)
    for row, prefix in enumerate(prefixes):
        tokens[row, longest - len(prefix) :], mask[row, longest - len(prefix) :] = prefix, True
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    tokens, mask, positions = (value.to(model.device) for value in (tokens, mask, positions))
    return model.next_logits(tokens, positions=positions, attention_mask=mask, cache=None)[0]
