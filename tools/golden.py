#!/usr/bin/env python3
"""Record what short runs compute, and compare it with another version of the code, bit for bit.

    python tools/golden.py record before/     # run every case on this version
    python tools/golden.py record after/      # and on another
    python tools/golden.py compare before/ after/

For a change that should not alter numbers. Each case is two steps of a recipe through `unirl train`. Its record is
`events.jsonl` without times and paths, and a SHA-256 of the tensors in its checkpoint. Records depend on the CPU and on
torch, so both must come from one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SMALL = [
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "sampling.num_inference_steps=4",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=2",
    # No two images share it, so every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
]
SMALL_TEXT = [
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "sampling.max_new_tokens=12",
    "eval.num_prompts=2",
]
SMALL_GRADIENT = ["data.prompts_per_step=4", "data.samples_per_prompt=1", "eval.num_prompts=2"]
SMALL_JOINT = [
    "data.prompts_per_step=3",
    "stages.image.samples=2",
    "sampling.image.num_inference_steps=4",
    "eval.num_prompts=2",
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
    "reward.light.stage=image",
]
STORED = ["data.prompts_per_step=4"]
RAY = ["launcher=ray", "launcher.cpus=0.1", "launcher.reward_cpus=0.1"]
APART = [*RAY, "launcher.placement=separate"]
AHEAD = ["run.max_staleness=1", "train.old_log_probs=engine", "run.max_steps=3"]

CASES: dict[str, list[str]] = {
    "flow-grpo": ["quickstart", *SMALL],
    "flow-grpo-lora": [
        "quickstart",
        *SMALL,
        "backend.trains=lora",
        "algorithm.kl_coef=0.1",
        "train.micro_batch_size=5",
    ],
    "awm": ["quickstart-awm", *SMALL],
    "dpo": ["quickstart-dpo", *SMALL],
    "flow-ppo": ["quickstart-flow-ppo", *SMALL],
    "branch-grpo": ["quickstart-branch-grpo", *SMALL[:2], *SMALL[3:], "data.samples_per_prompt=16"],
    "refl": ["quickstart-refl", *SMALL_GRADIENT],
    "sft": ["quickstart-sft", *STORED, "data.train={stored}"],
    "text-grpo": ["quickstart-text", *SMALL_TEXT],
    "text-ppo": ["quickstart-text", *SMALL_TEXT, "algorithm=ppo", "backend.critic.lr=3e-3"],
    "vl": ["quickstart-vl", "data.prompts_per_step=4", "eval.num_prompts=2"],
    "video": ["quickstart-video", "data.prompts_per_step=2", "data.samples_per_prompt=4", "eval.num_prompts=2"],
    "unified": ["quickstart-unified", *SMALL_JOINT],
    "image-tokens": ["quickstart-image-tokens", "data.prompts_per_step=4", "eval.num_prompts=2"],
    "joint": ["quickstart-enhancer-joint", *SMALL_JOINT],
    "joint-overlap-ahead": ["quickstart-enhancer-joint", *SMALL_JOINT, "run.reward_overlap_groups=1", *AHEAD, *APART],
    "reward-overlap": ["quickstart", *SMALL, "run.reward_overlap_groups=1"],
    "one-step-off-policy": ["quickstart-text", *SMALL_TEXT, *AHEAD, "engine=vllm"],
    "dynamic-sampling": ["quickstart-text", *SMALL_TEXT, "data.dynamic_sampling_rounds=2"],
    "dynamic-overlap-ahead": [
        "quickstart-text",
        *SMALL_TEXT,
        "data.dynamic_sampling_rounds=2",
        "run.reward_overlap_groups=3",
        *AHEAD,
        *APART,
    ],
    "ray-separate": ["quickstart", *SMALL, *APART],
    "ray-separate-ahead": ["quickstart", *SMALL, *APART, *AHEAD],
    "ray-two-ranks": ["quickstart-enhancer-joint", *SMALL_JOINT, *RAY, "launcher.train_ranks=2"],
}
"""Name -> recipe and overrides; `{stored}` is a prompt file of images."""
TIMES = (
    "time",
    "wall_s",
    "seconds",
    "phases",
    "folder",
    "size_bytes",
    "cpu",
    "resolved",
    "text",
    "versions",
    "plan_hash",
)
"""Fields of events that differ between runs or between versions without other numbers."""
UNSTABLE = (
    "overlap",
    "generate_utilisation",
    "rollouts_waiting",
    "reward_queue_max",
    "_bytes",
    "_per_sample",
    "/bytes",
)
"""Ends of metrics of time and traffic."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run the cases and write their records")
    record.add_argument("folder", type=Path)
    record.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    record.add_argument("--jobs", type=int, default=2, help="runs at once")
    compare = commands.add_parser("compare", help="compare two folders of records; exits with 1 where they differ")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        options.folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as threads:
            failed = [name for name in threads.map(lambda name: _record(name, options.folder), options.only) if name]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    raise SystemExit(_compare(options.before, options.after))


