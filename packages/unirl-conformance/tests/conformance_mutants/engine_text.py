"""Engines whose texts are wrong, and one that promises little of them and keeps it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from unirl.core.specs.capability import Cap
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.track import Status, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.numerics.tokens.replay import replay_text

from conformance_mutants.changes import changed, with_segment
from conformance_mutants.engine_changes import TEXT_ONLY, Fields, rollout, texts

SPEC = replace(
    TEXT_ONLY,
    name="plain-text",
    build=f"{__name__}:build",
    capabilities=TEXT_ONLY.capabilities - {Cap.LOG_PROBS_TOKEN, Cap.SEEDS, Cap.INITIAL_NOISE},
)
"""Draws from a separate generator, and gives no log-probs."""
LINEAGE = "every-text-comes-back-with-its-lineage"
LIMIT, STOPS = "a-text-that-reaches-its-limit-is-truncated", "stop-tokens-end-a-text"
STRINGS, WORDS = "stop-strings-end-a-text-and-are-removed", "texts-decode-from-their-tokens"
GROUPS, SEEDS = "texts-of-a-group-differ", "the-same-seeds-give-the-same-texts"
DRAWN, TOP = "tokens-are-drawn-at-the-temperature", "top-k-and-top-p-keep-the-likeliest-tokens"
READ, SHARED = "prompts-are-read-as-tokens", "shared-weights-are-sampled-as-they-train"
ALL_TOKENS = "log-probs-cover-the-whole-vocabulary"
OPTIONS = "options-of-a-text-track-are-echoed-and-replayed"
ALLOWED = "a-restricted-tokens-log-prob-is-over-what-was-allowed"
FORCED = "forced-tokens-are-masked-and-get-no-gradient"
GREEDY, SCORED = "temperature-0-is-greedy", "log-probs-are-those-of-the-model-at-the-temperature"


def build(config: Any, *, model: Any, device: Any) -> Any:
    """The engine of `SPEC`."""
    generator = torch.Generator().manual_seed(99)

    def own_seeds(_: Any, request: Request) -> Fields:
        return {"seeds": tuple(torch.randint(2**62, (request.num_rows,), generator=generator).tolist())}

    change = rollout(params=own_seeds, segment=lambda *_: {"log_probs": None})
    return changed(TrainsideEngine(config, model=model), {"_text": change})


def scored(engine: Any, track: Track, *, temperature: float) -> tuple[Tensor, ...]:
    """Log-probs of a track's tokens at a temperature."""
    result = replay_text(engine._model, with_segment(track, temperature=temperature), packing=False).log_probs
    return tuple(row[:length] for row, length in zip(result, track.text.lengths, strict=True))


def without_last_letter(_: Any, request: Request, track: Track) -> Fields:
    assert track.media is not None
    return {"media": Media(kind="text", values=tuple(text[:-1] for text in track.media.texts))}


def truncated_if_full(_: Any, request: Request, track: Track) -> Fields:
    longest = request.text.sampling.max_new_tokens
    return {"status": tuple(Status.TRUNCATED if n == longest else Status.COMPLETED for n in track.text.lengths)}


def without_stop_token(_: Any, request: Request, track: Track) -> Fields:
    stops, text = set(request.text.stop_tokens), track.text
    kept = [len(row) - (len(row) > 1 and int(row[-1]) in stops) for row in text.tokens]
    assert text.log_probs is not None
    pairs = {"tokens": text.tokens, "log_probs": text.log_probs}
    return {name: tuple(row[:n] for row, n in zip(rows, kept, strict=True)) for name, rows in pairs.items()}


def one_seed_a_group(_: Any, request: Request) -> Fields:
    first = {group: seed for group, seed in reversed(list(zip(request.group_ids, request.text.seeds, strict=True)))}
    return {"seeds": tuple(first[group] for group in request.group_ids)}


def at_1_unless_greedy(sampling: Any) -> Fields:
    return {"temperature": 1.0 if sampling.temperature else 0.0}


def scored_as_requested(engine: Any, request: Request, track: Track) -> Fields:
    temperature = request.text.sampling.temperature
    return {"log_probs": scored(engine, track, temperature=temperature)} if temperature else {}


def scored_over_top_k(engine: Any, request: Request, track: Track) -> Fields:
    """Log-probs over the top k tokens, for completions of one token."""
    top_k = request.text.sampling.top_k
    if not top_k:
        return {}
    left: list[Tensor] = []
    for prompt, tokens in zip(track.text.prompt_tokens, track.text.tokens, strict=True):
        places = torch.arange(len(prompt))[None]
        mask = torch.ones_like(places, dtype=torch.bool)
        logits, _ = engine._model.next_logits(prompt[None], positions=places, attention_mask=mask, cache=None)
        left.append(logits[0, tokens] - logits.topk(top_k, dim=1).values.logsumexp(dim=1))
    return {"log_probs": tuple(left)}


