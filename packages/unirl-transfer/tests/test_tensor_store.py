"""Stores of several workers: each fetches the others' rows with one question, counts the bytes, and says what is gone."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.roles import Transport, TransportCounts, TransportPlace
from unirl.core.specs.part_config import PartConfig
from unirl.transfer import tensor_store
from unirl.transfer.remote_rows import Piece, RemoteRows
from unirl.transfer.tensor_store import Blob, TensorStore


class Workers:
    """Stores that ask each other as processes do: questions and answers are pickled on the way."""

    def __init__(self, *names: str) -> None:
        self.questions: list[tuple[str, int]] = []
        self.answer_bytes = 0
        self.stores = {name: TensorStore(name, ask=self._ask, device=torch.device("cpu")) for name in names}

    def _ask(self, owner: str, question: Any) -> list[Tensor]:
        self.questions.append((owner, len(question)))
        data = pickle.dumps(self.stores[owner].answer(pickle.loads(pickle.dumps(question))))
        self.answer_bytes += len(data)
        return pickle.loads(data)

    def keep(self, owner: str, *tensors: Tensor) -> list[RemoteRows]:
        return [
            RemoteRows([Piece(blob, 0, len(tensor))], row_shape=tuple(tensor.shape[1:]), dtype=tensor.dtype)
            for blob, tensor in zip(self.stores[owner].keep(tensors), tensors, strict=True)
        ]

    def fetch(self, reader: str, *rows: RemoteRows) -> list[Tensor]:
        return self.stores[reader].fetch(pickle.loads(pickle.dumps(rows)))


def numbered(*shape: int, start: int = 0) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).float()


def counts(sent: int, fetched: int, held: int) -> TransportCounts:
    return TransportCounts(bytes_sent=sent, bytes_fetched=fetched, bytes_held=held)


def built(process: str, ask: Any = lambda process, question: []) -> Transport:
    return tensor_store.build(PartConfig(), place=TransportPlace(run="r", process=process, device="cpu", ask=ask))


def test_the_store_fits_the_role():
    (name,) = built("train-0").keep([numbered(2, 2)])
    assert name.owner == "train-0"


def test_a_worker_that_replaces_another_gives_no_rows_for_the_names_of_the_one_that_died():
    before, after = built("rollout-0"), built("rollout-0")
    (name,) = before.keep([numbered(2, 2)])
    assert name not in after.keep([numbered(2, 2, start=50)] * 3)
    with pytest.raises(RunFailed, match="dropped"):
        after.fetch([RemoteRows([Piece(name, 0, 2)], row_shape=(2,), dtype=torch.float32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_what_comes_is_what_was_kept_bit_for_bit(dtype: torch.dtype):
    workers, tensor = Workers("a", "b"), numbered(4, 3, 2).to(dtype)
    (rows,) = workers.keep("a", tensor)
    (result,) = workers.fetch("b", rows)
    assert result.dtype == dtype
    assert torch.equal(result, tensor)


def test_bits_that_compare_unequal_or_alike_come_through():
    special = torch.tensor([[float("nan"), -0.0, 0.0, float("-inf"), 2.0**-149]])
    workers = Workers("a", "b")
    (result,) = workers.fetch("b", *workers.keep("a", special))
    assert torch.equal(result.view(torch.int32), special.view(torch.int32))


def test_everything_wanted_of_an_owner_is_one_question():
    workers = Workers("a", "b", "c")
    one, two = workers.keep("a", numbered(4, 2), numbered(6, 3, start=50))
    (three,) = workers.keep("b", numbered(4, 2, start=200))
    mixed = torch.cat([three[1:3], one[3:], three[:1], one[:2]])
    result = workers.fetch("c", two[1:4], mixed, three)
    # Pieces of `a`: two of `mixed`, one of `two`. Pieces of `b`: two of `mixed`, all of `three`.
    assert sorted(workers.questions) == [("a", 3), ("b", 3)]
    a, b = numbered(4, 2), numbered(4, 2, start=200)
    assert torch.equal(result[0], numbered(6, 3, start=50)[1:4])
    assert torch.equal(result[1], torch.cat([b[1:3], a[3:], b[:1], a[:2]]))
    assert torch.equal(result[2], b)


def test_a_workers_own_rows_are_no_question_and_no_bytes():
    workers = Workers("a", "b")
    mine, theirs = workers.keep("a", numbered(2, 4))[0], workers.keep("b", numbered(2, 4, start=50))[0]
    (result,) = workers.fetch("a", torch.cat([mine, theirs]))
    assert torch.equal(result, torch.cat([numbered(2, 4), numbered(2, 4, start=50)]))
    assert workers.questions == [("b", 1)]
    # 2 rows of 4 fp32 numbers.
    assert workers.stores["a"].counts() == counts(sent=0, fetched=32, held=32)
    assert workers.stores["b"].counts() == counts(sent=32, fetched=0, held=32)


def test_bytes_are_those_of_the_rows_that_went():
    workers = Workers("a", "b", "c")
    one, two = workers.keep("a", numbered(5, 3), numbered(4, 2).to(torch.bfloat16))
    workers.fetch("b", one[:2], two)
    workers.fetch("c", one[4:])
    to_b, to_c = 2 * 3 * 4 + 4 * 2 * 2, 1 * 3 * 4
    assert workers.stores["a"].counts() == counts(sent=to_b + to_c, fetched=0, held=5 * 3 * 4 + 4 * 2 * 2)
    assert workers.stores["b"].counts() == counts(sent=0, fetched=to_b, held=0)
    assert workers.stores["c"].counts() == counts(sent=0, fetched=to_c, held=0)


def test_a_few_rows_do_not_bring_the_tensor_that_they_are_a_view_of():
    workers = Workers("a", "b")
    rows = workers.keep("a", torch.zeros(1000, 256))[0]
    view = workers.keep("a", torch.zeros(1000, 256)[10:12])[0]
    workers.fetch("b", rows[3:5], view)
    # 2 x 2 rows of 1 KiB; pickle's own part of two tensors is below 1 KiB each.
    assert 4096 <= workers.answer_bytes < 6144


def test_no_rows_are_an_empty_tensor_of_the_right_kind_and_no_question():
    workers = Workers("a", "b")
    rows = workers.keep("a", numbered(4, 2, 3).to(torch.bfloat16))[0]
    (result,) = workers.fetch("b", rows[:0])
    assert (result.shape, result.dtype) == ((0, 2, 3), torch.bfloat16)
    assert workers.questions == []
    assert workers.stores["b"].fetch([]) == []


def test_names_are_never_given_again():
    workers = Workers("a")
    store = workers.stores["a"]
    first = store.keep([numbered(1, 2), numbered(1, 2)])
    store.drop()
    second = store.keep([numbered(1, 2)])
    assert len({*first, *second}) == 3
    assert all(len(pickle.dumps(blob)) < 1024 for blob in (*first, *second))


def test_what_was_dropped_is_missing_by_name_for_others_and_for_oneself():
    workers = Workers("a", "b")
    rows = workers.keep("a", numbered(2, 2))[0]
    workers.stores["a"].drop()
    assert workers.stores["a"].counts().bytes_held == 0
    kept = workers.keep("a", numbered(2, 2, start=9))[0]
    for reader in ("a", "b"):
        with pytest.raises(RunFailed, match="tensor 1 of 'a' was dropped; its rollout is over"):
            workers.fetch(reader, rows)
        assert torch.equal(workers.fetch(reader, kept)[0], numbered(2, 2, start=9))


def test_one_missing_tensor_brings_nothing_and_counts_nothing():
    workers = Workers("a", "b")
    (good,) = workers.keep("a", numbered(2, 2))
    bad = RemoteRows([Piece(Blob("a", 77), 0, 2)], row_shape=(2,), dtype=torch.float32)
    with pytest.raises(RunFailed, match="tensor 77"):
        workers.fetch("b", good, bad)
    assert workers.stores["a"].counts().bytes_sent == workers.stores["b"].counts().bytes_fetched == 0


@pytest.mark.parametrize(("start", "count"), [(1, 2), (2, 1), (-1, 1), (0, 3)])
def test_rows_past_the_end_are_an_error_and_not_fewer_rows(start: int, count: int):
    workers = Workers("a", "b")
    (blob,) = workers.stores["a"].keep([numbered(2, 2)])
    for reader in ("a", "b"):
        with pytest.raises(IndexError, match="it has 2"):
            workers.fetch(reader, RemoteRows([Piece(blob, start, count)], row_shape=(2,), dtype=torch.float32))


def test_the_first_error_of_an_owner_is_what_the_reader_raises():
    def ask(owner: str, question: Any) -> list[Tensor]:
        raise ConnectionError(f"{owner} is gone")

    store = TensorStore("b", ask=ask, device=torch.device("cpu"))
    rows = RemoteRows([Piece(Blob("a", 1), 0, 1)], row_shape=(2,), dtype=torch.float32)
    with pytest.raises(ConnectionError, match="a is gone"):
        store.fetch([rows])


def test_gradients_stay_where_they_are():
    workers = Workers("a")
    leaf = numbered(2, 2).requires_grad_()
    (result,) = workers.fetch("a", *workers.keep("a", leaf * 2))
    assert not result.requires_grad
    assert torch.equal(result, numbered(2, 2) * 2)


def test_rows_come_to_the_device_of_the_reader():
    workers = Workers("a")
    rows = workers.keep("a", numbered(2, 2))
    reader = TensorStore("b", ask=workers._ask, device=torch.device("meta"))
    assert [tensor.device.type for tensor in reader.fetch([*rows, rows[0][:0]])] == ["meta", "meta"]


def test_closing_forgets_and_may_happen_twice():
    workers = Workers("a")
    rows = workers.keep("a", numbered(2, 2))
    store = workers.stores["a"]
    store.close()
    store.close()
    with pytest.raises(RunFailed, match="dropped"):
        store.fetch(rows)


def test_readers_at_once_get_their_rows_and_every_byte_is_counted():
    workers, readers, rounds = Workers("a", "b"), 8, 50
    tensors = [numbered(16, 32, start=1000 * index) for index in range(4)]
    rows = workers.keep("a", *tensors)
    store, start = workers.stores["a"], threading.Barrier(readers + 1)
    wrong: list[str] = []

    def read(reader: int) -> None:
        start.wait()
        for turn in range(rounds):
            which, at = (reader + turn) % 4, turn % 12
            (result,) = store.answer([(rows[which].pieces[0].blob.number, at, 4)])
            if not torch.equal(result, tensors[which][at : at + 4]):
                wrong.append(f"reader {reader}, turn {turn}")

    def write() -> None:
        start.wait()
        for turn in range(rounds):
            store.keep([numbered(2, 2, start=turn)])
            assert store.counts().bytes_held >= sum(tensor.nbytes for tensor in tensors)

    run_all([*(lambda number=number: read(number) for number in range(readers)), write])
    assert wrong == []
    # Each turn of each reader takes 4 rows of 32 fp32 numbers.
    assert store.counts().bytes_sent == readers * rounds * 4 * 32 * 4
    assert store.counts().bytes_held == 4 * 16 * 32 * 4 + rounds * 2 * 2 * 4


def test_a_drop_while_others_read_gives_rows_or_the_error_and_never_others():
    workers = Workers("a")
    store, start, result = workers.stores["a"], threading.Barrier(5), list[str]()
    number = store.keep([numbered(64, 64)])[0].number

    def read() -> None:
        start.wait()
        for _ in range(200):
            try:
                (rows,) = store.answer([(number, 3, 5)])
            except RunFailed:
                result.append("dropped")
            else:
                result.append("right" if torch.equal(rows, numbered(64, 64)[3:8]) else "wrong")

    def drop() -> None:
        start.wait()
        store.drop()
        store.keep([numbered(64, 64, start=5)])

    run_all([read, read, read, read, drop])
    assert len(result) == 800
    assert set(result) <= {"right", "dropped"}
    with pytest.raises(RunFailed, match="dropped"):
        store.answer([(number, 3, 5)])


def run_all(functions: Sequence[Callable[[], None]]) -> None:
    """All at once; what one of them raises is raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(timeout=60)


def test_some_are_dropped_by_name_and_the_rest_stay():
    workers = Workers("a", "b")
    gone, stays = workers.keep("a", numbered(2, 2), numbered(2, 2, start=9))
    workers.stores["a"].drop([gone.pieces[0].blob])
    assert torch.equal(workers.fetch("b", stays)[0], numbered(2, 2, start=9))
    with pytest.raises(RunFailed, match="tensor 1 of 'a' was dropped"):
        workers.fetch("b", gone)
    assert workers.stores["a"].counts().bytes_held == 16
    workers.stores["a"].drop([gone.pieces[0].blob])
