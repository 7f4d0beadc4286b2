"""Weights arrive bit for bit, or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transfer_receiver import carrier
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.roles import WeightUpdate
from unirl.core.types.weights import checksum
from unirl.transfer.weights.carriers import InProcessCarrier, SharedMemoryCarrier
from unirl.transfer.weights.manifest import pack, plan_transfer, unpack
from unirl.transfer.weights.transfer import Receiver, send

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("transfer_receiver.py")
GENERATOR = torch.Generator().manual_seed(3)
TENSORS = {
    "block.0.weight": torch.randn(7, 5, generator=GENERATOR),
    # Nine bytes of int8 put what follows at an odd offset.
    "block.0.zero": torch.arange(9, dtype=torch.int8),
    "block.1.weight": torch.randn(3, 4, generator=GENERATOR).to(torch.bfloat16),
    "block.1.bias": torch.randn(4, generator=GENERATOR).t(),
    "empty": torch.zeros(0, 3),
    "step": torch.tensor(7, dtype=torch.int64),
}


def update(tensors=None, **changes) -> WeightUpdate:
    tensors = TENSORS if tensors is None else tensors
    return WeightUpdate(**{"version": 4, "tensors": tensors, "kind": "full", "checksum": checksum(tensors), **changes})


def transfer(sent: WeightUpdate, *, holds=None, bucket_bytes=64, apply=None, device=None):
    """Within this process. Returns the report and what was applied."""
    applied: dict[str, torch.Tensor] = {}
    through = InProcessCarrier()
    apply = apply or (lambda manifest, tensors: applied.update(tensors))
    receiver = Receiver(through, holds=holds, device=device, apply=apply)
    report = send(
        sent,
        carrier=through,
        begin=receiver.begin,
        take=receiver.take,
        finish=receiver.finish,
        bucket_bytes=bucket_bytes,
    )
    return report, applied


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("bucket_bytes", [1, 50, 64, 10_000])
def test_tensors_of_any_dtype_shape_and_offset_arrive_bit_for_bit(bucket_bytes: int) -> None:
    report, applied = transfer(update(), holds=TENSORS, bucket_bytes=bucket_bytes)
    assert_same(applied, TENSORS)
    size = 35 * 4 + 9 + 12 * 2 + 4 * 4 + 0 + 8
    assert (report.num_tensors, report.size_bytes) == (6, size)
    assert report.receipt.checksum == checksum(TENSORS) == update().checksum
    assert (report.receipt.version, report.receipt.num_tensors, report.receipt.size_bytes) == (4, 6, size)


def test_buckets_are_filled_in_order_and_a_larger_tensor_has_its_own() -> None:
    manifest = plan_transfer(update(), bucket_bytes=40)
    assert manifest.buckets == (
        ("block.0.weight",),
        ("block.0.zero", "block.1.bias"),
        ("block.1.weight", "empty", "step"),
    )
    for bucket in manifest.buckets:
        assert_same(unpack(manifest, bucket, pack(bucket, TENSORS)), {n: TENSORS[n] for n in bucket})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({f"base.{n}": t for n, t in TENSORS.items()}, "none of the 6 tensors sent is known here.*A prefix differs"),
        ({**TENSORS, "step": torch.tensor(7)}, None),
        ({**TENSORS, "stop": torch.tensor(7)}, "1 of 7 tensors are unknown here, such as 'stop'; did you mean 'step'"),
        ({n: t for n, t in TENSORS.items() if n != "step"}, "which leaves out 1 that are held, such as 'step'"),
        ({**TENSORS, "step": torch.tensor(7.0)}, r"'step' is sent as float32\[\]; int64\[\] is held"),
        ({**TENSORS, "empty": torch.zeros(3, 0)}, r"'empty' is sent as float32\[3, 0\]; float32\[0, 3\] is held"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_bytes(changed, says: str | None) -> None:
    if says is None:
        transfer(update(changed), holds=TENSORS)
        return
    applied: list[object] = []
    with pytest.raises(EchoMismatch, match=says):
        transfer(update(changed), holds=TENSORS, apply=lambda manifest, tensors: applied.append(tensors))
    assert applied == []


def test_an_update_is_collected_on_the_device_that_was_asked_for() -> None:
    """After its bytes were compared, which a tensor on `meta` does not have."""
    report, applied = transfer(update(), holds=TENSORS, device="meta")
    assert {name: (one.device.type, one.shape) for name, one in applied.items()} == {
        name: ("meta", one.shape) for name, one in TENSORS.items()
    }
    assert report.receipt.checksum == checksum(TENSORS)


def test_shared_memory_that_is_full_is_an_error_that_says_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    through = SharedMemoryCarrier()
    with monkeypatch.context() as patched, pytest.raises(RunFailed, match=r"launcher\.carrier: .*3 MiB.*--shm-size"):
        patched.setattr(os, "posix_fallocate", full)
        through.send(torch.zeros(3 * 2**20, dtype=torch.uint8))
    assert list(Path("/dev/shm").glob(f"unirl-{os.getpid()}-*")) == []
    ticket = through.send(data := torch.arange(5, dtype=torch.uint8))
    assert torch.equal(through.receive(ticket), data)
    through.release(ticket)


def test_an_update_without_tensors_is_an_error() -> None:
    with pytest.raises(RecipeError, match="the lora update of version 4 has no tensors"):
        transfer(update({}, kind="lora"))


class Damaging(InProcessCarrier):
    def receive(self, ticket):
        data = ticket.clone()
        data[0] ^= 1
        return data


class Short(InProcessCarrier):
    def receive(self, ticket):
        return ticket[:-1]


@pytest.mark.parametrize(
    ("through", "says"),
    [
        (Damaging(), "'block.0.weight' of version 4 .* its bytes were corrupted in transit by Damaging"),
        (Short(), "bucket 0 of version 4: got 148 bytes, expected a bucket of 149"),
    ],
)
def test_damage_on_the_way_is_found_and_nothing_is_applied(through, says: str) -> None:
    applied: list[object] = []
    receiver = Receiver(through, apply=lambda manifest, tensors: applied.append(tensors))
    with pytest.raises(EchoMismatch, match=says):
        send(
            update(),
            carrier=through,
            begin=receiver.begin,
            take=receiver.take,
            finish=receiver.finish,
            bucket_bytes=150,
        )
    assert applied == []


def test_an_update_that_was_cut_off_is_not_applied() -> None:
    through = InProcessCarrier()
    receiver = Receiver(through, apply=lambda manifest, tensors: pytest.fail("applied"))
    manifest = plan_transfer(update(), bucket_bytes=40)
    receiver.begin(manifest)
    receiver.take(0, through.send(pack(manifest.buckets[0], TENSORS)))
    with pytest.raises(EchoMismatch, match=r"5 of 6 tensors of version 4 are missing, such as 'block\.0\.zero'"):
        receiver.finish()
    receiver.begin(manifest)
    with pytest.raises(EchoMismatch, match="6 of 6 tensors"):
        receiver.finish()


def test_an_update_can_be_sent_again_after_it_failed_to_apply() -> None:
    applied: list[object] = []

    def apply(manifest, tensors):
        applied.append(tensors)
        if len(applied) == 1:
            raise MemoryError("no room")

    through = InProcessCarrier()
    receiver = Receiver(through, apply=apply)

    def again():
        return send(update(), carrier=through, begin=receiver.begin, take=receiver.take, finish=receiver.finish)

    with pytest.raises(MemoryError):
        again()
    assert again().receipt.checksum == checksum(TENSORS)


def test_a_receiver_that_holds_something_else_is_found_by_its_receipt() -> None:
    through = InProcessCarrier()
    receiver = Receiver(through, apply=lambda manifest, tensors: None)

    def stale():
        import dataclasses

        return dataclasses.replace(receiver.finish(), version=3)

    with pytest.raises(EchoMismatch, match=r"sent version 4 with checksum .*, but the receiver holds version 3"):
        send(update(), carrier=through, begin=receiver.begin, take=receiver.take, finish=stale)


class Other:
    """The receiver in a separate process."""

    def __init__(self, name: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, method: str, *arguments):
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()
        state, value = pickle.load(self._process.stdout)
        assert state == "ok", value
        return value

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(("stop", ()), self._process.stdin)
            self._process.stdin.flush()
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()


@pytest.mark.parametrize(
    "name",
    ["shared-memory", "collective", "disk", "by-value", pytest.param("cuda-ipc", marks=pytest.mark.gpu)],
)
def test_weights_cross_to_another_process_by_every_carrier(name: str, tmp_path: Path) -> None:
    other = Other(name, tmp_path)
    try:
        ours = carrier(name, tmp_path, 0)
        for bucket_bytes in (40, 10_000):
            report = send(
                update(),
                carrier=ours,
                begin=lambda manifest: other("begin", manifest),
                take=lambda number, ticket: other("take", number, ticket),
                finish=lambda: other("finish"),
                bucket_bytes=bucket_bytes,
            )
            assert report.receipt.checksum == checksum(TENSORS)
        assert_same(other("held"), TENSORS)
    finally:
        other.close()
    # Nothing is left behind: no block of shared memory, no bucket file.
    assert list(Path("/dev/shm").glob(f"unirl-{os.getpid()}-*")) == []
    assert list((tmp_path / "buckets").glob("*")) == []


def test_two_processes_read_the_same_bucket_of_shared_memory(tmp_path: Path) -> None:
    others = [Other("shared-memory", tmp_path) for _ in range(2)]
    ours = SharedMemoryCarrier()

    def to_both(method: str, *arguments):
        first, second = (other(method, *arguments) for other in others)
        assert first == second
        return first

    try:
        report = send(
            update(),
            carrier=ours,
            begin=lambda manifest: to_both("begin", manifest),
            take=lambda number, ticket: to_both("take", number, ticket),
            finish=lambda: to_both("finish"),
            bucket_bytes=40,
        )
        assert report.receipt.checksum == checksum(TENSORS)
        for other in others:
            assert_same(other("held"), TENSORS)
    finally:
        for other in others:
            other.close()
    assert list(Path("/dev/shm").glob(f"unirl-{os.getpid()}-*")) == []
