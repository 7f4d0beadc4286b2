"""One sequence: what a stage continues from, and what each branch of guidance leaves out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from unified_models import given
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.bagel.model import BagelModel
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.tokens.batches import pad_batch

IMAGE = LatentSamplingConfig(num_inference_steps=4, height=32, width=32)
TEXT = TextSamplingConfig(max_new_tokens=4)
SAMPLED = (40, 41, 42)


def marks(model: BagelModel) -> tuple[int, int]:
    return model.marks.start, model.marks.end


def continued(model: BagelModel, media: tuple[MediaRef, ...] = (), *turns: Turn) -> Inputs:
    return given(("a ring",), (media,), (turns,))


def test_a_prompt_is_in_the_published_format(model: BagelModel) -> None:
    start, end = marks(model)
    words = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("be brief", "a ring")]
    sampling = dataclasses.replace(TEXT, system_prompt="be brief")
    (row,) = model.prompt_tokens(given(("a ring",)), sampling=sampling)
    assert row.tolist() == [start, *words[0], end, start, *words[1], end, start]
    options = {"system_prompt": "be brief"}
    (same,) = model.encode(given(("a ring",)), sampling=dataclasses.replace(IMAGE, options=options))["tokens"]
    assert same.tolist() == row.tolist()[:-1]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_turn_is_its_sampled_tokens_with_the_end_that_a_cut_one_lacks(
    model: BagelModel, media: list[tuple[MediaRef, ...]], is_cut: bool
) -> None:
    _, end = marks(model)
    first = continued(model, media[0])
    turn = Turn(stage="plan", text="anything", tokens=SAMPLED if is_cut else (*SAMPLED, end))
    second = continued(model, media[0], turn)
    (prompt,) = model.prompt_tokens(first, sampling=TEXT)
    (tokens,) = model.encode(second, sampling=IMAGE)["tokens"]
    assert tokens.tolist() == [*prompt.tolist(), *SAMPLED, end]
    (after,) = model.prompt_tokens(second, sampling=TEXT)
    assert after.tolist() == [*tokens.tolist(), model.marks.start]


def test_a_continued_sequence_scores_as_one_sequence(model: BagelModel, media: list[tuple[MediaRef, ...]]) -> None:
    """1e-6 nats: the same tokens in another split, so that only the shapes of products may differ."""
    start, end = marks(model)
    later = torch.tensor([50, 51, end])
    turn = Turn(stage="plan", tokens=(*SAMPLED, end))
    alone, joined = (continued(model, media[0], *turns) for turns in ((turn,), ()))
    tokens = {True: later, False: torch.tensor([*SAMPLED, end, start, *later.tolist()])}
    result: list[Tensor] = []
    for inputs, completion in ((alone, tokens[True]), (joined, tokens[False])):
        batch = pad_batch(
            model.prompt_tokens(inputs, sampling=TEXT),
            [completion],
            pad_token=model.pad_token,
            conditions=model.conditions(inputs, sampling=TEXT),
        )
        with torch.no_grad():
            result.append(model.score(batch, temperature=1.0)[0][-3:])
    assert float((result[0] - result[1]).abs().max()) <= 1e-6


def test_every_token_of_a_turn_counts(model: BagelModel) -> None:
    """Equal turns give equal conditions and velocities, one other token gives others; its text does not matter."""
    _, end = marks(model)
    x = torch.randn(1, *model.latent_shape(IMAGE), generator=torch.Generator().manual_seed(1))

    def velocity(turn: Turn) -> Tensor:
        with torch.no_grad():
            return model.velocity(x, torch.tensor([0.5]), model.encode(continued(model, (), turn), sampling=IMAGE))

    same = velocity(Turn(stage="plan", text="one", tokens=(*SAMPLED, end)))
    assert torch.equal(same, velocity(Turn(stage="plan", text="two", tokens=(*SAMPLED, end))))
    for place in range(len(SAMPLED)):
        other = list(SAMPLED)
        other[place] += 1
        changed = velocity(Turn(stage="plan", tokens=(*other, end)))
        assert float((changed - same).abs().max()) > 1e-4


def test_images_of_turns_and_words_of_others_are_as_in_a_prompt(
    model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """A drawing, then the user's wish."""
    sources = dict(model.encode(given(("",), (media[0],)), sampling=IMAGE))
    turns = (Turn(stage="draft", media=media[0]), Turn(stage="revise", text="larger"))
    result = dict(model.encode(continued(model, (), *turns), sampling=IMAGE))
    prompt, wish = (model.encode(given((text,)), sampling=IMAGE)["tokens"][0] for text in ("a ring", "larger"))
    assert torch.equal(result["tokens"][0], torch.cat([prompt, sources["tokens"][0], wish]))
    assert torch.equal(result["latents"][0], sources["latents"][0])
    assert torch.equal(result["features"][0], sources["features"][0])


