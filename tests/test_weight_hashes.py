"""Cost of the checksums of a weight update, from the ranks that train to an external engine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import Fsdp2Config
from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser
from unirl.core.errors import EchoMismatch
from unirl.core.roles import WeightUpdate
from unirl.core.specs.config import TrainConfig
from unirl.core.types import weights as core_weights
from unirl.core.types.weights import tensor_digests
from unirl.engine_host import received
from unirl.engine_host.received import read_weights
from unirl.engine_host.transfer import files_of
from unirl.transfer.weights import transfer
from unirl.transfer.weights.carriers import ByValueCarrier
from unirl.transfer.weights.manifest import Manifest


def test_every_process_on_the_way_of_an_update_hashes_each_tensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three: the rank that exports, the rollout worker that receives, and the engine's program behind it."""
    counts: dict[str, Counter[str]] = {"rank": Counter(), "worker": Counter(), "engine": Counter()}
    at = "rank"
    real = core_weights.tensor_digest

    def counted(name: str, tensor: Tensor) -> str:
        counts[at][name] += 1
        return real(name, tensor)

    monkeypatch.setattr(core_weights, "tensor_digest", counted)
    monkeypatch.setattr(transfer, "tensor_digest", counted)
    monkeypatch.setattr(received, "tensor_digest", counted)

    held: dict[str, Tensor] = {}

    def apply(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        nonlocal at
        update = WeightUpdate(version=1, tensors=tensors, kind="full", checksum=manifest.checksum)
        with files_of(update, folder=str(tmp_path)) as paths:
            at = "engine"
            held.update(read_weights(paths, update.checksum))
            at = "worker"

    backend = build(Fsdp2Config(trains="full"), model=TinyDenoiser(), train=TrainConfig(), steps=1)
    update = backend.export_weights(kind="full")
    receiver = transfer.Receiver(ByValueCarrier(), apply=apply)

    def take(number: int, ticket: object) -> None:
        nonlocal at
        at = "worker"
        receiver.take(number, ticket)
        at = "rank"

    report = transfer.send(
        update, carrier=ByValueCarrier(), begin=receiver.begin, take=take, finish=receiver.finish, bucket_bytes=256
    )
    assert report.num_buckets > 1
    assert report.receipt.checksum == update.checksum
    assert all(torch.equal(held[name], tensor) for name, tensor in update.tensors.items())
    once = dict.fromkeys(update.tensors, 1)
    assert counts == {"rank": once, "worker": once, "engine": once}


def test_a_digest_of_other_bytes_than_those_that_are_sent_is_caught() -> None:
    backend = build(Fsdp2Config(trains="full"), model=TinyDenoiser(), train=TrainConfig(), steps=1)
    update = backend.export_weights(kind="full")
    tensors = dict(update.tensors)
    update = dataclasses.replace(update, tensors=tensors, digests=tensor_digests(tensors))
    name = next(iter(tensors))
    tensors[name].add_(1.0)
    receiver = transfer.Receiver(ByValueCarrier(), apply=lambda manifest, tensors: pytest.fail("it was applied"))
    with pytest.raises(EchoMismatch, match=f"{name!r} of version 0 was sent with checksum"):
        transfer.send(
            update, carrier=ByValueCarrier(), begin=receiver.begin, take=receiver.take, finish=receiver.finish
        )
