"""The parts of the kit: their commands, their time limits, and what each needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from runs import NEEDS_CUDA, runs

__all__ = ["FIRST", "SECOND", "Part", "parts"]

KIT = Path(__file__).parent
PYTHON = sys.executable
GPU_TESTS = (
    "tests/test_gpu.py",
    "plugins/launchers/ray/tests/test_turns.py",
    "packages/unirl-core/tests/test_weights_checksum.py",
    "packages/unirl-numerics/tests/test_batch_invariant.py",
    "packages/unirl-numerics/tests/test_token_log_probs.py",
    "packages/unirl-transfer/tests/test_weight_transfer.py",
    "plugins/engines/trainside/tests/test_offload_idle.py",
    "plugins/backends/fsdp2/tests/test_fsdp2_offload.py",
    "plugins/backends/fsdp2/tests/test_fsdp2_snapshot.py",
)
PROMPTS = "".join(f"a red ring on the left of {number} blue squares\n" for number in range(16))


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    command: Sequence[str]
    limit_s: float
    """The command is stopped after this time; others go on."""
    needs: tuple[str, ...] = ()
    """Parts without which this one cannot run."""
    absent: str = ""
    """Why it cannot run here; empty where it can."""
    is_timed: bool = True
    """Whether its numbers depend on what runs beside it: it then runs alone."""
    is_measured: bool = True
    """Whether it leaves numbers in `measures/NAME.json` of the work folder."""
    samples_memory: bool = False
    """Memory of the card and of each process on it is sampled meanwhile."""


FIRST = (
    "quickstart-fp32",
    "quickstart-bf16",
    "quickstart-text",
    "quickstart-resume",
    "tests",
    "conformance",
    "ray-ipc",
    "ray-shared-memory",
    "checkpoint-sd35",
    "checkpoint-qwen3",
    "ceilings",
    "sd3-fsdp",
    "sd3-bare",
    "text",
    "ray-sd3-colocate",
)
"""Whatever may be wrong on a GPU shows here."""
SECOND = (
    "checkpoint-sd35",
    "checkpoint-qwen3",
    "checkpoint-wan21",
    "sd3-flow-grpo",
    "sd3-autocast",
    "sd3-offload",
    "sd3-engine",
    "text-trl",
    "wan",
)
LIMITS_S = {"sd3-fsdp": 75, "wan": 150, "ray-sd3-colocate": 150}
"""Time limits of timed runs of UniRL, in seconds; others have 60 s."""
ASIDE_S = 180
"""Time limit of parts that run side by side, in seconds."""
ASIDE = ("quickstart-fp32", "quickstart-bf16", "quickstart-text", "ray-ipc", "ray-shared-memory")
"""Runs of UniRL of which correctness is asked, not time."""
SLOWER = 5
"""Times the limits of a dry run, on a few shared cores."""
NEEDS = {"sd3": "checkpoint-sd35", "ray-sd3": "checkpoint-sd35", "wan": "checkpoint-wan21", "text": "checkpoint-qwen3"}
"""Beginning of a run's name -> the checkpoint that it reads."""


