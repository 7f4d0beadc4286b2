"""Tests for every latent engine that also generates the texts of a model which continues one sequence: a model's test
module imports all of them.

The module has the fixtures `engine`, see `started`, `model`, with the weights of the checkpoint and to be modified, `ask`,
see `asking`, `media`, source images of three prompts: one, one of another size, and two, `variants`, settings of texts
about them, and `spoiled`, the name of a weight of the second layer and the engine's name of its layer.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.loop.requests import with_inputs
from unirl.model_host.unified.model import UnifiedModel
from unirl.numerics.tokens.rollout import generate_text, text_conditions

from . import latents
from .sequence_models import asked
from .text_engines import (
    test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated,
    test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit,
    test_after_a_full_sync_it_samples_from_what_was_sent,
    test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync,
    test_greedy_texts_are_those_of_the_trainer,
    test_log_probs_are_those_of_the_weights_at_the_sampling_temperature,
)
from .texts import ROUNDING, Ask, gap

__all__ = [
    "test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated",
    "test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit",
    "test_after_a_full_sync_it_samples_from_what_was_sent",
    "test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync",
    "test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent",
    "test_greedy_texts_are_those_of_the_trainer",
    "test_it_draws_what_the_trainer_would_have_drawn",
    "test_log_probs_are_those_of_the_weights_at_the_sampling_temperature",
    "test_logits_that_are_not_finite_are_an_error_that_names_the_weight",
    "test_prompts_of_equal_tokens_over_other_images_are_other_prompts",
    "test_requests_that_it_cannot_honour_are_refused",
    "test_rows_that_are_already_done_leave_the_batch",
    "test_texts_and_images_take_turns_with_the_same_weights",
    "test_texts_continue_from_turns",
]

PROMPTS = ("a red ring", "two blue squares on the left", "it")

Model = UnifiedModel[Any]


def asking(own: Model) -> Ask:
    """Makes requests of two samples for each prompt; the version is the engine's. own: a model that nothing modifies."""

    def make(
        engine: ExternalLatentEngine,
        *,
        stop_tokens: tuple[int, ...] | None = None,
        seed: int = 0,
        media: Any = lambda number: (),
        **settings: Any,
    ) -> Request:
        request = make_request(
            own,
            TextSamplingConfig(**{"max_new_tokens": 16, **settings}),
            track="text",
            prompts=PROMPTS,
            media=media,
            samples_per_prompt=2,
            seed=seed,
            policy_version=engine.version,
        )
        if stop_tokens is None:
            return request
        return dataclasses.replace(request, params=dataclasses.replace(request.text, stop_tokens=stop_tokens))

    return make


def check_text(engine: ExternalLatentEngine, model: Model, request: Request, *, rounding: float = ROUNDING) -> Track:
    """The same tokens, mask and log-probs as from the trained module: by its token loop, and by one forward in replay.
    Returns the track. rounding: largest difference of log-probs."""
    track = engine.generate(request)
    verify_echo(request, track)
    conditions = text_conditions(model, request.inputs, sampling=request.text.sampling)
    expected = generate_text(model, request.text, conditions=conditions)
    assert [row.tolist() for row in track.text.tokens] == [row.tolist() for row in expected.tokens]
    masks = [None if own is None else [row.tolist() for row in own] for own in (track.text.mask, expected.mask)]
    assert masks[0] == masks[1] and (masks[0] is None) is not bool(model.spec.restricts)
    assert track.text.log_probs is not None
    for own, other in zip(track.text.log_probs, expected.log_probs, strict=True):
        assert float((own - other).abs().max()) < rounding
    if request.text.sampling.temperature:
        assert gap(track, model) < rounding
    return track


def changed(model: Model, request: Request, **changes: Any) -> Request:
    """The request with other inputs, and the prompt tokens of these."""
    return with_inputs(request, dataclasses.replace(request.inputs, **changes), model=model, track="text")


def test_it_draws_what_the_trainer_would_have_drawn(
    engine: ExternalLatentEngine,
    model: Model,
    ask: Ask,
    media: list[tuple[MediaRef, ...]],
    variants: list[dict[str, Any]],
) -> None:
    """About no source, one, one of another size and two, or some with and some without; by top_k and top_p, and behind a
    system prompt. Prompts are of different lengths, and the six rows are two batches."""
    engine.load_weights(full_update(model, version=1))
    check_text(engine, model, ask(engine))
    check_text(engine, model, ask(engine, temperature=0.7, system_prompt="Be brief."))
    for settings in (*variants, {"top_k": 5}, {"top_p": 0.6}):
        check_text(engine, model, ask(engine, media=lambda number: media[number], **settings))
    check_text(engine, model, ask(engine, media=lambda number: media[number] if number == 1 else ()))


