"""A plan of two stages on the quickstarts' checkpoints: a writer rewrites a prompt, and a painter draws it."""

from __future__ import annotations

from pathlib import Path

from small_runs import catalog
from torch import Tensor
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.loop.build import build_parts
from unirl.loop.parts import Parts
from unirl.loop.run import train

__all__ = ["JOINT", "RECIPE", "Weights", "composed", "numbers", "saved_weights", "weights"]

Weights = dict[str, dict[str, Tensor]]
"""Model -> its tensors by name."""

RECIPE = """
defaults:
  - /unirl
  - /model@model.writer: qwen3
  - /model@model.painter: sd3
  - /backend@backend.writer: fsdp2
  - /engine@engine.rewrite: trainside
  - /engine@engine.image: trainside
  - /algorithm@algorithm.rewrite: grpo
  - /sampling@sampling.rewrite: text
  - /sampling@sampling.image: latent
  - /reward@reward.shapes: shapes
  - _self_
stages:
  rewrite: {model: writer, samples: 2}
  image: {model: painter, parent: rewrite, samples: 2, credit: mean}
model:
  writer: {path: "${asset:quickstart,enhancer/checkpoint}"}
  painter: {path: "${asset:quickstart,checkpoint}"}
backend: {writer: {trains: full}}
data: {train: "${asset:quickstart,enhancer/prompts/train.jsonl}", prompts_per_step: 2}
sampling:
  rewrite: {chat: false, max_new_tokens: 8}
  image: {num_inference_steps: 3, height: 64, width: 64, max_sequence_length: 8, eta: 0, kernel: euler, sde: {mode: none}}
run: {max_steps: 4, save_every: 2, media_every: 0, threads: 1}
"""
JOINT = (
    "+backend@backend.painter=fsdp2",
    "backend.painter.trains=full",
    "+algorithm@algorithm.image=flow-grpo",
    "sampling.image.kernel=flow-sde",
    "sampling.image.eta=0.7",
    "sampling.image.sde={mode: fraction, last: 0.7}",
)


def composed(recipe: Path, *overrides: str) -> Plan:
    return compose(str(recipe), overrides, catalog=catalog())


def numbers(plan: Plan, *, resume: Path | None = None) -> dict[int, dict[str, float]]:
    """Step -> its metrics, of a run."""
    steps: dict[int, dict[str, float]] = {}

    def note(event: Event) -> None:
        if event.kind == "step":
            steps[event.step] = dict(event.data["metrics"])

    train(plan, catalog=catalog(), resume=resume, listeners=[note])
    return steps


def weights(parts: Parts) -> Weights:
    """Weights of every model that trains."""
    return {name: dict(backend.export_weights(kind="full").tensors) for name, backend in parts.backends.items()}


def saved_weights(plan: Plan, folder: Path, *, step: int) -> Weights:
    """Weights in a checkpoint of a run."""
    parts = build_parts(plan, catalog=catalog())
    for name, backend in parts.backends.items():
        backend.load(folder / "checkpoints" / f"step-{step:06d}" / "backend" / name)
    return weights(parts)
