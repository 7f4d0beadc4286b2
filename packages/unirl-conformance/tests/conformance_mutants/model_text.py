"""Text models that are broken in one way each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from unirl.conformance.doubles import text_model
from unirl.conformance.doubles.text_model import TextWorkbenchConfig, TextWorkbenchModel
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig

from conformance_mutants.mutant import Mutant, mutant, mutants_in

Scored = tuple[Tensor, Tensor | None]


OWN, CACHED = "own-text-replays-at-ratio-1", "cached-logits-are-those-of-the-whole-text"
SCORES, PACKED = "scores-are-the-log-softmax-of-the-plain-logits", "padded-packed-and-single-rows-score-alike"
PACKED_GRADIENT = "packing-does-not-change-the-gradient"
CHAT = "chat-settings-change-the-prompt"
PROMPTED, GREEDY, SCORED = (
    f"{name}-those-of-the-reference" for name in ("prompt-tokens-are", "greedy-texts-are", "log-probs-are")
)


@mutant(
    claim="prompt-tokens-are-those-of-the-prompt-alone",
    name="pads",
    breaks="pads prompts to the longest of a call",
    also=(PROMPTED, GREEDY),
)
class PadsItsPrompts(TextWorkbenchModel):
    def prompt_tokens(self, inputs: Inputs, **settings: Any) -> list[Tensor]:
        rows = super().prompt_tokens(inputs, **settings)
        return list(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=text_model.PAD))


@mutant(claim=CHAT, name="no-system", breaks="leaves the system prompt out", also=(PROMPTED,))
class ForgetsTheSystem(TextWorkbenchModel):
    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        return super().prompt_tokens(inputs, sampling=dataclasses.replace(sampling, system_prompt=""))


@mutant(claim=CHAT, breaks="ignores the switch of its chat template", also=(PROMPTED,))
class AlwaysThinks(TextWorkbenchModel):
    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        thinking = True if sampling.thinking is False else sampling.thinking
        return super().prompt_tokens(inputs, sampling=dataclasses.replace(sampling, thinking=thinking))


# A text goes on from its prompt.
@mutant(claim=PROMPTED, name="own-template", breaks="puts a line break after the chat template", also=(GREEDY,))
class EndsItsTemplateOtherwise(TextWorkbenchModel):
    """Puts a line break after the template, as some checkpoints have one."""

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        rows = super().prompt_tokens(inputs, sampling=sampling)
        return [torch.cat([row, torch.tensor([10])]) if sampling.chat else row for row in rows]


@mutant(claim=GREEDY, name="counts-padding", breaks="counts padding on the left as positions", also=(OWN, CACHED))
class CountsItsPadding(TextWorkbenchModel):
    """Takes the place in a padded row for the position in the text."""

    def next_logits(self, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any) -> Any:
        total, length = attention_mask.shape[1], tokens.shape[1]
        places = torch.arange(total - length, total).expand(len(tokens), -1)
        return super().next_logits(tokens, positions=places, attention_mask=attention_mask, cache=cache)


@mutant(claim=SCORED, name="sharper", breaks="scales all logits by 1.01")
class IsALittleSharper(TextWorkbenchModel):
    """Scales its logits by 1.01 wherever it computes them, so that it agrees with itself."""

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        return super().score(batch, temperature=temperature / 1.01, with_entropy=with_entropy)

    def next_logits(self, tokens: Tensor, **where: Any) -> Any:
        logits, cache = super().next_logits(tokens, **where)
        return 1.01 * logits, cache


@mutant(claim="decoding-inverts-tokenizing", breaks="strips the spaces around texts")
class CleansUp(TextWorkbenchModel):
    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return [text.strip() for text in super().texts(tokens)]


@mutant(claim="stop-tokens-and-padding-are-tokens-of-the-model", breaks="names no stop token", also=(GREEDY,))
class NeverStops(TextWorkbenchModel):
    stop_tokens = ()


class Scores(TextWorkbenchModel):
    """A model whose log-probs are changed after the fact."""

    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        log_probs, entropy = super().score(batch, temperature=temperature, with_entropy=with_entropy)
        return self.changed(log_probs, batch), entropy


@mutant(claim=OWN, name="text-grad-mode", breaks="scores text otherwise where gradients are on")
class ComputesOtherwiseWithGradients(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs * (1 + 1e-3 * torch.is_grad_enabled())


# The first token of a batch has that of the last one.
@mutant(
    claim=SCORED,
    name="shifts",
    breaks="gives log-probs one token late",
    also=(OWN, SCORES, PACKED, "gradient-does-not-depend-on-batching"),
)
class ShiftsItsLogProbs(Scores):
    """Gives each token the log-prob of the one before it."""

    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs.roll(1)


@mutant(
    claim="gradient-does-not-depend-on-batching",
    name="text-divides",
    breaks="divides the gradient of log-probs by the tokens of a batch",
)
class DividesItsGradient(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs.detach() + (log_probs - log_probs.detach()) / len(log_probs)


@mutant(claim=PACKED_GRADIENT, name="halves-packed", breaks="halves the gradient of packed batches")
class HalvesThePackedGradient(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs if batch.attention_mask is not None else (log_probs + log_probs.detach()) / 2


# The loop over tokens divides the logits by it.
@mutant(claim=SCORES, name="no-temperature", breaks="scores at temperature 1 whatever is asked", also=(OWN,))
class IgnoresTheTemperature(TextWorkbenchModel):
    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        return super().score(batch, temperature=1.0, with_entropy=with_entropy)


@mutant(claim=SCORES, name="bits", breaks="gives entropies in bits")
class CountsInBits(TextWorkbenchModel):
    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        log_probs, entropy = super().score(batch, temperature=temperature, with_entropy=with_entropy)
        return log_probs, None if entropy is None else entropy / math.log(2)


# Everything that compares with a packed batch, or with another one.
@mutant(
    claim=PACKED,
    name="sees-neighbours",
    breaks="attends to other samples of a packed row",
    also=(OWN, PACKED_GRADIENT, "gradient-does-not-depend-on-batching"),
)
class SeesItsNeighbours(TextWorkbenchModel):
    """Attends to every sample before it in a packed row."""

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        if batch.attention_mask is None:
            places = torch.arange(batch.tokens.shape[1])[None]
            batch = dataclasses.replace(batch, positions=places)
        return super().score(batch, temperature=temperature, with_entropy=with_entropy)


@mutant(claim=CACHED, name="first-rows", breaks="forgets the order of the rows of its cache")
class KeepsTheFirstRows(TextWorkbenchModel):
    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        return super().select_cache(cache, rows.sort().values)


# Texts are generated with the cache.
@mutant(
    claim=CACHED,
    name="forgets-early",
    breaks="loses a tenth of a layer's cached values when rows are chosen",
    also=(OWN, GREEDY),
)
class ForgetsAnEarlyToken(TextWorkbenchModel):
    """Its cache loses a little of the first layer."""

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        (key, value), *others = super().select_cache(cache, rows)
        return ((key, 0.9 * value), *others)


@mutant(
    claim="gradient-reaches-every-layer-that-lora-adapts",
    name="text-detached",
    breaks="detaches a layer of a text model",
)
class DetachesALayer(TextWorkbenchModel):
    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
            return nn.functional.linear(input, self.weight.detach(), self.bias)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        first = self.net.blocks[0]
        assert isinstance(first, text_model.TextBlock)
        first.down.__class__ = self.Detached


BROKEN = mutants_in(__name__)
WELL = dataclasses.replace(
    text_model.SPEC, build=f"{__name__}:build", text_parity="conformance_mutants.text_reference:run"
)
UNCOMPARED = Mutant(
    claim=SCORED, name="no-text-parity", breaks="names no reference run of texts", also=(PROMPTED, GREEDY)
)
MUTANTS = [*BROKEN.values(), UNCOMPARED]
SPECS = {
    WELL.name: WELL,
    UNCOMPARED.name: dataclasses.replace(WELL, name=UNCOMPARED.name, text_parity=""),
    **{mutant.name: dataclasses.replace(WELL, name=mutant.name) for mutant in BROKEN.values()},
}


def build(config: TextWorkbenchConfig, *, device: Any) -> TextWorkbenchModel:
    """The model that the config's `use` names."""
    kind = next((kind for kind, mutant in BROKEN.items() if mutant.name == config.use), TextWorkbenchModel)
    model = kind(device=device)
    model.net.load_state_dict(load_file(Path(config.path) / text_model.WEIGHTS_FILE))
    model.spec = SPECS[config.use]
    return model
