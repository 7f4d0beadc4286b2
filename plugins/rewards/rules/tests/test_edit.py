"""The reward of edits, on images drawn by hand: right edits, every kind of wrong one, and prompts that name no edit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_drawn_shapes import ALL, CENTER, DRAW, RGB, draw
from PIL import Image
from torch import Tensor
from unirl.core.errors import DataError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.config import EditConfig
from unirl.rewards.rules.edit import build
from unirl.rewards.rules.edits_world import ALL_EDITS
from unirl.rewards.rules.shapes_world import ALL_SCENES

ATTRIBUTES = ("color", "shape", "place")
WORDS = (tuple(RGB), tuple(DRAW), tuple(CENTER))
Triple = tuple[str, str, str]


def after(triple: Triple, attribute: str, value: str) -> Triple:
    color, shape, place = (value if name == attribute else own for name, own in zip(ATTRIBUTES, triple, strict=True))
    return color, shape, place


EDITS = [
    (triple, attribute, value)
    for triple in ALL
    for attribute, own, words in zip(ATTRIBUTES, triple, WORDS, strict=True)
    for value in words
    if value != own
]


@pytest.fixture(scope="session")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> dict[Triple, MediaRef]:
    folder = tmp_path_factory.mktemp("sources")
    result: dict[Triple, MediaRef] = {}
    for triple in ALL:
        file = folder / f"{'-'.join(triple)}.png"
        save(draw(*triple), file)
        result[triple] = MediaRef(modality="image", role="source", uri=str(file))
    return result


def save(image: Tensor, file: Path) -> None:
    Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(file)


def wanting(edits: list[tuple[Triple, str, str]], images: Tensor, refs: list[tuple[MediaRef, ...]]) -> ScoreInput:
    names = tuple(f"s{index}" for index in range(len(edits)))
    texts = tuple(f"{attribute} {value}" for _, attribute, value in edits)
    return ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs(ids=names, prompts=texts, texts=texts, media=tuple(refs)),
        metadata=tuple({"attribute": attribute, "value": value} for _, attribute, value in edits),
        media=Media(kind="image", values=images),
    )


def score(edits: list[tuple[Triple, str, str]], images: Tensor, source_of: dict[Triple, MediaRef]) -> Scores:
    refs = [(source_of[triple],) for triple, _, _ in edits]
    return build(EditConfig(), device="cpu").score(wanting(edits, images, refs))


def test_the_world_has_576_edits_by_44_instructions() -> None:
    """64 scenes with three other values of three attributes; 4 x 4 colours of shapes, 4 x 3 shapes of others, 4 x 4 moves."""
    assert len(set(ALL_EDITS)) == 576 == len(EDITS)
    assert len({edit.instruction for edit in ALL_EDITS}) == 44
    assert {edit.target for edit in ALL_EDITS} == set(ALL_SCENES)
    assert {(edit.source.color, edit.source.shape, edit.source.place) for edit in ALL_EDITS} == set(ALL)
    for edit in ALL_EDITS:
        changed = [name for name in ATTRIBUTES if getattr(edit.source, name) != getattr(edit.target, name)]
        assert changed == [edit.attribute] and edit.instruction.split()[-1] == edit.value


def test_every_right_edit_is_perfect(source_of: dict[Triple, MediaRef]) -> None:
    scores = score(EDITS, torch.stack([draw(*after(*edit)) for edit in EDITS]), source_of)
    assert scores.values.tolist() == [1.0] * 576
    assert {name: part.min().item() for name, part in scores.parts.items()} == {
        name: 1.0 for name in ("asked", "kept", "background", "perfect")
    }


def test_the_source_itself_is_worth_nothing(source_of: dict[Triple, MediaRef]) -> None:
    scores = score(EDITS, torch.stack([draw(*triple) for triple, _, _ in EDITS]), source_of)
    assert scores.values.tolist() == scores.parts["asked"].tolist() == [0.0] * 576
    assert scores.parts["kept"].min() == 1


@pytest.mark.parametrize("also", ATTRIBUTES)
def test_each_other_attribute_that_changes_costs_half(source_of: dict[Triple, MediaRef], also: str) -> None:
    words = WORDS[ATTRIBUTES.index(also)]

    def spoilt(edit: tuple[Triple, str, str]) -> Triple:
        result = after(*edit)
        own = result[ATTRIBUTES.index(also)]
        return after(result, also, words[(words.index(own) + 1) % 4])

    edits = [edit for edit in EDITS if edit[1] != also]
    scores = score(edits, torch.stack([draw(*spoilt(edit)) for edit in edits]), source_of)
    assert scores.parts["asked"].min() == 1 and scores.parts["background"].min() == 1
    assert scores.values.tolist() == scores.parts["kept"].tolist() == [0.5] * len(edits)
    assert scores.parts["perfect"].max() == 0


def test_the_asked_value_with_nothing_kept_is_worth_nothing(source_of: dict[Triple, MediaRef]) -> None:
    edit = (("red", "ring", "left"), "color", "blue")
    scores = score([edit], draw("blue", "disk", "top")[None], source_of)
    assert (scores.values.item(), scores.parts["asked"].item(), scores.parts["kept"].item()) == (0, 1, 0)


def test_another_value_than_the_asked_one_is_worth_nothing(source_of: dict[Triple, MediaRef]) -> None:
    edit = (("red", "ring", "left"), "shape", "disk")
    scores = score([edit], draw("red", "cross", "left")[None], source_of)
    assert (scores.values.item(), scores.parts["kept"].item()) == (0, 1)


def test_changed_background_costs_its_share(source_of: dict[Triple, MediaRef]) -> None:
    """Eight rows of grey too dark to be a shape, far from it: 512 pixels of what lies outside of both shapes.

    Those lie in one disk: a square of 21 x 21 pixels within sqrt(441 / 2) and 3 more of its centre."""
    image = draw("green", "square", "top")
    image[:, 56:] = 0.3
    scores = score([(("red", "square", "top"), "color", "green")], image[None], source_of)
    axis = torch.arange(64.0)
    inside = ((axis[None] - 32) ** 2 + (axis[:, None] - 17) ** 2).sqrt() <= (441 / 2) ** 0.5 + 3
    outside = 64 * 64 - int(inside.sum())
    assert scores.parts["asked"].item() == scores.parts["kept"].item() == 1
    # Division in fp32.
    assert scores.values.item() == pytest.approx((1 - 512 / outside) / 0.99, abs=1e-6)
    assert scores.parts["perfect"].item() == 0


def test_a_bright_spot_far_from_the_shape_is_no_part_of_it(source_of: dict[Triple, MediaRef]) -> None:
    """One of 4 x 4 pixels is less than the hundredth of the background that may change, one of 8 x 8 is more."""
    values: list[float] = []
    for side in (4, 8):
        image = draw("green", "square", "top")
        image[1, 64 - side :, 64 - side :] = 1
        scores = score([(("red", "square", "top"), "color", "green")], image[None], source_of)
        values.append(scores.parts["background"].item())
    assert values[0] == 1 and 0.98 < values[1] < 1


def test_a_source_with_another_background_asks_for_that_one(tmp_path: Path) -> None:
    grey = draw("red", "ring", "left").clamp(min=0.25)
    save(grey, tmp_path / "grey.png")
    ref = MediaRef(modality="image", role="source", uri=str(tmp_path / "grey.png"))
    edit = (("red", "ring", "left"), "color", "blue")
    images = torch.stack([draw("blue", "ring", "left").clamp(min=0.25), draw("blue", "ring", "left")])
    scores = build(EditConfig(), device="cpu").score(wanting([edit] * 2, images, [(ref,)] * 2))
    assert scores.parts["background"].tolist() == [1, 0]
    assert scores.values.tolist() == [1, 0]


@pytest.mark.parametrize("image", [torch.zeros(3, 64, 64), torch.ones(3, 64, 64)], ids=["black", "white"])
def test_an_empty_canvas_is_worth_nothing(source_of: dict[Triple, MediaRef], image: Tensor) -> None:
    scores = score([(("red", "ring", "left"), "color", "blue")], image[None], source_of)
    assert {"value": scores.values.item(), "kept": scores.parts["kept"].item()} == {"value": 0, "kept": 0}


def test_scores_do_not_depend_on_order_or_batch(source_of: dict[Triple, MediaRef]) -> None:
    generator = torch.Generator().manual_seed(0)
    clean = torch.stack([draw(*(after(*edit) if row % 2 else edit[0])) for row, edit in enumerate(EDITS)])
    images = (clean + 0.1 * torch.randn(clean.shape, generator=generator)).clamp(0, 1)
    whole = score(EDITS, images, source_of).values
    assert len(whole.unique()) > 2
    order = torch.randperm(576, generator=generator).tolist()
    assert score([EDITS[row] for row in order], images[order], source_of).values.equal(whole[order])
    alone = [score([EDITS[row]], images[row : row + 1], source_of).values.item() for row in range(40)]
    assert alone == whole[:40].tolist()


def _bad(samples: ScoreInput, **metadata: Any) -> ScoreInput:
    return dataclasses.replace(samples, metadata=({**samples.metadata[0], **metadata},))


def test_prompts_that_name_no_edit_are_refused_by_the_sample(source_of: dict[Triple, MediaRef], tmp_path: Path) -> None:
    triple = ("red", "ring", "left")
    edit = (triple, "color", "blue")
    image, ref = draw("blue", "ring", "left")[None], source_of[triple]
    good = wanting([edit], image, [(ref,)])
    reward = build(EditConfig(), device="cpu")
    assert reward.score(good).values.item() == 1
    save(torch.zeros(3, 64, 64), tmp_path / "empty.png")
    save(torch.zeros(3, 64, 96), tmp_path / "wide.png")
    empty, wide = (dataclasses.replace(ref, uri=str(tmp_path / name)) for name in ("empty.png", "wide.png"))
    other = dataclasses.replace(ref, role="condition")
    for samples, message in (
        (
            _bad(good, attribute="size"),
            r"metadata 'attribute' of sample 's0' is 'size'; it is one of color, shape, place",
        ),
        (
            _bad(good, value="top"),
            r"metadata 'value' of sample 's0' is 'top'; for attribute 'color' it is one of red, gr",
        ),
        (_bad(good, value=7), r"metadata 'value' of sample 's0' .* is 7, not a string"),
        (_bad(good, value="red"), r"sample 's0' .*: the source is 'red' already, so there is nothing to edit"),
        (wanting([edit], image, [()]), r"sample 's0' .*: got 0 source images, expected one of role `source`\."),
        (wanting([edit], image, [(other,)]), r"got 0 source images"),
        (wanting([edit], image, [(ref, ref)]), r"got 2 source images"),
        (wanting([edit], image, [(empty,)]), r"the source shows no color and shape and place of the world of shapes"),
        (wanting([edit], image, [(wide,)]), r"got a source of 64 x 96 pixels, expected 64 x 64"),
    ):
        with pytest.raises(RewardFailed, match=message):
            reward.score(samples)
    with pytest.raises(DataError, match=r"gone\.png"):
        reward.score(wanting([edit], image, [(dataclasses.replace(ref, uri=str(tmp_path / "gone.png")),)]))
