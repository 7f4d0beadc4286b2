"""The four Wan models by name: their specs, and models on a checkpoint."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.spec import ModelSpec
from unirl.models.wan.model import build
from unirl.models.wan.plugin import unirl_models

__all__ = ["FROM_FRAME", "FROM_TEXT", "SPECS", "built", "refusals", "write"]

SPECS: dict[str, ModelSpec] = {spec.name: spec for spec in unirl_models()}
FROM_TEXT = ("wan21", "wan22")
FROM_FRAME = ("wan21-i2v", "wan22-i2v")


def write(name: str, folder: Path, **options: Any) -> None:
    """Write the miniature of a model."""
    tiny = SPECS[name].tiny
    assert tiny is not None
    _resolved(tiny.write)(folder, seed=0, **options)


def built(name: str, folder: Path, *, lazy: bool = False, serves: frozenset[str] | None = None, **settings: Any) -> Any:
    """A model with these settings on a checkpoint."""
    config = _resolved(SPECS[name].config)(path=str(folder), **settings)
    return build(config, device="cpu", lazy=lazy, **({} if serves is None else {"serves": serves}))


def refusals(name: str, folder: Path, *words: str) -> list[str]:
    """Why match() refuses a model's recipe on a checkpoint."""
    catalog = Catalog.discover()
    plan = compose(f"{name}/flow-grpo", ["data.train=frames.jsonl", f"model.path={folder}", *words], catalog=catalog)
    return [str(reason) for reason in match(plan, catalog=catalog).reasons]


def _resolved(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
