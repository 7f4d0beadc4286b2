"""The runs of UniRL that the kit makes: a recipe, its overrides, and the arithmetic of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NEEDS_CUDA", "Run", "runs"]

NEEDS_CUDA = ("ray-ipc", "ray-shared-memory", "ray-sd3-colocate")
"""Runs whose processes share a GPU: there is nothing to share without one."""


@dataclass(frozen=True, kw_only=True)
class Run:
    recipe: str
    words: tuple[str, ...]
    """Overrides."""
    rows: int
    """Samples of a round; of text, tokens."""
    model: str = ""
    """Key of `FORWARD_FLOP`; empty where TFLOP/s say nothing."""
    generated: float = 0.0
    """Forwards of each row while generating: steps x branches of the guidance, 1 for text."""
    trained: float = 0.0
    """Forwards of each row while training: scored steps x branches x (old log-probs + reference + forward + backward).
    A backward costs one forward with LoRA, two with all weights, and one more with activation checkpointing. Of two
    updates, the first gives its own old log-probs: they cost half a forward."""


def runs(work: Path, *, is_tiny: bool, device: str) -> Mapping[str, Run]:
    """Every run by its name. work: the folder with the random checkpoints and `prompts.txt`; runs are written there."""
    common = (f"run.device={device}", "run.media_every=0", "run.save_every=0", "eval.every=0", "data.eval=''")
    result = {**_quickstarts(is_tiny), **_sd3(work, is_tiny), "wan": _wan(work, is_tiny), "text": _text(work, is_tiny)}
    ray = ("launcher=ray", "launcher.call_timeout_s=120")
    ipc = (*ray, "launcher.placement=colocate", "launcher.carrier=cuda-ipc")
    shared = (*ray, "launcher.placement=separate", "launcher.gpus=0.5", "launcher.carrier=shared-memory")
    for name, plain, words in (
        ("ray-ipc", "quickstart-fp32", ipc),
        ("ray-shared-memory", "quickstart-fp32", shared),
        ("ray-sd3-colocate", "sd3-fsdp", ipc),
    ):
        # Peaks and TFLOP/s are those of other processes; memory is sampled from outside.
        result[name] = Run(recipe=result[plain].recipe, words=(*result[plain].words, *words), rows=result[plain].rows)
    return {
        name: Run(**{**vars(run), "words": (*common, f"run.dir={work / 'runs' / name}", *run.words)})
        for name, run in result.items()
    }


def _quickstarts(is_tiny: bool) -> dict[str, Run]:
    """The recipes as they are, three steps each; two small steps in a dry run."""
    steps = ("~tracker.report", f"run.max_steps={2 if is_tiny else 3}")
    small = ("data.prompts_per_step=2", "data.samples_per_prompt=4")
    images = (*steps, *((*small, "sampling.num_inference_steps=4") if is_tiny else ()))
    text = (*steps, *((*small, "sampling.max_new_tokens=8") if is_tiny else ()))
    # bf16 keeps 8 bits of the velocity; the default bound is the clip range of 1e-3.
    bf16 = ("backend.trains=lora", "backend.mixed_precision=bf16", "train.logp_mismatch_max=0.1")
    rows = 8 if is_tiny else 16 * 12
    return {
        "quickstart-fp32": Run(recipe="quickstart", words=images, rows=rows),
        "quickstart-bf16": Run(recipe="quickstart", words=(*images, *bf16), rows=rows),
        "quickstart-text": Run(recipe="quickstart-text", words=text, rows=8 if is_tiny else 32 * 8),
    }


def _sd3(work: Path, is_tiny: bool) -> dict[str, Run]:
    """A round of `Sd3Round`: four prompts, ten steps, three of them scored and trained in two updates, no guidance."""
    pixels, length, samples, micro = (64, 16, 2, 2) if is_tiny else (512, 256, 8, 8)
    words = (
        f"data.train={work / 'prompts.txt'}",
        f"model.path={work / 'sd35-medium'}",
        "run.max_steps=3",
        "data.prompts_per_step=4",
        f"data.samples_per_prompt={samples}",
        f"sampling.height={pixels}",
        f"sampling.width={pixels}",
        f"sampling.max_sequence_length={length}",
        f"train.micro_batch_size={micro}",
        "model.text_dtype=bfloat16",
        # The mismatch is measured here, not bounded.
        "train.logp_mismatch_max=10",
    )
    bf16 = ("model.dtype=bfloat16", "backend.mixed_precision=bf16")
    autocast = ("model.dtype=bfloat16", "model.autocast=bfloat16", "backend.mixed_precision=none")
    engine = (*bf16, "train.old_log_probs=engine", "model.vae_dtype=bfloat16")
    count = {"recipe": "sd3/flow-grpo", "rows": 4 * samples, "model": "sd35-medium", "generated": 10.0}
    return {
        "sd3-fsdp": Run(**count, words=(*words, *bf16, "backend.shard=always"), trained=3 * (0.5 + 2)),
        "sd3-autocast": Run(**count, words=(*words, *autocast), trained=3 * (0.5 + 2)),
        "sd3-offload": Run(**count, words=(*words, *autocast, "backend.offload_frozen=blocks"), trained=3 * (0.5 + 2)),
        "sd3-engine": Run(**count, words=(*words, *engine), trained=3 * 2),
    }


def _wan(work: Path, is_tiny: bool) -> Run:
    """Four videos of 480 x 832 x 33, eight steps, two of them trained; guidance 4.5 and a KL penalty, as the recipe."""
    height, width, frames = (32, 32, 5) if is_tiny else (480, 832, 33)
    words = (
        f"data.train={work / 'prompts.txt'}",
        f"model.path={work / 'wan21-1.3b'}",
        "run.max_steps=2",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "sampling.num_inference_steps=8",
        f"sampling.height={height}",
        f"sampling.width={width}",
        f"sampling.frames={frames}",
        "sampling.sde.mode=random",
        "sampling.sde.count=2",
        "sampling.sde.last=0.5",
        "engine.forward_batch=2",
        "model.decode_batch=1",
        "train.micro_batch_size=1",
        "train.logp_mismatch_max=10",
    )
    return Run(
        recipe="wan21/flow-grpo",
        words=words,
        rows=4,
        model="wan21-1.3b",
        generated=8 * 2,
        trained=2 * 2 * (0.5 + 1 + 3),
    )


def _text(work: Path, is_tiny: bool) -> Run:
    """GRPO on all weights: 16 prompts of 8 completions, each of exactly 256 tokens, in two updates."""
    prompts, samples, tokens = (2, 2, 8) if is_tiny else (16, 8, 256)
    words = (
        f"model.path={work / 'qwen3-1.7b'}",
        "run.max_steps=3",
        f"data.prompts_per_step={prompts}",
        f"data.samples_per_prompt={samples}",
        f"sampling.max_new_tokens={tokens}",
        # `unirl plan`: 13.4 MiB of activations a token, so 27 GiB beside 26 GiB of weights, gradients and moments.
        "train.micro_batch_tokens=2048",
        "model.autocast=bfloat16",
        "~tracker.report",
        "~reward.math",
        "+reward@reward.digits=function",
        f"reward.digits.target={Path(__file__).with_name('digits.py')}:digits",
        "train.logp_mismatch_max=5",
        "train.logp_mismatch_mean=1",
    )
    rows = prompts * samples * tokens
    return Run(recipe="quickstart-text", words=words, rows=rows, model="qwen3-1.7b", generated=1, trained=0.5 + 3)
