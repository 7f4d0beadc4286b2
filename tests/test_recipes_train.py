"""Every recipe of a plugin takes one step, with its settings, on miniatures of its models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from miniature_recipes import miniature_words
from unirl.conformance.part_factory import PartFactory
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.recipe.files import list_recipes, recipe_roots
from unirl.loop.run import train

pytestmark = [
    pytest.mark.slow,
    # Minutes, for all of them.
    pytest.mark.nightly,
    # Of torch, where a block's output is reshaped on one rank.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

ROOT = Path(__file__).resolve().parents[1]
# The quickstarts bring their checkpoints: their pages train with them.
RECIPES = [recipe.name for recipe in list_recipes(recipe_roots(ROOT)) if not recipe.name.startswith("quickstart")]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartFactory]:
    factory = PartFactory(Catalog.discover(), tmp_path_factory.mktemp("factory"))
    yield factory
    factory.close()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_a_step_on_its_miniature(name: str, factory: PartFactory, tmp_path: Path) -> None:
    overrides = [*miniature_words(name, factory, tmp_path, directory=ROOT), f"run.dir={tmp_path / 'run'}"]
    plan = compose(name, overrides, catalog=factory.catalog, directory=ROOT)
    train(plan, catalog=factory.catalog)
    lines = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    (metrics,) = (event["metrics"] for event in map(json.loads, lines) if event["kind"] == "step")
    prefixes = [plan.prefix(stage) for stage in plan.trained]
    for prefix in prefixes:
        assert f"{prefix}steps_skipped" not in metrics
        # An update in 16 bits may overflow at first, and is then left out.
        assert metrics[f"{prefix}updates"] + metrics[f"{prefix}updates_skipped"] > 0
        assert math.isfinite(metrics[f"{prefix}loss"])