def parts(work: Path, *, theirs: Path, is_dry: bool, has_cuda: bool) -> dict[str, Part]:
    """Every part by name. work: folder for checkpoints and runs.  theirs: flow_grpo's two files, if they are there."""
    tiny, no_cuda = ("--tiny",) if is_dry else (), "" if has_cuda else "no CUDA device"
    result = [
        Part(name="ceilings", command=_script("ceilings.py", *_out(work, "ceilings")), limit_s=40),
        *(_checkpoint(name, model, work, is_dry=is_dry) for name, model in CHECKPOINTS.items()),
        Part(
            name="sd3-bare",
            command=_script("train_bare_sd3.py", str(work / "sd35-medium"), *_out(work, "sd3-bare"), *tiny),
            limit_s=60,
            needs=("checkpoint-sd35",),
        ),
        Part(
            name="sd3-flow-grpo",
            command=_script(
                "train_flow_grpo.py",
                str(work / "sd35-medium"),
                *("--theirs", str(theirs)),
                *_out(work, "sd3-flow-grpo"),
                *tiny,
            ),
            limit_s=60,
            needs=("checkpoint-sd35",),
            absent="" if (theirs / "flow_grpo").is_dir() else "flow_grpo's two files were not put beside the kit",
        ),
        Part(
            name="text-trl",
            command=_script("train_trl.py", str(work / "qwen3-1.7b"), *_out(work, "text-trl"), *tiny),
            limit_s=60,
            needs=("checkpoint-qwen3",),
            absent="" if find_spec("trl") else "trl is not installed",
        ),
        *_runs(work, is_dry=is_dry, no_cuda=no_cuda),
        Part(
            name="quickstart-resume",
            command=_unirl(
                "train", "--resume", str(work / "runs/quickstart-fp32"), f"run.max_steps={3 if is_dry else 4}"
            ),
            limit_s=ASIDE_S,
            needs=("quickstart-fp32",),
            is_timed=False,
            is_measured=False,
        ),
        Part(
            name="tests",
            command=[
                PYTHON,
                "-m",
                "pytest",
                "-q",
                "-n",
                "4",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                "-W",
                "default",
                *GPU_TESTS,
            ],
            limit_s=ASIDE_S,
            absent=no_cuda,
            is_timed=False,
            is_measured=False,
        ),
        Part(
            name="conformance",
            command=_unirl(*CONFORMANCE, "--report", str(work / "conformance"), "--", "-n", "8", "-k", "cuda"),
            limit_s=ASIDE_S,
            absent=no_cuda,
            is_timed=False,
            is_measured=False,
        ),
    ]
    # The limits are those of a machine with a GPU.
    slower = SLOWER if is_dry else 1
    return {part.name: replace(part, limit_s=slower * part.limit_s) for part in result}


CHECKPOINTS = {"checkpoint-sd35": "sd35-medium", "checkpoint-wan21": "wan21-1.3b", "checkpoint-qwen3": "qwen3-1.7b"}
CONFORMANCE = (
    "conformance",
    "--tier=gpu",
    "--engine=trainside",
    "--backend=fsdp2",
    # Nothing of a dist's files and imports depends on a GPU.
    "--without=plugin:*",
)
"""Every claim on CUDA that needs no other engine. `-k cuda` leaves out the same claims on the CPU."""


def _checkpoint(name: str, model: str, work: Path, *, is_dry: bool) -> Part:
    size = "tiny" if is_dry else "full"
    return Part(
        name=name,
        command=_script("random_checkpoint.py", model, str(work / model), "--size", size),
        limit_s=ASIDE_S,
        is_timed=False,
        is_measured=False,
    )


def _runs(work: Path, *, is_dry: bool, no_cuda: str) -> list[Part]:
    """The runs of ours, by their names in `runs.py`."""
    no_ray = "" if find_spec("ray") else "ray is not installed: unpack ray.txz"
    result: list[Part] = []
    for name in runs(work, is_tiny=is_dry, device="cpu"):
        extra = ["--tiny"] if is_dry else []
        if name == "sd3-fsdp":
            extra += ["--profile", str(work / "profile.txt")]
        result.append(
            Part(
                name=name,
                command=_script("train_ours.py", name, "--work", str(work), *_out(work, name), *extra),
                limit_s=ASIDE_S if name in ASIDE else LIMITS_S.get(name, 60),
                needs=tuple(needed for beginning, needed in NEEDS.items() if name.startswith(beginning)),
                absent=(no_cuda or no_ray) if name in NEEDS_CUDA else "",
                is_timed=name not in ASIDE,
                samples_memory=name in NEEDS_CUDA and name not in ASIDE,
            )
        )
    return result


def _script(name: str, *words: str) -> list[str]:
    return [PYTHON, str(KIT / name), *words]


def _unirl(*words: str) -> list[str]:
    return [PYTHON, "-m", "unirl.core", *words]


def _out(work: Path, name: str) -> tuple[str, str]:
    return "--out", str(work / "measures" / f"{name}.json")
