"""One sequence: its format, what a stage continues from, and what the negative branch of guidance leaves out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unified_models import given
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.hunyuan_image3 import tiny
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build
from unirl.models.hunyuan_image3.resolutions import Resolutions
from unirl.models.hunyuan_image3.sequence import moves
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.restricted import target_restrictions

IMAGE = LatentSamplingConfig(num_inference_steps=4, height=64, width=64)
TEXT = TextSamplingConfig(max_new_tokens=4)
SAMPLED = (40, 41, 42)


def words(model: HunyuanImageModel, *parts: str) -> list[int]:
    """Tokens of texts, each by itself; names of special tokens are theirs."""
    return [token for part in parts for token in model.tokenizer(part, add_special_tokens=False)["input_ids"]]


def continued(media: tuple[MediaRef, ...] = (), *turns: Turn) -> Inputs:
    return given(("a ring",), (media,), (turns,))


def image_tokens(model: HunyuanImageModel, inputs: Inputs, **options: object) -> list[int]:
    (tokens,) = model.encode(inputs, sampling=dataclasses.replace(IMAGE, options=options))["tokens"]
    return tokens.tolist()


def test_a_prompt_is_in_the_published_format(model: HunyuanImageModel) -> None:
    start = words(model, "<|startoftext|>", "be brief", "\n\n", "User: ", "a ring", "\n\n", "Assistant: ")
    for begin, tags in (("", []), ("think", ["<think>"]), ("recaption", ["<recaption>"])):
        sampling = dataclasses.replace(TEXT, system_prompt="be brief", options={"begin": begin})
        (row,) = model.prompt_tokens(given(("a ring",)), sampling=sampling)
        assert row.tolist() == [*start, *words(model, *tags)]
    # The square is number 16 of 33 ratios.
    size = words(model, "<answer>", "<boi>", "<img_size_64>", "<img_ratio_16>")
    assert image_tokens(model, given(("a ring",)), system_prompt="be brief") == [*start, *size]
    (raw,) = model.prompt_tokens(given(("a ring",)), sampling=dataclasses.replace(TEXT, chat=False))
    assert raw.tolist() == words(model, "<|startoftext|>", "a ring")


def test_a_base_checkpoint_has_no_roles(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0, has_roles=False)
    base = build(HunyuanImageConfig(path=str(tmp_path)), device="cpu")
    (row,) = base.prompt_tokens(given(("a ring",)), sampling=TEXT)
    assert row.tolist() == words(base, "<|startoftext|>", "a ring")
    size = words(base, "<boi>", "<img_size_64>", "<img_ratio_16>")
    assert image_tokens(base, given(("a ring",))) == [*row.tolist(), *size]


@pytest.mark.parametrize(
    ("sampled", "end"),
    [
        ((40, "</think>", "<recaption>", 41, "</recaption>"), []),
        ((40, "</think>", "<recaption>", 41), ["</recaption>"]),
        ((40, 41), ["</think>"]),
    ],
)
def test_a_turn_is_its_sampled_tokens_with_the_tag_that_a_cut_one_lacks(
    model: HunyuanImageModel, media: list[tuple[MediaRef, ...]], sampled: tuple[int | str, ...], end: list[str]
) -> None:
    tokens = tuple(words(model, one)[0] if isinstance(one, str) else one for one in sampled)
    sampling = dataclasses.replace(TEXT, options={"begin": "think"})
    (prompt,) = model.prompt_tokens(given(("a ring",), (media[0],)), sampling=sampling)
    second = continued(media[0], Turn(stage="think", text="anything", tokens=tokens))
    size = words(model, "<answer>", "<boi>", "<img_size_64>", "<img_ratio_16>")
    expected = [*prompt.tolist(), *tokens, *words(model, *end)]
    assert image_tokens(model, second, begin="think") == [*expected, *size]
    (after,) = model.prompt_tokens(second, sampling=sampling)
    assert after.tolist() == expected


def test_a_continued_sequence_scores_as_one_sequence(
    model: HunyuanImageModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """1e-6 nats: the same tokens in another split, so that only the shapes of products may differ."""
    later = torch.tensor([50, 51, *words(model, "</recaption>")])
    alone, joined = (continued(media[0], *turns) for turns in ((Turn(stage="plan", tokens=SAMPLED),), ()))
    result: list[Tensor] = []
    for inputs, completion in ((alone, later), (joined, torch.tensor([*SAMPLED, *later.tolist()]))):
        batch = pad_batch(
            model.prompt_tokens(inputs, sampling=TEXT),
            [completion],
            pad_token=model.pad_token,
            conditions=model.conditions(inputs, sampling=TEXT),
        )
        with torch.no_grad():
            result.append(model.score(batch, temperature=1.0)[0][-3:])
    assert float((result[0] - result[1]).abs().max()) <= 1e-6


def test_a_recaption_is_forced_after_a_thought_and_weighs_nothing(model: HunyuanImageModel) -> None:
    """Log-probs of the other tokens are those without the rule."""
    end, tag = words(model, "</think>", "<recaption>")
    tokens = torch.tensor([40, end, tag, 41, end])
    options = {"begin": "think"}
    assert not model.allowed(tokens, options={"begin": ""})
    assert {place: ids.tolist() for place, ids in model.allowed(tokens, options=options).items()} == {
        2: [tag],
        5: [tag],
    }
    inputs, sampling = given(("a ring",)), dataclasses.replace(TEXT, options=options)
    batch = pad_batch(
        model.prompt_tokens(inputs, sampling=sampling),
        [tokens],
        pad_token=model.pad_token,
        conditions=model.conditions(inputs, sampling=sampling),
    )
    allowed = target_restrictions(model, [tokens], options=options)
    with torch.no_grad():
        free, _ = model.score(batch, temperature=1.0)
        ruled, _ = model.score(dataclasses.replace(batch, options=options, allowed=allowed), temperature=1.0)
    assert ruled[2] == 0 and free[2] < 0
    # 1e-6 nats: the projection of one row less.
    assert float((ruled - free)[[0, 1, 3, 4]].abs().max()) <= 1e-6


def test_every_token_of_a_turn_counts(model: HunyuanImageModel) -> None:
    """Equal turns give equal conditions and velocities, one other token gives others; its text does not matter."""
    x = torch.randn(1, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))

    def velocity(turn: Turn) -> Tensor:
        with torch.no_grad():
            return model.velocity(x, torch.tensor([0.5]), model.encode(continued((), turn), sampling=IMAGE))

    same = velocity(Turn(stage="plan", text="one", tokens=SAMPLED))
    assert torch.equal(same, velocity(Turn(stage="plan", text="two", tokens=SAMPLED)))
    for place in range(len(SAMPLED)):
        other = list(SAMPLED)
        other[place] += 1
        assert float((velocity(Turn(stage="plan", tokens=tuple(other))) - same).abs().max()) > 1e-4


def test_images_of_turns_are_answers_and_words_of_others_the_users(
    model: HunyuanImageModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """A drawing, then the user's wish."""
    turns = (Turn(stage="draft", media=media[0]), Turn(stage="revise", text="larger"))
    result = model.encode(continued((), *turns), sampling=IMAGE)
    sources = model.encode(given(("",), (media[0],)), sampling=IMAGE)
    stand = model.stand
    image = [
        *words(model, "<boi>", "<img_size_64>", "<img_ratio_13>"), stand.clean_time, *[stand.latent] * 12,
        *words(model, "<joint_img_sep>"), *[stand.feature] * 12, *words(model, "<eoi>"),
    ]  # fmt: skip
    assert result["tokens"][0].tolist() == [
        *words(model, "<|startoftext|>", "User: ", "a ring", "\n\n", "Assistant: ", "<answer>"), *image,
        *words(model, "</answer>", "\n\n", "User: ", "larger", "\n\n", "Assistant: "),
        *words(model, "<answer>", "<boi>", "<img_size_64>", "<img_ratio_16>"),
    ]  # fmt: skip
    assert torch.equal(result["latents"][0], sources["latents"][0])
    assert torch.equal(result["features"][0], sources["features"][0])