def scored_over_all(engine: Any, request: Request, track: Track) -> Fields:
    """Log-probs over the whole vocabulary, also of tokens that were restricted."""
    free = tuple((name, name != "form" and value) for name, value in track.text.options)
    if free == track.text.options or not request.text.sampling.temperature:
        return {}
    unruled = with_segment(track, options=free)
    return {"log_probs": scored(engine, unruled, temperature=request.text.sampling.temperature)}


def remembers_greedy_texts(engine: Any, generate: Any, request: Request) -> Track:
    """The text of a greedy request again, whatever the weights are by then."""
    if request.text.sampling.temperature:
        return generate(request)
    kept = vars(engine).setdefault("kept", {})
    if request.sample_ids not in kept:
        kept[request.sample_ids] = generate(request)
    return replace(kept[request.sample_ids], policy_version=(engine.version,) * request.num_rows)


def keeps_dropout(engine: Any, generate: Any, request: Request) -> Track:
    engine._check(request)
    seed = torch.random.fork_rng() if engine._model.trainable.training else nullcontext()
    with torch.no_grad(), seed:
        return engine._text(request)


# fmt: off
MUTANTS = [
    texts("forgets-text-parents", LINEAGE, "names the groups of texts as their parents",
          track=lambda _, request, track: {"parent_ids": track.group_ids}),
    # A text that is cut before its stop string is compared with its tokens as well.
    texts("loses-a-letter", WORDS, "loses the last letter of texts", also=(STRINGS,), track=without_last_letter),
    texts("full-is-truncated", LIMIT, "takes a text that ends with its last token for a truncated one",
          track=truncated_if_full),
    # A text without it seems to have ended for no reason.
    texts("drops-stops", STOPS, "drops the token that ended a text", also=(LIMIT,), segment=without_stop_token),
    texts("shows-stops", STRINGS, "leaves the stop string in the text",
          track=lambda engine, request, track: {
              "media": Media(kind="text", values=tuple(engine._model.texts(list(track.text.tokens))))}),
    texts("no-stop-strings", STRINGS, "ignores stop strings", sampling=lambda _: {"stop": []}),
    # Seeds that come from neighbours change with the split, and a group of one text has no distribution.
    texts("one-seed", GROUPS, "draws the samples of a group from one seed", also=(DRAWN, SEEDS, TOP),
          params=one_seed_a_group),
    texts("draws-by-place", SEEDS, "draws by the place in the request",
          params=lambda _, request: {"seeds": tuple(request.rollout + row for row in range(request.num_rows))}),
    texts("scores-at-1", SCORED, "gives log-probs at temperature 1",
          segment=lambda engine, request, track: {"log_probs": scored(engine, track, temperature=1.0)}),
    texts("samples-at-1", DRAWN, "samples at temperature 1 throughout", sampling=at_1_unless_greedy,
          segment=scored_as_requested),
    # Draws are of another temperature, whoever says so.
    texts("has-one-temperature", LINEAGE, "samples at temperature 1 throughout, and says so", also=(DRAWN,),
          is_honest=True, sampling=at_1_unless_greedy),
    # Whatever is compared with the model's own continuation of the prompt.
    texts("drops-the-first-token", LINEAGE, "continues prompts without their first token, and says so",
          also=(ALL_TOKENS, GREEDY, READ, SHARED, TOP), is_honest=True,
          params=lambda _, request: {
              "prompt_tokens": tuple(row[min(1, len(row) - 1) :] for row in request.text.prompt_tokens)}),
    # What is decided by the weights alone no longer is.
    texts("never-greedy", GREEDY, "raises temperature 0 to a half", also=(LINEAGE, READ, SHARED),
          sampling=lambda sampling: {"temperature": max(sampling.temperature, 0.5)}),
    texts("no-top-p", TOP, "ignores top_p", sampling=lambda _: {"top_p": 1.0}),
    texts("scores-what-is-left", ALL_TOKENS, "gives log-probs over the tokens that top_k leaves",
          segment=scored_over_top_k),
    texts("tokenizes-again", READ, "tokenizes the words of prompts again",
          params=lambda engine, request: {
              "prompt_tokens": tuple(engine._model.prompt_tokens(request.inputs, sampling=request.text.sampling))}),
    texts("forgets-options", OPTIONS, "leaves an option out, and echoes it", by_rules=True,
          params=lambda _, request: {"options": tuple(
              (name, 1.0 if name == "sharpness" else value) for name, value in request.text.options)}),
    texts("scores-all", ALLOWED, "gives log-probs over all tokens where some were allowed", by_rules=True,
          segment=scored_over_all),
    texts("trains-forced", FORCED, "masks no token", by_rules=True, segment=lambda *_: {"mask": None}),
    texts("text-version-of-the-request", "a-stale-version-is-detected", "gives texts the version that was asked for",
          track=lambda _, request, track: {"policy_version": (request.policy_version,) * track.num_rows}),
    texts("remembers-texts", SHARED, "keeps texts across a change of the weights",
          changes={"_text": remembers_greedy_texts}),
    texts("text-keeps-dropout", "dropout-is-off-while-sampling", "generates text with dropout",
          changes={"generate": keeps_dropout}),
]
# fmt: on
