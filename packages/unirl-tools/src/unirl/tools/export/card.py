"""The model card of an export: base, license, recipe, held-out scores, versions."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from unirl.core.errors import CheckpointError
from unirl.core.observe.events import read_events
from unirl.core.observe.recorded import Recorded
from unirl.core.observe.stages import evaluation_facts
from unirl.loop.run_folder import EVENTS_FILE
from unirl.model_host.model_files import read_json

from .usage import Shown, copy_samples, pipeline_tag, snippet, trained_stages

if TYPE_CHECKING:
    from .source import TrainedModel

__all__ = ["base_license", "write_card"]

MOST_ROWS = 9
"""Evaluations that the table shows."""
MARKUP = re.compile(r"[\\`*\[\]|~$@]|:(?=//)|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])")
"""Characters that are markup in Markdown, besides those of HTML, or make a link of a text. An underscore within a word
does neither."""


def write_card(
    folder: Path,
    source: TrainedModel,
    base: Path,
    *,
    name: str,
    step: int,
    policy: str,
    layout: str | None,
    is_pipeline: bool,
) -> None:
    """Write README.md, and copy the license files and samples that it refers to. base: folder of the base checkpoint.
    name: of the export, for those who load it.  step: of the weights.  layout: of adapters; None for a complete
    checkpoint."""
    for file in _license_files(base):
        shutil.copyfile(file, folder / file.name)
    plan, recorded = source.plan, source.recorded
    path = str(source.setting("path") or base)
    revision = source.setting("revision")
    is_hub_id = not Path(path).expanduser().is_dir()
    stages = trained_stages(source)
    algorithms = [stage.algorithm.name for stage in stages if stage.algorithm is not None]
    terms, is_adapter = base_license(base), layout is not None
    library = "diffusers" if is_pipeline else "peft" if is_adapter else "transformers"
    shown = copy_samples(source, folder, step=step)
    prompt = shown[0].prompt if shown else "..."
    task = pipeline_tag(stages, shown)
    pipeline = str(read_json(base / "model_index.json").get("_class_name", "")) if is_pipeline else ""
    use = snippet(source, task=task, base=path, name=name, layout=layout, pipeline=pipeline, prompt=prompt)
    head = {
        **{key: value for key, value in terms.items() if key.startswith("license")},
        **({"base_model": path} if is_hub_id else {}),
        "base_model_relation": "adapter" if is_adapter else "finetune",
        "library_name": library,
        "pipeline_tag": task,
        "tags": ["unirl", "reinforcement-learning", *algorithms, *(["lora"] if is_adapter else [])],
        **({"widget": [{"text": one.prompt, "output": {"url": one.file}} for one in shown]} if shown else {}),
    }
    config = OmegaConf.to_yaml(OmegaConf.create(dict(plan.resolved))).rstrip()
    content = "LoRA adapters" if is_adapter else "A complete checkpoint"
    weights = "moving average of the weights" if policy == "ema" else "trained weights"
    facts = {
        "base": f"{path}, revision {revision}" if revision else path,
        "license of the base": terms.get("stated", "not stated in its files" + "; see its page on the hub" * is_hub_id),
        "recipe": f"{plan.recipe} {' '.join(recorded['overrides'])}".strip(),
        "algorithm": ", ".join(algorithms),
        **({"layout": layout} if layout else {}),
        "steps": f"{step} of {plan.run.max_steps}, {weights}",
        "trained with": ", ".join(f"{name} {number}" for name, number in recorded["dists"].items()),
        "exported with": ", ".join(
            f"{name} {version(name)}" for name in dict.fromkeys(["torch", "safetensors", library])
        ),
    }
    text = "\n".join(
        [
            "---",
            *(f"{key}: {_quoted(value)}" for key, value in head.items()),
            "---",
            f"# {_shown(plan.run.name or plan.recipe)}, step {step}",
            "",
            f"{content} for {_shown(source.learner.model.spec.reference or library)}, trained with UniRL.",
            "",
            *_table(facts),
            "",
            *_use(use),
            *_samples(shown),
            "## Held-out scores",
            "",
            *_scores(source, step),
            "",
            "## Config",
            "",
            f"{_fence(config)}yaml",
            config,
            _fence(config),
            "",
        ]
    )
    # Half of a surrogate pair cannot be written.
    (folder / "README.md").write_bytes(text.encode("utf-8", "replace"))


def _use(program: str) -> list[str]:
    return ["## Use", "", f"{_fence(program)}python", program, _fence(program), ""] if program else []


def _samples(shown: Sequence[Shown]) -> list[str]:
    if not shown:
        return []
    title = f"## Held-out samples at step {shown[0].step}"
    return [
        title,
        "",
        *(f"- ![sample {number}]({one.file}) {_shown(one.prompt)}" for number, one in enumerate(shown)),
        "",
    ]


def base_license(base: Path) -> dict[str, str]:
    """License of a checkpoint by its files: `license`, `license_name` and `license_link` of its card, and `stated`, a
    phrase; empty where no file states one."""
    card, result = base / "README.md", dict[str, str]()
    if card.is_file():
        head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), flags=re.DOTALL)
        lines = re.findall(r"^(license(?:_name|_link)?):[ \t]*(\S.*)$", head.group(1) if head else "", re.MULTILINE)
        result = {key: value.strip().strip("\"'") for key, value in lines}
    if result:
        result["stated"] = f"{', '.join(result.values())} (by its README.md)"
        return result
    if files := _license_files(base):
        return {"license": "other", "license_link": files[0].name, "stated": f"see {files[0].name}"}
    for name in ("model_index.json", "config.json"):
        file = base / name
        stated = read_json(file).get("license") if file.is_file() else None
        if stated:
            return {"license": str(stated), "stated": f"{stated} (by its {name})"}
    return {}


def _license_files(base: Path) -> list[Path]:
    return sorted(
        path for path in base.iterdir() if re.match("licen[cs]e", path.name, re.IGNORECASE) and path.is_file()
    )


def _scores(source: TrainedModel, step: int) -> list[str]:
    """Held-out scores before and after, and a table of the evaluations between."""
    file = source.folder / EVENTS_FILE
    try:
        events = read_events(file) if file.is_file() else []
        read = {
            event.step: Recorded(where=event.read_from, values=event.data)
            for event in events
            # A resumed run evaluates a step again.
            if event.kind == "evaluated" and event.step <= step
        }
        points = {number: data.numbers("metrics") for number, data in read.items()}
        samples = read[max(read)].optional_count("samples") if read else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error} Remove the line.") from error
    if not points:
        return ["The run had no held-out evaluation up to this step."]
    steps = sorted(points)
    names = sorted({name for metrics in points.values() for name in metrics})
    shown = {steps[round(n * (len(steps) - 1) / (MOST_ROWS - 1))] for n in range(MOST_ROWS)}
    first, last = points[steps[0]], points[steps[-1]]
    changes = [
        f"- {_shown(name)}: {_number(first, name)} at step {steps[0]}, {_number(last, name)} at step {steps[-1]}"
        for name in names
        if name.rpartition("/")[2] in ("score_mean", "share_at_threshold")
    ]
    return [
        *changes,
        "",
        f"| step | {' | '.join(map(_shown, names))} |",
        f"| ---: |{' ---: |' * len(names)}",
        *(f"| {row} | {' | '.join(_number(points[row], name) for name in names)} |" for row in sorted(shown)),
        "",
        "Their samples have a sampler of their own, not that of training:",
        "",
        *_table({**_sampler(source), **({} if samples is None else {"samples": str(samples)})}),
    ]


def _sampler(source: TrainedModel) -> dict[str, str]:
    """How evaluated samples are made: settings of the evaluation, and of the sampler of each stage."""
    facts = evaluation_facts(source.plan)
    stages: dict[str, dict[str, object]] = facts.pop("stages")
    for stage, settings in stages.items():
        facts |= {f"{stage}/{name}" if stages.keys() - {stage} else name: value for name, value in settings.items()}
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in facts.items()}


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {_shown(key)} | {_shown(value)} |" for key, value in rows.items())]


def _shown(text: str) -> str:
    """A text of a user or a checkpoint, in one line, as Markdown shows it letter by letter."""
    line = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return MARKUP.sub(r"\\\g<0>", html.escape(line, quote=False))


def _quoted(value: object) -> str:
    """A text, or a list of them, as YAML and JSON have it: in quotes, with escapes of what cannot be printed."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)


def _fence(content: str) -> str:
    """Backticks around a block of code that has fewer in a row."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
