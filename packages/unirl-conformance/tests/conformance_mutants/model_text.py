"""Text models with one fault each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.core.types.inputs import Inputs

from conformance_mutants.changes import Change, returns
from conformance_mutants.mutant import Mutant

HEALTHY = replace(
    text_model.SPEC, build="conformance_mutants.model:build", text_parity="conformance_mutants.text_reference:run"
)
RULED = replace(text_model.RULED, build=HEALTHY.build, text_parity=HEALTHY.text_parity)
OWN, CACHED = "own-text-replays-at-ratio-1", "cached-logits-are-those-of-the-whole-text"
SCORES, PACKED = "scores-are-the-log-softmax-of-the-plain-logits", "padded-packed-and-single-rows-score-alike"
PACKED_GRADIENT, BATCHING = "packing-does-not-change-the-gradient", "gradient-does-not-depend-on-batching"
INSIDE = "trained-weights-are-used-inside-the-root-forward"
CHAT = "chat-settings-change-the-prompt"
OBSERVED = "an-observation-is-the-next-message"
PROMPTED, GREEDY, SCORED = (
    f"{name}-those-of-the-reference" for name in ("prompt-tokens-are", "greedy-texts-are", "log-probs-are")
)


def text(
    name: str, claim: str, breaks: str, changes: Mapping[str, Change] | None = None, *, spec: Any = None, **more: Any
) -> Mutant:
    stated = replace(HEALTHY, **{"build": text_model.SPEC.build, **(spec or {})})
    return Mutant(name=name, claim=claim, breaks=breaks, changes=changes or {}, spec=stated, **more)


def sampling(change: Callable[[Any], Mapping[str, Any]]) -> dict[str, Change]:
    """Prompts read by other sampling settings."""

    def prompt_tokens(_: Any, prompt_tokens: Any, inputs: Inputs, *, sampling: Any) -> list[Tensor]:
        return prompt_tokens(inputs, sampling=replace(sampling, **change(sampling)))

    return {"prompt_tokens": prompt_tokens}


def log_probs(change: Callable[[Tensor, Any], Tensor]) -> dict[str, Change]:
    """Other scores. change: gets the healthy ones and the batch."""

    def score(_: Any, score: Any, batch: Any, **how: Any) -> Any:
        log_probs, entropy = score(batch, **how)
        return change(log_probs, batch), entropy

    return {"score": score}


def padded(rows: list[Tensor]) -> list[Tensor]:
    return list(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=text_model.PAD))


def ends_with_line_break(_: Any, prompt_tokens: Any, inputs: Inputs, *, sampling: Any) -> list[Tensor]:
    """Some checkpoints have one after the template."""
    rows = prompt_tokens(inputs, sampling=sampling)
    return [torch.cat([row, torch.tensor([10])]) if sampling.chat else row for row in rows]


def by_place(_: Any, next_logits: Any, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any) -> Any:
    """Takes the place in a padded row for the position in the text."""
    total, length = attention_mask.shape[1], tokens.shape[1]
    places = torch.arange(total - length, total).expand(len(tokens), -1)
    return next_logits(tokens, positions=places, attention_mask=attention_mask, cache=cache)


def in_bits(scores: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    log_probs, entropy = scores
    return log_probs, None if entropy is None else entropy / math.log(2)


def sees_neighbours(_: Any, score: Any, batch: Any, **how: Any) -> Any:
    """Attends to every sample before it in a packed row."""
    if batch.attention_mask is None:
        batch = replace(batch, positions=torch.arange(batch.tokens.shape[1])[None])
    return score(batch, **how)


def with_less_of_a_layer(cache: Any) -> Any:
    (key, value), *others = cache
    return ((key, 0.9 * value), *others)


def adds_bias_outside(model: Any, next_logits: Any, tokens: Tensor, **how: Any) -> Any:
    logits, cache = next_logits(tokens, **how)
    bias = model.net.leave.bias.detach()
    return (logits - bias) + bias, cache


class Detached(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        return nn.functional.linear(input, self.weight.detach(), self.bias)


def detach_a_layer(model: Any) -> None:
    model.net.blocks[0].down.__class__ = Detached


# fmt: off
MUTANTS = [
    text("pads", "prompt-tokens-are-those-of-the-prompt-alone", "pads prompts to the longest of a call",
         {"prompt_tokens": returns(padded)}, also=(PROMPTED, GREEDY)),
    text("no-system", CHAT, "leaves the system prompt out",
         sampling(lambda _: {"system_prompt": ""}), also=(PROMPTED,)),
    text("always-thinks", CHAT, "ignores the switch of its chat template",
         sampling(lambda sampling: {"thinking": True} if sampling.thinking is False else {}), also=(PROMPTED,)),
    # A text continues its prompt.
    text("own-template", PROMPTED, "puts a line break after the chat template", {"prompt_tokens": ends_with_line_break},
         also=(GREEDY,)),
    text("counts-padding", GREEDY, "counts padding on the left as positions", {"next_logits": by_place},
         also=(OWN, CACHED)),
    # Wherever it computes them, so that it agrees with itself.
    text("sharper", SCORED, "scales all logits by 1.01",
         {"score": lambda _, score, batch, *, temperature, **how: score(batch, temperature=temperature / 1.01, **how),
          "next_logits": returns(lambda result: (1.01 * result[0], result[1]))}),
    text("ends-twice", OBSERVED, "ends completions that have an end again",
         {"observation_tokens": lambda _, method, texts, *, after, **how:
             method(texts, after=[row[:0] for row in after], **how)}),
    text("cleans-up", "decoding-inverts-tokenizing", "strips the spaces around texts",
         {"texts": returns(lambda texts: [text.strip() for text in texts])}),
    text("never-stops", "stop-tokens-and-padding-are-tokens-of-the-model", "names no stop token",
         after_build=lambda model: setattr(model, "__class__", type("Endless", (type(model),), {"stop_tokens": ()})),
         also=(GREEDY, OBSERVED)),
    text("text-grad-mode", OWN, "scores text otherwise where gradients are on",
         log_probs(lambda values, _: values * (1 + 1e-3 * torch.is_grad_enabled()))),
    # The first token of a batch has that of the last one.
    text("shifts", SCORED, "gives log-probs one token late", log_probs(lambda values, _: values.roll(1)),
         also=(OWN, SCORES, PACKED, BATCHING)),
    text("text-divides", BATCHING, "divides the gradient of log-probs by the tokens of a batch",
         log_probs(lambda values, _: values.detach() + (values - values.detach()) / len(values))),
    text("halves-packed", PACKED_GRADIENT, "halves the gradient of packed batches",
         log_probs(
             lambda values, batch: values if batch.attention_mask is not None else (values + values.detach()) / 2)),
    text("allows-all", "scores-are-over-the-allowed-tokens", "scores restricted tokens over the whole vocabulary",
         {"score": lambda _, score, batch, **how: score(replace(batch, allowed={}), **how)},
         spec={"build": text_model.RULED.build, "options": text_model.RULED.options,
               "restricts": text_model.RULED.restricts, "token_options": text_model.RULED.token_options}),
    # The loop over tokens divides the logits by it.
    text("no-temperature", SCORES, "scores at temperature 1 whatever is asked",
         {"score": lambda _, score, batch, *, temperature, **how: score(batch, temperature=1.0, **how)}, also=(OWN,)),
    text("bits", SCORES, "gives entropies in bits", {"score": returns(in_bits)}),
    # Everything that compares with a packed batch, or with another one.
    text("sees-neighbours", PACKED, "attends to other samples of a packed row", {"score": sees_neighbours},
         also=(OWN, PACKED_GRADIENT, BATCHING)),
    text("first-rows", CACHED, "forgets the order of the rows of its cache",
         {"select_cache": lambda _, select, cache, rows: select(cache, rows.sort().values)}),
    # Texts are generated with the cache.
    text("forgets-early", CACHED, "loses a tenth of a layer's cached values when rows are chosen",
         {"select_cache": returns(with_less_of_a_layer)}, also=(OWN, GREEDY)),
    text("adds-bias-outside", INSIDE, "adds the bias of its output projection outside of its net",
         {"next_logits": adds_bias_outside}),
    text("text-detached", "gradient-reaches-every-layer-that-lora-adapts", "detaches a layer of a text model",
         after_build=detach_a_layer),
    text("no-text-parity", SCORED, "names no reference run of texts",
         spec={"text_parity": ""}, also=(PROMPTED, GREEDY)),
]
# fmt: on
