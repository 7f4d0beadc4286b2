"""Engines whose texts are wrong in one way, and one that promises little of them and keeps it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from unirl.core.capability import Cap, Support
from unirl.core.request import Request, TextRequest
from unirl.core.rollout import Rollout
from unirl.core.track import Status, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.numerics.text_replay import replay_text

from conformance_mutants.mutant import Mutant

TEXT_ONLY = dataclasses.replace(
    TRAINSIDE, capabilities={**TRAINSIDE.capabilities, Cap.LATENT_ROLLOUT: Support.NO}, kernels=()
)
SPEC = dataclasses.replace(
    TEXT_ONLY,
    name="plain-text",
    build=f"{__name__}:build",
    capabilities={
        **TEXT_ONLY.capabilities,
        **dict.fromkeys((Cap.LOG_PROBS_TOKEN, Cap.SEEDS, Cap.INITIAL_NOISE), Support.NO),
    },
)
"""Draws from a generator of its own, and gives no log-probs."""


class TextEngine(TrainsideEngine):
    """Generates another request than it was given, and changes what it returns, echoing what was asked."""

    def _text(self, request: Request, name: str) -> Track:
        asked = request.text(name)
        changed = dataclasses.replace(request, tracks={name: self.wanted(request, asked)})
        track = super()._text(changed, name)
        segment = dataclasses.replace(
            track.text, prompt_tokens=asked.prompt_tokens, temperature=asked.sampling.temperature
        )
        return self.track(asked, dataclasses.replace(track, segment=segment))

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
    segment = dataclasses.replace(track.text, temperature=temperature)
    found = replay_text(engine._model, segment, packing=False).log_probs  # type: ignore[arg-type]
    return tuple(row[:length] for row, length in zip(found, segment.lengths, strict=True))


class PlainTextEngine(TextEngine):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        self._own = torch.Generator().manual_seed(99)

    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        seeds = torch.randint(2**62, (text.num_rows,), generator=self._own)
        return dataclasses.replace(text, seeds=tuple(seeds.tolist()))

    def track(self, asked: TextRequest, track: Track) -> Track:
        return _segment(track, log_probs=None)


class ForgetsTextParents(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return dataclasses.replace(track, parent_ids=track.group_ids)


class LosesTheLastLetter(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return dataclasses.replace(track, texts=tuple(text[:-1] for text in track.texts or ()))


class CallsFullTextsTruncated(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        longest = asked.sampling.max_new_tokens
        status = tuple(Status.TRUNCATED if n == longest else Status.COMPLETED for n in track.text.lengths)
        return dataclasses.replace(track, status=status)


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


class ShowsTheStopString(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return dataclasses.replace(track, texts=tuple(self._model.texts(list(track.text.tokens))))  # type: ignore[attr-defined]


class IgnoresStopStrings(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, stop=[])


class OneSeedAGroup(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        first = {group: text.seeds[row] for row, group in reversed(list(enumerate(request.group_ids)))}
        return dataclasses.replace(text, seeds=tuple(first[group] for group in request.group_ids))


class DrawsByPlace(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return dataclasses.replace(text, seeds=tuple(request.rollout + row for row in range(text.num_rows)))


class ScoresAtTemperature1(TextEngine):
    def track(self, asked: TextRequest, track: Track) -> Track:
        return _segment(track, log_probs=_scored(self, track, temperature=1.0))


class SamplesAtTemperature1(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, temperature=1.0 if text.sampling.temperature else 0.0)

    def track(self, asked: TextRequest, track: Track) -> Track:
        if not asked.sampling.temperature:
            return track
        return _segment(track, log_probs=_scored(self, track, temperature=asked.sampling.temperature))


class IsNeverGreedy(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, temperature=max(text.sampling.temperature, 0.5))


class IgnoresTopP(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        return _sampling(text, top_p=1.0)


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


class TokenizesAgain(TextEngine):
    def wanted(self, request: Request, text: TextRequest) -> TextRequest:
        model: Any = self._model
        return dataclasses.replace(
            text, prompt_tokens=tuple(model.prompt_tokens(request.prompts, sampling=text.sampling))
        )


class TakesTheVersionOfTheRequest(TextEngine):
    def _text(self, request: Request, name: str) -> Track:
        track = super()._text(request, name)
        return dataclasses.replace(track, policy_version=(request.policy_version,) * track.num_rows)


class RemembersGreedyTexts(TextEngine):
    """The text of a greedy request again, whatever the weights are by then."""

    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        self._kept: dict[tuple[str, ...], Track] = {}

    def _text(self, request: Request, name: str) -> Track:
        if request.text(name).sampling.temperature:
            return super()._text(request, name)
        if request.sample_ids not in self._kept:
            self._kept[request.sample_ids] = super()._text(request, name)
        kept = self._kept[request.sample_ids]
        return dataclasses.replace(kept, policy_version=(self.version,) * kept.num_rows)


class KeepsDropout(TextEngine):
    def generate(self, request: Request) -> Rollout:
        self._check(request)
        seed = torch.random.fork_rng() if self._model.trainable.training else nullcontext()
        with torch.no_grad(), seed:
            return Rollout(tracks={name: self._text(request, name) for name in request.tracks})


LINEAGE = "every-text-comes-back-with-its-lineage"
LIMIT, STOPS = "a-text-that-reaches-its-limit-is-truncated", "stop-tokens-end-a-text"
STRINGS, WORDS = "stop-strings-end-a-text-and-are-not-seen", "texts-are-the-words-of-their-tokens"
GROUPS, SEEDS = "texts-of-a-group-differ", "the-same-seeds-give-the-same-texts"
DRAWN, TOP = "tokens-are-drawn-at-the-temperature", "top-k-and-top-p-leave-the-likeliest-tokens"
READ, SHARED = "prompts-are-read-as-tokens", "shared-weights-are-sampled-as-they-train"
GREEDY, SCORED = "temperature-0-takes-the-likeliest-token", "log-probs-are-those-of-the-model-at-the-temperature"
BROKEN: dict[type[TrainsideEngine], Mutant] = {
    ForgetsTextParents: Mutant(
        claim=LINEAGE,
        name="forgets-text-parents",
        broken="names the groups of texts as their parents",
    ),
    LosesTheLastLetter: Mutant(
        claim=WORDS,
        name="loses-a-letter",
        broken="loses the last letter of texts",
        # A text that is cut before its stop string is compared with its tokens as well.
        also=(STRINGS,),
    ),
    CallsFullTextsTruncated: Mutant(
        claim=LIMIT, name="full-is-truncated", broken="takes a text that ends with its last token for a truncated one"
    ),
    DropsTheStopToken: Mutant(
        claim=STOPS,
        name="drops-stops",
        broken="drops the token that ended a text",
        # A text without it seems to have ended for no reason.
        also=(LIMIT,),
    ),
    ShowsTheStopString: Mutant(claim=STRINGS, name="shows-stops", broken="leaves the stop string in the text"),
    IgnoresStopStrings: Mutant(claim=STRINGS, name="no-stop-strings", broken="ignores stop strings"),
    OneSeedAGroup: Mutant(
        claim=GROUPS,
        name="one-seed",
        broken="draws the samples of a group from one seed",
        # Seeds that come from neighbours change with the split, and a group of one text has no distribution.
        also=(DRAWN, SEEDS, TOP),
    ),
    DrawsByPlace: Mutant(claim=SEEDS, name="draws-by-place", broken="draws by the place in the request"),
    ScoresAtTemperature1: Mutant(claim=SCORED, name="scores-at-1", broken="gives log-probs at temperature 1"),
    SamplesAtTemperature1: Mutant(claim=DRAWN, name="samples-at-1", broken="samples at temperature 1 throughout"),
    IsNeverGreedy: Mutant(
        claim=GREEDY,
        name="never-greedy",
        broken="raises temperature 0 to a half",
        # What is decided by the weights alone no longer is.
        also=(LINEAGE, READ, SHARED),
    ),
    IgnoresTopP: Mutant(claim=TOP, name="no-top-p", broken="ignores top_p"),
    ScoresWhatIsLeft: Mutant(
        claim="log-probs-are-over-all-tokens-whatever-is-left-out",
        name="scores-what-is-left",
        broken="gives log-probs over the tokens that top_k leaves",
    ),
    TokenizesAgain: Mutant(claim=READ, name="tokenizes-again", broken="tokenizes the words of prompts again"),
    TakesTheVersionOfTheRequest: Mutant(
        claim="a-stale-version-is-detected",
        name="text-version-of-the-request",
        broken="gives texts the version that was asked for",
    ),
    RemembersGreedyTexts: Mutant(
        claim=SHARED, name="remembers-texts", broken="keeps texts across a change of the weights"
    ),
    KeepsDropout: Mutant(
        claim="dropout-is-off-while-sampling", name="text-keeps-dropout", broken="generates text with dropout"
    ),
}


def build(config: Any, *, model: Any, device: Any) -> PlainTextEngine:
    return PlainTextEngine(config, model=model)
