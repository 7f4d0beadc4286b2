"""What the page asks for, as JSON: one row of every run, and curves, settings and samples of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from ..families import Branch, Family, sample_families
from ..fold import fold
from ..history import recipe_values
from ..media import MEDIA, RunFolderError, Sample, SampleBatch
from .live_run import Group, LiveRun

__all__ = ["MOST_SHOWN", "Key", "curves", "details", "path_of", "row", "sample_steps", "samples"]

MOST_SHOWN = 500
"""Points of a curve on the page."""
GLANCE = 600
"""Characters of a text that are seen at first."""
MOST_PROMPTS = 64
"""Of one step."""

Key = Literal["train", "eval"]
FileUrl = Callable[[Path], str]
"""The address of a file of a run, for the page."""


def row(run: LiveRun) -> dict[str, Any]:
    """What the table of runs shows of one. Unknown numbers are None."""
    history = run.history
    reward, held_out = _headline(run, "train", "reward_mean"), _headline(run, "held-out", "score_mean")
    trained = [stage for stage in history.stages if stage["algorithm"]]
    return {
        "folder": str(run.folder),
        "name": history.name,
        "recipe": history.recipe,
        "algorithm": _names(stage["algorithm"] for stage in trained)
        or str(history.settings("algorithm").get("use", "")),
        "model": _names(stage["model"] for stage in history.stages) or str(history.settings("model").get("use", "")),
        "state": run.state,
        "step": run.num_steps,
        "steps": history.num_steps_planned,
        "reward": reward[-1] if reward else None,
        "best_reward": max(reward) if reward else None,
        "held_out": held_out[-1] if held_out else None,
        "best_held_out": max(held_out) if held_out else None,
        "seconds": history.wall_s,
        "began": history.sessions[0].began if history.sessions else None,
        "findings": run.num_findings,
        "problem": run.problem,
        "read": run.offset / run.size if run.size else 1.0,
        "version": run.version,
    }


def curves(run: LiveRun) -> list[dict[str, Any]]:
    """Every curve: its group, its name and its points, as `Curve.shown` gives them."""
    return [
        {"group": group, "name": name, **curve.shown(MOST_SHOWN)}
        for (group, name), curve in run.curves.items()
        if curve.steps
    ]


def details(run: LiveRun) -> dict[str, Any]:
    """Settings, findings, seconds of each phase, sizes in memory, sessions and versions."""
    history = run.history
    return {
        "recipe": recipe_values(history.resolved),
        "findings": [{"step": finding.step, "text": finding.text} for finding in history.findings],
        "num_findings": run.num_findings,
        "phases": [
            {"name": name, "times": phase.times, "total": phase.total, "longest": phase.longest}
            for name, phase in sorted(run.phases.items(), key=lambda item: -item[1].total)
        ],
        "memory": [
            {"name": name, "last": curve.values[-1], "highest": max(curve.values)}
            for (_, name), curve in run.curves.items()
            if curve.values and (name.endswith(("_bytes", "_mib")) or "memory" in name)
        ],
        "resumed": [session.first_step for session in history.sessions[1:]],
        "versions": dict(history.versions),
    }


def sample_steps(run: LiveRun) -> dict[str, Any]:
    """Steps of which samples were saved, of training and of evaluations; or the problem with them."""
    try:
        batches = run.samples()
    except (OSError, ValueError, RecursionError) as error:
        return {"train": [], "eval": [], "problem": str(error)}
    steps = {key: sorted({batch.step for batch in _of(batches, key)}) for key in ("train", "eval")}
    return {**steps, "problem": ""}


def samples(run: LiveRun, key: Key, step: int, *, url: FileUrl) -> dict[str, Any]:
    """The samples of a step by prompt, each with those that were made from it; at most `MOST_PROMPTS` prompts."""
    try:
        batches = [batch for batch in _of(run.samples(), key) if batch.step == step]
        found = sample_families(batches).get(step, [])
        shown = [_family(one, url, run.folder / MEDIA) for one in found[:MOST_PROMPTS]]
    except (OSError, ValueError, RecursionError, RunFolderError) as error:
        return {"families": [], "num_prompts": 0, "problem": str(error)}
    return {"families": shown, "num_prompts": len(found), "problem": ""}


def path_of(run: LiveRun, file: Path) -> str:
    """A file of a run as the end of an address: its path within the samples, quoted."""
    return quote(file.relative_to(run.folder / MEDIA).as_posix())


def _of(batches: Sequence[SampleBatch], key: str) -> list[SampleBatch]:
    return [batch for batch in batches if batch.key.partition("/")[0] == key]


def _family(family: Family, url: FileUrl, media: Path) -> dict[str, Any]:
    return {
        "prompt": family.prompt,
        # Named by their content, so that runs with other folders have the same ones.
        "asked": [file.relative_to(media).as_posix() for file in family.inputs],
        "inputs": [url(file) for file in family.inputs],
        "branches": [_branch(branch, url) for branch in family.branches],
    }


def _branch(branch: Branch, url: FileUrl) -> dict[str, Any]:
    sample = branch.sample
    return {
        "stage": branch.stage,
        "name": sample.name,
        "reward": sample.reward,
        "truncated": sample.is_truncated,
        **(_text(sample) if branch.is_text else _picture(sample, url)),
        "branches": [_branch(child, url) for child in branch.branches],
    }


def _picture(sample: Sample, url: FileUrl) -> dict[str, Any]:
    animation = sample.animation
    return {"image": url(sample.file), "animation": url(animation) if animation else None}


def _text(sample: Sample) -> dict[str, Any]:
    text = fold(sample.text, glance=GLANCE)
    return {
        "head": text.head,
        "tail": text.tail,
        "all": list(text.shown) if text.tail else [],
        "characters": text.num_characters,
    }


def _headline(run: LiveRun, group: Group, metric: str) -> Sequence[float]:
    """Values of a metric of the whole run, or of its last stage that has it."""
    stages = [str(stage["name"]) for stage in reversed(run.history.stages)]
    for name in (metric, *(f"{stage}/{metric}" for stage in stages)):
        curve = run.curves.get((group, name))
        if curve is not None and curve.values:
            return curve.values
    return []


def _names(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