def _record(name: str, into: Path) -> str:
    """Run a case and write its record; returns its name where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        recipe, *words = [
            word.format(stored=_stored(Path(folder))) if "{stored}" in word else word for word in CASES[name]
        ]
        words = ["run.max_steps=2", "run.save_every=0", "run.media_every=0", "run.threads=1", "~tracker.report", *words]
        command = [sys.executable, "-m", "unirl.core", "train", recipe, f"run.dir={run}", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            print(f"{name}: failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
            return name
        lines = [_stable(json.loads(line)) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line["kind"] not in ("finding", "loading")]
        digest = {"kind": "weights", "sha256": _digest(run)}
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in [*lines, digest])
        (into / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {digest['sha256'][:12]}", flush=True)
        return ""


def _stored(folder: Path) -> Path:
    """A prompt file of sixteen images of role `target`, drawn by a formula."""
    import numpy as np
    from PIL import Image

    across, down = np.meshgrid(np.arange(64), np.arange(64))
    rows: list[str] = []
    for number in range(16):
        pixels = np.stack([(across * (number + 1)) % 256, (down * (number + 2)) % 256, (across + down) % 256], axis=-1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        media = [{"modality": "image", "role": "target", "uri": f"{number}.png"}]
        rows.append(json.dumps({"prompt": f"stripes number {number}", "media": media}))
    file = folder / "stored.jsonl"
    file.write_text("\n".join(rows), encoding="utf-8")
    return file


def _stable(value: Any, key: str = "") -> Any:
    """A value of an event without what differs between two equal runs."""
    if isinstance(value, dict):
        return {
            name: _stable(inner, name)
            for name, inner in value.items()
            if name not in TIMES and not name.endswith(("_s", "seconds", *UNSTABLE))
        }
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _digest(run: Path) -> str:
    """SHA-256 over the names and bytes of all tensors in the last checkpoint."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    result = hashlib.sha256()
    for path in sorted((run / "checkpoints").rglob(".metadata")):
        file = run / "whole.pt"
        dcp_to_torch_save(path.parent, file)
        for name, tensor in sorted(_tensors(torch.load(file, weights_only=True))):
            result.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def _tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{prefix}/{key}")
    elif isinstance(value, torch.Tensor):
        yield prefix, value.reshape(-1)


def _compare(before: Path, after: Path) -> int:
    """Print each difference; 1 where there is one."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.jsonl")})
    different = 0
    for name in names:
        left, right = (_lines(folder / name) for folder in (before, after))
        problems = list(_differences(left, right))
        different += bool(problems)
        print(f"{name.removesuffix('.jsonl')}: {'; '.join(problems[:6]) or 'equal'}")
    return int(bool(different) or not names)


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [_stable(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def _differences(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Iterator[str]:
    if len(left) != len(right):
        yield f"{len(left)} and {len(right)} events"
    for one, other in zip(left, right, strict=False):
        flat, others = dict(_flat(one)), dict(_flat(other))
        for key in sorted({*flat, *others}):
            values = [repr(leaves.get(key, "absent")) for leaves in (flat, others)]
            if values[0] != values[1]:
                yield f"{one['kind']} {one.get('step', '')} {key}: {values[0]}, {values[1]}"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


if __name__ == "__main__":
    main()
