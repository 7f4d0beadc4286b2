"""Every quickstart, and one recipe of each model, algorithm and reward, takes a step on the pretended device.

A device mismatch there is one on CUDA. Parts that no recipe has are tried in a quickstart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml
from pretended_device import own_process
from pretended_runs import ROOT, Step, recipe_step, step_with_part
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.files import list_recipes, recipe_roots

pytestmark = [
    pytest.mark.slow,
    # Minutes, for all of them.
    pytest.mark.nightly,
    # A miniature of HunyuanVideo 1.5 takes two minutes of a core.
    pytest.mark.timeout(900),
]

Part = tuple[str, str]
"""Kind and name."""
REPLACED: set[Part] = {("reward", "ocr"), ("reward", "edit-judge")}
"""Rewards of recipes with a stand-in on miniatures (`STAND_INS`), so that a recipe does not try them."""
KINDS = ("model", "algorithm", "reward")
NOT_HERE: dict[Part, str] = {
    ("reward", "first-frame"): "an image of role `first_frame`",
    ("reward", "geneval"): "metadata `tag`",
    ("reward", "geneval2"): "metadata `vqa_list`",
    ("reward", "ocr"): "metadata `text`",
    ("reward", "unit-tests"): "metadata `tests`",
    ("reward", "wise"): "metadata `explanation`",
}
"""Parts that no quickstart has the prompts for, and what these lack."""


def parts_of(file: Path) -> set[Part]:
    """Parts that the defaults of a recipe choose: `/model: sd3`, `/reward@reward.pick: pickscore`."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", [])
    chosen = [item for entry in entries if isinstance(entry, dict) for item in entry.items()]
    named = {(key.removeprefix("override ").lstrip("/").partition("@")[0], str(name)) for key, name in chosen}
    return (named & PARTS) - REPLACED


def chosen_recipes() -> tuple[list[str], set[Part]]:
    """The quickstarts, each further recipe with a part that none before it has, and the parts of all of them."""
    recipes = sorted(list_recipes(recipe_roots(ROOT)), key=lambda recipe: not recipe.name.startswith("quickstart"))
    names, tried = list[str](), set[Part]()
    for recipe in recipes:
        own = parts_of(recipe.file)
        if recipe.name.startswith("quickstart") or own - tried:
            names.append(recipe.name)
            tried |= own
    return names, tried


SETTINGS = {
    "rewards of steps": ("quickstart", ("algorithm.step_rewards=true",)),
    "scouts": (
        "quickstart",
        (
            *("data.scouts.samples_per_prompt=24", "data.scouts.num_inference_steps=4"),
            # Shapes of random weights may all score the same.
            *("+reward@reward.light=brightness", "reward.light.weight=0.1"),
        ),
    ),
    "moving reference": ("quickstart", ("algorithm.kl_coef=0.1", "backend.moving_reference.kind=constant")),
    "gate of the kl": (
        "quickstart",
        (
            *("algorithm.kl_coef=0.1", "algorithm.kl_gate=0.5", "backend.reference_copy=true"),
            *("+reward@reward.size=jpeg-size", "reward.size.weight=0"),
        ),
    ),
}
"""Settings that no recipe has and that bring tensors of their own: recipe and overrides."""
PARTS = {(found.spec.kind, found.spec.name) for found in Catalog.discover().parts() if found.spec.kind in KINDS}
RECIPES, TRIED = chosen_recipes()


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with own_process() as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("miniatures")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_a_step_on_a_device(name: str, process: ProcessPoolExecutor, folder: Path) -> None:
    check(process.submit(recipe_step, name, folder).result())


@pytest.mark.parametrize(("kind", "name"), sorted(PARTS - TRIED - NOT_HERE.keys()))
def test_a_part_without_a_recipe_takes_a_step_on_a_device(
    kind: str, name: str, process: ProcessPoolExecutor, folder: Path
) -> None:
    check(process.submit(step_with_part, kind, name, folder).result())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_takes_a_step_on_a_device(name: str, process: ProcessPoolExecutor, folder: Path) -> None:
    recipe, words = SETTINGS[name]
    check(process.submit(recipe_step, recipe, folder, *words).result())


def check(step: Step) -> None:
    """It updated the weights with a finite loss."""
    metrics, _ = step
    updates = [value for key, value in metrics.items() if key.rpartition("/")[2] == "updates"]
    losses = [value for key, value in metrics.items() if key.rpartition("/")[2] == "loss"]
    assert updates and min(updates) > 0
    assert losses and all(map(math.isfinite, losses))
