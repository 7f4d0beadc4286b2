"""Inputs: equal ids are one input, unequal ids never are, and media go where the model takes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import loop_toy
import pytest
import torch
from plans import changed
from unirl.core.data.run_data import read_data
from unirl.core.errors import BatchError, DataError
from unirl.core.specs.capability import Cap
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs, Turn, distinct
from unirl.core.types.sampling import TextSamplingConfig
from unirl.loop.requests import build_request

CAT, DOG = (MediaRef(modality="image", role="source", uri=f"/{name}.png") for name in ("cat", "dog"))
EDITS = Inputs(
    ids=("cat", "dog", "cat"),
    prompts=("make it red",) * 3,
    texts=("make it red",) * 3,
    media=((CAT,), (DOG,), (CAT,)),
)


def test_one_instruction_over_two_images_is_two_inputs() -> None:
    assert distinct(EDITS) == ([0, 1], [0, 1, 0])
    assert distinct(EDITS.select([1, 0, 1])) == ([0, 1], [0, 1, 0])
    assert distinct(EDITS.select([])) == ([], [])


def test_negatives_keep_the_media_of_their_rows_and_are_one_where_there_are_none() -> None:
    negative = EDITS.negative("blurry")
    assert negative.texts == ("blurry",) * 3 and negative.media == EDITS.media
    assert distinct(negative) == ([0, 1], [0, 1, 0])
    bare = Inputs.of_texts(["a", "b"]).negative("blurry")
    assert distinct(bare) == ([0], [0, 0])


THOUGHT = Turn(stage="think", text="a cat is", tokens=(1, 2))
WISH = Turn(stage="redraw", text="Make it larger.")


def drawing(ref: MediaRef) -> Turn:
    return Turn(stage="draw", media=(ref,))


def continued(*turns: tuple[Turn, ...]) -> Inputs:
    ids = tuple(f"row {number}" for number in range(len(turns)))
    media = ((),) * len(turns)
    return Inputs(ids=ids, prompts=("draw",) * len(turns), texts=("draw",) * len(turns), media=media, turns=turns)


def test_negatives_keep_the_images_of_turns_and_drop_their_texts() -> None:
    negative = continued((THOUGHT, drawing(CAT), WISH), (THOUGHT, WISH), (drawing(DOG),), (WISH,)).negative("blurry")
    assert negative.turns == ((drawing(CAT),), (), (drawing(DOG),), ())
    assert negative.texts == ("blurry",) * 4 and negative.media == ((),) * 4
    # Rows with different images are never one input; those with none are.
    assert negative.ids == ("row 0", "", "row 2", "")
    assert distinct(negative) == ([0, 1, 2], [0, 1, 2, 1])
    # Without any image, as if the model had not continued.
    bare = continued((THOUGHT,), (WISH,)).negative("")
    assert bare.turns is None and distinct(bare) == ([0], [0, 0])


def test_without_media_the_words_of_others_stay() -> None:
    """The branch `no-image` of BAGEL's guidance: texts of the user, without the model's thought about the image."""
    inputs = dataclasses.replace(continued((THOUGHT, drawing(CAT), WISH), (THOUGHT,)), media=((DOG,), (DOG,)))
    bare = inputs.without_media()
    assert bare.turns == ((WISH,), ()) and bare.media == ((), ())
    assert (bare.ids, bare.texts) == (inputs.ids, inputs.texts)
    assert continued((THOUGHT, drawing(CAT))).without_media().turns is None


@pytest.mark.parametrize(
    "change", [{"texts": ("make it red", "make it red", "make it blue")}, {"media": ((CAT,), (DOG,), (DOG,))}]
)
def test_equal_ids_of_different_inputs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=r"Inputs\.ids: rows 0 and 2 are both 'cat', with texts .* different ids"):
        dataclasses.replace(EDITS, **change)


class Tokenizes:
    """A text model that notes what it is given."""

    spec = dataclasses.replace(loop_toy.MODEL, tracks={"text": "text"})
    stop_tokens = (0,)

    def __init__(self) -> None:
        self.given: list[Inputs] = []

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[torch.Tensor]:
        self.given.append(inputs)
        # Tokens that depend on the media, as those of a model that looks at images.
        return [torch.tensor([len(media[0].uri) if media else 1]) for media in inputs.media]


def test_prompts_of_one_text_are_tokenized_each_with_its_own_image() -> None:
    model: Any = Tokenizes()
    long = dataclasses.replace(DOG, uri="/a-longer-name.png")
    prompts = [
        Prompt(prompt_id=name, text="what is it?", metadata={}, media=(ref,)) for name, ref in (("a", CAT), ("b", long))
    ]
    request = build_request(
        prompts,
        track="text",
        sampling=TextSamplingConfig(),
        samples_per_prompt=2,
        model=model,
        trajectory="none",
        seed=0,
        rollout=0,
        policy_version=0,
    )
    assert [given.ids for given in model.given] == [("a", "b")]
    assert [row.tolist() for row in request.text.prompt_tokens] == [[8], [8], [18], [18]]


def data(
    folder: Path, *media: str, inputs: Any = None, takes: bool = True, text_alone: Mapping[str, str] | None = None
) -> None:
    """Read a file of two prompts with media of these roles: images, unless `role-modality` says otherwise."""
    (folder / "a.png").write_bytes(b"")
    refs = [
        {"modality": modality or "image", "role": role, "uri": "a.png"}
        for role, _, modality in (name.partition("-") for name in media)
    ]
    rows = [{"prompt": "one", "media": refs}, {"prompt": "two", "media": refs}]
    file = folder / "edits.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = loop_toy.plan(groups=2)
    spec = dataclasses.replace(plan.only.model.spec, inputs=inputs or {}, text_alone=text_alone or {})
    model = dataclasses.replace(plan.only.model, spec=spec)
    engine_spec = dataclasses.replace(plan.only.engine.spec, capabilities={Cap.MEDIA_REFS} if takes else set[Cap]())
    engine = dataclasses.replace(plan.only.engine, spec=engine_spec)
    settings = dataclasses.replace(plan.data, train=str(file))
    read_data(changed(plan, model=model, engine=engine, data=settings))


def test_media_that_the_model_takes_or_needs_are_read(tmp_path: Path) -> None:
    data(tmp_path)
    data(tmp_path, inputs={"image": {"source": "takes"}})
    data(tmp_path, "source", "source", inputs={"image": {"source": "needs", "condition": "takes"}})
    data(tmp_path, "source", "condition", inputs={"image": {"source": "needs", "condition": "takes"}})


@pytest.mark.parametrize(
    ("media", "inputs", "takes", "message"),
    [
        (
            ["source"],
            {},
            True,
            r"edits\.jsonl:1: got media of role 'source', expected none, which model 'toy'",
        ),
        (["mask"], {"image": {"source": "takes"}}, True, r":1: got media of role 'mask', expected source"),
        (
            ["source", "source"],
            {"image": {"source": "needs one"}},
            True,
            r":1: got 2 media of role 'source', of which model 'toy' needs one",
        ),
        (
            [],
            {"image": {"source": "needs"}},
            True,
            r":1: got no media of role 'source', of which model 'toy' needs one",
        ),
        (
            ["source-video"],
            {"image": {"source": "takes"}},
            True,
            r":1: got video '.*a\.png', expected image, which model 'toy' reads",
        ),
        (["source"], {"image": {"source": "takes"}}, False, r"got media of role 'source', but engine 'own' takes"),
    ],
)
def test_media_that_do_not_fit_are_refused_with_file_line_role_and_model(
    tmp_path: Path, media: list[str], inputs: Any, takes: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        data(tmp_path, *media, inputs=inputs, takes=takes)


def test_media_of_a_model_that_an_engine_is_given_none_of_are_refused_with_the_reason(tmp_path: Path) -> None:
    inputs = {"image": {"source": "takes"}}
    with pytest.raises(
        DataError, match=r"'source', but engine 'own' is given none of model 'toy': it has no eyes\. Change"
    ):
        data(tmp_path, "source", inputs=inputs, text_alone={"own": "it has no eyes"})
    data(tmp_path, "source", inputs=inputs, text_alone={"another": "it has no eyes"})
    data(tmp_path, inputs=inputs, text_alone={"own": "it has no eyes"})
