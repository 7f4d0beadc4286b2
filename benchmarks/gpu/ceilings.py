"""Upper bounds of the card and the host: matrix products, attention kernels, copies, checksums, and freed memory.

    python benchmarks/gpu/ceilings.py --out FILE

Each number is the mean of several repetitions after a warm-up. On a CPU the same code runs on small shapes, as a trial.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from measure import DEVICE, now, write_measures
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from unirl.core.types.weights import fingerprint

SHAPES = {"sd3": (8, 24, 1357, 64), "wan": (1, 12, 14040, 128)}
"""[rows, heads, tokens, width of a head]: SD3.5 Medium at 512 px, and Wan 2.1 1.3B with 33 frames of 480 x 832."""
BACKENDS: Mapping[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ON_CUDA = DEVICE == "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measures: dict[str, float] = {}
    for part in (products, attentions, copies, checksums, freed_memory):
        measures.update(part())
    write_measures(options.out, measures)


def seconds(call: Callable[[], object], *, repetitions: int) -> float:
    """Mean seconds of a call, after two that are not counted."""
    for _ in range(2):
        call()
    began = now()
    for _ in range(repetitions):
        call()
    return (now() - began) / repetitions


def products() -> Iterator[tuple[str, float]]:
    """TFLOP/s of a square matrix product, 2 m^3 operations."""
    size = 8192 if ON_CUDA else 256
    left, right = (torch.randn(size, size, device=DEVICE) for _ in range(2))
    pairs = {"gemm_bf16_tflops": (left.bfloat16(), right.bfloat16()), "gemm_fp32_tflops": (left, right)}
    for name, (one, other) in pairs.items():
        yield name, 2 * size**3 / seconds(lambda one=one, other=other: one @ other, repetitions=10) / 1e12
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield "gemm_tf32_tflops", 2 * size**3 / seconds(lambda: left @ right, repetitions=10) / 1e12
    torch.set_float32_matmul_precision(before)


def attentions() -> Iterator[tuple[str, float]]:
    """TFLOP/s in bf16: 4 rows heads tokens^2 width forward; a forward with its backward counts 3.5 times that.

    Source of the count: Dao, FlashAttention-2, arXiv 2307.08691, section 4.1. Kernels that do not take the shape are
    left out.
    """
    for shape, (rows, heads, tokens, width) in SHAPES.items():
        sizes = (rows, heads, tokens, width) if ON_CUDA else (1, 2, 64, width)
        query, key, value = (
            torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        flop = 4 * sizes[0] * sizes[1] * sizes[2] ** 2 * sizes[3]
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend) if backend is not None else nullcontext(), warnings.catch_warnings():
                # Why a kernel does not take the shape is said in warnings.
                warnings.simplefilter("ignore", UserWarning)
                try:
                    taken = attention_seconds(query, key, value)
                except RuntimeError as error:
                    print(f"attention {name} for {shape}: not run: {str(error)[:80]}")
                    continue
            for what, duration, factor in zip(("forward", "both"), taken, (1.0, 3.5), strict=True):
                yield f"attention_{shape}_{name}_{what}_tflops", factor * flop / duration / 1e12


def attention_seconds(query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Seconds of a forward, and of a forward with its backward."""
    with torch.no_grad():
        forward = seconds(lambda: attention(query, key, value), repetitions=5)
    return forward, seconds(lambda: attention(query, key, value).sum().backward(), repetitions=5)


def copies() -> Iterator[tuple[str, float]]:
    """GB/s between host and device, from pageable and from pinned memory, and within the device (read and write)."""
    size = 2**28 if ON_CUDA else 2**20
    # Written to once: pages that never were are not copied from memory.
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=ON_CUDA)
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    calls: Mapping[str, Callable[[], object]] = {
        "to_device_pageable": lambda: there.copy_(pageable),
        "to_device_pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to_host_pageable": lambda: pageable.copy_(there),
        "to_host_pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    for name, call in calls.items():
        yield f"copy_{name}_gb_per_s", size / seconds(call, repetitions=5) / 1e9
    yield "copy_within_device_gb_per_s", 2 * size / seconds(there.clone, repetitions=5) / 1e9


def checksums() -> Iterator[tuple[str, float]]:
    """GB/s of the checksum that every weight gets on both sides of a transfer, where it lies."""
    size = 2**28 if ON_CUDA else 2**20
    data = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    yield "checksum_gb_per_s", size / seconds(lambda: fingerprint(data), repetitions=5) / 1e9


def freed_memory() -> Iterator[tuple[str, float]]:
    """GiB that the allocator keeps from other processes after a tensor of 20 GiB is freed, and after `empty_cache`."""
    if not ON_CUDA:
        return
    large = torch.empty(20 * 2**30, dtype=torch.uint8, device=DEVICE)
    del large
    yield "reserved_after_free_gib", torch.cuda.memory_reserved() / 2**30
    torch.cuda.empty_cache()
    yield "reserved_after_empty_cache_gib", torch.cuda.memory_reserved() / 2**30


if __name__ == "__main__":
    main()
