"""The device of a part, its clock and peaks, and the file of numbers that each part leaves."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

__all__ = ["DEVICE", "FORWARD_FLOP", "device_name", "now", "peaks_gib", "throughput", "typical_round", "write_measures"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD_FLOP: Mapping[str, float] = {
    "sd35-medium": 2_442_642_604_032,
    "wan21-1.3b": 72_929_788_821_504,
    # Two for each weight that multiplies: 28 layers of 50,331,648 and the output projection of 151,936 x 2,048.
    "qwen3-1.7b": 2 * (28 * 50_331_648 + 151_936 * 2_048),
}
"""Floating-point operations of a forward of one row at the size that the kit runs, by torch's FlopCounterMode: 512 x
512 pixels with 333 text tokens, 33 frames of 480 x 832 with 512 text tokens; of the language model, of one token,
without attention."""


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def now() -> float:
    """Seconds, after everything that was started on the device is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peaks_gib() -> dict[str, float]:
    """Most memory of tensors, and of torch's allocator, in GiB; none on a CPU."""
    if DEVICE == "cpu":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": allocated / 2**30, "reserved_gib": reserved / 2**30}


def typical_round(rounds: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The median round by `round_s`, without the first, which compiles kernels and fills the allocator."""
    kept = sorted(rounds[1:] or rounds, key=lambda one: one["round_s"])
    return kept[(len(kept) - 1) // 2]


def throughput(
    rounds: Sequence[Mapping[str, float]], *, rows: int, flop: float, generated: float, trained: float
) -> dict[str, float]:
    """Seconds, rows a second and TFLOP/s of a typical round; its spread is (slowest - fastest) / median.

    rows: samples of a round, or its tokens.  flop: of a forward of one row, 0 leaves TFLOP/s out.  generated, trained:
    forwards of each row in the two phases, a backward counted as the forwards that cost the same.
    """
    typical = typical_round(rounds)
    seconds = [one["round_s"] for one in rounds[1:] or rounds]
    result = {**typical, "rows_per_s": rows / typical["round_s"]}
    result["round_spread"] = (max(seconds) - min(seconds)) / statistics.median(seconds)
    if flop:
        work = rows * flop / 1e12
        result["generate_tflops"] = work * generated / typical["generate_s"]
        result["train_tflops"] = work * trained / typical["train_s"]
        result["tflops"] = work * (generated + trained) / typical["round_s"]
    return result


def write_measures(
    path: Path, measures: Mapping[str, float], *, rounds: Sequence[Mapping[str, float]] = (), note: str = ""
) -> None:
    """Leave the numbers of a part in a file, and print them. Names end with their unit.

    note: what a reader must know to compare them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"measures": dict(measures), "rounds": list(rounds), "note": note}, indent=1))
    for name, value in measures.items():
        print(f"{path.stem}  {name} = {value:.4g}", flush=True)
