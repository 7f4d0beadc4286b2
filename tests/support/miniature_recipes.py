"""Shipped recipes on miniatures of their models: overrides and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from PIL import Image
from unirl.conformance.part_factory import PartFactory
from unirl.core.recipe.compose import compose_config, plan_of
from unirl.core.recipe.files import find_recipe, recipe_roots
from unirl.core.specs.plan import Plan, Stage
from unirl.core.specs.spec import EngineSpec, ModelSpec, RewardSpec

__all__ = ["STAND_INS", "miniature_words"]

SIZES = ("height", "width", "frames", "max_new_tokens", "max_sequence_length")
STAND_INS = {
    "math": ("+reward@reward.standin=function", f"reward.standin.target={Path(__file__).resolve()}:length"),
    "ocr": ("+reward@reward.standin=jpeg-size",),
    "edit-judge": ("+reward@reward.standin=jpeg-size",),
    "unified-reward-pairwise": ("+reward@reward.standin=jpeg-size", "advantage.values=win-rate"),
}
"""Rewards that a miniature gets none of, or that need a service, and what takes their place."""


def miniature_words(name: str, factory: PartFactory, folder: Path, *, directory: Path) -> list[str]:
    """Overrides with which a recipe takes one step on its miniature. A quickstart keeps its checkpoint and its prompts.

    folder: an empty one, for its prompts.  directory: where to look for `./recipes`.
    """
    composed = compose_config(name, catalog=factory.catalog, directory=directory)
    lacks_prompts = OmegaConf.is_missing(composed.config.data, "train")
    composed.config.data.train = "prompts.jsonl"
    plan = plan_of(composed, catalog=factory.catalog)
    rows = write_prompts(plan, factory, folder, directory=directory)
    words = list(shorter(plan))
    if lacks_prompts:
        words.append(f"data.train={rows}")
    if len(plan.stages) > 1:
        engines = {stage.engine.key: stage.engine.spec for stage in plan.stages}
        words += [f"{key}.path={rows.with_name('stored.jsonl')}" for key, spec in engines.items() if spec.samples]
    return words if name.startswith("quickstart") else [*words, *smaller(plan, factory)]


def length(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def shorter(plan: Plan) -> Iterator[str]:
    """Overrides for one short step that trains."""
    yield from ("data.eval=''", "run.max_steps=1", "run.device=cpu", "run.media_every=0")
    yield from (f"~{choice.key}" for choice in plan.trackers.values())
    prompts = max(stage.train.updates_per_step for stage in plan.trained)
    yield f"data.prompts_per_step={prompts}"
    if plan.run.reward_overlap_groups:
        yield f"run.reward_overlap_groups={prompts // 2}"
    # A step of 24 samples of 50 denoise steps takes minutes, and tries nothing that one of 4 does not. A tree has as many as
    # its branches make.
    least = max([4, *(stage.advantage.keep_best + stage.advantage.keep_worst for stage in plan.trained)])
    has_trees = any("branch" in stage.algorithm.spec.name for stage in plan.trained if stage.algorithm is not None)
    if plan.data.samples_per_prompt > least and not has_trees:
        yield f"data.samples_per_prompt={least}"
    for choice in plan.rewards.values():
        if choice.spec.name in STAND_INS:
            yield from (f"~{choice.key}", *STAND_INS[choice.spec.name])
    for stage in plan.trained:
        for key, is_needed in (("critic", stage.needs.critic), ("fake_score", stage.needs.fake_score)):
            if is_needed:
                # Until then no policy is updated.
                yield f"{stage.learner.backend.key}.{key}.warmup_steps=0"  # type: ignore[union-attr]


def smaller(plan: Plan, factory: PartFactory) -> Iterator[str]:
    """Overrides that change sizes, files and what needs a service or a correct answer, and nothing else."""
    if plan.launcher is not None and plan.launcher.spec.name != "local":
        # One process; several ranks are tested elsewhere.
        yield "launcher=local"
    # A log-prob is the mean over a hundredth of the elements: what 16 bits round is not averaged out.
    yield "train.logp_mismatch_max=1"
    for choice in plan.choices:
        found = next(one for one in factory.catalog.parts() if one.spec == choice.spec)
        if isinstance(choice.spec, ModelSpec):
            yield f"{choice.key}.path={factory.checkpoint(found)}"
        elif isinstance(choice.spec, EngineSpec) and choice.spec.environment:
            yield ("engine" if choice.key == "engine" else f"engine@{choice.key}") + "=trainside"
        elif isinstance(choice.spec, RewardSpec) and choice.spec.name not in STAND_INS:
            yield from (f"{choice.key}.{key}={value}" for key, value in factory.reward_files(found).items())
    for stage in plan.stages:
        tiny = stage.learner.model.spec.tiny
        assert tiny is not None
        name = f"sampling.{stage.name}" if len(plan.stages) > 1 else "sampling"
        yield from (
            f"{name}.{key}={value}"
            for key, value in tiny.sampling.items()
            # An image made of tokens has as many as its grid.
            if key in SIZES and hasattr(stage.sampling, key) and (key != "max_new_tokens" or stage.medium == "text")
        )


def write_prompts(plan: Plan, factory: PartFactory, folder: Path, *, directory: Path) -> Path:
    """Prompts with all that a stage of the plan reads of them, and stored samples in `stored.jsonl` beside them."""
    stage = plan.stages[-1]
    found = next(one for one in factory.catalog.parts() if one.spec == stage.learner.model.spec)
    sets = [each for each in stage.engine.spec.samples if len(each) == stage.samples]
    # The line of a prompt file in its header.
    shows_sources = '"source"' in find_recipe(plan.recipe, recipe_roots(directory)).file.read_text(encoding="utf-8")
    prompts: list[dict[str, Any]] = []
    stored: list[dict[str, Any]] = []
    for number in range(8):
        media = [vars(one) for one in (factory.media if shows_sources else factory.needed_media)(found, number)]
        prompts.append({"prompt": f"prompt {number}", "metadata": {}, "media": media})
        stored.append({"prompt": f"prompt {number}", "metadata": {}, "media": []})
        for role in sets[0] if sets else ():
            if stage.kind == "text":
                stored[-1]["metadata"][role] = f"{role[0]}{number}"
                continue
            image = folder / f"{role}-{number}.png"
            height, width = _image_size(plan, stage)
            Image.effect_noise((width, height), 40 + number).convert("RGB").save(image)
            stored[-1]["media"].append({"modality": "image", "role": role, "uri": str(image)})
    if sets and len(plan.stages) == 1:
        prompts = stored
    for name, rows in (("prompts.jsonl", prompts), ("stored.jsonl", stored)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder / "prompts.jsonl"


def _image_size(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Of the stage's images: as its quickstart says, else of the miniature of its model."""
    if plan.recipe.startswith("quickstart"):
        return stage.sampling.height, stage.sampling.width  # type: ignore[union-attr]
    sampling = stage.learner.model.spec.tiny.sampling  # type: ignore[union-attr]
    return sampling["height"], sampling["width"]