def test_the_negative_branch_has_the_images_alone(model: BagelModel, media: list[tuple[MediaRef, ...]]) -> None:
    turn = Turn(stage="plan", tokens=SAMPLED)
    negative = model.encode(continued(model, media[0], turn).negative(""), sampling=IMAGE)
    expected = model.encode(given(("",), (media[0],)), sampling=IMAGE)
    assert torch.equal(negative["tokens"][0], expected["tokens"][0]) and len(negative["latents"][0]) == 20
    assert not len(model.encode(continued(model, ()).negative(""), sampling=IMAGE)["tokens"][0])
    # A drawing that the sample continues from is an image like another.
    drawn = continued(model, (), turn, Turn(stage="draft", media=media[0]), Turn(stage="revise", text="larger"))
    result = model.encode(drawn.negative(""), sampling=IMAGE)
    for name in expected:
        assert torch.equal(result[name][0], expected[name][0])


def test_the_branch_without_images_has_the_words_of_the_user(
    model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """As BAGEL's inference code, whose context without images has every text but the thought."""
    turns = (
        Turn(stage="plan", tokens=SAMPLED),
        Turn(stage="draft", media=media[0]),
        Turn(stage="revise", text="larger"),
    )
    inputs = continued(model, media[0], *turns)
    bare = make_guidance("text-image", scale=4.0, image_scale=1.5).inputs("no-image", inputs, negative_prompt="")
    prompt, wish = (model.encode(given((text,)), sampling=IMAGE)["tokens"][0] for text in ("a ring", "larger"))
    result = model.encode(bare, sampling=IMAGE)
    assert torch.equal(result["tokens"][0], torch.cat([prompt, wish])) and not len(result["latents"][0])


def test_questions_may_show_features_alone(model: BagelModel, media: list[tuple[MediaRef, ...]]) -> None:
    sampling = dataclasses.replace(TEXT, options={"sources": "features"})
    inputs = given(("what is it",), (media[0],))
    (tokens,), values = model.prompt_tokens(inputs, sampling=sampling), model.conditions(inputs, sampling=sampling)
    assert len(values["latents"][0]) == 0 and len(values["features"][0]) == 12
    assert int((tokens == model.marks.feature).sum()) == 12 and not bool((tokens == model.marks.latent).any())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (dataclasses.replace(TEXT, thinking=True), r"^sampling\.thinking: got True"),
        (dataclasses.replace(TEXT, chat=False, system_prompt="x"), r"^sampling\.chat: got false with sampling\.system"),
    ],
)
def test_settings_that_the_format_lacks_are_refused(
    model: BagelModel, sampling: TextSamplingConfig, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.prompt_tokens(given(("a ring",)), sampling=sampling)
    with pytest.raises(RecipeError, match=r"^sampling\.chat: got false with a stage that continues"):
        model.prompt_tokens(continued(model), sampling=dataclasses.replace(TEXT, chat=False))


def test_steps_are_one_fewer_than_the_published_points(model: BagelModel) -> None:
    """By the published formula: linspace(1, 0, n), 3 t / (1 + 2 t); n = 5 points for four steps."""
    expected = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])
    assert torch.allclose(model.schedule(IMAGE), expected, atol=1e-7)


def test_a_size_off_the_grid_is_refused_with_the_nearest(model: BagelModel) -> None:
    with pytest.raises(RecipeError, match=r"^sampling\.width: got 40, expected a multiple of 16.*Nearest: 32 or 48"):
        model.latent_shape(dataclasses.replace(IMAGE, width=40))
    with pytest.raises(RecipeError, match=r"^sampling\.height: got 144, expected .* from 16 to 128"):
        model.latent_shape(dataclasses.replace(IMAGE, height=144))
