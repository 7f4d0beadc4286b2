"""An engine in a separate process: which syncs leave it with weights that must not be sampled from."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.roles import Model, WeightUpdate
from unirl.core.types.weights import checksum, tensor_digests
from unirl.engine_host.external import ExternalEngine, Hosting
from unirl.engine_host.process import Program

SERVER = """
from unirl.engine_host.frames import Unchanged

def calls():
    return {"version": version, "load": load, "load_weights": load_weights}

def version(asked, tensors):
    return "1.0", {}

def load(asked, tensors):
    return {"weights": [["weight", "float32", [2, 2]], ["bias", "float32", [2]]]}, {}

def load_weights(asked, tensors):
    if asked["checksum"] == "torn":
        raise OSError("the memory is gone")
    if asked["checksum"] == "other":
        raise Unchanged("others came.")
    if asked["checksum"] == "half":
        raise ValueError("others were sent, after the first half was written")
    return None, {}
"""

PARTIAL = """
from unirl.engine_host.received import read_weights

def calls():
    return {"version": version, "load": load, "load_weights": load_weights}

def version(asked, tensors):
    return "1.0", {}

def load(asked, tensors):
    return {"weights": [["weight", "float32", [2, 2]]]}, {}

def load_weights(asked, tensors):
    names = sorted(read_weights(asked["paths"], asked["checksum"]))
    if names != ["weight"]:
        raise ValueError(f"got {names}")
    return None, {}
"""


def program_of(folder: Path, name: str, server: str) -> Program:
    (folder / f"{name}_server.py").write_text(server, encoding="utf-8")
    return Program(
        name=name,
        python=Path(sys.executable),
        serve=f"{name}_server:calls",
        modules=(f"{name}_server",),
        start_timeout_s=60,
    )


def update(model: Model, *, version: int, marked: str = "") -> WeightUpdate:
    """Full weights. marked: what the server takes the checksum for: `torn` and `half` fail half-way, `other` before."""
    tensors = {name: value.detach().clone() for name, value in model.trainable.named_parameters()}
    return WeightUpdate(version=version, tensors=tensors, kind="full", checksum=marked or checksum(tensors))


def test_an_update_that_is_refused_does_not_mend_one_that_failed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    program = program_of(tmp_path, "torn", SERVER)
    hosting = Hosting(title="Torn", program=program, arguments={}, check_version=lambda _: None, overwrites=True)
    model = cast("Model", SimpleNamespace(trainable=torch.nn.Linear(2, 2), spec=SimpleNamespace(name="linear")))
    engine: Any = ExternalEngine(hosting, model=model)
    try:
        engine.load_weights(update(model, version=1))
        with pytest.raises(EchoMismatch, match="others came"):
            engine.load_weights(update(model, version=2, marked="other"))
        engine._refuse_idle()
        with pytest.raises(RunFailed, match="the memory is gone"):
            engine.load_weights(update(model, version=3, marked="torn"))
        for _ in range(2):
            with pytest.raises(RunFailed, match="the sync of version 3 did not complete"):
                engine._refuse_idle()
            with pytest.raises(EchoMismatch, match="others came"):
                engine.load_weights(update(model, version=4, marked="other"))
        engine.load_weights(update(model, version=5))
        engine._refuse_idle()
        assert engine.version == 5
        # What an error is called and what it says decide nothing.
        with pytest.raises(RunFailed, match="ValueError: others were sent"):
            engine.load_weights(update(model, version=6, marked="half"))
        with pytest.raises(RunFailed, match="the sync of version 6 did not complete"):
            engine._refuse_idle()
        engine.load_weights(update(model, version=6))
        with pytest.raises(EchoMismatch, match="the update has no tensors"):
            engine.load_weights(WeightUpdate(version=6, tensors={}, kind="lora", checksum=checksum({})))
    finally:
        engine.close()


def test_weights_that_an_engine_does_not_compute_with_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compares the checksum of what comes, and answers for nothing else."""
    monkeypatch.syspath_prepend(tmp_path)
    program = program_of(tmp_path, "partial", PARTIAL)
    hosting = Hosting(title="Partial", program=program, arguments={}, check_version=lambda _: None)
    model = cast("Model", SimpleNamespace(trainable=torch.nn.Linear(2, 2), spec=SimpleNamespace(name="linear")))
    with pytest.raises(RecipeError, match=r"Partial has no weights with the names of 1 trained weights.*'bias'"):
        ExternalEngine(hosting, model=model)
    engine = ExternalEngine(replace(hosting, leaves_out=lambda name: name == "bias"), model=model)
    try:
        whole = update(model, version=1)
        for sent in (whole, replace(whole, digests=tensor_digests(whole.tensors))):
            receipt = engine.load_weights(sent)
            assert (receipt.version, receipt.checksum, receipt.num_tensors) == (1, whole.checksum, 2)
        with pytest.raises(EchoMismatch, match=r"got tensors with the checksum .*, expected .* They changed"):
            engine.load_weights(replace(whole, tensors={**whole.tensors, "bias": torch.ones(2)}))
        without = {name: value for name, value in whole.tensors.items() if name != "bias"}
        with pytest.raises(EchoMismatch, match="1 tensors were sent, which leaves out 1 that are held, such as 'bias'"):
            engine.load_weights(replace(whole, tensors=without))
    finally:
        engine.close()
