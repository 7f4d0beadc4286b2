"""Engines whose texts are wrong in one way, and one that promises little of them and keeps it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from unirl.core.specs.capability import Cap
from unirl.core.types.media import Media
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.track import Status, TextSegment, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.numerics.tokens.replay import replay_text

from conformance_mutants.mutant import mutant, mutants_in

TEXT_ONLY = dataclasses.replace(TRAINSIDE, capabilities=TRAINSIDE.capabilities - {Cap.LATENT_ROLLOUT}, kernels=())
SPEC = dataclasses.replace(
    TEXT_ONLY,
    name="plain-text",
    build=f"{__name__}:build",
    capabilities=TEXT_ONLY.capabilities - {Cap.LOG_PROBS_TOKEN, Cap.SEEDS, Cap.INITIAL_NOISE},
)
"""Draws from a generator of its own, and gives no log-probs."""


class TextEngine(TrainsideEngine):
    """Generates another request than it was given, and changes what it returns, echoing what was asked: its echo is a
    lie, unless `echo` says otherwise."""

    def _text(self, request: Request) -> Track:
        asked = request.text
        changed = dataclasses.replace(request, params=self.wanted(request, asked))
        track = super()._text(changed)
        return self.track(asked, dataclasses.replace(track, segment=self.echo(asked, track)))

    def echo(self, asked: TextRequest, track: Track) -> TextSegment:
        return dataclasses.replace(
            track.text, prompt_tokens=asked.prompt_tokens, temperature=asked.sampling.temperature
        )

    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return text

    def track(self, asked: TextRequest, track: Track) -> Track:
        return track


def _sampling(text: TextRequest, **changes: Any) -> TextRequest:
    return dataclasses.replace(text, sampling=dataclasses.replace(text.sampling, **changes))


def _segment(track: Track, **changes: Any) -> Track:
    return dataclasses.replace(track, segment=dataclasses.replace(track.text, **changes))


def _scored(engine: TrainsideEngine, track: Track, *, temperature: float) -> tuple[Tensor, ...]:
    """Log-probs of a track's tokens at a temperature."""
    result = replay_text(engine._model, _segment(track, temperature=temperature), packing=False).log_probs  # type: ignore[arg-type]
    return tuple(row[:length] for row, length in zip(result, track.text.lengths, strict=True))


class PlainTextEngine(TextEngine):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        self._own = torch.Generator().manual_seed(99)

    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        seeds = torch.randint(2**62, (text.num_rows,), generator=self._own)
        return dataclasses.replace(text, seeds=tuple(seeds.tolist()))

    def track(self, asked: TextRequest, track: Track) -> Track:
        return _segment(track, log_probs=None)


LINEAGE = "every-text-comes-back-with-its-lineage"
LIMIT, STOPS = "a-text-that-reaches-its-limit-is-truncated", "stop-tokens-end-a-text"
STRINGS, WORDS = "stop-strings-end-a-text-and-are-removed", "texts-decode-from-their-tokens"
GROUPS, SEEDS = "texts-of-a-group-differ", "the-same-seeds-give-the-same-texts"
DRAWN, TOP = "tokens-are-drawn-at-the-temperature", "top-k-and-top-p-keep-the-likeliest-tokens"
READ, SHARED = "prompts-are-read-as-tokens", "shared-weights-are-sampled-as-they-train"
ALL_TOKENS = "log-probs-cover-the-whole-vocabulary"
GREEDY, SCORED = "temperature-0-is-greedy", "log-probs-are-those-of-the-model-at-the-temperature"


