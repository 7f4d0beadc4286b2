"""What a text track asks of a plan: the part of `match` that is about sampling tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .capability import Needs
from .eval_sampling import evaluation_base

if TYPE_CHECKING:
    from .config import TextSamplingConfig
    from .plan import Plan

__all__ = ["critic_without_text", "text_sampling"]


def text_sampling(key: str, sampling: TextSamplingConfig, plan: Plan, needs: Needs) -> Iterator[tuple[str, str]]:
    """Why a text track cannot be sampled, or trained on, with these settings: key path and sentence of each reason.

    key: of the settings.  needs: of the algorithm with its settings.
    """
    yield from _ranges(key, sampling)
    known = {item.name for item in dataclasses.fields(sampling)}
    changed = {name: value for name, value in plan.eval.sampling.items() if name in known}
    yield from _ranges("eval.sampling", dataclasses.replace(evaluation_base(sampling), **changed))
    if needs.log_probs != "token":
        return
    asks = f"algorithm {plan.algorithm.name!r} takes ratios of log-probs"
    if sampling.temperature == 0:
        yield f"{key}.temperature", f"{asks}, and at temperature 0 nothing is random; use one above 0, such as 1."
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            yield (
                f"{key}.{name}",
                f"{value} was asked for; {asks} over all tokens, and a sampler that drops some is another policy. Use "
                f"{whole} here; eval.sampling.{name} may differ.",
            )


def critic_without_text(asks: str, model: str) -> str:
    """Why an algorithm with a critic cannot train this model. asks: who asks, as the start of a sentence."""
    return f"{asks} trains a critic, which reads tokens; model {model!r} has no text track. Choose one that has."


def _ranges(key: str, sampling: TextSamplingConfig) -> Iterator[tuple[str, str]]:
    for name, value, least in (
        ("temperature", sampling.temperature, 0),
        ("top_k", sampling.top_k, 0),
        ("max_new_tokens", sampling.max_new_tokens, 1),
        ("max_prompt_tokens", sampling.max_prompt_tokens, 0),
    ):
        if value < least:
            yield f"{key}.{name}", f"{value} was asked for; it must be {least} or more."
    if not 0 < sampling.top_p <= 1:
        yield f"{key}.top_p", f"{sampling.top_p} was asked for; it must be above 0 and at most 1."
    if any(not text for text in sampling.stop):
        yield f"{key}.stop", "an empty string was given, which ends every text before it begins; leave it out."
