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
from unirl.conformance.workbench import text_model as workbench
from unirl.conformance.workbench.text_model import TextWorkbenchConfig, TextWorkbenchModel
from unirl.core.config import TextSamplingConfig

from conformance_mutants.mutant import Mutant

Scored = tuple[Tensor, Tensor | None]


class IgnoresMedia(TextWorkbenchModel):
    def prompt_tokens(
        self, prompts: Sequence[str], *, sampling: TextSamplingConfig, media: object = None
    ) -> list[Tensor]:
        return super().prompt_tokens(prompts, sampling=sampling)


class PadsItsPrompts(TextWorkbenchModel):
    def prompt_tokens(self, prompts: Sequence[str], **settings: Any) -> list[Tensor]:
        rows = super().prompt_tokens(prompts, **settings)
        return list(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=workbench.PAD))


class ForgetsTheSystem(TextWorkbenchModel):
    def prompt_tokens(self, prompts: Sequence[str], *, sampling: TextSamplingConfig, media: Any = None) -> list[Tensor]:
        return super().prompt_tokens(prompts, sampling=dataclasses.replace(sampling, system_prompt=""), media=media)


class AlwaysThinks(TextWorkbenchModel):
    def prompt_tokens(self, prompts: Sequence[str], *, sampling: TextSamplingConfig, media: Any = None) -> list[Tensor]:
        thinking = True if sampling.thinking is False else sampling.thinking
        return super().prompt_tokens(prompts, sampling=dataclasses.replace(sampling, thinking=thinking), media=media)


class EndsItsTemplateOtherwise(TextWorkbenchModel):
    """Puts a line break after the template, as some checkpoints have one."""

    def prompt_tokens(self, prompts: Sequence[str], *, sampling: TextSamplingConfig, media: Any = None) -> list[Tensor]:
        rows = super().prompt_tokens(prompts, sampling=sampling, media=media)
        return [torch.cat([row, torch.tensor([10])]) if sampling.chat else row for row in rows]


class CountsItsPadding(TextWorkbenchModel):
    """Takes the place in a padded row for the position in the text."""

    def next_logits(self, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any) -> Any:
        total, length = attention_mask.shape[1], tokens.shape[1]
        places = torch.arange(total - length, total).expand(len(tokens), -1)
        return super().next_logits(tokens, positions=places, attention_mask=attention_mask, cache=cache)


class IsALittleSharper(TextWorkbenchModel):
    """Scales its logits by 1.01 wherever it computes them, so that it agrees with itself."""

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        return super().score(batch, temperature=temperature / 1.01, with_entropy=with_entropy)

    def next_logits(self, tokens: Tensor, **where: Any) -> Any:
        logits, cache = super().next_logits(tokens, **where)
        return 1.01 * logits, cache


class CleansUp(TextWorkbenchModel):
    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return [text.strip() for text in super().texts(tokens)]


class NeverStops(TextWorkbenchModel):
    stop_tokens = ()


class Scores(TextWorkbenchModel):
    """A model whose log-probs are changed after the fact."""

    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        log_probs, entropy = super().score(batch, temperature=temperature, with_entropy=with_entropy)
        return self.changed(log_probs, batch), entropy