def test_the_negative_branch_has_the_images_and_tokens_for_no_text(
    model: HunyuanImageModel, media: list[tuple[MediaRef, ...]]
) -> None:
    negative = continued(media[0], Turn(stage="plan", tokens=SAMPLED)).negative("")
    tokens = image_tokens(model, negative, cfg_tokens=5)
    assert tokens == image_tokens(model, given(("",), (media[0],)), cfg_tokens=5)
    assert tokens.count(model.marks.cfg) == 5 and tokens.count(model.stand.latent) == 12
    assert image_tokens(model, negative).count(model.marks.cfg) == 32
    # A drawing that the sample continues from stays, the words around it do not.
    turns = (Turn(stage="draft", media=media[0]), Turn(stage="revise", text="larger"))
    assert image_tokens(model, continued((), *turns).negative(""), cfg_tokens=5) == image_tokens(
        model, dataclasses.replace(continued((), turns[0]), texts=("",)), cfg_tokens=5
    )
    # A negative prompt of the user is a text like another.
    assert image_tokens(model, negative.negative("blurry")) == image_tokens(model, given(("blurry",), (media[0],)))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (dataclasses.replace(TEXT, thinking=True), r"^sampling\.thinking: got True"),
        (dataclasses.replace(TEXT, chat=False, system_prompt="x"), r"^sampling\.chat: got false with sampling\.system"),
    ],
)
def test_settings_that_the_format_lacks_are_refused(
    model: HunyuanImageModel, sampling: TextSamplingConfig, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.prompt_tokens(given(("a ring",)), sampling=sampling)
    with pytest.raises(RecipeError, match=r"^sampling\.chat: got false with a stage that continues"):
        model.prompt_tokens(continued(), sampling=dataclasses.replace(TEXT, chat=False))


def test_the_schedule_is_uniform_and_shifted_by_3(model: HunyuanImageModel) -> None:
    """By the formula 3 t / (1 + 2 t) at t = 1, 3/4, 1/2, 1/4, 0."""
    expected = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])
    assert torch.allclose(model.schedule(IMAGE), expected, atol=1e-7)


