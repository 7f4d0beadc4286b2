"""The note when memory runs out: how much was asked for, what was predicted, and the settings that lower it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from unirl.core.errors import RewardFailed, RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap
from unirl.core.types.sampling import LatentSamplingConfig

from .memory_plan import memory_plan
from .prediction import shown_bytes
from .process_memory import processes_of

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["explanation"]

SIGNS = re.compile(
    # torch's errors on CUDA and on a CPU, Python's, C++'s, and Ray's for a process that it stopped.
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|not enough memory: you tried to allocate"
    r"|Cannot allocate memory|\bMemoryError\b|std::bad_alloc|running low on memory"
)
AMOUNT = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def explanation(plan: Plan, error: BaseException) -> str:
    """A note on a failure of a run, "" unless memory ran out.

    The prediction is that of `unirl plan`, for a plan that has one and a model that is measured without its weights.
    """
    text = _report(error)
    if text is None:
        return ""
    is_cuda = "CUDA" in text
    _free(error)
    phase = "score" if isinstance(error, RewardFailed) else ""
    if isinstance(error, RunFailed):
        # A worker's phase of scoring also names the reward.
        phase = "score" if error.phase.startswith("score ") else error.phase
    lines = [f"Out of memory in phase {phase!r}" if phase else "Out of memory"]
    if amount := AMOUNT.search(text):
        size = int(float(amount[1]) * UNITS[amount[2].lower()])
        lines[0] += f": tried to allocate {shown_bytes(size)}"
    lines[0] += "."
    here = replace(plan, run=replace(plan.run, device="cuda" if is_cuda else "cpu"))
    lines.append(_prediction(here, phase=phase))
    same = dict.fromkeys(_of_rewards(plan) if phase == "score" else _of_transfers(plan) if phase == "sync" else ())
    for stage in plan.stages if phase != "score" else ():
        same |= dict.fromkeys(_same_results(plan, stage, phase, is_cuda=is_cuda))
    other = dict.fromkeys(_other_rewards(plan) if phase == "score" else ())
    other |= dict.fromkeys(word for stage in plan.stages for word in _other_results(plan, stage, phase))
    if same:
        lines.append(f"Settings that lower it: {', '.join(same)}. A resumed run may change them.")
    if other:
        lines.append(f"Settings that lower it in a new run: {', '.join(other)}.")
    return "\n".join(lines)


def _report(error: BaseException) -> str | None:
    """The text that says that memory ran out, of an error or of one that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or SIGNS.search(str(cause)):
            return str(cause)
        cause = cause.__cause__
    return None


