"""Operations on rows stored elsewhere give the same results as on the tensor itself."""

# `rows()` and `shared()` are dataclasses.field() with the kind of the field.
# ruff: noqa: RUF009

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.types.batch import Batch, rows, shared
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, Track
from unirl.transfer.remote_rows import LARGE_ROW_BYTES, Fetch, Piece, RemoteRows, dehydrated, fetchable, hydrated

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


class Shelf:
    """Tensors under numbers, and their rows by the definition of a piece: rows start to start + count, in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.keeps = 0
        self.fetches = 0

    def keep(self, tensors: Sequence[Tensor]) -> list[int]:
        self.keeps += 1
        self.tensors += tensors
        return list(range(len(self.tensors) - len(tensors), len(self.tensors)))

    def fetch(self, wanted: Sequence[RemoteRows]) -> list[Tensor]:
        self.fetches += 1
        result: list[Tensor] = []
        for remote in wanted:
            picked = [self.tensors[p.blob][p.start + i] for p in remote.pieces for i in range(p.count)]
            result.append(torch.stack(picked) if picked else torch.empty(remote.shape, dtype=remote.dtype))
        return result

    def remote(self, tensor: Tensor) -> RemoteRows:
        (blob,) = self.keep([tensor])
        piece = Piece(blob, 0, tensor.shape[0])
        return RemoteRows([piece], row_shape=tuple(tensor.shape[1:]), dtype=tensor.dtype, fetch=self.fetch)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of which no two rows are alike, as far as the dtype can tell them apart."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).reshape(shape).to(dtype)


def assert_same(remote: RemoteRows, tensor: Tensor) -> None:
    assert (remote.shape, remote.ndim, remote.dtype, len(remote)) == (
        tuple(tensor.shape),
        tensor.ndim,
        tensor.dtype,
        len(tensor),
    )
    assert remote.size_bytes == tensor.nbytes
    fetched = remote.cpu()
    assert fetched.dtype == tensor.dtype
    assert torch.equal(fetched, tensor)


# Operations.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3, 4), (0, 3), (5, 0)], ids=str)
def test_rows_know_what_the_tensor_knows(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = numbered(*shape, dtype=dtype)
    assert_same(Shelf().remote(tensor), tensor)


@pytest.mark.parametrize("index", [[0], [3, 3, 3], [4, 3, 2, 1, 0], [1, 2, 4, 0, 1], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_taking_rows(index: list[int], dtype: torch.dtype):
    tensor, at = numbered(5, 3), torch.tensor(index, dtype=dtype)
    assert_same(Shelf().remote(tensor).index_select(0, at), tensor.index_select(0, at))


def test_taking_one_row_by_a_number_without_a_dimension():
    tensor, at = numbered(5, 3), torch.tensor(2)
    assert_same(Shelf().remote(tensor).index_select(0, at), tensor.index_select(0, at))


def test_the_rows_of_a_vector_are_its_last_dimension_too():
    tensor, at = numbered(5), torch.tensor([4, 1])
    assert_same(Shelf().remote(tensor).index_select(-1, at), tensor.index_select(-1, at))


@pytest.mark.parametrize(
    "rows_", [slice(None), slice(1, 3), slice(-2, None), slice(0, 9), slice(3, 1), slice(None, None, 2)], ids=str
)
def test_slices(rows_: slice):
    tensor = numbered(5, 3)
    assert_same(Shelf().remote(tensor)[rows_], tensor[rows_])


@pytest.mark.parametrize("cat", [torch.cat, torch.concat, torch.concatenate])
def test_joining(cat: Callable[..., Any]):
    shelf, one, other = Shelf(), numbered(2, 3), numbered(3, 3) + 100
    remote = [shelf.remote(one), shelf.remote(other), shelf.remote(one[:0])]
    assert_same(cat(remote), cat([one, other, one[:0]]))
    assert_same(cat(tuple(remote), dim=0), cat([one, other, one[:0]]))
    assert_same(cat(remote, -2), cat([one, other, one[:0]], -2))


def test_neighbours_are_one_piece_and_strangers_are_not():
    shelf = Shelf()
    first, second = shelf.remote(numbered(4, 2)), shelf.remote(numbered(4, 2))
    halves = torch.cat([first[:2], first[2:]])[:]
    assert [(piece.blob, piece.start, piece.count) for piece in halves.pieces] == [(0, 0, 4)]
    mixed = torch.cat([first[2:], second[:1]])[:]
    assert [(piece.blob, piece.start, piece.count) for piece in mixed.pieces] == [(0, 2, 2), (1, 0, 1)]


Step = tuple[str, Any]
SLICES = st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.integers(1, 3)).map(lambda part: slice(*part))
STEPS = st.one_of(
    st.tuples(st.just("take"), st.lists(st.integers(0, 10**6), max_size=6)),
    st.tuples(st.just("slice"), SLICES),
    st.tuples(st.just("join"), st.integers(0, 10**6)),
)


@settings(max_examples=150)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    width=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(STEPS, max_size=8),
)
def test_any_chain_of_operations_equals_the_same_chain_on_tensors(
    counts: list[int], width: int, dtype: torch.dtype, steps: list[Step]
):
    shelf = Shelf()
    tensors = [
        numbered(count, width, dtype=dtype) + (0 if dtype is torch.bool else 40 * i) for i, count in enumerate(counts)
    ]
    tensors = [tensor.to(dtype) for tensor in tensors]
    pairs = [(shelf.remote(tensor), tensor) for tensor in tensors]
    remote, tensor = pairs[0]
    for name, value in steps:
        if name == "take":
            at = torch.tensor([number % len(tensor) for number in value] if len(tensor) else [], dtype=torch.int64)
            remote, tensor = remote.index_select(0, at), tensor.index_select(0, at)
        elif name == "slice":
            remote, tensor = remote[value], tensor[value]
        else:
            other, real = pairs[value % len(pairs)]
            remote, tensor = torch.cat([remote, other]), torch.cat([tensor, real])
        pairs.append((remote, tensor))
    for remote, tensor in pairs:
        assert_same(remote, tensor)
    assert [len(piece) for piece in shelf.fetch([r for r, _ in pairs])] == [len(t) for _, t in pairs]


def test_a_copy_in_another_process_knows_the_rows_and_cannot_fetch_them():
    remote = Shelf().remote(numbered(4, 2))
    copy = pickle.loads(pickle.dumps(remote))
    assert (copy.pieces, copy.shape, copy.dtype) == (remote.pieces, remote.shape, remote.dtype)
    with pytest.raises(TypeError, match="this process cannot fetch it"):
        copy.cpu()
    assert remote.cpu().shape == (4, 2)


def test_fetching_can_be_given_later_and_survives_joining():
    shelf, tensor = Shelf(), numbered(4, 2)
    bare = pickle.loads(pickle.dumps(shelf.remote(tensor)))
    able = bare.with_fetch(shelf.fetch)
    assert_same(torch.cat([bare, able]), torch.cat([tensor, tensor]))


def test_what_a_batch_does_to_every_tensor_leaves_rows_alone():
    remote = Shelf().remote(numbered(4, 2))
    assert remote.detach() is remote
    assert remote.to("cpu") is remote
    assert remote.to(torch.device("meta")) is remote


# Refusals: silence would give other numbers than the tensor.


@pytest.mark.parametrize("index", [[5], [-1], [0, -5]], ids=str)
def test_rows_that_are_not_there_are_refused_as_a_tensor_refuses_them(index: list[int]):
    tensor, at = numbered(5, 3), torch.tensor(index)
    with pytest.raises(IndexError):
        tensor.index_select(0, at)
    with pytest.raises(IndexError, match="there are 5, counted from 0"):
        Shelf().remote(tensor).index_select(0, at)


@pytest.mark.parametrize("index", [torch.tensor([True, False]), torch.tensor([0.0]), torch.tensor([[0], [1]])], ids=str)
def test_an_index_that_is_no_vector_of_numbers_is_refused(index: Tensor):
    tensor = numbered(5, 3)
    with pytest.raises((IndexError, RuntimeError)):
        tensor.index_select(0, index)
    with pytest.raises(IndexError, match="a vector of int64"):
        Shelf().remote(tensor).index_select(0, index)


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_other_dimensions_than_rows_are_refused(dim: int):
    with pytest.raises(IndexError, match=f"got dimension {dim}, "):
        Shelf().remote(numbered(5, 3)).index_select(dim, torch.tensor([0]))


@pytest.mark.parametrize("key", [0, (slice(None), 0), torch.tensor([0]), None, ...], ids=str)
def test_what_is_no_slice_is_refused(key: Any):
    with pytest.raises(TypeError, match="only be sliced along dimension 0"):
        Shelf().remote(numbered(5, 3))[key]


def test_joining_refuses_what_would_not_be_these_rows():
    shelf, here = Shelf(), numbered(2, 3)
    remote = shelf.remote(here)
    with pytest.raises(TypeError, match="cannot be joined with local rows"):
        torch.cat([remote, here])
    with pytest.raises(TypeError, match="cannot be joined with local rows"):
        torch.cat([here, remote])
    with pytest.raises(TypeError, match="only be joined along dimension 0"):
        torch.cat([remote, remote], dim=1)
    with pytest.raises(TypeError, match="not into `out`"):
        torch.cat([remote, remote], out=torch.empty(4, 3))
    with pytest.raises(TypeError, match="different shape or dtype"):
        torch.cat([remote, shelf.remote(numbered(2, 4))])
    with pytest.raises(TypeError, match="different shape or dtype"):
        torch.cat([remote, shelf.remote(here.to(torch.bfloat16))])


@pytest.mark.parametrize("call", [torch.isfinite, torch.sum, lambda x: torch.stack([x]), lambda x: torch.add(x, x)])
def test_arithmetic_on_rows_that_lie_elsewhere_is_refused_by_name(call: Callable[[Any], Any]):
    with pytest.raises(TypeError, match=r"torch\.\w+ was called on rows stored on a worker"):
        call(Shelf().remote(numbered(2, 3)))


@pytest.mark.parametrize("target", [torch.float16, torch.ones(2), 0], ids=str)
def test_a_change_of_dtype_is_refused(target: Any):
    with pytest.raises(TypeError, match="can only change device"):
        Shelf().remote(numbered(2, 3)).to(target)


# Batches.


@dataclass(frozen=True, kw_only=True)
class Inner(Batch):
    values: Tensor = rows()

    @property
    def num_rows(self) -> int:
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class Outer(Batch):
    name: str = shared(default="outer")
    ids: tuple[str, ...] = rows()
    large: Tensor = rows()
    small: Tensor = rows()
    by_name: Mapping[str, Tensor] = rows()
    inner: Inner | None = rows(default=None)
    ragged: tuple[Tensor, ...] = rows()

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.ids)


WIDE = LARGE_ROW_BYTES // 4 + 1
"""fp32 numbers of the smallest row that stays behind."""


def outer(num_rows: int, *, start: int = 0) -> Outer:
    at = start * 1000
    return Outer(
        ids=tuple(f"s{start + row}" for row in range(num_rows)),
        large=numbered(num_rows, WIDE) + at,
        small=numbered(num_rows) + at,
        by_name={"a": numbered(num_rows, 2, WIDE) + at + 7, "b": numbered(num_rows, 1) + at},
        inner=Inner(values=numbered(num_rows, WIDE) + at + 9),
        ragged=tuple(numbered(row + 1, WIDE) + at + row for row in range(num_rows)),
    )


def assert_equal(left: Any, right: Any) -> None:
    """Written out anew: `same` is what batches use on their own fields."""
    assert type(left) is type(right), (type(left), type(right))
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, Batch):
        for name in left.__dataclass_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    elif isinstance(left, Mapping):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def test_large_rows_stay_behind_and_small_ones_go_along():
    shelf, batch = Shelf(), outer(3)
    left = dehydrated(batch, shelf.keep)
    assert isinstance(left.large, RemoteRows) and isinstance(left.by_name["a"], RemoteRows)
    assert left.inner is not None and isinstance(left.inner.values, RemoteRows)
    assert all(isinstance(value, RemoteRows) for value in left.ragged)
    assert left.small is batch.small and left.by_name["b"] is batch.by_name["b"]
    assert shelf.keeps == 1


def test_the_boundary_is_the_bytes_of_a_row():
    shelf, exact = Shelf(), numbered(3, LARGE_ROW_BYTES, dtype=torch.uint8)
    at = dehydrated(Inner(values=exact), shelf.keep)
    above = dehydrated(Inner(values=numbered(3, LARGE_ROW_BYTES + 1, dtype=torch.uint8)), shelf.keep)
    assert at.values is exact
    assert isinstance(above.values, RemoteRows)


def test_leaving_and_fetching_again_is_the_same_batch_and_one_question():
    shelf, batch = Shelf(), outer(3)
    back = hydrated(dehydrated(batch, shelf.keep), shelf.fetch)
    assert_equal(back, batch)
    assert shelf.fetches == 1


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 10**6), max_size=5),
    data=st.data(),
)
def test_what_batches_do_commutes_with_leaving_the_numbers_behind(
    sizes: list[int], picks: list[int], data: st.DataObject
):
    shelf = Shelf()
    real = [outer(size, start=10 * index) for index, size in enumerate(sizes)]
    left = [pickle.loads(pickle.dumps(dehydrated(batch, shelf.keep))) for batch in real]
    joined, joined_left = Outer.concat(real), Outer.concat(left)
    at = [pick % joined.num_rows for pick in picks]
    cut = data.draw(st.integers(0, joined.num_rows))
    done: list[Callable[[Outer], list[Outer]]] = [
        lambda batch: [batch.select(at)],
        lambda batch: batch.split([cut, batch.num_rows - cut]),
        lambda batch: [batch.select([0, *range(batch.num_rows)])],
        lambda batch: batch.chunks(2),
        lambda batch: [Outer.concat(batch.split([cut, batch.num_rows - cut]))],
        lambda batch: [batch.to("cpu")],
    ]
    for change in done:
        for ours, theirs in zip(change(joined_left), change(joined), strict=True):
            assert_equal(hydrated(ours, shelf.fetch), theirs)


def test_a_tensor_that_stands_twice_is_kept_once_and_comes_once():
    shelf, tensor = Shelf(), numbered(3, WIDE)
    batch = Outer(
        ids=("a", "b", "c"),
        large=tensor,
        small=numbered(3),
        by_name={"again": tensor},
        ragged=(numbered(1), numbered(1), numbered(1)),
    )
    left = dehydrated(batch, shelf.keep)
    assert len(shelf.tensors) == 1 and left.large is left.by_name["again"]
    back = hydrated(pickle.loads(pickle.dumps(left)), shelf.fetch)
    assert back.large is back.by_name["again"]
    assert_equal(back, batch)


def test_a_batch_with_nothing_large_is_itself_and_asks_nobody():
    shelf, batch = Shelf(), Inner(values=numbered(3, 2))
    assert dehydrated(batch, shelf.keep) is batch
    assert hydrated(batch, shelf.fetch) is batch
    assert (shelf.keeps, shelf.fetches) == (0, 0)


def test_joining_batches_whose_rows_differ_is_refused():
    shelf = Shelf()
    with pytest.raises(BatchError, match="rows of different shape or dtype"):
        Inner.concat([dehydrated(Inner(values=numbered(2, width)), shelf.keep) for width in (WIDE, WIDE + 1)])
    with pytest.raises(TypeError, match="cannot be joined with local rows"):
        Inner.concat([dehydrated(Inner(values=numbered(2, WIDE)), shelf.keep), Inner(values=numbered(2, WIDE))])


def track(num_prompts: int, per_prompt: int, *, start: int) -> Track:
    """A rollout's track as an engine gives it: embeddings once per prompt, trajectories and images per sample."""
    rows_ = num_prompts * per_prompt
    ids = tuple(f"p{start + row // per_prompt}/{row % per_prompt}" for row in range(rows_))
    groups = tuple(name.split("/")[0] for name in ids)
    embeddings = {"text": numbered(num_prompts, 3, WIDE) + 1000 * start, "pooled": numbered(num_prompts, 4)}
    return Track(
        name="image",
        sample_ids=ids,
        group_ids=groups,
        inputs=Inputs.of_texts(groups),
        metadata=tuple({} for _ in ids),
        conditions={"positive": Conditions(values=embeddings, index=torch.arange(rows_) // per_prompt)},
        segment=LatentSegment(
            latents=numbered(rows_, 3, 4, 5, 5) + start,
            positions=torch.arange(3).expand(rows_, 3).clone(),
            sde_steps=torch.arange(2).expand(rows_, 2).clone(),
            log_probs=numbered(rows_, 2),
            sigmas=torch.tensor([1.0, 0.5, 0.0]),
            sampler=Sampler(kernel="flow-sde", eta=0.7),
        ),
        media=Media(kind="image", values=numbered(rows_, 3, 8, 8) / 7),
        sample_weights=torch.ones(rows_),
        status=(Status.COMPLETED,) * rows_,
        policy_version=(3,) * rows_,
    )


def test_a_track_is_joined_regrouped_and_compacted_without_its_numbers():
    shelf = Shelf()
    real = [track(2, 3, start=0), track(1, 3, start=5)]
    left = [pickle.loads(pickle.dumps(dehydrated(one, shelf.keep))) for one in real]

    def regrouped(tracks: list[Track]) -> list[Track]:
        joined = Track.concat(tracks)
        order = sorted(range(joined.num_rows), key=lambda row: (row % 3, row))
        shares = joined.select(order).split([4, 5])
        return [
            Track(**{**vars(share), "media": None, "conditions": {k: v.compact() for k, v in share.conditions.items()}})
            for share in shares
        ]

    for ours, theirs in zip(regrouped(left), regrouped(real), strict=True):
        back = hydrated(ours, shelf.fetch)
        assert_equal(back, theirs)
        expanded = back.conditions["positive"].expanded()["text"]
        prompts = [int(name.split("/")[0][1:]) for name in back.sample_ids]
        # By the formula of `track`: the embedding of prompt p of a track that starts at s is row p - s plus 1000 s.
        for row, prompt in enumerate(prompts):
            begin = 0 if prompt < 5 else 5
            assert torch.equal(expanded[row], numbered(2, 3, WIDE)[prompt - begin] + 1000 * begin)


def test_what_the_driver_holds_of_a_sample_does_not_grow_with_its_size():
    def driver_bytes(size: int) -> float:
        shelf, one = Shelf(), track(2, 3, start=0)
        one = Track(**{**vars(one), "media": Media(kind="image", values=torch.zeros(6, 3, size, size))})
        return len(pickle.dumps(dehydrated(one, shelf.keep))) / one.num_rows

    # A few digits of the shape differ.
    assert abs(driver_bytes(1024) - driver_bytes(16)) < 8
    assert driver_bytes(1024) < 4096


def test_padding_a_track_repeats_references_alone():
    shelf, real = Shelf(), track(1, 2, start=0)
    left = dehydrated(real, shelf.keep).padded(5)
    assert sum(tensor.nbytes for tensor in shelf.tensors) == sum(
        tensor.nbytes
        for tensor in (real.media.stacked, real.latent.latents, real.conditions["positive"].values["text"])
    )
    assert_equal(hydrated(left, shelf.fetch), real.padded(5))


def here(array: Any) -> torch.Tensor:
    return array.cpu()


@pytest.mark.parametrize("kind", ["image", "video", "ragged"])
def test_media_of_every_kind_are_fetched_for_trackers(kind: str):
    shelf, values = Shelf(), {"image": numbered(2, 3, 8, 8) / 7, "video": numbered(2, 4, 3, 8, 8) / 7}
    ragged = (numbered(2, 3, 8, 8), numbered(3, 3, 8, 8) / 7)
    rate = None if kind == "image" else 8.0
    media = Media(kind="image" if kind == "image" else "video", values=values.get(kind, ragged), rate=rate)
    left = pickle.loads(pickle.dumps(dehydrated(media, shelf.keep)))
    assert all(isinstance(value, RemoteRows) for value in (left.values if kind == "ragged" else (left.values,)))
    with pytest.raises(TypeError, match="cannot fetch"):
        left.mapped(here)
    assert_equal(fetchable(left, shelf.fetch).select([1]).mapped(here), media.select([1]))


def test_fetching_one_field_leaves_the_rest():
    shelf = Shelf()
    fetch: Fetch = shelf.fetch
    left = dehydrated(track(1, 2, start=0), shelf.keep)
    assert isinstance(left.media.values, RemoteRows)
    assert torch.equal(fetchable(left.media, fetch).select([1]).values.cpu(), (numbered(2, 3, 8, 8) / 7)[1:])
    assert isinstance(left.latent.latents, RemoteRows)


def test_frames_of_videos_can_be_left_out_before_they_are_fetched() -> None:
    """Exactly the rows and frames that are asked for are fetched; the rest behaves as a tensor of videos."""
    shelf, videos = Shelf(), numbered(3, 5, 3, 8, 8)
    expected = Media(kind="video", values=videos, rate=4.0)
    remote = dehydrated(expected, shelf.keep)
    assert isinstance(remote.values, RemoteRows) and remote.values.shape == videos.shape
    assert torch.equal(hydrated(remote, shelf.fetch).stacked, videos)
    assert torch.equal(remote.values.with_fetch(shelf.fetch).cpu(), videos)

    both = Media.concat([remote.select([2]), remote.select([0, 1])])
    chosen = pickle.loads(pickle.dumps(both.with_frames(lambda count: [0, 2, 3])))
    assert [(piece.start, piece.count) for piece in chosen.values.pieces] == [
        (10, 1),
        (12, 2),
        (0, 1),
        (2, 2),
        (5, 1),
        (7, 2),
    ]
    assert torch.equal(hydrated(chosen, shelf.fetch).stacked, videos[[2, 0, 1]][:, [0, 2, 3]])
    assert torch.equal(hydrated(chosen.select([1]), shelf.fetch).stacked, videos[[0]][:, [0, 2, 3]])
    with pytest.raises(IndexError, match="got row 5, but there are 5"):
        remote.values.index_select(1, torch.tensor([5]))
    with pytest.raises(IndexError, match="only be indexed along dimension 0"):
        remote.values.index_select(2, torch.tensor([0]))
    with pytest.raises(TypeError, match="rows of different shape"):
        torch.cat([remote.values, chosen.values])