def test_a_size_without_a_token_is_refused_with_the_nearest_ratio(model: HunyuanImageModel) -> None:
    wrong = r"^sampling\.width: got 64 x 80 \(height x width\), which .* no token for\. The nearest ratio is that of"
    with pytest.raises(RecipeError, match=wrong):
        model.latent_shape(dataclasses.replace(IMAGE, width=80))
    with pytest.raises(RecipeError, match=wrong):
        model.encode(given(("a",)), sampling=dataclasses.replace(IMAGE, width=80))


def test_ratios_of_the_published_checkpoints_have_their_numbers() -> None:
    """By hand: 33 ratios in steps of 64 pixels around 1024 x 1024, number 16; four more, and squares, where the
    tokenizer has their tokens."""
    base, instructed = (Resolutions(base=1024, unit=16, has_more=more) for more in (False, True))
    assert len(base.sizes) == 33 and len(instructed.sizes) == 37 and len(set(instructed.sizes)) == 37
    for size, number in (((512, 2048), 0), ((512, 1536), 8), ((1024, 1024), 16), ((1280, 768), 20), ((2048, 512), 32)):
        assert base.ratio(*size) == instructed.ratio(*size) == number
    for size, number in (((1024, 768), 33), ((720, 1280), 36), ((512, 512), 16), ((896, 896), 16)):
        assert base.ratio(*size) is None and instructed.ratio(*size) == number
    assert base.nearest(480, 640) == 14 and instructed.nearest(480, 640) == 35
    assert base.ratio(1000, 1000) is instructed.ratio(256, 256) is None


def test_a_grid_is_centred_in_the_positions_of_its_tokens() -> None:
    """By hand: 2 x 3 tokens take six positions, from 5 to 10. Rows begin at 5 + (6 - 2) / 2 = 7, columns at
    5 + (6 - 3) / 2 = 6.5, of which the half is cut off. A seventh token is padding."""
    places = 5 + torch.arange(7)[:, None] + moves(2, 3, 7)
    assert places.tolist() == [[7, 6], [7, 7], [7, 8], [8, 6], [8, 7], [8, 8], [11, 11]]
