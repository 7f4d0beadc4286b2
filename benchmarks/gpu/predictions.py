"""Predicted measurements of each part on an H100 and an H200, by formula, written before the first run on either.

    python benchmarks/gpu/predictions.py        prints the table of the README

Rates of the cards are from NVIDIA's data sheets (SXM): 989 TFLOP/s dense bf16, 494 TF32, 67 fp32; HBM of 3.35 and
4.8 TB/s; PCIe 5.0 x16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from measure import FORWARD_FLOP

__all__ = ["CARDS", "Card", "Prediction", "card_of", "predictions"]


@dataclass(frozen=True, kw_only=True)
class Card:
    memory_tb_per_s: float
    bf16_peak: float = 989.0
    """TFLOP/s, like those below."""
    tf32_peak: float = 494.5
    fp32_peak: float = 67.0
    forward: float = 400.0
    """Of a diffusion transformer in bf16, eager: 40 % of the peak, as `unirl plan` assumes."""
    decode: float = 60.0
    """Of a VAE in fp32: convolutions in TF32, group norms bound by memory."""
    pcie_gb_per_s: float = 63.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    part: str
    measure: str
    """A key of the part's measures; its end is the unit."""
    formula: str
    value: float
    low: float
    """What is measured should be between `low` and `high`, in the same unit."""
    high: float


CARDS: Mapping[str, Card] = {"H100": Card(memory_tb_per_s=3.35), "H200": Card(memory_tb_per_s=4.8)}
SD3, WAN, TOKEN = (FORWARD_FLOP[name] / 1e12 for name in ("sd35-medium", "wan21-1.3b", "qwen3-1.7b"))
"""TFLOP of a forward of one image, one video, one token."""
SD3_DECODE, WAN_DECODE = 2.51, 112.8
"""TFLOP that the VAE decodes an image of 512 px, and a video of 480 x 832 x 33, with; counted."""
SD3_BLOCKS = 4.45
"""GB of the blocks in bf16, by `unirl plan`."""
TOKENS, MISMATCH_BF16 = 16 * 8 * 256, 3e-4
SAME = "old log-probs come from the same operations"


def card_of(device: str) -> str:
    """`H100` or `H200` by the name of a device; empty for others, which nothing is predicted for."""
    return next((name for name in CARDS if name in device), "")


def predictions(card: Card) -> list[Prediction]:
    return [*_ceilings(card), *_quickstarts(), *_sd3(card), *_wan(card), *_text(card), *_ray()]


def _near(part: str, measure: str, formula: str, value: float, low: float = 0.75, high: float = 1.35) -> Prediction:
    """low, high: as fractions of the value."""
    return Prediction(part=part, measure=measure, formula=formula, value=value, low=value * low, high=value * high)


def _between(part: str, measure: str, formula: str, value: float, low: float, high: float) -> Prediction:
    return Prediction(part=part, measure=measure, formula=formula, value=value, low=low, high=high)


def _ceilings(card: Card) -> Iterator[Prediction]:
    part, within = "ceilings", 0.85 * 1000 * card.memory_tb_per_s
    yield _near(part, "gemm_bf16_tflops", "0.70 x peak: power holds the clock down", 0.7 * card.bf16_peak, 0.8, 1.2)
    yield _near(part, "gemm_tf32_tflops", "0.70 x peak", 0.7 * card.tf32_peak, 0.8, 1.25)
    yield _near(part, "gemm_fp32_tflops", "0.75 x peak", 0.75 * card.fp32_peak, 0.8, 1.3)
    heads = "x peak: heads of 64 halve the work per load"
    yield _near(part, "attention_sd3_default_forward_tflops", f"0.35 {heads}", 0.35 * card.bf16_peak, 0.6, 1.6)
    yield _near(part, "attention_wan_default_forward_tflops", "0.50 x peak", 0.5 * card.bf16_peak, 0.7, 1.4)
    yield _near(part, "attention_wan_default_both_tflops", "0.40 x peak", 0.4 * card.bf16_peak, 0.6, 1.4)
    yield _near(part, "copy_to_device_pinned_gb_per_s", "0.85 x PCIe", 0.85 * card.pcie_gb_per_s, 0.4, 1.2)
    yield _near(part, "copy_to_host_pinned_gb_per_s", "0.85 x PCIe", 0.85 * card.pcie_gb_per_s, 0.4, 1.2)
    yield _near(part, "copy_to_device_pageable_gb_per_s", "one core copies to a pinned buffer", 10, 0.3, 3.0)
    yield _near(part, "copy_to_host_pageable_gb_per_s", "the same, and pages are written", 6, 0.3, 3.0)
    yield _near(part, "copy_within_device_gb_per_s", "0.85 x HBM", within, 0.8, 1.15)
    passes = "0.85 x HBM / 9: each word of 4 bytes is widened, multiplied and summed, 36 bytes of traffic"
    yield _near(part, "checksum_gb_per_s", passes, within / 9, 0.3, 2.0)
    yield _between(part, "reserved_after_free_gib", "the allocator keeps all 20", 20, 20, 20.1)
    yield _between(part, "reserved_after_empty_cache_gib", "all but what is in use", 0, 0, 1.0)


