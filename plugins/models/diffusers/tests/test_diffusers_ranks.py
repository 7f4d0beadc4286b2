"""Two ranks that build a pipeline lazily and shard it by FSDP2 over gloo, against one process that loads it whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_ranks import computed, launched
from pipeline_inputs import FP32, SMALL, words_of
from test_diffusers_families import WARNINGS
from tiny_pipelines.families import FAMILIES
from torch import Tensor

pytestmark = [*WARNINGS, pytest.mark.slow, pytest.mark.nightly]
NUM_LAUNCHES = 3
CHUNKS = [list(FAMILIES)[start::NUM_LAUNCHES] for start in range(NUM_LAUNCHES)]
FULL = [*FP32, "backend.trains=full", "backend.activation_checkpointing=true"]
SAME = 2e-5
"""Fraction of the largest element. Rows in batches of other sizes and gradients of two ranks added: fp32 sums in another
order, 1e-7 in each of some ten layers and back. A row or a rank too many, or a factor of two, gives about 1."""


def case_of(name: str, folder: Path, *words: str, **settings: Any) -> dict[str, Any]:
    (folder.parent / "prompts.txt").write_text("a ring\n")
    path = [f"model.path={folder}", f"data.train={folder.parent / 'prompts.txt'}"]
    return {"name": name, "words": [*SMALL, *words, *words_of(name), *path], **settings}


def gap(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    return float((result - expected).abs().nan_to_num(nan=torch.inf).max())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", CHUNKS, ids=[chunk[0] for chunk in CHUNKS])
def test_ranks_that_built_a_pipeline_lazily_compute_what_one_process_does(
    names: list[str], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Velocities, loss, the gradient of every weight, recomputed, and the weights that are exported. Where rows are split
    the second rank needs fewer forwards than the first."""
    cases = [case_of(name, folder(name), *FULL) for name in names]
    for case, ranks in zip(cases, launched(tmp_path, cases), strict=True):
        name, one = case["name"], computed(case)
        assert all(rank["is_sharded"] for rank in ranks) and not one["is_sharded"]
        velocity = torch.cat([rank["velocity"] for rank in ranks])
        assert gap(velocity, one["velocity"]) <= SAME * float(one["velocity"].abs().max()), name
        loss = sum(float(rank["loss"]) for rank in ranks) / len(ranks)
        assert loss == pytest.approx(float(one["loss"]), rel=SAME), name
        largest = max(float(grad.abs().max()) for grad in one["grads"].values())
        assert largest > 0
        for rank in ranks:
            assert rank["grads"].keys() == one["grads"].keys()
            for key, grad in one["grads"].items():
                assert gap(rank["grads"][key], grad) <= SAME * largest, (name, key)
            assert rank["export"].keys() == one["export"].keys()
            assert all(torch.equal(rank["export"][key], value) for key, value in one["export"].items()), name


def test_a_velocity_that_is_off_is_refused_with_the_number_when_it_is_built_lazily(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its timestep is 0.9 of the pipeline's. Right, it is accepted in float32 and with the weights gathered in bfloat16."""
    name = "StableDiffusion3Pipeline"
    bf16 = ["model.dtype=float32", "backend.mixed_precision=bf16"]
    kinds = [(FULL, True), (FULL, False), (bf16, False)]
    wrong, right, rounded = launched(
        tmp_path, [case_of(name, folder(name), *words, is_wrong=is_wrong) for words, is_wrong in kinds]
    )
    for rank in wrong:
        assert re.search(
            r"three steps of its own run and its velocities differ by 0\.\d+ of the largest", rank["refusal"]
        )
    for rank, expected in zip(rounded, right, strict=True):
        error = (rank["velocity"] - expected["velocity"]).square().mean() / expected["velocity"].square().mean()
        # Activations of 8 bits, 0.4% each, in some twenty products one after another; RMS, for extremes add up.
        assert 0 < float(error.sqrt()) <= 0.1