@mutant(claim=LINEAGE, breaks="names the groups of texts as their parents")
class ForgetsTextParents(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return dataclasses.replace(track, parent_ids=track.group_ids)


# A text that is cut before its stop string is compared with its tokens as well.
@mutant(claim=WORDS, name="loses-a-letter", breaks="loses the last letter of texts", also=(STRINGS,))
class LosesTheLastLetter(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        assert track.media is not None
        cut = Media(kind="text", values=tuple(text[:-1] for text in track.media.texts))
        return dataclasses.replace(track, media=cut)


@mutant(claim=LIMIT, name="full-is-truncated", breaks="takes a text that ends with its last token for a truncated one")
class CallsFullTextsTruncated(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        longest = asked.sampling.max_new_tokens
        status = tuple(Status.TRUNCATED if n == longest else Status.COMPLETED for n in track.text.lengths)
        return dataclasses.replace(track, status=status)


# A text without it seems to have ended for no reason.
@mutant(claim=STOPS, name="drops-stops", breaks="drops the token that ended a text", also=(LIMIT,))
class DropsTheStopToken(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        stops = set(asked.stop_tokens)
        kept = [len(row) - (len(row) > 1 and int(row[-1]) in stops) for row in track.text.tokens]
        assert track.text.log_probs is not None
        return _segment(
            track,
            tokens=tuple(row[:count] for row, count in zip(track.text.tokens, kept, strict=True)),
            log_probs=tuple(row[:count] for row, count in zip(track.text.log_probs, kept, strict=True)),
        )


@mutant(claim=STRINGS, name="shows-stops", breaks="leaves the stop string in the text")
class ShowsTheStopString(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return dataclasses.replace(
            track, media=Media(kind="text", values=tuple(self._model.texts(list(track.text.tokens))))
        )  # type: ignore[attr-defined]


@mutant(claim=STRINGS, name="no-stop-strings", breaks="ignores stop strings")
class IgnoresStopStrings(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, stop=[])


# Seeds that come from neighbours change with the split, and a group of one text has no distribution.
@mutant(claim=GROUPS, name="one-seed", breaks="draws the samples of a group from one seed", also=(DRAWN, SEEDS, TOP))
class OneSeedAGroup(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        first = {group: text.seeds[row] for row, group in reversed(list(enumerate(request.group_ids)))}
        return dataclasses.replace(text, seeds=tuple(first[group] for group in request.group_ids))


@mutant(claim=SEEDS, breaks="draws by the place in the request")
class DrawsByPlace(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return dataclasses.replace(text, seeds=tuple(request.rollout + row for row in range(text.num_rows)))


@mutant(claim=SCORED, name="scores-at-1", breaks="gives log-probs at temperature 1")
class ScoresAtTemperature1(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return _segment(track, log_probs=_scored(self, track, temperature=1.0))


@mutant(claim=DRAWN, name="samples-at-1", breaks="samples at temperature 1 throughout")
class SamplesAtTemperature1(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, temperature=1.0 if text.sampling.temperature else 0.0)

    def track(self, asked: TextRequest, track: Track) -> Track:
        if not asked.sampling.temperature:
            return track
        return _segment(track, log_probs=_scored(self, track, temperature=asked.sampling.temperature))


class HonestTextEngine(TextEngine):
    """Computes something else than was asked for, with an echo that is read off what computed it."""

    def echo(self, asked: TextRequest, track: Track) -> TextSegment:
        return track.text


@mutant(
    claim=LINEAGE,
    breaks="samples at temperature 1 throughout, and says so",
    # Draws are of another temperature, whoever says so.
    also=(DRAWN,),
)
class HasOneTemperature(HonestTextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, temperature=1.0 if text.sampling.temperature else 0.0)


@mutant(
    claim=LINEAGE,
    breaks="goes on from prompts without their first token, and says so",
    # Whatever is compared with the model's own continuation of the prompt.
    also=(ALL_TOKENS, GREEDY, READ, SHARED, TOP),
)
class DropsTheFirstToken(HonestTextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return dataclasses.replace(text, prompt_tokens=tuple(row[min(1, len(row) - 1) :] for row in text.prompt_tokens))


# What is decided by the weights alone no longer is.
@mutant(claim=GREEDY, name="never-greedy", breaks="raises temperature 0 to a half", also=(LINEAGE, READ, SHARED))
class IsNeverGreedy(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, temperature=max(text.sampling.temperature, 0.5))


@mutant(claim=TOP, name="no-top-p", breaks="ignores top_p")
class IgnoresTopP(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, top_p=1.0)


@mutant(
    claim="log-probs-cover-the-whole-vocabulary",
    breaks="gives log-probs over the tokens that top_k leaves",
)
class ScoresWhatIsLeft(TextEngine):
    """Of texts of one token, log-probs over the `top_k` likeliest alone."""

    def track(self, asked: TextRequest, track: Track) -> Track:
        top_k = asked.sampling.top_k
        if not top_k:
            return track
        model: Any = self._model
        left: list[Tensor] = []
        for prompt, tokens in zip(track.text.prompt_tokens, track.text.tokens, strict=True):
            places = torch.arange(len(prompt))[None]
            mask = torch.ones_like(places, dtype=torch.bool)
            logits, _ = model.next_logits(prompt[None], positions=places, attention_mask=mask, cache=None)
            mass = logits.topk(top_k, dim=1).values.logsumexp(dim=1)
            left.append(logits[0, tokens] - mass)
        return _segment(track, log_probs=tuple(left))


@mutant(claim=READ, breaks="tokenizes the words of prompts again")
class TokenizesAgain(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        model: Any = self._model
        return dataclasses.replace(
            text, prompt_tokens=tuple(model.prompt_tokens(request.inputs, sampling=text.sampling))
        )


@mutant(
    claim="a-stale-version-is-detected",
    name="text-version-of-the-request",
    breaks="gives texts the version that was asked for",
)
class TakesTheVersionOfTheRequest(TextEngine):
    def _text(self, request: Request) -> Track:
        track = super()._text(request)
        return dataclasses.replace(track, policy_version=(request.policy_version,) * track.num_rows)


@mutant(claim=SHARED, name="remembers-texts", breaks="keeps texts across a change of the weights")
class RemembersGreedyTexts(TextEngine):
    """The text of a greedy request again, whatever the weights are by then."""

    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        self._kept: dict[tuple[str, ...], Track] = {}

    def _text(self, request: Request) -> Track:
        if request.text.sampling.temperature:
            return super()._text(request)
        if request.sample_ids not in self._kept:
            self._kept[request.sample_ids] = super()._text(request)
        kept = self._kept[request.sample_ids]
        return dataclasses.replace(kept, policy_version=(self.version,) * kept.num_rows)


@mutant(claim="dropout-is-off-while-sampling", name="text-keeps-dropout", breaks="generates text with dropout")
class KeepsDropout(TextEngine):
    def generate(self, request: Request) -> Track:
        self._check(request)
        seed = torch.random.fork_rng() if self._model.trainable.training else nullcontext()
        with torch.no_grad(), seed:
            return self._text(request)


BROKEN = mutants_in(__name__)


def build(config: Any, *, model: Any, device: Any) -> PlainTextEngine:
    return PlainTextEngine(config, model=model)
