"""Image tokens, pixels and texts against transformers' own forward and `generate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from unirl.core.errors import BatchError, DataError, RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.loop.requests import build_request
from unirl.models.janus import tiny
from unirl.models.janus.model import JanusModel
from unirl.numerics.tokens.batches import pack_batch, pad_batch
from unirl.numerics.tokens.rollout import GeneratedText, completion_media, generate_text, text_conditions

TEXTS = ("a red ring on the left", "two blue squares")
SIZE = tiny.GRID**2
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""fp32 in another order: log-probs of some nats, logits of some ten."""


def image_request(model: JanusModel, scale: float, **settings: Any) -> Request:
    sampling = TextSamplingConfig(**{"max_new_tokens": SIZE, "options": {"guidance_scale": scale}, **settings})
    prompts = [Prompt(prompt_id=text, text=text, metadata={}) for text in TEXTS]
    return build_request(
        prompts,
        track="picture",
        model_track="image",
        medium="image",
        sampling=sampling,
        samples_per_prompt=2,
        model=model,
        trajectory="none",
        seed=1,
        rollout=0,
        policy_version=0,
    )


def generated(model: JanusModel, request: Request) -> GeneratedText:
    sampling = request.text.sampling
    return generate_text(model, request.text, conditions=text_conditions(model, request.inputs, sampling=sampling))


def batch_of(model: JanusModel, request: Request, tokens: Any) -> TokenBatch:
    batch = pad_batch(list(request.text.prompt_tokens), list(tokens), pad_token=model.pad_token)
    return dataclasses.replace(batch, options=dict(request.text.options))


def plain_log_probs(plain: Any, prompt: Tensor, tokens: Tensor, *, scale: float) -> Tensor:
    """[L, V] by transformers' modules, of one row: both sequences written out."""
    config = plain.generation_config
    kept = (prompt == config.bos_token_id) | (prompt == config.generation_kwargs["boi_token_id"])
    both = torch.stack([prompt, prompt.masked_fill(~kept, config.pad_token_id)])
    made = plain.prepare_embeddings_for_image_generation(tokens[None, :-1]).repeat(2, 1, 1)
    embedded = torch.cat([plain.get_input_embeddings()(both), made], dim=1)
    states = plain.model.language_model(inputs_embeds=embedded).last_hidden_state[:, len(prompt) - 1 :]
    conditional, unconditional = plain.model.generation_head(states)
    return torch.log_softmax(unconditional + scale * (conditional - unconditional), dim=1)


@pytest.mark.parametrize("scale", [5.0, 1.0])
@torch.no_grad()
def test_log_probs_of_image_tokens_are_those_of_transformers(model: JanusModel, plain: Any, scale: float) -> None:
    """Sampled with a cache, and scored in one forward of both rows of each sample."""
    request = image_request(model, scale)
    result = generated(model, request)
    assert [len(row) for row in result.tokens] == [SIZE] * 4 and not any(result.truncated)
    log_probs, entropy = model.score(batch_of(model, request, result.tokens), temperature=1.0, with_entropy=True)
    assert entropy is not None
    pieces = zip(request.text.prompt_tokens, result.tokens, log_probs.split(SIZE), entropy.split(SIZE), strict=True)
    for row, (prompt, tokens, scored, spread) in enumerate(pieces):
        scores = plain_log_probs(plain, prompt, tokens, scale=scale)
        expected = scores.gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(scored, expected, **CLOSE)
        torch.testing.assert_close(result.log_probs[row], expected, **CLOSE)
        torch.testing.assert_close(spread, -(scores.exp() * scores).sum(dim=1), **CLOSE)


@torch.no_grad()
def test_greedy_images_and_their_pixels_are_those_of_transformers(model: JanusModel, plain: Any) -> None:
    request = image_request(model, 5.0, temperature=0.0).select([0, 2])
    result = generated(model, request)
    media = completion_media(model, result.tokens, request)
    assert media.kind == "image"
    for row, prompt in enumerate(request.text.prompt_tokens):
        expected = plain.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            generation_mode="image",
            do_sample=False,
            guidance_scale=5.0,
        )
        assert torch.equal(result.tokens[row], expected[0])
        pixels = plain.decode_image_tokens(expected)[0].permute(2, 0, 1)
        # Eight bits: half a level, and fp32.
        torch.testing.assert_close(media.arrays[row], (pixels / 2 + 0.5).clamp(0, 1), rtol=0, atol=0.5 / 255 + 1e-6)
    together = model.media_of(result.tokens, sampling=request.text.sampling)
    alone = [model.media_of([tokens], sampling=request.text.sampling).array(0) for tokens in result.tokens]
    for row, one in enumerate(alone):
        torch.testing.assert_close(together.array(row), one, rtol=0, atol=1 / 255 + 1e-6)


@torch.no_grad()
def test_a_dropped_cache_row_takes_its_unconditional_one_along(model: JanusModel) -> None:
    request = image_request(model, 5.0)
    whole = generated(model, request)
    for rows in ([3], [2, 0]):
        part = generated(model, request.select(rows))
        for place, row in enumerate(rows):
            assert torch.equal(part.tokens[place], whole.tokens[row])