def test_texts_continue_from_turns(
    engine: ExternalLatentEngine, model: Model, ask: Ask, media: list[tuple[MediaRef, ...]]
) -> None:
    """From its own texts as they were sampled, whole and cut, and from an image that it drew."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    each = (
        (Turn(stage="plan", text="x", tokens=(70, 71, model.stop_tokens[0])),),
        (Turn(stage="plan", text="y", tokens=(72,)), Turn(stage="draw", media=media[0])),
        (Turn(stage="other", text="by another model"),),
    )
    continued = changed(model, request, turns=tuple(one for one in each for _ in range(2)))
    track, other = check_text(engine, model, continued), engine.generate(request)
    assert all(one.tolist() != two.tolist() for one, two in zip(track.text.tokens, other.text.tokens, strict=True))


def test_prompts_of_equal_tokens_over_other_images_are_other_prompts(
    engine: ExternalLatentEngine, model: Model, ask: Ask, tmp_path: Path
) -> None:
    """Images of one size and one colour each."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, temperature=0.0).select([0, 2])
    refs: list[tuple[MediaRef, ...]] = []
    for number, colour in enumerate(((250, 5, 5), (5, 5, 250))):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (64, 64), colour).save(file)
        refs.append((MediaRef(modality="image", role="source", uri=str(file)),))
    texts = (PROMPTS[0],) * 2
    shown = changed(model, request, media=tuple(refs), texts=texts, prompts=texts)
    first, second = shown.text.prompt_tokens
    assert first.tolist() == second.tolist()
    for rows in ((0, 1), (1, 0), (1,)):
        check_text(engine, model, shown.select(rows))
    one, other = (engine.generate(shown.select([row])).text.log_probs for row in (0, 1))
    assert one is not None and other is not None
    # A random model's text may be the same; its log-probs are not.
    assert float((one[0][0] - other[0][0]).abs()) > 100 * ROUNDING


def test_an_image_that_cannot_be_read_is_refused_before_anything_is_sent(
    engine: ExternalLatentEngine,
    model: Model,
    ask: Ask,
    media: list[tuple[MediaRef, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, media=lambda number: media[0]).select([0])
    gone = dataclasses.replace(media[0][0], uri="/gone.png")
    inputs = dataclasses.replace(request.inputs, media=((gone,),))
    process: Any = engine._process
    with monkeypatch.context() as patched, pytest.raises(DataError, match=r"/gone\.png' \(source\)"):
        patched.setattr(process, "call", lambda *_, **__: pytest.fail("something was sent"))
        engine.generate(dataclasses.replace(request, inputs=inputs))
    check_text(engine, model, request)


def test_requests_that_it_cannot_honour_are_refused(engine: ExternalLatentEngine, model: Model, ask: Ask) -> None:
    longest = model.encoder.longest
    with pytest.raises(RecipeError, match=rf"takes {longest} \(max_position_embeddings of the checkpoint\)"):
        engine.generate(ask(engine, max_new_tokens=longest))
    engine.load_weights(full_update(model, version=5))
    with pytest.raises(RunFailed, match=r"got a request for weights version 4, but it holds version 5"):
        engine.generate(dataclasses.replace(ask(engine), policy_version=4))
    engine.sleep()
    with pytest.raises(RunFailed, match="asleep"):
        engine.generate(ask(engine))
    engine.wake()
    check_text(engine, model, ask(engine))


def test_texts_and_images_take_turns_with_the_same_weights(
    engine: ExternalLatentEngine, model: Model, ask: Ask
) -> None:
    """All weights, an adapter on every layer that LoRA adapts, and all weights again: one sync for both, and neither
    disturbs the other."""
    for version in (1, 3):
        perturb(model, seed=version)
        engine.load_weights(full_update(model, version=version))
        for _ in range(2):
            check_text(engine, model, ask(engine))
            assert latents.gap(engine.generate(asked(model, engine)), model) < ROUNDING
        update, added = latents.adapter(model, targets=model.spec.lora_targets, version=version + 1)
        engine.load_weights(update)
        adapted = with_adapter(copy.deepcopy(model), added)
        check_text(engine, adapted, ask(engine))
        assert latents.gap(engine.generate(asked(model, engine)), adapted) < ROUNDING


def test_rows_that_are_already_done_leave_the_batch(engine: ExternalLatentEngine, model: Model, ask: Ask) -> None:
    """A third of all tokens ends a text, so that rows of one batch end at different places."""
    engine.load_weights(full_update(model, version=1))
    third = tuple(range(1, len(model.vocabulary), 3))
    track = check_text(engine, model, ask(engine, stop_tokens=third))
    assert len(set(track.text.lengths)) > 2


def test_logits_that_are_not_finite_are_an_error_that_names_the_weight(
    engine: ExternalLatentEngine, model: Model, ask: Ask, spoiled: tuple[str, str]
) -> None:
    weight, layer = spoiled
    whole = copy.deepcopy(model)
    with torch.no_grad():
        model.transformer.get_parameter(weight)[0, 0] = torch.inf
    engine.load_weights(full_update(model, version=1))
    with pytest.raises(RunFailed, match=rf"'{model.spec.name}': logits are not finite.*{layer}"):
        engine.generate(ask(engine))
    engine.load_weights(full_update(whole, version=2))
    check_text(engine, whole, ask(engine))