def _free(error: BaseException) -> None:
    """Drop the tensors of what failed, which the frames of its traceback hold; the prediction takes memory, too."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


def _prediction(plan: Plan, *, phase: str) -> str:
    """Predicted memory of each process of the phase, or why it is unknown."""
    if any(Cap.LAZY_BUILD not in stage.model.spec.capabilities for stage in plan.stages):
        return "Nothing is predicted: the model cannot be measured without loading its weights again."
    try:
        processes = {process.role: process for process in memory_plan(plan, catalog=Catalog.of({})).processes}
    except Exception as failure:  # noqa: BLE001 - said in the note; the run failed for another reason
        return f"Nothing is predicted: {failure}"
    # Train ranks generate and score where no other process does.
    role = {"train": "train", "score": "reward"}.get(phase, "rollout")
    process = processes.get(role, processes["train"])
    largest = sorted(process.items.items(), key=lambda item: -item[1])[:3]
    items = ", ".join(f"{name} {shown_bytes(size)}" for name, size in largest)
    without = "" if phase == "train" else "; activations of sampling, decoding and rewards are not counted"
    return (
        f"Predicted for each {process.role} process: {shown_bytes(process.total)} ({items}{without}). See `unirl plan`."
    )


def _same_results(plan: Plan, stage: Stage, phase: str, *, is_cuda: bool) -> Iterator[str]:
    """Settings that lower the memory of a phase, with what they are now; of all phases for an unknown one. Results stay
    the same up to rounding."""
    train, is_latent = stage.train, isinstance(stage.sampling, LatentSamplingConfig)
    if phase not in ("train", "sync"):
        engine = vars(stage.engine.config)
        for key in ("forward_batch", "max_num_seqs", "kv_cache_mb", "gpu_memory"):
            if key in engine:
                yield _setting(f"{stage.engine.key}.{key}", engine[key], zero="all")
        if is_latent and "decode_batch" in vars(stage.model.config):
            yield _setting(f"{stage.model.key}.decode_batch", vars(stage.model.config)["decode_batch"], zero="all")
        if engine.get("offload_idle") is False and is_cuda:
            yield f"{stage.engine.key}.offload_idle=true"
    if phase not in ("generate", "evaluate", "sync") and stage.backend is not None:
        if train.micro_batch_tokens and not is_latent:
            yield f"train.micro_batch_tokens ({train.micro_batch_tokens})"
        else:
            yield _setting("train.micro_batch_size", train.micro_batch_size, zero="all samples")
        if is_latent and not train.is_serial("cuda" if is_cuda else "cpu") and stage.needs.trajectory != "none":
            yield "train.replay=serial"
        if vars(stage.backend.config).get("activation_checkpointing") is False:
            yield f"{stage.backend.key}.activation_checkpointing=true"
        if plan.launcher is not None and "train_ranks" in vars(plan.launcher.config):
            yield f"more launcher.train_ranks ({processes_of(plan).train})"


def _of_rewards(plan: Plan) -> Iterator[str]:
    """Settings that lower the memory of scoring, or have it elsewhere. Scores stay the same up to rounding."""
    for choice in plan.rewards.values():
        if "batch_size" in choice.config.rounding_only:
            yield f"{choice.key}.batch_size ({vars(choice.config)['batch_size']})"
    launcher = {} if plan.launcher is None else vars(plan.launcher.config)
    if "reward_gpus" in launcher:
        yield f"devices of their own by launcher.reward_gpus ({launcher['reward_gpus']:g})"
    else:
        yield "processes of their own by launcher=ray"


def _other_rewards(plan: Plan) -> Iterator[str]:
    """Settings that lower the memory of scoring, with which scores are others."""
    for choice in plan.rewards.values():
        config = vars(choice.config)
        if "batch_size" in config and "batch_size" not in choice.config.rounding_only:
            yield f"{choice.key}.batch_size ({config['batch_size']})"
        if config.get("dtype") == "float32":
            yield f"{choice.key}.dtype=bfloat16"


def _of_transfers(plan: Plan) -> Iterator[str]:
    """Settings that lower the memory of sending weights."""
    launcher = {} if plan.launcher is None else vars(plan.launcher.config)
    if "bucket_mb" in launcher:
        yield f"launcher.bucket_mb ({launcher['bucket_mb']})"
    for stage in plan.stages:
        engine = vars(stage.engine.config)
        for key in ("gpu_memory", "kv_cache_mb"):
            if key in engine:
                yield _setting(f"{stage.engine.key}.{key}", engine[key], zero="the engine's default")


def _other_results(plan: Plan, stage: Stage, phase: str) -> Iterator[str]:
    """Like `_same_results`, but settings with which another policy is trained."""
    sampling = stage.sampling
    backend = stage.backend
    if backend is not None and backend.config.trains == "full" and phase not in ("generate", "evaluate", "score"):
        yield f"{backend.key}.trains=lora"
    if phase == "sync":
        # What is sent and held is the weights.
        return
    if phase != "train":
        yield f"data.prompts_per_step ({plan.data.prompts_per_step})"
    if isinstance(sampling, LatentSamplingConfig):
        frames = f" x {sampling.frames} frames" if sampling.frames > 1 else ""
        names = "sampling.height, sampling.width" + (" and sampling.frames" if frames else "")
        yield f"{names} ({sampling.height} x {sampling.width}{frames})"
    else:
        yield f"sampling.max_new_tokens ({sampling.max_new_tokens})"


def _setting(key: str, value: float, *, zero: str) -> str:
    return f"{key} ({value or f'0, {zero}'})"
