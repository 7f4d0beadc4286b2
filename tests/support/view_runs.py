"""Run folders made by hand, for tests of `unirl view` and `unirl vote`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

STAGES = [
    {"name": name, "parent": parent, "samples": 2, "medium": medium, "learner": name, "model": model, "engine": "e"}
    | {"algorithm": "grpo", "rewards": [], "credit": "none"}
    for name, parent, medium, model in (("rewrite", None, "text", "qwen3"), ("image", "rewrite", "image", "sd3"))
]


def start(*, name: str = "first", at: int = 0, **fields: Any) -> dict[str, Any]:
    kind = "run_resumed" if at else "run_started"
    resolved = {"run": {"seed": 7}, "algorithm": {"use": "flow-grpo"}, "model": {"use": "sd3"}}
    return {"kind": kind, "step": at, "time": 100.0, "name": name, "recipe": "quickstart", "plan_hash": "h"} | {
        "resolved": resolved,
        "steps": 9,
        **fields,
    }


def step(at: int, **metrics: float | None) -> dict[str, Any]:
    return {"kind": "step", "step": at, "time": 100.0 + at, "metrics": metrics, "phases": {"train": at / 4}}


END = {"kind": "run_finished", "step": 3, "time": 110.0, "status": "done", "wall_s": 10.0}


def lines(events: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(event)}\n" for event in events)


def write(folder: Path, *events: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text(lines(events))
    return folder


def with_samples(folder: Path) -> Path:
    """A held-out rewrite and an image of it."""
    media = folder / "media"
    (media / "step-000000").mkdir(parents=True)
    (media / "step-000000" / "r.txt").write_text("a red disk")
    Image.new("RGB", (4, 4), "red").save(media / "step-000000" / "i.png")
    sample = {"prompt": "p", "reward": 0.5, "is_truncated": False, "inputs": []}
    rewrite = {**sample, "file": "step-000000/r.txt", "sample": "r0/p/0", "parent": None}
    image = {**sample, "file": "step-000000/i.png", "sample": "r0/p/0/image-0", "parent": "step-000000/r.txt"}
    note = {"step": 0, "time": 1.0, "num_left_out": 0}
    events = (
        {**note, "kind": "texts", "key": "eval/rewrite", "samples": [rewrite]},
        {**note, "kind": "images", "key": "eval/image", "samples": [image]},
    )
    (media / "index.jsonl").write_text(lines(events))
    return folder


def with_images(folder: Path, key: str, at: int, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Images of a step under a key, in addition to those that are there.

    samples: fields of the index. `colour`, a number, and `size` are those of the image; equal ones are equal files.
    """
    media = folder / "media"
    (media / f"step-{at:06d}").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        fields = dict(sample)
        colour, size = fields.pop("colour"), fields.pop("size", 4)
        name = f"step-{at:06d}/{key.replace('/', '-')}-{number:02d}.png"
        image = Image.new("RGB", (size, size), (colour % 256, colour // 256 % 256, colour // 65536))
        image.save(media / name)
        fixed = {"file": name, "reward": None, "is_truncated": False, "parent": None, "inputs": [], "media": []}
        rows.append({**fixed, **fields})
    event = {"kind": "images", "key": key, "step": at, "time": 1.0, "num_left_out": 0, "samples": rows}
    with (media / "index.jsonl").open("a") as file:
        file.write(lines([event]))
    return folder
