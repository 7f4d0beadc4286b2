"""Batch operations: rows are taken, joined, repeated, padded and moved without loss, whatever the fields hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from unirl.core.errors import BatchError
from unirl.core.types.batch import Batch, same
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, TextSegment, Track


def make_track(rows: int = 4, *, first: int = 0, **changed: Any) -> Track:
    """A track whose row r carries the number first + r in every field."""
    numbers = [first + row for row in range(rows)]
    values = torch.tensor(numbers, dtype=torch.float32)
    fields: dict[str, Any] = {
        "name": "image",
        "sample_ids": tuple(f"p{n // 2}/{n}" for n in numbers),
        "group_ids": tuple(f"p{n // 2}" for n in numbers),
        "inputs": Inputs.of_texts([f"prompt {n // 2}" for n in numbers]),
        "metadata": tuple({"number": n} for n in numbers),
        "conditions": {
            "positive": Conditions(
                values={"embeds": torch.arange(20.0).reshape(10, 2)}, index=torch.tensor(numbers) % 10
            )
        },
        "segment": LatentSegment(
            latents=values.reshape(rows, 1, 1).expand(rows, 2, 3),
            positions=torch.tensor([[3, 4]] * rows).reshape(rows, 2),
            sde_steps=torch.tensor([[3]] * rows).reshape(rows, 1),
            log_probs=values.reshape(rows, 1),
            sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
            sampler=Sampler(kernel="flow-sde", eta=0.7),
        ),
        "media": Media(
            kind="video", values=tuple(torch.full((n % 3 + 1, 3, 2, 2), float(n)) for n in numbers), rate=8.0
        ),
        "rewards": values,
        "reward_parts": {"shapes": values, "shapes/color": -values},
        "sample_weights": torch.ones(rows),
        "status": (Status.COMPLETED,) * rows,
        "policy_version": (7,) * rows,
    }
    return Track(**{**fields, **changed})


def make_text(tokens: tuple[torch.Tensor, ...], **fields: Any) -> TextSegment:
    return TextSegment(prompt_tokens=(torch.ones(1, dtype=torch.int64),) * len(tokens), tokens=tokens, **fields)


def numbers(track: Track) -> list[int]:
    """The row numbers of `make_track`, after checking that every field of a row still belongs together."""
    result = [meta["number"] for meta in track.metadata]
    expected = torch.tensor(result, dtype=torch.float32)
    assert track.sample_ids == tuple(f"p{n // 2}/{n}" for n in result)
    assert track.rewards is not None and same(track.rewards, expected)
    assert same(track.reward_parts["shapes/color"], -expected)
    assert same(track.latent.latents[:, 0, 0], expected)
    assert track.latent.log_probs is not None and same(track.latent.log_probs[:, 0], expected)
    assert track.media is not None
    assert [(len(video), float(video.mean())) for video in track.media.arrays] == [
        (n % 3 + 1, float(n)) for n in result
    ]
    embeds = track.conditions["positive"].expanded()["embeds"]
    assert same(embeds, torch.tensor([[2.0 * (n % 10), 2.0 * (n % 10) + 1] for n in result]).reshape(-1, 2))
    return result


def cuts(rows: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, rows), max_size=4).map(lambda at: sorted([0, *at, rows]))


@given(st.integers(1, 9), st.data())
def test_select_keeps_every_field_of_a_row_together(rows: int, data: st.DataObject) -> None:
    expected = data.draw(st.lists(st.integers(0, rows - 1), unique=True))
    assert numbers(make_track(rows).select(expected)) == expected


@given(st.integers(0, 9), st.data())
def test_splitting_and_joining_gives_the_same_batch(rows: int, data: st.DataObject) -> None:
    track = make_track(rows)
    at = data.draw(cuts(rows))
    pieces = track.split([end - start for start, end in pairwise(at)])
    assert [len(piece) for piece in pieces] == [end - start for start, end in pairwise(at)]
    assert same(Track.concat(pieces), track)


@given(st.integers(1, 9), st.integers(0, 10))
def test_chunks_are_full_but_for_the_last(rows: int, size: int) -> None:
    pieces = make_track(rows).chunks(size)
    expected = [list(range(start, min(start + size, rows))) for start in range(0, rows, size)] if size else None
    assert [numbers(piece) for piece in pieces] == (expected or [list(range(rows))])


@given(st.integers(1, 6), st.integers(0, 6))
def test_padding_goes_and_leaves_the_rows(rows: int, more: int) -> None:
    track = make_track(rows)
    padded = track.padded(rows + more)
    assert len(padded) == rows + more
    assert padded.sample_weights.tolist() == [1.0] * rows + [0.0] * more
    assert numbers(padded) == [*range(rows), *[rows - 1] * more]
    assert sum(map(len, padded.groups().values())) == rows
    assert same(padded.select(range(rows)), track)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_padding_repeats_the_last_unit_whole_under_new_ids(units: int, size: int, copies: int, more: int) -> None:
    ids = tuple(f"u{unit}" for unit in range(units)) * size
    rows = units * size
    track = make_track(rows, group_ids=("g",) * rows, unit_ids=ids)
    padded = track.padded(rows + copies * size)
    padded = padded.padded(padded.num_rows + more * size)
    assert [meta["number"] for meta in padded.metadata[rows:]] == track.units()[-1] * (copies + more)
    assert padded.units()[:units] == [list(range(unit, rows, units)) for unit in range(units)]
    assert [len(unit) for unit in padded.units()] == [size] * (units + copies + more)
    assert padded.sample_weights.tolist() == [1.0] * rows + [0.0] * (copies + more) * size
    assert same(padded.select(range(rows)), track)


def test_rows_without_unit_ids_are_units_of_their_own() -> None:
    assert make_track(3).units() == [[0], [1], [2]]


def test_a_unit_of_two_groups_is_refused() -> None:
    with pytest.raises(BatchError, match=r"unit 'u' of track 'image' has rows of groups 'p0' and 'p1'"):
        make_track(4, unit_ids=("u", "v", "u", "v"))


def test_padding_that_would_cut_a_unit_is_refused() -> None:
    track = make_track(4, unit_ids=("u", "u", "v", "v"))
    with pytest.raises(BatchError, match=r"got 7 rows for the 4 of track 'image', expected whole copies of its last"):
        track.padded(7)


@pytest.mark.parametrize("name", ["values", "returns", "advantages"])
def test_numbers_of_scored_steps_have_one_entry_for_each(name: str) -> None:
    segment = make_track(4).latent
    filled = dataclasses.replace(segment, **{name: torch.arange(4.0)[:, None]})
    taken = getattr(filled.select([3, 1]), name)
    assert taken.tolist() == [[3.0], [1.0]]
    assert same(LatentSegment.concat(filled.split([1, 3])), filled)
    with pytest.raises(BatchError, match=rf"LatentSegment.{name}: got shape \[4, 2\], expected \[4, 1\]"):
        dataclasses.replace(segment, **{name: torch.zeros(4, 2)})


def test_naming_a_row_of_a_track_twice_is_refused_because_its_id_would_repeat() -> None:
    with pytest.raises(BatchError, match="duplicate id 'p0/0'"):
        make_track().select([0, 0])


def test_groups_of_unequal_size_keep_their_order() -> None:
    track = make_track(4, group_ids=("b", "a", "b", "b"), status=(Status.COMPLETED,) * 3 + (Status.PADDING,))
    assert track.groups() == {"b": [0, 2], "a": [1]}


def test_a_shared_field_that_disagrees_is_named() -> None:
    one, other = make_track(2), make_track(2, first=2)
    other = dataclasses.replace(
        other, segment=dataclasses.replace(other.latent, sampler=Sampler(kernel="cps", eta=0.7))
    )
    with pytest.raises(BatchError, match=r"LatentSegment.sampler: piece 0 has Sampler\(kernel='flow-sde'"):
        Track.concat([one, other])


def test_a_field_that_only_some_pieces_have_is_named() -> None:
    with pytest.raises(BatchError, match=r"Track.rewards: piece 1 has none, piece 0 has some"):
        Track.concat([make_track(2), make_track(2, first=2, rewards=None)])


def test_keys_that_disagree_are_named() -> None:
    other = make_track(2, first=2, reward_parts={"size": torch.zeros(2)})
    with pytest.raises(BatchError, match=r"Track.reward_parts: piece 0 has keys \['shapes', 'shapes/color'\]"):
        Track.concat([make_track(2), other])


def test_rows_of_different_shape_are_named() -> None:
    one = make_track(2, media=Media(kind="image", values=torch.zeros(2, 3, 4, 4)))
    other = make_track(2, first=2, media=Media(kind="image", values=torch.zeros(2, 3, 8, 8)))
    with pytest.raises(BatchError, match=r"Media.values: the pieces have rows of different shape or dtype"):
        Track.concat([one, other])


def test_pieces_of_different_types_are_named() -> None:
    text = make_track(2, first=2, segment=make_text((torch.arange(2),) * 2))
    with pytest.raises(BatchError, match="different types: LatentSegment, TextSegment"):
        Track.concat([make_track(2), text])


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda t: t.select([4]), "got row 4, expected 0 to 3"),
        (lambda t: t.select([-1]), "got row -1"),
        (lambda t: t.split([1, 2]), r"sizes \[1, 2\] add up to 3; there are 4 rows"),
        (lambda t: t.split([5, -1]), "there are 4 rows"),
        (lambda t: t.chunks(-1), "got size -1"),
        (lambda t: t.padded(3), "got 3 rows, expected at least 4"),
        (lambda t: t.select([]).padded(1), "'image' has no row to copy"),
        (lambda t: Track.concat([]), "nothing to join"),
        (lambda t: make_track(2, sample_ids=("a", "a")), "duplicate id 'a'"),
        (lambda t: make_track(2, inputs=Inputs.of_texts(["a"])), "Track.inputs: 1 entries for 2 samples"),
        (lambda t: make_track(2, reward_parts={"x": torch.zeros(3)}), r"reward_parts\['x'\]: 3 entries for 2"),
    ],
)
def test_a_wrong_call_says_what_was_asked_and_what_is_there(act: Any, says: str) -> None:
    with pytest.raises(BatchError, match=says):
        act(make_track())


def test_moving_reaches_nested_ragged_and_shared_tensors() -> None:
    # The meta device represents any other device: it exists everywhere and holds no data.
    moved = make_track(3, segment=make_text((torch.arange(2),) * 3)).to("meta")
    assert moved.sample_weights.device.type == "meta"
    assert moved.conditions["positive"].values["embeds"].device.type == "meta"
    assert moved.media is not None and {video.device.type for video in moved.media.arrays} == {"meta"}
    assert isinstance(moved.segment, TextSegment)
    assert {tokens.device.type for tokens in moved.segment.tokens} == {"meta"}


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_batch_that_is_there_is_not_moved(device: Any) -> None:
    for segment in (None, make_text((torch.arange(2),) * 3)):
        track = make_track(3) if segment is None else make_track(3, segment=segment)
        assert track.to(device) is track
        there = track.to("meta")
        assert there is not track and there.sample_ids is track.sample_ids


def test_neighbouring_rows_are_a_view_of_the_batch() -> None:
    track = make_track(4)
    base = track.sample_weights.data_ptr()
    assert [piece.sample_weights.data_ptr() for piece in track.chunks(2)] == [base, base + 8]


def test_prompts_are_held_once_through_split_join_and_padding() -> None:
    track = make_track(4)
    again = Track.concat(track.chunks(1)).padded(9)
    assert again.conditions["positive"].values["embeds"].shape == (10, 2)


def test_prompts_of_different_origin_stand_side_by_side() -> None:
    one = Conditions(values={"e": torch.tensor([[1.0], [2.0]])}, index=torch.tensor([1, 0]))
    other = Conditions(values={"e": torch.tensor([[3.0]])}, index=torch.tensor([0, 0]))
    joined = Conditions.concat([one, other])
    assert joined.expanded()["e"].tolist() == [[2.0], [1.0], [3.0], [3.0]]
    assert joined.select([1, 3]).compact().values["e"].tolist() == [[1.0], [3.0]]


def test_prompts_that_do_not_fit_together_are_named() -> None:
    one = Conditions(values={"e": torch.zeros(1, 4)}, index=torch.tensor([0]))
    with pytest.raises(BatchError, match=r"Conditions.values\['e'\]: the pieces have rows of different shape"):
        Conditions.concat([one, Conditions(values={"e": torch.zeros(1, 5)}, index=torch.tensor([0]))])
    with pytest.raises(BatchError, match=r"piece 0 has keys \['e'\], piece 1 has \['f'\]"):
        Conditions.concat([one, Conditions(values={"f": torch.zeros(1, 4)}, index=torch.tensor([0]))])
    with pytest.raises(BatchError, match=r"got \{'e': 1, 'f': 2\} entries"):
        Conditions(values={"e": torch.zeros(1), "f": torch.zeros(2)}, index=torch.tensor([0]))


PATCHES = tuple(torch.full((size, 2), float(size)) for size in (3, 1, 2))
"""Values of three inputs, like pixel patches of images of different sizes."""


def ragged(*index: int) -> Conditions:
    return Conditions(values={"patches": PATCHES, "grid": torch.arange(3)}, index=torch.tensor(index))


def test_ragged_conditions_are_held_once_per_input_and_never_padded() -> None:
    conditions = ragged(2, 0, 2, 1)
    expanded = conditions.expanded()
    assert [len(patches) for patches in expanded["patches"]] == [2, 3, 2, 1]
    assert all(mine is PATCHES[at] for mine, at in zip(expanded["patches"], (2, 0, 2, 1), strict=True))
    assert expanded["grid"].tolist() == [2, 0, 2, 1]
    compact = conditions.select([2, 0]).compact()
    assert compact.values["patches"] == (PATCHES[2],) and compact.index.tolist() == [0, 0]


def test_ragged_conditions_are_split_joined_moved_and_written() -> None:
    conditions = ragged(2, 0, 2, 1)
    whole = Conditions.concat(conditions.split([1, 3]))
    assert whole.values["patches"] is PATCHES and whole.index.tolist() == [2, 0, 2, 1]
    both = Conditions.concat([ragged(1).compact(), ragged(0, 2).compact()])
    assert [len(patches) for patches in both.expanded()["patches"]] == [1, 3, 2]
    assert same(from_bytes(to_bytes(conditions), Conditions), conditions)
    moved = conditions.to("meta").values["patches"]
    assert isinstance(moved, tuple) and {patches.device.type for patches in moved} == {"meta"}


def test_ragged_conditions_that_do_not_fit_together_are_named() -> None:
    stacked = Conditions(values={"patches": torch.zeros(1, 3, 2), "grid": torch.arange(1)}, index=torch.tensor([0]))
    with pytest.raises(BatchError, match=r"Conditions.values\['patches'\]: the pieces hold different kinds"):
        Conditions.concat([ragged(0), stacked])
    with pytest.raises(BatchError, match=r"got \{'patches': 3, 'grid': 2\} entries"):
        Conditions(values={"patches": PATCHES, "grid": torch.arange(2)}, index=torch.tensor([0]))


def test_the_final_latents_are_those_at_the_last_position_of_each_sample() -> None:
    segment = LatentSegment(
        latents=torch.arange(6.0).reshape(2, 3, 1),
        positions=torch.tensor([[0, 1, 2], [1, 2, -1]]),
        sde_steps=torch.tensor([[0], [1]]),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="flow-sde", eta=0.7),
    )
    assert segment.final.tolist() == [[2.0], [4.0]]
    without_end = dataclasses.replace(segment, positions=torch.tensor([[0, 1, 2], [0, 1, -1]]))
    with pytest.raises(BatchError, match="position 2 is not stored for every sample"):
        _ = without_end.final


def test_a_latent_segment_is_not_made_of_text() -> None:
    track = make_track(1, segment=make_text((torch.arange(2),)))
    with pytest.raises(BatchError, match="got TextSegment, expected a latent segment"):
        _ = track.latent


def test_lengths_count_generated_tokens_and_those_of_the_prompt_with_them() -> None:
    prompts = (torch.tensor([5]), torch.tensor([6, 7]), torch.tensor([8, 9, 10]))
    tokens = (torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3]))
    segment = TextSegment(prompt_tokens=prompts, tokens=tokens)
    assert segment.lengths == (2, 0, 1)
    assert segment.total_lengths == (3, 2, 4)


def test_a_text_follows_at_least_one_token() -> None:
    with pytest.raises(BatchError, match="row 0 has none"):
        TextSegment(prompt_tokens=(torch.zeros(0, dtype=torch.int64),), tokens=(torch.arange(2),))


def test_every_token_has_a_log_prob_or_none_has() -> None:
    with pytest.raises(BatchError, match=r"TextSegment.log_probs: \(1,\) entries for \(2,\) tokens"):
        make_text((torch.arange(2),), log_probs=(torch.zeros(1),))


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor(3), torch.tensor(3), True),
        (torch.zeros(0, 2), torch.zeros(0, 3), False),
        (torch.zeros(1, 1).expand(1, 6)[:, :1].T, torch.zeros(6, 1)[:1], True),
        (torch.zeros(2, 6)[:0, 0], torch.zeros(0), True),
        (torch.zeros(2), None, False),
        ({"a": (torch.zeros(2),)}, {"a": (torch.zeros(2),)}, True),
        ((torch.zeros(2), 1), (torch.zeros(2),), False),
        (Sampler(kernel="cps", eta=0.7), Sampler(kernel="cps", eta=0.8), False),
        (1, 1.0, True),
    ],
)
def test_same_compares_bit_for_bit(left: object, right: object, equal: bool) -> None:
    assert same(left, right) is equal


def test_same_looks_into_nested_batches() -> None:
    conditions: Mapping[str, Batch] = make_track().conditions
    assert same(conditions, make_track().conditions)
    assert not same(conditions, make_track(first=1).conditions)


def test_a_move_to_a_gpu_waits_for_no_copy_and_one_from_it_does() -> None:
    """A torch without CUDA moves nothing there, so the calls are noted instead."""
    calls: list[tuple[str, bool]] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.to:
                return func(*args, **(kwargs or {}))
            calls.append((str(args[1]), (kwargs or {}).get("non_blocking", False)))
            return args[0]

    conditions = Conditions(values={"text": torch.zeros(2, 3)}, index=torch.arange(2))
    there = conditions.to("meta")
    with Noted():
        conditions.to("cuda:1")
        there.to("cpu")
    assert calls == [("cuda:1", True)] * 2 + [("cpu", False)] * 2


def test_what_a_change_leaves_stays_where_it_is() -> None:
    """`meta` is a device here: it has shapes and no values."""
    track = make_track(4)
    seen: list[Track] = []

    def change(moved: Track) -> Track:
        seen.append(moved)
        scored = dataclasses.replace(moved.latent, log_probs=moved.latent.latents.new_zeros((4, 1), device="cpu"))
        return dataclasses.replace(moved, segment=scored, advantages=torch.ones(4))

    result = track.computed_on("meta", change)
    assert seen[0].latent.latents.is_meta and seen[0].sample_weights.is_meta
    assert result.latent.latents is track.latent.latents and result.conditions is track.conditions
    assert result.sample_weights is track.sample_weights and result.media is track.media
    assert result.latent.log_probs is not None and result.latent.log_probs.tolist() == [[0.0]] * 4
    assert result.advantages is not None and result.advantages.tolist() == [1.0] * 4
    elsewhere = track.computed_on("cpu", change, home="meta")
    assert elsewhere.latent.log_probs is not None and elsewhere.latent.log_probs.is_meta
    assert elsewhere.latent.latents is track.latent.latents


def test_conditions_move_without_the_inputs_that_none_uses() -> None:
    values = {"embeds": torch.zeros(10, 2), "masks": tuple(torch.zeros(n) for n in range(10))}
    conditions = Conditions(values=values, index=torch.tensor([7, 3, 7]))
    assert conditions.to("cpu") is conditions
    moved = conditions.to("meta")
    assert moved.values["embeds"].shape == (2, 2) and moved.index.shape == (3,)
    assert [mask.shape[0] for mask in moved.values["masks"]] == [3, 7]
