"""Batch-invariant numerics: when they are refused, and that rows then do not depend on their batch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unirl.core.errors import PlanRejected
from unirl.numerics import cpu
from unirl.numerics.batch_invariant import batch_invariant, first_difference, is_batch_invariant, set_variables
from unirl.numerics.cpu import describe_cpu

STRICT = "AUTO,STRICT"


def test_the_variables_are_set_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environ: dict[str, str] = {}
    set_variables(environ)
    assert environ["MKL_CBWR"] == STRICT
    set_variables(kept := {"MKL_CBWR": "AVX2,STRICT"})
    assert kept["MKL_CBWR"] == "AVX2,STRICT"


def test_a_torch_that_was_loaded_without_the_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(PlanRejected, match=f"torch was loaded before in this process .* Set MKL_CBWR={STRICT}"):
        set_variables({})
    set_variables({"MKL_CBWR": STRICT})


def test_another_mode_of_mkl_is_refused() -> None:
    with pytest.raises(PlanRejected, match="MKL_CBWR=COMPATIBLE, which is not strict"):
        set_variables({"MKL_CBWR": "COMPATIBLE"})


def test_a_torch_without_mkl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("MKL_CBWR", STRICT)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with pytest.raises(PlanRejected, match="built without MKL"), batch_invariant(on_cuda=False):
        pass


@pytest.mark.batch_invariant
def test_rows_do_not_depend_on_their_batch() -> None:
    assert is_batch_invariant()
    assert first_difference("cpu") == ""


def test_on_cuda_the_mode_turns_tf32_off_for_convolutions_as_well_and_back_on() -> None:
    import torch
    from unirl.numerics.batch_invariant import _deterministic_cuda

    def flags() -> list[bool]:
        matmul = torch.backends.cuda.matmul
        return [
            torch.backends.cudnn.allow_tf32,
            matmul.allow_tf32,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ]

    before = flags()
    assert before[0], "torch allows it for convolutions by default"
    with _deterministic_cuda():
        assert flags() == [False] * 4
        assert torch.are_deterministic_algorithms_enabled()
    assert flags() == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_on_a_gpu_rows_do_not_depend_on_their_batch_or_the_mode_is_refused(no_batch_invariance: str) -> None:
    import torch

    if no_batch_invariance:
        pytest.skip(f"not run: {no_batch_invariance}")
    from unirl.numerics.batch_invariant import _deterministic_cuda

    # Torch has no batch-invariant products of its own, so either may be the case.
    with _deterministic_cuda():
        difference = first_difference("cuda")
    if difference:
        said = f"does not hold on {re.escape(torch.cuda.get_device_name())}: {re.escape(difference)}"
        with pytest.raises(PlanRejected, match=said), batch_invariant(on_cuda=True):
            pass
    else:
        with batch_invariant(on_cuda=True):
            assert first_difference("cuda") == ""


def test_the_flags_are_as_before_after_the_mode(no_batch_invariance: str) -> None:
    import torch

    if no_batch_invariance:
        pytest.skip(f"not run: {no_batch_invariance}")
    before = torch.backends.mkldnn.enabled
    with batch_invariant(on_cuda=False):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before
    assert not is_batch_invariant() or not before


ASK = """
import json, sys
from unirl.numerics import cpu
from unirl.numerics.batch_invariant import batch_invariant, first_difference
from unirl.core.errors import PlanRejected

refusal = ""
try:
    with batch_invariant(on_cuda=False):
        inside = first_difference("cpu")
except PlanRejected as error:
    refusal, inside = str(error), ""
print(json.dumps([refusal, inside]))
"""


@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
def test_the_mode_holds_or_is_refused_with_every_instruction_set(instructions: str) -> None:
    """Code without AVX2 has no strict mode, and code that happens to be invariant needs none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    run = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**environment, "MKL_ENABLE_INSTRUCTIONS": instructions, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    refusal, inside = json.loads(run.stdout.splitlines()[-1])
    assert inside == ""
    if refusal:
        assert "rows differs from that of" in refusal or "built without MKL" in refusal


def test_the_cpu_is_described_by_its_model_and_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Acme 9000\ncpu family\t: 6\nmodel\t\t: 85\nstepping\t: 7\n"
        "flags\t\t: fpu sse4_2 avx2 avx512f amx_tile\n\nprocessor\t: 1\nmodel name\t: other\n"
    )
    monkeypatch.setattr(cpu, "CPU_INFO", info)
    for name in cpu.INSTRUCTION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    result = describe_cpu(with_torch=False)
    assert str(result) == "Acme 9000 6/85/7 (avx2, avx512f, amx_tile), ATEN_CPU_CAPABILITY=avx2"
    assert describe_cpu(with_torch=True).torch == torch.backends.cpu.get_cpu_capability()


def test_a_system_without_cpuinfo_still_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "absent")
    result: Any = describe_cpu(with_torch=False)
    assert result.model and result.instructions == ()
