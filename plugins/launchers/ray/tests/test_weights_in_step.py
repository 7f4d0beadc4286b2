"""Tensors that train ranks gather together, one of which sends them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
import torch.distributed as dist
from small_runs import plan
from torch._C._distributed_c10d import HashStore
from unirl.core.errors import EchoMismatch
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.weights import MadeTensors, tensor_digests
from unirl.launchers.ray.actors import Actor, Call, WorkerDied
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.placement import WorkerPlace
from unirl.launchers.ray.ray_worker import RayWorker
from unirl.launchers.ray.session import WeightVersions
from unirl.launchers.ray.traffic import Traffic
from unirl.launchers.ray.weight_ends import Shipped, WeightEnds, _InStep
from unirl.launchers.ray.weight_sync import WeightSync
from unirl.launchers.ray.worker import WorkerFacts
from unirl.transfer.weights.transfer import Receiver, TransferReport
from unirl.transfer.wire import packed, unpacked

NAMES = ("b", "a", "c")


@pytest.fixture
def made() -> tuple[MadeTensors, list[str]]:
    """Three tensors, and the names of those that were made."""
    order: list[str] = []

    def make(name: str) -> torch.Tensor:
        order.append(name)
        return torch.full((2,), float(ord(name)))

    forms = {name: torch.empty(2, device="meta") for name in NAMES}
    return MadeTensors({name: lambda name=name: make(name) for name in NAMES}, forms=forms), order


def test_a_rank_that_keeps_nothing_makes_all_in_the_order_of_their_names(made) -> None:
    tensors, order = made
    with _InStep(tensors):
        pass
    assert order == ["a", "b", "c"]


def test_a_sender_that_fails_makes_the_rest_for_the_ranks_that_wait(made) -> None:
    tensors, order = made
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(EchoMismatch, match="the receiver"), _InStep(tensors) as making:
            assert float(making["a"][0]) == ord("a")
            raise EchoMismatch("the receiver holds something else")
    finally:
        dist.destroy_process_group()
    assert order == ["a", "b", "c"]


def test_a_sender_of_its_own_makes_no_more_after_a_failure(made) -> None:
    tensors, order = made
    with pytest.raises(EchoMismatch), _InStep(tensors) as making:
        making["a"]
        raise EchoMismatch("the receiver holds something else")
    assert order == ["a"]


def test_another_order_is_found_at_once(made) -> None:
    tensors, order = made
    with (
        pytest.raises(AssertionError, match="'b' was asked for, but 'a' is next on all ranks"),
        _InStep(tensors) as making,
    ):
        making["b"]
    assert order == []


def test_a_look_at_shapes_makes_nothing(made) -> None:
    tensors, order = made
    with pytest.raises(AssertionError), _InStep(tensors) as making:
        assert [form.nbytes for form in making.forms.values()] == [8, 8, 8] and len(making) == 3
        raise AssertionError
    assert order == []


@pytest.mark.parametrize("carrier", ["ray", "disk"])
def test_one_gather_serves_several_receivers(made, carrier: str, tmp_path: Path) -> None:
    tensors, order = made
    ends: dict[str, WeightEnds] = {}
    held: dict[str, dict[str, torch.Tensor]] = {"rollout-0": {}, "rollout-1": {}}

    def tell(names: Sequence[str], method: str, data: bytes) -> list[bytes]:
        args, _ = unpacked(data)
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(getattr(ends[name], method.removeprefix("weights.")), *args) for name in names]
            return [packed(call.result()) for call in calls]

    for name in ("train-0", *held):
        own: dict[str, Any] = {"parts": None, "plan": None, "tell": tell, "device": torch.device("cpu"), "host": ""}
        ends[name] = WeightEnds(name, **own)
    for name, holds in held.items():
        through = ends[name]._carrier(carrier, str(tmp_path))
        ends[name]._receivers["main"] = Receiver(through, apply=lambda _, found, holds=holds: holds.update(found))
    digests = tensor_digests(tensors)
    order.clear()
    ends["train-0"]._export = WeightUpdate(version=3, tensors=tensors, kind="full", digests=digests)
    shipped = ends["train-0"].ship("main", list(held), carrier=(carrier, str(tmp_path)), bucket_bytes=8)
    assert order == ["a", "b", "c"]
    assert (shipped.report.receipt.version, shipped.report.size_bytes) == (3, 24)
    for holds in held.values():
        assert {name: float(tensor[0]) for name, tensor in holds.items()} == {name: ord(name) for name in NAMES}
    assert not list(tmp_path.iterdir())


class RecordedCluster:
    """Answers calls of a weight sync, and notes to whom weights are sent and who is replaced."""

    def __init__(self, dying: Sequence[str] = ()) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.replaced: list[str] = []
        self.traffic = Traffic()
        self._dying = list(dying)

    def prepare(self, *_: Any, **named: Any) -> None:
        pass

    def call(self, actors: Sequence[Actor], method: str, *_: Any, **named: Any) -> list[Any]:
        return [None for _ in actors]

    def run(self, calls: Sequence[Call], *, phase: str) -> list[Any]:
        self.sent.append((calls[0].actor.name, calls[0].args[1]))
        if self._dying:
            raise WorkerDied("it died", worker=self._dying.pop(0))
        receipt = WeightReceipt(version=3, checksum="", num_tensors=5, size_bytes=40)
        report = TransferReport(
            receipt=receipt, num_tensors=5, size_bytes=40, num_buckets=1, seconds=2.0, checksum_seconds=0.0
        )
        return [Shipped(report=report, announced_bytes=1), *[None] * (len(calls) - 1)]

    def replace(self, actor: Actor, old: Any, failure: Exception) -> None:
        self.replaced.append(actor.name)


def synced(cluster: RecordedCluster, carrier: str) -> None:
    """One sync of two rollout workers, each on the GPU of a train rank."""
    train, rollout = (
        [
            Actor(
                place=WorkerPlace(name=f"{role}-{n}", role=role, index=n, cpus=1, gpus=0.5, device=n),
                facts=WorkerFacts(host="a", pid=7, device="cuda", gpu=f"GPU-{n}"),
            )
            for n in (0, 1)
        ]
        for role in ("train", "rollout")
    )
    session: Any = SimpleNamespace(
        cluster=cluster,
        train=train,
        rollout=rollout,
        generating=lambda stage: rollout,
        turns=SimpleNamespace(train=lambda: None, rollout=lambda: None),
        version_of=lambda *_: 3,
        versions=WeightVersions(trained={}, sampled={}),
    )
    words = plan("launcher=ray", "launcher.placement=colocate", "launcher.train_ranks=2")
    WeightSync(words, RayConfig(carrier=carrier), session).sync(words.only)
    assert session.versions.sampled == {words.only.name: 3}


@pytest.mark.parametrize("carrier", ["shared-memory", "ray"])
def test_workers_are_sent_the_weights_together(carrier: str) -> None:
    cluster = RecordedCluster()
    synced(cluster, carrier)
    assert cluster.sent == [("train-0", ["rollout-0", "rollout-1"])]
    assert cluster.traffic.take() == {"sync/bytes": 81, "sync/tensors": 10, "sync/seconds": 2.0}


def test_within_a_gpu_each_worker_is_sent_them_by_the_rank_beside_it() -> None:
    cluster = RecordedCluster()
    synced(cluster, "cuda-ipc")
    assert cluster.sent == [("train-0", ["rollout-0"]), ("train-1", ["rollout-1"])]


def test_each_worker_that_dies_in_a_sync_is_replaced_once() -> None:
    both = ["rollout-0", "rollout-1"]
    cluster = RecordedCluster(dying=both)
    synced(cluster, "shared-memory")
    assert (cluster.replaced, cluster.sent) == (both, [("train-0", both)] * 3)
    with pytest.raises(WorkerDied):
        synced(RecordedCluster(dying=["rollout-1", "rollout-1"]), "shared-memory")


def test_large_arguments_for_several_workers_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int] = []
    monkeypatch.setattr(ray, "put", lambda data: put.append(len(data)) or "reference")
    worker = RayWorker("run", "train-0")
    other = SimpleNamespace(call=SimpleNamespace(remote=lambda method, data: data))
    monkeypatch.setattr(worker, "_get", lambda workers, ask: [ask(other) for _ in workers])
    tell = cast("Any", worker)._tell
    large = bytes(2**20)
    assert tell(["rollout-0", "rollout-1"], "weights.take", large) == ["reference"] * 2
    assert tell(["rollout-0"], "weights.take", large) == [large]
    assert tell(["rollout-0", "rollout-1"], "weights.begin", b"small") == [b"small"] * 2
    assert put == [2**20]
