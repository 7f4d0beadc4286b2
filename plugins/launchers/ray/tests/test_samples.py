"""Samples that are made again are known by what came along with them, and answer to their old names."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.transfer.remote_rows import Piece, dehydrated, hydrated, renamed, renames

ROWS = 3


def track(*, large: float = 1.0, small: float = 1.0) -> Track:
    """A track whose latents, 1 KiB a row, stay behind; its log-probs come along."""
    return Track(
        name="image",
        sample_ids=("a", "b", "c"),
        group_ids=("g", "g", "g"),
        inputs=Inputs.of_texts(("p",) * ROWS),
        metadata=({"n": 1},) * ROWS,
        policy_version=(4,) * ROWS,
        sample_weights=torch.ones(ROWS),
        status=(Status.COMPLETED,) * ROWS,
        segment=LatentSegment(
            latents=torch.full((ROWS, 2, 128), large),
            positions=torch.tensor([[0, 1]] * ROWS),
            sigmas=torch.tensor([1.0, 0.0]),
            sampler=Sampler(kernel="flow-sde", eta=0.7),
            sde_steps=torch.tensor([[0]] * ROWS),
            log_probs=torch.full((ROWS, 1), small),
        ),
    )


def left(made: Track, shelf: dict[str, Tensor], mark: str) -> Track:
    def keep(tensors):
        names = [f"{mark}{number}" for number in range(len(tensors))]
        shelf.update(zip(names, tensors, strict=True))
        return names

    return dehydrated(made, keep)


def test_rows_that_were_taken_before_are_found_under_the_new_names() -> None:
    shelf: dict[str, Tensor] = {}
    before, after = left(track(), shelf, "old"), left(track(), shelf, "new")
    names = renames(before, after)
    assert names == {"old0": "new0"}
    result = renamed(before.select([2, 0]), names)
    assert [piece for piece in result.segment.latents.pieces] == [Piece("new0", 2, 1), Piece("new0", 0, 1)]
    del shelf["old0"]
    here = hydrated(result, lambda wanted: [shelf[w.pieces[0].blob][[p.start for p in w.pieces]] for w in wanted])
    assert torch.equal(here.segment.latents, track().segment.latents[[2, 0]])


def test_what_has_no_new_name_keeps_its_own() -> None:
    shelf: dict[str, Tensor] = {}
    before = left(track(), shelf, "old")
    assert renamed(before, {}) is before
    assert renamed(before, {"other": "new"}).segment.latents.pieces == before.segment.latents.pieces


def test_samples_that_differ_in_anything_that_came_along_are_not_the_same() -> None:
    shelf: dict[str, Tensor] = {}
    before = left(track(), shelf, "old")
    # One unit in the last place of fp32 at 1.
    assert renames(before, left(track(small=1 + 2**-23), shelf, "new")) is None
    other = dataclasses.replace(track(), policy_version=(5,) * ROWS)
    assert renames(before, left(other, shelf, "new")) is None
    assert renames(before, left(track().select([0, 1]), shelf, "new")) is None
