"""Transports: tensors of one process in another."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.processes import marked, patience
from unirl.conformance.doubles.rows import Rows
from unirl.conformance.fixtures.transport import TransportCase, tensors
from unirl.core.errors import RunFailed

MAX_NAME_BYTES = 1024
"""Longest name, pickled, as the role states."""


def same_bits(result: Tensor, expected: Tensor) -> bool:
    """Whether dtype, shape and bits are equal: NaN equals itself, -0 and 0 differ."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(result.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@claim("transport")
def test_rows_arrive_bit_for_bit(case: TransportCase) -> None:
    """Rows that one worker kept arrive in another one, in the driver and in the worker itself: of every dtype, bit for
    bit, whole tensors and pieces of several in the requested order.

    If it fails: look for a dtype that travels as another (bool, bf16), tensors that are not contiguous, and answers
    that are handed out in the order of the owner instead of the question.
    """
    given = tensors()
    run = case.shared_run()
    names, more = run.keep(given), run.keep([tensor.flip(0) for tensor in given])
    for tensor, name, other in zip(given, names, more, strict=True):
        cases = {
            "all rows": (Rows.of(tensor, (name, 0, 6)), tensor),
            "rows 2 and 3": (Rows.of(tensor, (name, 2, 2)), tensor[2:4]),
            "pieces of two tensors": (
                Rows.of(tensor, (other, 4, 1), (name, 5, 1), (name, 0, 3), (other, 4, 2)),
                torch.cat([tensor[1:2], tensor[5:], tensor[:3], tensor[:2].flip(0)]),
            ),
        }
        for process in run.all:
            result = process("fetch", [rows for rows, _ in cases.values()])
            for (what, (_, expected)), rows in zip(cases.items(), result, strict=True):
                kind = f"{tensor.dtype} tensor {list(tensor.shape)}"
                assert same_bits(rows, expected), f"{what} of a {kind}: other bits arrived in {process.name!r}"


@claim("transport")
def test_names_are_small_and_never_reused(case: TransportCase) -> None:
    """The name that the driver passes on in place of a tensor is hashable and below 1 KiB, whatever the size of the
    tensor; no name is given twice, not even after its tensor was dropped.

    If it fails: count on after `drop`, and keep shapes, bytes and addresses out of the name.
    """
    run = case.shared_run()
    names = [*run.keep(tensors()), *run.keep([torch.zeros(64, 4096)])]
    run.maker("drop")
    names += run.keep(tensors())
    largest = max(len(pickle.dumps(name)) for name in names)
    case.record("bytes of a name", float(largest), bound=float(MAX_NAME_BYTES - 1))
    assert len(set(names)) == len(names), "a name was given twice"


@claim("transport")
def test_rows_that_were_dropped_are_refused(case: TransportCase) -> None:
    """Rows of a tensor that was dropped raise a RunFailed, and never come as other rows; those that were not dropped
    can still be fetched.

    If it fails: forget the tensor and not its place, and look the name up before anything is read.
    """
    first, second = tensors()[0], tensors()[1]
    run = case.shared_run()
    (gone,), (kept,) = run.keep([first]), run.keep([second])
    run.maker("drop", [gone])
    try:
        run.taker("fetch", [Rows.of(first, (gone, 0, 6))])
    except RunFailed:
        pass
    else:
        raise AssertionError("rows of a tensor that was dropped were given")
    (result,) = run.taker("fetch", [Rows.of(second, (kept, 0, 6))])
    assert same_bits(result, second), "a tensor that was kept was dropped with another one"
    run.maker("drop")
    try:
        run.taker("fetch", [Rows.of(second, (kept, 0, 6))])
    except RunFailed:
        return
    raise AssertionError("after everything was dropped, rows were given")


@claim("transport")
def test_bytes_are_counted(case: TransportCase) -> None:
    """The counts say how many bytes are held, how many left and how many came: they are the run's account of where its
    data went.

    If it fails: count the bytes of the rows where they are kept, sent and fetched, and take them off in `drop`.
    """
    given = tensors()[:3]
    size = sum(tensor.nbytes for tensor in given)
    run = case.shared_run()
    maker, taker = run.counts()
    names = run.keep(given)
    held = run.counts()[0].bytes_held
    assert held == size, f"tensors of {size} bytes are kept, {held} are counted"
    run.taker("fetch", [Rows.of(tensor, (name, 0, 6)) for tensor, name in zip(given, names, strict=True)])
    came, left = run.counts()[1].bytes_fetched - taker.bytes_fetched, run.counts()[0].bytes_sent - maker.bytes_sent
    assert came == size, f"{size} bytes came, {came} are counted"
    assert left >= size, f"{size} bytes left, {left} are counted"
    run.maker("drop")
    held = run.counts()[0].bytes_held
    assert held == 0, f"all was dropped, {held} bytes are counted as held"


@claim("transport")
def test_closed_transports_leave_nothing_behind(case: TransportCase) -> None:
    """Every transport can be closed twice; once all are, and their processes have ended, nothing of the run is left.

    If it fails: end in the driver's `close` what its `build` started, and remember that it was done.
    """
    with case.run() as run:
        run.keep(tensors())
        for process in run.all:
            process("close")
            process("close")
    left = marked(run.name, within_s=patience(run.start_s))
    assert not left, f"left behind after close: {', '.join(left)}"