class ComputesOtherwiseWithGradients(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs * (1 + 1e-3 * torch.is_grad_enabled())


class ShiftsItsLogProbs(Scores):
    """Gives each token the log-prob of the one before it."""

    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs.roll(1)


class DividesItsGradient(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs.detach() + (log_probs - log_probs.detach()) / len(log_probs)


class HalvesThePackedGradient(Scores):
    def changed(self, log_probs: Tensor, batch: Any) -> Tensor:
        return log_probs if batch.attention_mask is not None else (log_probs + log_probs.detach()) / 2


class IgnoresTheTemperature(TextWorkbenchModel):
    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        return super().score(batch, temperature=1.0, with_entropy=with_entropy)


class CountsInBits(TextWorkbenchModel):
    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        log_probs, entropy = super().score(batch, temperature=temperature, with_entropy=with_entropy)
        return log_probs, None if entropy is None else entropy / math.log(2)


class SeesItsNeighbours(TextWorkbenchModel):
    """Attends to every sample before it in a packed row."""

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> Scored:
        if batch.attention_mask is None:
            places = torch.arange(batch.tokens.shape[1])[None]
            batch = dataclasses.replace(batch, positions=places)
        return super().score(batch, temperature=temperature, with_entropy=with_entropy)


class KeepsTheFirstRows(TextWorkbenchModel):
    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        return super().select_cache(cache, rows.sort().values)


class ForgetsAnEarlyToken(TextWorkbenchModel):
    """Its cache loses a little of the first layer."""

    def select_cache(self, cache: Any, rows: Tensor) -> Any:
        (key, value), *others = super().select_cache(cache, rows)
        return ((key, 0.9 * value), *others)


class DetachesALayer(TextWorkbenchModel):
    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
            return nn.functional.linear(input, self.weight.detach(), self.bias)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        first = self.net.blocks[0]
        assert isinstance(first, workbench.TextBlock)
        first.down.__class__ = self.Detached


OWN, CACHED = "own-text-replays-at-ratio-1", "cached-logits-are-those-of-the-whole-text"
SCORES, PACKED = "scores-are-the-log-softmax-of-the-plain-logits", "padded-packed-and-single-rows-score-alike"
PACKED_GRADIENT = "packing-does-not-change-the-gradient"
CHAT = "settings-of-the-chat-change-what-they-say"
PROMPTED, GREEDY, SCORED = (
    f"{name}-those-of-the-reference" for name in ("prompt-tokens-are", "greedy-texts-are", "log-probs-are")
)
BROKEN: dict[type[TextWorkbenchModel], Mutant] = {
    IgnoresMedia: Mutant(
        claim="media-is-refused-where-it-is-not-promised",
        name="text-no-media",
        broken="is a text model, and leaves media out without a word",
    ),
    PadsItsPrompts: Mutant(
        claim="prompt-tokens-are-those-of-the-prompt-alone",
        name="pads",
        broken="pads prompts to the longest of a call",
        also=(PROMPTED, GREEDY),
    ),
    ForgetsTheSystem: Mutant(claim=CHAT, name="no-system", broken="leaves the system prompt out", also=(PROMPTED,)),
    AlwaysThinks: Mutant(
        claim=CHAT, name="always-thinks", broken="ignores the switch of its chat template", also=(PROMPTED,)
    ),
    EndsItsTemplateOtherwise: Mutant(
        claim=PROMPTED,
        name="own-template",
        broken="puts a line break after the chat template",
        # A text goes on from its prompt.
        also=(GREEDY,),
    ),
    CountsItsPadding: Mutant(
        claim=GREEDY, name="counts-padding", broken="counts padding on the left as positions", also=(OWN, CACHED)
    ),
    ShiftsItsLogProbs: Mutant(
        claim=SCORED,
        name="shifts",
        broken="gives log-probs one token late",
        # The first token of a batch has that of the last one.
        also=(OWN, SCORES, PACKED, "gradient-is-the-same-row-by-row"),
    ),
    IsALittleSharper: Mutant(claim=SCORED, name="sharper", broken="scales all logits by 1.01"),
    CleansUp: Mutant(
        claim="texts-give-back-what-was-tokenized", name="cleans-up", broken="strips the spaces around texts"
    ),
    NeverStops: Mutant(
        claim="stop-tokens-and-padding-are-tokens-of-the-model",
        name="never-stops",
        broken="names no stop token",
        also=(GREEDY,),
    ),
    IgnoresTheTemperature: Mutant(
        claim=SCORES,
        name="no-temperature",
        broken="scores at temperature 1 whatever is asked",
        # The loop over tokens divides the logits by it.
        also=(OWN,),
    ),
    CountsInBits: Mutant(claim=SCORES, name="bits", broken="gives entropies in bits"),
    SeesItsNeighbours: Mutant(
        claim=PACKED,
        name="sees-neighbours",
        broken="attends to other samples of a packed row",
        # Everything that compares with a packed batch, or with another one.
        also=(OWN, PACKED_GRADIENT, "gradient-is-the-same-row-by-row"),
    ),
    KeepsTheFirstRows: Mutant(claim=CACHED, name="first-rows", broken="forgets the order of the rows of its cache"),
    ForgetsAnEarlyToken: Mutant(
        claim=CACHED,
        name="forgets-early",
        broken="loses a tenth of a layer's cached values when rows are chosen",
        # Texts are generated with the cache.
        also=(OWN, GREEDY),
    ),
    ComputesOtherwiseWithGradients: Mutant(
        claim=OWN, name="text-grad-mode", broken="scores text otherwise where gradients are on"
    ),
    HalvesThePackedGradient: Mutant(
        claim=PACKED_GRADIENT, name="halves-packed", broken="halves the gradient of packed batches"
    ),
    DividesItsGradient: Mutant(
        claim="gradient-is-the-same-row-by-row",
        name="text-divides",
        broken="divides the gradient of log-probs by the tokens of a batch",
    ),
    DetachesALayer: Mutant(
        claim="gradient-reaches-every-layer-that-lora-adapts",
        name="text-detached",
        broken="detaches a layer of a text model",
    ),
}
WELL = dataclasses.replace(
    workbench.SPEC, build=f"{__name__}:build", text_parity="conformance_mutants.text_reference:run"
)
UNCOMPARED = Mutant(
    claim=SCORED, name="no-text-parity", broken="names no reference run of texts", also=(PROMPTED, GREEDY)
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
    model.net.load_state_dict(load_file(Path(config.path) / workbench.WEIGHTS_FILE))
    model.spec = SPECS[config.use]
    return model