def _quickstarts() -> Iterator[Prediction]:
    for part in ("quickstart-fp32", "quickstart-bf16", "quickstart-text"):
        yield _between(part, "ratio_max_dev_first", SAME, 0, 0, 0)
    fp32 = "rounding of values of order 1 in other batches"
    yield _between("quickstart-fp32", "logp_mismatch_max", fp32, 2e-6, 0, 1e-5)
    yield _between("quickstart-text", "logp_mismatch_max", "as measured on a CPU: 3e-5", 3e-5, 0, 1e-2)
    yield _between("quickstart-bf16", "logp_mismatch_max", "2^-9 of the velocity, over sqrt(256)", 1e-3, 0, 0.1)


def _sd3(card: Card) -> Iterator[Prediction]:
    decode = 32 * SD3_DECODE / card.decode
    generate, step = 32 * 10 * SD3 / card.forward + decode, 32 * 3 * SD3 / card.forward
    bare, work = generate + 2 * step, 32 * 16 * SD3
    # One micro-batch of 8 images: activations of one scored step at a time.
    weights, activations = 2 * 2.243e9 / 2**30, 16.4
    formula = "32 x (10 + 3 x 2) x F / 400 + 32 x 2.51 / 60"
    # Two updates: the first gives its own old log-probs.
    ours = "32 x (10 + 3 x 2.5) x F / 400 + 32 x 2.51 / 60"
    yield from _round("sd3-bare", formula, bare, rows=32, tflop=work)
    yield _near("sd3-bare", "generate_s", "32 x 10 x F / 400 + 32 x 2.51 / 60", generate)
    yield _near("sd3-bare", "train_s", "32 x 3 x 2 x F / 400", 2 * step)
    yield from _round("sd3-flow-grpo", f"1.15 x ({formula})", 1.15 * bare, rows=32, tflop=work)
    yield from _round("sd3-fsdp", f"1.10 x ({ours})", 1.1 * (bare + step / 2), rows=32, tflop=32 * 17.5 * SD3, high=1.5)
    yield from _round("sd3-autocast", f"1.00 x ({ours})", bare + step / 2, rows=32, tflop=32 * 17.5 * SD3, high=1.5)
    # 2 batches of 10 steps; 2 micro-batches of 3 steps forward, and 4 of 3 forward and backward.
    bus = 0.85 * card.pcie_gb_per_s
    copied = max(20 * SD3_BLOCKS / bus, generate - decode) + 6 * max(SD3_BLOCKS / bus, 8 * SD3 / card.forward)
    copied += 24 * max(SD3_BLOCKS / bus, 8 * SD3 / card.forward)
    formula = "32 x 10 x F / 400 + 32 x 2.51 / 60 + 30 x 4.45 / (0.85 x 63): copies are hidden while generating"
    yield from _round("sd3-offload", formula, copied + decode, rows=32, tflop=32 * 17.5 * SD3, high=1.5)
    engine = 1.1 * (bare - decode / 2)
    yield from _round("sd3-engine", "1.10 x (bare - half of the decoding)", engine, rows=32, tflop=work, high=1.5)
    for part in ("sd3-bare", "sd3-flow-grpo"):
        yield _near(part, "peak_gib", "2 x 2.24e9 + 16.4 GiB: one step at a time", weights + activations, 0.7)
    for part in ("sd3-fsdp", "sd3-autocast", "sd3-engine"):
        yield _near(part, "peak_gib", "`unirl plan`: 22.2, of which activations 16.4", 22.2, 0.6, 1.3)
    yield _near("sd3-offload", "peak_gib", "`unirl plan`: 22.2 - 4.1 of blocks + 0.4 of two", 18.5, 0.6, 1.3)
    for part in ("sd3-bare", "sd3-flow-grpo", "sd3-fsdp", "sd3-autocast", "sd3-offload", "sd3-engine"):
        why = "bf16 of batches of 16 and 8, mean over 65,536 elements"
        yield _between(part, "logp_mismatch_max", why, MISMATCH_BF16, 0, 1e-2)
    for part in ("sd3-fsdp", "sd3-autocast", "sd3-offload"):
        yield _between(part, "ratio_max_dev_first", SAME, 0, 0, 0)


