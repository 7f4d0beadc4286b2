"""Renamed recipe keys: old names are refused with the new name in the message, never silently accepted."""

from __future__ import annotations

__all__ = ["RENAMED", "renamed"]

RENAMED = {
    "run.steps": "run.max_steps",
    "run.stream_groups": "run.reward_overlap_groups",
    "run.rollout_ahead": "run.max_staleness",
    "data.refill_rounds": "data.dynamic_sampling_rounds",
    "sampling.steps": "sampling.num_inference_steps",
    "train.micro_batch": "train.micro_batch_size",
    "train.logp_gap_max": "train.logp_mismatch_max",
    "train.logp_gap_mean": "train.logp_mismatch_mean",
}


def renamed(path: str) -> str:
    """The new path of a renamed key, or "". Keys of one track (`sampling.image.steps`) and of evaluation
    (`eval.sampling.steps`) are renamed like those of `sampling`."""
    *above, key = path.split(".")
    if "sampling" in above and "sde" not in above:
        new = RENAMED.get(f"sampling.{key}", "")
        return ".".join([*above, new.rpartition(".")[2]]) if new else ""
    return RENAMED.get(path, "")
