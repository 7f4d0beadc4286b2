"""The model card of an export: base, license, recipe, held-out scores, versions."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from unirl.core.errors import CheckpointError
from unirl.core.observe.events import read_events
from unirl.loop.run_folder import EVENTS_FILE

if TYPE_CHECKING:
    from .source import RunSource

__all__ = ["base_license", "write_card"]

MOST_ROWS = 9
"""Evaluations that the table shows."""


def write_card(
    folder: Path, source: RunSource, base: Path, *, policy: str, is_adapter: bool, is_pipeline: bool
) -> None:
    """Write README.md, and copy the license files that it refers to. base: folder of the base checkpoint."""
    for file in _license_files(base):
        shutil.copyfile(file, folder / file.name)
    plan, recorded = source.plan, source.recorded
    path = str(source.setting("path") or base)
    revision = source.setting("revision")
    is_hub_id = not Path(path).expanduser().is_dir()
    stages = [stage for stage in plan.trained if stage.learner.name == source.learner.name]
    algorithms = [stage.algorithm.name for stage in stages if stage.algorithm is not None]
    terms = base_license(base)
    library = "diffusers" if is_pipeline else "peft" if is_adapter else "transformers"
    head = {
        **{key: value for key, value in terms.items() if key.startswith("license")},
        **({"base_model": path} if is_hub_id else {}),
        "library_name": library,
        "tags": ["unirl", *algorithms, *(["lora"] if is_adapter else [])],
    }
    content = "LoRA adapters" if is_adapter else "A complete checkpoint"
    weights = "moving average of the weights" if policy == "ema" else "trained weights"
    facts = {
        "base": f"{path}, revision {revision}" if revision else path,
        "license of the base": terms.get("stated", "not stated in its files" + "; see its page on the hub" * is_hub_id),
        "recipe": f"{plan.recipe} {' '.join(recorded['overrides'])}".strip(),
        "algorithm": ", ".join(algorithms),
        "steps": f"{source.checkpoint.step} of {plan.run.max_steps}, {weights}",
        "trained with": ", ".join(f"{name} {number}" for name, number in recorded["dists"].items()),
        "exported with": ", ".join(
            f"{name} {version(name)}" for name in dict.fromkeys(["torch", "safetensors", library])
        ),
    }
    text = "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
            "---",
            f"# {plan.run.name or plan.recipe}, step {source.checkpoint.step}",
            "",
            f"{content} for {source.learner.model.spec.reference or library}, trained with UniRL.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {key} | {_cell(value)} |" for key, value in facts.items()),
            "",
            "## Held-out scores",
            "",
            *_scores(source),
            "",
            "## Config",
            "",
            "```yaml",
            OmegaConf.to_yaml(OmegaConf.create(dict(plan.resolved))).rstrip(),
            "```",
            "",
        ]
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def base_license(base: Path) -> dict[str, str]:
    """License of a checkpoint by its files: `license`, `license_name` and `license_link` of its card, and `stated`, a
    phrase; empty where no file states one."""
    card, result = base / "README.md", dict[str, str]()
    if card.is_file():
        head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), flags=re.DOTALL)
        lines = re.findall(
            r"^(license(?:_name|_link)?):[ \t]*(\S.*?)[ \t]*$", head.group(1) if head else "", re.MULTILINE
        )
        result = {key: value.strip("\"'") for key, value in lines}
    if result:
        result["stated"] = f"{', '.join(result.values())} (by its README.md)"
        return result
    if files := _license_files(base):
        return {"license": "other", "license_link": files[0].name, "stated": f"see {files[0].name}"}
    for name in ("model_index.json", "config.json"):
        file = base / name
        stated: Any = json.loads(file.read_text(encoding="utf-8")).get("license") if file.is_file() else None
        if stated:
            return {"license": str(stated), "stated": f"{stated} (by its {name})"}
    return {}


def _license_files(base: Path) -> list[Path]:
    return sorted(
        path for path in base.iterdir() if re.match("licen[cs]e", path.name, re.IGNORECASE) and path.is_file()
    )


def _scores(source: RunSource) -> list[str]:
    """Held-out scores before and after, and a table of the evaluations between."""
    file, step = source.folder / EVENTS_FILE, source.checkpoint.step
    try:
        events = read_events(file) if file.is_file() else []
    except ValueError as error:
        raise CheckpointError(f"{error} Remove the line.") from error
    # A resumed run evaluates a step again.
    points = {event.step: event.data["metrics"] for event in events if event.kind == "evaluated" and event.step <= step}
    if not points:
        return ["The run had no held-out evaluation up to this step."]
    steps = sorted(points)
    names = sorted({name for metrics in points.values() for name in metrics})
    shown = {steps[round(n * (len(steps) - 1) / (MOST_ROWS - 1))] for n in range(MOST_ROWS)}
    first, last = points[steps[0]], points[steps[-1]]
    changes = [
        f"- {name}: {_number(first, name)} at step {steps[0]}, {_number(last, name)} at step {steps[-1]}"
        for name in names
        if name.rpartition("/")[2] in ("score_mean", "share_at_threshold")
    ]
    return [
        *changes,
        "",
        f"| step | {' | '.join(map(_cell, names))} |",
        f"| ---: |{' ---: |' * len(names)}",
        *(f"| {row} | {' | '.join(_number(points[row], name) for name in names)} |" for row in sorted(shown)),
        "",
        f"Of samples by policy `{source.plan.eval.policy}`.",
    ]


def _number(metrics: Any, name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
