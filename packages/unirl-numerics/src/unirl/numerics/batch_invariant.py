"""Batch-invariant numerics: each row's result has the same bits whatever the other rows in the batch.

A library may choose another order of additions for another number of rows, so that a row is rounded differently in a
larger batch. `docs/explanation/numbers.md` lists what the mode covers and what it does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from unirl.core.errors import PlanRejected

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VARIABLES", "batch_invariant", "first_difference", "is_batch_invariant", "set_variables"]

VARIABLES: Mapping[str, str] = {"MKL_CBWR": "AUTO,STRICT", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables of the mode, read when MKL and cuBLAS are first used.

MKL: Intel, "Reproducibility Conditions", strict CNR mode: products of AVX2 and AVX-512 code whose bits do not depend on
the number of rows or threads.  cuBLAS: NVIDIA, "Results Reproducibility".
"""
KEY = "run.batch_invariant"
SPLITS = ([1, 23], [5, 19], [16, 8], [3, 3, 18])
"""Row counts that 24 rows are cut into by the check: vectors, odd counts, and both sides of 16, where ATen and oneDNN
change their algorithm."""


def set_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables of the mode where they are not set. To be called before torch is loaded.

    Raises PlanRejected when `MKL_CBWR` asks for another mode, or when torch is there and was loaded without it.
    """
    asked = environ.get("MKL_CBWR", "")
    if asked and not asked.upper().endswith(",STRICT"):
        raise PlanRejected(
            f"{KEY}: got true, and the environment has MKL_CBWR={asked}, which is not strict. Unset it, or set "
            f"MKL_CBWR={VARIABLES['MKL_CBWR']}."
        )
    if not asked and "torch" in sys.modules:
        raise PlanRejected(
            f"{KEY}: got true, and torch was loaded before in this process without it; MKL reads its settings once. "
            f"Set MKL_CBWR={VARIABLES['MKL_CBWR']} in the environment and start again."
        )
    for name, value in VARIABLES.items():
        environ.setdefault(name, value)


@contextmanager
def batch_invariant(*, on_cuda: bool | None = None) -> Generator[None]:
    """The mode in this process: loads torch, selects what it has for it, and checks it by computing.

    on_cuda: whether this process computes on CUDA as well; None is wherever there is a device. On leaving, torch's
    flags are as they were; the variables stay.
    Raises PlanRejected, with the reason, where the platform has no such mode.
    """
    set_variables(os.environ)
    import torch

    if not torch.backends.mkl.is_available():
        raise PlanRejected(
            f"{KEY}: got true, and torch {torch.__version__} is built without MKL here, whose strict mode it needs. "
            "Leave it out, or use a torch for x86-64 with MKL."
        )
    cuda = torch.cuda.is_available() if on_cuda is None else on_cuda
    backends: Any = torch.backends
    with ExitStack() as stack:
        # Both choose another algorithm for another number of rows: ATen takes NNPACK from 16 images on, oneDNN blocks
        # by the batch. Without them ATen unfolds image by image and multiplies by MKL.
        stack.enter_context(_flag(backends.mkldnn.set_flags, False))
        stack.enter_context(_flag(backends.nnpack.set_flags, False))
        if cuda:
            stack.enter_context(_deterministic_cuda())
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            problem = first_difference(device)
            if problem:
                raise PlanRejected(
                    f"{KEY}: got true, and it does not hold on {_name(device)}: {problem}. {_advice(device)}"
                )
        yield


def is_batch_invariant() -> bool:
    """Whether this process is within `batch_invariant()`: its variable is set and torch's flags are as it sets them."""
    torch: Any = sys.modules.get("torch")
    strict = os.environ.get("MKL_CBWR", "").upper().endswith(",STRICT")
    return strict and torch is not None and not torch.backends.mkldnn.enabled


def first_difference(device: str) -> str:
    """Computes small cases of what models are made of, whole and in parts; names the first that differs, or nothing."""
    import torch
    from torch.nn import functional as F

    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(device)

    wide, tall, kernel, patch = random(1536, 384), random(64, 256), random(32, 16, 3, 3), random(64, 16, 2, 2)

    def attention(x: Any) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in x.chunk(3, dim=-1))
        return F.scaled_dot_product_attention(query, key, value)

    cases: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
        "a product of 384 by 1536": (lambda x: F.linear(x, wide), random(24, 384)),
        "a product of 256 by 64": (lambda x: F.linear(x, tall), random(24, 256)),
        "a product over sequences": (lambda x: F.linear(x, tall), random(24, 17, 256)),
        "attention": (attention, random(24, 33, 384)),
        "a 3x3 convolution": (lambda x: F.conv2d(x, kernel, padding=1), random(24, 16, 8, 8)),
        "a patch embedding": (lambda x: F.conv2d(x, patch, stride=2), random(24, 16, 8, 8)),
    }
    for name, (compute, rows) in cases.items():
        whole = compute(rows)
        for sizes in SPLITS:
            parts = torch.cat([compute(part.clone()) for part in rows.split(sizes)])
            if not torch.equal(whole, parts):
                largest = float((whole - parts).abs().max() / whole.abs().max())
                return f"{name} of 24 rows differs from that of {' + '.join(map(str, sizes))} rows by {largest:.1e}"
    return ""


@contextmanager
def _flag(set_flags: Callable[[bool], tuple[Any, ...]], value: bool) -> Generator[None]:
    before = set_flags(value)[0]
    try:
        yield
    finally:
        set_flags(before)


@contextmanager
def _deterministic_cuda() -> Generator[None]:
    """Torch's options on CUDA: deterministic algorithms, full fp32 and no sums in 16 bits."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    flags: list[tuple[Any, str]] = [
        # On by default for convolutions alone.
        (torch.backends.cudnn, "allow_tf32"),
        (matmul, "allow_tf32"),
        (matmul, "allow_fp16_reduced_precision_reduction"),
        (matmul, "allow_bf16_reduced_precision_reduction"),
    ]
    before = [getattr(owner, name) for owner, name in flags]
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    for owner, name in flags:
        setattr(owner, name, False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


def _name(device: str) -> str:
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    from .cpu import describe_cpu

    return str(describe_cpu(with_torch=True))


def _advice(device: str) -> str:
    if device == "cuda":
        return (
            "Torch has no batch-invariant products on this GPU. Leave it out; engines that have the mode take it "
            "alone, by engine.batch_invariant=true."
        )
    return (
        "MKL's strict mode needs an Intel CPU with AVX2 or AVX-512, not masked by MKL_ENABLE_INSTRUCTIONS; on other "
        "CPUs MKL ignores it. Leave it out."
    )
