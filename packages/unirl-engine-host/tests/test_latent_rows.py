"""Rows of a serving engine: conditions travel once per input of a batch, and inputs of one text are not shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from point_velocity import a_request, sample
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.core.types.serial import from_bytes
from unirl.core.types.track import Conditions, Track
from unirl.engine_host.latent_rows import joined, rows_of

CAT, DOG = ((MediaRef(modality="image", role="source", uri=f"/{name}.png"),) for name in ("cat", "dog"))
EDITS = Inputs(
    ids=("cat", "dog", "cat", "dog"),
    prompts=("make it red",) * 4,
    texts=("make it red",) * 4,
    media=(CAT, DOG, CAT, DOG),
)


def conditions_of(inputs: Inputs) -> list[list[float]]:
    """An encoding [N, 2] that depends on text and media, as that of a model that edits images."""
    pairs = zip(inputs.texts, inputs.media, strict=True)
    return [[float(len(text)), float(sum(ref.uri == "/cat.png" for ref in media))] for text, media in pairs]


def encoded(inputs: Inputs) -> Conditions:
    """Each id once."""
    first = {name: inputs.ids.index(name) for name in inputs.ids}
    values = conditions_of(inputs.select(list(first.values())))
    # Ragged as well: as many patches as the text has letters, and one.
    patches = tuple(torch.full((1 + int(length), 2), is_cat) for length, is_cat in values)
    return Conditions(
        values={"text": torch.tensor(values), "patches": patches},
        index=torch.tensor([[*first].index(i) for i in inputs.ids]),
    )


def made(request: Request, *, guided: bool) -> list[dict[str, Any]]:
    conditions = {"positive": encoded(request.inputs)}
    if guided:
        conditions["negative"] = encoded(request.inputs.negative(""))
    return rows_of(
        request,
        segment=sample(request, 1.0, *([0.5] if guided else [])),
        conditions=conditions,
        media=None,
        texts=request.inputs.texts,
        negative_prompt="" if guided else None,
        sources={branch: [[ref.uri for ref in media] for media in request.inputs.media] for branch in conditions},
        version=4,
    )


@pytest.mark.parametrize("inputs", [EDITS, Inputs.of_texts(["a", "b", "a", "a"])], ids=["edits", "texts"])
# Batches as an engine may make them: rows of one input apart, and in another order than in the request.
@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[2, 0], [3, 1]], [[3], [2], [1], [0]]])
def test_every_row_comes_back_with_the_conditions_of_its_own_input(batches: list[list[int]], inputs: Inputs) -> None:
    request = dataclasses.replace(a_request(4, guidance_scale=2.0), inputs=inputs)
    rows: dict[int, dict[str, Any]] = {}
    for batch in batches:
        rows |= zip(batch, made(request.select(batch), guided=True), strict=True)
    used, tensors = joined(request, [rows[row] for row in range(4)])
    hashes = [[ref.uri for ref in media] for media in inputs.media]
    assert used["sources"] == [{"positive": own, "negative": own} for own in hashes]
    track = from_bytes(tensors["track"].numpy().tobytes(), Track)
    for kind, own in (("positive", inputs), ("negative", inputs.negative(""))):
        result = track.conditions[kind]
        assert result.expanded()["text"].tolist() == conditions_of(own)
        assert len(result.values["text"]) == len(result.values["patches"]) == len(set(own.ids))
        patches = result.expanded()["patches"]
        assert isinstance(patches, tuple)
        assert [[len(rows) - 1.0, float(rows[0, 0])] for rows in patches] == conditions_of(own)


def test_conditions_travel_once_per_input_of_a_batch() -> None:
    request = dataclasses.replace(a_request(4), inputs=EDITS)
    assert [bool(row["conditions"]) for row in made(request, guided=False)] == [True, True, False, False]