@torch.no_grad()
def test_texts_about_images_are_those_of_transformers(
    model: JanusModel, plain: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    """One prompt with an image and one without, padded to one batch; greedily, with transformers' own processor."""
    media = tuple(tiny.media(tmp_path, number=number) for number in (0, 2))
    inputs = dataclasses.replace(Inputs.of_texts(TEXTS), media=media)
    sampling = TextSamplingConfig(max_new_tokens=6)
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    conditions = model.conditions(inputs, sampling=sampling)
    words = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    processor = transformers.JanusProcessor(
        transformers.AutoImageProcessor.from_pretrained(tiny_folder), words, num_image_tokens=SIZE
    )
    answers = [
        torch.tensor([70, 71, model.tokenizer.convert_tokens_to_ids("<image_placeholder>"), 72]),
        torch.tensor([80]),
    ]
    batch = pad_batch(prompts, answers, pad_token=model.pad_token, conditions=conditions)
    log_probs = model.score(batch, temperature=0.7)[0].split([4, 1])
    for row, text in enumerate(TEXTS):
        content = [*({"type": "image"} for _ in media[row]), {"type": "text", "text": text}]
        prompt = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pictures = [Image.open(ref.uri) for ref in media[row]] or None
        asked = processor(text=[words.bos_token + prompt], images=pictures, return_tensors="pt")
        assert prompts[row].tolist() == asked["input_ids"][0].tolist()
        if media[row]:
            torch.testing.assert_close(conditions["pixel_values"][row], asked["pixel_values"])
        # What a text says of images is embedded as text: transformers would count it among them.
        seen = plain(**asked, use_cache=True)
        scores = [seen.logits[0, -1]]
        cache = seen.past_key_values
        for token in answers[row][:-1]:
            seen = plain(input_ids=token[None, None], past_key_values=cache, use_cache=True)
            scores.append(seen.logits[0, -1])
        expected = torch.log_softmax(torch.stack(scores) / 0.7, dim=1).gather(1, answers[row][:, None]).squeeze(1)
        torch.testing.assert_close(log_probs[row], expected, **CLOSE)


def test_an_image_continues_the_tokens_of_its_plan(model: JanusModel) -> None:
    plan = Turn(stage="plan", text="red", tokens=(114, 101, 100, 258))
    foreign = Turn(stage="other", text="ab")
    inputs = dataclasses.replace(Inputs.of_texts(TEXTS), turns=((plan,), (plan, foreign)))
    sampling = TextSamplingConfig(max_new_tokens=SIZE, options={"guidance_scale": 5.0})
    starts = model.prompt_tokens(Inputs.of_texts(TEXTS), sampling=TextSamplingConfig())
    boi = model.tokenizer.convert_tokens_to_ids("<begin_of_image>")
    words = model.tokenizer("ab", add_special_tokens=False)["input_ids"]
    result = [row.tolist() for row in model.prompt_tokens(inputs, sampling=sampling)]
    assert result == [
        [*starts[0].tolist(), *plan.tokens, boi],
        [*starts[1].tolist(), *plan.tokens, *words, boi],
    ]
    image = MediaRef(modality="image", role="condition", uri="a.png")
    drawn = dataclasses.replace(plan, tokens=(), media=(image,))
    with pytest.raises(RecipeError, match=r"stages\.plan: got an image to continue from"):
        model.prompt_tokens(dataclasses.replace(inputs, turns=((drawn,), ())), sampling=sampling)


def test_an_image_that_is_not_filled_or_would_be_stopped_is_refused(model: JanusModel) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_new_tokens: got 15, expected 16 or more, the tokens of each"):
        image_request(model, 5.0, max_new_tokens=15)
    with pytest.raises(RecipeError, match=r"sampling\.stop: got \['x'\], but nothing stops a sample"):
        image_request(model, 5.0, stop=["x"])
    with pytest.raises(RecipeError, match=r"sampling\.stop_token_ids: got \[3\]"):
        image_request(model, 5.0, stop_token_ids=[3])
    assert image_request(model, 5.0, max_new_tokens=40).text.length == SIZE
    with pytest.raises(BatchError, match="got an image of 3 tokens, expected 16"):
        model.media_of([torch.tensor([1, 2, 3])], sampling=TextSamplingConfig())


def test_prompts_that_the_format_does_not_have_are_refused(model: JanusModel) -> None:
    with pytest.raises(DataError, match="'<image_placeholder>', which stands for images"):
        model.prompt_tokens(Inputs.of_texts(("see <image_placeholder>",)), sampling=TextSamplingConfig())
    with pytest.raises(RecipeError, match=r"sampling\.thinking: got True"):
        model.prompt_tokens(Inputs.of_texts(("a",)), sampling=TextSamplingConfig(thinking=True))
    packed = pack_batch([torch.tensor([1])], [torch.tensor([2])])
    with pytest.raises(BatchError, match="got packed rows"):
        model.score(packed, temperature=1.0)


def test_what_is_saved_loads_in_transformers(model: JanusModel, plain: Any, tmp_path: Path) -> None:
    saved: Any = model.causal_lm
    saved.save_pretrained(tmp_path)
    again, report = transformers.JanusForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(2, 9)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, plain(tokens).logits)