def _wan(card: Card) -> Iterator[Prediction]:
    seconds = 4 * (16 + 18) * WAN / card.forward + 4 * WAN_DECODE / card.decode
    formula = "4 x (8 x 2 + 2 x 2 x 4.5) x F / 400 + 4 x 112.8 / 60"
    yield from _round("wan", formula, seconds, rows=4, tflop=4 * 34 * WAN, low=0.6, high=1.6)
    yield _near("wan", "peak_gib", "`unirl plan`: 10.6, and 10 to decode a video in fp32", 20.6, 0.5, 1.6)
    yield _between("wan", "logp_mismatch_max", "bf16 of batches of 4 and 2", MISMATCH_BF16, 0, 1e-2)
    yield _between("wan", "ratio_max_dev_first", SAME, 0, 0, 0)


def _text(card: Card) -> Iterator[Prediction]:
    generate = 256 * 0.030
    for part, forwards in (("text", 3.5), ("text-trl", 4)):
        train, formula = 1.3 * TOKENS * TOKEN * forwards / card.forward, f"1.3 x 32,768 x {forwards:g} x F / 400"
        work, both = TOKENS * TOKEN * (1 + forwards), f"256 x 30 ms of launches + {formula}"
        yield from _round(part, both, generate + train, rows=TOKENS, tflop=work, low=0.5, high=2.0)
        yield _near(part, "train_s", formula, train, 0.6, 2.5)
        yield _near(part, "peak_gib", "16 x 1.72e9 + 2,048 x 13.4 MiB, by `unirl plan`", 52.4, 0.4, 1.25)
    yield _between("text", "logp_mismatch_max", "bf16: logits of order 1 are 2^-8 apart", 0.02, 0, 0.5)
    yield _between("text", "ratio_max_dev_first", SAME, 0, 0, 0)


def _ray() -> Iterator[Prediction]:
    for part in ("ray-ipc", "ray-shared-memory"):
        yield _between(part, "logp_mismatch_max", "fp32, the weights are the same bits", 2e-6, 0, 1e-5)
        yield _between(part, "ratio_max_dev_first", SAME, 0, 0, 0)
    why = "rank 22.2 + two contexts of 0.5; more if its memory does not come back for the worker"
    yield _near("ray-sd3-colocate", "card_peak_gib", why, 23.2, 0.6, 1.4)


def _round(
    part: str, formula: str, seconds: float, *, rows: int, tflop: float, low: float = 0.75, high: float = 1.35
) -> Iterator[Prediction]:
    """tflop: of all forwards and backwards of a round; decoding is in its seconds alone."""
    yield _near(part, "round_s", formula, seconds, low, high)
    yield _near(part, "rows_per_s", f"{rows:,} / round_s", rows / seconds, 1 / high, 1 / low)
    yield _near(part, "tflops", f"{tflop:,.0f} TFLOP / round_s", tflop / seconds, 1 / high, 1 / low)


def table() -> Iterator[str]:
    """Rows of Markdown: both cards beside each other. F is a forward's TFLOP."""
    yield "| part | measure | formula | H100 | H200 | range |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one, other in zip(*(predictions(CARDS[name]) for name in ("H100", "H200")), strict=True):
        bounds = (
            f"{one.low / one.value:.2f} to {one.high / one.value:.2f} of it" if one.low else f"at most {one.high:g}"
        )
        yield f"| {one.part} | {one.measure} | {one.formula} | {one.value:.3g} | {other.value:.3g} | {bounds} |"


if __name__ == "__main__":
    print("\n".join(table()))
